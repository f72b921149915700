"""Muon beside AdamW as an ordinary program has them: what ``stronghold.Muon`` is compared with. Holds no tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.engine import engine_of
from stronghold.unit import unit_of
from tests.muon_groups import ADAMW, MUON, split_up
from tests.native_reference import adamw_floats
from tests.reference import MOMENTS, Batch, rounded_to


class TorchMuon:
    """``torch.optim.Muon`` over the matrices and AdamW over the rest, on fp32 masters.

    With ``by_torch``, its arguments, that is ``torch.optim.AdamW``. Without, its step is in the kernel's order of
    operations, which ``tests/native_reference.py`` has: they are a rounding apart, and Newton and Schulz's iteration
    enlarges that.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        by_torch: dict[str, bool] | None = None,
        **muon: Any,
    ) -> None:
        matrices, rest = split_up(model)
        self.masters = {p: nn.Parameter(p.detach().clone()) for p in (*matrices, *rest)}
        self.muon = torch.optim.Muon([self.masters[p] for p in matrices], **{**MUON, **muon})
        self.adamw = torch.optim.AdamW([self.masters[p] for p in rest], **ADAMW, **(by_torch or {}))
        self.by_torch = by_torch is not None
        for parameter in self.masters:
            parameter.data = rounded_to(dtype, parameter.data)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.muon.param_groups + self.adamw.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in self.masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self.muon.step()
        if self.by_torch:
            self.adamw.step()
        else:
            self._step_rest()
        for parameter, master in self.masters.items():
            parameter.copy_(rounded_to(parameter.dtype, master))

    def _step_rest(self) -> None:
        (group,) = self.adamw.param_groups
        for master in group["params"]:
            if master.grad is None:
                continue
            state = self.adamw.state[master]
            if not state:
                state.update(step=torch.tensor(0.0), **{name: torch.zeros_like(master) for name in MOMENTS})
            state["step"] += 1
            kept = (master.detach(), *(state[name] for name in MOMENTS))
            new = adamw_floats(
                *(tensor.numpy() for tensor in kept),
                master.grad.numpy(),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=int(state["step"]),
                grad_scale=1.0,
            )
            for tensor, values in zip(kept, new, strict=True):
                tensor.copy_(torch.from_numpy(values))

    def zero_grad(self) -> None:
        for parameter in self.masters:
            parameter.grad = None


def train(
    model: nn.Module, optimizer: Any, batches: Sequence[Batch], *, accumulation: int = 1, clip: float | None = None
) -> list[float]:
    """The ordinary loop, with a warm-up of the learning rates and dropout; returns the losses."""
    torch.manual_seed(7)
    full = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for number, batch in enumerate(batches):
        for group, lr in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = lr * min(1.0, (number // accumulation + 1) / 10)
        loss = model(**batch).loss
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (number + 1) % accumulation == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def seen(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Returns copies of all masters and moments, by name."""
    if isinstance(optimizer, TorchMuon):
        states = {**optimizer.muon.state, **optimizer.adamw.state}
        masters = {name: optimizer.masters[parameter] for name, parameter in model.named_parameters()}
        at = [(name, master.detach(), states[master]) for name, master in masters.items()]
    else:
        engine, at = engine_of(model), []
        for name, parameter in model.named_parameters():
            value = engine.settled_value(unit_of(parameter), parameter.__dict__["_index"], exact=True)
            at.append((name, value, optimizer.state.get(parameter, {})))
    found = {}
    for name, value, state in at:
        found[name] = value.detach().cpu().clone()
        for key in (*MOMENTS, "momentum_buffer"):
            if key in state:
                found[f"{name} {key}"] = state[key].detach().cpu().clone()
    return found


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names what is not the same to the bit."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]
