"""What a run of an integer network gave. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lbq.engine.convolution import Counts
from lbq.engine.method import Choice
from lbq.graph.levels import Integers


@dataclass(repr=False)
class Output:
    """What a run gave.

    logits: int64 `[B, classes]`, sums over time in the network's own unit; multiply by `scale` for real numbers.
    counts: what each synapse executed: accumulations by planes, or products where it ran densely. `total` adds them up.
    choices: for each synapse, how it ran and why.
    levels: for each layer `[T, B, C, H, W]`, where the caller wants a trace.
    """

    logits: NDArray[np.int64]
    scale: float
    counts: dict[str, Counts]
    choices: dict[str, Choice]
    levels: dict[str, Integers] | None = None

    def __repr__(self) -> str:
        levels = "no levels" if self.levels is None else f"levels of {len(self.levels)} layers"
        return (
            f"Output(logits {list(self.logits.shape)}, scale {self.scale:.4g}, {len(self.counts)} synapses, {levels})"
        )

    @property
    def predictions(self) -> NDArray[np.int64]:
        return self.logits.argmax(1)

    @property
    def total(self) -> Counts:
        return sum(self.counts.values(), Counts())
