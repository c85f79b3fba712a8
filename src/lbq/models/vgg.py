"""VGG-11/13/16 with BatchNorm as burst networks: convolution, BatchNorm, neuron; max-pool on the neurons' outputs."""

from __future__ import annotations

from torch import Tensor, nn

from lbq.models.resnet import BurstNet, MakeNeuron, initialise
from lbq.models.time import fire, over_time

# convolutions in each of the five stages; their widths are 1, 2, 4, 8, 8 times the base
STAGES: dict[int, tuple[int, ...]] = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3)}


class ConvUnit(nn.Module):
    """sn(BN(conv(x))) over `[T, B, C, H, W]`, or over a static `[B, C, H, W]` that it shows at all `timesteps`.

    kernel: the side of the convolution's kernel, odd; 1 makes it a linear layer of each pixel.
    """

    def __init__(self, inputs: int, outputs: int, neuron: MakeNeuron, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.sn = neuron(outputs)

    def forward(self, x: Tensor, timesteps: int | None = None) -> Tensor:
        return fire(x, self.conv, self.bn, self.sn, timesteps=timesteps)


class VGG(BurstNet):
    """Five stages of 3x3 convolutions, each ended by a 2x2 max-pool; global average pool; one linear layer.

    Inputs of at least 32x32: five poolings halve the resolution five times.
    """

    def __init__(
        self,
        neuron: MakeNeuron,
        *,
        depth: int,
        width: int,
        num_classes: int,
        timesteps: int,
        in_channels: int,
    ) -> None:
        super().__init__()
        self.timesteps = timesteps
        inputs = in_channels
        self.stages = nn.ModuleList()
        for count, factor in zip(STAGES[depth], (1, 2, 4, 8, 8), strict=True):
            units = nn.ModuleList()
            for _ in range(count):
                units.append(ConvUnit(inputs, width * factor, neuron))
                inputs = width * factor
            self.stages.append(units)
        self.maxpool = nn.MaxPool2d(2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        initialise(self)

    def features(self, x: Tensor) -> Tensor:
        for units in self.stages:
            for unit in units.children():
                x = unit(x, self.timesteps)
            x = over_time(x, self.maxpool)
        return over_time(x, self.avgpool).flatten(2)
