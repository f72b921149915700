"""A run that was stopped, or killed while it wrote, goes on to the bit; what it cannot go on from is told."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from stronghold.engine.planning import auto
from stronghold.errors import BudgetError, CheckpointError
from stronghold.lab.command import INTERRUPTED
from stronghold.lab.finetuning import run as runner
from stronghold.lab.finetuning import trainer, watch
from stronghold.lab.finetuning.checkpoints import SEAL, prune
from stronghold.lab.finetuning.settings import BY_EVALUATION, CourseSettings, FinetuneSettings
from stronghold.lab.training import TrainingError
from stronghold.settings import OffloadSettings
from tests.crossed import crossed
from tests.lab.finetuning import runs, small
from tests.lab.finetuning.runs import LORA

CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, bf16": {"dtype": "bf16"},
    "all weights, 8-bit moments, accumulated": {
        "course": CourseSettings(lr=3e-3, states="8bit", scheduler="cosine", warmup=2),
        "accumulate": 2,
        "epochs": 4.0,
    },
    "adapters": {"adapters": LORA},
    "adapters on a base in bf16": {"adapters": LORA, "dtype": "bf16"},
    "adapters on a base in four bits": {"adapters": replace(LORA, quantize="nf4"), "dtype": "bf16"},
}


STOPPED = {2: "in the first epoch", 7: "in the second"}


def weights(wanted: FinetuneSettings) -> dict[str, torch.Tensor]:
    """Returns what was saved."""
    model: Any = AutoModelForCausalLM.from_pretrained(wanted.model if wanted.adapters else wanted.save)
    if wanted.adapters:
        model = peft.PeftModel.from_pretrained(model, wanted.save)
    return dict(model.named_parameters())


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the process get a SIGINT in the midst of the step after ``step``."""
    begins = watch.Watch.on_step_begin

    def begin(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        begins(self, args, state, control, **more)
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(watch.Watch, "on_step_begin", begin)


@pytest.mark.parametrize(
    ("name", "stopped"), crossed(CASES, STOPPED, together=1), ids=lambda one: STOPPED.get(one, one)
)
def test_after_an_interrupt_it_goes_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stopped: int
) -> None:
    whole = runs.settings(tmp_path, **CASES[name])
    runs.run(whole)
    expected = runs.losses(whole)
    assert len(set(expected)) == len(expected) == 12

    wanted = replace(whole, out=str(tmp_path / "stopped"), save=str(tmp_path / "stopped-model"))
    with monkeypatch.context() as patch:
        stop_after(stopped - 1, patch)
        outcome = runner.finetune(wanted)
    assert outcome.interrupted
    assert outcome.exit_code == INTERRUPTED
    assert outcome.saved is None
    assert runs.losses(wanted) == expected[:stopped]
    folder = tmp_path / "stopped" / f"checkpoint-{stopped}"
    assert (folder / SEAL).is_file()
    offload = OffloadSettings(window=2, store=str(tmp_path / "store"))
    resumed = replace(wanted, resume=True, offload=offload)
    shown = runs.run(resumed)
    assert f"resume from {folder}, after step {stopped}" in " ".join(shown.split())
    assert "12 of " in shown
    assert f"{stopped} of them done" in shown
    assert runs.losses(wanted) == expected
    found = weights(wanted)
    for key, value in weights(whole).items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", [*BY_EVALUATION, "linear"])
def test_an_evaluation_that_is_due_is_done_before_an_interrupt_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # No loss is better by ten: each evaluation has the scheduler halve the rate.
    halving = {"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs", "min_lr": 0.0}
    course = CourseSettings(lr=3e-3, scheduler=name, scheduler_options={} if name == "linear" else halving)
    whole = runs.settings(tmp_path)
    whole = replace(whole, course=course, data=replace(whole.data, held_out=2), eval_every=2)  # 10 steps
    runs.run(whole)
    rates = [record["lr"] for record in runs.records(whole, "step")]
    if name != "linear":
        assert len(set(rates)) == 4, "the rate follows the evaluations"
    expected = [(record["step"], record["loss"]) for record in runs.records(whole, "evaluation")]
    assert [step for step, _ in expected] == [2, 4, 6, 8, 10]

    wanted = replace(whole, out=str(tmp_path / "stopped"), save=str(tmp_path / "stopped-model"))
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        assert runner.finetune(wanted).interrupted
    resumed = replace(wanted, resume=True)
    with monkeypatch.context() as patch:
        stop_after(9, patch)  # in the last step of all
        assert not runner.finetune(resumed).interrupted
    assert [record["lr"] for record in runs.records(wanted, "step")] == rates
    assert runs.losses(wanted) == runs.losses(whole)
    assert [(record["step"], record["loss"]) for record in runs.records(wanted, "evaluation")] == expected


def test_ctrl_c_while_the_model_is_saved_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runs.settings(tmp_path)
    runs.run(whole)
    wanted = replace(whole, out=str(tmp_path / "late"), save=str(tmp_path / "late-model"))
    save_model = trainer.save_model

    def save(model: Any, folder: Any, tokenizer: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        save_model(model, folder, tokenizer)

    monkeypatch.setattr(trainer, "save_model", save)
    try:
        outcome = runner.finetune(wanted)
    except KeyboardInterrupt:
        pytest.fail("the signal ended the run before its model was saved")
    assert not outcome.interrupted
    assert outcome.exit_code == 0
    assert outcome.saved == wanted.save
    assert runs.records(wanted, "end")[0]["saved"] == wanted.save
    found = weights(wanted)
    for key, value in weights(whole).items():
        assert torch.equal(found[key], value), key


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = runs.settings(tmp_path)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        shown = runs.run(wanted)
    assert f"interrupted after step 4 of 12; kept in {wanted.out}/checkpoint-4" in shown
    assert f"to go on: the same command with --resume --out {wanted.out}" in shown
    assert not Path(wanted.save).exists()


def test_checkpoints_come_when_they_are_due_and_the_newest_stay(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path, checkpoint_every=5)
    runs.run(wanted)
    assert sorted(path.name for path in Path(wanted.out).glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-12"]
    assert [Path(record["path"]).name for record in runs.records(wanted, "checkpoint")] == [
        "checkpoint-5",
        "checkpoint-10",
        "checkpoint-12",
    ]


@pytest.mark.parametrize("adapters", [None, LORA], ids=["all weights", "adapters"])
def test_a_checkpoint_is_a_model_to_load(tmp_path: Path, adapters: Any) -> None:
    wanted = runs.settings(tmp_path, checkpoint_every=12, adapters=adapters)
    runs.run(wanted)
    at = replace(wanted, save=str(tmp_path / "run" / "checkpoint-12"))
    found = weights(at)
    assert all(torch.equal(found[key], value) for key, value in weights(wanted).items())
    assert AutoTokenizer.from_pretrained(at.save).chat_template
    names = {path.name for path in Path(at.save).iterdir()}
    assert ("optimizer.pt" in names) == (adapters is not None)
    assert ("stronghold" in names) == (adapters is None)


@pytest.mark.parametrize("adapters", [None, LORA], ids=["all weights", "adapters with dropout"])
def test_it_goes_on_at_the_intervals_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: Any
) -> None:
    wanted = runs.settings(tmp_path, checkpoint_every=3, adapters=adapters)
    wanted = replace(wanted, data=replace(wanted.data, held_out=2), eval_every=2)  # 10 steps
    runs.run(wanted)
    other = replace(wanted, out=str(tmp_path / "other"), save=str(tmp_path / "other-model"))
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        runs.run(replace(other, eval_every=4, checkpoint_every=4))
    runs.run(replace(other, resume=True))
    assert runs.losses(other) == runs.losses(wanted)
    assert [record["step"] for record in runs.records(other, "checkpoint")] == [4, 5, 6, 9, 10]
    evaluations = {record["step"]: record["loss"] for record in runs.records(other, "evaluation")}
    expected = {record["step"]: record["loss"] for record in runs.records(wanted, "evaluation")}
    assert [*evaluations] == [4, 6, 8, 10]
    assert [*expected] == [2, 4, 6, 8, 10]
    assert evaluations.items() <= expected.items()


def damaged(folder: Path, how: str) -> None:
    if how == "killed while it wrote":
        (folder / SEAL).unlink()
    elif how == "a byte of the weights":
        file = next(iter(sorted(folder.rglob("stronghold/layer*"))), folder / "adapter_model.safetensors")
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    elif how == "its states are gone":
        (folder / "trainer_state.json").unlink()
    else:
        shutil.rmtree(folder / "stronghold", ignore_errors=True)
        (folder / "optimizer.pt").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "how", ["killed while it wrote", "a byte of the weights", "its states are gone", "a part is gone"]
)
@pytest.mark.parametrize("adapters", [None, LORA], ids=["all weights", "adapters"])
def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path, how: str, adapters: Any) -> None:
    wanted = runs.settings(tmp_path, checkpoint_every=4, adapters=adapters, keep_checkpoints=3)
    runs.run(wanted)
    expected = runs.losses(wanted)
    damaged(Path(wanted.out) / "checkpoint-12", how)
    shown = runs.run(replace(wanted, resume=True))
    assert f"skipped    {wanted.out}/checkpoint-12: " in shown
    assert "after step 8" in shown
    assert runs.losses(wanted) == expected
    assert (Path(wanted.out) / "checkpoint-12" / SEAL).is_file()
    for number in (4, 8, 12):
        damaged(Path(wanted.out) / f"checkpoint-{number}", how)
    kind, told = CheckpointError, r"from a whole checkpoint \(got 3 in .*, none of them whole: "
    if how == "killed while it wrote":  # none is there, and the log is one of a complete run
        kind, told = ValueError, "no whole checkpoint, so that its run would be overwritten"
    before = runs.records(wanted, "step")
    with pytest.raises(kind, match=told):
        runs.run(replace(wanted, resume=True))
    assert runs.records(wanted, "step") == before


def refused(wanted: FinetuneSettings) -> str:
    with pytest.raises(ValueError) as told:
        runs.run(replace(wanted, resume=True))
    return str(told.value)


def test_other_settings_or_data_are_refused(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path, checkpoint_every=12)
    runs.run(wanted)
    assert "(got epochs=3.0, which was 2.0, in " in refused(replace(wanted, epochs=3.0))
    course = replace(wanted.course, lr=1.0)
    assert "(got batch=3, which was 2, lr=1.0, which was 0.003, in" in refused(replace(wanted, batch=3, course=course))
    assert "adapters=True, which was False" in refused(replace(wanted, adapters=LORA))
    data = Path(wanted.data.data)
    lines = data.read_text().splitlines()
    data.write_text("\n".join(lines[::-1]))
    assert "a run goes on with the data it began with (got rows with CRC-32 " in refused(wanted)
    data.write_text("\n".join(lines))
    (tmp_path / "moved").mkdir()
    shutil.copy(data, tmp_path / "moved" / "data.jsonl")
    with pytest.raises(ValueError, match="must not hold another run"):
        runs.run(wanted)
    with pytest.raises(ValueError, match="which has checkpoints"):
        (Path(wanted.out) / "log.jsonl").unlink()
        runs.run(wanted)


def test_the_same_files_by_other_paths_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run was refused that went on from another folder than it began in."""
    wanted = runs.settings(tmp_path, checkpoint_every=6)

    def named(place: str, model: str = "model") -> FinetuneSettings:
        data = replace(wanted.data, data=f"{place}data.jsonl")
        run, folder = f"{place}run", f"{place}{model}"
        return replace(wanted, model=folder, data=data, out=run, save=f"{run}/model")

    monkeypatch.chdir(tmp_path)
    runs.run(replace(named(""), steps=12))
    (tmp_path / "else" / "where").mkdir(parents=True)
    (tmp_path / "link").symlink_to("model")
    shutil.copytree("model", "copied")
    whole = runs.losses(named(""))
    for path in (tmp_path / "run" / "checkpoint-12", tmp_path / "run" / "model"):
        shutil.rmtree(path)
    monkeypatch.chdir(tmp_path / "else" / "where")
    runs.run(replace(named("../../", "link"), steps=12, resume=True))
    assert runs.losses(named("../../")) == whole
    told = refused(replace(named("../../", "copied"), steps=12))
    assert "(got model='../../copied', which was '../../link', in " in told


def test_to_resume_where_there_is_none_yet_begins(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path, resume=True)
    shown = runs.run(wanted)
    assert f"no whole checkpoint in {wanted.out} yet: beginning with step 1" in shown
    assert len(runs.losses(wanted)) == 12


def killed(wanted: FinetuneSettings, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs until the step after ``step`` begins, which fails, and leaves what a killed process leaves."""

    def fail(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            raise RuntimeError("the machine is gone")

    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="the machine is gone"):
        patch.setattr(watch.Watch, "on_step_begin", fail)
        runs.run(wanted)


@pytest.mark.parametrize("adapters", [None, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("step", [2, 4], ids=["before its first checkpoint", "while it wrote its first checkpoint"])
def test_a_run_that_was_killed_without_a_whole_checkpoint_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, adapters: Any
) -> None:
    whole = runs.settings(tmp_path, adapters=adapters)
    runs.run(whole)
    wanted = replace(whole, out=str(tmp_path / "killed"), save=str(tmp_path / "killed-model"), checkpoint_every=4)
    killed(wanted, step, monkeypatch)
    assert runs.losses(wanted) == runs.losses(whole)[:step]
    folder = Path(wanted.out) / "checkpoint-4"
    assert folder.exists() == (step == 4)
    if step == 4:
        damaged(folder, "killed while it wrote")
    shown = runs.run(replace(wanted, resume=True))
    assert ("it was not written to its end" in shown) == (step == 4)
    assert f"no whole checkpoint in {wanted.out} yet: beginning with step 1" in shown
    assert runs.losses(wanted) == runs.losses(whole)
    assert [record["step"] for record in runs.records(wanted, "checkpoint")] == [4, 8, 12]
    assert {path.name for path in Path(wanted.out).glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-12"}
    found = weights(wanted)
    for key, value in weights(whole).items():
        assert torch.equal(found[key], value), key


def test_a_run_that_kept_no_checkpoints_is_not_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = runs.settings(tmp_path)
    killed(wanted, 2, monkeypatch)
    before = runs.losses(wanted)
    assert "no whole checkpoint, so that its run would be overwritten" in refused(wanted)
    assert runs.losses(wanted) == before


def test_a_seal_that_cannot_be_read_is_no_seal(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path, checkpoint_every=12)
    runs.run(wanted)
    seal = Path(wanted.out) / "checkpoint-12" / SEAL
    told = json.loads(seal.read_text())
    assert told["step"] == 12
    seal.write_text(json.dumps({"step": 12}))
    with pytest.raises(CheckpointError, match=r"its finetune\.json cannot be read"):
        runs.run(replace(wanted, resume=True))


def test_steps_that_the_log_has_lost_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = stopped(runs.settings(tmp_path, steps=4), monkeypatch)
    log = Path(wanted.out) / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    assert f"note       {log} has lost the records of step 2, whose training the checkpoint has" in runs.run(wanted)


def test_a_mixture_goes_on_in_the_parts_that_it_was_cut_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.folder(tmp_path / "model", "mixture")
    tight = OffloadSettings(window=1, device_memory="20KiB")
    with pytest.raises(BudgetError):
        runner.finetune(runs.settings(tmp_path, offload=tight))
    whole = runs.settings(tmp_path, offload=tight, experts_per_part="auto")
    assert "experts in a part" in runs.run(whole)
    wanted = replace(whole, out=str(tmp_path / "stopped"), save=str(tmp_path / "stopped-model"))
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        runner.finetune(wanted)
    roomy = replace(wanted, offload=OffloadSettings(window=2), resume=True)
    runs.run(roomy)
    assert runs.losses(roomy) == runs.losses(whole)
    for one in (whole, roomy):
        assert runs.records(one, "start")[0]["settings"]["experts_per_part"] == 2
    with pytest.raises(ValueError, match="experts_per_part=1, which was 2"):
        runner.finetune(replace(roomy, experts_per_part=1))


def stopped(whole: FinetuneSettings, monkeypatch: pytest.MonkeyPatch) -> FinetuneSettings:
    """Stops the run after two steps, in a folder of its own, and returns what goes on with it."""
    wanted = replace(whole, out=whole.out + "-stopped", save=whole.save + "-stopped")
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        assert runner.finetune(wanted).interrupted
    return replace(wanted, resume=True)


PLANNED: dict[str, Any] = {"plans": True, "offload": OffloadSettings(activations="auto", resident="auto")}


@pytest.mark.parametrize(("chosen", "other"), [(2, None), (None, 2)], ids=["parts of a batch", "the whole"])
def test_a_run_goes_on_with_the_micro_batch_that_was_planned_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: int | None, other: int | None
) -> None:
    # Dropout draws for each micro-batch: with another number of them the losses would be others.
    plain = runs.settings(
        tmp_path, adapters=LORA, batch=4, steps=4, offload=OffloadSettings(window=1, micro_batch=chosen)
    )
    runs.run(plain)
    with monkeypatch.context() as patch:
        patch.setattr(auto, "micro_batches", lambda *_: (chosen,))
        wanted = stopped(replace(plain, **PLANNED), monkeypatch)
    assert runs.records(wanted, "start")[0]["settings"]["micro_batch"] == chosen
    with monkeypatch.context() as patch:
        patch.setattr(auto, "micro_batches", lambda asked, *_: (asked if isinstance(asked, int) else other,))
        runs.run(wanted)
    assert runs.losses(wanted) == runs.losses(plain)
    with pytest.raises(ValueError, match=f"got micro_batch=1, which was {chosen}, in "):
        runs.run(replace(wanted, plans=False, offload=OffloadSettings(window=1, micro_batch=1)))


def test_compiled_layers_go_on_with_the_activations_that_they_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = {"backend": "aot_eager", "dynamic": True}
    first = runs.settings(tmp_path, steps=4, offload=OffloadSettings(window=1, activations="keep", compile=graphs))
    then = replace(first, plans=True, offload=OffloadSettings(activations="auto", compile=graphs))
    stopped(first, monkeypatch)
    found = replace(then, out=first.out + "-stopped", save=first.save + "-stopped", resume=True)
    runs.run(found)
    assert runs.records(found, "resume")[0]["settings"]["activations"] == "keep"
    with pytest.raises(ValueError, match="got activations='recompute', which was 'keep', in "):
        runs.run(replace(found, offload=OffloadSettings(window=1, compile=graphs)))


def test_what_a_killed_process_wrote_of_a_checkpoint_goes_before_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kill while one was written left a model's weights in a hidden folder, for good."""
    wanted = stopped(runs.settings(tmp_path, steps=4), monkeypatch)
    out = Path(wanted.out)
    for name in (".checkpoint-3.partial", ".checkpoint-1.partial", ".checkpoint-1.removed", "checkpoint-of", ".mine"):
        (out / name).mkdir()
        (out / name / "model.safetensors").write_bytes(b"weights")
    seen: list[set[str]] = []
    save_model = trainer.save_model

    def save(model: Any, folder: Any, tokenizer: Any) -> None:
        seen.append({path.name for path in out.iterdir() if path.is_dir()})
        save_model(model, folder, tokenizer)

    monkeypatch.setattr(trainer, "save_model", save)
    runs.run(replace(wanted, checkpoint_every=4))
    assert seen[0] == {"checkpoint-2", "checkpoint-of", ".mine"}
    assert {path.name for path in out.iterdir() if path.is_dir()} == seen[0] | {"checkpoint-4"}


@pytest.mark.parametrize("step", [4, 6])
def test_a_stray_file_that_is_named_as_a_checkpoint_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The run ended at its next checkpoint."""
    wanted = stopped(runs.settings(tmp_path, steps=6, checkpoint_every=4), monkeypatch)
    (Path(wanted.out) / f"checkpoint-{step}").write_text("notes")
    runs.run(wanted)
    assert {path.name for path in Path(wanted.out).glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}


def test_damaged_checkpoints_do_not_count_among_the_newest_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = runs.settings(tmp_path, checkpoint_every=4, keep_checkpoints=3)
    runs.run(wanted)
    expected = runs.losses(wanted)
    damaged(Path(wanted.out) / "checkpoint-12", "a byte of the weights")
    damaged(Path(wanted.out) / "checkpoint-8", "a byte of the weights")
    one = replace(wanted, resume=True, checkpoint_every=3, keep_checkpoints=1)
    with monkeypatch.context() as patch:
        stop_after(6, patch)  # behind checkpoints after steps 6 and, for it is stopped, 7
        shown = runs.run(one)
    assert "after step 4" in shown
    kept = {path.name for path in Path(wanted.out).glob("checkpoint-*")}
    assert kept == {"checkpoint-7", "checkpoint-8", "checkpoint-12"}, "what is later stays until the run is there"
    assert [record["step"] for record in runs.records(wanted, "checkpoint")] == [4, 6, 7]
    assert "after step 7" in runs.run(one)
    assert runs.losses(wanted) == expected
    assert {path.name for path in Path(wanted.out).glob("checkpoint-*")} == {"checkpoint-12"}


def test_pruning_counts_what_is_whole_up_to_the_step(tmp_path: Path) -> None:
    for step in (5, 10, 20, 30, 40, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step != 30:
            (tmp_path / f"checkpoint-{step}" / SEAL).touch()
    prune(tmp_path, 40, 2, {tmp_path / "checkpoint-20"})
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-40", "checkpoint-100"}


def test_what_cannot_be_pruned_is_told_and_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (5, 10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / SEAL).touch()
    rmtree = shutil.rmtree

    def refuse(path: Path) -> None:  # as where another machine has a file of it open on a network's disk
        if path.name == "checkpoint-5":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert prune(tmp_path, 20, 1) == {tmp_path / "checkpoint-5": "Device or resource busy"}
    assert not (tmp_path / "checkpoint-5" / SEAL).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-5", "checkpoint-20"}


def test_on_a_full_disk_it_says_which_checkpoint_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line told of a file in the checkpoint that was not to be, and nothing of the one before."""
    whole = runs.settings(tmp_path)
    runs.run(whole)
    wanted = replace(whole, out=str(tmp_path / "out"), save=str(tmp_path / "saved"), checkpoint_every=4)
    write, shown = os.pwrite, io.StringIO()

    def full(file: int, data: Any, offset: int) -> int:
        if "/checkpoint-8/" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            runner.finetune(wanted, console=Console(file=shown, width=120))
    told = f"kept       {wanted.out}/checkpoint-4; to go on: the same command with --resume --out {wanted.out}\n"
    assert told in shown.getvalue()
    runs.run(replace(wanted, resume=True))
    assert runs.losses(wanted) == runs.losses(whole)
