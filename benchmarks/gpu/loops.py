"""The training loops that smoke.py, trace_steps.py and large.py run: plain PyTorch's, and stronghold's."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from probe_parts import synchronize
from safetensors.torch import load_file
from torch import Tensor, nn

import stronghold
from stronghold.lab.methods.megatron_lm import WithMasters
from stronghold.lab.methods.ordinary import recompute_layers
from stronghold.lab.models.gpt import GPT
from stronghold.optim.adamw_on_device import scratch_bytes
from stronghold.reports import Report
from stronghold.unit import is_packed

LR, WEIGHT_DECAY = 3e-4, 0.1


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A model in training: ``step`` takes batches, int64 (samples, tokens), accumulates over them and updates.

    It returns their mean loss, which lies on the device; nothing waits for it. ``report`` is stronghold's, or None.
    ``values`` returns what is trained, in the plain loop in bf16 that alone, by the names of a saved model, on the CPU
    in fp32: of a bf16 weight its master.
    """

    step: Callable[..., Tensor]
    values: Callable[[], dict[str, Tensor]]
    report: Callable[[], Report | None]
    close: Callable[[], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def plain(
    model: nn.Module,
    *,
    dtype: str,
    device: torch.device,
    lr: float = LR,
    recompute: bool = False,
    clip: float | None = None,
    muon: bool = False,
) -> Loop:
    """Returns the ordinary loop: all of ``model`` on the device; in bf16 with fp32 masters there.

    With ``muon``, in fp32 alone, PyTorch's own Muon updates the layers' matrices, and AdamW the rest.
    """
    model.to(device)
    if recompute:
        assert isinstance(model, GPT)
        recompute_layers(model)
    masters: list[tuple[nn.Parameter, nn.Parameter]] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if dtype == "bf16":
        masters = [(weight, nn.Parameter(weight.detach().clone())) for weight in trained]
        trained = [master for _, master in masters]
        model.to(torch.bfloat16)
    fused = device.type in ("cpu", "cuda")
    optimizer: Any
    if muon:
        of_muon, of_adamw = _groups(model, lr)
        optimizer = _Both(torch.optim.Muon([of_muon]), torch.optim.AdamW([of_adamw], fused=fused))
    else:
        optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=WEIGHT_DECAY, fused=fused)
    ready = WithMasters(
        model=model, optimizer=optimizer, report=lambda: None, device=device, max_grad_norm=clip, masters=tuple(masters)
    )

    def step(*batches: Tensor) -> Tensor:
        losses = [_accumulate(ready.loss(batch), len(batches)) for batch in batches]
        ready.step()
        return torch.stack(losses).mean()

    def values() -> dict[str, Tensor]:
        if not masters:
            return _saved(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {names[weight]: master.detach().cpu().clone() for weight, master in masters}

    return Loop(step=step, values=values, report=lambda: None, close=lambda: None, model=model, optimizer=optimizer)


def offloaded(
    model: nn.Module,
    *,
    dtype: str,
    device: torch.device,
    lr: float = LR,
    offload: Callable[..., nn.Module] = stronghold.offload,
    settings: dict[str, Any],
    optimizer: dict[str, Any],
    muon: bool = False,
) -> Loop:
    """Returns stronghold's loop; ``settings`` are those of ``stronghold.offload``, ``optimizer`` of AdamW or Muon."""
    offload(model, device=device, dtype=torch.bfloat16 if dtype == "bf16" else None, **settings)
    updates: stronghold.AdamW
    if muon:
        of_muon, of_adamw = _groups(model, lr)
        updates = stronghold.Muon([of_muon, of_adamw | {"use_muon": False}], **optimizer)
    else:
        updates = stronghold.AdamW(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY, **optimizer)

    def step(*batches: Tensor) -> Tensor:
        losses = [_accumulate(model(batch.to(device), labels=batch.to(device)).loss, len(batches)) for batch in batches]
        updates.step()
        updates.zero_grad()
        return torch.stack(losses).mean()

    return Loop(
        step=step,
        values=lambda: _saved(model),
        report=lambda: stronghold.report(model),
        close=lambda: stronghold.close(model),
        model=model,
        optimizer=updates,
    )


def away(got: Sequence[float], wanted: Sequence[float]) -> float:
    """Returns how far the furthest loss is from what it should be, relative to that; infinity for NaN."""
    found = [abs(one - other) / abs(other) for one, other in zip(got, wanted, strict=True)]
    return max(one if one == one else float("inf") for one in found)


def _saved(model: nn.Module) -> dict[str, Tensor]:
    """Returns what stronghold.save writes: under the same names, however a model's parameters are cut apart.

    Of a model with quantised weights, which it does not write, what is trained.
    """
    if any(is_packed(parameter) for parameter in model.parameters()):
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return {name: parameter.detach().cpu().float().clone() for name, parameter in trained.items()}
    with tempfile.TemporaryDirectory() as folder:
        stronghold.save(model, folder, dtype=torch.float32)
        return {name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()}


class _Both:
    """Two optimizers where a loop has one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def _groups(model: nn.Module, lr: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the layers' matrices, and the rest."""
    assert isinstance(model, GPT)
    matrices = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
    known = set(matrices)
    rest = [parameter for parameter in model.parameters() if parameter not in known]
    how = {"lr": lr, "weight_decay": WEIGHT_DECAY}
    return {"params": matrices, **how}, {"params": rest, **how}


def _accumulate(loss: Tensor, batches: int) -> Tensor:
    (loss / batches).backward()
    return loss.detach().float()


def batches_of(samples: int, tokens: int, vocabulary: int, device: torch.device) -> Iterator[Tensor]:
    """Yields the same batches each time: multiples of a few numbers, which a model begins to learn in some steps."""
    generator = torch.Generator().manual_seed(0)
    for _ in itertools.count():
        strides = torch.randint(1, 8, (samples, 1), generator=generator)
        starts = torch.randint(vocabulary, (samples, 1), generator=generator)
        yield ((starts + strides * torch.arange(tokens)) % vocabulary).to(device)


def held_bytes(device: torch.device) -> int:
    """Returns what tensors take of ``device``, or 0 of the CPU, which does not count."""
    return _memory("memory_allocated", device)


def peak_bytes(device: torch.device) -> int:
    """Returns the most that tensors took since :func:`reset_peak`, or 0 of the CPU, which does not count."""
    return _memory("max_memory_allocated", device)


def reset_peak(device: torch.device) -> None:
    _memory("reset_peak_memory_stats", device)


def least_peak(loop: Loop, tokens: Tensor, device: torch.device, before_bytes: int) -> dict[str, int]:
    """Returns the peak of a step over a few ``tokens``, above ``before_bytes``, beside what the report says.

    It trains the sum of what the last norm gives: a loss over the vocabulary, with the sum of tied gradients, would
    take a multiple of the table in fp32, and a second copy of a slot could not be told from that.
    """
    report = loop.report()
    assert report is not None
    table = max(loop.model.parameters(), key=torch.Tensor.numel)
    synchronize(device)
    reset_peak(device)
    normed: list[Tensor] = []
    hook = loop.model.get_submodule("norm").register_forward_hook(lambda module, given, out: normed.append(out))
    try:
        loop.model(tokens)
    finally:
        hook.remove()
    normed.pop().float().sum().backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    synchronize(device)
    said = report.device_bytes  # with the gradients of a root that is updated there
    if report.resident_root:
        dtype = getattr(torch, report.dtype)
        said += scratch_bytes(table.numel(), device.type, dtype=dtype, states=report.states or "fp32")
    else:
        said += report.root_gradients_device_bytes
    return {"least_peak_bytes": max(0, peak_bytes(device) - before_bytes), "least_peak_said": said}


def _memory(name: str, device: torch.device) -> int:
    return 0 if device.type == "cpu" else getattr(torch.accelerator, name)(device) or 0
