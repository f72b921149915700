"""ResNet-50 (He et al. 2015) and VGG-16 (Simonyan and Zisserman 2014) as rows of layers.

Both take images (batch, 3, height, width) and return scores (batch, 1000). ``width`` is the number of channels behind
the first convolution, 64 in the papers; all others follow it. Stages are cut between the children of the nn.Sequential.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 1000


def resnet50(width: int = 64) -> nn.Sequential:
    """Returns 18 layers: the stem, 16 bottlenecks and the head. 25,557,032 parameters at width 64."""
    stem = nn.Sequential(*_convolution(3, width, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
    layers: list[nn.Module] = [stem]
    channels = width
    for group, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width << group, stride=2 if group and not block else 1))
            channels = 4 * width << group
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return nn.Sequential(*layers, head)


def vgg16(width: int = 64) -> nn.Sequential:
    """Returns 16 layers: 13 convolutions and 3 linear ones. 138,357,544 parameters at width 64.

    The paper's dropout is left out: its random numbers would be others in each process, and losses not to be compared.
    """
    layers: list[nn.Module] = []
    channels = 3
    for block in ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8)):
        for factor in block:
            layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = factor * width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    features = 49 * channels
    for _ in range(2):
        layers += [nn.Linear(features, 64 * width), nn.ReLU(inplace=True)]
        features = 64 * width
    return nn.Sequential(*layers, nn.Linear(features, CLASSES))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut: (batch, channels, h, w) to (batch, 4 * width, h / stride, w / stride)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _convolution(channels: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
