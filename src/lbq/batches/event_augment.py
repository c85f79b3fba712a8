"""Augmentation of event frames `[T, B, 2, H, W]`, float or uint8: one choice per sample, the same at all its timesteps.

`EventAugment`'s defaults are the CIFAR10-DVS recipe released with Spikformer (Zhou et al., ICLR 2023): a left-right
flip with probability 1/2, then one of six with equal chance: nothing, horizontal shear up to 0.3 rad, horizontal or
vertical translation up to 5 pixels, rotation up to 30 degrees, or a square hole of 0.1 % to 11 % of the area.
Magnitudes are 31 evenly spaced values; translations are cut to whole pixels. Maps are about the centre and take the
nearest pixel; zeros come in. Rolling, by up to 5 pixels, is from Neuromorphic Data Augmentation (Li et al., ECCV 2022),
whose maps are gentler (rotation up to 15 degrees); name "roll" in `choices` to use it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lbq.batches import augment as ops
from lbq.batches.random import integers, uniform
from lbq.errors import nearest

BINS = 31
CHOICES = ("none", "shear", "translate_x", "translate_y", "rotate", "cutout", "roll")
SPIKFORMER = ("none", "shear", "translate_x", "translate_y", "rotate", "cutout")


def roll(x: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
    """Down by `dy` and right by `dx` whole pixels; what leaves on one side comes in on the other."""
    return ops.transform(x, ops.fixed(ops.translate_matrix(-dx, -dy)), border="wrap")


def cutout(x: Tensor, top: Tensor, left: Tensor, size: Tensor) -> Tensor:
    """Zero in a square of `size` pixels at (`top`, `left`), clipped at the borders; size 0 leaves the sample."""
    return ops.erase(x, top, left, size)


def shear_matrix(radians: Tensor, height: int, width: int) -> Tensor:
    return ops.centred(ops.shear_x_matrix(-torch.tan(radians.to(torch.float64))), height, width)


@dataclass(frozen=True)
class EventAugment:
    """A flip, then one of `choices` for each sample, or nothing from the epoch `plain_from` on. The numbers' source is this
    module's docstring."""

    flip: float = 0.5  # probability
    choices: tuple[str, ...] = SPIKFORMER
    shear: float = 0.3  # rad
    translate: float = 5.0  # pixels
    rotate: float = 30.0  # degrees
    roll: int = 5  # pixels
    cutout: tuple[float, float] = (0.001, 0.11)  # share of the area
    plain_from: float = math.inf

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError('choices: empty; ("none",) leaves every sample')
        for name in self.choices:
            if name not in CHOICES:
                raise ValueError(f"choices: unknown {name!r}{nearest(name, CHOICES)}")
        if len(set(self.choices)) < len(self.choices):
            raise ValueError(f"choices: {', '.join(self.choices)}: each may be named once")

    def __call__(self, x: Tensor, index: Tensor, seed: int, epoch: int) -> Tensor:
        """`x` [T, B, 2, H, W] and each sample's number in its dataset, int64 [B] on the same device."""
        height, width = x.shape[-2:]
        u = uniform(seed, "event", epoch, index, 6)
        if epoch >= self.plain_from:
            return torch.where((u[:, 0] < self.flip)[:, None, None, None], x.flip(-1), x)
        chosen = integers(u[:, 1], len(self.choices))
        coefficients = _coefficients(self, height, width, x.device)[chosen, integers(u[:, 2], BINS)]
        x = ops.transform(x, coefficients, mirror=u[:, 0] < self.flip)
        if "cutout" in self.choices:
            # float64: whole pixels must not depend on how a device rounds a square root
            low, high = (share * height * width for share in self.cutout)
            size = (low + (high - low) * u[:, 3].to(torch.float64)).sqrt().round().to(torch.int64)
            size = size.clamp(max=min(height, width))
            place = u[:, 4:6].to(torch.float64)  # the hole lies within the image
            top, left = ((place[:, i] * (side + 1 - size)).to(torch.int64) for i, side in enumerate((height, width)))
            x = cutout(x, top, left, torch.where(self._is("cutout", chosen), size, 0))
        if "roll" in self.choices:
            dy, dx = (integers(u[:, 4:6], 2 * self.roll + 1) - self.roll).unbind(1)
            rolled = self._is("roll", chosen)
            x = roll(x, torch.where(rolled, dy, 0), torch.where(rolled, dx, 0))
        return x

    def _is(self, name: str, chosen: Tensor) -> Tensor:
        return chosen == self.choices.index(name)


@functools.lru_cache(maxsize=64)
def _coefficients(recipe: EventAugment, height: int, width: int, device: torch.device) -> Tensor:
    """The map of each choice at each magnitude, int64 [choices, BINS, 2, 3]. Computed on the CPU for every device."""
    steps = (torch.arange(BINS, dtype=torch.float64) - BINS // 2) / (BINS // 2)
    zero = torch.zeros_like(steps)
    pixels = (steps * recipe.translate).trunc()
    matrices = {
        "shear": shear_matrix(steps * recipe.shear, height, width),
        "translate_x": ops.translate_matrix(-pixels, zero),
        "translate_y": ops.translate_matrix(zero, -pixels),
        "rotate": ops.rotate_matrix(steps * recipe.rotate, height, width),
    }
    still = ops.translate_matrix(zero, zero)
    return ops.fixed(torch.stack([matrices.get(name, still) for name in recipe.choices])).to(device)
