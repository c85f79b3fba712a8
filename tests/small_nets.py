"""Small networks with statistics and unequal steps of their own, for the tests of deployment."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lbq import models
from lbq.deploy import deploy
from lbq.engine import Network
from lbq.neuron import BurstNeuron

MEAN, STD = (0.5, 0.4, 0.6), (0.25, 0.3, 0.2)


def normalised(x: np.ndarray[Any, Any]) -> Tensor:
    """uint8 [B, C, H, W] as training sees it, in float64."""
    channels = x.shape[1]
    mean, std = (np.array(v[:channels])[:, None, None] for v in (MEAN, STD))
    return torch.from_numpy((x / 255 - mean) / std)


def pixels(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def warmed(net: nn.Module, *shape: int, static: bool = True, seed: int = 0) -> nn.Module:
    """BatchNorm with statistics of its own and unequal steps; in evaluation mode and float64."""
    torch.manual_seed(seed)
    net.double().train()
    for i in range(3):
        x = pixels(6, *shape, seed=seed + i)
        net(normalised(x) if static else torch.from_numpy(x[None].repeat(2, 0) / 64))
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, BurstNeuron) and hasattr(module, "rho"):
                module.rho.add_(torch.randn(module.rho.shape) * 0.3)
    return net.eval()


def small(
    id: str = "resnet8w4", neuron: Any = "lbq", shape: tuple[int, int, int] = (3, 8, 8), **options: Any
) -> nn.Module:
    torch.manual_seed(0)
    options = {"timesteps": 2, "num_classes": 5, **options}
    return warmed(models.create(id, neuron=neuron, in_channels=shape[0], **options), *shape)


def deployed(
    id: str = "resnet8w4", neuron: Any = "lbq", shape: tuple[int, int, int] = (3, 8, 8), bits: int = 8, **options: Any
) -> Network:
    return deploy(small(id, neuron, shape, **options), shape, mean=MEAN[: shape[0]], std=STD[: shape[0]], bits=bits)
