"""Where a training run stands, and what each of its epochs came to. Plain values: no network, no data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Position:
    """Where a run stands. `stream` counts the draws of the random stream, `step` the optimiser's steps."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    stream: int = 0


@dataclass(frozen=True)
class EpochRecord:
    """Loss and accuracies in percent, on augmented training images and, where evaluated, on held-out and test images.

    steps, tails, active: of each neuron after the epoch. Where weights are averaged, these and the accuracies are of the
    averaged network; `unaveraged_accuracy` is the test accuracy of the weights as trained. tested_in: the precision of
    accuracies and active ratios. It is the training's, but float32 (or float64, where trained in it) in the last epoch;
    there the `_as_trained` accuracies are in the training's precision. accumulations: of a training image, as the price on
    levels counts them, where there is one.
    """

    epoch: int
    step: int
    loss: float
    train_accuracy: float
    lr: float
    seconds: float
    samples_per_second: float
    test_accuracy: float | None = None
    holdout_accuracy: float | None = None
    unaveraged_accuracy: float | None = None
    test_accuracy_as_trained: float | None = None
    holdout_accuracy_as_trained: float | None = None
    tested_in: str | None = None
    accumulations: float | None = None
    steps: dict[str, float] = field(default_factory=dict)
    tails: dict[str, float] = field(default_factory=dict)
    active: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, Any] | None = None  # in the last epoch, which test samples are right: see lbq.counting.outcomes
