"""How a trained network uses its levels, from recorded levels. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class LevelHistogram:
    """How often each magnitude 0..n_max was emitted by one layer: `counts` [n_max + 1]."""

    counts: NDArray[np.int64]

    @property
    def active_ratio(self) -> float:
        """Share of neuron-steps with a non-zero level."""
        return float(self.counts[1:].sum() / self.counts.sum())

    @property
    def conditional(self) -> NDArray[np.float64]:
        """P(k | k > 0) for k = 1..n_max; all zero where the layer never fired."""
        fired = self.counts[1:]
        return fired / max(int(fired.sum()), 1)

    @property
    def normalised_entropy(self) -> float:
        """Entropy of P(k | k > 0) divided by log(n_max): 0 for one level only, 1 for all levels equally."""
        p = self.conditional[self.conditional > 0]
        n_max = len(self.counts) - 1
        return float(-(p * np.log(p)).sum() / np.log(n_max)) if n_max > 1 else 0.0


class LevelCounter:
    """Level histograms over batches, in constant memory. `n_max` gives each layer's highest level."""

    def __init__(self, n_max: Mapping[str, int]) -> None:
        self.layers = {name: LevelHistogram(np.zeros(n + 1, np.int64)) for name, n in n_max.items()}

    def add(self, levels: Mapping[str, NDArray[np.integer]]) -> None:
        for name, histogram in self.layers.items():
            magnitude = np.abs(levels[name].astype(np.int64)).ravel()
            histogram.counts += np.bincount(magnitude, minlength=len(histogram.counts))


def coefficient_of_variation(steps: NDArray[np.floating]) -> float:
    """Standard deviation over mean of the layer-wise steps."""
    return float(np.std(steps) / np.mean(steps))
