"""The network that a configuration describes, with its first weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from lbq import models
from lbq.batches.random import key
from lbq.config import Config

# what first weights are drawn by; where a mode is told of a function of init, it is not told what that calls
DRAWS = (Tensor.uniform_, Tensor.normal_, init.uniform_, init.normal_, init.kaiming_uniform_)


def stream_seed(seed: int, *purpose: object) -> int:
    """A seed of its own for each (seed, purpose...)."""
    return key(seed, *purpose) >> 1  # 63 bits: also as a signed number it is not negative


def build(config: Config) -> models.BurstNet:
    """The configured network with weights drawn from the configured seed; the caller's random state is untouched."""
    m = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, "weights"))
        return models.create(
            m.id,
            m.num_classes,
            m.timesteps,
            config.neuron,
            in_channels=m.in_channels,
            stem_stride=m.stem_stride,
            dropout=m.dropout,
            share_tail=m.share_tail,
        )


class _Undrawn(TorchFunctionMode):
    """Zeros where random numbers would be drawn."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWS:
            with torch.no_grad():
                return (args[0] if args else kwargs["tensor"]).zero_()
        return func(*args, **(kwargs or {}))


def outline(config: Config) -> models.BurstNet:
    """The same for what its modules say of themselves, without weights: to draw these takes long. (Tensors without memory, on
    PyTorch's device meta, would take a second for the first of them, and a network of a user's own may read what it makes.)"""
    with _Undrawn():
        return build(config)
