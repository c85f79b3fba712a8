"""Residual burst networks: BasicBlocks whose second neuron fires on BN(conv) + shortcut.

Parameter names follow the usual ResNet (`conv1`, `bn1`, `layer1.0.conv1`, `layer1.0.downsample.0`, `fc`), so ANN
weights in that naming load directly. Neurons are `sn1`, `layer1.0.sn1`, `layer1.0.sn2`, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from lbq.models.time import fire, over_time

MakeNeuron = Callable[[int], nn.Module]  # channels -> neuron


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """sn2(BN(conv2(sn1(BN(conv1(x))))) + shortcut(x)) over `[T, B, C, H, W]`; no neuron on the shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, neuron: MakeNeuron) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.sn1 = neuron(outputs)
        self.conv2 = conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.sn2 = neuron(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = fire(x, self.conv1, self.bn1, self.sn1)
        shortcut = x if self.downsample is None else over_time(x, self.downsample)
        return fire(out, self.conv2, self.bn2, self.sn2, residual=shortcut)


class BurstNet(nn.Module):
    """The base of all networks: `[B, C, H, W]` or `[T, B, C, H, W]` in, logits averaged over time out.

    For static images, time begins after the stem's BatchNorm. Event frames bring it.
    """

    timesteps: int
    fc: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.dropout: nn.Module = nn.Identity()  # before the classifier

    def features(self, x: Tensor) -> Tensor:
        """Scaled outputs `[T, B, F]`, the input of the last linear layer."""
        raise NotImplementedError

    def forward(self, x: Tensor, per_step: bool = False) -> Tensor:
        """Mean logits `[B, classes]`, or `[T, B, classes]` if `per_step` (for losses per timestep)."""
        logits = over_time(self.features(x), self.dropout, self.fc, spatial=1)
        return logits if per_step else logits.mean(0)


class ResNet(BurstNet):
    """stem -> stages of BasicBlocks -> global average pool -> fc.

    stem: `cifar` is one 3x3 convolution, `imagenet` a 7x7/2 convolution and a 3x3/2 max-pool on the neuron's output
        (max commutes with a positive step, so levels stay integers).
    hidden: width of a further spiking linear layer before the classifier (ResNet-19's published form b).
    stem_stride: 2 halves the resolution at once, for event frames at 128x128.
    """

    def __init__(
        self,
        neuron: MakeNeuron,
        *,
        blocks: Sequence[int],
        widths: Sequence[int],
        stem_width: int,
        stem: Literal["cifar", "imagenet"] = "cifar",
        stem_stride: int = 1,
        hidden: int | None = None,
        num_classes: int,
        timesteps: int,
        in_channels: int,
    ) -> None:
        super().__init__()
        self.timesteps = timesteps
        if stem == "cifar":
            self.conv1 = conv3x3(in_channels, stem_width, stem_stride)
            self.maxpool: nn.MaxPool2d | None = None
        else:
            self.conv1 = nn.Conv2d(in_channels, stem_width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(stem_width)
        self.sn1 = neuron(stem_width)

        self.stages = len(blocks)
        inputs = stem_width
        for stage, (depth, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            layers = []
            for i in range(depth):
                layers.append(BasicBlock(inputs, width, 2 if stage > 1 and i == 0 else 1, neuron))
                inputs = width
            self.add_module(f"layer{stage}", nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d(1)

        self.fc1: nn.Linear | None = None
        if hidden is not None:
            self.fc1 = nn.Linear(inputs, hidden)
            self.sn_fc1 = neuron(hidden)
        self.fc = nn.Linear(inputs if hidden is None else hidden, num_classes)
        initialise(self)

    def features(self, x: Tensor) -> Tensor:
        out = fire(x, self.conv1, self.bn1, self.sn1, timesteps=self.timesteps)
        if self.maxpool is not None:
            out = over_time(out, self.maxpool)
        for stage in range(1, self.stages + 1):
            out = getattr(self, f"layer{stage}")(out)
        features: Tensor = over_time(out, self.avgpool).flatten(2)
        if self.fc1 is not None:
            features = self.sn_fc1(over_time(features, self.fc1, spatial=1))
        return features


def initialise(net: nn.Module) -> None:
    """He's initialisation for convolutions. BatchNorm starts as the identity, and linear layers as in PyTorch."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
