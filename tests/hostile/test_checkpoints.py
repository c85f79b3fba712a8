"""Checkpoints with a right checksum that no run wrote: each is refused in one line, before anything is trained."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lbq.errors import LbqError, RunError
from lbq.runs import checkpoint
from lbq.training import job
from lbq.training.epoch_log import EpochLog
from tests.support import small_runs
from tests.support.attacks import put

Change = Callable[[dict[str, Any], dict[str, Any]], Any]
SETTINGS = small_runs.config(small_runs.TINY, "train.epochs=2", "optim.momentum=0.9")


@dataclass
class Stopped:
    folder: Path
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]

    def resumed(self, change: Change) -> dict[str, Any]:
        """Continue the run from a changed checkpoint."""
        tensors, values = dict(self.tensors), copy.deepcopy(self.values)
        change(values, tensors)
        place = self.folder / job.CHECKPOINTS
        (place / checkpoint.PREVIOUS).unlink(missing_ok=True)
        (place / checkpoint.LAST).unlink()
        checkpoint.save(place, tensors, values)
        return small_runs.run(SETTINGS, self.folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use_few_digits(patch)
        with pytest.raises(small_runs.Killed), small_runs.after_step(6, small_runs.raising(small_runs.Killed)):
            small_runs.run(SETTINGS, folder)
        loaded = small_runs.last_checkpoint(folder)
        yield Stopped(folder, loaded.tensors, loaded.values)


def tensor(prefix: str, make: Callable[[torch.Tensor], torch.Tensor] | None) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        name = next(name for name in sorted(tensors) if name.startswith(prefix) and tensors[name].dim())
        old = tensors.pop(name)
        if make is not None:
            tensors[name] = make(old)

    return change


FORGED: dict[str, tuple[Change, str]] = {
    "no position": (put("position"), "position is missing"),
    "no epoch": (put("position", "epoch"), "position.epoch is missing"),
    "epoch -5": (put("position", "epoch", value=-5), "position.epoch must be a whole number, not negative, not -5"),
    "epoch 10^9": (put("position", "epoch", value=10**9), "it stands at epoch 1000000000, batch 1, and the run has 2"),
    "epoch true": (put("position", "epoch", value=True), "position.epoch must be a whole number"),
    "epoch 1.5": (put("position", "epoch", value=1.5), "position.epoch must be a whole number"),
    "batch beyond the epoch": (put("position", "batch", value=9), "it stands at epoch 1, batch 9"),
    "another step": (put("position", "step", value=4), "it stands at step 4 of stream 5"),
    "another stream": (put("position", "stream", value=0), "it stands at step 5 of stream 0"),
    "a place more": (put("position", "hook", value=1), "must be an epoch, a batch, a step and a stream"),
    "no tally": (put("tally"), "tally is missing"),
    "a tally of text": (put("tally", value=[["a", "b", "c"]]), "tally[0][0] must be a number"),
    "a tally of others": (put("tally", value=[[0.0, 0.0, 999.0, 0.0]]), "its tally counts 0 right of 999 samples"),
    "tallies of two lengths": (put("tally", value=[[0, 0, 0], [0, 0, 0, 0]]), "rows of three or four numbers"),
    "a scaler": (put("scaler", value={"scale": 1.0}), "its scaler must have no values"),
    "no log": (put("metrics_bytes", value=0), "holds 0 epochs, its checkpoint says 1"),
    "seconds of text": (put("seconds", value="1"), "seconds must be a number"),
    "first steps of others": (put("first_steps", value={"x": 1.0}), "its first steps are of other neurons"),
    "another run": (put("config_hash", value="0"), "belongs to another configuration"),
    "environment a list": (put("environment", value=[]), "environment must be an object"),
    "a lost momentum": (tensor("optim/", None), "is missing"),
    "a momentum of integers": (tensor("optim/", lambda t: t.long()), "must be float32"),
    "a momentum of another shape": (tensor("optim/", lambda t: t[None]), "must be float32"),
    "a momentum that is no number": (tensor("optim/", lambda t: t * float("nan")), "are not finite"),
    "weights in halves": (tensor("model/", lambda t: t.half()), "must be float32"),
    "a lost average": (tensor("average/", None), "is missing"),
    "a tensor more": (lambda _, tensors: tensors.update(x=torch.zeros(1)), "tensor 'x' belongs to nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_checkpoints_are_refused(name: str, stopped: Stopped) -> None:
    change, message = FORGED[name]
    log = (stopped.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(LbqError) as error:
        stopped.resumed(change)
    line = str(error.value)
    assert message in line
    assert line.isprintable()
    assert (stopped.folder / "metrics.jsonl").read_bytes() == log  # nothing is lost


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "holds 0 epochs, its checkpoint says 1"),
        ("{\n", "is not the log of a run"),
        ("[]\n", "line 1: it must be an object"),
        ('{"epoch": 1}\n', "line 1: loss is missing"),
        ("\xff\n", "is not the log of a run ('utf-8' codec can't decode byte 0xff"),
    ],
)
def test_logs_are_checked_too(lines: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(lines.encode("latin-1"))
    with pytest.raises(RunError) as error:
        EpochLog(tmp_path).check(len(lines), 1)
    assert message in str(error.value)


def test_what_will_be_trained_again_may_be_damaged(stopped: Stopped, tmp_path: Path) -> None:
    line = (stopped.folder / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\xff\0")
    EpochLog(tmp_path).cut(len(line), 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == line


def test_a_log_of_another_epoch(stopped: Stopped, tmp_path: Path) -> None:
    line = json.loads((stopped.folder / "metrics.jsonl").read_text())
    text = json.dumps({**line, "epoch": 7}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(RunError, match="line 1: its epoch is 7"):
        EpochLog(tmp_path).check(len(text), 1)


def test_the_checkpoint_itself_goes_on(stopped: Stopped) -> None:
    assert stopped.resumed(lambda *_: None)["epoch"] == 2
