"""AdamW on the host, with torch.optim.AdamW's face."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.device import Event
from stronghold.errors import NonFiniteGradientError, OffloadedModelError
from stronghold.optim.exchange import as_saved, checked_states, take_saved
from stronghold.optim.groups import (
    TORCH_DEFAULTS,
    check_group,
    check_groups,
    check_torch_arguments,
)
from stronghold.optim.states import Moments
from stronghold.optim.update import Change, Update
from stronghold.settings import check_optimizer
from stronghold.unit import (
    ConsumedGradient,
    HostGrad,
    Owner,
    Unit,
    gradient_of,
    is_shared,
    opaque,
    set_gradient,
    unit_of,
)


class AdamW(torch.optim.Optimizer):
    """Updates the parameters of an offloaded model on the host's cores.

    The arithmetic and the ``state_dict()`` are those of ``torch.optim.AdamW`` (Loshchilov and Hutter, 2019), and every
    scheduler of ``torch.optim.lr_scheduler`` works with it. ``step()`` may return while updates still run; what
    reads a parameter, a moment or a gradient in use waits for them.

    Of ``torch.optim.AdamW``'s other arguments (``amsgrad``, ``maximize``, ``foreach``, ``capturable``,
    ``differentiable``, ``fused``) it takes those values that ask for nothing: False, and None where torch has it.

    Args:
        params: Parameters of one offloaded model, or groups of them, as torch.optim takes them.
        lr: The learning rate; a group may have its own, as of the next three.
        betas: The decay of the two moments.
        eps: What is added to the root of the second moment.
        weight_decay: The decay, times the learning rate, of each weight.
        states: ``"fp32"``, or ``"8bit"`` for both moments in eight bits, 2 bytes per parameter rather than 8 (how, and
            after whom, is in :mod:`stronghold.optim.blocks`); its ``state_dict()`` has them in fp32, and loading that
            restores them exactly.
        max_grad_norm: The largest norm of all gradients, like ``torch.nn.utils.clip_grad_norm_`` but without a pass of
            its own over the gradients; None for any.
        update: ``"deferred"`` updates layer after layer behind ``step()``, under the next forward pass.
            ``"in_backward"`` updates each layer as soon as its gradient has reached the host and keeps no gradient: it
            takes no clipping over the whole model and no second ``backward()`` before ``step()``, which are refused.
            The norm of its gradients may be asked for (``clip_grad_norm_`` with a bound that it does not reach).
        nonfinite: What becomes of a step whose gradients hold NaN or infinity: ``"raise"`` (NonFiniteGradientError,
            before any state has changed) or ``"skip"`` (nothing changes and ``skipped_steps`` counts it). Under
            ``in_backward`` the layers updated before the first such gradient stay updated and all others are left
            alone.
        threads: The cores an update may use; by default all that the process may use (affinity, cgroup quota), less
            one on a GPU for the thread that launches its kernels. It changes no bit of the result.

    Raises:
        ValueError: Settings out of range.
        OffloadedModelError: Parameters that are not all of one offloaded model.
        BudgetError: States that do not fit the model's budgets.
        MemoryError: States that the machine can never hold, or that the system refuses.
        StoreError: A disk that has no room for them, or still has those of an optimizer before.

    Warns where the host's memory is not free now.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        states: str = "fp32",
        max_grad_norm: float | None = None,
        update: str = "deferred",
        nonfinite: str = "raise",
        threads: int | None = None,
        **of_torch: Any,
    ) -> None:
        check_torch_arguments(of_torch)
        check_optimizer(states, update, nonfinite, max_grad_norm)
        if threads is not None and not (isinstance(threads, int) and threads >= 1):
            raise ValueError(
                f"threads must be a whole number of at least 1 (got {threads!r}); pass None for all usable cores"
            )
        self.states = states
        self.max_grad_norm = max_grad_norm
        self.in_backward = update == "in_backward"
        self.nonfinite = nonfinite
        self.skipped_steps = 0
        self._owner: Owner | None = None
        self._groups: dict[int, int] = {}
        self._moments = Moments(states)
        self._in_order: list[Update] = []
        """Updates of the backward pass that were issued to the device before the host saw their gradients."""
        self._checked = False
        """Whether the settings were checked since the last step."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **TORCH_DEFAULTS}
        check_group(defaults)
        super().__init__(params, defaults)
        assert self._owner is not None
        self.threads: int = self._owner.update_threads() if threads is None else threads
        self._check_memory(self._owner)
        before = [unit for unit in self._owner.units if unit.gradients.buffer is None]
        try:
            for unit in self._owner.units:
                self._allocate(unit)
        except BaseException as error:
            for unit in before:
                unit.gradients.release()
            self._moments = Moments(states)  # gives back what was had
            if not isinstance(error, MemoryError):
                raise
            raise MemoryError(
                f"AdamW's states and gradients could not be had: {error}; use states='8bit' or "
                "update='in_backward', or freeze parameters"
            ) from error
        self._owner.adopt(self)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The moments and step counts, keyed by parameter; waits for the updates that write them."""
        self.wait()
        return self._state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._state = value

    def __getstate__(self) -> dict[str, Any]:
        raise OffloadedModelError(
            "an optimizer over an offloaded model cannot be copied or pickled, for it updates that model's own memory; "
            "copy or save its state_dict(), and load that into an optimizer over the other model"
        )

    def wait(self) -> None:
        """Blocks until every update under way is complete."""
        if self._owner is not None:
            self._owner.wait_updates()

    @opaque
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step with the gradients at hand; their updates run on behind the return.

        Raises NonFiniteGradientError, or skips the step, where a gradient is not finite, and ValueError where the user
        has put a setting into a group that is out of range or not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._owner is not None
        self._check_settings()
        self._checked = False
        with self._owner.turn():
            self._step()
        return loss

    def _step(self) -> None:
        assert self._owner is not None
        self._owner.close_backward()
        if self.in_backward:
            self.wait()  # the updates of the backward pass tell whether its gradients were finite
        given = {unit: gradients for unit in self._owner.units if (gradients := self._gradients(unit))}
        self._owner.agree(given)
        found = {unit: self._collect(unit, gradients) for unit, gradients in given.items()}
        scale = self._clip_scale(found)
        if scale is not None:
            updates = self._prepared(found)
            for update in updates:
                update.submit(scale)
            self._owner.changed([update.unit for update in updates])
            for update in updates:
                if update.unit.is_aliased or any(is_shared(change.gradient.values) for change in update.changes):
                    self.wait()  # what the user can read or write unseen must be done by now
                    break
                update.mark_pending()
        self._owner.step_done()

    def update_now(self, unit: Unit, gradients: dict[int, HostGrad], ready: Event | None) -> Event | None:
        """Updates one layer during the backward pass, behind ``ready``; returns the update's event."""
        if not self._checked:
            self._check_settings()
        if unit.was_written():
            unit.take_writes()
        (update,) = self._prepared({unit: gradients}, checked=True)
        done = update.submit(1.0, after=ready)
        if done is None and not unit.weight[0].is_cpu:
            self._in_order.append(update)
        return done

    @opaque
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or with ``set_to_none=False`` fills them with zeros, as torch.optim does.

        Raises ValueError for the latter under ``in_backward``, which has no memory to fill: a layer that does not run
        would be decayed by the next step of torch.optim, and moved by its momentum.
        """
        assert self._owner is not None
        if self.in_backward and not set_to_none:
            raise ValueError(
                "update='in_backward' keeps no gradients that could be filled with zeros (got set_to_none=False); call "
                "zero_grad(), or use update='deferred'"
            )
        self._owner.close_backward()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if isinstance(gradient_of(parameter), ConsumedGradient):
                set_gradient(parameter, None)  # there is no memory to fill with zeros
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its parameters must belong to the offloaded model of the others."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        for item in params:
            parameter = item[1] if isinstance(item, tuple) else item
            if not isinstance(parameter, Tensor):
                raise TypeError(f"parameters must be tensors, or pairs of a name and one (got {type(item).__name__})")
            unit = unit_of(parameter) if isinstance(parameter, nn.Parameter) else None
            if unit is None or unit.owner is None or (self._owner is not None and unit.owner is not self._owner):
                raise OffloadedModelError(
                    f"every parameter must belong to one offloaded model (got one of shape {tuple(parameter.shape)} "
                    f"that belongs to {'no offloaded model' if unit is None else 'another'}); call "
                    "stronghold.offload(model) first, when all its modules are there (PEFT's adapters too), and pass "
                    "that model's parameters()"
                )
            self._owner = unit.owner
        check_group({**self.defaults, **param_group})
        super().add_param_group({**param_group, "params": params})
        for parameter in self.param_groups[-1]["params"]:
            self._groups[id(parameter)] = len(self.param_groups) - 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in ``torch.optim.AdamW``'s format; 8-bit moments as copies in fp32.

        Warns once per model, after the first step, where the model has fp32 masters beside bf16 weights: neither this
        dictionary nor the model's holds their low bits.
        """
        result = super().state_dict()
        if result["state"]:
            self._warn_of_masters()
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = result["state"].items()
        return {**result, "state": {n: as_saved(state, parameters[n].shape) for n, state in states}}

    def _warn_of_masters(self) -> None:
        assert self._owner is not None
        if self._owner.masters_kept or not any(unit.masters for unit in self._owner.units):
            return
        self._owner.masters_kept = True
        warnings.warn(
            "a training that is saved by its state dictionaries, in bf16, goes on from rounded weights: neither the "
            "model's state_dict() nor the optimizer's has the low bits of the fp32 masters. To go on to the bit, save "
            "by stronghold.checkpoint.save, or pass transformers.Trainer(callbacks=[stronghold.trainer."
            "KeepEverything()])",
            RuntimeWarning,
            stacklevel=3,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dictionary of this class or of ``torch.optim.AdamW``.

        Moments keep their fp32 values, whatever the parameters' dtype. Raises ValueError for one of another shape or
        format, before anything has changed.
        """
        loaded = checked_states(state_dict, self.param_groups, eight_bits=self.states == "8bit")
        missing: dict[Unit, list[int]] = {}
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if number in loaded and (unit := unit_of(parameter)) is not None:
                missing.setdefault(unit, []).append(parameter.__dict__["_index"])
        self._provide(missing)
        self.wait()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.__dict__.pop("state", None)  # where torch's __setstate__ puts it, and our property does not look
        self._state = defaultdict(dict)
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if number not in loaded:
                continue
            unit, index = unit_of(parameter), parameter.__dict__["_index"]
            assert unit is not None
            unit.mark_dirty()
            self._state[parameter] = take_saved(loaded[number], self._moments.of(unit, index))

    def restart(self, steps: Mapping[Tensor, float], *, zeroed: bool = True) -> None:
        """Replaces all states: the parameters of ``steps`` have one, at that step, whose moments the caller fills.

        The memory for those of the others is all zero if it was not used before, unless ``zeroed`` is False.
        Raises BudgetError where they do not fit, before anything has changed.
        """
        placed = [(p, unit, p.__dict__["_index"]) for p in steps if (unit := unit_of(p)) is not None]  # type: ignore[arg-type]
        missing: dict[Unit, list[int]] = {}
        for _, unit, index in placed:
            missing.setdefault(unit, []).append(index)
        self._provide(missing)
        self.wait()
        self._state = defaultdict(dict)
        for parameter, unit, index in placed:
            exp_avg, exp_avg_sq = self._moments.of(unit, index)
            step = torch.tensor(steps[parameter], dtype=torch.float32)
            self._state[parameter] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if not zeroed:
            self._moments.distrust()

    def forget(self) -> None:
        """Gives the memory of the states back: called when the model is closed."""
        self._state = defaultdict(dict)
        self._moments = Moments(self.states)
        self._in_order.clear()

    def _trained(self, unit: Unit) -> list[int]:
        parameters = enumerate(unit.parameters)
        return [index for index, p in parameters if self.updates(unit, index) and p.requires_grad]

    def _check_memory(self, owner: Owner) -> None:
        """Refuses states and gradients that do not fit the model's budgets, before any are allocated."""
        host_bytes = device_bytes = disk_bytes = 0
        for unit in owner.units:
            states = self._moments.missing_bytes(unit, self._trained(unit))
            device_bytes += states if unit.lives("moments") == "device" else 0
            host_bytes += states if unit.lives("moments") == "host" else 0
            disk_bytes += states if unit.lives("moments") == "disk" else 0
            if self._keeps_gradients(unit) and unit.gradients.buffer is None:
                host_bytes += unit.gradients.layout.total_bytes
        owner.check_memory(
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            disk_bytes=disk_bytes,
            what="AdamW, its states and gradients,",
        )

    def _provide(self, indices: Mapping[Unit, list[int]]) -> None:
        """Allocates moments of parameters that had none when the optimizer was made; refuses what does not fit."""
        assert self._owner is not None
        missing = {unit: size for unit, its in indices.items() if (size := self._moments.missing_bytes(unit, its))}
        if not missing:
            return
        host_bytes, device_bytes, disk_bytes = (
            sum(size for unit, size in missing.items() if unit.lives("moments") == where)
            for where in ("host", "device", "disk")
        )
        what = f"AdamW's state of {', '.join(unit.name for unit in missing)[:200]}"
        self._owner.check_memory(host_bytes=host_bytes, device_bytes=device_bytes, disk_bytes=disk_bytes, what=what)
        for unit in missing:
            self._moments.allocate(unit, indices[unit])

    def _keeps_gradients(self, unit: Unit) -> bool:
        assert self._owner is not None
        sums = not self.in_backward or self._owner.sums_gradients
        return bool(self._trained(unit)) and not unit.resident and (unit.has_device_copy if unit.is_root else sums)

    def _allocate(self, unit: Unit) -> None:
        self._moments.allocate(unit, self._trained(unit))
        if self._keeps_gradients(unit):
            assert self._owner is not None
            unit.gradients.allocate(self._owner.device)

    def updates(self, unit: Unit, index: int) -> bool:
        """Whether a parameter is in one of the groups."""
        return id(unit.parameters[index]) in self._groups

    def _state_of(self, unit: Unit, index: int) -> dict[str, Any]:
        """Returns the state of a parameter, or a first one that is not in use yet."""
        if state := self._state.get(unit.parameters[index]):
            return state
        exp_avg, exp_avg_sq = self._moments.begin(unit, index)
        return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def _check_settings(self) -> None:
        """Refuses what the user has set since the optimizer was made, before anything is updated with it."""
        check_groups(self.param_groups, self._groups)
        update = "in_backward" if self.in_backward else "deferred"
        check_optimizer(self.states, update, self.nonfinite, self.max_grad_norm)
        self._checked = True

    def _change(self, unit: Unit, index: int, gradient: HostGrad) -> Change:
        """Notes what one parameter's update needs, with the group's settings as they are now."""
        group = self.param_groups[self._groups[id(unit.parameters[index])]]
        beta1, beta2 = group["betas"]
        return Change(
            index=index,
            gradient=gradient,
            state=self._state_of(unit, index),
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        )

    def _prepared(self, found: Mapping[Unit, Mapping[int, HostGrad]], *, checked: bool = False) -> list[Update]:
        """Returns the updates of all units, which nothing refuses any more; where one is refused, nothing changes.

        They are in the order in which they are to be submitted.
        """
        without = {unit: [p for p in its if not self._state.get(unit.parameters[p])] for unit, its in found.items()}
        self._provide(without)
        updates: list[Update] = []
        try:
            # What the computation itself updates comes last, so that the host is at work meanwhile.
            for unit, gradients in sorted(found.items(), key=lambda item: item[0].resident):
                changes = [self._change(unit, index, gradient) for index, gradient in gradients.items()]
                updates.append(Update(unit, changes, threads=self.threads, checked=checked))
                updates[-1].prepare()
        except BaseException:
            for update in updates:
                update.cancel()
            raise
        changed = {update.unit: update.changes for update in updates}
        for unit in found:
            self._state.update((unit.parameters[change.index], change.state) for change in changed[unit])
        return updates

    def _gradients(self, unit: Unit) -> dict[int, Tensor]:
        """Returns the gradients that the step uses of one unit, by index."""
        gradients: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(unit.parameters):
                gradient = gradient_of(parameter)
                if gradient is None or isinstance(gradient, ConsumedGradient) or not self.updates(unit, index):
                    continue
                if gradient.layout != torch.strided:
                    raise OffloadedModelError(
                        f"{unit.name} has a gradient of layout {gradient.layout}, and only dense gradients are "
                        "updated; pass sparse=False to its embedding"
                    )
                gradients[index] = gradient
        return gradients

    def _collect(self, unit: Unit, gradients: dict[int, Tensor]) -> dict[int, HostGrad]:
        """Returns the gradients where the unit is updated."""
        assert self._owner is not None
        self._owner.take_writes(unit)
        return self._owner.collect(unit, gradients)

    def _clip_scale(self, found: Mapping[Unit, Mapping[int, HostGrad]]) -> float | None:
        """Returns what to multiply the gradients with, or None where the step must be skipped."""
        assert self._owner is not None
        found_inf = self.in_backward and self._owner.take_found_inf()
        norm = math.sqrt(self._owner.sum_squares(found, finite=not found_inf))
        if not math.isfinite(norm):
            for update in self._in_order:
                if not update.finite:
                    update.take_back()
        self._in_order.clear()
        if not math.isfinite(norm):
            if self.nonfinite == "raise":
                raise NonFiniteGradientError(
                    f"the gradients' norm must be finite (got {norm}); nothing was updated"
                    f"{' from the first such layer on' if self.in_backward else ''}. Lower the learning rate, clip, or "
                    "pass nonfinite='skip' to go on without such steps"
                )
            self.skipped_steps += 1
            return None
        if self.max_grad_norm is None:
            return 1.0
        # torch.nn.utils.clip_grad_norm_'s coefficient
        return min(1.0, self.max_grad_norm / (norm + 1e-6))
