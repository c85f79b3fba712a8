"""A neuron on the scores Q K^T on integers: every engine gives the same, bounds are proved, files are not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lbq import engine
from lbq.counting.operations import count
from lbq.counting.products import FIELDS, product_totals, worths
from lbq.engine import Network
from lbq.engine.attention import dense_products, multiply
from lbq.engine.cuda import plain
from lbq.engine.file import artefact
from lbq.engine.file.reading import Reader
from lbq.engine.products import ProductStep
from lbq.errors import ArtefactError
from lbq.graph import Synapse
from lbq.graph.integer import MEMBRANE_BOUND, largest_read
from lbq.graph.levels import synapse_product
from tests.support.products import check_native
from tests.support.small_nets import deployed, pixels


def pair(shape: tuple[int, int, int], heads: int) -> tuple[Synapse, Synapse]:
    """Q K^T and A V of levels of this shape."""
    channels, height, width = shape
    square = heads, height * width, height * width
    scores = Synapse("s", "q", "matmul", np.ones(heads, np.int32), shape, square, keys="k", heads=heads)
    return scores, Synapse("a", "s", "matmul", np.ones(channels, np.int32), square, shape, values="v", heads=heads)


@settings(max_examples=15, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 2, 33, 65]),
    highest=st.sampled_from([1, 5, 127]),
    signs=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_every_way_to_both_products_is_the_same(
    sides: Any, heads: int, width: int, highest: int, signs: Any, seed: int
) -> None:
    rng, shape, tokens = np.random.default_rng(seed), (heads * width, *sides), sides[0] * sides[1]

    def levels(signed: bool, *size: int) -> Any:
        low = -highest if signed else 0
        return rng.integers(low, highest + 1, (2, *size)).astype(np.int8 if signed else np.uint8)

    first, second = pair(shape, heads)
    q, k, s = levels(signs[0], *shape), levels(signs[1], *shape), levels(signs[0], heads, tokens, tokens)
    by_head = [x.astype(np.int64).reshape(2, heads, width, tokens) for x in (q, k)]
    cases = [
        (first, (q, k), np.einsum("bhdn,bhdm->bhnm", *by_head)),
        (second, (s, k), np.einsum("bhnm,bhdm->bhdn", s.astype(np.int64), by_head[1]).reshape(2, *shape)),
    ]
    for synapse, operands, expected in cases:
        largest = largest_read(synapse, dict.fromkeys("qksv", highest))
        assert np.abs(expected).max() <= largest
        wide = [x.astype(np.int64) for x in operands]
        np.testing.assert_array_equal(synapse_product(synapse, wide), expected)
        tensors = [torch.from_numpy(x.astype(np.int32)) for x in operands]
        np.testing.assert_array_equal(plain.multiply(synapse, tensors, torch.float64).numpy(), expected)
        last = [x.transpose(0, 2, 3, 1).copy() for x in operands]
        counted = product_totals(synapse, [x[None] for x in operands])
        for planes in (True, False):
            out, counts = multiply(synapse, last, largest, planes)
            np.testing.assert_array_equal(out.transpose(0, 3, 1, 2), expected)
            check_native(ProductStep(synapse, last, planes), out, counts)
            bits = int(counted[FIELDS.index("bit_sparse")])
            done = (bits, 0, counts.popcounts) if planes else (0, 2 * dense_products(synapse), 0)
            assert (counts.accumulations, counts.products, counts.ands) == done
        assert not synapse.linear
        assert dense_products(synapse) == synapse.macs == tokens**2 * shape[0]


@pytest.mark.parametrize(
    ("shape", "heads", "n_max"), [((4, 2, 3), 2, 5), ((3, 1, 4), 1, 3), ((6, 2, 2), 3, 1)], ids=str
)
def test_counts_equal_brute_force(shape: tuple[int, int, int], heads: int, n_max: int) -> None:
    rng, (channels, height, width) = np.random.default_rng(0), shape
    first, second = pair(shape, heads)
    tokens, depth = height * width, channels // heads
    q, k, v = rng.integers(-n_max, n_max + 1, (3, 1, 2, *shape)).astype(np.int8)
    s = rng.integers(0, n_max + 1, (1, 2, heads, tokens, tokens)).astype(np.uint8)
    expected: Any = np.zeros((2, len(FIELDS)), np.int64)

    def worth(level: Any) -> Any:
        return worths(np.array([abs(int(level))]))[:, 0]

    for b, h, n, m, c in np.ndindex(2, heads, tokens, tokens, depth):
        a, d, e = (x[0, b].reshape(heads, depth, tokens)[h, c] for x in (q, k, v))
        expected[0] += worth(a[n]) * worth(d[m])
        expected[1] += worth(s[0, b, h, n, m]) * worth(e[m])
    np.testing.assert_array_equal(product_totals(first, (q, k)), expected[0])
    np.testing.assert_array_equal(product_totals(second, (s, v)), expected[1])


def test_bounds_are_reached_and_not_exceeded() -> None:
    """12 heads of 32 channels, 64 tokens, levels up to 5: 800 for a score, and 64 * 5 * 5 for a current behind its neuron."""
    first, second = pair((384, 8, 8), 12)
    full, scores = np.full((1, 8, 8, 384), 5, np.uint8), np.full((1, 64, 64, 12), 5, np.uint8)
    for synapse, operands, bound in ((first, (full, full), 800), (second, (scores, full), 1600)):
        assert largest_read(synapse, dict.fromkeys("qksv", 5)) == bound
        for planes in (True, False):
            whole, counts = multiply(synapse, operands, bound, planes)
            assert (whole == bound).all()
            check_native(ProductStep(synapse, operands, planes), whole, counts)


@pytest.fixture(scope="module")
def net() -> Network:
    return deployed("spikformer1x64-scores", shape=(3, 16, 16))


def test_all_engines_are_equal(net: Network, tmp_path: Path) -> None:
    engine.save(tmp_path / "net.lbq", net)
    net = engine.load(tmp_path / "net.lbq")
    x = pixels(4, 3, 16, 16)
    expected = net.run(x, "dense", trace=True)
    assert expected.levels is not None
    assert all(expected.levels[f"blocks.1.sn_{name}"].any() for name in ("scores", "attention"))
    ways = [net.run(x, way, trace=True, threads=2) for way in ("bitplane", "auto", "auto")]
    for out in (*ways, net.on_device("cpu").run(x, trace=True)):
        assert out.levels is not None
        np.testing.assert_array_equal(out.logits, expected.logits)
        for layer, levels in expected.levels.items():
            np.testing.assert_array_equal(out.levels[layer], levels, err_msg=layer)
    account = count(net.network, expected.levels)
    assert account.products == ("blocks.1.scores", "blocks.1.attention")
    rates = count(net.network, expected.levels, "rate").synapses
    for name, (one, other) in zip(account.products, (("q.sn", "k.sn"), ("sn_scores", "v.sn")), strict=True):
        assert account.synapses[name].bit_sparse * 4 == ways[0].counts[name].accumulations > 0
        means = [np.mean(expected.levels[f"blocks.1.{layer}"]) for layer in (one, other)]
        assert rates[name].unary == pytest.approx(2 * 16**2 * 64 * np.prod(means))


def test_constants_are_exact_and_bounds_proved(net: Network) -> None:
    """Products are all that leads to either layer, so their factor is the unit and nothing is rounded."""
    for name in ("scores", "attention"):
        layer = net.network[f"blocks.1.sn_{name}"]
        assert (layer.matmuls[0].weight == 2**layer.fraction).all()
    text = artefact.proved(net.network)[1]
    assert text["version"] == 2
    assert all(layer["bound"] < MEMBRANE_BOUND for layer in text["layers"])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scores", {"heads": 4}, "tensor 'blocks.1.scores/weight' must be int32 [4], not int32 [2]"),
        ("scores", {"heads": 3}, "3 heads must divide 64 channels"),
        ("scores", {"keys": "stem.0.sn"}, "'stem.0.sn' is no layer before it of the shape (64, 4, 4)"),
        ("scores", {"keys": ""}, "'' is no layer before it"),
        ("scores", {"keys": None}, "wrong or missing: 'keys, values'"),
        ("scores", {"values": "blocks.1.v.sn"}, "must be int32 [64], not int32 [2]"),
        ("attention", {"keys": "blocks.1.k.sn"}, "'blocks.1.k.sn' is no layer before it of the shape (2, 16, 16)"),
        ("attention", {"heads": 1}, "'blocks.1.sn_scores' is no layer before it of the shape (1, 16, 16)"),
        ("attention", {"source": "blocks.1.q.sn"}, "'blocks.1.q.sn' is no layer before it of the shape (2, 16, 16)"),
        ("attention", {"values": "blocks.1.sn_scores"}, "no layer before it of the shape (2, 256, 256)"),
        ("attention", {"values": "input"}, "is no layer before it of the shape"),
    ],
)
def test_files_that_lie_are_refused(net: Network, name: str, change: dict[str, Any], message: str) -> None:
    tensors, text = artefact.proved(net.network)
    forged = json.loads(json.dumps(text))
    synapses = {s["name"]: s for layer in forged["layers"] for s in layer["synapses"]}
    synapse = synapses[f"blocks.1.{name}"]
    synapse.update(change)
    for key in [key for key, value in change.items() if value is None]:
        del synapse[key]
    with pytest.raises(ArtefactError) as error:
        Reader(tensors).network(forged)
    assert message in str(error.value)
