"""A batch in place of time: warned of once, with the remedy, and never where time is in front."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq import models
from lbq.models import over_time
from lbq.neuron import LMHT, MLF, BurstNeuron, origin
from lbq.neuron.base import neurons_of
from lbq.neuron.baselines import QuantReLU
from tests.support.own_nets import Own
from tests.support.small_nets import Branches, Functional

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def texts(net: Callable[[Tensor], Any], x: Tensor) -> list[str]:
    """The warnings of one call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(x)
    return [str(w.message) for w in caught if "as time" in str(w.message)]


# A batch in front
# ---------------------------------------------------------------------------------------------------------------------


def residual(m: Any, x: Tensor) -> Tensor:
    x = m.sn(m.bn(m.conv(x)))
    return m.fc((m.sn2(F.dropout(m.conv2(x)) + x)).mean((2, 3)))


def vision_transformer(m: Any, x: Tensor) -> Tensor:
    x = m.conv(x).flatten(2).transpose(-2, -1)
    y = m.norm(x)
    return m.sn(m.fc1(m.norm(x + m.attention(y, y, y)[0])))


def cnn() -> nn.Module:
    layers = {"conv": nn.Conv2d(3, 8, 3), "bn": nn.BatchNorm2d(8), "conv2": nn.Conv2d(8, 8, 1), "fc": nn.Linear(8, 5)}
    return Functional(residual, **layers, sn=BurstNeuron(), sn2=BurstNeuron())


WRONG: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "a plain CNN": (cnn, IMAGES, 2),
    "Sequential": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Dropout(), BurstNeuron()), IMAGES, 1),
    "InstanceNorm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), BurstNeuron()), IMAGES, 1),
    "InstanceNorm1d": (lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.InstanceNorm1d(8), BurstNeuron()), IMAGES[:, :, 0], 1),
    "a pool": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.MaxPool2d(2), BurstNeuron()), IMAGES, 1),
    "one pool": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), BurstNeuron()), IMAGES, 1),
    "means": (lambda: Functional(lambda m, x: m.sn(m.conv(x).mean((2, 3))), **conv_layers()), IMAGES, 1),
    "joined": (lambda: Functional(lambda m, x: m.sn(torch.cat([m.conv(x)] * 2, -3)), **conv_layers()), IMAGES, 1),
    "a part": (lambda: Functional(lambda m, x: m.sn(m.conv(x)[:, 2:]), **conv_layers()), IMAGES, 1),
    "larger": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=2), BurstNeuron()), IMAGES, 1),
    "flat": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), BurstNeuron()), IMAGES, 1),
    "a perceptron": (lambda: nn.Sequential(nn.Linear(8, 8), BurstNeuron(), nn.Linear(8, 4), BurstNeuron()), IMAGES[0, 0], 2),
    "BatchNorm1d": (lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), BurstNeuron()), IMAGES[0, 0], 1),
    "signals": (lambda: nn.Sequential(nn.Conv1d(3, 8, 3), BurstNeuron()), IMAGES[:, :, 0], 1),
    "several membranes": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), MLF()), IMAGES, 1),
    "mixed time": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), LMHT(4)), IMAGES, 1),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 8, activation=BurstNeuron(), batch_first=True), IMAGES[:, 0], 1
    ),
    "tokens first": (lambda: nn.TransformerEncoderLayer(8, 2, 8, activation=BurstNeuron()), IMAGES[:, 0], 1),
    "a vision transformer": (
        lambda: Functional(
            vision_transformer, conv=nn.Conv2d(3, 8, 4, 4), norm=nn.LayerNorm(8), fc1=nn.Linear(8, 8), sn=BurstNeuron(),
            attention=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        IMAGES, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_batch_in_front_is_warned_of_once_with_the_remedy(case: str) -> None:
    make, x, neurons = WRONG[case]
    net = make()
    with torch.no_grad():
        assert not texts(net, x)  # there is no graph that could be asked
    said = texts(net, x)
    assert len(said) == neurons
    first = "the tokens of TransformerEncoderLayer" if case == "tokens first" else "the batch of"
    assert all(first in text and "lbq.models.over_time(x, layer, timesteps=T)" in text for text in said)
    assert not texts(net, x)


def test_the_warning_points_to_the_line_that_calls_the_neuron() -> None:
    with pytest.warns(UserWarning, match="as time, and there stands the batch of a convolution") as caught:
        nn.Sequential(nn.Conv2d(3, 8, 3), BurstNeuron())(IMAGES)
    assert caught[0].filename == __file__


# Time in front
# ---------------------------------------------------------------------------------------------------------------------


def stacked(m: Any, x: Tensor) -> Tensor:
    return m.sn(torch.stack([m.bn(m.conv(x))] * 2))


def by_hand(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x.repeat(2, 1, 1, 1)))
    return m.sn(y.view(2, -1, *y.shape[1:]))


def joined(m: Any, x: Tensor) -> Tensor:
    return m.sn(torch.cat([m.conv(x)[None]] * 2, -5))


def frame_means(m: Any, x: Tensor) -> Tensor:
    return m.sn(m.conv(x).unflatten(0, (2, -1)).mean((-2, -1)))


def behind(m: Any, x: Tensor) -> Tensor:
    """Time is the last axis of a convolution's output."""
    return m.sn(m.conv(x.flatten(2)).permute(2, 0, 1))


def signals(m: Any, x: Tensor) -> Tensor:
    return m.sn2(m.norm(m.fc(m.sn(over_time(x, m.conv, timesteps=2, spatial=2)))))


def conv_layers(**more: nn.Module) -> dict[str, nn.Module]:
    return {"conv": nn.Conv2d(3, 8, 3), "bn": nn.BatchNorm2d(8), "sn": BurstNeuron(), **more}


def by_instance(m: Any, x: Tensor) -> Tensor:
    return m.sn(over_time(x, m.conv, m.norm, timesteps=2))


RIGHT: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "stacked": (lambda: Functional(stacked, **conv_layers()), IMAGES),
    "by hand": (lambda: Functional(by_hand, **conv_layers()), IMAGES),
    "one image by hand": (lambda: Functional(by_hand, **conv_layers()), IMAGES[:1]),
    "joined in time": (lambda: Functional(joined, **conv_layers()), IMAGES),
    "means of frames": (lambda: Functional(frame_means, **conv_layers()), IMAGES),
    "time behind": (lambda: Functional(behind, **conv_layers(conv=nn.Conv1d(3, 8, 3))), IMAGES),
    "signals": (
        lambda: Functional(
            signals, **conv_layers(conv=nn.Conv1d(3, 8, 3), fc=nn.Linear(6, 6), norm=nn.LayerNorm(6), sn2=BurstNeuron())
        ),
        IMAGES[:, :, 0],
    ),
    "InstanceNorm": (lambda: Functional(by_instance, **conv_layers(norm=nn.InstanceNorm2d(8))), IMAGES),
    "InstanceNorm of frames": (lambda: Functional(by_instance, **conv_layers(norm=nn.InstanceNorm2d(8))), IMAGES[:, None]),
    "tokens": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), BurstNeuron(), nn.Linear(8, 4), BurstNeuron()), IMAGES),
    "features": (lambda: nn.Sequential(nn.Linear(8, 8), BurstNeuron(), nn.Linear(8, 4), BurstNeuron()), IMAGES[0]),
    "of a user": (Own, IMAGES[:, :1]),
    "branches": (Branches, IMAGES),
    "without memory": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), QuantReLU()), IMAGES),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_time_in_front_is_not_warned_of(case: str) -> None:
    make, x = RIGHT[case]
    net = make()
    assert not texts(net, x)
    assert all(neuron.origin_seen for neuron in neurons_of(net).values())


@pytest.mark.parametrize(
    "id", ["resnet8w2", "resnet18w2", "vgg11w4", "spikformer1x16", "spikformer1x16-sew", "qkformer3x32"]
)
def test_no_network_by_name_is_warned_of(id: str) -> None:
    """With images and with events, of which one has a batch of one."""
    x = torch.randn(2, 3, 32, 32)
    net = models.create(id, timesteps=2).eval()
    for input in (x, x[:, None]):
        fresh = copy.deepcopy(net)
        assert not texts(fresh, input)
        assert all(one.origin_seen for one in neurons_of(fresh).values())


# Cost
# ---------------------------------------------------------------------------------------------------------------------


def test_a_neuron_looks_once() -> None:
    net = nn.Sequential(nn.Linear(8, 8), BurstNeuron())
    with mock.patch.object(origin, "_batch_of", wraps=origin._batch_of) as asked:
        for _ in range(3):
            net(IMAGES)
    assert asked.call_count == 1


def test_compiled_and_traced_code_holds_nothing_of_it() -> None:
    """That nothing of it is compiled, the tests of the kernels under torch.compile show."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), BurstNeuron())
    with mock.patch("torch.compiler.is_compiling", return_value=True), mock.patch("lbq.neuron.base.look") as asked:
        net[1](net[0](IMAGES))
    assert not asked.called
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated
        torch.jit.trace(net, IMAGES, check_trace=False)
    torch.func.vmap(net)(IMAGES[None])
    assert not net[1].origin_seen
    assert texts(net, IMAGES)
