"""What a training reports: derive from `Watcher` to act on it. No torch, so that commands load fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lbq.training.plan import Plan
    from lbq.training.position import EpochRecord


class Watcher:
    """Its methods are called on rank 0. By itself it does nothing."""

    def plan(self, plan: Plan) -> None:
        """Training is about to begin."""

    def resumed(self, epoch: int, batch: int, notes: tuple[str, ...]) -> None:
        """Training goes on from there. notes: damaged checkpoints that were skipped, and what has changed around the run."""

    def restarted(self, log: Path) -> None:
        """There was no checkpoint, so training starts again; the old log is now `log`."""

    def initialised(self, source: str, copied: int, left: tuple[str, ...]) -> None:
        """Training starts from the weights of that run or file. copied: how many tensors. left: those that it lacks."""

    def step(self, epoch: int, batch: int, batches: int, samples_per_second: float) -> None:
        """A step is done, the `batch`-th of `batches` in this epoch."""

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is done."""
