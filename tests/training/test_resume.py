"""A run that was killed, stopped, or met a full disk gives the same bytes as one that was not.

`LBQ_KILLS=200 pytest tests/training/test_resume.py -k killed` draws more kills than the usual 10.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from lbq import cli, models
from lbq.config import Config
from lbq.data import digits
from lbq.deploy import lower
from lbq.errors import LbqError, RunError
from lbq.models.resnet import ResNet
from lbq.runs import checkpoint, records, run_folder
from lbq.system import files, plugins
from lbq.training import job
from lbq.training.distributed import World
from lbq.training.plan import plan_of
from lbq.training.trainer import Trainer
from tests.support.small_runs import (
    TINY,
    AtStep,
    Contents,
    Killed,
    Silent,
    after_step,
    config,
    contents,
    differences,
    last_checkpoint,
    raising,
    run,
    small_digits,
    state_of,
    timeless,
    trainer,
    use_few_digits,
)

STEPS = 6
SIX_STEPS = (TINY, "train.batch_size=24")  # in 3 epochs


@pytest.fixture(autouse=True)
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_digits(monkeypatch)


# Every batch boundary
# ---------------------------------------------------------------------------------------------------------------------

VARIANTS = {
    "sgd": [],
    "adamw-tet-fp64": ["optim.name=adamw", "optim.lr=0.002", "train.loss=tet", "train.precision=fp64"],
    "accumulate-clip": ["train.accumulate=2", "optim.clip=0.5", "train.sync_batchnorm=true"],
    "rounded-sharp": ["train.weight_bits=4", "optim.sam=0.05", "train.epochs=2", "train.batch_size=16"],
    "channels-last-mix": ["train.channels_last=true", "augment.mixup=0.5", "augment.cutmix=1.0", "optim.momentum=0.5"],
    "adamw-shared-tail": [
        "optim.name=adamw",
        "optim.lr=0.002",
        "model.share_tail=true",
        "data.holdout=0.1",
        "train.batch_size=22",
    ],
    "fp16": ["train.precision=fp16", "train.epochs=2", "train.batch_size=16", "optim.clip=1.0"],
    "sgd-fp64-no-ema": ["train.precision=fp64", "train.ema=0.0", "optim.momentum=0.0", "train.eval_every=2"],
}


def saving(settings: Config, boundaries: Collection[int], folder: Path) -> tuple[Trainer, list[dict[str, Any]]]:
    """Train to the end, saving after these steps as a job does; the trainer, and its records."""

    def save(made: Trainer) -> bool:
        if made.position.step in boundaries:
            checkpoint.save(folder / str(made.position.step), *made.state())
        return False

    made = trainer(settings, between_steps=save)
    return made, [timeless(asdict(record)) for record in made.fit()]


def resumed(settings: Config, folder: Path) -> tuple[Contents, list[dict[str, Any]]]:
    """Go on from a checkpoint in a new trainer; the final state, and the records from there on."""
    loaded = checkpoint.load(folder)
    assert loaded is not None
    torch.manual_seed(loaded.values["position"]["step"])  # whatever the process did before
    made = trainer(settings)
    made.restore(loaded.tensors, loaded.values)
    records = [timeless(asdict(record)) for record in made.fit()]
    return state_of(made), records


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_at_batch_boundaries_is_exact(variant: str, tmp_path: Path) -> None:
    """At every one of the first variant; of the others within an epoch, at its end, after it, and at the run's end."""
    settings = config(*SIX_STEPS, *VARIANTS[variant])
    whole = trainer(settings)
    records = [timeless(asdict(record)) for record in whole.fit()]
    final = state_of(whole)
    assert final["values"]["position"] == {"epoch": settings.train.epochs, "batch": 0, "step": STEPS, "stream": STEPS}
    end = STEPS // settings.train.epochs
    boundaries = range(1, STEPS + 1) if variant == "sgd" else (1, end, end + 1, STEPS)
    saver, seen = saving(settings, boundaries, tmp_path)
    assert differences(final, state_of(saver)) == []
    assert seen == records
    for after in boundaries:
        state, seen = resumed(settings, tmp_path / str(after))
        assert differences(final, state) == [], after
        recorded = (after - 1) // end  # epochs, before the checkpoint
        assert seen == records[recorded:], after


# Deliberately broken restores
# ---------------------------------------------------------------------------------------------------------------------


def _position(key: str, value: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def breaks(tensors: dict[str, Any], values: dict[str, Any]) -> None:
        assert values["position"][key] != value
        values["position"][key] = value

    return breaks


def _without_rho(tensors: dict[str, Any], values: dict[str, Any]) -> None:
    fresh = models.create("tiny", in_channels=1).state_dict()
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


@contextmanager
def broken_restore(mutation: str | None) -> Iterator[None]:
    """Within the context, a restore gets something wrong."""
    right = Trainer.restore

    def restore(self: Trainer, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        if mutation is not None:
            MUTATIONS[mutation](tensors, values)
        right(self, tensors, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "restore", restore)
        yield


# Kills, in one process that forks: importing torch takes longer than the run
# ---------------------------------------------------------------------------------------------------------------------


class Forks:
    """Runs `lbq train` in forked children of this process, which has imported everything and never trained itself."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        use_few_digits(pytest.MonkeyPatch())
        self.folder = folder
        self.config = folder / "config.toml"
        self.config.write_text(config(*SIX_STEPS).to_toml())
        made = trainer(config(*SIX_STEPS))
        made.evaluate("test")
        lower(made.net, (1, 8, 8), 2)
        with suppress(SystemExit), redirect_stdout(StringIO()):
            cli.main(["train", "--help"])  # imports what every child would import for itself
        self.whole = folder / "whole"
        started = time.monotonic()
        assert self.wait(self.start(self.whole)) == 0
        self.seconds = time.monotonic() - started
        self.expected = contents(self.whole)

    def start(self, out: Path, change: AbstractContextManager[None] | None = None) -> int:
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
            with change or nullcontext():
                cli.main(["train", str(self.config), "--out", str(out), "--resume", "auto", "--device", "cpu"])
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    @staticmethod
    def watch(pid: int, seconds: float) -> None:
        """Wait this long, or until the child is done."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(min(0.01, left))

    @staticmethod
    def wait(pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def messages(self, out: Path) -> list[str]:
        return [x for x in out.with_suffix(".err").read_text().splitlines() if x.startswith("lbq: ")]


forks_in = cache(Forks)  # one for all that the helper is asked


def _send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


SPREAD = 3  # positions that kills must have met


def kills(folder: Path, count: int) -> dict[str, Any]:
    """`count` kills at random moments of run after run, each continued until it is done.

    How long a run takes depends on what else the machine does: kills come later after one that no checkpoint came before, and
    there are up to five times as many until they are spread over the run.
    """
    forks = forks_in(folder)
    draw, span = random.Random(count), forks.seconds
    killed = finished = resumed = 0
    positions: list[int] = []
    started = time.monotonic()

    def few() -> bool:
        spread = resumed >= count / 4 and len(set(positions)) >= SPREAD
        return killed < count or (killed < 5 * count and not spread)

    while few():
        out = folder / f"run-{finished}"
        while True:
            pid = forks.start(out)
            if few():
                forks.watch(pid, draw.uniform(0, 1.05 * span))
                os.kill(pid, signal.SIGKILL)  # a zombie takes it without harm
            code = forks.wait(pid)
            loaded = checkpoint.load(out / job.CHECKPOINTS)  # raises where a checkpoint is damaged
            assert loaded is None or not loaded.skipped, loaded
            if code == 0:
                span = max(forks.seconds, span / 1.5)
                break
            assert code == -signal.SIGKILL, (code, out.with_suffix(".err").read_text())
            span *= 1.5 if loaded is None else 1
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
    """What the comparison says where a run killed within its second epoch is continued by a broken restore."""
    forks = forks_in(folder)
    differing: dict[str, Any] = {}
    killed = folder / "killed"
    assert forks.wait(forks.start(killed, after_step(4, _send(signal.SIGKILL)))) == -signal.SIGKILL
    for mutation in [None, *MUTATIONS]:
        out = folder / f"mutation-{mutation}"
        shutil.copytree(killed, out)
        code = forks.wait(forks.start(out, broken_restore(mutation)))
        differing[str(mutation)] = differences(forks.expected, contents(out)) if code == 0 else ["failed"]
    return differing


def signals(folder: Path) -> dict[str, Any]:
    """Exit codes and messages of stopped runs, and of a second process in a folder that is in use."""
    forks = forks_in(folder)
    outcomes: dict[str, Any] = {}
    places = (1, 2, STEPS)  # within an epoch, at its end, at the run's end
    for number, step in ((signal.SIGINT, 1), *((signal.SIGTERM, step) for step in places)):
        out = folder / f"{number.name}-{step}"
        code = forks.wait(forks.start(out, after_step(step, _send(number))))
        messages, loaded = forks.messages(out), last_checkpoint(out)
        assert loaded.values["position"]["step"] == step
        assert forks.wait(forks.start(out)) == 0
        outcomes[f"{number.name} {step}"] = [code, messages, differences(forks.expected, contents(out))]
    out, (reader, writer) = folder / "shared", os.pipe()
    first = forks.start(out, after_step(2, lambda: os.read(reader, 1)))
    while not (out / job.CHECKPOINTS / checkpoint.LAST).exists():
        time.sleep(0.005)
    second = forks.wait(forks.start(out))
    messages = forks.messages(out)
    os.write(writer, b"x")
    outcomes["second"] = [second, messages, forks.wait(first), differences(forks.expected, contents(out))]
    return outcomes


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Calls a function in a fresh process that may fork: this one has threads, and that one must get none of OpenMP's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        pool = multiprocessing.get_context("spawn").Pool(1)
    with pool:
        folder = tmp_path_factory.mktemp("forks")
        yield lambda function, *rest: pool.apply(function, (folder, *rest))


def test_killed_at_random_moments(helper: Ask) -> None:
    count = int(os.environ.get("LBQ_KILLS", "10"))
    report = helper(kills, count)
    sys.stderr.write(f"{report}\n")
    assert report["kills"] >= count
    assert report["with_checkpoint"] >= count / 4
    assert report["positions"] >= SPREAD


def test_broken_restores_are_caught(helper: Ask) -> None:
    differing = helper(mutations)
    assert differing.pop("None") == []  # the same procedure with the right restore
    assert differing.keys() == MUTATIONS.keys()
    for mutation, wrong in differing.items():
        assert wrong, mutation


def test_signals_save_and_stop(helper: Ask) -> None:
    outcomes = helper(signals)
    second, messages, first, wrong = outcomes.pop("second")
    assert (second, first, wrong) == (2, 0, [])
    assert len(messages) == 1
    assert "shared is being written by another process" in messages[0]
    assert len(outcomes) == 4
    for case, (code, messages, wrong) in outcomes.items():
        name = case.split()[0]
        assert code == {"SIGTERM": 143, "SIGINT": 130}[name], case
        assert len(messages) == 1
        assert f"stopped by {name};" in messages[0]
        assert "continues with --resume auto" in messages[0]
        assert wrong == [], case


# Failures of every single write
# ---------------------------------------------------------------------------------------------------------------------


class Disk:
    """Counts what reaches the file system; the operation `fail_at` fails, or is the process's last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int, kill: bool) -> None:
        self.count, self.fail_at, self.kill = 0, fail_at, kill
        self.log: list[str] = []
        for name in ("fsync", "replace", "rename", "truncate", "unlink", "mkdir", "link"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        for module in (files, job, run_folder):
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
    TINY,
    "train.epochs=3",
    "train.batch_size=50",
    "train.eval_every=3",
    "train.checkpoint_steps=0",
    "train.ema=0.0",
)


@pytest.mark.parametrize("kill", [False, True], ids=["error", "kill"])
def test_every_failing_write_is_named_and_survived(kill: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        job, "SAVING_SHARE", 1e9
    )  # a save at every epoch's end, however slow the disk: runs write alike
    plan = plan_of(trainer(FAULTY))
    monkeypatch.setattr(job, "plan_of", lambda _: plan)  # the network is traced once for all
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
    settings = config(TINY)
    run(settings, tmp_path / "whole")
    folder = tmp_path / "run"
    checkpoints = folder / job.CHECKPOINTS
    with pytest.raises(Killed):
        run(settings, folder, AtStep(1, 2, raising(Killed)))
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


# What may change between
# ---------------------------------------------------------------------------------------------------------------------


def test_another_number_of_processes_may_continue(tmp_path: Path) -> None:
    """The sums of an epoch that two processes began are added up; dropout aside, the run stays what it was."""
    settings = config(TINY, "model.dropout=0.0")
    whole = trainer(settings)
    expected = [timeless(asdict(record)) for record in whole.fit()]
    first = trainer(settings, between_steps=lambda t: t.position.step == 6)
    list(first.fit())
    tensors, values = first.state()
    half = [x / 2 for x in values["tally"][0]]
    values["tally"] = [half, half]
    second = trainer(settings)
    second.restore({k: v.clone() for k, v in tensors.items()}, values)
    assert [timeless(asdict(record)) for record in second.fit()] == expected[1:]
    other = trainer(settings, world=World(1, 3))
    other.restore(tensors, values)
    assert other.tally.tolist() == [0, 0, 0, 0]


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    for name, changes in (("a", []), ("b", ["seed=4"])):
        with pytest.raises(Killed):
            run(config(TINY, *changes), tmp_path / name, AtStep(0, 3, raising(Killed)))
    last = Path(job.CHECKPOINTS) / checkpoint.LAST
    (tmp_path / "a" / last).write_bytes((tmp_path / "b" / last).read_bytes())
    with pytest.raises(RunError, match=r"last\.safetensors belongs to another configuration"):
        run(config(TINY), tmp_path / "a")


def test_a_network_that_changed_under_its_id_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def network(blocks: int) -> Callable[..., models.BurstNet]:
        return partial(ResNet, blocks=(blocks,), widths=(4,), stem_width=4)

    monkeypatch.setitem(models.OWN, "own", network(1))
    with pytest.raises(Killed):
        run(config("model.id=own"), tmp_path, AtStep(0, 3, raising(Killed)))
    models.OWN["own"] = network(2)
    message = (
        r"last\.safetensors holds the weights of another network than own is now \(layer1\.1\.bn1\.bias\): bring back"
    )
    with pytest.raises(RunError, match=message):
        run(config("model.id=own"), tmp_path)
    models.OWN["own"] = network(1)
    assert run(config("model.id=own"), tmp_path)["epoch"] == config().train.epochs


def test_what_changed_around_a_run_is_told_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An imported file, PyTorch, the machine: none of it is in the configuration, and all of it may change results."""
    sources: list[str] = []
    monkeypatch.setattr(plugins, "_CHECKSUMS", sources)
    watchers = [AtStep(0, 3, raising(Killed)), AtStep(1, 2, raising(Killed)), Silent()]
    for watcher, source in zip(watchers, ("net.py sha256 01", "net.py sha256 02", ""), strict=True):
        sources[:] = filter(None, [source])
        with suppress(Killed):
            result = run(config(TINY), tmp_path, watcher)
    assert [w.resumptions[0][2] for w in watchers[1:]] == [
        ("not as before: imports net.py sha256 02, was net.py sha256 01",),
        ("not as before: imports none, was net.py sha256 02",),
    ]
    until = [epoch * 4 + batch for w in watchers[1:] for epoch, batch, _ in w.resumptions]
    assert result["earlier"] == "; ".join(
        f"until step {step}: imports net.py sha256 0{i}" for i, step in enumerate(until, 1)
    )
    assert "imports" not in result["environment"]
    assert records.record_of(tmp_path)["earlier"] == result["earlier"]
    assert "earlier" not in run(config(TINY, "seed=4"), tmp_path / "other")


def test_data_may_move_but_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Killed):
        run(config(TINY), tmp_path / "run", AtStep(0, 3, raising(Killed)))
    with monkeypatch.context() as other:
        few = small_digits(49)
        other.setattr(digits, "load_digits", lambda: few)
        with pytest.raises(RunError, match="began with other data .digits, [0-9a-f]{64}. than that under data.root"):
            run(config(TINY), tmp_path / "run")
    moved = config(TINY, "data.root=elsewhere", "train.checkpoint_minutes=7.0", "data.workers=1")
    result = run(moved, tmp_path / "run")
    assert run_folder.load_config(tmp_path / "run") == moved
    assert result["accuracy"] == run(config(TINY), tmp_path / "whole")["accuracy"]
