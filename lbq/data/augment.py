"""Batched, per-sample random augmentation on tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def random_shift(x: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Shift each image of `x` [B, C, H, W] by up to `pixels` in each direction; what comes in repeats the border."""
    if pixels == 0:
        return x
    batch, _, height, width = x.shape
    padded = F.pad(x, (pixels,) * 4, mode="replicate")
    dy, dx = torch.randint(0, 2 * pixels + 1, (2, batch), generator=generator).to(x.device)
    rows = dy[:, None] + torch.arange(height, device=x.device)
    columns = dx[:, None] + torch.arange(width, device=x.device)
    each = torch.arange(batch, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
