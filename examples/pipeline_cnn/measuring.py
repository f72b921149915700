"""One model in stages and in one process: seconds per batch, and losses."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import stronghold

Record = dict[str, Any]


def take_core() -> int:
    """Gives this process a core of its own where there is one for each, and returns how many they have together."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    if len(cores) >= processes:
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
    return min(len(cores), processes)


class Comparison:
    """Measures one model, from the same weights on the same images each time. All processes call the same methods."""

    def __init__(self, name: str, options: argparse.Namespace, cores: int, progress: Progress) -> None:
        self.name, self.options, self.cores, self.progress = name, options, cores, progress
        self.stages = dist.get_world_size()
        self.alone: dict[int, Record] = {}
        """What one process made of a batch of so many images."""

    def run(self, batch: int, balance: str | list[int]) -> Record:
        """Returns what a partition made of a batch of so many images; exits where its losses are not one process's."""
        if batch not in self.alone:
            self.alone[batch] = self.in_one_process(batch)
        alone, found = self.alone[batch], self.in_stages(batch, balance)
        for ours, expected in zip(found["losses"], alone["losses"], strict=True):
            if not abs(ours - expected) <= 1e-5 * expected:
                raise SystemExit(f"error: {self.name} by {balance} has a loss of {ours}, one process has {expected}")
        seconds = statistics.median(found["batch_seconds"])
        ideal = statistics.median(alone["batch_seconds"]) / self.cores
        return {
            "model": self.name,
            "balance": balance,
            "stages": self.stages,
            "cores": self.cores,
            "batch": batch,
            "micro_batches": self.micro_batches(batch),
            "image": self.options.image,
            "width": self.options.width,
            "seconds": seconds,
            "ideal_seconds": ideal,
            "over_ideal": seconds / ideal - 1,
            "images_per_second": batch / seconds,
            **found,
            "date": time.strftime("%Y-%m-%d"),
            "machine": {"processor": processor(), "cores": os.cpu_count()},
            "versions": {"stronghold": stronghold.__version__, "torch": torch.__version__},
        }

    def micro_batches(self, batch: int) -> int:
        return min(batch, self.options.micro_batches)

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return getattr(models, self.name)(self.options.width)

    def images(self, batch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(batch)
        size = self.options.image
        images = torch.randn(batch, 3, size, size, generator=generator)
        return images, torch.randint(models.CLASSES, (batch,), generator=generator)

    def in_one_process(self, batch: int) -> Record:
        """Trains in the first process, while the others wait."""
        if dist.get_rank() > 0:
            return shared(None)
        model = stronghold.offload(self.model(), device="cpu", activations="keep")
        count = self.micro_batches(batch)

        def forward_backward(images: Tensor, targets: Tensor) -> float:
            total = 0.0
            for x, y in zip(images.chunk(count), targets.chunk(count), strict=True):
                loss = F.cross_entropy(model(x), y) / count
                loss.backward()
                total += loss.item()
            return total

        return shared(self.measure(model, forward_backward, batch, "one process"))

    def in_stages(self, batch: int, balance: str | list[int]) -> Record:
        """Trains in all processes, each of which has a stage."""
        model, micro_batches = self.model(), self.micro_batches(batch)
        staged = stronghold.pipeline(
            model,
            loss=F.cross_entropy,
            stages=self.stages,
            micro_batches=micro_batches,
            balance=equal_parameters(model, self.stages) if balance == "parameters" else balance,
            schedule="1F1B" if micro_batches >= self.stages else "GPipe",  # 1F1B wants one for each stage
            inputs=self.images(batch)[0],
            device="cpu",
            activations="keep",
        )
        layers: list[Any] = [None] * self.stages
        dist.all_gather_object(layers, stronghold.report(staged).layers)

        def forward_backward(images: Tensor, targets: Tensor) -> float:
            return staged.forward_backward(images, targets).item()

        measured = self.measure(staged, forward_backward, batch, f"layers {' '.join(map(str, layers))}")
        return {"layers": layers, **shared(measured)}

    def measure(
        self, model: nn.Module, forward_backward: Callable[[Tensor, Tensor], float], batch: int, what: str
    ) -> Record:
        """Trains on a batch again and again; returns seconds without the warm-up's, and all losses."""
        warmup, steps = self.options.warmup, self.options.steps
        task = self.progress.add_task(f"{self.name}, batch {batch}, {what}", total=warmup + steps)
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-4, threads=1)
        images, targets = self.images(batch)
        losses, seconds = [], []
        for _ in range(warmup + steps):
            begin = time.perf_counter()
            losses.append(forward_backward(images, targets))
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
            self.progress.advance(task)
        return {"losses": losses, "batch_seconds": seconds[warmup:]}


def shared(value: Any) -> Any:
    """Returns what the first process has."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def equal_parameters(model: nn.Sequential, stages: int) -> list[int]:
    """Returns the numbers of layers whose fullest stage has the fewest parameters, of all there are."""
    layers = [count for child in model if (count := sum(p.numel() for p in child.parameters()))]
    cuts = ([0, *inner, len(layers)] for inner in combinations(range(1, len(layers)), stages - 1))
    best = min(cuts, key=lambda cut: max(sum(layers[first:end]) for first, end in pairwise(cut)))
    return [end - first for first, end in pairwise(best)]


def processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())
