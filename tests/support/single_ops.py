"""Each operation of augmentation by itself, made of the library's tables, matrices and blends, to compare with Pillow's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lbq.batches import augment as ops


def moved(x: Tensor, matrix: Tensor, fill: int = 0) -> Tensor:
    """Each image of `x` by its affine map of `matrix` [B, 2, 3]; `fill` comes in."""
    return ops.transform(x, ops.fixed(matrix), fill)


def flip(x: Tensor, mask: Tensor) -> Tensor:
    """Left to right where `mask` holds."""
    return torch.where(mask[:, None, None, None], x.flip(-1), x)


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper `bits` (1..8) of each value."""
    return ops.lookup(x, ops.posterize_table(bits))


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert values from `threshold` (0..256) up."""
    return ops.lookup(x, ops.solarize_table(threshold))


def autocontrast(x: Tensor) -> Tensor:
    """Stretch each channel's range to 0..255."""
    return ops.lookup(x, ops.autocontrast_table(x))


def equalize(x: Tensor) -> Tensor:
    """Flatten each channel's histogram."""
    return ops.lookup(x, ops.equalize_table(x))


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Towards (or away from) black."""
    image = x.to(torch.float32)
    return ops.blend(torch.zeros_like(image), image, factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Towards the image's mean grey."""
    image = x.to(torch.float32)
    return ops.blend(ops.mean_grey(ops.grey(image)), image, factor)


def color(x: Tensor, factor: Tensor) -> Tensor:
    """Towards the grey image."""
    image = x.to(torch.float32)
    return ops.blend(ops.grey(image), image, factor)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """Towards the smoothed image."""
    image = x.to(torch.float32)
    return ops.blend(ops.smooth(image), image, factor)


def frames(batch: int = 5, steps: int = 3, height: int = 24, width: int = 20, seed: int = 0) -> Tensor:
    """Sparse event counts, different at every timestep."""
    x = torch.randint(0, 12, (steps, batch, 2, height, width), generator=torch.Generator().manual_seed(seed))
    return (x - 6).clamp_min(0).to(torch.uint8)


# --- of Pillow, and of chance ---


def affine(image: Any, matrix: tuple[float, ...], fill: int) -> Any:
    module = pytest.importorskip("PIL.Image")
    colour = fill if image.mode == "L" else (fill,) * 3
    return image.transform(image.size, module.Transform.AFFINE, matrix, fillcolor=colour)


def chi_square(counts: Tensor) -> float:
    """Deviations from an even spread, in standard deviations of the chi-square distribution."""
    expected = counts.sum().item() / counts.numel()
    freedom = counts.numel() - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)
