"""Networks by id. The width is part of the id, because public code calls at least three different nets "ResNet-20".

| id | what |
|---|---|
| `resnet18`, `resnet34` | the ImageNet nets: 7x7/2 stem, max-pool, stages 64/128/256/512 |
| `resnet18w64`, `resnet34w64`, any width | the same stages with a CIFAR stem (3x3, no pool) |
| `resnet20w128`, any of 8, 14, 20, 32, 44, 56 and any width | CIFAR stem, three stages w/2w/4w of (depth - 2) / 6 blocks; `resnet20w128` is the paper's "ResNet-20" |
| `resnet19w128` | stem and stages 128/256/512 of 3, 3, 2 blocks, one linear layer |
| `resnet19w64fc256` | the other published ResNet-19: stem 64, the same stages, linear 256, neuron, linear |
| `vgg11`, `vgg13`, `vgg16`, or `vgg11w32` and so on | VGG with BatchNorm, global average pool and one linear layer; base width 64 |
| `spikformer4x384`, any depth and any width that 32 divides (below 32, 8) | transformer: Spikformer's |
| `qkformer4x384`, any depth from 3 and any width that 32 divides | transformer: QKFormer's, with token attention in its first two blocks |

Transformers merge residuals in front of neurons. `-sew` and `-membrane` behind the id choose other shortcuts, as in
`spikformer4x384-sew`; `-scores`, last, puts a neuron on the scores Q K^T. `register` gives your own network an id.
"""  # noqa: E501

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar, cast

from torch import nn

from lbq import neuron as neurons
from lbq.errors import YOUR_OWN, ConfigError, nearest
from lbq.models.resnet import BurstNet as BurstNet
from lbq.models.resnet import MakeNeuron, ResNet
from lbq.models.time import fire as fire
from lbq.models.time import fold_time as fold_time
from lbq.models.time import over_time as over_time
from lbq.models.time import unfold_time as unfold_time
from lbq.models.transformer import QKFormer, Spikformer
from lbq.models.vgg import STAGES as VGG_STAGES
from lbq.models.vgg import VGG
from lbq.neuron.checks import check_count
from lbq.system.lazy import submodules as _submodules

Own = TypeVar("Own", bound=Callable[..., BurstNet])
NeuronChoice = str | Mapping[str, Any] | Callable[..., nn.Module]

IDS: tuple[str, ...] = (
    "resnet18",
    "resnet34",
    "resnet18w64",
    "resnet34w64",
    "resnet19w128",
    "resnet19w64fc256",
    "resnet20w128",
    "resnet20w16",
    "resnet8w16",
    "vgg11",
    "vgg13",
    "vgg16",
    "spikformer4x384",
    "spikformer2x64",
    "qkformer4x384",
)
FOUR_STAGES: dict[int, tuple[int, ...]] = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
THREE_STAGE_DEPTHS = (8, 14, 20, 32, 44, 56)
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
    if _built_in(id) is not None:
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
    if id in OWN:
        return partial(OWN[id])
    if (builder := _built_in(id)) is not None:
        return builder
    if (match := re.fullmatch(r"resnet(\d+)", id)) and int(match[1]) in (19, *THREE_STAGE_DEPTHS):
        raise ConfigError(
            f"model: unknown id {id!r}: several networks have this name; give a width too, as in {id}w128"
        )
    if match := re.match(r"(?:spikformer|qkformer)[1-9]\d?x[1-9]\d{0,3}(?!\d)", id):
        raise ConfigError(
            f"model: unknown id {id!r}: behind {match[0]} may stand -sew or -membrane, and then -scores, as in "
            f"{match[0]}-sew-scores"
        )
    raise ConfigError(f"model: unknown id {id!r}{nearest(id, (*IDS, *OWN))}{YOUR_OWN}")


def _built_in(id: str) -> partial[Any] | None:
    if match := re.fullmatch(r"resnet(18|34)(?:w([1-9]\d{0,3}))?", id):
        depth, base = int(match[1]), int(match[2] or 64)
        stem: Literal["cifar", "imagenet"] = "cifar" if match[2] else "imagenet"
        widths = [base * 2**i for i in range(4)]
        return partial(ResNet, blocks=FOUR_STAGES[depth], widths=widths, stem_width=base, stem=stem)
    if id == "resnet19w128":
        return partial(ResNet, blocks=(3, 3, 2), widths=(128, 256, 512), stem_width=128)
    if id == "resnet19w64fc256":
        return partial(ResNet, blocks=(3, 3, 2), widths=(128, 256, 512), stem_width=64, hidden=256)
    if (match := re.fullmatch(r"resnet(\d+)w([1-9]\d{0,3})", id)) and int(match[1]) in THREE_STAGE_DEPTHS:
        count, base = (int(match[1]) - 2) // 6, int(match[2])
        return partial(ResNet, blocks=(count,) * 3, widths=(base, 2 * base, 4 * base), stem_width=base)
    if (match := re.fullmatch(r"vgg(\d+)(?:w([1-9]\d{0,3}))?", id)) and int(match[1]) in VGG_STAGES:
        return partial(VGG, depth=int(match[1]), width=int(match[2] or 64))
    if match := re.fullmatch(r"(spikformer|qkformer)([1-9]\d?)x([1-9]\d{0,3})(?:-(sew|membrane))?(-scores)?", id):
        network = Spikformer if match[1] == "spikformer" else QKFormer
        options = {"shortcut": match[4] or "neuron", "score_neurons": match[5] is not None}
        return partial(network, depth=int(match[2]), width=int(match[3]), **cast(Any, options))
    return None


def neuron_maker(neuron: NeuronChoice, timesteps: int) -> MakeNeuron:
    """A function that makes a neuron for a layer of so many channels, from `create`'s argument `neuron`."""
    if isinstance(neuron, str):
        neuron = {"name": neuron}
    if isinstance(neuron, Mapping):
        options = dict(neuron)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"neuron: give a 'name', one of {', '.join(sorted(neurons.NEURONS))}")
        for option in ("timesteps", "channels"):  # the network knows them
            if option in options:
                raise ConfigError(f"neuron {name!r} has no option {option!r}: the network sets it")
        return lambda channels: neurons.create(name, timesteps=timesteps, channels=channels, **options)
    if isinstance(neuron, nn.Module):
        kind = type(neuron).__name__
        raise ConfigError(f"neuron must be a function that makes one for each layer: pass neuron=lambda: {kind}(...)")
    if not callable(neuron):
        raise ConfigError(f"neuron must be a name, a mapping or a callable, got {type(neuron).__name__}")
    factory = neuron
    try:
        accepts = set(inspect.signature(factory).parameters)
    except ValueError:  # some built-in callables have no signature
        accepts = set()
    if _is_neuron(factory.func if isinstance(factory, partial) else factory):
        accepts.discard("channels")  # which would make a step for each channel

    def make(channels: int) -> nn.Module:
        module = factory(**{k: v for k, v in {"channels": channels, "timesteps": timesteps}.items() if k in accepts})
        if not isinstance(module, nn.Module):
            raise ConfigError(f"neuron: the callable must return a torch.nn.Module, got {type(module).__name__}")
        return module

    return make


def _is_neuron(factory: object) -> bool:
    return isinstance(factory, type) and issubclass(factory, neurons.SpikingNeuron)


_submodules(__name__)
