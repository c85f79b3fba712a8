"""A network as users write it, for the tests of its deployment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lbq.deploy import deploy
from lbq.engine import Network
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.small_nets import pixels

SHAPE = (1, 8, 8)
Forward = Callable[[Any, Tensor], Tensor]


def rest(m: Any, x: Tensor) -> Tensor:
    """From `[T, B, C, H, W]` before the second convolution to logits."""
    x = m.sn2(over_time(x, m.conv2, m.bn2))
    return over_time(over_time(x, m.pool).flatten(2), m.fc, spatial=1).mean(0)


def plain(m: Any, x: Tensor) -> Tensor:
    return rest(m, m.sn(over_time(x, m.conv, m.bn, timesteps=m.timesteps)))


class Own(nn.Module):
    """Two convolutions and a linear layer; `replaced` are other modules under some of their names."""

    def __init__(self, function: Forward = plain, timesteps: int = 3, **replaced: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.timesteps = function, timesteps
        self.conv, self.bn, self.sn = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), BurstNeuron(step=0.3)
        self.conv2, self.bn2, self.sn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), BurstNeuron(step=0.2)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)
        with torch.no_grad():
            for norm in (self.bn, self.bn2):
                norm.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr]
                norm.running_var.uniform_(0.1, 0.3)  # type: ignore[union-attr]
        for name, module in replaced.items():
            module.load_state_dict(self.get_submodule(name).state_dict())
            self.add_module(name, module)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def made(net: nn.Module, **options: Any) -> Network:
    return deploy(net, SHAPE, **{"mean": [0.5], "std": [0.25], "bits": 16, **options})


def close(net: nn.Module, network: Network, x: np.ndarray[Any, Any] | None = None) -> None:
    """Logits on integers, 16-bit weights, near PyTorch's in float64; other networks here differ by far more."""
    x = pixels(4, *SHAPE) if x is None else x
    with torch.no_grad():
        logits = net.double()((torch.from_numpy(x).double() / 255 - 0.5) / 0.25).numpy()
    found = network.run(x)
    np.testing.assert_allclose(found.logits * found.scale, logits, atol=0.02 * np.ptp(logits))


def frames_close(net: Own) -> None:
    """Event frames give the network's own logits on integers."""
    network = deploy(net, SHAPE, static=False, bits=16)
    x = np.random.default_rng(0).integers(0, 4, (3, 2, *SHAPE), np.uint8)
    with torch.no_grad():
        logits = net.double()(torch.from_numpy(x).double()).numpy()
    found = network.run(x)
    np.testing.assert_allclose(found.logits * found.scale, logits, atol=0.02 * np.ptp(logits))
