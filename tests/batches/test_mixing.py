"""Mixup, CutMix and label smoothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lbq.batches.mixing import Mixing

quick = settings(max_examples=25, derandomize=True)


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
    for step in range(20):  # each with its own alpha
        either = Mixing(0.2, 3.0).choose(32, 32, 0, 0, step)
        assert either == (Mixing(0.2) if either.box is None else Mixing(cutmix=3.0)).choose(32, 32, 0, 0, step)
    assert len({Mixing(0.8).choose(32, 32, s, e, t).lam for s in (0, 1) for e in (0, 1) for t in (0, 1)}) == 8


def test_plain_epochs_are_not_mixed_but_smoothed() -> None:
    x, y = torch.rand(4, 1, 8, 8), torch.arange(4)
    always, ends = Mixing(0.8, 1.0, smoothing=0.1), Mixing(0.8, 1.0, smoothing=0.1, plain_from=3)
    assert all(ends.choose(32, 32, 0, 2, step) == always.choose(32, 32, 0, 2, step) for step in range(20))
    for step in range(20):
        mixed, target = ends(x, y, 0, 3, step)
        assert torch.equal(mixed, x)
        assert torch.equal(target, always.targets(y))


def test_boxes_lie_within_the_image_and_reach_its_borders() -> None:
    mixes = [Mixing(cutmix=1.0).choose(9, 12, 0, 0, step) for step in range(500)]
    boxes = np.array([mix.box for mix in mixes])
    top, bottom, left, right = boxes.T
    assert (top.min(), bottom.max(), left.min(), right.max()) == (0, 9, 0, 12)
    assert (top <= bottom).all()
    assert (left <= right).all()
    np.testing.assert_allclose([mix.lam for mix in mixes], 1 - (bottom - top) * (right - left) / 108)


def test_mixing_types() -> None:
    y = torch.tensor([0, 2])
    out, target = Mixing(0.5, smoothing=0.1, classes=3)(torch.ones(2, 1, 4, 4, dtype=torch.bfloat16), y, 0, 0, 0)
    assert (out.dtype, target.dtype) == (torch.bfloat16, torch.float32)
    expected = torch.tensor([[1 - 0.1 + 0.1 / 3, 0.1 / 3, 0.1 / 3], [0.1 / 3, 0.1 / 3, 1 - 0.1 + 0.1 / 3]])
    torch.testing.assert_close(Mixing(smoothing=0.1, classes=3).targets(y), expected)
