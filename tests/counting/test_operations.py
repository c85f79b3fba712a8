"""Counts against brute force and against what the executor did; energies against the paper's table, to the digit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lbq import models
from lbq.counting import technology
from lbq.counting.measurement import Measurement
from lbq.counting.operations import (
    HOROWITZ,
    PAPER_BACKENDS,
    Count,
    Counter,
    Energies,
    Mode,
    Operations,
    count,
    energy_mj,
    popcount,
    saved,
)
from lbq.deploy import absorb, deploy, lower
from lbq.deploy.float_execution import execute
from lbq.engine import Network
from lbq.engine.convolution import BACKENDS
from lbq.errors import GraphError
from lbq.graph import INPUT, Graph
from lbq.graph.levels import pool
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from lbq.report.cost_tables import cost_table
from lbq.results import paper
from tests.support.small_nets import Functional

# The paper's table "Accuracy and modeled arithmetic-cost comparison on CIFAR-10 using ResNet-20"
PUBLISHED = """
ANN      97.52 2587.24 N/A     N/A   11.90 --
Binary   91.81 3.54    79.59   N/A   0.09  135.38
Ternary  94.11 3.54    1693.84 N/A   1.54  7.72
LBQ(2)   96.73 3.54    542.72  0.385 0.50  23.58
LBQ(5)   97.45 3.54    945.69  0.695 0.87  13.72
LBQ(10)  97.44 3.54    1203.80 0.938 1.10  10.82
LBQ(20)  97.35 3.54    1163.20 0.983 1.06  11.19
"""
PUBLISHED_REDUCTIONS = {
    "Binary": 0.0,
    "Ternary": 0.0,
    "LBQ (2)": 25.41,
    "LBQ (5)": 40.52,
    "LBQ (10)": 53.30,
    "LBQ (20)": 58.88,
}


def test_the_papers_energy_table_to_the_digit() -> None:
    """Eq. energy_proxy on the paper's own counts."""
    setting = ("Dataset", "Network", "Epochs", "Origin")
    rows = [list(row.values()) for row in cost_table([]).texts(*setting)]
    assert [[text.replace(" ", "").replace(",", "") or "--" for text in row] for row in rows] == [
        line.split() for line in PUBLISHED.strip().splitlines()
    ]


def test_the_papers_reductions_to_the_digit() -> None:
    for method, (unary, bit_sparse) in paper.ACCUMULATIONS.items():
        assert round(saved(bit_sparse, unary), 2) == PUBLISHED_REDUCTIONS[method]
    assert (saved(0, 5), saved(5, 0)) == (100.0, 0.0)


def test_the_papers_network_is_ours() -> None:
    graph = lower(models.create("resnet20w128"), (3, 32, 32))
    assert (graph.macs, graph.stem_macs) == (paper.ANN_MACS, paper.STEM_MACS)


def test_energy_terms() -> None:
    ops = Operations(fp_macs=1e9, accumulations=2e9, formations=3e9, shifts=4e9)
    assert energy_mj(ops) == pytest.approx(4.6 + 1.8 + 0.3 + 0.4)
    assert energy_mj(ops, q=5) == pytest.approx(4.6 + 1.8 + 1.5 + 0.4)
    assert energy_mj(ops, Energies(shift=0.0)) == pytest.approx(4.6 + 1.8 + 0.3)
    assert (HOROWITZ.fp_mac, HOROWITZ.accumulate, HOROWITZ.formation) == (4.6, 0.9, 0.1)
    with pytest.raises(
        TypeError, match=r"table must be lbq\.counting\.operations\.Energies, got Technology: give its \.paper"
    ):
        energy_mj(ops, technology.DEFAULT)  # type: ignore[arg-type]
    assert energy_mj(ops, technology.DEFAULT.paper) == energy_mj(ops)


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1))
def test_popcount(values: list[int]) -> None:
    assert popcount(np.array(values)).tolist() == [abs(v).bit_count() for v in values]


def tiny(neuron: str = "lbq", id: str = "resnet8w2", seed: int = 0) -> tuple[Graph, dict[str, np.ndarray]]:
    """A small network with levels recorded from a run on random inputs."""
    torch.manual_seed(seed)
    net = models.create(id, neuron=neuron).double()
    net(torch.randn(8, 3, 8, 8, dtype=torch.float64) * 3)
    graph = lower(net.eval(), (3, 8, 8))
    x = np.random.default_rng(seed).normal(size=(2, 3, 8, 8)) * 3
    result = execute(absorb(graph), x)
    return graph, result.levels


def brute_force(graph: Graph, levels: dict[str, np.ndarray]) -> dict[str, Count]:
    """Every synapse of every image, timestep, output position, tap and channel, in plain loops."""
    counts = {}
    unit_events = all(graph.spec(layer.name).n_max == 1 for layer in graph.layers)
    for s in graph.synapses:
        if s.source == INPUT or s.kind == "identity":
            continue
        steps = np.stack([pool(step, s.pools) for step in levels[s.source]])
        events = np.stack([pool(np.abs(step), s.pools) for step in levels[s.source]])
        if s in graph.readout.synapses:  # once, on sums over time
            steps, events = steps.sum(0, keepdims=True), events.sum(0, keepdims=True)
        total, images, fan = Count(), steps.shape[1], s.weight.shape[0]
        for oy, ox, ky, kx in np.ndindex(*s.out_shape[1:], *s.weight.shape[2:]):
            y, x = oy * s.stride[0] + ky - s.padding[0], ox * s.stride[1] + kx - s.padding[1]
            if not (0 <= y < s.in_shape[1] and 0 <= x < s.in_shape[2]):
                continue
            for value, event in zip(np.abs(steps[..., y, x]).flat, events[..., y, x].flat, strict=True):
                bits = int(value).bit_count()
                total.unary += fan * int(event if unit_events else value) / images
                total.bit_sparse += fan * bits / images
                total.shifts += fan * (bits - int(value) % 2) / images
                total.events += fan * int(event if unit_events else bool(value)) / images
        counts[s.name] = total
    return counts


@pytest.mark.parametrize("neuron", ["lbq", "ternary", "lif"])
def test_exact_counts_equal_brute_force(neuron: str) -> None:
    """Eqs. unary_acs, bit_sparse_acs, explicit_shifts and the unit-event count, border-exact, per synapse."""
    graph, levels = tiny(neuron)
    account = count(graph, levels)
    expected = brute_force(graph, levels)
    assert set(account.synapses) == set(expected)
    assert sum(c.unary for c in expected.values()) > 0
    for name, counted in account.synapses.items():
        for quantity in ("unary", "bit_sparse", "shifts", "events"):
            assert getattr(counted, quantity) == pytest.approx(getattr(expected[name], quantity)), (name, quantity)


@pytest.mark.parametrize(("neuron", "id"), [("lbq", "resnet18w2"), ("lif", "resnet8w2"), ("ternary", "vgg11w2")])
def test_exact_counts_equal_what_the_engine_did(neuron: str, id: str) -> None:
    """Border-exact, synapse by synapse, shortcuts, first layer on pixel planes and readout included; and the explicit
    backend's shifts. What the engine executes and what the closed forms say of its levels are two programs."""
    net = deployed(neuron, id)
    x = np.random.default_rng(1).integers(0, 256, (3, 3, 32, 32), np.uint8)
    out = net.run(x, "bitplane", trace=True, backend="explicit")
    assert out.levels is not None
    account = count(net.network, {**out.levels, INPUT: x[None]})
    counts = {**account.synapses, **account.shortcuts, **account.stem}
    assert set(counts) == set(out.counts) == {s.name for s in net.network.synapses}
    for name, counted in counts.items():
        assert counted.bit_sparse * len(x) == pytest.approx(out.counts[name].accumulations), name
        if name not in account.shortcuts:
            assert counted.shifts * len(x) == pytest.approx(out.counts[name].shifts), name
    for s in net.network.synapses:
        if s.kind == "conv" and s.source != INPUT:  # formed once per tensor; the engine forms them for each reader
            assert out.counts[s.name].formations == pytest.approx(account.formations[s.source] * len(x)), s.name
    assert sum(counts.accumulations for counts in out.counts.values()) > 0
    assert all(0 < counts.events <= counts.macs for counts in account.stem.values())  # a pixel is one event, if any


def deployed(neuron: str, id: str) -> Network:
    torch.manual_seed(0)
    net = models.create(id, neuron=neuron, timesteps=3).double()
    for _ in range(3):
        net(torch.randn(4, 3, 32, 32, dtype=torch.float64))
    return deploy(net.eval(), (3, 32, 32), mean=[0.5] * 3, std=[0.25] * 3)


def test_rate_counts_are_rates_times_macs() -> None:
    graph, levels = tiny()
    account = count(graph, levels, "rate")
    for s in graph.synapses:
        if s.source != INPUT and s.kind == "conv":
            level, counted = levels[s.source], account.synapses[s.name]
            assert counted.unary == pytest.approx(level.mean() * s.macs * 2)
            assert counted.bit_sparse == pytest.approx(popcount(level).mean() * s.macs * 2)
            assert counted.events == pytest.approx((level != 0).mean() * s.macs * 2)
            assert counted.macs == s.macs * 2
    shortcuts = {s.name: levels[s.source].sum() / 2 for s in graph.synapses if s.kind == "identity"}
    assert {name: counted.unary for name, counted in account.shortcuts.items()} == pytest.approx(shortcuts)


def test_formations_are_counted_once_per_tensor() -> None:
    """Two convolutions read layer1's output; its bits are formed once. The rate mode sums over all neurons."""
    graph, levels = tiny()
    rate = count(graph, levels, "rate")
    everything = sum(int(popcount(level).sum()) for level in levels.values()) / 2
    assert rate.total.formations == pytest.approx(everything)
    exact = count(graph, levels)
    sources = [s.source for s in graph.synapses if s.kind == "conv" and s.source != INPUT]
    assert list(exact.formations) == list(dict.fromkeys(sources))  # equal networks give equal files
    last = pool(levels["layer3.0.sn2"].sum(0), graph.readout.synapses[0].pools)
    pooled = int(popcount(np.asarray(last, np.int64)).sum()) / 2
    assert exact.formations["layer3.0.sn2"] == pytest.approx(pooled)


def test_shifts_by_backend() -> None:
    graph, levels = tiny()
    account = count(graph, levels)
    assert account.shifts("preshifted") == account.shifts("fused") == 0
    assert account.shifts("explicit") == account.total.shifts > 0
    assert account.shifts("horner") == account.horner > 0
    older = replace(account, level_bits=0, horner=0.0)  # as older files have it: two of 3 planes
    assert older.shifts("horner") == account.outputs * 2
    assert account.energy_mj("explicit") > account.energy_mj("fused") == account.energy_mj()
    tenfold = Energies(46.0, 9.0, 1.0, 1.0)  # prices are of both sides
    assert account.energy_mj(table=tenfold) == pytest.approx(10 * account.energy_mj())
    assert account.ann_energy_mj(tenfold) == pytest.approx(10 * account.ann_energy_mj())
    assert set(PAPER_BACKENDS) == set(BACKENDS) - {"horner"}
    with pytest.raises(ValueError, match="backend must be one of horner, preshifted, fused, explicit, got 'by hand'"):
        account.shifts("by hand")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["rate", "exact"])
@pytest.mark.parametrize("neuron", ["lif", "ternary"])
def test_unit_events_need_no_formation(neuron: str, mode: Mode) -> None:
    graph, levels = tiny(neuron)
    account = count(graph, levels, mode)
    assert account.unit_events
    assert account.operations("explicit") == Operations(account.fp_macs, account.total.events)
    assert account.total.events == account.total.unary
    assert account.shifts("explicit") == account.horner == account.pool_adds == 0
    assert account.level_bits == (2 if neuron == "ternary" else 1)  # with the sign
    head = "fc" if mode == "exact" else ""  # whose sums by planes would need fewer
    for name, counted in account.synapses.items():
        assert (counted.bit_sparse, counted.shifts) == (counted.events, 0) or name == head


@pytest.mark.parametrize("mode", ["rate", "exact"])
def test_a_network_that_always_fires_once_costs_what_its_ann_costs(mode: Mode) -> None:
    """All levels 1, one timestep: accumulations and first-layer MACs are the ANN's MACs, in either way of counting."""
    graph = lower(models.create("resnet8w2", timesteps=1, neuron={"name": "lbq", "n_max": 5}), (3, 8, 8))
    levels = {layer.name: np.ones((1, 1, *layer.shape), np.int64) for layer in graph.layers}
    account = count(graph, levels, mode)
    head = graph.readout.synapses[0]
    pooled = 4 if mode == "exact" else 1  # the head then reads sums over its 2x2 window
    assert account.total.unary + account.fp_macs == account.ann_macs + (pooled - 1) * head.macs
    assert account.ann_macs == (sum(s.valid_macs for s in graph.synapses) if mode == "exact" else graph.macs)


def lowered(function: Any, side: int, timesteps: int = 2, /, **layers: nn.Module) -> Graph:
    """Of a network of this forward that has a first convolution and two neurons, on images [3, side, side]."""
    always = {"conv": nn.Conv2d(3, 2, 1), "sn": BurstNeuron(3), "sn2": BurstNeuron(3)}
    return lower(Functional(function, timesteps, **{**always, **layers}).eval(), (3, side, side))


def windows(pooling: nn.Module, size: int, timesteps: int = 2) -> Graph:
    """Means over windows that overlap, between two layers."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.sn2(over_time(m.sn(over_time(x, m.conv, timesteps=timesteps)), m.pooling, m.conv2))
        return over_time(x.flatten(2), m.fc, spatial=1).mean(0)

    fc = nn.Linear(4 * size * size, 3)
    return lowered(forward, 5, timesteps, pooling=pooling, conv2=nn.Conv2d(2, 4, 1), fc=fc)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"), [(3, 1, 0, 3), (3, 2, 1, 3), (2, 1, 0, 4), (2, 2, 0, 2)]
)
def test_additions_into_overlapping_windows_equal_brute_force(
    kernel: int, stride: int, padding: int, size: int
) -> None:
    """Each non-zero level is added into every window that holds it, one addition at a time."""
    graph = windows(nn.AvgPool2d(kernel, stride, padding), size)
    random = np.random.default_rng(0)
    levels = {layer.name: random.integers(0, 4, (2, 3, *layer.shape)) for layer in graph.layers}
    additions = int((levels["sn2"] != 0).sum())  # over time, in front of the readout
    for plane in levels["sn"].reshape(-1, 5, 5):
        for oy, ox, ky, kx in np.ndindex(size, size, kernel, kernel):
            y, x = oy * stride + ky - padding, ox * stride + kx - padding
            additions += bool(0 <= y < 5 and 0 <= x < 5 and plane[y, x])
    assert count(graph, levels).pool_adds == pytest.approx(additions / 3)
    assert count(graph, levels, "rate").pool_adds == 0


def test_one_timestep_without_windows_adds_nothing_up() -> None:
    graph = windows(nn.Identity(), 5, timesteps=1)
    levels = {layer.name: np.ones((1, 1, *layer.shape), np.int64) for layer in graph.layers}
    assert count(graph, levels).pool_adds == 0


def test_additions_behind_a_max_pool() -> None:
    graph = windows(nn.Sequential(nn.MaxPool2d(2, 1), nn.AvgPool2d(2)), 2)
    random = np.random.default_rng(0)
    levels = {layer.name: random.integers(0, 2, (2, 3, *layer.shape)) for layer in graph.layers}
    largest = np.lib.stride_tricks.sliding_window_view(levels["sn"], (2, 2), (3, 4)).max((5, 6))
    assert count(graph, levels).pool_adds == pytest.approx(((largest != 0).sum() + (levels["sn2"] != 0).sum()) / 3)


def test_rate_counts_of_pooled_shortcuts_and_votes() -> None:
    """Rates times what the shortcut adds, as for weights, whatever was pooled before it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.sn(over_time(x, m.conv, timesteps=2))
        return m.sn2(over_time(x, m.conv2) + over_time(x, m.pooling)).mean((0, 3, 4))

    layers = {"conv": nn.Conv2d(3, 4, 1), "conv2": nn.Conv2d(4, 4, 2, 2), "pooling": nn.AvgPool2d(2)}
    graph = lowered(forward, 4, **layers)
    levels = {layer.name: np.full((2, 1, *layer.shape), 3) for layer in graph.layers}
    rate = count(graph, levels, "rate").shortcuts
    assert {name: one.bit_sparse for name, one in rate.items()} == {
        "sn2.shortcut": 2 * 2 * 16,
        "sn2->identity": 2 * 2 * 4,
    }
    exact = count(graph, levels).shortcuts  # sums: 12 over four levels, 24 over all of these and time
    assert {name: one.bit_sparse for name, one in exact.items()} == {"sn2.shortcut": 2 * 2 * 16, "sn2->identity": 2 * 4}


def test_what_several_synapses_read_is_summed_and_formed_once() -> None:
    """Two convolutions of the same means over windows, and one of the levels themselves."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.sn(over_time(x, m.conv, timesteps=2))
        pooled = over_time(x, m.pooling)
        x = m.sn2(over_time(pooled, m.one) + over_time(pooled, m.two) + over_time(x, m.strided))
        return over_time(x.flatten(2), m.fc, spatial=1).mean(0)

    layers = {"one": nn.Conv2d(2, 4, 1), "two": nn.Conv2d(2, 4, 1), "strided": nn.Conv2d(2, 4, 2, 2)}
    graph = lowered(forward, 4, **layers, pooling=nn.AvgPool2d(2), fc=nn.Linear(16, 3))
    random = np.random.default_rng(0)
    levels = {layer.name: random.integers(0, 4, (2, 3, *layer.shape)) for layer in graph.layers}
    account = count(graph, levels)
    sums = levels["sn"].reshape(2, 3, 2, 2, 2, 2, 2).sum((4, 6))
    assert account.formations["sn"] == pytest.approx((popcount(levels["sn"]).sum() + popcount(sums).sum()) / 3)
    assert account.pool_adds == pytest.approx(sum((level != 0).sum() for level in levels.values()) / 3)
    assert account.outputs == 2 * 3 * 16 + 3  # the head once, on sums over time


def test_horners_shifts_by_hand() -> None:
    """One for each output and plane above the lowest: levels up to 5 have three planes."""
    graph, levels = tiny()
    # of convolutions that read levels, shortcuts' among them
    outputs = 2 * (2 * 8 * 8) + 3 * (4 * 4 * 4) + 3 * (8 * 2 * 2)
    # the head reads sums over 2 timesteps and 2 x 2 positions, up to 40: six planes
    assert count(graph, levels).horner == 2 * outputs * 2 + 10 * 5
    assert count(graph, levels, "rate").horner == 2 * (outputs + 10) * 2  # and here it reads levels


def test_batches_add_up() -> None:
    graph, levels = tiny()
    whole = count(graph, levels)
    counter = Counter(graph)
    for i in range(2):
        counter.add({name: level[:, i : i + 1] for name, level in levels.items()})
    parts = counter.account()
    assert parts.images == whole.images == 2
    assert parts.total.bit_sparse == pytest.approx(whole.total.bit_sparse)
    assert parts.active_ratio == pytest.approx(whole.active_ratio)
    assert whole.active_ratio == pytest.approx(np.mean([(level != 0).mean() for level in levels.values()]))


def test_the_first_layer_is_counted_once_for_images_and_every_step_for_events() -> None:
    net = models.create("resnet8w2")
    for static, times in ((True, 1), (False, 2)):
        graph = lower(net, (3, 8, 8), static=static)
        levels = {layer.name: np.zeros((2, 1, *layer.shape), np.int64) for layer in graph.layers}
        assert count(graph, levels, "rate").fp_macs == times * 3 * 2 * 9 * 64
        account = count(graph, levels)
        assert account.fp_macs == times * 3 * 2 * 22**2  # 22 of 24 taps along each axis are valid
        assert (account.frames, account.ann_macs) == (times, graph.valid_macs)  # a rival sees the frames' sum


def test_an_ann_on_event_frames_is_counted_with_every_frame() -> None:
    """Itself; as the rival of a spiking network it takes one pass."""
    graph = lower(models.create("resnet8w2", neuron="relu", timesteps=4), (3, 8, 8), static=False)
    measured = Measurement(graph, 1, 50.0, None)
    assert measured.ann_macs == 4 * graph.valid_macs
    assert measured.ann_energy_mj() == pytest.approx(4 * energy_mj(Operations(graph.valid_macs)))
    assert measured.to_dict()["frames"] == 4
    static = lower(models.create("resnet8w2", neuron="relu", timesteps=4), (3, 8, 8))
    assert Measurement(static, 1, 50.0, None).ann_macs == graph.valid_macs


def test_what_cannot_be_counted_is_refused() -> None:
    graph = lower(models.create("resnet8w2"), (3, 8, 8))
    with pytest.raises(GraphError, match="nothing was counted"):
        Counter(graph).account()
    with pytest.raises(ValueError, match="mode"):
        Counter(graph, "fast")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="not a spiking neuron"):
        Counter(lower(models.create("resnet8w2", neuron="relu"), (3, 8, 8)))
