"""A network of ReLUs whose forward each test writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Layers for all forwards below; BatchNorm has statistics of its own."""

    def __init__(self, forward: Forward, **replaced: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = forward
        self.conv, self.bn = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.act, self.act2, self.fc = nn.ReLU(), nn.ReLU(), nn.Linear(6, 4)
        self.pool, self.wide, self.norm = nn.AdaptiveAvgPool2d(1), nn.Linear(6 * 64, 4), nn.BatchNorm1d(4)
        for name, module in replaced.items():
            self.add_module(name, module)
        with torch.no_grad():
            for norm in (self.bn, self.bn2, self.norm):
                norm.running_mean.uniform_(-0.3, 0.3)  # type: ignore[union-attr]
                norm.running_var.uniform_(0.2, 2.0)  # type: ignore[union-attr]
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def head(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.pool(x).flatten(1))
