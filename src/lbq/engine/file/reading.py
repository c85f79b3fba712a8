"""Reading a deployed network from its description and tensors, with every statement checked.

The reader checks names, shapes, types and ranges one by one, derives shapes from the input's shape, and proves bounds again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine.file import container
from lbq.engine.file.fields import Fields
from lbq.engine.file.synapses import LATER_VERSION, SynapseReader
from lbq.errors import ArtefactError
from lbq.graph import INPUT, Gate, integer
from lbq.graph.integer import Exits, IntegerLayer, IntegerNetwork, IntegerNeuron, Mixing
from lbq.graph.levels import highest_level

FORMAT, VERSION = "lbq integer network", 1


@dataclass(frozen=True)
class Golden:
    """Inputs with the results that the network must give for them.

    inputs: uint8 `[B, C, H, W]` or `[T, B, C, H, W]`. logits: int64 `[B, classes]`. digests: for each layer, the SHA-256 of
    its levels `[B, C, H, W]` at each timestep.
    """

    inputs: NDArray[np.uint8]
    logits: NDArray[np.int64]
    digests: Mapping[str, tuple[str, ...]]


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max  # an integer may lie beyond all floats


def needs_later_version(network: IntegerNetwork) -> bool:
    """Whether a network has what readers of version 1 do not know. Packed weights are another such thing."""
    products = any(s.kind == "matmul" or any(p.channels > 1 for p in s.pools) for s in network.synapses)
    return bool(network.mixed_layers or network.exits or network.gates or products)


class Reader(SynapseReader):
    """Makes a network of its description and tensors; every tensor must belong to something."""

    def network(self, value: Any) -> tuple[IntegerNetwork, Golden | None]:
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ArtefactError(f"it is not a deployed network: {container.REMEDY}")
        self.version = value.get("version")
        if type(self.version) is not int or self.version not in (VERSION, LATER_VERSION):
            raise ArtefactError(
                f"its format has version {self.version!r:.20}, this lbq reads {VERSION} and {LATER_VERSION}: deploy it again, "
                "or use the lbq that wrote it"
            )
        later = ("exit",) if self.version == LATER_VERSION and "exit" in value else ()
        top = Fields(
            value, "the description",
            "format", "version", "producer", "input", "layers", "readout", "scale", "classes", "facts", "golden", *later,
        )  # fmt: skip
        inputs = Fields(value["input"], "input", "shape", "timesteps", "static", "max")
        shape = inputs.take("shape", list, lambda v: len(v) == 3 and all(type(x) is int and 0 < x <= 2**16 for x in v))
        self.timesteps = inputs.integer("timesteps", 1, integer.MOST_TIMESTEPS)
        self.static = bool(inputs.take("static", bool))
        self._fits("input", tuple(shape))
        self.shapes[INPUT], self.levels[INPUT] = tuple(shape), integer.LARGEST_PIXEL
        described = top.take("layers", list, lambda v: 1 <= len(v) <= integer.MOST_LAYERS)
        layers = [layer for value in described if (layer := self._layer_or_gate(value)) is not None]
        if not layers:
            raise ArtefactError("the description: layers must not be gates alone")
        readout, bound = self._readout(value["readout"])
        if not _number(value["scale"]):
            raise ArtefactError("the description: scale must be a positive number")
        network = IntegerNetwork(
            input_shape=self.shapes[INPUT],
            timesteps=self.timesteps,
            static=self.static,
            layers=tuple(layers),
            readout=readout,
            scale=float(value["scale"]),
            classes=self._classes(value["classes"], readout.shape[0]),
            input_max=inputs.integer("max", 1, integer.LARGEST_PIXEL),
            facts=top.take("facts", dict),
            exits=self._exits(value["exit"], readout.shape[0]) if later else None,
            gates=tuple(self.gates),
        )
        if self.version == LATER_VERSION and not (self.packs or needs_later_version(network)):
            raise ArtefactError(f"its format has version {LATER_VERSION}, but nothing in it needs more than {VERSION}")
        if network.exits is not None and (mixed := network.mixed_layers):
            raise ArtefactError(f"layer {mixed[0]!r} mixes all timesteps, so that there is no exit before the last one")
        self._prove(readout.name, bound, integer.readout_bound(network), integer.FLOAT64_BOUND)
        if not integer.readout_fits(network):
            raise ArtefactError("the readout: its sums may reach 2^53, where float64 rounds")
        synapse, most = integer.pooled_bound(network)
        if most >= integer.SUM_BOUND:
            raise ArtefactError(f"synapse {synapse!r}: its pooled levels may reach {most}, beyond int32")
        golden = None if value["golden"] is None else self._golden(value["golden"], network)
        if extra := sorted(set(self.tensors) - self.used):
            raise ArtefactError(f"tensor {extra[0]!r:.200} belongs to nothing")
        return network, golden

    def _layer_or_gate(self, value: Any) -> IntegerLayer | None:
        if self.version == LATER_VERSION and isinstance(value, dict) and "gate" in value:
            self._gate(value)
            return None
        return self._layer(value)

    def _gate(self, value: Any) -> None:
        fields = Fields(value, "a gate", "name", "gate")
        name = self._new_name(fields)
        where = f"gate {name!r}"
        factor, source = fields.take("gate", list, lambda v: len(v) == 2 and all(type(x) is str for x in v))
        for operand in (factor, source):
            if operand not in self.signed:
                raise ArtefactError(f"{where} reads {operand[:40]!r}, which is no layer before it")
        (channels, *sides), shape = self.shapes[factor], self.shapes[source]
        if shape[0] % channels or tuple(sides) not in (shape[1:], (1, 1)):
            raise ArtefactError(f"{where}: {self.shapes[factor]} is no factor of {shape}")
        most, signed = self.levels[factor] * self.levels[source], self.signed[factor] or self.signed[source]
        if most > highest_level(signed):
            raise ArtefactError(f"{where}: its levels may reach {most}, beyond 8 bits")
        self.shapes[name], self.levels[name], self.signed[name] = shape, most, signed
        self.gates.append(Gate(name, factor, source, shape))

    def _layer(self, value: Any) -> IntegerLayer:
        fields = Fields(value, "a layer", "name", "fraction", "unit", "synapses", "bound", "neuron")
        name = self._new_name(fields)
        where = f"layer {name!r}"
        synapses, shape = self._synapses(value["synapses"], where)
        fraction = fields.integer("fraction", 0, integer.MOST_FRACTION)
        neuron = self._neuron(value["neuron"], name, shape[0])
        bias_shape = shape if self.tensors.get(f"{name}/bias", np.zeros(0)).ndim == 3 else shape[:1]
        layer = IntegerLayer(
            name=name,
            synapses=synapses,
            bias=self._tensor(f"{name}/bias", (np.int32,), bias_shape),
            shape=shape,
            fraction=fraction,
            neuron=neuron,
            unit=self._unit(value["unit"], where, shape[0]),
        )
        largest = {s.name: integer.largest_read(s, self.levels) for s in synapses}
        bound = 0
        for reached, work in integer.membrane_bounds(layer, largest, self.timesteps):
            bound, self.work = max(bound, reached), self.work + work
            if self.work > integer.MOST_WORK:
                raise ArtefactError(f"{where}: its bound takes too long to prove: deploy it over fewer timesteps")
        self._prove(name, fields.integer("bound", 0, 2**62), bound, integer.MEMBRANE_BOUND)
        self.shapes[name], self.levels[name], self.signed[name] = shape, neuron.n_max, neuron.signed
        return layer

    def _readout(self, value: Any) -> tuple[IntegerLayer, int]:
        fields = Fields(value, "the readout", "name", "fraction", "unit", "synapses", "bound")
        name = self._new_name(fields)
        synapses, shape = self._synapses(value["synapses"], "the readout")
        if shape[1:] != (1, 1) or any(s.source == INPUT for s in synapses):
            raise ArtefactError("the readout must read levels and give one number for each class")
        if any(s.kind == "matmul" for s in synapses):
            raise ArtefactError("the readout sums levels over time first, and cannot read products of them")
        fields.integer("fraction", 0, 0)
        bias = self._tensor(f"{name}/bias", (np.int64,), shape[:1])
        if (bias < -integer.FLOAT64_BOUND).any() or (bias > integer.FLOAT64_BOUND).any():
            raise ArtefactError("the readout: its bias is out of range")
        unit = self._unit(value["unit"], "the readout", shape[0])
        return IntegerLayer(name, synapses, bias, shape, 0, None, unit), fields.integer("bound", 0, 2**62)

    def _neuron(self, value: Any, name: str, channels: int) -> IntegerNeuron:
        where = f"layer {name!r}: its neuron"
        mixes = self.version == LATER_VERSION and isinstance(value, dict) and "mixing" in value
        more = ("mixing",) if mixes else ()
        fields = Fields(value, where, "n_max", "signed", "reset", "leak", "decay_reset", *more)
        signed = bool(fields.take("signed", bool))
        n_max = fields.integer("n_max", 1, highest_level(signed))
        leak = None
        if value["leak"] is not None:
            most = integer.LARGEST_MIXING if mixes else 1
            leak = fields.pair("leak", 0, most * 2**integer.MOST_LEAK)
            if not (1 <= leak[1] <= integer.MOST_LEAK and leak[0] <= most * 2 ** leak[1]):
                raise ArtefactError(f"{where}: leak must be m / 2^k in [0, {most}] with k in 1..{integer.MOST_LEAK}")
        thresholds = self._tensor(f"{name}/thresholds", (np.int32,), (channels, n_max))
        if int(thresholds[:, 0].min()) < integer.LEAST_THRESHOLD or int(thresholds.max()) > integer.MEMBRANE_BOUND:
            raise ArtefactError(f"{where}: thresholds must be in {integer.LEAST_THRESHOLD}..2^30")
        if (thresholds[:, 1:] < thresholds[:, :-1]).any():
            raise ArtefactError(f"{where}: thresholds must not decrease")
        reset = self._tensor(f"{name}/reset", (np.int32,), (channels,))
        if int(reset.min()) < 0:
            raise ArtefactError(f"{where}: a reset cannot be negative")
        kind = fields.take("reset", str, lambda v: v in ("once", "level", "hard"))
        late = bool(fields.take("decay_reset", bool))
        mixing = self._mixing(value["mixing"], where) if mixes else None
        return IntegerNeuron(n_max, signed, thresholds, reset, kind, leak, late, mixing)

    def _mixing(self, value: Any, where: str) -> Mixing:
        fields = Fields(value, f"{where}: its mixing", "bits", "weights")
        bits, steps = fields.integer("bits", 1, integer.MOST_LEAK), self.timesteps
        if steps > integer.MOST_MIXED_STEPS:
            raise ArtefactError(f"{where} mixes {steps} timesteps, at most {integer.MOST_MIXED_STEPS} are read")
        rows = fields.take("weights", list, lambda v: len(v) == steps)
        most = integer.LARGEST_MIXING << bits
        for row in rows:
            whole = isinstance(row, list) and len(row) == steps and all(type(w) is int for w in row)
            if not whole or not all(0 <= w <= most for w in row):
                raise ArtefactError(f"{where}: its mixing must be {steps} rows of {steps} whole numbers in 0..{most}")
        return Mixing(np.array(rows, np.int32), bits)

    def _exits(self, value: Any, classes: int) -> Exits:
        fields, count = Fields(value, "exit", "margins", "shares", "source"), self.timesteps - 1
        if not count:
            raise ArtefactError("exit: there is no timestep before the last one")
        most = 2 * integer.FLOAT64_BOUND
        margins = fields.take("margins", list, lambda v: len(v) == count and all(type(m) is int for m in v))
        if not all(0 <= margin <= most for margin in margins):
            raise ArtefactError(f"exit: margins must be in 0..{most}")
        shares = fields.take("shares", list, lambda v: len(v) == count and all(type(s) in (int, float) for s in v))
        if not all(0 <= share <= 1 for share in shares):
            raise ArtefactError("exit: shares must be in 0..1")
        source = fields.take("source", str, integer.is_name)
        bias = self._tensor("exit/bias", (np.int64,), (count, classes))
        if (bias < -integer.FLOAT64_BOUND).any() or (bias > integer.FLOAT64_BOUND).any():
            raise ArtefactError("exit: its bias is out of range")
        return Exits(tuple(margins), bias, tuple(map(float, shares)), source)

    def _golden(self, value: Any, network: IntegerNetwork) -> Golden:
        def are_digests(values: list[Any]) -> bool:
            hexadecimal = (isinstance(v, str) and re.fullmatch(r"[0-9a-f]{64}", v) for v in values)
            return len(values) == network.timesteps and all(hexadecimal)

        names = [layer.name for layer in network.layers]
        fields = Fields(value, "golden", *names)
        digests = {name: tuple(fields.take(name, list, are_digests)) for name in names}
        inputs = self._tensor("golden/input", (np.uint8,), None)
        lead = 1 if network.static else 2
        if inputs.shape[lead:] != network.input_shape or inputs.shape[: lead - 1] != (network.timesteps,) * (lead - 1):
            raise ArtefactError(f"golden: its inputs have the shape {list(inputs.shape)}")
        if not inputs.size:
            raise ArtefactError("golden: there are no inputs")
        logits = self._tensor("golden/logits", (np.int64,), (inputs.shape[lead - 1], network.readout.shape[0]))
        return Golden(inputs, logits, digests)

    # Small checks ------------------------------------------------------------------------------------------------------

    def _prove(self, name: str, stated: int, bound: int, limit: int) -> None:
        if bound >= limit:
            raise ArtefactError(f"layer {name!r}: its sums may reach {bound}, beyond 2^{limit.bit_length() - 1}")
        if stated != bound:
            raise ArtefactError(f"layer {name!r}: its bound is stated as {stated}, but is {bound}")

    def _unit(self, value: Any, where: str, channels: int) -> NDArray[np.float64]:
        if not isinstance(value, list) or len(value) != channels or not all(_number(v) for v in value):
            raise ArtefactError(f"{where}: unit must be {channels} positive numbers")
        return np.array(value, np.float64)

    def _classes(self, value: Any, count: int) -> tuple[str, ...]:
        if not isinstance(value, list) or len(value) not in (0, count) or not all(isinstance(v, str) for v in value):
            raise ArtefactError(f"classes must be {count} names or none")
        for name in value:
            if not integer.is_name(name):
                raise ArtefactError(f"classes: the name {name[:40]!a} is empty, too long, or has control characters")
        return tuple(value)
