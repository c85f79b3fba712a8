"""Lists of inputs by the pair of levels that they have at two neighbouring timesteps. No torch.

The native method `pairs` adds the weight rows of a list once, for both timesteps. Each list costs time of its own, so only
frequent pairs have one. Every other pair stands in several lists whose levels have no bit in common and add up to it. Then
a row counts as many set bits as before, however it was added. Which lists there are never changes results.

A pair (S1, S2) is written as the number S1 << 3 | S2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine.tape import aligned

LARGEST_LEVEL = 7  # three bits for each timestep: 63 pairs
PAIRS = 64
MOST_COLUMNS = 6  # lists in which one pair may stand: one for each bit
NO_LIST = 255  # of native.h
ROWS_PER_LIST = 12.0  # a list takes as long as so many rows do
UNKNOWN = 99  # lists: a pair cannot be written


@dataclass(frozen=True)
class PairLists:
    """The pairs that have a list, in the order in which they are added up."""

    pairs: tuple[int, ...]

    @cached_property
    def levels(self) -> NDArray[np.uint8]:
        return np.array(self.pairs, np.uint8)

    @cached_property
    def table(self) -> NDArray[np.uint8]:
        """For each pair the numbers of the lists in which it stands, `NO_LIST` behind them: `[64, MOST_COLUMNS]`."""
        table, needed = aligned((PAIRS, MOST_COLUMNS), np.uint8), lists_needed(self.pairs)
        table[...] = NO_LIST
        for pair in range(1, PAIRS):
            rest, column = pair, 0
            while rest and needed[pair] < UNKNOWN:
                parts = (i for i, p in enumerate(self.pairs) if p & rest == p and needed[rest ^ p] == needed[rest] - 1)
                table[pair, column] = number = next(parts)
                rest, column = rest ^ self.pairs[number], column + 1
        return table

    def missing(self, largest: int) -> bool:
        """Whether some pair of levels up to `largest` cannot be written."""
        return bool((self.table[possible_pairs(largest), 0] == NO_LIST).any())

    @cached_property
    def columns(self) -> int:
        """The most lists in which one pair stands."""
        return int((self.table != NO_LIST).sum(1).max())


def possible_pairs(largest: int) -> list[int]:
    """All pairs of levels up to `largest` but (0, 0)."""
    return [s1 << 3 | s2 for s1 in range(largest + 1) for s2 in range(largest + 1) if s1 or s2]


def _with(needed: NDArray[np.int64], pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """`lists_needed` with one list more, for each of these pairs: `[pairs, 64]`."""
    every, p = np.arange(PAIRS), pairs[:, None]
    return np.where(every & p == p, np.minimum(needed, 1 + needed[every ^ (every & p)]), needed)


def lists_needed(pairs: tuple[int, ...]) -> NDArray[np.int64]:
    """For each pair, how many of these lists it must stand in, or `UNKNOWN`."""
    needed = np.full(PAIRS, UNKNOWN)
    needed[0] = 0
    for pair in pairs:
        needed = np.minimum(_with(needed, np.array([pair]))[0], UNKNOWN)
    return needed


def all_lists(largest: int) -> PairLists:
    """A list for every pair."""
    return PairLists(tuple(possible_pairs(largest)))


def rows_by_pair(levels: NDArray[Any], timesteps: int, taps: int) -> NDArray[np.float64]:
    """How many weight rows an output pixel meets of each pair, `[64]`, in levels [T * B, H, W, C]."""
    paired = levels[: len(levels) // timesteps * (timesteps // 2 * 2)]
    paired = paired.reshape(timesteps // 2, 2, -1)
    codes = (paired[:, 0] << 3 | paired[:, 1]).ravel() & (PAIRS - 1)
    pixels = max(codes.size // levels.shape[3], 1)
    return np.bincount(codes, minlength=PAIRS) * (taps / pixels)


def chosen_lists(rows: NDArray[np.float64], largest: int) -> PairLists:
    """The lists for so many rows of each pair: first one for each bit, then those that save more than they cost.

    Cost is counted in rows: those added, and `ROWS_PER_LIST` for each list.
    """
    possible = np.array(possible_pairs(largest))
    bits = [1 << k for k in range(6) if 1 << k % 3 <= largest]
    lists = tuple(reversed(bits))

    def cost(needed: NDArray[np.int64], count: int) -> Any:
        return needed[..., possible] @ rows[possible] + ROWS_PER_LIST * count

    while True:
        needed = lists_needed(lists)
        costs = cost(_with(needed, possible), len(lists) + 1)
        best = int(costs.argmin())
        if costs[best] >= cost(needed, len(lists)):
            break
        lists = (*lists, int(possible[best]))
    while True:
        fewer = [tuple(p for p in lists if p != dropped) for dropped in lists]
        needs = np.array([lists_needed(rest) for rest in fewer])
        costs = np.where(needs[:, possible].max(1) < UNKNOWN, cost(needs, len(lists) - 1), np.inf)
        best = int(costs.argmin())
        if costs[best] > cost(lists_needed(lists), len(lists)):
            return PairLists(tuple(sorted(lists)))
        lists = fewer[best]
