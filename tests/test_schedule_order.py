"""The schedule that follows an order: micro-batches that go through a pipeline's stage in turn."""

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from stronghold.schedule import Action, Computation, Schedule
from tests.test_schedule import planned_fetches

F, B = False, True


def layers_of(passes: list[bool], layers: int) -> list[Computation]:
    """Every pass through all layers: forward upwards, backward downwards."""
    orders = {F: range(layers), B: range(layers - 1, -1, -1)}
    return [Computation(layer, backward) for backward in passes for layer in orders[backward]]


def run(schedule: Schedule, order: list[Computation], *, changes: bool = False, count: int = 0):
    """Runs one step; returns its fetches, the computations that found no layer, and what was foreseen after each."""
    log, late, seen = [], 0, []

    def note(moves):
        log.extend(f"F{move.layer}" for move in moves if move.action is Action.FETCH)
        seen.append((len(log), schedule.ahead(count) if count else []))

    for layer, backward in order:
        late += layer not in schedule.held
        if backward:
            note(schedule.begin_backward(layer, ()))
            note(schedule.end_backward())
        else:
            note(schedule.begin_forward(layer, training=True))
            note(schedule.end_forward(returning=True))
    if changes:
        log.extend(f"U{layer}" for layer in range(schedule.layers))
        note(schedule.changed(range(schedule.layers)))
    return log, late, seen


@st.composite
def stages(draw):
    layers = draw(st.integers(1, 6))
    micro_batches, warmup = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    passes, forwards, backwards = [], 0, 0
    while backwards < micro_batches:
        forward = forwards < micro_batches and forwards - backwards < warmup
        passes.append(F if forward else B)
        forwards, backwards = forwards + forward, backwards + (not forward)
    return layers, draw(st.integers(1, layers)), layers_of(passes, layers)


@settings(max_examples=150)
@given(stages())
def test_every_layer_is_there_in_time_with_the_least_traffic(stage):
    layers, window, order = stage
    schedule = Schedule(layers, window)
    schedule.follow(order)
    run(schedule, order)
    rounds = [run(schedule, order) for _ in range(4)]
    numbers = tuple(computation.layer for computation in order)
    assert sum(len(log) for log, _, _ in rounds[1:]) <= planned_fetches(numbers * 5, window) - planned_fetches(
        numbers * 2, window
    )
    assert all(late == 0 for _, late, _ in rounds)


@settings(max_examples=60)
@given(stages(), st.booleans(), st.integers(1, 3))
def test_what_is_foreseen_is_what_is_then_done(stage, changes, count):
    layers, window, order = stage
    schedule = Schedule(layers, window)
    schedule.follow(order)
    logs, foreseen = [], []
    for number in range(9):  # enough of them to see what the fourth foresees
        log, _, seen = run(schedule, order, changes=changes, count=count)
        if number in (2, 3):
            foreseen += [(len(logs) + position, ahead) for position, ahead in seen]
        logs += log
    for position, ahead in foreseen:
        fetched = [(t, int(word[1:])) for t, word in enumerate(logs) if word[0] == "F" and t >= position]
        assert [layer for _, layer in fetched[: len(ahead)]] == ahead
        for t, layer in fetched[: len(ahead)]:
            assert f"U{layer}" not in logs[position:t], "read before its update"


def test_looking_ahead_does_not_copy_the_order():
    class Uncopied(Computation):
        def __deepcopy__(self, memo):
            raise AssertionError("a copy for every look")

    schedule = Schedule(4, 2)
    order = layers_of([F, B], 4)
    schedule.follow([Uncopied(*computation) for computation in order])
    run(schedule, order)
    schedule.begin_forward(0, training=True)
    assert schedule.ahead(2) == [2, 3]


@settings(max_examples=60)
@given(stages(), st.booleans(), st.booleans())
def test_looking_ahead_changes_nothing(stage, follows, changes):
    layers, window, order = stage
    order = [one for one in order if one.layer % 3 != 1]  # so that it jumps
    schedule = Schedule(layers, window)
    if follows:
        schedule.follow(order)
    for number in range(2 * len(order)):
        layer, backward = order[number % len(order)]
        schedule.begin_backward(layer, ()) if backward else schedule.begin_forward(layer, training=True)
        before = copy.deepcopy(vars(schedule))
        schedule.ahead(3)
        assert vars(schedule) == before
        schedule.end_backward() if backward else schedule.end_forward(returning=True)
        if changes:
            schedule.changed(range(layers))


def test_a_computation_that_is_left_out_does_not_lose_the_place():
    schedule = Schedule(4, 2)
    order = layers_of([F, F, B, B], 4)
    schedule.follow(order)
    frozen = [one for one in order if one != (0, B)]
    for _ in range(3):
        _, late, _ = run(schedule, frozen)
    assert late == 0


def test_an_evaluation_is_foreseen_by_itself_and_the_order_is_taken_up_behind_it():
    schedule = Schedule(4, 2)
    order = layers_of([F, F, B, B], 4)
    schedule.follow(order)
    run(schedule, order)
    late = []
    for _ in range(3):
        for layer in range(4):
            late.append(layer not in schedule.held)
            schedule.begin_forward(layer, training=False)
            schedule.end_forward(returning=False)
    assert not any(late[4:])
    run(schedule, order)
    assert run(schedule, order)[1] == 0
