"""The command line: settings arrive, errors are one line, signals and pictures work from outside."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stronghold.lab import cli
from stronghold.lab.methods import METHODS
from stronghold.lab.models.files import load_model
from stronghold.lab.records.runs import read_run

ROOT = Path(__file__).parents[2]
TINY = ["-l", "2", "--hidden", "32", "--heads", "2", "--vocabulary", "256", "--seq", "32", "--batch", "2"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return str(path)


def settings_of(*arguments):
    return cli._train_settings(cli._parser().parse_args(["train", *arguments]))


def refuse(capsys, *arguments):
    """Returns the one line with which ``arguments`` are refused, and the exit code."""
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert error.startswith("stronghold: error: ")
    assert error.count("\n") == 1
    return error, code


def test_the_store_on_disk_is_in_the_runs_folder_or_where_it_is_said():
    assert settings_of("--out", "runs/a", "--store", "disk").offload.store == "runs/a/store"
    assert settings_of("--out", "runs/a", "--store", "/mnt/nvme").offload.store == "/mnt/nvme"
    assert settings_of("--out", "runs/a").offload.store == "ram"


def test_every_argument_arrives():
    settings = settings_of(
        *TINY,
        *("--data", "d", "--tokenizer", "t", "--held-out", "3", "--dropout", "0.5", "--steps", "7", "--lr", "0.1"),
        *("--warmup", "2", "--weight-decay", "0.3", "--clip", "0.7", "--nonfinite", "skip", "--seed", "9"),
        *("--device", "cuda:1", "--device-limit", "3GB", "--dtype", "bf16"),
        *("--window", "2", "--micro-batch", "1", "--activations", "host", "--compile"),
        *("--device-memory", "1GiB", "--host-memory", "2GB", "--out", "o", "--save", "s", "--log", "l"),
        *("--record", "r", "--checkpoint-every", "11", "--keep-checkpoints", "3", "--resume"),
    )
    expected = {
        "method": "stronghold", "path": None, "layers": 2, "hidden": 32, "heads": 2, "vocabulary": 256,
        "dropout": 0.5, "source": "d", "tokenizer": "t", "held_out": 3, "lr": 0.1, "warmup_steps": 2,
        "weight_decay": 0.3, "max_grad_norm": 0.7, "update": "deferred", "nonfinite": "skip", "window": 2,
        "store": "ram", "micro_batch": 1, "activations": "host", "compile": True, "device_memory": 2**30,
        "host_memory": 2 * 10**9, "device": "cuda:1", "dtype": "bf16", "batch": 2, "sequence": 32, "steps": 7,
        "device_limit": 3 * 10**9, "seed": 9, "out": "o", "save": "s", "log": "l", "record": "r",
        "checkpoint_every": 11, "keep_checkpoints": 3, "resume": True,
    }  # fmt: skip
    flat = settings.flat()
    assert {name: flat[name] for name in expected} == expected


def test_defaults_are_those_that_help_tells():
    flat = settings_of("--device", "cpu").flat()
    assert (flat["layers"], flat["hidden"], flat["sequence"], flat["batch"]) == (16, 2048, 1024, 4)
    assert (flat["window"], flat["max_grad_norm"], flat["warmup_steps"]) == ("auto", 1.0, 10)
    assert (flat["checkpoint_every"], flat["keep_checkpoints"], flat["resume"]) == (None, 2, False)
    assert re.fullmatch(r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", flat["out"])
    assert settings_of("--device", "cpu", "--steps", "5000").optimizer.warmup_steps == 100
    assert settings_of("--device", "cpu", "--clip", "0").optimizer.max_grad_norm is None
    assert settings_of("--device", "cpu", "--update", "in_backward").optimizer.max_grad_norm is None


@pytest.mark.parametrize("clip", [(), ("--clip", "0"), ("--clip", "1")])
@pytest.mark.parametrize("method", ["stronghold", "all", "zero-infinity-nvme"])
def test_on_disk_stronghold_and_no_peer_updates_layers_in_the_backward_pass(method, clip):
    optimizer = settings_of("--method", method, "--store", "disk", *clip).optimizer
    hides = method != "zero-infinity-nvme" and clip != ("--clip", "1")
    assert optimizer.update == ("in_backward" if hides else "deferred")
    assert optimizer.max_grad_norm == (None if hides or clip == ("--clip", "0") else 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["train", "--bogus"], "--bogus"),
        (["train", "--batch", "many"], "--batch"),
        (["train", "--batch", "0"], "batch must be a whole number of at least 1 (got 0)"),
        (["train", "--window", "wide"], "must be a whole number or auto (got 'wide')"),
        (["train", "--method", "magic"], "magic"),
        (["train", "--device", "mars"], "cuda:N or this machine's accelerator (got 'mars'; torch sees "),
        (["train", "--model", "m", "--layers", "3"], "got --model with --layers"),
        (["train", "--model", "/nowhere"], "a model must be a folder with a config.json"),
        (["train", "--checkpoint-every", "0"], "checkpoint_every must be a whole number of at least 1 (got 0)"),
        (["train", "--resume"], "--resume goes on with the run in a folder (got none); pass --out"),
        (["train", "--update", "in_backward", "--clip", "1"], "max_grad_norm needs all gradients"),
        (["train", *TINY, "--data", "/nowhere"], "got '/nowhere'"),
        (["train", "--hidden", "100"], "hidden must be a multiple of 2 · heads"),
        (["train", "--device-memory", "lots"], "'lots'"),
        (["train", "--device-limit", "1GiB"], "the CPU has none of its own (got device_limit='1GiB'"),
        (["train", "--device", "cuda", "--device-limit", "lots"], "'lots'"),
        (["train", "--stages", "0"], "stages must be a whole number of at least 1 (got 0); pass one"),
        (["train", "--stages", "2", "--schedule", "nonsense"], "--schedule: invalid choice: 'nonsense' (choose from"),
        (["train", "--stages", "2", "--balance", "3,x"], "a partition, or numbers such as 26,23 (got '3,x'); see"),
        (["train", "--micro-batches", "3", "--batch", "4"], "got micro_batches=3, schedule=None and one stage); pass"),
        (["train", "--stages", "2", "--micro-batches", "0"], "micro_batches must be a whole number of at least 1"),
        (["train", *TINY, "--vocabulary", "10"], "(got vocabulary=10); pass --vocabulary 256 or more, or --tokenizer"),
        (["plot"], "RUN"),
        (["plot", "/nowhere"], "a run must be a folder"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, arguments, message):
    device = ["--device", "cpu"] if arguments[:1] == ["train"] and "--device" not in arguments else []
    error, code = refuse(capsys, *arguments, *device)
    assert message in error
    assert code == 2


@pytest.mark.parametrize("wrong", [["--schedule", "nonsense"], ["--steps", "0"]])
def test_of_the_processes_that_torchrun_starts_the_first_one_tells_a_wrong_argument(capsys, monkeypatch, wrong):
    waited = []
    monkeypatch.setattr("stronghold.distributed.watch.joined", lambda: None)  # another test here may have joined others
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "0")
    assert wrong[1] in refuse(capsys, "train", "--device", "cpu", *wrong)[0] and waited == []
    monkeypatch.setenv("RANK", "1")
    try:
        assert cli.main(["train", "--device", "cpu", *wrong]) != 0
    except SystemExit as stop:
        assert stop.code == 2
    assert waited == [20] and capsys.readouterr().err == ""


def test_a_window_wider_than_the_model_is_refused_before_anything_is_written(capsys, text, tmp_path):
    error, code = refuse(
        capsys, "train", *TINY, "--data", text, "--window", "3", "--device", "cpu", "--out", str(tmp_path / "o")
    )
    assert "window=3, layers=2" in error
    assert code == 2
    assert not (tmp_path / "o").exists()


def test_a_failure_is_one_line_and_exit_code_1(capsys, text, tmp_path):
    common = ["train", *TINY, "--data", text, "--device", "cpu", "--steps", "3", "--out", str(tmp_path / "o")]
    error, code = refuse(capsys, *common, "--log", "/dev/full")
    assert "cannot write the log (No space left on device): /dev/full" in error
    assert code == 1


def test_train_then_plot(capsys, text, tmp_path):
    run = tmp_path / "o"
    command = ["train", *TINY, "--data", text, "--device", "cpu", "--steps", "4", "--window", "1", "--out", str(run)]
    assert cli.main(command) == 0
    assert "TFLOPS (6·N·tokens)" in capsys.readouterr().out
    assert len(read_run(run).steps) == 4
    with (run / "log.jsonl").open("a") as file:
        file.write('{"event":')
    picture = tmp_path / "p.png"
    assert cli.main(["plot", str(run), str(run / "log.jsonl"), "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "was cut off and is left out" in capsys.readouterr().err
    for name in ("p", "p.txt"):
        assert cli.main(["plot", str(run), "-o", str(tmp_path / name)]) == 2
        told = f"--output is a picture in PNG, SVG or PDF (got {str(tmp_path / name)!r}); name it {str(picture)!r}"
        assert told in capsys.readouterr().err and not (tmp_path / name).exists()
    before = (run / "log.jsonl").read_bytes()
    assert cli.main(["plot", str(run), "-o", str(run / "log.jsonl")]) == 2  # it was the only record of the run
    assert "which is read, and would be lost" in capsys.readouterr().err
    assert cli.main(["trace", str(run.parent), "-o", str(run / "log.jsonl")]) == 2
    assert "which is read, and would be lost" in capsys.readouterr().err
    assert (run / "log.jsonl").read_bytes() == before


def test_of_several_runs_those_that_cannot_be_drawn_are_left_out_and_told(capsys, tmp_path):
    step = {"event": "step", "step": 1, "loss": 2.0, "iteration_s": 0.5}
    start = {"event": "start", "settings": {"batch": 2, "sequence": 8}}
    odd = {
        "whole": [start, step],
        "killed": [start],
        "other": [{"event": "start", "settings": "none"}, step],
        "": [step],
    }
    for name, records in odd.items():
        (tmp_path / f"{name or 'no-start'}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    picture, runs = tmp_path / "p.png", sorted(map(str, tmp_path.glob("*.jsonl")))
    assert cli.main(["plot", *runs, "-o", str(picture)]) == 0
    assert picture.exists()
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2].split()[0].rpartition("/")[2] for line in told] == [
        "killed.jsonl",
        "no-start.jsonl",
        "other.jsonl",
    ]
    assert "killed.jsonl is left out: there must be at least one step to draw" in told[0]
    picture.unlink()
    assert cli.main(["plot", *runs[:3], "-o", str(picture)]) == 2
    assert "there must be a run to draw (got none: " in capsys.readouterr().err
    assert cli.main(["plot", runs[0], "-o", str(picture)]) == 2
    assert cli.main(["plot", *runs, str(tmp_path / "nowhere"), "-o", str(picture)]) == 2  # a slip of the pen
    assert not picture.exists()


def test_resume_goes_on_and_tells_what_it_skipped(capsys, text, tmp_path):
    run = tmp_path / "o"
    command = ["train", *TINY, "--data", text, "--device", "cpu", "--out", str(run)]
    command += ["--checkpoint-every", "2", "--resume"]
    assert cli.main([*command, "--steps", "4"]) == 0
    assert "yet: beginning with step 1" in capsys.readouterr().out
    (run / "checkpoints" / "step-000004" / "manifest.json").unlink()
    assert cli.main([*command, "--steps", "60"]) == 0  # a tenth of which would be another warm-up
    shown = capsys.readouterr().out
    assert "skipped " in shown and "step-000004: a checkpoint must be a directory with a manifest.json" in shown
    assert [step["step"] for step in read_run(run).steps] == list(range(1, 61))
    error, code = refuse(capsys, *command, "--steps", "80", "--seed", "3")
    assert "got seed=3, which was 0" in error
    assert code == 2


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("stronghold.lab.cli", ["plot", "absent"]),
        pytest.param("stronghold.lab.cases.__main__", ["draw", "1", "--results", "absent"], marks=pytest.mark.long),
    ],
)
def test_a_process_that_ends_searches_for_no_garbage(module, arguments):
    told = "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 1000))"  # runs last
    program = f"{told}; from {module} import main; sys.exit(main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("True\n", 2), done.stderr


@pytest.mark.parametrize(
    "command", [[], ["train"], ["plan"], ["probe"], ["plot"], ["report"], ["trace"], ["partition"]]
)
def test_help_fits_and_has_no_gaps(capsys, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 104
    for option in re.findall(r"^  (--[a-z-]+|-[a-z], --[a-z-]+)", text, flags=re.MULTILINE):
        assert re.search(rf"{option}.*\s+\S+ \S+", text), option


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train", "--stages --micro-batches --schedule --balance"),
        (
            "partition",
            "--layers --hidden --heads --vocabulary --dropout --input --stages --processes --schedule --balance --file "
            "--memory --activations --micro-batches --batch --seq --dtype --device --output",
        ),
    ],
)
def test_help_lists_what_there_is_to_say_of_stages(capsys, command, options):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert set(options.split()) <= set(re.findall(r"^  (?:-\w[^,]*, )?(--[a-z-]+)", text, flags=re.MULTILINE))
    assert "GPipe, 1F1B, Interleaved1F1B" in " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "balance"),
    [("time", "time"), ("26,23", (26, 23)), ("5", (5,)), ("partition.json", "partition.json"), ("./a,b", "./a,b")],
)
def test_a_balance_is_a_name_the_layers_or_a_file(text, balance):
    assert settings_of("--device", "cpu", "--stages", "2", "--balance", text).parallel.balance == balance


def start(arguments, log):
    return subprocess.Popen(
        [sys.executable, "-m", "stronghold", *arguments],
        cwd=ROOT,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )


def wait_for(condition, process, log, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def steps_in(run):
    path = run / "log.jsonl"
    return path.read_text().count('"event": "step"') if path.exists() else 0


def test_ctrl_c_saves_and_exits_with_130(text, tmp_path):
    run, log = tmp_path / "o", tmp_path / "out.txt"
    process = start(["train", *TINY, "--data", text, "--device", "cpu", "--steps", "1000000", "--out", str(run)], log)
    try:
        wait_for(lambda: steps_in(run) >= 5, process, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
    finally:
        process.kill()
    shown = log.read_text()
    assert "ending after this step" in shown
    assert "Traceback" not in shown
    logged = read_run(run)
    assert logged.end["interrupted"] is True
    assert f"interrupted after step {len(logged.steps)} of 1000000" in shown
    assert load_model(run / "model")[1]


def test_a_second_ctrl_c_quits_at_once(text, tmp_path):
    run, log = tmp_path / "o", tmp_path / "out.txt"
    slow = ["-l", "24", "--hidden", "512", "--heads", "2", "--vocabulary", "256", "--seq", "512", "--batch", "8"]
    process = start(["train", *slow, "--data", text, "--device", "cpu", "--out", str(run)], log)
    try:
        wait_for(lambda: (run / "log.jsonl").exists(), process, log)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "ending after this step" in log.read_text(), process, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    assert not (run / "model").exists()  # which a step that ends saves


def run_sh(*arguments):
    return subprocess.run(
        [ROOT / "examples" / "run.sh", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "magic"], f"-m must be one of: {' '.join(sorted(METHODS))} all (got 'magic')"),
        (["-m", "../x"], f"-m must be one of: {' '.join(sorted(METHODS))} all (got '../x')"),
        (["-l", "none"], "-l must be a whole number of at least 1 and at most 999999999 (got 'none')"),
        (["-b", "0"], "-b must be a whole number of at least 1 and at most 999999999 (got '0')"),
        (["-l", "2", "-w", "3"], "-w must not be more than the layers (got -w 3, -l 2)"),
        (["--micro-batch", "0"], "--micro-batch must be a whole number of at least 1 and at most 999999999 (got '0')"),
        (["--dtype", "fp8"], "--dtype must be fp32 or bf16 (got 'fp8')"),
        (["--steps"], "--steps needs a value"),
        (["--bogus"], "unknown option '--bogus'"),
        *(
            ([option, ""], f"{option} needs a value")
            for option in ("-m", "-l", "--lr", "--store", "--clip", "--results")
        ),
        (["-b", str(10**21)], f"-b must be a whole number of at least 1 and at most 999999999 (got '{10**21}')"),
    ],
)
def test_run_sh_refuses_in_one_line_with_exit_code_2(arguments, message):
    result = run_sh(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"run.sh: error: {message}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("below", ["", "below", "below/it"])
def test_run_sh_refuses_a_folder_of_results_that_cannot_be(below, tmp_path):
    (tmp_path / "file").touch()
    result = run_sh("-l", "2", "-h", "32", "-w", "1", "--steps", "1", "--results", str(tmp_path / "file" / below))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "run.sh: error: --results must be a folder that can be made and written to "
        f"(got '{tmp_path / 'file' / below}')\n"
    )


def test_run_sh_runs_the_main_job_and_leaves_its_log(tmp_path):
    small = "-m stronghold -l 2 -h 32 -b 2 -w 1 --seq 32 --steps 5 --micro-batch 1 --device cpu"
    result = run_sh(*small.split(), "--results", str(tmp_path / "results"))
    assert result.returncode == 0, result.stderr
    (log,) = (tmp_path / "results").glob("log_stronghold_l-2_h-32_bs-2_ws-1_*.txt")
    written = log.read_text()
    assert str(log) in result.stdout
    for core in (
        "parameters", "samples/s", "iteration time", "TFLOPS (6·N·tokens)",
        "TFLOPS with recomputation (8·N·tokens)", "peak device bytes", "peak host bytes", "first", "last",
    ):  # fmt: skip
        assert core in written
        assert core in result.stdout
    assert len(re.findall(r"^step +\d+  loss \d+\.\d{6}", written, flags=re.MULTILINE)) == 5
    (record,) = map(json.loads, (tmp_path / "results" / "runs.jsonl").read_text().splitlines())
    assert record["summary"]["steps"] == 5
    assert record["settings"]["micro_batch"] == 1
    (run,) = (tmp_path / "results" / "runs").iterdir()
    assert len(read_run(run).steps) == 5
