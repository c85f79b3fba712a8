"""Record integer levels while a network runs: `with record_levels(net) as levels: net(x)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from lbq.neuron.base import SpikingNeuron, neurons_of
from lbq.neuron.hooks import attached, before_each


@contextmanager
def record_levels(net: nn.Module) -> Iterator[dict[str, NDArray[np.integer[Any]]]]:
    """A dictionary that every forward pass fills with `layer name -> levels [T, B, ...]`, in execution order.

    A neuron that is called again keeps its last call. Calls of `forward_step` are not recorded.
    """
    levels: dict[str, NDArray[np.integer[Any]]] = {}

    def keep(name: str, neuron: SpikingNeuron, x: Tensor) -> None:
        levels[name] = neuron.levels(x).cpu().numpy()

    with attached(before_each(neurons_of(net), keep)):
        yield levels
