"""Reading the synapses of a deployed network, and the tensors that they hold, with every statement checked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine.file import container
from lbq.engine.file.fields import Fields
from lbq.engine.file.packing import LARGEST, unpack
from lbq.errors import ArtefactError
from lbq.graph import INPUT, Gate, Pool, Shape, Synapse, integer, output_size

LATER_VERSION = 2  # of files with what a reader of version 1 does not know, so that it refuses them


def _form(synapse: Synapse) -> tuple[Any, ...]:
    """What a copy shares with its original."""
    s = synapse
    conv = s.weight.shape, s.out_shape, s.stride, s.padding, s.dilation, s.groups
    return s.kind, *conv, *((s.sources, s.heads) if s.kind == "matmul" else ())


class SynapseReader:
    """Knows the layers and gates that it has read so far: their shapes and largest levels."""

    timesteps: int
    version: Any

    def __init__(self, tensors: container.Tensors) -> None:
        self.tensors = tensors
        self.used: set[str] = set()
        self.names: set[tuple[str, str]] = set()  # layers and synapses have names of their own
        self.originals: dict[str, Synapse] = {}  # of copies
        self.shapes: dict[str, Shape] = {}
        self.levels: dict[str, int] = {}  # the largest level of each source
        self.signed: dict[str, bool] = {}
        self.gates: list[Gate] = []
        self.packs = False  # whether weights lie two to a byte
        self.work = 0  # that the layers' bounds took

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
        products = kind == "matmul" and self.version == LATER_VERSION
        more: tuple[str, ...] = ("stride", "padding", "dilation", "groups") if kind == "conv" else ()
        if products:
            more = (*([key for key in ("keys", "values") if key in value] or ("keys", "values")), "heads")
        for key in ("copy_of", "packed") if kind == "conv" else ("copy_of",) if products else ():
            if key in value and (key != "packed" or self.version == LATER_VERSION):
                more = (*more, key)
        fields = Fields(value, "a synapse", "name", "source", "kind", "pools", *more)
        name = self._new_name(fields, "synapse")
        where = f"synapse {name!r}"
        source = fields.take("source", str)
        if source not in self.shapes:
            raise ArtefactError(f"{where} reads {source[:40]!r}, which is neither the input nor a layer before it")
        pools, in_shape = self._pools(fields, source, where)
        if kind == "identity":
            if source == INPUT:
                raise ArtefactError(f"{where}: the input cannot be an identity")
            weight = self._tensor(f"{name}/weight", (np.int32,), in_shape[:1])
            return Synapse(name, source, "identity", weight, in_shape, in_shape, pools, absorbed=True)
        if products:
            return self._matmul(fields, name, source, in_shape, pools)
        if kind != "conv":
            raise ArtefactError(f"{where}: kind must be conv, identity or, from version {LATER_VERSION} on, matmul")
        return self._conv(fields, name, source, in_shape, pools)

    def _matmul(self, fields: Fields, name: str, source: str, shape: Shape, pools: tuple[Pool, ...]) -> Synapse:
        """A product of levels: no pools, layers or gates of one shape, and heads that divide its channels. Scores without
        values are one square of tokens for each head, and so is the source of a product without keys."""
        where, heads = f"synapse {name!r}", fields.integer("heads", 1, 2**16)
        others = {key: fields.take(key, str) for key in ("keys", "values") if key in fields.value}
        in_shape, shape = shape, shape if "keys" in others else self.shapes.get(others["values"], shape)
        channels, height, width = shape
        square = heads, height * width, height * width
        for operand, wanted in (
            (source, shape if "keys" in others else square),
            *((o, shape) for o in others.values()),
        ):
            if operand not in self.signed or self.shapes[operand] != wanted:
                raise ArtefactError(f"{where}: {operand[:40]!r} is no layer before it of the shape {wanted}")
        if pools or channels % heads:
            raise ArtefactError(f"{where}: it must have no pools, and {heads} heads must divide {channels} channels")
        out_shape = shape if "values" in others else square
        self._fits(where, out_shape)
        weight = self._tensor(f"{name}/weight", (np.int32,), out_shape[:1])
        synapse = Synapse(
            name, source, "matmul", weight, in_shape, out_shape, absorbed=True, copy_of=self._original(fields),
            heads=heads, **others,
        )  # fmt: skip
        return self._with_original(synapse)

    def _conv(self, fields: Fields, name: str, source: str, in_shape: Shape, pools: tuple[Pool, ...]) -> Synapse:
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
        synapse = Synapse(
            name, source, "conv", weight, in_shape, out_shape, pools, stride, padding, dilation, groups,
            absorbed=True, copy_of=self._original(fields),
        )  # fmt: skip
        return self._with_original(synapse)

    def _original(self, fields: Fields) -> str:
        return fields.name("copy_of") if "copy_of" in fields.value else ""

    def _with_original(self, synapse: Synapse) -> Synapse:
        """Check that what a synapse is a copy of is there, and the same."""
        if original := synapse.copy_of:
            where, other = f"synapse {synapse.name!r}", self.originals.get(original)
            if other is None:
                raise ArtefactError(f"{where}: it is a copy of {original!r}, which is no convolution before it")
            if other.copy_of or _form(other) != _form(synapse):
                raise ArtefactError(f"{where}: it is a copy of {original!r}, which is another convolution")
        self.originals[synapse.name] = synapse
        return synapse

    def _weight(self, name: str) -> NDArray[Any]:
        return self._tensor(f"{name}/weight", (np.int8, np.int16), None)

    def _packed(self, fields: Fields, name: str) -> NDArray[np.int8]:
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

    def _pools(self, fields: Fields, source: str, where: str) -> tuple[tuple[Pool, ...], Shape]:
        """The pools between a source and a synapse, and the shape behind them."""
        pools = tuple(self._pool(p, where) for p in fields.take("pools", list))
        if len(pools) > integer.MOST_POOLS:
            raise ArtefactError(f"{where}: it may have {integer.MOST_POOLS} pools at most, not {len(pools)}")
        shape = self.shapes[source]
        for i, p in enumerate(pools):
            if source == INPUT or (p.kind == "max" and any(q.kind == "sum" for q in pools[:i])):
                raise ArtefactError(f"{where}: the input, and sums, cannot be pooled")
            if shape[0] % p.channels:
                raise ArtefactError(f"{where}: a pool over {p.channels} channels does not divide {shape[0]}")
            shape = p.output(shape)
            self._fits(where, shape)
        return pools, shape

    def _pool(self, value: Any, where: str) -> Pool:
        over_channels = self.version == LATER_VERSION and isinstance(value, dict) and "channels" in value
        more = ("channels",) if over_channels else ()
        fields = Fields(value, f"{where}: a pool", "kind", "kernel", "stride", "padding", *more)
        kind = fields.take("kind", str, lambda v: v in ("max", "sum"))
        pool = Pool(
            kind, fields.pair("kernel", 1, 2**16), fields.pair("stride", 1, 2**16), fields.pair("padding", 0, 2**15),
            fields.integer("channels", 2, 2**16) if over_channels else 1,
        )  # fmt: skip
        if pool.channels > 1 and replace(pool, channels=1) != Pool("sum", (1, 1), (1, 1)):
            raise ArtefactError(f"{where}: a pool over channels must be a sum, and of one position")
        if any(2 * p > k for p, k in zip(pool.padding, pool.kernel, strict=True)):
            raise ArtefactError(f"{where}: a pool's padding is more than half its kernel")
        return pool

    # Small checks ------------------------------------------------------------------------------------------------------

    def _new_name(self, fields: Fields, what: str = "layer") -> str:
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
