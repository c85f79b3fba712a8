"""Augmentation of event frames: alike at all timesteps of a sample, and the recipe is its parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

from lbq.batches import event_augment as events
from lbq.batches.event_augment import EventAugment
from lbq.batches.random import integers, uniform
from tests.support import single_ops as single

quick = settings(max_examples=25, deadline=None, derandomize=True)


def per_image(x: Tensor, function: Callable[[Any, int], Any]) -> Tensor:
    """Pillow's result for each plane of each timestep, with the sample's position."""
    image = pytest.importorskip("PIL.Image")
    out = x.clone()
    for t, b, c in np.ndindex(*x.shape[:3]):
        out[t, b, c] = torch.from_numpy(np.array(function(image.fromarray(x[t, b, c].numpy()), b)))
    return out


def test_event_operations_treat_all_timesteps_of_a_sample_alike() -> None:
    x = single.frames()
    mask = torch.tensor([True, False, True, True, False])
    assert torch.equal(single.flip_frames(x, mask), torch.where(mask[:, None, None, None], x.flip(-1), x))
    dy, dx = torch.tensor([0, 3, -2, 30, -1]), torch.tensor([1, -4, 0, 2, -25])
    rolled = events.roll(x, dy, dx)
    moved = single.translate_frames(x, dy, dx)
    for b in range(5):
        whole = torch.roll(x[:, b], (int(dy[b]), int(dx[b])), (-2, -1))
        assert torch.equal(rolled[:, b], whole)
    assert torch.equal(moved, per_image(x, lambda im, b: single.affine(im, (1, 0, -int(dx[b]), 0, 1, -int(dy[b])), 0)))
    degrees = torch.tensor([0.0, 15.0, -30.0, 29.0, -7.5])
    assert torch.equal(single.rotate_frames(x, degrees), per_image(x, lambda im, b: im.rotate(float(degrees[b]))))
    got = events.cutout(
        x, torch.tensor([0, 2, 20, 3, 5]), torch.tensor([1, 3, 18, 0, 5]), torch.tensor([4, 1, 9, 0, 2])
    )
    expected = x.clone()
    expected[:, 0, :, 0:4, 1:5] = 0
    expected[:, 1, :, 2, 3] = 0
    expected[:, 2, :, 20:, 18:] = 0
    expected[:, 4, :, 5:7, 5:7] = 0
    assert torch.equal(got, expected)


def test_event_shear_keeps_the_centre() -> None:
    x = torch.zeros(1, 2, 2, 21, 41)
    x[..., 20] = 1.0  # a vertical line through the middle
    angle = torch.tensor([0.3, -0.3])
    got = single.shear_frames(x, angle)
    for b in range(2):
        for row in range(21):
            column = got[0, b, 0, row].nonzero().item()
            assert column == pytest.approx(20 + math.tan(angle[b]) * (row - 10), abs=0.51)


def plain_event(one: Tensor, name: str, share: Tensor, place: Tensor) -> Tensor:
    """A recipe's choice for one sample [T, 1, 2, H, W] at `share` of its range, or rolled by `place`."""
    pixels, zero = (share * 5).trunc(), torch.zeros_like(share)
    match name:
        case "shear":
            return single.shear_frames(one, share * 0.3)
        case "translate_x":
            return single.translate_frames(one, zero, pixels)
        case "translate_y":
            return single.translate_frames(one, pixels, zero)
        case "rotate":
            return single.rotate_frames(one, share * 30)
        case "roll":
            return events.roll(one, place[:1], place[1:])
    return one


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_event_recipe_is_its_parts(dtype: torch.dtype) -> None:
    x = single.frames(300, 2).to(dtype)
    index = torch.arange(300)
    got = EventAugment(choices=events.CHOICES)(x, index, 9, 1)
    assert got.dtype == dtype
    u = uniform(9, "event", 1, index, 6)
    chosen, share = integers(u[:, 1], 7), (integers(u[:, 2], 31) - 15).double() / 15
    place = integers(u[:, 4:6], 11) - 5
    flipped = single.flip_frames(x, u[:, 0] < 0.5)
    seen: Counter[str] = Counter()
    for b in range(300):
        name, now = events.CHOICES[int(chosen[b])], got[:, b : b + 1]
        expected = plain_event(flipped[:, b : b + 1], name, share[b : b + 1], place[b])
        if name == "cutout":
            changed = now != expected
            assert (now[changed] == 0).all()
            assert changed.any() or u[b, 3] < 0.2  # the smallest holes may cover no event
        else:
            assert torch.equal(now, expected), name
        seen[name] += 1
    assert min(seen[name] for name in events.CHOICES) > 20


def test_plain_epochs_of_events_are_flipped_alone() -> None:
    x, index = single.frames(40), torch.arange(40)
    ends = EventAugment(plain_from=3)
    assert torch.equal(ends(x, index, 0, 2), EventAugment()(x, index, 0, 2))
    found = ends(x, index, 0, 3)
    assert torch.equal(found, EventAugment(choices=("none",))(x, index, 0, 3))
    assert 0 < (found != x).flatten(2).any(2).any(0).sum() < 40
    assert torch.equal(EventAugment(flip=0, plain_from=3)(x, index, 0, 3), x)


def test_event_holes_have_the_recipes_areas() -> None:
    got = EventAugment(flip=0, choices=("cutout",))(torch.ones(1, 2000, 1, 48, 48), torch.arange(2000), 0, 0)
    holes = (got[0, :, 0] == 0).sum((1, 2)).double()
    sides = holes.sqrt()
    assert torch.equal(sides, sides.round())  # whole squares: inside the image
    share = holes / 48**2
    assert share.min() <= 0.004
    assert 0.10 < share.max() <= 0.115
    assert share.mean() == pytest.approx(0.0555, abs=0.004)
    covered = (got[0, :, 0] == 0).any(0)
    assert all(side.any() for side in (covered[0], covered[-1], covered[:, 0], covered[:, -1]))


def test_event_recipe_does_not_depend_on_the_batch() -> None:
    x, index = single.frames(40), torch.arange(40) * 13
    recipe = EventAugment()
    whole = recipe(x, index, 0, 0)
    parts = torch.cat([recipe(x[:, p], index[p], 0, 0) for p in torch.arange(40).split([7, 32, 1])], 1)
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, recipe(x, index, 0, 1))
    assert torch.equal(EventAugment(flip=0, choices=("none",))(x, index, 0, 0), x)


@pytest.mark.parametrize(
    ("choices", "message"),
    [((), "choices: empty"), (("rol",), "did you mean 'roll'"), (("none", "none"), "each may be named once")],
)
def test_event_recipe_names_what_is_wrong(choices: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EventAugment(choices=choices)
