"""Run folders: `config.toml`, `metrics.jsonl`, `weights.safetensors`, `result.json`. No pickle anywhere.

A folder appears under its final name only when it is complete: it is written beside it and renamed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lbq._version import __version__
from lbq.config import Config
from lbq.errors import ConfigError, RunError
from lbq.kernels.choose import choose
from lbq.models import BurstNet
from lbq.train import build


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """A folder to fill, renamed to `path` on success and removed on failure. `path` must not exist yet."""
    path = Path(path)
    if path.exists():
        raise RunError(f"{path} exists already: choose another folder or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    except OSError as error:
        raise RunError(f"cannot write under {path.parent}: {error.strerror}") from error
    try:
        yield partial
        partial.chmod(0o755)
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def next_free(stem: Path | str) -> Path:
    """`stem-001`, or the next number that no folder has."""
    stem = Path(stem)
    number = 1
    while (path := stem.with_name(f"{stem.name}-{number:03d}")).exists():
        number += 1
    return path


def environment() -> dict[str, str]:
    """What a result depends on beside its configuration."""
    return {
        "lbq": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "kernel": choose("cpu").kernel,
    }


def save(folder: Path, net: BurstNet, config: Config, metrics: Iterable[Any], result: Mapping[str, Any]) -> None:
    """Write one run into an existing folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for record in metrics:
            row = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
            file.write(json.dumps(row) + "\n")
    # cloned: a tail shared between layers is one tensor under several names, which the format refuses
    save_file({k: v.detach().cpu().clone() for k, v in net.state_dict().items()}, folder / "weights.safetensors")
    record = {**result, "config_hash": config.hash, "environment": environment()}
    (folder / "result.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def load(run: Path | str) -> BurstNet:
    """The trained network of a run folder, in evaluation mode."""
    folder = Path(run)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a run folder: give one that `lbq demo` or a training wrote")
    for name in ("config.toml", "weights.safetensors"):
        if not (folder / name).is_file():
            raise RunError(f"{folder} is not a complete run folder: {name} is missing")
    try:
        net = build(Config.load(folder / "config.toml"))
    except ConfigError as error:
        raise RunError(str(error)) from error
    weights = folder / "weights.safetensors"
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{weights} cannot be read ({error}): restore the file or train again") from error
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{weights} does not belong to {folder / 'config.toml'}: {reason[:300]}") from error
    return net.eval()
