"""Products of levels with levels: attention, (Q K^T) V in each head, or in two with a neuron on Q K^T, and gates. NumPy only:
products.py does the same by the native library.

Two methods give the same integers. `dense` multiplies in BLAS, in the order that takes fewer products: (Q K^T) V or
Q (K^T V). It is exact: float32 while every sum stays below 2^24, float64 below 2^53. `bitplane` works on words of 64 channels,
one for each bit plane: q k = sum over i, j of 2^(i + j) [bit i of q and bit j of k], so an AND and a popcount add up to 64
products of two bits. The planes of V then choose which scores are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine.convolution import Counts
from lbq.graph import Synapse
from lbq.graph.integer import FLOAT32_BOUND
from lbq.graph.levels import Integers, bit_planes, gated, planes_of, popcount

Words = NDArray[np.uint64]
WORD_BITS = 64
SCORES_AT_A_TIME = 2**18  # an AND of two words for each


def dense_products(synapse: Synapse) -> int:
    """Of one timestep of one image, in the order that takes fewer."""
    return synapse.macs * synapse.per_head // synapse.tokens if synapse.linear else synapse.macs


def multiply(
    synapse: Synapse, operands: Sequence[Integers], largest: int, planes: bool
) -> tuple[NDArray[np.int32], Counts]:
    """The product of a synapse's operands `[N, H, W, C]`, int32, and what was done.

    largest: the largest sum. planes: by bit planes.
    """
    right, *values = (matrices(x, synapse.heads) for x in operands[1:])
    if synapse.keys:
        left = matrices(operands[0], synapse.heads)
    else:
        left, right = operands[0].transpose(0, 3, 1, 2), right.swapaxes(2, 3)
    # rows and columns, of which both sum over the last axis: channels of Q and K, or keys of scores and V
    result: Any
    if planes:
        result, counts = _by_planes(left, right, *values)
    else:
        kind: Any = np.float32 if largest < FLOAT32_BOUND else np.float64
        rows, columns, *others = (x.astype(kind) for x in (left, right.swapaxes(2, 3), *values))
        linear = synapse.linear
        result = rows @ (columns @ others[0]) if linear else reduce(np.matmul, [rows, columns, *others])
        counts = Counts(products=len(left) * dense_products(synapse))
    channels, height, width = synapse.out_shape
    last = result.swapaxes(1, 2) if synapse.values else result.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(last).astype(np.int32).reshape(-1, height, width, channels), counts


def matrices(levels: Integers, heads: int) -> Integers:
    """`[N, heads, tokens, channels of a head]`."""
    return levels.reshape(len(levels), -1, heads, levels.shape[-1] // heads).swapaxes(1, 2)


def _by_planes(left: Integers, right: Integers, v: Integers | None = None) -> tuple[NDArray[np.int64], Counts]:
    """left @ right^T, and that @ v, of levels `[N, heads, rows, summed]` and `[N, heads, columns, summed]`."""
    out = np.zeros((*left.shape[:3], right.shape[2]) if v is None else v.shape, np.int64)
    counts, operands = Counts(), [x for x in (left, right, v) if x is not None]
    for some in range(len(left)):
        rows, columns = list(_words(left[some])), list(_words(right[some]))
        values = [] if v is None else [(weight, plane.astype(np.float64)) for weight, plane in _signed_planes(v[some])]
        read = np.zeros(right.shape[1:3], np.int64)  # of each column, how many scores are not zero
        # an image's scores may be many: a few rows at a time
        length = max(SCORES_AT_A_TIME // (read.size * -(-right.shape[3] // WORD_BITS)), 1)
        for start in range(0, left.shape[2], length):
            block = slice(start, start + length)
            scores = np.zeros((*left[some, :, block].shape[:2], right.shape[2]), np.int64)
            for weight, words in rows:
                _add_scores(scores, weight, words[:, block, None], columns, counts)
            if v is None:
                out[some, :, block] = scores
                continue
            read += np.count_nonzero(scores, axis=1)
            real = scores.astype(np.float64)
            for weight, plane in values:
                out[some, :, block] += weight * (real @ plane).astype(np.int64)  # below 2^31: exact
        if v is not None:  # each set bit of V adds the scores of its token that are not zero
            added = int((read * popcount(v[some]).sum(-1, dtype=np.int64)).sum())
            counts.accumulations += added
            counts.additions += added
    counts.formations = int(sum(popcount(x).sum(dtype=np.int64) for x in operands))
    counts.neurons_active = int(sum(np.count_nonzero(x) for x in operands))
    return out, counts


def _add_scores(
    scores: NDArray[np.int64], weight: int, rows: Words, columns: list[tuple[int, Words]], counts: Counts
) -> None:
    """Of one plane of Q, a few of its rows, with every plane of K."""
    for other, others in columns:
        both = np.bitwise_count(rows & others[:, None])
        bits = both.sum(-1, dtype=np.int64)
        scores += weight * other * bits
        counts.ands += both.size
        counts.popcounts += both.size
        counts.accumulations += int(bits.sum())


def _signed_planes(levels: Integers) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Planes of positive levels, and of negative ones, each with what a bit in it is worth."""
    for sign in (1, -1) if levels.dtype.kind == "i" else (1,):
        part = np.where(np.sign(levels) == sign, levels, 0)
        yield from ((sign << i, plane) for i, plane in enumerate(bit_planes(part, planes_of(part))))


def _words(levels: Integers) -> Iterator[tuple[int, Words]]:
    """The same with the channels, the last axis, packed into words of 64."""
    for weight, plane in _signed_planes(levels):
        padded = np.zeros((*plane.shape[:-1], -(-plane.shape[-1] // WORD_BITS) * WORD_BITS), np.bool_)
        padded[..., : plane.shape[-1]] = plane
        yield weight, np.packbits(padded, axis=-1).view(np.uint64)


def gate_levels(factor: Integers, levels: Integers, signed: bool) -> Integers:
    """A gate's levels `[N, H, W, C]`, 8-bit."""
    product = gated(*(x.transpose(0, 3, 1, 2).astype(np.int16) for x in (factor, levels)))
    return np.ascontiguousarray(product.transpose(0, 2, 3, 1)).astype(np.int8 if signed else np.uint8)


def gate_counts(factor: Integers, levels: Integers, planes: bool) -> Counts:
    """One addition for each pair of set bits, or one product for each level."""
    if not planes:
        return Counts(products=levels.size)
    bits = gated(*(popcount(x).astype(np.int64).transpose(0, 3, 1, 2) for x in (factor, levels)))
    added, formed = int(bits.sum()), sum(int(popcount(x).sum(dtype=np.int64)) for x in (factor, levels))
    return Counts(accumulations=added, formations=formed, neurons_active=int(np.count_nonzero(bits)), additions=added)
