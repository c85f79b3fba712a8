"""Activations that are no ReLU: replaced, or refused with what to do about each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq.convert import convert, with_relus
from lbq.deploy import deploy
from lbq.errors import GraphError
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.small_nets import Functional

IMAGES = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def plain(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), activation, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(inplace=True), nn.Hardswish()])
def test_smooth_activations_become_relus(activation: nn.Module) -> None:
    ann = plain(activation).eval()
    with pytest.raises(
        GraphError, match=rf"{type(activation).__name__} is no ReLU: lbq.convert.with_relus\(ann\) replaces"
    ):
        convert(ann, IMAGES)
    relus = with_relus(ann)
    assert isinstance(ann[1], type(activation))
    assert isinstance(relus.get_submodule("1"), nn.ReLU)
    convert(relus, IMAGES)


def test_what_has_nothing_to_replace_is_refused() -> None:
    with pytest.raises(
        GraphError, match=r"Sequential has no module of GELU, SiLU, .*: write functions such as F.gelu\(x\)"
    ):
        with_relus(plain(nn.ReLU()))


def gated(m: Any, x: Tensor) -> Tensor:
    x = F.relu(m.conv(x))
    return m.fc((x * m.gate(m.squeeze(x.mean((2, 3))))[..., None, None]).mean((2, 3)))


class Tok(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.encoder, self.fc = (
            nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, activation=activation),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.encoder(x).mean(1))


def test_refusals_of_a_conversion_name_the_cause() -> None:
    layers = {"conv": nn.Conv2d(3, 4, 3), "squeeze": nn.Linear(4, 4), "fc": nn.Linear(4, 3)}
    for gate in (nn.Sigmoid(), nn.Hardsigmoid()):
        with pytest.raises(
            GraphError, match="leave it out, and with it the gate that it makes, as in squeeze-and-excitation"
        ):
            convert(Functional(gated, **layers, gate=gate), IMAGES)
    with pytest.raises(GraphError, match="Softmax is no ReLU: leave out a last softmax"):
        convert(nn.Sequential(plain(nn.ReLU()), nn.Softmax(1)), IMAGES)
    with pytest.raises(GraphError, match=r"gelu is no ReLU: make it a module, nn.GELU; lbq.convert.with_relus\(ann\)"):
        convert(Functional(lambda m, x: F.gelu(F.relu(m.conv(x))), **layers), IMAGES)
    attending = nn.Sequential(plain(nn.ReLU()), nn.MultiheadAttention(3, 1))
    with pytest.raises(
        GraphError, match="layer '1': MultiheadAttention has a softmax inside, for which levels have no"
    ):
        convert(attending, IMAGES)
    with pytest.raises(GraphError, match="Tanh is no ReLU: train the ANN with ReLUs"):
        convert(plain(nn.Tanh()), IMAGES)
    for activation in (F.relu, nn.ReLU()):
        with pytest.raises(
            GraphError, match="layer 'encoder': torch.fx does not look into TransformerEncoderLayer, where"
        ):
            convert(Tok(activation), IMAGES[:, 0])
    with pytest.raises(GraphError, match="Tok has no ReLU"):
        convert(Tok(F.gelu), IMAGES[:, 0])


def spiking_gate(m: Any, x: Tensor) -> Tensor:
    x = m.sn(over_time(x, m.conv, timesteps=2))
    return m.fc((x * torch.sigmoid(m.squeeze(x.mean((3, 4))))[..., None, None]).mean((3, 4))).mean(0)


def dense(m: Any, x: Tensor) -> Tensor:
    return over_time(m.sn(over_time(x, m.conv, timesteps=2)), m.head).mean(0)


def upsampled(m: Any, x: Tensor) -> Tensor:
    return F.interpolate(dense(m, x), scale_factor=2)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (spiking_gate, "sigmoid.*if it gates channels, as in squeeze-and-excitation, leave the gate out"),
        (dense, "outputs by pixel, as for segmentation, are not supported; pool before it"),
        (upsampled, "interpolate.*outputs by pixel, as for segmentation, are not supported"),
    ],
)
def test_refusals_of_a_deployment_name_the_cause(forward: Any, reason: str) -> None:
    layers = {"conv": nn.Conv2d(3, 4, 3), "squeeze": nn.Linear(4, 4), "fc": nn.Linear(4, 3), "head": nn.Conv2d(4, 3, 1)}
    with pytest.raises(GraphError, match=reason):
        deploy(Functional(forward, **layers, sn=BurstNeuron()), (3, 8, 8), scale=255)


def test_a_network_without_time_is_told_so_before_timesteps_are_asked_for() -> None:
    head = nn.Flatten(), nn.Linear(144, 3)
    with pytest.raises(GraphError, match="layer '1': a neuron needs time in front"):
        deploy(nn.Sequential(nn.Conv2d(3, 4, 3), BurstNeuron(), *head), (3, 8, 8), scale=255)
    with pytest.raises(GraphError, match=r"no spiking neurons: .*lbq.convert.convert\(net, images\)"):
        deploy(nn.Sequential(nn.Conv2d(3, 4, 3), *head), (3, 8, 8), scale=255)
