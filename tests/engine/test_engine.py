"""The integer engines: kernels against brute force, every engine against a scalar restatement, and against each other.

Guarantee (b): every engine gives identical levels and logits, bit for bit.
"""

from __future__ import annotations

import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lbq import models
from lbq.counting.operations import count
from lbq.deploy import deploy
from lbq.engine import Network, numpy_kernels
from lbq.engine import convolution as native_kernels
from lbq.engine.convolution import Backend, Counts, Method
from lbq.engine.cuda import TorchRunner
from lbq.engine.file.container import forget
from lbq.engine.memory import Plan, Workspace
from lbq.engine.method import Prepared
from lbq.engine.neuron import NativeNeuron, NumpyNeuron, count_thresholds
from lbq.engine.runner import Runner
from lbq.engine.steps import Emitted
from lbq.engine.tape import perform
from lbq.errors import GraphError, LbqError
from lbq.graph import INPUT, Pool, Synapse
from lbq.graph.integer import MEMBRANE_BOUND, IntegerLayer, IntegerNeuron, membrane_bound, rounded_leak, synapse_bound
from lbq.graph.levels import bit_planes, planes_of, pool, popcount
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.oracle import integer_network
from tests.support.small_nets import CASES, Branches, deployed, pixels, same, warmed

Ints = np.ndarray[Any, Any]


def brute_force(
    weight: Ints, level: Ints, stride: int, padding: int, dilation: int, groups: int
) -> tuple[Ints, Counts, int]:
    """Currents of one image [H, W, I], what bit planes must do for them, one bit and weight at a time, and how many
    weights meet a level that is not zero."""
    outputs, per_group, kh, kw = weight.shape
    height, width = (
        (size + 2 * padding - dilation * (k - 1) - 1) // stride + 1
        for size, k in zip(level.shape[:2], (kh, kw), strict=True)
    )
    out, counts, met = np.zeros((height, width, outputs), np.int64), Counts(), 0
    for o, oy, ox, i, ky, kx in np.ndindex(outputs, height, width, per_group, kh, kw):
        y, x = oy * stride + ky * dilation - padding, ox * stride + kx * dilation - padding
        if not (0 <= y < level.shape[0] and 0 <= x < level.shape[1]):
            continue
        value = int(level[y, x, o // (outputs // groups) * per_group + i])
        met += value != 0
        for k in range(abs(value).bit_length()):
            if abs(value) >> k & 1:
                out[oy, ox, o] += np.sign(value) * (int(weight[o, i, ky, kx]) << k)
                counts.accumulations += 1
                counts.shifts += k > 0
    counts.formations = int(popcount(level).sum())
    counts.neurons_active = int((level != 0).sum())
    return out, counts, met


@settings(deadline=None, max_examples=25)
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
    conv = numpy_kernels.pack(weight, (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)
    first, second = (brute_force(weight, one, stride, padding, dilation, groups) for one in level)
    expected, counted, met = np.stack([first[0], second[0]]), first[1] + second[1], first[2] + second[2]
    reference = F.conv2d(
        torch.from_numpy(level.transpose(0, 3, 1, 2).astype(np.float64)), torch.from_numpy(weight.astype(np.float64)),
        None, stride, padding, dilation, groups,
    )  # fmt: skip
    np.testing.assert_array_equal(reference.numpy().transpose(0, 2, 3, 1), expected)
    horner = max(planes_of(level) - 1, 0) * expected.size
    counts_of: dict[tuple[Method, Backend], Counts] = {
        ("dense", "horner"): Counts(),
        ("level", "horner"): Counts(accumulations=met, neurons_active=counted.neurons_active),
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
    methods: tuple[Method, ...] = ("bitplane", "dense", "level")
    for method in methods:
        conv = numpy_kernels.pack(weight, accumulator=np.int64)
        assert conv.run(level, method)[0].item() == exact > 2**31
    assert numpy_kernels.pack(weight).run(level // 200, "dense")[0].item() == 699 * 32767


def test_zero_planes_cost_nothing() -> None:
    conv = numpy_kernels.pack(np.ones((2, 2, 3, 3), np.int8), padding=(1, 1))
    out, counts = conv.run(np.zeros((1, 4, 4, 2), np.uint8))
    assert not out.any()
    assert counts == Counts()
    out, counts = conv.run(np.full((1, 4, 4, 2), 4, np.uint8))  # two planes of three are empty
    assert counts.accumulations == 2 * 2 * 100
    assert conv.run(np.zeros((0, 4, 4, 2), np.uint8))[0].shape == (0, 4, 4, 2)


def test_kernels_refuse_what_they_do_not_take() -> None:
    with pytest.raises(ValueError, match="weights must be int8 or int16"):
        numpy_kernels.pack(np.ones((1, 1, 1, 1)))
    conv = numpy_kernels.pack(np.ones((1, 2, 1, 1), np.int8))
    wrong: list[Any] = [np.zeros((1, 1, 1, 3), np.uint8), np.zeros((1, 1, 1, 2)), np.zeros((1, 1, 2), np.uint8)]
    for levels in wrong:
        with pytest.raises(ValueError, match=r"levels must be integers \[B, H, W, 2\]"):
            conv.run(levels)
    good = np.zeros((1, 1, 1, 2), np.uint8)
    with pytest.raises(ValueError, match="method must be one of"):
        conv.run(good, "sparse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend must be one of"):
        conv.run(good, "bitplane", "shifted")  # type: ignore[arg-type]
    huge = numpy_kernels.pack(np.full((1, 2, 1, 1), 32767, np.int16), accumulator=np.int64)
    with pytest.raises(ValueError, match="float64 does not hold"):
        huge.run(np.full((1, 1, 1, 2), 2**40), "dense")


# Levels ----------------------------------------------------------------------------------------------------------------


def test_planes_decompose_levels() -> None:
    """Eq. bitplane_decomp: S = sum of 2^k b_k; K = ceil(log2(n_max + 1))."""
    level = np.arange(256)
    planes = bit_planes(level, 8)
    assert np.array_equal((planes * 2 ** np.arange(8)[:, None]).sum(0), level)
    for n_max, expected in ((1, 1), (2, 2), (3, 2), (5, 3), (10, 4), (20, 5), (255, 8)):
        assert replace(NEURON, n_max=n_max).planes == expected == int(np.ceil(np.log2(n_max + 1)))
        assert planes_of(np.array([0, -n_max])) == planes_of(np.array([n_max], np.uint8)) == expected


@pytest.mark.parametrize("kind", ["max", "sum"])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 1), (7, 7, 0)])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.float64])
def test_pooling_equals_pytorch(kind: str, kernel: int, stride: int, padding: int, dtype: Any) -> None:
    low = 0 if dtype == np.uint8 else -3
    width = 7 if kernel == 7 else 8  # one window over everything, too
    level = np.random.default_rng(0).integers(low, 4, (2, 3, 7, width)).astype(dtype)
    spec = Pool(kind, (kernel,) * 2, (stride,) * 2, (padding,) * 2)  # type: ignore[arg-type]
    x = torch.from_numpy(level).double()
    if kind == "max":
        expected = F.max_pool2d(x, kernel, stride, padding)
    else:
        expected = F.avg_pool2d(x, kernel, stride, padding) * kernel**2
    np.testing.assert_allclose(pool(level, (spec,)).astype(np.float64), expected.numpy())
    last = pool(level.transpose(0, 2, 3, 1), (spec,), (1, 2))
    np.testing.assert_allclose(last.transpose(0, 3, 1, 2).astype(np.float64), expected.numpy())
    assert spec.output((3, 7, width)) == expected.shape[1:]


# The neuron ------------------------------------------------------------------------------------------------------------

NEURON = IntegerNeuron(
    5, False, np.array([[100, 200, 300, 400, 500]], np.int32), np.array([100], np.int32), "once", (1, 1), True
)


def layer_of(neuron: IntegerNeuron, fraction: int = 0, bias: int = 0) -> IntegerLayer:
    weight = np.ones((1, 1, 1, 1), np.int8)
    synapse = Synapse("conv", "a", "conv", weight, (1, 1, 1), (1, 1, 1), absorbed=True)
    return IntegerLayer("sn", (synapse,), np.array([bias], np.int32), (1, 1, 1), fraction, neuron, np.ones(1))


class PerformedNeuron(NativeNeuron):
    """With NumpyNeuron's face."""

    def run(self, *arguments: Any) -> Emitted:
        step = self.step(*arguments)
        perform(step, 1)
        return step.emitted()


FORMS = (NumpyNeuron, PerformedNeuron)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("neuron", "currents", "levels"),
    [
        (NEURON, [260, 0, 0], [2, 0, 0]),  # 260, then (160 + 1) >> 1 = 80, then 40
        (NEURON, [-301, 350], [0, 2]),  # (-301 + 1) >> 1 = -150: half rounds up, so that 200 is just reached
        (replace(NEURON, leak=None), [150, 50, 0], [1, 1, 0]),  # 150, 50 + 50, 0
        (replace(NEURON, reset_kind="level"), [260, 70], [2, 1]),  # 260 - 200 = 60, 30 + 70
        (replace(NEURON, reset_kind="hard"), [260, 99, 51], [2, 0, 1]),  # 0, 99, (99 + 1) >> 1 = 50 + 51
        (replace(NEURON, decay_reset=False), [260, 70], [2, 1]),  # 130 + 70 - 100 = 100: the reset is not decayed
        (replace(NEURON, signed=True), [-260, 0, 130], [-2, 0, 0]),  # -260 + 100 = -160, -80, -40 + 130 = 90
        (replace(NEURON, leak=(0, 1)), [260, 99], [2, 0]),
    ],
)
def test_the_neuron_by_hand(neuron: IntegerNeuron, currents: list[int], levels: list[int], form: type[Any]) -> None:
    out = np.zeros((len(currents), 1, 1, 1), neuron.dtype)
    shaped = np.array(currents, np.int32).reshape(-1, 1, 1, 1)
    found = form(layer_of(neuron)).run(shaped, [], out, False, len(currents))
    assert out.ravel().tolist() == levels
    assert found == Emitted(sum(s != 0 for s in levels), sum(abs(s).bit_count() for s in levels))


@pytest.mark.parametrize("form", FORMS)
def test_fraction_shifts_currents_and_not_the_bias(form: type[Any]) -> None:
    layer = layer_of(NEURON, fraction=3, bias=50)
    out = np.zeros((1, 1, 1, 1), np.uint8)
    form(layer).run(np.full((1, 1, 1, 1), 44, np.int32), [], out, False, 1)
    assert out.item() == 4  # 44 * 8 + 50 = 402
    shortcut = Synapse("i", "a", "identity", np.array([-37], np.int32), (1, 1, 1), (1, 1, 1), absorbed=True)
    layer = replace(layer, synapses=(*layer.synapses, shortcut))
    form(layer).run(np.full((1, 1, 1, 1), 44, np.int32), [np.full((1, 1, 1, 1), 3, np.uint8)], out, False, 1)
    assert out.item() == 2  # 402 - 111
    form(layer).run(None, [np.zeros((2, 1, 1, 1), np.uint8)], two := np.zeros((2, 1, 1, 1), np.uint8), False, 2)
    assert two.ravel().tolist() == [0, 0]  # the bias alone, 50 and 75


@settings(deadline=None)
@given(st.lists(st.integers(64, 10_000), min_size=1, max_size=9), st.integers(-(2**30), 2**30), st.booleans())
def test_thresholds_are_counted(thresholds: list[int], u: int, signed: bool) -> None:
    ordered = np.array([sorted(thresholds)], np.int32)
    level = count_thresholds(np.array([[u]], np.int32), ordered, signed).item()
    reached = sum((abs(u) if signed else u) >= t for t in thresholds)
    assert level == (-reached if signed and u < 0 else reached)


@given(st.integers(-(2**30), 2**30), st.integers(1, 16), st.data())
def test_the_leak_rounds_half_up(v: int, k: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(0, 2**k))
    found = rounded_leak(np.array([v]), (m, k)).item()
    assert found == (2 * v * m + 2**k) // 2 ** (k + 1)
    assert abs(found - v * m / 2**k) <= 0.5
    assert abs(found) <= abs(v)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-127, 127), min_size=1, max_size=6), st.integers(-5000, 5000), st.integers(0, 6),
    st.sampled_from(["once", "level", "hard"]), st.booleans(), st.booleans(), st.integers(64, 3000), st.integers(0, 3000),
    st.sampled_from([None, (1, 1), (3, 2), (65000, 16), (0, 1)]), st.integers(0, 2**31),
)  # fmt: skip
def test_no_membrane_passes_its_proved_bound(
    weights: list[int], bias: int, fraction: int, kind: Any, decay: bool, signed: bool, step: int, reset: int, leak: Any,
    seed: int,
) -> None:  # fmt: skip
    """Worst-case and random levels never take U beyond `membrane_bound`, whatever the neuron."""
    steps, inputs = 4, len(weights)
    thresholds = (step * np.arange(1, 6, dtype=np.int32))[None]
    neuron = IntegerNeuron(5, signed, thresholds, np.array([reset], np.int32), kind, leak, decay)
    weight = np.array(weights, np.int8).reshape(1, inputs, 1, 1)
    synapse = Synapse("conv", "a", "conv", weight, (inputs, 1, 1), (1, 1, 1), absorbed=True)
    layer = IntegerLayer("sn", (synapse,), np.array([bias], np.int32), (1, 1, 1), fraction, neuron, np.ones(1))
    bound = membrane_bound(layer, {"conv": 5}, steps)
    random = np.random.default_rng(seed)
    for attempt in range(6):
        level = 5 * (weight.ravel() > 0) if attempt == 0 else 5 * (weight.ravel() < 0)
        v, pending = 0, 0
        for _ in range(steps):
            if attempt > 1:
                level = random.integers(0, 6, inputs)
            m, k = leak or (1, 0)
            u = ((v * m + ((1 << k) >> 1)) >> k) + (int(weight.ravel() @ level) << fraction) + bias - pending
            assert abs(u) <= bound
            s = sum((abs(u) if signed else u) >= int(t) for t in thresholds[0]) * (-1 if signed and u < 0 else 1)
            drop = reset * (s if kind == "level" else np.sign(s))
            if kind == "hard":
                v = 0 if s else u
            elif decay:
                v = u - int(drop)
                assert abs(v) <= bound
            else:
                v, pending = u, int(drop)


@pytest.mark.parametrize(
    ("kind", "leak", "worst"),
    [
        ("once", None, 930),  # 70, then 70 + 0 - 1000
        ("once", (1, 1), 965),  # 70, then 35 + 0 - 1000
        ("level", None, 1870),  # 60, 60 + 70 = 130, then 130 + 0 - 2000
        ("level", (1, 1), 1935),  # 60, 30 + 100 = 130, then 65 + 0 - 2000
    ],
)
def test_the_bound_knows_that_a_late_reset_may_far_exceed_its_threshold(kind: Any, leak: Any, worst: int) -> None:
    """A reset that comes a timestep late takes the membrane far below 0: tried with all sequences of a few currents."""
    neuron = IntegerNeuron(2, False, np.array([[64, 128]], np.int32), np.array([1000], np.int32), kind, leak, False)
    found = 0
    for currents in itertools.product((0, 60, 70, 100), repeat=3):
        u = drop = 0
        for x in currents:
            u = (u if leak is None else (u + 1) // 2) + x - drop
            level = (u >= 64) + (u >= 128)
            drop = 1000 * (level if kind == "level" else min(level, 1))
            found = max(found, abs(u))
    assert found == worst <= membrane_bound(layer_of(neuron), {"conv": 100}, 3)


def test_bounds_saturate_instead_of_overflowing() -> None:
    weight = np.full((1, 64, 1, 1), 32767, np.int16)
    synapse = Synapse("conv", "a", "conv", weight, (64, 1, 1), (1, 1, 1), absorbed=True)
    assert synapse_bound(synapse, 10**30).item() == 2**36
    layer = replace(layer_of(NEURON, fraction=20), synapses=(replace(synapse),) * 64)
    assert membrane_bound(layer, {"conv": 10**30}, 4096) >= MEMBRANE_BOUND
    with pytest.raises(GraphError, match="has no neuron"):
        membrane_bound(replace(layer, neuron=None), {}, 1)
    with pytest.raises(ValueError, match="has no neuron"):
        NumpyNeuron(replace(layer, neuron=None))


# Whole networks --------------------------------------------------------------------------------------------------------


def agrees_with_the_definition(net: Network, x: Ints) -> None:
    out = net.run(x, "dense", trace=True)
    assert out.levels is not None
    assert any(level.any() for level in out.levels.values())
    for i in range(len(out.logits)):
        logits, steps = integer_network(net.network, x[i] if net.network.static else x[:, i])
        assert out.logits[i].tolist() == logits
        for t, levels in enumerate(steps):
            for name in out.levels:
                assert {at: int(out.levels[name][t, i][at]) for at in levels[name]} == levels[name], (name, t)


@pytest.mark.parametrize(("id", "neuron", "shape", "options"), CASES[:-1])
def test_engines_equal_the_definition(
    id: str, neuron: Any, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """docs/explanation/integers.md in Python's own integers, one number at a time, asserting the bounds as it goes."""
    agrees_with_the_definition(deployed(id, neuron, shape, **options), pixels(1, *shape))


@pytest.mark.parametrize(("id", "neuron", "shape", "options"), CASES)
def test_all_engines_give_the_same_bits(
    id: str, neuron: Any, shape: tuple[int, int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = deployed(id, neuron, shape, **options)
    x = pixels(5, *shape, seed=3)
    dense = net.run(x, "dense", trace=True)
    backends: tuple[Backend, ...] = ("horner", "preshifted", "fused", "explicit")
    found = [net.run(x, "bitplane", trace=True, backend=backend) for backend in backends]
    found += [net.run(x, "auto", trace=True, threads=2), net.run(x, "bitplane", trace=True, threads=3)]
    found.append(net.on_device("cpu").run(x, trace=True))
    for other in found:
        assert same(dense, other)
    monkeypatch.setenv("LBQ_NATIVE", "off")
    for engine in ("bitplane", "auto"):
        with pytest.warns(
            RuntimeWarning, match="running in NumPy, which is right but slow: switched off by LBQ_NATIVE=off"
        ):
            assert same(dense, net.run(x, engine, trace=True))
    monkeypatch.undo()
    one = net.run(x[2], "bitplane", trace=True)
    assert one.logits[0].tolist() == dense.logits[2].tolist()
    assert net.run(x).levels is None


def test_branches_pools_groups_and_a_static_image_beside_levels() -> None:
    torch.manual_seed(4)
    net = deploy(warmed(Branches(), 3, 6, 6), (3, 6, 6), mean=[0.5] * 3, std=[0.25] * 3)
    x = pixels(3, 3, 6, 6, seed=5)
    agrees_with_the_definition(net, x[:2])
    dense = net.run(x, "dense", trace=True)
    for engine in ("bitplane", "auto"):
        assert same(dense, net.run(x, engine, trace=True))
    assert same(dense, net.on_device("cpu").run(x, trace=True))


def test_what_runs_densely_counts_products_and_no_accumulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's and a GPU's as the account's MACs, and by `auto` those of the synapses that it chose to run so."""
    torch.manual_seed(4)
    net = deploy(warmed(Branches(), 3, 6, 6), (3, 6, 6), mean=[0.5] * 3, std=[0.25] * 3)
    x = pixels(3, 3, 6, 6, seed=5)
    dense = net.run(x, "dense", trace=True)
    account = count(net.network, dense.levels)
    macs = {name: counted.macs for name, counted in account.synapses.items()}
    macs |= {s.name: s.valid_macs for s in net.network.synapses if s.source == INPUT}
    for out in (dense, net.on_device("cpu").run(x)):
        assert {name: out.counts[name] for name in macs} == {
            name: Counts(products=round(3 * n)) for name, n in macs.items()
        }
        assert out.total.products == 3 * (account.fp_macs + account.total.macs)  # shortcuts have none
    planes = net.run(x, "bitplane")
    assert planes.total.products == 0
    monkeypatch.setattr(
        Prepared, "_measure", lambda self, _, density: density * (2 if "2" in self.synapse.name else 0.5)
    )
    for _ in range(3):  # chosen, recorded, replayed
        mixed = net.run(x, "auto")
        for name, choice in mixed.choices.items():
            theirs = dense if choice.method == "dense" else planes
            assert mixed.counts[name] == theirs.counts[name], name
    assert 0 < mixed.total.products < dense.total.products
    assert 0 < mixed.total.accumulations < planes.total.accumulations


class Three(nn.Module):
    """Three convolutions into one layer, the first of the image itself, whose current is the same at every timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.timesteps = 2
        self.conv, self.sn = nn.Conv2d(3, 4, 3, padding=1), BurstNeuron()
        self.a, self.b, self.c, self.sn1 = *(nn.Conv2d(i, 4, 3, padding=1) for i in (3, 4, 4)), BurstNeuron()
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.sn(over_time(x, self.conv, timesteps=2))
        u = self.sn1(over_time(x, self.a, timesteps=2) + over_time(s, self.b) + over_time(s, self.c))
        return over_time(over_time(u, self.pool).flatten(2), self.fc, spatial=1).mean(0)


def test_three_currents_of_one_layer_do_not_overwrite_each_other() -> None:
    torch.manual_seed(2)
    net = deploy(warmed(Three(), 3, 6, 6), (3, 6, 6), mean=[0.5] * 3, std=[0.25] * 3)
    x = pixels(3, 3, 6, 6, seed=1)
    agrees_with_the_definition(net, x[:2])
    assert same(net.run(x, "dense", trace=True), net.run(x, "bitplane", trace=True))


def test_event_networks_read_frames_at_every_timestep() -> None:
    torch.manual_seed(0)
    made = warmed(models.create("resnet8w2", in_channels=2, num_classes=3), 2, 4, 4, static=False)
    net = deploy(made, (2, 4, 4), timesteps=3, static=False)
    x = pixels(3, 4, 2, 4, 4) // 32
    agrees_with_the_definition(net, x[:, :2])
    dense = net.run(x, "dense", trace=True)
    for other in (net.run(x, "bitplane", trace=True), net.on_device("cpu").run(x, trace=True)):
        assert same(dense, other)
    assert net.run(x[:, 1], "dense").logits[0].tolist() == dense.logits[1].tolist()
    assert net.verify("bitplane") == 8


def test_first_calls_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms of weights that one thread has just made, another may drop."""

    def slow(tensor: Any) -> None:
        time.sleep(0.001)
        forget(tensor)

    monkeypatch.setattr(native_kernels, "forget", slow)
    x = pixels(2, 3, 8, 8)
    expected = deployed().run(x).logits
    for _ in range(3):
        net = Network(deployed().network)
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(net.run, [x] * 8):
                assert np.array_equal(found.logits, expected)


def test_batches_chunks_and_threads_do_not_matter() -> None:
    net = deployed()
    x = pixels(23, 3, 8, 8)
    whole = net.run(x, "bitplane", trace=True)
    runner = Runner(net.network)
    runner.together = 4
    done: list[int] = []
    pieces = runner.run(x, "bitplane", trace=True, threads=2, progress=done.append)
    assert same(whole, pieces)
    assert sum(done) == 23
    assert max(done) == 4
    for name, counts in whole.counts.items():
        assert replace(counts, horner_shifts=0) == replace(pieces.counts[name], horner_shifts=0)
    assert len(runner._spaces) <= 2  # memory is planned once and reused


@pytest.mark.parametrize("threads", [1, 2])
def test_a_function_is_told_every_level_once(threads: int) -> None:
    net = deployed()
    x = pixels(9, 3, 8, 8)
    whole = net.run(x, "dense", trace=True)
    assert whole.levels is not None
    runner = Runner(net.network)
    runner.together = 2
    told: dict[str, list[tuple[int, int]]] = {}

    def tell(name: str, levels: np.ndarray) -> None:
        told.setdefault(name, []).append((levels.shape[1], int(levels.sum(dtype=np.int64))))

    out = runner.run(x, "bitplane", tell, threads)
    assert out.levels is None
    np.testing.assert_array_equal(out.logits, whole.logits)
    on_torch: dict[str, int] = {}
    net.on_device("cpu").run(x, lambda name, levels: on_torch.update({name: int(levels.sum(dtype=np.int64))}))
    for name, levels in whole.levels.items():
        assert sum(images for images, _ in told[name]) == 9
        assert sum(total for _, total in told[name]) == levels.sum(dtype=np.int64) == on_torch[name]


def test_memory_is_reused_as_soon_as_the_last_reader_is_done() -> None:
    net = deployed("resnet20w4", shape=(3, 8, 8)).network
    plan = Plan(net)
    assert len(plan.slots) == 3  # a block's input, its inner layer, its output
    assert Workspace(plan, 2).nbytes < 2 * 2 * (3 * net.layers[0].units + 8 * net.layers[0].units) + 1
    for i, layer in enumerate(net.layers):  # nothing that is still to be read is overwritten
        for other in net.layers[:i]:
            if plan.last[other.name] >= i:
                assert plan.levels[other.name] != plan.levels[layer.name]


def test_golden_vectors_find_an_engine_that_errs() -> None:
    net = deployed()
    assert net.verify("dense") == net.verify("bitplane") == 8
    layer = net.network.layers[2]
    broken = replace(layer, bias=layer.bias + 40_000)
    network = replace(net.network, layers=(*net.network.layers[:2], broken, *net.network.layers[3:]))
    with pytest.raises(
        LbqError, match="layer 'layer1.0.sn2': its levels at timestep 0 are not the golden ones: .* --against"
    ):
        Network(network, net.golden).verify()
    readout = replace(net.network.readout, bias=net.network.readout.bias + 1)
    with pytest.raises(LbqError, match="the logits are not the golden ones: .* --against"):
        Network(replace(net.network, readout=readout), net.golden).verify()
    with pytest.raises(LbqError, match="no golden vectors"):
        Network(net.network).verify()


def test_choices_are_reported_with_their_reason() -> None:
    net = deployed("resnet8w2", shape=(3, 4, 4))
    x = pixels(2, 3, 4, 4)
    assert {c.reason for c in net.run(x, "dense").choices.values()} == {"asked for"}
    assert {c.method for c in net.run(x, "bitplane").choices.values()} == {"bitplane"}
    auto = net.run(x, "auto").choices
    assert set(auto) == {s.name for s in net.network.synapses if s.kind == "conv"}
    assert all(c.reason for c in auto.values())


def test_kernels_too_large_for_the_native_library_run_in_numpy() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.sn = nn.Conv2d(3, 2, 3, padding=1), BurstNeuron()
            self.wide, self.sn1 = nn.Conv2d(2, 2, 17, padding=8), BurstNeuron()
            self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.sn1(over_time(self.sn(over_time(x, self.conv, timesteps=2)), self.wide))
            return over_time(over_time(x, self.pool).flatten(2), self.fc, spatial=1).mean(0)

    torch.manual_seed(0)
    net = deploy(warmed(Wide(), 3, 6, 6), (3, 6, 6), timesteps=2, scale=255)
    x = pixels(2, 3, 6, 6)
    expected = net.run(x, "dense", trace=True)
    for engine in ("auto", "bitplane"):
        assert same(net.run(x, engine, trace=True), expected)


class Slow:
    """A convolution that takes the time it is told."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def run(self, levels: Ints, method: Method, **_: Any) -> tuple[Ints, Counts]:
        time.sleep(self.seconds[method])
        return levels, Counts()

    def keep(self, method: Method) -> None:
        assert method in self.seconds


def test_auto_compares_the_density_with_a_measured_cross_over(monkeypatch: pytest.MonkeyPatch) -> None:
    net = deployed("resnet8w2", shape=(3, 4, 4)).network
    prepared = Prepared(net.layers[1].convs[0], 5, False)
    monkeypatch.setattr(Prepared, "native_refused", lambda self: None)
    monkeypatch.setattr(Prepared, "conv", lambda self, kernel: Slow({"bitplane": 0.01, "dense": 0.02}))
    level = np.zeros((1, 4, 4, 2), np.uint8)
    level[0, :2] = 1  # density 0.5; planes take half the time there, so that both would take the same at about 1
    choice = prepared.choose("auto", level, 0.5)
    assert (choice.kernel, choice.method) == ("native", "bitplane")
    assert prepared.crossover == pytest.approx(1.0, rel=0.3)
    assert re.fullmatch(r"density 0\.500 below cross-over [\d.]+", choice.reason)
    level[:] = 3
    choice = prepared.choose("auto", level, 2.0)
    assert (choice.method, choice.density) == ("dense", 2.0)
    assert "above cross-over" in choice.reason
    prepared.crossover = 1.0
    chosen = [prepared.choose("auto", level, density).method for density in (0.95, 0.85, 1.05, 1.15)]
    assert chosen == ["dense", "bitplane", "bitplane", "dense"]  # near the cross-over it stays as it was
    assert prepared.choose("auto", level, 0.95).reason == "density 0.950 near cross-over 1.000"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((1, 3, 8, 8)),), "images must be uint8"),
        ((np.zeros((1, 3, 8, 9), np.uint8),), r"images must be \[B, 3, 8, 8\], got \[1, 3, 8, 9\]"),
        ((np.zeros((0, 3, 8, 8), np.uint8),), "images must not be empty"),
        ((np.zeros((8, 8), np.uint8),), r"got \[8, 8\]"),
        ((np.zeros((1, 3, 8, 8), np.uint8), "fast"), "engine must be one of auto, dense, bitplane, cuda, got 'fast'"),
        ((np.zeros((1, 3, 8, 8), np.uint8), "auto", False, 0), "threads must be a whole number in 1..256, got 0"),
        (
            (np.zeros((1, 3, 8, 8), np.uint8), "auto", False, 1, "shifted"),
            "backend must be one of horner, preshifted, fused, explicit",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LbqError, match=message):
        deployed().run(*arguments)


def test_a_network_refuses_values_above_those_it_was_trained_on() -> None:
    """Of a network of one's own too, which names no dataset: pixels 0..255 for 0..16 would be classified, wrongly."""
    net = deployed("resnet8w2", shape=(3, 4, 4))
    narrow = Network(replace(net.network, input_max=16))
    x = pixels(2, 3, 4, 4)
    with pytest.raises(
        LbqError, match=r"^images have values up to 2\d\d, the network was trained on 0 to 16: scale them"
    ):
        narrow.run(x)
    found = narrow.run(x // 16, trace=True)
    layers = len(net.network.layers)
    assert re.fullmatch(rf"Output\(logits \[2, 5\], scale \S+, \d+ synapses, levels of {layers} layers\)", repr(found))


def test_the_gpu_engine_refuses_what_float32_cannot_hold() -> None:
    network = deployed("resnet8w16", {"name": "lbq", "n_max": 255}, (3, 4, 4)).network
    TorchRunner(network, "cpu")
    layers = list(network.layers)
    for i, layer in enumerate(layers):
        heavy = tuple(replace(s, weight=np.full_like(s.weight, 127)) for s in layer.synapses)
        layers[i] = replace(layer, synapses=heavy)
    with pytest.raises(
        LbqError, match="'layer3.0.conv2' may reach 18653760, which float32 does not hold exactly: use another"
    ):
        TorchRunner(replace(network, layers=tuple(layers)), "cpu")
    wide = tuple(replace(s, weight=np.ones(s.weight.shape, np.int16)) for s in network.layers[0].synapses)
    with pytest.raises(LbqError, match="'conv1' has 16-bit weights: use another engine, or --bits 8"):
        TorchRunner(replace(network, layers=(replace(network.layers[0], synapses=wide),)), "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(LbqError, match="needs a GPU"):
            deployed().run(pixels(1, 3, 8, 8), "cuda")


def test_the_gpu_engine_gives_the_same_bits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    net = deployed("resnet8w64", shape=(3, 16, 16))
    x = pixels(9, 3, 16, 16)
    before = torch.get_float32_matmul_precision()
    assert same(net.run(x, "dense", trace=True), net.run(x, "cuda", trace=True))
    assert torch.get_float32_matmul_precision() == before


def test_a_readout_of_levels_alone() -> None:
    """Logits that are a sum of a convolution and of levels themselves: an identity in the readout."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.timesteps = 2
            self.conv, self.sn, self.pool, self.fc = (
                nn.Conv2d(3, 4, 3),
                BurstNeuron(),
                nn.AdaptiveAvgPool2d(1),
                nn.Conv2d(4, 4, 1),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.sn(over_time(x, self.conv, timesteps=2))
            x = over_time(x, self.pool)
            return (over_time(x, self.fc) + x).mean(0)

    torch.manual_seed(1)
    net = deploy(warmed(Net(), 3, 6, 6), (3, 6, 6), mean=[0.5] * 3, std=[0.25] * 3)
    x = pixels(2, 3, 6, 6)
    assert {s.kind for s in net.network.readout.synapses} == {"conv", "identity"}
    agrees_with_the_definition(net, x)
    assert same(net.run(x, "dense"), net.run(x, "bitplane"))
    assert same(net.run(x, "dense"), net.on_device("cpu").run(x))
    assert INPUT not in net.run(x, "dense", trace=True).levels  # type: ignore[operator]
