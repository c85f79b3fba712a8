"""Augmentation: counter-based randomness, image operations against Pillow, policies, mixing, event frames."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lbq.data import augment as ops
from lbq.data import event_augment as events
from lbq.data.event_augment import EventAugment
from lbq.data.mixing import Mixing
from lbq.data.policies import BLEND, CIFAR10, IMAGENET, KINDS, POLICIES, ImageAugment, autoaugment, magnitude
from lbq.data.random import MIX_1, MIX_2, PER_DRAW, PER_SAMPLE, integers, key, uniform
from tests import single_ops as single

quick = settings(max_examples=25, deadline=None, derandomize=True)


# --- randomness ---


def plain_uniform(seed: int, purpose: str, epoch: int, index: int, draw: int) -> float:
    """The same number with Python's integers."""
    mask = (1 << 64) - 1
    z = (key(seed, purpose, epoch) + index * PER_SAMPLE + draw * PER_DRAW) & mask
    z = ((z ^ (z >> 30)) * MIX_1) & mask
    z = ((z ^ (z >> 27)) * MIX_2) & mask
    return ((z ^ (z >> 31)) >> 40) / (1 << 24)


@quick
@given(st.integers(0, 2**63), st.text(max_size=8), st.integers(0, 10**6), st.integers(0, 2**62))
def test_uniform_is_the_hash_it_says(seed: int, purpose: str, epoch: int, index: int) -> None:
    u = uniform(seed, purpose, epoch, torch.tensor([index, index + 1]), 3)
    assert u.dtype == torch.float32
    assert u.tolist() == [[plain_uniform(seed, purpose, epoch, i, j) for j in range(3)] for i in (index, index + 1)]


def test_uniform_golden_values() -> None:
    """A change of these changes what every run with a given seed sees."""
    assert (uniform(0, "image", 0, torch.tensor([0, 1, 49999]), 2) * 2**24).tolist() == [
        [16176007, 9307778],
        [5451805, 14028316],
        [9383067, 6463008],
    ]
    assert (uniform(7, "event", 299, torch.tensor([123]), 4) * 2**24).tolist() == [
        [175064, 14745221, 4835087, 13614417]
    ]


def test_uniform_does_not_depend_on_batch_or_number_of_draws() -> None:
    index = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    whole = uniform(3, "image", 5, index, 8)
    parts = torch.cat([uniform(3, "image", 5, part, 8) for part in index.split([1, 99, 400, 500])])
    assert torch.equal(whole, parts)
    assert torch.equal(whole[:, :3], uniform(3, "image", 5, index, 3))
    assert uniform(3, "image", 5, index[:0], 8).shape == (0, 8)


def test_uniform_refuses_other_indices() -> None:
    with pytest.raises(ValueError, match=r"index: expected int64 \[B\], not int32 \[4\]"):
        uniform(0, "image", 0, torch.arange(4, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match=r"index: .* \[2, 2\]"):
        uniform(0, "image", 0, torch.zeros(2, 2, dtype=torch.int64), 1)


def chi_square(counts: Tensor) -> float:
    """Deviations from an even spread, in standard deviations of the chi-square distribution."""
    expected = counts.sum().item() / counts.numel()
    freedom = counts.numel() - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


INDEX = torch.arange(100_000)


def draws(seed: int = 0, purpose: str = "image", epoch: int = 0, shift: int = 0, draw: int = 0) -> Tensor:
    return uniform(seed, purpose, epoch, INDEX + shift, draw + 1)[:, draw]


@pytest.mark.parametrize("stride", [1, 2, 1024, 2**32])
def test_uniform_is_uniform(stride: int) -> None:
    u = uniform(11, "image", 3, INDEX * stride, 4)
    assert u.min() >= 0
    assert u.max() < 1
    for column in u.T:
        assert abs(chi_square(torch.histc(column, 256, 0, 1))) < 5
        ordered = column.sort().values
        distance = (ordered - (torch.arange(len(ordered)) + 0.5) / len(ordered)).abs().max().item()
        assert distance * math.sqrt(len(ordered)) < 1.95  # Kolmogorov-Smirnov, one in a thousand
    low = (u * 2**24).long() & 0xFF  # the lowest bits too
    assert abs(chi_square(torch.bincount(low.flatten(), minlength=256).float())) < 5


@pytest.mark.parametrize(
    "other",
    [
        {"shift": 1},
        {"shift": 2},
        {"shift": 50_000},
        {"epoch": 1},
        {"purpose": "event"},
        {"seed": 1},
        {"draw": 1},
        {"draw": 9},
        {"draw": 1, "shift": 1},
        {"epoch": 1, "shift": 1},
    ],
    ids=str,
)
def test_neighbouring_draws_are_independent(other: dict[str, Any]) -> None:
    a, b = draws(), draws(**other)
    assert (a == b).float().mean() < 1e-4
    assert abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a)) < 4
    pairs = torch.bincount((a * 32).long() * 32 + (b * 32).long(), minlength=1024).float()
    assert abs(chi_square(pairs)) < 5


def test_every_index_bit_flips_half_the_result() -> None:
    base = torch.arange(0, 2000)
    a = (uniform(0, "image", 0, base, 1) * 2**24).long()
    for bit in range(40):
        changed = a ^ (uniform(0, "image", 0, base ^ (1 << bit), 1) * 2**24).long()
        share = torch.stack([(changed >> k) & 1 for k in range(24)]).float().mean(1)
        assert (share - 0.5).abs().max() < 0.06, bit


@quick
@given(st.integers(2, 2**20), st.data())
def test_integers_are_the_exact_floor(n: int, data: st.DataObject) -> None:
    """At both ends, and just below and at the places where the result steps up."""
    steps = data.draw(st.lists(st.integers(1, n - 1), min_size=20, max_size=20))
    numerators = [0, 2**24 - 1, *(j * 2**24 // n for j in steps), *(-(-j * 2**24 // n) for j in steps)]
    u = torch.tensor(numerators, dtype=torch.float64).to(torch.float32) / 2**24
    assert integers(u, n).tolist() == [k * n >> 24 for k in numerators]


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


def affine(image: Any, matrix: tuple[float, ...], fill: int) -> Any:
    module = pytest.importorskip("PIL.Image")
    colour = fill if image.mode == "L" else (fill,) * 3
    return image.transform(image.size, module.Transform.AFFINE, matrix, fillcolor=colour)


SIZES = [(3, 32, 32), (1, 28, 28), (3, 17, 40), (3, 2, 5)]


@pytest.mark.parametrize(("channels", "height", "width"), SIZES)
@pytest.mark.parametrize("fill", [128, 0])
def test_geometry_equals_pillow(channels: int, height: int, width: int, fill: int) -> None:
    x = images(24, channels, height, width)
    amount = spread(-0.3, 0.3)
    got = single.shear_x(x, amount, fill=fill)
    assert torch.equal(got, pillow(x, lambda im, i: affine(im, (1, amount[i].item(), 0, 0, 1, 0), fill)))
    got = single.shear_y(x, amount, fill=fill)
    assert torch.equal(got, pillow(x, lambda im, i: affine(im, (1, 0, 0, amount[i].item(), 1, 0), fill)))
    pixels = spread(-14.5, 14.5)
    got = single.translate_x(x, pixels, fill=fill)
    assert torch.equal(got, pillow(x, lambda im, i: affine(im, (1, 0, pixels[i].item(), 0, 1, 0), fill)))
    got = single.translate_y(x, pixels, fill=fill)
    assert torch.equal(got, pillow(x, lambda im, i: affine(im, (1, 0, 0, 0, 1, pixels[i].item()), fill)))
    degrees = spread(-30, 30)
    colour = fill if channels == 1 else (fill,) * 3
    got = single.rotate(x, degrees, fill=fill)
    assert torch.equal(got, pillow(x, lambda im, i: im.rotate(degrees[i].item(), fillcolor=colour)))


def test_rotation_by_any_angle_equals_pillow() -> None:
    x = images(180)
    degrees = torch.arange(180).double() * 2.03 - 179
    assert torch.equal(
        single.rotate(x, degrees, fill=7), pillow(x, lambda im, i: im.rotate(degrees[i].item(), fillcolor=(7,) * 3))
    )


@pytest.mark.parametrize(("channels", "height", "width"), SIZES)
def test_lookups_equal_pillow(channels: int, height: int, width: int) -> None:
    done = pytest.importorskip("PIL.ImageOps")
    x = images(24, channels, height, width)
    assert torch.equal(single.invert(x), pillow(x, lambda im, i: done.invert(im)))
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
    for factor in (0.3, 0.7, 1.3):
        plain = a.astype(np.float32) + np.float32(factor) * (b.astype(np.float32) - a.astype(np.float32))
        mixed = np.asarray(image.blend(image.fromarray(a), image.fromarray(b), factor))
        if not np.array_equal(mixed, np.clip(plain, 0, 255).astype(np.uint8)):
            return True
    return False


def test_smoothing_and_grey_equal_pillow() -> None:
    kernel = pytest.importorskip("PIL.ImageFilter").SMOOTH
    x = images(48)
    assert torch.equal(ops.smooth(x.float()).byte(), pillow(x, lambda im, i: im.filter(kernel)))
    assert torch.equal(ops.grey(x.float()).byte(), pillow(x, lambda im, i: im.convert("L")))


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


def test_flip_equals_pillow() -> None:
    module = pytest.importorskip("PIL.ImageOps")
    x = images(6)
    assert torch.equal(single.flip(x, torch.ones(6, dtype=torch.bool)), pillow(x, lambda im, i: module.mirror(im)))
    assert torch.equal(single.flip(x, torch.zeros(6, dtype=torch.bool)), x)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normalise(dtype: torch.dtype) -> None:
    x = images(4)
    mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
    got = ops.normalise(x, 255.0, mean, std, dtype)
    assert got.dtype == dtype
    exact = (x.double() / 255 - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std).double()[:, None, None]
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-7, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


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
        return affine(image, tuple(value if i == where else one for i, one in enumerate((1, 0, 0, 0, 1, 0))), 128)
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
    assert abs(chi_square(torch.bincount(chosen, minlength=25).float())) < 5
    x = torch.full((20_000, 1, 4, 4), 100, dtype=torch.uint8)
    got = autoaugment(x, "cifar10", u)[chosen == 7].float().mean((1, 2, 3))  # flat: sharpness leaves it
    assert (got == 190).float().mean() == pytest.approx(0.35, abs=0.06)  # brightness up
    assert (got == 10).float().mean() == pytest.approx(0.35, abs=0.06)  # and down
    assert (got == 100).float().mean() == pytest.approx(0.3, abs=0.06)


def test_autoaugment_names_what_is_wrong() -> None:
    u = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"policy: unknown 'cifar'; did you mean 'cifar10'\?"):
        autoaugment(images(2), "cifar", u)
    with pytest.raises(ValueError, match=r"x: a policy takes uint8"):
        autoaugment(images(2).float(), "cifar10", u)
    with pytest.raises(ValueError, match=r"policy: unknown 'svhn'"):
        ImageAugment(policy="svhn")
    with pytest.raises(ValueError, match=r"crop_padding and cutout: -1, 0"):
        ImageAugment(crop_padding=-1)


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
    assert CIFAR(x, index, 5, 2, torch.bfloat16).dtype == torch.bfloat16
    without = ImageAugment(4, True, None, 16, CIFAR.mean, CIFAR.std)(x, index, 5, 2)
    assert torch.equal((got == 0).all(1), (without == 0).all(1))  # switching the policy off moves nothing else


def test_pipeline_switched_off_only_normalises() -> None:
    x = images(8)
    plain = ImageAugment(mean=(0.5,) * 3, std=(0.25,) * 3)
    assert torch.equal(plain(x, torch.arange(8), 0, 0), ops.normalise(x, 255.0, (0.5,) * 3, (0.25,) * 3))


def test_shift_replicates_the_border() -> None:
    """The digits' setting: a random shift by one pixel, all nine of them."""
    x = torch.randint(0, 17, (200, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    got = ImageAugment(1, scale=16.0, border="replicate")(x, torch.arange(200), 0, 0)
    padded = torch.nn.functional.pad(x.float(), (1,) * 4, mode="replicate") / 16
    moves: Counter[tuple[int, int]] = Counter()
    for i in range(200):
        found = [(a, b) for a in range(3) for b in range(3) if torch.equal(got[i], padded[i, :, a : a + 8, b : b + 8])]
        assert len(found) == 1
        moves[found[0]] += 1
    assert len(moves) == 9


def test_flips_and_crops_are_evenly_spread() -> None:
    u = uniform(0, "image", 1, torch.arange(50_000), 10)
    assert abs((u[:, 2] < 0.5).float().mean().item() - 0.5) < 0.01
    place = integers(u[:, 0], 9) * 9 + integers(u[:, 1], 9)
    assert abs(chi_square(torch.bincount(place, minlength=81).float())) < 5


def test_nothing_reads_the_device() -> None:
    """On the meta device, which has shapes but no values, any read of a value or tensor left on the CPU is an error."""
    x, index = images(4).to("meta"), torch.arange(4, device="meta")
    assert CIFAR(x, index, 0, 0).shape == x.shape
    assert EventAugment(choices=events.CHOICES)(frames(4).to("meta"), index, 0, 0).device.type == "meta"
    mixed, target = Mixing(0.5, 1.0)(CIFAR(x, index, 0, 0), index, 0, 0, 0)
    assert (mixed.device.type, target.shape) == ("meta", (4, 10))


# --- mixing ---

alphas = st.sampled_from([0.0, 0.2, 0.5, 1.0, 3.0])


@quick
@given(alphas, alphas, st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**6), st.booleans())
def test_mixing_laws(mixup: float, cutmix: float, prob: float, smoothing: float, step: int, timed: bool) -> None:
    mixing = Mixing(mixup, cutmix, prob, smoothing, 7)
    x = torch.arange(6.0, dtype=torch.float64)[:, None, None, None].expand(6, 2, 9, 12).contiguous()
    if timed:
        x = torch.stack([x, x + 100])
    before, y = x.clone(), torch.arange(6)
    out, target = mixing(x, y, 1, 2, step)
    assert torch.equal(x, before)
    assert out.shape == x.shape
    assert target.shape == (6, 7)
    torch.testing.assert_close(target.sum(1), torch.ones(6, dtype=torch.float64))
    assert target.min() >= 0
    choice = mixing.choose(9, 12, 1, 2, step)
    # What is seen in the image is what the target says, whichever way it was mixed: image i holds the value i.
    base = out[0] if timed else out
    seen = base.mean((1, 2, 3))
    torch.testing.assert_close(seen, choice.lam * y.double() + (1 - choice.lam) * y.flip(0).double())
    hard = Mixing(mixup, cutmix, prob, 0.0, 7)(x, y, 1, 2, step)[1]
    torch.testing.assert_close(hard @ torch.arange(7.0, dtype=torch.float64), seen)
    torch.testing.assert_close(target, hard * (1 - smoothing) + smoothing / 7)
    if choice.box is not None:  # CutMix never blends: the partner is in the box and nowhere else
        top, bottom, left, right = choice.box
        inside = torch.zeros(9, 12, dtype=torch.bool)
        inside[top:bottom, left:right] = True
        first = before[0] if timed else before
        assert torch.equal(base, torch.where(inside, first.flip(0), first))
        assert choice.lam == pytest.approx(1 - inside.double().mean().item())
    if timed:
        torch.testing.assert_close(out[1], out[0] + 100)
    if not (mixup or cutmix):
        assert out is x


@pytest.mark.parametrize(("mixup", "cutmix"), [(1.0, 0.0), (0.0, 1.0)])
def test_mixing_treats_timesteps_alike(mixup: float, cutmix: float) -> None:
    x = torch.randn(3, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    mixing, y = Mixing(mixup, cutmix), torch.arange(4)
    for step in range(20):
        out, target = mixing(x, y, 0, 0, step)
        for t in range(3):
            once, same = mixing(x[t], y, 0, 0, step)
            assert torch.equal(out[t], once)
            assert torch.equal(target, same)


def test_mixing_chooses_as_asked() -> None:
    both = [Mixing(0.8, 1.0, 0.6).choose(32, 32, 0, 0, step) for step in range(4000)]
    mixed = [m for m in both if m.lam < 1 or m.box is not None]
    assert len(mixed) / len(both) == pytest.approx(0.6, abs=0.03)
    assert sum(m.box is not None for m in mixed) / len(mixed) == pytest.approx(0.5, abs=0.04)
    only = [Mixing(0.8).choose(32, 32, 0, 0, step) for step in range(4000)]
    lam = np.array([m.lam for m in only])
    assert all(m.box is None for m in only)
    assert lam.mean() == pytest.approx(0.5, abs=0.02)
    assert lam.var() == pytest.approx(1 / (4 * (2 * 0.8 + 1)), abs=0.01)  # of Beta(a, a)
    assert all(m.box is not None for m in (Mixing(cutmix=1.0).choose(32, 32, 0, 0, step) for step in range(100)))
    assert Mixing(0.8).choose(32, 32, 0, 0, 5) == only[5]
    assert len({Mixing(0.8).choose(32, 32, s, e, t).lam for s in (0, 1) for e in (0, 1) for t in (0, 1)}) == 8


def test_mixing_types_and_errors() -> None:
    y = torch.tensor([0, 2])
    out, target = Mixing(0.5, smoothing=0.1, classes=3)(torch.ones(2, 1, 4, 4, dtype=torch.bfloat16), y, 0, 0, 0)
    assert (out.dtype, target.dtype) == (torch.bfloat16, torch.float32)
    expected = torch.tensor([[1 - 0.1 + 0.1 / 3, 0.1 / 3, 0.1 / 3], [0.1 / 3, 0.1 / 3, 1 - 0.1 + 0.1 / 3]])
    torch.testing.assert_close(Mixing(smoothing=0.1, classes=3).targets(y), expected)
    with pytest.raises(ValueError, match="x: mixing takes floating-point"):
        Mixing(0.5)(torch.ones(2, 1, 4, 4, dtype=torch.uint8), y, 0, 0, 0)
    with pytest.raises(ValueError, match="mixup: -1"):
        Mixing(mixup=-1)
    with pytest.raises(ValueError, match="prob: 1.5"):
        Mixing(prob=1.5)


# --- event frames ---


def frames(batch: int = 5, steps: int = 3, height: int = 24, width: int = 20, seed: int = 0) -> Tensor:
    """Sparse counts, other at every timestep."""
    x = torch.randint(0, 12, (steps, batch, 2, height, width), generator=torch.Generator().manual_seed(seed))
    return (x - 6).clamp_min(0).to(torch.uint8)


def per_image(x: Tensor, function: Callable[[Any, int], Any]) -> Tensor:
    """Pillow's result for each plane of each timestep, with the sample's position."""
    image = pytest.importorskip("PIL.Image")
    out = x.clone()
    for t, b, c in np.ndindex(*x.shape[:3]):
        out[t, b, c] = torch.from_numpy(np.array(function(image.fromarray(x[t, b, c].numpy()), b)))
    return out


def test_event_operations_treat_all_timesteps_of_a_sample_alike() -> None:
    x = frames()
    mask = torch.tensor([True, False, True, True, False])
    assert torch.equal(single.flip_frames(x, mask), torch.where(mask[:, None, None, None], x.flip(-1), x))
    dy, dx = torch.tensor([0, 3, -2, 30, -1]), torch.tensor([1, -4, 0, 2, -25])
    rolled = events.roll(x, dy, dx)
    moved = single.translate_frames(x, dy, dx)
    for b in range(5):
        whole = torch.roll(x[:, b], (int(dy[b]), int(dx[b])), (-2, -1))
        assert torch.equal(rolled[:, b], whole)
    assert torch.equal(moved, per_image(x, lambda im, b: affine(im, (1, 0, -int(dx[b]), 0, 1, -int(dy[b])), 0)))
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
    x = frames(300, 2).to(dtype)
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
    x, index = frames(40), torch.arange(40) * 13
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
