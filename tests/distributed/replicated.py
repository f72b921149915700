"""What runs in each process of a test of replicas of a whole model."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import stronghold
from stronghold.checkpoint import pretrained
from stronghold.distributed import watch
from stronghold.engine import engine_of
from stronghold.errors import ParallelError
from tests.distributed.cases import machines, optimizer_of, residual
from tests.small import SIZE

BITS: list[dict[str, Any]] = [
    {},
    {"states": "8bit", "window": 2, "activations": "keep"},
    {"update": "in_backward", "states": "8bit", "disk": True},
    {"resident": 3, "max_grad_norm": 0.05},
    {"bf16": True, "resident": 3},
    {"compile": "aot_eager", "window": 2},
    {"muon": True, "update": "in_backward", "disk": True, "bf16": True},
]
"""Ways to train that are the same to the bit in two replicas and with two halves of each batch in one process."""

LONG_BITS: list[dict[str, Any]] = [
    {"update": "in_backward"},
    {"disk": True, "max_grad_norm": 0.05},
    {"resident": 3, "update": "in_backward"},
    {"bf16": True},
    {"muon": True, "max_grad_norm": 0.05},
]
"""Others, of the same parts."""

APART: list[dict[str, Any]] = [
    {"max_grad_norm": 0.05},
    {"update": "in_backward", "states": "8bit", "disk": True},
    {"resident": 3, "disk": True, "bf16": True},
    {"muon": True, "resident": 3},
]
"""The same on two machines."""


def bits(folder: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Trains in replicas beside one process; returns what is not equal, both's host memory, and fetches."""
    unequal, bytes_, fetches = [], [], 0
    for number, case in enumerate(cases):
        settings = dict(case)
        optimizing = {k: settings.pop(k) for k in ("states", "update", "max_grad_norm", "muon") if k in settings}
        dtype = torch.bfloat16 if settings.pop("bf16", False) else None
        if settings.pop("disk", False):
            settings["store"] = f"{folder}/{number}"
        whole, model = residual(), residual()
        stronghold.offload(whole, device="cpu", dtype=dtype, window=1, compile=case.get("compile", False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(int(os.environ["RANK"]))  # the first one's values are taken
        stronghold.replicate(model, device="cpu", dtype=dtype, **{"window": 1, **settings})
        optimizers = [
            optimizer_of(whole, **{**optimizing, "update": "deferred"}),
            optimizer_of(model, **optimizing),
        ]
        if case == cases[0]:
            bytes_ = [stronghold.report(one).pageable_host_bytes for one in (whole, model)]
        for step in range(4):
            parts = batches(step, dtype)
            expected = mean_gradients(whole, parts)
            x, y = parts[dist.get_rank()]
            F.cross_entropy(model(x), y).backward()
            if optimizing.get("update") != "in_backward" and "resident" not in case:
                named = zip(model.named_parameters(), expected, strict=True)
                unequal += [f"{case} gradient {n}" for (n, p), g in named if ".0." in n and not torch.equal(p.grad, g)]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            named = zip(model.named_parameters(), whole.parameters(), strict=True)
            unequal += [f"{case} step {step} {n}" for (n, p), q in named if not torch.equal(p, q)]
        if "compile" in case and stronghold.report(model).compiled != len(engine_of(model).blocks):
            unequal.append(f"{case}: what is compiled")
        if case == cases[0]:
            fetches = stronghold.report(model).step.fetches
    return {"unequal": unequal, "bytes": bytes_, "fetches": fetches}


def batches(step: int, dtype: torch.dtype | None) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, 4, dtype=dtype, generator=generator)
    y = torch.randint(5, (8,), generator=generator)
    parts = dist.get_world_size()
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))


def mean_gradients(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Returns, and puts into ``.grad``, the mean of the gradients of two parts or of two pairs of them.

    It is taken by torch in the compute type, and of each pair first.
    """
    gradients = []
    for x, y in parts:
        for parameter in model.parameters():
            parameter.grad = None
        F.cross_entropy(model(x), y).backward()
        gradients.append([parameter.grad.detach().clone() for parameter in model.parameters()])
    while len(gradients) > 1:
        pairs = zip(gradients[::2], gradients[1::2], strict=True)
        gradients = [[one + other for one, other in zip(*pair, strict=True)] for pair in pairs]
    means = [total / len(parts) for total in gradients[0]]
    for parameter, mean in zip(model.parameters(), means, strict=True):
        parameter.grad = mean.clone()
    return means


def refused(folder: str) -> dict[str, str]:
    """Returns what each thing that replicas cannot do raises, and whether the replicas go on to train together."""
    found = {}
    model = residual()
    stronghold.replicate(model, device="cpu", window=1)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)

    def backward(which: int = 0) -> None:
        F.cross_entropy(model(batches(which, None)[dist.get_rank()][0]), batches(which, None)[0][1]).backward()

    def clip() -> None:
        backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def keep() -> None:
        optimizer.zero_grad()
        backward()
        kept = model[3].up.weight.grad
        optimizer.zero_grad()
        backward()
        del kept

    found["write"] = error_of(lambda: nn.init.zeros_(model[3].up.weight))
    found["load"] = error_of(lambda: model.load_state_dict(model.state_dict()))
    found["clip"] = error_of(clip)
    found["reduce"] = error_of(lambda: dist.all_reduce(model[3].up.weight.grad))
    found["keep"] = error_of(keep)
    optimizer.zero_grad()
    before = model[3].up.weight.detach().clone()
    backward(1)
    optimizer.step()
    found["trained"] = str(not torch.equal(before, model[3].up.weight))
    for way in BEHIND_ITS_BACK:
        found[way] = behind_its_back(way)
    found["resident"] = behind_its_back("data", resident=6)
    found["other way"] = error_of(other_way)
    found["not finite"] = error_of(not_finite)
    return found


class Fork(nn.Module):
    """A model in which each replica leaves out a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != 1 + dist.get_rank():
                x = torch.tanh(layer(x))
        return x


BEHIND_ITS_BACK: dict[str, Callable[[nn.Module], object]] = {
    "data": lambda layer: layer.weight.data.add_(0.5),
    "detach": lambda layer: layer.weight.detach()[0].fill_(0.5),
    "view": lambda layer: layer.weight.view(-1)[3:4].data.add_(0.5),
    "array": lambda layer: layer.bias.detach().numpy().__setitem__(0, 0.5),
    "kept": lambda layer: KEPT[-1].mul_(0.5),
    "gradient's data": lambda layer: layer.weight.grad.data.mul_(0.5),
    "gradient's view": lambda layer: layer.weight.grad.detach()[0].fill_(0.5),
}
"""Ways to write a weight or a gradient of which no call tells, and each replica's would come on top of the others'."""
KEPT: list[Tensor] = []
"""Memory of the layer that is written, from before the first step."""


def behind_its_back(way: str, *, resident: int = 0) -> str:
    """Returns what a step raises where a layer was written so, which has computed as ever where it was looked at so."""
    model, untouched = residual(), residual()
    for one in (model, untouched):
        stronghold.replicate(one, device="cpu", window=1, resident=resident)
    if way == "kept":
        KEPT.append(model[3].up.weight.data)
    optimizers = [stronghold.AdamW(one.parameters(), lr=1e-2) for one in (model, untouched)]

    def step(write: bool) -> None:
        for one, optimizer in zip((model, untouched), optimizers, strict=True):
            F.cross_entropy(one(batches(0, None)[dist.get_rank()][0]), batches(0, None)[0][1]).backward()
            if one is model:
                layer = one[3].up
                if way != "kept":
                    looked = layer.weight.data, layer.bias.detach().numpy(), layer.weight.view(-1)
                    assert len((*looked, layer.weight.grad.data)) == 4
                dist.barrier()  # what one writes another one must not take for what was there
                if write:
                    BEHIND_ITS_BACK[way](layer)
            optimizer.step()
            optimizer.zero_grad()

    step(write=False)
    step(write=False)
    assert all(map(torch.equal, model.parameters(), untouched.parameters()))
    return error_of(lambda: step(write=True))


def other_way() -> None:
    model = Fork()
    stronghold.replicate(model, device="cpu", window=1)
    model(torch.randn(2, SIZE)).sum().backward()


def not_finite() -> None:
    """One replica's batch is not finite: no layer may be updated in either."""
    model = residual()
    stronghold.replicate(model, device="cpu", window=1)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, update="in_backward")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    x, y = batches(0, None)[0]
    F.cross_entropy(model(x * (torch.nan if dist.get_rank() else 1.0)), y).backward()
    try:
        optimizer.step()
    finally:
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeError as error:  # load_state_dict's own, of all that went wrong; the others are ours
        return f"{type(error).__name__}: {error}"
    return "nothing"


def from_files(folder: str) -> bool:
    """Whether a model on the meta device has its values in both replicas, out of files that one of them has written."""
    whole = residual().state_dict()
    file = Path(folder) / "model.safetensors"
    if dist.get_rank() == 0:
        save_file(whole, file)
    dist.barrier()
    with torch.device("meta"):
        model = residual()
    stronghold.replicate(model, device="cpu", window=1, weights=folder)
    return all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


def saved_by_one(folder: str) -> list[str]:
    """Has all replicas save, the first one alone, and all where it cannot be; returns what is not as it should be."""
    model, expected = residual(), residual().state_dict()
    stronghold.replicate(model, device="cpu", window=1)
    rank, write = dist.get_rank(), pretrained._write
    wrong, written = list[str](), []

    def slowly(outgoing: Any, where: Path, limit: int) -> None:
        time.sleep(0.3)
        written.append(where)
        write(outgoing, where, limit)

    def compare(name: str) -> None:
        found = load_file(Path(folder) / name / "model.safetensors")
        if found.keys() != expected.keys() or not all(torch.equal(found[key], expected[key]) for key in found):
            wrong.append(f"{name}: the file")

    pretrained._write = slowly
    try:
        for name in ("by all", "again by all"):
            stronghold.save(model, Path(folder) / name)
            compare(name)
        if rank == 0:
            stronghold.save(model, Path(folder) / "by one")
            compare("by one")
        dist.barrier()
    finally:
        pretrained._write = write
    if len(written) != (3 if rank == 0 else 0):
        wrong.append(f"written {len(written)} times")
    try:
        stronghold.save(model, Path(folder) / "file")  # there is one
        wrong.append("not refused")
    except (ValueError, ParallelError) as error:
        if not str(error).startswith(("process 0 failed: " if rank else "") + "a folder to save in must be new"):
            wrong.append(f"{error}")
    dist.barrier()
    return wrong


def reduced() -> tuple[int, int, list[int]]:
    """Returns the bytes of gradients that a step has sent here and to other machines, and each gradient's elements."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    stronghold.replicate(model, device="cpu", window=1, dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(model.parameters())
    model(torch.randn(2, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    step = stronghold.report(model).step
    return step.reduced_bytes, step.crossed_bytes, [p.numel() for p in model.parameters()]


def ends_first() -> float:
    """One replica ends while the other still looks at what both have updated."""
    model = residual()
    stronghold.replicate(model, device="cpu", window=1)
    optimizer = stronghold.AdamW(model.parameters())
    x, y = batches(0, None)[dist.get_rank()]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        time.sleep(3 * watch.BEAT_S)
    return model[3].up.weight.sum().item() if dist.get_rank() == 0 else 0.0


def ends_later() -> float:
    """The last update of a replica of the first stage takes a while, and those of the last stage have ended."""
    torch.manual_seed(0)
    model = stronghold.pipeline(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))),
        loss=F.mse_loss,
        stages=2,
        replicas=2,
        micro_batches=2,
        balance="layers",
        device="cpu",
        window=1,
    )
    optimizer = stronghold.AdamW(model.parameters())
    loss = model.forward_backward(torch.ones(8, 8), torch.zeros(8, 8))
    if dist.get_rank() == 2:
        engine = engine_of(model)
        assert engine is not None
        engine.device.updates.submit(lambda: time.sleep(6 * watch.BEAT_S))
    optimizer.step()
    return loss.item()


def apart(folder: str) -> dict[str, Any]:
    """Trains on two machines, each of which has its own folder."""
    own = f"{folder}/{int(os.environ['RANK']) * 2 // int(os.environ['WORLD_SIZE'])}"
    os.makedirs(own, exist_ok=True)
    with machines(2):
        found = bits(own, APART if os.environ["WORLD_SIZE"] == "2" else APART[::2])
        found |= {"crossed": reduced(), "random": from_random(), "written": written()}
    socket.gethostname = lambda: "machine-0" if os.environ["RANK"] == "0" else "machine-1"
    return {**found, "uneven": error_of(lambda: stronghold.replicate(residual(), device="cpu"))}


def one_folder(folder: str) -> list[Any]:
    """Trains on two machines that see one folder; returns what is in it, and whether all have the same weights."""
    with machines(2):
        model = residual()
        stronghold.replicate(model, device="cpu", window=1, store=folder)
        optimizer = stronghold.AdamW(model.parameters())
        x, y = batches(0, None)[dist.get_rank()]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        weights = [parameter.sum().item() for parameter in model.parameters()]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, weights)
        found = set(os.listdir(folder))
        dist.barrier()
    return [found, all(one == weights for one in everyone)]


def written() -> str:
    """Returns what it raises to write a parameter, which would then differ between machines."""
    model = residual()
    stronghold.replicate(model, device="cpu", window=1)
    return error_of(lambda: nn.init.zeros_(model[3].up.weight))


def from_random() -> bool:
    """Whether all replicas begin with the values that the first one draws."""
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = residual()
    stronghold.replicate(model, device="cpu", window=1, weights=lambda module: module.apply(_draw))
    sums = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().float())
    return all(torch.equal(one, sums[0]) for one in sums)


def _draw(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def other_bits(folder: str) -> list[str]:
    return bits(folder, LONG_BITS)["unequal"]


def all_of(folder: str) -> dict[str, Any]:
    found = {**bits(folder, BITS), "refused": refused(folder)}
    (Path(folder) / "files").mkdir(exist_ok=True)
    found["from files"] = from_files(f"{folder}/files")
    (Path(folder) / "files" / "file").touch()
    found["saved"] = saved_by_one(f"{folder}/files")
    return {**found, "reduced": reduced(), "last": ends_first()}
