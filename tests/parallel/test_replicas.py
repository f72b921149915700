"""Replicas train as one process with all the data does, to the bit, in memory that they have in common."""

from __future__ import annotations

import pytest

from tests.parallel.launched import launch


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "store").mkdir()
    return launch("tests.parallel.replicated", "all_of", 2, folder, str(folder / "store"))


def test_replicas_train_to_the_bit_as_one_process_does_with_the_mean_of_their_gradients(replicas):
    assert [found["unequal"] for found in replicas] == [[], []]


def test_weights_gradients_and_states_are_there_once(replicas):
    whole, _ = replicas[0]["bytes"]
    staging = sum(found["bytes"][1] for found in replicas) - whole
    assert 0 < staging < 0.1 * whole


@pytest.mark.parametrize("what", ["write", "load", "clip", "keep"])
def test_what_each_replica_would_write_is_refused(replicas, what):
    for found in replicas:
        assert "2 replicas have the weights and gradients of" in found["refused"][what]
        assert found["refused"]["trained"] == "True"


def test_replicas_that_go_another_way_through_the_model_are_told(replicas):
    for found in replicas:
        assert found["refused"]["other way"].startswith("ParallelError: replicas must compute the same layers")


def test_a_gradient_that_is_not_finite_in_one_replica_keeps_all_from_updating(replicas):
    for found in replicas:
        assert found["refused"]["not finite"].startswith("NonFiniteGradientError")


def test_replicas_have_their_values_out_of_files(replicas):
    assert [found["from files"] for found in replicas] == [True, True]


def test_the_gradients_that_cross_to_other_replicas_are_those_of_the_formula(replicas):
    for found in replicas:
        sent, formula = found["reduced"]
        assert sent == formula > 0


def test_a_step_of_replicas_fetches_no_more_than_it_must(replicas):
    layers, window = 8, 1
    assert [found["fetches"] for found in replicas] == [2 * layers - window] * 2
