"""Reads a profile in the text format of Aceso's profiler (Liu et al., EuroSys 2024).

A directory holds, for a model called ``gpt_1_3B``::

    gpt_1_3B_mbs4_tp2_algo0.csv         operators' costs, for 4 samples and a degree of 2
    prim_gpt_1_3B_all_gather_2gpus.csv  seconds of a collective among 2 devices, by size
    p2p_intra_node.csv                  speed of messages within a node, by size
    p2p_inter_node.csv                  and between two; where it is missing they are taken to be as fast

Times of operators are microseconds, of collectives milliseconds, sizes MiB, and speeds GB/s.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from stronghold.planner.profiled.device_links import GB, MIB, Links
from stronghold.planner.profiled.families import Family, family_of
from stronghold.planner.profiled.profile import Costs, Profile

COLUMNS = 9
"""An operator's name, its two times, and six sizes."""
_LARGEST = 1e12
"""Eleven days, and an exabyte: above it is no time that a search tells from what never ends."""
_SLOWEST = 1e-9
"""GB/s of a link: a byte a second."""
_UNITS = (1e-6, 1e-6, MIB, MIB, MIB, MIB, MIB, MIB)


def read_profile(directory: str | os.PathLike[str], model: str, layers: int | None = None) -> Profile:
    """Returns the profile of ``model`` in ``directory``.

    Args:
        directory: The folder with the files.
        model: The files' name for it, such as ``gpt_1_3B``.
        layers: How many layers it has, which no file tells; None for a model whose operators are all in the files.

    Raises:
        ValueError: Nothing there has that name, a file is not as above, files do not have the same operators, or
            ``layers`` is missing, not asked for or below 1. It names the file and the line.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"layers must be 1 or more (got -l {layers}); pass the layers that the model has")
    folder, family = Path(directory), family_of(model)
    tables = {key: _operators(path) for key, path in sorted(_costs_files(folder, model).items())}
    (first, (names, _)), *others = tables.items()
    for key, (other, _) in others:
        if other != names:
            shared = min(len(names), len(other))
            line = next((n for n in range(shared) if names[n] != other[n]), shared)
            raise ValueError(
                f"all files of a model must have the same operators in the same order (got {_name(model, key)!r}, "
                f"which differs from {_name(model, first)!r} in line {line + 2}); profile the model again"
            )
    rows = _rows(model, family, names, layers)
    return Profile(
        model=model,
        family=family,
        layers=layers or 1,
        operators=[names[row] for row in rows],
        rows=rows,
        costs={key: costs for key, (_, costs) in tables.items()},
        links=_links(folder, model),
    )


def models_in(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the models of which ``directory`` has profiles."""
    return sorted({found[1] for path in Path(directory).glob("*.csv") if (found := _COSTS.fullmatch(path.name))})


_COSTS = re.compile(r"(.+)_mbs([1-9]\d*)_tp([1-9]\d*)_algo(\d+)\.csv")


def _name(model: str, key: tuple[int, int, int]) -> str:
    return "{}_mbs{}_tp{}_algo{}.csv".format(model, *key)


def _costs_files(folder: Path, model: str) -> dict[tuple[int, int, int], Path]:
    if not folder.is_dir():
        raise ValueError(f"a profile must be a folder of csv files (got {str(folder)!r}); pass the profiler's output")
    files = {}
    for path in folder.glob("*.csv"):
        found = _COSTS.fullmatch(path.name)
        if found and found[1] == model:
            files[int(found[2]), int(found[3]), int(found[4])] = path
    if not files:
        known = ", ".join(models_in(folder)) or "no profiled model"
        raise ValueError(
            f"the profile must have files {model}_mbs*_tp*_algo*.csv (got {str(folder)!r} with {known}); pass one of "
            "its models, or another folder"
        )
    return files


def _rows(model: str, family: Family, names: Sequence[str], layers: int | None) -> list[int]:
    """Returns the line of each operator of the whole model: a layer's lines come once for each layer."""
    if family.rows is not None and len(names) != family.rows:
        raise ValueError(
            f"a profile of {family.name} must have {family.rows} operators (got {len(names)} of {model}); give another "
            "kind of model another name"
        )
    if bool(family.repeated) != (layers is not None):
        rule = (
            "the number of layers must be given, since the files have one of them"
            if family.repeated
            else ("the number of layers must not be given, since the files have all operators")
        )
        raise ValueError(f"of {model}, {rule} (got layers={layers}); {'pass' if family.repeated else 'leave out'} -l")
    rows, done = [], 0
    for begin, end in family.repeated:
        rows += [*range(done, begin), *(list(range(begin, end)) * (layers or 1))]
        done = end
    return [*rows, *range(done, len(names))]


def _operators(path: Path) -> tuple[list[str], list[Costs]]:
    names, costs = [], []
    for line, row in _lines(path):
        if len(row) != COLUMNS:
            raise ValueError(
                f"{path}, line {line}: an operator must have a name, two times and six sizes (got {len(row)} columns); "
                "profile it again"
            )
        names.append(row[0])
        numbers = [_number(path, line, text) for text in row[1:]]
        costs.append(Costs(*(number * unit for number, unit in zip(numbers, _UNITS, strict=True))))
    if not names:
        raise ValueError(f"{path}: must have a line for each operator (got none); profile it again")
    if not any(one.forward_s or one.backward_s for one in costs):
        raise ValueError(f"{path}: operators must take some time (got 0 for all {len(names)}); profile it again")
    return names, costs


def _links(folder: Path, model: str) -> Links:
    within = _bands(folder / "p2p_intra_node.csv")
    between = folder / "p2p_inter_node.csv"
    collectives: dict[str, dict[int, dict[int, float]]] = {}
    for path in sorted(folder.glob(f"prim_{model}_*gpus.csv")):
        found = re.fullmatch(rf"prim_{re.escape(model)}_([a-z_]+)_(\d+)gpus\.csv", path.name)
        if found:
            times = {}
            for line, row in _lines(path):
                if len(row) != 2:
                    raise ValueError(
                        f"{path}, line {line}: a collective must have a size and a time (got {len(row)} columns); "
                        "profile it again"
                    )
                times[round(_number(path, line, row[0]))] = 1e-3 * _number(path, line, row[1])
            if not times:
                raise ValueError(f"{path}: must have a line for each size (got none); profile it again, or remove it")
            collectives.setdefault(found[1], {})[int(found[2])] = times
    return Links(within=within, between=_bands(between) if between.exists() else within, collectives=collectives)


def _bands(path: Path) -> list[float]:
    for line, row in _lines(path):
        bands = [_number(path, line, text) * GB for text in row]
        if not all(band >= _SLOWEST * GB for band in bands):
            told = ", ".join(row)
            raise ValueError(
                f"{path}, line {line}: speeds must be {_SLOWEST:g} GB/s or more (got {told}); profile it again"
            )
        return bands
    raise ValueError(f"{path}: must have a line of sizes and one of speeds (got less); profile it again")


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (number, columns) of the lines below the head. Raises ValueError for a file that cannot be read."""
    try:
        rows = [*csv.reader(path.read_text(encoding="utf-8").splitlines())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"a profile must have {path.name} (got {path}: {error}); profile it, or pass another folder"
        ) from error
    for number, row in enumerate(rows, start=1):
        if number > 1 and row:
            yield number, [column.strip() for column in row]


def _number(path: Path, line: int, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _LARGEST:
        raise ValueError(
            f"{path}, line {line}: times and sizes must be numbers from 0 to {_LARGEST:g} (got {text[:40]!r}); profile "
            "it again"
        )
    return number
