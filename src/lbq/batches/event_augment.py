"""Augmentation of event frames `[T, B, 2, H, W]`, float or uint8: one choice per sample, the same at all its timesteps.

`EventAugment` is the CIFAR10-DVS recipe released with Spikformer (Zhou et al., ICLR 2023): a left-right
flip with probability 1/2, then one of six with equal chance: nothing, horizontal shear up to 0.3 rad, horizontal or
vertical translation up to 5 pixels, rotation up to 30 degrees, or a square hole of 0.1 % to 11 % of the area.
Magnitudes are 31 evenly spaced values; translations are cut to whole pixels. Maps are about the centre and take the
nearest pixel; zeros come in.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lbq.batches import augment as ops
from lbq.batches.random import integers, uniform

MAGNITUDES = 31
SHEAR_RADIANS, TRANSLATE_PIXELS, ROTATE_DEGREES = 0.3, 5.0, 30.0  # at most
HOLE = (0.001, 0.11)  # share of the area
SPIKFORMER = ("none", "shear", "translate_x", "translate_y", "rotate", "cutout")


def shear_matrix(radians: Tensor, height: int, width: int) -> Tensor:
    return ops.centred(ops.matrix(1, -torch.tan(radians.to(torch.float64)), 0, 0, 1, 0), height, width)


@dataclass(frozen=True)
class EventAugment:
    """A flip, then one of `SPIKFORMER` for each sample. From the epoch `plain_from` on, the flip alone."""

    flip: float = 0.5  # probability
    plain_from: float = math.inf

    def __call__(self, x: Tensor, index: Tensor, seed: int, epoch: int) -> Tensor:
        """`x` [T, B, 2, H, W] and each sample's number in its dataset, int64 [B] on the same device."""
        height, width = x.shape[-2:]
        u = uniform(seed, "event", epoch, index, 6)
        if epoch >= self.plain_from:
            return torch.where((u[:, 0] < self.flip)[:, None, None, None], x.flip(-1), x)
        chosen = integers(u[:, 1], len(SPIKFORMER))
        coefficients = _coefficients(height, width, x.device)[chosen, integers(u[:, 2], MAGNITUDES)]
        x = ops.transform(x, coefficients, mirror=u[:, 0] < self.flip)
        # float64: whole pixels must not depend on how a device rounds a square root
        low, high = (share * height * width for share in HOLE)
        size = (low + (high - low) * u[:, 3].to(torch.float64)).sqrt().round().to(torch.int64)
        size = size.clamp(max=min(height, width))
        place = u[:, 4:6].to(torch.float64)  # the hole lies within the image
        top, left = ((place[:, i] * (side + 1 - size)).to(torch.int64) for i, side in enumerate((height, width)))
        return ops.erase(x, top, left, torch.where(chosen == SPIKFORMER.index("cutout"), size, 0))


@functools.lru_cache(maxsize=64)
def _coefficients(height: int, width: int, device: torch.device) -> Tensor:
    """The map of each choice at each magnitude, int64 [choices, MAGNITUDES, 2, 3]. Computed on the CPU for every device."""
    steps = (torch.arange(MAGNITUDES, dtype=torch.float64) - MAGNITUDES // 2) / (MAGNITUDES // 2)
    pixels = (steps * TRANSLATE_PIXELS).trunc()
    matrices = {
        "shear": shear_matrix(steps * SHEAR_RADIANS, height, width),
        "translate_x": ops.matrix(1, 0, -pixels, 0, 1, 0),
        "translate_y": ops.matrix(1, 0, 0, 0, 1, -pixels),
        "rotate": ops.rotate_matrix(steps * ROTATE_DEGREES, height, width),
    }
    still = ops.matrix(1, 0, torch.zeros_like(steps), 0, 1, 0)
    return ops.fixed(torch.stack([matrices.get(name, still) for name in SPIKFORMER])).to(device)
