"""Networks: shapes and counts that must come out exactly, and how time enters."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lbq import models
from lbq.deploy import lower
from lbq.errors import ConfigError
from lbq.neuron import LIF, LMHT, BurstNeuron, QuantReLU, ReLU, SpikingNeuron
from lbq.neuron.recorder import record_levels

# id -> (synaptic and BatchNorm parameters, spiking layers, neurons per timestep, MACs, stem MACs)
FACTS: dict[str, tuple[int, int, int, int, int]] = {
    "resnet20w128": (17_289_866, 19, 1_507_328, 2_587_235_328, 3_538_944),
    "resnet19w128": (12_569_226, 17, 1_441_792, 2_285_245_440, 3_538_944),
    "resnet19w64fc256": (12_630_858, 18, 1_376_512, 2_216_495_616, 1_769_472),
    "resnet18w64": (11_173_962, 17, 557_056, 555_422_720, 1_769_472),
    "resnet8w16": (78_042, 7, 73_728, 12_501_632, 442_368),
    "vgg11": (9_228_362, 8, 151_552, 152_769_536, 1_769_472),
    "vgg13": (9_413_066, 10, 249_856, 228_267_008, 1_769_472),
    "vgg16": (14_724_042, 13, 276_480, 313_201_664, 1_769_472),
}


def parameters_outside_neurons(net: nn.Module) -> int:
    inside = {id(p) for m in net.modules() if isinstance(m, SpikingNeuron) for p in m.parameters()}
    return sum(p.numel() for p in net.parameters() if id(p) not in inside)


@pytest.mark.parametrize("id", sorted(FACTS))
def test_counts_come_out_exactly(id: str) -> None:
    net = models.create(id)
    graph = lower(net, (3, 32, 32))
    neurons = sum(isinstance(m, SpikingNeuron) for m in net.modules())
    facts = (parameters_outside_neurons(net), neurons, graph.units, graph.macs, graph.stem_macs)
    assert facts == FACTS[id]


@pytest.mark.parametrize(
    ("id", "parameters", "macs"),
    [("resnet18", 11_689_512, 1814.073344), ("resnet34", 21_797_672, 3663.761408)],
)
def test_imagenet_nets_are_the_published_ones(id: str, parameters: int, macs: float) -> None:
    net = models.create(id, num_classes=1000)
    assert parameters_outside_neurons(net) == parameters
    assert lower(net, (3, 224, 224)).macs == round(macs * 1e6)
    names = set(net.state_dict())
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer4.1.bn2.bias",
        "layer2.0.downsample.0.weight",
        "fc.bias",
    } <= names


def test_static_and_event_inputs() -> None:
    net = models.create("resnet8w8", num_classes=7, timesteps=3).eval()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        static = net(x, per_step=True)
        assert static.shape == (3, 2, 7)
        assert net(x).shape == (2, 7)
        torch.testing.assert_close(net(x), static.mean(0))
        # the same image as a sequence of frames gives the same logits: only the stem is computed more often
        torch.testing.assert_close(net(x.expand(3, *x.shape), per_step=True), static)
        assert net(torch.randn(5, 2, 3, 16, 16), per_step=True).shape == (5, 2, 7)  # events bring their own T


@pytest.mark.parametrize("id", ["resnet8w2", "vgg11w2"])
def test_an_image_is_shown_as_often_as_the_network_says_now(id: str) -> None:
    net = models.create(id, 3, timesteps=2).eval()
    net.timesteps = 5
    seen: list[nn.Module] = []
    modules = [m for m in net.modules() if isinstance(m, nn.Sequential) and len(m)]
    for module in modules:
        module.register_forward_hook(lambda m, *_: seen.append(m))
    with record_levels(net) as levels:
        net(torch.rand(1, 3, 32, 32))
    assert {len(level) for level in levels.values()} == {5}
    assert set(seen) == set(modules)  # hooks for features are called


def test_time_is_a_view_for_static_images() -> None:
    seen = []
    net = models.create("resnet8w8", timesteps=4)
    neuron = net.get_submodule("sn1")
    neuron.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].stride(0)))
    net(torch.randn(2, 3, 8, 8))
    assert seen == [0]  # no T-fold copy of the stem's output


def test_event_net_with_stride_two_stem() -> None:
    net = models.create("resnet8w8", timesteps=2, in_channels=2, stem_stride=2)
    assert net(torch.randn(2, 1, 2, 32, 32)).shape == (1, 10)
    graph = lower(net, (2, 32, 32), static=False)
    assert graph.layers[0].shape == (8, 16, 16)


@pytest.mark.parametrize(
    ("neuron", "kind"),
    [
        ("lbq", BurstNeuron),
        ("lif", LIF),
        ("relu", ReLU),
        ({"name": "qann", "n_max": 3}, QuantReLU),
        (lambda: BurstNeuron(n_max=2), BurstNeuron),
        (nn.SiLU, nn.SiLU),
        (BurstNeuron, BurstNeuron),
        (LMHT, LMHT),
        (lambda channels: BurstNeuron(channels=channels), BurstNeuron),
    ],
)
def test_any_neuron(neuron: Any, kind: type[nn.Module]) -> None:
    net = models.create("resnet8w8", neuron=neuron)
    assert sum(isinstance(m, kind) for m in net.modules()) == 7
    assert net(torch.randn(2, 3, 8, 8)).shape == (2, 10)


def test_options_reach_the_neurons() -> None:
    net = models.create("resnet8w8", neuron={"name": "lbq", "per_channel": True, "n_max": 3}, share_tail=True)
    steps = [m.step.shape[0] for m in net.modules() if isinstance(m, BurstNeuron)]
    assert steps == [8, 8, 8, 16, 16, 32, 32]
    assert len({id(m.eta) for m in net.modules() if isinstance(m, BurstNeuron)}) == 1


@pytest.mark.parametrize("id", ["resnet8w8", "vgg11w4", "resnet18w4"])
def test_gradients_reach_every_parameter(id: str) -> None:
    torch.manual_seed(0)
    net = models.create(id)
    net(torch.randn(4, 3, 32, 32)).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"id": "resnet20"},
            "unknown id 'resnet20': several networks have this name; give a width too, as in resnet20w128",
        ),
        ({"id": "resnet9"}, "unknown id 'resnet9'; did you mean"),
        ({"id": "resnet21w16"}, "unknown id"),
        ({"id": "resnet20w0"}, "unknown id"),
        ({"id": "resnet8w1000000000"}, "unknown id"),
        ({"id": 20}, "id must be a string"),
        ({"id": "resnet8w8", "timesteps": 0}, "timesteps must be"),
        ({"id": "resnet8w8", "num_classes": 1.5}, "model: num_classes must be an integer >= 1, got 1.5"),
        ({"id": "resnet8w8", "num_classes": True}, "num_classes must be"),
        ({"id": "resnet8w8", "neuron": "lbqx"}, "unknown neuron"),
        ({"id": "resnet8w8", "neuron": {"n_max": 3}}, "give a 'name'"),
        ({"id": "resnet8w8", "neuron": 3}, "neuron must be"),
        (
            {"id": "resnet8w8", "neuron": BurstNeuron()},
            r"neuron must be a function that makes one for each layer: pass neuron=lambda: BurstNeuron\(...\)",
        ),
        ({"id": "resnet8w8", "neuron": lambda: 3}, "must return a torch.nn.Module"),
        ({"id": "vgg11", "stem_stride": 2}, "stem_stride applies"),
        ({"id": "resnet18", "stem_stride": 2}, "stem_stride applies"),
    ],
)
def test_bad_requests(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.create(**arguments)


def test_sizes_may_be_numpys() -> None:
    net = models.create("resnet8w2", num_classes=np.int64(7), timesteps=np.int32(3), in_channels=np.uint8(1))  # type: ignore[arg-type]
    assert type(net.timesteps) is int
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 7)


def test_misuse_of_time_is_refused() -> None:
    net = models.create("resnet8w8")
    with pytest.raises(ValueError, match=r"x must be \[B, C, H, W\] or \[T, B, C, H, W\]"):
        net(torch.randn(3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(ValueError, match="^timesteps must be given"):
        models.over_time(x, nn.Conv2d(3, 4, 3))
    with pytest.raises(ValueError, match=r"^layers must not hold a neuron, .*: call Sequential on \[T, B, ...\]$"):
        models.over_time(x, nn.Sequential(nn.Conv2d(3, 4, 3), BurstNeuron()), timesteps=2)
    with pytest.raises(TypeError, match="^x must be a tensor, got ndarray"):
        models.over_time(x.numpy(), nn.Conv2d(3, 4, 3), timesteps=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^layers must be modules or functions, got int"):
        models.over_time(x, 3, timesteps=2)  # type: ignore[arg-type]


def test_functions_and_signals_over_time() -> None:
    x = torch.randn(2, 3, 4, 8)
    out = models.over_time(x, nn.Conv1d(4, 5, 3), torch.relu, spatial=2)
    assert out.shape == (2, 3, 5, 6)
    assert (out >= 0).all()
    with pytest.raises(
        ValueError, match=r"x must be \[B, C, L\] or \[T, B, C, L\], got shape \(2, 3\); spatial=2 says"
    ):
        models.over_time(torch.randn(2, 3), torch.relu, spatial=2)


def test_every_listed_id_builds() -> None:
    for id in models.IDS:
        with torch.device("meta"):
            assert models.create(id).timesteps == 2


def test_a_neurons_class_has_one_step_for_a_layer_as_by_its_name() -> None:
    by_name = models.create("resnet8w2")
    for choice in (BurstNeuron, partial(BurstNeuron, n_max=5)):
        by_class = models.create("resnet8w2", neuron=choice)
        assert {n: p.shape for n, p in by_class.named_parameters()} == {
            n: p.shape for n, p in by_name.named_parameters()
        }


@pytest.mark.parametrize("timesteps", [0, -1, 2.0, "2"])
def test_a_changed_number_of_timesteps_is_checked(timesteps: Any) -> None:
    net = models.create("resnet8w2")
    net.timesteps = timesteps
    with pytest.raises(ValueError, match=f"timesteps must be a whole number above 0, got {timesteps!r}"):
        net(torch.zeros(1, 3, 8, 8))
