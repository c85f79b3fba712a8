"""A deployed network read back into one that trains: it deploys to the same levels again, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lbq import models
from lbq.data.testset import open_test
from lbq.deploy import deploy
from lbq.deploy.unfolding import Unfolded, unfold
from lbq.engine import Network, load
from lbq.errors import GraphError
from lbq.graph.integer import MEMBRANE_BOUND
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from lbq.neuron.base import neurons_of
from tests.support.paths import ROOT
from tests.support.reading import real
from tests.support.small_nets import (
    CASES,
    MEAN,
    STD,
    Branches,
    Functional,
    branched,
    deploy_warmed,
    deployed,
    eventful,
    mean_logits,
    pixels,
    warmed,
)
from tests.support.token_nets import SHAPE, images, network, static_patches

Shape = tuple[int, int, int]
MORE: list[tuple[str, Any, Shape, dict[str, Any]]] = [
    ("resnet8w4", {"name": "lbq", "learn_beta": True, "learn_alpha": True, "beta": 0.3, "alpha": 0.8}, (3, 8, 8), {}),
    ("resnet8w2", "ternary_learned", (3, 8, 8), {}),
    ("resnet8w2", "v2", (1, 8, 8), {"share_tail": True}),
    ("narrow-pooled-stem", "lbq", (3, 32, 32), {}),
    ("vgg11w2", "lbq", (3, 32, 32), {}),
]


def untrained(id: str = "resnet8w4", neuron: Any = "lbq", channels: int = 3, **options: Any) -> nn.Module:
    """Of other weights than `deployed` has."""
    torch.manual_seed(5)
    return models.create(id, neuron=neuron, in_channels=channels, **{"timesteps": 2, "num_classes": 5, **options})


def read_back(net: nn.Module, file: Network, channels: int = 3, **options: Any) -> Unfolded:
    unfolded = unfold(net, file.network, MEAN[:channels], STD[:channels], **options)
    net.load_state_dict(unfolded.weights, strict=False)
    return unfolded


def check_equal(one: Network, other: Network, x: np.ndarray[Any, Any]) -> None:
    ours, theirs = one.run(x, trace=True), other.run(x, trace=True)
    assert ours.levels is not None
    assert theirs.levels is not None
    same = [(ours.levels[name] == level).ravel() for name, level in theirs.levels.items()]
    assert np.concatenate(same).mean() > 0.999
    assert any(level.any() for level in theirs.levels.values())
    np.testing.assert_array_equal(ours.predictions, theirs.predictions)


@pytest.mark.parametrize(("id", "neuron", "shape", "options"), CASES + MORE)
def test_networks_of_every_kind_deploy_to_the_same_levels_again(
    id: str, neuron: Any, shape: Shape, options: dict[str, Any]
) -> None:
    file, net, channels = deployed(id, neuron, shape, **options), untrained(id, neuron, shape[0], **options), shape[0]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    unfolded = unfold(net, file.network, MEAN[:channels], STD[:channels])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert unfolded.border == 0
    assert {name.rpartition(".")[2] for name in before.keys() - unfolded.weights.keys()} <= {"eta"}
    net.load_state_dict(unfolded.weights, strict=False)
    check_equal(deploy(net, shape, mean=MEAN[:channels], std=STD[:channels]), file, pixels(40, *shape, seed=9))


@pytest.mark.parametrize("bits", [4, 16])
def test_weights_of_other_widths(bits: int) -> None:
    file, net = deployed(bits=bits), untrained()
    read_back(net, file)
    check_equal(deploy(net, (3, 8, 8), mean=MEAN, std=STD, bits=bits), file, pixels(40, 3, 8, 8, seed=9))


@torch.no_grad()
def test_steps_are_those_of_training() -> None:
    torch.manual_seed(0)
    trained = models.create("resnet8w4", num_classes=5)
    net = untrained()
    read_back(net, deploy_warmed(trained, 3, 8, 8))
    steps = {name: float(module.step) for name, module in neurons_of(net).items()}
    assert steps == pytest.approx({name: float(module.step) for name, module in neurons_of(trained).items()}, rel=1e-5)


def test_networks_without_batchnorm_and_with_several_paths() -> None:
    torch.manual_seed(7)
    file, net = branched(), Branches()
    net.load_state_dict(unfold(net, file.network, [0.5] * 3, [0.25] * 3).weights, strict=False)
    check_equal(deploy(net, (3, 6, 6), mean=[0.5] * 3, std=[0.25] * 3), file, pixels(40, 3, 6, 6, seed=9))


def test_networks_of_tokens_take_the_weights_of_one_of_images() -> None:
    file = deploy(warmed(network(images), *SHAPE), SHAPE, mean=MEAN, std=STD)
    net = network(static_patches)
    read_back(net, file)
    check_equal(deploy(net, SHAPE, mean=MEAN, std=STD), file, pixels(40, *SHAPE, seed=9))


def test_event_frames() -> None:
    file, net = eventful(), untrained("resnet8w2", channels=2, num_classes=3)
    net.load_state_dict(unfold(net, file.network).weights, strict=False)
    frames = np.random.default_rng(0).integers(0, 4, (3, 40, 2, 4, 4), np.uint8)
    check_equal(deploy(net, (2, 4, 4), timesteps=3, static=False), file, frames)


def test_other_timesteps_and_a_classifier_left_out() -> None:
    file, net = deployed(timesteps=3), untrained(timesteps=1, num_classes=7)
    head = net.state_dict()["fc.weight"].clone()
    assert not any(name.startswith("fc.") for name in read_back(net, file, head=False).weights)
    assert torch.equal(net.state_dict()["fc.weight"], head)
    again = untrained(timesteps=1)
    read_back(again, file)
    check_equal(deploy(again, (3, 8, 8), mean=MEAN, std=STD), file.over(1), pixels(40, 3, 8, 8, seed=9))


def test_another_normalisation_is_adapted_to() -> None:
    """Exactly where nothing is padded. Elsewhere padding stands for another mean, and the difference is said."""
    file, net, x = deployed(), untrained(), pixels(40, 3, 8, 8, seed=9)
    unfolded = unfold(net, file.network, MEAN, [0.2, 0.2, 0.3])
    net.load_state_dict(unfolded.weights, strict=False)
    assert unfolded.border == 0
    check_equal(deploy(net, (3, 8, 8), mean=MEAN, std=[0.2, 0.2, 0.3]), file, x)
    unfolded = unfold(net, file.network, [0.3, 0.3, 0.3], STD)
    net.load_state_dict(unfolded.weights, strict=False)
    ours = deploy(net, (3, 8, 8), mean=[0.3, 0.3, 0.3], std=STD).run(x, trace=True).levels
    theirs = file.run(x, trace=True).levels
    assert 0.01 < unfolded.border < 3
    assert ours is not None
    assert theirs is not None
    inside = (..., slice(1, -1), slice(1, -1))
    assert (ours["sn1"][inside] == theirs["sn1"][inside]).mean() > 0.999
    assert (ours["sn1"] == theirs["sn1"]).mean() < 0.999


def test_a_file_of_pixels_without_a_mean() -> None:
    """Its bias is one number for each channel, ours a map."""
    torch.manual_seed(0)
    file = deploy(models.create("resnet8w2", num_classes=5).eval(), (3, 8, 8), scale=255)
    assert unfold(untrained("resnet8w2"), file.network, [0.0] * 3, [1.0] * 3).border == 0
    assert unfold(untrained("resnet8w2"), file.network, MEAN, STD).border > 0


def test_a_published_network() -> None:
    """On some real images; its weights come back as they are."""
    test = open_test("cifar10", str(real("cifar10")), 2)
    file = load(ROOT / "models" / "cifar10_resnet8w16_t2_lbq.lbq")
    net = models.create("resnet8w16", stem_stride=2).eval()
    form: dict[str, Any] = {"mean": test.mean, "std": test.std, "scale": test.scale}
    net.load_state_dict(unfold(net, file.network, **form).weights, strict=False)
    again = deploy(net, (3, 32, 32), **form)
    for ours, theirs in zip(again.network.synapses, file.network.synapses, strict=True):
        assert theirs.kind == "identity" or np.array_equal(ours.weight, theirs.weight)
    check_equal(again, file, test.read(0, 20))


# Refusals
# ---------------------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"id": "resnet8w2"}, r"layer 'conv1': its weight's shape is \(4, 3, 3, 3\) in the file and \(2, 3, 3, 3\)"),
    ({}, {"id": "resnet14w4"}, r"where the file has layer 'layer2.0.sn1', this network has layer 'layer1.1.sn1'"),
    ({}, {"stem_stride": 2}, r"layer 'conv1': its stride is \(1, 1\) in the file and \(2, 2\) in this network"),
    ({}, {"num_classes": 7}, r"its classifier knows 5 classes, this network 7: set train\.new_head=true"),
    ({}, {"neuron": {"name": "lbq", "n_max": 3}}, r"layer 'sn1': its levels go to 5 in .* set neuron\.n_max=5"),
    ({}, {"neuron": "relu"}, r"layer 'sn1': ReLU is no spiking neuron, as the file's is: set neuron\.name"),
    ({}, {"neuron": "lmht"}, r"layer 'sn1': LM-HT's mixing of timesteps cannot be taken from a deployed network"),
    ({"neuron": "lmht"}, {"neuron": "lmht"}, r"layer 'sn1': LM-HT's mixing .*: start from its run folder"),
    (
        {"neuron": "ternary"},
        {"neuron": {"name": "lbq", "n_max": 1}},
        r"layer 'sn1': it is another kind of neuron in the file \(signed levels: True there, False here\)",
    ),
    (
        {"neuron": {"name": "ilif", "n_max": 5}},
        {},
        r"another kind of neuron in the file \(reset: level there, once here\)",
    ),
    ({"neuron": "lif"}, {"neuron": {"name": "lbq", "n_max": 1}}, r"\(decayed reset: False there, True here\)"),
    (
        {"neuron": {"name": "lbq", "beta": 0.25}},
        {},
        r"its leak is 0\.25 in the file and 0\.5 here: set neuron\.beta=0\.25",
    ),
    (
        {"neuron": {"name": "lbq", "alpha": 0.7}},
        {},
        r"its reset is 0\.7 steps in the file and 1 here: set neuron\.alpha=0\.7",
    ),
    ({}, {"neuron": "v2"}, r"layer 'sn1': its thresholds begin at .* in the file and at 0\.4 here, .* learn_step"),
    ({"neuron": {"name": "lbq", "per_channel": True}}, {}, r"its thresholds begin at .* per_channel as the file's"),
    (
        {"neuron": {"name": "lbq", "membrane": "if"}},
        {"neuron": {"name": "lbq", "membrane": "plif"}},
        r"its leak is 1 in",
    ),
]


@pytest.mark.parametrize(("theirs", "ours", "message"), REFUSED)
def test_what_differs_is_refused_by_name(theirs: dict[str, Any], ours: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        read_back(untrained(**ours), deployed(**theirs))


def small(norm: nn.Module | None = None, bias: bool = True, factor: float = 1.0) -> nn.Module:
    """A convolution, perhaps BatchNorm, and a block whose shortcut is multiplied by a number."""

    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.sn(over_time(x, m.conv, m.norm, timesteps=2))
        return mean_logits(m, m.sn1(over_time(a, m.conv1) + factor * a))

    torch.manual_seed(1)
    return Functional(
        forward,
        conv=nn.Conv2d(3, 4, 3, padding=1, bias=bias),
        norm=norm or nn.Identity(),
        sn=BurstNeuron(),
        conv1=nn.Conv2d(4, 4, 3, padding=1),
        sn1=BurstNeuron(),
        pool=nn.AdaptiveAvgPool2d(1),
        fc=nn.Linear(4, 5),
    )


def joined(m: Any, x: Tensor) -> Tensor:
    a = m.sn(over_time(x, m.conv, timesteps=2))
    b = m.sn1(over_time(a, m.conv1))
    return mean_logits(m, torch.cat([a, b], 2))


def test_what_only_networks_of_your_own_have() -> None:
    file = deploy_warmed(small(nn.BatchNorm2d(4)), 3, 6, 6)
    with pytest.raises(GraphError, match=r"layer 'sn1\.shortcut': this shortcut is scaled in the file"):
        read_back(small(nn.BatchNorm2d(4), factor=0.5), file)
    with pytest.raises(GraphError, match=r"a BatchNorm of 4 channels has no weight and bias: use affine=True"):
        read_back(small(nn.BatchNorm2d(4, affine=False)), file)
    with pytest.raises(GraphError, match=r"layer 'sn' has a bias in the file, and nothing in this network can add one"):
        read_back(small(bias=False), file)
    net = small()  # the bias of BatchNorm goes to the convolution
    net.load_state_dict(unfold(net, file.network, [0.5] * 3, [0.25] * 3).weights, strict=False)
    check_equal(deploy(net, (3, 6, 6), mean=[0.5] * 3, std=[0.25] * 3), file, pixels(40, 3, 6, 6, seed=9))
    layers = {"conv": nn.Conv2d(3, 4, 1), "sn": BurstNeuron(), "conv1": nn.Conv2d(4, 4, 1), "sn1": BurstNeuron()}
    cat = Functional(joined, **layers, pool=nn.AdaptiveAvgPool2d(1), fc=nn.Linear(8, 3))
    with pytest.raises(GraphError, match=r"layer 'fc\.part0' reads joined tensors: such a network cannot be read back"):
        read_back(cat, deploy_warmed(cat, 3, 6, 6))


def test_channels_that_never_fire_take_the_others_step() -> None:
    file, net = deployed("resnet8w2").network, untrained("resnet8w2")
    first = file.layers[0]
    assert first.neuron is not None
    thresholds = first.neuron.thresholds.copy()

    def silenced(channels: Any) -> Any:
        thresholds[channels] = MEMBRANE_BOUND
        layer = replace(first, neuron=replace(first.neuron, thresholds=thresholds.copy()))  # type: ignore[type-var]
        return replace(file, layers=(layer, *file.layers[1:]))

    with pytest.raises(GraphError, match=r"layer 'sn1': its thresholds begin"):  # one step would let it fire
        unfold(net, silenced(0), MEAN, STD)
    with pytest.raises(GraphError, match=r"layer 'sn1': none of its channels ever fires"):
        unfold(net, silenced(slice(None)), MEAN, STD)
    tiny = replace(file, layers=(replace(first, unit=first.unit * 1e-12), *file.layers[1:]))
    with pytest.raises(GraphError, match=r"layer 'sn1': step must be above 2e-06"):
        unfold(net, tiny, MEAN, STD)
