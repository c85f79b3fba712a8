"""Operations on a batch of images in which each image has its own parameters. Any device; nothing waits for the device.

Images are uint8 `[B, C, H, W]`, parameters `[B]` on the same device. The result is uint8 and equal to Pillow's, image by
image. Lookup tables and nearest-neighbour affine maps agree to the bit: Pillow's 16.16 fixed-point arithmetic is repeated
here. Blends agree with Pillow's float32 where the compiler does not fuse (x86-64); a fused multiply-add can differ by 1.
The geometry works on any dtype and on `[T, B, C, H, W]`, alike for all timesteps of a sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Border = Literal["fill", "replicate"]
LUMA = (19595.0, 38470.0, 7471.0)  # ITU-R 601-2 in units of 2^-16, as Pillow converts RGB to L


# --- geometry ---


def transform(
    x: Tensor,
    coefficients: Tensor,
    fill: float = 0,
    border: Border = "fill",
    mirror: Tensor | None = None,
) -> Tensor:
    """Output pixel (x, y) of `x` [..., B, C, H, W] is the input pixel that `coefficients` (see `fixed`) map it to.

    Beyond the image lies `fill`, or the nearest border pixel. `mirror` (bool [B]) first flips the input left to right.
    One gather does it all.
    """
    height, width = x.shape[-2:]
    columns, rows = _count(width, x.device), _count(height, x.device)[:, None]
    a, b, c = coefficients[..., None, None].unbind(2)  # each [B, 2, 1, 1]
    source = (a * columns + (b * rows + c)) >> 16  # [B, 2, H, W]: x, then y
    last = _constant((width - 1, height - 1), torch.int64, x.device)[:, None, None]
    inside = torch.minimum(source.clamp_min(0), last)
    column, row = inside.unbind(1)
    if mirror is not None:
        column = torch.where(mirror[:, None, None], width - 1 - column, column)
    index = (column + row * width).flatten(1)[:, None]
    out = x.flatten(-2).gather(-1, index.expand(*x.shape[:-2], -1)).view(x.shape)
    if border == "fill":
        out = torch.where((inside == source).all(1)[:, None], out, fill)
    return out


def fixed(matrix: Tensor) -> Tensor:
    """`matrix` [B, 2, 3] float64, output pixel to input pixel, as int64 [B, 2, 3] in units of 2^-16, for pixel centres."""
    offset = matrix[..., 2] + matrix[..., 0] * 0.5 + matrix[..., 1] * 0.5
    return (torch.stack([matrix[..., 0], matrix[..., 1], offset], -1) * 65536 + 0.5).floor().to(torch.int64)


def matrix(*entries: Tensor | float) -> Tensor:
    """The affine map (a, b, c, d, e, f), float64 [..., 2, 3]: x_in = a x + b y + c, y_in = d x + e y + f.

    As in Pillow, (0, 0) is the upper left corner: b shears rows to the left, d shears columns up, c and f move the image
    left and up by so many pixels.
    """
    values = torch.broadcast_tensors(*(torch.as_tensor(entry, dtype=torch.float64) for entry in entries))
    return torch.stack(values, -1).unflatten(-1, (2, 3))


def rotate_matrix(degrees: Tensor, height: int, width: int) -> Tensor:
    """Counter-clockwise about the image's centre."""
    angle = degrees.to(torch.float64) * (-math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    return centred(matrix(cos, sin, 0, -sin, cos, 0), height, width)


def centred(matrix: Tensor, height: int, width: int) -> Tensor:
    """`matrix` about the image's centre instead of its upper left corner."""
    x, y = width / 2, height / 2
    offset = matrix[..., 0] * -x + matrix[..., 1] * -y + matrix[..., 2]
    return torch.stack([matrix[..., 0], matrix[..., 1], offset + _constant((x, y), torch.float64, matrix.device)], -1)


def crop(
    x: Tensor, dy: Tensor, dx: Tensor, padding: int, border: Border = "fill", mirror: Tensor | None = None
) -> Tensor:
    """The window of the image's own size at row `dy`, column `dx` (0..2 padding) of the image padded on every side."""
    offset = torch.stack([dx, dy], 1)[:, :, None] * 65536 + (32768 - padding * 65536)
    still = _constant((65536, 0, 0, 65536), torch.int64, x.device).view(2, 2)
    return transform(x, torch.cat([still.expand(len(dx), 2, 2), offset], 2), 0, border, mirror)


def erase(x: Tensor, top: Tensor, left: Tensor, size: int | Tensor) -> Tensor:
    """Zero in the square of side `size` (a number or [B]) at (`top`, `left`), clipped at the image's borders."""
    rows = _count(x.shape[-2], x.device) - top[:, None]
    columns = _count(x.shape[-1], x.device) - left[:, None]
    side = size[:, None] if isinstance(size, Tensor) else size
    hole = ((rows >= 0) & (rows < side))[:, None, :, None] & ((columns >= 0) & (columns < side))[:, None, None, :]
    return x.masked_fill(hole, 0)


def cutout(x: Tensor, row: Tensor, column: Tensor, size: int) -> Tensor:
    """Zero in the square of side `size` whose centre is pixel (`row`, `column`), clipped at the borders.

    DeVries and Taylor 2017. After normalisation, zero is the mean pixel.
    """
    return erase(x, row - size // 2, column - size // 2, size)


# --- lookup tables ---


def lookup(x: Tensor, table: Tensor) -> Tensor:
    """`x` uint8 through `table` uint8 [B, C or 1, 256]. `x` may be int64 already, so that a batch is converted once."""
    values = x.flatten(2).to(torch.int64)
    return table.expand(-1, x.shape[1], -1).gather(2, values).view(x.shape)


def posterize_table(bits: Tensor) -> Tensor:
    """The table that keeps the upper `bits` (1..8): uint8 [B, 1, 256]."""
    return ((_levels(bits) >> (8 - bits)[:, None, None]) << (8 - bits)[:, None, None]).to(torch.uint8)


def solarize_table(threshold: Tensor) -> Tensor:
    """The table that inverts values from `threshold` (0..256, may be a fraction) up: uint8 [B, 1, 256]."""
    levels = _levels(threshold)
    return torch.where(levels < threshold[:, None, None], levels, 255 - levels).to(torch.uint8)


def autocontrast_table(x: Tensor) -> Tensor:
    """The table that stretches each channel's range to 0..255: uint8 [B, C, 256]. A channel of one value stays."""
    levels = _levels(x).to(torch.float64)
    low, high = (v[..., None].to(torch.float64) for v in torch.aminmax(x.flatten(2), dim=2))
    # A true division (255.0 / tensor would multiply by a reciprocal); infinite where the channel has one value.
    scale = torch.full_like(low, 255.0) / (high - low)
    stretched = (levels * scale + -low * scale).clamp(0, 255)
    return torch.where(high > low, stretched, levels).to(torch.uint8)


def equalize_table(x: Tensor) -> Tensor:
    """The table that flattens each channel's histogram: uint8 [B, C, 256]."""
    values = x.flatten(2).to(torch.int64)
    counts = torch.zeros(*x.shape[:2], 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, values, counts.new_ones(1).expand_as(values))
    last = counts.gather(2, values.amax(2, keepdim=True))  # pixels of the brightest value
    step = (values.shape[2] - last) // 255
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp_min(1)).clamp_max(255)
    return torch.where(step > 0, table, _levels(x)).to(torch.uint8)


# --- blends: between a degenerate image (factor 0) and the image (factor 1), and beyond ---


def blend(degenerate: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """degenerate + factor [B] * (x - degenerate), both float32 with whole values, cut to 0..255 and truncated to uint8.

    A product and a sum of their own, never a fused operation: the bits of Pillow, and the same on every device.
    """
    step = (x - degenerate) * factor.to(torch.float32)[:, None, None, None]
    return (degenerate + step).clamp_(0, 255).to(torch.uint8)


def grey(x: Tensor) -> Tensor:
    """Luma of float32 [B, 3 or 1, H, W] as whole float32 [B, 1, H, W]. Exact: every partial sum is under 2^24."""
    if x.shape[1] == 1:
        return x
    weights = _constant(LUMA, torch.float32, x.device)[:, None, None]
    return (((x * weights).sum(1, keepdim=True) + 32768.0) * 2.0**-16).floor_()


def mean_grey(luma: Tensor) -> Tensor:
    """The mean of `grey` [B, 1, 1, 1], rounded half up; in integers, so that no device sees another half."""
    pixels = luma.shape[2] * luma.shape[3]
    return ((2 * luma.sum((2, 3), keepdim=True, dtype=torch.int64) + pixels) // (2 * pixels)).to(torch.float32)


def smooth(x: Tensor) -> Tensor:
    """3x3 mean with weight 5 in the middle, rounded, of float32; the outermost pixels stay (Pillow's SMOOTH).

    A sum of whole numbers over 13 is never half-way, so the rounding has no ties.
    """
    if min(x.shape[-2:]) < 3:
        return x
    three = x[..., :-2] + x[..., 1:-1] + x[..., 2:]
    nine = three[..., :-2, :] + three[..., 1:-1, :] + three[..., 2:, :]
    out = x.clone()
    out[..., 1:-1, 1:-1] = ((nine + x[..., 1:-1, 1:-1] * 4 + 6.5) / 13).floor_()
    return out


# --- to numbers that a network takes ---


def normalise(x: Tensor, scale: float, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / scale - mean) / std by channel, in float32."""
    shift = _constant(tuple(m * scale for m in mean), torch.float32, x.device)[:, None, None]
    width = _constant(tuple(s * scale for s in std), torch.float32, x.device)[:, None, None]
    return (x.to(torch.float32) - shift) / width


# --- helpers ---


@functools.lru_cache(maxsize=256)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small constant, copied to the device once: each copy from the host would wait for the device."""
    return torch.tensor(values, dtype=dtype, device=device)


@functools.lru_cache(maxsize=256)
def _count(n: int, device: torch.device) -> Tensor:
    """0..n-1, made once; never written to."""
    return torch.arange(n, device=device)


def _levels(like: Tensor) -> Tensor:
    return _count(256, like.device)
