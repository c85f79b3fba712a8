"""What measuring a network gives: accuracy, counts in both modes, level histograms, membranes. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from lbq.counting.analysis import Analysis, LayerAnalysis, LevelHistogram, Membrane, Trace
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
from lbq.counting.tally import Tallies
from lbq.graph import Graph
from lbq.graph.integer import IntegerNetwork


@dataclass(frozen=True)
class Measurement:
    """accuracy in percent, NaN where labels are not known; `tallies` is None for a network without spikes.

    complete: whether these were all test images; inputs: what they are, in words. membranes and traces: by layer, where they
    were asked for.
    """

    graph: Graph | IntegerNetwork
    images: int
    accuracy: float
    tallies: Tallies | None
    complete: bool = True
    membranes: Mapping[str, Membrane] = field(default_factory=dict)
    traces: Sequence[Trace] = ()
    inputs: str = "images"

    @property
    def ann_macs(self) -> int:
        """Of the same network as an ANN, at valid positions: of all frames where it is one, else of one pass."""
        return self.graph.valid_macs * (self.graph.frames if self.tallies is None else 1)

    @property
    def exact(self) -> Account | None:
        return None if self.tallies is None else Counter(self.graph, "exact", self.tallies).account()

    @property
    def rate(self) -> Account | None:
        return None if self.tallies is None else Counter(self.graph, "rate", self.tallies).account()

    @property
    def histograms(self) -> dict[str, LevelHistogram]:
        tallies = self.tallies
        if tallies is None:
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
        layers = []
        for layer in self.graph.layers if self.tallies is not None else ():
            spec = self.graph.spec(layer.name)
            step = _step_of(self.graph, layer.name)
            assert self.tallies is not None
            layers.append(
                LayerAnalysis(
                    name=layer.name,
                    shape=layer.shape,
                    n_max=spec.n_max,
                    step=float(step.mean()) if step.size else None,
                    step_range=(float(step.min()), float(step.max())) if step.size > 1 else None,
                    tail=(tails or {}).get(layer.name),
                    levels=self.tallies.by_timestep(layer.name),
                    membrane=self.membranes.get(layer.name),
                )
            )
        found = self.to_dict()
        return Analysis(
            images=self.images,
            complete=self.complete,
            accuracy=found["accuracy"],
            facts=dict(facts),
            layers=tuple(layers),
            accounts={k: v for k, v in found.items() if k not in ("images", "accuracy")},
            traces=tuple(self.traces),
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
    return {
        "total": asdict(account.total),
        "fp_macs": account.fp_macs,
        "ann_macs": account.ann_macs,
        "ann_energy_mj": account.ann_energy_mj(table),
        "pool_adds": account.pool_adds,
        "active_ratio": account.active_ratio,
        "timesteps": account.timesteps,
        "frames": account.frames,
        "neurons": account.neurons,
        "n_max": account.n_max,
        "outputs": account.outputs,
        "level_bits": account.level_bits,
        "horner": account.horner,
        "unit_events": account.unit_events,
        "shifts": {backend: account.shifts(backend) for backend in PAPER_BACKENDS},
        "energy_mj": {backend: account.energy_mj(backend, table) for backend in PAPER_BACKENDS},
        "layers": {name: asdict(activity) for name, activity in account.layers.items()},
        "formations": account.formations,
        "synapses": {name: asdict(count) for name, count in account.synapses.items()},
        "shortcuts": {name: asdict(count) for name, count in account.shortcuts.items()},
        "stem": {name: asdict(count) for name, count in account.stem.items()},
    }


def account_from(value: Mapping[str, Any], mode: Mode, images: int) -> Account:
    """The account that an analysis, checked when it was read, holds under `accounts[mode]`."""
    return Account(
        mode=mode,
        images=images,
        synapses={name: _known(Count, count) for name, count in value["synapses"].items()},
        shortcuts={name: _known(Count, count) for name, count in value["shortcuts"].items()},
        stem={name: _known(Count, count) for name, count in value["stem"].items()},
        layers={name: _known(LayerActivity, activity) for name, activity in value["layers"].items()},
        formations=dict(value["formations"]),
        **{
            key: value[key]
            for key in ("fp_macs", "ann_macs", "pool_adds", "unit_events", "timesteps", "neurons", "n_max", "outputs")
        },
        **{key: value[key] for key in ("frames", "level_bits", "horner") if key in value},
    )


def _known(kind: type[Any], value: Mapping[str, Any]) -> Any:
    """A dataclass from its fields; a newer file may hold more."""
    return kind(**{f.name: value[f.name] for f in fields(kind)})
