"""Mixtures of experts whose layers are larger than the window: ``split_experts(model, experts_per_part)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from stronghold.engine.block import Block, block_of
from stronghold.engine.experts_part import COUNT, NO_ADAPTERS, WRAPPED, ExpertsPart, adds_up_in_order, are_experts
from stronghold.engine.same_experts import check_same
from stronghold.engine.saved import Saved
from stronghold.engine.whole_names import WholeNames
from stronghold.errors import OffloadedModelError
from stronghold.unit import unit_of

SMALL = 1 / 8
"""What is smaller than so much of a part stays on the device."""


def split_experts(model: nn.Module, experts_per_part: int) -> nn.Module:
    """Cuts the experts of every layer of ``model`` into parts that go through the window by themselves; returns it.

    For mixtures of experts whose layers are too large for the window: a slot then holds ``experts_per_part`` experts,
    or a layer's attention, whatever is larger. Experts are cut where a module has them stacked, in parameters whose
    first dimension is its ``num_experts``, and is called with the tokens, the numbers of their experts and their
    weights, as those of transformers are. What each token gets, the gradients, and the names in ``state_dict()`` and
    in what :func:`stronghold.save` writes are those of the whole model; the names of parameters and of optimizer states
    are not. Frozen parts that no token of a batch needs are passed over, and fetched only where the fetch has begun
    before the routing is known. What is small beside the parts, such as norms and routers, becomes root parameters.

    Call it before :func:`stronghold.offload`, whose ``experts_per_part`` does the same, on a model in memory or on the
    meta device, and after whatever else rewrites modules by their parameters; an optimizer is made of the parameters
    that are there afterwards. One layer's experts are in memory twice at a time.

    Raises ValueError where there are no such experts, or not that many, and OffloadedModelError for a model that is
    offloaded already.
    """
    if any(unit_of(parameter) is not None for parameter in model.parameters()):
        raise OffloadedModelError(
            f"experts are split before a model is offloaded (got {type(model).__name__}, which is); build it anew"
        )
    if experts_per_part_of(model) is not None:
        raise ValueError(
            f"the experts of {type(model).__name__} are split already; build it anew to split it otherwise"
        )
    places = _stacked_experts(model)
    if (around := adapters_of_experts(model)) is not None:
        raise OffloadedModelError(NO_ADAPTERS.format(type(around).__name__, "experts"))
    if not places:
        raise ValueError(
            f"split_experts needs a module with stacked experts: parameters of its own alone, the first dimension of "
            f"each its {COUNT}, and no buffer's (got none in {type(model).__name__}); experts that are modules of "
            "their own need no splitting, for layers= of offload() can name their containers"
        )
    if changed := [type(experts).__name__ for experts in places if "forward" in vars(experts)]:
        raise ValueError(
            f"experts in parts compute with the forward of their class (got another on an instance of {changed[0]}, "
            "which computes with the whole's weights); define it in a subclass, or leave the layers whole"
        )
    fewest = _fewest(places)
    if not 1 <= experts_per_part <= fewest:
        raise ValueError(
            f"experts_per_part must be between 1 and the number of experts of a layer (got {experts_per_part}, a layer "
            f"has {fewest}); pass a number in between"
        )
    while places:  # so that no more than one is there twice
        experts, owners = places.popitem()
        split = SplitExperts(experts, experts_per_part)
        for parent, name in owners:
            parent._modules[name] = split
    return model


def experts_per_part_of(model: nn.Module) -> int | None:
    """Returns how many experts a part has, None where they were not split."""
    return next((module.experts_per_part for module in model.modules() if isinstance(module, SplitExperts)), None)


def fewest_experts(model: nn.Module) -> int:
    """Returns how many experts a layer has at least, 0 where no layer has some that can be split."""
    places = _stacked_experts(model)
    whole = experts_per_part_of(model) is None and adapters_of_experts(model) is None
    return _fewest(places) if places and whole else 0


def adapters_of_experts(model: nn.Module) -> nn.Module | None:
    """Returns a module of adapters around experts, None where there is none."""
    places = _stacked_experts(model).values()
    return next((parent for owners in places for parent, name in owners if name == WRAPPED), None)


def _stacked_experts(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Returns the modules with stacked experts, each with those that hold it and its names there."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, module in parent._modules.items():
            if are_experts(module):
                places.setdefault(module, []).append((parent, name))
    return places


def _fewest(places: Iterable[nn.Module]) -> int:
    return min(getattr(experts, COUNT) for experts in places)


def parts_of(layer: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Returns what of a layer moves by itself, by name, or None where the layer moves as a whole.

    That is each part of its experts, and each module that holds none and is not small beside a part.
    """
    split = [module for module in layer.modules() if isinstance(module, SplitExperts)]
    if not split:
        return None
    for experts in split:
        for part in experts.parts:
            assert isinstance(part, ExpertsPart)
            part.check()
    least = SMALL * max(_elements(part) for experts in split for part in experts.parts)
    found: list[tuple[str, nn.Module]] = []

    def descend(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(child, SplitExperts):
                found.extend((f"{prefix}{name}.parts.{number}", part) for number, part in enumerate(child.parts))
            elif any(experts in split for experts in child.modules()):
                descend(f"{prefix}{name}.", child)
            elif _elements(child) >= least:
                found.append((f"{prefix}{name}", child))

    descend("", layer)
    return found


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class SplitExperts(WholeNames):
    """Stands for a layer's experts: sends each token to those of its parts that have an expert for it.

    Rows are gathered and added up as transformers' own implementation does, whichever is chosen: in the order of the
    experts ("eager"), or of each token's choices.
    """

    def __init__(self, experts: nn.Module, experts_per_part: int, *, copies: bool = True) -> None:
        names = [name for name, parameter in experts._parameters.items() if parameter is not None]
        super().__init__(names, getattr(experts, COUNT), experts_per_part)
        self.config = getattr(experts, "config", None)
        self.parts = nn.ModuleList(ExpertsPart(experts, *two, copies=copies) for two in pairwise(self._edges))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns what each token gets, (tokens, hidden), of its experts ``top_k_index`` (tokens, k), weighted."""
        part = self.parts[0]
        assert isinstance(part, ExpertsPart)
        part.check()
        first = part.experts
        if not adds_up_in_order(first):
            return self._by_choice(hidden_states, top_k_index, top_k_weights)
        check_same(first, self.num_experts, self._cut_as_this, hidden_states, top_k_index, top_k_weights)
        return self._in_order(hidden_states, top_k_index, top_k_weights)

    def _cut_as_this(self, experts: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return SplitExperts(experts, self.experts_per_part, copies=False)._in_order

    def _in_order(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens = top_k_index.shape[0]
        numbers, pairs = torch.sort(top_k_index.t().reshape(-1), stable=True)  # by expert, choice and token
        token, weights = pairs % tokens, top_k_weights.t().reshape(-1)[pairs]
        bounds = bounds_of(numbers, range(self.num_experts + 1), self.num_experts)
        total = torch.zeros_like(hidden_states)
        for begin, end, part in self._needed([bounds[expert] for expert in self._edges]):
            sizes = [bounds[expert + 1] - bounds[expert] for expert in range(begin, end)]
            whole = slice(bounds[begin], bounds[end])
            places = token[whole].split(sizes)
            rows = torch.cat([hidden_states[its] for its in places])  # one by one, as their gradients are added up
            with _gathered_again(rows, hidden_states, token[whole]):
                output = part(rows, numbers[whole] - begin, weights[whole])
            del rows
            for its, weighted in zip(places, output.split(sizes), strict=True):
                total.index_add_(0, its, weighted.to(total.dtype))
        return total

    def _by_choice(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, choices = top_k_index.shape
        numbers, pairs = torch.sort(top_k_index.reshape(-1))
        token, weights = pairs // choices, top_k_weights.reshape(-1)[pairs]
        bounds = bounds_of(numbers, self._edges, self.num_experts)
        bound = dict(zip(self._edges, bounds, strict=True))
        rows_of = dict(zip(bound, hidden_states[token].split([b - a for a, b in pairwise(bounds)]), strict=False))
        outputs = []
        for begin, end, part in self._needed(bounds):
            rows, whole = rows_of.pop(begin), slice(bound[begin], bound[end])
            with _gathered_again(rows, hidden_states, token[whole]):
                outputs.append(part(rows, numbers[whole] - begin, weights[whole]))
            del rows
        back = torch.empty_like(pairs)
        back[pairs] = torch.arange(len(pairs), device=pairs.device)
        weighted = torch.cat(outputs)[back]
        return weighted.view(tokens, choices, -1).sum(dim=1).to(hidden_states.dtype)

    @property
    def _edges(self) -> list[int]:
        """The first expert of each part, and the number of all."""
        return [*range(0, self.num_experts, self.experts_per_part), self.num_experts]

    def _needed(self, bounds: Sequence[int]) -> list[tuple[int, int, nn.Module]]:
        """Returns the parts that run, with the experts from which to which each has; ``bounds`` are those of its pairs.

        Where the window does not hold them, it fetches them from now on, and no others.
        """
        needed, passed_over = [], []
        for part, (begin, end), (first, last) in zip(self.parts, pairwise(self._edges), pairwise(bounds), strict=True):
            trained = torch.is_grad_enabled() and any(p.requires_grad for p in part.parameters())
            if last > first or trained:
                needed.append((begin, end, part))
            else:
                passed_over.append(part)
        if blocks := _blocks(self.parts):
            left_out, among = ([block.layer for block in some] for some in (_blocks(passed_over), blocks))
            engine = blocks[0].engine
            with engine.turns.taken():
                engine.window.leave_out(left_out, among)
        return needed


def _blocks(parts: Iterable[nn.Module]) -> list[Block]:
    return [block for part in parts if (block := block_of(part)) is not None]


def bounds_of(numbers: Tensor, edges: Sequence[int], experts: int) -> list[int]:
    """Returns where in ``numbers``, of ``experts`` and sorted, the ``edges`` would be.

    Of a tensor without values, on which a step is planned, as if each expert had as many.
    """
    if isinstance(numbers, FakeTensor):
        return [len(numbers) * edge // experts for edge in edges]
    found: list[int] = torch.searchsorted(numbers, torch.tensor([*edges], device=numbers.device)).tolist()
    return found


def _gathered_again(rows: Tensor, source: Tensor, token: Tensor) -> saved_tensors_hooks:
    """Has autograd keep of ``rows``, which are ``source[token]``, how to gather them again."""
    kept = Saved.of(source)
    place = _place(rows)

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        if _place(tensor) == place and len(token):
            return lambda: kept.value("the tokens of experts")[token]
        saved = Saved.of(tensor)
        return lambda: saved.value("experts")

    return saved_tensors_hooks(pack, lambda value: value())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what two tensors have in common that are the same elements of the same memory."""
    # Not by its address, which a tensor without values has none of.
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
