"""Random sequences of a user's operations: a bounded run, always the same. ``python -m tests.fuzz`` goes further."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from tests.fuzz.known import KNOWN
from tests.fuzz.memory import WRITES, Write
from tests.fuzz.minimise import minimise
from tests.fuzz.models import Model
from tests.fuzz.operation import Evaluate, Train
from tests.fuzz.programs import Program, programs
from tests.fuzz.running import Failure, run
from tests.fuzz.states import Mode
from tests.fuzz.twin import Twin, Way


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Leaves what was imported out of each program's garbage collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


MINIMISE_S = 60


def unknown(program: Program) -> Failure | None:
    """Runs a program; returns how it failed, but for a known cause."""
    failure = run(program)
    return None if failure is None or any(cause.explains(failure, program) for cause in KNOWN) else failure


@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(programs())
def test_sequences_of_operations_do_what_they_do_in_plain_pytorch(program: Program) -> None:
    failure = unknown(program)
    if failure is None:
        return
    smallest = minimise(program, lambda smaller: unknown(smaller) is not None, MINIMISE_S)
    failure = unknown(smallest) or failure
    raise AssertionError(
        f"{failure.kind} {failure.place}: {failure.message} (at {failure.where})\n"
        f"from tests.fuzz.short import *\ncheck({smallest!r})"
    )


def test_a_program_that_goes_wrong_is_told_and_made_smaller() -> None:
    """Two ways that promise different things stand for one that breaks its promise."""
    program = Program(
        model=Model(layers=("block", "linear", "odd"), order="twice"),
        ways=(Way(window=2), Way(), Way(micro_batch=2)),
        operations=(Mode(train=True), Train(batch=1), Evaluate(batch=2), Train(batch=2)),
    )

    def unlike(smaller: Program) -> bool:
        return any(way.micro_batch == 2 for way in smaller.ways) and Train(batch=2) in smaller.operations

    smallest = minimise(program, unlike, MINIMISE_S)
    assert smallest == Program(
        ways=(Way(micro_batch=2),), model=Model(layers=("linear",)), operations=(Train(batch=2),)
    )
    assert eval(repr(smallest)) == smallest


def lost(twin: Twin, name: str, parameter: Tensor, factor: float) -> None:
    """Stands for a write that one twin does not see."""
    if twin.plain or twin.way == Way():
        parameter.mul_(factor)


@pytest.mark.parametrize(("ways", "beside"), [((Way(window=2),), "plain"), ((Way(), Way(window=2)), "another way")])
@pytest.mark.parametrize("optimizer", ["AdamW", "sgd"])
def test_a_write_that_is_lost_is_a_failure(
    ways: tuple[Way, ...], beside: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(ways=ways, optimizer=optimizer, operations=(Train(), Write(how="mul_", target=3), Train()))
    assert run(program) is None
    monkeypatch.setitem(WRITES, "mul_", lost)
    failure = run(program)
    assert failure is not None
    assert failure.kind == f"differs from {beside}"
