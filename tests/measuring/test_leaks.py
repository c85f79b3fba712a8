"""`lbq.check`: samples that leak into each other are refused, with the neuron that reads the batch as time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lbq
from lbq import models
from lbq.errors import GraphError
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.own_nets import Own, rest
from tests.support.small_nets import Functional, small

IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def leaking(m: Any, x: Tensor) -> Tensor:
    return rest(m, m.sn(m.bn(m.conv(x)))[None].expand(2, -1, -1, -1, -1))


def test_samples_that_stay_apart_pass() -> None:
    net = Own().train()
    lbq.check(net, IMAGES)
    lbq.check(net, IMAGES.numpy())
    assert net.training
    assert next(net.parameters()).dtype == torch.float32
    events = models.create("resnet8w4", in_channels=1, timesteps=3)
    lbq.check(events, torch.stack([IMAGES] * 3), static=False)
    lbq.check(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), IMAGES)


def test_what_a_network_keeps_of_its_last_pass_is_no_obstacle() -> None:
    """An activation for another loss: it has a history of gradients, which PyTorch does not copy."""

    def keeping(m: Any, x: Tensor) -> Tensor:
        kept = m.sn(over_time(x, m.conv, m.bn, timesteps=2))
        m.kept, m.all_kept, m.by_name = kept, [kept * 2], {"sn": kept * 3}
        return rest(m, kept)

    net: Any = Own(keeping)
    net(IMAGES)
    values = net.kept.clone()
    lbq.check(net, IMAGES)
    assert net.kept.grad_fn is not None
    assert torch.equal(net.kept, values)


def test_the_neuron_that_reads_the_batch_as_time_is_named() -> None:
    with pytest.raises(GraphError, match="leak into each other, neuron 'sn' reads the batch as time: .*over_time"):
        lbq.check(Own(leaking), IMAGES)
    layer = nn.TransformerEncoderLayer(8, 2, 8, activation=BurstNeuron(), batch_first=True)
    with pytest.raises(GraphError, match="neuron 'activation' reads the batch as time"):
        lbq.check(layer, IMAGES[:, 0])


@pytest.mark.parametrize("case", ["its branch counts for nothing yet", "it is silent"])
def test_a_neuron_that_reads_the_batch_as_time_is_named_before_it_matters(case: str) -> None:
    """As in a new network whose residual branches begin at 0."""

    def shortcut(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        return m.fc((y + m.last(m.sn(y))).mean((2, 3)))

    silent = case == "it is silent"
    layers = {"conv": nn.Conv2d(1, 8, 3), "last": nn.Conv2d(8, 8, 1), "fc": nn.Linear(8, 3)}
    net = Functional(shortcut, sn=BurstNeuron(step=100.0 if silent else 0.1), **layers)
    if not silent:
        with torch.no_grad():
            net.get_parameter("last.weight").zero_()
    with pytest.raises(GraphError, match="neuron 'sn' reads the batch as time"):
        lbq.check(net, IMAGES)


def test_networks_and_images_without_numbers_are_refused() -> None:
    for net, images in ((Own().to("meta"), IMAGES), (Own(), IMAGES.to("meta"))):
        with pytest.raises(GraphError, match="must have numbers: they are on the meta device"):
            lbq.check(net, images)


def test_other_leaks_are_refused_too() -> None:
    net = Functional(lambda m, x: m.fc((x - x[:1]).flatten(1)), fc=nn.Linear(64, 3))
    with pytest.raises(GraphError, match="Functional leak into each other, one of its layers mixes the batch"):
        lbq.check(net, IMAGES)


def test_attention_over_the_batch_is_refused_though_it_has_no_order() -> None:
    """Tokens in front, as torch's own layers have them by default: turning the batch round turns the outputs round."""

    def attending(m: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(2).permute(2, 0, 1)  # [tokens, B, channels]
        q, k, v = (m.sn(layer(tokens)[None])[0] for layer in (m.q, m.k, m.v))
        return m.fc((q @ k.mT @ v).mean(0))

    torch.manual_seed(0)
    layers = {name: nn.Linear(1, 8) for name in "qkv"}
    net = Functional(attending, sn=BurstNeuron(step=0.05), fc=nn.Linear(8, 3), **layers)
    x = IMAGES.double()
    torch.testing.assert_close(net.double()(x.flip(0)), net(x).flip(0))
    with pytest.raises(GraphError, match="leak into each other, one of its layers mixes the batch"):
        lbq.check(net, IMAGES)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (IMAGES[:1], "two inputs or more"),
        (np.zeros((4, 1, 8, 8), np.uint8), "floating-point"),
        (torch.zeros(4, 1, 8, 8), "must differ"),
        (None, "got NoneType"),
        (torch.full((4, 1, 8, 8), torch.nan), "images hold numbers that are not finite"),
    ],
)
def test_images_that_say_nothing_are_refused(images: Any, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        lbq.check(Own(), images)


@pytest.mark.parametrize("name", ["resnet20w8", "vgg11w8"])
def test_a_network_before_training_can_be_checked(name: str) -> None:
    """Nothing fires in it yet, as its BatchNorms have measured nothing."""
    torch.manual_seed(0)
    net, images = lbq.models.create(name), 0.02 * torch.randn(4, 3, 32, 32)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with torch.no_grad():
        assert not net.eval()(images).diff(dim=0).any()
    lbq.check(net.train(), images)
    assert net.training
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_a_leak_is_found_before_training_too() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    layers = {"conv": nn.Conv2d(1, 8, 3), "norm": norm, "fc": nn.Linear(288, 3), "sn": BurstNeuron(step=40.0)}
    net = Functional(lambda m, x: m.fc(m.sn(m.norm(10 * m.conv(x))).flatten(1)), **layers)
    with torch.no_grad():
        norm.weight.fill_(100)
        assert norm.running_var is not None
        norm.running_var.fill_(1e9)
    with pytest.raises(GraphError, match="neuron 'sn' reads the batch as time"):
        lbq.check(net, IMAGES)


def test_outputs_that_say_nothing_are_refused() -> None:
    net = Own(leaking)
    with torch.no_grad():
        for parameter in net.conv.parameters():
            parameter.mul_(1e-6)
    with pytest.raises(GraphError, match="all images have one output, as where no neuron fires"):
        lbq.check(net, IMAGES)
    net.conv.weight.data.fill_(float("nan"))
    with pytest.raises(GraphError, match="not finite: did training diverge"):
        lbq.check(net, IMAGES)


def test_a_network_without_the_batch_in_front_is_refused() -> None:
    with pytest.raises(GraphError, match="one tensor with the batch in front"):
        lbq.check(Functional(lambda m, x: m.fc(x.flatten(1)).mean(0), fc=nn.Linear(64, 3)), IMAGES)


def test_a_wrapped_network_is_checked_as_it_is_and_nothing_is_refused() -> None:
    net = small("resnet8w2")
    images = torch.randn(4, 3, 8, 8)
    lbq.check(nn.DataParallel(net), images)
    with pytest.raises(GraphError, match="net must be a torch.nn.Module, got NoneType"):
        lbq.check(None, images)  # type: ignore[arg-type]
