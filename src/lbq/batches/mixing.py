"""Mixup and CutMix: a batch mixed with itself in reverse order, and soft targets to match.

Mixup (Zhang et al. 2018) takes lambda * x + (1 - lambda) * partner. CutMix (Yun et al. 2019) puts a box of the partner
into x; its lambda is the share of x that is left. A batch has one lambda from Beta(alpha, alpha) and one decision, a
function of (seed, epoch, step). The host decides, so nothing waits for a device. In a run over several processes each
mixes its own part of the batch, all with the same lambda.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from lbq.batches.random import key


@dataclass(frozen=True)
class Mix:
    """What happens to one batch: `lam` is x's share; `box` is (top, bottom, left, right) for CutMix, None for mixup."""

    lam: float
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class Mixing:
    """How batches are mixed.

    `mixup` and `cutmix` are the alphas of their Beta, 0 for off. If both are on, a batch takes either with equal
    chance. A batch is mixed with probability `prob`, and never from the epoch `plain_from` on. `smoothing`
    spreads that share of every target over all classes.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    smoothing: float = 0.0
    classes: int = 10
    plain_from: float = math.inf

    def choose(self, height: int, width: int, seed: int, epoch: int, step: int) -> Mix:
        """What happens to the batch of this step."""
        draw = random.Random(key(seed, "mixing", epoch, step))
        mixed, switch = draw.random() < self.prob, draw.random()
        if not mixed or not (self.mixup or self.cutmix) or epoch >= self.plain_from:
            return Mix(1.0)
        cutting = bool(self.cutmix) and (not self.mixup or switch < 0.5)
        alpha = self.cutmix if cutting else self.mixup
        lam = draw.betavariate(alpha, alpha)
        if not cutting:
            return Mix(lam)
        half_height, half_width = (int(side * math.sqrt(1 - lam)) // 2 for side in (height, width))
        row, column = draw.randrange(height), draw.randrange(width)
        top, bottom = max(row - half_height, 0), min(row + half_height, height)
        left, right = max(column - half_width, 0), min(column + half_width, width)
        return Mix(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))

    def __call__(self, x: Tensor, y: Tensor, seed: int, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """`x` [B, C, H, W] or [T, B, C, H, W], floating; `y` int64 [B]. Returns x and soft targets [B, classes]."""
        mix = self.choose(x.shape[-2], x.shape[-1], seed, epoch, step)
        batch = x.dim() - 4
        if mix.box is not None:
            top, bottom, left, right = mix.box
            part = x[..., top:bottom, left:right].flip(batch)
            x = x.clone()
            x[..., top:bottom, left:right] = part
        elif mix.lam < 1:
            x = x * mix.lam + x.flip(batch) * (1 - mix.lam)
        target = self.targets(y, torch.promote_types(x.dtype, torch.float32))
        return x, target * mix.lam + target.flip(0) * (1 - mix.lam) if mix.lam < 1 else target

    def targets(self, y: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Labels [B] as smoothed one-hot [B, classes], unmixed."""
        base = self.smoothing / self.classes
        target = torch.full((len(y), self.classes), base, dtype=dtype, device=y.device)
        return target.scatter_(1, y[:, None], 1 - self.smoothing + base)
