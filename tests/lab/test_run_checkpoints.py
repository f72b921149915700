"""A training run that stops and goes on: its losses are those of one that never stopped, and its log says so."""

from __future__ import annotations

import dataclasses
import errno
import gc
import io
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from stronghold.checkpoint.folder import step_path, steps_in
from stronghold.checkpoint.pretrained import save
from stronghold.errors import CheckpointError, StoreError
from stronghold.lab import methods, training
from stronghold.lab.models.files import load_model
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.json_lines import read_records
from stronghold.lab.records.runs import read_run
from stronghold.lab.settings import DataSettings, ModelSettings, OptimizerSettings, TrainSettings
from stronghold.lab.training import train
from stronghold.settings import OffloadSettings
from tests.lab.test_run_folder import in_another_process

SHAPE: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 2, "vocabulary": 256, "dropout": 0.1}


@pytest.fixture
def settings(tmp_path: Any) -> TrainSettings:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is followed by {number + 1}. " for number in range(400)))
    return TrainSettings(
        out=str(tmp_path / "run"),
        model=ModelSettings(**SHAPE),
        data=DataSettings(source=str(text)),
        optimizer=OptimizerSettings(lr=1e-2, warmup_steps=3, max_grad_norm=0.5, weight_decay=0.3),
        offload=OffloadSettings(window=2),
        batch=3,
        sequence=32,
        steps=9,
        seed=5,
        checkpoint_every=3,
    )


def run(settings: TrainSettings, **changes: Any) -> tuple[training.Outcome, str]:
    file = io.StringIO()
    outcome = train(dataclasses.replace(settings, **changes), console=Console(file=file, width=200))
    return outcome, file.getvalue()


def losses(out: str) -> list[tuple[int, float, float]]:
    return [(step["step"], step["loss"], step["lr"]) for step in read_run(out).steps]


def kept(out: str) -> list[int]:
    return list(steps_in(os.path.join(out, "checkpoints")))


def stop_in(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """Has ``act`` called when step ``step`` of the next training begins."""
    inputs_of, calls = methods.inputs_of, [0]

    def noted(model: Any, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            act()
        return inputs_of(model, batch)

    monkeypatch.setattr(methods, "inputs_of", noted)


def crash(monkeypatch: pytest.MonkeyPatch, settings: TrainSettings, step: int, **changes: Any) -> None:
    """Runs until ``step`` begins, which fails."""

    def fail() -> None:
        raise RuntimeError("the machine is gone")

    with monkeypatch.context() as patch:
        stop_in(patch, step, fail)
        with pytest.raises(training.TrainingError, match="the machine is gone"):
            run(settings, **changes)


@pytest.fixture
def expected(settings: TrainSettings, tmp_path: Any) -> list[tuple[int, float, float]]:
    out = str(tmp_path / "uninterrupted")
    run(settings, out=out, checkpoint_every=None)
    assert kept(out) == []
    return losses(out)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "other"),
    [
        ("fp32", {}, {"window": 1, "resident": 1}),
        ("bf16", {"states": "8bit"}, {"window": 3, "store": "disk"}),
        ("fp32", {"update": "in_backward", "max_grad_norm": None}, {"window": 1, "store": "disk"}),
    ],
)
def test_a_run_that_goes_on_has_the_losses_of_one_that_never_stopped(
    settings: TrainSettings, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, optimizer: Any, other: Any
) -> None:
    wanted = dataclasses.replace(settings, dtype=dtype, optimizer=dataclasses.replace(settings.optimizer, **optimizer))
    run(wanted, out=str(tmp_path / "whole"), save=str(tmp_path / "model"))
    assert kept(str(tmp_path / "whole")) == [6, 9], "the two newest stay"
    crash(monkeypatch, wanted, 5)
    assert kept(wanted.out) == [3]
    assert len(losses(wanted.out)) == 4
    if other.get("store") == "disk":
        other = {**other, "store": str(tmp_path / "store")}
    offload = OffloadSettings(**other)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # the random states are the checkpoint's
    outcome, shown = run(wanted, resume=True, offload=offload, save=str(tmp_path / "resumed"))
    assert "step-000003, after step 3" in shown
    assert losses(wanted.out) == losses(str(tmp_path / "whole"))
    assert outcome.summary.steps == 9
    whole, resumed = (load_model(tmp_path / name)[0].state_dict() for name in ("model", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    events = [record["event"] for record in read_records(os.path.join(wanted.out, "log.jsonl")).records]
    assert events == [
        *("start", "step", "step", "step", "checkpoint", "resume", "step", "step", "step", "checkpoint"),
        *("step", "step", "step", "checkpoint", "end"),
    ]


def test_the_logs_go_on(settings: TrainSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    wanted = dataclasses.replace(settings, log=str(tmp_path / "log.txt"))
    crash(monkeypatch, wanted, 6)
    with open(os.path.join(wanted.out, "log.jsonl"), "a") as file:
        file.write('{"event": "st')  # cut off
    time.sleep(1.1)  # TensorBoard tells which of its files is the later one by the second
    run(wanted, resume=True)
    text = (tmp_path / "log.txt").read_text()
    assert text.count("\nstep ") == 5 + 6
    assert text.count("checkpoint") > 2
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(wanted.out)
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 10))


def test_a_damaged_checkpoint_is_skipped_with_its_reason_and_replaced(
    settings: TrainSettings, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(monkeypatch, settings, 8)
    assert kept(settings.out) == [3, 6]
    damaged = os.path.join(settings.out, "checkpoints", "step-000006")
    os.truncate(os.path.join(damaged, "layer-00001.safetensors"), 1000)
    _, shown = run(settings, resume=True)
    assert f"skipped    {damaged}: the file of layers.1 must have" in shown
    assert "resume     from" in shown and "after step 3" in shown
    assert losses(settings.out) == expected
    assert kept(settings.out) == [6, 9]


def test_a_checkpoint_that_cannot_be_removed_is_told_once_and_ends_no_run(
    settings: TrainSettings, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(monkeypatch, settings, 8)
    damaged = Path(settings.out, "checkpoints", "step-000006")
    os.truncate(damaged / "layer-00001.safetensors", 1000)
    rmtree = shutil.rmtree

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:  # as of another user's
        if Path(path).name == ".step-000006.removed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        rmtree(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    _, shown = run(settings, resume=True)
    assert losses(settings.out) == expected
    assert kept(settings.out) == [6, 9]
    left = damaged.with_name(".step-000006.removed")
    assert shown.count(f"note       {left} cannot be removed: Permission denied; remove it") == 1


def test_a_folder_that_another_run_writes_is_left_alone(
    settings: TrainSettings, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removed the other's checkpoints, and both ended with an error."""
    crash(monkeypatch, settings, 5)
    before = {path: path.read_bytes() for path in Path(settings.out).rglob("*") if path.is_file()}
    with (
        in_another_process(Path(settings.out)),
        pytest.raises(ValueError, match=r"a run's folder is written by one run at a time \(got out="),
    ):
        run(settings, resume=True)
    assert {path: path.read_bytes() for path in Path(settings.out).rglob("*") if path.is_file()} == before
    run(settings, resume=True)
    assert losses(settings.out) == expected


def test_a_run_has_its_folder_while_it_trains(settings: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def look() -> None:
        code = f"from stronghold.lab.run_folder import taken\nwith taken({settings.out!r}): pass"
        found.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr)

    stop_in(monkeypatch, 2, look)
    run(settings)
    assert len(found) == 1 and "one run at a time" in found[0]


def test_none_intact_is_an_error_and_leaves_everything(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(monkeypatch, settings, 5)
    os.unlink(os.path.join(settings.out, "checkpoints", "step-000003", "manifest.json"))
    before = losses(settings.out)
    with pytest.raises(CheckpointError, match=r"got 1 in .*all damaged: .*No such file"):
        run(settings, resume=True)
    assert losses(settings.out) == before


def test_one_command_begins_and_goes_on(
    settings: TrainSettings, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a loop that starts a run again whenever it has ended."""
    crash(monkeypatch, settings, 2, resume=True)
    for step in (5, 5, 2):  # each counts from where it goes on
        crash(monkeypatch, settings, step, resume=True)
    assert losses(settings.out)[-1][0] == 7
    _, shown = run(settings, resume=True)
    assert losses(settings.out) == expected
    before = [os.stat(path).st_mtime_ns for path in steps_in(os.path.join(settings.out, "checkpoints")).values()]
    outcome, shown = run(settings, resume=True)
    assert "after step 9" in shown
    assert not outcome.interrupted and outcome.summary.steps == 9
    assert losses(settings.out) == expected
    after = [os.stat(path).st_mtime_ns for path in steps_in(os.path.join(settings.out, "checkpoints")).values()]
    assert before == after, "nothing is saved where nothing was trained"


def test_without_a_checkpoint_it_begins_and_says_so(settings: TrainSettings, expected: Any) -> None:
    _, shown = run(settings, resume=True)
    assert "yet: beginning with step 1" in shown
    assert losses(settings.out) == expected


def test_a_run_that_kept_none_is_not_overwritten(settings: TrainSettings) -> None:
    run(settings, checkpoint_every=None, steps=2)
    before = losses(settings.out)
    with pytest.raises(ValueError, match="no whole checkpoint, so that its run would be overwritten"):
        run(settings, resume=True)
    assert losses(settings.out) == before
    shutil.rmtree(settings.out)
    run(settings)
    shutil.rmtree(os.path.join(settings.out, "checkpoints"))
    with pytest.raises(ValueError, match="no whole checkpoint, so that its run would be overwritten"):
        run(settings, resume=True)


def test_a_folder_with_checkpoints_is_not_begun_in(settings: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    run(settings, steps=3)
    os.unlink(os.path.join(settings.out, "log.jsonl"))
    monkeypatch.setattr(training, "_build_model", lambda *_: pytest.fail("built"))
    with pytest.raises(ValueError, match=r"which has checkpoints\); resume it"):
        run(settings)


def test_more_steps_go_on_and_none_left_need_a_log(settings: TrainSettings) -> None:
    run(settings, steps=4)
    assert kept(settings.out) == [3, 4], "the last step is kept though none was due"
    run(settings, steps=6, resume=True)
    assert [step for step, *_ in losses(settings.out)] == [1, 2, 3, 4, 5, 6]
    os.unlink(os.path.join(settings.out, "log.jsonl"))
    with pytest.raises(ValueError, match="there must be steps left to train"):
        run(settings, steps=6, resume=True)


@pytest.mark.parametrize("steps", [20, 7])
def test_the_rates_are_those_of_the_steps_it_began_with_however_many_there_are_now(
    settings: TrainSettings, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    left_open = dataclasses.replace(settings.optimizer, warmup_steps=None)
    settings = dataclasses.replace(settings, optimizer=left_open, steps=10)
    whole = dataclasses.replace(left_open, warmup_steps=1, decay_steps=10)
    run(settings, out=str(tmp_path / "whole"), optimizer=whole, steps=steps, checkpoint_every=None)
    with monkeypatch.context() as patch:
        stop_in(patch, 5, lambda: os.kill(os.getpid(), signal.SIGINT))
        run(settings)
    assert kept(settings.out) == [3, 5]
    with pytest.raises(ValueError, match=r"got warmup_steps=2, which was 1, in .*step-000005"):
        run(settings, resume=True, steps=steps, optimizer=dataclasses.replace(left_open, warmup_steps=2))
    _, shown = run(settings, resume=True, steps=steps)
    assert ("schedule   of the 10 steps that the run began with; from there to step 20" in shown) == (steps == 20)
    assert losses(settings.out) == losses(str(tmp_path / "whole"))
    rates = [rate for _, _, rate in losses(settings.out)]
    factors = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 8)) for step in range(9)]
    assert rates == pytest.approx([1e-2, *(1e-2 * factor for factor in factors), *[1e-3] * 10][:steps])
    run(settings, resume=True, steps=steps + 1)  # the checkpoints of the run that went on know it too
    assert losses(settings.out)[-1][2] == pytest.approx(1e-3 if steps == 20 else 1e-2 * factors[6])


def test_a_checkpoint_of_an_earlier_version_names_no_horizon(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = TrainSettings.flat
    with monkeypatch.context() as patch:
        patch.setattr(TrainSettings, "flat", lambda self: {n: v for n, v in flat(self).items() if n != "decay_steps"})
        run(settings, steps=4)
    run(settings, steps=8, resume=True)
    assert [rate for *_, rate in losses(settings.out)][4:] == pytest.approx([1e-3] * 4)


def test_a_run_goes_on_compiled_only_if_it_began_so(settings: TrainSettings) -> None:
    run(settings, steps=4)
    compiled = dataclasses.replace(settings.offload, compile=True)
    with pytest.raises(ValueError, match=r"got compile=True, which was False, in .*step-000004"):
        run(settings, steps=8, resume=True, offload=compiled)


def test_a_compiled_run_goes_on_with_the_activations_that_it_began_with(settings: TrainSettings) -> None:
    graphs = {"backend": "aot_eager"}
    run(settings, steps=4, offload=OffloadSettings(window=2, activations="keep", compile=graphs))
    with pytest.raises(ValueError, match=r"got activations='recompute', which was 'keep', in .*step-000004"):
        run(settings, steps=8, resume=True, offload=OffloadSettings(window=2, activations="host", compile=graphs))


def test_all_samples_at_a_time_are_so_by_whatever_number(settings: TrainSettings, expected: Any) -> None:
    run(settings, steps=9, offload=OffloadSettings(window=2, micro_batch=4))
    assert losses(settings.out) == expected
    shutil.rmtree(os.path.join(settings.out, "checkpoints", "step-000009"))
    run(settings, resume=True, offload=OffloadSettings(window=2))
    assert losses(settings.out) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_of_the_last_step(
    settings: TrainSettings, expected: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        stop_in(patch, 5, lambda: os.kill(os.getpid(), number))
        outcome, shown = run(settings)
    assert outcome.interrupted and "interrupted after step 5 of 9" in shown
    assert kept(settings.out) == [3, 5]
    _, shown = run(settings, resume=True)
    assert "after step 5" in shown
    assert losses(settings.out) == expected
    assert kept(settings.out) == [6, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 6}, r"got seed=6, which was 5, in .*step-000003"),
        ({"batch": 2, "sequence": 16}, r"got batch=2, which was 3, sequence=16, which was 32"),
        ({"offload": OffloadSettings(window=2, micro_batch=1)}, r"got micro_batch=1, which was None, in .*step-000003"),
        ({"dtype": "bf16"}, r"got dtype='bf16', which was 'fp32'"),
        ({"model": ModelSettings(**{**SHAPE, "layers": 4})}, r"got layers=4, which was 3"),
        ({"optimizer": OptimizerSettings(lr=1e-3, betas=(0.8, 0.9))}, r"lr=0\.001.*betas=\(0\.8, 0\.9\)"),
    ],
)
def test_other_settings_are_refused_by_name(settings: TrainSettings, changes: Any, message: str) -> None:
    run(settings, steps=3)
    before = losses(settings.out)
    with pytest.raises(ValueError, match=message):
        run(settings, resume=True, **changes)
    assert losses(settings.out) == before


def test_a_stray_file_in_the_place_of_a_checkpoint_ends_no_run(settings: TrainSettings) -> None:
    """The run ended at the step that has its name."""
    run(settings, steps=3)
    step_path(settings.checkpoints_folder, 6).write_text("notes")
    _, shown = run(settings, resume=True)
    assert "after step 3" in shown and kept(settings.out) == [6, 9]


def test_the_same_files_by_other_paths_are_the_same(
    settings: TrainSettings, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run was refused that went on from another folder than it began in."""
    gpt = GPTConfig(sequence=32, **SHAPE)
    (tmp_path / "shape").mkdir()
    save(GPT(gpt), tmp_path / "shape" / "model")
    (tmp_path / "else" / "where").mkdir(parents=True)
    (tmp_path / "link").symlink_to("shape")

    def named(model: str, text: str, out: str) -> dict[str, Any]:
        return {"model": ModelSettings(path=model), "data": DataSettings(source=text), "out": out}

    monkeypatch.chdir(tmp_path)
    run(settings, steps=3, **named("shape/model", "text.txt", "run"))
    begun = losses("run")
    monkeypatch.chdir(tmp_path / "else" / "where")
    run(settings, steps=6, resume=True, **named("../../link/model", str(tmp_path / "text.txt"), "../../run"))
    assert losses("../../run")[:3] == begun and kept("../../run") == [3, 6]
    shutil.copytree(tmp_path / "shape" / "model", "model")
    with pytest.raises(ValueError, match=r"got path='model', which was '../../link/model', in .*step-000006"):
        run(settings, resume=True, **named("model", "../../text.txt", "../../run"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"got path='else/where/model', which was '../../link/model'"):
        run(settings, resume=True, **named("else/where/model", "text.txt", "run"))
    run(settings, resume=True, **named("./shape/model/", "./text.txt", "run"))
    assert kept("run") == [6, 9]


def test_a_store_knows_its_run_by_another_path(
    settings: TrainSettings, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that the store has kept is given up where an older checkpoint is chosen over it, damaged as it is."""
    monkeypatch.chdir(tmp_path)
    wanted = on_disk(tmp_path, checkpoint_every=3, data=DataSettings(source="text.txt"))
    run(settings, steps=3, out="run", **wanted)
    gc.collect()
    with open(tmp_path / "store" / "layer-00001.bin", "r+b") as file:
        file.write(b"\xff")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    wanted["data"] = DataSettings(source="../text.txt")
    _, shown = run(settings, steps=6, resume=True, out="../run", **wanted)
    assert f"skipped    {tmp_path}/store: " in shown and "step-000003, after step 3" in shown
    assert kept("../run") == [3, 6]


def test_other_data_under_the_same_name_is_refused(settings: TrainSettings) -> None:
    run(settings, steps=3)
    path = settings.data.source
    assert path is not None
    with open(path, "r+") as file:
        file.seek(3000)
        file.write("X")
    with pytest.raises(ValueError, match=r"goes on with the data it began with \(got [\d,]+ tokens with CRC-32C"):
        run(settings, resume=True)


def test_another_tokenizer_is_refused_and_the_same_elsewhere_is_not(settings: TrainSettings, tmp_path: Any) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    def written(name: str, last: str) -> DataSettings:
        # To each the whole text is one unknown word: the tokens are the same.
        words = {"<unk>": 0, "</s>": 1, last: 2}
        Tokenizer(WordLevel(words, unk_token="<unk>")).save(str(tmp_path / name))
        return DataSettings(source=str(tmp_path / "texts"), tokenizer=str(tmp_path / name))

    (tmp_path / "texts").mkdir()
    for number in range(100):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}")
    run(settings, steps=3, data=written("one.json", "a"))
    with pytest.raises(
        ValueError, match=r"the tokenizer it began with \(got '.*two.json', 3 tokens .* and 1; 3 tokens"
    ):
        run(settings, resume=True, data=written("two.json", "b"))
    run(settings, resume=True, data=written("moved.json", "a"))
    assert [step for step, *_ in losses(settings.out)] == list(range(1, 10))


def test_fp32_states_are_not_resumed_in_eight_bits_but_the_other_way(settings: TrainSettings) -> None:
    eight = dataclasses.replace(settings.optimizer, states="8bit")
    run(settings, steps=3)
    with pytest.raises(CheckpointError, match="do not go into eight bits"):
        run(settings, resume=True, optimizer=eight)
    shutil.rmtree(settings.out)
    run(settings, steps=3, optimizer=eight)
    run(settings, resume=True)
    assert [step for step, *_ in losses(settings.out)] == list(range(1, 10))


def test_a_checkpoint_of_another_program_is_refused(settings: TrainSettings) -> None:
    from tests.checkpoint.training import of_kind

    other, _ = of_kind()
    other.save(os.path.join(settings.out, "checkpoints", "step-000001"), extra={"mine": 1})
    with pytest.raises(CheckpointError, match="which another program saved"):
        run(settings, resume=True)


def test_a_full_disk_ends_the_run_and_the_last_checkpoint_goes_on(
    settings: TrainSettings, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.pwrite, [0]

    def full(file: int, data: Any, offset: int) -> int:
        if os.path.basename(os.path.dirname(os.readlink(f"/proc/self/fd/{file}"))) == ".step-000006.partial":
            calls[0] += 1
            if calls[0] > 5:
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        file = io.StringIO()
        with pytest.raises(OSError, match="No space left"):
            train(settings, console=Console(file=file, width=200))
    assert os.listdir(os.path.join(settings.out, "checkpoints")) == ["step-000003"]
    told = f"kept       {settings.out}/checkpoints/step-000003; to go on: the same command with --resume --out "
    assert f"{told}{settings.out}\n" in file.getvalue()
    run(settings, resume=True)
    assert losses(settings.out) == expected


def test_a_method_that_does_not_offload_is_refused_before_it_trains(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stronghold.lab.methods import Prepared

    class Plain:
        def prepare(self, model: Any, settings: Any, weights: Any = None) -> Prepared:
            optimizer = torch.optim.AdamW(model.parameters())
            return Prepared(model=model, optimizer=optimizer, report=lambda: None, device=torch.device("cpu"))  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(training, "find_method", lambda name: Plain())
    with pytest.raises(RuntimeError, match="of an offloaded model"):
        run(settings)
    assert not os.path.exists(settings.out)


def test_the_log_tells_each_checkpoint(settings: TrainSettings) -> None:
    run(settings, keep_checkpoints=3)
    records = read_records(os.path.join(settings.out, "log.jsonl")).records
    saved = [line for line in records if line["event"] == "checkpoint"]
    assert [line["step"] for line in saved] == [3, 6, 9] == kept(settings.out)
    assert all(line["save_s"] > 0 and os.path.isdir(line["path"]) for line in saved)


def stopped(monkeypatch: pytest.MonkeyPatch, settings: TrainSettings, step: int, **changes: Any) -> str:
    """Runs until Ctrl-C in ``step``; returns what was shown."""
    with monkeypatch.context() as patch:
        stop_in(patch, step, lambda: os.kill(os.getpid(), signal.SIGINT))
        outcome, shown = run(settings, **changes)
    assert outcome.interrupted
    gc.collect()  # the store is given up with its model
    return shown


def on_disk(tmp_path: Any, **more: Any) -> dict[str, Any]:
    store = OffloadSettings(window=2, store=str(tmp_path / "store"))
    return {"offload": store, "keep_store": True, "checkpoint_every": None, **more}


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_a_run_that_its_store_has_kept_goes_on_there(
    settings: TrainSettings, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    optimizer = dataclasses.replace(settings.optimizer, states=states)
    run(settings, out=str(tmp_path / "whole"), checkpoint_every=None, optimizer=optimizer)
    wanted = on_disk(tmp_path, optimizer=optimizer)
    shown = stopped(monkeypatch, settings, 4, **wanted)
    line = next(line for line in shown.splitlines() if line.startswith("kept"))
    assert re.fullmatch(rf"kept +{tmp_path}/store: the run after step 4, .*iB; to go on: --resume --out .*", line)
    with pytest.raises(ValueError, match=r"store's folder must not hold another run .*resume it \(--resume"):
        run(settings, **{**wanted, "out": str(tmp_path / "other")})
    assert not os.path.exists(tmp_path / "other")
    _, shown = run(settings, resume=True, **wanted)
    assert f"from {tmp_path}/store, after step 4" in shown
    assert f"note       {tmp_path}/store is no checkpoint any more once its first layer is updated" in shown
    assert losses(settings.out) == losses(str(tmp_path / "whole"))
    gc.collect()
    _, shown = run(settings, resume=True, **{**wanted, "steps": 12, "checkpoint_every": 5})
    assert f"from {tmp_path}/store, after step 9" in shown and "no checkpoint any more" not in shown


@pytest.mark.parametrize("end", ["interrupted", "last step", "last step, to save elsewhere"])
def test_where_the_store_cannot_keep_the_run_the_model_is_saved_first(
    settings: TrainSettings, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The store's disk is full when what lies beside the layers' files is written; the model's has room."""
    steps = 4 if end == "interrupted" else 9
    begun = dataclasses.replace(settings.optimizer, decay_steps=9)
    ended = {"steps": steps, "optimizer": begun, "save": str(tmp_path / "expected")}
    run(settings, out=str(tmp_path / "whole"), checkpoint_every=None, **ended)
    folder = str(tmp_path / "elsewhere") if "elsewhere" in end else os.path.join(settings.out, "model")
    write, store = os.pwrite, str(tmp_path / "store")

    def full(file: int, data: Any, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{file}")
        if os.path.dirname(path) == store and path.endswith(".safetensors.partial"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    if end == "interrupted":
        stop_in(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
    file = io.StringIO()
    save = folder if "elsewhere" in end else None
    wanted = dataclasses.replace(settings, **on_disk(tmp_path, optimizer=begun, save=save))
    with pytest.raises(OSError, match="No space left"):
        train(wanted, console=Console(file=file, width=200))
    assert re.search(rf"^not kept +{store}: .*No space left on device", file.getvalue(), re.MULTILINE)
    assert f"model saved in {folder}" in file.getvalue()
    there, expected = load_file(f"{folder}/model.safetensors"), load_file(tmp_path / "expected" / "model.safetensors")
    assert there.keys() == expected.keys()
    assert all(torch.equal(there[name], expected[name]) for name in expected)
    gc.collect()
    assert not os.path.exists(store)


def test_a_store_without_room_to_keep_the_run_is_refused_before_the_first_step(
    settings: TrainSettings, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on disk takes 1.7 MiB of the 2, and the embedding, which is in memory, half a MiB more."""
    wanted = on_disk(tmp_path, model=ModelSettings(**SHAPE | {"vocabulary": 4096}))
    real = shutil.disk_usage

    def small(path: Any) -> Any:
        taken = sum(os.stat(entry).st_blocks * 512 for entry in os.scandir(path))
        return real(path)._replace(free=2 * 2**20 - taken)

    monkeypatch.setattr(shutil, "disk_usage", small)
    stop_in(monkeypatch, 1, lambda: pytest.fail("it has begun"))
    with pytest.raises(StoreError, match=r"beside the units' files takes 5\d\d KiB at .*/store, where \d+ KiB"):
        run(settings, **wanted)
    gc.collect()
    assert not os.path.exists(tmp_path / "store")


def test_the_newest_intact_one_wins_wherever_it_is(
    settings: TrainSettings, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings, out=str(tmp_path / "whole"), checkpoint_every=None)
    wanted = on_disk(tmp_path, checkpoint_every=3)
    stopped(monkeypatch, settings, 5, **wanted)
    for path in [path for step, path in steps_in(os.path.join(settings.out, "checkpoints")).items() if step == 5]:
        shutil.rmtree(path)
    kept, saved = tmp_path / "store-5", tmp_path / "run-5"
    shutil.copytree(tmp_path / "store", kept)
    shutil.copytree(settings.out, saved)
    _, shown = run(settings, resume=True, **wanted)
    assert f"from {tmp_path}/store, after step 5" in shown and "skipped" not in shown
    assert losses(settings.out) == losses(str(tmp_path / "whole"))
    gc.collect()
    # A damaged one is passed over, told, and overwritten.
    for path, before in ((tmp_path / "store", kept), (settings.out, saved)):
        shutil.rmtree(path)
        shutil.copytree(before, path)
    with open(tmp_path / "store" / "layer-00001.bin", "r+b") as file:
        file.write(b"\xff")
    _, shown = run(settings, resume=True, **wanted)
    assert f"skipped    {tmp_path}/store: the file of " in shown and "is damaged" in shown
    assert "step-000003, after step 3" in shown
    assert losses(settings.out) == losses(str(tmp_path / "whole"))
    gc.collect()
    # An older one too.
    shutil.rmtree(tmp_path / "store")
    shutil.copytree(kept, tmp_path / "store")
    _, shown = run(settings, resume=True, **{**wanted, "steps": 10})
    assert f"skipped    {tmp_path}/store: it is of step 5, and another of step 9" in shown
    assert "step-000009, after step 9" in shown


def test_a_store_that_another_run_has_kept_is_left_alone(settings: TrainSettings, tmp_path: Any) -> None:
    wanted = on_disk(tmp_path)
    run(settings, **{**wanted, "out": str(tmp_path / "other"), "steps": 2})
    gc.collect()
    run(settings, steps=3)
    before = (tmp_path / "store" / "manifest.json").read_bytes()
    with pytest.raises(StoreError, match="holds a run after step 2, which this one would overwrite"):
        run(settings, resume=True, **{**wanted, "steps": 5})
    assert (tmp_path / "store" / "manifest.json").read_bytes() == before
