"""A few elements tell of a write that nothing else tells of."""

import pytest
import torch

from stronghold.layout import lay_out
from stronghold.unit.samples import Samples

SHAPES = [(3,), (1,), (0,), (500, 7)]


def sampled(dtype):
    counts = [torch.Size(shape).numel() for shape in SHAPES]
    layout = lay_out([count * dtype.itemsize for count in counts])
    flat = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    weights = [
        flat[offset : offset + size].view(dtype) for offset, size in zip(layout.offsets, layout.sizes, strict=True)
    ]
    samples = Samples(flat, layout, [dtype.itemsize] * len(layout.sizes))
    return samples, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_names_the_parameters_that_changed(dtype):
    samples, weights = sampled(dtype)
    assert list(samples.written()) == [], "nothing was taken yet"
    samples.take()
    assert list(samples.written()) == []
    weights[3] += 1e-7
    assert list(samples.written()) == [3]
    weights[0] -= 1
    assert list(samples.written()) == [0, 3]
    samples.take()
    assert list(samples.written()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_and_the_last_element_and_all_of_a_small_one_are_among_them(dtype):
    samples, weights = sampled(dtype)
    for place, number in [(0, 0), (0, 1), (0, 2), (1, 0), (3, 0), (3, -1)]:
        samples.take()
        weights[place][number] = 1.0 if weights[place][number] == 0 else 0.0
        assert list(samples.written()) == [place]


def test_the_smallest_change_of_an_fp32_element_shows():
    samples, weights = sampled(torch.float32)
    weights[3].fill_(1.0)
    samples.take()
    weights[3].view(torch.int32).add_(1)
    assert list(samples.written()) == [3]


def test_many_parameters_have_fewer_each():
    layout = lay_out([400] * 5000)
    samples = Samples(torch.zeros(layout.total_bytes, dtype=torch.uint8), layout, [4] * len(layout.sizes))
    assert len(samples._places) == 2 * 5000
