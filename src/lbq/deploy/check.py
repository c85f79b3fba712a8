"""Does the deployed network do what the trained network does? In two steps, because only one of them is exact."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import numpy as np
from torch import nn

from lbq.batches.sources import Source
from lbq.counting.operations import Counter
from lbq.data.testset import TestSet
from lbq.deploy.float_execution import execute
from lbq.deploy.lowering.lower import lower
from lbq.engine import Network
from lbq.graph import INPUT
from lbq.graph.rewrites import absorb
from lbq.measuring.measure import passes


@dataclass(frozen=True)
class AbsorptionCheck:
    """The absorbed network on integer levels, with real weights in float64, against the trained network in float64.

    Both compute the same sums in another order, so that only an image with a membrane within 1e-9 steps of a threshold
    (`tied_images`) may round differently, and carry the difference on; `untied` and `largest_logit_error` are of all
    other images.
    """

    images: int
    levels: int
    different: int
    untied: int
    tied_images: int
    largest_logit_error: float

    @property
    def passed(self) -> bool:
        few = self.tied_images <= 0.02 * self.images
        return self.untied == 0 and self.largest_logit_error < 1e-9 and few


def check_absorption(net: nn.Module, source: Source) -> AbsorptionCheck:
    """Compare every layer and timestep on the test part of `source`."""
    exact = copy.deepcopy(net).cpu().double()
    graph = absorb(lower(exact, source.shape, static=source.static))
    images = levels = different = untied = tied = 0
    logit_error = 0.0
    for one in passes(exact, source):
        result = execute(graph, one.x.cpu().double().numpy())
        for name, level in result.levels.items():
            per_image = (level != one.levels[name].reshape(level.shape)).sum((0, 2, 3, 4))
            different += int(per_image.sum())
            untied += int(per_image[result.ties == 0].sum())
            levels += level.size
        error = np.abs(result.logits - one.logits)[result.ties == 0]
        logit_error = max(logit_error, float(error.max(initial=0)))
        tied += int((result.ties > 0).sum())
        images += len(one.labels)
    return AbsorptionCheck(images, levels, different, untied, tied, logit_error)


@dataclass(frozen=True)
class IntegerCheck:
    """The integer network against the network as trained, in float32; shares in percent.

    Accumulations are counted while executing by bit planes and, independently, from the levels.
    """

    images: int
    bytes: int
    levels_agree: float
    predictions_agree: float
    accuracy: float
    accumulations_executed: int
    accumulations_counted: int
    images_per_second: float
    kernel: str

    @property
    def passed(self) -> bool:
        return self.accumulations_executed == self.accumulations_counted


def check_integers(net: nn.Module, source: Source, deployed: Network, test: TestSet, size: int) -> IntegerCheck:
    """Run a deployed network by bit planes on the test part, and compare it with `net`. size: bytes of its file."""
    deployed.verify("dense")
    deployed.verify("bitplane")
    counter = Counter(deployed.network)
    images = correct = agree = same = levels = executed = 0
    seconds, kernels = 0.0, set()
    for one in passes(net, source):
        x = test.read(images, images + len(one.labels))
        started = time.perf_counter()
        found = deployed.run(x, "bitplane", trace=True)
        seconds += time.perf_counter() - started
        assert found.levels is not None
        for name, level in found.levels.items():
            same += int((level == one.levels[name].reshape(level.shape)).sum())
            levels += level.size
        counter.add({**found.levels, INPUT: x[None] if test.static else x})
        executed += sum(counts.accumulations for counts in found.counts.values())
        kernels |= {choice.kernel for choice in found.choices.values()}
        images += len(one.labels)
        correct += int((found.predictions == one.labels).sum())
        agree += int((found.predictions == one.logits.argmax(1)).sum())
    account = counter.account()
    counted = sum(
        count.bit_sparse for part in (account.synapses, account.shortcuts, account.stem) for count in part.values()
    )
    return IntegerCheck(
        images=images,
        bytes=size,
        levels_agree=100 * same / levels,
        predictions_agree=100 * agree / images,
        accuracy=100 * correct / images,
        accumulations_executed=executed,
        accumulations_counted=round(counted * images),
        images_per_second=images / seconds,
        kernel="native" if "native" in kernels else "NumPy",
    )
