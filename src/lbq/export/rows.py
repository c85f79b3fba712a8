"""Weight rows of the C export: two weights of 8 bits, or four of 4 bits, in each halfword. NumPy only.

`c/model_rows.h` adds them and says how they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lbq.graph import Synapse

LONGEST_LIST = 64  # rows that are added before their sum is read, at most: MODEL_LIST
SHORTEST_LIST = 16  # twice MODEL_SCAN: with less, sums are read too often to be worth it
LARGEST_SUM = 2**15 - 1
LARGEST_OF_FOUR_BITS = 7


@dataclass(frozen=True)
class PackedRows:
    """halfwords: `[kh, kw, inputs of a group, halfwords of all outputs]`. bits: of a weight. longest: how many rows may be
    added before their sum leaves 16 bits."""

    halfwords: NDArray[np.uint16]
    bits: int
    longest: int


def packed_rows(synapse: Synapse, largest: int) -> PackedRows | None:
    """A convolution's rows. None: its weights are wider, or it reads levels so large, or has so few outputs, that packing does
    not pay.

    largest: the highest level that it reads.
    """
    weight, outputs = synapse.weight, len(synapse.weight) // synapse.groups
    if weight.dtype != np.int8:
        return None
    most = int(np.abs(weight.astype(np.int16)).max(initial=1))
    bits = 4 if most <= LARGEST_OF_FOUR_BITS and outputs % 8 == 0 else 8
    longest = min(LONGEST_LIST, LARGEST_SUM // (most * largest))
    if outputs % 4 or longest < SHORTEST_LIST:
        return None
    parts = 16 // bits
    biased = weight.transpose(2, 3, 1, 0).astype(np.uint16) + np.uint16(1 << (bits - 1))
    split = biased.reshape(*biased.shape[:3], synapse.groups, parts, outputs // parts).astype(np.uint32)
    shifts = np.arange(0, 16, bits, dtype=np.uint32)[:, None]
    halfwords = (split << shifts).sum(-2, dtype=np.uint32).astype(np.uint16)
    return PackedRows(halfwords.reshape(*biased.shape[:3], -1), bits, longest)
