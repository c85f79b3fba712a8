"""Does the absorbed network on integer levels do what the trained network does?"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from torch import nn

from lbq.account import Counter
from lbq.data.sources import Source
from lbq.deploy.lower import lower
from lbq.engine import execute
from lbq.graph import absorb
from lbq.measure import passes


@dataclass(frozen=True)
class IntegerCheck:
    """The absorbed network, bit plane by bit plane, against the trained network on the same images.

    levels_different compares with the trained network in float64, where both compute the same sums in another order, so
    that only an image with a membrane within 1e-9 steps of a threshold (`tied_images`) may round differently, and carry
    the difference on; levels_different_untied and largest_logit_error are of all other images. predictions_agree
    (percent) is against the network as trained, in float32. Accumulations are counted while executing and,
    independently, from levels.
    """

    images: int
    levels_compared: int
    levels_different: int
    levels_different_untied: int
    tied_images: int
    largest_logit_error: float
    predictions_agree: float
    accuracy: float
    accumulations_executed: int
    accumulations_counted: int

    @property
    def passed(self) -> bool:
        """Levels and logits agree in float64 on all images but a few tied ones, and so do the two counts."""
        return (
            self.levels_different_untied == 0
            and self.largest_logit_error < 1e-9
            and self.tied_images <= 0.02 * self.images
            and self.accumulations_executed == self.accumulations_counted
        )


def check_integers(net: nn.Module, source: Source) -> IntegerCheck:
    """Lower and absorb `net`, run it by bit planes on the test part of `source`, and compare it with `net`."""
    exact = copy.deepcopy(net).cpu().double()  # lowered from here: softplus in float32 would give slightly other steps
    graph = lower(exact, source.shape, static=source.static)
    absorbed = absorb(graph)
    counter = Counter(graph)
    images = different = untied = compared = tied = executed = correct = agree = 0
    logit_error = 0.0
    for one, trained in zip(passes(exact, source), passes(net, source), strict=True):
        result = execute(absorbed, one.x.cpu().double().numpy())
        for name, level in result.levels.items():
            per_image = (level != one.levels[name].reshape(level.shape)).sum((0, 2, 3, 4))
            different += int(per_image.sum())
            untied += int(per_image[result.ties == 0].sum())
            compared += level.size
        error = np.abs(result.logits - one.logits)[result.ties == 0]
        logit_error = max(logit_error, float(error.max(initial=0)))
        tied += int((result.ties > 0).sum())
        counter.add(result.levels)
        executed += sum(tally.accumulations for tally in result.tallies.values())
        images += len(one.labels)
        correct += int((result.predictions == one.labels).sum())
        agree += int((result.predictions == trained.logits.argmax(1)).sum())
    account = counter.account()
    counted = (account.total + account.shortcut_total).bit_sparse * images
    return IntegerCheck(
        images=images,
        levels_compared=compared,
        levels_different=different,
        levels_different_untied=untied,
        tied_images=tied,
        largest_logit_error=logit_error,
        predictions_agree=100 * agree / images,
        accuracy=100 * correct / images,
        accumulations_executed=executed,
        accumulations_counted=round(counted),
    )
