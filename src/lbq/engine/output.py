"""What a run of an integer network gave. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine.convolution import Counts
from lbq.engine.method import Choice
from lbq.graph.integer import shown_classes
from lbq.graph.levels import Integers


@dataclass(repr=False)
class Output:
    """What a run gave.

    logits: int64 `[B, classes]`, sums over time in the network's own unit; multiply by `scale` for real numbers.
    counts: what each synapse executed: accumulations by planes, or products where it ran densely. `total` adds them up.
    choices: for each synapse, how it ran and why.
    levels: for each layer `[T, B, C, H, W]`, where the caller wants a trace.
    timesteps: after how many each input stopped, `[B]`, where inputs may stop early. A unit of its logits is then worth
        `scale` times `whole`, the timesteps of the network, over its own.
    """

    logits: NDArray[np.int64]
    scale: float
    counts: dict[str, Counts]
    choices: dict[str, Choice]
    levels: dict[str, Integers] | None = None
    timesteps: NDArray[np.int64] | None = None
    whole: int = 1

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

    def ranked(self, classes: Sequence[str], number: int = 0) -> list[dict[str, Any]]:
        """Classes of an input, the likeliest first, with their share of a softmax over the real-valued logits."""
        steps = self.whole if self.timesteps is None else self.timesteps[number]
        logits = self.logits[number] * self.scale * (self.whole / steps)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        names = shown_classes(classes, len(logits))
        order = np.argsort(-self.logits[number], kind="stable")
        return [
            {"class": names[i], "index": int(i), "share": float(shares[i]), "logit": int(self.logits[number, i])}
            for i in order
        ]
