"""Small networks with statistics and unequal steps of their own, for the tests of deployment."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lbq import models
from lbq.deploy import absorb, deploy, fold_gain, on_pixels
from lbq.deploy.float_execution import execute
from lbq.engine import Network
from lbq.engine.output import Output
from lbq.graph import Graph
from lbq.models import over_time
from lbq.models.resnet import ResNet
from lbq.models.transformer import QKFormer
from lbq.neuron import LMHT, BurstNeuron
from lbq.neuron.recorder import record_levels

MEAN, STD = (0.5, 0.4, 0.6), (0.25, 0.3, 0.2)


def normalised(x: np.ndarray[Any, Any]) -> Tensor:
    """uint8 [B, C, H, W] as training sees it, in float64."""
    channels = x.shape[1]
    mean, std = (np.array(v[:channels])[:, None, None] for v in (MEAN, STD))
    return torch.from_numpy((x / 255 - mean) / std)


def pixels(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def warmed(net: nn.Module, *shape: int, static: bool = True, seed: int = 0) -> nn.Module:
    """BatchNorm with statistics of its own and unequal steps; in evaluation mode and float64."""
    torch.manual_seed(seed)
    net.double().train()
    for i in range(3):
        x = pixels(6, *shape, seed=seed + i)
        net(normalised(x) if static else torch.from_numpy(x[None].repeat(2, 0) / 64))
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, BurstNeuron) and hasattr(module, "rho"):
                module.rho.add_(torch.randn(module.rho.shape) * 0.3)
            if isinstance(module, LMHT):
                module.mixing.normal_(0.5)
                module.leak_logit.normal_()
    return net.eval()


def small(
    id: str = "resnet8w4", neuron: Any = "lbq", shape: tuple[int, int, int] = (3, 8, 8), **options: Any
) -> nn.Module:
    torch.manual_seed(0)
    options = {"timesteps": 2, "num_classes": 5, **options}
    return warmed(models.create(id, neuron=neuron, in_channels=shape[0], **options), *shape)


def deployed(
    id: str = "resnet8w4", neuron: Any = "lbq", shape: tuple[int, int, int] = (3, 8, 8), bits: int = 8, **options: Any
) -> Network:
    """A `small` network on integers: a copy of the one that was made of these arguments, and the random state of then."""
    net, random_state = _deployed(json.dumps([id, neuron, shape, bits, options]))
    torch.set_rng_state(random_state)
    return copy.deepcopy(net)


@functools.cache
def _deployed(arguments: str) -> tuple[Network, Tensor]:
    id, neuron, shape, bits, options = json.loads(arguments)
    made = small(id, neuron, shape, **options)
    net = deploy(made, tuple(shape), mean=MEAN[: shape[0]], std=STD[: shape[0]], bits=bits)
    return net, torch.get_rng_state()


class Functional(nn.Module):
    """A network whose forward is any function of it and its input; layers: its modules by name."""

    def __init__(self, function: Callable[..., Tensor], timesteps: int = 2, /, **layers: nn.Module) -> None:
        super().__init__()
        self.function, self.timesteps = function, timesteps
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def mean_logits(m: Any, x: Tensor) -> Tensor:
    """Pool levels `[T, B, C, H, W]`, classify them by a linear layer, and average over time."""
    return over_time(over_time(x, m.pool).flatten(2), m.fc, spatial=1).mean(0)


def branches(m: Any, x: Tensor) -> Tensor:
    """Two paths from one tensor with steps of their own, average-pooled, max-pooled, grouped and dilated, then merged."""
    a = m.sn(over_time(x, m.conv, timesteps=3))
    b = m.sn1(over_time(a, m.avg, m.conv1))
    c = m.sn2(over_time(a, m.max, m.conv2) + b)
    d = m.sn3(over_time(c, m.conv3) + b + over_time(x, m.skip, timesteps=3))
    return mean_logits(m, d)


class Branches(Functional):
    def __init__(self) -> None:
        super().__init__(branches, 3)
        self.conv, self.sn = nn.Conv2d(3, 4, 3, padding=1), BurstNeuron(6)
        self.avg, self.conv1, self.sn1 = nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1, groups=2), BurstNeuron(3)
        self.max, self.conv2, self.sn2 = nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, padding=2, dilation=2), BurstNeuron()
        self.conv3, self.skip, self.sn3 = nn.Conv2d(4, 4, 1), nn.Conv2d(3, 4, 2, 2), BurstNeuron(2)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)


def deploy_warmed(net: nn.Module, channels: int, height: int, width: int, **options: Any) -> Network:
    """A network with statistics of its own on integers, for images of mean 0.5 and deviation 0.25."""
    shape = channels, height, width
    return deploy(warmed(net, *shape), shape, mean=[0.5] * channels, std=[0.25] * channels, **options)


def branched(bits: int = 8) -> Network:
    torch.manual_seed(4)
    return deploy_warmed(Branches(), 3, 6, 6, bits=bits)


def pooled(m: Any, x: Tensor) -> Tensor:
    """Averages that overlap, one behind the other and behind a maximum, padded where an average counts no padding."""
    a = m.sn(over_time(x, m.conv, timesteps=3))
    b = m.sn1(over_time(a, m.avg, m.avg1, m.conv1) + over_time(a, m.max, m.avg2, m.conv2))
    return mean_logits(m, b)


def unit_events(neuron: Callable[[], nn.Module]) -> Network:
    """A network of such neurons, whose levels are 0, 1 and -1, with pools of every kind."""
    torch.manual_seed(5)
    layers: dict[str, Any] = {
        "conv": nn.Conv2d(3, 4, 3, padding=1),
        "sn": neuron(),
        "sn1": neuron(),
        "fc": nn.Linear(4, 3),
    }
    layers |= {"avg": nn.AvgPool2d(3, 1), "avg1": nn.AvgPool2d(2, 2), "conv1": nn.Conv2d(4, 4, 3, padding=1)}
    layers |= {"max": nn.MaxPool2d(3, 1, 1), "avg2": nn.AvgPool2d((4, 5), (2, 2)), "conv2": nn.Conv2d(4, 4, (1, 1))}
    layers["conv1"].weight.data.mul_(4)  # so that events arrive behind the averages
    layers["conv2"].weight.data.mul_(4)
    net = Functional(pooled, 3, pool=nn.AdaptiveAvgPool2d(1), **layers)
    return deploy_warmed(net, 3, 8, 7)


def eventful(id: str = "resnet8w2") -> Network:
    """A network that reads three event frames `[2, 4, 4]`."""
    torch.manual_seed(0)
    net = warmed(models.create(id, in_channels=2, num_classes=3), 2, 4, 4, static=False)
    return deploy(net, (2, 4, 4), timesteps=3, static=False)


def eventful_transformer() -> Network:
    """The same for `[2, 8, 8]`: gates, sums over channels, attention, and currents as shortcuts."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"shortcut": "membrane", "num_classes": 3, "timesteps": 3, "in_channels": 2}
    net = QKFormer(lambda _: BurstNeuron(), depth=3, width=8, heads=1, scale=16.0, **options)
    return deploy(warmed(net, 2, 8, 8, static=False), (2, 8, 8), timesteps=3, static=False)


# Families that have no narrow network by id, and one with a residual of each kind where every neuron costs time
ONE_BLOCK = "one-block"
models.register(ONE_BLOCK)(partial(ResNet, blocks=(1,), widths=(8,), stem_width=4))
models.register("one-block-fc")(partial(ResNet, blocks=(1,), widths=(8,), stem_width=4, hidden=8))
models.register("narrow-fc")(partial(ResNet, blocks=(3, 3, 2), widths=(4, 8, 16), stem_width=2, hidden=8))
models.register("narrow-pooled-stem")(
    partial(ResNet, blocks=(2, 2, 2, 2), widths=(4, 8, 16, 32), stem_width=4, stem="imagenet")
)

# Networks of every kind that deploys: model, neuron, input shape, options
CASES: list[tuple[str, Any, tuple[int, int, int], dict[str, Any]]] = [
    ("resnet8w2", "lbq", (3, 4, 4), {}),
    ("resnet8w2", {"name": "lbq", "n_max": 20, "per_channel": True}, (3, 4, 4), {"timesteps": 3}),
    ("resnet8w2", {"name": "lbq", "membrane": "plif"}, (1, 5, 3), {}),
    ("resnet8w2", {"name": "lbq", "membrane": "if", "alpha": 0.7}, (3, 4, 4), {}),
    ("resnet8w2", "lif", (3, 4, 4), {"timesteps": 3}),
    ("resnet8w2", "ternary", (3, 4, 4), {}),
    ("resnet8w2", "ternary_half", (3, 4, 4), {}),
    ("resnet8w2", "ilif", (3, 4, 4), {}),
    ("resnet8w2", "qann", (3, 4, 4), {"timesteps": 1}),
    ("resnet8w2", "ladder", (3, 4, 4), {}),
    ("narrow-fc", "lbq", (3, 4, 4), {}),
]


# The same with neurons that mix timesteps, which are not exported
MIXED_CASES: list[tuple[str, Any, tuple[int, int, int], dict[str, Any]]] = [
    ("resnet8w2", "lmht", (3, 4, 4), {"timesteps": 3}),
    ("resnet8w2", {"name": "lmht", "n_max": 4, "learn_step": True}, (1, 5, 3), {"timesteps": 1}),
]


def same(a: Output, b: Output) -> bool:
    """Identical logits and, where traced, levels: values and types."""
    if a.levels is not None and b.levels is not None:
        if list(a.levels) != list(b.levels):
            return False
        for x, y in zip(a.levels.values(), b.levels.values(), strict=True):
            if x.dtype != y.dtype or not np.array_equal(x, y):
                return False
    return np.array_equal(a.logits, b.logits) and a.logits.dtype == b.logits.dtype == np.int64


def compare(net: nn.Module, graph: Graph, x: Tensor) -> None:
    """Levels at every layer and timestep, and logits, of the absorbed network against the network: on values, and on
    pixels that become these values. Images with a membrane on a threshold would be excepted; there must be none."""
    with torch.no_grad(), record_levels(net) as expected:
        logits = net(x).numpy()
    channels = graph.input_shape[0]
    mean, std = [0.3 + 0.1 * i for i in range(channels)], [0.2 + 0.05 * i for i in range(channels)]
    column = (-1, 1, 1)
    as_pixels = (x.numpy() * np.array(std).reshape(column) + np.array(mean).reshape(column)) * 255
    for rewritten, values in ((graph, x.numpy()), (fold_gain(on_pixels(graph, mean, std, 255)), as_pixels)):
        result = execute(absorb(rewritten), values)
        assert not result.ties.any()
        for name, level in result.levels.items():
            np.testing.assert_array_equal(level, graph[name].placed(expected[name]), err_msg=name)
        np.testing.assert_allclose(result.logits, logits, rtol=1e-9, atol=1e-12)
    assert set(expected) == {layer.name for layer in graph.layers}
    assert any(level.any() for level in expected.values())
