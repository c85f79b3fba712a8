"""Run a network over images and measure it: accuracy, counts in both modes, level histograms. Constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lbq import runs, train
from lbq.account import BACKENDS, Account, Counter, Operations, energy_mj
from lbq.analyze import LevelCounter, LevelHistogram
from lbq.data.sources import Source, open_source
from lbq.deploy import lower
from lbq.graph import Graph
from lbq.neuron.record import record_levels


@dataclass(frozen=True)
class Measurement:
    """accuracy in percent; `exact` and `rate` are None for a network without spikes."""

    graph: Graph
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
            "accuracy": self.accuracy,
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
    }


@dataclass(frozen=True)
class Pass:
    """One batch through a network: its inputs `[B, ...]` or `[T, B, ...]`, labels, logits, and every layer's levels."""

    x: torch.Tensor
    labels: NDArray[np.int64]
    logits: NDArray[np.float64]
    levels: dict[str, NDArray[np.integer[Any]]]


@torch.no_grad()
def passes(net: nn.Module, source: Source) -> Iterator[Pass]:
    """The test part of `source` through `net` in evaluation mode and in its own precision, batch by batch."""
    parameter = next(net.parameters())
    for x, labels in source.eval_batches("test"):
        with record_levels(net) as levels, train.evaluating(net):
            logits = net(x.to(parameter))
        yield Pass(x, labels.cpu().numpy(), logits.double().cpu().numpy(), levels)


def measure(net: nn.Module, source: Source) -> Measurement:
    """Accuracy on the test part and, for a spiking network, its counts and level histograms there."""
    graph = lower(net, source.shape, static=source.static)
    specs = {layer.name: layer.neuron for layer in graph.layers}
    spiking = all(spec is not None for spec in specs.values())
    exact, rate = (Counter(graph, "exact"), Counter(graph, "rate")) if spiking else (None, None)
    histograms = LevelCounter({name: spec.n_max for name, spec in specs.items() if spec is not None})
    correct = images = 0
    for one in passes(net, source):
        correct += int((one.logits.argmax(1) == one.labels).sum())
        images += len(one.labels)
        if exact is not None and rate is not None:
            for counter in (exact, rate, histograms):
                counter.add(one.levels)
    return Measurement(
        graph,
        images,
        100 * correct / images,
        exact.account() if exact else None,
        rate.account() if rate else None,
        histograms.layers,
    )


def measure_run(run: Path | str, device: str = "cpu", changes: Iterable[str] = ()) -> Measurement:
    """The network of a run folder on the test images of the dataset it was trained on."""
    config = runs.load_config(run, changes)
    return measure(runs.load(run).to(device), open_source(config, device))
