"""A run's settings from a YAML file: its keys are the options' names, with the line of each for what is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Entry:
    """A key's value, and the ``place`` that it stands at, such as ``run.yaml:3``."""

    value: Any
    place: str


def read_run_file(path: str, names: Collection[str]) -> dict[str, Entry]:
    """Returns the entries of the file at ``path`` by the names of options, written with underscores.

    ``checkpoint-every`` and ``checkpoint_every`` are one key. Raises ValueError, naming file and line, for what is no
    YAML, no mapping, a key that is none of ``names`` or stands there twice; and for a file that cannot be read.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"a run's file must be readable (got {path!r}: {error.strerror}); pass another") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _no_yaml(path, path, error) from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(
            f"a run's file must have the options' names as keys (got {path!r}, which has none); write them"
        )
    loader = yaml.SafeLoader("")
    found: dict[str, Entry] = {}
    for key, value in root.value:
        place, name = f"{path}:{key.start_mark.line + 1}", str(key.value).replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {near[0].replace('_', '-')}?" if near else "see stronghold finetune --help"
            raise ValueError(
                f"a run's file has the options' names as keys (at {place}: {key.value!r} is none); {remedy}"
            )
        if name in found:
            raise ValueError(
                f"a key stands once in a run's file (at {place}: {key.value!r}, again); remove one of them"
            )
        # A number stays as it is written: YAML 1.1 takes 2e-4 for text.
        scalar = isinstance(value, yaml.ScalarNode) and value.tag in (f"tag:yaml.org,2002:{kind}" for kind in _NUMBERS)
        try:
            found[name] = Entry(value.value if scalar else loader.construct_object(value, deep=True), place)
        except (yaml.YAMLError, ValueError) as error:  # a tag that is not YAML's own, a date that there is not
            raise _no_yaml(path, place, error) from error
    return found


def _no_yaml(path: str, place: str, error: Exception) -> ValueError:
    """Returns what is wrong with the file at ``path``: in the line that YAML says, or else at ``place``."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        place = f"{path}:{mark.line + 1}"
    problem = getattr(error, "problem", None) or str(error)
    return ValueError(f"a run's file must be YAML (at {place}: {problem}); mend it")


_NUMBERS = ("int", "float")
