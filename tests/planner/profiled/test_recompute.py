"""What a stage recomputes to fit, and stages in tables, against the performance model and all sets of operators."""

from itertools import product

import pytest

from stronghold.planner.profiled.files import read_profile
from stronghold.planner.profiled.layouts import Share, Sharing
from stronghold.planner.profiled.operator_plan import OperatorStage
from stronghold.planner.profiled.predict import predict_stage
from stronghold.planner.profiled.recompute import segment_starts, with_room
from stronghold.planner.profiled.stage_table import StageTable
from tests.planner.profiled.small_profiles import write_profile

NAMES = ["conv1", "bn1", "block-0-0-conv1", "block-0-0-bn1", "block-0-0-relu", "block-0-1-conv1", "block-0-1-bn1", "fc"]
ONE = Share(1, 1)


def taken(profile, stage, behind):
    return predict_stage(profile, stage, 2, behind=behind, receives_across=False, sends_across=False)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("behind", [0, 3])
def test_a_stage_fits_for_about_the_fewest_seconds(tmp_path, seed, behind):
    profile = read_profile(write_profile(tmp_path, "resnet_toy", NAMES, seed=seed), "resnet_toy")
    shares = (ONE,) * len(NAMES)
    every = [
        (taken(profile, stage, behind).device_bytes, taken(profile, stage, behind).recompute_s, stage)
        for again in product((False, True), repeat=len(NAMES))
        if not again[0]  # conv1 never is
        for stage in [OperatorStage(begin=0, devices=1, choices=shares, recomputed=again)]
    ]
    nothing = next(stage for _, _, stage in every if not any(stage.recomputed))
    least, most = min(size for size, _, _ in every), taken(profile, nothing, behind).device_bytes
    table = StageTable(profile, segment_starts(profile), Sharing(1, shares), 2, most)
    assert table.seconds(0, len(NAMES), behind, (False, False)) == pytest.approx(
        taken(profile, nothing, behind).micro_batch_s
    )
    for part in (0.0, 0.3, 0.6, 0.9, 1.0):
        memory_bytes = least + part * (most - least) + 1
        best = min(seconds for size, seconds, _ in every if size <= memory_bytes)
        stage = with_room(profile, segment_starts(profile), nothing, 2, behind, memory_bytes)
        table = StageTable(profile, segment_starts(profile), Sharing(1, shares), 2, memory_bytes)
        if stage is None:  # the least of all may need runs that end elsewhere
            assert part == 0
            continue
        found = taken(profile, stage, behind)
        assert found.device_bytes <= memory_bytes
        assert best <= found.recompute_s <= best + 0.5 * taken(profile, nothing, behind).forward_s
        tabled = table.seconds(0, len(NAMES), behind, (False, False))
        assert tabled == pytest.approx(found.micro_batch_s, rel=0.15)
        assert (tabled > taken(profile, nothing, behind).micro_batch_s * (1 + 1e-9)) == (best > 0)


def test_what_cannot_fit_is_none(tmp_path):
    profile = read_profile(write_profile(tmp_path, "resnet_toy", NAMES), "resnet_toy")
    stage = OperatorStage(begin=0, devices=1, choices=(ONE,) * 8, recomputed=(False,) * 8)
    assert with_room(profile, segment_starts(profile), stage, 2, 0, 1e6) is None
    table = StageTable(profile, segment_starts(profile), Sharing(1, (ONE,) * 8), 2, 1e6)
    assert table.seconds(0, 8, 0, (False, False)) == float("inf")
