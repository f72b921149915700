"""Rounds: measures take turns, the first round does not count, and what is enough is enough."""

from stronghold.planner.machine_file import Spread
from stronghold.probing import rounds
from stronghold.probing.rounds import Measure, sample_all


def test_measures_take_turns_and_the_first_round_does_not_count():
    called = []

    def counting(name):
        def sample():
            called.append(name)
            return {(name,): float(called.count(name))}

        return Measure(name, sample)

    found = sample_all([counting("a"), counting("b")], seconds=0.0)
    assert called == ["a", "b"] * (1 + rounds.LEAST_ROUNDS)
    assert found == {("a",): [2.0, 3.0, 4.0], ("b",): [2.0, 3.0, 4.0]}
    assert found.spread(("a",)) == Spread(2.5, 3.0, 3.5)


def test_there_are_as_many_rounds_as_the_time_allows_and_not_more_than_the_most():
    found = sample_all([Measure("a", lambda: {("a",): 1.0})], seconds=5.0)
    assert len(found["a",]) == rounds.MOST_ROUNDS


def test_progress_is_told_before_each_measure():
    told = []
    measures = [Measure(name, lambda: {}) for name in ("a", "b")]
    sample_all(measures, seconds=1e-9, progress=lambda what, share: told.append((what, share)))
    assert [what for what, _ in told] == ["a", "b"] * (1 + rounds.LEAST_ROUNDS)
    assert all(0 <= share <= 1 for _, share in told)
