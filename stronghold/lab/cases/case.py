"""The five cases: what each one measures, and which runs it consists of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stronghold.lab.cases.machines import Machine


class Wanted(NamedTuple):
    """A run that a case consists of, by what distinguishes it from the others; ``window`` is stronghold's alone.

    ``group`` is where its bar stands: the baseline whose largest model it trains, in case 2.
    """

    method: str
    layers: int
    window: int | None = None
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One figure of the paper: ``y`` of each run over ``x``.

    ``y`` is a field of Measurement. ``x`` is "method" for bars, "baseline" for bars in groups, else the setting on the
    axis: runs with any value of it belong, not only those that the case itself runs. The ``largest`` case is of trials.
    """

    number: int
    title: str
    figure: str
    x: str
    x_label: str
    y: str
    y_label: str
    largest: bool = False

    @property
    def name(self) -> str:
        return f"case{self.number}"

    @property
    def varies(self) -> bool:
        """Tells a case with numbers on its x axis from one of bars."""
        return self.x in Wanted._fields[1:3]

    def runs(self, machine: Machine, largest: Mapping[str, int]) -> Iterator[Wanted]:
        """Yields the case's runs on ``machine``, given the layers of each method's ``largest`` model.

        Those of case 1 are known only when they have passed.
        """
        methods, ours = machine.methods, machine.window
        if self.x == "layers":
            yield from (Wanted("stronghold", layers, ours) for layers in machine.scaling_layers)
        elif self.x == "window":
            yield from (Wanted("stronghold", machine.largest["megatron-lm"], window) for window in machine.windows)
        elif self.x == "baseline":
            for method in methods:
                if method != "stronghold" and method in largest:
                    yield Wanted(method, largest[method], None, method)
                    yield Wanted("stronghold", largest[method], ours, method)
        elif not self.largest:
            for method in methods:
                yield Wanted(method, largest["megatron-lm"], ours if method == "stronghold" else None)


CASES = {
    case.number: case
    for case in (
        Case(
            number=1,
            title="The largest trainable model",
            figure="figure 6a",
            x="method",
            x_label="",
            y="parameters",
            y_label="parameters of the largest model",
            largest=True,
        ),
        Case(
            number=2,
            title="Throughput at each baseline's largest model",
            figure="figure 7a",
            x="baseline",
            x_label="baseline, at its largest model",
            y="samples_per_s",
            y_label="samples per second",
        ),
        Case(
            number=3,
            title="Throughput at Megatron-LM's largest model",
            figure="figure 8a",
            x="method",
            x_label="",
            y="samples_per_s",
            y_label="samples per second",
        ),
        Case(
            number=4,
            title="Time per iteration as layers grow",
            figure="figure 8b",
            x="layers",
            x_label="layers",
            y="iteration_s",
            y_label="seconds per iteration",
        ),
        Case(
            number=5,
            title="Time per iteration by window size",
            figure="figure 9",
            x="window",
            x_label="window (layers on the device)",
            y="iteration_s",
            y_label="seconds per iteration",
        ),
    )
}
