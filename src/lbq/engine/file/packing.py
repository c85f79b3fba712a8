"""Weights of 4 bits in files: two to a byte."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.graph import INPUT
from lbq.graph.integer import IntegerNetwork

LARGEST = 7  # of 4 bits, symmetric around zero


def packed_synapses(network: IntegerNetwork) -> frozenset[str]:
    """The convolutions whose weights a file packs: those between neurons, if all of them fit 4 bits."""
    convs = [s for layer in network.layers for s in layer.convs if s.source != INPUT]
    fits = all(s.weight.dtype == np.int8 and np.abs(s.weight).max(initial=0) <= LARGEST for s in convs)
    return frozenset(s.name for s in convs) if fits else frozenset()


def pack(weight: NDArray[np.int8]) -> NDArray[np.uint8]:
    """One byte for two weights in their order, the first in the lower half, as two's complement; an odd one beside a zero."""
    halves = np.append(weight.ravel(), np.zeros(weight.size % 2, np.int8)).view(np.uint8) & 15
    packed: NDArray[np.uint8] = (halves[::2] | halves[1::2] << 4).astype(np.uint8)
    return packed


def unpack(packed: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.int8]:
    """The inverse. A last half that stands for no weight is dropped."""
    halves = np.stack([packed & 15, packed >> 4], 1).reshape(-1)[: int(np.prod(shape))]
    signed: NDArray[Any] = ((halves ^ 8).astype(np.int16) - 8).astype(np.int8)
    return signed.reshape(shape)
