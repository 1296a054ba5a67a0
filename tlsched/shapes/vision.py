"""Definitions of VGG-16 and ResNet-50."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

# Simonyan and Zisserman, arXiv 1409.1556, table 1, column D: channels of the 3x3 convolutions of
# each group, which a 2x2 max-pool ends; then the widths of the fully connected layers.
VGG16_GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
VGG16_FULLY_CONNECTED = (4096, 4096, 1000)
# He et al., arXiv 1512.03385, table 1: blocks of each stage and their inner width; a block's output
# is four times as wide.
RESNET50_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
RESNET_EXPANSION = 4
IMAGE_SHAPE = (3, 224, 224)
CLASSES = 1000


class VGG16(nn.Module):
    """VGG-16, configuration D."""

    def __init__(self) -> None:
        super().__init__()
        channels, side = IMAGE_SHAPE[:2]
        number = 0
        for group in VGG16_GROUPS:
            for width in group:
                number += 1
                self.add_module(f"conv{number}", nn.Conv2d(channels, width, 3, padding=1))
                channels = width
            self.add_module(f"pool{number}", nn.MaxPool2d(2))
            side //= 2
        self.add_module("flatten", nn.Flatten())
        widths = (channels * side * side, *VGG16_FULLY_CONNECTED)
        for number, (before, after) in enumerate(pairwise(widths), start=1):
            self.add_module(f"fc{number}", nn.Linear(before, after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images; activations have no parameters and no FLOPs worth counting."""
        for layer in self.children():
            x = layer(x)
        return x


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution beside a shortcut, which is projected where shapes differ."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * RESNET_EXPANSION
        self.conv1 = _normed(channels, width, 1)
        self.conv2 = _normed(width, width, 3, stride)
        self.conv3 = _normed(width, out, 1)
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else _normed(channels, out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        inner = self.conv2(self.conv1(x).relu()).relu()
        return torch.relu(self.conv3(inner) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50; a stage's stride is its first 3x3 convolution's, as implementations have it."""

    def __init__(self) -> None:
        super().__init__()
        channels = RESNET50_STAGES[0][1]
        self.stem = _normed(IMAGE_SHAPE[0], channels, 7, 2)
        blocks: list[nn.Module] = [nn.MaxPool2d(3, 2, 1)]
        for stage, (count, width) in enumerate(RESNET50_STAGES):
            for number in range(count):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = width * RESNET_EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images."""
        features = self.blocks(self.stem(x).relu())
        logits: torch.Tensor = self.fc(features.mean((2, 3)))
        return logits


def _normed(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width))
