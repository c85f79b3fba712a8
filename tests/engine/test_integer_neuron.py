"""The neuron on integers: by hand, and the native library against NumPy, which is the definition."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lbq import native
from lbq.engine.neuron import Emitted, LayerNeurons, count_thresholds
from lbq.engine.tape import perform
from lbq.graph import Synapse
from lbq.graph.integer import IntegerLayer, IntegerNeuron
from tests.support.integer_layers import NEURON, layer_of


class NativeNeurons(LayerNeurons):
    """Native neurons that are called as NumPy's are."""

    def run(self, *arguments: Any) -> Emitted:
        step = self.step(*arguments)
        perform(step, 1)
        return step.emitted()


FORMS = (LayerNeurons, NativeNeurons)


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


@given(st.lists(st.integers(64, 10_000), min_size=1, max_size=9), st.integers(-(2**30), 2**30), st.booleans())
def test_thresholds_are_counted(thresholds: list[int], u: int, signed: bool) -> None:
    ordered = np.array([sorted(thresholds)], np.int32)
    level = count_thresholds(np.array([[u]], np.int32), ordered, signed).item()
    reached = sum((abs(u) if signed else u) >= t for t in thresholds)
    assert level == (-reached if signed and u < 0 else reached)


# The native library against NumPy --------------------------------------------------------------------------------------

NATIVE = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.report().reason}")


def wide_layer(
    neuron: IntegerNeuron, bias: NDArray[np.int32], fraction: int = 0, weights: tuple[NDArray[np.int32], ...] = ()
) -> IntegerLayer:
    """A layer of several channels; weights: of its identity synapses."""
    shape = bias.shape if bias.ndim == 3 else (len(bias), 2, 3)
    identities = (Synapse(f"i{i}", "a", "identity", w, shape, shape, absorbed=True) for i, w in enumerate(weights))
    return IntegerLayer("sn", tuple(identities), bias, shape, fraction, neuron, np.ones(len(bias)))


def agree(
    layer: IntegerLayer, currents: Any, shortcuts: list[Any], shape: tuple[int, ...], static: bool, timesteps: int
) -> Emitted:
    """Native neurons emit NumPy's levels from NumPy's membranes, by any number of threads."""
    neuron = layer.neuron
    assert neuron is not None
    expected, membranes = (
        np.empty(shape, neuron.dtype),
        np.empty((timesteps, shape[0] // timesteps, *shape[1:]), np.int32),
    )
    emitted = LayerNeurons(layer).run(currents, shortcuts, expected, static, timesteps, membranes.__setitem__)
    for threads in (1, 2, 3):
        out, watched = np.empty(shape, neuron.dtype), np.empty(shape, np.int32)
        step = LayerNeurons(layer).step(currents, shortcuts, out, static, timesteps, watched)
        perform(step, threads)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(watched, membranes.reshape(shape))
        assert step.emitted() == emitted
    return emitted


@NATIVE
@pytest.mark.parametrize("reset_kind", ["once", "level", "hard"])
@pytest.mark.parametrize("decay_reset", [True, False])
@pytest.mark.parametrize("signed", [True, False])
def test_native_neurons_equal_the_definition(isa: str, reset_kind: Any, decay_reset: bool, signed: bool) -> None:
    rng = np.random.default_rng(5)
    timesteps, batch, channels = 3, 2, 37
    shape = (timesteps * batch, 2, 3, channels)
    cases = itertools.product((None, (1, 1), (3, 4)), (True, False), (0, 2), (True, False), (True, False))
    for n_max, case in zip(itertools.cycle((1, 5, 100)), cases):  # each n_max meets each value of the others
        leak, static, shortcuts, with_currents, mapped = case
        currents = rng.integers(-900, 900, ((batch if static else timesteps * batch), *shape[1:])).astype(np.int32)
        thresholds = np.sort(rng.integers(64, 3000, (channels, n_max)), 1).astype(np.int32)
        reset = rng.integers(64, 500, channels).astype(np.int32)
        neuron = IntegerNeuron(n_max, signed, thresholds, reset, reset_kind, leak, decay_reset)
        bias = rng.integers(-300, 300, (channels, 2, 3) if mapped else channels).astype(np.int32)
        weights = tuple(rng.integers(-99, 99, channels).astype(np.int32) for _ in range(shortcuts))
        levels = [rng.integers(-2 * i, 6, shape).astype((np.uint8, np.int8)[i]) for i in range(shortcuts)]
        layer = wide_layer(neuron, bias, 2, weights)
        agree(layer, currents if with_currents else None, levels, shape, static, timesteps)


@NATIVE
@pytest.mark.parametrize("channels", [1, 3, 4, 15, 16, 20, 64, 67])
def test_native_neurons_of_any_number_of_levels_and_channels(isa: str, channels: int) -> None:
    """From 8 levels on, set bits are counted in another way; channels come in whole tiles, parts of one, and one by one."""
    rng = np.random.default_rng(channels)
    for n_max, signed in ((2, False), (5, False), (7, False), (8, False), (255, False), (127, True)):
        thresholds = np.tile(np.arange(1, n_max + 1, dtype=np.int32) * 8, (channels, 1))
        neuron = IntegerNeuron(n_max, signed, thresholds, np.full(channels, 8, np.int32), "once", (1, 1), True)
        layer = wide_layer(neuron, rng.integers(-9, 9, channels).astype(np.int32))
        currents = rng.integers(-9 * n_max, 9 * n_max, (6, 2, 3, channels)).astype(np.int32)
        agree(layer, currents, [], currents.shape, False, 3)


@NATIVE
def test_threads_share_the_neurons_of_a_large_layer() -> None:
    thresholds = np.tile(np.arange(1, 6, dtype=np.int32) * 64, (64, 1))
    neuron = IntegerNeuron(5, False, thresholds, np.full(64, 64, np.int32), "once", (1, 1), True)
    currents = np.random.default_rng(1).integers(-100, 300, (4, 16, 16, 64)).astype(np.int32)
    assert agree(wide_layer(neuron, np.zeros(64, np.int32)), currents, [], currents.shape, False, 2).active > 0


def test_what_neurons_refuse() -> None:
    wrong = (
        (replace(NEURON, thresholds=np.ones((2, 4), np.int32)), "thresholds must be"),
        (replace(NEURON, n_max=256, thresholds=np.ones((1, 256), np.int32)), "thresholds must be"),
        (replace(NEURON, leak=(3, 1)), "leak must be"),
        (None, "layer 'sn' has no neuron"),
    )
    for neuron, message in wrong:
        with pytest.raises(ValueError, match=message):
            LayerNeurons(replace(layer_of(NEURON), neuron=neuron))
    with pytest.raises(ValueError, match="weights of identities and products must be"):
        LayerNeurons(wide_layer(NEURON, np.ones(1, np.int32), weights=(np.ones(2, np.int32),)))
