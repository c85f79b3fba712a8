"""The plain executors: convolutions against PyTorch, bit planes against the dense oracle, and honest tallies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lbq import models
from lbq.deploy import lower
from lbq.engine import execute
from lbq.engine.neuron import Membrane, distance_to_threshold, emit
from lbq.engine.synapse import Tally, bit_planes, bitplane, dense, pool
from lbq.errors import GraphError
from lbq.graph import NeuronSpec, Pool, Synapse, absorb

SPEC = NeuronSpec("BurstNeuron", 5, np.array(0.5), np.array(0.5), 0.5, 1.0, 1.0, "floor", "once", True)


def synapse(
    outputs: int, inputs: int, kernel: tuple[int, int], size: tuple[int, int], stride: int, padding: int, dilation: int,
    groups: int, seed: int = 0,
) -> Synapse:  # fmt: skip
    weight = np.random.default_rng(seed).normal(size=(outputs, inputs // groups, *kernel))
    height, width = (
        (s + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for s, k in zip(size, kernel, strict=True)
    )
    return Synapse(
        "s", "a", "conv", weight, (inputs, *size), (outputs, height, width), (), (stride,) * 2, (padding,) * 2,
        (dilation,) * 2, groups, True,
    )  # fmt: skip


def brute_force(s: Synapse, level: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Currents, accumulations and shifted accumulations of one image, one bit and weight at a time."""
    out = np.zeros(s.out_shape)
    accumulations = shifted = 0
    outputs, per_group, kh, kw = s.weight.shape
    per_out = outputs // s.groups
    for o in range(outputs):
        group = o // per_out
        for oy in range(s.out_shape[1]):
            for ox in range(s.out_shape[2]):
                for c in range(per_group):
                    for ky in range(kh):
                        for kx in range(kw):
                            y = oy * s.stride[0] + ky * s.dilation[0] - s.padding[0]
                            x = ox * s.stride[1] + kx * s.dilation[1] - s.padding[1]
                            if not (0 <= y < s.in_shape[1] and 0 <= x < s.in_shape[2]):
                                continue
                            value = int(level[group * per_group + c, y, x])
                            for k in range(abs(value).bit_length()):
                                if abs(value) >> k & 1:
                                    out[o, oy, ox] += np.sign(value) * 2**k * s.weight[o, c, ky, kx]
                                    accumulations += 1
                                    shifted += k > 0
    return out, accumulations, shifted


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([1, 2]), st.integers(1, 2), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(1, 2),
    st.integers(0, 2), st.integers(1, 2), st.integers(0, 2**31),
)  # fmt: skip
def test_bit_planes_equal_brute_force(
    groups: int, wide: int, kernel: tuple[int, int], stride: int, padding: int, dilation: int, seed: int
) -> None:
    s = synapse(2 * groups, wide * groups, kernel, (5, 6), stride, padding, dilation, groups, seed)
    level = np.random.default_rng(seed).integers(-6, 7, (2, *s.in_shape))
    level[np.random.default_rng(seed + 1).random(level.shape) < 0.6] = 0
    tally = Tally()
    out = bitplane(s, level, 3, tally)
    expected = [brute_force(s, one) for one in level]
    np.testing.assert_allclose(out, np.stack([e[0] for e in expected]), atol=1e-12)
    assert tally.accumulations == sum(e[1] for e in expected)
    assert tally.shifted == sum(e[2] for e in expected)
    np.testing.assert_allclose(dense(s, level.astype(float)), out, atol=1e-12)
    reference = F.conv2d(
        torch.from_numpy(level).double(), torch.from_numpy(s.weight), None, stride, padding, dilation, groups
    )
    np.testing.assert_allclose(out, reference.numpy(), atol=1e-12)


def test_identity_synapse() -> None:
    s = Synapse("i", "a", "identity", np.array([0.5, 2.0]), (2, 3, 3), (2, 3, 3), absorbed=True)
    level = np.random.default_rng(0).integers(0, 6, (2, 2, 3, 3))
    tally = Tally()
    np.testing.assert_allclose(bitplane(s, level, 3, tally), dense(s, level.astype(float)))
    assert tally.accumulations == int(np.bitwise_count(level).sum())


def test_planes_decompose_levels() -> None:
    """Eq. bitplane_decomp: S = sum of 2^k b_k; K = ceil(log2(n_max + 1))."""
    level = np.arange(256)
    planes = bit_planes(level, 8)
    assert np.array_equal((planes * 2 ** np.arange(8)[:, None]).sum(0), level)
    for n_max, expected in ((1, 1), (2, 2), (3, 2), (5, 3), (10, 4), (20, 5), (255, 8)):
        assert replace(SPEC, n_max=n_max).planes == expected == int(np.ceil(np.log2(n_max + 1)))


@pytest.mark.parametrize("kind", ["max", "sum"])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
def test_pooling_equals_pytorch(kind: str, kernel: int, stride: int, padding: int) -> None:
    level = np.random.default_rng(0).integers(-3, 4, (2, 3, 7, 8))
    spec = Pool(kind, (kernel,) * 2, (stride,) * 2, (padding,) * 2)  # type: ignore[arg-type]
    x = torch.from_numpy(level).double()
    if kind == "max":
        expected = F.max_pool2d(x, kernel, stride, padding)
    else:
        expected = F.avg_pool2d(x, kernel, stride, padding) * kernel**2
    np.testing.assert_allclose(np.asarray(pool(level, (spec,)), np.float64), expected.numpy())
    assert spec.output((3, 7, 8)) == expected.shape[1:]


def test_neuron_emits_and_resets() -> None:
    membrane = Membrane()
    level, u = emit(SPEC, np.full((1, 1, 1, 1), 1.3), membrane)
    assert (level.item(), u.item()) == (2, 1.3)
    assert membrane.v is not None
    assert membrane.v.item() == pytest.approx(0.8)
    level, u = emit(SPEC, np.zeros((1, 1, 1, 1)), membrane)
    assert u.item() == pytest.approx(0.4)
    assert level.item() == 0


@pytest.mark.parametrize(
    ("spec", "u", "distance"),
    [
        (SPEC, 1.05, 0.1),
        (SPEC, 0.0, 1.0),  # no threshold at 0
        (SPEC, 3.0, 1.0),  # nor above n_max
        (replace(SPEC, n_max=1, rounding="trunc"), -0.55, 0.1),
        (replace(SPEC, rounding="round"), 0.75, 0.0),
        (replace(SPEC, thresholds=np.array([0.5, 2.0])), 1.9, 0.2),
    ],
)
def test_distance_to_the_nearest_threshold(spec: NeuronSpec, u: float, distance: float) -> None:
    assert distance_to_threshold(spec, np.array([u])).item() == pytest.approx(distance)


def test_zero_planes_cost_nothing() -> None:
    s = synapse(2, 2, (3, 3), (4, 4), 1, 1, 1, 1)
    tally = Tally()
    assert not bitplane(s, np.zeros((1, 2, 4, 4), np.int64), 3, tally).any()
    assert tally == Tally()


def test_wrong_inputs_are_refused() -> None:
    graph = lower(models.create("resnet8w4"), (3, 8, 8))
    with pytest.raises(GraphError, match="not absorbed yet"):
        execute(graph, np.zeros((1, 3, 8, 8)))
    with pytest.raises(GraphError, match=r"x must be \[B, 3, 8, 8\], got \[1, 1, 8, 8\]"):
        execute(absorb(graph), np.zeros((1, 1, 8, 8)))
    with pytest.raises(ValueError, match="accumulate must be"):
        execute(absorb(graph), np.zeros((1, 3, 8, 8)), "sparse")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="current of layer 'sn1' is NaN"):
        execute(absorb(graph), np.full((1, 3, 8, 8), np.nan))
    events = lower(models.create("resnet8w4"), (3, 8, 8), static=False)
    with pytest.raises(GraphError, match=r"x must be \[2, B, 3, 8, 8\]"):
        execute(absorb(events), np.zeros((1, 3, 8, 8)))


def test_a_membrane_on_a_threshold_is_reported_as_a_tie() -> None:
    """Such an image may round either way in another order of summation; the integer check sets it aside."""
    torch.manual_seed(0)
    graph = absorb(lower(models.create("resnet8w4").double().eval(), (3, 8, 8)))
    x = np.random.default_rng(0).normal(size=(3, 3, 8, 8))
    assert not execute(graph, x).ties.any()
    step = graph.spec("sn1").step
    stem = graph["sn1"]
    tied = replace(graph, layers=(replace(stem, bias=np.full(4, step)), *graph.layers[1:]))
    x[1] = 0  # the current is the bias: exactly one step
    ties = execute(tied, x).ties
    assert ties[1] >= 2 * 4 * 64  # all of the first layer, at both timesteps
    assert ties[[0, 2]].tolist() == [0, 0]
