"""How a trained network uses its levels: steps, activity, level distributions, entropy, membranes. NumPy only.

docs/analysis.md defines every quantity. An `Analysis` is plain numbers: it is written as JSON and CSV and read back by
reports, long after the weights have gone.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.errors import LbqError

FORMAT, VERSION = "lbq analysis", 1
GOLDEN = "golden inputs"  # in place of a dataset's name
NO_TEST_SET = f"{GOLDEN} are no test set: give one with --data"


@dataclass
class LevelHistogram:
    """How often each magnitude 0..n_max was emitted by one layer: `counts` [n_max + 1]."""

    counts: NDArray[np.int64]

    @property
    def active_ratio(self) -> float:
        """Share of neuron-steps with a non-zero level."""
        return float(self.counts[1:].sum() / self.counts.sum())

    @property
    def mean_level(self) -> float:
        """Mean magnitude over all neuron-steps, silent ones included."""
        return float(self.counts @ np.arange(len(self.counts)) / self.counts.sum())

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
        return float(-(p * np.log(p)).sum() / np.log(n_max)) + 0.0 if n_max > 1 else 0.0


def coefficient_of_variation(steps: NDArray[np.floating]) -> float:
    """Standard deviation over mean of the layer-wise steps."""
    return float(np.std(steps) / np.mean(steps))


@dataclass
class Membrane:
    """Histogram of r = U / step before the reset, by timestep: `counts` [T, bins].

    Bins are `WIDTH` wide from `LOW` on, up to n_max + `ABOVE`; the first and the last also hold what lies beyond.
    thresholds: where the levels 1..n_max begin, in the same unit.
    """

    counts: NDArray[np.int64]
    thresholds: tuple[float, ...]

    LOW, ABOVE, WIDTH = -4.0, 4.0, 0.125

    @classmethod
    def empty(cls, timesteps: int, thresholds: Sequence[float]) -> Membrane:
        bins = round((math.ceil(max(thresholds)) + cls.ABOVE - cls.LOW) / cls.WIDTH)
        return cls(np.zeros((timesteps, bins), np.int64), tuple(thresholds))

    def add(self, timestep: int, r: NDArray[np.floating]) -> None:
        bins = self.counts.shape[1]
        place = (r.ravel() - self.LOW) / self.WIDTH
        index = np.clip(place, 0, bins - 1, out=place).astype(np.int64)  # not negative any more: cutting off is floor
        self.counts[timestep] += np.bincount(index, minlength=bins)

    @property
    def edges(self) -> NDArray[np.float64]:
        return self.LOW + self.WIDTH * np.arange(self.counts.shape[1] + 1)


@dataclass(frozen=True)
class Trace:
    """One neuron on one image, in the network's own units: what came in, the membrane before and after the reset, levels."""

    layer: str
    unit: int
    step: float
    n_max: int
    leak: float
    alpha: float
    current: tuple[float, ...]
    before: tuple[float, ...]
    levels: tuple[int, ...]
    after: tuple[float, ...]


def typical_units(levels: NDArray[np.integer]) -> list[int]:
    """Four neurons of `levels` [T, units], from a typical active one to the busiest: by quantiles of their summed levels."""
    total = np.abs(levels).sum(0)
    active = np.flatnonzero(total)
    order = active[np.argsort(total[active], kind="stable")]
    quantiles = (0.3, 0.8, 0.97, 1.0) if len(order) else ()
    return list(dict.fromkeys(int(order[round(q * (len(order) - 1))]) for q in quantiles))


@dataclass(frozen=True)
class LayerAnalysis:
    """One layer. step: mean over channels where they have their own (`step_range` then gives both ends); None where there is
    none. tail: of the surrogate, None where it has none. levels: counts `[T, n_max + 1]`."""

    name: str
    shape: tuple[int, ...]
    n_max: int
    step: float | None
    step_range: tuple[float, float] | None
    tail: float | None
    levels: NDArray[np.int64]
    membrane: Membrane | None = None

    @property
    def histogram(self) -> LevelHistogram:
        return LevelHistogram(self.levels.sum(0))

    def at(self, timestep: int) -> LevelHistogram:
        return LevelHistogram(self.levels[timestep])


@dataclass(frozen=True)
class Analysis:
    """A network on `images` test images; complete: these were all. accuracy is None where labels are not known.

    facts: what was analysed (model, hashes ...). accounts: the counts of the same pass, by mode.
    """

    images: int
    complete: bool
    accuracy: float | None
    facts: dict[str, Any]
    layers: tuple[LayerAnalysis, ...]
    accounts: dict[str, Any] = field(default_factory=dict)
    traces: tuple[Trace, ...] = ()

    @property
    def deployed(self) -> bool:
        """Whether it is of an integer network."""
        return self.facts.get("kind") == "artefact"

    @property
    def golden(self) -> bool:
        """Whether it is of the few inputs that a deployed network carries to be checked with, not of a test set."""
        return self.facts.get("data") == GOLDEN

    @property
    def steps(self) -> dict[str, float]:
        return {layer.name: layer.step for layer in self.layers if layer.step is not None}

    @property
    def variation(self) -> float | None:
        """Coefficient of variation of the steps over layers."""
        return coefficient_of_variation(np.array(list(self.steps.values()))) if self.steps else None

    def mean(self, quantity: str) -> float:
        """Mean over layers, as the paper reports it: of `active_ratio`, `normalised_entropy` or `mean_level`."""
        return float(np.mean([getattr(layer.histogram, quantity) for layer in self.layers]))

    @property
    def first_level(self) -> float:
        """Mean over layers of P(k = 1 | k > 0)."""
        return float(np.mean([layer.histogram.conditional[0] for layer in self.layers]))

    def summary(self) -> dict[str, Any]:
        """Means over layers and the range of the steps; empty for a network without spikes."""
        if not self.layers:
            return {}
        steps = self.steps.values()
        return {
            "active_ratio": self.mean("active_ratio"),
            "normalised_entropy": self.mean("normalised_entropy"),
            "first_level": self.first_level,
            "step_min": min(steps) if steps else None,
            "step_max": max(steps) if steps else None,
            "step_variation": self.variation,
        }

    # As files
    # ---------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "images": self.images,
            "complete": self.complete,
            "accuracy": self.accuracy,
            "facts": self.facts,
            "summary": self.summary(),
            "layers": [_layer_dict(layer) for layer in self.layers],
            "accounts": self.accounts,
            "traces": [asdict(trace) for trace in self.traces],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str = "analysis") -> Analysis:
        if value.get("format") != FORMAT or value.get("version") != VERSION:
            raise LbqError(
                f"{where} is not an analysis of version {VERSION} (it says {value.get('format')!r}, "
                f"{value.get('version')!r}): make it again with lbq analyze"
            )
        try:
            return cls(
                images=int(value["images"]),
                complete=bool(value["complete"]),
                accuracy=None if value["accuracy"] is None else float(value["accuracy"]),
                facts=dict(value["facts"]),
                layers=tuple(_layer_from(entry) for entry in value["layers"]),
                accounts=dict(value["accounts"]),
                traces=tuple(_trace_from(entry) for entry in value["traces"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LbqError(f"{where} is damaged ({type(error).__name__}: {error}): make it again") from error

    def table(self) -> list[dict[str, Any]]:
        """One row for each layer and timestep (`all`: over time)."""
        rows = []
        for layer in self.layers:
            steps = range(len(layer.levels))
            for when, histogram in [("all", layer.histogram), *((t, layer.at(t)) for t in steps)]:
                rows.append(
                    {
                        "layer": layer.name,
                        "timestep": when,
                        "step": layer.step,
                        "tail": layer.tail,
                        "n_max": layer.n_max,
                        "active_ratio": histogram.active_ratio,
                        "mean_level": histogram.mean_level,
                        "normalised_entropy": histogram.normalised_entropy,
                        **{f"p{k + 1}": p for k, p in enumerate(histogram.conditional)},
                    }
                )
        return rows

    def csv(self) -> str:
        rows, out = self.table(), io.StringIO()
        columns = max((list(row) for row in rows), key=len)
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()


def load(path: Path | str) -> Analysis:
    """An analysis from its JSON file."""
    try:
        value = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise LbqError(f"{path} cannot be read as JSON: {' '.join(str(error).split())[:100]}") from error
    return Analysis.from_dict(value if isinstance(value, dict) else {}, str(path))


def _layer_dict(layer: LayerAnalysis) -> dict[str, Any]:
    histogram, membrane = layer.histogram, layer.membrane
    return {
        "name": layer.name,
        "shape": list(layer.shape),
        "n_max": layer.n_max,
        "step": layer.step,
        "step_range": None if layer.step_range is None else list(layer.step_range),
        "tail": layer.tail,
        "active_ratio": histogram.active_ratio,
        "normalised_entropy": histogram.normalised_entropy,
        "conditional": histogram.conditional.round(6).tolist(),
        "levels": layer.levels.tolist(),
        "membrane": None
        if membrane is None
        else {"counts": membrane.counts.tolist(), "thresholds": list(membrane.thresholds)},
    }


def _layer_from(entry: Mapping[str, Any]) -> LayerAnalysis:
    membrane = entry["membrane"]
    levels = np.array(entry["levels"], np.int64)
    if levels.ndim != 2 or levels.shape[1] != entry["n_max"] + 1:
        raise ValueError(f"levels of layer {entry['name']}")
    return LayerAnalysis(
        name=str(entry["name"]),
        shape=tuple(entry["shape"]),
        n_max=int(entry["n_max"]),
        step=entry["step"],
        step_range=None if entry["step_range"] is None else tuple(entry["step_range"]),
        tail=entry["tail"],
        levels=levels,
        membrane=None
        if membrane is None
        else Membrane(np.array(membrane["counts"], np.int64), tuple(membrane["thresholds"])),
    )


def _trace_from(entry: Mapping[str, Any]) -> Trace:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    return Trace(**fields)
