"""What runs in each process of a test of replicas of a whole model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import stronghold
from stronghold.parallel import watch
from stronghold.plan.traffic import reduce_scatter_bytes
from tests.parallel.cases import residual
from tests.small import SIZE

BITS: list[dict[str, Any]] = [
    {},
    {"states": "8bit", "window": 2, "activations": "keep"},
    {"update": "in_backward"},
    {"update": "in_backward", "states": "8bit", "disk": True},
    {"disk": True, "max_grad_norm": 0.05},
    {"resident": 3, "max_grad_norm": 0.05},
    {"resident": 3, "update": "in_backward"},
    {"bf16": True},
]
"""Ways to train that are the same to the bit in two replicas and with two halves of each batch in one process."""


def bits(folder: str) -> dict[str, Any]:
    """Trains in two replicas beside one process; returns what is not equal, both's host memory, and fetches."""
    unequal, bytes_, fetches = [], [], 0
    for number, case in enumerate(BITS):
        settings = dict(case)
        optimizing = {k: settings.pop(k) for k in ("states", "update", "max_grad_norm") if k in settings}
        dtype = torch.bfloat16 if settings.pop("bf16", False) else None
        if settings.pop("disk", False):
            settings["store"] = f"{folder}/{number}"
        whole, model = residual(), residual()
        stronghold.offload(whole, device="cpu", dtype=dtype, window=1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(int(os.environ["RANK"]))  # the first one's values are taken
        stronghold.replicate(model, device="cpu", dtype=dtype, **{"window": 1, **settings})
        optimizers = [
            stronghold.AdamW(whole.parameters(), lr=1e-2, **{**optimizing, "update": "deferred"}),
            stronghold.AdamW(model.parameters(), lr=1e-2, **optimizing),
        ]
        if not case:
            bytes_ = [stronghold.report(one).pageable_host_bytes for one in (whole, model)]
        for step in range(4):
            halves = batches(step, dtype)
            expected = mean_gradients(whole, halves)
            x, y = halves[dist.get_rank()]
            F.cross_entropy(model(x), y).backward()
            if optimizing.get("update") != "in_backward" and "resident" not in case:
                named = zip(model.named_parameters(), expected, strict=True)
                unequal += [f"{case} gradient {n}" for (n, p), g in named if ".0." in n and not torch.equal(p.grad, g)]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            named = zip(model.named_parameters(), whole.parameters(), strict=True)
            unequal += [f"{case} step {step} {n}" for (n, p), q in named if not torch.equal(p, q)]
        if not case:
            fetches = stronghold.report(model).step.fetches
    return {"unequal": unequal, "bytes": bytes_, "fetches": fetches}


def batches(step: int, dtype: torch.dtype | None) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, 4, dtype=dtype, generator=generator)
    y = torch.randint(5, (8,), generator=generator)
    return list(zip(x.chunk(2), y.chunk(2), strict=True))


def mean_gradients(model: nn.Module, halves: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Returns, and puts into ``.grad``, the mean of the gradients of both halves, by torch in the compute type."""
    gradients = []
    for x, y in halves:
        for parameter in model.parameters():
            parameter.grad = None
        F.cross_entropy(model(x), y).backward()
        gradients.append([parameter.grad.detach().clone() for parameter in model.parameters()])
    means = [(one + other) / 2 for one, other in zip(*gradients, strict=True)]
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
    found["keep"] = error_of(keep)
    optimizer.zero_grad()
    before = model[3].up.weight.detach().clone()
    backward(1)
    optimizer.step()
    found["trained"] = str(not torch.equal(before, model[3].up.weight))
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


def reduced() -> tuple[int, int]:
    """Returns what a step has sent to the other replica of its layers' gradients, and what the formula says."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    stronghold.replicate(model, device="cpu", window=1, dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(model.parameters())
    model(torch.randn(2, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    step = stronghold.report(model).step
    return step.reduced_bytes, sum(reduce_scatter_bytes(p.numel(), 2, 2) for p in model.parameters())


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


def all_of(folder: str) -> dict[str, Any]:
    found = {**bits(folder), "refused": refused(folder)}
    (Path(folder) / "files").mkdir(exist_ok=True)
    return {**found, "from files": from_files(f"{folder}/files"), "reduced": reduced(), "last": ends_first()}
