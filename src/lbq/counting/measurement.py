"""What measuring a network gives: accuracy, counts in both modes, level histograms, membranes. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.counting.analysis import Analysis, LayerAnalysis, LevelHistogram, Membrane, Trace, from_fields
from lbq.counting.operations import (
    HOROWITZ,
    PAPER_BACKENDS,
    Account,
    Count,
    Counter,
    Energies,
    LayerActivity,
    Mode,
    Operations,
    energy_mj,
)
from lbq.counting.outcomes import packed
from lbq.counting.tally import Tallies
from lbq.graph import Graph
from lbq.graph.integer import IntegerNetwork


@dataclass(frozen=True)
class Measurement:
    """accuracy: percent, NaN without labels; tallies: None for a network without spikes.

    complete: whether these were all test images; inputs: what the images are, in words.
    """

    graph: Graph | IntegerNetwork
    images: int
    accuracy: float
    tallies: Tallies | None
    complete: bool = True
    membranes: Mapping[str, Membrane] = field(default_factory=dict)
    traces: Sequence[Trace] = ()
    inputs: str = "images"
    right: NDArray[np.bool_] | None = None  # which images, in order; None where that is not known

    @property
    def ann_macs(self) -> int:
        """Of the same network as an ANN, at valid positions. An ANN itself runs every frame, a rival one pass."""
        return self.graph.valid_macs * (self.graph.frames if self.tallies is None else 1)

    @property
    def exact(self) -> Account | None:
        return None if self.tallies is None else Counter(self.graph, "exact", self.tallies).account()

    @property
    def rate(self) -> Account | None:
        return None if self.tallies is None else Counter(self.graph, "rate", self.tallies).account()

    @property
    def histograms(self) -> dict[str, LevelHistogram]:
        if (tallies := self.tallies) is None:
            return {}
        return {layer.name: LevelHistogram(tallies.by_timestep(layer.name).sum(0)) for layer in self.graph.layers}

    def ann_energy_mj(self, table: Energies = HOROWITZ) -> float:
        """Modelled energy of the same network as an ANN, border-exact like `exact`."""
        return energy_mj(Operations(float(self.ann_macs)), table)

    def to_dict(self, table: Energies = HOROWITZ) -> dict[str, Any]:
        """table: prices of the paper's regime."""
        modes = {str(a.mode): _account_dict(a, table) for a in (self.exact, self.rate) if a is not None}
        return {
            "images": self.images,
            "accuracy": None if math.isnan(self.accuracy) else self.accuracy,
            "macs": self.graph.macs,
            "valid_macs": self.graph.valid_macs,
            "frames": self.graph.frames,
            "units": self.graph.units,
            "ann_energy_mj": self.ann_energy_mj(table),
            **modes,
        }

    def analysis(self, facts: Mapping[str, Any], tails: Mapping[str, float] | None = None) -> Analysis:
        """What `lbq analyze` writes. facts: what was measured; tails: of the surrogate, by layer."""
        tallies, measured = self.tallies, self.to_dict()
        layers = []
        for layer in self.graph.layers if tallies is not None else ():
            assert tallies is not None
            step = _step_of(self.graph, layer.name)
            layers.append(
                LayerAnalysis(
                    name=layer.name,
                    shape=layer.shape,
                    n_max=self.graph.spec(layer.name).n_max,
                    step=float(step.mean()) if step.size else None,
                    step_range=(float(step.min()), float(step.max())) if step.size > 1 else None,
                    tail=(tails or {}).get(layer.name),
                    levels=tallies.by_timestep(layer.name),
                    membrane=self.membranes.get(layer.name),
                )
            )
        return Analysis(
            images=self.images,
            complete=self.complete,
            accuracy=measured["accuracy"],
            facts=dict(facts),
            layers=tuple(layers),
            accounts={k: v for k, v in measured.items() if k not in ("images", "accuracy")},
            traces=tuple(self.traces),
            outcomes=None if self.right is None else packed(self.right),
        )


def _step_of(graph: Graph | IntegerNetwork, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A layer's step in the trained network's unit: a scalar, or one per channel that fires at all."""
    if isinstance(graph, Graph):
        return graph.spec(name).step
    layer = graph[name]
    steps = graph.spec(name).steps * layer.unit / 2.0**layer.fraction
    steps = steps[np.isfinite(steps)]
    if not len(steps):
        return steps
    alike = np.ptp(steps) <= 0.01 * steps.mean()  # one for all channels, rounded
    return np.array(np.median(steps)) if alike else steps


def _account_dict(account: Account, table: Energies) -> dict[str, Any]:
    stored = {key: value for key, value in asdict(account).items() if key not in ("mode", "images")}
    if not account.mixing_macs:
        stored.pop("mixing_macs")  # of LM-HT alone
    if not account.products:
        stored.pop("products")  # of attention and gates alone
    return {
        **stored,
        "total": asdict(account.total),
        "ann_energy_mj": account.ann_energy_mj(table),
        "active_ratio": account.active_ratio,
        "shifts": {backend: account.shifts(backend) for backend in PAPER_BACKENDS},
        "energy_mj": {backend: account.energy_mj(backend, table) for backend in PAPER_BACKENDS},
    }


def account_from(value: Mapping[str, Any], mode: Mode, images: int) -> Account:
    """The account that an analysis, checked when it was read, holds under `accounts[mode]`."""
    stored = {f.name: value[f.name] for f in fields(Account) if f.name in value}  # older files lack some
    for key in ("synapses", "shortcuts", "stem"):
        stored[key] = {name: from_fields(Count, count) for name, count in value[key].items()}
    stored["products"] = tuple(value.get("products", ()))
    stored["layers"] = {name: from_fields(LayerActivity, layer) for name, layer in value["layers"].items()}
    return Account(**stored, mode=mode, images=images)
