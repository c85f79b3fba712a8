"""Quantisation to integers: units, fractions, constants, bias maps, readout, and what is refused with which advice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lbq import models
from lbq.batches.sources import open_source
from lbq.cli.demo import demo_config
from lbq.config import Config
from lbq.data import load_digits
from lbq.deploy import absorb, deploy, fold_gain, lower, on_pixels, quantise
from lbq.deploy.float_execution import execute
from lbq.deploy.pipeline import deploy_trained, test_set
from lbq.deploy.verify import check_absorption, check_integers
from lbq.engine import Network
from lbq.errors import GraphError, LbqError
from lbq.graph import INPUT, Graph, Layer, NeuronSpec, Pool, Synapse
from lbq.graph.integer import MEMBRANE_BOUND, membrane_bound
from lbq.graph.quantise import dyadic, integer_neuron, integer_weights, quantise_readout, shared_unit
from lbq.measuring.measure import measure
from lbq.models import BurstNet, over_time
from lbq.neuron import MLF, BurstNeuron, ReLU
from lbq.training import evaluation
from lbq.training import trainer as train
from tests.support.reading import normalised_by
from tests.support.small_nets import (
    MEAN,
    STD,
    Functional,
    deploy_warmed,
    deployed,
    mean_logits,
    normalised,
    pixels,
    small,
)

SPEC = NeuronSpec("BurstNeuron", 5, np.array(0.5), np.array(0.5), 0.5, 1.0, 1.0, "floor", "once", True)


def conv(weight: Any, source: str = "a", name: str = "conv", size: int = 4, padding: int = 0) -> Synapse:
    weight = np.asarray(weight, np.float64)
    out = size + 2 * padding - weight.shape[2] + 1
    shapes = (weight.shape[1], size, size), (weight.shape[0], out, out)
    return Synapse(name, source, "conv", weight, *shapes, padding=(padding, padding), absorbed=True)


def rewritten(net: nn.Module, shape: tuple[int, int, int] = (3, 8, 8)) -> Graph:
    return absorb(fold_gain(on_pixels(lower(net, shape), MEAN[: shape[0]], STD[: shape[0]], 255)))


# One rule at a time ----------------------------------------------------------------------------------------------------


def test_one_unit_per_channel_is_shared_by_all_convolutions_into_it() -> None:
    first, second = np.zeros((3, 2, 1, 1)), np.zeros((3, 2, 1, 1))
    first[:, 0, 0, 0], second[:, 1, 0, 0] = [1.27, -0.3, 0], [0.2, 2.54, 0]
    layer = Layer("sn", (conv(first), conv(second, name="other")), np.zeros(3), (3, 4, 4), SPEC)
    largest = {"conv": 5, "other": 5}
    unit = shared_unit(layer, np.full(3, 0.5), 8, largest)
    np.testing.assert_allclose(unit, [0.01, 0.02, 0.5 / 2**16])  # the last channel is dead
    assert integer_weights(layer.synapses[0], unit, 8).weight[:, 0, 0, 0].tolist() == [127, -15, 0]
    assert integer_weights(layer.synapses[1], unit, 8).weight[:, 1, 0, 0].tolist() == [20, 127, 0]
    np.testing.assert_allclose(shared_unit(layer, np.full(3, 0.5), 4, largest)[:2], [1.27 / 7, 2.54 / 7])


@pytest.mark.parametrize(
    ("bits", "most", "kind"),
    [(2, 1, np.int8), (4, 7, np.int8), (6, 31, np.int8), (8, 127, np.int8), (16, 32767, np.int16)],
)
def test_weights_use_the_bits_they_are_given(bits: int, most: int, kind: Any) -> None:
    network = quantise(rewritten(small()), bits)
    for layer in network.layers:
        for s in layer.convs:
            stem = s.source == INPUT and bits < 8
            assert s.weight.dtype == kind
            assert int(np.abs(s.weight.astype(int)).max()) == (127 if stem else most) or len(layer.convs) > 1
    assert network.readout.convs[0].weight.dtype == np.int16


def test_thresholds_of_every_kind_of_rounding() -> None:
    fine = np.array([0.01, 0.02])

    def thresholds(**changes: Any) -> list[list[int]]:
        values: list[list[int]] = integer_neuron(replace(SPEC, n_max=2, **changes), fine).thresholds.tolist()
        return values

    assert thresholds() == [[50, 100], [25, 50]]
    assert thresholds(rounding="strict") == [[51, 101], [26, 51]]  # U > theta is U >= theta + 1
    assert thresholds(rounding="round") == [[25, 75], [12, 38]]  # ties to even: 12.5 and 37.5
    assert thresholds(rounding="trunc") == [[50, 100], [25, 50]]
    assert thresholds(rounding="half") == [[25, 75], [12, 38]]
    assert thresholds(thresholds=np.array([0.1, 0.9])) == [[10, 90], [5, 45]]
    assert thresholds(step=np.array([1.0, 0.5])) == [[100, 200], [25, 50]]
    never = integer_neuron(SPEC, np.array([1e-12])).thresholds
    assert never.tolist() == [[MEMBRANE_BOUND] * 5]
    assert integer_neuron(replace(SPEC, alpha=0.5), fine).reset.tolist() == [25, 12]


@pytest.mark.parametrize(
    ("leak", "expected"),
    [(0.5, (1, 1)), (0.25, (1, 2)), (0.75, (3, 2)), (0.0, (0, 1)), (1.0, None), (0.3, (19661, 16)), (1 - 1e-9, None)],
)
def test_leaks_are_dyadic(leak: float, expected: tuple[int, int] | None) -> None:
    assert dyadic(leak) == expected


def test_the_readout_has_one_unit_for_all_classes_and_sums_over_time() -> None:
    weight = np.array([[[[1.0]]], [[[0.001]]]])
    readout = Layer("readout", (conv(weight, size=1),), np.array([0.5, -1.0]), (2, 1, 1))
    made, scale = quantise_readout(readout, timesteps=4)
    assert made.synapses[0].weight.ravel().tolist() == [32767, 33]
    assert made.bias.tolist() == [65534, -131068]  # b * T / q
    assert scale == pytest.approx(1 / 32767 / 4)
    blank, scale = quantise_readout(replace(readout, synapses=(conv(0 * weight, size=1),)), timesteps=4)
    assert (blank.bias * scale).tolist() == pytest.approx([0.5, -1.0])  # also where all weights are 0


def test_fractions_are_as_large_as_the_bound_allows() -> None:
    network = deployed().network
    largest = {s.name: network.largest(s) for s in network.synapses}
    for layer in network.layers:
        assert membrane_bound(layer, largest, network.timesteps) < MEMBRANE_BOUND
        assert layer.neuron is not None
        doubled = replace(
            layer,
            fraction=layer.fraction + 1,
            bias=2 * layer.bias.astype(np.int64),
            synapses=tuple(
                replace(s, weight=2 * s.weight.astype(np.int64)) if s.kind == "identity" else s for s in layer.synapses
            ),
        )
        assert membrane_bound(doubled, largest, network.timesteps) >= MEMBRANE_BOUND * 0.99
        assert int(layer.neuron.thresholds[:, 0].min()) >= 64


# Whole networks --------------------------------------------------------------------------------------------------------

NEURONS: list[Any] = [
    "lbq", {"name": "lbq", "n_max": 20}, {"name": "lbq", "per_channel": True}, {"name": "lbq", "membrane": "plif"},
    {"name": "lbq", "membrane": "if"}, "burst_fixed", "ladder", "lif", "if", "plif", "ternary", "ternary_learned",
    "ternary_half", "ilif", "qann",
]  # fmt: skip


@pytest.mark.parametrize("neuron", NEURONS, ids=str)
def test_sixteen_bits_are_nearly_exact_for_every_neuron(neuron: Any) -> None:
    """With 16-bit weights hardly a level differs from the trained network's; what is left is rounding."""
    net = small("resnet8w8", neuron)
    x = pixels(4, 3, 8, 8, seed=9)
    absorbed = execute(rewritten(net), x)
    output = deploy(net, (3, 8, 8), mean=MEAN, std=STD, bits=16).run(x, "dense", trace=True)
    assert output.levels is not None
    different = sum(int((level != absorbed.levels[name]).sum()) for name, level in output.levels.items())
    assert different <= 0.004 * sum(level.size for level in output.levels.values())
    assert any(level.any() for level in output.levels.values())
    with torch.no_grad():
        logits = net(normalised(x)).numpy()
    close = np.abs(output.logits * output.scale - logits).max(1) <= 0.03 * np.abs(logits).max()
    assert close.sum() >= 3  # of four images: one level at a threshold may tip the rest of its image


@pytest.mark.parametrize(
    ("id", "shape"),
    [
        ("vgg11w4", (3, 32, 32)),
        ("narrow-pooled-stem", (3, 32, 32)),
        ("resnet18w4", (1, 9, 9)),
        ("narrow-fc", (3, 8, 8)),
    ],
)
def test_networks_of_every_family_deploy(id: str, shape: tuple[int, int, int]) -> None:
    net = deployed(id, shape=shape)
    assert net.verify("dense") == 8
    assert net.network.macs == lower(small(id, shape=shape), shape).macs


def test_average_pools_inside_become_sums() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.sn(over_time(x, m.conv, timesteps=2))
        return mean_logits(m, m.sn2(over_time(x, m.avg, m.conv2)))

    torch.manual_seed(0)
    first = {"conv": nn.Conv2d(3, 4, 3, padding=1), "sn": BurstNeuron(200), "avg": nn.AvgPool2d(2)}
    second = {"conv2": nn.Conv2d(4, 4, 3), "sn2": BurstNeuron(), "pool": nn.AdaptiveAvgPool2d(1)}
    net = deploy_warmed(Functional(forward, **first, **second, fc=nn.Linear(4, 3)), 3, 8, 8)
    synapse = net.network["sn2"].synapses[0]
    assert net.network.largest(synapse) == 800  # beyond 8 bits
    assert net.verify("bitplane") == 8
    assert "above 8 bits" in net.run(pixels(1, 3, 8, 8), "bitplane").choices["conv2"].reason


@pytest.fixture(scope="module")
def trained() -> tuple[BurstNet, Config]:
    """The network of the first tutorial with its own configuration, in half of its epochs."""
    config = demo_config("lbq", seed=0, epochs=10)
    trainer = train.Trainer(config, open_source(config))
    for _ in trainer.fit():
        pass
    return trainer.net.eval(), config


def test_lbq_reaches_97_percent_and_its_integers_agree(trained: tuple[BurstNet, Config]) -> None:
    """What the first tutorial promises of the first run."""
    net, config = trained
    source, test = open_source(config), test_set(config)
    measured = measure(net, source)
    assert measured.accuracy >= 97
    absorption = check_absorption(net, source)
    assert absorption.passed
    for change in ({"untied": 1}, {"largest_logit_error": 0.1}, {"tied_images": 599}):
        assert not replace(absorption, **change).passed
    check = check_integers(net, source, deploy_trained(net, config, test, None), test, 0)
    assert check.passed
    assert check.accuracy >= measured.accuracy - 1
    assert check.predictions_agree > 98.5
    steps = evaluation.neuron_steps(net).values()
    assert max(steps) / min(steps) > 1.5  # layers chose different resolutions


@pytest.mark.parametrize(("bits", "loss", "agree"), [(8, 1.5, 97), (6, 2.0, 96), (4, 6.0, 85), (16, 0.5, 99)])
def test_integers_keep_the_accuracy_of_a_trained_network(
    trained: tuple[BurstNet, Config], bits: int, loss: float, agree: float
) -> None:
    net, config = trained
    source, test = open_source(config), test_set(config)
    deployed = deploy_trained(net, config, test, test.read(0, 8), bits)
    check = check_integers(net, source, deployed, test, 1)
    with torch.no_grad():
        digits = load_digits()
        pixels = torch.from_numpy(normalised_by(digits.inputs, digits.test.images))
        exact = 100 * float((net(pixels).argmax(1).numpy() == digits.test.labels).mean())
    assert exact > 90
    assert check.accuracy > exact - loss
    assert check.predictions_agree > agree
    assert check.passed
    assert check.accumulations_executed > 10**6
    assert not replace(check, accumulations_executed=0).passed
    assert deployed.network.input_max == 16
    assert deployed.network.facts["data"]["name"] == "digits"
    assert deployed.network.classes == tuple("0123456789")


# What is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("neuron", "message"),
    [
        (MLF, "layer 'sn1': MLF keeps several membranes per neuron, .*; use LadderNeuron"),
        (ReLU, "layer 'sn1' is not a spiking neuron: it has no integer levels"),
        (lambda: BurstNeuron(300), "layer 'sn1': n_max is 300, but levels are 8-bit: use at most 255"),
        (
            lambda: BurstNeuron(5, step=3e-6),
            "layer 'sn1': its first threshold is .* units, fewer than 64: the step 3e-06 is too small",
        ),
    ],
)
def test_neurons_without_an_integer_form_are_refused_by_layer(neuron: Any, message: str) -> None:
    net = models.create("resnet8w4", neuron=neuron)
    with pytest.raises(GraphError, match=message):
        deploy(net.eval(), (3, 8, 8), mean=MEAN, std=STD)


def test_a_running_variance_below_0_is_refused() -> None:
    net = small()
    net.get_submodule("bn1").running_var.fill_(-1)  # type: ignore[operator]
    with pytest.raises(GraphError, match="layer 'bn1': a running variance is not positive: did training diverge?"):
        deploy(net.eval(), (3, 8, 8), mean=MEAN, std=STD)


def test_what_does_not_fit_is_refused() -> None:
    graph = rewritten(small())
    for bits in (1, 9):
        with pytest.raises(GraphError, match=f"bits must be 2 to 8, or 16, got {bits}"):
            quantise(graph, bits)
    with pytest.raises(GraphError, match="not absorbed"):
        quantise(lower(small(), (3, 8, 8)))
    with pytest.raises(GraphError, match="no spiking layer"):
        quantise(replace(graph, layers=()))
    stem = graph.layers[0]
    assert stem.neuron is not None
    huge = Pool("sum", (30_000, 30_000), (1, 1))

    def changed(**changes: Any) -> Graph:
        neuron = replace(stem.neuron, **changes.pop("neuron", {}))  # type: ignore[type-var]
        return replace(graph, layers=(replace(stem, neuron=neuron, **changes), *graph.layers[1:]))

    def readout(**changes: Any) -> Graph:
        return replace(graph, readout=replace(graph.readout, **changes))

    head = graph.readout.synapses[0]
    alone = stem.bias.copy()
    alone[2] = -1e30 * np.broadcast_to(stem.neuron.step, 4)[2]
    for wrong, message in (
        (changed(neuron={"gain": 0.5}), "layer 'sn1': its gain is not folded yet"),
        (changed(neuron={"reset": "hard", "alpha": 0.5}), "a hard reset by alpha 0.5 has no integer form: use alpha 1"),
        (changed(neuron={"alpha": -0.5}), "its leak is 0.5 and its reset -0.5: .* a reset at least 0"),
        (changed(neuron={"scale": np.array(np.inf)}), "layer 'sn1': its scale is not finite"),
        (changed(neuron={"rounding": "trunc", "n_max": 128}), "n_max is 128, .* use at most 127"),
        (changed(bias=np.full(4, np.nan)), "layer 'sn1': its weights or bias are not finite: did training diverge?"),
        (changed(bias=np.full(4, 1e30)), "layer 'sn1': its membrane may reach 2\\^30: use fewer weight bits"),
        (
            changed(bias=alone),
            r"layer 'sn1': its membrane .* by the bias of channel 2, -1e\+30 steps: prune that channel",
        ),
        (readout(shape=(5, 2, 2)), r"readout: it gives \(5, 2, 2\) and not one"),
        (readout(synapses=(replace(head, source=INPUT),)), "readout: it reads the input itself"),
        (readout(bias=np.full(5, 1e30)), "readout: its sums may reach 2\\^53"),
        (
            readout(synapses=(replace(head, pools=(huge,)),)),
            "'fc': its pooled levels may reach 9000000000, beyond int32",
        ),
    ):
        with pytest.raises(GraphError, match=message):
            quantise(wrong)


def test_wrong_channels_of_the_data_are_named() -> None:
    config = Config.from_dict({"model": {"id": "resnet8w2", "in_channels": 3}})
    with pytest.raises(LbqError, match="the network reads 3 channels, digits has 1"):
        deploy_trained(small("resnet8w2"), config, test_set(config), None)


def test_default_golden_inputs_are_random_and_within_range() -> None:
    net: Network = deploy(small("resnet8w2", shape=(1, 8, 8)), (1, 8, 8), mean=(0.3,), scale=16)
    assert net.golden is not None
    assert net.golden.inputs.shape == (8, 1, 8, 8)
    assert net.golden.inputs.max() == 16


def test_a_network_deployed_for_streams_fits_over_all_time() -> None:
    net = small("resnet8w2", shape=(3, 4, 4))
    options: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.25] * 3}
    with pytest.raises(GraphError, match="may reach 2\\^30 over endless frames: deploy its run with --stream"):
        deploy(net, (3, 4, 4), **options).stream()
    made = deploy(net, (3, 4, 4), stream=True, **options)
    assert made.stream().window == 2
    assert made.verify("bitplane") == 8
    with pytest.raises(GraphError, match="has no leak, so its membrane has no bound"):
        deploy(small("resnet8w2", {"name": "lbq", "membrane": "if"}, (3, 4, 4)), (3, 4, 4), stream=True, **options)
