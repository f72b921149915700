"""The registry of methods, and this project's own: it trains as PyTorch does."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from stronghold.lab.methods import METHODS, decay_groups, find_method
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.settings import OptimizerSettings, TrainSettings
from stronghold.settings import OffloadSettings

CONFIG = GPTConfig(layers=4, hidden=32, heads=2, sequence=16, vocabulary=300)
SETTINGS = TrainSettings(
    out="unused",
    sequence=16,
    offload=OffloadSettings(window=2),
    optimizer=OptimizerSettings(lr=1e-2, weight_decay=0.5, max_grad_norm=0.7),
)


def build():
    torch.manual_seed(0)
    return GPT(CONFIG)


def losses(model, optimizer, steps, clip=None):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, 300, (2, 16), generator=generator)
        loss = model(ids, labels=ids).loss
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_every_registered_method_has_its_name_and_the_file_that_run_sh_looks_for():
    folder = Path(__file__).parents[3] / "stronghold" / "lab" / "methods"
    files = {file.stem.replace("_", "-") for file in folder.glob("[a-z]*.py")}
    assert files == set(METHODS)
    assert [find_method(name).name for name in METHODS] == list(METHODS)


def test_an_unknown_method_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"one of stronghold.* \(got 'zero'\)"):
        find_method("zero")


def test_matrices_decay_and_the_rest_does_not():
    model = build()
    model.layers[0].qkv.weight.requires_grad_(False)
    decaying, other = decay_groups(model, 0.5)
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.5, 0.0)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = [name for name, p in model.named_parameters() if p.ndim == 2 and p.requires_grad]
    assert [named[id(parameter)] for parameter in decaying["params"]] == expected
    assert "layers.0.qkv.weight" not in expected
    assert all(named[id(p)].endswith(("bias", "norm.weight")) for p in other["params"])
    assert len(decaying["params"]) + len(other["params"]) == len(named) - 1
    assert [len(group["params"]) for group in decay_groups(nn.Linear(2, 2, bias=False), 0.5)] == [1]


def test_it_trains_as_pytorch_does():
    plain = build()
    optimizer = torch.optim.AdamW(decay_groups(plain, 0.5), lr=1e-2, betas=(0.9, 0.95))
    expected = losses(plain, optimizer, 8, clip=0.7)
    prepared = find_method("stronghold").prepare(build(), SETTINGS)
    found = losses(prepared.model, prepared.optimizer, 8)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]
    for mine, theirs in zip(prepared.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().clone(), theirs.detach(), rtol=1e-3, atol=1e-4)


def test_the_report_tells_of_the_model_and_the_step():
    prepared = find_method("stronghold").prepare(build(), SETTINGS)
    report = prepared.report()
    assert (report.parameters, report.layers, report.window) == (CONFIG.parameters, 4, 2)
    assert report.step is None
    losses(prepared.model, prepared.optimizer, 2)
    step = prepared.report().step
    assert step is not None
    assert step.total_s > 0
    assert step.fetches == 2 * 4 - 2


@pytest.mark.parametrize(
    ("change", "dtype"),
    [({"dtype": "bf16"}, "bfloat16"), ({"dtype": "fp32"}, "float32")],
)
def test_the_compute_type_is_the_settings(change, dtype):
    prepared = find_method("stronghold").prepare(build(), dataclasses.replace(SETTINGS, **change))
    assert prepared.report().dtype == dtype


def test_in_backward_reaches_the_same_losses():
    unclipped = dataclasses.replace(SETTINGS.optimizer, max_grad_norm=None)
    found = {}
    for update in ("deferred", "in_backward"):
        wanted = dataclasses.replace(unclipped, update=update)
        prepared = find_method("stronghold").prepare(build(), dataclasses.replace(SETTINGS, optimizer=wanted))
        found[update] = losses(prepared.model, prepared.optimizer, 4)
    assert found["deferred"] == found["in_backward"]
