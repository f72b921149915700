"""``stronghold.AdamW``, with torch.optim.AdamW's face: what the user's loop calls, and who takes a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stronghold.engine.taking_in import take_in_new, unmark_quantised
from stronghold.engine.updates import take_step
from stronghold.optim import HostAdamW, HostMuon, Threads
from stronghold.optim.groups import TORCH_DEFAULTS, check_torch_arguments
from stronghold.unit import ConsumedGradient, gradient_of, opaque, set_gradient

if TYPE_CHECKING:
    from stronghold.engine.engine import Engine


class AdamW(HostAdamW):
    """Updates the parameters of an offloaded model on the host's cores.

    The arithmetic and the ``state_dict()`` are those of ``torch.optim.AdamW`` (Loshchilov and Hutter, 2019), and every
    scheduler of ``torch.optim.lr_scheduler`` works with it. ``step()`` may return while updates still run; what
    reads a parameter, a gradient or ``optimizer.state`` in use waits for them.

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
            ``"auto"`` is what makes the shorter step by the plan that ``offload`` made or was given: ``"deferred"``
            where there is none, where the two are alike, and with ``max_grad_norm``.
        nonfinite: What becomes of a step whose gradients hold NaN or infinity: ``"raise"`` (NonFiniteGradientError,
            before any state has changed) or ``"skip"`` (nothing changes and ``skipped_steps`` counts it). Under
            ``in_backward`` the layers updated before the first such gradient stay updated and all others are left
            alone.
        threads: The cores an update may use; by default all that the process may use (affinity, cgroup quota). On a GPU
            one of them is left to the thread that launches its kernels, and of the others an update takes as few as
            keep the host's memory busy: the first updates from the second step on are timed with several numbers.
            It changes no bit of the result.

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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **TORCH_DEFAULTS}
        kept = {"states": states, "max_grad_norm": max_grad_norm, "nonfinite": nonfinite}
        self._open(params, defaults, update=update, threads=threads, **kept)

    def _open(
        self, params: Iterable[Any], defaults: dict[str, Any], *, update: str, threads: int | None, **settings: Any
    ) -> None:
        """Makes it the optimizer of the parameters' model, with all that it needs; ``settings`` are HostAdamW's."""
        if threads is not None and not (isinstance(threads, int) and threads >= 1):
            raise ValueError(
                f"threads must be a whole number of at least 1 (got {threads!r}); pass None for all usable cores"
            )
        if not isinstance(params, Tensor) and not (params := list(params)):  # of a tensor torch says what is wrong
            raise ValueError(
                "optimizer got an empty parameter list; pass model.parameters(), of which frozen ones are left alone "
                "(a process may have a stage in which all are)"
            )
        super().__init__(params, defaults, update="deferred" if update == "auto" else update, **settings)
        engine = self._engine
        if update == "auto" and settings["max_grad_norm"] is None:
            gains = engine.planned.gain_in_backward(by_muon=isinstance(self, HostMuon))
            self.in_backward = gains or engine.budget.update == "in_backward"
        if self.in_backward and engine.budget.accumulates:
            raise ValueError(
                "update='in_backward' updates each layer in every backward pass, and the model was offloaded for a "
                "loop that accumulates (got accumulate of 2 or more); use update='deferred', or offload without it"
            )
        self.kernel_threads = engine.update_threads() if threads is None else Threads(threads)
        self.reserve(engine.units, engine.device, sums_gradients=engine.sums_gradients, adds=engine.budget.accumulates)
        engine.adopt(self)
        unmark_quantised(engine.model())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its parameters must belong to the offloaded model of the others, or have been added to it."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        take_in_new(params)
        super().add_param_group({**param_group, "params": params})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dictionary of this class or of torch's, as :class:`HostAdamW` says; no step is open then."""
        super().load_state_dict(state_dict)
        self._engine.gradients.since_step.clear()

    def restart(self, steps: Mapping[Tensor, float], *, zeroed: bool = True) -> None:
        """Replaces all states, as :class:`HostAdamW` says; no step is open then."""
        super().restart(steps, zeroed=zeroed)
        self._engine.gradients.since_step.clear()

    @property
    def threads(self) -> int:
        """The cores that an update on the host takes, as far as that is measured."""
        return self.kernel_threads.count

    @property
    def _engine(self) -> Engine:
        engine: Engine = self._owner
        engine.check_open()
        return engine

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
        with torch.inference_mode(False), torch.no_grad():  # states made in it could not be written outside of it
            take_step(self._engine, self)
        return loss

    @opaque
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or with ``set_to_none=False`` fills them with zeros, as torch.optim does.

        Raises ValueError for the latter under ``in_backward``, which has no memory to fill: a layer that does not run
        would be decayed by the next step of torch.optim, and moved by its momentum.
        """
        if self.in_backward and not set_to_none:
            raise ValueError(
                "update='in_backward' keeps no gradients that could be filled with zeros (got set_to_none=False); call "
                "zero_grad(), or use update='deferred'"
            )
        self._engine.close_backward()
        for parameter in self._parameters():  # once closed, and not once for each parameter, as ``.grad`` would
            if set_to_none or isinstance(gradient_of(parameter), ConsumedGradient):  # which has no memory to fill
                set_gradient(parameter, None)
        if not set_to_none:
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in ``torch.optim.AdamW``'s format; 8-bit moments as copies in fp32.

        Warns once per model, after the first step, where the model has fp32 masters beside bf16 weights: neither this
        dictionary nor the model's holds their low bits.
        """
        result = super().state_dict()
        if any(self.state.values()) and self._engine.loses_masters():
            warnings.warn(
                "a training that is saved by its state dictionaries, in bf16, goes on from rounded weights: neither "
                "the model's state_dict() nor the optimizer's has the low bits of the fp32 masters. To go on to the "
                "bit, save by stronghold.checkpoint.save, or pass transformers.Trainer(callbacks=[stronghold.trainer."
                "KeepEverything()])",
                RuntimeWarning,
                stacklevel=2,
            )
        return result
