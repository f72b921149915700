"""The schedule against literals, against brute force, and against what must never happen."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stronghold.schedule import Action, KnownFuture, Move, Schedule, evict, fetch, possible_now, trace
from tests.crossed import seeds


def fetches(layers: int, window: int, once: list[str], rounds: int = 6) -> int:
    """The fetches of one more round of ``once``, when the schedule has settled."""
    settled, more = (trace(layers, window, once * n).split() for n in (rounds, rounds + 1))
    return sum(word[0] == "F" for word in more[len(settled) :])


def test_trace_with_a_window_of_two():
    assert trace(4, 2, ["forward", "backward", "step", "forward"]) == (
        "F0 F1 C0 E0 F2 C1 E1 F3 C2 C3 "  # the last two stay
        "C3 E3 F1 C2 E2 F0 C1 C0 "
        "E0 E1 F0 F1 "  # both have changed
        "C0 E0 F2 C1 E1 F3 C2 C3"
    )


def test_trace_with_a_window_of_one():
    assert trace(3, 1, ["forward", "backward"]) == "F0 C0 E0 F1 C1 E1 F2 C2 C2 E2 F1 C1 E1 F0 C0"


def test_trace_of_accumulation_finds_the_first_layers_again():
    assert trace(4, 2, ["forward", "backward", "forward"]) == (
        "F0 F1 C0 E0 F2 C1 E1 F3 C2 C3 C3 E3 F1 C2 E2 F0 C1 C0 C0 E0 F2 C1 E1 F3 C2 C3"
    )


def test_trace_with_the_whole_model_in_the_window_fetches_only_what_changed():
    assert trace(2, 2, ["forward", "backward", "step", "forward"]) == "F0 F1 C0 C1 C1 C0 E0 E1 F0 F1 C0 C1"


def test_moves_print_as_letter_and_layer():
    assert [str(fetch(3)), str(evict(12)), str(Move(Action.COMPUTE, 0))] == ["F3", "E12", "C0"]


@given(st.integers(1, 12), st.data())
def test_a_step_that_updates_every_layer_takes_2l_minus_w_fetches(layers, data):
    window = data.draw(st.integers(1, layers))
    assert fetches(layers, window, ["forward", "backward", "step"]) == 2 * layers - window


@given(st.integers(1, 12), st.data())
def test_accumulation_takes_twice_l_minus_w_fetches(layers, data):
    window = data.draw(st.integers(1, layers))
    assert fetches(layers, window, ["forward", "backward"]) == 2 * (layers - window)


@given(st.integers(1, 12), st.data())
def test_evaluation_takes_at_most_l_minus_w_plus_two_fetches(layers, data):
    window = data.draw(st.integers(1, layers))
    got = fetches(layers, window, ["evaluate"])
    assert got <= min(layers, layers - window + 2)
    assert got >= (layers - window)


def test_frozen_lower_layers_return_no_more_and_are_not_fetched_for_it():
    schedule, moves = Schedule(6, 2), []

    def step():
        moves.clear()
        for i in range(6):
            moves.extend(schedule.begin_forward(i, training=True, behind=[x for x in range(i) if x >= 3]))
            moves.extend(schedule.end_forward(returning=i >= 3))
        for i in (5, 4, 3):
            moves.extend(schedule.begin_backward(i, list(range(i - 1, 2, -1))))
            moves.extend(schedule.end_backward())
        moves.extend(schedule.changed([3, 4, 5]))
        return sum(move.action is Action.FETCH for move in moves)

    step(), step()
    # Forward needs all six; backward three, of which two are still there.
    assert step() == 6 + 3 - 2


def test_what_changed_is_dropped_and_nothing_else():
    schedule = Schedule(4, 4)
    for i in range(4):
        schedule.begin_forward(i, training=False)
        schedule.end_forward(returning=False)
    moves = schedule.changed([2])
    assert [str(move) for move in moves] == ["E2", "F2"]
    assert schedule.held == {0, 1, 2, 3}


@pytest.mark.parametrize("window", [0, -1, 5])
def test_a_window_out_of_range_is_refused(window):
    with pytest.raises(ValueError, match=rf"window must be between 1 and the number of layers \(got window={window}, "):
        Schedule(4, window)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["forward", "evaluate", "backward", "changed", "changed many"]),
        st.integers(0, 6),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(st.integers(1, 7), st.data(), EVENTS)
def test_whatever_happens_layers_are_there_when_computed_and_the_window_holds(layers, data, events):
    """Any order of events, also ones that no forecast foresees: a replay of the moves keeps to the rules."""
    window = data.draw(st.integers(1, layers))
    schedule, held, tape, fresh = Schedule(layers, window), set(), [], set()

    def replay(moves, computing=None):
        for move in moves:
            if move.action is Action.FETCH:
                assert move.layer not in held
                held.add(move.layer)
                fresh.add(move.layer)
            else:
                assert move.layer in held
                assert move.layer != computing, "the slot of a computation in progress was taken"
                held.discard(move.layer)
            assert len(held) <= window

    for kind, layer in events:
        layer %= layers
        if kind == "changed":
            fresh.discard(layer)
            replay(schedule.changed([layer]))
        elif kind == "changed many":
            fresh.clear()
            replay(schedule.changed(range(layers)))
        elif kind == "backward":
            tape = tape[: tape.index(layer)] if layer in tape else tape
            replay(schedule.begin_backward(layer, tape[::-1]))
            assert layer in held, "computed without having been fetched"
            assert layer in fresh, "computed with what an update has changed since"
            replay(schedule.end_backward())
        else:
            training = kind == "forward"
            replay(schedule.begin_forward(layer, training=training, behind=tape))
            assert layer in held
            assert layer in fresh
            replay(schedule.end_forward(returning=training))
            if training:
                tape = [*tape, layer]
        assert held == schedule.held


def least_fetches(future: tuple[int, ...], window: int) -> int:
    """Brute force: the least fetches with which each layer, and beside it the next one, is there when computed."""

    @cache
    def cost(t: int, held: frozenset[int]) -> int:
        if t == len(future):
            return 0
        needed = {future[t]} if window == 1 else set(future[t : t + 2])
        missing = needed - held
        best = None
        pool = held - needed

        def subsets(items):
            items = sorted(items)
            for mask in range(1 << len(items)):
                yield frozenset(x for i, x in enumerate(items) if mask >> i & 1)

        for kept in subsets(pool):
            if len(kept) + len(needed) > window:
                continue
            if len(kept) < min(len(pool), window - len(needed)):
                continue  # to drop more than there is need for never helps
            got = len(missing) + cost(t + 1, frozenset(kept | needed))
            best = got if best is None else min(best, got)
        return best

    return cost(0, frozenset())


def planned_fetches(future: tuple[int, ...], window: int) -> int:
    held, count = set(), 0

    def apply(moves):
        nonlocal count
        for move in list(moves):
            if move.action is Action.FETCH:
                held.add(move.layer)
                count += 1
            else:
                held.remove(move.layer)

    apply(possible_now(future, held, window))
    for t, layer in enumerate(future):
        assert layer in held
        rest = future[t + 1 :]
        apply(possible_now(rest, held, window, computing=layer))
        apply(possible_now(rest, held, window))
    return count


@settings(max_examples=300)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 4))
def test_no_plan_that_looks_one_computation_ahead_fetches_less(future, window):
    assert planned_fetches(tuple(future), window) == least_fetches(tuple(future), window)


@settings(max_examples=200)
@given(st.data())
def test_what_gives_way_is_what_is_needed_last_however_far_that_is(data):
    """Belady's rule read as it is written, over futures of hundreds of computations."""
    layers = data.draw(st.integers(2, 60))
    future = tuple(data.draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=200)))
    held = data.draw(st.sets(st.integers(0, layers - 1), min_size=2, max_size=layers))
    first = next((t for t, layer in enumerate(future) if layer not in held), None)
    moves = list(possible_now(future, held, len(held)))
    if first is None:
        assert moves == []
        return
    before = future[first - 1] if first else None

    def needed(layer: int) -> int:
        return next((t for t in range(first, len(future)) if future[t] == layer), len(future))

    victim = max(sorted(held - {before}, reverse=True), key=needed)
    too_early = victim in future[:first]
    assert moves[:2] == ([] if too_early else [evict(victim), fetch(future[first])])


ROUNDS = {
    "deferred": ["forward", "backward", "step"],
    "in_backward": ["forward", "backward and update"],
    "accumulation": ["forward", "backward"],
    "evaluation": ["evaluate"],
}


def foreseen(layers: int, window: int, passes: list[str], count: int):
    """Runs the schedule and returns its log and what it foresaw: (events so far, the layers ahead) after each event.

    The log is of "F3" for a fetch, "U3" for an update and "C3" for a computation that begins.
    """
    schedule, log, seen = Schedule(layers, window), [], []

    def note(moves):
        log.extend(str(move) for move in moves if move.action is Action.FETCH)
        seen.append((len(log), schedule.ahead(count)))

    def change(changed):
        log.extend(f"U{layer}" for layer in changed)
        note(schedule.changed(changed))

    for kind in passes:
        if kind == "step":
            change(range(layers))
            continue
        backward = kind.startswith("backward")
        for i in reversed(range(layers)) if backward else range(layers):
            if backward:
                note(schedule.begin_backward(i, range(i - 1, -1, -1)))
            else:
                training = kind == "forward"
                note(schedule.begin_forward(i, training=training, behind=range(i) if training else ()))
            log.append(f"C{i}")
            note(schedule.end_backward() if backward else schedule.end_forward(returning=kind == "forward"))
            if kind == "backward and update":
                change([i])
    return log, seen


@settings(max_examples=60)
@given(st.integers(1, 9), st.data(), st.sampled_from(sorted(ROUNDS)), st.integers(1, 3))
def test_what_is_foreseen_is_what_is_then_done(layers, data, kind, count):
    """In the third and fourth of eight rounds, when it has seen all that happens; and nothing is left out."""
    window, passes = data.draw(st.integers(1, layers)), ROUNDS[kind]
    log, seen = foreseen(layers, window, passes * 8, count)
    for position, layers_ahead in seen[len(seen) // 4 : len(seen) // 2]:
        fetched = [(t, int(word[1:])) for t, word in enumerate(log) if word[0] == "F" and t >= position][:count]
        assert [layer for _, layer in fetched[: len(layers_ahead)]] == layers_ahead
        for t, layer in fetched[: len(layers_ahead)]:
            assert f"U{layer}" not in log[position:t], "read before its update"
        for t, layer in fetched[len(layers_ahead) : len(layers_ahead) + 1]:
            computations = sum(word[0] == "C" for word in log[position:t])
            assert f"U{layer}" in log[position:t] or computations >= 3 * count - 1


def test_two_fetches_ahead_in_forward_across_the_turn_and_behind_the_step():
    _, seen = foreseen(6, 2, ["forward", "backward", "step"] * 2, 2)
    words = [ahead for _, ahead in seen[25:]]  # the second step; each computation begins and ends
    assert words[0:4] == [[2, 3], [3, 4], [3, 4], [4, 5]]
    assert words[8:12] == [[3, 2], [3, 2], [3, 2], [3, 2]]
    assert words[12:16] == [[3, 2], [2, 1], [2, 1], [1, 0]]
    assert words[20:] == [[], [], [], [], [2, 3]]  # the step is foreseen: nothing is read that it will change


def test_an_unforeseen_pass_is_no_hindrance():
    schedule = Schedule(4, 2)
    assert schedule.ahead(2) == []
    for i in range(3):
        schedule.begin_forward(i, training=True, behind=range(i))
        schedule.end_forward(returning=True)
    assert schedule.ahead(2) == [1, 0]  # expecting the turn
    schedule.begin_forward(0, training=False)
    assert schedule.ahead(2) == [2, 3]


@pytest.mark.parametrize("seed", seeds(30, 12))
def test_a_future_that_is_known_changes_no_move(seed):
    """Over passes of which every future is an end of the one before, or some are and others not."""
    rng = random.Random(seed)
    layers, window, ends = rng.randint(60, 150), rng.randint(1, 20), rng.random() < 0.7
    order = rng.choice(([*range(layers)], [*range(0, layers, 2), *range(1, layers, 2)]))
    future, known = (*order, *reversed(order), *order), KnownFuture()
    for passed in range(0, 2 * layers, rng.randint(3, 20)):
        rest = future[passed:] if ends or rng.random() < 0.5 else (*future[passed:], *order)
        held = set(rng.sample(range(layers), window))
        computing = rng.choice([None, *held])
        assert [*possible_now(rest, held, window, computing, known)] == [*possible_now(rest, held, window, computing)]
