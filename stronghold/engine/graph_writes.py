"""What a graph that torch.compile has made writes of its own inputs, and whether its outputs come of that."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_STATISTICS = ("running_mean", "running_var")
"""What batch norms write in training, which their operators' schemas do not all say, and read in evaluation alone."""


class _Op(NamedTuple):
    """What an operator reads, gives values to, and of that writes in place: numbers of pieces of memory."""

    reads: set[int]
    gives: set[int]
    writes: set[int]


def written_inputs(graph: GraphModule) -> list[str]:
    """Returns the names of inputs that ``graph`` writes in place, and of whose values an output comes.

    A backward graph that computes such an output again begins with what the forward graph has written, not with what it
    was given. Nothing is computed: the graph is run on tensors without memory.
    """
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    examples = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    tensors = [one for one in examples if isinstance(one, FakeTensor)]
    if not any(one.requires_grad for one in tensors):
        return []
    mode, operators = tensors[0].fake_mode, _Operators()
    fresh = contextlib.nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    with mode, fresh, torch.no_grad():
        given = [torch.empty_like(one) if isinstance(one, Tensor) else one for one in examples]
        with operators:
            outputs = operators.all(_Noting(graph, operators).run(*given))
    written = set().union(*(op.writes for op in operators.found))
    numbers = {name: operators.all(one) & written for name, one in zip(names, given, strict=True)}
    return [name for name, number in numbers.items() if number and outputs & operators.reached_from(number)]


class _Operators(TorchDispatchMode):
    """Notes what the operators that run under it read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Op] = []
        self._storages: dict[int, tuple[int, Any]] = {}

    def all(self, value: Any) -> set[int]:
        """Returns the numbers of the pieces of memory in ``value``, each its own as long as this object lives."""
        storages = [one.untyped_storage() for one in tree_leaves(value) if isinstance(one, Tensor)]
        return {self._storages.setdefault(one._cdata, (len(self._storages), one))[0] for one in storages}

    def reached_from(self, numbers: set[int]) -> set[int]:
        """Returns the memory whose values come of those in ``numbers``."""
        reached = set[int]()
        for op in self.found:
            if op.reads & (numbers | reached):
                reached |= op.gives
        return reached

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        named = {argument.name: argument for argument in func._schema.arguments}
        values = {**dict(zip(named, args, strict=False)), **(kwargs or {})}
        of_batch = {name for name in _STATISTICS if name in values and values.get("training", True)}
        writes = {name for name in values if (info := named[name].alias_info) is not None and info.is_write} | of_batch
        written = self.all([values[name] for name in writes])
        reads = self.all([value for name, value in values.items() if name not in of_batch])
        self.found.append(_Op(reads, self.all(out) | written, written))
        return out


class _Noting(Interpreter):
    """Runs a graph under ``operators``, and in it what is checkpointed; of other operators of graphs it notes all."""

    def __init__(self, graph: GraphModule, operators: _Operators) -> None:
        super().__init__(graph)
        self._operators = operators

    def run_node(self, n: Node) -> Any:
        known = n.meta.get("example_value")
        if n.op != "placeholder" and isinstance(known, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return known  # made anew it would be another number, of which nothing is known
        if n.op != "call_function" or not isinstance(n.target, HigherOrderOperator):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is tag_activation_checkpoint:
            return _Noting(args[0], self._operators).run(*args[1:])
        out = n.meta.get("example_value")
        reads = self._operators.all((args, kwargs))
        self._operators.found.append(_Op(reads, reads | self._operators.all(out), set()))
        return out
