"""Lowering and absorption: each rewrite alone, whole networks to the bit, and what is refused.

Guarantee (a): in float64 the absorbed network's levels equal the training network's at every layer and timestep.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lbq import models
from lbq.deploy import absorb, fold_gain, lower, on_pixels
from lbq.deploy.float_execution import distance_to_threshold, execute
from lbq.errors import GraphError
from lbq.graph import INPUT, Graph, Layer, NeuronSpec, Synapse
from lbq.models import over_time
from lbq.neuron import LIF, LMHT, BurstNeuron, LadderNeuron, SpikingNeuron
from tests.support import small_nets
from tests.support.small_nets import Functional, compare, mean_logits


def chain(m: Any, x: Tensor) -> Tensor:
    """Layers in order over time, a linear head, logits averaged."""
    first, *rest = m.layers
    x = over_time(x, first, timesteps=2)
    for layer in rest:
        alone = isinstance(layer, (SpikingNeuron, nn.Flatten))  # knows time
        x = layer(x) if alone else over_time(x, layer, spatial=1 if isinstance(layer, nn.Linear) else 3)
    return x.mean(0)


def warmed(net: nn.Module, *shape: int) -> nn.Module:
    """As of small_nets, and BatchNorm has weights and biases of its own too."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, LMHT):
            nn.init.normal_(module.mixing)
            nn.init.normal_(module.leak_logit)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    return small_nets.warmed(net, *shape)


CASES: list[tuple[str, Any, tuple[int, int, int]]] = [
    ("resnet8w4", "lbq", (3, 8, 8)),
    ("resnet8w4", {"name": "lbq", "n_max": 20}, (3, 9, 9)),
    ("resnet8w4", {"name": "lbq", "per_channel": True}, (3, 8, 8)),
    ("resnet8w4", {"name": "lbq", "membrane": "plif"}, (3, 8, 8)),
    ("resnet8w4", {"name": "lbq", "membrane": "if"}, (3, 8, 8)),
    ("resnet8w4", "lif", (3, 8, 8)),
    ("resnet8w4", "ternary", (3, 8, 8)),
    ("resnet8w4", "ternary_half", (3, 8, 8)),
    ("resnet8w4", "ilif", (3, 8, 8)),
    ("resnet8w4", "qann", (3, 8, 8)),
    ("resnet8w4", "ladder", (3, 8, 8)),
    ("resnet8w4", "lmht", (3, 8, 8)),
    ("vgg11w4", {"name": "lmht", "n_max": 4, "learn_step": True}, (3, 32, 32)),
    ("resnet18w4", "lbq", (3, 16, 16)),
    ("narrow-fc", "lbq", (3, 4, 4)),  # a neuron behind a linear layer
    ("narrow-pooled-stem", "lbq", (3, 32, 32)),  # whose stem pools levels
    ("vgg11w4", "lbq", (3, 32, 32)),
    ("vgg11w4", "ternary", (3, 32, 32)),
]


@pytest.mark.parametrize(("id", "neuron", "shape"), CASES)
def test_absorbed_networks_equal_training(id: str, neuron: Any, shape: tuple[int, int, int]) -> None:
    net = warmed(models.create(id, neuron=neuron, timesteps=3), *shape)
    compare(net, lower(net, shape), torch.randn(3, *shape, dtype=torch.float64))


def test_event_network() -> None:
    net = warmed(models.create("resnet8w4", in_channels=2, stem_stride=2), 2, 16, 16)
    graph = lower(net, (2, 16, 16), timesteps=4, static=False)
    assert graph.timesteps == 4
    compare(net, graph, torch.randn(4, 2, 2, 16, 16, dtype=torch.float64))


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(3, 6, 3, 2, 1), BurstNeuron(), nn.Conv2d(6, 8, 3, 1, 2, dilation=2, groups=2), BurstNeuron(3)),
        (nn.Conv2d(3, 6, (3, 1), (1, 2)), BurstNeuron(), nn.AvgPool2d(2), nn.Conv2d(6, 8, 1), LIF()),
        (nn.Conv2d(3, 6, 3), LadderNeuron([0.2, 0.3, 0.9]), nn.MaxPool2d(2, 1, 1), nn.Conv2d(6, 8, 3), LIF()),
        (nn.Conv2d(3, 6, 3), BurstNeuron(), nn.Dropout(0.5), nn.BatchNorm2d(6), BurstNeuron()),
    ],
)
def test_layers_of_a_users_own_network(layers: tuple[nn.Module, ...]) -> None:
    with torch.no_grad():
        x = torch.zeros(1, 3, 9, 7)
        for layer in layers:
            x = layer(x[None])[0] if isinstance(layer, SpikingNeuron) else layer(x)
    whole = nn.ModuleList([*layers, nn.Flatten(2), nn.Linear(x.numel(), 4)])
    net = warmed(Functional(chain, layers=whole), 3, 9, 7)
    compare(net, lower(net, (3, 9, 7)), torch.randn(3, 3, 9, 7, dtype=torch.float64))


def test_absorb_multiplies_each_reader_by_its_sources_step() -> None:
    """Eq. absorb, and a residual identity becomes a diagonal synapse of the source's scale."""
    net = warmed(models.create("resnet8w4"), 3, 8, 8)
    graph = lower(net, (3, 8, 8))
    absorbed = absorb(graph)
    assert not graph.absorbed
    assert absorbed.absorbed
    for before, after in zip(graph.all_layers, absorbed.all_layers, strict=True):
        for s, t in zip(before.synapses, after.synapses, strict=True):
            spec = None if s.source == INPUT else graph[s.source].neuron
            factor = 1.0 if spec is None else spec.step
            np.testing.assert_array_equal(t.weight, s.weight * factor)
    shortcut = next(s for s in absorbed["layer1.0.sn2"].synapses if s.kind == "identity")
    source = absorbed["sn1"].neuron
    assert source is not None
    np.testing.assert_array_equal(shortcut.weight, np.full(4, source.step))
    for old, new in zip(absorb(absorbed).all_layers, absorbed.all_layers, strict=True):  # once is enough
        for s, t in zip(old.synapses, new.synapses, strict=True):
            assert s.weight is t.weight


def test_pixels_enter_every_synapse_that_reads_them() -> None:
    """In groups, and of a readout too, once; a layer without a neuron has no gain to fold."""
    grouped = Synapse("conv", INPUT, "conv", np.ones((6, 1, 1, 1)), (3, 1, 1), (6, 1, 1), groups=3)
    head = Synapse("fc", INPUT, "conv", np.ones((2, 3, 1, 1)), (3, 1, 1), (2, 1, 1))
    layer = Layer("relu", (grouped,), np.zeros(6), (6, 1, 1))
    readout = Layer("readout", (head,), np.zeros(2), (2, 1, 1))
    graph = Graph((3, 1, 1), 1, True, (layer,), readout)
    moved = fold_gain(on_pixels(graph, [0.5] * 3, [1.0, 0.5, 0.25], 2.0))
    assert moved.layers[0].synapses[0].weight.ravel().tolist() == [0.5, 0.5, 1, 1, 2, 2]
    assert moved.readout.synapses[0].weight.reshape(2, 3).tolist() == [[0.5, 1, 2]] * 2
    with pytest.raises(GraphError, match="reads pixels already"):
        on_pixels(moved, [0.0] * 3, [1.0] * 3, 255)
    for mean, std in ((3, 2), (2, 3)):
        with pytest.raises(GraphError, match=f"one value for each of 3 channels, got {mean} and {std}"):
            on_pixels(graph, [0.5] * mean, [1.0] * std, 2.0)


def parts(**extra: nn.Module) -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(3, 4, 3, padding=1), "sn": BurstNeuron(), "conv2": nn.Conv2d(4, 4, 3, padding=1),
        "sn2": BurstNeuron(), "pool": nn.AdaptiveAvgPool2d(1), "fc": nn.Linear(4, 2), **extra,
    }  # fmt: skip


def stem(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.sn(over_time(x, m.conv, timesteps=2))
    return out


def then(*names: str, fires: bool = False) -> Any:
    """A forward that applies these layers to the stem's levels, then the second neuron where it `fires`."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = over_time(stem(m, x), *(m.get_submodule(name) for name in names))
        return mean_logits(m, m.sn2(x) if fires else x)

    return forward


REFUSED: list[tuple[Any, dict[str, nn.Module], str]] = [
    (lambda m, x: mean_logits(m, m.sn2(over_time(stem(m, x), m.conv2).sigmoid())), {}, "'sigmoid' has no integer form"),
    (then("act"), {"act": nn.Softmax(2)}, "layer 'act': Softmax"),
    (then("conv2", "same"), {"same": nn.Identity()}, "read a neuron's output"),
    (lambda m, x: mean_logits(m, m.sn(over_time(stem(m, x), m.conv2))), {}, "'sn' is used twice"),
    (lambda m, x: stem(m, x), {}, "average its logits"),
    (lambda m, x: (stem(m, x), x), {}, "must return one tensor, .*: of several heads return one"),
    (
        lambda m, x: torch.cat([mean_logits(m, stem(m, x))] * 2, -1),
        {},
        "can be joined: .*; of several heads return one",
    ),
    (lambda m, x: mean_logits(m, stem(m, x + m.fc.bias.sum())), {}, "bare parameter"),
    (
        lambda m, x: mean_logits(m, stem(m, 2 * x - 1)),
        {},
        "normalise images before the network, not in it: mean= and std=",
    ),
    (lambda m, x: mean_logits(m, stem(m, x) + 1), {}, "write x . y, and constants into a bias"),
    (
        lambda m, x: over_time(stem(m, x).mean((3, 4)), m.fc, spatial=1)[-1],
        {},
        "the mean or the sum over time, not one",
    ),
    (lambda m, x: mean_logits(m, stem(m, over_time(x, m.pool2))), {"pool2": nn.MaxPool2d(2)}, "raw input"),
    (then("p"), {"p": nn.AvgPool2d(3, 2, ceil_mode=True)}, "ceil_mode"),
    (then("p"), {"p": nn.AvgPool2d(2, divisor_override=3)}, "divisor"),
    (then("p"), {"p": nn.AvgPool2d(3, 1, 1, count_include_pad=False)}, "count_include_pad"),
    (then("a", "p"), {"a": nn.AvgPool2d(2), "p": nn.MaxPool2d(2)}, "max-pooling"),
    (
        then("c", fires=True),
        {"c": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")},
        "only padding_mode='zeros' is supported, not 'reflect'",
    ),
    (
        then("c", fires=True),
        {"c": nn.Conv2d(4, 4, (3, 2), padding="same")},
        "layer 'c': padding='same' of an even kernel",
    ),
    (then("conv2", "b", fires=True), {"b": nn.BatchNorm2d(4, track_running_stats=False)}, "running statistics"),
    (
        lambda m, x: mean_logits(m, m.sn2(over_time(stem(m, x), m.conv2) + over_time(stem2(m, x), m.c))),
        {"c": nn.Conv2d(4, 2, 1), "sn3": BurstNeuron(), "conv3": nn.Conv2d(3, 4, 1)},
        "differ",
    ),
    (lambda m, x: mean_logits(m, m.sn2(x)), {}, "pass a convolution"),
    (lambda m, x: over_time(stem(m, x).flatten(2), m.fc, spatial=1).mean(0), {}, "expects 4 inputs"),
    (
        lambda m, x: over_time(m.sn2(over_time(stem(m, x).flatten(2), m.b, spatial=1)), m.fc, spatial=1).mean(0),
        {"b": nn.BatchNorm1d(256)},
        "layer 'b': expects 256 channels",
    ),
]


def stem2(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.sn3(over_time(x, m.conv3, timesteps=2))
    return out


@pytest.mark.parametrize(("function", "extra", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(function: Any, extra: dict[str, nn.Module], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        lower(Functional(function, **parts(**extra)), (3, 8, 8))


def test_wrong_shapes_and_timesteps_are_refused() -> None:
    net = models.create("resnet8w4")
    with pytest.raises(GraphError, match=r"layer 'conv1': expects 3 channels, gets \(1, 8, 8\)"):
        lower(net, (1, 8, 8))
    with pytest.raises(GraphError, match="input_shape must be"):
        lower(net, (8, 8, 8, 8))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"give spatial=1, or input_shape as \(C, H, W\)"):
        lower(net, (8,))
    with pytest.raises(GraphError, match=r"give spatial=2, or input_shape as \(C, H, W\)"):
        lower(net, (8, 8))
    with pytest.raises(GraphError, match="the network runs 2 timesteps, not 4"):
        lower(net, (3, 8, 8), timesteps=4)
    assert lower(net, [3, 8, 8]).input_shape == (3, 8, 8)  # type: ignore[arg-type]


def test_flattened_neurons_and_named_arguments() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        flat = m.sn2(over_time(stem(m, x), m.conv2).flatten(2))
        return over_time(flat, m.fc, spatial=1).mean(dim=0)

    net = warmed(Functional(forward, **parts(fc=nn.Linear(4 * 64, 2))), 3, 8, 8)
    compare(net, lower(net, (3, 8, 8)), torch.randn(2, 3, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    "conv", [nn.Conv2d(4, 4, (3, 5), padding="same", dilation=(2, 1)), nn.Conv2d(4, 4, 3, padding="valid")]
)
def test_padding_by_name(conv: nn.Conv2d) -> None:
    net = Functional(then("c", fires=True), **parts(c=conv))
    compare(warmed(net, 3, 8, 8), lower(net, (3, 8, 8)), torch.randn(2, 3, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("size", [8, (2, 4), [4, 2], (None, 2), (1, None)])
def test_adaptive_pooling_to_even_windows(size: Any) -> None:
    extra = {"p": nn.AdaptiveAvgPool2d(size), "conv3": nn.Conv2d(4, 4, 1)}
    net = Functional(then("p", "conv3", fires=True), **parts(**extra))
    compare(warmed(net, 3, 8, 8), lower(net, (3, 8, 8)), torch.randn(2, 3, 8, 8, dtype=torch.float64))


def test_synchronised_batch_norm_is_batch_norm() -> None:
    net = warmed(models.create("resnet8w4"), 3, 8, 8)
    graph = lower(net, (3, 8, 8))
    other = lower(nn.SyncBatchNorm.convert_sync_batchnorm(net).eval(), (3, 8, 8))
    for synapse, expected in zip(other.synapses, graph.synapses, strict=True):
        np.testing.assert_array_equal(synapse.weight, expected.weight)


def test_a_second_input_is_named() -> None:
    class TwoInputs(Functional):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return mean_logits(self, stem(self, self.function(x, y)))

    with pytest.raises(GraphError, match="^TwoInputs reads a second input, 'y': deploy one input"):
        lower(TwoInputs(lambda x, y: x + y, **parts()), (3, 8, 8))
    assert lower(TwoInputs(lambda x, y: x, **parts()), (3, 8, 8)).macs > 0


def test_what_is_wrong_with_time_or_tracing_is_said() -> None:
    events = Functional(lambda m, x: mean_logits(m, m.sn(over_time(x, m.conv))), **parts())
    with pytest.raises(GraphError, match="does not say how often it is shown; for event frames, .* pass static=False"):
        lower(events, (3, 8, 8))
    assert lower(events, (3, 8, 8), static=False).timesteps == 2
    inside = Functional(lambda m, x: mean_logits(m, over_time(stem(m, x), nn.MaxPool2d(2))), **parts())
    with pytest.raises(GraphError, match="torch.fx: MaxPool2d is made in its forward: make it in __init__"):
        lower(inside, (3, 8, 8))
    with pytest.raises(GraphError, match="the network has no spiking neurons"):
        lower(nn.Sequential(nn.Conv2d(3, 4, 3)), (3, 8, 8))


def test_plain_ann_has_macs_but_no_neurons() -> None:
    graph = lower(models.create("resnet8w4", neuron="relu", timesteps=1), (3, 8, 8))
    assert all(layer.neuron is None for layer in graph.layers)
    with pytest.raises(GraphError, match="'sn1' is not a spiking neuron"):
        absorb(graph)


@pytest.mark.parametrize("id", ["resnet8w4", "vgg11"])
def test_the_structure_alone_needs_no_weights(id: str) -> None:
    net = models.create(id)
    graph, bare = lower(net, (3, 32, 32)), lower(net, (3, 32, 32), weights=False)
    assert [layer.name for layer in bare.layers] == [layer.name for layer in graph.layers]
    assert [layer.shape for layer in bare.layers] == [layer.shape for layer in graph.layers]
    for synapse, expected in zip(bare.synapses, graph.synapses, strict=True):
        assert replace(synapse, weight=expected.weight) == expected
        assert (synapse.macs, synapse.valid_macs) == (expected.macs, expected.valid_macs)
        np.testing.assert_array_equal(synapse.fan_out(), expected.fan_out())
        if synapse.kind == "conv":
            assert np.isnan(synapse.weight).all()
            assert synapse.weight.strides == (0, 0, 0, 0)  # one number, whatever the shape


def test_wrong_inputs_of_the_absorbed_network_are_refused() -> None:
    graph = lower(models.create("resnet8w4"), (3, 8, 8))
    with pytest.raises(GraphError, match="not absorbed yet"):
        execute(graph, np.zeros((1, 3, 8, 8)))
    with pytest.raises(GraphError, match=r"x must be \[B, 3, 8, 8\], got \[1, 1, 8, 8\]"):
        execute(absorb(graph), np.zeros((1, 1, 8, 8)))
    with pytest.raises(GraphError, match="current of layer 'sn1' is NaN"):
        execute(absorb(graph), np.full((1, 3, 8, 8), np.nan))
    events = lower(models.create("resnet8w4"), (3, 8, 8), static=False)
    with pytest.raises(GraphError, match=r"x must be \[2, B, 3, 8, 8\]"):
        execute(absorb(events), np.zeros((1, 3, 8, 8)))


def test_a_membrane_on_a_threshold_is_reported_as_a_tie() -> None:
    """Such an image may round either way in another order of summation; the check of absorption sets it aside."""
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


SPEC = NeuronSpec("BurstNeuron", 5, np.array(0.5), np.array(0.5), 0.5, 1.0, 1.0, "floor", "once", True)


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
