"""A run that was killed, stopped, or met a full disk gives the same bytes as one that was not.

`LBQ_KILLS=200 pytest tests/test_resume.py -k killed` draws more kills than the usual 20.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from lbq import checkpoint, cli, files, job, models, optim, runs
from lbq.config import Config
from lbq.data import digits
from lbq.deploy import lower
from lbq.distributed import World
from lbq.errors import LbqError, RunError
from lbq.neuron import BurstNeuron
from lbq.train import Diverged, EpochRecord, Trainer
from tests.small_runs import Contents, Silent, config, contents, differences, small_digits, state_of, timeless, trainer

STEPS = 12


@pytest.fixture(autouse=True)
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    few = small_digits()
    monkeypatch.setattr(digits, "load_digits", lambda: few)
    monkeypatch.setattr(runs, "_commit", lambda: "")


def run(settings: Config, folder: Path, watcher: job.Watcher | None = None) -> dict[str, Any]:
    return job.train(settings, folder, watcher or Silent(), resume=True)


# Every batch boundary
# ---------------------------------------------------------------------------------------------------------------------

VARIANTS = {
    "sgd": [],
    "adamw-tet-fp64": ["optim.name=adamw", "optim.lr=0.002", "train.loss=tet", "train.precision=fp64"],
    "accumulate-clip": ["train.accumulate=2", "optim.clip=0.5", "train.sync_batchnorm=true"],
    "channels-last-mix": ["train.channels_last=true", "augment.mixup=0.5", "augment.cutmix=1.0", "optim.momentum=0.5"],
    "adamw-shared-tail": [
        "optim.name=adamw",
        "optim.lr=0.002",
        "model.share_tail=true",
        "data.holdout=0.1",
        "train.batch_size=11",
    ],
    "fp16": ["train.precision=fp16", "train.epochs=2", "train.batch_size=8", "optim.clip=1.0"],
    "sgd-fp64-no-ema": ["train.precision=fp64", "train.ema=0.0", "optim.momentum=0.0", "train.eval_every=2"],
}


def interrupted(settings: Config, after: int, folder: Path) -> tuple[Contents, list[dict[str, Any]]]:
    """Train `after` steps, save, and go on in a new trainer; the final state and all records."""

    def enough(made: Trainer) -> bool:
        return made.position.step == after

    first = trainer(settings, between_steps=enough)
    records = list(first.fit())
    checkpoint.save(folder, *first.state())
    loaded = checkpoint.load(folder)
    assert loaded is not None
    torch.manual_seed(after)  # whatever the process did before
    second = trainer(settings)
    second.restore(loaded.tensors, loaded.values)
    records += second.fit()
    return state_of(second), [timeless(record.to_dict()) for record in records]


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_at_every_batch_boundary_is_exact(variant: str, tmp_path: Path) -> None:
    settings = config(*VARIANTS[variant])
    whole = trainer(settings)
    records = [timeless(record.to_dict()) for record in whole.fit()]
    final = state_of(whole)
    assert final["values"]["position"] == {"epoch": settings.train.epochs, "batch": 0, "step": STEPS, "stream": STEPS}
    for after in range(1, STEPS + 1):
        resumed, seen = interrupted(settings, after, tmp_path / str(after))
        assert differences(final, resumed) == [], after
        assert seen == records, after


def test_the_random_stream_matters() -> None:
    """Otherwise the tests here would not see it broken."""
    final = []
    for dropout in ("0.3", "0.0"):
        made = trainer(config(f"model.dropout={dropout}"))
        list(made.fit())
        final.append(state_of(made))
    assert "model/fc.weight" in differences(*final)


# Deliberately broken restores
# ---------------------------------------------------------------------------------------------------------------------


def _position(key: str, value: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def breaks(tensors: dict[str, Any], values: dict[str, Any]) -> None:
        assert values["position"][key] != value
        values["position"][key] = value

    return breaks


def _without_rho(tensors: dict[str, Any], values: dict[str, Any]) -> None:
    fresh = models.create("resnet8w2", in_channels=1).state_dict()
    for name in [name for name in tensors if name.startswith("model/") and name.endswith("rho")]:
        tensors[name] = fresh[name.removeprefix("model/")]


def _without(prefix: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def breaks(tensors: dict[str, Any], values: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return breaks


def _no_tally(tensors: dict[str, Any], values: dict[str, Any]) -> None:
    values["tally"] = [[0.0, 0.0, 0.0]]


MUTATIONS: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "random stream": _position("stream", 0),
    "schedule": _position("step", 0),
    "data cursor": _position("batch", 0),
    "step parameters": _without_rho,
    "momentum": _without("optim/"),
    "averages": _without("average/"),
    "metrics": _no_tally,
}


def broken_restore(mutation: str | None) -> Callable[[], None]:
    """A child's preparation: a restore that gets something wrong."""

    def setup() -> None:
        right = Trainer.restore

        def restore(self: Trainer, tensors: dict[str, Any], values: dict[str, Any]) -> None:
            if mutation is not None:
                MUTATIONS[mutation](tensors, values)
            right(self, tensors, values)

        Trainer.restore = restore  # type: ignore[method-assign]

    return setup


# Kills, in one process that forks: importing torch takes longer than the run
# ---------------------------------------------------------------------------------------------------------------------


class Forks:
    """Runs `lbq train` in forked children of this process, which has imported everything and never trained itself."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        few = small_digits()
        digits.load_digits = lambda: few
        runs._commit = lambda: ""
        self.folder = folder
        self.config = folder / "config.toml"
        self.config.write_text(config().to_toml())
        made = trainer(config())
        made.evaluate("test")
        lower(made.net, (1, 8, 8), 2)
        self.whole = folder / "whole"
        started = time.monotonic()
        assert self.wait(self.start(self.whole)) == 0
        self.seconds = time.monotonic() - started
        self.expected = contents(self.whole)

    def start(self, out: Path, setup: Callable[[], None] = lambda: None) -> int:
        """The process id of a child that trains into `out`, its stderr in `out`.err."""
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            sink = os.open(out.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            setup()
            cli.main(["train", str(self.config), "--out", str(out), "--resume", "auto", "--device", "cpu"])
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    @staticmethod
    def wait(pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def messages(self, out: Path) -> list[str]:
        return [x for x in out.with_suffix(".err").read_text().splitlines() if x.startswith("lbq: ")]


def at_step(step: int, action: Callable[[], object]) -> Callable[[], None]:
    """A child's preparation: do something right after a step, before anything is saved."""

    def setup() -> None:
        right = Trainer._step

        def after(self: Trainer, micro: Any) -> None:
            right(self, micro)
            if self.position.step == step:
                action()

        Trainer._step = after  # type: ignore[method-assign]

    return setup


def _send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def kills(folder: Path, count: int) -> dict[str, Any]:
    """`count` kills at random moments of run after run, each continued until it is done."""
    forks = Forks(folder)
    draw = random.Random(count)
    killed = finished = resumed = 0
    positions: list[int] = []
    started = time.monotonic()
    while killed < count:
        out = folder / f"run-{finished}"
        while True:
            pid = forks.start(out)
            time.sleep(draw.uniform(0, 1.05 * forks.seconds) if killed < count else forks.seconds)
            if killed < count:
                os.kill(pid, signal.SIGKILL)  # a zombie takes it without harm
            code = forks.wait(pid)
            loaded = checkpoint.load(out / job.CHECKPOINTS)  # raises where a checkpoint is damaged
            assert loaded is None or not loaded.skipped, loaded
            if code == 0:
                break
            assert code == -signal.SIGKILL, (code, out.with_suffix(".err").read_text())
            killed += 1
            positions.append(0 if loaded is None else loaded.values["position"]["step"])
            resumed += loaded is not None
        wrong = differences(forks.expected, contents(out))
        assert not wrong, wrong
        finished += 1
    return {
        "kills": killed,
        "runs": finished,
        "with_checkpoint": resumed,
        "positions": len(set(positions)),
        "run_seconds": round(forks.seconds, 2),
        "seconds": round(time.monotonic() - started, 1),
    }


def mutations(folder: Path) -> dict[str, Any]:
    """What the comparison says where a run killed after step 6 is continued by a broken restore."""
    forks = Forks(folder)
    found: dict[str, Any] = {}
    for mutation in [None, *MUTATIONS]:
        out = folder / f"mutation-{mutation}"
        assert forks.wait(forks.start(out, at_step(7, _send(signal.SIGKILL)))) == -signal.SIGKILL
        code = forks.wait(forks.start(out, broken_restore(mutation)))
        found[str(mutation)] = differences(forks.expected, contents(out)) if code == 0 else ["failed"]
    return found


def signals(folder: Path) -> dict[str, Any]:
    """Exit codes and messages of stopped runs, and of a second process in a folder that is in use."""
    forks = Forks(folder)
    found: dict[str, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        for step in (3, 4, STEPS):  # within an epoch, at its end, at the run's end
            out = folder / f"{number.name}-{step}"
            code = forks.wait(forks.start(out, at_step(step, _send(number))))
            messages, loaded = forks.messages(out), checkpoint.load(out / job.CHECKPOINTS)
            assert loaded is not None
            assert loaded.values["position"]["step"] == step
            assert forks.wait(forks.start(out)) == 0
            found[f"{number.name} {step}"] = [code, messages, differences(forks.expected, contents(out))]
    out, (reader, writer) = folder / "shared", os.pipe()
    first = forks.start(out, at_step(2, lambda: os.read(reader, 1)))
    while not (out / job.CHECKPOINTS / checkpoint.LAST).exists():
        time.sleep(0.005)
    second = forks.wait(forks.start(out))
    messages = forks.messages(out)
    os.write(writer, b"x")
    found["second"] = [second, messages, forks.wait(first), differences(forks.expected, contents(out))]
    return found


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Calls a function in a fresh process that may fork: this one has threads."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield lambda function, *rest: pool.apply(function, (tmp_path_factory.mktemp("forks"), *rest))


def test_killed_at_random_moments(helper: Ask) -> None:
    count = int(os.environ.get("LBQ_KILLS", "20"))
    report = helper(kills, count)
    sys.stderr.write(f"{report}\n")
    assert report["kills"] == count
    assert report["with_checkpoint"] >= count / 4
    assert report["positions"] >= 4  # the kills were spread over the run


def test_broken_restores_are_caught(helper: Ask) -> None:
    found = helper(mutations)
    assert found.pop("None") == []  # the same procedure with the right restore
    assert found.keys() == MUTATIONS.keys()
    for mutation, wrong in found.items():
        assert wrong, mutation


def test_signals_save_and_stop(helper: Ask) -> None:
    found = helper(signals)
    second, messages, first, wrong = found.pop("second")
    assert (second, first, wrong) == (2, 0, [])
    assert len(messages) == 1
    assert "shared is being written by another process" in messages[0]
    assert len(found) == 6
    for case, (code, messages, wrong) in found.items():
        name = case.split()[0]
        assert code == {"SIGTERM": 143, "SIGINT": 130}[name], case
        assert len(messages) == 1
        assert f"stopped by {name};" in messages[0]
        assert "continues with --resume auto" in messages[0]
        assert wrong == [], case


# Failures of every single write
# ---------------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing that catches errors catches it."""


class Disk:
    """Counts what reaches the file system; the operation `fail_at` fails, or is the process's last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int, kill: bool) -> None:
        self.count, self.fail_at, self.kill = 0, fail_at, kill
        self.log: list[str] = []
        for name in ("fsync", "replace", "rename", "truncate", "unlink", "mkdir", "link"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        for module in (files, job, runs):
            monkeypatch.setattr(module, "open", self._open, raising=False)

    def touch(self, what: str) -> None:
        self.log.append(what)
        self.count += 1
        if self.count == self.fail_at:
            if self.kill:
                raise Killed
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _wrap(self, name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name != "mkdir" or not os.path.exists(arguments[0]):
                self.touch(name)
            return right(*arguments, **options)

        return call

    def _open(self, path: Any, mode: str = "r", **options: Any) -> IO[Any]:
        if mode == "r":
            return open(path, mode, **options)
        self.touch("open")
        file: IO[Any] = open(path, mode, **options)  # noqa: SIM115 - the caller closes it
        right = file.write

        def write(data: Any) -> int:
            try:
                self.touch("write")
            except BaseException:
                right(data[: len(data) // 2])  # a part of it arrives
                file.flush()
                raise
            return right(data)

        file.write = write  # type: ignore[method-assign]
        return file


FAULTY = config(
    "train.epochs=3", "train.batch_size=50", "train.eval_every=3", "train.checkpoint_steps=0", "train.ema=0.0"
)


@pytest.mark.parametrize("kill", [False, True], ids=["error", "kill"])
def test_every_failing_write_is_named_and_survived(kill: bool, tmp_path: Path) -> None:
    run(FAULTY, tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, -1, kill)
        run(FAULTY, tmp_path / "counted")
    assert {"fsync", "replace", "open", "write"} <= set(disk.log)
    assert disk.count > 30
    for k in range(1, disk.count + 1):
        folder = tmp_path / str(k)
        what = disk.log[k - 1]
        with pytest.MonkeyPatch.context() as patch:
            faulty = Disk(patch, k, kill)
            with pytest.raises(Killed if kill else LbqError) as caught:
                run(FAULTY, folder)
        assert faulty.log[-1 if kill else k - 1] == what
        if not kill:
            assert "\n" not in str(caught.value)
            assert os.strerror(errno.EIO) in str(caught.value), what
            assert str(folder) in str(caught.value), what
        run(FAULTY, folder)
        assert differences(expected, contents(folder)) == [], (k, what)
        assert not list(folder.rglob("*.partial"))


def test_a_damaged_checkpoint_is_passed_over_and_never_takes_the_good_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config()
    run(settings, tmp_path / "whole")
    folder = tmp_path / "run"
    checkpoints = folder / job.CHECKPOINTS
    with pytest.raises(Killed):
        run(settings, folder, _AtStep(1, 2, _raise(Killed)))
    last = checkpoints / checkpoint.LAST
    last.write_bytes(last.read_bytes()[:-1] + b"!")
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        real(source, target)
        if Path(target).name == checkpoint.PREVIOUS:
            raise Killed

    watcher = Silent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            run(settings, folder, watcher)
    assert "last.safetensors is damaged" in watcher.resumptions[0][2][0]
    run(settings, folder)
    assert differences(contents(tmp_path / "whole"), contents(folder)) == []


def _raise(error: type[BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


class _AtStep(Silent):
    """Acts when a step is reported, which is before it is saved."""

    def __init__(self, epoch: int, batch: int, action: Callable[[], object]) -> None:
        super().__init__()
        self.when, self.action = (epoch, batch), action

    def step(self, epoch: int, batch: int, batches: int, samples_per_second: float) -> None:
        super().step(epoch, batch, batches, samples_per_second)
        if (epoch, batch) == self.when:
            self.action()


# Within this process: signals, the lock, folders
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_obeyed_between_steps(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    settings = config("train.checkpoint_steps=0")
    watcher = _AtStep(1, 1, lambda: signal.raise_signal(number))
    with pytest.raises(job.Stopped, match=f"stopped by {number.name}") as caught:
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


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(config(), tmp_path / "run", _AtStep(1, 1, twice))
    finally:
        signal.signal(signal.SIGINT, usual)
    run(config(), tmp_path / "run")
    run(config(), tmp_path / "whole")
    assert differences(contents(tmp_path / "whole"), contents(tmp_path / "run")) == []


def test_saving_by_time(tmp_path: Path) -> None:
    settings = config("train.checkpoint_steps=0", "train.checkpoint_minutes=1e-9")
    with pytest.raises(Killed):
        run(settings, tmp_path, _AtStep(1, 3, _raise(Killed)))
    loaded = checkpoint.load(tmp_path / job.CHECKPOINTS)
    assert loaded is not None
    assert loaded.values["position"]["step"] == 6


def test_saving_takes_little_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short epochs do not each end with a slow save, but the last one does."""
    saved: list[int] = []
    original = checkpoint.save

    def slow(folder: Path, tensors: Any, values: dict[str, Any]) -> None:
        time.sleep(0.5)
        saved.append(values["position"]["epoch"])
        original(folder, tensors, values)

    monkeypatch.setattr(checkpoint, "save", slow)
    settings = config("train.epochs=6", "train.checkpoint_steps=0")
    run(settings, tmp_path / "run")
    assert len(saved) < 6
    assert saved[0] == 1
    assert saved[-1] == 6
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


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="is not empty and not a run folder"):
        run(config(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "thesis.tex"]


def test_metrics_that_lost_their_lines_are_named(tmp_path: Path) -> None:
    """Growing the file with zeros would hide it until the end."""
    with pytest.raises(Killed):
        run(config(), tmp_path, _AtStep(1, 2, _raise(Killed)))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match=r"metrics\.jsonl is shorter than its checkpoint says"):
        run(config(), tmp_path)


def test_without_a_checkpoint_it_starts_again_says_so_and_keeps_the_log(tmp_path: Path) -> None:
    run(config(), tmp_path / "whole")
    folder = tmp_path / "run"
    logs = []
    for number in (1, 2):
        with pytest.raises(Killed):
            run(config(), folder, _AtStep(number, 2, _raise(Killed)))
        logs.append((folder / "metrics.jsonl").read_bytes())
        assert logs[-1].count(b"\n") == number
        shutil.rmtree(folder / job.CHECKPOINTS)
        watcher = _AtStep(0, 1, _raise(Killed))
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
        run(config(), tmp_path, _AtStep(1, 2, _raise(Killed)))
    shutil.rmtree(tmp_path / job.CHECKPOINTS)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match=r"cannot rename .*metrics\.jsonl: Permission denied"):
        run(config(), tmp_path)


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    refused: list[str] = []

    def intrude() -> None:
        with pytest.raises(RunError) as caught:
            run(config(), tmp_path / "run")
        refused.append(str(caught.value))

    run(config(), tmp_path / "run", _AtStep(1, 1, intrude))
    assert len(refused) == 1
    assert "is being written by another process" in refused[0]
    run(config(), tmp_path / "whole")
    assert differences(contents(tmp_path / "whole"), contents(tmp_path / "run")) == []


# Losses that are no numbers
# ---------------------------------------------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    lines = capsys.readouterr().err.splitlines()
    return int(stop.value.code or 0), [line for line in lines if line.startswith("lbq: ")]


def test_divergence_names_layer_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "wild.toml", tmp_path / "run"
    file.write_text(config("optim.lr=1e38", "train.warmup_epochs=0", "optim.neuron_lr=1e-40").to_toml())
    code, messages = call(capsys, "train", str(file), "--out", str(out), "--device", "cpu")
    assert code == 2
    assert len(messages) == 1
    assert "loss became" in messages[0]
    assert "epoch 1, step 2, first in layer '" in messages[0]
    assert "lower optim.lr (1e+38)" in messages[0]
    loaded = checkpoint.load(out / job.CHECKPOINTS)
    assert loaded is not None
    assert loaded.values["position"]["step"] == 1


def plant(layer: str, step: int, where: str) -> Callable[[], None]:
    """A NaN in a layer's weight, or in its gradient, at one step."""
    right = Trainer._step

    def changed(self: Trainer, micro: Any) -> None:
        handle = None
        if self.position.step == step:
            weight = self.net.get_submodule(layer).weight
            assert isinstance(weight, torch.nn.Parameter)
            if where == "weight":
                weight.data.view(-1)[0] = float("nan")
            else:
                handle = weight.register_hook(lambda grad: grad * float("nan"))
        right(self, micro)
        if handle is not None:
            handle.remove()

    def setup() -> None:
        Trainer._step = changed  # type: ignore[method-assign]

    return setup


@pytest.mark.parametrize(
    ("layer", "where", "found"),
    [
        ("layer2.0.conv2", "weight", "epoch 2, step 3, first in layer 'layer2.0.conv2'"),
        ("conv1", "gradient", r"conv1\.weight is no longer finite after epoch 2, step 3"),  # the loss was still finite
    ],
)
def test_a_nan_stops_and_the_last_good_checkpoint_stays(
    layer: str, where: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", Trainer._step)  # put back afterwards
        plant(layer, 6, where)()
        with pytest.raises(Diverged, match=found) as caught:
            run(config(), tmp_path / "run")
    assert "\n" not in str(caught.value)
    loaded = checkpoint.load(tmp_path / "run" / job.CHECKPOINTS)
    assert loaded is not None
    assert loaded.values["position"]["step"] == 6
    assert all(value.isfinite().all() for value in loaded.tensors.values())
    run(config(), tmp_path / "run")  # the cause removed, it goes on
    run(config(), tmp_path / "whole")
    assert differences(contents(tmp_path / "whole"), contents(tmp_path / "run")) == []


def test_a_nan_in_the_data_is_named() -> None:
    made = trainer(config())
    right = made.source.train_batches

    def batches(*arguments: Any) -> Iterator[Any]:
        for x, y in right(*arguments):
            x[0, 0, 0, 0] = float("nan")
            yield x, y

    made.source.train_batches = batches  # type: ignore[method-assign, assignment]
    with pytest.raises(Diverged, match="epoch 1, step 1, first in the input"):
        list(made.fit())


def test_a_step_that_collapses_stops_training(tmp_path: Path) -> None:
    """Softplus has no slope there, so the layer would stay dead for the rest of the run."""
    wild = config("neuron.name=v3", "neuron.surrogate=box_et", "optim.neuron_lr=1e5", "optim.lr=0.1")
    with pytest.raises(
        Diverged, match=r"the step of layer '.*' fell from 0\.4 to .* by epoch 1, step \d+: lower optim"
    ) as e:
        run(wild, tmp_path / "run")
    assert "\n" not in str(e.value)
    tame = config("neuron.name=v3", "neuron.surrogate=box_et")
    run(tame, tmp_path / "tame")


def test_small_steps_may_collapse_too_and_first_ones_are_remembered() -> None:
    made = trainer(config("neuron.name=lbq", "neuron.step=0.005"))
    neuron = made.net.sn1
    assert isinstance(neuron, BurstNeuron)
    with torch.no_grad():
        neuron.rho.fill_(-50.0)
    with pytest.raises(Diverged, match="the step of layer 'sn1' fell from 0.005 to 1e-06"):
        made.check_steps()
    began = trainer(config())
    began.start_from(
        {name: torch.full_like(v, -10.0) for name, v in began.net.state_dict().items() if name.endswith("rho")}
    )
    again = trainer(config())
    again.restore(*began.state())
    again.check_steps()  # 4.6e-5 is what they began with


def test_an_overflow_of_half_precision_is_found_where_it_happens() -> None:
    made = trainer(config("train.precision=fp16"))
    with torch.no_grad():
        made.net.fc.weight.fill_(1e5)  # fine in float32
    with pytest.raises(Diverged, match="first in layer 'fc'"):
        list(made.fit())


def test_out_of_memory_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Trainer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory, and a paragraph of advice")

    monkeypatch.setattr(Trainer, "fit", full)
    with pytest.raises(
        LbqError, match=r"out of memory at batch 12, T = 2 .*: raise train\.accumulate \(now 1\) or lower"
    ):
        run(config(), tmp_path)


def test_deterministic_is_for_the_run_alone(tmp_path: Path) -> None:
    seen: list[bool] = []
    watcher = _AtStep(0, 1, lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
    run(config("train.deterministic=true"), tmp_path / "a", watcher)
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    run(config(), tmp_path / "b")
    assert runs.read_weights(tmp_path / "a").keys() == runs.read_weights(tmp_path / "b").keys()
    assert (tmp_path / "a/weights.safetensors").read_bytes() == (tmp_path / "b/weights.safetensors").read_bytes()


def test_tensorboard_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "a" / "tensorboard")

        def __enter__(self) -> SummaryWriter:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            written.append((name, value, epoch))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    find = importlib.util.find_spec
    there = find("json")  # as if the package were there
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: there if name == "tensorboard" else find(name, *a))
    watcher = Silent()
    run(config("train.tensorboard=true"), tmp_path / "a", watcher)
    assert ("loss", watcher.records[1].loss, 2) in written
    assert ("steps/layer1.0.sn2", watcher.records[2].steps["layer1.0.sn2"], 3) in written


def test_another_number_of_processes_may_continue(tmp_path: Path) -> None:
    """The sums of an epoch that two processes began are added up; dropout aside, the run stays what it was."""
    settings = config("model.dropout=0.0")
    whole = trainer(settings)
    expected = [timeless(record.to_dict()) for record in whole.fit()]
    first = trainer(settings, between_steps=lambda t: t.position.step == 6)
    list(first.fit())
    tensors, values = first.state()
    half = [x / 2 for x in values["tally"][0]]
    values["tally"] = [half, half]
    second = trainer(settings)
    second.restore({k: v.clone() for k, v in tensors.items()}, values)
    assert [timeless(record.to_dict()) for record in second.fit()] == expected[1:]
    other = trainer(settings, world=World(1, 3, 1))
    other.restore(tensors, values)
    assert other.tally.tolist() == [0, 0, 0]


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    for name, changes in (("a", []), ("b", ["seed=4"])):
        with pytest.raises(Killed):
            run(config(*changes), tmp_path / name, _AtStep(0, 3, _raise(Killed)))
    last = Path(job.CHECKPOINTS) / checkpoint.LAST
    (tmp_path / "a" / last).write_bytes((tmp_path / "b" / last).read_bytes())
    with pytest.raises(RunError, match=r"last\.safetensors belongs to another configuration"):
        run(config(), tmp_path / "a")


def test_data_may_move_but_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Killed):
        run(config(), tmp_path / "run", _AtStep(0, 3, _raise(Killed)))
    with monkeypatch.context() as other:
        few = small_digits(49)
        other.setattr(digits, "load_digits", lambda: few)
        with pytest.raises(RunError, match="began with other data .digits, [0-9a-f]{64}. than that under data.root"):
            run(config(), tmp_path / "run")
    moved = config("data.root=elsewhere", "train.checkpoint_minutes=7.0", "data.workers=1")
    result = run(moved, tmp_path / "run")
    assert runs.load_config(tmp_path / "run") == moved
    assert result["accuracy"] == run(config(), tmp_path / "whole")["accuracy"]


# Starting from another run
# ---------------------------------------------------------------------------------------------------------------------


def test_averages_start_from_the_weights_that_training_starts_from(tmp_path: Path) -> None:
    run(config(), tmp_path / "ann")
    settings = config(
        f"train.init_from={tmp_path / 'ann'}", "optim.lr=1e-30", "train.epochs=1", "train.warmup_epochs=0"
    )
    run(settings, tmp_path / "tuned")
    theirs, ours = runs.read_weights(tmp_path / "ann"), runs.read_weights(tmp_path / "tuned")
    assert torch.allclose(theirs["conv1.weight"], ours["conv1.weight"])
    with pytest.raises(RunError, match=r"train\.init_from: no weight of .* fits this network"):
        run(config(f"train.init_from={tmp_path / 'ann'}", "model.id=resnet8w3"), tmp_path / "other")


def test_records_and_result(tmp_path: Path) -> None:
    watcher = Silent()
    result = run(config("data.holdout=0.2", "train.eval_every=2", "train.batch_size=10"), tmp_path, watcher)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [json.loads(json.dumps(record.to_dict())) for record in watcher.records]
    assert [line["test_accuracy"] is None for line in lines] == [True, False, False]
    assert all(isinstance(record, EpochRecord) for record in watcher.records)
    assert result["accuracy"] == lines[-1]["test_accuracy"]
    assert result["best_on_holdout"] == max(lines[1:], key=lambda line: line["holdout_accuracy"])["epoch"]
    assert len(lines[0]["steps"]) == len(lines[0]["tails"]) == len(lines[1]["active"]) == 7
    (plan,) = watcher.plans
    assert (plan.steps_per_epoch, plan.train_samples) == (4, 40)
    net = runs.load(tmp_path)
    assert plan.parameters == sum(p.numel() for p in net.parameters())
    found = job.evaluate_run(tmp_path, torch.device("cpu"), World())
    assert found == {"accuracy": result["accuracy"], "images": 31, "stored_accuracy": result["accuracy"]}
    assert optim.learning_rate(11, 4, config()) == pytest.approx(lines[-1]["lr"])
