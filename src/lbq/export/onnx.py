"""A deployed network as an ONNX model of standard operators, which gives exactly the engine's integers. No torch.

`sequence` is all timesteps in one model. `step` is one timestep with explicit state: a membrane is what the next timestep
begins with, after reset and leak. docs/howto/export-onnx.md lists the inputs and outputs of both forms.

Levels and weights are whole numbers, so a float32 convolution is exact in any order of summation while sum |W| * S stays
below 2^24. Elsewhere weights are split into bytes and levels into digits, and the parts are added in int64 (split.py).
This holds wherever float32 convolutions are summed in float32: without Winograd and TF32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lbq._version import __version__
from lbq.engine import Network
from lbq.errors import GraphError, LbqError
from lbq.export.checks import refuse_unknown
from lbq.export.operators import Products
from lbq.export.split import BYTE_BITS, Split, split
from lbq.graph import INPUT, Pool, Shape, Synapse
from lbq.graph.integer import FLOAT32_BOUND, IntegerLayer, IntegerNetwork, IntegerNeuron
from lbq.system import files

if TYPE_CHECKING:
    import onnx

Form = Literal["sequence", "step"]
FORMS: tuple[Form, ...] = ("sequence", "step")
OPSET, IR_VERSION = 17, 8  # of 2022, so that older runtimes read it
MOST_WEIGHT_BYTES = 2**31 - 2**20  # protobuf ends at 2 GiB
SHIFT_OFFSET = 2**48  # |V * m| stays below 2^46 for the proved bound of V and m up to 2^16


def write_onnx(
    network: IntegerNetwork | Network, path: Path | str, form: Form = "sequence", source: Path | str | None = None
) -> int:
    """Write a network as an ONNX model; return the size of the file in bytes. The same network gives the same bytes.

    source: the model.lbq that it was read from. Its SHA-256 goes into the model's metadata.
    """
    files.check_file(path)
    model = onnx_model(network, form, source)
    return files.write(path, model.SerializeToString(deterministic=True))


def onnx_model(
    network: IntegerNetwork | Network, form: Form = "sequence", source: Path | str | None = None
) -> onnx.ModelProto:
    """The same model as an object of the package onnx, which has checked it."""
    if form not in FORMS:
        raise LbqError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if isinstance(network, Network):
        with network.unchanged():
            return onnx_model(network.network, form, source)
    if not isinstance(network, IntegerNetwork):
        raise LbqError(f"network must be a deployed one, lbq.engine.load(PATH), got {type(network).__name__}")
    refuse_unknown(network, "ONNX")
    try:
        import onnx
    except ImportError as error:
        raise LbqError("writing ONNX needs the package onnx: pip install onnx onnxruntime") from error
    size = sum(s.weight.nbytes for s in network.synapses)
    if size > MOST_WEIGHT_BYTES:
        raise GraphError(f"the network has {size:,} bytes of weights, an ONNX file at most 2 GiB: use model.lbq")
    graph = _Graph(onnx, network, form).build()
    model = onnx.helper.make_model(
        graph,
        ir_version=IR_VERSION,
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        producer_name="lbq",
        producer_version=__version__,
        doc_string=_DESCRIBED[form],
    )
    onnx.helper.set_model_props(model, _properties(network, form, source))
    onnx.checker.check_model(model, full_check=True)
    return model


_DESCRIBED = {
    "sequence": "An integer spiking network, all timesteps: logits times metadata scale are real logits.",
    "step": "One timestep of an integer spiking network: feed every output next.NAME to the input NAME, from zeros on. "
    "After metadata timesteps steps, logits times scale are real logits.",
}


def _properties(network: IntegerNetwork, form: Form, source: Path | str | None) -> dict[str, str]:
    values: dict[str, Any] = {
        "form": form,
        "timesteps": network.timesteps,
        "static": network.static,
        "input_max": network.input_max,
        "scale": network.scale,
        "classes": list(network.classes),
        "facts": dict(network.facts),
    }
    text = {name: v if isinstance(v, str) else json.dumps(v, sort_keys=True) for name, v in values.items()}
    if source is not None:
        text["lbq_sha256"] = files.sha256_of(source, remedy="give the model.lbq of the network")
    return text


# The graph -------------------------------------------------------------------------------------------------------------


class _Graph(Products):
    """The whole of one model."""

    def __init__(self, onnx: Any, network: IntegerNetwork, form: Form) -> None:
        super().__init__(onnx)
        self.network, self.form = network, form
        self.static_currents: dict[str, str] = {}  # of each layer, computed once for all timesteps
        self.weights: dict[str, list[str]] = {}  # the parts of each synapse's weights

    def build(self) -> onnx.GraphProto:
        kinds, describe = self.onnx.TensorProto, self.helper.make_tensor_value_info
        net, last = self.network, self.network.timesteps - 1
        shape, classes = list(net.input_shape), net.readout.shape[0]
        step = self.form == "step"
        states = {layer.name: f"membrane.{layer.name}" for layer in net.layers} if step else {}
        static = net.static or step
        name = ("image" if net.static else "frame") + ("" if step else "s")
        lead: list[Any] = ["batch"] if static else [net.timesteps, "batch"]
        inputs = [describe(name, kinds.UINT8, lead + shape)]
        outputs = [describe("logits", kinds.INT64, ["batch", classes])]
        frames = self._frames(name, static)
        self.states: dict[str, str | None] = {layer.name: states.get(layer.name) for layer in net.layers}
        sums: str | None = "sums" if step else None
        for t in range(1 if step else net.timesteps):
            self.levels = {INPUT: (frames[0 if static else t], "")}
            self.pooled: dict[tuple[str, tuple[Pool, ...]], str] = {}
            before = "" if step else f"t{t}/"
            for layer in net.layers:
                self.scope = before + layer.name
                self._layer(layer, carry=step or t < last)
                for gate in net.gates_behind(layer.name):
                    self.scope = before + gate.name
                    self._gate(gate, net.shape_of(gate.factor))
            self.scope = before + net.readout.name
            sums = self._readout(sums)
        self.scope = ""
        self._node("Add", [sums, self._constant(f"{net.readout.name}/bias", net.readout.bias[None])], "logits")
        if step:
            ends = {"sums": sums} | {states[layer]: self.states[layer] for layer in states}
            for state, end in ends.items():
                kind = kinds.INT64 if state == "sums" else kinds.INT32
                size = [classes] if state == "sums" else list(net[state.removeprefix("membrane.")].shape)
                self._node("Identity", [end], f"next.{state}")
                inputs.append(describe(state, kind, ["batch", *size]))
                outputs.append(describe(f"next.{state}", kind, ["batch", *size]))
        return self.helper.make_graph(self.nodes, "lbq", inputs, outputs, list(self.constants.values()))

    def _frames(self, name: str, static: bool) -> list[str]:
        """The input as float32 `[B, C, H, W]`: one image, or one frame for each timestep."""
        if static:
            return [self._cast(name, np.float32, "pixels")]
        at = [self._number(np.int64(t)) for t in range(self.network.timesteps)]
        return [self._cast(self._node("Gather", [name, t], axis=0), np.float32) for t in at]

    # Layers ------------------------------------------------------------------------------------------------------------

    def _layer(self, layer: IntegerLayer, carry: bool) -> None:
        """One timestep of a layer: its levels, and the membrane that the next timestep begins with."""
        neuron = layer.neuron
        assert neuron is not None
        u = self._current(layer)
        if (before := self.states[layer.name]) is not None:
            u = self._node("Add", [u, before], "U")
        level, whole = self._emit(layer.name, neuron, u)
        self.levels[layer.name] = level, whole
        if carry:
            self.states[layer.name] = self._carried(layer.name, neuron, u, whole)

    def _current(self, layer: IntegerLayer) -> str:
        """((sum of W * S) << f) + bias + identities + products, int32. What depends on a static image is computed once."""
        fixed = [s for s in layer.convs if s.source == INPUT and self.network.static]
        moving = [s for s in layer.convs if s not in fixed]
        bias = layer.bias[None] if layer.bias.ndim == 3 else layer.bias[None, :, None, None]
        if layer.name not in self.static_currents:
            total = self._constant(f"{layer.name}/bias", bias)
            for s in fixed:
                total = self._node("Add", [total, self._shifted(self._convolved(s), layer)])
            self.static_currents[layer.name] = total
        total = self.static_currents[layer.name]
        for s in moving:
            total = self._node("Add", [self._shifted(self._convolved(s), layer), total])
        for s in layer.identities:
            weight = self._constant(f"{s.name}/weight", s.weight[:, None, None])
            read = self._cast(self._read(s), np.int32) if s.pools else self.levels[s.source][1]
            total = self._node("Add", [total, self._node("Mul", [read, weight])])
        for s in layer.matmuls:
            weight = self._constant(f"{s.name}/weight", s.weight[:, None, None])
            product = self._attended(s, exact=self.network.largest(s) < FLOAT32_BOUND)
            total = self._node("Add", [total, self._node("Mul", [product, weight])])
        return total

    def _shifted(self, current: str, layer: IntegerLayer) -> str:
        if not layer.fraction:
            return current
        return self._node("Mul", [current, self._number(np.int32(1 << layer.fraction))], "shifted")

    def _emit(self, name: str, neuron: IntegerNeuron, u: str) -> tuple[str, str]:
        """Levels as float32, for convolutions, and as int32: how many thresholds U reaches, all compared at once."""
        thresholds = self._constant(f"{name}/thresholds", neuron.thresholds.T[None, :, :, None, None])
        magnitude = self._node("Abs", [u]) if neuron.signed else u
        axis = self._number(np.array([1], np.int64))
        wide = self._node("Unsqueeze", [magnitude, axis])
        reached = self._cast(self._node("GreaterOrEqual", [wide, thresholds]), np.float32)
        level = self._node("ReduceSum", [reached, axis], "magnitude" if neuron.signed else "S", keepdims=0)
        if neuron.signed:
            level = self._node("Mul", [level, self._cast(self._node("Sign", [u]), np.float32)], "S")
        return level, self._cast(level, np.int32)

    def _carried(self, name: str, neuron: IntegerNeuron, u: str, level: str) -> str:
        """leak(V) - pending: the part of the membrane U [.., C, H, W] that the next timestep begins with."""
        if neuron.reset_kind == "hard":
            fired = self._cast(level, np.bool_)
            silent = self._cast(self._node("Not", [fired]), np.int32)
            return self._leaked(neuron, self._node("Mul", [u, silent], "V"))
        times = level if neuron.reset_kind == "level" else self._node("Sign", [level])
        reset = self._constant(f"{name}/reset", neuron.reset[:, None, None])
        drop = self._node("Mul", [times, reset], "drop")
        if neuron.decay_reset:
            return self._leaked(neuron, self._node("Sub", [u, drop], "V"))
        return self._node("Sub", [self._leaked(neuron, u), drop], "carried")

    def _leaked(self, neuron: IntegerNeuron, v: str) -> str:
        """(V * m + 2^(k-1)) >> k, arithmetically.

        BitShift takes unsigned numbers only, and Div rounds towards zero. So 2^48, a multiple of 2^k, is added to make the
        number positive, and 2^48 >> k is subtracted again.
        """
        if neuron.leak is None:
            return v
        m, k = neuron.leak
        wide = self._cast(v, np.int64)
        if m != 1:
            wide = self._node("Mul", [wide, self._number(np.int64(m))])
        positive = self._node("Add", [wide, self._number(np.int64(SHIFT_OFFSET + (1 << (k - 1))))])
        shift = self._number(np.uint64(k))
        moved = self._node("BitShift", [self._cast(positive, np.uint64), shift], direction="RIGHT")
        back = self._node("Sub", [self._cast(moved, np.int64), self._number(np.int64(SHIFT_OFFSET >> k))])
        return self._cast(back, np.int32, "leaked")

    def _readout(self, sums: str | None) -> str:
        """Sums `[B, classes]`, int64, with the currents of this timestep's levels added."""
        for s in self.network.readout.synapses:
            if s.kind == "conv":
                current = self._convolved(s, np.int64)
            else:
                weight = self._constant(f"{s.name}/weight", s.weight.astype(np.int64)[:, None, None])
                current = self._node("Mul", [self._cast(self._read(s), np.int64), weight])
            flat = self._node("Flatten", [current], axis=1)
            sums = flat if sums is None else self._node("Add", [sums, flat], "sums")
        assert sums is not None
        return sums

    # Synapses ----------------------------------------------------------------------------------------------------------

    def _convolved(self, s: Synapse, kind: type = np.int32) -> str:
        """The current of one convolution, `[B, O, OH, OW]`: one float32 Conv, or several put together in int64."""
        chosen = split(s, self.network.largest(s), self.network.negative(s))
        weights = self._weights(s, chosen.weights)
        digits = list(self._digits(self._read(s), chosen))
        attributes: dict[str, Any] = {
            "strides": list(s.stride),
            "pads": [*s.padding, *s.padding],
            "dilations": list(s.dilation),
            "group": s.groups,
            "kernel_shape": list(s.weight.shape[2:]),
        }
        total: str | None = None
        for i, weight in enumerate(weights):
            for j, digit in enumerate(digits):
                product = self._node("Conv", [digit, weight], **attributes)
                if chosen.parts == 1:
                    return self._cast(product, kind, "current")
                part, shift = self._cast(product, np.int64), BYTE_BITS * i + chosen.bits * j
                if shift:
                    part = self._node("Mul", [part, self._number(np.int64(1 << shift))])
                total = part if total is None else self._node("Add", [total, part])
        assert total is not None
        return self._cast(total, kind, "current") if kind is not np.int64 else total

    def _weights(self, s: Synapse, parts: int) -> list[str]:
        """Weights as float32, low byte first. The file holds integers, which are cast and split when it is loaded."""
        if s.name not in self.weights:
            scope, self.scope = self.scope, s.name
            whole = self._cast(self._constant(f"{s.name}/weight", s.weight), np.float32, "weights")
            self.weights[s.name] = [whole]
            if parts == 2:
                nearest = self._node("Add", [whole, self._number(np.float32(128))])
                high = self._node("Floor", [self._node("Mul", [nearest, self._number(np.float32(1 / 256))])], "high")
                low = self._node("Sub", [whole, self._node("Mul", [high, self._number(np.float32(256))])], "low")
                self.weights[s.name] = [low, high]
            self.scope = scope
        return self.weights[s.name]

    def _digits(self, levels: str, chosen: Split) -> Iterator[str]:
        """Digits of whole numbers in float32, the lowest first; the highest carries the sign."""
        for _ in range(chosen.digits - 1):
            above = self._node("Floor", [self._node("Mul", [levels, self._number(np.float32(2.0**-chosen.bits))])])
            yield self._node("Sub", [levels, self._node("Mul", [above, self._number(np.float32(2**chosen.bits))])])
            levels = above
        yield levels

    def _read(self, s: Synapse) -> str:
        """The (pooled) levels that a synapse reads, as float32."""
        if (most := self.network.largest(s)) >= FLOAT32_BOUND:
            raise GraphError(
                f"synapse {s.name!r}: its pooled levels may reach {most:,}, more than is exact in float32: use model.lbq "
                "itself, or a smaller n_max or window"
            )
        levels = self.levels[s.source][0]
        shape = self.network.shape_of(s.source)
        for i, p in enumerate(s.pools):
            key = s.source, s.pools[: i + 1]
            if key not in self.pooled:
                self.pooled[key] = self._pool(levels, p, shape)
            levels, shape = self.pooled[key], p.output(shape)
        return levels

    def _pool(self, levels: str, p: Pool, shape: Shape) -> str:
        if p.channels > 1:
            return self._channel_sums(levels, p.channels, shape)
        window: dict[str, Any] = {
            "kernel_shape": list(p.kernel),
            "strides": list(p.stride),
            "pads": [*p.padding, *p.padding],
        }
        if p.kind == "max":
            return self._node("MaxPool", [levels], **window)
        if p.kernel == shape[1:] and not any(p.padding):
            return self._node("ReduceSum", [levels, self._number(np.array([2, 3], np.int64))], keepdims=1)
        ones = self._constant(
            f"ones/{shape[0]}x{p.kernel[0]}x{p.kernel[1]}", np.ones((shape[0], 1, *p.kernel), np.int8)
        )
        return self._node("Conv", [levels, self._cast(ones, np.float32)], group=shape[0], **window)
