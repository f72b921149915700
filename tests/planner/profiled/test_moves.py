"""Moves of borders: which operators change stages, and that the longest stage becomes shorter."""

from itertools import pairwise

from stronghold.planner.profiled.files import read_profile
from stronghold.planner.profiled.layouts import Share, Sharing
from stronghold.planner.profiled.moves import Bench, _shifted
from stronghold.planner.profiled.reach import Cluster, Draft
from stronghold.planner.profiled.recompute import segment_starts
from stronghold.planner.profiled.stage_table import StageTable
from tests.planner.profiled.small_profiles import write_profile

SHARING = Sharing(1, (Share(1, 1),) * 12)


def drafts_of(*borders):
    return [Draft(begin=a, end=b, sharing=SHARING) for a, b in pairwise(borders)]


def test_operators_go_through_the_stages_between():
    drafts = drafts_of(0, 4, 8, 12)
    assert _shifted(drafts, 0, 2, 1) == drafts_of(0, 3, 7, 12)
    assert _shifted(drafts, 2, 0, 2) == drafts_of(0, 6, 10, 12)
    assert _shifted(drafts, 1, 2, 3) == drafts_of(0, 4, 5, 12)
    assert _shifted(drafts, 1, 2, 4) is None


def test_a_bad_beginning_is_moved_to_the_best_borders(tmp_path):
    names = [f"op{n}" for n in range(12)]
    profile = read_profile(write_profile(tmp_path, "toy_a", names), "toy_a")
    table = StageTable(profile, segment_starts(profile), SHARING, 1, 1e12)
    bench = Bench({SHARING: table}, Cluster(nodes=1, devices_per_node=3), 20)
    best = min(bench.step_s(drafts_of(0, a, b, 12)) for a in range(1, 11) for b in range(a + 1, 12))
    assert bench.step_s(bench.improved(drafts_of(0, 10, 11, 12))) <= best * 1.02
