"""Epochs of a run as TensorBoard shows them."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lbq.errors import LbqError
from lbq.training.position import EpochRecord

LAYERWISE = ("steps", "tails", "active")  # fields with one number for each layer


def check() -> None:
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise LbqError(f"train.tensorboard needs the package tensorboard ({error}): pip install tensorboard") from error


class TensorBoard:
    """Writes epochs below `folder`, in one file from its first epoch on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def epoch(self, record: EpochRecord) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # epochs that a run continued from an older checkpoint repeats count once
            self._writer = SummaryWriter(str(self.folder), purge_step=record.epoch)
        for name, value in asdict(record).items():
            if name in LAYERWISE:
                for layer, number in value.items():
                    self._writer.add_scalar(f"{name}/{layer}", number, record.epoch)
            elif isinstance(value, int | float) and name != "epoch":
                self._writer.add_scalar(name, value, record.epoch)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
