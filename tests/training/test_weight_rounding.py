"""Training with rounded weights: they are deployment's, gradients go straight through, and what is saved is what was tested."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lbq import models
from lbq.deploy import absorb, deploy, fold_gain, lower, on_pixels
from lbq.errors import ConfigError, GraphError
from lbq.graph import INPUT
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from lbq.neuron.recorder import record_levels
from lbq.runs import run_folder
from lbq.training import job
from lbq.training.trainer import Trainer
from lbq.training.weight_rounding import WeightRounding
from tests.support import small_runs
from tests.support.commands import Call
from tests.support.small_nets import MEAN, STD, Functional, mean_logits, normalised, pixels, small, warmed
from tests.support.token_nets import SHAPE, batched_products, network

ROUNDED = "train.weight_bits=4"
EXACT = ("model.dropout=0", "train.precision=fp64", "optim.momentum=0", "augment.shift=0")


@pytest.fixture(autouse=True)
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    small_runs.use_few_digits(monkeypatch)


def joined(m: Any, x: Tensor) -> Tensor:
    """Two branches joined along channels, a hidden linear layer that reads them flattened, and an average in front."""
    a = m.sn1(over_time(x, m.conv1, timesteps=2))
    b = m.sn2(over_time(a, m.conv2, m.bn2))
    c = m.sn3(over_time(torch.cat([a, b], 2), m.avg, m.conv3, m.bn3) + 0.5 * over_time(a, m.avg, m.skip))
    return over_time(m.sn4(over_time(c.flatten(2), m.hidden, spatial=1)), m.fc, spatial=1).mean(0)


def joining() -> nn.Module:
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, 4, 3, padding=1), "sn1": BurstNeuron(5, channels=4), "avg": nn.AvgPool2d(2),
        "conv2": nn.Conv2d(4, 6, 3, padding=1, groups=2), "bn2": nn.BatchNorm2d(6), "sn2": BurstNeuron(5, channels=6),
        "conv3": nn.Conv2d(10, 4, 3, padding=1), "bn3": nn.BatchNorm2d(4, affine=False), "skip": nn.Conv2d(4, 4, 1),
        "sn3": BurstNeuron(3, channels=4), "hidden": nn.Linear(4 * 4, 6), "sn4": BurstNeuron(3), "fc": nn.Linear(6, 5),
    }  # fmt: skip
    return warmed(Functional(joined, **layers), 3, 4, 4)


def rounding_of(net: nn.Module, shape: tuple[int, int, int], bits: int = 4, steps: int = 2) -> WeightRounding:
    return WeightRounding(net, shape, bits, timesteps=steps, std=STD[: shape[0]], scale=255)


# The rounding is deployment's
# ---------------------------------------------------------------------------------------------------------------------


def check_as_deployed(net: nn.Module, shape: tuple[int, int, int], steps: int, bits: int = 4) -> None:
    """Rounded weights, absorbed, are whole numbers of the deployed network's units: the ones that it has."""
    mean, std = MEAN[: shape[0]], STD[: shape[0]]
    deployed = deploy(net, shape, mean=mean, std=std, timesteps=steps, bits=bits)
    rounding, before = rounding_of(net, shape, bits, steps), [p.clone() for p in net.parameters()]
    with rounding():
        real = absorb(fold_gain(on_pixels(lower(net, shape, steps), mean, std, 255)))
        again = rounding.rounded_weights()
        for weight, value in zip(rounding.weights, again, strict=True):  # rounding what is rounded changes nothing
            torch.testing.assert_close(value, weight)
        x = pixels(8, *shape)
        with record_levels(net) as seen, torch.no_grad():
            net(normalised(x))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    for whole, layer in zip(deployed.network.layers, real.layers, strict=True):
        for s, t in zip(whole.synapses, layer.synapses, strict=True):
            if s.kind == "conv":
                np.testing.assert_allclose(t.weight / whole.unit[:, None, None, None], s.weight, atol=1e-5)
                assert np.abs(s.weight).max() <= (
                    127 if any(p.source == INPUT for p in whole.synapses) else 2 ** (bits - 1) - 1
                )
    out = deployed.run(x, "dense", trace=True)
    assert out.levels is not None
    equal = [(level == real[name].placed(seen[name])).mean() for name, level in out.levels.items()]
    assert np.mean(equal) > 0.999


NETWORKS: dict[str, tuple[str, Any, tuple[int, int, int], int]] = {  # model, neuron, input shape, timesteps
    "shortcuts": ("resnet8w4", "lbq", (3, 4, 4), 2),
    "steps by channel": ("resnet8w2", {"name": "lbq", "n_max": 20, "per_channel": True}, (3, 4, 4), 3),
    "gain": ("resnet8w2", {"name": "lbq", "membrane": "plif"}, (1, 5, 3), 2),
    "scale that is no step": ("resnet8w2", "ladder", (3, 4, 4), 2),
    "pools": ("vgg11w2", "lbq", (3, 32, 32), 1),
    "gates": ("qkformer3x32", "lbq", (3, 16, 16), 1),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_the_rounding_is_that_of_deployment(case: str) -> None:
    id, neuron, shape, steps = NETWORKS[case]
    check_as_deployed(small(id, neuron, shape, timesteps=steps), shape, steps)


@pytest.mark.parametrize("bits", [2, 7])
def test_joined_grouped_and_scaled_layers_are_rounded_as_they_are_deployed(bits: int) -> None:
    check_as_deployed(joining(), (3, 4, 4), 2, bits)


def test_linear_layers_of_tokens_are_rounded_as_they_are_deployed() -> None:
    check_as_deployed(warmed(network(batched_products, unequal=True), *SHAPE), SHAPE, 2)


def test_channels_with_tiny_weights_or_without_gain() -> None:
    """Tiny weights are rounded in the smallest unit, as in deployment. A gain of 0 hides weights, which stay."""
    net: Any = small("resnet8w4", {"name": "lbq", "membrane": "plif"}, (3, 4, 4))
    block = net.layer2[0]
    real = absorb(fold_gain(on_pixels(lower(net, (3, 4, 4), 2), MEAN, STD, 255)))
    absorbed = {s.name: np.abs(s.weight).mean((1, 2, 3)) for s in real.synapses if s.kind == "conv"}
    with torch.no_grad():
        block.bn1.weight[0] = 0
        block.conv1.weight[1] *= 2 * block.sn1.step / 2**12 / absorbed["layer2.0.conv1"][1]
        net.conv1.weight[1] *= 50 * net.sn1.step / (255 * 2**16) / absorbed["conv1"][1]
    check_as_deployed(net, (3, 4, 4), 2)
    weight = block.conv1.weight.detach().clone()
    with rounding_of(net, (3, 4, 4))():
        assert torch.equal(block.conv1.weight[0], weight[0])
        assert 0 < len(block.conv1.weight[1].unique()) < 15


# Straight through
# ---------------------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_straight_through_estimator() -> None:
    net = small("resnet8w4", shape=(3, 4, 4)).train()
    rounding, x, y = rounding_of(net, (3, 4, 4)), normalised(pixels(6, 3, 4, 4)), torch.arange(6) % 5
    rounded = dict(zip(map(id, rounding.weights), rounding.rounded_weights(), strict=True))
    passing = {n: p + (rounded[id(p)] - p).detach() if id(p) in rounded else p for n, p in net.named_parameters()}
    statistics = {n: b.clone() for n, b in net.named_buffers()}
    expected = torch.autograd.grad(
        F.cross_entropy(functional_call(net, passing | statistics, x), y), list(net.parameters())
    )
    with rounding():
        F.cross_entropy(net(x), y).backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_step_that_would_be_undone_is_refused_and_loses_nothing() -> None:
    net = small("resnet8w4", shape=(3, 4, 4)).train()
    rounding, optimiser = rounding_of(net, (3, 4, 4)), torch.optim.SGD(net.parameters(), lr=0.1)
    before = [p.clone() for p in net.parameters()]
    net(normalised(pixels(6, 3, 4, 4))).sum().backward()
    with rounding(), pytest.raises(RuntimeError, match="would be undone: call it behind the block"):
        optimiser.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with rounding():
        other.step()  # of other weights: none of its business
    optimiser.step()
    assert not torch.equal(rounding.weights[0], before[0])


def one_step(made: Trainer) -> dict[str, Tensor]:
    made.between_steps = lambda _: True
    list(made.fit())
    return {name: value.clone() for name, value in made.net.state_dict().items()}


@pytest.mark.parametrize("changes", [("optim.sam=0.1",), ("train.accumulate=2",)], ids=["sharp", "parts"])
def test_a_step_takes_the_gradient_at_the_rounded_weights(changes: tuple[str, ...]) -> None:
    """What a step adds to the weights is what it adds to rounded weights in a training without rounding."""
    plain = (*EXACT, "train.ema=0", "optim.weight_decay=0", *changes)
    made, other = (small_runs.trainer(small_runs.config(*plain, f"train.weight_bits={bits}")) for bits in (4, 0))
    before = {name: value.clone() for name, value in made.net.state_dict().items()}
    with made.rounded():
        rounded = {name: value.clone() for name, value in made.net.state_dict().items()}
    other.net.load_state_dict(rounded)
    after, expected = one_step(made), one_step(other)
    assert sum(not torch.equal(rounded[name], value) for name, value in before.items()) == 9
    for name, value in after.items():
        if value.is_floating_point():
            torch.testing.assert_close(value - before[name], expected[name] - rounded[name], atol=1e-12, rtol=1e-6)


# Runs
# ---------------------------------------------------------------------------------------------------------------------


def test_a_fine_tuning_leaves_what_it_tested_and_deploys_so(call: Call, tmp_path: Path) -> None:
    """From a deployed network, with averaged weights: the plan says the bits, deployment takes them, others with a word."""
    first, tuned, file = tmp_path / "first", tmp_path / "tuned", tmp_path / "model.lbq"
    settings = small_runs.config("train.epochs=1", "train.warmup_epochs=0", "train.checkpoint_steps=0")
    small_runs.save_run(first, models.create("resnet8w2", in_channels=1), settings)
    said = call.json("deploy", first, "-o", file, "--bits", "4", "--noise")
    word = "rounded to 4 bits after training: train.weight_bits=4 trains with these"
    assert (said["bits"], said["remark"]) == (4, word)
    code, _, err = call("train", first / "config.toml", f"train.init_from={file}", ROUNDED, "--out", tuned)
    assert (code, "weights  rounded to 4 bits as in the deployed network" in err) == (0, True), err
    word = "trained with 4 bits: --bits 4 needs fewer, and loses nothing"
    assert word in call.printed("deploy", tuned, "-o", file, "--bits", "8", "--noise")
    said = call.json("deploy", tuned, "-o", file, "--noise")
    assert (said["bits"], said["remark"]) == (4, None)
    evaluated = job.evaluate_run(tuned)
    assert evaluated["accuracy"] == evaluated["stored_accuracy"]
    stored, kept = run_folder.read_weights(tuned), small_runs.last_checkpoint(tuned).tensors
    made = small_runs.trainer(run_folder.load_config(tuned))
    made.net.load_state_dict({name: kept[f"average/{name}"] for name in stored})
    weight = "layer2.0.conv2.weight"
    assert not torch.equal(stored[weight], made.net.state_dict()[weight])  # a checkpoint has unrounded weights
    with made.rounded():
        assert all(torch.equal(value, stored[name]) for name, value in made.net.state_dict().items())


# What is refused
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("train.weight_bits=9",), r"train.weight_bits must be 0 \(not rounded\) or 2 to 8, got 9"),
        (("train.weight_bits=1",), "train.weight_bits must be 0 .* got 1"),
        (("train.weight_bits=4.0",), "train.weight_bits must be an integer, got 4.0"),
        (
            (ROUNDED, "neuron.name=relu"),
            "train.weight_bits=4 rounds weights as deployment does: layer 'sn1' is not a spiking",
        ),
        ((ROUNDED, "neuron.name=mlf"), "train.weight_bits=4 rounds .* MLF keeps several membranes"),
        ((ROUNDED, "model.id=spikformer2x16-sew"), "layer 'blocks.1.q.conv' reads a sum of levels, or several layers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        small_runs.trainer(small_runs.config(*changes))
    assert "\n" not in str(caught.value)


def test_weights_that_cannot_be_rounded_are_refused_by_layer() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return mean_logits(m, m.sn2(over_time(m.sn1(over_time(x, m.conv1, timesteps=2)), m.conv2)))

    def net() -> Any:
        layers = {"conv1": nn.Conv2d(3, 3, 1), "conv2": nn.Conv2d(3, 3, 1), "fc": nn.Linear(3, 2)}
        return Functional(forward, **layers, sn1=BurstNeuron(), sn2=BurstNeuron(), pool=nn.AdaptiveAvgPool2d(1))

    shared, computed = net(), net()
    shared.conv2.weight = shared.conv1.weight
    nn.utils.parametrizations.weight_norm(computed.conv2)
    for other, why in (
        (shared, "layer 'conv1': its weight is another layer's"),
        (computed, "layer 'conv2': its weight is comp"),
    ):
        with pytest.raises(GraphError, match=why):
            WeightRounding(other, (3, 4, 4), 4)
    with pytest.raises(ValueError, match="bits must be 2 to 8, got 16"):
        WeightRounding(net(), (3, 4, 4), 16)
    only = Functional(
        lambda m, x: mean_logits(m, m.sn1(over_time(x, m.conv1, timesteps=2))), **dict(net().named_children())
    )
    with pytest.raises(GraphError, match="no layer lies between neurons"):
        WeightRounding(only, (3, 4, 4), 4)


@pytest.mark.parametrize(
    "wrong", [{"std": [0.0]}, {"std": [math.nan]}, {"std": [1.0, 2.0]}, {"scale": 0.0}, {"scale": -1.0}]
)
def test_a_normalisation_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    net = models.create("resnet8w4", timesteps=2, in_channels=1)
    with pytest.raises(ValueError, match="std"):
        WeightRounding(net, (1, 8, 8), 4, **wrong)
