"""How a trained network uses its levels: steps, activity, level distributions, entropy, membranes. NumPy only.

docs/explanation/quantities.md defines every quantity. An `Analysis` is plain numbers: it is written as JSON and CSV and
read back by reports, long after the weights have gone.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.counting.schemas import ANALYSIS
from lbq.errors import LbqError, RunError
from lbq.system import files
from lbq.system.schema import problem

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
        return cls(np.zeros((timesteps, cls.bins(thresholds)), np.int64), tuple(thresholds))

    @classmethod
    def bins(cls, thresholds: Sequence[float]) -> int:
        return round((math.ceil(max(thresholds)) + cls.ABOVE - cls.LOW) / cls.WIDTH)

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
    """One neuron on one image, in the network's own units: input current, membrane before and after the reset, levels."""

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
    """Four neurons of `levels` [T, units], from a typical active one to the busiest, by quantiles of summed levels."""
    total = np.abs(levels).sum(0)
    active = np.flatnonzero(total)
    order = active[np.argsort(total[active], kind="stable")]
    quantiles = (0.3, 0.8, 0.97, 1.0) if len(order) else ()
    return list(dict.fromkeys(int(order[round(q * (len(order) - 1))]) for q in quantiles))


@dataclass(frozen=True)
class LayerAnalysis:
    """One layer. levels: counts `[T, n_max + 1]`; tail: of the surrogate, None where it has none.

    step: None where the layer has none, the mean where channels have their own; `step_range` then holds both ends.
    """

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
    """A network on `images` images. complete: whether this is the whole set; accuracy: None without labels.

    facts: what was analysed (model, hashes ...); accounts: the counts of the same pass, by mode. outcomes: which images it
    gets right, as `lbq.counting.outcomes` packs them; None without labels, and of networks in float.
    """

    images: int
    complete: bool
    accuracy: float | None
    facts: dict[str, Any]
    layers: tuple[LayerAnalysis, ...]
    accounts: dict[str, Any] = field(default_factory=dict)
    traces: tuple[Trace, ...] = ()
    outcomes: dict[str, Any] | None = None

    @property
    def deployed(self) -> bool:
        """Whether it is of an integer network."""
        return self.facts.get("kind") == "artefact"

    @property
    def golden(self) -> bool:
        """Whether the images are the few test inputs that a deployed network carries."""
        return self.facts.get("data") == GOLDEN

    @property
    def other_data(self) -> str:
        """The data it ran on where that is not its dataset's test set, such as a user's own file; else empty."""
        data, dataset = self.facts.get("data"), self.facts.get("dataset")
        return str(data) if data and dataset and data != dataset else ""

    @property
    def of_test_set(self) -> bool:
        """Whether it ran on the whole test set."""
        return self.complete and not self.other_data

    @property
    def steps(self) -> dict[str, float]:
        return {layer.name: layer.step for layer in self.layers if layer.step is not None}

    @property
    def active(self) -> dict[str, float]:
        return {layer.name: layer.histogram.active_ratio for layer in self.layers}

    def mean(self, quantity: str) -> float:
        """Mean over layers, as the paper reports it: of `active_ratio`, `normalised_entropy` or `mean_level`."""
        return float(np.mean([getattr(layer.histogram, quantity) for layer in self.layers]))

    def summary(self) -> dict[str, Any]:
        """Means over layers, among them P(k = 1 | k > 0), and the range of steps. Empty for a network without spikes."""
        if not self.layers:
            return {}
        steps = list(self.steps.values())
        return {
            "active_ratio": self.mean("active_ratio"),
            "normalised_entropy": self.mean("normalised_entropy"),
            "first_level": float(np.mean([layer.histogram.conditional[0] for layer in self.layers])),
            "step_min": min(steps, default=None),
            "step_max": max(steps, default=None),
            "step_variation": coefficient_of_variation(np.array(steps)) if steps else None,
        }

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
            **({} if self.outcomes is None else {"outcomes": self.outcomes}),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str = "analysis") -> Analysis:
        if value.get("format") != FORMAT or value.get("version") != VERSION:
            raise LbqError(
                f"{where} is not an analysis of version {VERSION} (it says {value.get('format')!r}, "
                f"{value.get('version')!r}): make it again with lbq analyze"
            )
        wrong = problem(value, ANALYSIS) or _misshapen(value)
        if wrong is not None:
            raise LbqError(f"{where} is damaged: {wrong}; make it again with lbq analyze")
        layers = tuple(map(_layer_from, value["layers"]))
        traces = tuple(from_fields(Trace, trace) for trace in value["traces"])
        analysis: Analysis = replace(from_fields(cls, value), layers=layers, traces=traces)
        return analysis

    def table(self) -> list[dict[str, Any]]:
        """One row for each layer and timestep (`all`: over time)."""
        rows = []
        for layer in self.layers:
            low, high = layer.step_range or (layer.step, layer.step)
            steps = {"step": layer.step, "step_min": low, "step_max": high}
            for when in ("all", *range(len(layer.levels))):
                quantities = _quantities(layer.histogram if when == "all" else layer.at(when))
                shares = {f"p{k}": p for k, p in enumerate(quantities.pop("conditional"), 1)}
                head = {"layer": layer.name, "timestep": when, **steps, "tail": layer.tail, "n_max": layer.n_max}
                rows.append(head | quantities | shares)
        return rows

    def csv(self) -> str:
        """The table as a file."""
        rows, out = self.table(), io.StringIO()
        writer = csv.DictWriter(out, max(rows, key=len), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()


def load(path: Path | str) -> Analysis:
    """An analysis from its JSON file."""
    return Analysis.from_dict(files.json_of(path, RunError, "make it again with lbq analyze"), str(path))


def _quantities(histogram: LevelHistogram) -> dict[str, Any]:
    return {
        "active_ratio": histogram.active_ratio,
        "mean_level": histogram.mean_level,
        "normalised_entropy": histogram.normalised_entropy,
        "conditional": histogram.conditional,
    }


def _rounded(histogram: LevelHistogram) -> dict[str, Any]:
    return {**_quantities(histogram), "conditional": histogram.conditional.round(6).tolist()}


def _layer_dict(layer: LayerAnalysis) -> dict[str, Any]:
    return {
        **{key: getattr(layer, key) for key in ("name", "shape", "n_max", "step", "step_range", "tail")},
        **_rounded(layer.histogram),
        "by_timestep": [_rounded(layer.at(t)) for t in range(len(layer.levels))],
        "levels": layer.levels.tolist(),
        "membrane": layer.membrane
        and {"counts": layer.membrane.counts.tolist(), "thresholds": layer.membrane.thresholds},
    }


def _misshapen(value: Mapping[str, Any]) -> str | None:
    """A problem that a schema does not see: lists that belong together, but differ in size."""
    for i, layer in enumerate(value["layers"]):
        where, membrane = f"layers[{i}]", layer["membrane"]
        if any(len(row) != layer["n_max"] + 1 or not sum(row) for row in layer["levels"]):
            return f"{where}.levels must count the levels 0 to {layer['n_max']} of at least one neuron at each timestep"
        if membrane is not None:
            bins = Membrane.bins(membrane["thresholds"])
            if any(len(row) != bins for row in membrane["counts"]):
                return f"{where}.membrane.counts must have {bins} bins at each timestep, as its thresholds say"
    for i, trace in enumerate(value["traces"]):
        if len({len(trace[key]) for key in ("current", "before", "levels", "after")}) > 1:
            return f"traces[{i}] must give current, before, levels and after at the same timesteps"
    accounts = value["accounts"]
    if ("exact" in accounts) != ("rate" in accounts):
        return "accounts must hold exact and rate, or neither"
    return None


def _layer_from(entry: Mapping[str, Any]) -> LayerAnalysis:
    layer, membrane = from_fields(LayerAnalysis, entry), entry["membrane"]
    if membrane is not None:
        membrane = Membrane(np.array(membrane["counts"], np.int64), tuple(membrane["thresholds"]))
    return replace(layer, levels=np.array(entry["levels"], np.int64), membrane=membrane)


def from_fields(kind: type[Any], entry: Mapping[str, Any]) -> Any:
    """A dataclass from the JSON of its fields. A newer file may hold more, an older one lack what has a default."""
    known = (f for f in fields(kind) if f.name in entry or (f.default is MISSING and f.default_factory is MISSING))
    values = ((f.name, entry[f.name]) for f in known)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values})
