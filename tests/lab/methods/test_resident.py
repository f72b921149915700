"""Methods of PyTorch alone: each has the losses of the loop as a book has it, and refuses what it cannot keep."""

import dataclasses
import itertools
import sys

import pytest
import torch

from stronghold.errors import StrongholdError
from stronghold.lab.records.agreement import disagreements
from tests.crossed import crossed
from tests.lab.methods.ordinary import CONFIG, losses_of, plain_losses, prepare, settings_of


@pytest.fixture
def alone():
    """Leaves no process group behind: another method of the same process may want its own."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("method", "clip"), crossed(["megatron-lm", "fsdp-offload", "l2l", "stronghold"], [0.7, None], together=1)
)
def test_it_trains_as_pytorch_does(method, clip, alone):
    settings = settings_of(clip=clip)
    expected, plain = plain_losses(settings)
    prepared = prepare(method, settings)
    found = losses_of(prepared)
    assert found[0] == expected[0]  # the same model, to the bit
    assert found == pytest.approx(expected, rel=1e-6)
    if method == "fsdp-offload":
        return
    for mine, theirs in zip(prepared.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().clone(), theirs.detach(), rtol=1e-3, atol=1e-4)


def test_activations_that_are_kept_change_nothing():
    losses = [losses_of(prepare("megatron-lm", settings_of(activations=a))) for a in ("recompute", "keep")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("method", ["megatron-lm", "fsdp-offload", "l2l"])
def test_bf16_has_the_losses_of_stronghold_to_its_rounding(method, alone):
    settings = settings_of(dtype="bf16")
    expected = losses_of(prepare("stronghold", settings))
    assert losses_of(prepare(method, settings)) == pytest.approx(expected, rel=2e-3)


def test_bf16_weights_are_their_masters_rounded():
    prepared = prepare("megatron-lm", settings_of(dtype="bf16"))
    losses_of(prepared)
    for weight, master in prepared.masters:
        assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(weight, master.bfloat16())


def test_the_resident_model_holds_sixteen_bytes_a_parameter():
    prepared = prepare("megatron-lm", settings_of())
    losses_of(prepared)
    held = prepared.report().device_bytes
    assert held == pytest.approx(16 * CONFIG.parameters, rel=1e-3)
    assert prepared.report().parameters == CONFIG.parameters


@pytest.mark.parametrize("method", ["megatron-lm", "l2l", "fsdp-offload", "torchao-offload", "zero-infinity-nvme"])
@pytest.mark.parametrize(
    "change",
    [
        {"resident": 1},
        {"device_memory": "1GiB"},
        {"save": "model"},
        {"checkpoint_every": 5},
        {"resume": True},
        {"compile": True},
    ],
)
def test_what_only_stronghold_has_is_refused(method, change):
    (name,) = change
    with pytest.raises(ValueError, match=rf"{method} cannot keep {name} \(got .*train with stronghold"):
        prepare(method, settings_of(**change))


@pytest.mark.parametrize("method", ["megatron-lm", "l2l", "fsdp-offload", "torchao-offload", "zero-infinity"])
def test_a_store_on_disk_is_refused_by_those_that_have_none(method):
    with pytest.raises(ValueError, match=rf"{method} cannot keep store \(got '/mnt/nvme', it has only 'ram'\)"):
        prepare(method, settings_of(store="/mnt/nvme"))


@pytest.mark.parametrize(
    ("method", "activations"),
    [("megatron-lm", "host"), ("fsdp-offload", "host"), ("l2l", "keep"), ("zero-infinity", "host")],
)
def test_activations_where_the_method_has_none_are_refused(method, activations):
    with pytest.raises(ValueError, match=rf"{method} must have its activations by .* \(got '{activations}'\)"):
        prepare(method, settings_of(activations=activations))


def test_eight_bit_states_are_refused():
    settings = settings_of()
    settings = dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, states="8bit"))
    with pytest.raises(ValueError, match="megatron-lm cannot keep states"):
        prepare("megatron-lm", settings)


def test_torchao_is_refused_where_there_is_no_gpu():
    with pytest.raises(ValueError, match=r"torchao-offload runs on CUDA alone \(got device='cpu'\)"):
        prepare("torchao-offload", settings_of())


def test_torchao_is_refused_in_bf16_and_where_it_is_not_installed(monkeypatch):
    with pytest.raises(ValueError, match="no fp32 masters"):
        prepare("torchao-offload", settings_of(device="cuda", dtype="bf16"))
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(StrongholdError, match="torchao-offload needs torchao"):
        prepare("torchao-offload", settings_of(device="cuda"))


def test_zero_is_refused_where_deepspeed_is_not_installed(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR", "DEEPSPEED_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what begin() sets is gone afterwards
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(StrongholdError, match=r"zero-offload needs DeepSpeed .*the extra 'baselines'"):
        prepare("zero-offload", settings_of())


def recorded(method, losses):
    settings = {"method": method, "dtype": "fp32", "lr": 1e-2}
    return {"settings": settings, "losses": losses, "summary": {}}


def stuck_losses(settings):
    """Returns the losses of the reference when one layer's weights never change."""
    prepared = prepare("megatron-lm", settings)
    for parameter in prepared.model.layers[2].parameters():
        parameter.register_hook(torch.zeros_like)
    return losses_of(prepared)


def late_losses(settings):
    """Returns the losses of the reference when each update is made with the gradients of the step before."""
    prepared = prepare("megatron-lm", settings)
    before = {}
    for parameter in prepared.model.parameters():

        def late(gradient, parameter=parameter):
            last, before[parameter] = before.get(parameter, torch.zeros_like(gradient)), gradient.clone()
            return last

        parameter.register_hook(late)
    return losses_of(prepared)


def test_a_verdict_heeds_what_separates_two_roundings_of_the_reference_and_sees_what_is_wrong(monkeypatch):
    """As where PyTorch's own norm of large gradients is off on the CPU: here by more, so that small ones show it."""
    settings = settings_of()
    clip, calls = torch.nn.utils.clip_grad_norm_, itertools.count()

    def inexact(parameters, max_norm, **more):
        return clip(parameters, max_norm * (1 + 0.1 * (next(calls) % 2)), **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", inexact)
        reference = recorded("megatron-lm", losses_of(prepare("megatron-lm", settings)))
        wrong = {
            "a layer without updates": stuck_losses(settings),
            "late gradients": late_losses(settings),
        }
    again = recorded("megatron-lm-exact", losses_of(prepare("megatron-lm-exact", settings)))
    right = recorded("stronghold", losses_of(prepare("stronghold", settings)))
    wrong["no clipping"] = losses_of(prepare("stronghold", settings_of(clip=None)))
    assert disagreements([reference, right])[1] is not None, "or this test shows nothing"
    assert disagreements([reference, again, right])[1:] == [None, None]
    for name, losses in wrong.items():
        found = disagreements([reference, again, recorded("stronghold", losses)])[2]
        assert found is not None, name


def test_exact_norms_and_operations_one_by_one_are_the_same_but_for_rounding():
    for settings in (settings_of(), settings_of(clip=None), settings_of(clip=1e9)):
        expected, _ = plain_losses(settings)
        assert losses_of(prepare("megatron-lm-exact", settings)) == pytest.approx(expected, rel=1e-6)
    rounded = losses_of(prepare("megatron-lm-exact", settings_of(dtype="bf16")))
    assert rounded == pytest.approx(losses_of(prepare("megatron-lm", settings_of(dtype="bf16"))), rel=2e-3)


def test_an_exact_norm_that_is_none_is_refused():
    prepared = prepare("megatron-lm-exact", settings_of())
    prepared.backward(prepared.loss(torch.zeros(4, 16, dtype=torch.int64)))
    prepared.model.embedding.weight.grad[0, 0] = torch.inf
    before = prepared.model.embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match="norm must be finite"):
        prepared.step()
    assert torch.equal(prepared.model.embedding.weight, before)
