"""Networks of one's own: how time comes in, sizes, currents read twice, functions in place of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lbq.engine
from lbq.deploy import deploy, lower
from lbq.errors import GraphError
from lbq.models import fold_time, over_time, unfold_time
from tests.support.own_nets import SHAPE, Forward, Own, close, frames_close, made, plain, rest
from tests.support.small_nets import pixels, same


def folded(m: Any, x: Tensor) -> Tensor:
    """From `[T, B, C, H, W]`, the first convolution at every timestep."""
    return rest(m, m.sn(over_time(x, m.conv, m.bn)))


def current(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.bn(m.conv(x))
    return out


def by_hand(m: Any, x: Tensor) -> Tensor:
    steps, batch = x.shape[:2]
    return rest(m, m.sn(m.bn(m.conv(x.flatten(0, 1))).unflatten(0, (steps, batch))))


def by_views(m: Any, x: Tensor, whole: bool) -> Tensor:
    """As in by_hand, by view and reshape throughout; sizes given or left to PyTorch."""
    steps, batch, channels, height, width = x.shape
    x = current(m, x.reshape(steps * batch if whole else -1, channels, height, width))
    x = m.sn(x.view(steps, batch if whole else -1, 4, height, width))
    x = m.bn2(m.conv2(torch.reshape(x, (-1, 4, x.size(3), 8))))
    x = m.sn2(x.view(steps, x.shape[0] // steps, *([4, 8, 8] if whole else [-1, 8, 8])))
    x = m.pool(x.view(-1, 4, 8, 8)).view(steps, batch, 4 if whole else -1)
    return m.fc(x.view(-1, x.shape[-1])).view(steps, -1, 5).mean(0)


def by_shapes(m: Any, x: Tensor) -> Tensor:
    """Time unfolds by the sizes of what was computed from the folded tensor."""
    steps, batch, channels, height, width = x.shape
    y = current(m, x.reshape(steps * batch, channels, height, width))
    y = m.sn(y.reshape(steps, batch, *y.shape[1:]))
    assert y.dim() == y.ndim == len(y.shape) == 5
    z = m.bn2(m.conv2(y.view(-1, *y.shape[2:])))
    z = m.sn2(z.reshape(steps, batch, -1, z.shape[-2], z.size(-1)))
    return m.fc(z.mean((3, 4)).reshape(-1, z.size()[2])).view(*z.shape[:2], m.fc.out_features).mean(0)


def as_ann(x: Tensor, *layers: nn.Module) -> Tensor:
    """As SpikingJelly's seq_to_ann_forward."""
    shape = [x.shape[0], x.shape[1]]
    y = x.flatten(0, 1)
    for layer in layers:
        y = layer(y)
    shape.extend(y.shape[1:])
    return y.view(shape)


WAYS: dict[str, Forward] = {
    "unsqueeze_expand": lambda m, x: folded(m, x.unsqueeze(0).expand(3, -1, -1, -1, -1)),
    "unsqueeze_expand_sizes": lambda m, x: folded(m, torch.unsqueeze(x, 0).expand((3, x.shape[0], 1, x.size(2), 8))),
    "unsqueeze_expand_shape": lambda m, x: folded(m, x.unsqueeze(0).expand(3, *x.shape)),
    "expand": lambda m, x: folded(m, x.expand(m.timesteps, *x.shape)),
    "stack": lambda m, x: folded(m, torch.stack([x] * m.timesteps)),
    "stack_dim": lambda m, x: folded(m, torch.stack([x for _ in range(3)], dim=0)),
    "repeat": lambda m, x: folded(m, x[None].repeat(3, 1, 1, 1, 1)),
    "repeat_only": lambda m, x: folded(m, x.repeat(3, 1, 1, 1, 1)),
    "unsqueeze_repeat": lambda m, x: folded(m, x[None, ...].repeat((3, 1, 1, 1, 1))),
    "dimensions_asked": lambda m, x: folded(m, torch.stack([x] * 3) if x.dim() == 4 else x),
    "current_stack": lambda m, x: rest(m, m.sn(torch.stack([current(m, x)] * 3))),
    "current_expand": lambda m, x: rest(m, m.sn(current(m, x)[None].expand(3, -1, 4, -1, -1))),
    "one_folded": lambda m, x: rest(m, m.sn(over_time(x[None], m.conv, m.bn).expand(3, -1, -1, -1, -1))),
    "halves": lambda m, x: rest(m, m.sn(unfold_time(current(m, fold_time(x)), x, 3))),
    "by_hand": lambda m, x: by_hand(m, torch.stack([x] * 3)),
    "by_views": lambda m, x: by_views(m, x.expand(3, *x.shape), False),
    "by_views_with_sizes": lambda m, x: by_views(m, x.expand(3, *x.shape), True),
    "by_shapes": lambda m, x: by_shapes(m, x.expand(3, *x.shape)),
    "as_ann": lambda m, x: m.fc(
        as_ann(
            m.sn2(as_ann(m.sn(as_ann(x[None].repeat(3, 1, 1, 1, 1), m.conv, m.bn)), m.conv2, m.bn2)), m.pool
        ).flatten(2)
    ).mean(0),
    "branch_on_sizes": lambda m, x: folded(m, torch.stack([x] * 3) if x.shape[1:] == (1, 8, 8) else x),
    "sizes_by_name": lambda m, x: folded(m, x.expand(3, x.size(dim=0), x.size(dim=1), 8, 8)),
    "image_by_views": lambda m, x: folded(m, torch.stack([x.view(x.size(0), -1).view(-1, 1, 8, 8)] * 3)),
    "one_by_views": lambda m, x: rest(m, m.sn(torch.stack([current(m, x[None].view(x.shape))] * 3))),
    "linear_without_fold": lambda m, x: m.fc(
        over_time(m.sn2(over_time(m.sn(over_time(x, m.conv, m.bn, timesteps=3)), m.conv2, m.bn2)), m.pool).flatten(2)
    ).mean(0),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_show_an_image_is_over_times(way: str) -> None:
    """The same network as with over_time(..., timesteps=3), in PyTorch and on integers, and so in counts."""
    x, net = pixels(4, *SHAPE), Own(WAYS[way])
    with torch.no_grad():
        values = torch.randn(4, *SHAPE)
        torch.testing.assert_close(net(values), Own()(values))
    expected, network = made(Own()), made(net)
    assert network.network.timesteps == 3
    assert network.network.static
    a, b = (n.run(x, "bitplane", trace=True) for n in (expected, network))
    assert same(a, b)
    assert a.counts == b.counts


@pytest.mark.parametrize(
    "shown",
    [
        lambda x: x[None],
        lambda x: x.unsqueeze(0).expand(1, -1, -1, -1, -1),
        lambda x: x[None].repeat(1, 1, 1, 1, 1),
        lambda x: x.expand(1, *x.shape),
        lambda x: torch.stack([x]),
    ],
)
def test_one_timestep_needs_a_dimension_only(shown: Callable[[Tensor], Tensor]) -> None:
    one = made(Own(lambda m, x: folded(m, shown(x)), timesteps=1))
    assert same(one.run(pixels(2, *SHAPE)), made(Own(timesteps=1)).run(pixels(2, *SHAPE)))


def test_a_static_current_is_added_at_every_timestep() -> None:
    """[B, ...] + [T, B, ...], as PyTorch broadcasts it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = over_time(m.sn(over_time(x, m.conv, m.bn, timesteps=3)), m.conv2, m.bn2)
        out = m.sn2(hidden + m.skip(x))
        return over_time(over_time(out, m.pool).flatten(2), m.fc, spatial=1).mean(0)

    net = Own(forward)
    net.skip = nn.Conv2d(1, 4, 1)
    close(net, made(net))


def before_and_behind(m: Any, x: Tensor) -> Tensor:
    """As in residual networks whose blocks begin with an activation: a current is rectified, and added further on."""
    y = over_time(x, m.conv, m.bn, timesteps=3)
    z = m.sn2(over_time(m.sn(y), m.conv2, m.bn2) + y)
    return over_time(over_time(z, m.pool).flatten(2), m.fc, spatial=1).mean(0)


def twice_into_one(m: Any, x: Tensor) -> Tensor:
    y = over_time(m.sn(over_time(x, m.conv, timesteps=3)), m.conv2)
    z = m.sn2(over_time(y, m.bn) + over_time(y, m.bn2))
    return m.fc(over_time(z, m.pool).flatten(start_dim=2)).mean(0)


@pytest.mark.parametrize("function", [before_and_behind, twice_into_one])
def test_a_current_may_be_read_twice(function: Forward, tmp_path: Path) -> None:
    """Each reader has a synapse of its own: their units differ."""
    net = Own(function)
    network = made(net)
    names = [synapse.name for layer in network.network.layers for synapse in layer.synapses]
    assert len(set(names)) == len(names) == 3
    graph = lower(net, SHAPE)
    first, second = graph.layers
    one_name = dataclasses.replace(second, synapses=tuple(dataclasses.replace(s, name="conv") for s in second.synapses))
    with pytest.raises(GraphError, match="synapse 'conv' stands in the network twice"):
        dataclasses.replace(graph, layers=(first, one_name))
    lbq.engine.save(tmp_path / "net.lbq", network)
    loaded = lbq.engine.load(tmp_path / "net.lbq")
    x = pixels(4, *SHAPE)
    assert same(network.run(x, "dense", trace=True), loaded.run(x, "bitplane", trace=True))
    close(net, loaded, x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: folded(m, torch.stack([x] * 4)), "the network runs 4 timesteps, not 3: give timesteps=4"),
        (lambda m, x: folded(m, x.expand(4, *x.shape)), "the network runs 4 timesteps, not 3"),
        (lambda m, x: folded(m, torch.stack([x] * 3, dim=1)), "a neuron needs time in front, .* x.transpose.0, 1. puts"),
        (lambda m, x: folded(m, torch.stack([x] * 3, dim=2)), "only the same image, stacked in front"),
        (lambda m, x: folded(m, torch.stack([x, x.clone(), x])), "only the same image, stacked in front"),
        (
            lambda m, x: rest(m, m.sn(torch.stack([y := m.conv(x), m.bn(y), y]))),
            "only the same image, stacked in front",
        ),
        (lambda m, x: folded(m, x[None].repeat(3, 2, 1, 1, 1)), "repeat is supported only to show an image"),
        (lambda m, x: folded(m, x[None].repeat(3, 1, 1, 8, 1)), "repeat is supported only to show an image"),
        (lambda m, x: folded(m, x[None].expand(3, 2, 1, 8, 8)), "expand is supported only to show an image"),
        (lambda m, x: folded(m, x[None].expand(3, -1, 4, -1, -1)), "expand is supported only to show an image"),
        (lambda m, x: folded(m, x[None].expand(3, -1)), "expand is supported only to show an image"),
        (lambda m, x: folded(m, torch.stack([torch.stack([x] * 3)] * 3)), "only an image without time in front"),
        (lambda m, x: folded(m, x.unsqueeze(1)), "layer 'sn': a neuron needs time in front"),
        (lambda m, x: folded(m, x.unsqueeze(2)), "'unsqueeze' has no integer form"),
        (lambda m, x: folded(m, torch.stack([x] * 3).unsqueeze(0)), "'unsqueeze' has no integer form"),
        (lambda m, x: folded(m, x[0]), "'getitem' has no integer form"),
        (lambda m, x: folded(m, x.expand(3, *current(m, x).shape)), "expand is supported only to show an image"),
        (lambda m, x: by_hand(m, x.expand(x.shape[4], *x.shape)), "cannot be traced by torch.fx: tuple index out of range"),
        (lambda m, x: folded(m, x.expand(current(m, x).shape[4], *x.shape)), "by torch.fx: tuple index out of range"),
        (lambda m, x: folded(m, torch.stack([x] * (2 if x.size(0) > 1 else 3))), "a branch on a tensor.s values"),
        (lambda m, x: rest(m, torch.stack([m.sn(y) for y in current(m, x)])), "a loop over a tensor, .*: give layers"),
        (lambda m, x: rest(m, m.sn(current(m, x))), "layer 'sn': a neuron needs time in front"),
        (lambda m, x: rest(m, m.sn(current(m, fold_time(torch.stack([x] * 3))))), "layer 'sn': a neuron needs time"),
        (lambda m, x: rest(m, m.sn(current(m, torch.stack([x] * 3)))), "layer 'conv': Conv2d knows no .*over_time"),
        (lambda m, x: rest(m, m.sn(current(m, x[None]).expand(3, -1, -1, -1, -1))), "layer 'conv': Conv2d knows no time"),
        (lambda m, x: rest(m, m.sn(unfold_time(current(m, x), torch.stack([x] * 3)))), "from fold_time of the same"),
        (lambda m, x: rest(m, m.sn(torch.stack([x] * 3).flatten(1))), r"layer 'sn': .*reads \[T, B \* tokens\]"),
        (lambda m, x: folded(m, torch.stack([x.flatten(0, 1)] * 3)), r"spatial=3, but the tensor is \[T, B, height, width\]"),
        (lambda m, x: rest(m, m.sn(torch.add(y := over_time(x, m.conv, timesteps=3), y, alpha=2))), "only sums and diff"),
        (lambda m, x: plain(m, x)[None].expand(3, -1, -1), "return its logits as .B, classes., without time"),
        (lambda m, x: m.fc(fold_time(m.sn(over_time(x, m.conv, timesteps=3)).mean((3, 4)), 2)).mean(0), "give spatial=1"),
        (
            lambda m, x: over_time(m.sn(over_time(x, m.conv, timesteps=3)).mean((3, 4)), m.fc, spatial=2, timesteps=3).mean(0),
            "fold_time_1 in the network's forward: spatial=2, but the tensor has 1: give spatial=1",
        ),
        (
            lambda m, x: unfold_time(
                m.fc(y := fold_time(m.sn(over_time(x, m.conv, timesteps=3)).mean((3, 4)), 1)), y, 3, 1
            ).mean(0),
            "from fold_time of the same",
        ),
        (
            lambda m, x: unfold_time(
                m.fc(fold_time(y := m.sn(over_time(x, m.conv, timesteps=3)).mean((3, 4)), 1)), y, 3, 2
            ).mean(0),
            "unfold_time.* give spatial=1",
        ),
        *(
            (lambda m, x, sizes=sizes: folded(m, torch.stack([x] * 3).view(*sizes(x))), "it may only join or split")
            for sizes in (
                lambda x: (x.shape[0], 3, 1, 8, 8),
                lambda x: (-1, 3, 1, 8, 8),
                lambda x: (3, -1, 1, 4, 16),
                lambda x: (3, -1, -1, 8, 8),
                lambda x: (3, 4, 1, 8, 8),
                lambda x: (0, -1),
                lambda x: (torch.float32,),
                lambda x: (x,),
            )
        ),
        (
            lambda m, x: folded(m, torch.stack([x] * 3).view(3, x.shape[0] * 8, 8)),
            r"but the tensor is \[T, B \* height, width\]",
        ),
        (
            lambda m, x: rest(m, over_time(y := m.sn(over_time(x, m.conv, timesteps=3)), m.conv2) + m.bn2(fold_time(y))),
            "one of its operands has time in front, the other has it folded",
        ),
        (lambda m, x: folded(m, x * x), "it multiplies something else than neurons' outputs: put a neuron in front"),
        (lambda m, x: folded(m, x / x.shape[0]), "'truediv' has no integer form"),
        (lambda m, x: folded(m, 3 / x), "'truediv' has no integer form"),
        (lambda m, x: folded(m, x / 0), "'truediv' has no integer form"),
        (lambda m, x: rest(m, m.sn(m.bn(m.conv(x.expand(3, *x.shape).flatten(0, 1))).unflatten(0, (2, -1)))), "join or split"),
        (lambda m, x: m.fc(m.pool(current(m, x).relu()).flatten(1)).mean(0), "there is no time in front"),
        (lambda m, x: m.fc(m.sn(over_time(x, m.conv, timesteps=3)).mean(0)), "layer 'fc': flatten .4, 8, 8. before"),
        (lambda m, x: plain(m, x).mean(0, keepdim=True), "but as the mean over time, mean.0."),
        (lambda m, x: m.fc(m.sn(over_time(x, m.conv, timesteps=3)).flatten(2).mean((1, 2))), "but as the mean over time"),
        (lambda m, x: plain(m, x).mean(), "but as the mean over time, mean.0."),
        (
            lambda m, x: rest(m, m.sn(over_time(x, m.conv, timesteps=3) + current(m, fold_time(torch.stack([x] * 3))))),
            "'conv' is used twice",
        ),
    ],
)  # fmt: skip
def test_time_that_is_not_where_it_should_be_is_refused(function: Forward, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        made(Own(function))


def test_event_frames_have_their_time() -> None:
    frames_close(Own(by_hand))
    with pytest.raises(GraphError, match="only an image without time in front"):
        deploy(Own(WAYS["stack"]), SHAPE, static=False)


def pooled(pool: Callable[[Tensor], Tensor]) -> Forward:
    """Two layers, then `pool` from [T * B, 4, 8, 8] to [T * B, 4], then logits."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.sn2(over_time(m.sn(over_time(x, m.conv, m.bn, timesteps=3)), m.conv2, m.bn2))
        return m.fc(pool(fold_time(x))).unflatten(0, (3, -1)).mean(0)

    return forward


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "adaptive_named": lambda x: F.adaptive_avg_pool2d(input=x, output_size=(1, 1)).view(-1, 4),
    "mean": lambda x: x.mean((2, 3)),
    "mean_from_the_end": lambda x: torch.mean(x, dim=[-1, -2], keepdim=True).flatten(1),
    "average": lambda x: F.avg_pool2d(x, 8).flatten(1),
    "average_of_its_size": lambda x: F.avg_pool2d(x, (x.shape[2], x.shape[-2] + x.size(3) - 8)).flatten(1),
    "averages": lambda x: F.avg_pool2d(F.avg_pool2d(x, kernel_size=4, stride=4), 2).flatten(1),
    "dropout": lambda x: F.dropout2d(F.dropout(x, 0.5, False), training=False).mean((2, 3)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_the_layers_that_do_the_same(name: str) -> None:
    expected, network = made(Own()), made(Own(pooled(FUNCTIONS[name])))
    x = pixels(4, *SHAPE)
    a, b = (n.run(x, "bitplane", trace=True) for n in (expected, network))
    np.testing.assert_array_equal(a.predictions, b.predictions)
    assert a.levels is not None
    assert b.levels is not None
    assert all(np.array_equal(a.levels[layer], b.levels[layer]) for layer in a.levels)
    np.testing.assert_allclose(a.logits * a.scale, b.logits * b.scale, rtol=0.02)


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(x, 2, padding=1),
        lambda x: torch.max_pool2d(x, 3, 2),
        lambda x: F.max_pool2d(x, [2], (1,)),
        lambda x: torch.max_pool2d(x, 2, []),
        lambda x: F.max_pool2d(x, 2, ceil_mode=True),  # whose windows fill the input
        lambda x: F.max_pool2d(x, 2, 3, padding=1, ceil_mode=True),  # where one more would begin in the padding
    ],
)
def test_maximum_by_functions(pool: Callable[[Tensor], Tensor]) -> None:
    net = Own(pooled(lambda x: pool(x).mean((2, 3))))
    close(net, made(net))


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (lambda x: F.dropout(x).mean((2, 3)), "operation 'dropout' has no integer form here"),
        (lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True).mean((2, 3)), "reach over the edge of .8, 8., which"),
        (lambda x: F.max_pool2d(x, 2, dilation=2).mean((2, 3)), "dilated pooling is not supported"),
        (lambda x: F.adaptive_avg_pool2d(x, 3).flatten(1), "to .3, 3. has windows of unequal size"),
        (lambda x: x.mean((1, 3)), "'mean' has no integer form here but as the mean over time"),
        (lambda x: x.mean((2, 3), dtype=torch.float64), "'mean' has no integer form here but as the mean over time"),
        (lambda x: F.lp_pool2d(x, 2, 8).flatten(1), "has no integer form here"),
        (lambda x: F.avg_pool2d(x, x.shape[0] - 1).flatten(1), "layer 'avg_pool2d': sub is no height and width"),
        (lambda x: F.max_pool2d(x, 2, 0).mean((2, 3)), "0 is no height and width: use whole numbers from 1"),
        (
            lambda x: F.adaptive_avg_pool2d(x, x.shape[0] - 1).mean((2, 3)),
            "use whole numbers from 0, or x.shape",
        ),
    ],
)
def test_functions_without_integer_form(pool: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        made(Own(pooled(pool)))
