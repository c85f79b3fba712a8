"""Does the absorbed network on integer levels do what the trained network does?"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from torch import nn

from lbq import train
from lbq.account import Counter
from lbq.data.digits import Split
from lbq.deploy.lower import lower
from lbq.engine import execute
from lbq.graph import Shape, absorb
from lbq.measure import level_batches


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


def check_integers(net: nn.Module, split: Split, batch_size: int = 200) -> IntegerCheck:
    """Lower and absorb `net`, run it by bit planes on all images of `split`, and compare it with `net`."""
    shape: Shape = split.images.shape[1:]
    exact = copy.deepcopy(net).double()  # lowered from here: softplus in float32 would give slightly other steps
    graph = lower(exact, shape)
    absorbed = absorb(graph)
    images = split.images.astype(np.float64)
    counter = Counter(graph)
    different = untied = compared = tied = executed = 0
    predictions = []
    expected_batches = level_batches(exact, images, batch_size)
    logit_error = 0.0
    for start, (logits, expected) in enumerate(expected_batches):
        result = execute(absorbed, images[start * batch_size : (start + 1) * batch_size])
        predictions.append(result.predictions)
        for name, level in result.levels.items():
            per_image = (level != expected[name].reshape(level.shape)).sum((0, 2, 3, 4))
            different += int(per_image.sum())
            untied += int(per_image[result.ties == 0].sum())
            compared += level.size
        untied_error = np.abs(result.logits - logits)[result.ties == 0]
        logit_error = max(logit_error, float(untied_error.max(initial=0)))
        tied += int((result.ties > 0).sum())
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
        levels_different_untied=untied,
        tied_images=tied,
        largest_logit_error=logit_error,
        predictions_agree=100 * float((predicted == trained).mean()),
        accuracy=100 * float((predicted == split.labels).mean()),
        accumulations_executed=executed,
        accumulations_counted=round(counted),
    )
