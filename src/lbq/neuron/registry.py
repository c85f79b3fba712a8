"""Names for neurons: what a configuration or `lbq.models.create(neuron=...)` may say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from lbq.errors import YOUR_OWN, ConfigError, check_new, nearest
from lbq.neuron.base import neurons_of
from lbq.neuron.baselines import ILIF, LIF, LMHT, MLF, QuantReLU, ReLU, Ternary
from lbq.neuron.burst import BurstNeuron, LadderNeuron
from lbq.neuron.checks import check_count, check_flag

Own = TypeVar("Own", bound=Callable[..., nn.Module])

# V1, V2 and V3 are the paper's ablation: {fixed, learned} step x {box, ReLSG-ET} surrogate; LBQ is the fourth corner.
NEURONS: dict[str, Callable[..., nn.Module]] = {
    "lbq": BurstNeuron,
    "burst_fixed": partial(BurstNeuron, learn_step=False),
    "v1": partial(BurstNeuron, learn_step=False, surrogate="box"),
    "v2": partial(BurstNeuron, learn_step=False),
    "v3": partial(BurstNeuron, surrogate="box"),
    "ladder": LadderNeuron,
    "lif": LIF,
    "if": partial(LIF, membrane="if"),
    "plif": partial(LIF, membrane="plif"),
    "ternary": Ternary,
    "ternary_learned": partial(Ternary, learn_step=True),
    "ternary_half": partial(Ternary, rule="half", beta=0.25, surrogate="clip"),
    "ilif": ILIF,
    "lmht": LMHT,
    "mlf": MLF,
    "relu": ReLU,
    "qann": QuantReLU,
}
BUILT_IN = frozenset(NEURONS)
FORMER_OPTIONS = {"lmht": {"levels": "n_max"}, "mlf": {"levels": "n_max"}}  # in run folders and records of that time


def register(name: str) -> Callable[[Own], Own]:
    """`@register("mine")` makes a neuron of your own known by this name, to configurations too.

    To decorate: a module class, or a function that returns a module. Its arguments are the options that a configuration may
    give (any at all, where it takes `**options`); `timesteps` is filled in where it asks for it, `channels` where it does and
    `per_channel=true` is set. A name that was registered before gets the new neuron.
    """
    check_new(name, BUILT_IN, "neuron")

    def add(neuron: Own) -> Own:
        if not callable(neuron):
            raise ConfigError(f"register: {name!r} must be a class or a function, got {type(neuron).__name__}")
        NEURONS[name] = neuron
        return neuron

    return add


def options_of(name: str) -> set[str]:
    """The options that a configuration may give to the neuron `name`."""
    arguments = inspect.signature(NEURONS[name]).parameters
    names = {n for n, a in arguments.items() if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)}
    return names - {"timesteps", "channels"} | ({"per_channel"} if "channels" in names else set())


def create(name: str, *, timesteps: int | None = None, channels: int | None = None, **options: Any) -> nn.Module:
    """A neuron by name. `timesteps` and `channels` describe where it stands and reach the neurons that need them;
    `per_channel=True` asks for one step per channel."""
    if name not in NEURONS:
        hint = "; an ANN's is 'relu'" if name.lower() == "ann" else nearest(name, NEURONS)  # 'qann' is quantised
        raise ConfigError(f"unknown neuron {name!r}{hint}{YOUR_OWN}")
    options = {FORMER_OPTIONS.get(name, {}).get(option, option): value for option, value in options.items()}
    known, factory = options_of(name), NEURONS[name]
    accepts = inspect.signature(factory).parameters
    any_option = any(argument.kind is argument.VAR_KEYWORD for argument in accepts.values())
    for option in options:
        if option not in known and not any_option:
            raise ConfigError(f"neuron {name!r} has no option {option!r}{nearest(option, known)}")
    if "timesteps" in accepts:
        options["timesteps"] = timesteps
    try:
        if check_flag("per_channel", options.pop("per_channel", False)):
            options["channels"] = check_count("channels", channels)
        neuron = factory(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"neuron {name!r}: {error}") from error
    if not isinstance(neuron, nn.Module):  # one of a user's own
        raise ConfigError(f"neuron {name!r} must be a torch.nn.Module, got {type(neuron).__name__}")
    return neuron


def share_tail(net: nn.Module) -> None:
    """Give all neurons of `net` one tail coefficient: the paper writes lambda without a layer index."""
    neurons = [n for n in neurons_of(net).values() if n.surrogate.tail == "learned"]
    if not neurons:
        raise ConfigError("share_tail: no neuron of this network learns a tail")
    for neuron in neurons[1:]:
        neuron.eta = neurons[0].eta
