"""Parameters that wait for their update when the user looks at them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from stronghold.errors import OffloadedModelError
from stronghold.unit.becoming import become, becoming
from stronghold.unit.calls import ALIASES, FACTS, check_not_transformed, hands_out, key_of, walk, written
from stronghold.unit.compiler import opaque
from stronghold.unit.copies import blocking, wait_for_factors
from stronghold.unit.dtypes import check_mixed
from stronghold.unit.own_writes import watched_data
from stronghold.unit.packed import copy_of, stand_in
from stronghold.unit.unit import Unit


class _Parameter(nn.Parameter):
    """One whose gradient the user may look at, and which may be copied, when a backward pass has failed.

    ``copy.deepcopy`` and ``pickle`` make plain parameters.
    """

    _unit_reference: weakref.ref[Unit]

    @property
    def _unit(self) -> Unit | None:
        return _unit_of(self)

    @property
    @opaque
    def grad(self) -> Tensor | None:  # type: ignore[override]
        _end_failed_backward(self)
        return gradient_of(self)

    @grad.setter
    @opaque
    def grad(self, value: Tensor | None) -> None:
        _end_failed_backward(self)
        if value is not None and value.is_cpu and (unit := _unit_of(self)) is not None:
            unit.copies.wait()
        set_gradient(self, value)

    @grad.deleter
    @opaque
    def grad(self) -> None:
        self.grad = None

    @opaque
    def detach(self) -> Tensor:
        """Waits, in another thread than the one that computes, for the layer: its slot is another's then.

        ``state_dict()`` calls it. The user has the values of a backward pass that has failed in their place.
        """
        if (unit := _unit_of(self)) is None:
            return super().detach()
        if isinstance(self, BoundParameter):
            with unit.in_turn():
                _end_failed_backward(self)
                if isinstance(self, BoundParameter):
                    return super().detach()
        unit.wait_updated()
        with becoming:  # else it could come to a slot meanwhile
            if not isinstance(self, BoundParameter):
                return super().detach()
        return self.detach()

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        _end_failed_backward(self)
        if (own := self.__dict__.get("_own_class")) is not None:
            return memo[id(self)] if id(self) in memo else copy_of(self, own, memo)
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex):
        _end_failed_backward(self)
        return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, {})


class OffloadedParameter(_Parameter):
    """What a parameter of an offloaded model is while it is not being computed with.

    An ordinary parameter on the CPU (of the root: on the device) in every respect but one: a user who reads or writes
    its values waits until the update under way has written them.
    """

    @classmethod
    @opaque
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        key = key_of(func)
        if key == "set:data" and isinstance(args[0], OffloadedParameter):
            return args[0]._set_data(args[1])

        def call() -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                try:
                    return func(*args, **kwargs)
                except RuntimeError as error:
                    for value, unit in placed:
                        check_mixed(error, unit.name, value.dtype, walk((args, tuple(kwargs.values()))))
                    raise

        placed: list[tuple[OffloadedParameter, Unit]] = []
        if key in FACTS:
            return call()
        args, kwargs = blocking(key, args, kwargs)
        used = [v for v in walk((args, tuple(kwargs.values()))) if isinstance(v, OffloadedParameter)]
        placed = [(value, unit) for value in used if (unit := _unit_of(value)) is not None]
        for _, unit in placed:
            check_not_transformed(unit.name)
            unit.wait_updated()
        wait_for_factors(key, (unit for _, unit in placed), args, kwargs)
        targets = {id(target) for target in written(func, args, kwargs)}
        into = [(value, unit) for value, unit in placed if id(value) in targets]
        if len(into) == 1:
            (value, unit), *_ = into
            return unit.write(value.__dict__["_index"], call)
        for _, unit in into:
            unit.check_own()
        for value, unit in into:  # one of many (torch._foreach_*): told apart by blocks, not by copies of all
            unit.mark_aliased(value.__dict__["_index"], unseen=True)
        result = call()
        for value, unit in placed:
            if hands_out(key, result, value):
                unit.mark_aliased(value.__dict__["_index"], unseen=key in ALIASES)
                unit.copies.expected = True
        return result

    @opaque
    def set_(self, *source: Any, **more: Any) -> Tensor:
        """Takes the values over, as ``p.data = value`` does; ``nn.utils.parametrize`` calls it to put a weight back."""
        if not (len(source) == 1 and source[0] is self):
            self._set_data(torch.empty(0, dtype=self.dtype, device=self.device).set_(*source, **more))
        return self

    def _set_data(self, value: Tensor) -> None:
        """Takes the values of ``p.data = value``, or ``p.set_(value)``, over: the memory itself is the unit's."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise OffloadedModelError(
                f"the data of an offloaded parameter keeps its shape and dtype ({tuple(self.shape)} {self.dtype}; got "
                f"{tuple(value.shape)} {value.dtype}); change the parameter before offload(), where "
                "peft.prepare_model_for_kbit_training() belongs, too: adapters do not need it. Make stronghold.AdamW "
                "before TRL's trainer, which otherwise rounds the adapters of a quantised base to bfloat16"
            )
        if (unit := _unit_of(self)) is not None:
            _check_held_by_none(unit, index_of(self), value)
        with torch.no_grad():
            self.copy_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if (unit := _unit_of(self)) is not None:
            unit.wait_updated()
        with torch._C.DisableTorchFunctionSubclass():
            return repr(nn.Parameter(self.detach(), self.requires_grad))


class BoundParameter(_Parameter):
    """What a parameter is while its layer is on the device: a plain one, but for a backward pass that has failed.

    While a compiler traces it, it has no gradient: of that the compiler would make a likeness, on the parameter's own
    device, where a gradient that the user keeps is on the host.
    """

    data = watched_data  # type: ignore[assignment]

    @_Parameter.grad.getter  # type: ignore[attr-defined, untyped-decorator]
    @opaque
    def grad(self) -> Tensor | None:
        if TracingContext.try_get() is not None:
            return None
        _end_failed_backward(self)
        return gradient_of(self)

    def set_(self, *source: Any, **more: Any) -> Tensor:
        """Counts no write where the tensor is set to itself, as ``torch.nn.utils.parametrize`` does for PEFT."""
        if len(source) == 1 and source[0] is self and not more:
            return self
        done: Tensor = super().set_(*source, **more)
        return done


@contextmanager
def bound(units: Sequence[Unit]) -> Iterator[None]:
    """Makes the parameters of units on the device plain ones for the block, which computes with them.

    The updates under way, if any, are waited for.
    """
    for unit in units:
        unit.wait_updated()
    parameters = [parameter for unit in units for parameter in unit.parameters]
    become(BoundParameter, parameters)
    try:
        yield
    finally:
        become(OffloadedParameter, parameters)


def check_not_swapped(name: str, parameters: Iterable[nn.Parameter]) -> None:
    """Raises OffloadedModelError where the user has swapped one of the unit ``name`` for another tensor."""
    if not all("_unit_reference" in parameter.__dict__ for parameter in parameters):
        raise OffloadedModelError(
            "an offloaded model must keep the parameters that it had at offload() (got one in "
            f"{name} that torch.utils.swap_tensors has exchanged, which load_state_dict calls as well after "
            "torch.__future__.set_swap_module_params_on_conversion(True)); write into the parameter, "
            "p.data.copy_(values), or exchange it before offload()"
        )


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Returns ``parameter.grad`` as autograd has it, also while a backward pass is under way."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.grad.__get__(parameter)  # type: ignore[union-attr]


def present_gradients(parameters: Iterable[Tensor]) -> dict[int, Tensor]:
    """Returns those that there are, by place."""
    with torch._C.DisableTorchFunctionSubclass():
        gradients = map(Tensor.grad.__get__, parameters)  # type: ignore[union-attr]
        return {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}


def set_gradient(parameter: Tensor, value: Tensor | None) -> None:
    """Sets it."""
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.grad.__set__(parameter, value)  # type: ignore[union-attr]


def take_gradient(parameter: Tensor) -> Tensor | None:
    """Returns it, and leaves None in its place."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = Tensor.grad.__get__(parameter)  # type: ignore[union-attr]
        if gradient is not None:
            Tensor.grad.__set__(parameter, None)  # type: ignore[union-attr]
        return gradient


def _check_held_by_none(unit: Unit, index: int, value: Tensor) -> None:
    """Raises OffloadedModelError where the user holds a tensor over a parameter's memory, other than ``value`` itself.

    It would change with the parameter, whose memory stays the unit's.
    """
    unit.wait_updated()
    own = (unit.on_device or unit.weight)[index]
    with torch._C.DisableTorchFunctionSubclass():
        itself = own.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    if not itself and unit.is_aliased_at(index):
        raise OffloadedModelError(
            "p.data = values writes into an offloaded parameter's own memory, which a tensor that is still held has as "
            f"well, or a graph without its backward pass (one of {unit.name}), and would change with it: the way back, "
            "p.data = kept, would find the new values. Keep a copy, kept = p.data.clone(), write by "
            "p.data.copy_(values), or compute the values under torch.no_grad(), as in with torch.no_grad(): "
            "model.unmerge_adapter()"
        )


def _end_failed_backward(parameter: Tensor) -> None:
    """Publishes the gradients of a backward pass that an error has ended, before the user sees or drops them."""
    if (unit := _unit_of(parameter)) is not None and torch._C._current_graph_task_id() == -1:
        unit.end_backward()


def _unit_of(parameter: Tensor) -> Unit | None:
    reference = parameter.__dict__.get("_unit_reference")
    return None if reference is None else reference()


def unit_of(parameter: nn.Parameter) -> Unit | None:
    """Returns where a parameter of an offloaded model lives, or None for any other parameter."""
    found = _unit_of(parameter)
    return _unit_of(stand_in(parameter)) if found is None else found


def index_of(parameter: nn.Parameter) -> int:
    """Returns the number of a parameter of an offloaded model in its unit: of a quantised weight that of a part."""
    index: int = stand_in(parameter).__dict__["_index"]
    return index
