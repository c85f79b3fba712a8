"""Convolutions of every shape by the native library: the same currents and counts as in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbq import native
from lbq.engine import numpy_kernels
from lbq.engine.convolution import MOST_TAPS, MOST_WEIGHT_ROWS, Backend, Method, PackedConv
from lbq.engine.general import GeneralConv
from lbq.engine.method import Prepared
from lbq.engine.tape import perform
from lbq.errors import LbqError
from lbq.graph import Synapse
from lbq.native import ISAS

METHODS: tuple[tuple[Method, Backend], ...] = (("dense", "horner"), ("bitplane", "horner"), ("bitplane", "explicit"))


def check(weights: Any, levels: Any, *shape: Any) -> None:
    """By every method, instruction path and on several threads, in memory that held other numbers."""
    conv, reference = GeneralConv(weights, *shape), numpy_kernels.PackedConv(weights, *shape)
    for method, backend in METHODS:
        expected, counts = reference.run(levels, method, backend)
        for isa in native.isas():
            for threads in (1, 3):
                step = conv.step(levels, method, backend, np.full(expected.shape, 77, np.int32))
                step.call.isa = ISAS[isa]
                perform(step, threads)
                np.testing.assert_array_equal(step.out, expected, err_msg=f"{isa}, {method}")
                assert step.counts() == counts


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 3, 8, 33]), st.sampled_from([1, 1, 2, 9]), st.sampled_from([1, 1, 2, 7, 16, 20]),
    st.tuples(st.integers(1, 3), st.integers(1, 3)), st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)), st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([np.int8, np.int16]), st.sampled_from(["uint8", "int8", "bytes"]), st.integers(0, 2**31),
)  # fmt: skip
def test_it_equals_numpy(
    groups: int, inputs: int, outputs: int, kernel: Any, stride: Any, padding: Any, dilation: Any, kind: Any,
    levels: str, seed: int,
) -> None:  # fmt: skip
    random = np.random.default_rng(seed)
    weights = random.integers(-127, 128, (groups * outputs, inputs, *kernel)).astype(kind)
    low, high = {"uint8": (0, 6), "int8": (-5, 6), "bytes": (0, 256)}[levels]
    x = random.integers(low, high, (2, 7, 8, groups * inputs)).astype(np.int8 if levels == "int8" else np.uint8)
    x[random.random(x.shape) < random.random()] = 0
    check(weights, x, stride, padding, dilation, groups)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_are_exact(sign: int) -> None:
    """Just below 2^31, and in a group that lies beside one of the other sign."""
    weights = np.full((4, 257, 1, 1), sign * 32767, np.int16)
    weights[:2] *= -1
    x = np.full((1, 1, 3, 2 * 257), 255, np.uint8)
    conv = GeneralConv(weights, groups=2)
    assert conv.heaviest * 255 < 2**31 <= conv.heaviest * 256
    for method, backend in METHODS:
        out, _ = conv.run(x, method, backend)
        assert (out == sign * 257 * 32767 * 255 * np.array([-1, -1, 1, 1])).all()
    low = np.full((1, 1, 3, 2 * 257), -128, np.int8)
    assert (conv.run(low)[0] == conv.run(low, "dense")[0]).all()
    assert conv.run(low)[0][0, 0, 0, 0] == sign * 257 * 32767 * 128


def test_kernels_of_very_many_weights() -> None:
    random = np.random.default_rng(0)
    for shape in ((5, 2, 17, 16), (3, 66_000, 1, 1)):
        weights = random.integers(-127, 128, shape).astype(np.int8)
        assert weights[0, 0].size > MOST_TAPS or weights[0].size > MOST_WEIGHT_ROWS
        x = random.integers(0, 6, (2, shape[2], shape[3] + 1, shape[1])).astype(np.uint8)
        x[random.random(x.shape) < 0.8] = 0
        check(weights, x, (1, 1), (0, 0))
        with pytest.raises(LbqError, match="too large for these kernels: use GeneralConv"):
            PackedConv(weights)
        synapse = Synapse("s", "sn", "conv", weights, (shape[1], shape[2], shape[3]), (shape[0], 1, 1))
        prepared = Prepared(synapse, 5, False)
        assert isinstance(prepared.native, GeneralConv)
        assert prepared.native_refused() is None


def test_what_is_refused() -> None:
    conv = GeneralConv(np.full((2, 1, 3, 3), 30000, np.int16), groups=2)
    good = np.ones((1, 5, 5, 2), np.uint8)
    calls: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: GeneralConv(np.ones((2, 1, 3, 3), np.int32)), "weights must be int8 or int16"),
        (lambda: GeneralConv(np.ones((5, 2, 1, 1), np.int8), groups=2), "outputs a multiple of groups, got .* 2, .* and 5"),
        (lambda: GeneralConv(np.ones((2, 2, 1, 1), np.int8), padding=(0, -1)), "padding not negative"),
        (lambda: GeneralConv(np.ones((2, 2, 1, 1), np.int8), dilation=(0, 1)), "dilation and groups must be positive"),
        (lambda: conv.run(good[..., :1]), "levels must be uint8 or int8"),
        (lambda: conv.run(good.astype(np.int32)), "levels must be uint8 or int8"),
        (lambda: conv.run(good[:, :2]), "smaller than the kernel"),
        (lambda: conv.run(good, "planes"), "method must be one of bitplane"),  # type: ignore[arg-type]
        (lambda: conv.run(good, "pairs"), "method pairs does not run a convolution of this shape: use bitplane"),
        (lambda: conv.run(good, out=np.empty((1, 3, 3, 1), np.int32)), "out must be contiguous int32"),
        (lambda: GeneralConv(np.full((1, 300, 1, 1), 32767, np.int16)).run(
            np.full((1, 1, 1, 300), 255, np.uint8)), "beyond int32"),
    )  # fmt: skip
    for call, message in calls:
        with pytest.raises((ValueError, LbqError), match=message):
            call()
