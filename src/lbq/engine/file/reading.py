"""Reading a deployed network from its description and tensors, with every statement checked.

The reader checks names, shapes, types and ranges one by one, derives shapes from the input's shape, and proves bounds again.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine.file import container
from lbq.engine.file.packing import LARGEST, unpack
from lbq.errors import ArtefactError
from lbq.graph import INPUT, Pool, Shape, Synapse, integer, output_size
from lbq.graph.integer import Exits, IntegerLayer, IntegerNetwork, IntegerNeuron, Mixing
from lbq.graph.levels import highest_level

FORMAT, VERSION = "lbq integer network", 1
LATER_VERSION = 2  # of files with mixed timesteps, exits or packed weights, so that a reader of version 1 refuses them


@dataclass(frozen=True)
class Golden:
    """Inputs with the results that the network must give for them.

    inputs: uint8 `[B, C, H, W]` or `[T, B, C, H, W]`. logits: int64 `[B, classes]`. digests: for each layer, the SHA-256 of
    its levels `[B, C, H, W]` at each timestep.
    """

    inputs: NDArray[np.uint8]
    logits: NDArray[np.int64]
    digests: Mapping[str, tuple[str, ...]]


class _Fields:
    """A JSON object with known keys, whose values are read one by one with their type."""

    def __init__(self, value: Any, where: str, *keys: str) -> None:
        if not isinstance(value, dict):
            raise ArtefactError(f"{where} must be an object")
        if set(value) != set(keys):
            odd = ", ".join(sorted(set(value) ^ set(keys)))[:80]
            raise ArtefactError(f"{where} must have the entries {', '.join(keys)[:400]}; wrong or missing: {odd!r}")
        self.value, self.where = value, where

    def take(self, key: str, kind: type, ok: Callable[[Any], bool] = lambda _: True) -> Any:
        value = self.value[key]
        if type(value) is not kind or not ok(value):
            raise ArtefactError(f"{self.where}: {key} is {str(value)[:40]!r}, which is not possible")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        return self._inside(key, self.take(key, int), low, high)

    def pair(self, key: str, low: int, high: int) -> tuple[int, int]:
        first, second = self.take(key, list, lambda v: len(v) == 2 and all(type(x) is int for x in v))
        return self._inside(key, first, low, high), self._inside(key, second, low, high)

    def _inside(self, key: str, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            raise ArtefactError(f"{self.where}: {key} must be in {low}..{high}, not {str(value)[:40]}")
        return value

    def name(self, key: str) -> str:
        return str(self.take(key, str, lambda v: "/" not in v and integer.is_name(v)))


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max  # an integer may lie beyond all floats


def _form(conv: Synapse) -> tuple[Any, ...]:
    return conv.weight.shape, conv.out_shape, conv.stride, conv.padding, conv.dilation, conv.groups


class Reader:
    """Makes a network of its description and tensors; every tensor must belong to something."""

    def __init__(self, tensors: container.Tensors) -> None:
        self.tensors = tensors
        self.used: set[str] = set()
        self.names: set[tuple[str, str]] = set()  # layers and synapses have names of their own
        self.convs: dict[str, Synapse] = {}
        self.shapes: dict[str, Shape] = {}
        self.levels: dict[str, int] = {}  # the largest level of each source
        self.packs = False  # whether weights lie two to a byte
        self.work = 0  # that the layers' bounds took

    def network(self, value: Any) -> tuple[IntegerNetwork, Golden | None]:
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ArtefactError(f"it is not a deployed network: {container.REMEDY}")
        self.version = value.get("version")
        if self.version not in (VERSION, LATER_VERSION):
            raise ArtefactError(
                f"its format has version {self.version!r:.20}, this lbq reads {VERSION} and {LATER_VERSION}: deploy it again, "
                "or use the lbq that wrote it"
            )
        later = ("exit",) if self.version == LATER_VERSION and "exit" in value else ()
        top = _Fields(
            value, "the description",
            "format", "version", "producer", "input", "layers", "readout", "scale", "classes", "facts", "golden", *later,
        )  # fmt: skip
        inputs = _Fields(value["input"], "input", "shape", "timesteps", "static", "max")
        shape = inputs.take("shape", list, lambda v: len(v) == 3 and all(type(x) is int and 0 < x <= 2**16 for x in v))
        self.timesteps = inputs.integer("timesteps", 1, integer.MOST_STEPS)
        self.static = bool(inputs.take("static", bool))
        self._fits("input", tuple(shape))
        self.shapes[INPUT], self.levels[INPUT] = tuple(shape), integer.LARGEST_PIXEL
        described = top.take("layers", list, lambda v: 1 <= len(v) <= integer.MOST_LAYERS)
        layers = [self._layer(layer) for layer in described]
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
        )
        if self.version == LATER_VERSION and not (network.mixed_layers or network.exits or self.packs):
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

    def _layer(self, value: Any) -> IntegerLayer:
        fields = _Fields(value, "a layer", "name", "fraction", "unit", "synapses", "bound", "neuron")
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
        largest = {s.name: self.levels[s.source] * s.summed for s in synapses}
        bound = 0
        for reached, work in integer.membrane_bounds(layer, largest, self.timesteps):
            bound, self.work = max(bound, reached), self.work + work
            if self.work > integer.MOST_WORK:
                raise ArtefactError(f"{where}: its bound takes too long to prove: deploy it over fewer timesteps")
        self._prove(name, fields.integer("bound", 0, 2**62), bound, integer.MEMBRANE_BOUND)
        self.shapes[name], self.levels[name] = shape, neuron.n_max
        return layer

    def _readout(self, value: Any) -> tuple[IntegerLayer, int]:
        fields = _Fields(value, "the readout", "name", "fraction", "unit", "synapses", "bound")
        name = self._new_name(fields)
        synapses, shape = self._synapses(value["synapses"], "the readout")
        if shape[1:] != (1, 1) or any(s.source == INPUT for s in synapses):
            raise ArtefactError("the readout must read levels and give one number for each class")
        fields.integer("fraction", 0, 0)
        bias = self._tensor(f"{name}/bias", (np.int64,), shape[:1])
        if (bias < -integer.FLOAT64_BOUND).any() or (bias > integer.FLOAT64_BOUND).any():
            raise ArtefactError("the readout: its bias is out of range")
        unit = self._unit(value["unit"], "the readout", shape[0])
        return IntegerLayer(name, synapses, bias, shape, 0, None, unit), fields.integer("bound", 0, 2**62)

    def _synapses(self, value: Any, where: str) -> tuple[tuple[Synapse, ...], Shape]:
        if not isinstance(value, list) or not 1 <= len(value) <= integer.MOST_SYNAPSES:
            count = f", not {len(value)}" if isinstance(value, list) else ""
            raise ArtefactError(f"{where}: synapses must be a list of 1 to {integer.MOST_SYNAPSES}{count}")
        synapses = tuple(self._synapse(one) for one in value)
        if len({s.out_shape for s in synapses}) != 1:
            raise ArtefactError(f"{where}: its synapses give different shapes: {[s.out_shape for s in synapses][:4]}")
        return synapses, synapses[0].out_shape

    def _synapse(self, value: Any) -> Synapse:
        kind = value.get("kind") if isinstance(value, dict) else None
        more = ("stride", "padding", "dilation", "groups") if kind == "conv" else ()
        for key in ("copy_of", "packed") if kind == "conv" else ():
            if key in value and (key != "packed" or self.version == LATER_VERSION):
                more = (*more, key)
        fields = _Fields(value, "a synapse", "name", "source", "kind", "pools", *more)
        name = self._new_name(fields, "synapse")
        where = f"synapse {name!r}"
        source = fields.take("source", str)
        if source not in self.shapes:
            raise ArtefactError(f"{where} reads {source[:40]!r}, which is neither the input nor a layer before it")
        pools = tuple(self._pool(p, where) for p in fields.take("pools", list))
        if len(pools) > integer.MOST_POOLS:
            raise ArtefactError(f"{where}: it may have {integer.MOST_POOLS} pools at most, not {len(pools)}")
        in_shape = self.shapes[source]
        for i, p in enumerate(pools):
            if source == INPUT or (p.kind == "max" and any(q.kind == "sum" for q in pools[:i])):
                raise ArtefactError(f"{where}: the input, and sums, cannot be pooled")
            in_shape = p.output(in_shape)
            self._fits(where, in_shape)
        if kind == "identity":
            if source == INPUT:
                raise ArtefactError(f"{where}: the input cannot be an identity")
            weight = self._tensor(f"{name}/weight", (np.int32,), in_shape[:1])
            return Synapse(name, source, "identity", weight, in_shape, in_shape, pools, absorbed=True)
        if kind != "conv":
            raise ArtefactError(f"{where}: kind must be conv or identity")
        return self._conv(fields, name, source, in_shape, pools)

    def _conv(self, fields: _Fields, name: str, source: str, in_shape: Shape, pools: tuple[Pool, ...]) -> Synapse:
        where = f"synapse {name!r}"
        weight = self._packed(fields, name) if "packed" in fields.value else self._weight(name)
        if weight.ndim != 4 or not weight.size:
            raise ArtefactError(f"{where}: its weight must have four dimensions and not be empty")
        if int(weight.min()) < -np.iinfo(weight.dtype).max:
            raise ArtefactError(f"{where}: its weights must be symmetric around zero")
        groups = fields.integer("groups", 1, 2**16)
        stride, padding = fields.pair("stride", 1, 2**12), fields.pair("padding", 0, 2**12)
        dilation = fields.pair("dilation", 1, 2**12)
        outputs, per_group, *kernel = weight.shape
        if per_group * groups != in_shape[0] or outputs % groups:
            raise ArtefactError(f"{where}: its weight {list(weight.shape)} does not fit {in_shape} in {groups} groups")
        out_shape = (outputs, *output_size(in_shape[1:], kernel, stride, padding, dilation))
        self._fits(where, out_shape)
        original = fields.name("copy_of") if "copy_of" in fields.value else ""
        synapse = Synapse(
            name, source, "conv", weight, in_shape, out_shape, pools, stride, padding, dilation, groups, True, original
        )
        if original:
            other = self.convs.get(original)
            if other is None:
                raise ArtefactError(f"{where}: it is a copy of {original!r}, which is no convolution before it")
            if other.copy_of or _form(other) != _form(synapse):
                raise ArtefactError(f"{where}: it is a copy of {original!r}, which is another convolution")
        self.convs[name] = synapse
        return synapse

    def _weight(self, name: str) -> NDArray[Any]:
        return self._tensor(f"{name}/weight", (np.int8, np.int16), None)

    def _packed(self, fields: _Fields, name: str) -> NDArray[np.int8]:
        """Weights of 4 bits, two to a byte."""
        shape = fields.take(
            "packed", list, lambda v: len(v) == 4 and all(type(x) is int and 0 < x <= integer.MOST_UNITS for x in v)
        )
        count = math.prod(shape)
        if count > integer.MOST_UNITS:
            raise ArtefactError(f"synapse {name!r}: it may have 2^28 weights at most, not {count}")
        self.packs = True
        weight = unpack(self._tensor(f"{name}/weight", (np.uint8,), (-(-count // 2),)), tuple(shape))
        if int(weight.min()) < -LARGEST:
            raise ArtefactError(f"synapse {name!r}: its weights must be symmetric around zero")
        return weight

    def _pool(self, value: Any, where: str) -> Pool:
        fields = _Fields(value, f"{where}: a pool", "kind", "kernel", "stride", "padding")
        kind = fields.take("kind", str, lambda v: v in ("max", "sum"))
        pool = Pool(
            kind, fields.pair("kernel", 1, 2**16), fields.pair("stride", 1, 2**16), fields.pair("padding", 0, 2**15)
        )
        if any(2 * p > k for p, k in zip(pool.padding, pool.kernel, strict=True)):
            raise ArtefactError(f"{where}: a pool's padding is more than half its kernel")
        return pool

    def _neuron(self, value: Any, name: str, channels: int) -> IntegerNeuron:
        where = f"layer {name!r}: its neuron"
        mixes = self.version == LATER_VERSION and isinstance(value, dict) and "mixing" in value
        more = ("mixing",) if mixes else ()
        fields = _Fields(value, where, "n_max", "signed", "reset", "leak", "decay_reset", *more)
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
        fields = _Fields(value, f"{where}: its mixing", "bits", "weights")
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
        fields, count = _Fields(value, "exit", "margins", "shares", "source"), self.timesteps - 1
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
        fields = _Fields(value, "golden", *names)
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

    def _new_name(self, fields: _Fields, what: str = "layer") -> str:
        name = fields.name("name")
        if (what, name) in self.names or name == INPUT:
            raise ArtefactError(f"the name {name!r} is used by more than one {what}")
        self.names.add((what, name))
        return name

    def _tensor(self, name: str, kinds: tuple[type, ...], shape: tuple[int, ...] | None) -> NDArray[Any]:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ArtefactError(f"tensor {name!r} is missing")
        if tensor.dtype not in kinds or (shape is not None and tensor.shape != shape):
            expected = " or ".join(np.dtype(kind).name for kind in kinds)
            raise ArtefactError(
                f"tensor {name!r} must be {expected}{'' if shape is None else f' {list(shape)}'}, "
                f"not {tensor.dtype} {list(tensor.shape)}"
            )
        self.used.add(name)
        return tensor

    def _fits(self, where: str, shape: Shape) -> None:
        if min(shape) < 1 or math.prod(shape) * self.timesteps > integer.MOST_UNITS:
            raise ArtefactError(f"{where}: {tuple(shape)} over {self.timesteps} timesteps is empty or too large to run")

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
