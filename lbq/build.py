"""The network that a configuration describes, with its first weights."""

from __future__ import annotations

import hashlib

import torch

from lbq import models
from lbq.config import Config


def stream_seed(seed: int, *purpose: object) -> int:
    """A seed of its own for each (seed, purpose...)."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


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
