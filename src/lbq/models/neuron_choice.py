"""Which neurons a network gets: by name, by name and options, or from a callable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from lbq import neuron as neurons
from lbq.errors import ConfigError
from lbq.models.resnet import MakeNeuron

NeuronChoice = str | Mapping[str, Any] | Callable[..., nn.Module]


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
