"""A training job around its loop: signals, saving, its folder and lock, options, what it starts from and writes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lbq.config import Config
from lbq.errors import ConfigError, RunError, Stopped
from lbq.runs import checkpoint, records, run_folder
from lbq.system import files
from lbq.training import job, optim
from lbq.training.distributed import World
from lbq.training.position import EpochRecord
from lbq.training.tensorboard import TensorBoard
from tests.support import small_runs
from tests.support.small_runs import (
    AtStep,
    Killed,
    Silent,
    contents,
    differences,
    last_checkpoint,
    raising,
    run,
    use_few_digits,
)

config = partial(small_runs.config, small_runs.TINY)


@pytest.fixture(autouse=True)
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_digits(monkeypatch)


# Within this process: signals, the lock, folders
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_obeyed_between_steps(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    settings = config("train.checkpoint_steps=0")
    watcher = AtStep(1, 1, lambda: signal.raise_signal(number))
    with pytest.raises(Stopped, match=f"stopped by {number.name}") as caught:
        run(settings, tmp_path / "run", watcher)
    assert caught.value.code == 128 + number
    assert watcher.steps[-1] == (1, 1)
    assert signal.getsignal(number) == before
    again = Silent()
    run(settings, tmp_path / "run", again)
    assert again.resumptions == [(1, 2, ())]  # the step that was under way is kept
    assert again.steps[0] == (1, 3)
    run(settings, tmp_path / "whole")
    assert differences(contents(tmp_path / "whole"), contents(tmp_path / "run")) == []


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_is_passed_on_is_no_second_one(first: signal.Signals, tmp_path: Path) -> None:
    """As where a launcher is told together with what it started."""

    def both() -> None:
        for number in (first, signal.SIGTERM):
            signal.raise_signal(number)

    with pytest.raises(Stopped, match=f"stopped by {first.name}"):
        run(config(), tmp_path / "run", AtStep(1, 1, both))
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(config(), tmp_path / "run", AtStep(1, 1, twice))
    finally:
        signal.signal(signal.SIGINT, usual)
    run(config(), tmp_path / "run")
    run(config(), tmp_path / "whole")
    assert differences(contents(tmp_path / "whole"), contents(tmp_path / "run")) == []


def test_saving_by_time(tmp_path: Path) -> None:
    settings = config("train.checkpoint_steps=0", "train.checkpoint_minutes=1e-9")
    with pytest.raises(Killed):
        run(settings, tmp_path, AtStep(1, 3, raising(Killed)))
    loaded = last_checkpoint(tmp_path)
    assert loaded.values["position"]["step"] == 6


def test_saving_takes_little_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short epochs do not each end with a slow save, but the last one does."""
    saved: list[int] = []
    original, now = checkpoint.save, 0.0

    class Clock(Silent):
        def step(self, *_: Any) -> None:
            nonlocal now
            now += 1

    def slow(folder: Path, tensors: Any, values: dict[str, Any]) -> None:
        nonlocal now
        now += 0.2
        saved.append(values["position"]["epoch"])
        original(folder, tensors, values)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(job, "time", types.SimpleNamespace(monotonic=lambda: now))
    run(config("train.epochs=6", "train.checkpoint_steps=0"), tmp_path / "run", Clock())
    assert saved == [1, 4, 6]  # 0.2 s are 2 % of 10, and an epoch takes 4
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    result = run(config(), tmp_path)
    watcher = Silent()
    assert run(config(), tmp_path, watcher) == result
    assert not watcher.plans
    assert not watcher.steps
    with pytest.raises(RunError, match="holds a run already: continue it with --resume auto"):
        job.train(config(), tmp_path, Silent())
    with pytest.raises(RunError, match=r"config\.toml differs from the configuration given"):
        run(config("seed=4"), tmp_path)


def test_a_folder_in_which_nothing_was_trained_takes_another_run(tmp_path: Path) -> None:
    """As after a mistake in a network of one's own, which the first step shows."""

    class Broken(Silent):
        def step(self, *_: object) -> None:
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        job.train(config(), tmp_path / "run", Broken())
    job.train(config("seed=4"), tmp_path / "run", Silent())
    assert Config.load(tmp_path / "run" / "config.toml").seed == 4


@pytest.mark.parametrize("text", ["", '{"accuracy": 9', "[]", '{"accuracy": "x", "epoch": 3}'])
def test_a_damaged_result_is_named_and_can_be_written_again(tmp_path: Path, text: str) -> None:
    settings = config("train.epochs=1", "train.warmup_epochs=0")
    result = run(settings, tmp_path)
    (tmp_path / "result.json").write_text(text)
    again = r"result\.json .*; remove it, and lbq train with --resume auto writes it again$"
    with pytest.raises(RunError, match=again):
        run(settings, tmp_path)
    with pytest.raises(RunError, match=again):
        job.evaluate_run(tmp_path)
    (tmp_path / "result.json").write_text("{}")  # as of a run that was not trained here
    with pytest.raises(RunError, match=r"accuracy is missing; remove it"):
        run(settings, tmp_path)
    assert job.evaluate_run(tmp_path, device="cpu")["stored_accuracy"] is None
    (tmp_path / "result.json").unlink()
    assert run(settings, tmp_path) == result


def test_training_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    settings = config("train.epochs=1", "train.warmup_epochs=0")
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []
    watcher = AtStep(0, 1, lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run, settings, tmp_path / "thread", watcher).result()
    assert seen == [before]
    assert result["accuracy"] == run(settings, tmp_path / "main")["accuracy"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_off_holds_no_folder(tmp_path: Path) -> None:
    """As workers are, which outlive a killed training for seconds: it could not be continued meanwhile."""
    fork = multiprocessing.get_context("fork")
    began, end = fork.Event(), fork.Event()

    def stay() -> None:
        began.set()
        end.wait(60)

    with run_folder.locked(tmp_path):
        child = fork.Process(target=stay)
        child.start()
        assert began.wait(60)
        assert run_folder.held(tmp_path)  # by this one
    assert not run_folder.held(tmp_path)
    end.set()
    child.join()


def test_a_system_without_locks_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows, where importing it fails
    with run_folder.locked(tmp_path), run_folder.locked(tmp_path):
        assert not run_folder.held(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_a_file_system_without_locks_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    busy = RunError("busy")
    with (
        run_folder.locked(tmp_path),
        run_folder.locked(tmp_path),
        files.holding(tmp_path, busy),
        files.holding(tmp_path, busy),
    ):
        assert not run_folder.held(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="is not empty and not a run folder"):
        run(config(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]  # and nothing is put there


def test_commands_quote_paths(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    for name in ("config.toml", run_folder.CONVERSION):
        (folder / name).write_text("")
    with pytest.raises(RunError, match=rf"train from it with 'train\.init_from={folder}' and another --out"):
        run(config(), folder)
    with pytest.raises(RunError, match=rf"train on with 'train\.init_from={folder}'"):
        run_folder.check_folder(folder, "result.json")


def test_a_path_that_has_no_text_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written as TOML"):
        run(config("data.root=data\udcff"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_metrics_that_lost_their_lines_are_named(tmp_path: Path) -> None:
    """Growing the file with zeros would hide it until the end."""
    with pytest.raises(Killed):
        run(config(), tmp_path, AtStep(1, 2, raising(Killed)))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match=r"metrics\.jsonl is shorter than its checkpoint says"):
        run(config(), tmp_path)


def test_without_a_checkpoint_it_starts_again_says_so_and_keeps_the_log(tmp_path: Path) -> None:
    run(config(), tmp_path / "whole")
    folder = tmp_path / "run"
    logs = []
    for number in (1, 2):
        with pytest.raises(Killed):
            run(config(), folder, AtStep(number, 2, raising(Killed)))
        logs.append((folder / "metrics.jsonl").read_bytes())
        assert logs[-1].count(b"\n") == number
        shutil.rmtree(folder / job.CHECKPOINTS)
        watcher = AtStep(0, 1, raising(Killed))
        with pytest.raises(Killed):
            run(config(), folder, watcher)
        assert watcher.logs == [folder / f"metrics.jsonl.{number}"]
        assert not (folder / "metrics.jsonl").exists()
    last = Silent()
    run(config(), folder, last)  # nothing logged since: nothing to keep or to say
    assert (last.resumptions, last.logs) == ([], [])
    assert [(folder / f"metrics.jsonl.{n}").read_bytes() for n in (1, 2)] == logs
    assert differences(contents(tmp_path / "whole"), contents(folder)) == []


def test_a_log_that_cannot_be_kept_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Killed):
        run(config(), tmp_path, AtStep(1, 2, raising(Killed)))
    shutil.rmtree(tmp_path / job.CHECKPOINTS)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match=r"cannot rename .*metrics\.jsonl: Permission denied"):
        run(config(), tmp_path)


# Options
# ---------------------------------------------------------------------------------------------------------------------


def test_deterministic_is_for_the_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flags() -> tuple[bool, bool, bool, str | None]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ.get(job.CUBLAS_WORKSPACE),
        )

    monkeypatch.delenv(job.CUBLAS_WORKSPACE, raising=False)
    seen: list[Any] = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = flags()
        run(config("train.deterministic=true"), tmp_path / "a", AtStep(0, 1, lambda: seen.append(flags())))
        assert seen == [(True, False, False, ":4096:8")]
        assert flags() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_training_leaves_the_callers_random_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(config(), tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)  # and does not depend on it
    run(config(), tmp_path / "b")
    assert differences(contents(tmp_path / "a"), contents(tmp_path / "b")) == []


def test_tensorboard_shows_every_epoch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watcher, folder = Silent(), tmp_path / "a"
    run(config("train.tensorboard=true"), folder, watcher)
    assert len(list((folder / "tensorboard").iterdir())) == 1
    shown = EventAccumulator(str(folder / "tensorboard")).Reload()
    lines = {tag: {event.step: event.value for event in shown.Scalars(tag)} for tag in shown.Tags()["scalars"]}
    records = {record.epoch: record for record in watcher.records}
    assert lines["loss"] == pytest.approx({epoch: record.loss for epoch, record in records.items()})
    layer = "layer1.0.sn2"
    assert lines[f"steps/{layer}"] == pytest.approx({e: record.steps[layer] for e, record in records.items()})
    tested = {epoch: record.test_accuracy for epoch, record in records.items() if record.test_accuracy is not None}
    assert tested
    assert lines["test_accuracy"] == pytest.approx(tested)
    assert not {"epoch", "tested_in"} & lines.keys()


def test_tensorboard_shows_an_epoch_once_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watcher = Silent()
    run(config("train.epochs=4"), tmp_path / "a", watcher)
    first, second, third, fourth = watcher.records
    killed = first, second, third  # after its third epoch, before the checkpoint
    for epochs in (killed, (replace(third, loss=7.0), fourth)):
        board = TensorBoard(tmp_path / "board")
        for record in epochs:
            board.epoch(record)
        board.close()
    shown = EventAccumulator(str(tmp_path / "board")).Reload().Scalars("loss")
    assert [event.step for event in shown] == [1, 2, 3, 4]
    assert shown[2].value == 7.0


# Starting from another run
# ---------------------------------------------------------------------------------------------------------------------


def test_averages_start_from_the_weights_that_training_starts_from(tmp_path: Path) -> None:
    run(config(), tmp_path / "ann")
    settings = config(
        f"train.init_from={tmp_path / 'ann'}", "optim.lr=1e-30", "train.epochs=1", "train.warmup_epochs=0"
    )
    run(settings, tmp_path / "tuned")
    theirs, ours = run_folder.read_weights(tmp_path / "ann"), run_folder.read_weights(tmp_path / "tuned")
    assert torch.allclose(theirs["conv1.weight"], ours["conv1.weight"])
    assert run_folder.read_result(tmp_path / "tuned")["init_sha256"] == run_folder.weights_checksum(tmp_path / "ann")
    assert records.record_of(tmp_path / "tuned")["init_sha256"] == run_folder.weights_checksum(tmp_path / "ann")
    with pytest.raises(RunError, match=r"train\.init_from: no weight of .* fits this network"):
        run(config(f"train.init_from={tmp_path / 'ann'}", "model.id=resnet8w3"), tmp_path / "other")


def test_what_a_start_from_other_weights_leaves_anew_is_told(tmp_path: Path) -> None:
    """One step for a layer becomes that of each channel; what the other run does not have begins anew."""
    short = ("train.epochs=1", "train.warmup_epochs=0", "optim.lr=1e-30")
    run(config(*short, "neuron.name=lbq", "neuron.step=0.7"), tmp_path / "layerwise")
    start = f"train.init_from={tmp_path / 'layerwise'}"
    seen = Silent()
    result = run(config(*short, start, "neuron.name=lbq", "neuron.per_channel=true"), tmp_path / "channels", seen)
    assert seen.starts == [(str(tmp_path / "layerwise"), seen.starts[0][1], ())]
    assert seen.starts[0][1] > 20
    assert all(step == pytest.approx(0.7) for step in result["steps"].values())
    run(config(*short, start, "neuron.name=lbq", "model.id=resnet14w2"), tmp_path / "deeper", seen)
    assert "layer1.1.conv1.weight" in seen.starts[1][2]
    assert "sn1.rho" not in seen.starts[1][2]


def replace_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """As if the run had ended with these."""
    checksum = run_folder.write_weights(folder, weights)
    result = {**run_folder.read_result(folder), "weights_sha256": checksum}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def test_constants_are_the_configurations_own_whatever_weights_it_starts_from(tmp_path: Path) -> None:
    """But for those with which both began: a conversion changes them layer by layer."""
    short = ("train.epochs=1", "train.warmup_epochs=0", "optim.lr=1e-30")
    fixed = ("neuron.name=burst_fixed",)
    run(config(*short, *fixed), tmp_path / "first")
    weights = run_folder.read_weights(tmp_path / "first")
    changed = {k: v + 0.25 if k.endswith("fixed_step") else v for k, v in weights.items()}
    replace_weights(tmp_path / "first", changed)
    start, seen = f"train.init_from={tmp_path / 'first'}", Silent()
    run(config(*short, *fixed, start), tmp_path / "same", seen)
    assert seen.starts[0][2] == ()
    assert torch.equal(run_folder.read_weights(tmp_path / "same")["sn1.fixed_step"], changed["sn1.fixed_step"])
    run(config(*short, *fixed, start, "neuron.beta=0.9", "neuron.step=0.1"), tmp_path / "other", seen)
    weights_now = run_folder.read_weights(tmp_path / "other")
    assert (float(weights_now["sn1.beta"]), float(weights_now["sn1.fixed_step"])) == pytest.approx((0.9, 0.1))
    assert {"sn1.beta", "sn1.fixed_step"} <= set(seen.starts[1][2])
    replace_weights(tmp_path / "other", {**weights_now, "sn1.beta": torch.tensor(0.5)})
    again = ("neuron.beta=0.9", "neuron.step=0.1", f"train.init_from={tmp_path / 'other'}")
    run(config(*short, *fixed, *again), tmp_path / "again")  # whose weights have another decay than its configuration
    assert float(run_folder.read_weights(tmp_path / "again")["sn1.beta"]) == pytest.approx(0.9)
    (tmp_path / "first" / "config.toml").unlink()  # weights alone say nothing of how they began
    run(config(*short, *fixed, start, "neuron.alpha=0.5"), tmp_path / "bare", seen)
    assert float(run_folder.read_weights(tmp_path / "bare")["sn1.alpha"]) == 0.5


def test_a_run_that_began_does_without_the_weights_it_started_from(tmp_path: Path) -> None:
    run(config("train.epochs=1", "train.warmup_epochs=0"), tmp_path / "ann")
    settings = config(f"train.init_from={tmp_path / 'ann'}", "train.epochs=2")
    with pytest.raises(Stopped):
        run(settings, tmp_path / "tuned", AtStep(0, 1, lambda: signal.raise_signal(signal.SIGTERM)))
    began_with = run_folder.weights_checksum(tmp_path / "ann")
    shutil.rmtree(tmp_path / "ann")
    finished = run(settings, tmp_path / "tuned")
    assert finished["epoch"] == 2
    assert finished["init_sha256"] == began_with
    assert run(settings, tmp_path / "tuned") == finished
    with pytest.raises(RunError, match=r"train\.init_from: .*ann does not exist"):
        run(settings, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_records_and_result(tmp_path: Path) -> None:
    watcher = Silent()
    result = run(config("data.holdout=0.2", "train.eval_every=2", "train.batch_size=10"), tmp_path, watcher)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [json.loads(json.dumps(asdict(record))) for record in watcher.records]
    assert [line["test_accuracy"] is None for line in lines] == [True, False, False]
    assert all(isinstance(record, EpochRecord) for record in watcher.records)
    assert result["accuracy"] == lines[-1]["test_accuracy"]
    reads = run_folder.read_inputs(tmp_path)
    assert reads is not None
    assert (reads.name, reads.shape, reads.static, reads.scale) == ("digits", (1, 8, 8), True, 16)
    assert reads.classes == tuple("0123456789")
    assert len(reads.mean) == len(reads.std) == 1
    assert result["best_on_holdout"] == max(lines[1:], key=lambda line: line["holdout_accuracy"])["epoch"]
    assert len(lines[0]["steps"]) == len(lines[0]["tails"]) == len(lines[1]["active"]) == 3
    (plan,) = watcher.plans
    assert (plan.steps_per_epoch, plan.train_samples, plan.emulated) == (4, 40, None)
    net = run_folder.load(tmp_path)
    assert plan.parameters == sum(p.numel() for p in net.parameters())
    facts = job.evaluate_run(tmp_path, device=torch.device("cpu"), world=World())
    assert facts == {
        "accuracy": result["accuracy"],
        "images": 31,
        "stored_accuracy": result["accuracy"],
        "stored_precision": "fp32",
        "other_data": False,
        "precision": "fp32",
        "trained_in": "fp32",
        "timesteps": config().model.timesteps,
        "trained_over": config().model.timesteps,
    }
    assert optim.learning_rate(11, 4, config()) == pytest.approx(lines[-1]["lr"])
