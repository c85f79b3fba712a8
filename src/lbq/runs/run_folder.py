"""Run folders: `config.toml`, `metrics.jsonl`, `weights.safetensors`, `result.json`, `checkpoints/`. No pickle anywhere.

Files appear under their final names only when they are complete; one process at a time may write a folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch import Tensor

from lbq._version import __version__
from lbq.config import CHANGEABLE, MOST_TIMESTEPS, Config
from lbq.data.dataset import Inputs
from lbq.errors import Busy, ConfigError, RunError
from lbq.models import BurstNet
from lbq.native.choose import choose
from lbq.results.gather import CONVERSION as CONVERSION
from lbq.results.schemas import INPUTS, RESULT
from lbq.runs.build import build
from lbq.system import files, plugins
from lbq.system.schema import Schema, problem

LOCK_WAIT_SECONDS = 0.2  # `held` locks a folder for a moment: a lock that stays longer is another process's
PACKAGES = ("numpy", "pillow", "triton")  # packages beside PyTorch that compute something


def next_free(stem: Path | str) -> Path:
    """`stem-001`, or the next number that no folder has."""
    stem = Path(stem)
    number = 1
    while (path := stem.with_name(f"{stem.name}-{number:03d}")).exists():
        number += 1
    return path


def default_name(config: Path) -> str:
    """The name of a configuration file's run, without its seed: cifar10-lbq_t2."""
    folder = config.parent.name
    if folder == "..":  # a name that begins with dots is hidden
        folder = os.path.basename(os.path.abspath(config.parent))
    return f"{folder}-{config.stem}" if folder else config.stem


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder of something else, before anything, such as the lock, is put there."""
    present = set(folder.iterdir()) if folder.exists() else set()
    config_file = folder / "config.toml"
    if present and config_file not in present and present - {folder / ".lock", *files.leftovers(config_file)}:
        raise RunError(f"{folder} is not empty and not a run folder: choose another with --out")
    if folder / CONVERSION in present:
        raise RunError(
            f"{folder} holds a converted network: train from it with "
            f"{shlex.quote(f'train.init_from={folder}')} and another --out"
        )


_locks: set[IO[str]] = set()  # lock files that this process holds


def _release_locks() -> None:
    """Close the locks in a forked process, such as one that decodes images: it may outlive this one."""
    for file in _locks:
        file.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_release_locks)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` against other processes, by a file in it: see `files.lock`."""
    files.refuse_pipe(folder / ".lock", RunError)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror}") from error
    with file:
        if not files.lock(file):
            time.sleep(LOCK_WAIT_SECONDS)
            if not files.lock(file):
                raise Busy(f"{folder} is being written by another process: wait for it or choose another folder")
        _locks.add(file)
        try:
            yield
        finally:
            _locks.discard(file)


def held(folder: Path) -> bool:
    """Whether another process holds `folder`."""
    files.refuse_pipe(folder / ".lock", RunError)
    try:
        with open(folder / ".lock") as file:
            return not files.lock(file, shared=True)  # shared: several processes may ask at once
    except OSError:  # no folder, or one that was never locked
        return False


def environment(device: torch.device | str = "cpu") -> dict[str, str]:
    """What a result depends on beside its configuration."""
    device, packages = torch.device(device), {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    machine = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine += f", {torch.cuda.get_device_name(device)}"
    return {
        "lbq": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **packages,
        "machine": machine,
        "kernel": choose(device.type).kernel,
        **({"imports": imports} if (imports := plugins.checksums()) else {}),
    }


def _commit() -> str:
    """The commit of the source tree that runs, with a + where it was changed; "" for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    files.write(path, text, RunError)


def rename(path: Path, target: Path) -> None:
    """Rename a file for good, past a crash."""
    try:
        os.replace(path, target)
        files.sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"cannot rename {path}: {error.strerror}") from error


def write_weights(folder: Path, state: Mapping[str, Tensor]) -> str:
    """Write `weights.safetensors`; returns its SHA-256. Cloned: layers may share a tail, one tensor under several names."""
    data = serialise({k: v.detach().cpu().clone().contiguous() for k, v in state.items()})
    files.write(folder / "weights.safetensors", data, RunError)
    return hashlib.sha256(data).hexdigest()


def check_folder(run: Path | str, *needed: str) -> Path:
    """The folder of a run. Where it lacks a needed file, the error says what is wrong and what to do."""
    remedy = "give one that `lbq demo` or `lbq train` wrote"
    folder = files.path_of(run, "run", f"a run folder is needed, {remedy}")
    if not folder.exists():
        raise RunError(f"{folder} does not exist: a run folder is needed, {remedy}")
    if folder.suffix == ".lbq":
        raise RunError(
            f"{folder} is a deployed network, not a run folder: load it with lbq.engine.load, run it with lbq run"
        )
    if not folder.is_dir():
        raise RunError(f"{folder} is not a run folder: {remedy}")
    missing = next((name for name in needed if not (folder / name).is_file()), None)
    if missing is None:
        return folder
    if not (folder / "config.toml").is_file():
        raise RunError(f"{folder} is not a run folder, config.toml is missing: {remedy}")
    if (folder / CONVERSION).is_file():
        raise RunError(
            f"{folder} was converted from an ANN, not trained, and has no {missing}: train on with "
            + shlex.quote(f"train.init_from={folder}")
        )
    if not (folder / "result.json").is_file():
        log, epochs = folder / "metrics.jsonl", load_config(folder).train.epochs
        done = log.read_bytes().count(b"\n") if log.is_file() else 0  # a last line that was cut off does not count
        raise RunError(
            f"the run {folder} is not finished, {done} of {epochs} epochs are: continue it with "
            f"lbq train {shlex.quote(str(folder / 'config.toml'))} --out {shlex.quote(str(folder))} --resume auto"
        )
    raise RunError(f"{folder} is not a complete run folder, {missing} is missing: restore the file or train again")


def load_config(run: Path | str, changes: Iterable[str] = ()) -> Config:
    """The configuration of a run with `key=value` changes: of `CHANGEABLE` alone, since the rest describes its weights."""
    folder, changes = check_folder(run, "config.toml"), tuple(changes)
    for change in changes:
        key, equals, _ = change.partition("=")
        if not equals:
            raise RunError(f"{change!r} must have the form key=value, such as data.root=DIR")
        if key.strip() not in CHANGEABLE:
            raise RunError(
                f"{key.strip()} cannot be changed, {folder} is trained already: give only {', '.join(CHANGEABLE)}"
            )
    file = folder / "config.toml"
    try:
        stored = Config.load(file)
        config = Config.load(file, changes) if changes else stored
    except ConfigError as error:
        raise RunError(str(error)) from error
    expected = _from_result(folder, "config_hash")
    if expected not in (None, stored.hash):
        raise RunError(
            f"{file} was changed after the run: its hash is {stored.hash[:10]}, result.json says {expected[:10]}; restore "
            "the file, and train other settings in another folder"
        )
    return config


def _from_result(folder: Path, key: str) -> Any:
    """An entry of a run's result; None where there is no result, or an older one without it."""
    return read_result(folder).get(key) if (folder / "result.json").is_file() else None


def read_result(folder: Path, expected: Schema = RESULT) -> dict[str, Any]:
    """The result of a run, checked against a schema."""
    path, remedy = folder / "result.json", "remove it, and lbq train with --resume auto writes it again"
    result = files.json_of(path, RunError, remedy)
    if (wrong := problem(result, expected)) is not None:
        raise RunError(f"{path} is damaged: {wrong}; {remedy}")
    return result


def read_inputs(run: Path | str) -> Inputs | None:
    """What the network of a run reads; None where an older run does not say."""
    folder, converted = check_folder(run), Path(run) / CONVERSION
    inputs = _from_result(folder, "inputs")
    if converted.is_file() and not (folder / "result.json").is_file():
        inputs = files.json_of(converted, RunError, "convert the ANN again").get("inputs")
        if inputs is not None and (wrong := problem(inputs, INPUTS)) is not None:
            raise RunError(f"{converted} is damaged: inputs: {wrong}; convert the ANN again")
    if inputs is None:
        return None
    values: dict[str, Any] = {f.name: tuple(v) if isinstance(v := inputs[f.name], list) else v for f in fields(Inputs)}
    return Inputs(**values)


def read_weights(run: Path | str) -> dict[str, Tensor]:
    """The weights of a run, whose checksum must be that of its result."""
    path = check_folder(run, "weights.safetensors") / "weights.safetensors"
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} cannot be read ({error}): restore the file or train again") from error
    weights_checksum(run)
    return weights


def weights_checksum(run: Path | str) -> str:
    """SHA-256 of a run's weights, compared with its result. `weights.sha256` may stand for weights that were deleted."""
    folder = Path(run)
    file = folder / "weights.safetensors"
    for name in (file.name, "weights.sha256"):
        files.refuse_pipe(folder / name, RunError)
    if file.exists():
        checksum = files.sha256_of(file, RunError)
    elif (file := folder / "weights.sha256").exists():
        checksum = (files.bytes_of(file, RunError).decode(errors="replace").split() or [""])[0]
        if not re.fullmatch("[0-9a-f]{64}", checksum):
            raise RunError(f"{file} does not begin with a SHA-256: restore it, or write one with sha256sum")
    else:
        raise RunError(f"{folder} has neither weights.safetensors nor weights.sha256: its record would prove nothing")
    expected = _from_result(folder, "weights_sha256")
    if expected not in (None, checksum):
        raise RunError(
            f"{file} is damaged or of another run: SHA-256 {checksum[:10]}, result.json says {expected[:10]}; restore the file"
        )
    return checksum


def over(timesteps: int, config: Config) -> Config:
    """The configuration with another number of timesteps."""
    if type(timesteps) is not int or not 1 <= timesteps <= MOST_TIMESTEPS:
        raise RunError(
            f"timesteps must be a whole number of at least 1 and at most {MOST_TIMESTEPS}, got {timesteps!r}"
        )
    return replace(config, model=replace(config.model, timesteps=timesteps))


def other_files(run: Path | str) -> str:
    """The names of the imported files that this run was trained with, and that are not imported as they were; "" where none are
    known, or nothing is imported."""
    return plugins.changed(_imports(Path(run))) if plugins.IMPORTED else ""


def _imports(run: Path) -> str:
    """What `plugins.checksums` gave when this run was trained."""
    result = run / "result.json"
    environment = files.json_of(result, RunError).get("environment") if result.is_file() else None
    return str(environment.get("imports", "")) if isinstance(environment, dict) else ""


def with_imports(run: Path, error: ConfigError) -> str:
    """What was wrong when the network of a run was built; with the files that it was trained with, if they are not imported."""
    lacking = plugins.changed(_imports(run)) if "unknown" in str(error) else ""
    return f"{error}; it was trained with --import {lacking}" if lacking else str(error)


def warn_of_other_files(run: Path | str) -> None:
    if others := other_files(run):
        warnings.warn(f"{run} was trained with other imports, {others}, so this may not be its network", stacklevel=3)


def load(run: Path | str, timesteps: int | None = None) -> BurstNet:
    """The trained network of a run folder, in evaluation mode. timesteps: default those of training."""
    folder = check_folder(run, "config.toml", "weights.safetensors")
    warn_of_other_files(folder)
    try:
        trained = load_config(folder)
        config = trained if timesteps is None else over(timesteps, trained)
        net = build(config)
    except ConfigError as error:
        raise RunError(f"{folder / 'config.toml'}: {with_imports(folder, error)}") from error
    if config.train.precision == "fp64":
        net.double()
    weights = read_weights(folder)
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        shapes = {name: value.shape for name, value in weights.items()}
        if config != trained and shapes == {k: v.shape for k, v in build(trained).state_dict().items()}:
            raise RunError(
                f"{folder} cannot run over {timesteps} timesteps, its {config.neuron['name']} neurons have weights for each of "
                f"{trained.model.timesteps} timesteps: train it over so many"
            ) from error
        raise RunError(
            f"{folder / 'weights.safetensors'} does not belong to {folder / 'config.toml'}: {reason[:300]}"
        ) from error
    return net.eval()
