"""A forward pass that passes over layers, as a mixture of experts does over those that no token needs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stronghold.schedule import Action, Schedule


def forward(schedule: Schedule, layers: int, routers: dict[int, list[int]], left_out: set[int]) -> list[str]:
    """Runs a pass without the layers ``left_out``, which each router, a layer, tells when it has run; the moves."""
    log, ran = [], []

    def note(moves):
        log.extend(str(move) for move in moves if move.action is Action.FETCH)

    for layer in range(layers):
        if layer in left_out:
            continue
        note(schedule.begin_forward(layer, training=True, behind=ran))
        log.append(f"C{layer}")
        note(schedule.end_forward(returning=True))
        ran.append(layer)
        if layer in routers:
            log.append(f"R{layer}")
            note(schedule.leave_out([x for x in routers[layer] if x in left_out], routers[layer]))
    for layer in reversed(ran):
        note(schedule.begin_backward(layer, ran[: ran.index(layer)][::-1]))
        log.append(f"B{layer}")
        note(schedule.end_backward())
    return log


def test_what_is_left_out_is_not_fetched_once_it_is_known():
    schedule = Schedule(5, 1)
    # The first fetch can begin before the routing is known.
    log = forward(schedule, 5, {0: [1, 2, 3]}, {1, 3})
    assert " ".join(log) == "F0 C0 F1 R0 F2 C2 F4 C4 B4 F2 B2 F0 B0"


def test_what_was_left_out_before_and_is_needed_now_is_fetched_as_soon_as_that_is_known():
    schedule = Schedule(5, 2)
    forward(schedule, 5, {0: [1, 2, 3]}, {1, 2})
    log = forward(schedule, 5, {0: [1, 2, 3]}, {3})
    assert log.index("F1") < log.index("C1") and log.index("F2") < log.index("C2")
    assert "F3" not in log  # the pass before had fetched it; this one held or dropped it


@settings(max_examples=200)
@given(st.data())
def test_nothing_left_out_is_fetched_once_that_is_known(data):
    experts, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    layers = rows * (experts + 1)
    routers = {row * (experts + 1): [row * (experts + 1) + 1 + i for i in range(experts)] for row in range(rows)}
    window = data.draw(st.integers(1, layers))
    schedule = Schedule(layers, window)
    for _ in range(4):
        left_out = {x for of in routers.values() for x in of if data.draw(st.booleans())}
        log = forward(schedule, layers, routers, left_out)
        position = {word: place for place, word in reversed(list(enumerate(log)))}
        for router, of in routers.items():
            told = position[f"R{router}"]
            for layer in left_out.intersection(of):
                assert f"C{layer}" not in log
                fetched = [place for place, word in enumerate(log) if word == f"F{layer}"]
                # until the backward pass looks ahead to the next forward pass
                assert not [p for p in fetched if told < p < position[f"B{router}"]]
