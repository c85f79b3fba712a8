"""Counts of products of levels with levels, attention and gates, from the levels of their operands. NumPy only.

A product of two levels takes unary q k additions, bit-sparse popcount(q) popcount(k), and one event where neither is zero.
Attention is counted in the order (Q K^T) V, or in the other, Q (K^T V). Its second product adds integers, the first one's
results, once for each unit, set bit or event of the level that chooses them, and only those that are not zero. With a neuron
on Q K^T both are products of levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.graph import Graph, Synapse
from lbq.graph.integer import IntegerNetwork
from lbq.graph.levels import Integers, gated, popcount

ORDER = "(Q K^T) V"  # that accounts count
SCORES_AT_A_TIME = 2**22


def signed_digits(value: Integers) -> NDArray[np.int64]:
    """Terms of a magnitude in its shortest signed binary form (non-adjacent form): 7 = 8 - 1 has two.

    3x has a digit wherever x and 3x differ (H. Prodinger, 2000), two places up.
    """
    magnitude = np.abs(value.astype(np.int64))
    return np.bitwise_count(magnitude ^ (3 * magnitude)).astype(np.int64)


FIELDS = ("unary", "bit_sparse", "lowest", "events", "signed_digits")  # lowest: bits of plane 0, which need no shift


def worths(magnitudes: Integers) -> NDArray[np.int64]:
    """`[fields, ...]`: what each of these magnitudes adds to each of `FIELDS`."""
    bits = popcount(magnitudes).astype(np.int64)
    lowest = magnitudes.astype(np.int64) & 1
    return np.stack([magnitudes.astype(np.int64), bits, lowest, (magnitudes != 0) + 0, signed_digits(magnitudes)])


def as_counts(totals: NDArray[Any]) -> dict[str, Any]:
    """`FIELDS`, whether of magnitudes or summed up, as the fields of a `Count`."""
    unary, bits, lowest, events, digits = totals
    return {"unary": unary, "bit_sparse": bits, "shifts": bits - lowest, "events": events, "signed_digits": digits}


def gate_totals(factor: Integers, levels: Integers) -> NDArray[np.int64]:
    """Of a gate whose operands have these levels, `[T, B, C, H, W]`."""
    pairs = (gated(a, k).sum() for a, k in zip(worths(np.abs(factor)), worths(np.abs(levels)), strict=True))
    return np.array([*pairs])


def attention_totals(q: Integers, k: Integers, v: Integers, heads: int, linear: bool = False) -> NDArray[np.int64]:
    """Of both products, for levels `[T, B, C, H, W]`. linear: in the order Q (K^T V)."""
    steps, batch, channels = q.shape[:3]
    shape = steps * batch, heads, channels // heads, -1
    totals = np.zeros(len(FIELDS), np.int64)
    for some in zip(*(x.reshape(shape) for x in (q, k, v)), strict=True):
        rows, columns, last = (x.astype(np.int64) for x in some)  # [heads, d, tokens]
        if linear:  # the tokens are summed over first, then a head's channels
            rows, columns, last = (x.swapaxes(1, 2) for x in (last, columns, rows))
        pairs = worths(np.abs(rows)).sum(3) * worths(np.abs(columns)).sum(3)
        chosen = worths(np.abs(last)).sum(2) * _read(rows, columns)  # [fields, heads, tokens of K or channels]
        totals += pairs.sum((1, 2)) + chosen.sum((1, 2))
    return totals


def product_totals(synapse: Synapse, operands: Sequence[Integers]) -> NDArray[np.int64]:
    """Of a synapse of kind `matmul`. With a neuron on the scores both of its products are over pairs of levels."""
    if len(operands) == 3:
        q, k, v = operands
        return attention_totals(q, k, v, synapse.heads)
    totals, summed = np.zeros(len(FIELDS), np.int64), 3 if synapse.keys else 2  # axis of what pairs do not share
    shapes = [(-1, synapse.heads, x.shape[2] // synapse.heads, x.shape[3] * x.shape[4]) for x in operands]
    if not synapse.keys:
        shapes[0] = -1, *synapse.in_shape
    for some in zip(*(x.reshape(shape) for x, shape in zip(operands, shapes, strict=True)), strict=True):
        one, other = (worths(np.abs(x.astype(np.int64))).sum(summed) for x in some)
        totals += (one * other).sum((1, 2))
    return totals


def _read(rows: Integers, columns: Integers) -> NDArray[np.int64]:
    """`[heads, columns]`: how many results of rows^T @ columns are not zero. A few rows at a time."""
    heads, _, count = columns.shape
    some = max(SCORES_AT_A_TIME // (heads * count), 1)
    real, nonzero = columns.astype(np.float64), np.zeros((heads, count), np.int64)
    for start in range(0, rows.shape[2], some):
        part = rows[:, :, start : start + some].astype(np.float64)  # sums below 2^31: exact
        nonzero += np.count_nonzero(part.swapaxes(1, 2) @ real, axis=1)
    return nonzero


class ProductTallies:
    """Totals of every gate and attention of a network. `add` levels layer by layer, in the order in which they run."""

    def __init__(self, graph: Graph | IntegerNetwork) -> None:
        self.graph = graph
        self.attentions = tuple(s for s in graph.synapses if s.kind == "matmul")
        self.names = (*graph.gate_names, *(s.name for s in self.attentions))
        self.totals = {name: np.zeros(len(FIELDS), np.int64) for name in self.names}
        self._due: dict[str, list[Synapse]] = {}
        self._last: dict[str, int] = {}  # for each operand, the layer behind which it is not needed any more
        for s in self.attentions:
            place = max(graph.place(source) for source in s.sources)
            self._due.setdefault(graph.layers[place].name, []).append(s)
            self._last |= {source: max(place, self._last.get(source, 0)) for source in s.sources}
        for gate in graph.gates:
            place = graph.place(gate.name)
            self._last |= {name: max(place, self._last.get(name, 0)) for name in gate.operands}
        self._held: dict[str, Integers] = {}

    @property
    def operands(self) -> frozenset[str]:
        return frozenset(self._last)

    def add(self, layer: str, levels: Integers) -> Iterator[tuple[str, Integers]]:
        """Levels `[T, B, C, H, W]` of a layer; gives the gates that are complete with it, and their levels."""
        if layer not in self._last:
            return
        self._held[layer] = levels.copy()  # the memory may be used again
        for gate in self.graph.gates_behind(layer):
            factor, source = (self._held[operand] for operand in gate.operands)
            self.totals[gate.name] += gate_totals(factor, source)
            self._held[gate.name] = gated(factor.astype(np.int32), source.astype(np.int32))
            yield gate.name, self._held[gate.name]
        for s in self._due.get(layer, ()):
            self.totals[s.name] += product_totals(s, [self._held[source] for source in s.sources])
        place = self.graph.place(layer)
        self._held = {name: held for name, held in self._held.items() if self._last.get(name, -1) > place}

    def merge(self, other: ProductTallies) -> None:
        for name, totals in other.totals.items():
            self.totals[name] += totals

    def exact(self, images: int) -> dict[str, dict[str, Any]]:
        """The fields of a `Count` for each gate and attention, of one image."""
        return {name: as_counts(totals / images) for name, totals in self.totals.items()}

    def rate(self, means: dict[str, NDArray[np.float64]]) -> dict[str, dict[str, Any]]:
        """The same from the operands' mean worths alone, as if they were independent and no result were zero."""
        steps, counts = self.graph.timesteps, {}
        for gate in self.graph.gates:
            size = steps * math.prod(gate.shape)
            counts[gate.name] = as_counts(size * means[gate.factor] * means[gate.source])
        for s in self.attentions:
            one, other, *values = (means[source] for source in s.sources)
            counts[s.name] = as_counts(steps * s.macs / (1 + len(values)) * sum(values, one * other))
        return counts

    def macs(self) -> dict[str, float]:
        """Of all timesteps, as a dense pass has them."""
        sizes = {gate.name: math.prod(gate.shape) for gate in self.graph.gates} | {
            s.name: s.macs for s in self.attentions
        }
        return {name: float(self.graph.timesteps * size) for name, size in sizes.items()}
