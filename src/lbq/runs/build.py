"""The network that a configuration describes, with its initial weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from lbq import models
from lbq.batches.random import key
from lbq.config import Config

# Functions that draw initial weights. A TorchFunctionMode sees `init.normal_` alone, not the call within it.
DRAWS = (Tensor.uniform_, Tensor.normal_, init.uniform_, init.normal_, init.kaiming_uniform_)


def stream_seed(seed: int, *purpose: object) -> int:
    """An independent seed for each (seed, purpose...)."""
    return key(seed, *purpose) >> 1  # 63 bits, so that it is not negative as a signed number


def build(config: Config) -> models.BurstNet:
    """The configured network with weights drawn from the configured seed; the caller's random state is untouched."""
    m = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, "weights"))
        return models.create(
            m.id,
            m.num_classes,
            m.timesteps,
            config.neuron_options,
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
    """The configured network with zeros for weights, to ask its modules: drawing weights takes long.

    PyTorch's meta device takes a second for its first tensor, and a user's own network may read the tensors that it makes.
    """
    with _Undrawn():
        return build(config)
