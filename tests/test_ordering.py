"""Promise 2: no buffer is read before it is filled or refilled before it is drained, whatever is late.

Every wait of the engine goes through ``Waits`` with its reason. With all of them, random delays change no bit; without
any one of them, some delays do: so each is needed, and each is tested.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import stronghold
from stronghold.device import Wait, Waits
from stronghold.engine import engine_of, offload_shared
from stronghold.store import disk as disk_module
from stronghold.unit import Lane, Replicas
from tests.delayed import DelayedDevice, DelayedDisk, RaceError
from tests.replicas import in_threads

LAYERS = 5
_SEEDED = threading.Lock()
"""One thread at a time draws what a seed gives."""


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, size)
        self.down = nn.Linear(size, size)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(8, 12)
        self.layers = nn.ModuleList(Layer(12) for _ in range(LAYERS))
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def train(device: DelayedDevice | str, *, disk=False, replicas=1, **settings):
    """Returns what is seen in a few steps. ``disk``: the layers are there, and the device has memory of its own."""
    with ExitStack() as stack:
        if disk and isinstance(device, DelayedDevice):
            stack.enter_context(mock.patch.object(disk_module, "Disk", lambda threads: DelayedDisk(_own.device)))
            settings["store"] = stack.enter_context(tempfile.TemporaryDirectory())
        elif settings.get("activations") == "disk" and "store" not in settings:
            settings["activations"] = "recompute"  # without a disk it is to be the same
        if settings.get("load"):
            settings["load"] = stack.enter_context(tempfile.TemporaryDirectory())
        if replicas == 1:
            _own.device = device
            return _train(device, **settings)
        return in_threads(replicas, lambda one: _train_replica(device, one, settings))


_own = threading.local()
"""The device of this thread."""


def _numbers_at(parameter: nn.Parameter) -> ctypes.Array:
    """Returns the memory of a parameter as the engine does not see it read."""
    with torch._C.DisableTorchFunctionSubclass():
        return (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())


def sum_of(values: ctypes.Array) -> float:
    return sum(values)


def _train_replica(device: DelayedDevice | str, one: Replicas, settings):
    """Trains with a device of its own: the first replica's is as late as ``device``, the others are not."""
    _own.device = device if one.rank == 0 or isinstance(device, str) else DelayedDevice(one.rank, gradients=1e-3)
    return _train(_own.device, replicas=one, **settings)


def _train(
    device: DelayedDevice | str,
    *,
    window=2,
    update="deferred",
    accumulate=1,
    read=False,
    clip=False,
    norm=None,
    write=False,
    states="fp32",
    evaluate=False,
    again=False,
    look=False,
    wait=False,
    load=False,
    overwrite=False,
    fused=False,
    replicas=None,
    muon=False,
    **kwargs,
):
    """Returns all that was seen in a few steps: losses, norms, weights right after the step, parameters at the end."""
    torch.set_num_threads(1)
    with _SEEDED:
        model, seen = Model(), []
    if replicas is None:
        stronghold.offload(model, window=window, device=device, **kwargs)
    else:
        offload_shared(model, replicas, window=window, device=device, **kwargs)
        copies = model.parameters() if replicas.local_rank else ()
        everyone = replicas.everyone
        engine_of(model).join(everyone, shared={}, copies=copies, model="Model", passes=1, here=everyone.world_size)
    settings = {"lr": 0.05, "update": update, "threads": 1, "max_grad_norm": norm}
    if fused:
        rate = torch.tensor(0.1, device=engine_of(model).device.torch_device)
        optimizer = torch.optim.AdamW(model.layers.parameters(), rate, fused=True)
    elif muon:
        parameters = list(model.parameters())
        matrices, vectors = ([p for p in parameters if (p.ndim == 2) == kind] for kind in (True, False))
        optimizer = stronghold.Muon([{"params": matrices}, {"params": vectors, "use_muon": False}], **settings)
    else:
        optimizer = stronghold.AdamW(model.parameters(), states=states, **settings)
    generator = torch.Generator().manual_seed(1)
    raw = [_numbers_at(model.layers[i].up.weight) for i in range(LAYERS) if wait]
    for number in range(4):
        for _ in range(accumulate):
            x = torch.randn(6, 8, generator=generator).to(engine_of(model).device.torch_device, kwargs.get("dtype"))
            if replicas is not None:
                x = x.chunk(replicas.local_world_size)[replicas.local_rank]
            loss = (model(x) ** 2).mean() + model(-x).abs().mean() * 0.1
            loss.backward()
            seen.append(loss.item())
        if clip:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        if look:
            seen += [model.layers[i].up.weight.grad.sum().item() for i in range(LAYERS)]
        if fused:
            rate.mul_(0.5)
        optimizer.step()
        if again:
            optimizer.step()  # with the same gradients, and nothing computed in between
        if write:
            with torch.no_grad():
                model.out.weight.mul_(0.5)
                model.layers[3].up.weight.mul_(0.5)
        if wait:
            optimizer.wait()
            seen += [sum_of(values) for values in raw]
        if load:
            if number == 0:
                stronghold.checkpoint.save(f"{load}/saved", model, optimizer)
            else:
                stronghold.checkpoint.load(f"{load}/saved", model, optimizer)
        if read:
            seen += [model.layers[i].up.weight.sum().item() for i in range(LAYERS)]
        optimizer.zero_grad()
        if overwrite:
            with torch.no_grad():
                found = model(x).sum()
                for layer in model.layers:
                    layer.up.weight.mul_(0.5)
                seen.append(found.item())
        if evaluate:
            with torch.no_grad():
                seen.append(model(x).sum().item())
    for parameter in model.parameters():
        seen += parameter.detach().flatten().tolist()
    if isinstance(device, DelayedDevice):
        device.settle()
    return seen


SETTINGS = {
    "deferred": {},
    "window of one": {"window": 1},
    "whole window": {"window": LAYERS},
    "accumulation": {"accumulate": 3},
    "in_backward": {"update": "in_backward"},
    "keep": {"activations": "keep"},
    "host": {"activations": "host"},
    "inputs on disk": {"disk": True, "activations": "disk"},
    "reading": {"read": True},
    "clipped accumulation": {"accumulate": 3, "clip": True},
    "clipped by the optimizer": {"norm": 0.1},
    "deferred in bf16": {"dtype": torch.bfloat16},
    "in_backward in bf16": {"dtype": torch.bfloat16, "update": "in_backward"},
    "writing in bf16": {"write": True, "dtype": torch.bfloat16},
    "micro-batches": {"micro_batch": 6},
    "accumulation in bf16": {"accumulate": 3, "dtype": torch.bfloat16},
    "eight bits in_backward": {"states": "8bit", "update": "in_backward"},
    "resident": {"resident": 2, "clip": True},
    "resident, accumulation in bf16": {"resident": 2, "accumulate": 3, "dtype": torch.bfloat16},
    "resident in_backward": {"resident": 2, "update": "in_backward", "states": "8bit"},
    "resident root": {"device_memory": "1GiB", "norm": 0.1, "read": True},
    "resident root, accumulation in bf16": {"device_memory": "1GiB", "accumulate": 3, "dtype": torch.bfloat16},
    "resident root, writing in bf16": {"device_memory": "1GiB", "write": True, "dtype": torch.bfloat16},
    "resident root and layers": {"device_memory": "1GiB", "resident": 2, "update": "in_backward", "states": "8bit"},
    "disk, each step twice": {"disk": True, "again": True},
    "disk": {"disk": True},
    "disk, window of one": {"disk": True, "window": 1},
    "disk, window of three": {"disk": True, "window": 3},
    "disk, whole window": {"disk": True, "window": LAYERS},
    "disk, in_backward": {"disk": True, "window": 1, "update": "in_backward"},
    "disk, in_backward in bf16": {"disk": True, "update": "in_backward", "dtype": torch.bfloat16},
    "disk, accumulation and evaluation": {"disk": True, "accumulate": 2, "evaluate": True},
    "disk, writing": {"disk": True, "write": True, "window": 1},
    "muon": {"muon": True},
    "muon, disk": {"muon": True, "disk": True, "update": "in_backward", "dtype": torch.bfloat16},
    "replicas, muon": {"replicas": 2, "muon": True},
    "replicas, muon, disk": {"replicas": 2, "muon": True, "disk": True, "update": "in_backward"},
    "waited for": {"wait": True},
    "written behind an evaluation": {"overwrite": True},
    "updated by torch": {"fused": True},
    "loading": {"load": True, "evaluate": True},
    "disk, loading": {"disk": True, "load": True, "evaluate": True, "window": 1},
    "replicas": {"replicas": 2, "read": True, "evaluate": True},
    "replicas, accumulation in bf16": {"replicas": 2, "accumulate": 2, "dtype": torch.bfloat16, "window": 1},
    "replicas in_backward": {"replicas": 2, "update": "in_backward", "read": True, "states": "8bit"},
    "replicas, disk": {"replicas": 2, "disk": True, "window": 1, "evaluate": True},
    "replicas, disk, in_backward": {"replicas": 2, "disk": True, "update": "in_backward", "read": True},
    "three replicas": {"replicas": 3, "window": 1, "accumulate": 2},
    "replicas, gradients looked at": {"replicas": 2, "look": True},
    "replicas, resident": {"replicas": 2, "resident": 2, "window": 1},
    "replicas, resident root": {"replicas": 2, "device_memory": "1GiB", "window": 1},
}
# Who is late, in seconds at most; each profile brings out other races.
PROFILES = {
    "fetches late": {"fetches": 3e-3},
    "gradients late": {"gradients": 4e-3},
    "updates late": {"updates": 4e-3},
    "iterations late": {"beside": 4e-3},
    "root late": {"root": 6e-3},
    "computation late": {"compute": 4e-3},
    "copies late, computation more": {"compute": 4e-3, "fetches": 1e-3, "gradients": 1e-3},
    "all late": {"fetches": 2e-3, "gradients": 2e-3, "updates": 2e-3, "root": 2e-3, "compute": 2e-3},
    "reads ahead late": {"reads": 5e-3, "updates": 1e-3},
    "disk late": {"disk": 4e-3, "weights": 4e-3},
    "disk and computation late": {"disk": 3e-3, "weights": 3e-3, "compute": 3e-3, "fetches": 2e-3},
    "weights from disk late": {"weights": 2e-2},
    "inputs to disk late": {"inputs": 4e-2},
    "inputs late, and from disk": {"inputs": 2e-3, "fetches": 4e-3, "gradients": 1e-3},
}
OF_A_DISK = {"reads", "disk", "weights", "inputs"}
"""Who is late only where there is one."""
OF_MUON = "iterations late"


OF_REPLICAS = ("gradients late", "updates late", "all late", "disk late")
"""Who is late so that other replicas must wait; for what is one replica's own, the others are there."""


def devices(setting: str, *, some: bool = False):
    """Yields a device for every profile that makes a difference to ``setting``, or for every fifth of them."""
    of_all = list(_devices(setting))
    first = list(SETTINGS).index(setting) % min(5, len(of_all))  # each profile in turn
    return of_all[first::5] if some else of_all


def _devices(setting: str):
    for seed, (name, profile) in enumerate(PROFILES.items()):
        disk, replicas = (SETTINGS[setting].get(what) for what in ("disk", "replicas"))
        if name == OF_MUON and not SETTINGS[setting].get("muon"):
            continue
        if (disk or not OF_A_DISK.intersection(profile)) and (name in OF_REPLICAS or not replicas):
            yield DelayedDevice(seed, **profile)


# Where the lack of a wait shows: in a setting, when somebody is late.
SHOWN = {
    "SLOT_FREE": ("deferred", "gradients late"),
    "FETCHED": ("deferred", "fetches late"),
    "UPDATED": ("deferred", "updates late"),
    "WEIGHTS_READ": ("deferred", "updates late"),
    "WEIGHTS_FETCHED": ("written behind an evaluation", ""),
    "COPIES": ("updated by torch", ""),
    "UPDATE_READ": ("waited for", "gradients late"),
    "GRADIENT_SLOT_FREE": ("whole window", "gradients late"),
    "GRADIENT_WRITTEN": ("deferred", "updates late"),
    "GRADIENT_READ": ("resident", "gradients late"),
    "GRADIENT_ADDED": ("clipped accumulation", "gradients late"),
    "GRADIENT_ADD": ("accumulation", "gradients late"),
    "GRADIENT_UPDATE": ("in_backward", "gradients late"),
    "STAGING_FREE": ("accumulation", "updates late"),
    "BUFFER_FREE": ("inputs on disk", "gradients late"),
    "DIRECTION": ("muon", "gradients late"),
    "UPDATE_WRITTEN_BACK": ("inputs on disk", "gradients late"),
    "READ_AHEAD": ("inputs on disk", "updates late"),
    "FILE_READ": ("disk, each step twice", "weights from disk late"),
    "UPDATE_DONE": ("inputs on disk", "gradients late"),
    "SHARE_UPDATED": ("replicas", "updates late"),
    "ROOT_GRADIENT": ("clipped by the optimizer", "computation late"),
    "ROOT_WRITTEN": ("writing in bf16", "computation late"),
    "ROOT_UPDATED": ("deferred", "gradients late"),
    "ROOT_UPLOADED": ("deferred", "fetches late"),
    "INPUT_SLOT_FREE": ("host", "gradients late"),
    "INPUT_WRITTEN": ("host", "fetches late"),
    "INPUT_STAGED": ("inputs on disk", "fetches late"),
    "INPUT_STAGING_FREE": ("inputs on disk", "inputs to disk late"),
    "INPUT_DOWN": ("host", "gradients late"),
    "INPUT_SLOT_READ": ("host", "gradients late"),
    "INPUT_UP": ("host", "gradients late"),
}
BEHIND = {"WEIGHTS_FETCHED", "COPIES"}
"""For a device that is behind the host, which no thread is: tests/accelerator/test_waits.py takes them away."""
TIMES_AS_LATE = (1, 1, 2, 4, 8, 16)
"""How late they are in each attempt: a race shows by chance, and less where all else is slow as well."""


@functools.cache
def undelayed(setting: str):
    return train("cpu", **SETTINGS[setting])


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.long)], ids=["some", "every"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_delay_changes_a_bit(setting, some):
    expected = undelayed(setting)
    for device in devices(setting, some=some):
        assert train(device, **SETTINGS[setting]) == expected


@pytest.mark.parametrize("wait", [wait for wait in Wait if wait.name not in BEHIND], ids=lambda wait: wait.name)
def test_every_wait_is_needed(wait, monkeypatch):
    """Takes one reason for waiting away: some delay must then change a result or be seen as a race."""
    used = []

    def without(original):
        def waits(self, *args):
            *_, reason = args
            if reason is wait:
                used.append(reason)
                return None
            return original(self, *args)

        return waits

    setting, profile = SHOWN[wait.name]
    expected = undelayed(setting)
    for kind in ("stream", "thread", "compute", "host"):
        monkeypatch.setattr(Waits, kind, without(getattr(Waits, kind)))
    for seed, times in enumerate(TIMES_AS_LATE):
        late = {who: times * longest_s for who, longest_s in PROFILES[profile].items()}
        try:
            got = train(DelayedDevice(seed, **late), **SETTINGS[setting])
        except (RaceError, RuntimeError):
            break
        if got != expected:
            break
    else:
        pytest.fail(f"nothing went wrong without {wait.name} ({wait.value}) in {setting!r} with {profile!r}")
    assert used


ROOMS = ("unit", "optim", "store", "window", "engine", "checkpoint")
"""Where waits are the engine's own: below are streams and events themselves, above other processes."""
NO_EVENTS = {
    "checkpoint/dcp_saving.py: writer.write_data(planner.finish_plan(plans[processes.rank]), planner).wait",
    "engine/updates.py: optimizer.wait",
    "window/gradients.py: optimizer.wait",
    "optim/host_adamw.py: self.wait",
    "optim/state_dicts.py: optimizer.wait",
    "unit/fetched.py: self.wait",
    "unit/copies.py: copies.wait",
    "unit/gradient.py: unit.copies.wait",
    "unit/parameter.py: unit.copies.wait",
    "unit/copies.py: self.wait",
    "engine/agreeing.py: unit.fetched.wait",
    "unit/unit.py: self.fetched.wait",
    "store/input_file.py: transfer.wait",  # and these are for transfers that the same thread has submitted
    "store/disk.py: file.wait",
    "store/ring.py: chunk.file.wait",
    "store/ring.py: self.written.wait",
    "store/unit_file.py: self.wait",
    "store/unit_file.py: transfer.wait",
}


def test_every_wait_has_one_place_and_its_own_reason():
    """The mutation above takes a reason away; with one place for each reason it takes away one wait."""
    root = Path(stronghold.__file__).parent
    source = "".join(p.read_text() for room in ROOMS for p in sorted((root / room).glob("*.py")))
    for wait in Wait:
        assert source.count(f"Wait.{wait.name})") == 1, wait
    assert source.count("self.waits.") == len(Wait)


def test_no_wait_goes_past_the_place_of_all():
    root = Path(stronghold.__file__).parent
    found = set()
    for path in (p for room in ROOMS for p in (root / room).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            waits = isinstance(node, ast.Attribute) and node.attr in (
                "wait",
                "compute_wait",
                "host_wait",
                "synchronize",
            )
            if waits and ast.unparse(node) != "self.waits.stream":
                found.add(f"{path.relative_to(root)}: {ast.unparse(node)}")
    assert found == NO_EVENTS


@pytest.mark.parametrize(
    ("kind", "method", "setting"),
    [
        (Lane, "barrier", "replicas"),
        (Lane, "barrier", "replicas, muon"),
        (Replicas, "agree", "replicas, gradients looked at"),
    ],
)
def test_replicas_wait_for_one_another(kind, method, setting, monkeypatch):
    """Takes their meetings away, behind an update or a backward pass: what a late replica brings is then missing."""
    expected = undelayed(setting)
    took = []
    monkeypatch.setattr(kind, method, lambda self, *_, **__: took.append(self) or (0, 0))
    late = [DelayedDevice(seed, updates=2e-2, gradients=2e-2) for seed in range(3)]
    assert any(train(device, **SETTINGS[setting]) != expected for device in late)
    assert took
