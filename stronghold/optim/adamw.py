"""AdamW on the host, with torch.optim.AdamW's face."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stronghold import native
from stronghold.device import Event
from stronghold.errors import NonFiniteGradientError, OffloadedModelError
from stronghold.home import ConsumedGradient, Home, Owner, PendingGradient, home_of, is_shared
from stronghold.optim.states import Moments
from stronghold.optim.update import Change, Update

_TORCH_DEFAULTS = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""What torch.optim.AdamW keeps in its groups beside ours, so that state dictionaries fit both ways."""


class AdamW(torch.optim.Optimizer):
    """Updates the parameters of an offloaded model on the host's cores.

    The arithmetic and the ``state_dict()`` are those of ``torch.optim.AdamW`` (Loshchilov and Hutter, 2019), and every
    scheduler of ``torch.optim.lr_scheduler`` works with it. ``step()`` may return while updates still run; whoever
    reads a parameter, a moment or a gradient in use waits for them.

    ``update="deferred"`` updates layer after layer behind ``step()``, under the next forward pass.
    ``update="in_backward"`` updates each layer as soon as its gradient has reached the host and keeps no gradient: it
    takes no clipping over the whole model and no second ``backward()`` before ``step()``, which are refused.

    ``max_grad_norm`` clips the norm of all gradients, like ``torch.nn.utils.clip_grad_norm_`` but without a pass of
    its own over the gradients. ``nonfinite`` says what becomes of a step whose gradients hold NaN or infinity:
    ``"raise"`` (NonFiniteGradientError, before any state has changed) or ``"skip"`` (nothing changes and
    ``skipped_steps`` counts it). Under ``in_backward`` the layers updated before the first such gradient stay updated
    and all others are left alone.

    ``threads`` are the cores an update may use; by default all that the process may use. It changes no bit of the
    result.

    Raises ValueError for settings out of range and OffloadedModelError for parameters that are not all of one
    offloaded model.
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
    ) -> None:
        _check_one_of("states", states, ("fp32",))
        _check_one_of("update", update, ("deferred", "in_backward"))
        _check_one_of("nonfinite", nonfinite, ("raise", "skip"))
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, or None for no clipping (got {max_grad_norm})")
        if max_grad_norm is not None and update == "in_backward":
            raise ValueError(
                f"max_grad_norm needs all gradients before the first update (got max_grad_norm={max_grad_norm} with "
                "update='in_backward', which updates each layer during the backward pass); use update='deferred', or "
                "max_grad_norm=None"
            )
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1 (got {threads}); pass None for all usable cores")
        self.max_grad_norm = max_grad_norm
        self.in_backward = update == "in_backward"
        self.nonfinite = nonfinite
        self.threads = threads or native.usable_cores()
        self.skipped_steps = 0
        self._owner: Owner | None = None
        self._groups: dict[int, int] = {}
        self._spoiled = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **_TORCH_DEFAULTS}
        _check_group(defaults)
        super().__init__(params, defaults)
        assert self._owner is not None
        for home in self._owner.homes:
            self._allocate(home)
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
        for home in self._owner.homes if self._owner is not None else ():
            if home.updated is not None:
                home.updated.wait()  # for the host's sake: somebody is to read or write what the update writes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step with the gradients at hand; their updates run on behind the return.

        Raises NonFiniteGradientError, or skips the step, where a gradient is not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._owner is not None
        self._owner.close_backward()
        if self.in_backward:
            self.wait()  # the updates of the backward pass tell whether its gradients were finite
        found = {home: gradients for home in self._owner.homes if (gradients := self._collect(home))}
        scale = self._clip_scale([gradient for gradients in found.values() for gradient in gradients.values()])
        if scale is not None:
            updates = [self._update(home, gradients) for home, gradients in found.items()]
            for update in updates:
                update.submit(scale)
            self._owner.changed([update.home for update in updates])
            for update in updates:
                if update.home.is_lent or any(is_shared(change.gradient) for change in update.changes):
                    self.wait()  # what somebody else can read or write without our noticing must be done by now
                    break
                _mark_pending(update)
        self._owner.step_done()
        return loss

    def update_now(self, home: Home, gradients: dict[int, Tensor], ready: Event) -> Event:
        """Updates one layer during the backward pass, behind ``ready``; returns the update's event."""
        if home.was_written():
            home.take_writes()
        update = self._update(home, gradients)
        update.finite = self._stay_finite
        return update.submit(1.0, after=ready)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or with ``set_to_none=False`` fills them with zeros, as torch.optim does."""
        assert self._owner is not None
        self._owner.close_backward()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if isinstance(parameter.grad, ConsumedGradient):
                    parameter.grad = None  # there is no memory to fill with zeros
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its parameters must belong to the offloaded model of the others."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        for item in params:
            parameter = item[1] if isinstance(item, tuple) else item
            if not isinstance(parameter, Tensor):
                raise TypeError(f"parameters must be tensors, or pairs of a name and one (got {type(item).__name__})")
            home = home_of(parameter) if isinstance(parameter, nn.Parameter) else None
            if home is None or home.owner is None or (self._owner is not None and home.owner is not self._owner):
                raise OffloadedModelError(
                    f"every parameter must belong to one offloaded model (got one of shape {tuple(parameter.shape)} "
                    f"that belongs to {'no offloaded model' if home is None else 'another'}); call "
                    "stronghold.offload(model) first and pass that model's parameters()"
                )
            self._owner = home.owner
        _check_group({**self.defaults, **param_group})
        super().add_param_group({**param_group, "params": params})
        for parameter in self.param_groups[-1]["params"]:
            self._groups[id(parameter)] = len(self.param_groups) - 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dictionary of this class or of ``torch.optim.AdamW``.

        Moments keep their fp32 values, whatever the parameters' dtype. Raises ValueError for one of another shape or
        format, before anything has changed.
        """
        from stronghold.optim.exchange import checked_states

        loaded = checked_states(state_dict, self.param_groups)
        for group in state_dict["param_groups"]:
            _check_group(group)
        self.wait()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.__dict__.pop("state", None)  # where torch's __setstate__ puts it, and our property does not look
        self._state = defaultdict(dict)
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if number not in loaded:
                continue
            home, place = home_of(parameter), parameter.__dict__["_place"]
            assert home is not None
            exp_avg, exp_avg_sq = self.moments.of(home, place)
            exp_avg.copy_(loaded[number]["exp_avg"])
            exp_avg_sq.copy_(loaded[number]["exp_avg_sq"])
            step = torch.as_tensor(loaded[number]["step"], dtype=torch.float32, device="cpu").clone()
            self._state[parameter] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    @property
    def moments(self) -> Moments:
        if not hasattr(self, "_moments"):
            assert self._owner is not None
            self._moments = Moments(self._owner.device)
        return self._moments

    def _allocate(self, home: Home) -> None:
        places = [p for p in range(len(home.parameters)) if self.updates(home, p) and home.parameters[p].requires_grad]
        self.moments.allocate(home, places)
        if places and (home.is_edge or not self.in_backward):
            assert self._owner is not None
            home.place_gradients(self._owner.device)

    def updates(self, home: Home, place: int) -> bool:
        """Whether a parameter is in one of the groups."""
        return id(home.parameters[place]) in self._groups

    def _state_of(self, home: Home, place: int) -> dict[str, Tensor]:
        state = self._state[home.parameters[place]]
        if not state:
            exp_avg, exp_avg_sq = self.moments.begin(home, place)
            state.update(step=torch.zeros((), dtype=torch.float32), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        return state

    def _change(self, home: Home, place: int, gradient: Tensor) -> Change:
        """Notes what one parameter's update needs, with the group's settings as they are now."""
        group = self.param_groups[self._groups[id(home.parameters[place])]]
        return Change(
            place=place,
            gradient=gradient,
            state=self._state_of(home, place),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def _update(self, home: Home, gradients: dict[int, Tensor]) -> Update:
        update = Update(home, [self._change(home, place, gradient) for place, gradient in gradients.items()])
        update.threads = self.threads
        return update

    def _collect(self, home: Home) -> dict[int, Tensor]:
        """Returns the gradients that the step uses of one unit, by place, in host memory."""
        gradients: dict[int, Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for place, parameter in enumerate(home.parameters):
                gradient = parameter.grad
                if gradient is None or isinstance(gradient, ConsumedGradient) or not self.updates(home, place):
                    continue
                gradients[place] = gradient.detach()  # .grad itself becomes a PendingGradient; the update reads this
        if not gradients:
            return {}
        assert self._owner is not None
        self._owner.take_writes(home)
        return self._owner.gradients_on_host(home, gradients)

    def _clip_scale(self, gradients: list[Tensor]) -> float | None:
        """Returns what to multiply the gradients with, or None where the step must be skipped."""
        norm = math.sqrt(native.squared_norm(gradients, threads=self.threads))
        if self._spoiled or not math.isfinite(norm):
            self._spoiled = False
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

    def _stay_finite(self, gradients: list[Tensor]) -> bool:
        """Whether an update in the backward pass may go on; runs in the update thread, in order."""
        if not self._spoiled and not math.isfinite(native.squared_norm(gradients, threads=self.threads)):
            self._spoiled = True
        return not self._spoiled


def _mark_pending(update: Update) -> None:
    """Lets whoever uses a gradient before its update has read it wait."""
    with torch._C.DisableTorchFunctionSubclass():
        for change in update.changes:
            gradient = update.home.parameters[change.place].grad
            if type(gradient) is Tensor:
                gradient.__class__ = PendingGradient
                gradient._home = update.home  # type: ignore[attr-defined]


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))} (got {value!r})")


def _check_group(group: dict[str, Any]) -> None:
    lr, betas, eps, weight_decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers (got {betas!r}), such as (0.9, 0.999)")
    beta1, beta2 = betas
    for name, value, good in (
        ("lr", lr, float(lr) >= 0),
        ("betas", (beta1, beta2), 0 <= beta1 < 1 and 0 <= beta2 < 1),
        ("eps", eps, eps >= 0),
        ("weight_decay", weight_decay, weight_decay >= 0),
    ):
        if not good:
            rule = "both in [0, 1)" if name == "betas" else "zero or more"
            raise ValueError(f"{name} must be {rule} (got {value})")
    for name, supported in (("amsgrad", False), ("maximize", False), ("decoupled_weight_decay", True)):
        if bool(group.get(name, supported)) is not supported:
            raise ValueError(f"{name}={not supported} is not supported (got it in a parameter group); leave it out")
