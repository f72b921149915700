"""What becomes of a training: its losses, its speed, and a line to read for each epoch."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch

WARMUP = 5  # batches whose time does not count


class Run:
    """One training, which begins now. ``quiet`` prints nothing: of several processes one is enough."""

    def __init__(self, options: argparse.Namespace, *, quiet: bool = False) -> None:
        self.options, self.quiet = options, quiet
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.tested_losses: list[float] = []
        self.accuracies: list[float] = []
        self._since = time.perf_counter()

    def learned(self, loss: float) -> None:
        """Notes the loss of a batch, and that it is done."""
        now = time.perf_counter()
        self.losses.append(loss)
        self.seconds.append(now - self._since)
        self._since = now

    def tested(self, loss: float, accuracy: float) -> None:
        """Notes what an epoch came to on the images that are not learned from, and prints it."""
        self.tested_losses.append(loss)
        self.accuracies.append(accuracy)
        if not self.quiet:
            print(
                f"epoch {len(self.accuracies):2}/{self.options.epochs}  loss {self.losses[-1]:.4f}  "
                f"tested: loss {loss:.4f}, {accuracy:.1%} right  {self.images_per_second:,.0f} images/s",
                flush=True,
            )
        self._since = time.perf_counter()

    @property
    def images_per_second(self) -> float:
        """Of the median batch."""
        return self.options.batch / statistics.median(self.seconds[WARMUP:] or self.seconds)

    def write(self, **more: Any) -> None:
        """Appends the run to the file that ``--out`` names, if it does, with what ``more`` there is to say of it."""
        if self.options.out is None or self.quiet:
            return
        record = {
            **more,
            "device": self.options.device,
            "epochs": self.options.epochs,
            "batch": self.options.batch,
            "width": self.options.width,
            "lr": self.options.lr,
            "images_per_second": self.images_per_second,
            "losses": self.losses,
            "tested_losses": self.tested_losses,
            "accuracies": self.accuracies,
            "date": time.strftime("%Y-%m-%d"),
            "cores": os.cpu_count(),
            "versions": {"torch": torch.__version__},
        }
        with open(self.options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
