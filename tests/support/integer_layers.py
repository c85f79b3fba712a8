"""Integer layers of one channel, for the tests of the neuron and of its bounds."""

from __future__ import annotations

import numpy as np

from lbq.graph import Synapse
from lbq.graph.integer import IntegerLayer, IntegerNeuron

NEURON = IntegerNeuron(
    5, False, np.array([[100, 200, 300, 400, 500]], np.int32), np.array([100], np.int32), "once", (1, 1), True
)


def layer_of(neuron: IntegerNeuron, fraction: int = 0, bias: int = 0) -> IntegerLayer:
    weight = np.ones((1, 1, 1, 1), np.int8)
    synapse = Synapse("conv", "a", "conv", weight, (1, 1, 1), (1, 1, 1), absorbed=True)
    return IntegerLayer("sn", (synapse,), np.array([bias], np.int32), (1, 1, 1), fraction, neuron, np.ones(1))
