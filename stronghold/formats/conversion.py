"""How the tensors of a transformers checkpoint become those of its model, and back.

From version 5 on transformers may hold weights otherwise than its files do: experts that are apart in the files are one
tensor in the model, and names differ. What transformers does on loading and saving a whole model is done here for one
group of tensors at a time, by its own converters.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from stronghold.formats.pieces import Cut, Group, Pieces, joined, pieces_of, whole_names

_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


@dataclass
class Conversion:
    """Tensors, named ``sources`` on one side, that together become tensors of the other side.

    Most groups are one tensor that stays as it is, and is called ``target`` on the other side.
    """

    target: str
    sources: list[str] = field(default_factory=list)
    _patterns: list[str] = field(default_factory=list)
    _converter: Any = None
    _model: Any = None
    _renamings: Sequence[Any] = ()

    def only(self, places: Sequence[int]) -> Conversion:
        """Returns the same of the sources at ``places`` alone."""
        patterns = [self._patterns[place] for place in places] if self._patterns else []
        return replace(self, sources=[self.sources[place] for place in places], _patterns=patterns)

    def convert(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns what ``tensors``, one for each source, become, by name. Tensors on the meta device tell shapes."""
        if self._converter is None:
            (tensor,) = tensors
            return {self.target: tensor}
        converter = copy.deepcopy(self._converter)
        for source, pattern, tensor in zip(self.sources, self._patterns, tensors, strict=True):
            converter.add_tensor(self.target, source, pattern, tensor)
        results = converter.convert(self.target, model=self._model, config=self._model.config)
        if isinstance(results, tuple):  # of version 5.0, with what went wrong
            results, _ = results
        return {
            _rename(name, self._renamings): value[0] if isinstance(value, list) else value
            for name, value in results.items()
        }


def into_model(model: nn.Module, names: Iterable[str], wanted: Collection[str]) -> tuple[list[Group], list[Any] | None]:
    """Groups a checkpoint's tensors, called ``names``, by what they become in ``model``, which wants those ``wanted``.

    Also returns transformers' conversions that were of use, for :func:`remember`. For a transformers model,
    ``base_model_prefix`` is added or taken away where the file has it otherwise.
    """
    pieces = pieces_of(model)
    groups, conversions = _into_whole(model, names, whole_names(wanted, pieces))
    return [one for group in groups for one in _cut(group, pieces)], conversions


def _cut(group: Conversion, pieces: Mapping[str, Pieces]) -> list[Group]:
    """Returns what gives the pieces of what ``group`` gives: experts that are apart in the files come part by part."""
    if not pieces:
        return [group]
    numbers = [int(found[1]) if (found := _EXPERT.search(source)) else -1 for source in group.sources]
    of = pieces.get(group.target)
    if of is None or group._converter is None or {*numbers} != {*range(max(numbers) + 1)}:
        return [Cut(group, pieces)]
    parts: list[Group] = []
    for part, name in enumerate(of.names):
        places = [place for place, number in enumerate(numbers) if number // of.length == part]
        parts.append(Cut(group.only(places), {group.target: Pieces([name], of.length)}))
    return parts


def _into_whole(
    model: nn.Module, names: Iterable[str], wanted: Collection[str]
) -> tuple[list[Conversion], list[Any] | None]:
    conversions = _conversions(model)
    prefix = getattr(model, "base_model_prefix", None)
    if conversions is None or not isinstance(prefix, str):
        return [Conversion(name, [name]) for name in names], None
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters, by_pattern = _sorted_out(conversions)
    there = dict.fromkeys(wanted, True)
    groups: dict[str, Conversion] = {}
    used: set[int] = set()
    for name in sorted(names, key=dot_natural_key):
        target, pattern = _by_first(_rename(name, renamings, used), converters, used)
        target, _ = rename_source_key(target, [], [], prefix, there)  # adds the prefix, or takes it away
        if target not in there and name in there:
            target, pattern = name, None
        group = _group(groups, target, name, pattern, by_pattern, model, ())
        group.sources.append(name)
    return list(groups.values()), [conversion for conversion in conversions if id(conversion) in used]


def remember(model: nn.Module, conversions: list[Any] | None) -> None:
    """Notes which conversions the checkpoint of ``model`` needed: saving undoes those, here and in transformers."""
    if conversions is not None:
        model.__dict__["_weight_conversions"] = conversions


def from_model(model: nn.Module, names: Iterable[str]) -> list[Group]:
    """Groups the tensors of ``model``, called ``names``, by what they become in a checkpoint's files."""
    pieces = pieces_of(model)
    return joined(_from_whole(model, whole_names(names, pieces)), pieces)


def _from_whole(model: nn.Module, names: Iterable[str]) -> list[Conversion]:
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None and (known := _conversions(model, add_legacy=False)):
        from transformers import core_model_loading

        prefix_change = getattr(core_model_loading, "PrefixChange", ())  # from version 5.6 on
        conversions = [conversion for conversion in known if not isinstance(conversion, prefix_change)]
    if not conversions:
        return [Conversion(name, [name]) for name in names]
    renamings, converters, by_pattern = _sorted_out([one.reverse_transform() for one in reversed(conversions)])
    groups: dict[str, Conversion] = {}
    for name in names:
        target, pattern = _by_first(name, converters)
        if pattern is None:
            target = _rename(name, renamings)
        group = _group(groups, target, name, pattern, by_pattern, model, renamings)
        group.sources.append(name)
    return list(groups.values())


def _conversions(model: Any, *, add_legacy: bool = True) -> list[Any] | None:
    if not hasattr(model, "base_model_prefix"):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5 files are as models are
        return None
    found: list[Any] = get_model_conversion_mapping(model, add_legacy=add_legacy)
    return found


def _sorted_out(conversions: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    return [c for c in conversions if isinstance(c, WeightRenaming)], converters, by_pattern


def _group(
    groups: dict[str, Conversion],
    target: str,
    name: str,
    pattern: str | None,
    by_pattern: dict[str, Any],
    model: nn.Module,
    renamings: Sequence[Any],
) -> Conversion:
    if pattern is None:
        # Under the file's own name if another tensor has taken the target: then one of the two is one too many.
        key = target if target not in groups else name
        return groups.setdefault(key, Conversion(target))
    group = groups.setdefault(
        target, Conversion(target, _converter=by_pattern[pattern], _model=model, _renamings=renamings)
    )
    group._patterns.append(pattern)
    return group


def _rename(name: str, renamings: Sequence[Any], used: set[int] | None = None) -> str:
    """Returns ``name`` renamed by each of ``renamings`` in turn. The ids of those that match are added to ``used``."""
    for renaming in renamings:
        name, pattern = renaming.rename_source_key(name)
        if pattern is not None and used is not None:
            used.add(id(renaming))
    return name


def _by_first(name: str, converters: Sequence[Any], used: set[int] | None = None) -> tuple[str, str | None]:
    """Returns ``name`` renamed by the first of ``converters`` that matches, and its pattern; None where none does.

    The functions of transformers that do the same, and what tells which conversions were of use, come and go with its
    versions; a conversion's own ``rename_source_key`` is in all of them from 5.0 to 5.23.
    """
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            if used is not None:
                used.add(id(converter))
            return renamed, pattern
    return name, None
