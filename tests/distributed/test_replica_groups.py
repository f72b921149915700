"""Replicas train as one process with all the data does, to the bit, in memory that they have in common."""

from __future__ import annotations

import re

import pytest

from stronghold.planner.link_bytes import all_reduce_bytes, reduce_scatter_bytes, share
from tests.distributed.launched import launch
from tests.distributed.replicated import BEHIND_ITS_BACK


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "store").mkdir()
    return launch("tests.distributed.replicated", "all_of", 2, folder, str(folder / "store"))


def test_replicas_train_to_the_bit_as_one_process_does_with_the_mean_of_their_gradients(replicas):
    assert [found["unequal"] for found in replicas] == [[], []]


@pytest.mark.long
def test_replicas_train_to_the_bit_in_the_other_ways_too(tmp_path):
    (tmp_path / "store").mkdir()
    found = launch("tests.distributed.replicated", "other_bits", 2, tmp_path, str(tmp_path / "store"))
    assert found == [[], []]


def test_weights_gradients_and_states_are_there_once(replicas):
    whole, _ = replicas[0]["bytes"]
    staging = sum(found["bytes"][1] for found in replicas) - whole
    assert 0 < staging < 0.1 * whole


@pytest.mark.parametrize("what", ["write", "load", "clip", "reduce", "keep"])
def test_what_each_replica_would_write_is_refused(replicas, what):
    for found in replicas:
        assert "2 replicas have the weights and gradients of" in found["refused"][what]
        assert found["refused"]["trained"] == "True"


@pytest.mark.parametrize("way", [*BEHIND_ITS_BACK, "resident"])
def test_what_a_replica_writes_of_what_all_have_is_refused_by_whatever_way(replicas, way):
    what = "gradient" if "gradient" in way else "weight"
    for found in replicas:
        assert re.match(
            rf"OffloadedModelError: replicas have the weights and gradients of 3 in common.* \(got a {what} of shape",
            found["refused"][way],
        ), found["refused"][way]


def test_replicas_that_go_another_way_through_the_model_are_told(replicas):
    for found in replicas:
        assert found["refused"]["other way"].startswith("ParallelError: replicas must compute the same layers")
        assert re.search(
            r"got the gradient of layers\.\d, parameter 0 of shape .* in replica [01], and not in replica [01]",
            found["refused"]["other way"],
        )


def test_a_gradient_that_is_not_finite_in_one_replica_keeps_all_from_updating(replicas):
    for found in replicas:
        assert found["refused"]["not finite"].startswith("NonFiniteGradientError")


def test_replicas_have_their_values_out_of_files(replicas):
    assert [found["from files"] for found in replicas] == [True, True]


def test_one_replica_saves_the_model_and_the_others_wait_where_they_call_it_too(replicas):
    """All wrote into one hidden folder, which each of them began by removing."""
    assert [found["saved"] for found in replicas] == [[], []]


def test_the_gradients_that_cross_to_other_replicas_are_those_of_the_formula(replicas):
    for found in replicas:
        sent, crossed, sizes = found["reduced"]
        assert sent == sum(reduce_scatter_bytes(size, 2, 2) for size in sizes)
        assert crossed == 0


def test_replicas_may_wait_for_one_another_when_another_stage_has_ended(tmp_path):
    losses = launch("tests.distributed.replicated", "ends_later", 4, tmp_path)
    assert len(set(losses)) == 1


@pytest.fixture(scope="module", params=[2, 4])
def apart(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart")
    return launch("tests.distributed.replicated", "apart", request.param, folder, str(folder / "store"))


def test_replicas_on_two_machines_train_to_the_bit_as_one_process_does(apart):
    assert [found["unequal"] for found in apart] == [[]] * len(apart)


def test_replicas_on_two_machines_begin_with_the_values_of_the_first(apart):
    assert all(found["random"] for found in apart)


def test_what_would_differ_between_machines_is_refused(apart):
    for found in apart:
        assert f"{len(apart)} replicas have the weights and gradients of" in found["written"]


def test_machines_have_as_many_replicas_each(apart):
    for found in apart:
        if len(apart) == 4:
            assert "(got 1 on machine-0, 3 on machine-1 for process 0 of each)" in found["uneven"]
        else:
            assert found["uneven"] == "nothing"


def test_each_machine_has_the_weights_gradients_and_states_once(apart):
    here = len(apart) // 2
    for first in (0, here):
        whole, _ = apart[first]["bytes"]
        held = sum(found["bytes"][1] for found in apart[first : first + here])
        assert whole <= held < 1.1 * whole


def test_of_gradients_only_shares_cross_to_other_machines(apart):
    here = len(apart) // 2
    for found in apart:
        sent, crossed, sizes = found["crossed"]
        assert sent == sum(reduce_scatter_bytes(size, 2, here) for size in sizes)
        assert crossed == sum(all_reduce_bytes(share(size, here), 2, 2) for size in sizes)


def test_a_step_of_replicas_fetches_no_more_than_it_must(replicas):
    layers, window = 8, 1
    assert [found["fetches"] for found in replicas] == [2 * layers - window] * 2


def test_machines_that_see_one_folder_have_stores_of_their_own_there(tmp_path):
    found = launch("tests.distributed.replicated", "one_folder", 4, tmp_path, str(tmp_path / "store"))
    assert all(one == found[0] for one in found)
    assert found[0] == [{"process-0", "process-2"}, True]
