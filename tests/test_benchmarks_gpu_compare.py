"""benchmarks/gpu/compare.py on the CPU: what its parts call and in which order, what fits, what the records come to."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from stronghold.lab import cli

GIB = 2**30
FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(FOLDER / "gpu")
    return importlib.import_module


@pytest.fixture
def parts(load):
    return load("compare_parts")


@pytest.fixture
def gpu(load, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")  # what it sets, to be put back
    return load("compare")


def in_short(rounds):
    return [(one.number, one.reference.name, [setting.name for setting in one.settings]) for one in rounds]


# ---- what is called ----


def test_methods_under_each_cap_begin_with_those_of_the_goals(parts):
    wanted = parts.Wanted(batches=(4, 32), caps=(8 * GIB, 16 * GIB), rounds=1)
    goals, again, others, _, from_disk, _ = parts.plan("methods", wanted)
    assert in_short([goals]) == [
        (
            1,
            "methods_megatron-lm_l-32_bs-4",
            [
                "methods_stronghold_l-32_bs-4_cap-8.00GiB",
                "methods_stronghold_l-32_bs-4_cap-8.00GiB_in_backward",
                "methods_zero-offload_l-32_bs-4_cap-8.00GiB",
                "methods_zero-infinity_l-32_bs-4_cap-8.00GiB",
                "methods_stronghold_l-32_bs-4_cap-16.0GiB",
                "methods_stronghold_l-32_bs-4_cap-16.0GiB_in_backward",
                "methods_zero-offload_l-32_bs-4_cap-16.0GiB",
                "methods_zero-infinity_l-32_bs-4_cap-16.0GiB",
            ],
        )
    ]
    assert again.settings == tuple(replace(setting, batch=32) for setting in goals.settings)
    assert [setting.method for setting in others.settings] == ["l2l", "fsdp-offload", "torchao-offload"] * 2
    assert [setting.method for setting in from_disk.settings] == ["zero-infinity-nvme"] * 2
    assert (others.number, others.reference) == (from_disk.number, from_disk.reference) == (1, goals.reference)


def test_a_further_round_is_of_the_goals_methods_alone(parts):
    wanted = parts.Wanted(caps=(GIB,), rounds=2, only=("zero-offload", "l2l"))
    assert [(one.number, [s.method for s in one.settings]) for one in parts.plan("methods", wanted)] == [
        (1, ["zero-offload"]),
        (2, ["zero-offload"]),
        (1, ["l2l"]),
    ]


def test_windows_are_passed_once_for_each_update_and_layers_each_have_a_reference(parts, gpu):
    (one,) = parts.plan("windows", replace(gpu.PARTS["windows"], rounds=1))
    assert [(setting.update, setting.window) for setting in one.settings] == [
        (update, window) for update in ("deferred", "in_backward") for window in range(2, 16)
    ]
    rounds = list(parts.plan("layers", gpu.PARTS["layers"]))
    assert [one.reference.layers for one in rounds] == [16, 24, 32, 40, 48, 56, 64, 78, 92]
    assert all(
        one.settings[0] == replace(one.reference, method="stronghold", window=15, cap=32 * GIB) for one in rounds
    )


# ---- what fits ----


@pytest.mark.parametrize(
    ("batch", "cap", "activations", "micro_batch"),
    [
        (4, 8, "recompute", None),
        (32, 8, "host", 8),
        (32, 16, "recompute", None),
        (32, 24, "recompute", None),
        (32, 32, "recompute", None),
        (32, None, "recompute", None),
    ],
)
def test_activations_take_three_quarters_of_a_cap_at_most(parts, batch, cap, activations, micro_batch):
    cap = None if cap is None else cap * GIB
    setting = parts.Setting(part="methods", method="stronghold", layers=32, batch=batch, cap=cap)
    fitted = parts.fit(parts.Course(), setting)
    assert (fitted.activations, fitted.micro_batch) == (activations, micro_batch)
    assert fitted.reserve <= (cap or 32 * GIB) * 3 / 4
    told = parts.fit(parts.Course(activations="keep", micro_batch=2, reserve=GIB), setting)
    assert (told.activations, told.micro_batch, told.reserve) == ("keep", 2, GIB)


def test_what_activations_take(parts):
    setting = parts.Setting(part="methods", method="stronghold", layers=32, batch=32)
    unit, table, chunk, course = 32 * 1024 * 2048 * 2, 51328 * 2048 * 4, 128 * 2**20, parts.Course()
    assert unit == 128 * 2**20
    for activations, samples, needed in (
        ("recompute", 32, 32 * unit + 26.5 * unit),
        ("recompute", 8, 32 * unit + 4 * unit + 3 * chunk + 3 * table),
        ("host", 24, 3 * unit + 20.5 * unit),
        ("keep", 32, 19 * 32 * unit + 26.5 * unit),
    ):
        expected = 1.1 * needed + 256 * 2**20
        assert parts.activation_bytes(course, setting, activations, samples) == pytest.approx(expected, abs=1)


def test_beyond_the_cap_stronghold_leaves_more_and_deepspeed_accumulates(parts):
    setting = parts.Setting(part="methods", method="stronghold", layers=32, batch=32, cap=GIB)
    before = parts.Fit(activations="host", micro_batch=8, reserve=100)
    assert parts.fit_tighter(parts.Course(), setting, before) == replace(before, reserve=150)
    assert parts.fit_tighter(parts.Course(reserve=100), setting, before) is None
    assert parts.fit_tighter(parts.Course(), replace(setting, window=2), before) is None
    tried, last = [], parts.Fit()
    while last is not None:
        last = parts.fit_tighter(parts.Course(), replace(setting, method="zero-infinity"), last)
        tried.append(last and last.micro_batch)
    assert tried == [8, 2, 1, None]
    assert parts.fit_tighter(parts.Course(), replace(setting, method="megatron-lm"), parts.Fit()) is None


# ---- the command ----


def settings_of(parts, course, setting):
    """Returns what the command line makes of a call's command."""
    fitted = parts.fit(course, setting)
    options = cli._parser().parse_args(["train", *parts.command(course, setting, fitted), "--out", "x"])
    return cli._train_settings(options).flat(), fitted


def test_every_command_is_of_the_same_training(parts, gpu):
    learned = []
    for part, wanted in gpu.PARTS.items():
        for setting in {s for one in parts.plan(part, wanted) for s in (one.reference, *one.settings)}:
            found, fitted = settings_of(parts, parts.Course(), setting)
            assert (found["method"], found["layers"], found["batch"]) == (setting.method, setting.layers, setting.batch)
            assert (found["device_limit"], found["update"]) == (setting.cap, setting.update)
            learned.append([found[name] for name in ("lr", "warmup_steps", "max_grad_norm", "dtype", "steps", "seed")])
            if setting.method == "stronghold" and part == "methods":
                assert (found["resident"], found["window"]) == ("auto", "auto")
                assert found["device_memory"] == setting.cap - fitted.reserve > 3 * GIB
            elif setting.method == "stronghold":
                assert (found["resident"], found["window"], found["device_memory"]) == (0, setting.window, None)
            if setting.method not in ("stronghold", "l2l"):  # what they would refuse
                assert (found["activations"], found["micro_batch"]) == ("recompute", None)
            assert (found["store"] == "ram") == (setting.method != "zero-infinity-nvme")
    assert learned == [[3e-6, 0, None, "bf16", 8, 0]] * len(learned)


def test_the_cpu_has_no_limit_of_its_own(parts, gpu):
    setting = parts.Setting(part="methods", method="stronghold", layers=4, batch=2, cap=2**20)
    found, _ = settings_of(parts, gpu.SMALL_COURSE, setting)
    assert (found["device_limit"], found["device_memory"], found["resident"]) == (None, 2**20, "auto")


# ---- making the calls ----


LOSSES = [3.0, 2.0]


@pytest.fixture
def played(load, gpu, monkeypatch, tmp_path):
    """Has ``main`` run with calls that take no time, and end as is said for their methods.

    Returns the exit code of ``main`` and the methods of the calls.
    """
    calls, runs = load("calls"), load("compare_runs")
    made, outcomes = [], {}

    def train(arguments, *, scratch=None, timeout_s=None, keep=None):
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        made.append(options)
        outcome = outcomes.get(options["--method"], 2.0)
        outcome = outcome.pop(0) if isinstance(outcome, list) else outcome
        if isinstance(outcome, str):
            late = outcome.startswith("not done")
            return calls.Call(record=None, steps=(), reason=outcome, wall_s=1.0, late=late)
        rate, losses = outcome if isinstance(outcome, tuple) else (outcome, LOSSES)
        settings = {"method": options["--method"], "dtype": "bf16", "layers": int(options["--layers"])}
        summary = {"samples_per_s": rate, "iteration_s": 1.0, "tflops": 1.0, "peak_device_bytes": 0}
        record = {"settings": settings, "machine": {"commit": None}, "parameters": 7, "summary": summary}
        step = dict.fromkeys(runs.OF_A_STEP, 0.5)
        return calls.Call(record=record | {"losses": losses}, steps=(step,) * 3, reason="", wall_s=1.0)

    def run(*arguments, **ends):
        made.clear()
        outcomes.clear()
        outcomes.update({name.replace("_", "-"): value for name, value in ends.items()})
        words = ["--small", "--out", str(tmp_path / "gpu.jsonl"), "--commit", "c", *arguments]
        return gpu.main(words), [call["--method"] for call in made]

    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(gpu, "train", train)
    monkeypatch.setattr(gpu, "use_baselines", lambda *_: None)
    return run


def recorded(tmp_path):
    return [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]


ONE = ("--part", "methods", "--caps", "1MiB", "--batches", "2", "--rounds", "2")
GOALS = ["megatron-lm", "stronghold", "stronghold", "zero-offload", "zero-infinity"]
OTHERS = ["megatron-lm", "l2l", "fsdp-offload", "torchao-offload"]


def test_what_is_recorded_is_not_called_again(played, tmp_path, capsys):
    _, methods = played(*ONE, "--only", "stronghold")
    assert methods == ["megatron-lm", "stronghold", "stronghold"] * 2
    assert "4 of 4 calls to make" in capsys.readouterr().out
    _, methods = played(*ONE)
    prepared = ["zero-offload", "zero-infinity", "zero-infinity-nvme"]
    assert methods == [
        *("megatron-lm", prepared[0], "zero-offload", prepared[1], "zero-infinity"),
        *("megatron-lm", "zero-offload", "zero-infinity"),
        *(*OTHERS, "megatron-lm", prepared[2], "zero-infinity-nvme"),
    ]
    assert "8 of 12 calls to make" in capsys.readouterr().out
    assert played(*ONE)[1] == []
    assert [record["call"]["round"] for record in recorded(tmp_path)][:6] == [1, 1, 1, 2, 2, 2]
    assert {record["machine"]["commit"] for record in recorded(tmp_path)} == {"c"}
    _, methods = played(*ONE, "--only", "stronghold", "--again")
    assert methods == ["megatron-lm", "stronghold", "stronghold"] * 2
    assert played(*ONE, "--only", "stronghold", "--commit", "d")[1] == methods  # another commit has nothing yet


def test_what_fails_is_recorded_and_not_tried_again(played, tmp_path, capsys):
    code, methods = played(*ONE, "--only", "stronghold", "l2l", stronghold="CUDA out of memory. Tried", l2l="no")
    assert methods == ["megatron-lm", "stronghold", "stronghold", "megatron-lm", "l2l"]
    assert [record.get("error") for record in recorded(tmp_path)] == [
        *(None, "CUDA out of memory. Tried", "CUDA out of memory. Tried", None, "no")
    ]
    printed = capsys.readouterr().out
    assert "l2l, 4 layers, batch 2, under 1.00 MiB: failed, no" in printed
    assert code == 0
    assert played(*ONE, "--only", "stronghold", "l2l")[1] == []


def test_a_reserve_that_was_told_is_kept_to(played, tmp_path):
    too_small = "step 1 failed: CUDA out of memory. Tried to allocate 2 GiB"
    _, methods = played(*ONE, "--only", "stronghold", "--reserve", "1KiB", "--rounds", "1", stronghold=too_small)
    assert methods == ["megatron-lm", "stronghold", "stronghold"]
    assert [record["reserve"] for record in recorded(tmp_path)] == [0, 1024, 1024]


@pytest.mark.parametrize("device", ["CUDA", "HIP", "XPU"])
def test_what_a_cap_is_too_small_for_is_called_with_less_and_begins_there_the_next_time(
    load, parts, monkeypatch, tmp_path, device
):
    calls, runs = load("calls"), load("compare_runs")
    made, said = [], []

    def train(arguments, **_):
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        made.append((int(options.get("--device-memory", 0)), options.get("--micro-batch")))
        if made.count(made[-1]) == 1 and options["--method"] == "stronghold" and len(made) == 3:
            return calls.Call(
                record={"machine": {}, "summary": {"samples_per_s": 1.0}}, steps=(), reason="", wall_s=1.0
            )
        return calls.Call(record=None, steps=(), reason=f"step 1 failed: {device} out of memory", wall_s=1.0)

    monkeypatch.setattr(runs, "train", train)
    runner = runs.Runner(
        "methods", parts.Course(), out=tmp_path / "gpu.jsonl", budget=calls.Budget(60.0), timeout_s=9.0, say=said.append
    )
    setting = parts.Setting(part="methods", method="stronghold", layers=32, batch=4, cap=16 * GIB)
    for number in (1, 2):
        runner._make(number, setting)
    reserve = parts.fit(parts.Course(), setting).reserve
    reserves = [reserve, reserve * 3 // 2, reserve * 3 // 2 * 3 // 2, reserve * 3 // 2 * 3 // 2]
    assert made[:4] == [(16 * GIB - one, None) for one in reserves]
    assert recorded(tmp_path)[0]["reserve"] == reserves[2]
    made.clear()
    runner._make(1, replace(setting, method="zero-offload"))
    assert made == [(0, None), (0, "1")]
    assert "error" in recorded(tmp_path)[-1] and recorded(tmp_path)[-1]["micro_batch"] == 1


def test_what_is_refused_is_told_and_not_recorded(played, tmp_path, capsys):
    _, methods = played(*ONE, "--only", "stronghold", "zero-offload", "zero-infinity", zero_offload="no DeepSpeed")
    assert methods == [*GOALS[:3], "zero-offload", *GOALS[:3]]  # that one to prepare it
    assert {record["call"]["method"] for record in recorded(tmp_path)} == {"megatron-lm", "stronghold"}
    printed = capsys.readouterr().out
    assert "zero-infinity, 4 layers, batch 2, under 1.00 MiB: failed, no DeepSpeed" in printed
    open_goal = "at least 1.5 of DeepSpeed's best at batch 2, under 1.00 MiB"
    assert f"open: {open_goal}: there is no run of DeepSpeed's, all of which failed" in printed
    assert "zero-infinity" in played(*ONE, "--only", "zero-infinity")[1]


def test_no_call_begins_that_would_not_end_in_time(played, load, monkeypatch, tmp_path, capsys):
    now = [0.0]

    class Slow(load("calls").Budget):
        def __init__(self, total_s):
            super().__init__(total_s, clock=lambda: now[0])

        def took(self, call_s):
            now[0] += 20.0
            super().took(20.0)

    monkeypatch.setattr(load("compare"), "Budget", Slow)
    _, methods = played(*ONE, "--only", "stronghold", "--minutes", "1.5")
    assert methods == ["megatron-lm", "stronghold", "stronghold", "megatron-lm"]
    printed = capsys.readouterr().out
    assert "the time is up: 2 calls are left, and the same command goes on with them" in printed
    assert played(*ONE, "--only", "stronghold")[1] == ["megatron-lm", "stronghold", "stronghold"]


def test_a_call_that_the_time_has_cut_is_none_but_one_that_hangs_is(played, tmp_path):
    hangs = "not done after 6.00 s"
    played(*ONE, "--only", "stronghold", "--minutes", "0.1", "--timeout", "100", stronghold=hangs)
    assert [record["call"]["method"] for record in recorded(tmp_path)] == ["megatron-lm"]
    played(*ONE, "--only", "stronghold", "--minutes", "100", "--timeout", "6", stronghold=hangs)
    assert [record.get("error") for record in recorded(tmp_path)] == [None, None, hangs, hangs]


# ---- what comes of it ----


def test_ratios_are_of_the_call_before_and_the_goals_of_their_medians(played, capsys):
    code, _ = played(
        *("--part", "methods", "--caps", "16GiB", "--batches", "32", "--rounds", "2", "--updates", "deferred"),
        *("--only", "stronghold", "zero-offload", "zero-infinity"),
        megatron_lm=[10.0, 20.0],
        stronghold=[9.5, 20.0],
        zero_offload=[1.0, 6.0, 8.0],  # the first is not measured: it is prepared
        zero_infinity=[1.0, 3.0, 3.0],
    )
    printed = capsys.readouterr().out.splitlines()
    assert code == 0
    assert printed[-3:] == [
        "met: at least 0.97 of the resident run at batch 32, under 16.0 GiB: 0.975 (0.9625 to 0.9875) "
        "(stronghold, deferred)",
        "met: at least 2 of DeepSpeed's best at batch 32, under 16.0 GiB: 2.042 (1.812 to 2.271) "
        "(stronghold, deferred against zero-offload)",
        "met: correct losses: 4 settings, 0 wrong, 0 not compared",
    ]
    (line,) = [line for line in printed if line.lstrip().startswith("stronghold, deferred")]
    assert "14.75 (12.12 to 17.38)" in line and "0.975 (0.9625 to 0.9875)" in line


def test_the_best_of_deepspeed_is_not_known_before_both_are_measured(played, capsys):
    under = ("--part", "methods", "--caps", "16GiB", "--batches", "32", "--rounds", "1", "--updates", "deferred")
    goal = "at least 2 of DeepSpeed's best at batch 32, under 16.0 GiB"
    played(*under, "--only", "stronghold", "zero-infinity", stronghold=9.0, zero_infinity=3.0)
    numbers = "3 (stronghold, deferred against zero-infinity), and zero-offload not measured"
    assert f"open: {goal}: {numbers}" in capsys.readouterr().out
    played(*under, "--only", "zero-offload", zero_offload="CUDA out of memory")
    met = f"met: {goal}: 3 (stronghold, deferred against zero-infinity)\n"
    assert met in capsys.readouterr().out  # what fails is not the best
    played(*under, "--only", "zero-offload", zero_offload=[1.0, 8.0])
    assert f"MISSED: {goal}: 1.125 (stronghold, deferred against zero-offload)" in capsys.readouterr().out


def test_wrong_losses_meet_no_goal_and_end_with_a_failure(played, capsys):
    code, _ = played(
        *("--part", "methods", "--caps", "16GiB", "--batches", "32", "--rounds", "1", "--updates", "deferred"),
        *("--only", "stronghold", "zero-offload"),
        stronghold=(9.0, [3.0, 2.1]),
        zero_offload=[1.0, 6.0],
    )
    printed = capsys.readouterr().out
    assert code == 1
    assert "stronghold, deferred, 4 layers, batch 32, under 16.0 GiB: WRONG, loss 2.1000 in step 2" in printed
    assert "open: at least 0.97 of the resident run" in printed
    assert "open: at least 2 of DeepSpeed's best at batch 32, under 16.0 GiB: there is no run of stronghold" in printed
    assert "MISSED: correct losses: 3 settings, 1 wrong" in printed


def test_without_a_resident_run_nothing_is_compared(played, capsys):
    code, methods = played(*ONE, "--only", "stronghold", megatron_lm="CUDA out of memory")
    assert (code, methods) == (0, [*GOALS[:3], *GOALS[1:3]])
    printed = capsys.readouterr().out
    assert "not compared" in printed
    assert "open: correct losses: 2 settings, 0 wrong, 2 not compared" in printed


def test_where_every_run_fails_nothing_is_known_of_losses(played, capsys):
    """As on a device that the methods do not take: the losses were told to be correct."""
    failed = "device must be cpu, cuda or cuda:N (got 'soft')"
    played(*ONE, "--only", "stronghold", megatron_lm=failed, stronghold=failed)
    assert "open: correct losses: 0 settings, 0 wrong, 0 not compared" in capsys.readouterr().out


# ---- the largest ----


def test_the_largest_are_searched_for_under_the_papers_limits_while_there_is_time(
    gpu, load, monkeypatch, tmp_path, capsys
):
    now, tried = [0.0], []

    def find_largest(case, preset, place, say, *, before_trial):
        tried.append((case.number, preset.name, preset.methods, place.device, place.timeout_s))
        for _ in range(9):
            before_trial()
            now[0] += 100.0

    monkeypatch.setattr(gpu, "find_largest", find_largest)
    monkeypatch.setattr(gpu, "Budget", lambda total_s: load("calls").Budget(total_s, clock=lambda: now[0]))
    arguments = ["--part", "largest", "--only", "stronghold", "--out", str(tmp_path / "results" / "gpu.jsonl")]
    assert gpu.main(arguments) == 0
    assert tried == [(1, "h200", ("stronghold",), "cuda", 300.0)]
    assert now == [400.0]  # of 570 s: the next could take 200
    assert "the time is up: the same command goes on with the search" in capsys.readouterr().out


# ---- by itself ----


def test_deepspeed_comes_from_the_wheels_and_is_built_where_the_project_builds(gpu, monkeypatch, tmp_path):
    (tmp_path / "environment.sh").write_text(
        "stronghold_baselines() {\n"
        f'  echo "$PIP_NO_INDEX $PIP_FIND_LINKS $PYTHON $*" >{tmp_path}/asked\n'
        "  export TORCH_EXTENSIONS_DIR=/built PATH=/bin:$PATH\n"
        "}\n"
    )
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    for name in ("PATH", "TORCH_EXTENSIONS_DIR", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, gpu.os.environ.get(name, ""))  # to be put back
    said = []
    gpu.use_baselines(tmp_path / "wheels", said.append)
    assert said == []
    assert (tmp_path / "asked").read_text() == f"1 {tmp_path}/wheels {gpu.sys.executable} deepspeed ninja\n"
    assert gpu.os.environ["TORCH_EXTENSIONS_DIR"] == "/built"
    assert gpu.os.environ["PATH"].startswith("/bin:")
    assert not gpu.os.environ["PIP_NO_INDEX"]
    (tmp_path / "environment.sh").write_text("stronghold_baselines() { return 1; }\n")
    gpu.use_baselines(tmp_path / "wheels", said.append)
    assert said == [f"DeepSpeed could not be installed from {tmp_path}/wheels (see above)"]


def test_a_tiny_part_end_to_end(gpu, tmp_path, capsys):
    arguments = ["--part", "windows", "--small", "--windows", "2", "--updates", "in_backward", "--rounds", "1"]
    arguments += ["--out", str(tmp_path / "gpu.jsonl"), "--trace", str(tmp_path / "trace")]
    assert gpu.main(arguments) == 0
    resident, windowed = recorded(tmp_path)
    assert windowed["placement"]["window"] == 2
    assert windowed["losses"] == pytest.approx(resident["losses"], rel=1e-2)
    assert all(step["compute_s"] > 0 for step in windowed["steps"])
    assert [path.name for path in (tmp_path / "trace").iterdir()] == [
        "windows_stronghold_l-4_bs-2_ws-2_in_backward.timeline.json"
    ]
    assert "met: correct losses: 2 settings, 0 wrong, 0 not compared" in capsys.readouterr().out
    assert gpu.main([*arguments, "--table"]) == 0
    assert len(recorded(tmp_path)) == 2
