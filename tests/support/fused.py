"""What tests of the fused kernels share: where they run, and their inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from lbq.kernels import reference
from lbq.neuron import SpikingNeuron

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = 0.37


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, device=DEVICE)


def channels_last(x: Tensor) -> Tensor:
    """`[T, B, C, H, W]` whose timesteps are channels_last."""
    return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])


def by_reference(x: Tensor, neuron: SpikingNeuron) -> Tensor:
    return reference.burst_sequence(x, neuron.constants(x), neuron.rule)[0]
