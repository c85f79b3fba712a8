"""Deployment at its edges: means over time, frozen constants, pruned channels, numbers that cannot be, files that cannot."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lbq.engine
from lbq.errors import ArtefactError, GraphError
from lbq.graph import INPUT, Layer, Synapse, output_size
from lbq.graph.quantise import bias_in_units, integer_weights, shared_unit
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.own_nets import SHAPE, Forward, Own, close, features, made, rest
from tests.support.small_nets import mean_logits


def _mean_inside(m: Any, x: Tensor) -> Tensor:
    x = m.sn(over_time(x, m.conv, m.bn, timesteps=m.timesteps))
    current = over_time(x, m.conv2)
    return mean_logits(m, m.sn2(current + current.mean(0)))


def _mean_of_a_sum(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A neuron's output, and the mean over time of its sum with another's."""
    x = m.sn(over_time(x, m.conv, m.bn, timesteps=m.timesteps))
    return x, (x + m.sn3(x)).mean(0)


def _mean_shown_again(m: Any, x: Tensor) -> Tensor:
    return rest(m, over_time(_mean_of_a_sum(m, x)[1], m.shown, timesteps=m.timesteps))


def _mean_added_again(m: Any, x: Tensor) -> Tensor:
    levels, mean = _mean_of_a_sum(m, x)
    return rest(m, mean + levels)


def _mean_pooled(m: Any, x: Tensor) -> Tensor:
    pooled = nn.functional.avg_pool2d(_mean_of_a_sum(m, x)[1], 2)
    return rest(m, pooled.expand(m.timesteps, -1, 4, 4, 4))


@pytest.mark.parametrize("function", [_mean_inside, _mean_shown_again, _mean_added_again, _mean_pooled])
def test_a_mean_over_time_in_front_of_a_neuron_is_refused(function: Forward) -> None:
    net = Own(function)
    net.sn3, net.shown = BurstNeuron(step=0.5), nn.Identity()
    with pytest.raises(GraphError, match="layer 'sn2': a neuron cannot follow the mean over time"):
        made(net)


def test_sums_of_means_are_logits() -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        x = over_time(features(m, x), m.pool).flatten(2)
        return over_time(x, m.fc, spatial=1).mean(0) + over_time(x, m.second, spatial=1).mean(0)

    def nested(m: Any, x: Tensor) -> Tensor:
        x = over_time(features(m, x), m.pool).flatten(2)
        return (over_time(x, m.fc, spatial=1).mean(0) + over_time(x, m.second, spatial=1)).mean(0)

    for function in (both, nested):
        net = Own(function)
        net.second = nn.Linear(4, 5)
        close(net, made(net))


@pytest.mark.parametrize(("name", "value"), [("alpha", 1.4), ("beta", 1.2), ("beta", -0.1)])
def test_a_frozen_network_deploys_as_it_did_before(name: str, value: float) -> None:
    net, neuron = Own(), BurstNeuron(step=0.3, learn_alpha=True, learn_beta=True)
    net.sn = neuron
    with torch.no_grad():
        getattr(neuron, name).fill_(value)
    x = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    before = net(x).detach()
    net.requires_grad_(False)
    assert torch.equal(net(x), before)
    close(net, made(net))


def test_a_channel_for_each_place_behind_flatten_is_refused() -> None:
    def flat(m: Any, x: Tensor) -> Tensor:
        x = m.wide(over_time(x, m.conv, m.bn, timesteps=m.timesteps).flatten(2))
        return over_time(x, m.head, spatial=1).mean(0)

    net = Own(flat)
    net.wide, net.head = BurstNeuron(channels=256), nn.Linear(256, 5)
    with pytest.raises(GraphError, match=r"layer 'wide': it has 256 steps for 4 channels of \(8, 8\): flatten behind"):
        made(net)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_pruned_channel_takes_no_resolution_from_the_others(bits: int) -> None:
    net = Own()
    whole = made(net, bits=bits).network.layers[1]
    with torch.no_grad():
        net.bn2.weight[0], net.bn2.bias[0] = 0.0, 3.0
    pruned = made(net, bits=bits)
    layer = pruned.network.layers[1]
    assert layer.fraction == whole.fraction
    assert layer.neuron is not None
    assert whole.neuron is not None
    np.testing.assert_array_equal(layer.neuron.thresholds[1:], whole.neuron.thresholds[1:])
    assert int(layer.neuron.thresholds[0, 0]) >= int(layer.neuron.thresholds[1:, 0].min())
    close(net, made(net))


def test_neurons_without_weights_in_front_of_them_deploy_with_any_bits() -> None:
    def behind(m: Any, x: Tensor) -> Tensor:
        return rest(m, m.second(over_time(m.sn(over_time(x, m.conv, m.bn, timesteps=m.timesteps)), m.pool2)))

    for bits in (4, 8, 16):
        net = Own(behind)
        net.sn, net.pool2 = BurstNeuron(31, step=0.4), nn.MaxPool2d(2)
        net.second = BurstNeuron(5, step=0.1, membrane="if")
        assert made(net, bits=bits).verify() == 8


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("alpha", math.nan, "its reset is not finite: did training diverge"),
        ("beta", math.nan, "its leak is not finite: did training diverge"),
        ("rho", math.inf, "its step is not finite"),
    ],
)
def test_constants_that_cannot_be_are_refused(name: str, value: float, message: str) -> None:
    net = Own()
    net.sn = BurstNeuron(step=0.3)
    with torch.no_grad():
        getattr(net.sn, name).fill_(value)
    with pytest.raises(GraphError, match=f"layer 'sn': {message}"):
        made(net)


def test_what_no_file_can_hold_is_not_written(tmp_path: Path) -> None:
    network = replace(made(Own()).network, timesteps=5000)
    with pytest.raises(ArtefactError, match=r"no file can hold this network: input: timesteps must be in 1\.\.4096"):
        lbq.engine.save(tmp_path / "m.lbq", lbq.engine.Network(network))
    assert not (tmp_path / "m.lbq").exists()


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[31m", "two\nlines", ""])
def test_names_of_classes_can_be_shown_anywhere(name: str) -> None:
    with pytest.raises(GraphError, match="classes: .* is no name"):
        made(Own(), classes=[name, "b", "c", "d", "e"])


def test_many_small_weights_are_not_taken_for_none() -> None:
    """Each is below the finest unit that a step allows, together they are several steps."""
    weight = np.zeros((2, 576, 1, 1))
    weight[0, 0], weight[1] = 1.0, 0.5 / 600
    synapse = Synapse("conv", "a", "conv", weight, (576, 1, 1), (2, 1, 1), absorbed=True)
    layer = Layer("sn", (synapse,), np.full(2, 0.5), (2, 1, 1))
    unit = shared_unit(layer, np.full(2, 0.5), 8, {"conv": 5})
    assert np.abs(integer_weights(synapse, unit, 8).weight[1]).min() > 100
    weight[1] = 0.5 / 1e6  # and these are none, so that the bias sets the unit, a power of two of the step
    wanted = 0.5 / (5 * 127 + 0.5 * 127)
    assert wanted < shared_unit(layer, np.full(2, 0.5), 8, {"conv": 5})[1] == 2.0**-10 < 2 * wanted
    shortcut = Synapse("id", "a", "identity", np.full(2, 2.0), (2, 1, 1), (2, 1, 1), absorbed=True)  # or a shortcut
    unit = shared_unit(replace(layer, synapses=(synapse, shortcut)), np.full(2, 0.5), 8, {"conv": 5, "id": 7})
    wanted = 14.5 / (127 * (5 + 14.5))
    assert wanted < unit[1] == 2.0**-7 < 2 * wanted


@pytest.mark.parametrize(("part", "kept"), [(2.5, True), (10, True), (60, True), (70, False), (1000, False)])
def test_no_weights_are_dropped_that_move_a_membrane_by_a_64th_of_a_step(part: float, kept: bool) -> None:
    """20 weights that with all levels at 5 are worth 1 / part of a step, in a channel whose bias is a hundred steps."""
    step = 0.5
    weight = np.ones((2, 20, 1, 1))
    weight[1] = step / part / (20 * 5)
    synapse = Synapse("conv", "a", "conv", weight, (20, 1, 1), (2, 1, 1), absorbed=True)
    layer = Layer("sn", (synapse,), np.array([0.0, 50.0]), (2, 1, 1))
    unit = shared_unit(layer, np.full(2, step), 8, {"conv": 5})
    integer = integer_weights(synapse, unit, 8).weight[1].astype(np.float64)
    assert bool(integer.all()) == kept
    lost = np.abs(weight[1] - integer * unit[1]).sum() * 5  # of a current, at most
    assert lost < step / 64
    if kept:
        assert lost < step / 1000
    else:  # then it takes no more fractional bits than the other: its bias is no larger than the other's currents
        assert 0.5 < (50 / unit[1]) / (20 * 5 / unit[0]) <= 1


def test_small_weights_of_pixels_keep_their_digits() -> None:
    """A pixel counts to 255, so that weights matter that no level would make felt."""
    weight = np.linspace(-1e-5, 1e-5, 27).reshape(1, 3, 3, 3)  # 0.036 at most, a fourteenth of a step
    synapse = Synapse("conv", INPUT, "conv", weight, (3, 3, 3), (1, 1, 1), absorbed=True)
    layer = Layer("sn", (synapse,), np.zeros(1), (1, 1, 1))
    unit = shared_unit(layer, np.full(1, 0.5), 8, {"conv": 255})
    integer = integer_weights(synapse, unit, 8).weight.astype(np.float64)
    assert np.abs(integer).max() == 127
    assert np.abs(weight - integer * unit[0]).sum() * 255 < 0.5 / 1000


def test_the_mean_pixel_is_taken_off_as_a_convolution_of_it() -> None:
    """Over valid taps, in groups too; where it is black there is nothing to take off at any place."""
    weight = np.random.default_rng(0).integers(-9, 10, (6, 1, 3, 3)).astype(np.int8)
    stride, padding, dilation = (2, 1), (1, 2), (2, 1)
    shape = (6, *output_size((7, 8), (3, 3), stride, padding, dilation))
    conv = Synapse("conv", INPUT, "conv", weight, (3, 7, 8), shape, (), stride, padding, dilation, groups=3)
    layer = Layer("sn", (conv,), np.arange(6.0), shape)
    mean = np.array([1.0, 10.0, 100.0])
    image = torch.from_numpy(mean)[:, None, None].expand(3, 7, 8)
    drop = nn.functional.conv2d(image, torch.from_numpy(weight).double(), None, stride, padding, dilation, 3)
    bias = bias_in_units(layer, {"conv": conv}, np.full(6, 0.5), mean)
    np.testing.assert_allclose(bias, 2 * layer.bias[:, None, None] - drop.numpy())
    for nothing in (0 * mean, None):  # event counts have no offset at all
        assert bias_in_units(layer, {"conv": conv}, np.full(6, 0.5), nothing).tolist() == [0, 2, 4, 6, 8, 10]
