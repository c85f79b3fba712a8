"""Run a network over images and measure it: accuracy, counts in both modes, level histograms. Constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lbq import runs, train
from lbq.account import Counter
from lbq.analyze import LevelCounter
from lbq.data.sources import Source, open_source
from lbq.deploy.lower import lower
from lbq.measurement import Measurement as Measurement
from lbq.neuron.record import record_levels


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
