"""Runs learn what TRL's SFTTrainer learns in memory, and save what from_pretrained and PEFT load."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import datasets
import peft
import pytest
import torch
import transformers
import trl
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from stronghold.lab.finetuning import trainer as trainers
from stronghold.lab.finetuning.settings import SCHEDULERS, CourseSettings, FinetuneSettings, RowSettings
from stronghold.lab.records.runs import WARM_UP_STEPS
from stronghold.lab.training import TrainingError
from stronghold.settings import OffloadSettings
from stronghold.units import format_count, format_seconds
from tests.lab.finetuning import runs, small
from tests.lab.finetuning.runs import LORA, PAIRS

TO_ROUNDING = 1e-5
"""Our AdamW computes in fp32 with fused multiply-adds, which torch's does not: the last bits of its updates differ."""


def theirs(trainer: Any, wanted: FinetuneSettings) -> torch.optim.Optimizer:
    """Returns torch's AdamW over the parameters of ``trainer``, as Trainer itself would make it."""
    course = wanted.course
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": course.weight_decay},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=course.lr, betas=course.betas, eps=course.eps)


def of_trl(
    wanted: FinetuneSettings, rows: list[Any], model: nn.Module | None = None, **more: Any
) -> tuple[list[float], nn.Module]:
    """Returns the losses and the model of TRL's own trainer on ``rows``, all of it in memory.

    By default it has the model of ``wanted`` in fp32, and the adapters of ``wanted`` if there are to be some.
    """
    course = wanted.course
    config = trl.SFTConfig(
        wanted.out + "-trl",
        per_device_train_batch_size=wanted.batch,
        gradient_accumulation_steps=wanted.accumulate,
        num_train_epochs=wanted.epochs,
        lr_scheduler_type=course.scheduler,
        learning_rate=course.lr,
        warmup_steps=course.warmup,
        max_grad_norm=course.max_grad_norm or 0.0,
        max_length=wanted.sequence,
        seed=wanted.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        packing=wanted.data.packing,
        **more,
    )
    lora = (wanted.adapters if model is None else None) and peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=wanted.adapters.rank,
        lora_alpha=wanted.adapters.alpha,  # type: ignore[arg-type]
        lora_dropout=wanted.adapters.lora_dropout,
        target_modules="all-linear" if wanted.adapters.targets == ("all-linear",) else [*wanted.adapters.targets],
    )
    trainer = trl.SFTTrainer(
        model=model or AutoModelForCausalLM.from_pretrained(wanted.model, dtype=torch.float32),
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(wanted.model),
        peft_config=lora,
    )
    trainer.optimizer = theirs(trainer, wanted)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model


def assert_alike(model: nn.Module, expected: nn.Module) -> None:
    found = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-3, atol=1e-5, msg=name)


CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": {"adapters": LORA},
    "accumulated": {"accumulate": 3},
    "packed": {"packing": True},
    "packed, adapters": {"packing": True, "adapters": LORA},
}


def case(place: Path, name: str, **more: Any) -> FinetuneSettings:
    wanted = runs.settings(place, **more)
    chosen = dict(CASES[name])
    if chosen.pop("packing", False):
        wanted = replace(wanted, data=replace(wanted.data, packing=True), sequence=12)
    return replace(wanted, **chosen)


@pytest.mark.parametrize("name", CASES)
def test_with_torchs_optimizer_every_loss_has_the_bits_of_trls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wanted = case(tmp_path, name)
    monkeypatch.setattr(trainers, "_optimizer", theirs)
    monkeypatch.setattr(trainers, "KeepEverything", transformers.TrainerCallback)  # it keeps our optimizer's states
    runs.run(wanted)
    expected, _ = of_trl(wanted, PAIRS)
    assert len(set(expected)) == len(expected) >= 4
    assert runs.losses(wanted) == expected


@pytest.mark.parametrize("name", CASES)
def test_with_ours_losses_and_weights_are_trls_to_rounding(tmp_path: Path, name: str) -> None:
    wanted = case(tmp_path, name)
    runs.run(wanted)
    expected, model = of_trl(wanted, PAIRS)
    found = runs.losses(wanted)
    assert found[0] == expected[0]  # before the first update
    torch.testing.assert_close(found, expected, rtol=TO_ROUNDING, atol=0.0)
    saved: Any = AutoModelForCausalLM.from_pretrained(wanted.model, dtype=torch.float32)
    if wanted.adapters:
        saved = peft.PeftModel.from_pretrained(saved, wanted.save)
    else:
        saved = AutoModelForCausalLM.from_pretrained(wanted.save, dtype=torch.float32)
    assert_alike(saved, model)


class TwoGPUs(trl.SFTConfig):
    """Those of a process that sees two GPUs, which Trainer would copy the model to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._n_gpu = 2


def test_of_several_gpus_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case(tmp_path, "all weights", out=str(tmp_path / "one"), save=str(tmp_path / "one" / "model"))
    runs.run(expected)
    wanted = case(tmp_path, "all weights")
    monkeypatch.setattr(trainers, "SFTConfig", TwoGPUs)
    runs.run(wanted)
    assert runs.losses(wanted) == runs.losses(expected)


@pytest.mark.parametrize(
    "adapters", [None, replace(LORA, targets=("q_proj", "v_proj"))], ids=["all weights", "adapters"]
)
def test_a_mixture_in_parts_learns_what_trl_learns_with_the_whole(tmp_path: Path, adapters: Any) -> None:
    small.folder(tmp_path / "model", "mixture")
    wanted = runs.settings(tmp_path, experts_per_part=3, adapters=adapters)
    runs.run(wanted)
    expected, model = of_trl(wanted, PAIRS)
    torch.testing.assert_close(runs.losses(wanted), expected, rtol=TO_ROUNDING, atol=0.0)
    if adapters is None:
        assert_alike(AutoModelForCausalLM.from_pretrained(wanted.save, dtype=torch.float32), model)


def test_messages_are_learned_as_trl_learns_the_assistants_turns(tmp_path: Path) -> None:
    small.folder(tmp_path / "model", "qwen3", small.MARKED)
    wanted = runs.settings(tmp_path, small.chats(12, turns=2))
    runs.run(wanted)
    expected, _ = of_trl(wanted, small.chats(12, turns=2), assistant_only_loss=True)
    torch.testing.assert_close(runs.losses(wanted), expected, rtol=TO_ROUNDING, atol=0.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_saved_of_a_model_is_what_it_is_and_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    made: list[Any] = []
    make = trainers.make_trainer
    monkeypatch.setattr(trainers, "make_trainer", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    wanted = runs.settings(tmp_path, dtype=dtype)
    shown = runs.run(wanted)
    assert f"model saved in {wanted.save}, with the tokenizer" in shown
    loaded = AutoModelForCausalLM.from_pretrained(wanted.save)
    assert loaded.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    (trainer,) = made
    for (name, parameter), saved in zip(trainer.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(parameter.detach().to(saved.dtype), saved), name
    tokenizer = AutoTokenizer.from_pretrained(wanted.save)
    assert tokenizer.get_vocab() == small.tokenizer().get_vocab()
    assert tokenizer.chat_template == small.TEMPLATE


def test_a_generation_config_that_transformers_warns_of_ends_no_run_at_its_save(tmp_path: Path) -> None:
    """TRL gives it the tokenizer's pad_token_id, and transformers then refused to save it, after the last step."""
    wanted = runs.settings(tmp_path, epochs=0.5)
    unclean = {"do_sample": False, "temperature": 0.1, "top_p": 0.2}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(unclean))
    runs.run(wanted)
    found = json.loads((Path(wanted.save) / "generation_config.json").read_text())
    assert {name: found.get(name) for name in unclean} == unclean


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_saved_of_adapters_peft_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    made: list[Any] = []
    make = trainers.make_trainer
    monkeypatch.setattr(trainers, "make_trainer", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    wanted = runs.settings(tmp_path, adapters=LORA, dtype=dtype)
    runs.run(wanted)
    base = AutoModelForCausalLM.from_pretrained(wanted.model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, wanted.save)
    found = dict(made[0].model.named_parameters())
    adapters = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert len(adapters) == 2 * 7 * 3
    assert all(torch.equal(found[name].detach().float(), parameter) for name, parameter in adapters.items())
    assert any(parameter.abs().max() > 0 for name, parameter in adapters.items() if "lora_B" in name)
    assert loaded.peft_config["default"].base_model_name_or_path == wanted.model
    assert AutoTokenizer.from_pretrained(wanted.save).chat_template == small.TEMPLATE


def test_adapters_and_their_tokenizer_leave_what_a_base_has_of_its_own(tmp_path: Path) -> None:
    """Of its tokenizer all was deleted that transformers does not write: tokenizer.model, which others read."""
    small.folder(tmp_path / "ours")
    for name in ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "special_tokens_map.json"):
        (tmp_path / "ours" / name).write_text("the base's")
    before = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    tokenizer = AutoTokenizer.from_pretrained(small.folder(tmp_path / "tokenizer"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear"))
    trainers.save_model(model, tmp_path / "ours", tokenizer)
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    found, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("ours", "theirs")
    )
    assert found == expected
    assert before.keys() < found.keys()
    assert all(found[name] == b"the base's" for name in ("tokenizer.model", "tekken.json", "merges.txt"))


def test_adapters_that_were_saved_are_trained_further(tmp_path: Path) -> None:
    first = runs.settings(tmp_path, adapters=replace(LORA, lora_dropout=0.0))
    runs.run(first)
    begun = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(first.model), first.save)
    second = replace(
        first, adapters=replace(LORA, path=first.save), out=str(tmp_path / "next"), save=str(tmp_path / "next-model")
    )
    second = replace(second, course=replace(second.course, lr=1e-30))
    runs.run(second)
    ended = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(first.model), second.save)
    for (name, one), other in zip(begun.named_parameters(), ended.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_windows_stores_and_the_planner_change_no_bit(tmp_path: Path) -> None:
    found = []
    for number, (offload, plans) in enumerate(
        [
            (OffloadSettings(window=1), False),
            (OffloadSettings(window=2, activations="keep"), False),
            (OffloadSettings(window=1, store=str(tmp_path / "store")), False),
            (OffloadSettings(activations="auto", resident="auto"), True),
        ]
    ):
        wanted = runs.settings(tmp_path, offload=offload, plans=plans, out=str(tmp_path / f"run{number}"))
        shown = runs.run(wanted)
        assert ("the planner" in shown or "planner" in shown) == plans
        found.append(runs.losses(wanted))
    assert len(set(found[0])) == len(found[0]) == 12
    assert found == [found[0]] * 4


@pytest.mark.parametrize("name", ["all weights", pytest.param("packed, adapters", marks=pytest.mark.long)])
def test_compiled_layers_learn_what_eager_ones_do_at_every_length(tmp_path: Path, name: str) -> None:
    eager = case(tmp_path, name)
    graphs = {"backend": "aot_eager", "dynamic": True}
    compiled = replace(eager, out=str(tmp_path / "compiled"), offload=OffloadSettings(window=1, compile=graphs))
    told = [runs.run(wanted) for wanted in (eager, compiled)]
    torch.testing.assert_close(runs.losses(compiled), runs.losses(eager), rtol=TO_ROUNDING, atol=0.0)
    assert "compiled layers" not in told[0]
    assert re.search(r"compiled layers\W+3 in their last call [^;]", told[1])


def test_it_evaluates_while_it_trains_what_trl_evaluates(tmp_path: Path) -> None:
    other = small.write_lines(tmp_path / "other.jsonl", PAIRS[:5])
    wanted = runs.settings(tmp_path)
    wanted = replace(wanted, data=replace(wanted.data, eval_data=str(other)), eval_every=4)
    shown = runs.run(wanted)
    found = runs.records(wanted, "evaluation")
    assert [record["step"] for record in found] == [4, 8, 12]
    assert shown.count("evaluation behind step") == 3
    assert f"evaluation {other}: 5 rows" in shown
    loaded = AutoModelForCausalLM.from_pretrained(wanted.save)
    trainer = trl.SFTTrainer(
        model=loaded,
        args=trl.SFTConfig(
            str(tmp_path / "e"), report_to=[], use_cpu=True, bf16=False, per_device_eval_batch_size=2, max_length=40
        ),
        train_dataset=datasets.Dataset.from_list(PAIRS),
        eval_dataset=datasets.Dataset.from_list(PAIRS[:5]),
        processing_class=AutoTokenizer.from_pretrained(wanted.save),
    )
    assert found[-1]["loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)
    assert "on held-out text" in shown


def test_evaluations_draw_no_random_number_of_the_training(tmp_path: Path) -> None:
    """On the CPU dropout draws from the generator that each pass over the rows drew from."""
    wanted = runs.settings(tmp_path, adapters=LORA)
    expected = of_trl(wanted, PAIRS)[0]
    other = small.write_lines(tmp_path / "other.jsonl", PAIRS[:5])
    wanted = replace(wanted, data=replace(wanted.data, eval_data=str(other)), eval_every=3)
    runs.run(wanted)
    assert len(runs.records(wanted, "evaluation")) == 4
    torch.testing.assert_close(runs.losses(wanted), expected, rtol=TO_ROUNDING, atol=0.0)


def test_without_a_number_it_evaluates_after_each_epoch_on_rows_held_out(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path, accumulate=2)
    wanted = replace(wanted, data=replace(wanted.data, held_out=2))  # 10 rows are 5 batches, 3 steps
    runs.run(wanted)
    assert [record["step"] for record in runs.records(wanted, "evaluation")] == [3, 6]


OPTIONS: dict[str, dict[str, float | str]] = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


def test_the_schedulers_are_those_of_transformers() -> None:
    assert set(SCHEDULERS) == {one.value for one in transformers.SchedulerType}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_sets_the_rates_that_transformers_sets(tmp_path: Path, name: str) -> None:
    options = OPTIONS.get(name, {})
    course = CourseSettings(lr=3e-3, scheduler=name, scheduler_options=options, warmup=2)
    wanted = runs.settings(tmp_path, epochs=1.0)
    wanted = replace(wanted, data=replace(wanted.data, eval_data=wanted.data.data), eval_every=2, course=course)
    runs.run(wanted)
    rates = [record["lr"] for record in runs.records(wanted, "step")]
    assert len(rates) == 6
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-3)
    scheduler = transformers.get_scheduler(name, optimizer, 2, 6, dict(options))
    if name in ("reduce_lr_on_plateau", "greedy"):
        assert rates[0] == 3e-3  # what follows is by the evaluations
        return
    expected = []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == expected
    assert name == "constant" or len(set(rates)) > 1


def test_the_plan_comes_before_the_first_step_and_the_log_has_every_number(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path, plans=True, offload=OffloadSettings(), log=str(tmp_path / "log.txt"))
    shown = runs.run(wanted)
    plan, step = shown.index("\nplan"), shown.index("step     1/12")
    assert plan < shown.index("all steps") < step
    for told in ("LoRA", "adapters"):
        assert told not in shown
    count = sum(parameter.numel() for parameter in small.model().parameters())
    for told in (
        f"all {format_count(count)} parameters",
        "fp32 on cpu",
        "12 of 2 rows",
        "of completions",
        "lr 0.003, linear, warm-up 2",
    ):
        assert told in shown[plan:step], told
    line = next(line for line in shown.splitlines() if line.startswith("step     1/12"))
    assert all(told in line for told in ("loss ", " tokens/s ", "device ", "host "))
    first = runs.records(wanted, "step")[0]
    assert first["tokens"] > 0
    assert first["host_bytes"] > 0
    assert "loss" in (tmp_path / "log.txt").read_text()
    (end,) = runs.records(wanted, "end")
    assert end["saved"] == wanted.save
    assert end["summary"]["last_loss"] == runs.losses(wanted)[-1]


def test_tokens_are_counted_as_they_are_and_not_as_they_are_filled_up(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path, epochs=1.0)
    runs.run(wanted)
    expected = sum(len(small.tokenizer()(row["prompt"] + row["completion"] + "<eos>")["input_ids"]) for row in PAIRS)
    assert sum(record["tokens"] for record in runs.records(wanted, "step")) == expected


def test_a_step_that_fails_ends_the_run_with_its_number(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path)
    wanted = replace(wanted, course=CourseSettings(lr=1e38, warmup=0, scheduler="constant"))
    with pytest.raises(TrainingError, match=r"step \d+ failed: "):
        runs.run(wanted)


def test_another_run_is_not_written_over(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path, epochs=1.0)
    runs.run(wanted)
    with pytest.raises(ValueError, match=r"must not hold another run \(got .*which has a log\.jsonl"):
        runs.run(wanted)


def test_wandb_that_is_not_installed_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got --wandb mine, and wandb is not installed"):
        runs.run(runs.settings(tmp_path, wandb="mine"))
    assert not (tmp_path / "run").exists()


def test_wandb_is_told_of_every_step_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock(run=None)
    for name in ("wandb", "wandb.sdk", "wandb.sdk.lib", "wandb.sdk.lib.config_util"):
        monkeypatch.setitem(sys.modules, name, wandb)
    wandb.ConfigError = KeyError

    def init(**_: Any) -> None:
        wandb.run = MagicMock()

    wandb.init.side_effect = init
    monkeypatch.setenv("WANDB_PROJECT", "another")
    for place in ("transformers.integrations", "transformers.integrations.integration_utils"):
        monkeypatch.setattr(f"{place}.is_wandb_available", lambda: True)
    wanted = runs.settings(tmp_path, wandb="mine", epochs=1.0)
    runs.run(wanted)
    assert wandb.init.call_args.kwargs["project"] == "mine"
    told = [call.args[0]["train/loss"] for call in wandb.log.call_args_list if "train/loss" in call.args[0]]
    assert told == runs.losses(wanted)


def test_options_that_a_scheduler_does_not_take_are_told_before_anything_is_written(tmp_path: Path) -> None:
    for course in (CourseSettings(scheduler="cosine", scheduler_options={"wrong": 1}),
                   CourseSettings(scheduler="cosine_with_min_lr")):  # fmt: skip
        with pytest.raises(ValueError, match="a scheduler takes options of its own"):
            runs.run(runs.settings(tmp_path, course=course))
    assert not (tmp_path / "run").exists()


def test_rows_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="loss must be 'completions' or 'all'"):
        RowSettings(data="d", loss="prompts")


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ({"log": "data.jsonl"}, "log .* data='.*', which is read, and would be lost"),
        ({"log": "run/log.jsonl"}, "log .* the run's log"),
        ({"log": "run/checkpoint-2"}, "log .* the run's checkpoint='.*/run/checkpoint-2'"),
        ({"save": "run/checkpoint-3/model"}, "save .* the run's checkpoint='.*/run/checkpoint-3'"),
        ({"log": "run/checkpoints"}, None),
    ],
)
def test_an_output_that_would_overwrite_something_is_refused_first(tmp_path, places, told):
    wanted = runs.settings(tmp_path, **{name: str(tmp_path / path) for name, path in places.items()})
    before = (tmp_path / "data.jsonl").read_bytes()
    if told is None:
        wanted.check_outputs()
    else:
        with pytest.raises(ValueError, match=rf"{told}.*pass another path"):
            runs.run(wanted)
    assert (tmp_path / "data.jsonl").read_bytes() == before
    assert not (tmp_path / "run").exists()


def test_a_planned_run_ends_with_its_plan_beside_the_median_of_its_steps(tmp_path: Path) -> None:
    planned = OffloadSettings(activations="auto", resident="auto")
    wanted = runs.settings(tmp_path, steps=5, plans=True, offload=planned)
    shown = runs.run(wanted)
    behind = shown[shown.index("summary") :]
    behind_warm_up = [one["iteration_s"] for one in runs.records(wanted, "step")[WARM_UP_STEPS:]]
    assert f"{format_seconds(statistics.median(behind_warm_up))} (" in next(
        line for line in behind.splitlines() if "measured" in line
    )
    assert len(re.findall("measured .*, [+-][0-9]+%", shown)) == 2  # the step's, and what the host had in memory
