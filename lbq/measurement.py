"""What measuring a network gives: accuracy, counts in both modes, level histograms. No torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lbq.account import BACKENDS, Account, Operations, energy_mj
from lbq.analyze import LevelHistogram
from lbq.engine.network import IntegerNetwork
from lbq.graph import Graph


@dataclass(frozen=True)
class Measurement:
    """accuracy in percent, NaN where labels are not known; `exact` and `rate` are None for a network without spikes."""

    graph: Graph | IntegerNetwork
    images: int
    accuracy: float
    exact: Account | None
    rate: Account | None
    histograms: dict[str, LevelHistogram]

    @property
    def ann_energy_mj(self) -> float:
        """Modelled energy of the same network as an ANN, border-exact like `exact`."""
        return energy_mj(Operations(float(sum(s.valid_macs for s in self.graph.synapses))))

    def to_dict(self) -> dict[str, Any]:
        modes = {str(a.mode): _account_dict(a) for a in (self.exact, self.rate) if a is not None}
        return {
            "images": self.images,
            "accuracy": None if math.isnan(self.accuracy) else self.accuracy,
            "macs": self.graph.macs,
            "valid_macs": sum(s.valid_macs for s in self.graph.synapses),
            "units": self.graph.units,
            "ann_energy_mj": self.ann_energy_mj,
            **modes,
        }


def _account_dict(account: Account) -> dict[str, Any]:
    return {
        "total": asdict(account.total),
        "fp_macs": account.fp_macs,
        "ann_macs": account.ann_macs,
        "ann_energy_mj": account.ann_energy_mj,
        "pool_adds": account.pool_adds,
        "active_ratio": account.active_ratio,
        "shifts": {backend: account.shifts(backend) for backend in BACKENDS},
        "energy_mj": {backend: account.energy_mj(backend) for backend in BACKENDS},
        "layers": {name: asdict(activity) for name, activity in account.layers.items()},
        "formations": account.formations,
        "synapses": {name: asdict(count) for name, count in account.synapses.items()},
        "shortcuts": {name: asdict(count) for name, count in account.shortcuts.items()},
        "stem": {name: asdict(count) for name, count in account.stem.items()},
    }
