"""A processor without products in bf16 is told of, once, where layers compute in bf16 on it, and nowhere else."""

import warnings

import pytest
import torch
from torch import nn

import stronghold
from stronghold.device import CpuDevice, slow_products
from stronghold.device.slow_products import SLOW, tell_of_slow_products, times_as_long
from stronghold.device.throttled import Speed, ThrottledDevice

CPU, APART = CpuDevice(), ThrottledDevice(Speed(flops=1e12, up=1e10, down=1e10, host=1e10), tokens=8)


@pytest.fixture(autouse=True)
def _unsaid():
    slow_products._tell.cache_clear()
    times_as_long.cache_clear()
    yield
    times_as_long.cache_clear()


def test_it_is_the_time_of_products_that_is_told(monkeypatch):
    took_s, now_s = {torch.bfloat16: 0.06, torch.float32: 0.01}, [0.0]

    def product(gradient, weight):
        assert gradient.dtype is weight.dtype and gradient.device == weight.device == CPU.torch_device
        now_s[0] += took_s[gradient.dtype]

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr("stronghold.device.slow_products.time.perf_counter", lambda: now_s[0])
    assert times_as_long() == pytest.approx(6)
    with torch.device("meta"), pytest.warns(RuntimeWarning, match=r"took 6 times as long.*dtype=torch\.float32"):
        times_as_long.cache_clear()
        tell_of_slow_products([torch.uint8, torch.bfloat16], CPU)


@pytest.mark.parametrize(
    ("times", "dtypes", "device"),
    [
        (SLOW, [torch.bfloat16], CPU),
        (50.0, [torch.float32, torch.uint8], CPU),
        (50.0, [torch.bfloat16], APART),
    ],
)
def test_nothing_is_told_of_other_types_devices_and_processors(monkeypatch, times, dtypes, device):
    monkeypatch.setattr(slow_products, "times_as_long", lambda: times)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_of_slow_products(dtypes, device)


def test_the_user_is_told_where_the_model_is_offloaded_and_once(monkeypatch):
    monkeypatch.setattr(slow_products, "times_as_long", lambda: 50.0)

    def offload(dtype):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        return stronghold.offload(model.to(dtype), device="cpu", window=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offload(torch.float32)
    with pytest.warns(RuntimeWarning, match="this processor has no products in bf16.*50 times") as told:
        offload(torch.bfloat16)
        offload(torch.bfloat16)
    assert len(told) == 1 and told[0].filename == __file__
