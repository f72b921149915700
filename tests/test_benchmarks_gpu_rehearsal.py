"""benchmarks/gpu, each script as a process on the CPU: its records, what a second call leaves out, its clock."""

import gc
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import stronghold

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "gpu"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"GOMP_SPINCOUNT": "1000", "KINETO_LOG_LEVEL": "99"}


def call(script, out, *arguments, code=0):
    """Returns what a script prints that ends with ``code``."""
    command = [str(FOLDER / script)] if script.endswith(".sh") else [sys.executable, str(FOLDER / script)]
    command += ["--out", str(out), "--device", "cpu", "--small", "--commit", "c", *map(str, arguments)]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "OUT"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def recorded(out, name):
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_the_probe_goes_on_where_it_was(load, tmp_path, capsys):
    def probe(*arguments):
        options = ["--out", str(tmp_path), "--device", "cpu", "--small", "--commit", "c", "--least", "0.001"]
        assert load("probe").main([*options, "--only", "product", *arguments]) == 0
        return capsys.readouterr().out

    probe()
    first = recorded(tmp_path, "probe")
    assert {record["call"]["kind"] for record in first} == {"bf16", "fp32", "tf32"}
    assert all(record["tflops"] > 0 and record["here"]["commit"] == "c" for record in first)
    printed = probe("link", "launch", "host memory")
    both = recorded(tmp_path, "probe")
    assert both[: len(first)] == first
    later = both[len(first) :]
    assert {record["call"]["part"] for record in later} == {"link", "launch", "host memory"}
    assert all(record["gb_per_s"] > 0 for record in later if record["call"]["part"] != "launch")
    assert "the best bf16 product" in printed and "up, not pinned" in printed
    probe()
    assert recorded(tmp_path, "probe") == both


MODES = 41 if importlib.util.find_spec("torchao") else 38


@pytest.mark.parametrize(
    ("script", "name", "left"),
    [
        pytest.param("probe.py", "probe", " are left", marks=pytest.mark.long),
        ("smoke.py", "smoke", f"{MODES} of {MODES} are left"),
        pytest.param("trace_steps.py", "trace", "17 of 17 are left", marks=pytest.mark.long),
        ("large.py", "large", "4 of 4 are left"),
    ],
)
def test_without_time_nothing_is_measured_and_what_is_left_is_said(tmp_path, script, name, left):
    assert left in call(script, tmp_path, "--minutes", 0, code=3)
    assert not (tmp_path / f"{name}.jsonl").exists()


RECORDED = {path.name for path in (FOLDER.parents[1] / "results" / "gpu").glob("*.jsonl")}
"""What a call begins with."""


@pytest.mark.parametrize("script", ["first.sh", "compare.sh", "large.sh"])
def test_a_shell_script_without_time_says_what_is_left(tmp_path, script):
    printed = call(script, tmp_path, "--minutes", 0)
    assert "no time for: " in printed
    (output,) = [path for path in tmp_path.iterdir() if path.name not in RECORDED]
    assert output.read_text() == printed


def test_a_packed_call_leaves_its_records_and_two_files_and_the_next_one_goes_on_in_them(tmp_path):
    traces = {f"trace_0{number}.json.gz": bytes(6 * 2**20) for number in range(3)}
    for name, trace in traces.items():
        (tmp_path / name).write_bytes(trace)
    (tmp_path / "smoke.jsonl").write_text("{}\n")
    printed = [call("first.sh", tmp_path, "--minutes", 0, "--pack") for _ in range(2)]
    # A file of more than 16 MiB might not be given back, and two traces are less.
    kept = {"smoke.jsonl", "beside.tar", "traces.tar", "trace_02.json.gz"}
    assert {path.name for path in tmp_path.iterdir()} == kept | RECORDED
    with tarfile.open(tmp_path / "traces.tar") as packed:
        assert {name: packed.extractfile(name).read() for name in sorted(packed.getnames())} == {
            name: traces[name] for name in sorted(traces)[:2]
        }
    with tarfile.open(tmp_path / "beside.tar") as packed:
        assert packed.getnames() == ["first.txt"]
        assert packed.extractfile("first.txt").read().decode() == "".join(printed)
    call("large.sh", tmp_path, "--minutes", 0)
    assert {path.name for path in tmp_path.iterdir()} == {"first.txt", "large.txt", *traces, *RECORDED}


def test_modes_are_compared_with_plain_pytorch_and_one_that_dies_is_told(tmp_path):
    only = ("--only", "window 2", "bf16, in_backward")
    printed = call("smoke.py", tmp_path, *only)
    assert "2 ok" in printed
    records = recorded(tmp_path, "smoke")
    assert [record["call"]["mode"] for record in records] == ["window 2", "bf16, in_backward"]
    for record in records:
        assert len(record["losses"]) == 5 and record["losses"][-1] < record["losses"][0]
        assert record["losses"] == pytest.approx(record["expected"], rel=record["tolerance"])
    printed = call("smoke.py", tmp_path, *only, "window 1", "--patience", "0.001", code=1)
    assert "2 ok, 1 failed" in printed
    assert recorded(tmp_path, "smoke")[:2] == records
    assert recorded(tmp_path, "smoke")[2]["error"].startswith("the process died: hung for 0:00:00.001000")


@pytest.fixture
def smoke(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER.parent)
    monkeypatch.syspath_prepend(FOLDER)
    import smoke  # type: ignore[import-not-found]

    return smoke


def test_layers_that_cannot_be_compiled_fail_their_mode(smoke, tmp_path, monkeypatch):
    """They ran eagerly, with the losses of plain PyTorch, and the mode was "ok"."""

    def no_compiler(graph, inputs):
        raise RuntimeError("no gcc")

    asked = smoke.compiled_on(torch.device("cuda"))
    assert asked["backend"] == "inductor"
    monkeypatch.setattr(smoke, "compiled_on", lambda device: asked | {"backend": no_compiler})
    with pytest.raises(stronghold.errors.OffloadedModelError, match=r"must be one graph .*no gcc"):
        smoke.run_mode(smoke.MODES["compiled, bf16, activations kept"], torch.device("cpu"), tmp_path)


@pytest.mark.parametrize(
    ("mode", "lost"),
    [
        ("bf16", r"layers\.[135]\."),
        ("bf16", r"embedding\."),
        ("biases alone, bf16", ""),
    ],
)
def test_a_mode_in_bf16_that_does_not_update_is_wrong(smoke, tmp_path, monkeypatch, mode, lost):
    """Five steps move a loss so little that it stays within what bf16 is allowed, and the mode was "ok"."""
    whole = smoke.offloaded

    def offloaded(model, **given):
        loop = whole(model, **given)
        (group,) = loop.optimizer.param_groups
        names = {parameter: name for name, parameter in model.named_parameters()}
        still = [parameter for parameter in group["params"] if re.match(lost, names[parameter])]
        group["params"] = [parameter for parameter in group["params"] if parameter not in set(still)]
        loop.optimizer.add_param_group({"params": still, "lr": 0.0})
        return loop

    for name, value in {"layers": 6, "hidden": 32, "heads": 2}.items():
        monkeypatch.setitem(smoke.GPT_SHAPE, name, value)
    monkeypatch.setattr(smoke.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    options = smoke._options(["--out", str(tmp_path), "--device", "cpu", "--commit", "c"])
    smoke.run_modes([mode], options)
    monkeypatch.setattr(smoke, "offloaded", offloaded)
    smoke.run_modes([mode], options)
    right, wrong = recorded(tmp_path, "smoke")
    assert "error" not in wrong and wrong["away"] <= wrong["tolerance"]
    assert [smoke.status_of(record) for record in (right, wrong)] == ["ok", "WRONG"]
    assert max(right["moved_away"].values()) < 0.15
    still = {unit for unit, away in wrong["moved_away"].items() if away == pytest.approx(1)}
    assert still == {unit for unit in wrong["moved_away"] if re.match(lost, f"{unit}.")}


def test_how_far_what_moved_is_away(smoke):
    one = torch.ones(1)
    names = ("layers.0.a", "layers.0.b.2.c", "layers.1.a", "head", "still", "stirred")
    before = dict.fromkeys(names, 0 * one)
    wanted = before | {"layers.0.a": 3 * one, "layers.0.b.2.c": 4 * one, "layers.1.a": one, "head": one}
    got = wanted | {"layers.0.a": 0 * one, "layers.1.a": one * torch.nan, "stirred": one}
    away = {"layers.0": 0.6, "layers.1": torch.inf, "head": 0, "still": 0, "stirred": torch.inf}
    assert smoke.moved_away(got, wanted, before) == pytest.approx(away)


def test_an_error_of_cuda_is_that_of_its_mode_alone(tmp_path):
    """The next mode, which had not begun, was "the process died" as well, and never tried again."""
    child = tmp_path / "child.py"
    child.write_text(
        f"import sys; sys.path[:0] = {[str(FOLDER), str(FOLDER.parent)]}\n"
        "import smoke\n"
        "smoke.__file__, whole = __file__, smoke.run_mode\n"
        "smoke.GPT_SHAPE |= {'layers': 2, 'hidden': 32, 'heads': 2}\n"
        "def run_mode(mode, *where):\n"
        "    if mode is smoke.MODES['window 1']: raise RuntimeError('CUDA error: an illegal memory access')\n"
        "    return whole(mode, *where)\n"
        "smoke.run_mode = run_mode\n"
        "if __name__ == '__main__': sys.exit(smoke.main())\n"
    )
    command = [sys.executable, str(child), "--out", str(tmp_path), "--device", "cpu", "--commit", "c"]
    command += ["--only", "window 1", "window 2"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 1 and "1 ok, 1 failed" in done.stdout, done.stdout + done.stderr
    failed, ok = recorded(tmp_path, "smoke")
    assert failed["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert ok["call"]["mode"] == "window 2" and "error" not in ok


def test_what_a_mode_is_warned_of_is_in_its_record_and_in_the_table(smoke, tmp_path, monkeypatch, capsys):
    def run_mode(*_):
        for _ in range(2):
            warnings.warn("pinning was\nrefused", RuntimeWarning, stacklevel=1)
        return (1.0,), {name: torch.zeros(1) for name, _ in smoke._model(smoke.MODES["window 2"]).named_parameters()}

    monkeypatch.setattr(smoke, "run_mode", run_mode)
    monkeypatch.setattr(smoke, "losses_of", lambda *_: (1.0,))
    monkeypatch.setattr(smoke, "moved_away", lambda *_: {"layers.0": 0.0})
    monkeypatch.setattr(smoke.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    options = smoke._options(["--out", str(tmp_path), "--device", "cpu", "--commit", "c"])
    with pytest.warns(RuntimeWarning, match="pinning was\nrefused"):  # printed as ever
        smoke.run_modes(["window 2"], options)
    (record,) = recorded(tmp_path, "smoke")
    assert record["told"] == ["RuntimeWarning: pinning was refused"]
    smoke.draw(smoke.table([record]))
    printed = capsys.readouterr().out
    assert "1 ok" in printed and "RuntimeWarning: pinning was refused" in printed


def test_steps_are_traced_beside_the_ordinary_loop(tmp_path):
    shape = ("--layers", 2, "--hidden", 32, "--heads", 2, "--sequence", 16, "--rounds", 1, "--steps", 1)
    shape += ("--only", "batch 4, cap *, in_backward*", "*, window 2, deferred*", "*, in_backward, 8-bit")
    printed = call("trace_steps.py", tmp_path, *shape)
    records = recorded(tmp_path, "trace")
    assert [record["call"]["method"] for record in records].count("plain") == 2
    assert len(records) == 2 + 4
    assert ["trace" in record for record in records] == [True] * 4 + [False] * (len(records) - 4)
    for record in records[:4]:
        trace = record["trace"]
        assert 0 < trace["busy"] < 1 and trace["gaps"] and trace["kernels"] > 10
        idle_s = sum(trace["why_s"].values())
        assert idle_s == pytest.approx((1 - trace["busy"]) * trace["traced_s"], rel=0.2)
    for record in records:
        assert record.get("away", 0.0) <= record.get("tolerance", 0.0)
    assert len(list(tmp_path.glob("trace_*.json.gz"))) == 4
    assert "largest gaps, batch 4, plain PyTorch, resident" in printed and "batch 2, window 2, deferred" in printed
    call("trace_steps.py", tmp_path, *shape)
    assert recorded(tmp_path, "trace") == records


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER.parent)
    monkeypatch.syspath_prepend(FOLDER)
    # A script's time begins with its process, and this one may be an hour old.
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: time.time())
    return importlib.import_module


def test_a_setting_that_is_not_there_is_refused_with_those_that_are(load, capsys):
    with pytest.raises(SystemExit):
        load("trace_steps").main(["--small", "--device", "cpu", "--only", "batch 5, *"])
    assert "(got ['batch 5, *']); there are: batch 4, cap 16.0 MiB, in_backward" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("first", [1.0, float("nan")])
def test_losses_that_are_no_numbers_are_wrong(load, first):
    """max() passes over a NaN that is not first, and one that is first became a word that no table could compare."""
    away = load("loops").away([first, float("nan"), float("nan")], [1.0, 1.0, 1.0])
    record = json.loads(load("half_hour").to_line({"away": away, "tolerance": 1e-2}))
    assert load("trace_table").is_wrong(record)
    assert not load("trace_table").is_wrong({"away": 1e-3, "tolerance": 1e-2})


SHAPE = ("--layers", "2", "--hidden", "32", "--heads", "2", "--sequence", "16", "--dtype", "fp32")
SHAPE += ("--rounds", "1", "--steps", "1", "--gaps", "0")


def test_a_setting_whose_losses_become_nan_is_wrong_in_the_table_and_by_its_end(load, tmp_path, monkeypatch, capsys):
    steps = load("trace_steps")
    whole, cap = steps.offloaded, steps.settings_of

    def offloaded(*model, **given):
        loop = whole(*model, **given)
        losses = iter([1.0])
        return load("loops").Loop(**vars(loop) | {"step": lambda batch: loop.step(batch) * next(losses, float("nan"))})

    monkeypatch.setattr(steps, "settings_of", lambda *given: cap(*given)[:1])
    monkeypatch.setattr(steps, "offloaded", offloaded)
    options = ["--out", str(tmp_path), "--device", "cpu", "--commit", "c", *SHAPE, "--cap", "4MiB", "--traces", "0"]
    for _ in range(2):  # as it is measured, and from the record
        assert steps.main(options) == 1
        assert "WRONG" in capsys.readouterr().out


def test_one_batchs_memory_is_free_when_the_next_begins(load, tmp_path, monkeypatch):
    """Layers that are computed again hold each other: the peak of the next batch had the one before in it."""
    steps = load("trace_steps")
    alive, seen = [], []

    class Course:
        def __init__(self, shape, batch, options, pristine):
            seen.append([one() is not None for one in alive])
            self.batch, self.itself = batch, self
            alive.append(weakref.ref(self))

        def ordinary_record(self, keep):
            return {"step_s": [1.0]}

        def measure(self, setting, keep):
            return {"step_s": [1.0]}

    monkeypatch.setattr(steps, "Course", Course)
    gc.disable()
    try:
        steps.main(["--out", str(tmp_path), "--device", "cpu", "--commit", "c", *SHAPE])
    finally:
        gc.enable()
    assert seen == [[], [False]]


def test_a_cap_that_takes_fewer_samples_at_a_time_says_so(load, tmp_path, monkeypatch, capsys):
    steps = load("trace_steps")
    whole = steps.settings_of
    monkeypatch.setattr(steps, "settings_of", lambda *given: whole(*given)[:1])
    fitted = {"activations": "host", "micro_batch": 1, "window": 1}
    monkeypatch.setattr(steps, "offload_settings", lambda *_, on_host: fitted)
    steps.main(["--out", str(tmp_path), "--device", "cpu", "--commit", "c", *SHAPE, "--traces", "0"])
    placed = recorded(tmp_path, "trace")[1]["placement"]
    assert (placed["activations"], placed["micro_batch"]) == ("host", 1)
    assert "1 at a time, inputs on the host" in capsys.readouterr().out


def test_memory_is_touched_as_it_grows_and_for_as_long_as_there_is_time(load, tmp_path, monkeypatch, capsys):
    touch = load("touch")
    part, arguments = touch.PART_BYTES // 64, ["--out", str(tmp_path), "--device", "cpu", "--commit", "c"]
    free = iter([1, 1, 1, 0, 0])  # in parts: of such a machine never much more than one
    monkeypatch.setattr(touch, "available_host_bytes", lambda: next(free) * part)
    monkeypatch.setattr(touch, "most_host_bytes", lambda held: 2**40)
    touch.main([*arguments, "--leave", "0"])
    assert recorded(tmp_path, "touch")[0]["call"] == {"bytes": 3 * part}
    monkeypatch.setattr(touch, "available_host_bytes", lambda: 2**40)
    monkeypatch.setattr(touch, "budget_of", lambda options: load("calls").Budget(touch.END_S))
    touch.main([*arguments, "--again"])  # of all its seconds none is left behind its imports
    assert len(recorded(tmp_path, "touch")) == 1
    assert "nothing is touched" in capsys.readouterr().out


def test_where_the_extension_cannot_be_built_that_is_said_and_packed(tmp_path):
    """The script ended without a word, and nothing of it came back."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    shutil.copytree(FOLDER, tree / "benchmarks" / "gpu")
    command = [str(tree / "benchmarks" / "gpu" / "first.sh"), "--out", str(out), "--small", "--pack"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("OUT", "PYTHONPATH")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "failed or wrong: building the extension" in done.stdout, done.stdout + done.stderr
    with tarfile.open(out / "beside.tar") as packed:
        assert sorted(packed.getnames()) == ["first.txt", "machine.txt"]
        assert packed.extractfile("first.txt").read().decode() == done.stdout


def test_large_models_learn_and_are_not_trained_again(load, tmp_path, capsys):
    options = ["--out", str(tmp_path), "--device", "cpu", "--small", "--commit", "c"]
    assert load("probe").main([*options, "--least", "0.001", "--only", "product"]) == 0
    assert load("large").main([*options, "--steps", "2", "--batches", "2"]) == 0
    printed = capsys.readouterr().out
    llama, gpt = recorded(tmp_path, "large")
    assert (llama["call"]["model"], gpt["call"]["model"]) == ("llama-tiny", "gpt-tiny")
    assert llama["learned"] and gpt["learned"] and len(llama["step_s"]) == 2
    assert (llama["loss_chunk"], gpt["loss_chunk"]) == (2048, 2**27 // (4 * 640))
    assert "best product" in printed and "WRONG" not in printed
    assert load("large").main([*options, "--steps", "2", "--batches", "2"]) == 0
    assert len(recorded(tmp_path, "large")) == 2


def test_a_copy_without_git_has_a_name_of_its_own_that_its_sources_give(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER.parent)
    monkeypatch.syspath_prepend(FOLDER)
    from half_hour import digest  # type: ignore[import-not-found]

    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text("int a;")
    first = digest(tmp_path)
    (tmp_path / "csrc" / "notes.txt").write_text("of no account")
    assert digest(tmp_path) == first
    (tmp_path / "csrc" / "a.cpp").write_text("int b;")
    assert digest(tmp_path) != first


def test_what_takes_longer_than_its_time_is_ended_and_what_follows_is_done(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER.parent)
    monkeypatch.syspath_prepend(FOLDER)
    from calls import Budget  # type: ignore[import-not-found]
    from half_hour import within  # type: ignore[import-not-found]

    before, begin_s = signal.getsignal(signal.SIGALRM), time.monotonic()
    with within(Budget(0.2)):
        with suppress(Exception):  # as what measures has it
            time.sleep(15)
        pytest.fail("what takes longer went on, or was taken for an error of its own")
    assert time.monotonic() - begin_s >= 0.2
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    done = []
    with within(Budget(-1.0)):  # nothing is begun then, and nothing has to be ended
        done.append(True)
    with within(Budget(60.0)), pytest.raises(ZeroDivisionError):
        1 / 0  # noqa: B018
    assert done and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_minutes_of_a_script_begin_with_its_process():
    """Imports took what a table was to be drawn in, so that the clock ended the script before it."""
    paths = [str(FOLDER), str(FOLDER.parent), str(ROOT)]
    script = "import time; time.sleep(3); from half_hour import budget_of; from types import SimpleNamespace as N\n"
    script += "print(budget_of(N(minutes=1)).left_s)"
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert float(done.stdout) < 58, done.stderr


@pytest.mark.timeout(1300)  # a script ends itself within ten minutes, and is called twice
@pytest.mark.parametrize(
    ("script", "names"),
    [
        pytest.param("first.sh", ("touch", "smoke", "probe", "trace"), marks=pytest.mark.long),
        pytest.param("compare.sh", ("methods",), marks=pytest.mark.long),
        ("large.sh", ("probe", "large")),
    ],
)
def test_each_of_the_three_commands_end_to_end(tmp_path, script, names):
    printed = call(script, tmp_path)
    assert "failed or wrong" not in printed and "no time for" not in printed
    for name in names:
        records = recorded(tmp_path, name) if name != "touch" else [{}]
        assert records and not any("CUDA" in str(record.get("error")) for record in records)
    before = {name: recorded(tmp_path, name) for name in names if name != "touch"}
    call(script, tmp_path)
    assert {name: recorded(tmp_path, name) for name in before} == before
