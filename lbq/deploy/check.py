"""Does the absorbed network on integer levels do what the trained network does?"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from torch import nn

from lbq import train
from lbq.account import Counter
from lbq.data.digits import Split
from lbq.engine import execute
from lbq.graph import Graph, absorb
from lbq.measure import level_batches


@dataclass(frozen=True)
class IntegerCheck:
    """The absorbed network, bit plane by bit plane, against the trained network on the same images.

    levels_different compares with the trained network in float64, where both compute the same sums in another order, so
    that only membranes within 1e-9 steps of a threshold (`ties`) may round differently. predictions_agree (percent) is
    against the network as trained, in float32. Accumulations are counted while executing and, independently, from
    levels.
    """

    images: int
    levels_compared: int
    levels_different: int
    ties: int
    predictions_agree: float
    accuracy: float
    accumulations_executed: int
    accumulations_counted: int

    @property
    def passed(self) -> bool:
        return self.levels_different <= self.ties and self.accumulations_executed == self.accumulations_counted


def check_integers(net: nn.Module, graph: Graph, split: Split, batch_size: int = 200) -> IntegerCheck:
    """Run `graph` (lowered from `net`) by bit planes on all images of `split` and compare it with `net`."""
    absorbed = absorb(graph)
    images = split.images.astype(np.float64)
    counter = Counter(graph)
    different = compared = ties = executed = 0
    predictions = []
    expected_batches = level_batches(copy.deepcopy(net).double(), images, batch_size)
    for start, (_, expected) in enumerate(expected_batches):
        result = execute(absorbed, images[start * batch_size : (start + 1) * batch_size])
        predictions.append(result.predictions)
        for name, level in result.levels.items():
            different += int((level != expected[name].reshape(level.shape)).sum())
            compared += level.size
        ties += sum(result.ties.values())
        counter.add(result.levels)
        executed += sum(tally.accumulations for tally in result.tallies.values())
    account = counter.account()
    counted = (account.total + account.shortcut_total).bit_sparse * len(split)
    predicted = np.concatenate(predictions)
    trained = train.predict(net, split.images).argmax(1).numpy()
    return IntegerCheck(
        images=len(split),
        levels_compared=compared,
        levels_different=different,
        ties=ties,
        predictions_agree=100 * float((predicted == trained).mean()),
        accuracy=100 * float((predicted == split.labels).mean()),
        accumulations_executed=executed,
        accumulations_counted=round(counted),
    )
