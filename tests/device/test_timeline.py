"""What a timeline says of a step: against events whose times are known."""

import time

import pytest
import torch
from torch import nn

import stronghold
from stronghold.device import CpuDevice, Timeline
from stronghold.device.throttled import Speed, ThrottledDevice
from stronghold.errors import OffloadedModelError


def train(model, optimizer, width):
    model(torch.ones(2, width)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def traced(*, device="cpu", width=64, layers=4, window=2, **options):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model = stronghold.offload(model, window=window, device=device, **options)
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    train(model, optimizer, width)
    optimizer.wait()
    begin_s = time.perf_counter()
    with stronghold.trace(model) as timeline:
        train(model, optimizer, width)
    optimizer.wait()
    return timeline.spans(), time.perf_counter() - begin_s, model


def of(spans, lane):
    return [span.name for span in spans if span.lane == lane]


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_step_has_every_computation_fetch_gradient_and_update_once_in_its_order(tmp_path, store):
    spans, wall_s, model = traced(store=tmp_path if store == "disk" else "ram")
    forward = [f"forward {i}" for i in range(4)]
    assert of(spans, "compute") == [*forward, *(f"backward {i}" for i in (3, 2, 1, 0))]
    for lane, name in (("gradients", "gradients"), ("updates", "update")):
        assert of(spans, lane) == [f"{name} {i}" for i in (3, 2, 1, 0)]
    assert len(of(spans, "fetches")) == stronghold.report(model).step.fetches
    assert all(0 <= span.begin_s <= span.end_s <= wall_s for span in spans)
    reads, writes = of(spans, "disk reads"), of(spans, "disk writes")
    assert (sorted(writes), bool(reads)) == (
        ([f"write {i}" for i in range(4)], True) if store == "disk" else ([], False)
    )


def test_nothing_is_recorded_outside_of_the_block():
    spans, _, model = traced()
    assert len(of(spans, "compute")) == 8
    assert model(torch.ones(2, 64)).shape == (2, 64)
    assert len(of(spans, "compute")) == 8


def test_a_stream_s_work_lasts_as_long_as_it_takes():
    device = CpuDevice()
    timeline = Timeline(device)
    device.timeline = timeline
    with device.noted(device.fetches, "short"):
        device.fetches.submit(lambda: time.sleep(0.02))
    with device.noted(device.fetches, "long"):
        device.fetches.submit(lambda: time.sleep(0.05))
    short, long = timeline.spans()
    assert (short.lane, short.name, long.name) == ("fetches", "short", "long")
    assert short.end_s - short.begin_s >= 0.02
    assert long.end_s - long.begin_s >= 0.05
    assert short.end_s <= long.begin_s


def test_a_stream_that_has_failed_still_ends_the_timeline():
    device = CpuDevice()
    device.timeline = Timeline(device)
    device.fetches.submit(lambda: 1 / 0)
    with device.noted(device.fetches, "never done"):
        device.fetches.submit(lambda: None)
    assert [span.name for span in device.timeline.spans()] == ["never done"]


def test_a_simulated_machine_s_timeline_is_on_its_own_clock():
    """64 x 64 parameters, 4 bytes each, at 16,384 bytes per second: a fetch takes one second."""
    speed = Speed(flops=2 * 64 * 64, up=64 * 64 * 4, down=64 * 64 * 4, host=1e9)
    spans, wall_s, _ = traced(device=ThrottledDevice(speed, tokens=1))
    assert wall_s < 5
    fetches = [span for span in spans if span.lane == "fetches"]
    assert fetches
    assert all(span.end_s - span.begin_s == pytest.approx(1) for span in fetches)
    forward = [span for span in spans if span.name.startswith("forward")]
    assert all(span.end_s - span.begin_s == pytest.approx(1) for span in forward)


def test_a_model_that_is_not_offloaded_is_refused():
    with pytest.raises(OffloadedModelError, match="offload"), stronghold.trace(nn.Linear(2, 2)):
        pass
