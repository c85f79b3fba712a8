"""Counts of attention and gates against brute force, and against what the engine executed."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lbq.counting.analysis import Analysis
from lbq.counting.costs import costs
from lbq.counting.measurement import Measurement, account_from
from lbq.counting.operations import Counter, Mode, count
from lbq.counting.products import ProductTallies, as_counts, attention_totals, gate_totals
from lbq.counting.tally import Tallies
from lbq.data.testset import TestSet
from lbq.engine import Network
from lbq.graph import INPUT
from lbq.measuring.observer import Observer
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.small_nets import Functional, deployed, normalised, pixels, small

Ints = np.ndarray[Any, Any]
KINDS = ("unary", "bit_sparse", "shifts", "events")


def one(level: int) -> dict[str, int]:
    """What one level is worth alone."""
    size = abs(level)
    bits = size.bit_count()
    return {"unary": size, "bit_sparse": bits, "shifts": bits - (size & 1), "events": size != 0}


def two(a: int, b: int) -> dict[str, int]:
    """What a product of two levels is worth: pairs of set bits, of which the lowest two need no shift."""
    bits = abs(a).bit_count() * abs(b).bit_count()
    lowest = abs(a) & abs(b) & 1
    return {"unary": abs(a * b), "bit_sparse": bits, "shifts": bits - lowest, "events": a != 0 and b != 0}


def brute_force(q: Ints, k: Ints, v: Ints, heads: int, linear: bool) -> dict[str, int]:
    total = dict.fromkeys(KINDS, 0)

    def add(worth: dict[str, int]) -> None:
        for kind in KINDS:
            total[kind] += worth[kind]

    steps, batch, channels, height, width = q.shape
    tokens, d = range(height * width), channels // heads
    for t, b, h in product(range(steps), range(batch), range(heads)):
        a, c, e = (x[t, b, h * d : (h + 1) * d].reshape(d, -1).astype(int).tolist() for x in (q, k, v))
        if linear:
            for i, j in product(range(d), range(d)):
                result = 0
                for m in tokens:
                    add(two(c[i][m], e[j][m]))
                    result += c[i][m] * e[j][m]
                for n in tokens if result else ():
                    add(one(a[i][n]))
            continue
        for n, m in product(tokens, tokens):
            score = 0
            for i in range(d):
                add(two(a[i][n], c[i][m]))
                score += a[i][n] * c[i][m]
            for j in range(d) if score else ():
                add(one(e[j][m]))
    return total


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(
    ("shape", "heads", "n_max", "signed"),
    [((2, 1, 4, 2, 3), 2, 5, False), ((1, 2, 3, 1, 4), 1, 3, True), ((1, 1, 6, 2, 2), 3, 1, True)],
)
def test_attention_equals_brute_force(shape: Any, heads: int, n_max: int, signed: bool, linear: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.integers(-n_max if signed else 0, n_max + 1, shape).astype(np.int8) * rng.integers(0, 2, shape, np.int8)
        for _ in range(3)
    )
    counts = as_counts(attention_totals(q, k, v, heads, linear))
    assert {kind: counts[kind] for kind in KINDS} == brute_force(q, k, v, heads, linear)


def test_gates_equal_brute_force() -> None:
    rng = np.random.default_rng(1)
    a, k = rng.integers(-3, 4, (2, 1, 2, 2, 2)), rng.integers(0, 6, (2, 1, 6, 2, 2))
    expected = dict.fromkeys(KINDS, 0)
    for t, c, y, x in product(range(2), range(6), range(2), range(2)):
        worth = two(int(a[t, 0, c // 3, y, x]), int(k[t, 0, c, y, x]))
        expected = {kind: expected[kind] + worth[kind] for kind in KINDS}
    counts = as_counts(gate_totals(a, k))
    assert {kind: counts[kind] for kind in KINDS} == expected


def test_gates_of_high_levels_do_not_wrap() -> None:
    """200 x 200 is more than int16 holds. Networks that are not deployed may have such levels."""
    from lbq.deploy import absorb, lower

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.sn(over_time(x, m.conv, timesteps=1))
        return m.fc((y * y).mean((-2, -1))).mean(0)

    layers = {"conv": nn.Conv2d(3, 4, 4), "sn": BurstNeuron(200), "fc": nn.Linear(4, 3)}
    tallies = ProductTallies(absorb(lower(Functional(forward, 1, **layers), (3, 8, 8))))
    ((name, levels),) = tallies.add("sn", np.full((1, 1, 4, 5, 5), 200, np.int16))
    assert (name, levels.min(), levels.max()) == ("sn*sn", 40_000, 40_000)
    assert tallies.exact(1)[name]["unary"] == 100 * 40_000


@pytest.fixture(scope="module")
def net() -> Network:
    return deployed("qkformer3x32", shape=(3, 8, 8))


def test_accounts_equal_what_the_engine_did(net: Network) -> None:
    x = pixels(4, 3, 8, 8)
    out = net.run(x, "bitplane", trace=True)
    assert out.levels is not None
    account = count(net.network, dict(reversed(out.levels.items())))  # in any order
    assert account.products == (*net.network.gate_names, "stages.2.0.attention")
    for name in (*account.products, "stages.0.0.bn", *account.shortcuts):
        if name in out.counts:
            counted = account.synapses.get(name) or account.shortcuts[name]
            assert counted.bit_sparse * 4 == pytest.approx(out.counts[name].accumulations)
    assert account.total.bit_sparse * 4 + account.shortcut_total.bit_sparse * 4 == pytest.approx(
        out.total.accumulations
        - sum(out.counts[s.name].accumulations for s in net.network.synapses if s.source == INPUT)
    )
    assert account.ann_macs == net.network.valid_macs
    attention = account.synapses["stages.2.0.attention"]
    assert attention.macs == 2 * 2 * 4**2 * 32  # timesteps, two products, tokens^2, channels


def test_rates_are_means_times_macs(net: Network) -> None:
    out = net.run(pixels(4, 3, 8, 8), "dense", trace=True)
    assert out.levels is not None
    account = count(net.network, out.levels, "rate")
    q, k, v = (np.mean(out.levels[f"stages.2.0.{name}.sn"]) for name in "qkv")
    attention = account.synapses["stages.2.0.attention"]
    assert attention.unary == pytest.approx(attention.macs / 2 * (q * k + v))
    gate, (factor, source) = net.network.gates[0], net.network.gates[0].operands
    events = np.mean(out.levels[factor] != 0) * np.mean(out.levels[source] != 0)
    assert account.synapses[gate.name].events == pytest.approx(2 * np.prod(gate.shape) * events)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_trained_network_is_counted_as_its_levels_are(on_device: bool) -> None:
    from lbq.deploy import absorb, lower
    from lbq.neuron.recorder import record_levels

    net = small("qkformer3x32")
    graph, x = absorb(lower(net, (3, 8, 8))), normalised(pixels(3, 3, 8, 8))
    tallies = Tallies(graph)
    observer = Observer(tallies, on_device)
    with torch.no_grad(), observer.counting(net), record_levels(net) as levels:
        net(x)
    observer.finish(3)
    modes: tuple[Mode, ...] = ("exact", "rate")
    for mode in modes:
        watched, recorded = Counter(graph, mode, tallies).account(), count(graph, levels, mode)
        assert watched.synapses == recorded.synapses
        assert watched.shortcuts == recorded.shortcuts


def test_analyses_hold_products_and_prices_leave_out_their_weights(net: Network) -> None:
    from lbq.counting.deployed import analyze

    test = TestSet("images", (3, 8, 8), size=4, read=lambda start, stop: pixels(4, 3, 8, 8)[start:stop])
    analysis = Analysis.from_dict(analyze(net, test, threads=2, membranes=0).to_dict())
    account = account_from(analysis.accounts["exact"], "exact", analysis.images)
    assert len(account.products) == 3
    measured = Measurement(net.network, 4, 50.0, None)
    assert measured.ann_macs == account.ann_macs
    lines = {line.what: line.count for line in costs(account).methods[0].lines}
    assert lines["synaptic accumulations"] == pytest.approx(account.total.bit_sparse)
    assert lines["weight bytes"] == pytest.approx(account.total.bit_sparse - account.product_total.bit_sparse)
