"""The images, the network and the arguments, which training is one and the same with and without stages."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="times that all images are seen (10)")
    parser.add_argument("--batch", type=int, default=64, help="images per batch (64)")
    parser.add_argument("--width", type=int, default=32, help="channels behind the first convolution (32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (1e-3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the network computes (cpu)")
    parser.add_argument("--out", type=Path, help="a file to append the run to, as a JSON line")
    return parser


def digits() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Returns 1,437 digits to learn from and 360 to be tested on: images (1, 8, 8) of 0 to 1, and 0 to 9."""
    images, targets = load_digits(return_X_y=True)
    learned, tested, answers, expected = train_test_split(
        images, targets, test_size=360, random_state=0, stratify=targets
    )
    return TensorDataset(_images(learned), torch.tensor(answers)), (_images(tested), torch.tensor(expected))


def batches(learned: TensorDataset, size: int) -> DataLoader:
    """Returns the batches of each epoch, in the same random order in every process."""
    return DataLoader(learned, size, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))


def network(width: int) -> nn.Sequential:
    """Returns seven layers, with the same weights each time.

    GroupNorm, since BatchNorm would see micro-batches. Smooth throughout: a ReLU near zero, or a maximum of two that
    are equal to rounding, has one gradient or another, and from there two runs part.
    """
    torch.manual_seed(0)

    def convolution(channels: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.GELU())

    return nn.Sequential(
        convolution(1, width),
        convolution(width, width),
        nn.AvgPool2d(2),
        convolution(width, 2 * width),
        convolution(2 * width, 2 * width),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 8 * width),
        nn.GELU(),
        nn.Linear(8 * width, 8 * width),
        nn.GELU(),
        nn.Linear(8 * width, 10),
    )


def _images(pixels) -> Tensor:
    return torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
