"""Layers on disk: the same bits as in memory, for every window, format, update and split of what is where."""

from __future__ import annotations

import gc
import itertools
import shutil
from functools import cache, partial

import pytest
import torch
from torch import nn

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import NonFiniteGradientError, StoreError
from stronghold.store import ring
from tests.crossed import crossed
from tests.delayed import Apart
from tests.reference import CASES, differences, offloaded, snapshot, train
from tests.small_ring import make_the_ring_small

STEPS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


def run(name, *, store="ram", dtype="fp32", clip=None, accumulation=1, update="deferred", states="fp32", **settings):
    case = CASES[name]
    adamw = {"update": update, "states": states, "threads": 1}
    model, optimizer = offloaded(case, store=store, dtype=DTYPES[dtype], adamw=adamw, **{"window": 2, **settings})
    batches = case.batches(STEPS * accumulation, size=2)
    losses = train(model, optimizer, batches, accumulation=accumulation, clip=clip, warmup=2)
    return losses, snapshot(model, optimizer), stronghold.report(model)


in_memory = cache(partial(run, store="ram"))


def check(tmp_path, name, *, like=None, **settings):
    losses, final, report = run(name, store=tmp_path / "store", **settings)
    expected_losses, expected, _ = in_memory(name, **(settings if like is None else like))
    assert losses == expected_losses
    assert differences(final, expected) == []
    return report


@pytest.mark.parametrize(
    ("name", "states", "dtype"), crossed(["gpt", "t5", "mixtral"], ["fp32", "8bit"], DTYPES, together=1)
)
def test_a_disk_gives_the_bits_of_memory(tmp_path, name, states, dtype):
    like = {"dtype": dtype, "states": states}
    for window, update in itertools.product((1, 2, CASES[name].layers), ("deferred", "in_backward")):
        report = check(tmp_path / f"{window}{update}", name, like=like, window=window, update=update, **like)
        assert report.disk_bytes > 0


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_device_with_memory_of_its_own_is_fed_through_staging(tmp_path, update, window):
    found = []
    for store, device in (("ram", "cpu"), (tmp_path / "store", Apart())):
        torch.manual_seed(0)
        model = stronghold.offload(Wide(), window=window, store=store, device=device)
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, update=update)
        for seed in range(3):
            model(torch.randn(4, 700, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert differences(*found) == []


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_clipping_accumulation_and_activations_do_not_change_that(tmp_path, activations):
    check(tmp_path, "bart", dtype="bf16", clip=0.5, accumulation=3, activations=activations)


def test_resident_layers_stay_off_the_disk(tmp_path):
    report = check(tmp_path, "gpt", resident=2)
    assert report.resident_device_bytes > 0


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_what_host_memory_holds_stays_there_and_no_split_changes_a_bit(tmp_path, monkeypatch, states):
    make_the_ring_small(monkeypatch)
    like = {"dtype": "bf16", "states": states}
    layers = CASES["gpt"].layers
    whole = in_memory("gpt", **like)[2].host_bytes
    least = check(tmp_path / "all", "gpt", like=like, **like).host_bytes
    splits, told = set(), []
    for number, share in enumerate((0.0, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 2.0, 8.0)):
        host_memory = int(least + share * whole)
        report = check(tmp_path / str(number), "gpt", like=like, host_memory=host_memory, **like)
        splits.add(report.disk_bytes)
        told.append((report.weights_on_disk, report.states_on_disk))
        assert report.host_bytes <= host_memory
    assert len(splits) >= layers, "the split goes layer by layer"
    assert told == sorted(told, reverse=True)
    assert (told[0], told[-1]) == ((layers, layers), (0, 0))
    assert any(weights < layers == on_disk for weights, on_disk in told), "weights come back before states"


class Wide(nn.Module):
    """Layers whose parameters do not fit one chunk, nor any whole number of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 700)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_parameters_larger_than_a_chunk_pass_in_parts(tmp_path, monkeypatch, states, update):
    monkeypatch.setattr(ring, "SLOT_BYTES", 4 * 2**20)
    found = []
    for store in ("ram", tmp_path / "store"):
        torch.manual_seed(0)
        model = stronghold.offload(Wide(), window=2, store=store, device="cpu", dtype=torch.bfloat16)
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, states=states, update=update, max_grad_norm=None)
        x = torch.randn(4, 700, generator=torch.Generator().manual_seed(1)).bfloat16()
        for _ in range(3):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert differences(*found) == []


def test_one_layer_updated_again_before_it_was_used_waits_for_itself(tmp_path):
    torch.manual_seed(0)
    found = []
    for store in ("ram", tmp_path / "store"):
        torch.manual_seed(0)
        model = stronghold.offload(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), store=store, device="cpu")
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
        model(torch.ones(2, 9)).sum().backward()
        for _ in range(20):
            optimizer.step()  # the same gradients again, with nothing computed in between
        found.append(snapshot(model, optimizer))
    assert differences(*found) == []


def test_a_step_that_is_skipped_leaves_the_disk_as_it_was(tmp_path):
    for update in ("deferred", "in_backward"):
        torch.manual_seed(0)
        model = stronghold.offload(
            nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), store=tmp_path / update, device="cpu", window=1
        )
        optimizer = stronghold.AdamW(model.parameters(), nonfinite="skip", update=update)
        before = snapshot(model, optimizer)
        model(torch.full((2, 9), torch.nan)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.skipped_steps == 1
        after = snapshot(model, optimizer)
        assert all(torch.equal(after[name]["weight"], before[name]["weight"]) for name in before)
        model(torch.ones(2, 9)).sum().backward()
        optimizer.step()
        assert not torch.equal(snapshot(model, optimizer)["0.weight"]["weight"], before["0.weight"]["weight"])


def test_a_parameter_on_disk_is_an_ordinary_tensor(tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    values = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model = stronghold.offload(plain, store=tmp_path / "store", device="cpu", window=1)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name])
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[1].weight.data[0] = 7.0
    alias = model[1].bias.data
    x = torch.ones(2, 9)
    expected = (x @ (2 * values["0.weight"]).T + values["0.bias"]) @ torch.cat(
        [torch.full((1, 9), 7.0), values["1.weight"][1:]]
    ).T + values["1.bias"]
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    optimizer.step()
    alias.zero_()
    assert torch.equal(model(x), model(x))
    assert not model[1].bias.any()
    optimizer.state[model[0].weight]["exp_avg"].zero_()  # as one may
    model(x).sum().backward()
    optimizer.step()
    model(x)
    engine_of(model).store.verify()


def test_nobodys_writes_are_taken_for_damage_and_all_are_kept_to_the_bit(tmp_path):
    """Writes by every way that there is, between steps: what is read later is not what was written directly."""
    found = []
    for store in ("ram", tmp_path / "store"):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(400, 400) for _ in range(4)))
        model = stronghold.offload(layers, store=store, device="cpu", dtype=torch.bfloat16)
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
        x = torch.ones(2, 400).bfloat16()
        held = model[2].weight.data
        for step in range(6):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[step % 4].weight.add_(0.01)
                model[(step + 1) % 4].weight.data[1] = 0.5
                held[0] = step
                torch._foreach_mul_(list(model.parameters()), 1.01)
                optimizer.state[model[3].weight]["exp_avg_sq"].mul_(1.1)
        model(x)
        engine_of(model).store.verify()
        found.append(snapshot(model, optimizer))
    assert differences(*found) == []


def wide(path=None, dtype=torch.float32):
    """Layers whose moments are many pages, so that a file has no room for two optimizers' by chance."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    settings = {"store": path} if path is not None else {}
    return stronghold.offload(model, window=2, device="cpu", dtype=dtype, **settings)


def steps(model, optimizer, seed):
    dtype = model[0].weight.dtype
    for number in range(2):
        model(torch.randn(4, 128, generator=torch.Generator().manual_seed(seed + number)).to(dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formats", [("fp32", "fp32"), ("fp32", "8bit", "fp32"), ("8bit", "fp32", "8bit")])
def test_an_optimizer_gets_the_room_of_one_that_is_gone_and_begins_at_zero(tmp_path, formats, dtype):
    found = []
    for path in (None, tmp_path / "store"):
        model = wide(path, DTYPES[dtype])
        for number, states in enumerate(formats):
            optimizer = None
            optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, states=states)
            steps(model, optimizer, 10 * number)
        stronghold.verify(model)
        found.append(snapshot(model, optimizer))
    assert differences(*found) == []


def test_a_second_optimizer_beside_a_first_is_refused_with_the_remedy_and_costs_nothing(tmp_path):
    model = wide(tmp_path / "store")
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0)
    before = snapshot(model, optimizer), stronghold.report(model)
    for _ in range(3):
        with pytest.raises(StoreError, match=r"left on disk, .* delete the optimizer before"):
            stronghold.AdamW(model.parameters(), lr=1e-2)
    assert differences(snapshot(model, optimizer), before[0]) == []
    assert stronghold.report(model).disk_bytes == before[1].disk_bytes
    steps(model, optimizer, 10)


def test_who_holds_a_moment_of_an_optimizer_that_is_gone_keeps_it(tmp_path):
    model = wide(tmp_path / "store")
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0)
    held = optimizer.state[model[2].weight]["exp_avg"]
    kept = held.clone()
    del optimizer
    with pytest.raises(StoreError, match="delete the optimizer before"):
        stronghold.AdamW(model.parameters(), lr=1e-2)
    assert torch.equal(held, kept)
    del held
    steps(model, stronghold.AdamW(model.parameters(), lr=1e-2), 0)


def test_a_run_with_a_second_optimizer_is_saved_in_place_and_goes_on(tmp_path):
    model = wide(tmp_path / "store")
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, states="8bit")
    steps(model, optimizer, 0)
    stronghold.checkpoint.save(tmp_path / "store", model, optimizer)
    optimizer = None
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, states="8bit")
    assert not (tmp_path / "store" / "manifest.json").exists()  # the states that were saved there are gone
    steps(model, optimizer, 10)
    kept = snapshot(model, optimizer)
    stronghold.checkpoint.save(tmp_path / "store", model, optimizer)
    del model, optimizer
    gc.collect()
    assert differences(snapshot(*reopened(tmp_path / "store", states="8bit")), kept) == []


def saved_in_place(path):
    model = wide(path)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0)
    kept = snapshot(model, optimizer)
    stronghold.checkpoint.save(path, model, optimizer)
    return model, optimizer, kept


def reopened(path, **adamw):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    stronghold.offload(model, window=2, device="cpu", store=str(path), weights=str(path))
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, **adamw)
    stronghold.checkpoint.load(path, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_step_that_is_refused_leaves_a_checkpoint_in_place_what_it_is(tmp_path, update):
    """The first batch has a NaN, and the program ends: nothing was updated, and nothing is lost."""
    path = tmp_path / "store"
    kept = saved_in_place(path)[-1]
    gc.collect()
    model, optimizer = reopened(path, update=update)
    model(torch.full((2, 128), torch.nan)).square().mean().backward()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    del model, optimizer
    gc.collect()
    assert differences(snapshot(*reopened(path, update=update)), kept) == []


def test_an_optimizer_that_is_refused_leaves_a_checkpoint_in_place_what_it_is(tmp_path):
    path = tmp_path / "store"
    model, optimizer, kept = saved_in_place(path)
    with pytest.raises(StoreError, match="delete the optimizer before"):
        stronghold.AdamW(model.parameters(), lr=1e-2)
    del model, optimizer
    gc.collect()
    assert differences(snapshot(*reopened(path)), kept) == []


def test_an_optimizer_needs_no_space_that_is_reserved_since_one_that_is_gone(tmp_path, monkeypatch):
    model = wide(tmp_path / "store")
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0)
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=0))
    optimizer.param_groups[0]["itself"] = optimizer  # so that only the collector finds it
    del optimizer
    steps(model, stronghold.AdamW(model.parameters(), lr=1e-2), 0)
    del model
    gc.collect()


def test_what_is_reserved_for_one_layer_is_no_space_for_another(tmp_path, monkeypatch):
    model = wide(tmp_path / "store")
    stronghold.AdamW(model[0].parameters(), lr=1e-2)
    gc.collect()
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=0))
    with pytest.raises(StoreError, match=r"takes .* KiB at .*, where 0 B are free"):
        stronghold.AdamW(model[1].parameters(), lr=1e-2)
    stronghold.AdamW(model[0].parameters(), lr=1e-2)


def test_masters_that_come_late_leave_the_next_optimizer_its_room(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3))).bfloat16().requires_grad_(False)
    stronghold.offload(model, window=2, device="cpu", store=tmp_path / "store").requires_grad_(True)
    for seed in (0, 10, 20):
        optimizer = None
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
        steps(model, optimizer, seed)
    stronghold.verify(model)
