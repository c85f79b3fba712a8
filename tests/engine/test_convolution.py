"""The native engine kernels against NumPy: the same bytes by every method, backend, path and number of threads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lbq import native
from lbq.engine.convolution import BACKENDS, MOST_WEIGHT_ROWS, Counts, PackedConv
from lbq.engine.general import GeneralConv
from lbq.engine.method import Prepared
from lbq.errors import LbqError
from lbq.graph import Synapse

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.report().reason}")

WAYS: list[tuple[Any, Any]] = [("bitplane", b) for b in BACKENDS] + [("dense", "horner")]
Pair = tuple[int, int]


def windows_of(levels: NDArray[Any], kernel: Pair, stride: Pair, padding: Pair) -> NDArray[Any]:
    """`[B, OH, OW, I, kh, kw]` of `[B, H, W, I]`, zeros beyond the border."""
    (ph, pw), (sh, sw) = padding, stride
    x = np.pad(levels, ((0, 0), (ph, ph), (pw, pw), (0, 0)))
    return np.lib.stride_tricks.sliding_window_view(x, kernel, (1, 2))[:, ::sh, ::sw]


def oracle(levels: NDArray[Any], weights: NDArray[Any], stride: Pair, padding: Pair) -> NDArray[np.int64]:
    windows = windows_of(levels.astype(np.int64), weights.shape[2:], stride, padding)
    return np.tensordot(windows, weights.astype(np.int64), axes=((3, 4, 5), (1, 2, 3)))


def closed_form(levels: NDArray[Any], weights: NDArray[Any], stride: Pair, padding: Pair, way: Any) -> Counts:
    """What the paper's equations count on these levels, at valid positions only."""
    method, backend = way
    if method == "dense":
        return Counts()
    magnitude = np.abs(levels.astype(np.int64))
    bits = np.unpackbits(magnitude[..., None].astype(np.uint8), axis=-1, bitorder="little").astype(np.int64)
    seen = windows_of(levels, weights.shape[2:], stride, padding)
    outputs = int(np.prod(seen.shape[:3])) * len(weights)

    def reached(per_input: NDArray[np.int64]) -> int:
        return int(windows_of(per_input, weights.shape[2:], stride, padding).sum()) * len(weights)

    active = int(np.count_nonzero(levels))
    planes = max(int(magnitude.max(initial=0)).bit_length(), 1)
    once = backend == "horner" and weights.dtype == np.int8 and magnitude.max(initial=0) <= 7  # rows of equal levels
    return Counts(
        accumulations=reached(bits.sum(-1)),
        formations=int(bits.sum()),
        shifts=reached(bits[..., 1:].sum(-1)) if backend == "explicit" else 0,
        horner_shifts=(planes - 1) * outputs if backend == "horner" else 0,
        neurons_active=active,
        additions=reached((magnitude > 0).astype(np.int64) if once else bits.sum(-1)),
    )


def some_levels(rng: np.random.Generator, shape: tuple[int, ...], largest: int, signed: bool, active: float) -> Any:
    levels = rng.integers(-largest if signed else 0, largest + 1, shape)
    levels[rng.random(shape) >= active] = 0
    return levels.astype(np.int8 if signed else np.uint8)


def agree(
    levels: NDArray[Any], weights: NDArray[Any], stride: Pair, padding: Pair, threads: tuple[int, ...] = (1, 2)
) -> None:
    expected = oracle(levels, weights, stride, padding)
    conv = PackedConv(weights, stride, padding)
    for way, n in itertools.product(WAYS, threads):
        method, backend = way
        found, counts = conv.run(levels, method, backend, n)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected, err_msg=f"{way}, {n} threads")
        assert counts == closed_form(levels, weights, stride, padding, way), way


SHAPES = [  # batch, height, width, inputs, outputs, kernel, stride, padding
    (2, 8, 8, 64, 64, (3, 3), (1, 1), (1, 1)),
    (1, 7, 5, 70, 130, (3, 3), (2, 2), (1, 1)),
    (3, 1, 1, 133, 10, (1, 1), (1, 1), (0, 0)),
    (2, 5, 6, 3, 65, (2, 3), (1, 2), (0, 2)),
    (1, 4, 4, 1, 1, (4, 4), (1, 1), (0, 0)),
    (1, 3, 20, 17, 128, (1, 5), (3, 1), (2, 4)),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("largest", "signed"),
    [(1, False), (2, False), (5, False), (7, False), (8, False), (255, False), (1, True), (5, True), (100, True)],
)
def test_every_way_equals_the_oracle(isa: str, shape: Any, largest: int, signed: bool) -> None:
    batch, height, width, inputs, outputs, kernel, stride, padding = shape
    rng = np.random.default_rng(largest + inputs)
    levels = some_levels(rng, (batch, height, width, inputs), largest, signed, 0.4)
    for heaviest, dtype in ((127, np.int8), (31, np.int8), (3, np.int8), (5000, np.int16)):
        weights = rng.integers(-heaviest, heaviest + 1, (outputs, inputs, *kernel)).astype(dtype)
        agree(levels, weights, stride, padding, threads=(2,) if heaviest == 31 else (1,))


MATRICES = [  # shapes whose inputs fill tiles: whole rows of them, an odd number, parts, strides, one tap
    (2, 16, 16, 64, 32, (3, 3), (1, 1), (1, 1)),
    (1, 3, 16, 128, 96, (3, 3), (1, 1), (1, 1)),
    (1, 9, 32, 64, 64, (3, 3), (2, 2), (1, 1)),
    (2, 8, 8, 192, 40, (3, 3), (1, 1), (1, 1)),
    (1, 17, 13, 64, 33, (2, 5), (3, 3), (0, 2)),
    (3, 1, 1, 128, 10, (1, 1), (1, 1), (0, 0)),
]


@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize(("largest", "signed"), [(5, False), (255, False), (5, True), (127, True)])
@pytest.mark.parametrize("unit", ["on", "off"])
def test_with_and_without_the_matrix_unit(
    shape: Any, largest: int, signed: bool, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LBQ_NATIVE_AMX", unit)
    batch, height, width, inputs, outputs, kernel, stride, padding = shape
    rng = np.random.default_rng(inputs)
    levels = some_levels(rng, (batch, height, width, inputs), largest, signed, 0.5)
    weights = rng.integers(-128, 128, (outputs, inputs, *kernel)).astype(np.int8)
    conv = PackedConv(weights, stride, padding)
    there = unit == "on" and "amx" in native.report().features
    assert ("tiles" in conv.dense_form(native.isa(), largest)) == there
    for threads in (1, 2):
        found, _ = conv.run(levels, "dense", threads=threads)
        np.testing.assert_array_equal(found, oracle(levels, weights, stride, padding))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 3),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    channels=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    largest=st.integers(1, 127),
    signed=st.booleans(),
    heaviest=st.integers(1, 127),
    active=st.floats(0, 1),
)
def test_any_shape(
    seed: int, batch: int, size: Pair, channels: Pair, kernel: Pair, stride: Pair, padding: Pair, largest: int,
    signed: bool, heaviest: int, active: float
) -> None:  # fmt: skip
    if any(s + 2 * p < k for s, p, k in zip(size, padding, kernel, strict=True)):
        return
    rng = np.random.default_rng(seed)
    levels = some_levels(rng, (batch, *size, channels[0]), largest, signed, active)
    weights = rng.integers(-heaviest, heaviest + 1, (channels[1], channels[0], *kernel)).astype(np.int8)
    agree(levels, weights, stride, padding)


@pytest.mark.parametrize("weight", [127, -127, -128, 1, 0])
@pytest.mark.parametrize("level", [1, 3, 5, 7, 15, 255, -1, -7, -127])
def test_extreme_sums_do_not_overflow(isa: str, weight: int, level: int) -> None:
    """Far more than 258 rows of the heaviest weights, all active, beside weights of the other sign."""
    weights = np.full((70, 600, 1, 2), weight, np.int8)
    weights[::3] = -127 if weight > 0 else 127
    levels = np.full((1, 1, 3, 600), level, np.int8 if level < 0 else np.uint8)
    agree(levels, weights, (1, 1), (0, 0), threads=(1,))


def test_the_flush_comes_exactly_in_time(isa: str) -> None:
    """65535 / 254 = 258 rows of bytes 0..254 fit 16 bits, 256 in whole groups; the next do not."""
    for rows in (127, 128, 129, 130, 255, 256, 257, 258, 259, 260, 512, 516, 517):
        for level, dtype in ((1, np.uint8), (7, np.uint8), (255, np.uint8), (-1, np.int8)):
            weights = np.full((64, rows, 1, 1), 127, np.int8)
            weights[1] = -127  # which makes the bias 127
            levels = np.full((1, 1, 1, rows), level, dtype)
            agree(levels, weights, (1, 1), (0, 0), threads=(1,))


def test_weights_of_4_bits_are_flushed_in_time_too(isa: str) -> None:
    """65535 / 14 = 4681 rows of bytes 0..14 fit 16 bits, or 32767 / 14 = 2340; the next do not."""
    for rows in (2336, 2340, 2344, 4680, 4684, 4700):
        weights = np.full((65, rows, 1, 1), 7, np.int8)
        weights[1] = -7
        expected = weights[:, :, 0, 0].sum(1, dtype=np.int64) * 7
        conv, levels = PackedConv(weights), np.full((2, 1, 1, rows), 7, np.uint8)
        for method in ("bitplane", "pairs"):
            out, _ = conv.run(levels, method, timesteps=2)
            assert out[0, 0, 0].tolist() == out[1, 0, 0].tolist() == expected.tolist()


@pytest.mark.parametrize(("low", "high"), [(-31, 32), (-32, 32), (-16, 48), (0, 63), (0, 64)])
def test_four_rows_are_added_as_bytes_only_where_they_fit(isa: str, low: int, high: int) -> None:
    """Four times 63 fit a byte, four times 64 do not."""
    weights = np.full((64, 9, 1, 1), high, np.int8)
    weights[1] = low
    for level, dtype in ((1, np.uint8), (5, np.uint8), (7, np.uint8), (8, np.uint8), (-5, np.int8)):
        agree(np.full((1, 1, 1, 9), level, dtype), weights, (1, 1), (0, 0), threads=(1,))


def test_the_most_rows_that_have_numbers(isa: str) -> None:
    """65535 weight rows; the row of zeros behind them, which fills groups, has the last number of 16 bits."""
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (3, MOST_WEIGHT_ROWS, 1, 1)).astype(np.int8)
    levels = some_levels(rng, (1, 1, 2, MOST_WEIGHT_ROWS), 5, False, 0.2)
    levels[..., -1] = 3
    agree(levels, weights, (1, 1), (0, 0), threads=(1,))


def test_large_layers_in_several_tiles_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(-31, 32, (96, 64, 3, 3)).astype(np.int8)
    levels = some_levels(
        rng, (40, 20, 20, 64), 5, False, 0.2
    )  # lists of more than one part, tiles of more than one unit
    expected = oracle(levels[[0, 17, 39]], weights, (1, 1), (1, 1))
    results = []
    for path, threads in itertools.product(native.isas(), (1, 2, 3)):
        monkeypatch.setenv("LBQ_NATIVE_ISA", path)
        found, counts = PackedConv(weights, (1, 1), (1, 1)).run(levels, "bitplane", threads=threads)
        np.testing.assert_array_equal(found[[0, 17, 39]], expected)
        results.append((found.tobytes(), counts))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("unit", ["on", "off"])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("outputs", [512, 490])  # whole blocks of them, and a last one that is not full
def test_many_weights_are_shared_out_among_threads_and_small_images_go_together(
    isa: str, unit: str, signed: bool, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LBQ_NATIVE_AMX", unit)
    rng = np.random.default_rng(outputs)
    weights = rng.integers(-128, 128, (outputs, 256, 3, 3)).astype(np.int8)  # more than 2^20
    levels = some_levels(rng, (7, 8, 6, 256), 5, signed, 0.3)  # 5 images of 48 positions go together, then 2
    expected, conv = oracle(levels, weights, (1, 1), (1, 1)), PackedConv(weights, (1, 1), (1, 1))
    for threads in (1, 2, 3, 20):  # more threads than blocks of outputs too
        found, _ = conv.run(levels, "dense", threads=threads)
        np.testing.assert_array_equal(found, expected, err_msg=f"{threads} threads")


def test_out_is_written_and_checked() -> None:
    conv = PackedConv(np.ones((3, 2, 1, 1), np.int8))
    levels = np.ones((2, 4, 4, 2), np.uint8)
    out = np.empty((2, 4, 4, 3), np.int32)
    found, _ = conv.run(levels, out=out)
    assert found is out
    assert (out == 2).all()
    strided = np.ones((2, 4, 8, 2), np.uint8)[:, :, ::2]
    np.testing.assert_array_equal(conv.run(strided)[0], out)
    for wrong in (out.astype(np.int64), out[:1], np.empty((2, 4, 3, 4), np.int32).swapaxes(2, 3)):
        with pytest.raises(ValueError, match="out must be contiguous int32"):
            conv.run(levels, out=wrong)  # type: ignore[arg-type]


def test_counts_add_up() -> None:
    more = Counts(1, 2, 3, 4, 5, 6, 7) + Counts(10, 20, 30, 40, 50, 60, 70)
    assert more == Counts(11, 22, 33, 44, 55, 66, 77)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = PackedConv(np.full((2, 3, 3, 3), 30000, np.int16))
    heavy = PackedConv(np.full((1, 300, 1, 1), 32767, np.int16))
    wide = np.ones((1, 4096, 1, 1), np.int8)  # its lists' entries would be numbered beyond 31 bits
    long, good, method = np.zeros((1, 1, 65536, 4096), np.int8), np.ones((1, 5, 5, 3), np.uint8), "planes"
    for call, message in (
        (lambda: PackedConv(np.ones((2, 2, 3, 3))), "weights must be int8 or int16"),
        (lambda: PackedConv(np.ones((2, 2, 3, 3), np.int8), (0, 1)), "stride must be positive"),
        (lambda: PackedConv(np.ones((1, 8000, 3, 3), np.int8)), "too large for these kernels: use GeneralConv"),
        (lambda: conv.run(good[..., :2]), "levels must be uint8 or int8"),
        (lambda: conv.run(good.astype(np.int32)), "levels must be uint8 or int8"),
        (lambda: conv.run(good[0]), "levels must be uint8 or int8"),
        (lambda: conv.run(good, method), "method must be one of bitplane"),  # type: ignore[arg-type]
        (lambda: conv.run(good, "bitplane", method), "backend must be one of horner"),  # type: ignore[arg-type]
        (lambda: conv.run(good[:, :2]), "smaller than the kernel"),
        (lambda: heavy.run(np.full((1, 1, 1, 300), 255, np.uint8)), "beyond int32"),
        (
            lambda: PackedConv(wide).step(long),
            "a row of 65536 pixels of 4096 channels is too long for these kernels: use GeneralConv",
        ),
    ):
        with pytest.raises((ValueError, LbqError), match=message):
            call()
    synapse = Synapse("conv", "sn", "conv", wide, (4096, 1, 65536), (1, 1, 65536))
    assert isinstance(Prepared(synapse, 7, True).native, GeneralConv)
    monkeypatch.setenv("LBQ_NATIVE", "off")
    with pytest.raises(LbqError, match="native kernels are not available: switched off"):
        conv.run(good)
