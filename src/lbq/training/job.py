"""A training job: one configuration trained in one run folder, which may be killed and continued at any moment.

Rank 0 writes; every process computes. Between steps the job saves by time or by count, and obeys SIGTERM and SIGINT by
saving and stopping. Records go to a `Watcher`; nothing is printed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lbq.batches.sources import open_source
from lbq.config import Config, differences
from lbq.errors import LbqError, RunError, Stopped
from lbq.native import choose as kernels
from lbq.neuron import SpikingNeuron
from lbq.results.schemas import TRAINED
from lbq.runs import checkpoint, run_folder
from lbq.runs.build import outline
from lbq.system import files
from lbq.system.signals import noting
from lbq.training.distributed import World
from lbq.training.evaluation import evaluate_run as evaluate_run
from lbq.training.optim import weight_decays
from lbq.training.plan import plan_of
from lbq.training.position import EpochRecord
from lbq.training.trainer import Trainer
from lbq.training.watcher import Watcher as Watcher

CHECKPOINTS = "checkpoints"
# What is written under another name first, which a killed process leaves.
WHOLE = ("config.toml", "weights.safetensors", "result.json", f"{CHECKPOINTS}/{checkpoint.LAST}")
CPU_IS_FULL = ("can't allocate memory", "not enough memory")  # in PyTorch's words, on x86-64 and on Arm
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # which cuBLAS must be told for its sums to have one order
ECHO_SECONDS = 1.0  # in which a SIGTERM counts as one that was passed on
CONSTANTS = ("beta", "alpha", "eta", "threshold", "ladder", "level_scale")  # of neurons, where they are not learned
SAVING_SHARE = 0.02  # of the time that saves after short epochs may take
# of processes on GPUs, which ask each other whether one was signalled: an answer waits for the GPU
STEPS_BETWEEN_STOP_CHECKS = 16
Unwatched = Watcher  # its earlier name


class Job:
    def __init__(self, config: Config, folder: Path, watcher: Watcher, device: torch.device, world: World) -> None:
        self.config, self.folder, self.watcher = config, folder, watcher
        self.device, self.world = device, world
        self.toml = config.to_toml()  # at once: what has no such form leaves no folder behind
        self.signal = 0
        self.saved_at, self.saving = time.monotonic(), 0.0  # when, and how long it took
        self.rate_from: tuple[float, int] | None = None
        self.environment = run_folder.environment(device) if world.main else {}
        self.earlier = ""  # what it was before, where the run was continued under another one
        self.began_with = ""  # SHA-256 of the weights that it started from, where those are another run's

    # The whole of it
    # -----------------------------------------------------------------------------------------------------

    def run(self, resume: bool) -> dict[str, Any]:
        """Train to the end and return the result; continue what is in the folder where `resume`."""
        if self.config.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise LbqError("train.tensorboard needs the package tensorboard: pip install 'lbq[tensorboard]'")
        # what a run started from may be gone once it has a checkpoint of its own
        if self.config.train.init_from and not (self.folder / CHECKPOINTS).exists():
            try:
                run_folder.check_folder(self.config.train.init_from, "weights.safetensors")
            except RunError as error:
                raise RunError(f"train.init_from: {error}") from error
        files.check_folder(self.folder, RunError)
        run_folder.refuse_foreign(self.folder)
        kernels.check(self.device.type)
        # first what may be wrong with configuration and data, so that a mistake leaves no folder behind
        source = open_source(self.config, self.device)
        self.trainer = Trainer(self.config, source, self.device, self.world, self._between_steps)
        plan = plan_of(self.trainer)
        self.environment |= {"kernel": plan.kernel} if self.world.main else {}
        lock = run_folder.locked(self.folder) if self.world.main else nullcontext()
        with lock, deterministic(self.config.train.deterministic), own_random_state(self.device), self._signals():
            done = self._prepare(resume) if self.world.main else None
            (finished,) = self.world.any([done is not None], self.device)
            if finished:
                return done or {}
            if self.world.main:
                self.watcher.plan(plan)
            self._restore()
            try:
                for record in self.trainer.fit():
                    self._finish_epoch(record)
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise LbqError(self._out_of_memory()) from error
            except RuntimeError as error:
                if not any(words in str(error) for words in CPU_IS_FULL):
                    raise
                raise LbqError(self._out_of_memory()) from error
            (stop,) = self.world.any([bool(self.signal)], self.device)
            if stop:
                self.signal = self.signal or signal.SIGTERM
                self._save()
                self.world.barrier()
                name = signal.Signals(self.signal).name
                raise Stopped(f"stopped by {name}; {self.folder} continues with --resume auto", 128 + self.signal)
            result = self._result() if self.world.main else {}
            self.world.barrier()
            return result

    def _prepare(self, resume: bool) -> dict[str, Any] | None:
        """Make the folder this job's; its result where it is complete already."""
        for name in WHOLE:  # nobody else is writing them: the folder is locked
            files.remove_leftovers(self.folder / name)
        config_file, result_file = self.folder / "config.toml", self.folder / "result.json"
        if not config_file.exists():
            run_folder.write_text(config_file, self.toml)
            return None
        if not resume:
            raise RunError(f"{self.folder} holds a run already: continue it with --resume auto or choose another --out")
        stored = run_folder.load_config(self.folder)
        if stored.hash != self.config.hash:
            others = "; ".join(differences(stored, self.config))
            raise RunError(f"{config_file} differs from the configuration given ({others}): choose another --out")
        if result_file.exists():
            return run_folder.read_result(self.folder, TRAINED)
        if stored != self.config:  # the data has moved, or it is watched otherwise
            run_folder.write_text(config_file, self.toml)
        return None

    # Saving and restoring
    # ------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _save(self) -> None:
        began = time.monotonic()
        self.trainer.check()
        tensors, values = self.trainer.state()
        if self.world.main:
            values["metrics_bytes"] = self.metrics.stat().st_size if self.metrics.exists() else 0
            values |= {"environment": self.environment, "earlier": self.earlier, "init_sha256": self.began_with}
            checkpoint.save(self.folder / CHECKPOINTS, tensors, values)
        self.saved_at = time.monotonic()
        self.saving = self.saved_at - began

    def _restore(self) -> None:
        loaded = checkpoint.load(self.folder / CHECKPOINTS)
        if not self.world.agree(-1 if loaded is None else loaded.values["position"]["step"], self.device):
            raise RunError(
                f"the processes find different checkpoints in {self.folder}: put it on a file system they share"
            )
        if loaded is None:
            if self.config.train.init_from:
                self.initialised_from(self.config.train.init_from)
            if self.world.main:
                self._set_metrics_aside()
            return
        if loaded.values["config_hash"] != self.config.hash:
            raise RunError(f"{loaded.path} belongs to another configuration: choose another --out")
        began, now = loaded.values.get("data"), self.trainer.data
        if began is not None and any(began[key] != now[key] for key in began.keys() & now.keys()):
            raise RunError(
                f"{self.folder} began with other data ({', '.join(began.values())}) than that under data.root "
                f"({', '.join(now.values())}): give the same, or choose another --out"
            )
        self._check_network(loaded)
        self.trainer.restore(loaded.tensors, loaded.values)
        self.began_with = loaded.values.get("init_sha256", "")  # which older ones do not say
        if self.world.main:
            checkpoint.set_aside(loaded)
            self._cut_metrics(loaded.values["metrics_bytes"])
            position = self.trainer.position
            notes = *(f"passed over: {note}" for note in loaded.skipped), *self._changes(loaded.values)
            self.watcher.resumed(position.epoch, position.batch, notes)

    def _changes(self, values: dict[str, Any]) -> list[str]:
        """What is not as it was when the checkpoint was written, which the result will tell."""
        now, before = self.environment, values.get("environment", self.environment)  # older ones do not say
        other = sorted(key for key in now | before if now.get(key) != before.get(key))
        old = ", ".join(f"{key} {before.get(key) or 'none'}" for key in other)
        parts = values.get("earlier", ""), old and f"until step {values['position']['step']}: {old}"
        self.earlier = "; ".join(filter(None, parts))
        return [f"not as before: {key} {now.get(key) or 'none'}, was {before.get(key) or 'none'}" for key in other]

    def _check_network(self, loaded: checkpoint.Loaded) -> None:
        """Refuse weights of another network: one of a user's own may have changed under its id."""
        ours = {f"model/{name}": value.shape for name, value in self.trainer.net.state_dict().items()}
        theirs = {name: value.shape for name, value in loaded.tensors.items() if name.startswith("model/")}
        other = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
        if other:
            raise RunError(
                f"{loaded.path} holds the weights of another network than {self.config.model.id} is now "
                f"({other[0].removeprefix('model/')}): bring back the one it began with, or choose another --out"
            )

    def _cut_metrics(self, length: int) -> None:
        """Drop records of what will be trained again."""
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        if size < length:
            raise RunError(f"{self.metrics} is shorter than its checkpoint says: start again in another folder")
        try:
            if size > length:
                os.truncate(self.metrics, length)
        except OSError as error:
            raise RunError(f"cannot write {self.metrics}: {error.strerror}") from error

    def _set_metrics_aside(self) -> None:
        """Keep the log of a training whose checkpoints are gone, under a name of its own."""
        if not self.metrics.exists() or not self.metrics.stat().st_size:
            return
        number = 1
        while (kept := self.metrics.with_name(f"{self.metrics.name}.{number}")).exists():
            number += 1
        try:
            os.replace(self.metrics, kept)
            files.sync_folder(self.folder)
        except OSError as error:
            raise RunError(f"cannot rename {self.metrics}: {error.strerror}") from error
        self.watcher.restarted(kept)

    def initialised_from(self, run: str) -> None:
        """Start from the weights of another run: everything of the same name and shape (an ANN's synapses, for example), and
        what it has one of and this network one for each channel. Constants of neurons are those of this configuration where
        the other's has others."""
        theirs, ours = run_folder.read_weights(run), self.trainer.net.state_dict()
        configured = self._configured_otherwise(run, theirs)
        fits = {
            k: v.expand(ours[k].shape)
            for k, v in theirs.items()
            if k in ours and v.shape in ((), ours[k].shape) and k not in configured
        }
        synapses = [k for k in ours if k.endswith("weight")]
        if not any(k in fits for k in synapses):
            raise RunError(f"train.init_from: no weight of {run} fits this network")
        self.trainer.start_from(fits)
        self.began_with = run_folder.weights_checksum(run)
        if self.world.main:
            self.watcher.initialised(run, len(fits), tuple(name for name in ours if name not in fits))

    def _configured_otherwise(self, run: str, weights: Mapping[str, Tensor]) -> set[str]:
        """The constants of neurons, such as a decay that is not learned, that are other ones in the other run's weights. Of
        fixed steps those with which it did not begin either: else a conversion may have chosen them, layer by layer."""
        try:
            first = _constants(outline(run_folder.load_config(run)), ("fixed_step",))
        except (LbqError, ValueError):  # weights alone, or a network that is not known here
            first = {}
        ours = _constants(self.trainer.net, (*CONSTANTS, "fixed_step"))
        theirs = {**weights, **first}
        return {name for name, value in ours.items() if name not in theirs or not _alike(theirs[name], value)}

    def _between_steps(self, trainer: Trainer) -> bool:
        every, minutes = self.config.train.checkpoint_steps, self.config.train.checkpoint_minutes
        p = trainer.position
        stop, late = bool(self.signal), time.monotonic() - self.saved_at > 60 * minutes
        if self.world.size > 1:
            asks = self.device.type == "cpu" or p.step % STEPS_BETWEEN_STOP_CHECKS == 0
            stop, late = self.world.any([stop, late], self.device) if asks else (False, False)
        due = late or bool(every and p.step % every == 0)
        if stop:
            self.signal = self.signal or signal.SIGTERM
            return True
        if self.world.main:
            self._report_step(p.epoch, p.batch, p.step)
        if due:
            self._save()
        return False

    def _report_step(self, epoch: int, batch: int, step: int) -> None:
        now = time.monotonic()
        if self.rate_from is None or batch == 1:
            self.rate_from = (now, step)
        began, first = self.rate_from
        rate = (step - first) * self.config.train.batch_size / (now - began) if step > first else 0.0
        self.watcher.step(epoch, batch, self.trainer.batches, rate)

    def _finish_epoch(self, record: EpochRecord) -> None:
        if self.world.main:
            try:
                with open(self.metrics, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record.to_dict()) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise RunError(f"cannot write {self.metrics}: {error.strerror}; free some space") from error
            self._tensorboard(record)
            self.watcher.epoch(record)
        rested = SAVING_SHARE * (time.monotonic() - self.saved_at) >= self.saving
        (due,) = self.world.any([self.trainer.done or (self.world.main and rested)], self.device)
        if due:
            self._save()

    def _tensorboard(self, record: EpochRecord) -> None:
        if not self.config.train.tensorboard:
            return
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(self.folder / "tensorboard")) as writer:
            for name, value in record.to_dict().items():
                if isinstance(value, dict):
                    for layer, number in value.items():
                        writer.add_scalar(f"{name}/{layer}", number, record.epoch)
                elif value is not None:
                    writer.add_scalar(name, value, record.epoch)

    def _result(self) -> dict[str, Any]:
        """The last epoch is the result. Writes weights (averaged ones, where averaging is on), then `result.json`."""
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        last = lines[-1]
        with self.trainer.averaged():
            checksum = run_folder.write_weights(self.folder, self.trainer.net.state_dict())
        result = {
            "accuracy": last["test_accuracy"],
            # lines of older versions do not say these; they were tested in the precision of training
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
            "steps": last["steps"],
            "tails": last["tails"],
            "active": last["active"],
            "training_seconds": sum(line["seconds"] for line in lines),
            "processes": self.world.size,
            "data": self.trainer.source.about,
            # lists for tuples, as it will be read
            "inputs": json.loads(json.dumps(asdict(self.trainer.source.inputs))),
            "weights_sha256": checksum,
            "config_hash": self.config.hash,
            "environment": self.environment,
            **({"earlier": self.earlier} if self.earlier else {}),
            **({"init_sha256": self.began_with} if self.began_with else {}),
        }
        run_folder.write_text(self.folder / "result.json", json.dumps(result, indent=2) + "\n")
        return result

    # Signals, memory
    # -------------------------------------------------------------------------------------------

    def _signals(self) -> AbstractContextManager[None]:
        """Note SIGTERM and SIGINT instead of dying of them; a second one has its usual effect.

        Who ends a whole job tells every process of it, and one that started others passes on what it was told: a SIGTERM at
        once after another signal is no second one.
        """
        times: dict[int, float] = {}  # of each signal

        def note(number: int, usual: Any) -> None:
            now = time.monotonic()
            if number == signal.SIGTERM and times and now - max(times.values()) < ECHO_SECONDS:
                return
            if number in times:
                signal.signal(number, usual)
                signal.raise_signal(number)
                return
            self.signal, times[number] = number, now

        return noting(note)

    def _out_of_memory(self) -> str:
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _peak_of_process()
        t = self.config.train
        kept = f"; {self.folder} keeps its checkpoint" if (self.folder / CHECKPOINTS).exists() else ""
        return (
            f"out of memory at batch {t.batch_size}, T = {self.config.model.timesteps} (peak {peak / 2**30:.1f} GiB): "
            f"raise train.accumulate (now {t.accumulate}) or lower train.batch_size{kept}"
        )


def _constants(net: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """What neurons have of that and do not learn, by all its names in the network's state."""
    neurons = [(n, m) for n, m in net.named_modules(remove_duplicate=False) if isinstance(m, SpikingNeuron)]
    return {f"{n}.{k}": v.cpu() for n, m in neurons for k, v in m.named_buffers(recurse=False) if k in names}


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal, or one is what all channels of the other have."""
    return one.shape in ((), other.shape) and bool((one == other).all())


def _peak_of_process() -> int:
    """The most bytes that this process has had in memory; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only deterministic operations for a while, where asked for; otherwise the fastest convolutions, found by trial."""
    only, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    trial, sets_workspace = torch.backends.cudnn.benchmark, wanted and CUBLAS_WORKSPACE not in os.environ
    if sets_workspace:
        os.environ[CUBLAS_WORKSPACE] = ":4096:8"
    if wanted:
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(only, warn_only=warns)
        torch.backends.cudnn.benchmark = trial
        if sets_workspace:
            os.environ.pop(CUBLAS_WORKSPACE, None)


def own_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Draw and seed for a while, on the CPU and on `device`, without a change of what the caller draws afterwards."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


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
