"""Where the CPU is the device, layers and root are computed with where they lie, unless a window is asked for."""

import time

import pytest
import torch

import stronghold
from stronghold import native
from stronghold.engine import engine_of
from tests.delayed import Apart
from tests.small import ADAMW, Residual, assert_same_models, numbers, ordinary_loop, pair


@pytest.mark.parametrize(
    ("settings", "resident", "window"),
    [
        ({}, 4, 0),
        ({"resident": "auto"}, 4, 0),
        ({"resident": "auto", "window": 2}, 4, 0),
        ({"window": 3}, 0, 3),
        ({"resident": 1}, 1, 2),
        ({"device_memory": "1GiB"}, 0, 4),
        ({"host_memory": "1GiB"}, 0, 2),
        pytest.param({"device": Apart()}, 0, 2, id="apart"),
    ],
)
def test_no_layer_has_a_slot_unless_a_window_or_a_budget_asks_for_one(settings, resident, window):
    model = stronghold.offload(Residual(), **{"device": "cpu", **settings})
    report = stronghold.report(model)
    assert (report.resident, report.window) == (resident, window)


def test_on_disk_layers_have_slots(tmp_path):
    report = stronghold.report(stronghold.offload(Residual(), device="cpu", store=tmp_path / "store"))
    assert (report.resident, report.window) == (0, 2)


@pytest.mark.parametrize("settings", [{}, {"window": 2}], ids=str)
def test_a_root_parameter_is_the_hosts_own_memory(settings):
    model = stronghold.offload(Residual(), device="cpu", **settings)
    stronghold.AdamW(model.parameters(), **ADAMW)
    root = [unit for unit in engine_of(model).units if unit.is_root]
    assert {unit.name for unit in root} == {"into.weight", "into.bias", "out.weight", "out.bias"}
    for unit in root:
        assert unit.parameters[0].data_ptr() == unit.weight[0].data_ptr()
        assert unit.gradients.buffer is None
    weights = sum(p.numel() * 4 for unit in root for p in unit.parameters)
    apart = stronghold.report(stronghold.offload(Residual(), device=Apart(), **settings))
    assert apart.root_device_bytes - stronghold.report(model).root_device_bytes >= weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_it_changes_no_bit(update, dtype):
    trained = []
    for settings in (
        {"device": Apart(), "window": 1},
        {"device": "cpu", "window": 1},
        {"device": "cpu", "window": "auto"},
    ):
        _, model = pair(Residual, dtype=dtype, **settings)
        optimizer = stronghold.AdamW(model.parameters(), update=update, **ADAMW)
        losses = ordinary_loop(model, optimizer, [batch.to(dtype) for batch in numbers(4)])
        trained.append((model, losses))
    (first, losses), *others = trained
    for model, found in others:
        assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))
        assert_same_models(model, first)


def test_a_gradient_that_is_kept_may_be_written_once_the_step_has_returned(monkeypatch):
    adamw = native.adamw

    def slowly(*args, **kwargs):
        time.sleep(0.01)
        adamw(*args, **kwargs)

    monkeypatch.setattr(native, "adamw", slowly)
    model, twin = (pair(Residual)[1].eval() for _ in range(2))
    optimizer, other = (stronghold.AdamW(one.parameters(), **ADAMW) for one in (model, twin))
    for batch in numbers(3):
        for one, updater in ((model, optimizer), (twin, other)):
            one(batch).backward()
            updater.step()
        for parameter in model.parameters():
            parameter.grad.fill_(float("nan"))  # of a root parameter that is updated behind the step's return, too
        optimizer.zero_grad()
        other.zero_grad()
    assert_same_models(model, twin)
