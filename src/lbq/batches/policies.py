"""AutoAugment's policies, and `ImageAugment`, which does everything to a training image.

The sub-policies and ranges are those of Cubuk et al., "AutoAugment: Learning Augmentation Strategies from Data", CVPR
2019 (appendix tables for CIFAR-10 and ImageNet; range table of the search space). Where the paper leaves a choice, ours
is that of the common PyTorch ports. Magnitude m of 0..9 is the m-th of ten evenly spaced values. A signed operation
takes either sign with equal chance (rotation too; one port turns one way only). Translations are a share of the image's
side, up to 150/331. Pixels from outside are grey, 128. All maps take the nearest pixel (one port shears with bicubic
interpolation). CIFAR-10's sub-policy 16, counted from 0, ends with probability 0.6; one port has 0.8.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lbq.batches import augment as ops
from lbq.batches.random import integers, uniform

Step = tuple[str, float, int]  # operation, probability, magnitude 0..9 (0 where it has none)

CIFAR10: tuple[tuple[Step, Step], ...] = (
    (("invert", 0.1, 7), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 3)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
    (("color", 0.9, 9), ("equalize", 0.6, 6)),
    (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 8), ("invert", 0.1, 3)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 1)),
)

IMAGENET: tuple[tuple[Step, Step], ...] = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 4), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 7)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 2)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 8), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 2)),
    (("equalize", 0.0, 7), ("equalize", 0.8, 8)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 9)),
    (("color", 0.4, 0), ("equalize", 0.6, 3)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
)

POLICIES = {"cifar10": CIFAR10, "imagenet": IMAGENET}
DRAWS = 5  # random numbers for one image's policy: the sub-policy, whether each step happens, the sign of each

POINT = ("posterize", "solarize", "invert", "autocontrast", "equalize")
GEOMETRY = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
BLEND = ("brightness", "contrast", "color", "sharpness")
KINDS = ("none", *POINT, *GEOMETRY, *BLEND)


def magnitude(name: str, level: int, sign: int, height: int, width: int) -> float:
    """What the operation takes at `level` 0..9 with `sign` -1 or 1: its unit is the operation's in `augment`."""
    share = level / 9
    if name in BLEND:
        return 1 + sign * 0.9 * share
    amounts = {
        "shear_x": sign * 0.3 * share,
        "shear_y": sign * 0.3 * share,
        "translate_x": sign * 150 / 331 * share * width,
        "translate_y": sign * 150 / 331 * share * height,
        "rotate": sign * 30 * share,
        "posterize": round(8 - 4 * share),
        "solarize": 256 - 256 * share,
    }
    return amounts.get(name, 0.0)


class _Table(NamedTuple):
    """Operations by row; row 0 changes nothing. A row has parameters for all three families, of which one at most acts."""

    kind: Tensor  # int64 [R], position in KINDS
    table: Tensor  # uint8 [R, 1, 256]
    coefficients: Tensor  # int64 [R, 2, 3]
    factor: Tensor  # float32 [R]

    def of(self, rows: Tensor) -> _Table:
        return _Table(*(column[rows] for column in self))


@functools.lru_cache(maxsize=64)
def _table(policy: str, height: int, width: int, device: torch.device) -> tuple[_Table, Tensor]:
    """Row 1 + 4 * sub-policy + 2 * step + sign, and the steps' probabilities, float32 [sub-policies, 2].

    Computed on the CPU: every device then uses the same parameters.
    """
    steps = [(name, level, sign) for sub in POLICIES[policy] for name, _, level in sub for sign in (-1, 1)]
    named = [("none", 0.0), *((name, magnitude(name, level, sign, height, width)) for name, level, sign in steps)]
    table = _Table(
        torch.tensor([KINDS.index(name) for name, _ in named]),
        torch.cat([_fixed_table(name, torch.tensor([value], dtype=torch.float64)) for name, value in named]),
        ops.fixed(
            torch.stack([_map(name, torch.tensor(value, dtype=torch.float64), height, width) for name, value in named])
        ),
        torch.tensor([value if name in BLEND else 1.0 for name, value in named], dtype=torch.float32),
    )
    probability = torch.tensor([[p for _, p, _ in sub] for sub in POLICIES[policy]], dtype=torch.float32)
    return _Table(*(column.to(device) for column in table)), probability.to(device)


def _fixed_table(name: str, amount: Tensor) -> Tensor:
    """The lookup table [1, 1, 256] of an operation that does not look at the image; no change for the others."""
    if name in ("solarize", "invert"):
        return ops.solarize_table(amount if name == "solarize" else torch.zeros(1))
    return ops.posterize_table(amount.long() if name == "posterize" else torch.tensor([8]))


def _map(name: str, amount: Tensor, height: int, width: int) -> Tensor:
    """The affine map [2, 3] of an operation; the identity if it has none."""
    if name == "rotate":
        return ops.rotate_matrix(amount, height, width)
    entries: list[Tensor | float] = [1, 0, 0, 0, 1, 0]
    place = {"shear_x": 1, "translate_x": 2, "shear_y": 3, "translate_y": 5}.get(name)
    if place is not None:
        entries[place] = amount
    return ops.matrix(*entries)


def autoaugment(x: Tensor, policy: str, u: Tensor, compact: bool | None = None) -> Tensor:
    """One sub-policy for each image of `x` (uint8 [B, 1 or 3, H, W]), chosen by `u` [B, 5] in [0, 1).

    Each of the two steps is one lookup, one gather and one blend over the whole batch. They leave images of another family
    as they are: no branch depends on the data, so nothing waits for a GPU. `compact` instead picks the images of a family,
    which is faster on a CPU (the default there) and gives the same result.
    """
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] not in (1, 3):
        raise ValueError(f"x: a policy takes uint8 [B, 1 or 3, H, W], not {x.dtype} {[*x.shape]}")
    table, probability = _table(policy, x.shape[2], x.shape[3], x.device)
    chosen = integers(u[:, 0], len(POLICIES[policy]))
    rows = 1 + 4 * chosen[:, None] + torch.arange(0, 4, 2, device=x.device) + integers(u[:, 3:5], 2)
    rows = torch.where(u[:, 1:3] < probability[chosen], rows, 0)
    compact = x.device.type == "cpu" if compact is None else compact
    for row in rows.unbind(1):
        batch = table.of(row)
        for family, names in ((_point, POINT), (_geometry, GEOMETRY), (_blend, BLEND)):
            if not compact:
                x = family(x, batch)
                continue
            first = KINDS.index(names[0])
            some = ((batch.kind >= first) & (batch.kind < first + len(names))).nonzero()[:, 0]
            if len(some):
                x = x.index_copy(0, some, family(x[some], batch.of(some)))
    return x


def _point(x: Tensor, batch: _Table) -> Tensor:
    values, kind = x.to(torch.int64), batch.kind[:, None, None]
    table = torch.where(kind == KINDS.index("autocontrast"), ops.autocontrast_table(values), batch.table)
    return ops.lookup(values, torch.where(kind == KINDS.index("equalize"), ops.equalize_table(values), table))


def _geometry(x: Tensor, batch: _Table) -> Tensor:
    return ops.transform(x, batch.coefficients, fill=128)


def _blend(x: Tensor, batch: _Table) -> Tensor:
    image, kind = x.to(torch.float32), batch.kind[:, None, None, None]
    luma = ops.grey(image)
    degenerate = torch.where(kind == KINDS.index("contrast"), ops.mean_grey(luma), 0.0)
    degenerate = torch.where(kind == KINDS.index("color"), luma, degenerate)
    degenerate = torch.where(kind == KINDS.index("sharpness"), ops.smooth(image), degenerate)
    return ops.blend(degenerate, image, batch.factor)


@dataclass(frozen=True)
class ImageAugment:
    """Crop, flip, policy, normalisation and Cutout, in this order. A sample's result does not depend on its batch.

    `crop_padding`: the image is padded by so many pixels and cropped back at random (0: off). Padding is zeros or, if
    `border` is "replicate", the image's own border: a random shift. `policy`: a name in `POLICIES`, or None.
    `cutout`: side of the square, 0 for none. From the epoch `plain_from` on there is neither policy nor Cutout.
    `mean`, `std`: by channel, of x / `scale`.
    """

    crop_padding: int = 0
    flip: bool = False
    policy: str | None = None
    cutout: int = 0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 255.0
    border: ops.Border = "fill"
    plain_from: float = math.inf

    def __call__(self, x: Tensor, index: Tensor, seed: int, epoch: int) -> Tensor:
        """`x` uint8 [B, C, H, W] and each image's number in its dataset, int64 [B] on the same device."""
        # Draws have fixed places: switching one operation on leaves the others' choices as they were.
        u = uniform(seed, "image", epoch, index, 5 + DRAWS)
        mirror = u[:, 2] < 0.5 if self.flip else None
        if self.crop_padding or mirror is not None:
            dy, dx = integers(u[:, :2], 2 * self.crop_padding + 1).unbind(1)
            x = ops.crop(x, dy, dx, self.crop_padding, self.border, mirror)
        plain = epoch >= self.plain_from
        if self.policy is not None and not plain:
            x = autoaugment(x, self.policy, u[:, 5:])
        x = self.normalised(x)
        if self.cutout and not plain:
            x = ops.cutout(x, integers(u[:, 3], x.shape[2]), integers(u[:, 4], x.shape[3]), self.cutout)
        return x

    def normalised(self, x: Tensor) -> Tensor:
        """`x` as it is tested: normalised, nothing else."""
        return ops.normalise(x, self.scale, self.mean, self.std)
