"""Plans of adapters on the experts of a mixture, which PEFT puts into place while a layer computes."""

from __future__ import annotations

import peft
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import stronghold
from tests.adapters import with_adapters
from tests.experts import FAMILIES, batches, trained
from tests.planner.machines import laptop

LORA = peft.LoraConfig(
    r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
)


@pytest.mark.filterwarnings("ignore")
def test_bytes_are_the_reports_and_the_model_is_left_as_it_was():
    model = with_adapters(FAMILIES["qwen3"](), LORA)
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    ids = torch.empty((2, 16), dtype=torch.int64, device="meta")
    plan = stronghold.plan(model, machine=laptop(), inputs={"input_ids": ids, "labels": ids}, window=2, resident=1)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, _ in tensors] == names
    assert not any(isinstance(tensor, FakeTensor) for _, tensor in tensors)

    stronghold.offload(model, device="cpu", **plan.settings)
    optimizer = stronghold.AdamW(trained(model), **plan.optimizer)
    for ids in batches(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = stronghold.report(model)
    assert plan.parameters == report.parameters
    assert (plan.slots_bytes, plan.resident_bytes) == (report.slots_device_bytes, report.resident_device_bytes)
    assert plan.gradient_bytes == report.gradients_device_bytes
    assert plan.pinned_bytes + plan.pageable_bytes == report.host_bytes
