"""Augmentation of images: operations against Pillow, the published policies, the pipeline."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lbq.batches import augment as ops
from lbq.batches.event_augment import EventAugment
from lbq.batches.mixing import Mixing
from lbq.batches.policies import BLEND, CIFAR10, IMAGENET, KINDS, POLICIES, ImageAugment, autoaugment, magnitude
from lbq.batches.random import integers, uniform
from tests.support import single_ops as single

# --- image operations against Pillow ---


def images(count: int = 24, channels: int = 3, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    """Noise, smooth shapes, narrow ranges, few values and single values: what lookup tables stumble over."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    made = []
    for i in range(count):
        planes = []
        for c in range(channels):
            waves = 127 * np.sin(x / rng.uniform(2, 9) + c) * np.cos(y / rng.uniform(2, 9)) + 128
            noise = rng.integers(0, 256, (height, width))
            planes.append(
                [noise, waves, noise // 9 + 37 + c, (noise > 180) * 255, np.full_like(noise, 9 * i), waves // 40 * 40][
                    (i + (c if i % 4 == 3 else 0)) % 6
                ]
            )
        made.append(np.stack(planes))
    return torch.from_numpy(np.stack(made).astype(np.uint8))


def pillow(x: Tensor, function: Callable[[Any, int], Any]) -> Tensor:
    """`function(image, position)` on each image."""
    image = pytest.importorskip("PIL.Image")
    results = []
    for i, each in enumerate(x):
        array = each.permute(1, 2, 0).numpy()
        done = np.asarray(function(image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array), i))
        results.append(torch.from_numpy(done.copy()).reshape(each.shape[1], each.shape[2], -1).permute(2, 0, 1))
    return torch.stack(results)


def spread(low: float, high: float, count: int = 24) -> Tensor:
    """Magnitudes for each image: both ends, the middle and odd places between."""
    return torch.cat(
        [torch.tensor([low, high, (low + high) / 2]), low + (high - low) * uniform_row(count - 3)]
    ).double()


def uniform_row(count: int) -> Tensor:
    return uniform(1, "magnitudes", 0, torch.arange(count), 1)[:, 0]


SIZES = [(3, 32, 32), (1, 28, 28), (3, 17, 40), (3, 2, 5)]


@pytest.mark.parametrize(("channels", "height", "width"), SIZES)
@pytest.mark.parametrize("fill", [128, 0])
def test_geometry_equals_pillow(channels: int, height: int, width: int, fill: int) -> None:
    x = images(24, channels, height, width)
    for places, amounts in (((1, 3), spread(-0.3, 0.3)), ((2, 5), spread(-14.5, 14.5))):  # shears, then translations
        for place in places:

            def entries(amount: Any, place: int = place) -> list[Any]:
                return [amount if i == place else one for i, one in enumerate((1, 0, 0, 0, 1, 0))]

            got = single.moved(x, ops.matrix(*entries(amounts)), fill)
            values = amounts.tolist()
            expected = pillow(x, lambda im, i: single.affine(im, tuple(entries(values[i])), fill))  # noqa: B023
            assert torch.equal(got, expected)
    degrees = spread(-180, 180)
    colour = fill if channels == 1 else (fill,) * 3
    got = single.moved(x, ops.rotate_matrix(degrees, height, width), fill)
    assert torch.equal(got, pillow(x, lambda im, i: im.rotate(degrees[i].item(), fillcolor=colour)))


@pytest.mark.parametrize(("channels", "height", "width"), SIZES)
def test_lookups_equal_pillow(channels: int, height: int, width: int) -> None:
    done = pytest.importorskip("PIL.ImageOps")
    x = images(24, channels, height, width)
    assert torch.equal(single.autocontrast(x), pillow(x, lambda im, i: done.autocontrast(im)))
    assert torch.equal(single.equalize(x), pillow(x, lambda im, i: done.equalize(im)))
    bits = torch.arange(24) % 8 + 1
    assert torch.equal(single.posterize(x, bits), pillow(x, lambda im, i: done.posterize(im, int(bits[i]))))
    threshold = spread(0, 256)
    assert torch.equal(single.solarize(x, threshold), pillow(x, lambda im, i: done.solarize(im, threshold[i].item())))


def test_autocontrast_and_equalize_equal_pillow_for_every_range() -> None:
    """Every (low, high) of a sample of ranges: where the float64 rounding of the stretch decides a level."""
    done = pytest.importorskip("PIL.ImageOps")
    rng = np.random.default_rng(3)
    made = []
    for _ in range(300):
        low, high = np.sort(rng.integers(0, 256, 2))
        made.append(rng.integers(low, high + 1, (1, 16, 48)))
    x = torch.from_numpy(np.stack(made).astype(np.uint8))
    assert torch.equal(single.autocontrast(x), pillow(x, lambda im, i: done.autocontrast(im)))
    assert torch.equal(single.equalize(x), pillow(x, lambda im, i: done.equalize(im)))


@pytest.mark.parametrize(("channels", "height", "width"), SIZES)
def test_blends_equal_pillow(channels: int, height: int, width: int) -> None:
    """Exactly where Pillow multiplies and adds in float32; by at most 1, seldom, where its build fuses the two."""
    done = pytest.importorskip("PIL.ImageEnhance")
    x = images(24, channels, height, width)
    for factor in (spread(0.1, 1.9), torch.linspace(0.1, 1.9, 24).double()):
        for ours, theirs in (
            (single.brightness, done.Brightness),
            (single.contrast, done.Contrast),
            (single.color, done.Color),
            (single.sharpness, done.Sharpness),
        ):
            off = (ours(x, factor).int() - pillow(x, enhanced(theirs, factor)).int()).abs()
            assert off.max() <= 1
            assert (off > 0).float().mean() <= (0.005 if pillow_fuses() else 0)


def enhanced(enhancer: Callable[[Any], Any], factor: Tensor) -> Callable[[Any, int], Any]:
    return lambda image, i: enhancer(image).enhance(factor[i].item())


@functools.cache
def pillow_fuses() -> bool:
    """Whether this build of Pillow rounds a blend's product and sum together, as compilers do on some machines."""
    image = pytest.importorskip("PIL.Image")
    a, b = (plane.astype(np.uint8) for plane in np.meshgrid(np.arange(256), np.arange(256)))
    for factor in (k / 10 for k in range(1, 20)):  # few of them show it
        plain = a.astype(np.float32) + np.float32(factor) * (b.astype(np.float32) - a.astype(np.float32))
        mixed = np.asarray(image.blend(image.fromarray(a), image.fromarray(b), factor))
        if not np.array_equal(mixed, np.clip(plain, 0, 255).astype(np.uint8)):
            return True
    return False


def test_mean_grey_rounds_half_up() -> None:
    x = torch.zeros(2, 1, 3, 2)
    x[0, 0, 0] = torch.tensor([1.0, 2.0])  # mean 0.5
    x[1, 0, 0] = torch.tensor([1.0, 1.0])
    assert ops.mean_grey(x).flatten().tolist() == [1, 0]


@pytest.mark.parametrize("border", ["fill", "replicate"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_is_padding_and_slicing(border: ops.Border, dtype: torch.dtype) -> None:
    x = images(81, 3, 20, 24).to(dtype)
    dy, dx = torch.arange(81) // 9, torch.arange(81) % 9
    mirror = torch.arange(81) % 2 == 0
    mode = "constant" if border == "fill" else "replicate"
    padded = torch.nn.functional.pad(single.flip(x, mirror).float(), (4,) * 4, mode=mode).to(dtype)
    got = ops.crop(x, dy, dx, 4, border, mirror)
    for i in range(81):
        assert torch.equal(got[i], padded[i, :, dy[i] : dy[i] + 20, dx[i] : dx[i] + 24])


@pytest.mark.parametrize("size", [16, 12, 5])
def test_cutout_is_a_clipped_square(size: int) -> None:
    x = torch.ones(1024, 2, 32, 32)
    row, column = torch.arange(1024) // 32, torch.arange(1024) % 32
    got = ops.cutout(x, row, column, size)
    for i in range(0, 1024, 37):
        expected = torch.ones(2, 32, 32)
        top, left = int(row[i]) - size // 2, int(column[i]) - size // 2
        expected[:, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0
        assert torch.equal(got[i], expected)
    assert (got == 0).sum((1, 2, 3)).max() == 2 * size * size


# --- policies ---


def test_policies_are_the_published_ones() -> None:
    """Counts and sums over the tables, taken from two independent ports that agree row by row."""
    for policy in (CIFAR10, IMAGENET):
        assert len(policy) == 25
        for name, probability, level in (step for sub in policy for step in sub):
            assert name in KINDS[1:]
            assert round(probability * 10) == pytest.approx(probability * 10)
            assert 0 <= level <= 9
    assert Counter(name for sub in CIFAR10 for name, *_ in sub) == {
        "equalize": 9, "autocontrast": 7, "color": 5, "sharpness": 5, "brightness": 4, "solarize": 4, "translate_y": 5,
        "invert": 3, "contrast": 2, "translate_x": 2, "shear_y": 2, "posterize": 1, "rotate": 1,
    }  # fmt: skip
    assert Counter(name for sub in IMAGENET for name, *_ in sub) == {
        "equalize": 17, "solarize": 7, "rotate": 6, "color": 6, "posterize": 5, "invert": 3, "autocontrast": 2,
        "contrast": 2, "sharpness": 1, "shear_x": 1,
    }  # fmt: skip
    for policy, total in ((CIFAR10, 77771), (IMAGENET, 89470)):  # weighted by place: notices an exchange
        steps = [step for sub in policy for step in sub]
        assert sum((i + 1) * (round(100 * p) + level) for i, (_, p, level) in enumerate(steps)) == total


def test_magnitudes() -> None:
    assert magnitude("shear_x", 9, -1, 32, 32) == pytest.approx(-0.3)
    assert magnitude("rotate", 3, 1, 32, 32) == pytest.approx(10)
    assert magnitude("translate_x", 9, 1, 100, 331) == pytest.approx(150)
    assert magnitude("translate_y", 9, 1, 331, 100) == pytest.approx(150)
    assert [magnitude("posterize", m, 1, 32, 32) for m in range(10)] == [8, 8, 7, 7, 6, 6, 5, 5, 4, 4]
    assert [magnitude("solarize", m, 1, 32, 32) for m in (0, 9)] == [256, 0]
    assert [magnitude(name, 9, sign, 32, 32) for name in BLEND for sign in (-1, 1)] == pytest.approx([0.1, 1.9] * 4)
    assert magnitude("invert", 9, 1, 32, 32) == 0


def plain_step(image: Any, name: str, value: float) -> Any:
    """One operation as Pillow does it."""
    done, enhance = pytest.importorskip("PIL.ImageOps"), pytest.importorskip("PIL.ImageEnhance")
    grey = 128 if image.mode == "L" else (128,) * 3
    if name == "rotate":
        return image.rotate(value, fillcolor=grey)
    if name in ("shear_x", "shear_y", "translate_x", "translate_y"):
        where = {"shear_x": 1, "translate_x": 2, "shear_y": 3, "translate_y": 5}[name]
        return single.affine(
            image, tuple(value if i == where else one for i, one in enumerate((1, 0, 0, 0, 1, 0))), 128
        )
    if name in BLEND:
        return getattr(enhance, name.capitalize())(image).enhance(value)
    if name == "posterize":
        return done.posterize(image, int(value))
    return done.solarize(image, value) if name == "solarize" else getattr(done, name)(image)


@pytest.mark.parametrize("policy", ["cifar10", "imagenet"])
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 20, 28)])
def test_every_sub_policy_equals_pillow(policy: str, channels: int, height: int, width: int) -> None:
    """All 25 sub-policies, both steps done or not, both signs, in one batch; picked or uniform alike."""
    cases = [(s, a, b, p, q) for s in range(25) for a in (0, 1) for b in (0, 1) for p in (0, 1) for q in (0, 1)]
    x = images(len(cases), channels, height, width)
    steps = POLICIES[policy]
    u = torch.zeros(len(cases), 5)
    for i, (s, a, b, p, q) in enumerate(cases):
        u[i, 0] = (s + 0.5) / 25
        for j, done in enumerate((a, b)):
            u[i, 1 + j] = max(steps[s][j][1] - 0.01, 0) if done else min(steps[s][j][1] + 0.01, 1 - 2**-24)
        u[i, 3:] = torch.tensor([0.25 + 0.5 * p, 0.25 + 0.5 * q])

    def plain(image: Any, i: int) -> Any:
        s, _, _, *signs = cases[i]
        for j, (name, probability, level) in enumerate(steps[s]):
            if u[i, 1 + j] < probability:
                image = plain_step(image, name, magnitude(name, level, 2 * signs[j] - 1, height, width))
        return image

    got = autoaugment(x, policy, u)
    off = (got.int() - pillow(x, plain).int()).abs()
    # Where Pillow fuses, an off-by-one of the first step may be amplified by the second.
    assert (off > 0).float().mean() <= (0.01 if pillow_fuses() else 0)
    assert torch.equal(got, autoaugment(x, policy, u, compact=False))
    assert (got != x).float().mean() > 0.3


def test_probabilities_are_met() -> None:
    """Each sub-policy takes its share of the images, and of those of CIFAR-10's eighth, 0.7 change brightness."""
    u = uniform(0, "image", 0, torch.arange(20_000), 5)
    chosen = integers(u[:, 0], 25)
    assert abs(single.chi_square(torch.bincount(chosen, minlength=25).float())) < 5
    x = torch.full((20_000, 1, 4, 4), 100, dtype=torch.uint8)
    got = autoaugment(x, "cifar10", u)[chosen == 7].float().mean((1, 2, 3))  # flat: sharpness leaves it
    assert (got == 190).float().mean() == pytest.approx(0.35, abs=0.06)  # brightness up
    assert (got == 10).float().mean() == pytest.approx(0.35, abs=0.06)  # and down
    assert (got == 100).float().mean() == pytest.approx(0.3, abs=0.06)


def test_policies_are_for_grey_and_colour() -> None:
    for wrong in (images(2).float(), images(2)[:, :2]):
        with pytest.raises(ValueError, match=r"x: a policy takes uint8 \[B, 1 or 3, H, W\]"):
            autoaugment(wrong, "cifar10", torch.zeros(2, 5))


def test_cutout_reaches_every_pixel_of_an_image_that_is_not_square() -> None:
    x = torch.full((500, 1, 4, 9), 255, dtype=torch.uint8)
    hole = ImageAugment(cutout=1)(x, torch.arange(500), 0, 0) == 0
    assert (hole.flatten(1).sum(1) == 1).all()
    assert hole.any(0).all()


CIFAR = ImageAugment(4, True, "cifar10", 16, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))


def test_pipeline_does_not_depend_on_the_batch() -> None:
    x = images(96)
    index = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))[:96]
    whole = CIFAR(x, index, 3, 7)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    parts = torch.cat([CIFAR(x[p], index[p], 3, 7) for p in order.split([1, 31, 64])])
    assert torch.equal(whole[order], parts)
    for other in (CIFAR(x, index, 3, 8), CIFAR(x, index, 4, 7), CIFAR(x, index + 1, 3, 7)):
        assert (other != whole).flatten(1).any(1).float().mean() > 0.9


def test_pipeline_is_its_parts() -> None:
    x, index = images(64), torch.arange(64) + 1000
    u = uniform(5, "image", 2, index, 10)
    expected = ops.crop(x, integers(u[:, 0], 9), integers(u[:, 1], 9), 4, mirror=u[:, 2] < 0.5)
    expected = ops.normalise(autoaugment(expected, "cifar10", u[:, 5:]), 255, CIFAR.mean, CIFAR.std)
    expected = ops.cutout(expected, integers(u[:, 3], 32), integers(u[:, 4], 32), 16)
    got = CIFAR(x, index, 5, 2)
    assert torch.equal(got, expected)
    without = ImageAugment(4, True, None, 16, CIFAR.mean, CIFAR.std)(x, index, 5, 2)
    assert torch.equal((got == 0).all(1), (without == 0).all(1))  # switching the policy off moves nothing else


def test_plain_epochs_are_cropped_and_flipped_alone() -> None:
    x, index = images(64), torch.arange(64)
    ends, never = replace(CIFAR, plain_from=3), replace(CIFAR, policy=None, cutout=0)
    for epoch in (0, 2):
        assert torch.equal(ends(x, index, 5, epoch), CIFAR(x, index, 5, epoch))
    for epoch in (3, 4):
        assert torch.equal(ends(x, index, 5, epoch), never(x, index, 5, epoch))
        assert not torch.equal(ends(x, index, 5, epoch), CIFAR(x, index, 5, epoch))


def test_shift_replicates_the_border() -> None:
    """The digits' setting: a random shift by one pixel, all nine of them."""
    x = torch.randint(0, 17, (200, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    got = ImageAugment(1, scale=16.0, border="replicate")(x, torch.arange(200), 0, 0)
    padded = torch.nn.functional.pad(x.float(), (1,) * 4, mode="replicate") / 16
    moves: Counter[tuple[int, int]] = Counter()
    for i in range(200):
        (move,) = (
            (a, b) for a in range(3) for b in range(3) if torch.equal(got[i], padded[i, :, a : a + 8, b : b + 8])
        )
        moves[move] += 1
    assert len(moves) == 9


def test_nothing_reads_the_device() -> None:
    """On the meta device, which has shapes but no values, any read of a value or tensor left on the CPU is an error."""
    x, index = images(4).to("meta"), torch.arange(4, device="meta")
    assert CIFAR(x, index, 0, 0).shape == x.shape
    assert EventAugment()(single.frames(4).to("meta"), index, 0, 0).device.type == "meta"
    mixed, target = Mixing(0.5, 1.0)(CIFAR(x, index, 0, 0), index, 0, 0, 0)
    assert (mixed.device.type, target.shape) == ("meta", (4, 10))
