"""Checkpoints that survive being killed: one safetensors file each, checksummed, written whole or not at all. No pickle.

Tensors go into the file's body. Other values go as JSON into its header, with a SHA-256 over names, shapes, types and bytes
of all tensors and over the JSON. `save` writes to a temporary name, flushes it to disk and renames. The checkpoint before
stays as `previous`, so that a good one always remains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from lbq.errors import RunError
from lbq.runs.run_folder import rename
from lbq.system import files
from lbq.system.schema import Schema, problem

FORMAT = "lbq-checkpoint-1"
LAST, PREVIOUS = "last.safetensors", "previous.safetensors"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's tensors and JSON values, where it came from, and what was wrong with newer ones, if anything."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    path: Path
    skipped: tuple[str, ...] = ()


def save(folder: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Write `last.safetensors` in `folder`, keeping the one before as `previous.safetensors`."""
    stored = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    metadata = {"format": FORMAT, "values": text, "sha256": digest(stored, text)}
    files.write(folder / LAST, serialise(stored, metadata), RunError, keep_as=folder / PREVIOUS)


def load(folder: Path, expected: Schema | None = None) -> Loaded | None:
    """The newest checkpoint that is whole and has the `expected` values, or None where there is none at all.

    A damaged one is passed over for the one before; where all are damaged, that is an error.
    """
    problems: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            tensors, values = read(path)
            if expected is not None and (wrong := problem(values, expected)) is not None:
                raise RunError(f"{path} is damaged: {wrong}")
        except RunError as error:
            problems.append(str(error))
            continue
        return Loaded(tensors, values, path, tuple(problems))
    if problems:
        raise RunError(f"no usable checkpoint: {'; '.join(problems)}; start again in another folder")
    return None


def set_aside(loaded: Loaded) -> None:
    """Move a damaged `last` out of the way, so that the next save cannot put it in the place of the good `previous`."""
    if loaded.path.name == PREVIOUS and loaded.skipped:
        rename(loaded.path.with_name(LAST), loaded.path.with_name("damaged.safetensors"))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and values of one checkpoint file, with everything checked."""
    if not path.is_file():  # opening a pipe would wait
        raise RunError(f"{path} is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error})") from error
    if metadata.get("format") != FORMAT:
        raise RunError(f"{path} is not a checkpoint of this version (format {metadata.get('format')!r})")
    text = metadata.get("values", "")
    if digest(tensors, text) != metadata.get("sha256"):
        raise RunError(f"{path} is damaged: its checksum does not match")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RunError(f"{path} is damaged: its values are not a JSON object")
    return tensors, values


def digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 over the JSON and every tensor's name, type, shape and bytes."""
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return total.hexdigest()
