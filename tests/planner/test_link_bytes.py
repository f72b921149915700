"""Bytes on links and hosts, against cases counted by hand and against what torch's schedules send."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stronghold.planner.link_bytes import all_gather_bytes, boundary_bytes, fetches, host_bytes, reduce_scatter_bytes
from stronghold.planner.pipeline_order import Pipeline
from stronghold.schedule import trace
from tests.planner.torch_schedules import sends


def interleaved(devices, micro_batches, stages_per_device):
    return Pipeline(
        schedule="Interleaved1F1B",
        devices=devices,
        micro_batches=micro_batches,
        stages_per_device=stages_per_device,
    )


def test_each_micro_batch_crosses_a_boundary_and_its_gradient_comes_back():
    pipeline = Pipeline(schedule="1F1B", devices=3, micro_batches=8)
    # 2 samples of 1024 tokens of width 4096 in bf16: 16 MiB, eight times
    assert boundary_bytes(pipeline, 2 * 1024 * 4096 * 2) == dict.fromkeys([(0, 1), (1, 0), (1, 2), (2, 1)], 128 << 20)
    assert boundary_bytes(pipeline, [10, 1]) == {(0, 1): 80, (1, 0): 80, (1, 2): 8, (2, 1): 8}


def test_boundaries_between_the_same_devices_add_up():
    # stages 0 to 8 on devices 0 1 2 0 1 2 0 1 2: twice round from 2 to 0
    assert boundary_bytes(interleaved(3, 6, 3), 1) == {
        (0, 1): 18,
        (1, 0): 18,
        (1, 2): 18,
        (2, 1): 18,
        (2, 0): 12,
        (0, 2): 12,
    }
    # on two devices activations to stage 2 go where gradients from stage 1 go
    assert boundary_bytes(interleaved(2, 4, 2), [100, 10, 1]) == {(0, 1): 4 * 111, (1, 0): 4 * 111}


def test_one_device_needs_no_link():
    assert boundary_bytes(interleaved(1, 4, 3), 1) == {}
    assert boundary_bytes(Pipeline(schedule="GPipe", devices=1, micro_batches=4), []) == {}


def test_as_many_sizes_as_boundaries():
    with pytest.raises(ValueError, match=r"one for each boundary between stages \(2; got 3\)"):
        boundary_bytes(Pipeline(schedule="GPipe", devices=3, micro_batches=4), [1, 1, 1])


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_it_is_what_torchs_schedule_sends(devices, rounds, stages_per_device):
    pipeline = interleaved(devices, devices * rounds, stages_per_device)
    assert boundary_bytes(pipeline, 1) == sends("Interleaved1F1B", devices, devices * rounds, stages_per_device)


@pytest.mark.parametrize(
    ("elements", "element_bytes", "replicas", "moved"),
    [
        (1000, 4, 1, 0),
        (1000, 4, 2, 2000),  # half of 4000
        (1000, 2, 4, 1500),  # three quarters of 2000
        (10, 4, 4, 36),  # shares of ⌈10 / 4⌉ = 3 elements: three of 12 bytes
        (3, 2, 8, 14),  # seven shares of one element, five of them filling
        (50_358_272, 2, 8, 88_126_976),  # a layer of width 2048: 100,716,544 bytes less an eighth
    ],
)
def test_replicas_exchange_all_shares_but_their_own(elements, element_bytes, replicas, moved):
    assert reduce_scatter_bytes(elements, element_bytes, replicas) == moved
    assert all_gather_bytes(elements, element_bytes, replicas) == moved


@given(st.integers(1, 30), st.integers(1, 5))
def test_a_ring_moves_that_much(elements, replicas):
    """Plays both rings over real numbers, share by share, and counts what replica 0 sends."""
    share = -(-elements // replicas)
    values = [
        [(r + 1) * 100 + i for i in range(elements)] + [0] * (share * replicas - elements) for r in range(replicas)
    ]
    total = [sum(column) for column in zip(*values, strict=True)]
    held, sent = [list(row) for row in values], 0

    def cut(number):
        return slice(number % replicas * share, (number % replicas + 1) * share)

    for step in range(replicas - 1):  # reduce-scatter: a partial sum goes on and what is there is added
        passing = [held[r][cut(r - step)] for r in range(replicas)]
        sent += len(passing[0])
        for r in range(replicas):
            there = cut(r - 1 - step)
            held[r][there] = [a + b for a, b in zip(held[r][there], passing[r - 1], strict=True)]
    assert all(held[r][cut(r + 1)] == total[cut(r + 1)] for r in range(replicas))
    assert sent * 4 == reduce_scatter_bytes(elements, 4, replicas)
    for step in range(replicas - 1):  # all-gather: the share received last goes on
        passing = [held[r][cut(r + 1 - step)] for r in range(replicas)]
        sent += len(passing[0])
        for r in range(replicas):
            held[r][cut(r - step)] = passing[r - 1]
    assert held == [total] * replicas
    assert sent * 4 == reduce_scatter_bytes(elements, 4, replicas) + all_gather_bytes(elements, 4, replicas)


@given(st.integers(1, 12), st.integers(1, 4), st.data())
def test_fetches_are_the_windows_own_where_passes_alternate(layers, micro_batches, data):
    window = data.draw(st.integers(1, layers))
    once = [*["forward", "backward"] * micro_batches, "step"]
    counts = [sum(word[0] == "F" for word in trace(layers, window, once * n).split()) for n in (5, 6)]
    assert fetches(layers, window, micro_batches) == counts[1] - counts[0]


def test_fetches_of_a_stage_within_its_window():
    assert (fetches(4, 4, 8), fetches(4, 9, 8), fetches(4, 1, 8)) == (4, 4, 4 + 15 * 3)


@pytest.mark.parametrize(
    ("parameters", "replicas", "devices_per_node", "bytes_a_parameter", "nodes"),
    [
        ([1000], 1, 1, 12, [12_000]),
        ([1000], 4, 4, 12, [12_000]),  # four replicas on one node: one set
        ([1000], 4, 2, 12, [6000, 6000]),  # two on each of two nodes: half a set each
        ([1000, 600], 2, 4, 12, [19_200]),  # both stages on one node
        ([1000, 600], 2, 2, 14, [14_000, 8400]),  # a node for each stage
        ([1000, 600, 400], 1, 2, 12, [19_200, 4800]),  # the last node has a device less
        ([10], 4, 4, 12, [144]),  # shares of three elements
        ([5], 1, 1, 6.03, [31]),  # 30.15 bytes
    ],
)
def test_replicas_share_one_set_of_states(parameters, replicas, devices_per_node, bytes_a_parameter, nodes):
    assert host_bytes(parameters, replicas, devices_per_node, bytes_a_parameter) == nodes
