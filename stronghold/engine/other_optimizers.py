"""Other optimizers than ours: what they write is seen, by whatever way they write it, and what they hold is counted.

The hooks are of every ``torch.optim.Optimizer`` in the process, and do nothing where none of its parameters belongs to
an offloaded model.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stronghold.engine.engine import Engine
from stronghold.engine.writing import Units, begin, end, units_of
from stronghold.errors import OffloadedModelError
from stronghold.optim import HostAdamW
from stronghold.optim.held import held_bytes, name_of
from stronghold.unit import Unit, gradient_of, make_ours, make_plain, opaque, wait_for_copies


@opaque
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    units = _stepped(optimizer)
    for unit, indices in units.items():
        _check_exact(optimizer, unit, indices)
    begin(units)
    wait_for_copies(units)
    if units:
        _limit_found_inf(optimizer)
    _make_ours(optimizer)  # of a step that has failed
    for unit, indices in units.items():
        for index in indices:  # a compiler knows nothing of our gradients' class
            gradient = gradient_of(unit.parameters[index])
            if gradient is not None and make_plain(gradient):
                _plain.setdefault(optimizer, []).append((weakref.ref(gradient), weakref.ref(unit)))


@opaque
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    units = _stepped(optimizer)
    end(units)
    _make_ours(optimizer)
    for engine in {id(unit.owner): unit.owner for unit in units}.values():
        if isinstance(engine, Engine) and optimizer not in engine.held.other_optimizers:
            host_bytes, device_bytes = held_bytes(optimizer)
            what = f"the states of {name_of(optimizer)}"
            engine.budget.check_budgets(host_bytes=host_bytes, device_bytes=device_bytes, what=what)
            engine.held.other_optimizers.add(optimizer)


def _make_ours(optimizer: Optimizer) -> None:
    for gradient, unit in _plain.pop(optimizer, []):
        if (one := gradient()) is not None and (its := unit()) is not None:
            make_ours(one, its)


_plain: weakref.WeakKeyDictionary[Optimizer, list[tuple[weakref.ref[Tensor], weakref.ref[Unit]]]]
_plain = weakref.WeakKeyDictionary()
"""The gradients that are plain tensors for an optimizer's step alone."""


def _limit_found_inf(optimizer: Optimizer) -> None:
    """Has a fused optimizer skip a step with infinite gradients on the host and on a device.

    ``torch.amp.GradScaler`` tells it on how many devices there are some, and its kernels skip a step for one alone.
    """
    found = getattr(optimizer, "found_inf", None)
    if isinstance(found, Tensor):
        optimizer.found_inf = found.clamp(max=1)  # type: ignore[attr-defined]


def _stepped(optimizer: Optimizer) -> Units:
    if isinstance(optimizer, HostAdamW):
        return {}
    return units_of(p for group in optimizer.param_groups for p in group["params"])


def _check_exact(optimizer: Optimizer, unit: Unit, indices: list[int]) -> None:
    """Refuses to step bf16 weights whose fp32 masters have more bits, which would be lost a step after the other."""
    if any(unit.has_finer_master(index) for index in indices):
        raise OffloadedModelError(
            "an optimizer must step the fp32 masters of a model that computes in bf16, and only stronghold.AdamW does "
            f"(got {name_of(optimizer)} over the bf16 weights of {unit.name}); use stronghold.AdamW or "
            "stronghold.Muon, or offload(dtype=torch.float32), or convert the model to bf16 before offload() to train "
            "it without masters"
        )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
