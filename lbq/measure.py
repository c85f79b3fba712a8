"""Run a network over images and measure it: accuracy, counts in both modes, level histograms. Constant memory."""

from __future__ import annotations

from collections.abc import Iterator
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
from lbq.data import Split, load_digits
from lbq.deploy import lower
from lbq.graph import Graph, Shape
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


@torch.no_grad()
def level_batches(
    net: nn.Module, images: NDArray[np.floating], batch_size: int
) -> Iterator[tuple[NDArray[np.float64], dict[str, NDArray[np.integer[Any]]]]]:
    """(logits, levels of every layer) for each batch of images, in evaluation mode."""
    device = train.device_of(net)
    for batch in torch.as_tensor(images).split(batch_size):
        with record_levels(net) as levels, train.evaluating(net):
            logits = net(batch.to(device))
        yield logits.double().cpu().numpy(), levels


def measure(net: nn.Module, split: Split, batch_size: int = 200) -> Measurement:
    """Accuracy on `split` and, for a spiking network, its counts and level histograms there."""
    shape: Shape = split.images.shape[1:]
    graph = lower(net, shape)
    specs = {layer.name: layer.neuron for layer in graph.layers}
    if any(spec is None for spec in specs.values()):
        return Measurement(graph, len(split), train.accuracy(net, split), None, None, {})
    exact, rate = Counter(graph, "exact"), Counter(graph, "rate")
    histograms = LevelCounter({name: spec.n_max for name, spec in specs.items() if spec is not None})
    predictions = []
    for logits, levels in level_batches(net, split.images, batch_size):
        predictions.append(logits.argmax(1))
        for counter in (exact, rate, histograms):
            counter.add(levels)
    accuracy = 100 * float((np.concatenate(predictions) == split.labels).mean())
    return Measurement(graph, len(split), accuracy, exact.account(), rate.account(), histograms.layers)


def measure_run(run: Path | str) -> Measurement:
    """The network of a run folder on the test images of the dataset it was trained on."""
    return measure(runs.load(run), load_digits()[1])
