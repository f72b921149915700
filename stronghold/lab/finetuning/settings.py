"""The settings of a fine-tuning run, validated once where they enter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from stronghold.checkpoint.quantising import KINDS
from stronghold.lab.finetuning.encoded import LONG_ROWS
from stronghold.lab.finetuning.tokens import LOSSES
from stronghold.lab.outputs import check_apart, check_places, check_save, check_sources, checkpoints_over, own_files
from stronghold.settings import OffloadSettings, check_one_of, check_optimizer, check_together, without_place

SCHEDULERS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)
"""Those of transformers, by the names of its SchedulerType."""
BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")
"""Those that follow the loss of evaluations."""
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """LoRA adapters of PEFT: new ones of a ``rank``, or those that are in the folder ``path`` already.

    ``targets`` are the names of the linear layers that get one, or "all-linear": all but the head. ``quantize`` is what
    the base below them is kept in, "nf4", "nf4_nested" or "int8", or None for the compute type.
    """

    path: str | None = None
    rank: int = 16
    alpha: float = 32.0
    lora_dropout: float = 0.0
    targets: tuple[str, ...] = ("all-linear",)
    quantize: str | None = None

    def __post_init__(self) -> None:
        _check_whole("rank", self.rank, at_least=1)
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be a positive number (got {self.alpha}); pass twice the rank")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be a probability below 1 (got {self.lora_dropout}); pass 0.05, or 0")
        if not self.targets or not all(self.targets):
            raise ValueError(f"targets must be names of linear layers (got {self.targets}); pass all-linear")
        if self.quantize is not None:
            check_one_of("quantize", self.quantize, KINDS)


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Rows to train on at ``data``, and to evaluate on at ``eval_data``, or ``held_out`` of the former.

    ``loss`` is "completions" or "all". Rows longer than the sequence are refused, cut or skipped, as ``long_rows``
    says. With ``packing`` several rows make a sample of a sequence, and none of them sees another.
    """

    data: str
    eval_data: str | None = None
    held_out: int = 0
    loss: str = "completions"
    long_rows: str = "refuse"
    packing: bool = False

    def __post_init__(self) -> None:
        _check_whole("held_out", self.held_out, at_least=0)
        check_one_of("loss", self.loss, LOSSES)
        check_one_of("long_rows", self.long_rows, LONG_ROWS)
        if self.eval_data is not None and self.held_out:
            raise ValueError(
                f"evaluation is on rows of its own file or on rows that are held out (got eval_data={self.eval_data!r} "
                f"and held_out={self.held_out}); pass one of them"
            )

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.eval_data is not None or self.held_out > 0


@dataclass(frozen=True, kw_only=True)
class CourseSettings:
    """AdamW and its learning rate: ``scheduler`` is one of transformers', with its own ``scheduler_options``.

    ``warmup`` is a number of steps, or below 1 a share of all. ``max_grad_norm`` clips the norm of all gradients; None
    leaves them. Biases and norms do not decay. ``update`` None is "deferred" where gradients are clipped or
    accumulated, and else the planner's.
    """

    lr: float = 2e-5
    scheduler: str = "linear"
    scheduler_options: Mapping[str, float | str] = field(default_factory=dict)
    warmup: float = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    states: str = "fp32"
    update: str | None = None

    def __post_init__(self) -> None:
        check_one_of("scheduler", self.scheduler, SCHEDULERS)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a positive number (got {self.lr}); pass one such as 2e-5")
        for name in ("warmup", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or a positive number (got {getattr(self, name)}); pass 0")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ValueError(f"warmup must be whole steps, or a share below 1 (got {self.warmup}); pass 10, or 0.1")
        check_optimizer(self.states, self.update or "deferred", "raise", self.max_grad_norm)


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """One run of fine-tuning: ``epochs`` over the data, or ``steps``, of ``accumulate`` times ``batch`` samples.

    ``adapters`` None trains all weights. ``dtype`` is the compute type. ``plans`` has what is "auto" in ``offload``
    planned for a step of this run. ``experts_per_part`` is how many experts of a mixture go through the window
    together, None for all of a layer, "auto" for as many as fit. ``out`` is the run's folder, in which every
    ``checkpoint_every`` steps, at the end and when it is interrupted a checkpoint goes, and of which the newest
    ``keep_checkpoints`` stay. ``save`` is where the model goes in the end. ``wandb`` is a project of Weights & Biases
    that the run is logged to.

    Raises ValueError for values out of range, and for those that contradict one another.
    """

    model: str
    data: RowSettings
    adapters: AdapterSettings | None = None
    course: CourseSettings = field(default_factory=CourseSettings)
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    plans: bool = True
    experts_per_part: int | str | None = None
    device: str = "cpu"
    dtype: str = "fp32"
    batch: int = 8
    accumulate: int = 1
    sequence: int = 1024
    epochs: float = 1.0
    steps: int | None = None
    seed: int = 0
    eval_every: int | None = None
    out: str
    save: str
    log: str | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    resume: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "keep_checkpoints"):
            _check_whole(name, getattr(self, name), at_least=1)
        for name in ("steps", "eval_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), at_least=1)
        if self.experts_per_part not in (None, "auto"):
            _check_whole("experts_per_part", self.experts_per_part, at_least=1)
        _check_whole("sequence", self.sequence, at_least=2)
        _check_whole("seed", self.seed, at_least=0)
        if self.seed >= 2**32:
            raise ValueError(
                f"seed must be below 2**32, for NumPy takes no other (got {self.seed}); pass one such as 4"
            )
        if not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be a positive number (got {self.epochs}); pass 1, or 0.5 for half the data")
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("device", self.device, ("cpu", "cuda"))  # of several GPUs CUDA_VISIBLE_DEVICES chooses
        if self.eval_every is not None and not self.data.evaluates:
            raise ValueError(
                f"evaluations need rows to evaluate on (got eval_every={self.eval_every} and none); pass eval_data or "
                "held_out"
            )
        if self.course.scheduler in BY_EVALUATION and not self.data.evaluates:
            raise ValueError(
                f"scheduler {self.course.scheduler!r} follows the loss of evaluations (got no rows to evaluate on); "
                "pass eval_data or held_out, or another scheduler"
            )
        check_together(self.course.update, self.accumulate)

    @property
    def update(self) -> str:
        """AdamW's ``update``."""
        if self.course.update is not None:
            return self.course.update
        return "deferred" if self.course.max_grad_norm or self.accumulate > 1 or not self.plans else "auto"

    def check_outputs(self) -> None:
        """Raises ValueError for a place that the run is to write to and cannot. Leaves nothing there."""
        check_places(folders=[("out", self.out)], files=[("log", self.log)])
        stores = [("store", path) for path in self.offload.directories]
        data = [("data", self.data.data), ("eval_data", self.data.eval_data)]
        inputs = [("model", self.model), *data, ("adapter", self.adapters.path if self.adapters else None)]
        outputs = [("log", self.log), ("save", self.save)]
        check_save(self.save, folders=[("out", self.out), *stores], files=[("log", self.log)])
        check_apart(outputs, kept=checkpoints_over(self.out, r"checkpoint-\d+", outputs))
        check_apart([("log", self.log)], kept=own_files(self.out)[:1], folders=stores, inputs=inputs)
        lost = self.model if self.adapters is None else None  # adapters may be saved beside the model that they are of
        check_sources([("out", self.out), *outputs, *stores], self.save, model=lost, data=data)

    def learned(self) -> dict[str, Any]:
        """Returns what decides which numbers the run learns: what a run that goes on must have as it began."""
        groups: list[Any] = [self.data, self.course, *([self.adapters] if self.adapters else [])]
        found = {item.name: getattr(group, item.name) for group in groups for item in fields(group)}
        own = ("model", "dtype", "batch", "accumulate", "sequence", "epochs", "steps", "seed", "experts_per_part")
        found |= {name: getattr(self, name) for name in own} | {"adapters": self.adapters is not None}
        found.pop("update")  # no number that is learned depends on it
        samples = self.offload.micro_batch  # each micro-batch has dropout of its own, and sums of its own
        found["micro_batch"] = samples if isinstance(samples, int) and samples < self._samples else None
        if self.offload.compile:  # compiled layers round in their own way, and where they keep activations in another
            found["compile"] = self.offload.compile
            found["activations"] = without_place(self.offload.activations)
        if self.course.scheduler in BY_EVALUATION:
            found["eval_every"] = self.eval_every
        else:
            found.pop("eval_data")
        return {name: list(one) if isinstance(one, tuple) else one for name, one in found.items()}

    def as_begun(self, learned: Mapping[str, Any]) -> FinetuneSettings:
        """Returns the settings of a run that goes on, of which :meth:`learned` was ``learned`` when it began.

        What they leave to the planner, and numbers that are learned depend on, is what was settled then.
        """
        parts, samples, offload = self.experts_per_part, learned.get("micro_batch"), self.offload
        if parts == "auto":  # states have the names of the parts that they are of
            parts = learned.get("experts_per_part")
        if samples is None and "micro_batch" in learned and self.plans and parts is None:
            samples = self._samples  # all of them: None would leave it to the planner
        if offload.micro_batch in (None, "auto"):
            offload = replace(offload, micro_batch=samples)
        if offload.compile and offload.activations == "auto":
            offload = replace(offload, activations=learned.get("activations", "auto"))
        return replace(self, experts_per_part=parts, offload=offload)

    @property
    def _samples(self) -> int:
        """How many samples a layer has at a time where it has all of a batch."""
        return 1 if self.data.packing else self.batch  # TRL puts the samples of a batch one behind the other

    def flat(self) -> dict[str, Any]:
        """Returns every setting by its own name, as a record holds them."""
        groups: list[Any] = [self.data, self.offload, self.course, *([self.adapters] if self.adapters else [])]
        grouped = ("data", "course", "offload", "adapters")
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in grouped}
        found = own | {item.name: getattr(group, item.name) for group in groups for item in fields(group)}
        own_batches = {"batch": self.batch * self.accumulate, "accumulate": self.accumulate}
        return found | {"method": "stronghold finetune", **own_batches}


def _check_whole(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be a whole number of at least {at_least} (got {value!r}); pass one such as 4")
