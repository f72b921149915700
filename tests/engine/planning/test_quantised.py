"""Plans of models with quantised weights: bytes are the report's, and a product's work is what the library's takes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import stronghold
from stronghold.checkpoint.quantising import quantise
from stronghold.engine.planning.computation import ModelComputation
from stronghold.engine.planning.quantised_layers import quantised_layers, with_rates
from stronghold.engine.planning.recording import Recording
from stronghold.probing.this_machine import processor_name
from stronghold.unit.packed import check_packed, settle
from tests.adapters import base, batches, trained, with_adapters
from tests.engine.test_packed import LORA, packed
from tests.engine.test_tensor_subclasses import quantised
from tests.planner.machines import laptop, machine

KINDS = {
    "nf4": lambda: packed(),
    "nested": lambda: packed(nested=True),
    "int8": lambda: packed(kind="int8"),
    "torchao": lambda: quantised(),
}


def planned(model, given=None, **settings):
    ids = torch.empty((2, 8), dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    return stronghold.plan(model, machine=given or laptop(), inputs=inputs, **settings)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind == "nested" else kind for kind in KINDS]
)
def test_bytes_are_the_reports_to_the_byte(kind):
    model = with_adapters(KINDS[kind](), LORA)
    plan = planned(model, window=2, resident=1)
    stronghold.offload(model, device="cpu", **plan.settings)
    optimizer = stronghold.AdamW(trained(model), **plan.optimizer)
    ids = batches(1)[0]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = stronghold.report(model)
    assert plan.parameters == report.parameters
    assert plan.slots_bytes == report.slots_device_bytes
    assert plan.gradient_bytes == report.gradients_device_bytes
    assert plan.root_bytes == report.root_device_bytes
    assert plan.resident_bytes == report.resident_device_bytes
    assert plan.pinned_bytes + plan.pageable_bytes == report.host_bytes
    stronghold.close(model)


@pytest.mark.parametrize("kind", ["nf4", "torchao"])
def test_a_product_keeps_what_the_librarys_keeps(kind):
    """By the bytes that are alive behind the forward pass, of the real one on real tensors."""
    model = KINDS[kind]()
    check_packed(model, torch.device("cpu"), None)
    settle(model, torch.device("cpu"))
    (one, *_) = quantised_layers(model)

    def left(compute, x):
        with Recording() as recording:
            recording.begin(Counter())
            output = compute(x)
            return recording.live_bytes - recording.size_of(output), recording.peak_bytes

    rows = torch.randn(6, one.module.in_features, dtype=torch.bfloat16)
    theirs, peak = left(one.module, rows.requires_grad_())
    with FakeTensorMode():
        fake = torch.empty(rows.shape, dtype=rows.dtype).requires_grad_()
        assert left(one.forward, fake)[0] == theirs
        assert left(one.forward, fake)[1] >= peak


@pytest.mark.parametrize("kind", ["nf4", "torchao"])
def test_a_layer_computes_what_the_plain_one_does_and_dequantises_in_each_pass(kind):
    ids = torch.empty((2, 8), dtype=torch.int64)

    def run(model):
        model.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(True)
        return ModelComputation(model, [*model.model.layers], {"input_ids": ids, "labels": ids}).layer(0)

    plain, found = run(base()), run(KINDS[kind]())
    for one, other in ((plain.forward, found.forward), (plain.backward, found.backward)):
        assert flops(one) == flops(other) > 0
    dequantised = [count(each) for each in (found.forward, found.backward)]
    assert dequantised == [7, 0 if kind == "torchao" else 7]
    weight = KINDS[kind]().model.layers[0].mlp.up_proj
    moved = max(op.moved_bytes for op in found.forward if "dequantise" not in op.kind and " as " not in op.kind)
    assert moved >= 2 * weight.in_features * weight.out_features


def flops(ops):
    return sum(op.flops * count for op, count in ops.items())


def count(ops):
    return sum(number for op, number in ops.items() if " in " in op.kind or " as " in op.kind)


def test_how_fast_this_machine_dequantises_is_measured_and_said_of_another():
    model = packed()
    here, elsewhere = laptop(device_name=processor_name()), machine()
    found, assumed = with_rates(here, quantised_layers(model), torch.bfloat16)
    assert found.transcendental["bfloat16 in four bits"].likely > 0
    assert assumed == ["a product with weights in four bits takes that in bfloat16, behind its dequantised weight's"]
    plan = planned(with_adapters(packed(), LORA), elsewhere)
    assert any("dequantised as fast as functions such as GELU" in text for text in plan.assumed)
    plain = planned(with_adapters(base(), LORA), elsewhere, activations=plan.settings["activations"])
    assert plan.busy_s["compute"] > plain.busy_s["compute"]


def test_layers_that_save_what_they_dequantise_are_recomputed():
    assert planned(with_adapters(quantised(), LORA)).settings["activations"] == "recompute"


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_layers_of_packed_weights_alone_are_planned_in_what_computes_beside_them(kind):
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3)]
        model = nn.Sequential(nn.Linear(8, 64), nn.Sequential(*layers)).to(torch.bfloat16)
    quantise(model, kind, layers="1")
    inputs = torch.empty((2, 8), dtype=torch.bfloat16, device="meta")
    found = stronghold.plan(model, machine=machine(), inputs=(inputs,), loss=torch.sum, layers="1", window=2)
    assert found.dtype == "bfloat16"


def test_what_computes_with_values_is_refused_by_name():
    import bitsandbytes

    model = packed()
    embedding = bitsandbytes.nn.Embedding4bit(64, 32)
    embedding.load_state_dict({"weight": torch.randn(64, 32)})
    model.model.embed_tokens = embedding.to("cpu")
    with pytest.raises(ValueError, match=r"got model.embed_tokens.weight, of weights in four bits, of a Embedding4bit"):
        planned(model)


def test_a_real_models_layers_are_as_they_were():
    model = with_adapters(packed(), LORA)
    before = {name: dict(module.__dict__) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    planned(model)
    for name, module in model.named_modules():
        if name in before:
            assert module.__dict__.keys() == before[name].keys(), name
    output: Tensor = model(input_ids=batches(1)[0]).logits
    assert torch.isfinite(output).all()
