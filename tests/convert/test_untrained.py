"""Neurons in networks that are not trained yet: `convert(net, images, fit=False)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq import models
from lbq.convert import convert
from lbq.deploy import deploy
from lbq.errors import GraphError
from tests.support.anns import Net, head


@pytest.mark.parametrize("neuron", ["lbq", {"name": "lbq", "per_channel": True}, "lif", "ternary", "mlf"])
def test_a_network_that_is_not_trained_keeps_the_first_steps(neuron: Any) -> None:
    plain, x = Net(lambda m, x: head(m, m.act2(m.bn2(m.conv2(m.act(m.bn(m.conv(x))))))).relu()), torch.randn(2, 3, 8, 8)
    net = convert(plain, x, timesteps=3, neuron=neuron, fit=False)
    made: Any = models.neuron_maker(neuron, 3)(6)
    assert net.fits == {}
    assert all(
        torch.equal(value, plain.state_dict()[name])
        for name, value in net.net.state_dict().items()
        if name in plain.state_dict()
    )
    neurons: list[Any] = [module for module in net.modules() if isinstance(module, type(made))]
    assert len(neurons) == 3
    assert all(torch.equal(each.step, torch.ones_like(each.step) * made.step.flatten()[0]) for each in neurons)
    net.train()(x).sum().backward()
    assert net.net.conv.weight.grad is not None  # type: ignore[union-attr]
    assert len(net.eval()(x)) == 2


def test_a_network_learns_from_the_start_with_neurons_in_it() -> None:
    from lbq.data import load_digits

    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    digits = load_digits()
    x, y = (
        torch.from_numpy(digits.train.images[:600]).float() / 4 - 2,
        torch.from_numpy(digits.train.labels[:600]).long(),
    )
    net = convert(plain, x[:2], fit=False).train()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        for batch in torch.randperm(600).split(50):
            optimiser.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
    integers = deploy(net.eval(), (1, 8, 8), mean=[0.5], std=[0.25], scale=16)
    predicted = integers.run(digits.test.images).predictions
    assert (predicted == digits.test.labels).mean() > 0.85
    with pytest.raises(GraphError, match="fit must be True or False"):
        convert(plain, x[:2], fit=1)  # type: ignore[arg-type]


def dropping(m: Any, x: Tensor) -> Tensor:
    return head(m, F.dropout(F.relu(m.bn(m.conv(x))), 0.5, m.training))


def in_two_heads(m: Any, x: Tensor) -> Any:
    x = F.relu(m.bn(m.conv(x)))
    return (head(m, x), x) if m.training else head(m, x)


@pytest.mark.parametrize("forward", [dropping, in_two_heads])
def test_what_happens_in_training_alone_is_told(forward: Any) -> None:
    x = torch.randn(4, 3, 8, 8)
    with pytest.warns(UserWarning, match="does something else in training, which the converted network leaves out"):
        convert(Net(forward), x, fit=False)
    convert(Net(forward), x)  # a trained one is converted as it is evaluated


def test_a_network_that_is_not_trained_keeps_its_mode() -> None:
    x = torch.randn(4, 3, 8, 8)
    plain = Net(lambda m, x: head(m, F.relu(m.bn(m.conv(x)))))
    assert convert(plain.train(), x, fit=False).net.bn.training  # type: ignore[union-attr]
    assert not convert(plain.eval(), x, fit=False).net.bn.training  # type: ignore[union-attr]
    assert not convert(plain.train(), x).training
    assert plain.training


def test_lazy_layers_are_told_from_hooks() -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x = torch.randn(4, 3, 8, 8)
    with pytest.raises(
        GraphError, match="layer '0' has no weights yet, for it is lazy: call the network once on images"
    ):
        convert(net, x, fit=False)
    net(x)
    convert(net, x, fit=False)


def test_a_step_for_each_channel_is_not_one_for_each_token() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.act, self.last = nn.Linear(6, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.act(self.drop(self.first(x))).mean(1))

    x = torch.randn(4, 5, 6)
    with pytest.raises(GraphError, match="layer 'act': what comes out of nn.Linear has its features last"):
        convert(Tokens(), x, neuron={"name": "lbq", "per_channel": True}, fit=False)
    convert(Tokens(), x, fit=False)
    features = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))  # the second axis is theirs
    convert(features, x[:, 0], neuron={"name": "lbq", "per_channel": True}, fit=False)
