"""Training runs small enough to repeat by the hundred, and what of a run must not depend on how often it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lbq import models
from lbq.batches.sources import ImageSource
from lbq.config import Config
from lbq.data import digits
from lbq.data.dataset import Dataset, Samples
from lbq.data.digits import load_digits
from lbq.models import BurstNet
from lbq.models.resnet import ResNet
from lbq.runs import checkpoint, run_folder
from lbq.system import toml
from lbq.training import job
from lbq.training.plan import Plan
from lbq.training.position import EpochRecord
from lbq.training.trainer import Trainer

Contents = dict[str, Any]

SMALL = {
    "seed": 3,
    "model": {"id": "resnet8w2", "dropout": 0.3},
    "augment": {"shift": 1},
    "optim": {"lr": 0.05},
    "train": {"epochs": 3, "batch_size": 12, "warmup_epochs": 1, "ema": 0.9, "checkpoint_steps": 1, "test": "every"},
}  # with 50 training images: 3 epochs of 4 steps
TINY = "model.id=tiny"  # where runs are many, and not of their layers
models.register("tiny")(partial(ResNet, blocks=(1,), widths=(2,), stem_width=2))
TIMINGS = ("seconds", "samples_per_second", "training_seconds", "environment")


def config(*changes: str) -> Config:
    return Config.from_dict(toml.merge(SMALL, toml.overrides(changes)))


def small_digits(train: int = 50, test: int = 31) -> Dataset:
    """The first digits; the sizes are no multiples of a batch."""
    whole = load_digits()
    parts = ((whole.train, train), (whole.test, test))
    some = [Samples(part.images[:count], part.labels[:count]) for part, count in parts]
    return Dataset(whole.inputs, some[0], some[1], whole.source)


def trainer(settings: Config, **options: Any) -> Trainer:
    return Trainer(settings, ImageSource(settings, small_digits(), torch.device("cpu")), **options)


class Silent(job.Watcher):
    """A watcher that keeps all reports."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.resumptions: list[tuple[int, int, tuple[str, ...]]] = []
        self.logs: list[Path] = []  # set aside
        self.starts: list[tuple[str, int, tuple[str, ...]]] = []
        self.steps: list[tuple[int, int]] = []
        self.records: list[EpochRecord] = []

    def plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def resumed(self, epoch: int, batch: int, notes: tuple[str, ...]) -> None:
        self.resumptions.append((epoch, batch, notes))

    def restarted(self, log: Path) -> None:
        self.logs.append(log)

    def initialised(self, source: str, copied: int, left: tuple[str, ...]) -> None:
        self.starts.append((source, copied, left))

    def step(self, epoch: int, batch: int, batches: int, samples_per_second: float) -> None:
        self.steps.append((epoch, batch))

    def epoch(self, record: EpochRecord) -> None:
        self.records.append(record)


def timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in TIMINGS}


def tensor_bytes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {k: (str(v.dtype), tuple(v.shape), v.contiguous().numpy().tobytes()) for k, v in tensors.items()}


def state_of(trainer: Trainer) -> Contents:
    tensors, values = trainer.state()
    return {**tensor_bytes(tensors), "values": timeless(values)}


def contents(folder: Path) -> Contents:
    """A finished run folder's weights, last checkpoint, metrics and result, without timings. Equal or not: nothing else."""
    tensors, values = checkpoint.read(folder / job.CHECKPOINTS / checkpoint.LAST)
    values.pop("metrics_bytes")  # the text of timings has no fixed length
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        **tensor_bytes(tensors),
        "values": timeless(values),
        "weights": (folder / "weights.safetensors").read_bytes(),
        "metrics": [timeless(record) for record in metrics],
        "result": timeless(json.loads((folder / "result.json").read_text())),
        "config": (folder / "config.toml").read_bytes(),
    }


def last_checkpoint(folder: Path) -> checkpoint.Loaded:
    """The newest whole checkpoint of a run folder, which must have one."""
    loaded = checkpoint.load(folder / job.CHECKPOINTS)
    assert loaded is not None
    return loaded


def save_run(folder: Path, net: BurstNet, config: Config) -> None:
    """A run folder of a network as it is, without a training."""
    folder.mkdir(parents=True)
    run_folder.write_text(folder / "config.toml", config.to_toml())
    checksum = run_folder.write_weights(folder, net.state_dict())
    result = {"weights_sha256": checksum, "config_hash": config.hash}
    run_folder.write_text(folder / "result.json", json.dumps(result))


def differences(a: Contents, b: Contents) -> list[str]:
    """Names of what differs."""
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def use_few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on a few digits, and record no commit."""
    few = small_digits()
    monkeypatch.setattr(digits, "load_digits", lambda: few)
    monkeypatch.setattr(run_folder, "_commit", lambda: "")


def run(settings: Config, folder: Path, watcher: job.Watcher | None = None) -> dict[str, Any]:
    return job.train(settings, folder, watcher or Silent(), resume=True)


class Killed(BaseException):
    """Stands for SIGKILL: nothing that catches errors catches it."""


def raising(error: type[BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


class AtStep(Silent):
    """Acts when a step is reported, which is before it is saved."""

    def __init__(self, epoch: int, batch: int, action: Callable[[], object]) -> None:
        super().__init__()
        self.when, self.action = (epoch, batch), action

    def step(self, epoch: int, batch: int, batches: int, samples_per_second: float) -> None:
        super().step(epoch, batch, batches, samples_per_second)
        if (epoch, batch) == self.when:
            self.action()


@contextmanager
def after_step(step: int, action: Callable[[], object]) -> Iterator[None]:
    """Act right after a step of any trainer, before anything is saved."""
    right = Trainer._step

    def changed(self: Trainer, parts: Any) -> None:
        right(self, parts)
        if self.position.step == step:
            action()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", changed)
        yield
