"""A deployed network as C99 that needs nothing but a compiler: tables of integers and a small runtime. No torch.

The runtime and its example lie beside this file in `c/`, for a network called `model`; names are changed to the one asked
for, so that several networks can be linked into one program. The same network gives the same bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq import files
from lbq._version import __version__
from lbq.engine import Network, load
from lbq.engine.network import IntegerLayer, IntegerNetwork, IntegerNeuron
from lbq.engine.reading import Golden
from lbq.errors import LbqError
from lbq.export.schedule import LayerStep, Schedule
from lbq.graph import Synapse

START = 24  # bytes that a file of an export begins with, whatever the network
FIXED = ("model.c", "model_net.h", "Makefile")  # but for names
WIDTH = 116  # of lines of numbers
MOST_CLASSES = 256  # of rows, or of columns: a byte says which
TENSORS = {
    "image": "MODEL_IMAGE",
    "unsigned": "MODEL_UNSIGNED_LEVELS",
    "signed": "MODEL_SIGNED_LEVELS",
    "sums": "MODEL_SUMS",
}


def export(model: Path, out: Path, name: str = "model") -> dict[str, Any]:
    """Write a model.lbq to the folder `out` as C. Returns facts: memory, weights and constants in bytes."""
    check_name(name)
    files.check_folder(out)
    net = load(model)
    with open(model, "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    made = Sources(net.network, name, net.golden, checksum)
    contents = made.files()
    for file_name, text in contents.items():
        check_ours(out / file_name, text)
    size = files.write_all(out, contents)
    facts = {
        "path": str(out),
        "files": list(contents),
        "bytes": size,
        "weights": net.network.parameters,
        "constant_bytes": made.constant_bytes,
        "memory_bytes": made.memory_bytes,
        "examples": len(made.golden.logits),
    }
    text = (
        f"{out}: {len(contents)} files; {facts['weights']:,} weights, constants of {made.constant_bytes:,} bytes, "
        f"memory of {made.memory_bytes:,} bytes; `make -C {shlex.quote(str(out))} check` runs {facts['examples']} inputs and "
        "compares"
    )
    return {**facts, "text": text}


def check_name(name: str) -> None:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,39}", name) is None:
        raise LbqError(
            f"--name {name!r} cannot begin the names of C: give a letter, then up to 39 letters, digits and underscores"
        )
    if name.lower() in ("example", "makefile"):
        raise LbqError(f"--name {name} is the name of a file beside it: give another one")


def check_ours(path: Path, text: str) -> None:
    """Refuse to replace a file that no export wrote: all of one name begin alike."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        if file.read(START) != text.encode()[:START]:
            raise LbqError(f"{path} is there already and was not written by lbq export: give another folder")


class Sources:
    """The C files of one network. memory_bytes: of `NAME_memory`; constant_bytes: of all weights and constants.

    golden: inputs and logits for the example; None: noise, and what the engine gives. checksum: of the network's file.
    """

    def __init__(
        self, network: IntegerNetwork, name: str = "model", golden: Golden | None = None, checksum: str = ""
    ) -> None:
        self.network, self.name, self.checksum = network, name, checksum
        self.schedule = Schedule(network)
        given = golden is not None and len(golden.logits) > 0
        self.origin = "The golden inputs that came with the network" if given else "Noise, and what lbq's engine gave"
        self.golden = golden if golden is not None and given else _noise(network)
        self.constant_bytes = 0
        self._arrays: list[str] = []
        self._said: list[str] = []
        self.levels = -(-self.schedule.levels // 4) * 4
        self.memory_bytes = 4 * self.schedule.words + self.levels
        self._tables = self._data()

    def files(self) -> dict[str, str]:
        """By name."""
        folder = resources.files("lbq.export") / "c"
        texts = {name: (folder / name).read_text(encoding="utf-8") for name in FIXED}
        texts |= {"model.h": self._header(), "model_data.c": self._tables, "example.c": self._example(folder)}
        order = ("model.h", "model.c", "model_net.h", "model_data.c", "example.c", "Makefile")
        return {_renamed(name, self.name): self._finished(texts[name]) for name in order}

    def _finished(self, text: str) -> str:
        return re.sub(r"@(\d+)@", lambda found: self._said[int(found[1])], _renamed(text, self.name))

    def _say(self, text: str) -> str:
        """A mark where `text` will stand, in which nothing is renamed."""
        self._said.append(text)
        return f"@{len(self._said) - 1}@"

    # model.h -----------------------------------------------------------------------------------------------------------

    def _header(self) -> str:
        net, facts = self.network, self.network.facts
        data = facts.get("data")
        shape = "x".join(map(str, net.input_shape))
        frames = 1 if net.static else net.timesteps
        kinds = ", ".join(sorted({str(s.weight.dtype) for s in net.synapses if s.kind == "conv"}))
        described = {
            "model": facts.get("model") or "a network of one's own",
            "dataset": (data.get("name") if isinstance(data, dict) else None) or "not stated",
            "input": f"uint8, {'one image' if net.static else f'{frames} event frames'} of {shape}, "
            f"values 0 to {net.input_max}",
            "network": f"{len(net.layers)} spiking layers, {net.units:,} neurons, {net.timesteps} timesteps, "
            f"{net.parameters:,} weights ({kinds})",
            "file": f"SHA-256 {self.checksum}" if self.checksum else "none",
            "written by": f"lbq {__version__}",
        }
        comment = "\n".join(f"   {key + ':':<12}{self._say(_comment(str(value)))}" for key, value in described.items())
        return f"""/* An integer spiking network.

{comment}

   It computes what docs/deploy.md of lbq defines, bit for bit: additions, products with small integers, shifts and
   comparisons; no floating point, no allocation, no state between calls. How accurate it is, this file does not say. */
#ifndef MODEL_H
#define MODEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define MODEL_INPUT_SHAPE {{{frames}, {", ".join(map(str, net.input_shape))}}} /* frames, channels, rows, columns */
#define MODEL_INPUT_BYTES {frames * math.prod(net.input_shape)}
#define MODEL_INPUT_MAX {net.input_max} /* the brightest pixel, or highest count, in the data it was trained on */
#define MODEL_TIMESTEPS {net.timesteps}
#define MODEL_CLASSES {net.readout.shape[0]}
#define MODEL_WEIGHTS {net.parameters}
#define MODEL_CONSTANT_BYTES {self.constant_bytes} /* weights, thresholds and biases, read only */
#define MODEL_MEMORY_BYTES {self.memory_bytes} /* sizeof(model_memory) */
#define MODEL_LOGIT_SCALE {net.scale!r} /* what one unit of a logit is worth; the network does not use it */

/* What a run needs besides the constants. It may lie anywhere, holds nothing between runs and needs no initial value. */
typedef struct {{
    int32_t words[{self.schedule.words}];
    uint8_t levels[{self.levels}];
}} model_memory;

extern const char *const model_class_names[MODEL_CLASSES];

/* Classify one input, MODEL_INPUT_BYTES in the order of MODEL_INPUT_SHAPE, pixels as they are stored. Writes
   MODEL_CLASSES logits. Returns 0, or 1 where a pointer is NULL. Calls with memories of their own may run at once. */
int model_run(const uint8_t *input, int64_t *logits, model_memory *memory);

/* The class with the largest logit; of equal ones the first. */
int model_best(const int64_t *logits);

#ifdef __cplusplus
}}
#endif

#endif
"""

    # model_data.c ------------------------------------------------------------------------------------------------------

    def _data(self) -> str:
        plan, net = self.schedule, self.network
        synapses: list[str] = []
        layers = [self._layer(i, step, synapses) for i, step in enumerate(plan.layers)]
        first = len(synapses)
        synapses += [
            self._synapse(s, source, first + i)
            for i, (s, source) in enumerate(zip(net.readout.synapses, plan.readout.sources, strict=True))
        ]
        bias = self._array("readout_bias", net.readout.bias)
        tensors = [
            f"{{{TENSORS[t.kind]}, {t.frames}, {', '.join(map(str, t.shape))}, {0 if t.kind == 'image' else t.offset}}}"
            for t in plan.tensors
        ]
        pools = [
            f"{{MODEL_POOL_{p.pool.kind.upper()}, {p.source}, {p.target}, "
            f"{_numbers(*p.pool.kernel, *p.pool.stride, *p.pool.padding)}}}"
            for p in plan.pools
        ]
        steps = [f"{{MODEL_{kind.upper()}_STEP, {index}}}" for kind, index in plan.steps]
        names = net.classes or tuple(map(str, range(net.readout.shape[0])))
        tables = [
            _table("model_tensor", "tensors", tensors),
            _table("model_synapse", "synapses", synapses),
            _table("model_pool", "pools", pools) if pools else "",  # C99 has no empty arrays
            _table("model_layer", "layers", layers),
            _table("model_step", "steps", steps),
            "const char *const model_class_names[MODEL_CLASSES] = {\n"
            + "".join(f"    {self._say(_string(name))},\n" for name in names)
            + "};\n",
            f"const model_network model_net = {{tensors, synapses, {'pools' if pools else 'NULL'}, layers, steps, "
            f"{len(steps)}, {first}, {len(net.readout.synapses)}, {bias}}};\n",
        ]
        head = (
            "/* The network's constants; written by lbq export. */\n"
            '#include <stddef.h>\n#include <stdint.h>\n\n#include "model.h"\n#include "model_net.h"\n'
        )
        return "\n".join([head, self._say("\n".join(self._arrays)), *(table for table in tables if table)])

    def _layer(self, index: int, step: LayerStep, synapses: list[str]) -> str:
        layer, first = step.layer, len(synapses)
        neuron = self.network.spec(layer.name)
        self._arrays.append(f"/* layer {index}: {_comment(layer.name)} */")
        for synapse, source in zip(layer.synapses, step.sources, strict=True):
            synapses.append(self._synapse(synapse, source, len(synapses)))
        bias = self._bias(index, layer)
        thresholds = self._array(f"thresholds_{index}", neuron.thresholds)
        reset = self._array(f"reset_{index}", neuron.reset)
        m, k = neuron.leak or (1, 0)
        shape = _numbers(step.target, first, len(layer.synapses), layer.fraction)
        row = f"{shape}, {bias}, {thresholds}, {reset}, {neuron.n_max}, {_reset(neuron)}, {m}, {k}"
        return self._row(row, layer.name)

    def _bias(self, index: int, layer: IntegerLayer) -> str:
        """A layer's bias, how many columns that has, and the classes of rows and of columns: of a map in which few rows and
        columns differ, as where padding makes the borders special, each is written once."""
        if layer.bias.ndim == 1:
            return f"{self._array(f'bias_{index}', layer.bias)}, 0, NULL, NULL"
        whole = layer.bias.transpose(1, 2, 0)
        table, rows, columns = distinct(whole)
        if max(table.shape[:2]) > MOST_CLASSES or table.nbytes + len(rows) + len(columns) >= whole.nbytes:
            return f"{self._array(f'bias_{index}', whole)}, {whole.shape[1]}, NULL, NULL"
        bias = self._array(f"bias_{index}", table)
        classes = [
            self._array(f"bias_{axis}_{index}", found.astype(np.uint8))
            for axis, found in (("rows", rows), ("columns", columns))
        ]
        return f"{bias}, {table.shape[1]}, {', '.join(classes)}"

    def _synapse(self, synapse: Synapse, source: int, index: int) -> str:
        if synapse.kind == "identity":
            name = self._array(f"identity_{index}", synapse.weight.astype(np.int32))
            return self._row(f"{source}, {name}, NULL, NULL, {_numbers(*[0] * 9)}", synapse.name)
        name = self._array(f"weights_{index}", synapse.weight.transpose(2, 3, 1, 0))
        pointers = f"{name}, NULL" if synapse.weight.dtype == np.int8 else f"NULL, {name}"
        numbers = (*synapse.weight.shape[2:], *synapse.stride, *synapse.padding, *synapse.dilation, synapse.groups)
        return self._row(f"{source}, NULL, {pointers}, {_numbers(*numbers)}", synapse.name)

    def _row(self, values: str, name: str) -> str:
        return f"{{{values}}} /* {self._say(_comment(name))} */"

    def _array(self, name: str, values: NDArray[Any]) -> str:
        self.constant_bytes += values.nbytes
        flat = np.ascontiguousarray(values).reshape(-1)
        shape = " ".join(f"[{n}]" for n in values.shape)
        self._arrays.append(
            f"static const {flat.dtype}_t {name}[{flat.size}] = {{ /* {shape} */\n{_wrapped(flat)}\n}};\n"
        )
        return name

    # example.c ---------------------------------------------------------------------------------------------------------

    def _example(self, folder: Traversable) -> str:
        text = (folder / "example.c").read_text(encoding="utf-8")
        inputs = self.golden.inputs if self.network.static else self.golden.inputs.swapaxes(0, 1)
        for key, value in {
            "examples": str(len(inputs)),
            "origin": self.origin,
            "inputs": self._say(",\n".join(f"{{\n{_wrapped(one.reshape(-1))}\n}}" for one in inputs)),
            "logits": ",\n".join(f"{{\n{_wrapped(one)}\n}}" for one in self.golden.logits),
        }.items():
            text = text.replace(f"@{key}@", value)
        return text


def _noise(network: IntegerNetwork) -> Golden:
    lead = (4,) if network.static else (network.timesteps, 4)
    inputs = np.random.default_rng(0).integers(0, network.input_max, (*lead, *network.input_shape), np.uint8, True)
    return Golden(inputs, Network(network).run(inputs, "dense").logits, {})


def distinct(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp], NDArray[np.intp]]:
    """A table of the distinct rows and columns, and which of them each is: values[y, x] is table[rows[y], columns[x]]."""
    (first_rows, rows), (first_columns, columns) = (
        np.unique(values, axis=axis, return_index=True, return_inverse=True)[1:] for axis in (0, 1)
    )
    return values[first_rows][:, first_columns], rows.reshape(-1), columns.reshape(-1)


def _reset(neuron: IntegerNeuron) -> str:
    late = "" if neuron.decay_reset or neuron.reset_kind == "hard" else "_LATE"
    return f"MODEL_RESET_{neuron.reset_kind.upper()}{late}"


def _renamed(text: str, name: str) -> str:
    """For a network of another name: what begins with `model_` or `MODEL_`, and the files."""
    text = re.sub(r"\bmodel_(?=\w)", f"{name}_", text)
    text = re.sub(r"\bMODEL_(?=\w)", f"{name.upper()}_", text)
    return re.sub(r"\bmodel\.(?=[cho]\b)", f"{name}.", text)


def _numbers(*values: int | None) -> str:
    return ", ".join(map(str, values))


def _table(kind: str, name: str, rows: list[str]) -> str:
    return f"static const {kind} {name}[{len(rows)}] = {{\n" + "".join(f"    {row},\n" for row in rows) + "};\n"


def _wrapped(values: NDArray[Any]) -> str:
    """Numbers with commas between, in lines of at most WIDTH characters."""
    longest = max(len(str(values.min())), len(str(values.max())))
    numbers, each = values.tolist(), WIDTH // (longest + 1)
    return ",\n".join(",".join(map(str, numbers[i : i + each])) for i in range(0, len(numbers), each))


def _comment(text: str) -> str:
    """Fit to stand in a comment: printable ASCII that neither ends it nor begins another."""
    plain = "".join(c if " " <= c <= "~" else "." for c in text)[:200]
    return re.sub(r"\?(?=\?)", "? ", plain.replace("*/", "* /").replace("/*", "/ *"))


def _string(text: str) -> str:
    """A string literal of its UTF-8; what C could read otherwise, trigraphs too, in octal."""
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\?' else f"\\{b:03o}" for b in text.encode()) + '"'
