"""Augmentation of event frames: alike at all timesteps of a sample, and the recipe is its parts."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from lbq.batches import event_augment as events
from lbq.batches.event_augment import EventAugment
from lbq.batches.random import integers, uniform
from tests.support import single_ops as single


def test_event_shear_keeps_the_centre() -> None:
    x = torch.zeros(1, 2, 2, 21, 41)
    x[..., 20] = 1.0  # a vertical line through the middle
    angle = torch.tensor([0.3, -0.3])
    got = single.moved(x, events.shear_matrix(angle, 21, 41))
    for b in range(2):
        for row in range(21):
            column = got[0, b, 0, row].nonzero().item()
            assert column == pytest.approx(20 + math.tan(angle[b]) * (row - 10), abs=0.51)


def plain_event(one: Tensor, name: str, share: float) -> Tensor:
    """A recipe's choice for one sample [T, 1, 2, H, W] at `share` of its range, by Pillow, image by image."""
    image = pytest.importorskip("PIL.Image")
    height, pixels = one.shape[-2], int(share * 5)
    slope = math.tan(share * 0.3)
    maps = {
        "shear": (1, -slope, slope * height / 2, 0, 1, 0),
        "translate_x": (1, 0, -pixels, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, -pixels),
    }
    out = one.clone()
    for t, c in np.ndindex(len(one), 2):
        plane = image.fromarray(one[t, 0, c].byte().numpy())
        turned = plane.rotate(share * 30) if name == "rotate" else plane
        out[t, 0, c] = torch.from_numpy(np.array(single.affine(plane, maps[name], 0) if name in maps else turned))
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_event_recipe_is_its_parts(dtype: torch.dtype) -> None:
    x = single.frames(300, 2).to(dtype)
    index = torch.arange(300)
    got = EventAugment()(x, index, 9, 1)
    assert got.dtype == dtype
    u = uniform(9, "event", 1, index, 6)
    chosen, share = integers(u[:, 1], 6), (integers(u[:, 2], 31) - 15).double() / 15
    flipped = single.flip(x, u[:, 0] < 0.5)
    seen: Counter[str] = Counter()
    for b in range(300):
        name, now = events.SPIKFORMER[int(chosen[b])], got[:, b : b + 1]
        expected = plain_event(flipped[:, b : b + 1], name, share[b].item())
        if name == "cutout":
            changed = now != expected
            assert (now[changed] == 0).all()
            assert changed.any() or u[b, 3] < 0.2  # the smallest holes may cover no event
        else:
            assert torch.equal(now, expected), name
        seen[name] += 1
    assert min(seen[name] for name in events.SPIKFORMER) > 20


def test_plain_epochs_of_events_are_flipped_alone() -> None:
    x, index = single.frames(40), torch.arange(40)
    ends = EventAugment(plain_from=3)
    assert torch.equal(ends(x, index, 0, 2), EventAugment()(x, index, 0, 2))
    flipped = ends(x, index, 0, 3)
    assert torch.equal(flipped, single.flip(x, uniform(0, "event", 3, index, 6)[:, 0] < 0.5))
    assert 0 < (flipped != x).flatten(2).any(2).any(0).sum() < 40
    assert torch.equal(EventAugment(flip=0, plain_from=3)(x, index, 0, 3), x)


def test_event_holes_have_the_recipes_areas() -> None:
    chosen = integers(uniform(0, "event", 0, torch.arange(13_000), 6)[:, 1], 6)
    index = (chosen == events.SPIKFORMER.index("cutout")).nonzero()[:2000, 0]
    got = EventAugment(flip=0)(torch.ones(1, 2000, 1, 48, 48), index, 0, 0)
    holes = (got[0, :, 0] == 0).sum((1, 2)).double()
    sides = holes.sqrt()
    assert torch.equal(sides, sides.round())  # whole squares: inside the image
    share = holes / 48**2
    assert share.min() <= 0.004
    assert 0.10 < share.max() <= 0.115
    assert share.mean() == pytest.approx(0.0555, abs=0.004)
    covered = (got[0, :, 0] == 0).any(0)
    assert all(side.any() for side in (covered[0], covered[-1], covered[:, 0], covered[:, -1]))
