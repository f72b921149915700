"""What runs in each process of a test of stages, and what it is compared with."""

from __future__ import annotations

import functools
import gc
import json
import os
import socket
import tempfile
import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import stronghold
from stronghold.distributed import Processes, in_stages
from stronghold.engine import engine_of
from stronghold.errors import ParallelError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.planner.pipeline_order import Pipeline
from tests.distributed.tied import with_a_tied_head
from tests.small import SIZE, Block

BATCH = 8
CONFIG = GPTConfig(layers=5, hidden=32, heads=2, sequence=16, vocabulary=100)


@dataclass(frozen=True)
class Case:
    """One way to train the same model: the same gradients and losses are expected of all.

    With ``ratios`` the balance is a file's, or for replicas what is in one. ``again`` are the layers that the backward
    pass is to compute again. On several ``machines`` the processes have no memory in common but with their neighbours.
    """

    stages: int
    replicas: int = 1
    schedule: str | None = None
    balance: Any = "layers"
    ratios: tuple[float, ...] | None = None
    again: frozenset[int] = frozenset(range(CONFIG.layers))
    micro_batches: int = 4
    clip: float | None = None
    frozen: bool = False
    disk: bool = False
    machines: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 3

    def order(self, processes: int) -> Pipeline:
        """Returns the schedule over so many processes."""
        each = self.stages * self.replicas // processes
        return Pipeline(
            schedule=self.schedule or ("1F1B" if each == 1 else "Interleaved1F1B"),
            devices=processes // self.replicas,
            micro_batches=self.micro_batches,
            stages_per_device=each,
        )


CASES = {
    1: [Case(1), Case(1, schedule="GPipe", settings={"window": 2})],
    2: [
        *(Case(2, schedule=schedule, settings={"window": w}) for schedule in ("GPipe", "1F1B") for w in (1, 2)),
        *(Case(4, schedule="Interleaved1F1B", settings={"window": w}) for w in (1, 3)),
        Case(2, clip=0.05),
        Case(2, balance=[4, 1]),
        Case(2, disk=True, settings={"window": 1}),
        Case(2, settings={"activations": "keep", "window": 1}, again=frozenset()),
        Case(2, balance=[3, 2], ratios=(0.7, 0.5), settings={"window": 1}, again=frozenset({1, 2, 4})),
        Case(4, balance=[1, 1, 2, 1], ratios=(1, 0, 0.5, 0.9), settings={"window": 1}, again=frozenset({0, 3})),
        Case(2, balance=[2, 3], ratios=(0, 0.4), settings={"activations": "host", "window": 2}, again=frozenset({4})),
        Case(2, settings={"activations": "host", "window": 2}),
        Case(2, settings={"resident": 1, "window": 1}),
        Case(2, settings={"micro_batch": 1, "window": 1}),
        Case(2, frozen=True, clip=0.05),
        Case(2, clip=1.0, steps=10, settings={"window": 1}),
        Case(1, replicas=2, settings={"window": 1}, clip=0.05),
        Case(
            1, replicas=2, disk=True, settings={"window": 2, "activations": "keep"}, micro_batches=2, again=frozenset()
        ),
        Case(1, replicas=2, frozen=True, settings={"micro_batch": 1, "activations": "host"}, micro_batches=1),
        Case(1, replicas=2, settings={"resident": 2, "window": 1}, clip=0.05),
        Case(1, replicas=2, clip=1.0, steps=10, settings={"window": 2}, micro_batches=2),
        Case(1, replicas=2, machines=2, settings={"window": 1}, clip=0.05),
        Case(1, replicas=2, machines=2, disk=True, settings={"resident": 2, "window": 1}, micro_batches=2),
    ],
    4: [
        Case(4, schedule="GPipe", settings={"window": 1}, clip=0.05),
        Case(4, schedule="1F1B", balance=[1, 1, 1, 2], micro_batches=8),
        Case(4, schedule="Interleaved1F1B", micro_batches=8),
        Case(2, replicas=2, settings={"window": 1}, clip=0.05),
        Case(2, replicas=2, schedule="GPipe", balance=[4, 1], frozen=True, micro_batches=2),
        Case(2, replicas=2, balance=[4, 1], ratios=(0.5, 0), settings={"window": 1}, again=frozenset({2, 3})),
        Case(4, replicas=2, schedule="Interleaved1F1B", disk=True, settings={"window": 1}, clip=0.05),
        Case(2, replicas=2, machines=2, disk=True, frozen=True, settings={"window": 1}, clip=0.05),
        Case(1, replicas=4, machines=2, settings={"window": 1}, clip=0.05, micro_batches=2),
    ],
}

EACH_TIME = {1: {0, 1}, 2: {0, 3, 8, 9, 11, 12, 14, 15, 16, 17, 19, 20, 22, 24}, 4: {1, 5, 6, 7, 8}}
"""Numbers of those that have every schedule, store and setting once; the others are long."""


def model(case: Case) -> GPT:
    torch.manual_seed(0)
    gpt = GPT(CONFIG)
    if case.frozen:
        for parameter in (*gpt.layers[0].parameters(), *gpt.layers[3].parameters(), gpt.norm.weight):
            parameter.requires_grad_(False)
    return gpt


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(BATCH, 12), (BATCH, 16), (2 * BATCH, 7)]  # one shape after another
    return [torch.randint(CONFIG.vocabulary, sizes[step % 3], generator=generator) for step in range(steps)]


@dataclass
class Trained:
    """What a run came to: each step's loss and gradients by name, losses without gradients, the parameters after it.

    ``sent`` are the bytes that a process has sent to others in each step, ``again`` the layers that it computed in a
    backward pass.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    evaluated: list[float]
    parameters: dict[str, Tensor]
    sent: list[dict[int, int]] = field(default_factory=list)
    again: set[int] = field(default_factory=set)


def alone(case: Case, device: str = "cpu") -> Trained:
    """Trains in this process, by plain PyTorch and the whole batch at once; cases that are one here, only once."""
    return _alone(case.frozen, case.clip, case.steps, device)


@functools.cache
def _alone(frozen: bool, clip: float | None, steps: int, device: str) -> Trained:
    gpt = model(Case(1, frozen=frozen)).to(device)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, weight_decay=0.1)
    trained = Trained([], [], [], {})
    for batch in (batch.to(device) for batch in batches(steps)):
        loss = gpt(batch, batch).loss
        loss.backward()
        trained.losses.append(loss.item())
        trained.gradients.append({n: to_host(p.grad) for n, p in gpt.named_parameters() if p.grad is not None})
        if clip is not None:
            nn.utils.clip_grad_norm_(gpt.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            trained.evaluated.append(gpt(batch[:5], batch[:5]).loss.item())
    trained.parameters = {name: to_host(p) for name, p in gpt.named_parameters()}
    return trained


def to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@contextmanager
def recomputations(gpt: GPT) -> Iterator[set[int]]:
    """Yields what will hold the numbers of the layers that are computed while a backward pass is under way."""
    inner = {id(layer.attention_norm): number for number, layer in enumerate(gpt.layers)}
    found: set[int] = set()

    kind = type(gpt.layers[0].attention_norm)  # hooks that only look are not called again
    forward = kind.forward

    def computes(module: nn.Module, *arguments: Any) -> Any:
        if id(module) in inner and torch._C._current_graph_task_id() != -1:
            found.add(inner[id(module)])
        return forward(module, *arguments)

    kind.forward = computes
    try:
        yield found
    finally:
        kind.forward = forward


def staged(case: Case, device: str) -> Trained:
    """Trains this process's stages."""
    gpt = model(case)
    names = {id(p): name for name, p in gpt.named_parameters()}
    with tempfile.TemporaryDirectory() as folder, recomputations(gpt) as again:
        with machines(case.machines):
            processes = Processes(torch.device(device), wanted=case.stages * case.replicas, replicas=case.replicas)
        folders = processes.all_gather_object(folder)
        folder = folders[
            processes.rank - processes.replicas.local_rank * processes.each
        ]  # theirs have one store in common
        balance = case.balance
        if case.ratios is not None:
            balance = {"partition": case.balance, "recompute_ratio": case.ratios}
            if case.replicas == 1:
                file = Path(folders[0]) / "partition.json"
                if processes.rank == 0:  # which is the one that reads it
                    file.write_text(json.dumps(balance))
                balance = file
        module = in_stages(
            LayeredGPT(gpt),
            processes,
            stages=case.stages,
            micro_batches=case.micro_batches,
            balance=balance,
            schedule=case.schedule,
            **({"store": folder} if case.disk else {}),
            **case.settings,
        )
        optimizer = stronghold.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=case.clip)
        trained = Trained([], [], [], {}, again=again)
        for batch in batches(case.steps):
            module.take_sent_bytes()
            trained.losses.append(module.forward_backward(batch, batch).item())
            trained.sent.append(module.take_sent_bytes())
            if case.replicas == 1:
                trained.gradients.append(gradients(module, names))
            optimizer.step()
            if case.replicas > 1:  # of a root parameter each has its own until the step
                trained.gradients.append(gradients(module, names))
            optimizer.zero_grad()
            trained.evaluated.append(module.evaluate(batch[:5], batch[:5]).item())
        trained.parameters = {names[id(p)]: to_host(p) for p in module.parameters()}
    return trained


@contextmanager
def machines(count: int) -> Iterator[None]:
    """Has this process say that it is on one of so many machines, with its neighbours by rank."""
    own, rank, processes = socket.gethostname, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if count > 1:
        socket.gethostname = lambda: f"machine-{rank * count // processes}"
    try:
        yield
    finally:
        socket.gethostname = own


def gradients(module: nn.Module, names: dict[int, str]) -> dict[str, Tensor]:
    return {names[id(p)]: to_host(p.grad) for p in module.parameters() if p.grad is not None}


LONG = [
    Case(2, clip=1.0, steps=50, settings={"window": 1}),
    Case(1, replicas=2, clip=1.0, steps=50, settings={"window": 2}, micro_batches=2),
]
"""Of two processes."""


def some_cases(processes: str, device: str, *numbers: str) -> dict[int, Trained]:
    return {int(number): staged(CASES[int(processes)][int(number)], device) for number in numbers}


def long_cases(device: str) -> list[Trained]:
    return [staged(case, device) for case in LONG]


def residual() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, SIZE), *(Block(dropout=0.0) for _ in range(6)), nn.Tanh(), nn.Linear(SIZE, 5)
    )


def optimizer_of(model: nn.Module, *, muon: bool = False, **settings: Any) -> stronghold.AdamW:
    """Returns AdamW, or Muon for the matrices and AdamW for the rest."""
    if not muon:
        return stronghold.AdamW(model.parameters(), lr=1e-2, **settings)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return stronghold.Muon([{"params": matrices}, {"params": vectors, "use_muon": False}], lr=1e-2, **settings)


def bits(folder: str, cases: list[dict[str, Any]]) -> list[str]:
    """Trains stages beside the same model in one process, micro-batch after micro-batch; returns what is not equal."""
    unequal = []
    for number, case in enumerate(cases):
        whole, model = residual(), residual()
        names = {id(p): name for name, p in model.named_parameters()}
        dtype = torch.bfloat16 if case.get("bf16") else None
        compiled = {"compile": case.get("compile", False)}
        stronghold.offload(whole, device="cpu", dtype=dtype, **compiled)
        stages = stronghold.pipeline(
            model,
            loss=F.cross_entropy,
            stages=case["stages"],
            micro_batches=4,
            balance="layers",
            schedule=case["schedule"],
            device="cpu",
            dtype=dtype,
            window=1,
            resident=case.get("resident", 0),
            **({"store": f"{folder}/{number}"} if case.get("disk") else {}),
            **compiled,
        )
        update = case.get("update", "deferred")
        optimizing = {name: case[name] for name in ("states", "muon") if name in case}
        optimizers = [optimizer_of(whole, **optimizing), optimizer_of(stages, **optimizing, update=update)]
        for step in range(4):
            x, y = torch.randn(8, 3, 4, dtype=dtype), torch.randint(5, (8,))
            losses = []
            for inputs, targets in zip(x.chunk(4), y.chunk(4), strict=True):
                loss = F.cross_entropy(whole(inputs), targets) / 4
                loss.backward()
                losses.append(loss.detach())
            same = torch.equal(stages.forward_backward(x, y), torch.stack(losses).sum().float())
            expected = dict(whole.named_parameters())
            for parameter in stages.parameters() if update == "deferred" else ():
                same &= torch.equal(parameter.grad, expected[names[id(parameter)]].grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for parameter in stages.parameters():
                same &= torch.equal(parameter, expected[names[id(parameter)]])
            if not same:
                unequal.append(f"{case} in step {step}")
        if "compile" in case and stronghold.report(stages).compiled != len(engine_of(stages).blocks):
            unequal.append(f"{case}: what is compiled")
    return unequal


BITS = [
    {"stages": 2, "schedule": "GPipe"},
    {"stages": 4, "schedule": "Interleaved1F1B", "bf16": True, "states": "8bit"},
    {"stages": 4, "schedule": "Interleaved1F1B", "disk": True},
    {"stages": 2, "schedule": "GPipe", "update": "in_backward", "bf16": True, "disk": True},
    {"stages": 2, "schedule": "1F1B", "update": "in_backward", "bf16": True, "resident": 2},
    {"stages": 4, "schedule": "Interleaved1F1B", "compile": "aot_eager"},
    {"stages": 4, "schedule": "Interleaved1F1B", "update": "in_backward", "bf16": True, "disk": True, "muon": True},
]

LONG_BITS = [
    {"stages": 2, "schedule": "1F1B", "states": "8bit"},
    {"stages": 2, "schedule": "1F1B", "bf16": True},
    {"stages": 2, "schedule": "1F1B", "update": "in_backward"},
    {"stages": 4, "schedule": "Interleaved1F1B", "update": "in_backward", "states": "8bit"},
    {"stages": 2, "schedule": "1F1B", "muon": True},
]


def other_bits(folder: str) -> list[str]:
    return bits(folder, LONG_BITS)


def fetches(*, foreseen: bool) -> int:
    """Returns the fetches of a step whose order the window has been told, or sees by itself."""
    stages = stronghold.pipeline(
        residual(),
        loss=F.cross_entropy,
        stages=4,
        micro_batches=4,
        balance="layers",
        schedule="Interleaved1F1B",
        device="cpu",
        window=1,
    )
    engine = engine_of(stages)
    if not foreseen:
        engine.window.follow([])
    optimizer = stronghold.AdamW(stages.parameters())
    for _ in range(3):
        stages.forward_backward(torch.randn(8, 3, 4), torch.randint(5, (8,)))
        optimizer.step()
        optimizer.zero_grad()
    return stronghold.report(stages).step.fetches


class Turned(nn.Linear):
    """Returns a view whose memory goes on in another order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


def turned() -> list[str]:
    """Trains stages that return views, on a view of a batch; returns what differs from one process."""

    def row() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Turned(6, 8), Turned(5, 5), Turned(8, 3), nn.Flatten())

    whole, model, different = row(), row(), list[str]()
    names = {id(p): name for name, p in model.named_parameters()}
    stages = stronghold.pipeline(
        model, loss=F.cross_entropy, stages=2, micro_batches=4, balance=[1, 2], device="cpu", window=1
    )
    for number, wide in enumerate((6, 5, 6)):  # as views of more and as they are
        x, y = torch.randn(8, wide, 6)[:, :5], torch.randint(15, (8,))
        losses = [F.cross_entropy(whole(one), two) / 4 for one, two in zip(x.chunk(4), y.chunk(4), strict=True)]
        sum(losses).backward()
        if not torch.allclose(stages.forward_backward(x, y), sum(losses).detach(), rtol=1e-5):
            different.append(f"loss {number}")
        expected = dict(whole.named_parameters())
        for parameter in stages.parameters():
            if not torch.allclose(parameter.grad, expected[names[id(parameter)]].grad, rtol=1e-5, atol=1e-7):
                different.append(f"gradient {names[id(parameter)]} {number}")
        if not torch.allclose(stages.evaluate(x, y), F.cross_entropy(whole(x), y).detach(), rtol=1e-5):
            different.append(f"evaluation {number}")
    return different


def without_shared_parameters(folder: str) -> dict[str, Any]:
    return {
        "turned": turned(),
        "autocast": under_autocast(Adding),
        "other batches": other_batches(),
        "thawed": thawed(),
        "frozen by one name": frozen_by_one_name(),
        "unequal": bits(folder, BITS),
        "foreseen": fetches(foreseen=True),
        "by itself": fetches(foreseen=False),
        "let go": is_let_go(),
        "kept": keeps_names(folder),
        **with_a_tied_head(folder),
        "saved in part": saved_in_part(folder),
        "ignored": ignored_labels(),
    }


class Adding(nn.Linear):
    """A residual layer: under autocast it returns fp32 of fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.tanh(x))


def gradients_apart(stages: nn.Module, whole: nn.Module, names: dict[int, str]) -> list[str]:
    """Returns which gradients of stages are not those of the whole model; ``names`` are by their parameters' ids."""
    expected = dict(whole.named_parameters())
    pairs = [(names[id(parameter)], parameter.grad) for parameter in stages.parameters()]
    return [f"gradient {name}" for name, grad in pairs if not torch.equal(grad, expected[name].grad)]


def under_autocast(layer: type[nn.Linear]) -> list[str]:
    """Trains stages under autocast beside the same micro-batches in plain PyTorch; returns what differs."""

    def row() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(layer(8, 8) for _ in range(4)))

    whole, model, different = row(), row(), list[str]()
    names = {id(p): name for name, p in model.named_parameters()}
    stages = stronghold.pipeline(model, loss=F.mse_loss, stages=2, micro_batches=2, balance="layers", device="cpu")
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [F.mse_loss(whole(one), two) / 2 for one, two in zip(x.chunk(2), y.chunk(2), strict=True)]
        for loss in losses:
            loss.backward()
        if not torch.equal(stages.forward_backward(x, y), sum(losses).detach()):
            different.append("loss")
        if not torch.equal(stages.evaluate(x, y), sum(losses).detach()):
            different.append("evaluation")
    return different + gradients_apart(stages, whole, names)


def of_another_type() -> list[str]:
    return under_autocast(nn.Linear)


def other_batches() -> list[str]:
    """Trains on what a DataLoader shuffles, behind layers that drew; returns what is not as in plain PyTorch."""
    x = torch.arange(64.0).view(8, 8) / 64
    data = torch.utils.data.TensorDataset(x, x.flip(1))

    def row() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    whole, model, different = row(), row(), list[str]()
    names = {id(p): name for name, p in model.named_parameters()}
    stages = stronghold.pipeline(model, loss=F.mse_loss, stages=2, micro_batches=2, balance="layers", device="cpu")
    torch.rand(dist.get_rank())  # as dropout of each stage draws, whose shapes differ
    for inputs, targets in torch.utils.data.DataLoader(data, 4, shuffle=True):
        for train in (stages.forward_backward, stages.evaluate):
            with suppress(ParallelError):
                different.append(f"not refused: {train(inputs, targets)}")
        break
    other = x + dist.get_rank()
    for inputs, targets in ((other, x), (x, other)):
        with suppress(ParallelError):
            different.append(f"not refused: {stages.forward_backward(inputs, targets)}")
    assert all(parameter.grad is None for parameter in stages.parameters())
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(7))
    for inputs, targets in loader:
        losses = [F.mse_loss(whole(one), two) / 2 for one, two in zip(inputs.chunk(2), targets.chunk(2), strict=True)]
        for loss in losses:
            loss.backward()
        if not torch.equal(stages.forward_backward(inputs.T.contiguous().T, targets), sum(losses).detach()):
            different.append("loss")
    return different + gradients_apart(stages, whole, names)


def thawed() -> list[str]:
    """Trains with other layers frozen from step to step; returns what is not as in plain PyTorch."""

    def row() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def freeze(layers: nn.Module, frozen: Container[int]) -> None:
        for name, parameter in layers.named_parameters():
            parameter.requires_grad_(int(names.get(id(parameter), name)[0]) not in frozen)

    whole, model, different = row(), row(), list[str]()
    names = {id(p): name for name, p in model.named_parameters()}
    freeze(model, {0, 1})
    stages = stronghold.pipeline(model, loss=F.mse_loss, stages=2, micro_batches=2, balance="layers", device="cpu")
    optimizers = [torch.optim.AdamW(whole.parameters(), lr=1e-2), stronghold.AdamW(stages.parameters(), lr=1e-2)]
    expected, generator = dict(whole.named_parameters()), torch.Generator().manual_seed(1)
    for step, frozen in enumerate(({0, 1}, {}, {0}, {2, 3}, {0, 1}, {1, 3})):
        for one in (whole, stages):
            freeze(one, frozen)
        x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)
        losses = [F.mse_loss(whole(one), two) / 2 for one, two in zip(x.chunk(2), y.chunk(2), strict=True)]
        sum(losses).backward()
        if not torch.allclose(stages.forward_backward(x, y), sum(losses).detach(), rtol=1e-5):
            different.append(f"loss {step}")
        for parameter in stages.parameters():
            own, other = parameter.grad, expected[names[id(parameter)]].grad
            if (own is None) != (other is None) or (
                own is not None and not torch.allclose(own, other, rtol=1e-4, atol=1e-6)
            ):
                different.append(f"gradient {names[id(parameter)]} {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if not torch.allclose(stages.evaluate(x, y), F.mse_loss(whole(x), y).detach(), rtol=1e-4):
            different.append(f"evaluation {step}")
    return different


def frozen_by_one_name() -> list[str]:
    """Freezes an embedding, which is the head as well, by one of its names; returns what is not as in plain PyTorch."""

    def row() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        layers[3].weight = layers[0].weight
        return layers

    def mean(output: Tensor, targets: Tensor) -> Tensor:
        return (output.square().mean((1, 2)) - targets).square().mean()

    whole, model, different = row(), row(), list[str]()
    stages = stronghold.pipeline(model, loss=mean, stages=2, micro_batches=2, balance="layers", device="cpu")
    x, y = torch.arange(12).view(4, 3) % 8, torch.arange(4.0)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for frozen in ((), ("0.weight",), ("0.weight", "3.weight"), ("3.weight",), ()):
        for name, parameter in stages.named_parameters():
            parameter.requires_grad_(name not in frozen)
        try:
            loss = stages.forward_backward(x, y)
        except ParallelError as error:
            states = ["frozen" if name in frozen else "trained" for name in ("0.weight", "3.weight")]
            if len(frozen) != 1 or f"got 0.weight {states[0]} and 3.weight {states[1]}, which are one" not in str(
                error
            ):
                different.append(f"{frozen}: {error}")
            continue
        if len(frozen) == 1:
            different.append(f"{frozen}: not refused")
        whole[0].weight.requires_grad_(not frozen)
        losses = [mean(whole(one), two) / 2 for one, two in zip(x.chunk(2), y.chunk(2), strict=True)]
        sum(losses).backward()
        if not torch.allclose(loss, sum(losses).detach(), rtol=1e-5):
            different.append(f"{frozen}: loss")
        for name, parameter in stages.named_parameters():
            own, other = parameter.grad, expected[name].grad
            if (own is None) != (other is None) or (own is not None and not torch.allclose(own, other, rtol=1e-4)):
                different.append(f"{frozen}: gradient {name}")
        stages.zero_grad()
        whole.zero_grad()
    return different


def keeps_names(folder: str) -> bool:
    """Whether a stage has its values out of a whole model's files, and its state by the names there."""
    whole = residual().state_dict()
    files = Path(folder) / f"files-{dist.get_rank()}"
    files.mkdir()
    save_file(whole, files / "model.safetensors")
    with torch.device("meta"):
        model = residual()
    stages = stronghold.pipeline(
        model, loss=F.cross_entropy, stages=2, micro_batches=2, balance="layers", device="cpu", weights=str(files)
    )
    state = stages.state_dict()
    same = 0 < len(state) < len(whole) and all(torch.equal(value, whole[name]) for name, value in state.items())
    stages.load_state_dict({name: value + 1 for name, value in state.items()})
    return same and all(torch.equal(p, whole[name] + 1) for name, p in stages.named_parameters())


def ignored_labels() -> list[str]:
    """Trains where a micro-batch has no labels and others unlike many, as the docs say; returns what is not plain's."""

    def row() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))

    def summed(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum") / labels

    whole, model = row(), row()
    names = {id(p): name for name, p in model.named_parameters()}
    stages = stronghold.pipeline(model, loss=summed, stages=2, micro_batches=2, balance="layers", device="cpu")
    different, x = list[str](), torch.arange(12).view(4, 3) % 8
    for ignored in (x.flatten() < 2, torch.arange(12) < 6):  # the second leaves out all of a micro-batch
        y = x.flatten().masked_fill(ignored, -100).view(4, 3)
        loss = F.cross_entropy(whole(x).flatten(0, 1), y.flatten())
        loss.backward()
        labels = (y != -100).sum() / 2
        if not torch.allclose(stages.forward_backward(x, y), loss.detach(), rtol=1e-5):
            different.append("loss")
        labels = (y != -100).sum()
        if not torch.allclose(
            stages.evaluate(x[:3], y[:3]) * labels,
            F.cross_entropy(whole(x[:3]).flatten(0, 1), y[:3].flatten(), reduction="sum").detach(),
            rtol=1e-5,
        ):
            different.append("evaluation")
        expected = dict(whole.named_parameters())
        for parameter in stages.parameters():
            if not torch.allclose(parameter.grad, expected[names[id(parameter)]].grad, rtol=1e-4, atol=1e-6):
                different.append(f"gradient {names[id(parameter)]}")
        whole.zero_grad()
        stages.zero_grad()
    return different


def saved_in_part(folder: str) -> str:
    """Returns what it raises to save a model in stages as one file, by process 0 alone and by all."""
    stages = stronghold.pipeline(
        residual(), loss=F.cross_entropy, stages=2, micro_batches=2, balance="layers", device="cpu"
    )
    found = []
    for ranks, part in (([0], stages), ([0, 1], stages), ([0, 1], stages.chunks[0])):
        if dist.get_rank() in ranks:
            try:
                stronghold.save(part, Path(folder) / "part")
                found.append("nothing")
            except ParallelError as error:
                found.append(str(error))
    dist.barrier()
    return found[-1] if len(set(found)) == 1 and not (Path(folder) / "part").exists() else f"{found}"


def is_let_go() -> bool:
    """Whether a model that was cut is gone once nobody else has it."""
    model = residual()
    gone = weakref.ref(model)
    stages = stronghold.pipeline(model, loss=F.cross_entropy, stages=2, micro_batches=2, balance="layers", device="cpu")
    stages.forward_backward(torch.randn(4, 3, 4), torch.randint(5, (4,)))
    del model
    gc.collect()
    return gone() is None
