"""What a layer's forward and backward pass take of the device, micro-batch by micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from stronghold.engine.copying import structural_copy
from stronghold.engine.joining import Joiner
from stronghold.engine.microbatch import batch_of, split
from stronghold.engine.module_writes import ModuleWrites
from stronghold.engine.planning.recording import Recording
from stronghold.engine.planning.root_run import NOTHING, Released, dropped

FIRST, LAST = 2, 3
"""Micro-batches of a layer that are run, of those that come first and last in its forward pass."""


@dataclass(frozen=True)
class LayerPasses:
    """The bytes that a layer's passes over the whole batch take.

    ``forward_bytes`` is the most that the forward pass takes beside the layer's input. It leaves ``left_bytes`` beside
    the input and the output, and ``saved_bytes`` if nobody has the output. ``backward_bytes`` is the most that the
    backward pass takes beside those, the input, and the gradient of the output.
    """

    forward_bytes: int
    left_bytes: int
    saved_bytes: int
    backward_bytes: int


class LayerRecorder:
    """Runs a layer over micro-batches of ``samples`` as the engine does, and records what is alive meanwhile.

    Without ``samples`` it runs over the whole batch.

    ``compute`` is the layer, or what computes it again in its backward pass, ``args`` and ``kwargs`` its arguments for
    the whole batch, ``parameters`` those that are trained. All micro-batches but the last are alike: those that come
    between the ``FIRST`` and the ``LAST`` are stood for by what they take and leave, unless ``whole``. From each of
    them to the next as much is added to what is alive, or given back: the most is alive in those at either end.
    """

    def __init__(
        self,
        recording: Recording,
        compute: Callable[..., Any],
        parameters: Sequence[Tensor],
        samples: int | None,
        *,
        module: nn.Module | None = None,
        whole: bool = False,
    ) -> None:
        self._recording, self._compute, self._parameters = recording, compute, parameters
        self._samples, self._module, self._whole = samples, module, whole

    def passes(self, args: Sequence[Any], kwargs: dict[str, Any], released: Released = NOTHING) -> LayerPasses:
        """Returns what they take where ``released`` of the input and the output's gradients nobody else has."""
        recording = self._recording
        begin_bytes = recording.live_bytes
        inputs, arguments = _given(args, kwargs)
        given_bytes = recording.live_bytes - begin_bytes
        recording.begin(Counter())
        output = self._forward(*arguments)
        del arguments
        forward_bytes = recording.peak_bytes - begin_bytes - given_bytes
        floating = _floating(output)
        left_bytes = recording.live_bytes - begin_bytes - given_bytes - sum(recording.size_of(t) for t in floating)
        gradients = _Gradients(recording, released)
        places = [place for place, tensor in enumerate(floating) if tensor.requires_grad]
        end = _End.apply(gradients, places, *(floating[place] for place in places)) if places else None
        del output, floating
        saved_bytes = recording.live_bytes - begin_bytes - given_bytes
        if end is None:
            return LayerPasses(forward_bytes, left_bytes, saved_bytes, 0)
        inputs = [tensor for place, tensor in inputs if place not in released.inputs]  # type: ignore[misc]
        with recording.paused():
            one = torch.ones(())
        with dropped(self._parameters):
            torch.autograd.backward(end, one)
        before_bytes = begin_bytes + given_bytes + saved_bytes + gradients.length_bytes
        return LayerPasses(forward_bytes, left_bytes, saved_bytes, recording.peak_bytes - before_bytes)

    def _forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        pieces = [(args, kwargs)] if self._samples is None else split(args, kwargs, self._samples, self._module)
        leaders = [leader.shape for piece in pieces if (leader := batch_of(*piece)) is not None]
        outputs, like = [], None
        writes = ModuleWrites(self._module, "a layer") if len(pieces) > 1 and self._module is not None else None
        for number, (piece_args, piece_kwargs) in enumerate(pieces):
            if self._whole or not FIRST <= number < len(pieces) - LAST:
                outputs.append(self._compute(*piece_args, **piece_kwargs))
                continue
            like = like or self._like(piece_args, piece_kwargs)
            outputs.append(like.output(piece_args, piece_kwargs))
        if writes is not None:
            writes.check()
        return outputs[0] if len(outputs) == 1 else Joiner(leaders, equal=lambda *_: True).join(outputs)

    def _like(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Like:
        recording = self._recording
        peak_bytes, begin_bytes = recording.peak_bytes, recording.live_bytes
        output = self._compute(*args, **kwargs)
        found = _floating(output)
        left_bytes = recording.live_bytes - begin_bytes - sum(recording.size_of(tensor) for tensor in found)
        ends = [torch.autograd.graph.get_gradient_edge(t) for t in found if t.requires_grad]
        with recording.paused():
            gradients = [torch.empty_like(t) for t in found if t.requires_grad]
            flat, spec = tree_flatten(output)
            flat = [
                torch.empty_like(leaf).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
                for leaf in flat
            ]
        del output, found
        saves_output = recording.live_bytes - begin_bytes > left_bytes
        asked = _asked(args, kwargs)
        with recording.paused():
            given = torch.autograd.grad(ends, asked, gradients, allow_unused=True) if ends and asked else ()
        del ends
        recording.peak_bytes = peak_bytes
        return _Like(flat, spec, left_bytes, saves_output, [gradient is not None for gradient in given])


class _Like:
    """Stands for a micro-batch of which it is known what it leaves and returns, and ``which`` inputs get gradients."""

    def __init__(self, flat: list[Any], spec: Any, left_bytes: int, saves_output: bool, which: list[bool]) -> None:
        self.left_bytes, self.saves_output = left_bytes, saves_output
        self._flat, self._spec, self._which = flat, spec, which
        self._places = [n for n, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def output(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        flat = [torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self._flat]
        if self._places:
            given = [tensor for tensor, gets in zip(_asked(args, kwargs), self._which, strict=True) if gets]
            outputs, anchor = [flat[n] for n in self._places], torch.empty(0, requires_grad=True)
            for place, tensor in zip(self._places, _Alike.apply(self, outputs, anchor, *given), strict=True):
                flat[place] = tensor
        return tree_unflatten(flat, self._spec)


class _Alike(torch.autograd.Function):
    """A micro-batch that is not computed: it keeps what one would, and gives gradients as one would."""

    @staticmethod
    def forward(ctx: Any, like: _Like, output: list[Tensor], *given: Tensor) -> tuple[Tensor, ...]:
        kept = [torch.empty(like.left_bytes, dtype=torch.uint8)] if like.left_bytes > 0 else []
        ctx.save_for_backward(*kept, *(output if like.saves_output else ()))
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in given[1:]]
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return None, None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.shapes)


def _given(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[tuple[int, Tensor]], Any]:
    """Returns the inputs that get gradients, with their places among the tensors, made anew; and the arguments."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    asked = {id(tensor): (place, tensor) for place, tensor in enumerate(tensors) if tensor.requires_grad}
    made = _Given.apply([t for _, t in asked.values()], torch.empty(0, requires_grad=True)) if asked else ()
    new = dict(zip(asked, made, strict=True))
    inputs = [(place, new[key]) for key, (place, _) in asked.items()]
    copied = structural_copy((args, kwargs), lambda tensor: new[id(tensor)] if id(tensor) in new else tensor.detach())
    return inputs, copied


class _Given(torch.autograd.Function):
    """Where a layer's input comes from, and where its gradients go."""

    @staticmethod
    def forward(ctx: Any, like: list[Tensor], _: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in like)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


class _Gradients:
    """Makes the gradients of a layer's output as its backward pass begins; has those that others have as well."""

    def __init__(self, recording: Recording, released: Released) -> None:
        self.recording, self._released = recording, released
        self._held: list[Tensor] = []
        self.length_bytes = 0

    def made(self, places: list[int], shapes: list[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        found = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        self.length_bytes = sum(self.recording.size_of(tensor) for tensor in found)
        pairs = zip(places, found, strict=True)
        self._held = [tensor for place, tensor in pairs if place not in self._released.gradients]
        self.recording.begin(Counter())
        return found


class _End(torch.autograd.Function):
    """What comes behind a layer: it does not keep the output, and gives it gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: _Gradients, places: list[int], *outputs: Tensor) -> Tensor:
        ctx.gradients, ctx.places = gradients, places
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in outputs]
        with gradients.recording.paused():
            return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gradients.made(ctx.places, ctx.shapes)


def _asked(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the inputs that get gradients."""
    return [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.requires_grad]


def _floating(output: Any) -> list[Tensor]:
    return [t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.is_floating_point()]
