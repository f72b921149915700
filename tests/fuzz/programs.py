"""Programs: a model, ways to offload it, and what a user does with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.fuzz import memory, operation, states
from tests.fuzz.models import FP32_ALONE, KINDS, ORDERS, OUTPUTS, Model
from tests.fuzz.operation import Operation
from tests.fuzz.plainly import Plainly
from tests.fuzz.twin import FOREIGN, OURS, Way

_NOT_LABELS = ("model", "ways", "operations", "window", "threads")


@dataclass(frozen=True, kw_only=True, repr=False)
class Program(Plainly):
    """One test: ``operations`` on a model that each of ``ways`` offloads, and on the plain one."""

    model: Model = field(default_factory=Model)
    ways: tuple[Way, ...] = (Way(),)
    dtype: str = "fp32"
    states: str = "fp32"
    optimizer: str = OURS
    max_grad_norm: float | None = None
    late: bool = False
    """Whether the last layer and a root parameter are in no group before AddGroup; not with bf16."""
    operations: tuple[Operation, ...] = ()

    @property
    def updates(self) -> set[str]:
        """How the offloaded twins update: "deferred", "in_backward"."""
        ours = self.optimizer == OURS or any(getattr(item, "how", "") == OURS for item in self.operations)
        if not ours:
            return {"deferred"}
        return {way.update for way in self.ways}

    def labels(self) -> frozenset[str]:
        """Returns what a cause may consist in: operations, settings and features that are not the plainest."""
        found = {label for item in self.operations for label in item.labels()}
        for thing in (self, self.model, *self.ways):
            plainest = type(thing)()
            for name, value in vars(thing).items():
                if isinstance(value, tuple) and name == "layers":
                    found.update(f"layer={kind}" for kind in value if kind != "linear")
                elif name not in ("model", "ways", "operations", "window", "threads") and value != getattr(
                    plainest, name
                ):
                    found.add(f"{name}={value}" if isinstance(value, str) else name)
        return frozenset(found)


def _models_of(kinds: Iterable[str]) -> st.SearchStrategy[Model]:
    return st.builds(
        Model,
        layers=st.lists(st.sampled_from(list(kinds)), min_size=2, max_size=4).map(tuple),
        order=st.sampled_from(ORDERS),
        outputs=st.sampled_from(OUTPUTS),
        dropout=st.sampled_from([0.0, 0.1]),
        tied=st.booleans(),
        shared=st.booleans(),
        frozen=st.lists(st.integers(0, 3), max_size=2, unique=True).map(tuple),
    )


models = _models_of(KINDS)
narrow_models = _models_of(kind for kind in KINDS if kind not in FP32_ALONE)


def ways(updates: st.SearchStrategy[str]) -> st.SearchStrategy[Way]:
    return st.builds(
        Way,
        window=st.integers(1, 4),
        store=st.sampled_from(["ram", "disk", "disks"]),
        activations=st.sampled_from(["recompute", "keep", "host"]),
        resident=st.sampled_from([0, 0, 1, 2, 4]),
        update=updates,
        threads=st.integers(1, 2),
        micro_batch=st.sampled_from([None, None, 8]),
    )


targets = st.integers(0, 30)
few = st.integers(0, 3)
whiches = st.integers(-2, 2)
factors = st.sampled_from([0.5, 0.0, 1.25, -1.0])
train = st.builds(operation.Train, batch=few, to_none=st.booleans())
loop = st.one_of(
    st.builds(operation.Forward, batch=few),
    st.builds(operation.Backward, which=whiches, retain=st.booleans(), together=st.booleans()),
    st.builds(operation.Step),
    st.builds(operation.ZeroGrad, to_none=st.booleans(), by_model=st.booleans()),
    st.builds(operation.Accumulate, batches=st.lists(few, min_size=2, max_size=3).map(tuple)),
    st.builds(operation.Clip, how=st.sampled_from(["norm", "foreach", "value"])),
    st.builds(operation.Gradient, how=st.sampled_from([*operation.GRADIENT_WRITES, "all"]), target=targets),
    st.builds(
        operation.Evaluate,
        batch=few,
        how=st.sampled_from(["no_grad", "grad", "inference"]),
        hold=st.booleans(),
        eval=st.booleans(),
    ),
    st.builds(operation.Explode, how=st.sampled_from(["forward", "backward"]), layer=few, batch=few),
)
writes = st.builds(memory.Write, how=st.sampled_from(list(memory.WRITES)), target=targets, factor=factors)
holds = st.builds(memory.Hold, what=st.sampled_from(list(memory.HOLDS)), target=targets)
held = st.builds(
    memory.Held, how=st.sampled_from(["read", "write", "drop"]), which=whiches, target=targets, factor=factors
)
state = st.one_of(
    st.builds(states.Look, what=st.sampled_from(list(states.LOOKS))),
    st.builds(states.Save, what=st.sampled_from(["model", "optimizer"])),
    st.builds(states.Load, what=st.sampled_from(["model", "optimizer"])),
    st.builds(states.Copy),
    st.builds(states.Checkpoint, way=ways(st.just("deferred"))),
    st.builds(states.Restore),
    st.builds(states.Group, what=st.sampled_from(states.SETTINGS), which=few, factor=factors.map(abs)),
    st.builds(states.Schedule),
    st.builds(states.AddGroup),
    st.builds(states.Freeze, target=targets, whole=st.booleans(), on=st.booleans()),
    st.builds(states.Mode, train=st.booleans()),
    st.builds(states.To, how=st.sampled_from(["cpu", "dtype", "double", "meta"])),
    st.builds(states.Hook, how=st.sampled_from(["scale", "note", "forward", "inner", "remove"]), target=targets),
    st.builds(states.Switch, how=st.sampled_from([OURS, *FOREIGN])),
)
_OFTEN = (train, train, train, loop, loop, writes, holds, held, state, state)
OPERATIONS = st.sampled_from(_OFTEN).flatmap(lambda some: some)


@st.composite
def programs(draw: st.DrawFn, operations: int = 14) -> Program:
    """Draws a program of up to so many operations; the simplest come first."""
    optimizer = draw(st.sampled_from([OURS, OURS, OURS, OURS, *FOREIGN]))
    dtype = draw(st.sampled_from(["fp32", "bf16"])) if optimizer == OURS else "fp32"
    updates = draw(
        st.sampled_from([st.just("deferred"), st.sampled_from(["deferred", "in_backward"]), st.just("in_backward")])
    )
    chosen = draw(st.lists(ways(updates), min_size=1, max_size=3).map(tuple))
    clips = optimizer == OURS and all(way.update == "deferred" for way in chosen)
    fewest = draw(st.integers(1, max(1, operations * 2 // 3)))  # hypothesis alone prefers short ones
    return Program(
        model=draw(narrow_models if dtype == "bf16" else models),
        ways=chosen,
        dtype=dtype,
        states=draw(st.sampled_from(["fp32", "fp32", "8bit"])) if optimizer == OURS else "fp32",
        optimizer=optimizer,
        max_grad_norm=draw(st.sampled_from([None, None, 0.1])) if clips else None,
        late=draw(st.booleans()) and dtype == "fp32",
        operations=draw(st.lists(OPERATIONS, min_size=fewest, max_size=operations).map(tuple)),
    )
