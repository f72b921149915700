"""DeepSpeed's engine: one process, the shared model and loop, its own backward pass, clipping and step."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.errors import StrongholdError
from stronghold.lab.methods import Prepared, decay_groups
from stronghold.lab.methods.deepspeed.settings import micro_batch_of
from stronghold.lab.methods.deepspeed.swap import Swap
from stronghold.lab.methods.ordinary import join_alone, measure, recompute_layers
from stronghold.lab.models.gpt import GPT
from stronghold.lab.settings import TrainSettings
from stronghold.weights import Weights, fill, open_weights


def begin(settings: TrainSettings, method: str, *, asynchronous_io: bool = False) -> None:
    """Makes this process DeepSpeed's only one, and compiles what it needs unless that was done before.

    Raises StrongholdError where DeepSpeed, or what it compiles with, is absent.
    """
    device = torch.device(settings.device)
    # DeepSpeed reads these when it is imported; a launcher would set them.
    os.environ.update({"RANK": "0", "LOCAL_RANK": str(device.index or 0), "WORLD_SIZE": "1"})
    os.environ.update({"DS_ACCELERATOR": device.type, "DEEPSPEED_LOG_LEVEL": "warning"})
    try:
        deepspeed = importlib.import_module("deepspeed")
        builders = importlib.import_module("deepspeed.ops.op_builder")
    except ImportError as error:
        raise StrongholdError(
            f"{method} needs DeepSpeed ({error}); install the extra 'baselines': pip install '.[baselines]' in the "
            "project's root"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of calls DeepSpeed makes
    importlib.import_module("torch._dynamo")  # while zero.Init has Tensor.__new__ replaced, torch fails to import it
    join_alone(device)
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    needed = [builders.CPUAdamBuilder()]
    if asynchronous_io:
        needed.append(builders.AsyncIOBuilder())
        if not needed[-1].is_compatible():
            raise StrongholdError(f"{method} needs libaio's headers; on Debian: apt-get install libaio-dev")
    for builder in needed:  # before any step is timed
        try:
            builder.load(verbose=False)
        except Exception as error:  # of a compiler, all kinds
            raise StrongholdError(
                f"{method} needs DeepSpeed's {builder.name}, which did not compile: {error}"
            ) from error


def prepare(
    gpt: GPT, settings: TrainSettings, weights: Weights | None, zero: dict[str, Any], swap: Swap | None = None
) -> Prepared:
    """Returns DeepSpeed's engine, by the settings ``zero``, around a model with the values of ``gpt``.

    ``gpt`` itself stays on the meta device. ``swap`` is the folder that ``zero`` names.
    """
    import deepspeed

    stage_3 = zero["zero_optimization"]["stage"] == 3
    drawn = torch.get_rng_state()
    if stage_3:
        with deepspeed.zero.Init(config_dict_or_path=zero):
            trained = GPT(gpt.config)
        parameters = list(trained.parameters())
        for number, value in _values(gpt, weights, drawn):
            with deepspeed.zero.GatheredParameters([parameters[number]], modifier_rank=0):
                parameters[number].data.copy_(value)
        # The head is the embedding's weight, used outside of that module: ZeRO 3 has to be told.
        deepspeed.zero.register_external_parameter(trained, trained.embedding.weight)
    else:
        trained = copy.deepcopy(gpt)
        fill(trained, weights)
    if settings.offload.activations == "recompute":
        recompute_layers(trained, use_reentrant=True)
    # By the shapes of ``gpt``: a parameter that ZeRO 3 has taken apart has one dimension, whatever it was.
    counterpart = dict(zip(gpt.parameters(), trained.parameters(), strict=True))
    groups = decay_groups(gpt, settings.optimizer.weight_decay)
    for group in groups:
        group["params"] = [counterpart[parameter] for parameter in group["params"]]
    engine, *_ = deepspeed.initialize(model=Loss(trained), model_parameters=groups, config=zero)
    if settings.dtype == "bf16":
        # Its masters begin as the rounded weights. Every other method's begin exact, and so do these.
        parameters = list(trained.parameters())
        for number, value in _values(gpt, weights, drawn):
            deepspeed.utils.safe_set_full_fp32_param(parameters[number], value)
    return Engine(
        model=trained,
        # The innermost optimizer's groups are those that DeepSpeed's own schedules write to.
        optimizer=engine.optimizer.optimizer,
        report=lambda: measure(
            settings,
            gpt.config.parameters,
            disk_bytes=swap.bytes() if swap else 0,
            disk_paths=(swap.path,) if swap else (),
            step=swap.since_last() if swap else None,
        ),
        device=torch.device(settings.device),
        packages=("deepspeed",),
        engine=engine,
        micro_batch=micro_batch_of(settings),
    )


class Loss(nn.Module):
    """The loss alone: DeepSpeed looks for tensors in what its outermost module returns."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss = self.model(ids, labels=ids).loss
        assert loss is not None
        return loss


@dataclass(frozen=True, kw_only=True)
class Engine(Prepared):
    """DeepSpeed's engine, which does the backward pass, the clipping and the update by its own settings.

    It accumulates the gradients of micro-batches: the backward pass of all but a batch's last one is part of ``loss``.
    """

    engine: Any
    micro_batch: int
    _last: list[Tensor] = field(default_factory=list)
    """The loss of the last micro-batch, whose backward pass is to come."""

    def loss(self, batch: Tensor) -> Tensor:
        """Returns the mean loss of ``batch``."""
        *pieces, last = batch.to(self.device).split(self.micro_batch)
        total = torch.zeros((), device=self.device)
        for piece in pieces:
            loss = self.engine(piece)
            total += loss.detach() * (len(piece) / len(batch))
            if torch.is_grad_enabled():
                self.engine.backward(loss)
                self.engine.step()  # counts the micro-batch; an update comes with the last one
        self._last[:] = [self.engine(last)]
        total += self._last[0].detach() * (len(last) / len(batch))
        return total

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients, and has them on the host."""
        self.engine.backward(self._last.pop())

    def step(self) -> None:
        """Clips, updates, and frees the gradients."""
        self.engine.step()


def _values(gpt: GPT, weights: Weights | None, drawn: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields the number and value of each parameter of ``gpt``, one layer's in memory at a time.

    They are the same each time, and the same as every other method's: the generator begins at ``drawn``.
    """
    torch.set_rng_state(drawn)
    for number, (value,) in open_weights(gpt, weights).units([[p] for p in gpt.parameters()], list(gpt.layers)):
        yield number, value
