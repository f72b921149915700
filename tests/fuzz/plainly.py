"""Dataclasses that print as the shortest Python that makes them again."""

from __future__ import annotations

from dataclasses import MISSING, fields


class Plainly:
    """A dataclass that leaves defaults out of its ``repr``."""

    def __repr__(self) -> str:
        changed = []
        for item in fields(self):  # type: ignore[arg-type]
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if (value := getattr(self, item.name)) != default:
                changed.append(f"{item.name}={value!r}")
        return f"{type(self).__name__}({', '.join(changed)})"
