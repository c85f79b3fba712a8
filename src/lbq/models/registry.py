"""Networks by id: those of lbq, and those that users register."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from lbq import neuron as neurons
from lbq.errors import ConfigError
from lbq.models.ids import built_in, unknown
from lbq.models.neuron_choice import NeuronChoice, neuron_maker
from lbq.models.resnet import BurstNet, ResNet
from lbq.neuron.checks import check_count

Own = TypeVar("Own", bound=Callable[..., BurstNet])

OWN: dict[str, Callable[..., BurstNet]] = {}  # registered by users


def create(
    id: str,
    num_classes: int = 10,
    timesteps: int = 2,
    neuron: NeuronChoice = "lbq",
    *,
    in_channels: int = 3,
    stem_stride: int = 1,
    dropout: float = 0.0,
    share_tail: bool = False,
) -> BurstNet:
    """Build a network.

    Args:
        id: a name such as "resnet20w128" (docs/reference/networks.md lists them), or a registered one.
        timesteps: how often a static image is shown; event frames `[T, B, C, H, W]` bring their own T.
        neuron: a name in `lbq.neuron.NEURONS`; a mapping with `name` and that neuron's options, such as
            `{"name": "lbq", "n_max": 10}`; or a callable that returns a fresh module. The callable receives `channels`
            and `timesteps` if it has arguments of these names; a neuron's class gets no `channels`, so that it has one
            step for a layer, as by its name.
        in_channels: 2 for event frames.
        stem_stride: 2 halves the resolution in the stem (CIFAR-stem ResNets only).
        dropout: share of features dropped before the classifier while training.
        share_tail: one tail coefficient for the whole network instead of one per layer.
    """
    try:
        num_classes, timesteps = check_count("num_classes", num_classes), check_count("timesteps", timesteps)
        in_channels, stem_stride = check_count("in_channels", in_channels), check_count("stem_stride", stem_stride)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    build = _builder(id)
    make = neuron_maker(neuron, timesteps)
    if stem_stride != 1:
        if build.func is not ResNet or build.keywords.get("stem") == "imagenet":
            raise ConfigError(f"model: stem_stride applies to CIFAR-stem ResNets, not to {id!r}: set it to 1")
        build = partial(build, stem_stride=stem_stride)
    net = build(make, num_classes=num_classes, timesteps=timesteps, in_channels=in_channels)
    if id in OWN:
        _check_own(id, net)
    if dropout:
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ConfigError(f"model: dropout must be in [0, 1), got {dropout!r}")
        net.dropout = nn.Dropout(dropout)
    if share_tail:
        neurons.share_tail(net)
    return net


def register(id: str) -> Callable[[Own], Own]:
    """`@register("mynet")` makes a network of your own known to `create`, and so to configurations, by this id.

    It decorates a class derived from `BurstNet`, or a function that returns one. `create` calls it as `mynet(neuron,
    num_classes=..., timesteps=..., in_channels=...)`; `neuron(channels)` makes a neuron. Registering an id again replaces
    its network.
    """
    if not isinstance(id, str) or not re.fullmatch(r"[A-Za-z][\w.-]*", id, re.ASCII):
        raise ConfigError(f"register: an id is letters, digits, '_', '-' and '.', beginning with a letter, got {id!r}")
    if built_in(id) is not None:
        raise ConfigError(f"register: {id!r} is a network of lbq: choose another id")

    def add(network: Own) -> Own:
        try:
            inspect.signature(network).bind(None, num_classes=10, timesteps=2, in_channels=3)
        except TypeError as error:
            arguments = "(neuron, num_classes=..., timesteps=..., in_channels=...)"
            raise ConfigError(f"register: {id!r} must be callable with {arguments}: {error}") from error
        OWN[id] = network
        return network

    return add


def _check_own(id: str, net: nn.Module) -> None:
    if not isinstance(net, BurstNet):
        raise ConfigError(f"model: {id!r} must be an lbq.models.BurstNet, got {type(net).__name__}")
    if not hasattr(net, "timesteps"):
        raise ConfigError(f"model: {id!r} has no `timesteps`: set self.timesteps = timesteps in its __init__")
    if type(net).forward is not BurstNet.forward:
        return
    if type(net).features is BurstNet.features:
        raise ConfigError(
            f"model: {id!r} has no `features`: write features(x), which returns what `fc` reads, [T, B, F]"
        )
    if not isinstance(getattr(net, "fc", None), nn.Module):
        raise ConfigError(
            f"model: {id!r} has no `fc`: set self.fc = nn.Linear(..., num_classes), or write its `forward`"
        )


def _builder(id: str) -> partial[Any]:
    if not isinstance(id, str):
        raise ConfigError(f"model: id must be a string such as 'resnet20w128', got {id!r}")
    builder = partial(OWN[id]) if id in OWN else built_in(id)
    if builder is None:
        raise unknown(id, OWN)
    return builder
