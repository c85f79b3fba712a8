"""Deployed networks for other programs: C99, WebAssembly, ONNX, NIR. No torch.

docs/explanation/integers.md defines what they compute.

Imports `engine`, `graph` and the folders below them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lbq.engine.published import resolve
from lbq.errors import LbqError, nearest
from lbq.export.cortex_m import check_target
from lbq.system.lazy import submodules as _submodules

FORMATS = {
    "c": "C99 sources that need nothing but a compiler",
    "c-step": "the same for one timestep, with a state that the caller keeps",
    "web": "one page that runs it in a browser, offline",
    "wasm": "a WebAssembly module and its JavaScript",
    "onnx": "an ONNX model of standard operators, all timesteps in one",
    "onnx-step": "the same for one timestep, with explicit state",
    "nir": "a NIR graph of a trained run, where that loses nothing",
}


def check_format(format: str) -> str:
    """The format, if there is such a one."""
    if format not in FORMATS:
        raise LbqError(f"--format {format!r} is not known{nearest(format, FORMATS)}")
    return format


def export(
    model: Path | str,
    out: Path | str,
    format: str = "c",
    name: str = "model",
    target: str | None = None,
    window: int | None = None,
) -> dict[str, Any]:
    """Write a deployed network, a model.lbq or a name of `lbq models`, in another form.

    out: a folder for `c`, `c-step` and `wasm`, else a file. name: the network's name in C, or of the module. target:
    `cortex-m` makes the C a whole project for a microcontroller. window: of `c-step`, logits are of so many of the latest
    frames; default the network's timesteps. Returns facts about what was written, as JSON values: `path`, `text` (a line for
    people) and others.
    """
    if not str(out):
        raise LbqError("export: say where to with -o")
    if check_format(format) == "nir":
        raise LbqError("NIR is written from a trained run, not from a deployed network: its neurons do not round")
    check_target(target, format)
    if name != "model" and format not in ("c", "c-step", "wasm"):
        raise LbqError(f"--name is for --format c, c-step and wasm, not {format}")
    if window is not None and format != "c-step":
        raise LbqError(f"--window is for --format c-step, not {format}")
    model, out = resolve(model), Path(out)
    if out.exists() and model.exists() and out.samefile(model):
        raise LbqError(f"{out} is the network that is to be exported: give another name with -o")
    if format in ("c", "c-step"):
        from lbq.export import c99

        return c99.export(model, out, name, "step" if format == "c-step" else "run", target, window)
    if format in ("web", "wasm"):
        from lbq.export import web

        return web.export_page(model, out) if format == "web" else web.export_module(model, out, name)
    from lbq.engine import load
    from lbq.export.onnx import write_onnx

    size = write_onnx(load(model), out, "step" if format == "onnx-step" else "sequence", model)
    return {
        "path": str(out),
        "bytes": size,
        "text": f"{out}: {size / 1e6:.2f} MB, the engine's integers in ONNX operators",
    }


_submodules(__name__)
