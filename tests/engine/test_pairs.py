"""Two timesteps at once: the same bytes and counts as by planes, whatever lists there are, at every edge."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lbq import native
from lbq.engine import Network, pairs
from lbq.engine.convolution import PackedConv
from lbq.engine.method import Prepared
from lbq.engine.pairs import PairLists, all_lists, chosen_lists, lists_needed, possible_pairs, rows_by_pair
from lbq.engine.runner import Runner
from tests.engine.test_convolution import SHAPES, oracle, some_levels, windows_of
from tests.support.small_nets import deployed, pixels, same

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.report().reason}")

Pair = tuple[int, int]


made_once = functools.cache(PairLists)  # its table takes longer than most of the convolutions here
needed_once = functools.cache(lists_needed)


def bit_lists(largest: int) -> PairLists:
    """The fewest lists: one for each bit of each timestep."""
    return PairLists(tuple(1 << k for k in range(6) if 1 << k % 3 <= largest))


def rows_added(levels: NDArray[Any], lists: PairLists, kernel: Pair, stride: Pair, padding: Pair, steps: int) -> int:
    """Weight rows that the lists hold for all output pixels, and those of a last timestep by planes."""
    timesteps = levels.reshape(steps, -1, *levels.shape[1:])
    needed = needed_once(lists.pairs)
    total = 0
    for t in range(0, steps - 1, 2):
        met = needed[timesteps[t].astype(int) << 3 | timesteps[t + 1]]
        total += int(windows_of(met, kernel, stride, padding).sum())
    if steps % 2:
        total += int(np.count_nonzero(windows_of(timesteps[-1], kernel, stride, padding)))
    return total


def agree(
    levels: NDArray[Any], weights: NDArray[Any], stride: Pair, padding: Pair, steps: int, threads: int = 1
) -> None:
    largest = max(int(levels.max(initial=0)), 1)
    conv, expected = PackedConv(weights, stride, padding), oracle(levels, weights, stride, padding)
    _, planes = conv.run(levels)
    taps = weights[0, 0].size
    chosen = chosen_lists(rows_by_pair(levels, steps, taps), largest)
    for lists in (made_once(made.pairs) for made in (all_lists(largest), bit_lists(largest), chosen)):
        out, counts = conv.run(levels, "pairs", threads=threads, timesteps=steps, lists=lists)
        np.testing.assert_array_equal(out, expected, err_msg=f"{len(lists.pairs)} lists")
        rows = rows_added(levels, lists, weights.shape[2:], stride, padding, steps)
        shifts = planes.horner_shifts // steps * (steps % 2)
        assert counts == replace(planes, horner_shifts=shifts, additions=rows * len(weights))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("largest", "steps"), [(1, 2), (2, 3), (3, 2), (5, 2), (5, 5), (7, 4)])
def test_pairs_equal_the_oracle(isa: str, shape: Any, largest: int, steps: int) -> None:
    batch, height, width, inputs, outputs, kernel, stride, padding = shape
    rng = np.random.default_rng(largest + inputs)
    levels = some_levels(rng, (steps * batch, height, width, inputs), largest, False, 0.4)
    for heaviest in (127, 31, 3):  # of 6 bits and fewer, four rows are added as bytes
        weights = rng.integers(-heaviest, heaviest + 1, (outputs, inputs, *kernel)).astype(np.int8)
        agree(levels, weights, stride, padding, steps, threads=2 if heaviest == 31 else 1)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 3),
    steps=st.integers(2, 5),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    channels=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    largest=st.integers(1, 7),
    heaviest=st.integers(1, 127),
    active=st.floats(0, 1),
)
def test_any_shape(
    seed: int, batch: int, steps: int, size: Pair, channels: Pair, kernel: Pair, stride: Pair, padding: Pair,
    largest: int, heaviest: int, active: float
) -> None:  # fmt: skip
    if any(s + 2 * p < k for s, p, k in zip(size, padding, kernel, strict=True)):
        return
    rng = np.random.default_rng(seed)
    levels = some_levels(rng, (steps * batch, *size, channels[0]), largest, False, active)
    weights = rng.integers(-heaviest, heaviest + 1, (channels[1], channels[0], *kernel)).astype(np.int8)
    agree(levels, weights, stride, padding, steps, threads=1 + seed % 2)


@pytest.mark.parametrize("weight", [127, -128])
@pytest.mark.parametrize("level", [(7, 7), (7, 0), (0, 7), (1, 7), (5, 5), (1, 0), (1, 1), (4, 3)])
def test_sums_are_flushed_exactly_in_time(isa: str, weight: int, level: Pair) -> None:
    """32767 / 254 = 129 rows, or 65535 / 254 = 258 units of a row and a level, fit 16 bits; the next do not."""
    rows = {48, 49, 127, 128, 131, 132, 255, 256, 257, 384, 386, 516, 1100}
    limits = {258 // s + more for s in range(1, 8) for more in (0, 1, 4)}
    for n in sorted(rows | limits):
        weights = np.full((130, n, 1, 1), weight, np.int8)
        weights[::3] = -127 if weight > 0 else 127  # which makes the range 254 or 255
        levels = np.empty((2, 1, 1, n), np.uint8)
        levels[0], levels[1] = level
        agree(levels, weights, (1, 1), (0, 0), 2)


def test_the_highest_pair_among_others_at_the_bound(isa: str) -> None:
    """Lists one after the other fill the same sums: any order of small and large ones must flush in time."""
    rng = np.random.default_rng(0)
    weights = np.full((70, 300, 1, 1), 127, np.int8)
    weights[::2] = -127
    for n in (1, 30, 36, 60, 129, 200, 300):
        levels = rng.integers(0, 8, (2, 1, 1, 300)).astype(np.uint8)
        levels[..., :n] = 7
        agree(levels, weights, (1, 1), (0, 0), 2)


def test_many_images_tiles_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (200, 64, 3, 3)).astype(np.int8)
    levels = some_levels(rng, (24, 20, 20, 64), 5, False, 0.3)
    expected = PackedConv(weights, (1, 1), (1, 1)).run(levels)[0]
    for path in native.isas():
        monkeypatch.setenv("LBQ_NATIVE_ISA", path)
        for threads, steps in ((1, 2), (2, 3), (3, 2), (2, 24)):
            conv = PackedConv(weights, (1, 1), (1, 1))
            out, _ = conv.run(levels, "pairs", threads=threads, timesteps=steps)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("largest", range(1, 8))
def test_every_pair_stands_in_lists_without_a_common_bit(largest: int) -> None:
    rng = np.random.default_rng(largest)
    for scale in (0.0, 1.0, 30.0, 1e4):
        rows = rng.random(64) ** 4 * scale
        lists = chosen_lists(rows, largest)
        assert lists == chosen_lists(rows, largest)
        assert not lists.missing(largest)
        for pair in possible_pairs(largest):
            parts = [lists.pairs[i] for i in lists.table[pair] if i != pairs.NO_LIST]
            assert sum(parts) == np.bitwise_or.reduce(parts) == pair
            assert len(parts) == lists_needed(lists.pairs)[pair] <= lists.columns
    assert chosen_lists(np.full(64, 1e6), largest) == all_lists(largest)
    assert len(chosen_lists(np.zeros(64), largest).pairs) <= 6


def test_what_pairs_do_not_take() -> None:
    ones, levels = np.ones((2, 3, 1, 1), np.int8), np.ones((4, 2, 2, 3), np.uint8)
    conv = PackedConv(ones)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: conv.run(levels, "pairs"), "does not run one timestep: use bitplane"),
        (lambda: conv.run(levels * 8, "pairs", timesteps=2), "levels above 7"),
        (lambda: conv.run(levels.astype(np.int8), "pairs", timesteps=2), "signed levels"),
        (lambda: PackedConv(ones.astype(np.int16)).run(levels, "pairs", timesteps=2), "weights above 8 bits"),
        (lambda: conv.run(levels, "pairs", timesteps=3), "got 4 images of 3"),
        (lambda: conv.run(levels, "pairs", "explicit", timesteps=2), "no backend"),
        (
            lambda: conv.run(levels * 3, "pairs", timesteps=2, lists=bit_lists(1)),
            "make up every pair of levels up to 3",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("timesteps", [1, 2, 3, 4])
def test_networks_by_pairs_are_recorded_and_repeated(timesteps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever pairs can run they are taken, on one thread and two, in the first run and from the recording."""

    def measure(self: Prepared, levels: NDArray[np.uint8], density: float) -> float:
        if self.native.pairs_refused(self.signed, self.largest, self.timesteps) is None:
            self.lists, self.gain = bit_lists(self.largest), 2.0
        return 2 * density + 1

    monkeypatch.setattr(Prepared, "_measure", measure)
    net = deployed(timesteps=timesteps)
    runner = net._runner = Runner(net.network)
    runner.images_per_piece = 2
    for i in range(4):
        x = pixels(5, 3, 8, 8, seed=i)
        dense, planes = net.run(x, "dense", trace=True), net.run(x, "bitplane")
        found = net.run(x, "auto", trace=True, threads=1 + i % 2)
        assert same(dense, found)
        for name, counts in found.counts.items():
            assert replace(counts, horner_shifts=0, additions=0) == replace(
                planes.counts[name], horner_shifts=0, additions=0
            )
        by_pairs = {name for name, choice in found.choices.items() if choice.method == "pairs"}
        assert bool(by_pairs) == (timesteps > 1)
        assert all("2.00 x planes" in found.choices[name].reason for name in by_pairs)
        explicit = net.run(x, "auto", backend="explicit")
        assert np.array_equal(explicit.logits, dense.logits)
        assert not any(choice.method == "pairs" for choice in explicit.choices.values())
    assert any(space.recordings for space in runner._spaces)


def test_auto_takes_pairs_only_where_they_were_faster() -> None:
    net = Network(deployed().network)
    out = net.run(pixels(4, 3, 8, 8), "auto")
    runner = net._runner
    assert runner is not None
    assert any(prepared.lists is not None for prepared in runner.prepared.values())
    for name, prepared in runner.prepared.items():
        assert out.choices[name].method == "dense" or (out.choices[name].method == "pairs") == (prepared.gain > 1)
