"""The native steps between convolutions against NumPy, and tapes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbq.counting.analysis import Membrane
from lbq.engine import numpy_kernels
from lbq.engine.convolution import BACKENDS, Backend, PackedConv
from lbq.engine.steps import PoolStep, ReadoutStep, add_step, histogram
from lbq.engine.tape import perform, recording
from lbq.graph import Pool
from lbq.graph.levels import pool

POOLS = [
    Pool("max", (2, 2), (2, 2)),
    Pool("max", (3, 3), (2, 2), (1, 1)),
    Pool("max", (3, 2), (1, 2), (1, 0)),
    Pool("sum", (2, 2), (2, 2)),
    Pool("sum", (3, 3), (1, 2), (1, 1)),
    Pool("sum", (7, 6), (7, 6)),
    Pool("sum", (1, 1), (1, 1), channels=18),
    Pool("sum", (2, 3), (2, 2), (1, 1), channels=4),
]


@pytest.mark.parametrize("which", POOLS, ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("threads", [1, 3])
def test_pooling(which: Pool, dtype: Any, threads: int) -> None:
    rng = np.random.default_rng(0)
    low, high = (-3, 4) if dtype == np.int8 else (0, 6)
    levels = rng.integers(low, high, (3, 7, 6, 36 if which.channels > 1 else 37)).astype(dtype)
    expected = pool(levels, (which,), (1, 2))
    fits = abs(expected).max() <= np.iinfo(dtype).max
    for wide in (False, True) if which.kind == "sum" else (False,):
        if not (wide or fits):
            continue
        step = PoolStep(levels, which, wide)
        perform(step, threads)
        assert step.out.dtype == (np.int32 if wide else dtype)
        np.testing.assert_array_equal(step.out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32])
def test_the_readout(backend: Backend, dtype: Any) -> None:
    """As a convolution with one window of the levels' sums over time."""
    rng = np.random.default_rng(1)
    steps, batch, classes = 3, 4, 7
    low = -2 if dtype != np.uint8 else 0
    levels = rng.integers(low, 6, (steps * batch, 2, 3, 5)).astype(dtype)
    weights = rng.integers(-(2**15), 2**15, (classes, 5, 2, 3)).astype(np.int16)
    bias = rng.integers(-(10**12), 10**12, classes)
    summed = levels.reshape(steps, batch, 2, 3, 5).sum(0, dtype=np.int64)
    largest = int(abs(summed).max())
    oracle = numpy_kernels.PackedConv(weights, accumulator=np.int64)
    expected, counts = oracle.run(summed, "bitplane", backend, largest=largest)
    logits = np.empty((batch, classes), np.int64)
    rows = weights.transpose(2, 3, 1, 0).reshape(-1, classes).astype(np.int64)
    step = ReadoutStep(levels, rows, bias, logits, steps, largest, backend)
    for _ in range(2):
        perform(step, 2)
        np.testing.assert_array_equal(logits, bias + expected[:, 0, 0])
        assert step.counts() == counts
    perform(ReadoutStep(levels, rows, None, logits, steps, 1, backend), 1)  # a bound that is too small harms nobody
    np.testing.assert_array_equal(logits, bias + 2 * expected[:, 0, 0])


@pytest.mark.parametrize("threads", [1, 2])
def test_currents_are_added(threads: int) -> None:
    rng = np.random.default_rng(2)
    many = rng.integers(-(2**30), 2**30, (6, 40, 41, 9)).astype(np.int32)
    for rows in (6, 2, 1):
        few = rng.integers(-(2**29), 2**29, (rows, 40, 41, 9)).astype(np.int32)
        expected = (many.reshape(6 // rows, *few.shape) + few).reshape(many.shape)
        perform(add_step(many, few), threads)
        np.testing.assert_array_equal(many, expected)


def test_a_tape_does_the_same_to_other_numbers() -> None:
    rng = np.random.default_rng(3)
    conv = PackedConv(rng.integers(-9, 9, (4, 3, 1, 1)).astype(np.int8))
    levels = rng.integers(0, 6, (2, 5, 5, 3)).astype(np.uint8)
    with recording() as tape:
        step = conv.step(levels, largest=5)
        perform(step, 1)
        pooled = PoolStep(levels, POOLS[0])
        perform(pooled, 1)
    perform(step, 1)  # not recorded any more
    assert len(tape.steps) == 2
    for _ in range(2):
        levels[...] = rng.integers(0, 6, levels.shape)
        tape.run(2)
        expected, counts = conv.run(levels.copy(), largest=5)
        np.testing.assert_array_equal(step.out, expected)
        assert step.counts() == counts
        np.testing.assert_array_equal(pooled.out, pool(levels, (POOLS[0],), (1, 2)))
    before = pooled.out.copy()
    levels[...] = 0
    tape.run(1, 0, 1)  # the convolution alone
    assert not step.out.any()
    np.testing.assert_array_equal(pooled.out, before)
    tape.run(1, 1)
    assert not pooled.out.any()


def test_histograms_of_membranes() -> None:
    rng = np.random.default_rng(4)
    step = rng.integers(50, 500, 70).astype(np.float64)
    step[3] = np.inf  # a channel that nothing reaches
    values = rng.integers(-5000, 9000, (3, 4, 5, 70)).astype(np.int32)
    values[0] = step.clip(max=500).astype(np.int32) * rng.integers(-4, 9, (4, 5, 70))  # on the edges
    values[1, 0, 0, :2] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    expected = Membrane.empty(1, (1, 2, 3, 4, 5))
    expected.add(0, values / step)
    found = histogram(values, step, Membrane.LOW, Membrane.WIDTH, expected.counts.shape[1])
    np.testing.assert_array_equal(found, expected.counts[0])
    assert found.sum() == values.size
