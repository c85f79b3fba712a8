"""The loss of a classifier over time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lbq.config import TrainConfig


def classification_loss(logits: Tensor, targets: Tensor, settings: TrainConfig) -> Tensor:
    """Cross-entropy of the mean logits, or TET (Deng et al. 2022): cross-entropy at every timestep plus a pull to 1.

    logits: `[B, classes]`, for TET `[T, B, classes]`; targets: probabilities `[B, classes]`.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()  # soft targets would lose a thousandth in half precision
    targets = targets.to(logits.dtype)
    if settings.loss == "ce":
        return F.cross_entropy(logits, targets)
    every = F.cross_entropy(logits.flatten(0, 1), targets.repeat(logits.shape[0], 1))
    return (1 - settings.tet_weight) * every + settings.tet_weight * (logits - 1).square().mean()
