"""A training job: one configuration trained in one run folder, which may be killed and continued at any moment.

Rank 0 writes; every process computes. Between steps the job saves by time or by count, and obeys SIGTERM and SIGINT by
saving and stopping. Records go to a `Watcher`; nothing is printed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lbq.batches.sources import lost_worker, open_source
from lbq.config import Config, differences
from lbq.errors import DataError, LbqError, RunError, Stopped
from lbq.native import choose as kernels
from lbq.results.schemas import TRAINED
from lbq.runs import checkpoint, run_folder
from lbq.system import files, signals
from lbq.training import evaluation, initial_weights, restoring, tensorboard
from lbq.training.distributed import World
from lbq.training.epoch_log import EpochLog
from lbq.training.evaluation import evaluate_run as evaluate_run
from lbq.training.optim import weight_decays
from lbq.training.plan import plan_of
from lbq.training.position import EpochRecord
from lbq.training.trainer import Trainer
from lbq.training.watcher import Watcher as Watcher

CHECKPOINTS = "checkpoints"
# Files that are written under a temporary name first. A killed process leaves that one behind.
WRITTEN_FILES = ("config.toml", "weights.safetensors", "result.json", f"{CHECKPOINTS}/{checkpoint.LAST}")
CPU_MEMORY_ERRORS = ("can't allocate memory", "not enough memory")  # PyTorch's messages, on x86-64 and on Arm
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # environment variable that gives sums of cuBLAS one order
ECHO_SECONDS = 1.0  # a SIGTERM within this time of another signal is the same one, passed on
SAVING_SHARE = 0.02  # largest share of the time that saves after short epochs may take
STEPS_BETWEEN_STOP_CHECKS = 16  # on several GPUs: asking all processes for a signal waits for the GPU
Unwatched = Watcher  # its earlier name


class Job:
    """One run in its folder, from wherever it stands to its result: checkpoints, signals, the log. Several processes of a
    distributed run have one each; the main one writes."""

    def __init__(self, config: Config, folder: Path, watcher: Watcher, device: torch.device, world: World) -> None:
        self.config, self.folder, self.watcher = config, folder, watcher
        self.device, self.world = device, world
        self.toml = config.to_toml()  # here, so that a configuration without a TOML form leaves no folder behind
        self.log = EpochLog(folder)
        shown = world.main and config.train.tensorboard
        self.board = tensorboard.TensorBoard(folder / "tensorboard") if shown else None
        self.signal = 0
        self.saved_at, self.saving_seconds = time.monotonic(), 0.0
        self.rate_from: tuple[float, int] | None = None  # time and step that the rate is measured from
        self.environment = run_folder.environment(device) if world.main else {}
        self.earlier = ""  # earlier environments, where the run was continued under another one
        self.start: initial_weights.Start | None = None
        self.init_sha256 = ""  # of the file that it started from, if any

    def run(self, resume: bool) -> dict[str, Any]:
        """Train to the end and return the result; continue what is in the folder where `resume`."""
        if self.config.train.tensorboard:
            tensorboard.check()
        # The run that it started from may be gone once it has a checkpoint of its own.
        starts = self.config.train.init_from and not (self.folder / CHECKPOINTS).exists()
        if starts:
            initial_weights.check(self.config.train.init_from)
        files.check_folder(self.folder, RunError)
        run_folder.refuse_foreign(self.folder)
        kernels.check(self.device.type)
        # Configuration and data are checked first, so that a mistake leaves no folder behind.
        source = open_source(self.config, self.device)
        self.trainer = Trainer(self.config, source, self.device, self.world, self._between_steps)
        plan = plan_of(self.trainer)
        if starts:
            self.start = initial_weights.read(self.config, self.trainer.net, source.inputs)
            plan = replace(plan, remarks=(*plan.remarks, *self.start.notes))
        self.environment |= {"kernel": plan.kernel} if self.world.main else {}
        signals.check()  # imports of PyTorch may have swallowed an interrupt
        lock = run_folder.locked(self.folder) if self.world.main else nullcontext()
        # The caller's random state stays as it is.
        own_random_state = torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])
        with lock, deterministic(self.config.train.deterministic), own_random_state, self._signals():
            done = self._prepare(resume) if self.world.main else None
            (finished,) = self.world.any([done is not None], self.device)
            if finished:
                return done or {}
            if self.world.main:
                self.watcher.plan(plan)
            self._restore()
            self._train()
            result = self._result() if self.world.main else {}
            self.world.barrier()
            return result

    def _train(self) -> None:
        """Train to the end. Where a signal comes, save and raise `Stopped`."""
        try:
            for record in self.trainer.fit():
                self._finish_epoch(record)
        except (MemoryError, RuntimeError) as error:
            full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            if full or any(message in str(error) for message in CPU_MEMORY_ERRORS):
                raise LbqError(self._out_of_memory()) from error
            if isinstance(error, RuntimeError) and (lost := lost_worker(error, self.config.data.workers)):
                raise DataError(f"{lost}{self._remains()}") from None
            raise
        finally:
            if self.board is not None:
                self.board.close()
        (stop,) = self.world.any([bool(self.signal)], self.device)
        if stop:
            self.signal = self.signal or signal.SIGTERM
            self._save()
            self.world.barrier()
            name = signal.Signals(self.signal).name
            raise Stopped(f"stopped by {name}; {self.folder} continues with --resume auto", 128 + self.signal)

    def _prepare(self, resume: bool) -> dict[str, Any] | None:
        """Make the folder this job's. Returns its result where it is complete already."""
        for name in WRITTEN_FILES:  # nobody else is writing them: the folder is locked
            files.remove_leftovers(self.folder / name)
        config_file, result_file = self.folder / "config.toml", self.folder / "result.json"
        # A configuration alone is of a run that ended before its first epoch, by a mistake in a network.
        begun = any(path.name not in ("config.toml", ".lock") for path in self.folder.iterdir())
        if not config_file.exists() or (not begun and not resume):
            run_folder.write_text(config_file, self.toml)
            return None
        if not resume:
            raise RunError(f"{self.folder} holds a run already: continue it with --resume auto or choose another --out")
        stored = run_folder.load_config(self.folder)
        if stored.hash != self.config.hash:
            changes = "; ".join(differences(stored, self.config))
            start = f", with {shlex.quote(f'train.init_from={self.folder}')} to start from its weights"
            raise RunError(
                f"{config_file} differs from the configuration given ({changes}): choose another --out"
                + start * result_file.exists()
            )
        if result_file.exists():
            run_folder.warn_of_other_files(self.folder)
            result = run_folder.read_result(self.folder, TRAINED)
            if result["accuracy"] is None and self.config.train.test != "never":
                test = shlex.join(["lbq", "eval", str(self.folder)])
                raise RunError(f"{self.folder} was trained to its end with train.test=never: {test} tests it")
            return result
        if stored != self.config:  # in settings that change no result, such as where the data lies
            run_folder.write_text(config_file, self.toml)
        return None

    # Saving and restoring
    # ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        began = time.monotonic()
        self.trainer.sentinel.check_weights(self.trainer.position)
        tensors, values = self.trainer.state()
        if self.world.main:
            values["metrics_bytes"] = self.log.size
            values |= {"environment": self.environment, "earlier": self.earlier, "init_sha256": self.init_sha256}
            checkpoint.save(self.folder / CHECKPOINTS, tensors, values)
        self.saved_at = time.monotonic()
        self.saving_seconds = self.saved_at - began

    def _restore(self) -> None:
        loaded = checkpoint.load(self.folder / CHECKPOINTS, restoring.VALUES)
        if not self.world.agree(-1 if loaded is None else loaded.values["position"]["step"], self.device):
            raise RunError(
                f"the processes find different checkpoints in {self.folder}: put it on a file system they share"
            )
        if loaded is None:
            if self.config.train.init_from:
                self._start()
            if self.world.main and (old_log := self.log.set_aside()) is not None:
                self.watcher.restarted(old_log)
            return
        if loaded.values["config_hash"] != self.config.hash:
            raise RunError(f"{loaded.path} belongs to another configuration: choose another --out")
        first, now = loaded.values.get("data", {}), self.trainer.data  # older checkpoints do not say
        if any(first[key] != now[key] for key in first.keys() & now.keys()):
            raise RunError(
                f"{self.folder} began with other data ({', '.join(first.values())}) than that under data.root "
                f"({', '.join(now.values())}): give the same, or choose another --out"
            )
        self._check_network(loaded)
        restoring.check(self.trainer, loaded)
        if self.world.main:
            self.log.cut(loaded.values["metrics_bytes"], loaded.values["position"]["epoch"])
        self.trainer.restore(loaded.tensors, loaded.values)
        self.init_sha256 = loaded.values.get("init_sha256", "")  # older checkpoints do not say
        if self.world.main:
            checkpoint.set_aside(loaded)
            position = self.trainer.position
            notes = *(f"passed over: {note}" for note in loaded.skipped), *self._changes(loaded.values)
            self.watcher.resumed(position.epoch, position.batch, notes)

    def _changes(self, values: dict[str, Any]) -> list[str]:
        """What has changed around the run since the checkpoint was written. The result will name it."""
        now, before = self.environment, values.get("environment", self.environment)  # older checkpoints do not say
        changed = {key: (now.get(key) or "none", before.get(key) or "none") for key in sorted(now | before)}
        changed = {key: pair for key, pair in changed.items() if pair[0] != pair[1]}
        old = ", ".join(f"{key} {was}" for key, (_, was) in changed.items())
        parts = values.get("earlier", ""), old and f"until step {values['position']['step']}: {old}"
        self.earlier = "; ".join(filter(None, parts))
        return [f"not as before: {key} {is_now}, was {was}" for key, (is_now, was) in changed.items()]

    def _check_network(self, loaded: checkpoint.Loaded) -> None:
        """Refuse weights of another network: a user may have changed their own network under its id."""
        ours = {f"model/{name}": value.shape for name, value in self.trainer.net.state_dict().items()}
        theirs = {name: value.shape for name, value in loaded.tensors.items() if name.startswith("model/")}
        other = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
        if other:
            raise RunError(
                f"{loaded.path} holds the weights of another network than {self.config.model.id} is now "
                f"({other[0].removeprefix('model/')}): bring back the one it began with, or choose another --out"
            )

    def _start(self) -> None:
        """Start from weights that are there already."""
        net = self.trainer.net
        start = self.start or initial_weights.read(self.config, net, self.trainer.source.inputs)
        self.start, self.init_sha256 = None, start.sha256
        self.trainer.start_from(start.weights)
        if self.world.main:
            left = tuple(name for name in net.state_dict() if name not in start.weights)
            self.watcher.initialised(self.config.train.init_from, len(start.weights), left)
        if start.folded:
            initial_weights.give_statistics(self.trainer)

    def _between_steps(self, trainer: Trainer) -> bool:
        """Report a step and save where it is due. Returns whether to stop."""
        t, position, now = self.config.train, trainer.position, time.monotonic()
        stop, due = bool(self.signal), now - self.saved_at > 60 * t.checkpoint_minutes
        if self.world.size > 1:
            asks = self.device.type == "cpu" or position.step % STEPS_BETWEEN_STOP_CHECKS == 0
            stop, due = self.world.any([stop, due], self.device) if asks else (False, False)
        if stop:
            self.signal = self.signal or signal.SIGTERM
            return True
        if self.world.main:
            if self.rate_from is None or position.batch == 1:
                self.rate_from = (now, position.step)
            began, first = self.rate_from
            rate = (position.step - first) * t.batch_size / (now - began) if position.step > first else 0.0
            self.watcher.step(position.epoch, position.batch, trainer.batches, rate)
        if due or (t.checkpoint_steps and position.step % t.checkpoint_steps == 0):
            self._save()
        return False

    def _finish_epoch(self, record: EpochRecord) -> None:
        if self.world.main:
            self.log.append(record)
            self.watcher.epoch(record)
        rested = SAVING_SHARE * (time.monotonic() - self.saved_at) >= self.saving_seconds
        (due,) = self.world.any([self.trainer.done or (self.world.main and rested)], self.device)
        if due:
            self._save()
        if self.board is not None:
            self.board.epoch(record)

    def _result(self) -> dict[str, Any]:
        """Write the weights as they were tested (averaged, rounded), then `result.json`: the last epoch is the result."""
        lines = self.log.lines()
        last = lines[-1]
        with self.trainer.averaged(), self.trainer.rounded():
            checksum = run_folder.write_weights(self.folder, self.trainer.net.state_dict())
        result = {
            "accuracy": last["test_accuracy"],
            # Lines of older versions lack these: they were tested in the precision of training.
            "accuracy_as_trained": last.get("test_accuracy_as_trained", last["test_accuracy"]),
            "tested_in": last.get("tested_in"),
            "epoch": last["epoch"],
            "seed": self.config.seed,
            "averaged_weights": bool(self.config.train.ema),
            "holdout_accuracy": last["holdout_accuracy"],
            "holdout_accuracy_as_trained": last.get("holdout_accuracy_as_trained", last["holdout_accuracy"]),
            "best_on_holdout": max(
                (line for line in lines if line["holdout_accuracy"] is not None),
                key=lambda line: line["holdout_accuracy"],
                default={"epoch": None},
            )["epoch"],
            "train_loss": last["loss"],
            "weight_decay": weight_decays(self.trainer.optimiser),
            "steps": evaluation.in_order(last["steps"], last["active"]),
            "tails": evaluation.in_order(last["tails"], last["active"]),
            "active": last["active"],
            "outcomes": last.get("outcomes"),
            "training_seconds": sum(line["seconds"] for line in lines),
            "processes": self.world.size,
            "data": self.trainer.source.about,
            # as it will be read: lists for tuples
            "inputs": json.loads(json.dumps(asdict(self.trainer.source.inputs))),
            "weights_sha256": checksum,
            "config_hash": self.config.hash,
            "environment": self.environment,
            **({"earlier": self.earlier} if self.earlier else {}),
            **({"init_sha256": self.init_sha256} if self.init_sha256 else {}),
        }
        run_folder.write_text(self.folder / "result.json", json.dumps(result, indent=2) + "\n")
        return result

    # Signals, memory
    # -------------------------------------------------------------------------------------------

    def _signals(self) -> AbstractContextManager[None]:
        """Note SIGTERM and SIGINT instead of dying of them; a second one has its usual effect.

        A launcher passes its signals on to processes that were signalled too. So a SIGTERM right after another signal is no
        second one.
        """
        times: dict[int, float] = {}  # when each signal came

        def note(number: int, usual: Any) -> None:
            now = time.monotonic()
            if number == signal.SIGTERM and times and now - max(times.values()) < ECHO_SECONDS:
                return
            if number in times:
                signal.signal(number, usual)
                signal.raise_signal(number)
                return
            self.signal, times[number] = number, now

        return signals.noting(note)

    def _out_of_memory(self) -> str:
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _peak_of_process()
        t = self.config.train
        return (
            f"out of memory at batch {t.batch_size}, T = {self.config.model.timesteps} (peak {peak / 2**30:.1f} GiB): "
            f"raise train.accumulate (now {t.accumulate}) or lower train.batch_size{self._remains()}"
        )

    def _remains(self) -> str:
        return f"; {self.folder} keeps its checkpoint" if (self.folder / CHECKPOINTS).exists() else ""


def _peak_of_process() -> int:
    """The most bytes that this process has had in memory; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Within the context, use deterministic operations alone; otherwise the fastest convolutions, which trials find."""
    only, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    trial, sets_workspace = torch.backends.cudnn.benchmark, enabled and CUBLAS_WORKSPACE not in os.environ
    if sets_workspace:
        os.environ[CUBLAS_WORKSPACE] = ":4096:8"
    if enabled:
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not enabled
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(only, warn_only=warns)
        torch.backends.cudnn.benchmark = trial
        if sets_workspace:
            os.environ.pop(CUBLAS_WORKSPACE, None)


def train(
    config: Config,
    folder: Path | str,
    watcher: Watcher | None = None,
    *,
    device: torch.device | str = "cpu",
    world: World | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train `config` in `folder` and return its result. Derive a watcher from `Watcher` to see how it goes."""
    return Job(config, Path(folder), watcher or Watcher(), torch.device(device), world or World()).run(resume)
