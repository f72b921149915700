"""What a command is to write over what it reads: exit code 2, one line that says why, and every byte is as it was."""

import json

import pytest

from stronghold.lab import cli
from stronghold.lab.cli import stages
from stronghold.lab.records.timeline import write_spans
from stronghold.planner.stage_costs import LayerCost
from stronghold.spans import Span
from tests.lab.cli.test_wrong_values import PARTITION, SHAPE, TRAIN, call
from tests.lab.page.examples import record, write_lines, write_log
from tests.planner.machines import laptop
from tests.planner.profiled.small_profiles import write_profile
from tests.short_files import short_files

PLAN = ["plan", *SHAPE, "--batch", "2", "--machine", "machine.json"]
PROFILED = ["plan", "toy_a", "--profile", "profiled", "--device-memory", "1GiB", "--batch", "8"]
TRAIN_MODEL = ["train", *TRAIN[TRAIN.index("--seq") :]]
FINETUNE = ["finetune", "model", "rows.jsonl", "--device", "cpu", "--out", "run"]
FINETUNE_BY_FILE = ["finetune", "run.yaml", "--device", "cpu", "--out", "run"]
COST = LayerCost(forward_s=0.001, backward_s=0.002, weight_bytes=1024, activation_bytes=1024, input_bytes=256)
CONFIG = {"model_type": "stronghold-gpt", "layers": 2, "hidden": 32, "heads": 2, "vocabulary": 256, "sequence": 32}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with one of everything that commands read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    laptop().write(tmp_path / "machine.json")
    (tmp_path / "link.json").symlink_to("machine.json")
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "part.json").write_text('{"partition": [1, 1], "recompute_ratio": [1, 1]}')
    (tmp_path / "results").mkdir()
    write_log(tmp_path / "results", "a")
    write_lines(tmp_path / "results" / "runs.jsonl", [record("b")])
    write_lines(tmp_path / "results" / "trials.jsonl", [record("b")])
    (tmp_path / "results" / "log_1.txt").write_text("a log of the artifact")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "profiled").mkdir()
    write_profile(tmp_path / "profiled", "toy_a", ["one", "two"])
    (tmp_path / "run.yaml").write_text("model: model\ndata: rows.jsonl\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "texts" / "below").mkdir(parents=True)
    (tmp_path / "texts" / "one.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    (tmp_path / "base").symlink_to("model")
    return tmp_path


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys, *arguments):
    """Returns the one line with which ``arguments`` are refused."""
    code = call([*arguments])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1), error
    return error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["report", "results", "-o", "results/runs/a/log.jsonl"], "RESULTS='results/**/log.jsonl', which is read"),
        (
            ["report", "results/runs/a", "-o", "results/runs/a/log.jsonl"],
            "RESULTS='results/runs/a/**/log.jsonl', which",
        ),
        (["report", "results", "-o", "results/runs.jsonl"], "RESULTS='results/runs.jsonl', which is read"),
        (["report", "results", "-o", "results/trials.jsonl"], "RESULTS='results/trials.jsonl', which is read"),
        (["report", "results", "-o", "results/log_1.txt"], "RESULTS='results/log_*.txt', which is read"),
        ([*PLAN, "-o", "machine.json"], "--machine='machine.json', which is read"),
        ([*PLAN, "-o", "link.json"], "--machine='machine.json', which is read"),
        ([*PLAN, "--picture", "machine.json"], "--machine='machine.json', which is read"),
        ([*PLAN, "-o", "new", "--picture", "./new"], "--output='new', which is another output"),
        (["plan", "model", *PLAN[-2:], "-o", "model/config.json"], "MODEL='model', which is read"),
        (["plan", "model/config.json", *PLAN[-2:], "-o", "model/config.json"], "MODEL='model/config.json', which is"),
        (["plan", "model", *PLAN[-2:], "--picture", "model/model.safetensors"], "MODEL='model', which is read"),
        ([*PROFILED, "-o", "profiled/p2p_intra_node.csv"], "--profile='profiled/*.csv', which is read"),
        ([*PROFILED, "--replay", "part.json", "-o", "part.json"], "--replay='part.json', which is read"),
        ([*PARTITION, "--window", "1", "--machine", "machine.json", "-o", "link.json"], "machine='machine.json', "),
        ([*PARTITION, "--file", "part.json", "-o", "part.json"], "file='part.json', which is read"),
        ([*TRAIN, "--plan", "plan.json", "--log", "plan.json"], "--plan='plan.json', which is read"),
        ([*TRAIN, "--plan", "plan.json", "--record", "plan.json"], "--plan='plan.json', which is read"),
        ([*FINETUNE_BY_FILE, "--log", "run.yaml"], "run's file='run.yaml', which is read"),
        ([*FINETUNE, "--adapter", "adapter", "--log", "adapter/adapter_config.json"], "adapter='adapter', which is"),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else "",
)
def test_what_is_read_is_not_written_over(here, capsys, arguments, told):
    before = files_in(here)
    error = refused(capsys, *arguments)
    assert "must have a place of its own (got " in error and told in error and error.endswith("; pass another path\n")
    assert files_in(here) == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*TRAIN_MODEL, "--model", "model", "--save", "model"], "save='model' and model='model', which would be lost"),
        ([*TRAIN_MODEL, "--model", "base", "--save", "./model/"], "save='./model/' and model='base', which would be"),
        ([*TRAIN_MODEL, "--model", "model/config.json", "--save", "base"], "model='model/config.json', which would be"),
        ([*FINETUNE, "--save", "base"], "save='base' and model='model', which would be lost"),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else "",
)
def test_a_model_is_not_saved_over_the_one_that_it_was(here, capsys, arguments, told):
    before = files_in(here)
    assert told in refused(capsys, *arguments)
    assert files_in(here) == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "texts/run"], "out='texts/run' and data='texts'"),
        (["--out", "texts"], "out='texts' and data='texts'"),
        (["--save", "texts/below/model"], "save='texts/below/model' and data='texts'"),
        (["--store", "texts/store"], "store='texts/store' and data='texts'"),
        (["--log", "texts/log.txt"], "log='texts/log.txt' and data='texts'"),
        (["--record", "texts/records"], "record='texts/records' and data='texts'"),
        (["--data", "."], "out='out' and data='.'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_does_not_write_into_the_folder_that_it_reads(here, capsys, arguments, told):
    """It could not be resumed: its own files were data by then."""
    before = files_in(here)
    error = refused(capsys, *TRAIN, "--data", "texts", *arguments)
    assert "must not be in a folder that is read as data (got " in error and told in error
    if "--out" in arguments:
        assert told in refused(capsys, "finetune", "model", "texts", *FINETUNE[3:], *arguments)
    if "--record" not in arguments:
        more = ["--eval-data", "texts", *[one for one in arguments if one != "--data"]]
        if "." not in arguments:
            assert told.replace("data=", "eval_data=") in refused(capsys, *FINETUNE, *more)
    assert files_in(here) == before


@pytest.mark.parametrize(
    ("pattern", "arguments", "told"),
    [
        (
            "texts/**/*.[jt]*",
            ["--out", "texts/run"],
            "out='texts/run', and data='texts/**/*.[jt]*' matches 'texts/run/",
        ),
        ("**/*.[jt]*", [], "out='out', and data='**/*.[jt]*' matches 'out/log.jsonl'"),
        ("./t*s/**", ["--out", "texts/below/run"], "data='./t*s/**' matches 'texts/below/run/log.jsonl'"),
        (
            "texts/**/*.json",
            ["--save", "texts/model"],
            "save='texts/model', and data='texts/**/*.json' matches 'texts/m",
        ),
        (
            "texts/*.txt",
            ["--log", "texts/log.txt"],
            "log='texts/log.txt', and data='texts/*.txt' matches 'texts/log.txt':",
        ),
        (
            "texts/*.txt",
            ["--record", "texts/r.txt"],
            "record='texts/r.txt', and data='texts/*.txt' matches 'texts/r.txt':",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_writes_nothing_that_its_pattern_matches(here, capsys, pattern, arguments, told):
    """With --resume it was refused as one on other data, or for the fields of its own log."""
    before = files_in(here)
    error = refused(capsys, *TRAIN, "--data", pattern, *arguments)
    assert "must have no file that is read as data (got " in error and told in error
    if "--record" not in arguments:
        told = told.replace("data=", "eval_data=").replace("out='out'", "out='run'").replace("'out/", "'run/")
        assert told in refused(capsys, *FINETUNE, "--eval-data", pattern, *arguments)
    assert files_in(here) == before


@pytest.mark.parametrize("option", ["--out", "--save", "--log", "--store", "--data", "--model"])
def test_a_path_that_is_not_utf_8_is_refused_before_anything_is_written(here, capsys, option):
    """A log was left that was cut short, so that the same command was refused from then on, and a codec was named."""
    read = {"--data": "texts", "--model": "base"}.get(option)
    name = f"{read or 'new'}\udcfc"  # a byte that is no UTF-8, as Python has it
    if read:
        (here / read).rename(here / name)
    before = files_in(here)
    told = f"a run's paths must be UTF-8, for its log tells them (got {name!r}); rename that file or folder"
    assert told in refused(capsys, *(TRAIN_MODEL if option == "--model" else TRAIN), option, name)
    given = {"--data": ["model", name], "--model": [name, "rows.jsonl"]}.get(option)
    assert told in refused(capsys, *(["finetune", *given, *FINETUNE[3:]] if given else [*FINETUNE, option, name]))
    assert files_in(here) == before


def test_a_run_goes_on_where_its_files_are_no_data(here):
    """Beside the folder that is read, where readers pass by, and beside what a pattern matches."""
    for data, out in (
        ("texts", "texts.run"),
        ("texts", "texts/.run"),
        ("texts/*.txt", "texts/run"),
        ("texts/**/*.txt", "texts/another"),
        ("texts/o**", "texts/one.run"),  # a folder is no data
    ):
        run = [*TRAIN, "--data", data, "--out", out, "--checkpoint-every", "1"]
        assert cli.main(run) == 0
        assert cli.main([*run, "--steps", "3", "--resume"]) == 0


@pytest.mark.parametrize("method", ["stronghold", "all"])
def test_a_file_of_something_else_is_refused_before_records_go_there(here, capsys, method):
    (here / "notes.txt").write_text("first\nlast, without a newline")
    before = files_in(here)
    error = refused(capsys, *TRAIN, "--method", method, "--record", "notes.txt")
    assert "a file of records has one JSON object a line (got 'notes.txt', whose last line is none: " in error
    assert files_in(here) == before and not (here / "out").exists()


def test_pages_and_plans_are_written_anew_where_they_were(here):
    """In the folder of what they are of, too; in a model's they were refused the second time."""
    (here / "shape").mkdir()  # a model without weights
    (here / "shape" / "config.json").write_text(json.dumps(CONFIG))
    for arguments in (
        ["report", "results", "-o", "results/report.html"],
        [*PLAN, "-o", "plan.json", "--picture", "plan.html"],
        [*PROFILED, "-o", "profiled/plan.json"],
        ["plan", "shape", "--seq", "32", *PLAN[-2:], "-o", "shape/plan.json", "--picture", "shape/plan.html"],
    ):
        assert cli.main(arguments) == 0
        assert cli.main(arguments) == 0


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([*PARTITION, "-o"], "new.json"),
        (["trace", "results/runs/a", "-o"], "new.json"),
        (["report", "results", "-o"], "new.html"),
        ([*PLAN, "-o"], "new.json"),
        ([*PLAN, "--picture"], "new.html"),
        ([*PROFILED, "-o"], "new.json"),
    ],
    ids=lambda value: value[0] + value[-1] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("before", [None, "what was there"])
def test_a_full_disk_is_told_with_the_file_which_is_as_before(here, capsys, monkeypatch, arguments, output, before):
    """The error named no file, and an empty one was left."""
    write_spans(here / "results" / "runs" / "a" / "timeline.json", [Span("compute", "forward 0", 0.0, 0.25)])
    monkeypatch.setattr(stages, "measure", lambda layered, *_, **__: [COST] * len(layered.layers))
    if before is not None:
        (here / output).write_text(before)
    files = files_in(here)
    with short_files(0):
        code = cli.main([*arguments, output])
    error = capsys.readouterr().err
    assert code == 1 and error.startswith("stronghold: error: ") and error.count("\n") == 1, error
    assert "File too large" in error and f": {output}; raise the limit on the size of files" in error
    assert files_in(here) == files
