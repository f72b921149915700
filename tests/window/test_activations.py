"""Layers' inputs that wait on the host, or on disk, for the backward pass: no bit differs, and they are counted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import BudgetError, CorruptionError, DiskError, StoreError
from stronghold.layout import PAGE_BYTES
from stronghold.native import Disk, Fault
from stronghold.store import INPUT_STAGING
from stronghold.store import disk as disk_module
from stronghold.window.shelves import DiskShelf
from tests.reference import CASES, differences, offloaded, snapshot, train
from tests.small import LENGTH, SAMPLES, SIZE, Residual, numbers, pair

LAYERS = 7
"""More than staging holds twice: the first ones are read from disk."""
RUN_BYTES = 4 * SAMPLES * LENGTH * SIZE


def offload(activations, *, window=2, device="cpu", layers=LAYERS, **settings):
    torch.manual_seed(0)
    model = Residual(layers)
    return stronghold.offload(model, device=device, window=window, activations=activations, **settings)


def trained(activations, *, update="deferred", backwards=1, loop=None, **settings):
    """Returns losses and all that is left of some steps, each with so many backward passes."""
    model = offload(activations, **settings)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, update=update)
    torch.manual_seed(1)
    losses, batches = [], [batch.to(settings.get("dtype")) for batch in numbers(4 * backwards)]
    for step in range(4):
        losses += (loop or one_by_one)(model, batches[step * backwards : (step + 1) * backwards])
        optimizer.step()
        optimizer.zero_grad()
    found = losses, snapshot(model, optimizer)
    stronghold.close(model)
    return found


def one_by_one(model, batches):
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
    return losses


def forward_first(model, batches):
    """All forward passes before the first backward pass, and of one graph two backward passes."""
    losses = [model(batch) for batch in batches]
    losses[-1].backward(retain_graph=True)
    losses[-1].backward()
    for loss in losses[:-1]:
        loss.backward()
    return [loss.item() for loss in losses]


def evaluated_meanwhile(model, batches):
    """A graph that no backward pass follows, and others begun before it goes."""
    left, found = [model(batch) for batch in batches], one_by_one(model, batches)
    del left
    return found + one_by_one(model, batches)


WAYS = {
    "plain": {},
    "micro-batches": {"micro_batch": 3},
    "accumulated": {"backwards": 3},
    "in_backward": {"update": "in_backward"},
    "forward first": {"backwards": 3, "loop": forward_first},
    "dropped": {"backwards": 2, "loop": evaluated_meanwhile},
    "bf16": {"dtype": torch.bfloat16},
    "resident": {"resident": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_on_the_host_and_on_disk_no_bit_differs(way, tmp_path):
    settings = WAYS[way]
    expected = trained("recompute", window=1, **settings)
    wholes = (1, 3, LAYERS) if way in ("plain", "micro-batches") else (2,)
    for window in (number for number in wholes if number <= LAYERS - settings.get("resident", 0)):
        for activations, store in (("host", "ram"), ("disk", [tmp_path / "one", tmp_path / "other"])):
            losses, left = trained(activations, window=window, store=store, **settings)
            assert losses == expected[0]
            assert differences(left, expected[1]) == []


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


def heads_in_turn(rows, x):
    """A trunk, and heads on its output that have a backward pass each, before the trunk's."""
    for layer in rows[:2]:
        x = layer(x)
    apart = x.detach().requires_grad_()
    for head in rows[2:]:
        head(apart).square().mean().backward()
    x.backward(apart.grad)


def some_checkpointed(rows, x):
    """Some layers in checkpoints of the user's, whose backward pass runs them again."""
    for number, layer in enumerate(rows):
        x = checkpoint(layer, x, use_reentrant=True) if number % 3 == 2 else layer(x)
    x.square().sum().backward()


@pytest.mark.parametrize("activations", ["host", "disk"])
@pytest.mark.parametrize("loop", [heads_in_turn, some_checkpointed])
@pytest.mark.parametrize("count", range(3, 8))
def test_a_run_that_nobody_expected_leaves_the_next_ones_inputs_where_they_are(loop, count, activations, tmp_path):
    """They were brought up into the slot that the layer was about to compute with: gradients of other inputs."""

    def gradients(**settings):
        torch.manual_seed(0)
        rows = nn.ModuleList(Added() for _ in range(count))
        if settings:
            stronghold.offload(rows, device="cpu", **settings)
        loop(rows, torch.randn(3, SIZE, requires_grad=True))
        return [parameter.grad.clone() for parameter in rows.parameters()]

    found = gradients(activations=activations, window=1, store=tmp_path / "store" if activations == "disk" else "ram")
    for one, other in zip(found, gradients(), strict=True):
        assert torch.equal(one, other)


class Queries(nn.Module):
    """Learned queries for every sample, with their positions, neither of which has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.randn(5, 2 * SIZE))
        self.layers = nn.ModuleList(Positioned() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        queries, positions = (one[None].expand(len(x), -1, -1) for one in self.learned.split(SIZE, 1))
        for layer in self.layers:
            queries = layer(queries, positions)
        return queries.square().mean()


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate, self.place = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x + positions)) * self.gate(x) + self.place(positions)


@pytest.mark.parametrize("activations", ["host", "disk"])
def test_inputs_that_lie_in_others_are_those_that_they_were(activations, tmp_path):
    """Came they back dense, the same linear layer would save another tensor than in the first run."""
    plain, ours = pair(Queries, window=1, activations=activations, store=tmp_path)
    for model in (plain, ours):
        model(numbers(1)[0]).backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_three_inputs_of_a_decoder_layer_go_to_disk_together(tmp_path):
    found = []
    for settings in ({"activations": "recompute"}, {"activations": "disk", "store": tmp_path / "store"}):
        model, optimizer = offloaded(CASES["t5"], window=2, **settings)
        found.append((train(model, optimizer, CASES["t5"].batches(2)), snapshot(model, optimizer)))
    (expected_losses, expected), (losses, left) = found
    assert losses == expected_losses
    assert differences(left, expected) == []


def test_inputs_on_disk_of_many_pages_over_several_pieces(tmp_path):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().sum()

    found = []
    for settings in ({}, {"activations": "disk", "store": [tmp_path / "one", tmp_path / "other"]}):
        torch.manual_seed(0)
        model = stronghold.offload(Wide(), device="cpu", window=1, **settings)
        x = torch.randn(300_007, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        model(x).backward()
        found.append([x.grad, *(p.grad.clone() for p in model.parameters())])
        if settings:
            written = engine_of(model).store.counters().written_bytes
            assert written >= 6 * x.nbytes
        stronghold.close(model)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_batches_that_grow_and_shrink_leave_no_more_than_the_longest_took(tmp_path):
    for activations, store in (("host", "ram"), ("disk", tmp_path / "store")):
        model = offload(activations, store=store)
        for samples in (1, 5, 600, 90, 2, 600):
            model(torch.randn(samples, SIZE)).backward()
        report = stronghold.report(model)
        run_bytes = 600 * 4 * SIZE
        pages = -(-run_bytes // PAGE_BYTES) * PAGE_BYTES
        if activations == "host":
            assert report.inputs_host_bytes == LAYERS * run_bytes
        else:
            assert report.inputs_host_bytes == INPUT_STAGING * pages
            assert report.inputs_disk_bytes == LAYERS * pages
        stronghold.close(model)


# ---- what is told ----


def test_the_report_tells_what_they_take(tmp_path):
    report = stronghold.report
    before = report(offload("recompute"))
    assert (before.inputs_host_bytes, before.inputs_disk_bytes) == (0, 0)

    model = offload("host")
    held = report(model).host_bytes
    model(numbers(1)[0]).backward()
    assert report(model).inputs_host_bytes == LAYERS * RUN_BYTES
    gradients = report(offload_and_go_back("recompute")).host_bytes - held
    assert report(model).host_bytes == held + gradients + LAYERS * RUN_BYTES
    assert "layers' inputs" in str(report(model))

    model, batches = offload("disk", store=tmp_path), numbers(3)
    optimizer = stronghold.AdamW(model.parameters())
    plain = offload("recompute", store=tmp_path / "beside")
    other = stronghold.AdamW(plain.parameters())
    for batch in batches:
        for each, its in ((model, optimizer), (plain, other)):
            each(batch).backward()
            its.step()
            its.wait()
            its.zero_grad()
    there, without = report(model), report(plain)
    assert there.inputs_host_bytes == INPUT_STAGING * PAGE_BYTES
    assert there.inputs_disk_bytes == LAYERS * PAGE_BYTES
    assert there.host_bytes == without.host_bytes + there.inputs_host_bytes
    assert there.disk_bytes == without.disk_bytes
    assert engine_of(model).store.counters().written_bytes - engine_of(plain).store.counters().written_bytes == (
        len(batches) * LAYERS * PAGE_BYTES
    )
    assert there.step.disk_wait_s > 0


def offload_and_go_back(activations):
    model = offload(activations)
    model(numbers(1)[0]).backward()
    return model


def test_in_the_trace_they_are_on_the_disk(tmp_path):
    model = offload("disk", store=tmp_path)
    with stronghold.trace(model) as timeline:
        model(numbers(1)[0]).backward()
    names = {span.lane: set() for span in timeline.spans()}
    for span in timeline.spans():
        names[span.lane].add(span.name)
    assert {f"write the inputs of layers.{number}" for number in range(LAYERS)} <= names["disk writes"]
    read = {number for number in range(LAYERS) if f"read the inputs of layers.{number}" in names["disk reads"]}
    assert read == set(range(LAYERS - INPUT_STAGING))  # the others are in staging still
    assert "for the inputs of layers.0" in names["waits"]


# ---- what is refused, and what goes wrong ----


def test_a_budget_that_they_would_overrun_says_so_before_the_first_step(tmp_path):
    model = offload("host")
    optimizer = stronghold.AdamW(model.parameters())
    model(numbers(1)[0]).backward()
    needed = stronghold.report(model).host_bytes
    del optimizer
    stronghold.close(model)
    for budget, fits in ((needed, True), (needed - 1, False)):
        model = offload("host", host_memory=budget)
        optimizer = stronghold.AdamW(model.parameters())
        before = snapshot(model, optimizer)
        if fits:
            model(numbers(1)[0]).backward()
            assert stronghold.report(model).host_bytes == budget
            continue
        with pytest.raises(BudgetError, match=r"the inputs of layers.6 .* takes .* beside .*got host_memory=.*disk"):
            model(numbers(1)[0])
        assert differences(snapshot(model, optimizer), before) == []


def test_on_disk_needs_a_store_there():
    with pytest.raises(ValueError, match=r"activations='disk' keeps .*got store='ram'.*activations='host'"):
        offload("disk")


@pytest.fixture
def faults(monkeypatch):
    wanted = []
    monkeypatch.setattr(disk_module, "Disk", partial(Disk, faults=wanted))
    return wanted


def test_a_full_disk_is_the_stores_error_and_training_goes_on_where_there_is_room(tmp_path, monkeypatch):
    model = offload("disk", store=tmp_path / "store")
    optimizer = stronghold.AdamW(model.parameters())
    before = snapshot(model, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 4 * PAGE_BYTES})())
        patched.setattr("stronghold.store.input_file.InputFile.disk_bytes", property(lambda self: 0))
        model(numbers(1)[0][:1])  # one page each, one by one: what is free does not change here
        patched.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0})())
        with pytest.raises(StoreError, match=r"the inputs of layers.0 takes .* free .* more"):
            model(torch.randn(2000, SIZE))
    assert differences(snapshot(model, optimizer), before) == []
    expected = offload("recompute")
    for each in (model, expected):
        torch.manual_seed(1)
        each(numbers(1)[0]).backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_disk_that_fills_up_in_between_is_an_error_with_the_bytes(tmp_path, faults):
    model = offload("disk", store=tmp_path / "store")
    faults.append(Fault(kind="reserve", what="ENOSPC", nth=1, times=100, path_ends=".bin"))
    disk = engine_of(model).store.disk
    assert disk._system is not None
    with pytest.raises(DiskError) as caught:
        full = offload("disk", store=tmp_path / "other", host_memory="1GiB")
        full(numbers(1)[0])
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_error_of_the_device_is_raised_with_file_and_layer(tmp_path, faults, kind):
    faults.append(Fault(kind=kind, what="EIO", nth=2, path_ends=f"inputs-{os.getpid()}.bin"))
    model = offload("disk", store=tmp_path / "store", host_memory="1GiB")
    with pytest.raises(DiskError, match=r"the inputs of layers\.\d") as caught:
        for batch in numbers(2):
            model(batch).backward()
    assert caught.value.errno == errno.EIO
    stronghold.close(model)


def test_what_the_disk_has_altered_is_never_computed_with(tmp_path):
    model = offload("disk", store=tmp_path / "store")
    loss = model(numbers(1)[0])
    engine = engine_of(model)
    shelf = engine.activations.shelf
    assert isinstance(shelf, DiskShelf)
    shelf._stream.record().wait()
    (descriptor,) = [
        int(name)
        for name in os.listdir("/proc/self/fd")
        if _target(name) == f"{tmp_path}/store/inputs-{os.getpid()}.bin (deleted)"
    ]
    with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:
        file.seek(PAGE_BYTES + 5)  # of the second layer
        octet = file.read(1)
        file.seek(PAGE_BYTES + 5)
        file.write(bytes([octet[0] ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(CorruptionError, match=r"the inputs of layers\.1"):
        loss.backward()


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


def test_nothing_is_left_behind_by_a_model_that_is_closed_or_killed(tmp_path):
    model = offload("disk", store=tmp_path / "closed")
    model(numbers(1)[0]).backward()
    assert not list((tmp_path / "closed").glob("inputs-*"))  # it has no name
    stronghold.close(model)
    assert not (tmp_path / "closed").exists()
    source = f"""
        import os, signal, sys, torch
        sys.path.insert(0, {os.getcwd()!r})
        from tests.window.test_activations import offload, numbers
        model = offload("disk", store={str(tmp_path / "killed")!r})
        loss = model(numbers(1)[0])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not list((tmp_path / "killed").glob("inputs-*"))
    assert list((tmp_path / "killed").glob("layer-*.bin"))  # these the next run overwrites
    model = offload("disk", store=tmp_path / "killed")
    model(numbers(1)[0]).backward()
    stronghold.close(model)


def test_the_steps_before_a_checkpoint_in_place_are_gone_on_from(tmp_path):
    found = []
    for again in (False, True):
        model = offload("disk", store=tmp_path / f"store-{again}")
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
        for step, batch in enumerate(numbers(4)):
            if again and step == 2:
                directory = tmp_path / f"store-{again}"
                stronghold.checkpoint.save(directory, model, optimizer)
                stronghold.close(model)
                assert not list(directory.glob("inputs-*"))
                model = offload("disk", store=directory, weights=directory)
                optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
                stronghold.checkpoint.load(directory, model, optimizer)
            torch.manual_seed(step)
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert differences(*found) == []
