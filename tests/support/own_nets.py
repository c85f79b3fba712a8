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
from tests.support.small_nets import Functional, mean_logits, pixels

SHAPE = (1, 8, 8)
Forward = Callable[[Any, Tensor], Tensor]


def rest(m: Any, x: Tensor) -> Tensor:
    """From `[T, B, C, H, W]` before the second convolution to logits."""
    return mean_logits(m, m.sn2(over_time(x, m.conv2, m.bn2)))


def features(m: Any, x: Tensor) -> Tensor:
    """Levels of the second neuron, `[T, B, 4, 8, 8]`."""
    out: Tensor = m.sn2(over_time(m.sn(over_time(x, m.conv, m.bn, timesteps=m.timesteps)), m.conv2, m.bn2))
    return out


def plain(m: Any, x: Tensor) -> Tensor:
    return rest(m, m.sn(over_time(x, m.conv, m.bn, timesteps=m.timesteps)))


class Own(Functional):
    """Two convolutions and a linear layer; `replaced` are other modules under some of their names."""

    def __init__(self, function: Forward = plain, timesteps: int = 3, **replaced: nn.Module) -> None:
        super().__init__(function, timesteps)
        torch.manual_seed(0)
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


def made(net: nn.Module, **options: Any) -> Network:
    return deploy(net, SHAPE, **{"mean": [0.5], "std": [0.25], "bits": 16, **options})


def close(net: nn.Module, network: Network, x: np.ndarray[Any, Any] | None = None) -> None:
    """Logits on integers, 16-bit weights, near PyTorch's in float64; other networks here differ by far more."""
    x = pixels(4, *SHAPE) if x is None else x
    logits_close(net, network, x, (x / 255 - 0.5) / 0.25)


def logits_close(net: nn.Module, network: Network, x: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    """Logits on integers near those that PyTorch gives in float64 for the values that the integers x stand for."""
    with torch.no_grad():
        logits = net.double()(torch.from_numpy(values).double()).numpy()
    output = network.run(x)
    np.testing.assert_allclose(output.logits * output.scale, logits, atol=0.02 * np.ptp(logits))


def frames_close(net: Own) -> None:
    """Event frames give the network's own logits on integers."""
    network = deploy(net, SHAPE, static=False, bits=16)
    x = np.random.default_rng(0).integers(0, 4, (3, 2, *SHAPE), np.uint8)
    logits_close(net, network, x, x)
