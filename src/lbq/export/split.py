"""A convolution of integers that stays exact in float32, because it is a sum of convolutions with fewer bits. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lbq.errors import GraphError
from lbq.graph import Synapse
from lbq.graph.integer import FLOAT32_BOUND
from lbq.graph.levels import row_sums

BYTE_BITS = 8


@dataclass(frozen=True)
class Split:
    """A convolution as a sum of convolutions that are exact in float32.

    weights: 1, or 2 where 16-bit weights are split into bytes. digits: how many a level has, each `bits` wide.
    """

    weights: int
    digits: int
    bits: int

    @property
    def parts(self) -> int:
        return self.weights * self.digits


def split(synapse: Synapse, largest: int, signed: bool) -> Split:
    """The fewest parts none of which can reach 2^24; an error where there are none."""
    planes, weight = largest.bit_length(), synapse.weight
    candidates = []
    heaviest = {1: int(row_sums(weight).max(initial=0))}
    if weight.dtype == np.int16:
        wide = weight.astype(np.int64)
        high = (wide + 128) >> BYTE_BITS  # the low byte, weight - 256 * high, is in -128..127
        heaviest[2] = max(int(row_sums(part).max(initial=0)) for part in (wide - (high << BYTE_BITS), high))
    for weights, heavy in heaviest.items():
        for digits in range(1, planes + 1):
            bits = -(-planes // digits)
            # the highest digit of a negative level is rounded down
            level = largest if digits == 1 else 2**bits - (not signed)
            if heavy * level < FLOAT32_BOUND and largest < FLOAT32_BOUND:
                candidates.append(Split(weights, digits, bits))
                break
    if not candidates:
        raise GraphError(
            f"synapse {synapse.name!r}: its sums reach {heaviest[1] * largest:,}, too many weights for one output to be exact "
            "in float32: use model.lbq itself, or fewer inputs"
        )
    return min(candidates, key=lambda s: s.parts)
