"""Finds the layers of a model: the containers whose children are repeated blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from stronghold.engine.split_experts import parts_of

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
"""Those that only hold modules: what they hold is called one by one, and they themselves never are."""

_AGAIN = "One block that is used again and again (as in ALBERT) fits the device as it is"


@dataclass(frozen=True)
class Layer:
    """One repeated block: its qualified name and the module itself."""

    name: str
    module: nn.Module


def find_layers(model: nn.Module, layers: str | Sequence[str] | None = None) -> list[Layer]:
    """Returns the layers of ``model`` in the order of the model's modules, all rows behind one another.

    ``layers`` names the containers (``"model.layers"``, or several), where one layer is enough; without it the
    outermost containers with a repeated block are taken. Children without parameters, such as activations, move nothing
    and are left out. A layer whose experts were split is as many as it has parts.

    Raises ValueError where there is no repeated block, or ``layers`` names none.
    """
    if layers is None:
        names = _found_containers(model)
    else:
        names = _named_containers(model, [layers] if isinstance(layers, str) else list(layers))
    result, seen = [], set()
    for name in names:
        for child_name, child in model.get_submodule(name).named_children():
            if id(child) not in seen and any(True for _ in child.parameters()):
                layer = Layer(f"{name}.{child_name}" if name else child_name, child)
                parts = parts_of(child)
                result += [layer] if parts is None else [Layer(f"{layer.name}.{n}", part) for n, part in parts]
            seen.add(id(child))
    containers = [model.get_submodule(name) for name in names]
    # One block may stand in several places.
    again = any(len(container._modules) > sum(1 for _ in container.children()) for container in containers)
    least = 2 if layers is None or again else 1
    if len(result) < least:
        where = ", ".join(map(repr, names)) or "no container"
        raise ValueError(
            f"a model must have a row of at least {'one layer' if least == 1 else 'two layers'} with parameters of "
            f"their own (got {len(result)} in {where} of {type(model).__name__}): there is nothing to pass through a "
            f"window. {_AGAIN}"
        )
    return result


def _named_containers(model: nn.Module, names: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules())
    candidates = ", ".join(repr(name) for name in _candidates(model)) or "none"
    if not names:
        raise ValueError(
            "layers= must name at least one container of layers (got an empty list); pass None to have them found, "
            f"or name one with a repeated block: {candidates}"
        )
    for name in names:
        module = modules.get(name)
        if module is None or not isinstance(module, _CONTAINERS) or not len(module):
            got = "names no module" if module is None else f"names a {type(module).__name__} of {_length(module)}"
            raise ValueError(
                f"layers= must name containers of layers (ModuleList, Sequential or ModuleDict) of the model (got "
                f"{name!r}, which {got}); containers with a repeated block here: {candidates}"
            )
    for outer in names:
        for inner in names:
            if inner != outer and (not outer or inner.startswith(f"{outer}.")):
                raise ValueError(
                    f"layers= must name containers that lie beside one another (got {outer!r} and {inner!r} inside "
                    "it); name one of the two"
                )
    return list(names)


def _found_containers(model: nn.Module) -> list[str]:
    candidates = _candidates(model)
    if not candidates:
        raise ValueError(
            f"{type(model).__name__} has no repeated block: no ModuleList, Sequential or ModuleDict in it has two or "
            "more children of one class with parameters; pass a model of two layers or more, or, in Python, name the "
            f"container of its layers with layers='...'. {_AGAIN}"
        )
    sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in candidates}
    largest = max(candidates, key=lambda name: sizes[name])
    # Beside the largest row, a row of composite blocks is one too (a decoder, a vision tower); a short stack of plain
    # linear layers is a head.
    return [name for name in candidates if name == largest or not _is_leaf(_block_of(model.get_submodule(name)))]


def _candidates(model: nn.Module) -> list[str]:
    """Returns the names of the outermost containers with a repeated block, in the model's order."""
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") if outer else name for outer in names)
        if not inside and isinstance(module, _CONTAINERS) and _block_of(module) is not None:
            names.append(name)
    return names


def _block_of(container: nn.Module) -> nn.Module | None:
    """Returns one of the children of the class that occurs most often, at least twice, with parameters; or None.

    Lists of blocks, as the stages of PVT and PoolFormer are, are no blocks: nobody calls them.
    """
    children = [c for c in container.children() if any(True for _ in c.parameters())]
    counts = Counter(type(child) for child in children)
    if not counts or counts.most_common(1)[0][1] < 2:
        return None
    block = counts.most_common(1)[0][0]
    if issubclass(block, _WITHOUT_FORWARD) and block.forward is nn.Module.forward:
        return None
    return next(child for child in children if type(child) is block)


def _is_leaf(module: nn.Module | None) -> bool:
    return module is None or not any(True for _ in module.children())


def _length(module: nn.Module) -> str:
    return f"{len(module)} children" if isinstance(module, _CONTAINERS) else "no children to pass through"
