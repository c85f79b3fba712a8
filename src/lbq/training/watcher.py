"""Who watches a training: derive from `Watcher`, and say what to do as things happen. No torch, so that commands load fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lbq.training.plan import Plan
    from lbq.training.position import EpochRecord


class Watcher:
    """Is called on rank 0, and does nothing by itself."""

    def plan(self, plan: Plan) -> None:
        """Training is about to begin."""

    def resumed(self, epoch: int, batch: int, notes: tuple[str, ...]) -> None:
        """It goes on from there; what was passed over to do so, and what is not as it was."""

    def restarted(self, log: Path) -> None:
        """There was a log, now under this name, but no checkpoint."""

    def initialised(self, run: str, copied: int, left: tuple[str, ...]) -> None:
        """It starts from that run's weights: how many tensors it copied, and which of the network's are not there."""

    def step(self, epoch: int, batch: int, batches: int, samples_per_second: float) -> None:
        """A step is done, the `batch`-th of `batches` in this epoch."""

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is done."""
