"""Deployed networks in other forms, for other programs. What they compute is defined in docs/deploy.md. No torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lbq.errors import LbqError, nearest

# By name: the module whose `export(model, out, name)` writes it and tells what it wrote
FORMATS = {"c": "lbq.export.c99"}


def export(model: Path | str, out: Path | str, format: str = "c", name: str = "model") -> dict[str, Any]:
    """Write the network of a model.lbq in another form.

    out: where to; a folder for `c`. name: what the network is called there. Returns what was written, as JSON values:
    `path`, and `text`, a line for people.
    """
    if format not in FORMATS:
        raise LbqError(f"--format {format!r} is not known{nearest(format, FORMATS)}")
    write: Callable[[Path, Path, str], dict[str, Any]] = import_module(FORMATS[format]).export
    return write(Path(model), Path(out), name)
