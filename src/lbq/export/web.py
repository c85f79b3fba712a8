"""A deployed network for browsers: the C export as WebAssembly, with a JavaScript face, or one page with all of it. No torch.

The module describes itself: a custom section called `lbq` holds, as JSON, what `web/network.js` needs to know of the network.
zig compiles it, the package `ziglang`. The module imports nothing. The same network gives the same bytes.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from lbq._version import __version__
from lbq.data.registry import FILES
from lbq.data.testset import EVAL_RATIO
from lbq.engine import Network, load
from lbq.errors import LbqError
from lbq.export.c99 import Sources
from lbq.export.checks import check_name, check_ours, refuse_unknown
from lbq.export.schedule import LayerStep, Schedule
from lbq.graph import INPUT, Synapse
from lbq.graph.integer import IntegerNetwork, shown_classes
from lbq.system import files

FLAGS = (
    "-target", "wasm32-freestanding", "-mcpu=generic+simd128", "-std=c99", "-O3", "-nostdlib", "-I.",
    "-Wl,--no-entry", "-Wl,--strip-all", "-Wl,-z,stack-size=65536",
)  # fmt: skip
SECTION = b"lbq"
SECTION_BYTES = 32  # among which the section's name stands
SCRIPTS = ("network.js", "pictures.js")
DIGITS_SHAPE, DIGITS_MAX = (1, 8, 8), 16


def export_module(model: Path, out: Path, name: str = "model") -> dict[str, Any]:
    """Write a model.lbq to the folder `out` as NAME.wasm and its JavaScript; return facts about it."""
    check_name(name)
    files.check_folder(out)
    contents: dict[str, bytes | str] = {script: _text(script) for script in SCRIPTS}
    for script in SCRIPTS:
        check_ours(out / script, _text(script))
    path = out / f"{name}.wasm"
    if path.is_file() and SECTION not in path.read_bytes()[:SECTION_BYTES]:
        raise LbqError(f"{path} is there already and was not written by lbq export: give another folder")
    contents[path.name] = module = build(load(model), model)
    files.write_all(out, contents)
    text = f"{out}: {path.name}, {len(module) / 1e3:.0f} kB, the engine's integers in WebAssembly, and {', '.join(SCRIPTS)}"
    return {"path": str(out), "files": list(contents), "bytes": len(module), "text": text}


def export_page(model: Path, out: Path) -> dict[str, Any]:
    """Write a model.lbq to the file `out` as a page that runs it; return facts about it."""
    files.check_file(out)
    net = load(model)
    network = net.network
    if image_facts(network)["resize"] is None:
        raise LbqError(
            f"{model} reads {'x'.join(map(str, network.input_shape))} {'pixels' if network.static else 'event frames'}, and "
            "a page takes square images of 1 or 3 channels: use --format wasm"
        )
    module = base64.b64encode(build(net, model)).decode()
    script = "\n".join(_text(name) for name in (*SCRIPTS, "page.js"))
    values = {"style": _text("page.css"), "script": script, "module": module, "title": escape(_title(network))}
    page = _text("page.html")
    for key, value in values.items():
        page = page.replace(f"@{key}@", value)
    size = files.write(out, page)
    return {
        "path": str(out),
        "bytes": size,
        "text": f"{out}: {size / 1e3:.0f} kB, opens in a browser, works offline",
    }


def build(net: Network, model: Path) -> bytes:
    """A network, loaded from `model`, as a WebAssembly module."""
    refuse_unknown(net.network, "WebAssembly")
    zig = compiler()
    with net.unchanged():
        sources = Sources(net.network, golden=net.golden, keep=True)
        code, checksum = sources.files(), files.sha256_of(model)
    with tempfile.TemporaryDirectory(prefix="lbq-") as folder:
        texts = {**code, "module.c": _text("module.c"), "string.h": _text("string.h")}
        for name, text in texts.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        compiled = sorted(name for name in texts if name.endswith(".c") and name != "example.c")
        command = [*zig, "cc", *FLAGS, "-o", "model.wasm", *compiled]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
            raise LbqError(f"zig could not compile the network ({reason[:200]}): pip install --upgrade ziglang")
        module = Path(folder, "model.wasm").read_bytes()
    return described(module, {**facts(net.network, sources), "sha256": checksum})


def compiler() -> list[str]:
    """The command that starts zig: the package `ziglang`, else a program on the path."""
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang"]
    if (program := shutil.which("zig")) is not None:
        return [program]
    raise LbqError("WebAssembly needs the compiler zig, which is not installed: pip install ziglang")


def described(module: bytes, facts: dict[str, Any]) -> bytes:
    """A module with its facts in front, as its first section."""
    content = bytes([len(SECTION)]) + SECTION + json.dumps(facts, separators=(",", ":")).encode()
    size, rest = b"", len(content)
    while rest or not size:  # LEB128
        size, rest = size + bytes([rest & 127 | (128 if rest > 127 else 0)]), rest >> 7
    return module[:8] + b"\0" + size + content + module[8:]


def facts(network: IntegerNetwork, sources: Sources) -> dict[str, Any]:
    """What network.js must know: names, shapes, where levels lie in memory, and how many weights each of them meets."""
    plan = sources.schedule
    steps = [*plan.layers, plan.readout]
    return {
        "title": _title(network),
        "dataset": network.dataset.get("name"),
        "written": f"lbq {__version__}",
        "classes": list(shown_classes(network.classes, network.readout.shape[0])),
        "scale": network.scale,
        "timesteps": network.timesteps,
        "static": network.static,
        "unitEvents": network.unit_events,
        "weights": network.parameters,
        "neurons": network.units,
        "input": image_facts(network),
        "tensors": [{"kind": t.kind, "frames": t.frames, "shape": t.shape, "offset": t.offset} for t in plan.tensors],
        "layers": [_drawn(network, plan.tensor(name), name) for name in _shown(network)],
        "synapses": [
            _reach(network, synapse, plan, tensor, step)
            for step in steps
            for synapse, tensor in zip(step.layer.synapses, step.sources, strict=True)
            if synapse.kind == "conv" and synapse.source != INPUT
        ],
        "products": [
            {
                "name": s.name,
                "layer": layer.name,
                "kind": _kind(s),
                "heads": s.heads,
                "tensors": [*map(plan.tensor, s.sources)],
            }
            for layer in network.layers
            for s in layer.matmuls
        ]
        + [
            {"name": gate.name, "layer": gate.name, "kind": "gate", "tensors": [*map(plan.tensor, gate.operands)]}
            for gate in network.gates
        ],
        "pixelProducts": sum(s.valid_macs for s in network.synapses if s.source == INPUT)
        * (1 if network.static else network.timesteps),
        "annProducts": network.valid_macs,
    }


def _kind(synapse: Synapse) -> str:
    """Of a product: (Q K^T) V, Q K^T for a neuron, or A V of such a neuron's levels."""
    return "attention" if len(synapse.sources) > 2 else "scores" if synapse.keys else "values"


def _shown(network: IntegerNetwork) -> Iterator[str]:
    """Layers, each with the gates behind it."""
    for layer in network.layers:
        yield layer.name
        yield from (gate.name for gate in network.gates_behind(layer.name))


def _drawn(network: IntegerNetwork, tensor: int, name: str) -> dict[str, Any]:
    """What the page needs to draw the levels of a layer or a gate."""
    most = network.n_max(name)
    place = {"name": name, "shape": network.shape_of(name), "tensor": tensor, "gate": name in network.gate_names}
    return {**place, "highest": most, "planes": most.bit_length()}


def image_facts(network: IntegerNetwork) -> dict[str, Any]:
    """What a network reads. resize: to how many pixels the shorter side of a picture is scaled, None where it takes none.
    drawing: whether it reads drawn digits."""
    shape, name = network.input_shape, network.dataset.get("name")
    square = network.static and shape[0] in (1, 3) and shape[1] == shape[2]
    side = round(shape[1] * EVAL_RATIO) if name in FILES else shape[1]
    drawing = name == "digits" and shape == DIGITS_SHAPE and network.input_max == DIGITS_MAX
    return {"shape": shape, "max": network.input_max, "resize": side if square else None, "drawing": drawing}


def _reach(network: IntegerNetwork, synapse: Synapse, plan: Schedule, tensor: int, step: LayerStep) -> dict[str, Any]:
    """How many weights an input meets: taps of its row, times taps of its column, times the outputs that read its channel.

    Unit events are counted before they are summed: an event meets the weights of every window that holds it."""
    rows, columns = synapse.taps(0), synapse.taps(1)
    if network.unit_events:
        maxima = tuple(pool for pool in synapse.pools if pool.kind == "max")  # they come first
        tensor = plan.tensor(synapse.source, maxima)
        shape, summed = plan.tensors[tensor].shape, []
        for pool in synapse.pools[len(maxima) :]:
            summed.append((pool, shape))
            shape = pool.output(shape)
        for pool, shape in reversed(summed):
            rows, columns = pool.windows(shape, 0) @ rows, pool.windows(shape, 1) @ columns
    place = {"tensor": tensor, "layer": step.layer.name, "readout": step.target is None}
    reach = {"rows": rows.tolist(), "columns": columns.tolist(), "fanOut": synapse.weight.shape[0] // synapse.groups}
    return {"name": synapse.name, **place, **reach}


def _title(network: IntegerNetwork) -> str:
    return str(network.facts.get("model") or "a network of one's own")


def _text(name: str) -> str:
    return (resources.files("lbq.export") / "web" / name).read_text(encoding="utf-8")
