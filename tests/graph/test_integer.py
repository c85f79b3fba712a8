"""Levels and integer neurons as numbers: bit planes, pools, the leak's rounding, and the proved bounds of membranes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lbq.errors import GraphError
from lbq.graph import Pool, Synapse
from lbq.graph.integer import MEMBRANE_BOUND, IntegerLayer, IntegerNeuron, membrane_bound, rounded_leak, synapse_bound
from lbq.graph.levels import bit_planes, planes_of, pool
from tests.support.integer_layers import NEURON, layer_of


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


@given(st.integers(-(2**30), 2**30), st.integers(1, 16), st.data())
def test_the_leak_rounds_half_up(v: int, k: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(0, 2**k))
    found = rounded_leak(np.array([v]), (m, k)).item()
    assert found == (2 * v * m + 2**k) // 2 ** (k + 1)
    assert abs(found - v * m / 2**k) <= 0.5
    assert abs(found) <= abs(v)


@settings(max_examples=60)
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
