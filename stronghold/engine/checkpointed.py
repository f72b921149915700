"""Activation checkpointing: what a function saved for its backward pass is computed again once that asks for it.

It does what ``torch.utils.checkpoint`` does with ``use_reentrant=False``, for functions of tensors on one device, and
in less time: of a layer's passes on a GPU the thread that launches them is what takes longest in small batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stronghold.engine.forward_hooks import remove_gradient_hooks
from stronghold.engine.saved import Saved
from stronghold.engine.surroundings import Surroundings
from stronghold.errors import OffloadedModelError
from stronghold.unit import as_written, opaque

_ROOT = torch.empty(0, device="cpu", requires_grad=True)
"""Gives :class:`_Inputs` a node in autograd's graph even where no input has a gradient."""
_OF_INPUTS = "; a layer that writes its own input needs offload(..., activations='keep')"
_Kind = tuple[torch.Size, torch.dtype, torch.device]


class SecondRuns:
    """The calls of a model's layers whose newest run has saved again what is not used yet.

    What of it lies in a slot of the window is true until another layer comes there, which shows in no version.
    """

    def __init__(self) -> None:
        self._frames: list[weakref.ref[_Frame]] = []

    def add(self, frame: _Frame) -> None:
        self._frames.append(weakref.ref(frame))

    def forget(self) -> None:
        """Lets go of what they have saved: a node of the graph that comes to it later has its layer run once more."""
        for reference in self._frames:
            if (frame := reference()) is not None:
                frame.forget()
        self._frames.clear()


def checkpointed(
    function: Callable[..., Any],
    *tensors: Tensor,
    device: torch.device,
    layer: str = "a layer",
    random: bool = True,
    runs: SecondRuns | None = None,
) -> Any:
    """Returns ``function(*tensors)``, which runs again in the backward pass, as far as that asks for what it saved.

    The second run finds autocast, the default device and, where it draws ``random`` numbers, their generators' states
    as the first one did: those of the CPU and of ``device``, of Python and of NumPy. It ends with the last tensor that
    the first run has saved; one that saves others raises OffloadedModelError, and where what it saved is written before
    it is used, RuntimeError: both name the ``layer``. A further backward pass, for a graph that is kept, runs it once
    more, and so does one for which ``runs`` were told to forget. The second run gets the tensors without their graph: a
    hook that the function registers on one of them, or on its node, is the first run's alone.
    """
    surroundings = Surroundings(device, random=random)
    frame = _Frame(function, tensors, surroundings, layer, runs)
    with torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack):
        output = function(*tensors)
    surroundings.ran()
    return output


class _Frame:
    """One call of a function, as long as autograd's graph of it is there."""

    __slots__ = (
        "__weakref__",
        "_function",
        "_inputs",
        "_kinds",
        "_layer",
        "_packed",
        "_runs",
        "_surroundings",
        "_task",
        "_values",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        tensors: tuple[Tensor, ...],
        surroundings: Surroundings,
        layer: str,
        runs: SecondRuns | None,
    ) -> None:
        self._function = function
        self._inputs: list[Saved | None]
        """None stands for the next of those that are ``packed``."""
        self._packed: Tensor | None = None
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:  # type: ignore[attr-defined]
            self._inputs = [*map(Saved.of_input, tensors)]
        else:  # whose inputs others pack, too: another checkpoint around this one, what keeps them on the host
            self._inputs = [Saved.of_input(tensor) if tensor.is_inference() else None for tensor in tensors]
            self._packed = _Inputs.apply(_ROOT, *(tensor for tensor in tensors if not tensor.is_inference()))
        self._surroundings = surroundings
        self._layer, self._runs = layer, runs
        self._kinds: list[_Kind] = []
        """Of what the first run has saved."""
        self._values: list[Saved | None] = []
        """What the newest run has saved again, and is not used yet."""
        self._task = -1
        """The backward pass that it was for."""

    @as_written
    def pack(self, tensor: Tensor) -> int:
        """Called by autograd in the first run: returns what stands for a tensor."""
        self._kinds.append((tensor.shape, tensor.dtype, tensor.device))
        return len(self._kinds) - 1

    @as_written
    def unpack(self, number: int) -> Tensor:
        """Called by autograd in a backward pass, most often once for each tensor, which is let go then."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task != self._task or (found := self._values[number]) is None:
            self._run_again(task)
            found = self._values[number]
            assert found is not None
        self._values[number] = None
        tensor, version = found
        if (0 if tensor.is_inference() else tensor._version) != version:
            found.value(self._layer)  # which raises
        return tensor

    def forget(self) -> None:
        """Lets go of what the newest run has saved."""
        self._values, self._task = [], -1

    @opaque
    def _run_again(self, task: int) -> None:
        self.forget()  # what a pass before has left unused
        values: list[Saved | None] = []
        kinds, count = self._kinds, len(self._kinds)

        @as_written
        def pack(tensor: Tensor) -> Tensor:
            number = len(values)
            if number == count:  # the layer has caught what ended its run
                raise _EndOfRunError
            if (tensor.shape, tensor.dtype, tensor.device) != kinds[number]:
                raise self._differs(number, tensor)
            kept = tensor if tensor.is_leaf else tensor.detach()  # as Saved.of
            values.append(Saved(kept, 0 if kept.is_inference() else kept._version))
            if number + 1 == count:
                raise _EndOfRunError
            return kept

        packed = iter(() if self._packed is None else self._packed.grad_fn.saved_tensors)  # type: ignore[union-attr]
        inputs = [next(packed) if saved is None else saved.value(self._layer, _OF_INPUTS) for saved in self._inputs]
        hooks, registered = torch.autograd.graph.saved_tensors_hooks(pack, _as_packed), RemovableHandle.next_id
        try:
            with self._surroundings.again(), torch.enable_grad(), hooks:
                twins = {id(one): _without_graph(one) for one in inputs}  # the same for the same
                self._function(*(twins[id(one)] for one in inputs))
        except _EndOfRunError:
            pass
        else:
            raise OffloadedModelError(
                f"a layer runs again in the backward pass, and must save what it saved in the forward pass (got "
                f"{len(values)} tensors of {count} in {self._layer}); have it compute alike in both, or use "
                "offload(..., activations='keep')"
            )
        finally:
            remove_gradient_hooks((one for one in inputs if isinstance(one, nn.Parameter)), since=registered)
        self._values, self._task = values, task
        if self._runs is not None:
            self._runs.add(self)

    def _differs(self, number: int, tensor: Tensor) -> OffloadedModelError:
        shape, dtype, device = self._kinds[number]
        return OffloadedModelError(
            f"a layer runs again in the backward pass, and must save what it saved in the forward pass (got, as number "
            f"{number} in {self._layer}, {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device} for {dtype} "
            f"of shape {tuple(shape)} on {device}); have it compute alike in both, or use "
            "offload(..., activations='keep')"
        )


class _EndOfRunError(BaseException):
    """Ends a second run that has saved all that the first one did; a layer that catches Exception does not see it."""


def _without_graph(tensor: Tensor) -> Tensor:
    """Returns the tensor without the graph that it comes from: a node of its own has the hooks that are registered.

    One without a gradient is the caller's own, and so is a parameter, whose hooks go behind the run.
    """
    if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
        return tensor
    twin: Tensor = tensor.detach().requires_grad_() if tensor.is_leaf else _Twin.apply(_ROOT, tensor.detach())
    if type(tensor) is Tensor and tensor.__dict__:  # what the caller has left on it
        twin.__dict__.update(tensor.__dict__)
    return twin


class _Twin(torch.autograd.Function):
    """Gives a tensor a node, and may be written in place, as a leaf may not."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, tensor: Tensor) -> Tensor:
        """Returns ``tensor``'s memory."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Is called where a function differentiates itself as far as that: nothing is beyond."""
        return None, None


def _as_packed(tensor: Tensor) -> Tensor:
    """Returns what a second run has saved, for a function that differentiates a part of itself."""
    return tensor


class _Inputs(torch.autograd.Function):
    """Has autograd save tensors under the hooks that hold around it."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, *tensors: Tensor) -> Tensor:
        """Returns an empty tensor whose node holds ``tensors``."""
        ctx.save_for_backward(*tensors)
        return torch.empty(0, device="cpu")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """Returns that of what ``forward`` returns, for a forward pass that has derivatives beside it."""
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Is not called: nothing is computed with what ``forward`` returns."""
        raise AssertionError
