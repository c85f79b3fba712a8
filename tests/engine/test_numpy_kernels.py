"""The NumPy kernels against brute force: currents and counts of every method, wide sums, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lbq.engine.convolution import Backend, Counts, Method
from lbq.engine.numpy_kernels import PackedConv
from lbq.graph.levels import planes_of, popcount

Ints = np.ndarray[Any, Any]


def brute_force(
    weight: Ints, level: Ints, stride: int, padding: int, dilation: int, groups: int
) -> tuple[Ints, Counts]:
    """Currents of one image [H, W, I], and what bit planes must do for them, one bit and weight at a time."""
    outputs, per_group, kh, kw = weight.shape
    height, width = (
        (size + 2 * padding - dilation * (k - 1) - 1) // stride + 1
        for size, k in zip(level.shape[:2], (kh, kw), strict=True)
    )
    out, counts = np.zeros((height, width, outputs), np.int64), Counts()
    for o, oy, ox, i, ky, kx in np.ndindex(outputs, height, width, per_group, kh, kw):
        y, x = oy * stride + ky * dilation - padding, ox * stride + kx * dilation - padding
        if not (0 <= y < level.shape[0] and 0 <= x < level.shape[1]):
            continue
        value = int(level[y, x, o // (outputs // groups) * per_group + i])
        for k in range(abs(value).bit_length()):
            if abs(value) >> k & 1:
                out[oy, ox, o] += np.sign(value) * (int(weight[o, i, ky, kx]) << k)
                counts.accumulations += 1
                counts.shifts += k > 0
    counts.additions = counts.accumulations
    counts.formations = int(popcount(level).sum())
    counts.neurons_active = int((level != 0).sum())
    return out, counts


@settings(max_examples=25)
@given(
    st.sampled_from([1, 2]), st.integers(1, 2), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(1, 2),
    st.integers(0, 2), st.integers(1, 2), st.sampled_from([np.int8, np.int16]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_every_method_equals_brute_force(
    groups: int, wide: int, kernel: tuple[int, int], stride: int, padding: int, dilation: int, kind: Any, signed: bool,
    seed: int,
) -> None:  # fmt: skip
    """Currents, and counts that equal the closed forms: zero for a dense product, the explicit backend's shifts,
    Horner's (K - 1) per output."""
    random = np.random.default_rng(seed)
    most = np.iinfo(kind).max
    weight = random.integers(-most, most, (2 * groups, wide, *kernel), kind, endpoint=True)
    level = random.integers(-6 if signed else 0, 7, (2, 5, 6, wide * groups)).astype(np.int8 if signed else np.uint8)
    level[random.random(level.shape) < 0.6] = 0
    conv = PackedConv(weight, (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)
    first, second = (brute_force(weight, one, stride, padding, dilation, groups) for one in level)
    expected, counted = np.stack([first[0], second[0]]), first[1] + second[1]
    reference = F.conv2d(
        torch.from_numpy(level.transpose(0, 3, 1, 2).astype(np.float64)), torch.from_numpy(weight.astype(np.float64)),
        None, stride, padding, dilation, groups,
    )  # fmt: skip
    np.testing.assert_array_equal(reference.numpy().transpose(0, 2, 3, 1), expected)
    horner = max(planes_of(level) - 1, 0) * expected.size
    counts_of: dict[tuple[Method, Backend], Counts] = {
        ("dense", "horner"): Counts(),
        ("bitplane", "horner"): replace(counted, shifts=0, horner_shifts=horner),
        ("bitplane", "preshifted"): replace(counted, shifts=0),
        ("bitplane", "fused"): replace(counted, shifts=0),
        ("bitplane", "explicit"): counted,
    }
    for (method, backend), counts in counts_of.items():
        buffer = np.full(expected.shape, 7, np.int32)
        out, found = conv.run(level, method, backend, out=buffer)
        assert out is buffer
        np.testing.assert_array_equal(out, expected, err_msg=f"{method} {backend}")
        assert found == counts, (method, backend)


def test_sums_beyond_float32_and_int32_are_exact() -> None:
    """2^24 + 1 is no float32: such products are formed in float64, and wide accumulators hold what int32 would not."""
    weight = np.full((1, 700, 1, 1), 32767, np.int16)
    weight[0, 0] = 1
    level = np.full((1, 1, 1, 700), 200, np.int32)
    level[..., 0] = 1
    exact = 699 * 32767 * 200 + 1
    methods: tuple[Method, ...] = ("bitplane", "dense")
    for method in methods:
        conv = PackedConv(weight, accumulator=np.int64)
        assert conv.run(level, method)[0].item() == exact > 2**31
    assert PackedConv(weight).run(level // 200, "dense")[0].item() == 699 * 32767


def test_zero_planes_cost_nothing() -> None:
    conv = PackedConv(np.ones((2, 2, 3, 3), np.int8), padding=(1, 1))
    out, counts = conv.run(np.zeros((1, 4, 4, 2), np.uint8))
    assert not out.any()
    assert counts == Counts()
    out, counts = conv.run(np.full((1, 4, 4, 2), 4, np.uint8))  # two planes of three are empty
    assert counts.accumulations == 2 * 2 * 100
    assert conv.run(np.zeros((0, 4, 4, 2), np.uint8))[0].shape == (0, 4, 4, 2)


def test_kernels_refuse_what_they_do_not_take() -> None:
    with pytest.raises(ValueError, match="weights must be int8 or int16"):
        PackedConv(np.ones((1, 1, 1, 1)))
    conv = PackedConv(np.ones((1, 2, 1, 1), np.int8))
    wrong: list[Any] = [np.zeros((1, 1, 1, 3), np.uint8), np.zeros((1, 1, 1, 2)), np.zeros((1, 1, 2), np.uint8)]
    for levels in wrong:
        with pytest.raises(ValueError, match=r"levels must be integers \[B, H, W, 2\]"):
            conv.run(levels)
    huge = PackedConv(np.full((1, 2, 1, 1), 32767, np.int16), accumulator=np.int64)
    with pytest.raises(ValueError, match="float64 does not hold"):
        huge.run(np.full((1, 1, 1, 2), 2**40), "dense")
