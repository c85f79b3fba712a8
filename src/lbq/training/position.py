"""Where a training run stands, and what each of its epochs came to. Plain values: no network, no data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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
    """Loss and accuracy (percent) on the augmented training images, and accuracies on the held-out and test images where they
    were evaluated; each neuron's step, tail and active ratio after the epoch. Where weights are averaged, all that is said of
    the network is said of the averaged one; `unaveraged_accuracy` is what the weights as trained reach on the test images.

    tested_in: the precision of these accuracies and active ratios. It is the training's, but for the last epoch, which is
    tested in float32 (or float64, where it was trained in that); the `_as_trained` ones are of the training's there too."""

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
    steps: dict[str, float] = field(default_factory=dict)
    tails: dict[str, float] = field(default_factory=dict)
    active: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
