"""Other ways to write a network of one's own that are the same in real arithmetic: they deploy, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq.deploy import lower
from lbq.engine import Network
from lbq.errors import GraphError
from lbq.models import over_time
from tests.own_nets import SHAPE, Forward, Own, close, made
from tests.small_nets import pixels, same
from tests.test_graph import compare


def exact(net: nn.Module, logits: bool = True) -> Network:
    """Deployed: levels, and logits where the network returns them, as in training in float64; engines agree to the bit."""
    net.double()
    if logits:
        compare(net, lower(net, SHAPE), torch.randn(4, *SHAPE, dtype=torch.float64))
    network, x = made(net), pixels(4, *SHAPE)
    assert same(network.run(x, "dense", trace=True), network.run(x, "bitplane", trace=True))
    if logits:
        close(net, network, x)
    return network


# The readout ------------------------------------------------------------------------------------------------------------


def features(m: Any, x: Tensor) -> Tensor:
    """Levels of the second neuron, `[T, B, 4, 8, 8]`."""
    out: Tensor = m.sn2(over_time(m.sn(over_time(x, m.conv, m.bn, timesteps=3)), m.conv2, m.bn2))
    return out


READOUTS: dict[str, Forward] = {
    "mean_first": lambda m, x: m.fc(features(m, x).mean((3, 4)).mean(0)),
    "mean_of_levels": lambda m, x: m.fc(m.pool(features(m, x).mean(0)).flatten(1)),
    "mean_at_once": lambda m, x: m.fc(features(m, x).mean(dim=(0, -1, -2))),
    "sum_over_steps": lambda m, x: m.fc(features(m, x).mean((3, 4))).sum(0) / m.timesteps,
    "sum_first": lambda m, x: m.fc(torch.sum(features(m, x).mean((3, 4)), dim=0) / 3),
    "sums": lambda m, x: m.fc((features(m, x).sum((3, 4)) / 64.0).sum(0).div(3)),
    "of_a_sum": lambda m, x: m.fc(((y := features(m, x)) + y).mean(0).mean((2, 3)) * 0.5),
}


@pytest.mark.parametrize("way", READOUTS)
def test_every_order_of_the_readout_is_the_same(way: str) -> None:
    expected, found = (made(net).run(pixels(4, *SHAPE)) for net in (Own(), Own(READOUTS[way])))
    exact(Own(READOUTS[way]))
    np.testing.assert_allclose(found.logits * found.scale, expected.logits * expected.scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(features(m, x).mean((3, 4))).sum(0),
        lambda m, x: m.fc(features(m, x).mean((3, 4)).sum(0)),  # the bias once, and not at every timestep
        lambda m, x: 2 * m.fc(features(m, x).sum((-1, -2)).sum(0)),
        lambda m, x: m.fc(m.pool(features(m, x).mean(0) + features_of(m, x)).flatten(1)),
        lambda m, x: m.fc(m.sn2(over_time(0.5 * m.sn(over_time(x * 0.7, m.conv, timesteps=3)), m.conv2) * 3).mean((0, 3, 4))),
    ],
)  # fmt: skip
def test_sums_over_time_and_factors_are_the_networks_own(function: Forward) -> None:
    """Logits are those that the network gives, and not their mean over time."""
    net = Own(function)
    net.sn3, net.conv3 = type(net.sn)(step=0.4), nn.Conv2d(1, 4, 1)
    exact(net)


def features_of(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.sn3(over_time(x, m.conv3, timesteps=3)).sum(0)
    return out


@pytest.mark.parametrize(
    "last",
    [
        lambda m, y: y.softmax(1),
        lambda m, y: torch.log_softmax(y, dim=-1),
        lambda m, y: F.softmax(y, dim=1),
        lambda m, y: m.softmax(y),
        lambda m, y: m.logarithm(y),
    ],
)
def test_a_last_softmax_is_left_out(last: Callable[[Any, Tensor], Tensor]) -> None:
    net = Own(lambda m, x: last(m, m.fc(features(m, x).mean((0, 3, 4)))))
    net.softmax, net.logarithm = nn.Softmax(1), nn.LogSoftmax(-1)
    found, x = exact(net, logits=False), pixels(4, *SHAPE)
    assert same(found.run(x), made(Own(READOUTS["mean_at_once"])).run(x))
    values = (torch.from_numpy(x).double() / 255 - 0.5) / 0.25
    with torch.no_grad():
        np.testing.assert_array_equal(net(values).argmax(1).numpy(), found.run(x).predictions)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: m.fc(features(m, x).mean((3, 4))).softmax(2).mean(0), "'softmax' .*: return the logits' mean over time"),
        (lambda m, x: m.fc(features(m, x).mean((0, 3, 4))).softmax(0), "'softmax' .*: return the logits' mean over time"),
        (lambda m, x: m.fc(features(m, x).mean((0, 3, 4))).softmax(1) * 2, "must return the current of its last linear"),
        (lambda m, x: m.fc(F.max_pool2d(features(m, x).mean(0), 8).flatten(1)), "max-pooling a mean over time"),
        (lambda m, x: m.fc(F.max_pool2d(features(m, x).flatten(0, 1) * -1, 8).flatten(1)), "max-pooling a negative multiple"),
        (lambda m, x: m.fc(features(m, x).mean((3, 4))), "average its logits over time: return logits.mean.0."),
        (lambda m, x: m.fc(features(m, x).mean((3, 4)).sum((0, 1))), "but as the sum over time, sum.0., or over height and"),
        (lambda m, x: m.fc(features(m, x).mean(4).flatten(2)).mean(0), "but as the mean over time"),
        (lambda m, x: features(m, x[None].expand(3, -1, -1, -1, -1)[0].sum(0)), "'getitem' has no integer form"),
        (lambda m, x: features(m, x.sum(0)), "sum.0. must be over time, and there is no time in front"),
    ],
)  # fmt: skip
def test_readouts_that_are_not_the_same_are_refused(function: Forward, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        made(Own(function))
