"""What a model computes and keeps, layer by layer and outside the layers: run once on tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from stronghold.engine.arguments import fill, flatten
from stronghold.engine.checkpointed import checkpointed
from stronghold.engine.copying import structural_copy
from stronghold.engine.microbatch import batch_of, split
from stronghold.engine.planning.even_routing import routed_evenly
from stronghold.engine.planning.layer_passes import LayerPasses, LayerRecorder
from stronghold.engine.planning.layer_traces import LayerTraces, call_of, likeness
from stronghold.engine.planning.passed_on import output_and_items, pass_on
from stronghold.engine.planning.quantised_layers import quantised_layers, without_values
from stronghold.engine.planning.recording import Recording
from stronghold.engine.planning.root_run import NOTHING, Released, RootRun, Stubs, dropped
from stronghold.engine.planning.telling import explained, explained_cut
from stronghold.formats.kept_in_fp32 import computes_in
from stronghold.planner.op_costs import Op
from stronghold.window import input_sizes

Inputs = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class LayerRun:
    """What a layer computes over a micro-batch of ``samples``.

    ``before_gradients`` is what of ``backward`` comes before the first gradient of a parameter.
    """

    samples: int
    forward: Counter[Op]
    before_gradients: Counter[Op]
    backward: Counter[Op]


_NO_OPS: Counter[Op] = Counter()


class ModelComputation:
    """What ``model`` computes in a step: ``inputs`` are its arguments, tensors on any device, of which sizes count.

    ``modules`` are its layers in order; those of one class and shape with inputs alike are run once. ``dtype`` is the
    compute type, None for each parameter's own. The model's output must be a loss, have one (``loss``), or be made one
    by ``loss``. ``block_bytes`` is what the device's allocator rounds each tensor's memory up to; ``fused`` tells that
    dropout is one kernel there. What is in ``traces`` of layers that are alike is not run again, and what is run is put
    there.

    Raises ValueError where the model cannot be run without values.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        inputs: Inputs,
        *,
        dtype: torch.dtype | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        block_bytes: int = 1,
        fused: bool = False,
        traces: LayerTraces | None = None,
    ) -> None:
        self.quantised = quantised_layers(model)
        self._traces = traces or LayerTraces()
        self._block_bytes = block_bytes
        self._mode, self._fused = self._traces.mode, fused
        self._model, self._dtype = model, dtype
        self._tensors = {id(t): self._fake(t) for t in [*model.parameters(), *model.buffers()]}
        self._modules = list(modules)
        self._kinds: dict[Any, int] = {}
        self.group_of = [-1] * len(self._modules)
        """For each layer, the number of the first one like it, with inputs alike."""
        self._calls: dict[int, tuple[tuple, dict[str, Any]]] = {}
        self._alike: dict[int, Hashable] = {}
        """What the layer and its call have in common with others, in this computation or another."""
        self.batch = 0
        """Samples that the layers get."""
        self.leaders = set[tuple[int, ...]]()
        """The shapes of what has them as first dimension, of all layers."""
        with explained(model):
            self.root = self._run_root(inputs, loss)
        self.idle = frozenset(number for number, group in enumerate(self.group_of) if group < 0)
        """Layers that these inputs do not come by, as those of a vision tower with text alone."""
        if len(self.idle) == len(self.group_of):
            raise ValueError(
                f"layers of {type(model).__name__} must run in its forward pass (got none of {len(self.idle)}); pass "
                "inputs with which they do, or the layers that do as layers="
            )

    def layer(self, number: int, samples: int | None = None) -> LayerRun:
        """Returns what the layer of this number does over a micro-batch, by default the whole batch."""
        group = self.group_of[number]
        samples = min(samples or self.batch, self.batch)
        if number in self.idle:
            return LayerRun(samples=samples, forward=_NO_OPS, before_gradients=_NO_OPS, backward=_NO_OPS)
        runs, key = self._traces.runs, (self._alike[group], samples)
        if key not in runs:
            with explained(self._model), explained_cut(type(self._modules[group]).__name__, samples, self.batch):
                runs[key] = self._run_layer(group, samples)
        run: LayerRun = runs[key]
        return run

    def passes(self, number: int, samples: int | None, *, kept: bool, whole: bool = False) -> LayerPasses:
        """Returns the bytes that the layer's passes take over micro-batches, each of which is run if ``whole``.

        Its activations are ``kept``, or else it is computed again in the backward pass.
        """
        if number in self.idle:
            return LayerPasses(0, 0, 0, 0)
        group, released = self.group_of[number], self.root.released.get(number, NOTHING)
        run = min(samples or self.batch, self.batch), kept, released
        if whole:
            return self._run_passes(group, *run, whole=True)
        passes, key = self._traces.passes, (self._alike[group], *run)
        if key not in passes:
            passes[key] = self._run_passes(group, *run)
        found: LayerPasses = passes[key]
        return found

    def runs(self, samples: int | None) -> list[list[list[int]]]:
        """Returns the bytes of each layer's inputs that get gradients, of each of its runs over a micro-batch."""
        samples, found = min(samples or self.batch, self.batch), list[list[list[int]]]()
        with explained(self._model), self._mode, torch.enable_grad():
            for number, group in enumerate(self.group_of):
                if number in self.idle:
                    found.append([])
                    continue
                # A part of a mixture has rows in samples' place, and no micro-batches.
                call, module = self._calls[group], self._modules[group]
                pieces = split(*call, samples, module) if samples < self.batch else [call]
                runs = list[list[int]]()
                for piece in pieces:
                    tensors: list[Tensor] = []
                    flatten(piece, tensors)
                    runs.append(input_sizes(tensors))
                found.append(runs)
        return found

    def _fake(self, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        dtype = computes_in(tensor, self._dtype) if is_parameter and tensor.is_floating_point() else tensor.dtype
        # What torch.empty() makes under the mode, in a fifth of the time: a model may have tens of thousands of these.
        fake = FakeTensor(self._mode, torch.empty(tensor.shape, dtype=dtype, device="meta"), torch.device("cpu"))
        fake._is_param = is_parameter  # type: ignore[attr-defined]  # torch.nn.utils.parametrize asks
        return fake.requires_grad_(tensor.requires_grad)

    @contextmanager
    def _without_values(self, module: nn.Module) -> Iterator[None]:
        """Has a module compute with tensors without memory; the backward pass too, which may run parts of it again."""
        held: list[tuple[Any, Any]] = [(n, n.copy()) for m in module.modules() for n in (m._parameters, m._buffers)]
        try:
            for names, before in held:
                names.update((name, self._tensors[id(t)]) for name, t in before.items() if t is not None)
            with routed_evenly(module), without_values(self.quantised):
                yield
        finally:
            for names, before in held:
                names.clear()  # a module may name others while it computes
                names.update(before)

    def _recording(self) -> Recording:
        return Recording(self._block_bytes, fused=self._fused)

    def _run_layer(self, number: int, samples: int) -> LayerRun:
        args, kwargs = self._calls[number]
        if samples < self.batch:
            args, kwargs = split(args, kwargs, samples, self._modules[number])[0]
        forward, before, backward = Counter[Op](), Counter[Op](), Counter[Op]()
        module = self._modules[number]
        trained = self._trained(module)
        with self._without_values(module), self._mode, self._recording() as recording:
            with torch.no_grad():
                recording.begin(forward)
                given = structural_copy((args, kwargs), _leaf)  # a cache among them keeps what the layer puts there
                out = module(*given[0], **given[1])
            recording.begin(Counter())
            given = structural_copy((args, kwargs), _leaf)
            out = module(*given[0], **given[1])
            outputs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.requires_grad]
            gradients = [torch.empty_like(t) for t in outputs]
            recording.go_on(before)
            if outputs:
                with dropped(trained, lambda: recording.go_on(backward)):
                    torch.autograd.backward(outputs, gradients)
        return LayerRun(samples=samples, forward=forward, before_gradients=before, backward=before + backward)

    def _run_passes(
        self, number: int, samples: int, kept: bool, released: Released, *, whole: bool = False
    ) -> LayerPasses:
        module = self._modules[number]
        trained = self._trained(module)
        compute = module if kept else partial(_computed_again, module)
        with (
            explained(self._model),
            explained_cut(type(module).__name__, samples, self.batch),
            self._without_values(module),
            self._mode,
            self._recording() as recording,
            torch.enable_grad(),
        ):
            piece = samples if samples < self.batch else None
            recorder = LayerRecorder(recording, compute, trained, piece, module=module, whole=whole)
            return recorder.passes(*self._calls[number], released)

    def _trained(self, module: nn.Module) -> list[Tensor]:
        return [self._tensors[id(p)] for p in module.parameters() if p.requires_grad]

    def _run_root(self, inputs: Inputs, loss: Callable[[Any], Tensor] | None) -> RootRun:
        recording, root = self._recording(), RootRun()
        stubs = Stubs(self, recording, root)
        positional, named = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        stubbed = stubs.in_place_of(self._model, self._modules)
        self._mode.is_packed = "position_ids" in named  # of several sequences each, for all that is known
        with stubbed, self._without_values(self._model), self._mode, recording:
            with recording.uncounted():
                args, kwargs = structural_copy((tuple(positional), dict(named)), _copies())  # the model may write there
            recording.begin(root.before)
            with torch.enable_grad():
                value = (loss or _loss_of)(self._model(*args, **kwargs))
            recording.go_on(root.behind_backward)
            value.backward()
            stubs.end()
        for fake in self._tensors.values():
            fake.grad = None
        return root

    def output_of(self, number: int, inputs: Sequence[Tensor], args: tuple, kwargs: dict, forward: Any) -> Any:
        """Returns what the layer returns, of whose kind the first one is run: called in its stead."""
        if self.group_of[number] < 0:
            kind = likeness(self._modules[number]), tuple((t.shape, t.dtype, t.requires_grad) for t in inputs)
            self.group_of[number] = self._kinds.setdefault(kind, number)
        group, leader = self.group_of[number], batch_of(args, kwargs)
        if leader is not None:
            self.leaders.add(tuple(leader.shape))
        if group not in self._alike:
            call = call_of(args, kwargs), self._dtype, self._block_bytes, self._fused
            self._alike[group] = likeness(self._modules[group]), *call
            self._calls[group] = structural_copy((args, kwargs), _copies())  # what is alive is not to depend on it
            self.batch = self.batch or (1 if leader is None else leader.shape[0])
        outputs, alike = self._traces.outputs, self._alike[group]
        if alike not in outputs:
            outputs[alike] = output_and_items(forward, args, kwargs)
        output, passed_on = outputs[alike]
        pass_on(passed_on, args, kwargs)
        return output


def _computed_again(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Computes as the engine does: a cache that the first run fills is in the second as the first found it."""
    tensors: list[Tensor] = []
    arguments = flatten((args, kwargs), tensors)
    first = [(args, kwargs)]
    del args, kwargs

    def compute(*tensors: Tensor) -> Any:
        given = first.pop() if first else fill(arguments, tensors)
        return module(*given[0], **given[1])

    return checkpointed(compute, *tensors, device=torch.device("cpu"), layer=type(module).__name__, random=False)


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _copies() -> Callable[[Any], Any]:
    """Returns what makes a tensor without memory like another one, the same for the same."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            known[id(value)] = value, made.requires_grad_(value.requires_grad)
        return known[id(value)][1]

    return copy


def _loss_of(output: Any) -> Tensor:
    """Returns the loss of a model's output: its own, or the mean square of its first numbers."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    numbers = next(t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.is_floating_point())
    return numbers if numbers.ndim == 0 else numbers.float().pow(2).mean()
