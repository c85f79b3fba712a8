"""Products of levels with levels: attention, (Q K^T) V in each head, or in two with a neuron on Q K^T, and gates. NumPy only.

Two methods give the same integers. `dense` multiplies in BLAS, in the order that takes fewer products: (Q K^T) V or
Q (K^T V). It is exact: float32 while every sum stays below 2^24, float64 below 2^53. `bitplane` works on words of 64 channels,
one for each bit plane: q k = sum over i, j of 2^(i + j) [bit i of q and bit j of k], so an AND and a popcount add up to 64
products of two bits. The planes of V then choose which scores are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def is_linear(synapse: Synapse) -> bool:
    """Whether Q (K^T V) takes fewer products than (Q K^T) V: where a head has fewer channels than there are tokens."""
    return len(synapse.sources) == 3 and synapse.per_head < synapse.tokens


def dense_products(synapse: Synapse) -> int:
    """Of one timestep of one image, in the order that is_linear says."""
    return synapse.macs * synapse.per_head // synapse.tokens if is_linear(synapse) else synapse.macs


def multiply(
    synapse: Synapse, operands: Sequence[Integers], largest: int, planes: bool
) -> tuple[NDArray[np.int32], Counts]:
    """The product of a synapse's operands `[N, H, W, C]`, as `attend` gives it."""
    if len(operands) == 3:
        q, k, v = operands
        return attend(synapse, q, k, v, largest, planes)
    one, other = operands
    right = _matrices(other, synapse.heads)
    # rows and columns, of which both sum over the last axis: channels of Q and K, or keys of scores and V
    left, right = (
        (_matrices(one, synapse.heads), right) if synapse.keys else (one.transpose(0, 3, 1, 2), right.swapaxes(2, 3))
    )
    if planes:
        result, counts = _pairs(left, right)
    else:
        kind: Any = np.float32 if largest < FLOAT32_BOUND else np.float64
        result = left.astype(kind) @ right.astype(kind).swapaxes(2, 3)
        counts = Counts(products=len(one) * dense_products(synapse))
    channels, height, width = synapse.out_shape
    last = result.transpose(0, 2, 3, 1) if synapse.keys else result.swapaxes(1, 2)
    return np.ascontiguousarray(last).astype(np.int32).reshape(-1, height, width, channels), counts


def attend(
    synapse: Synapse, q: Integers, k: Integers, v: Integers, largest: int, planes: bool
) -> tuple[NDArray[np.int32], Counts]:
    """(Q K^T) V of levels `[N, H, W, C]`, int32, and what was done. largest: the largest sum. planes: by bit planes."""
    matrices = [_matrices(x, synapse.heads) for x in (q, k, v)]
    if planes:
        result, counts = _by_planes(*matrices)
    else:
        kind: Any = np.float32 if largest < FLOAT32_BOUND else np.float64
        queries, keys, values = (x.astype(kind) for x in matrices)
        keys = keys.swapaxes(-2, -1)
        result = queries @ (keys @ values) if is_linear(synapse) else (queries @ keys) @ values
        counts = Counts(products=len(q) * dense_products(synapse))
    return np.ascontiguousarray(result.swapaxes(1, 2)).astype(np.int32).reshape(q.shape), counts


def _matrices(levels: Integers, heads: int) -> Integers:
    """`[N, heads, tokens, channels of a head]`."""
    return levels.reshape(len(levels), -1, heads, levels.shape[-1] // heads).swapaxes(1, 2)


def _pairs(left: Integers, right: Integers) -> tuple[NDArray[np.int64], Counts]:
    """left @ right^T of levels `[N, heads, rows, summed]` and `[N, heads, columns, summed]`, by bit planes."""
    out, counts = np.zeros((*left.shape[:3], right.shape[2]), np.int64), Counts()
    for some, result in enumerate(out):
        columns = list(_words(right[some]))
        length = max(SCORES_AT_A_TIME // (right[some, :, :, 0].size * -(-right.shape[3] // WORD_BITS)), 1)
        for weight, words in _words(left[some]):
            for start in range(0, left.shape[2], length):
                block = slice(start, start + length)
                _add_scores(result[:, block], weight, words[:, block, None], columns, counts)
    counts.formations = int(sum(popcount(x).sum(dtype=np.int64) for x in (left, right)))
    counts.neurons_active = int(sum(np.count_nonzero(x) for x in (left, right)))
    return out, counts


def _by_planes(q: Integers, k: Integers, v: Integers) -> tuple[NDArray[np.int64], Counts]:
    out, counts = np.zeros(v.shape, np.int64), Counts()
    for some in range(len(q)):
        rows, columns = list(_words(q[some])), list(_words(k[some]))
        values = [(weight, plane.astype(np.float64)) for weight, plane in _signed_planes(v[some])]
        read = np.zeros(k.shape[1:3], np.int64)  # of each token of K, how many scores are not zero
        # an image's scores may be many: a few queries at a time
        length = max(SCORES_AT_A_TIME // (read.size * -(-k.shape[3] // WORD_BITS)), 1)
        for start in range(0, q.shape[2], length):
            block = slice(start, start + length)
            scores = np.zeros((*q[some, :, block].shape[:2], k.shape[2]), np.int64)
            for weight, words in rows:
                _add_scores(scores, weight, words[:, block, None], columns, counts)
            read += np.count_nonzero(scores, axis=1)
            real = scores.astype(np.float64)
            for weight, plane in values:
                out[some, :, block] += weight * (real @ plane).astype(np.int64)  # below 2^31: exact
        # each set bit of V adds the scores of its token that are not zero
        added = int((read * popcount(v[some]).sum(-1, dtype=np.int64)).sum())
        counts.accumulations += added
        counts.additions += added
    counts.formations = int(sum(popcount(x).sum(dtype=np.int64) for x in (q, k, v)))
    counts.neurons_active = int(sum(np.count_nonzero(x) for x in (q, k, v)))
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
    added = int(bits.sum())
    return Counts(accumulations=added, neurons_active=int(np.count_nonzero(bits)), additions=added)
