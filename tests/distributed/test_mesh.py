"""Every process has its place: a machine, a replica on it and a stage."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from stronghold.distributed.mesh import MACHINE, REPLICA, STAGE, ranks_by_place, sets_along


@pytest.mark.parametrize("machines,replicas,stages", list(product((1, 2, 3), repeat=3)))
def test_ranks_that_torchrun_gives_lie_in_order(machines, replicas, stages):
    here = replicas * stages
    ranks = ranks_by_place([rank // here for rank in range(machines * here)], stages)
    assert torch.equal(ranks, torch.arange(machines * here).view(machines, replicas, stages))


def test_a_replica_may_span_machines():
    assert ranks_by_place("AABBCCDD", 4).tolist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]  # two machines for each
    assert ranks_by_place("ABAB", 2).tolist() == [[[0, 1], [2, 3]]]  # the same two for both: memory in common


def test_replicas_of_a_machine_need_not_follow_one_another():
    assert ranks_by_place("ABAB", 1).tolist() == [[[0], [2]], [[1], [3]]]
    assert ranks_by_place("AABBAABB", 2).tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize(
    "machines,each,found",
    [
        ("AAAB", 1, "3 on A, 1 on B for process 0 of each"),
        ("AAABBB", 2, "2 on A, 1 on B for process 0 of each"),
        ("ABAC", 2, "1 on B, 1 on C for process 1 of each"),  # in place 0 they have memory in common, here not
    ],
)
def test_what_is_no_grid_is_refused(machines, each, found):
    with pytest.raises(ValueError, match=rf"as many of them \(got {found}\); start torchrun with the same"):
        ranks_by_place(machines, each)


def test_sets_differ_along_their_dimensions_alone():
    ranks = torch.arange(12).view(2, 3, 2)
    assert sets_along(ranks, STAGE) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert sets_along(ranks, REPLICA) == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert sets_along(ranks, MACHINE) == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert sets_along(ranks, MACHINE, REPLICA) == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
