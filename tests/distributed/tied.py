"""What runs in each process of a test of stages with a head that is the embedding as well, in modules of their own."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import stronghold
from stronghold.errors import ParallelError

NAMES = ("0.weight", "4.weight")


def row(seed: int = 0, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(seed)
    with torch.device(device):
        layers = [nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)]
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def in_stages(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = loss, **settings: Any) -> nn.Module:
    return stronghold.pipeline(
        model, loss=loss, stages=2, micro_batches=2, balance="layers", device="cpu", window=1, **settings
    )


def batch(step: int = 0) -> Tensor:
    return torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        x = batch(step)
        if hasattr(model, "forward_backward"):
            losses.append(model.forward_backward(x, x))
        else:
            losses.append(loss(model(x), x))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.detach() for one in losses]


def apart(stages: nn.Module, expected: dict[str, Tensor], what: str, **tolerances: float) -> list[str]:
    """Returns which parameters are not the ``expected`` ones, by each of their names."""
    return [
        f"{what}: {name}"
        for name, parameter in stages.named_parameters()
        if not torch.allclose(parameter, expected[name], **{"rtol": 0, "atol": 0, **tolerances})
    ]


def all_names(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def checkpoints(folder: str, format: Any) -> list[str]:
    """Goes on from checkpoints of stages and of one process in either; returns what is not as in plain PyTorch."""
    whole, different = row(), list[str]()
    plain = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    train(whole, plain, range(2))
    begun = all_names(whole)
    losses = train(whole, plain, range(2, 4))
    near = {"rtol": 1e-4, "atol": 1e-6}

    def made(staged: bool) -> tuple[nn.Module, stronghold.AdamW]:
        model = in_stages(row(1)) if staged else stronghold.offload(row(1), device="cpu")
        return model, stronghold.AdamW(model.parameters(), lr=1e-2)

    for staged in (True, False):
        model = in_stages(row()) if staged else stronghold.offload(row(), device="cpu")
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2))
        path = Path(folder) / f"{format} {staged}"
        if staged or dist.get_rank() == 0:
            stronghold.checkpoint.save(path, model, optimizer, format=format)
        dist.barrier()
        for into_staged in (True, False):
            what = f"{format} {staged} {into_staged}"
            model, optimizer = made(into_staged)
            stronghold.checkpoint.load(path, model, optimizer, format=format)
            different += apart(model, begun, what, **near)
            if not torch.allclose(torch.stack(train(model, optimizer, range(2, 4))), torch.stack(losses), rtol=1e-5):
                different.append(f"{what}: losses")
    return different


def begins_alike(folder: str) -> list[str]:
    """Begins in several ways in which each process would have values of its own; returns what was not one model."""
    different = list[str]()
    rank = dist.get_rank()
    stages = in_stages(row(rank))
    whole = row(0)
    for layer, other in zip(whole[3:4], row(1)[3:4], strict=True):
        layer.load_state_dict(other.state_dict())
    different += apart(stages, all_names(whole), "another seed")
    x = batch()
    if not torch.allclose(stages.forward_backward(x, x), loss(whole(x), x).detach(), rtol=1e-5):
        different.append("another seed: loss")
    fresh = in_stages(row(rank), dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(fresh.parameters(), lr=0.0, weight_decay=0.0)
    fresh.forward_backward(x, x)
    optimizer.step()
    saved = Path(folder) / "bf16"
    stronghold.checkpoint.save(saved, fresh, optimizer)
    again = stronghold.offload(row(2), device="cpu")  # in fp32
    stronghold.checkpoint.load(saved, again, stronghold.AdamW(again.parameters()))
    different += apart(again, all_names(whole), "masters")

    given = row(5)
    values = all_names(given)
    for kept in NAMES:  # one name is enough
        path = Path(folder) / f"{kept} {rank}"
        path.mkdir()
        save_file({n: v for n, v in values.items() if n == kept or n not in NAMES}, path / "model.safetensors")
        for device in ("cpu", "meta"):
            different += apart(in_stages(row(0, device), weights=path), values, f"{kept} on {device}")

    def initialise(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    model = row(device="meta")
    torch.manual_seed(3)
    drawn = in_stages(model, weights=initialise)
    torch.manual_seed(3)
    first = nn.Embedding(11, 8).weight.detach()
    for name, parameter in drawn.named_parameters():
        if name in NAMES and not torch.equal(parameter, first):
            different.append(f"initialiser: {name}")
    return different


def other_settings() -> list[str]:
    """Takes steps with groups by the kind of module, and with others in one process; returns what was not refused."""
    different = list[str]()
    rank = dist.get_rank()

    def by_kind(model: nn.Module) -> stronghold.AdamW:
        decayed = [p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)]
        rest = [p for p in model.parameters() if all(p is not one for one in decayed)]
        return stronghold.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}])

    def without_head(model: nn.Module) -> stronghold.AdamW:
        return stronghold.AdamW([p for name, p in model.named_parameters() if name != NAMES[1]])

    def of_its_own(model: nn.Module) -> stronghold.AdamW:
        return stronghold.AdamW(model.parameters(), lr=1e-3 * (1 + rank))

    wanted = {
        by_kind: "got 0.weight in process 0 with group=1, weight_decay=0.0 and 4.weight in process 1 with group=0, "
        "weight_decay=0.5, which are one",
        without_head: "and 4.weight in process 1 with group=None, which are one",
        of_its_own: "got 0.weight in process 0 with lr=0.001 and 4.weight in process 1 with lr=0.002, which are one",
    }
    for make, rule in wanted.items():
        model = in_stages(row())
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        try:
            train(model, make(model), range(1))
            different.append(f"{make.__name__}: not refused")
        except ParallelError as error:
            if rule not in str(error):
                different.append(f"{make.__name__}: {error}")
        different += apart(model, before, make.__name__)
    whole, model = row(), in_stages(row())
    optimizers = [torch.optim.AdamW(whole.parameters()), stronghold.AdamW(model.parameters())]
    for step in range(3):
        for one, optimizer in zip((whole, model), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            train(one, optimizer, range(step, step + 1))
    return different + apart(model, all_names(whole), "with other rates", rtol=1e-4, atol=1e-6)


def outputs_of_evaluation() -> list[str]:
    """Evaluates; returns which outputs were kept."""
    outputs: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    class Noted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            outputs.append(weakref.ref(output))
            counts.append(sum(one() is not None for one in outputs))
            return output

    model = nn.Sequential(nn.Linear(8, 8), Noted(8, 8), nn.Linear(8, 8), Noted(8, 8))
    whole = copy.deepcopy(model)
    stages = stronghold.pipeline(model, loss=F.mse_loss, stages=2, micro_batches=4, balance="layers", device="cpu")
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    different = list[str]()
    for _ in range(2):
        outputs.clear()
        counts.clear()
        if not torch.allclose(stages.evaluate(x, x), F.mse_loss(whole(x), x).detach(), rtol=1e-5):
            different.append("loss")
        if left := sum(one() is not None for one in outputs):
            different.append(f"{left} outputs are left")
        if dist.get_rank() == 1 and max(counts[:4]) > 2:  # its own, and the one before
            different.append(f"as many outputs were there at once as {max(counts)}")
        outputs.clear()
        stages.forward_backward(x, x)
        if stages._schedules.keys() != {True}:
            different.append("what evaluation receives into is left")
    return different


def with_a_tied_head(folder: str) -> dict[str, list[str]]:
    return {
        "checkpoints": checkpoints(folder, "safetensors") + checkpoints(folder, "dcp"),
        "begins alike": begins_alike(folder),
        "other settings": other_settings(),
        "evaluation": outputs_of_evaluation(),
    }
