"""A deployed network as C99 that needs nothing but a compiler: tables of integers and a small runtime. No torch.

The runtime and its example are in `c/`, for a network called `model`. Names are changed to the caller's, so that several
networks can be linked into one program. The same network gives the same bytes.

The runtime has two forms: `run` takes all timesteps in one call, `step` takes one in each call, with a state that the
caller keeps. The parts of one form alone are in `c/run` and `c/step`.
"""

from __future__ import annotations

import math
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lbq._version import __version__
from lbq.engine import Network, load
from lbq.engine.file.reading import Golden
from lbq.errors import GraphError
from lbq.export import c99_exits, cortex_m
from lbq.export.checks import check_name, check_neighbours, check_ours, refuse_unknown
from lbq.export.rows import packed_rows
from lbq.export.schedule import LayerStep, Schedule
from lbq.graph import Synapse
from lbq.graph.endless import check_membranes, over_window
from lbq.graph.integer import IntegerLayer, IntegerNetwork, shown_classes
from lbq.system import files

Form = Literal["run", "step"]
LINE_CHARACTERS = 116  # of numbers
MOST_DISTINCT_ROWS = 256  # or columns: a byte numbers them
HEADERS = "model_levels.h", "model_net.h", "model_products.h", "model_rows.h"  # of the runtime
TENSOR_KINDS = {
    "image": "IMAGE",
    "unsigned": "UNSIGNED_LEVELS",
    "signed": "SIGNED_LEVELS",
    "sums": "SUMS",
}


def export(
    model: Path,
    out: Path,
    name: str = "model",
    form: Form = "run",
    target: str | None = None,
    window: int | None = None,
) -> dict[str, Any]:
    """Write a model.lbq to the folder `out` as C; return facts: memory, weights and constants in bytes.

    target: `cortex-m` adds what a microcontroller needs.
    """
    check_name(name)
    files.check_folder(out)
    net = load(model)
    with net.unchanged():
        sources = Sources(net.network, name, net.golden, files.sha256_of(model), form, target, window)
        contents = sources.files()
    golden = sources.golden  # the example's inputs and logits lie in flash too, and the logits of one in RAM
    flash_bytes = sources.constant_bytes + golden.inputs.nbytes + golden.logits.nbytes
    flash_bytes += c99_exits.example_bytes(sources.early)
    boards = cortex_m.fitting_boards(flash_bytes, sources.memory_bytes + golden.logits[0].nbytes) if target else []
    check_neighbours(out, name)
    for file_name, text in contents.items():
        check_ours(out / file_name, text)
    size = files.write_all(out, contents)
    facts = {
        "path": str(out),
        "files": list(contents),
        "bytes": size,
        "weights": net.network.parameters,
        "constant_bytes": sources.constant_bytes,
        "memory_bytes": sources.memory_bytes,
        "examples": len(sources.golden.logits),
        **({"boards": boards} if target else {}),
    }
    command = f"make -C {shlex.quote(str(out))} {f'BOARD={boards[0]} ' if boards else ''}check"
    if form == "step":
        facts |= {"endless": sources.endless, "window": sources.network.timesteps}
    text = (
        f"{out}: {len(contents)} files; {facts['weights']:,} weights, constants of {facts['constant_bytes']:,} bytes, "
        f"memory of {facts['memory_bytes']:,} bytes; `{command}` runs {facts['examples']} inputs and compares"
    )
    return {**facts, "text": text}


class Sources:
    """The C files of one network.

    golden: inputs and logits for the example; None takes noise, and what the engine gives for it.
    checksum: of the network's file. window: of the form `step`, logits are of so many of the latest frames; default the
    timesteps. endless: whether it goes on after them, with sums that are proved to fit. memory_bytes: of NAME_memory or
    NAME_state. constant_bytes: of all weights and constants. keep: whether a run leaves all levels in memory.
    """

    def __init__(
        self,
        network: IntegerNetwork,
        name: str = "model",
        golden: Golden | None = None,
        checksum: str = "",
        form: Form = "run",
        target: str | None = None,
        window: int | None = None,
        keep: bool = False,
    ) -> None:
        refuse_unknown(network, "C")
        if golden is not None and len(golden.logits):
            self.origin, self.golden = "The golden inputs that came with the network", golden
        else:
            self.origin, self.golden = "Noise, and what lbq's engine gave", _noise(network)
        self.timesteps, self.endless = network.timesteps, form == "step" and _endless(network, window)
        if window is not None:
            self.golden = _windowed(network, self.golden, window)
            network = over_window(network, window)
        self.early = c99_exits.of_examples(network, self.golden)
        self.network, self.name, self.checksum, self.form, self.target = network, name, checksum, form, target
        self.macro = name.upper()  # with which the names of constants begin
        self.schedule = Schedule(network, stepwise=form == "step", keep=keep)
        self.constant_bytes = 0
        self._arrays: list[str] = []
        self.levels, self.memory_bytes = self._sizes()
        self._tables = self._data()

    def files(self) -> dict[str, str]:
        """The text of each file, by name."""
        texts = {
            "model.h": self._header(),
            "model.c": self._template("model.c"),
            **{name: self._template(name, products=int(self.schedule.multiplies)) for name in HEADERS},
            "model_data.c": self._tables,
            "example.c": self._example(),
            "Makefile": self._template("Makefile"),
        }
        if self.target is not None:
            folder = resources.files("lbq.export") / "c" / self.target
            names = sorted(file.name for file in folder.iterdir())
            texts |= {name: self._template(f"{self.target}/{name}", **cortex_m.values()) for name in names}
        return {_renamed(name, self.name): text for name, text in texts.items()}

    def _template(self, name: str, **values: object) -> str:
        """A file of `c/`: `@interface@` becomes the form's file of that name, names the caller's, each `@KEY@` its value."""
        folder = resources.files("lbq.export") / "c"
        text, of_form = (folder / name).read_text(encoding="utf-8"), folder / self.form / name
        if of_form.is_file():
            more = c99_exits.part(name, self.form) if self.early else ""
            text = text.replace("@interface@\n", of_form.read_text(encoding="utf-8") + more)
        return re.sub(r"@(\w+)@", lambda mark: str(values[mark[1]]), _renamed(text, self.name))

    def _sizes(self) -> tuple[int, int]:
        """Bytes of levels, rounded up so that no compiler adds padding, and of the whole memory or state."""
        plan, fixed, unit = self.schedule, 4 * self.schedule.words, 4
        if self.form == "step":
            logits = 8 * self.network.readout.shape[0] * (1 + self.network.timesteps)
            fixed, unit = fixed + logits + 4 + 4 * plan.membranes, 8
        size = -(-(fixed + plan.levels) // unit) * unit
        return size - fixed, size

    # model.h -----------------------------------------------------------------------------------------------------------

    def _header(self) -> str:
        net, frames = self.network, self.schedule.tensors[0].frames
        return self._template(
            "model.h",
            described="\n".join(f"   {key + ':':<12}{_comment(text)}" for key, text in self._described().items()),
            shape=_numbers(frames, *net.input_shape),
            input_bytes=frames * math.prod(net.input_shape),
            input_max=net.input_max,
            timesteps=self.timesteps,
            window=net.timesteps,
            endless=int(self.endless),
            classes=net.readout.shape[0],
            weights=net.parameters,
            constant_bytes=self.constant_bytes,
            scale=repr(net.scale),
            frame="the image, each time the same" if net.static else "the next frame",
            membranes=self.schedule.membranes,
            words=self.schedule.words,
            levels=self.levels,
            memory_bytes=self.memory_bytes,
        )

    def _described(self) -> dict[str, str]:
        net = self.network
        kinds = ", ".join(sorted({str(s.weight.dtype) for s in net.synapses if s.kind == "conv"}))
        frames = "one image" if net.static else f"{self.timesteps} event frames"
        return {
            "model": str(net.facts.get("model") or "a network of one's own"),
            "dataset": str(net.dataset.get("name") or "not stated"),
            "input": f"uint8, {frames} of {'x'.join(map(str, net.input_shape))}, values 0 to {net.input_max}",
            "network": f"{len(net.layers)} spiking layers, {net.units:,} neurons, {self.timesteps} timesteps, "
            f"{net.parameters:,} weights ({kinds})",
            "file": f"SHA-256 {self.checksum}" if self.checksum else "none",
            "written by": f"lbq {__version__}",
        }

    # model_data.c ------------------------------------------------------------------------------------------------------

    def _data(self) -> str:
        plan, net = self.schedule, self.network
        synapses: list[str] = []
        layers = [self._layer(i, step, synapses) for i, step in enumerate(plan.layers)]
        first = len(synapses)
        synapses += [
            self._synapse(s, source, first + i, readout=True)
            for i, (s, source) in enumerate(zip(net.readout.synapses, plan.readout.sources, strict=True))
        ]
        bias, exits = self._array("readout_bias", net.readout.bias), c99_exits.constants(net.exits, self._array)
        tensors = [
            f"{{{self.macro}_{TENSOR_KINDS[t.kind]}, {_numbers(t.frames, *t.shape, 0 if t.kind == 'image' else t.offset)}}}"
            for t in plan.tensors
        ]
        pools = [
            f"{{{self.macro}_POOL_{p.pool.kind.upper()}, {p.source}, {p.target}, "
            f"{_numbers(*p.pool.kernel, *p.pool.stride, *p.pool.padding)}}}"
            for p in plan.pools
        ]
        names = shown_classes(net.classes, net.readout.shape[0])
        stages = [f"{{{self.macro}_{kind.upper()}_STAGE, {index}}}" for kind, index in plan.steps]
        tables = {"tensor": tensors, "synapse": synapses, "pool": pools, "layer": layers, "stage": stages}
        tables |= product_tables(plan)
        pointers = [f"{kind}s" if rows else "NULL" for kind, rows in tables.items()]
        counts = f"{len(stages)}, {first}, {len(net.readout.synapses)}, {bias}, {exits}"
        texts = [
            *(self._table(kind, f"{kind}s", rows) for kind, rows in tables.items() if rows),  # C99 has no empty arrays
            f"const char *const {self.name}_class_names[{self.macro}_CLASSES] = {{\n"
            + "".join(f"    {_string(name)},\n" for name in names)
            + "};\n",
            f"const {self.name}_network {self.name}_net = {{{', '.join([*pointers[:5], counts, *pointers[5:]])}}};\n",
        ]
        head = (
            "/* The network's constants; written by lbq export. */\n"
            f'#include <stddef.h>\n#include <stdint.h>\n\n#include "{self.name}.h"\n#include "{self.name}_net.h"\n'
        )
        return "\n".join([head, "\n".join(self._arrays), *texts])

    def _layer(self, index: int, step: LayerStep, synapses: list[str]) -> str:
        layer, first = step.layer, len(synapses)
        neuron = self.network.spec(layer.name)
        self._arrays.append(f"/* layer {index}: {_comment(layer.name)} */")
        for synapse, source in zip(layer.synapses, step.sources, strict=True):
            synapses.append(self._synapse(synapse, source, len(synapses)))
        bias = self._bias(index, layer)
        thresholds = self._array(f"thresholds_{index}", neuron.thresholds.T)
        reset = self._array(f"reset_{index}", neuron.reset)
        late = "" if neuron.decay_reset or neuron.reset_kind == "hard" else "_LATE"
        kind = f"{self.macro}_RESET_{neuron.reset_kind.upper()}{late}"
        shape = _numbers(step.target, first, len(layer.synapses), layer.fraction)
        leak = _numbers(*(neuron.leak or (1, 0)), step.membranes)
        return _row(f"{shape}, {bias}, {thresholds}, {reset}, {neuron.n_max}, {kind}, {leak}", layer.name)

    def _bias(self, index: int, layer: IntegerLayer) -> str:
        """A layer's bias, its number of columns, and which distinct row and column each place has.

        In a map few rows and columns differ, because only padding makes the borders special. Each is written once.
        """
        if layer.bias.ndim == 1:
            return f"{self._array(f'bias_{index}', layer.bias)}, 0, NULL, NULL"
        whole = layer.bias.transpose(1, 2, 0)
        table, rows, columns = distinct(whole)
        if max(table.shape[:2]) > MOST_DISTINCT_ROWS or table.nbytes + len(rows) + len(columns) >= whole.nbytes:
            return f"{self._array(f'bias_{index}', whole)}, {whole.shape[1]}, NULL, NULL"
        bias = self._array(f"bias_{index}", table)
        row_of = self._array(f"bias_rows_{index}", rows.astype(np.uint8))
        column_of = self._array(f"bias_columns_{index}", columns.astype(np.uint8))
        return f"{bias}, {table.shape[1]}, {row_of}, {column_of}"

    def _synapse(self, synapse: Synapse, source: int, index: int, readout: bool = False) -> str:
        if synapse.kind != "conv":
            name = self._array(f"{synapse.kind}_{index}", synapse.weight.astype(np.int32))
            return _row(f"{source}, {name}, NULL, NULL, NULL, {_numbers(*[0] * 11)}", synapse.name)
        tensor = self.schedule.tensors[source]
        rows = packed_rows(synapse, tensor.largest) if tensor.kind in ("unsigned", "signed") and not readout else None
        name = self._array(f"weights_{index}", synapse.weight.transpose(2, 3, 1, 0) if rows is None else rows.halfwords)
        if rows is not None:
            pointers = f"NULL, NULL, {name}, {rows.bits}, {rows.longest}"
        else:
            pointers = f"{name}, NULL, NULL, 0, 0" if synapse.weight.dtype == np.int8 else f"NULL, {name}, NULL, 0, 0"
        numbers = (*synapse.weight.shape[2:], *synapse.stride, *synapse.padding, *synapse.dilation, synapse.groups)
        return _row(f"{source}, NULL, {pointers}, {_numbers(*numbers)}", synapse.name)

    def _table(self, kind: str, name: str, rows: list[str]) -> str:
        lines = "".join(f"    {row},\n" for row in rows)
        return f"static const {self.name}_{kind} {name}[{len(rows)}] = {{\n{lines}}};\n"

    def _array(self, name: str, values: NDArray[Any]) -> str:
        self.constant_bytes += values.nbytes
        flat = np.ascontiguousarray(values).reshape(-1)
        shape = " ".join(f"[{n}]" for n in values.shape)
        self._arrays.append(
            f"static const {flat.dtype}_t {name}[{flat.size}] = {{ /* {shape} */\n{_wrapped(flat)}\n}};\n"
        )
        return name

    # example.c ---------------------------------------------------------------------------------------------------------

    def _example(self) -> str:
        inputs = self.golden.inputs if self.network.static else self.golden.inputs.swapaxes(0, 1)
        one_by_one, size = self.form == "step" and not self.network.static, f"{self.macro}_INPUT_BYTES"
        return self._template(
            "example.c",
            examples=len(inputs),
            origin=self.origin,
            input_size=f"{self.macro}_TIMESTEPS * {size}" if one_by_one else size,
            inputs=",\n".join(f"{{\n{_wrapped(one.reshape(-1))}\n}}" for one in inputs),
            logits=",\n".join(f"{{\n{_wrapped(one)}\n}}" for one in self.golden.logits),
            frame=f"input + t * {size}" if one_by_one else "input",
            **c99_exits.in_the_example(self.early, _wrapped),
            **(cortex_m.IN_THE_EXAMPLE if self.target else dict.fromkeys(cortex_m.IN_THE_EXAMPLE, "")),
        )


def product_tables(plan: Schedule) -> dict[str, list[str]]:
    """Rows of gates, of K^T V, and of what attention has beside other synapses."""
    pairs = [(step, s) for step in (*plan.layers, plan.readout) for s in step.layer.synapses if plan.multiplies]
    heads = [(*step.factors[s.name], s.heads) if s.name in step.factors else (0, 0, 0) for step, s in pairs]
    rows = {"gate": plan.gates, "product": plan.products, "attention": heads}
    return {kind: [f"{{{_numbers(*numbers)}}}" for numbers in some] for kind, some in rows.items()}


def _noise(network: IntegerNetwork) -> Golden:
    lead = (4,) if network.static else (network.timesteps, 4)
    inputs = np.random.default_rng(0).integers(0, network.input_max, (*lead, *network.input_shape), np.uint8, True)
    return Golden(inputs, Network(network).run(inputs, "dense").logits, {})


def _endless(network: IntegerNetwork, window: int | None) -> bool:
    """Whether the network is proved to fit however many frames come. A window that only such a network has demands it."""
    try:
        check_membranes(network)
    except GraphError:
        if window is not None:
            raise
        return False
    return True


def _windowed(network: IntegerNetwork, golden: Golden, window: int) -> Golden:
    """The golden inputs with the logits of their last frames."""
    frames = [golden.inputs] * network.timesteps if network.static else golden.inputs
    logits = []
    for i in range(len(golden.logits)):
        stream = Network(network).stream(window, engine="dense")
        logits.append([stream.step(frame[i]).logits[0] for frame in frames][-1])
    return Golden(golden.inputs, np.stack(logits), golden.digests)


def distinct(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp], NDArray[np.intp]]:
    """A table of the distinct rows and columns, with indices: values[y, x] is table[rows[y], columns[x]]."""
    (first_rows, rows), (first_columns, columns) = (
        np.unique(values, axis=axis, return_index=True, return_inverse=True)[1:] for axis in (0, 1)
    )
    return values[first_rows][:, first_columns], rows.reshape(-1), columns.reshape(-1)


def _renamed(text: str, name: str) -> str:
    """The text for a network of another name: names that begin with `model_` or `MODEL_`, and files, are changed."""
    text = re.sub(r"\bmodel_(?=\w)", f"{name}_", text)
    text = re.sub(r"\bMODEL_(?=\w)", f"{name.upper()}_", text)
    return re.sub(r"\bmodel\.(?=[cho]\b)", f"{name}.", text)


def _row(values: str, name: str) -> str:
    return f"{{{values}}} /* {_comment(name)} */"


def _numbers(*values: int | None) -> str:
    return ", ".join(map(str, values))


def _wrapped(values: NDArray[Any]) -> str:
    """Numbers with commas between, in lines of at most LINE_CHARACTERS."""
    longest = max(len(str(values.min())), len(str(values.max())))
    numbers, each = values.tolist(), LINE_CHARACTERS // (longest + 1)
    return ",\n".join(",".join(map(str, numbers[i : i + each])) for i in range(0, len(numbers), each))


def _comment(text: str) -> str:
    """A text that fits into a comment: printable ASCII that neither ends it nor begins another."""
    plain = "".join(c if " " <= c <= "~" else "." for c in text)[:200]
    return re.sub(r"\?(?=\?)", "? ", plain.replace("*/", "* /").replace("/*", "/ *"))


def _string(text: str) -> str:
    """A string literal of the text in UTF-8. Characters that C could misread, also in trigraphs, are octal."""
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\?' else f"\\{b:03o}" for b in text.encode()) + '"'
