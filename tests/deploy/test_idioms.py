"""Other ways to write a network of one's own that are the same in real arithmetic: they deploy, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq.deploy import deploy, graph_of, lower
from lbq.engine import Network
from lbq.errors import GraphError
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.own_nets import SHAPE, Forward, Own, close, features, frames_close, made
from tests.support.small_nets import compare, pixels, same


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


READOUTS: dict[str, Forward] = {
    "mean_first": lambda m, x: m.fc(features(m, x).mean((3, 4)).mean(0)),
    "mean_of_levels": lambda m, x: m.fc(m.pool(features(m, x).mean(0)).flatten(1)),
    "mean_at_once": lambda m, x: m.fc(features(m, x).mean(dim=(0, -1, -2))),
    "sum_over_steps": lambda m, x: m.fc(features(m, x).mean((3, 4))).sum(0) / m.timesteps,
    "sum_first": lambda m, x: m.fc(torch.sum(features(m, x).mean((3, 4)), dim=0) / 3),
    "sums": lambda m, x: m.fc((features(m, x).sum((3, 4)) / 64.0).sum(0).div(3)),
    "named": lambda m, x: m.fc(torch.sum(input=torch.mean(input=features(m, x), dim=(3, 4)), dim=0) / 3),
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


def test_the_last_neurons_may_vote() -> None:
    """Rates: the mean over time of neurons' outputs, with no layer behind them."""
    for function in (
        lambda m, x: m.last(m.fc(features(m, x).mean((3, 4)))).mean(0),
        lambda m, x: m.last(m.fc(features(m, x).mean((3, 4)))).sum(0) / 3,
        lambda m, x: features(m, x).mean((0, 3, 4)),
    ):
        net = Own(function)
        net.last = BurstNeuron(step=0.1)
        assert [s.kind for s in exact(net).network.readout.synapses] == ["identity"]
    net = Own(lambda m, x: features(m, x).mean((0, 3, 4)).log_softmax(1))
    assert same(exact(net, logits=False).run(x := pixels(4, *SHAPE)), made(Own(function)).run(x))


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
        (lambda m, x: m.fc(features(m, x).mean((0, 3, 4))).softmax(1) * 2, "must return one tensor, the current of its last"),
        (lambda m, x: m.fc(F.max_pool2d(features(m, x).mean(0), 8).flatten(1)), "max-pooling a mean over time"),
        (lambda m, x: m.fc(F.max_pool2d(features(m, x).flatten(0, 1) * -1, 8).flatten(1)), "max-pooling a negative multiple"),
        (
            lambda m, x: over_time(m.sn(over_time(x, m.conv, timesteps=3)), m.conv2).mean((0, 3, 4)),
            "must read a neuron's output: put a neuron in front of it, or average in front of a 1x1 convolution",
        ),
        (lambda m, x: m.fc(features(m, x).mean((3, 4)).view(3, len(x), 4)).mean(0), "len of a tensor .*: write x.shape.0."),
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


# Concatenation ----------------------------------------------------------------------------------------------------------


class Branches(Own):
    """Neurons of unequal steps, whose outputs are joined, and layers that read them."""

    def __init__(self, function: Forward) -> None:
        super().__init__(function)
        self.side, self.side_sn = nn.Conv2d(1, 3, 3, padding=1), BurstNeuron(step=0.45, n_max=3)
        self.wide, self.wider = nn.Conv2d(7, 4, 3, padding=1), nn.Conv2d(11, 4, 2, stride=2, bias=False)
        self.left, self.right = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.grouped = nn.Conv2d(7, 7, 1, groups=7)
        self.halves, self.most = nn.AvgPool2d(2), nn.MaxPool2d(3, 1, 1)
        self.hidden, self.last, self.out = nn.Linear(4 * 4 * 4 + 3, 4), BurstNeuron(step=0.2), nn.Linear(7, 5)
        with torch.no_grad():
            self.left.weight.copy_(self.wide.weight[:, :4])
            self.right.weight.copy_(self.wide.weight[:, 4:])
            self.left.bias.copy_(self.wide.bias)  # type: ignore[union-attr, arg-type]
        self.eval()


def branches(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.sn(over_time(x, m.conv, timesteps=3)), m.side_sn(over_time(x, m.side, timesteps=3))


def head(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.fc(m.sn2(x).mean((0, 3, 4)))
    return out


def folded_cat(m: Any, x: Tensor) -> Tensor:
    both = torch.cat([y.flatten(0, 1) for y in branches(m, x)], dim=1)
    return head(m, m.bn2(m.wide(both)).unflatten(0, (3, -1)))


def nested(m: Any, x: Tensor) -> Tensor:
    a, b = branches(m, x)
    return head(m, over_time(torch.cat([torch.cat([a, b], 2), a + a * 0.5], -3), m.wider, m.bn2))


def features_joined(m: Any, x: Tensor) -> Tensor:
    """Of unequal sizes before they are flattened."""
    a, b = branches(m, x)
    joined = torch.cat([over_time(a, m.halves).flatten(2), b.mean((3, 4))], -1)
    return m.fc(m.last(m.hidden(joined)).mean(0))


def by_hand(m: Any, x: Tensor) -> Tensor:
    a, b = branches(m, x)
    return head(m, over_time(a, m.left) + over_time(b, m.right))


CATS: dict[str, Forward] = {
    "time_in_front": lambda m, x: head(m, over_time(torch.cat(branches(m, x), 2), m.wide, m.bn2)),
    "folded": folded_cat,
    "nested": nested,
    "pooled": lambda m, x: head(m, over_time(torch.concat(branches(m, x), dim=2), m.most, m.halves, m.wide)),
    "features": features_joined,
    "means": lambda m, x: m.out(torch.cat(branches(m, x), 2).mean((0, 3, 4))),
    "means_joined": lambda m, x: m.out(torch.cat([y.mean((3, 4)) for y in branches(m, x)], 2).view(3, -1, 7) * 2).mean(0),
}  # fmt: skip


@pytest.mark.parametrize("way", CATS)
def test_concatenations_deploy(way: str) -> None:
    exact(Branches(CATS[way]))


def test_a_convolution_of_a_concatenation_is_the_sum_of_convolutions() -> None:
    """The same integers as the sum by hand, and for an ANN the same operations as one convolution."""
    joined, x = Branches(lambda m, x: head(m, over_time(torch.cat(branches(m, x), 2), m.wide))), pixels(4, *SHAPE)
    a, b = (made(net).run(x, "bitplane", trace=True) for net in (joined, Branches(by_hand)))
    assert same(a, b)
    assert sum(c.accumulations for c in a.counts.values()) == sum(c.accumulations for c in b.counts.values())
    graph = graph_of(joined, SHAPE)
    assert [s.name for s in graph.synapses] == ["conv", "side", "wide.part0", "wide.part1", "fc"]
    assert graph.macs == 64 * 9 * (4 + 3 + 7 * 4) + 4 * 5
    assert lower(joined, SHAPE, weights=False).macs == graph.macs


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: head(m, torch.cat(branches(m, x), 2)), "put BatchNorm, sums and neurons into the branches"),
        (lambda m, x: head(m, over_time(torch.cat(branches(m, x), 2), m.grouped)), "layer 'grouped': its groups cannot read"),
        (lambda m, x: head(m, over_time(torch.cat(branches(m, x), 2), m.conv2)), "expects 4 channels, gets 7 joined ones"),
        (lambda m, x: head(m, over_time(torch.cat(branches(m, x), 3), m.wide)), "along channels alone: dim=2"),
        (lambda m, x: torch.cat([(y := head(m, branches(m, x)[0])), y.softmax(1)], 1), "along channels alone: dim=1"),
        (lambda m, x: head(m, over_time(torch.cat([m.conv(x), m.side(x)], 1), m.wide)), "end each branch with a neuron"),
        (
            lambda m, x: head(m, over_time(torch.cat([(y := branches(m, x))[0].flatten(0, 1), y[1]], 1), m.wide)),
            "have time in front, are flattened or averaged, and others not",
        ),
        (
            lambda m, x: head(m, over_time(torch.cat([over_time((y := branches(m, x))[0], m.halves), y[1]], 2), m.wide)),
            "heights and widths .* differ",
        ),
        (
            lambda m, x: head(m, over_time(torch.cat([over_time((y := branches(m, x))[0], m.halves).flatten(2),
                                                      y[1].mean((3, 4))], 2).view(3, -1, 67, 1, 1), m.wide)),
            "layer 'wide': it reads flattened tensors that were joined: give them to a linear layer",
        ),
    ],
)  # fmt: skip
def test_concatenations_that_nothing_can_read_are_refused(function: Forward, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        made(Branches(function))


# Padding ----------------------------------------------------------------------------------------------------------------


class Padded(Branches):
    def __init__(self, function: Forward) -> None:
        super().__init__(function)
        self.zeros, self.wide_zeros, self.ones = nn.ZeroPad2d(1), nn.ZeroPad2d((2, 2, 0, 0)), nn.ConstantPad2d(1, 1.0)
        self.bare, self.wide_bare = nn.Conv2d(4, 4, 3), nn.Conv2d(7, 4, 3)
        self.eval()


PADS: dict[str, Forward] = {
    "layer": lambda m, x: head(m, over_time(branches(m, x)[0], m.zeros, m.bare)),
    "function": lambda m, x: head(m, over_time(F.pad(branches(m, x)[0], (1, 1, 1, 1)), m.bare)),
    "width": lambda m, x: head(m, over_time(F.pad(branches(m, x)[0], [1, 1]), m.bare)),
    "input": lambda m, x: head(m, over_time(m.zeros(x), m.conv, timesteps=3)),
    "beside_its_own": lambda m, x: head(m, over_time(branches(m, x)[0], m.wide_zeros, m.zeros, m.left)),
    "pooled": lambda m, x: head(m, over_time(branches(m, x)[0], m.halves, m.zeros, m.bare)),
    "joined": lambda m, x: head(m, over_time(torch.cat(branches(m, x), 2), m.zeros, m.wide_bare)),
    "sizes": lambda m, x: head(m, m.bare(m.zeros(y := branches(m, x)[0].flatten(0, 1))).reshape(3, -1, *y.shape[1:])),
}


@pytest.mark.parametrize("way", PADS)
def test_zeros_around_are_the_padding_of_a_convolution(way: str) -> None:
    exact(Padded(PADS[way]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: head(m, over_time(branches(m, x)[0], m.ones, m.bare)), "layer 'ones': pad with zeros, as many on opp"),
        (lambda m, x: head(m, over_time(F.pad(branches(m, x)[0], (0, 1, 0, 1)), m.bare)), "layer 'pad': pad with zeros"),
        (lambda m, x: head(m, over_time(F.pad(branches(m, x)[0], (1,) * 6), m.bare)), "'pad' has .*: pad height and width"),
        (lambda m, x: head(m, over_time(branches(m, x)[0], m.zeros, m.most, m.bare)), "layer 'most': it reads a padded tensor"),
        (lambda m, x: head(m, over_time(branches(m, x)[0], m.zeros)), "layer 'sn2': it reads a padded tensor: pad right in"),
        (lambda m, x: m.fc(over_time(branches(m, x)[0], m.zeros).flatten(2)).mean(0), "layer 'fc': it reads a padded tensor"),
        (lambda m, x: head(m, over_time((y := branches(m, x)[0]) + y, m.zeros, m.bare)), "it reads a padded tensor"),
    ],
)  # fmt: skip
def test_padding_that_no_convolution_has_is_refused(function: Forward, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        made(Padded(function))


# Time behind the batch ---------------------------------------------------------------------------------------------------


def batch_first(m: Any, x: Tensor) -> Tensor:
    """From `[B, T, 1, 8, 8]`; neurons alone have time in front."""
    batch, steps = x.shape[:2]
    y = m.bn(m.conv(x.flatten(0, 1))).unflatten(0, (batch, steps))
    y = m.sn(y.transpose(0, 1)).transpose(0, 1)
    y = m.sn2(over_time(y, m.conv2, m.bn2).permute(1, 0, 2, 3, 4)).permute(1, 0, 2, 3, 4)
    return m.fc(y.mean((3, 4))).mean(1)


def summed_behind(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)[:, None].expand(-1, 3, -1, -1, -1)
    z = m.bn(m.conv2(m.sn(y.swapaxes(0, 1)).transpose(1, 0).flatten(0, 1))).unflatten(0, (-1, 3))
    return m.fc(m.sn2((y + z).transpose(0, 1)).transpose(0, 1).sum((1, 3, 4)))


BATCH_FIRST: dict[str, Forward] = {
    "repeat": lambda m, x: batch_first(m, x.unsqueeze(1).repeat(1, 3, 1, 1, 1)),
    "expand": lambda m, x: batch_first(m, x[:, None].expand(-1, 3, -1, -1, 8)),
    "stack": lambda m, x: batch_first(m, torch.stack([x] * 3, dim=1)),
    "transposed": lambda m, x: batch_first(m, torch.movedim(x.expand(3, *x.shape), 0, 1)),
    "views": lambda m, x: batch_first(m, x[:, None, ...].repeat(1, 3, 1, 1, 1).view(-1, 1, 8, 8).view(x.shape[0], 3, 1, 8, 8)),
    "sums": summed_behind,
}  # fmt: skip


@pytest.mark.parametrize("way", BATCH_FIRST)
def test_time_may_stand_behind_the_batch(way: str) -> None:
    exact(Own(BATCH_FIRST[way]))


def test_one_timestep_behind_the_batch() -> None:
    for shown in (lambda x: x.unsqueeze(1), lambda x: x[:, None].expand(-1, 1, -1, -1, -1)):
        one = made(Own(lambda m, x, shown=shown: batch_first(m, shown(x)), timesteps=1))  # type: ignore[misc]
        assert same(one.run(pixels(2, *SHAPE)), made(Own(timesteps=1)).run(pixels(2, *SHAPE)))


def test_event_frames_may_be_transposed() -> None:
    frames_close(Own(lambda m, x: batch_first(m, x.transpose(0, 1))))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: m.sn(x.transpose(2, 3)), r"^layer 'sn': .*reads \[B, 1, width, height\]: x.expand\(T, "),
        (lambda m, x: m.sn(x.expand(3, *x.shape).movedim((0, 1), (1, 0))), "the raw input must pass a convolution"),
        (lambda m, x: m.sn(x.expand(3, *x.shape).permute(1, 0, 2, 4, 3)), r"^layer 'sn': .*reads \[B, T, 1, width, hei"),
        (lambda m, x: m.sn(x[:, None].repeat(1, 3, 1, 1, 1).view(3, -1, 1, 8, 8)), "it may only join or split time and batch"),
        (
            lambda m, x: m.sn(m.conv(x[:, None].repeat(1, 3, 1, 1, 1).flatten(0, 1)).unflatten(0, (3, -1))),
            "it may only join or split time and batch",
        ),
        (lambda m, x: m.sn(m.conv(x) + m.conv2(x)[:, None].expand(-1, 3, -1, -1, -1)), "or behind it: fold, unfold or"),
        (lambda m, x: m.fc(features(m, x).transpose(0, 1).mean((3, 4))).mean(0), "as the mean over time, mean.1."),
        (lambda m, x: m.sn(m.conv(x[:, None].repeat(1, 3, 1, 1, 1))), "layer 'conv': Conv2d knows no time in front"),
    ],
)  # fmt: skip
def test_what_would_mix_time_and_batch_is_refused(function: Forward, message: str) -> None:
    net = Own(function)
    net.conv2 = nn.Conv2d(1, 4, 1) if "fold, unfold" in message else net.conv2
    with pytest.raises(GraphError, match=message):
        made(net)


# Sums, products and shapes ------------------------------------------------------------------------------------------------


def by_comparison(m: Any, x: Tensor) -> Tensor:
    """Shapes decide, the batch's size being the same in all of them."""
    a = m.sn(over_time(x, m.conv, timesteps=3))
    steps, batch = a.shape[:2]
    y = m.conv2(a.flatten(0, 1))
    assert a.size(1) == batch
    assert y.shape[1:] == (4, 8, 8)
    batch *= steps
    y = m.bn2(y.reshape(batch, 4, 8, 8)).reshape(a.shape)
    shortcut = over_time(a, m.bn) if y.shape != a.shape else a
    return head(m, y - shortcut)


def in_place(m: Any, x: Tensor) -> Tensor:
    y = over_time(m.sn(over_time(x, m.conv, timesteps=3)), m.conv2)
    y *= -2
    y /= 4
    y -= over_time(m.sn2(-y), m.bn)
    out = m.fc(y.detach().relu().mean((3, 4)) if m.training else m.last(y).mean(axis=(3, 4))).sum(axis=0)
    out /= 3
    return out


@pytest.mark.parametrize("function", [by_comparison, in_place])
def test_differences_products_and_shapes(function: Forward) -> None:
    net = Own(function)
    net.last = BurstNeuron(step=0.25)
    exact(net)


def test_an_input_that_the_forward_changes_in_place() -> None:
    """What the trace knows of that deploys; what a forward does to real tensors alone does not escape."""

    def seen(m: Any, x: Tensor) -> Tensor:
        x *= 2
        return m.fc(m.sn(over_time(x, m.conv)).mean((0, 3, 4)))

    def unseen(m: Any, x: Tensor) -> Tensor:
        return m.fc(m.sn(over_time(x.mul_(2) if isinstance(x, Tensor) else x, m.conv)).mean((0, 3, 4)))

    assert deploy(Own(seen), SHAPE, static=False).network.layers[0].name == "sn"
    with pytest.raises(GraphError, match="computes something else than its trace"):
        deploy(Own(unseen), SHAPE, static=False)
