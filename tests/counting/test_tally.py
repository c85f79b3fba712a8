"""Tallies against plain loops, and the signed binary form against the definition of the non-adjacent form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lbq import models, native
from lbq.counting.products import signed_digits
from lbq.counting.tally import Read, Tallies, level_counts
from lbq.deploy import deploy, lower
from lbq.engine.steps import Tally
from lbq.errors import GraphError
from lbq.graph import Graph, Pool
from lbq.kernels import counting

SHAPES = [(2, 3, 5, 4, 4), (1, 2, 3, 3, 5), (2, 70, 4, 4, 5), (3, 1, 2, 1, 1), (2, 300, 1, 4, 4)]


def brute_force(levels: np.ndarray, n_max: int) -> np.ndarray:
    steps, _, _, height, width = levels.shape
    found = np.zeros((steps, height * width, n_max + 1), np.int64)
    for t, b, c, y, x in np.ndindex(levels.shape):
        found[t, y * width + x, abs(int(levels[t, b, c, y, x]))] += 1
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("n_max", "dtype"), [(1, np.int8), (5, np.uint8), (3, np.int8), (40, np.uint8), (30, np.int32)]
)
def test_counts_equal_brute_force(shape: tuple[int, ...], n_max: int, dtype: type) -> None:
    low = -n_max if np.issubdtype(dtype, np.signedinteger) else 0
    levels: np.ndarray = np.random.default_rng(0).integers(low, n_max + 1, shape).astype(dtype)
    expected = brute_force(levels, n_max)
    np.testing.assert_array_equal(level_counts(levels, n_max), expected)
    there = torch.zeros(expected.shape, dtype=torch.int64)
    counting.tally(torch.from_numpy(levels), torch.ones(()), there)
    np.testing.assert_array_equal(there.numpy(), expected)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("shape", [*SHAPES, (1, 5, 130, 2, 3), (2, 1, 64, 9, 9)])
@pytest.mark.parametrize(
    ("n_max", "dtype"), [(1, np.int8), (5, np.uint8), (7, np.int8), (40, np.uint8), (41, np.uint8), (127, np.int8)]
)
def test_native_tallies_equal_brute_force(
    isa: str, shape: tuple[int, ...], n_max: int, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LBQ_NATIVE_ISA", isa)
    low = -n_max if dtype == np.int8 else 0
    levels: np.ndarray = np.random.default_rng(1).integers(low, n_max + 1, shape).astype(dtype)
    channels_last = levels.transpose(0, 1, 3, 4, 2).copy()
    expected = brute_force(levels, n_max)
    np.testing.assert_array_equal(Tally(channels_last, n_max)(), expected)
    seen = channels_last.transpose(0, 1, 4, 2, 3)
    np.testing.assert_array_equal(level_counts(seen, n_max), expected)
    counts = Tally(channels_last, n_max)()
    assert Tally(channels_last, n_max, counts)() is counts
    np.testing.assert_array_equal(counts, 2 * expected)


def test_without_the_library_bytes_are_counted_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LBQ_NATIVE", "off")
    levels = np.random.default_rng(2).integers(0, 6, (2, 3, 4, 4, 5)).astype(np.uint8).transpose(0, 1, 4, 2, 3)
    np.testing.assert_array_equal(level_counts(levels, 5), brute_force(levels, 5))


@pytest.mark.parametrize("isa", native.isas())
def test_bytes_do_not_overflow(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LBQ_NATIVE_ISA", isa)
    for batch in (254, 255, 256, 1000):
        levels = np.full((1, batch, 2, 2, 200), 5, np.uint8)
        for counts in (Tally(levels, 5)(), level_counts(levels.transpose(0, 1, 4, 2, 3).copy(), 5)):
            assert (counts[:, :, 5] == batch * 200).all()
            assert counts.sum() == batch * 200 * 4


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize(("level", "dtype", "n_max"), [(-3, np.int8, 2), (42, np.uint8, 41), (-128, np.int8, 127)])
def test_a_native_tally_refuses_levels_beyond_the_largest(
    isa: str, level: int, dtype: type, n_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LBQ_NATIVE_ISA", isa)
    levels: np.ndarray = np.zeros((2, 2, 3, 3, 70), dtype)
    count = Tally(levels, n_max)
    count()
    levels[1, 1, 2, 2, 69] = level
    with pytest.raises(ValueError, match=f"must not exceed {n_max}"):
        count()
    np.testing.assert_array_equal(Tally(levels, abs(level))(), brute_force(levels.transpose(0, 1, 4, 2, 3), abs(level)))


def naf(n: int) -> int:
    """Non-zero digits of the non-adjacent form, digit by digit."""
    terms = 0
    while n:
        if n % 2:
            n -= 2 - n % 4
            terms += 1
        n //= 2
    return terms


@settings(max_examples=200)
@given(st.integers(0, 2**30))
def test_signed_digits_are_the_non_adjacent_form(value: int) -> None:
    terms = int(signed_digits(np.array([value]))[0])
    assert terms == naf(value) <= value.bit_count()
    assert [v for v in range(16) if signed_digits(np.array([-v]))[0] < v.bit_count()] == [7, 14, 15]


def test_reads_pool_and_sum() -> None:
    levels = np.arange(2 * 1 * 1 * 2 * 2).reshape(2, 1, 1, 2, 2).astype(np.uint8)  # 0..3, then 4..7
    window = Pool("sum", (2, 2), (2, 2))
    assert Read("a", sums=(window,)).of(levels).ravel().tolist() == [6, 22]
    assert Read("a", sums=(window,), over_time=True).of(levels).ravel().tolist() == [28]
    assert Read("a", maxima=(Pool("max", (2, 2), (2, 2)),)).of(levels).ravel().tolist() == [3, 7]
    assert Read("a").of(levels) is levels
    signed = np.array([1, -1, 1, 1], np.int8).reshape(1, 1, 1, 2, 2)
    assert Read("a", sums=(window,)).of(signed).ravel().tolist() == [2]
    full = np.full((3, 1, 1, 2, 2), 100, np.int8)  # sums do not fit into bytes
    assert Read("a", sums=(window,)).of(full).ravel().tolist() == [400] * 3
    assert Read("a", over_time=True).of(full).ravel().tolist() == [300] * 4
    assert Read("a", sums=(window,), absolute=True).of(signed).ravel().tolist() == [4]


def some_levels(graph: Graph, images: int = 3, least: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {layer.name: (graph.timesteps, images, *layer.shape) for layer in graph.layers}
    return {
        name: rng.integers(least, graph.spec(name).n_max + 1, shape).astype(np.int8) for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("sn1", lambda x: x[:1], r"levels of layer 'sn1' must be \[2, B, 2, 8, 8\], got \[1, 3, 2, 8, 8\]"),
        ("sn1", lambda x: x[..., :7], r"'sn1' must be \[2, B, 2, 8, 8\]"),
        ("sn1", lambda x: x.transpose(0, 1, 3, 4, 2), r"'sn1' must be \[2, B, 2, 8, 8\]"),
        ("sn1", lambda x: x[:, 0, 0, 0, 0], r"'sn1' must be \[2, B, 2, 8, 8\], got \[2\]"),
        ("sn1", lambda x: 0.4 * x, "'sn1' must be integers, got float64: give levels, as record_levels"),
        ("sn1", lambda x: 10 * x, "'sn1' must be 0 to 5, got 0 to 50"),
        ("sn1", lambda x: -x, "'sn1' must be 0 to 5, got -5 to 0"),
        ("sn1", lambda x: x[:, :2], "layers 'sn1' and .* have levels of 2 and 3 images: give those of one batch"),
        ("sn9", lambda x: x, "the network has no layer 'sn9'; did you mean 'sn1'"),
        ("input", lambda x: np.zeros((3, 3, 8, 8), np.uint8), r"'input' must be \[1, B, 3, 8, 8\], got \[3, 3, 8, 8\]"),
        ("input", lambda x: np.zeros((1, 3, 3, 8, 8)), "pixels of 'input' must be integers, got float64: .* uint8"),
        ("input", lambda x: np.full((1, 3, 3, 8, 8), 256), "pixels of 'input' must be 0 to 255, got 256 to 256"),
    ],
)
def test_what_are_no_levels_is_refused_and_nothing_counted(
    name: str, change: Callable[[np.ndarray], np.ndarray], match: str
) -> None:
    graph = lower(models.create("resnet8w2"), (3, 8, 8))
    levels, found = some_levels(graph), Tallies(graph)
    with pytest.raises(GraphError, match="no levels were recorded for layer 'sn1'"):
        found.add({})
    with pytest.raises(GraphError, match=match):
        found.add({**levels, name: change(levels["sn1"])})
    assert not found.counts
    assert found.images == 0
    found.add({**levels, "input": np.zeros((1, 3, 3, 8, 8), np.uint8)})
    assert found.images == 3


def test_signed_levels_flattened_ones_and_spikes_are_levels() -> None:
    ternary = lower(models.create("resnet8w2", neuron="ternary"), (3, 8, 8))
    levels = some_levels(ternary, least=-1)
    assert levels["sn1"].min() == -1
    flat = {name: level.reshape(*level.shape[:2], -1) for name, level in levels.items()}
    binary = lower(models.create("resnet8w2", neuron="lif"), (3, 8, 8))
    spikes = some_levels(binary)
    bools: dict[str, np.ndarray] = {name: level > 0 for name, level in spikes.items()}
    for graph, one, other in ((ternary, levels, flat), (binary, spikes, bools)):
        found, expected = Tallies(graph), Tallies(graph)
        found.add(other)
        expected.add(one)
        for read, counts in expected.counts.items():
            np.testing.assert_array_equal(found.counts[read], counts)


def test_levels_are_counted_on_a_graph() -> None:
    net = models.create("resnet8w2").eval()
    with pytest.raises(GraphError, match=r"got ResNet: give lbq\.deploy\.graph_of\(net, input_shape\)"):
        Tallies(net)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"got Network: give its \.network"):
        Tallies(deploy(net, (3, 8, 8), mean=[0.5] * 3, std=[0.25] * 3))  # type: ignore[arg-type]


def test_counts_made_elsewhere_add_up_and_are_left_alone() -> None:
    found, read = Tallies(lower(models.create("resnet8w2"), (3, 8, 8))), Read("sn1")
    counts = np.arange(12).reshape(2, 1, 6)
    for _ in range(3):
        found.add_counts({read: counts}, 4)
    assert found.images == 12
    np.testing.assert_array_equal(found.counts[read], 3 * counts)
    np.testing.assert_array_equal(counts.ravel(), np.arange(12))


def test_memory_that_holds_other_levels_is_counted_anew() -> None:
    """As an engine gives it: one array for image after image; and then another, of fewer images."""
    graph = lower(models.create("resnet8w2"), (3, 8, 8))
    name = graph.layers[-1].name  # what the readout sums over time and positions
    channels, height, width = graph[name].shape
    rng, found, expected = np.random.default_rng(2), Tallies(graph), Tallies(graph)
    for batch in (2, 1, 2):
        memory = np.zeros((graph.timesteps, batch, height, width, channels), np.uint8).transpose(0, 1, 4, 2, 3)
        for _ in range(3):
            memory[...] = rng.integers(0, 6, memory.shape)
            found.add_layer(name, memory)
            expected.add_layer(name, memory.copy("C"))  # a new array, which NumPy counts
    assert set(found.counts) == set(expected.counts)
    assert len(found.counts) > 1
    for read, counts in expected.counts.items():
        np.testing.assert_array_equal(found.counts[read], counts)
