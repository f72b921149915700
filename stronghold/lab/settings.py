"""The settings of a training run, validated once where they enter."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import psutil

from stronghold.lab.outputs import check_apart, check_places, check_save, check_sources, checkpoints_over, own_files
from stronghold.settings import OffloadSettings, check_one_of, check_optimizer
from stronghold.units import format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What to train: the reference GPT of a shape, or the model at ``path``.

    ``path`` is a folder with a config.json, with or without weights beside it, or such a file alone; then the
    shape is the file's own, and layers, hidden, heads, vocabulary and dropout are not used.
    """

    path: str | None = None
    layers: int = 16
    hidden: int = 2048
    heads: int = 16
    vocabulary: int = 51200
    dropout: float = 0.0

    def config_dict(self, sequence: int) -> dict[str, Any]:
        """Returns the reference GPT's shape for samples of so many tokens, as ``GPT.from_config_dict`` takes it."""
        return {name: value for name, value in vars(self).items() if name != "path"} | {"sequence": sequence}


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What to train on: the text at ``source``, or without one the Python standard library's own source.

    ``tokenizer`` is a folder, a tokenizer.json, or "bytes", which are then tokens themselves; without one it is that of
    the model's folder, and of a reference GPT without any bytes. ``held_out`` samples are kept for a loss on text that
    was not trained on.
    """

    source: str | None = None
    tokenizer: str | None = None
    held_out: int = 0

    def __post_init__(self) -> None:
        _check_whole("held_out", self.held_out, at_least=0)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule: the rate rises over ``warmup_steps`` to ``lr`` and falls, as a cosine, to a tenth.

    It has fallen after ``decay_steps`` and stays there. Where either is None it is as :meth:`TrainSettings.begun` says.
    ``max_grad_norm`` clips the norm of all gradients; None leaves them. Parameters of fewer than two
    dimensions, biases and norms, do not decay. ``states``, ``update`` and ``nonfinite`` are as in ``stronghold.AdamW``.
    """

    lr: float = 3e-4
    warmup_steps: int | None = 0
    decay_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = None
    states: str = "fp32"
    update: str = "deferred"
    nonfinite: str = "raise"

    def __post_init__(self) -> None:
        for name, least in (("warmup_steps", 0), ("decay_steps", 1)):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), at_least=least)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a positive number (got {self.lr}); pass one such as 3e-4")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or a positive number (got {self.weight_decay}); pass 0.1")
        check_optimizer(self.states, self.update, self.nonfinite, self.max_grad_norm)


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The stages of a model over processes, as in ``stronghold.pipeline``, and replicas, each of which has all stages.

    Where ``micro_batches`` is None there are as many as :func:`micro_batches_of` says.
    """

    stages: int = 1
    replicas: int = 1
    micro_batches: int | None = None
    schedule: str | None = None
    balance: str | tuple[int, ...] | Mapping[str, Sequence[float]] = "layers"

    def __post_init__(self) -> None:
        _check_whole("stages", self.stages, at_least=1)
        _check_whole("replicas", self.replicas, at_least=1)
        if self.micro_batches is not None:
            _check_whole("micro_batches", self.micro_batches, at_least=1)
        if self.stages == 1 and (self.micro_batches, self.schedule) != (None, None):
            raise ValueError(
                f"micro_batches and schedule are of a model in stages (got micro_batches={self.micro_batches}, "
                f"schedule={self.schedule!r} and one stage); pass stages, or micro_batch to have each layer take the "
                "batch in parts"
            )

        if self.stages == 1 and self.balance != "layers":
            raise ValueError(
                f"balance is of a model in stages (got balance={self.balance!r} and one stage); pass stages"
            )

    @property
    def alone(self) -> bool:
        """Whether one process trains by itself."""
        return self.stages == self.replicas == 1


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run: ``steps`` steps of ``batch`` samples of ``sequence`` tokens.

    ``device_limit`` is what PyTorch may take of a GPU, whatever the method, in bytes or like "16GiB". ``dtype`` is the
    compute type, "fp32" or "bf16". ``out`` is the run's folder. ``save`` is where the model goes at the end; without
    one it is kept only if the run is interrupted, in ``out``/model. ``log`` is a file for a log to read, ``record`` one
    of JSON lines to which the run's summary is appended. Every ``checkpoint_every`` steps, and at the end, a checkpoint
    goes into ``out``/checkpoints, of which the newest ``keep_checkpoints`` are kept; ``resume`` goes on from the newest
    intact one. With ``keep_store`` the run stays in the store's directory when it ends, as one more that it can go on
    from.
    """

    method: str = "stronghold"
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    device: str = "cpu"
    device_limit: int | str | None = None
    dtype: str = "fp32"
    batch: int = 4
    sequence: int = 1024
    steps: int = 100
    seed: int = 0
    out: str
    save: str | None = None
    log: str | None = None
    record: str | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    resume: bool = False
    keep_store: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "keep_checkpoints"):
            _check_whole(name, getattr(self, name), at_least=1)
        if self.checkpoint_every is not None:
            _check_whole("checkpoint_every", self.checkpoint_every, at_least=1)
        if self.keep_store and not self.offload.directories:
            raise ValueError(f"a store that is kept is a directory (got store={self.offload.store!r}); pass one")
        if not self.parallel.alone:
            self._check_parallel()
        _check_whole("sequence", self.sequence, at_least=2)
        check_batch(self.batch, self.sequence)
        _check_whole("seed", self.seed, at_least=0)
        check_one_of("dtype", self.dtype, ("fp32", "bf16"))
        _check_device(self.device)
        if self.device_limit is not None:
            if self.device == "cpu":
                raise ValueError(
                    f"device_limit is of a GPU's memory, and the CPU has none of its own (got device_limit="
                    f"{self.device_limit!r} with device='cpu'); leave it out, or pass device_memory as a budget"
                )
            object.__setattr__(self, "device_limit", parse_bytes(self.device_limit))

    def _check_parallel(self) -> None:
        stages, replicas = self.parallel.stages, self.parallel.replicas
        refused = {
            "method": self.method if self.method != "stronghold" else None,
            "save": self.save if stages > 1 else None,
            "keep_store": self.keep_store or None,
        }
        for name, value in refused.items():
            if value is not None:
                raise ValueError(
                    f"a model in {stages} stages and {replicas} replicas is trained by method 'stronghold' and kept in "
                    f"checkpoints, which load in one process too (got {name}={value!r}); pass checkpoint_every, or one "
                    "stage and one replica"
                )
        if self.batch % replicas:
            raise ValueError(
                f"the replicas must divide the batch (got batch={self.batch}, replicas={replicas}); pass a batch of a "
                f"multiple of {replicas}"
            )

    @property
    def save_folder(self) -> str:
        """Where the model goes at the end, or where the run is interrupted."""
        return os.path.join(self.out, "model") if self.save is None else self.save

    @property
    def checkpoints_folder(self) -> str:
        """Where the run's checkpoints go, the interrupted run's too."""
        return os.path.join(self.out, "checkpoints")

    def check_outputs(self) -> None:
        """Raises ValueError for a place that the run is to write to and cannot. Leaves nothing there."""
        files = [(name, getattr(self, name)) for name in ("log", "record")]
        check_places(folders=[("out", self.out)], files=files)
        stores = [("store", path) for path in self.offload.directories]
        inputs = [("model", self.model.path), ("data", self.data.source), ("tokenizer", self.data.tokenizer)]
        inputs += [("balance", self.parallel.balance)] if isinstance(self.parallel.balance, str) else []
        check_save(self.save_folder, folders=[("out", self.out), *stores], files=files)
        outputs = [*files, ("save", self.save)]
        kept = checkpoints_over(self.checkpoints_folder, r"step-\d+", outputs)
        check_apart(outputs, kept=kept, folders=[*stores, ("the run's checkpoints", self.checkpoints_folder)])
        check_apart(files, kept=own_files(self.out), inputs=inputs)
        outputs += [("out", self.out), *stores]
        check_sources(outputs, self.save_folder, model=self.model.path, data=[("data", self.data.source)])

    def begun(self, before: Mapping[str, Any] | None = None) -> TrainSettings:
        """Returns these settings with the learning rate's schedule and the micro-batches that were left open.

        The schedule follows from the number of steps with which a run begins: a warm-up of a tenth of them, at most
        100, and a cosine until the last one. A run that goes on keeps it, however many steps it has now, and the number
        of micro-batches, in however many stages: ``before`` is what :meth:`flat` told of it then.
        """
        steps = self.steps if before is None else before["steps"]  # an earlier version's has no decay_steps
        known = {"warmup_steps": min(100, steps // 10), "decay_steps": steps, **(before or {})}
        warmup, decay = self.optimizer.warmup_steps, self.optimizer.decay_steps
        schedule = replace(
            self.optimizer,
            warmup_steps=known["warmup_steps"] if warmup is None else warmup,
            decay_steps=known["decay_steps"] if decay is None else decay,
        )
        stages = self.parallel
        if stages.stages > 1 and stages.micro_batches is None:
            kept = micro_batches_of(before) if before and before.get("replicas", 1) == stages.replicas else None
            stages = replace(stages, micro_batches=kept or micro_batches_of(self.flat()))
        return replace(self, optimizer=schedule, parallel=stages)

    def flat(self) -> dict[str, object]:
        """Returns every setting by its own name, as a record holds them; of the optimizer's the store is told some."""
        groups = (self.model, self.data, self.offload, self.optimizer, self.parallel)
        return {
            "method": self.method,
            **{item.name: getattr(group, item.name) for group in groups for item in fields(group)},
            **{item.name: getattr(self, item.name) for item in fields(self)[6:]},
        }


def micro_batches_of(settings: Mapping[str, Any]) -> int | None:
    """Returns in how many parts each replica of a run in stages takes its part of a batch; None of any other run.

    ``settings`` are as :meth:`TrainSettings.flat` tells them. Where they leave it open it is the most that divides that
    part, up to four for each stage.
    """
    stages = settings.get("stages", 1)
    if stages == 1:
        return None
    if settings["micro_batches"] is not None:
        return int(settings["micro_batches"])
    samples = settings["batch"] // settings.get("replicas", 1)
    return max(n for n in range(1, 4 * stages + 1) if samples % n == 0)


def _check_whole(name: str, value: int, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be a whole number of at least {at_least} (got {value!r}); pass one")
    if value >= 2**63:
        raise ValueError(f"{name} must be below 2**63 (got a number of {value.bit_length()} bits); pass a smaller one")


def _check_device(name: str) -> None:
    if re.fullmatch(r"cpu|cuda(:\d+)?", name):
        return
    import torch  # only here: a command that names the CPU or a GPU starts without it

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or not re.fullmatch(rf"{found.type}(:\d+)?", name):
        seen = "none" if found is None else found.type
        raise ValueError(
            f"device must be cpu, cuda, cuda:N or this machine's accelerator (got {name!r}; torch sees {seen}); pass "
            "one of them"
        )


def check_batch(batch: int, sequence: int, memory: int | None = None) -> None:
    """Raises ValueError where the ids of a step's samples alone are more than ``memory``, by default this machine's."""
    if memory is None:
        memory = psutil.virtual_memory().total + psutil.swap_memory().total
    if (needed := 8 * batch * sequence) > memory:
        raise ValueError(
            f"the ids of a batch, 8 bytes for each token, must fit the memory (got batch={batch}, sequence={sequence}, "
            f"which is {format_bytes(needed)} of {format_bytes(memory)}); pass a smaller batch or a shorter sequence"
        )
