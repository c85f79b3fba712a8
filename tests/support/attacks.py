"""Files that pretend to be deployed networks. Each must be refused in one line, however plausible its checksum.

`attacks(good)` takes the bytes of a good file and gives name -> bytes. Those that change what the file says are sealed
again with a right checksum: only what they say is wrong with them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lbq.engine.file import container

Tree = dict[str, Any]
Tensors = container.Tensors


def attacks(good: bytes) -> Iterator[tuple[str, bytes]]:
    yield from raw(good)
    tensors, text, _ = container.decode(good)
    tree = json.loads(text)
    for name, change in CHANGES.items():
        mine, arrays = copy.deepcopy(tree), {key: value.copy() for key, value in tensors.items()}
        changed = change(mine, arrays)
        yield name, container.encode(arrays, changed if isinstance(changed, str) else json.dumps(mine))


def raw(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Wrong before anything is parsed."""
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    body = good[8 + length :]

    def sealed(header: Any) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text + body

    yield "empty", b""
    yield "seven bytes", good[:7]
    yield "no header", (0).to_bytes(8, "little")
    yield "header longer than the file", (2**62).to_bytes(8, "little") + good[8:]
    yield "header length all ones", b"\xff" * 8 + good[8:]
    yield "pickle", b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    yield "zip", b"PK\x03\x04" + good[4:]
    yield "header a list", sealed([])
    yield "header a number", sealed(b"1")
    yield "header not text", sealed(b"\xff\xfe" * 8)
    yield "header of brackets", sealed(b"[" * 100_000)
    yield "header without metadata", sealed({k: v for k, v in header.items() if k != "__metadata__"})
    yield "metadata a string", sealed({**header, "__metadata__": "lbq"})
    yield "metadata with more", sealed({**header, "__metadata__": {**header["__metadata__"], "note": ""}})
    yield "no checksum", sealed({**header, "__metadata__": {"lbq": header["__metadata__"]["lbq"]}})
    for wrong in ("", "0" * 64, "f" * 63, "\ud800" + "0" * 63, "é" * 64, 7, None, ["0" * 64]):
        yield f"checksum {wrong!r}", sealed({**header, "__metadata__": {**header["__metadata__"], "sha256": wrong}})
    for cut in (8, 9, 8 + length // 2, 8 + length, len(good) - 1):
        yield f"cut after {cut}", good[:cut]
    yield "one byte more", good + b"\0"
    yield "twice", good + good
    # sealed with a right checksum, but with tensors that are not where they say
    tensors = {k: v for k, v in header.items() if k != "__metadata__"}
    first = next(iter(sorted(tensors, key=lambda k: tensors[k]["data_offsets"])))
    for name, entry in {
        "overlap": {**tensors[first], "data_offsets": [0, 0]},
        "beyond the end": {**tensors[first], "data_offsets": [len(body), len(body) + 8]},
        "backwards": {**tensors[first], "data_offsets": [8, 0]},
        "negative offset": {**tensors[first], "data_offsets": [-8, 0]},
        "float offsets": {**tensors[first], "data_offsets": [0.0, 8.0]},
        "huge shape": {**tensors[first], "shape": [2**39, 2**39]},
        "negative shape": {**tensors[first], "shape": [-1]},
        "boolean shape": {**tensors[first], "shape": [True]},
        "text for a shape": {**tensors[first], "shape": "8"},
        "deep shape": {**tensors[first], "shape": [1] * 100},
        "floats": {**tensors[first], "dtype": "F32"},
        "unknown type": {**tensors[first], "dtype": "PICKLE"},
        "a list for a type": {**tensors[first], "dtype": ["I8"]},
        "an object for a type": {**tensors[first], "dtype": {"I8": 1}},
        "no type": {k: v for k, v in tensors[first].items() if k != "dtype"},
        "an entry more": {**tensors[first], "extra": 1},
        "no object": 5,
    }.items():  # fmt: skip
        yield f"tensor: {name}", reseal(sealed({**header, first: entry}))
    doubled = json.dumps(header, separators=(",", ":"))[:-1] + f',"{first}":{json.dumps(tensors[first])}}}'
    yield "tensor: said twice", reseal(sealed(doubled.encode()))


def reseal(data: bytes) -> bytes:
    """A right checksum for changed bytes."""
    import hashlib
    import re

    blank = re.sub(rb'"sha256":"[0-9a-f]{64}"', b'"sha256":"' + b"0" * 64 + b'"', data, count=1)
    digest = hashlib.sha256(blank).hexdigest().encode()
    return blank.replace(b'"sha256":"' + b"0" * 64 + b'"', b'"sha256":"' + digest + b'"', 1)


def put(*path: Any, value: Any = ...) -> Callable[[Tree, Tensors], None]:
    """Another value at this path, or none."""

    def change(tree: Tree, _: Tensors) -> None:
        where: Any = tree
        for key in path[:-1]:
            where = where[key]
        where[path[-1]] = value
        if value is ...:
            del where[path[-1]]

    return change


def _tensor(name: str, function: Callable[[Any], Any]) -> Callable[[Tree, Tensors], None]:
    def change(_: Tree, tensors: Tensors) -> None:
        tensors[name] = function(tensors[name])

    return change


def _without(name: str) -> Callable[[Tree, Tensors], None]:
    def change(_: Tree, tensors: Tensors) -> None:
        del tensors[name]

    return change


def _at(array: Any, index: Any, value: Any) -> Any:
    array[index] = value
    return array


POOL = {"kind": "sum", "kernel": [2, 2], "stride": [2, 2], "padding": [0, 0]}
S, L = ("layers", 1, "synapses", 0), ("layers", 1)  # layer1.0.conv1 into layer1.0.sn1
NAME = "layer1.0.conv1/weight"

CHANGES: dict[str, Callable[[Tree, Tensors], Any]] = {
    "text is not JSON": lambda tree, _: "{",
    "text is a list": lambda tree, _: "[]",
    "text holds NaN": lambda tree, _: json.dumps(tree).replace('"scale": ', '"scale": NaN, "x": ', 1),
    "text holds Infinity": put("scale", value=float("inf")),
    "a number beyond all floats": put("scale", value=10**400),
    "text says scale twice": lambda tree, _: json.dumps(tree)[:-1] + ', "scale": 1.0}',
    "another format": put("format", value="onnx"),
    "a later version": put("version", value=2),
    "no version": put("version"),
    "a version that is true": put("version", value=True),
    "a version with a point": put("version", value=1.0),
    "an unknown entry": put("hook", value="os.system"),
    "an entry that moves the cursor": put("\x1b[2J", value=1),
    "a version that moves the cursor": put("version", value="\x1b[2J"),
    "no layers": put("layers", value=[]),
    "layers an object": put("layers", value={}),
    "no readout": put("readout", value=None),
    "no timesteps": put("input", "timesteps", value=0),
    "many timesteps": put("input", "timesteps", value=10**9),
    "timesteps true": put("input", "timesteps", value=True),
    "static 1": put("input", "static", value=1),
    "a flat input": put("input", "shape", value=[3, 8]),
    "an endless input": put("input", "shape", value=[3, 65536, 65536]),
    "an empty input": put("input", "shape", value=[3, 0, 8]),
    "another input": put("input", "shape", value=[3, 9, 8]),
    "pixels to 256": put("input", "max", value=256),
    "scale zero": put("scale", value=0),
    "scale negative": put("scale", value=-1.0),
    "scale text": put("scale", value="1"),
    "classes too few": put("classes", value=["a"]),
    "classes numbers": put("classes", value=[1, 2, 3, 4, 5]),
    "a class with a long name": put("classes", value=["a" * 201, "b", "c", "d", "e"]),
    "a class that moves the cursor": put("classes", value=["\x9b2J", "b", "c", "d", "e"]),
    "facts a list": put("facts", value=[]),
    "layer a number": put("layers", 1, value=3),
    "layer without a name": put(*L, "name"),
    "layer with an empty name": put(*L, "name", value=""),
    "layer named as the input": put(*L, "name", value="input"),
    "layer name with a path": put(*L, "name", value="../../etc"),
    "layer name with a new line": put(*L, "name", value="a\nb"),
    "two layers of one name": put(*L, "name", value="sn1"),
    "fraction negative": put(*L, "fraction", value=-1),
    "fraction enormous": put(*L, "fraction", value=1000),
    "fraction one more": lambda tree, _: tree["layers"][1].update(fraction=tree["layers"][1]["fraction"] + 1),
    "fraction of the readout": put("readout", "fraction", value=3),
    "fraction of the readout false": put("readout", "fraction", value=False),
    "bound too small": put(*L, "bound", value=1),
    "bound one more": lambda tree, _: tree["layers"][1].update(bound=tree["layers"][1]["bound"] + 1),
    "bound of the readout": put("readout", "bound", value=5),
    "units missing": put(*L, "unit", value=[]),
    "units zero": lambda tree, _: _at(tree["layers"][1]["unit"], 0, 0),
    "units text": lambda tree, _: _at(tree["layers"][1]["unit"], 0, "1e-3"),
    "no synapses": put(*L, "synapses", value=[]),
    "many synapses": lambda tree, _: tree["layers"][1].update(synapses=tree["layers"][1]["synapses"] * 100),
    "synapses an object": put(*L, "synapses", value={}),
    "a synapse twice": lambda tree, _: tree["layers"][1]["synapses"].append(tree["layers"][1]["synapses"][0]),
    "a cycle": put(*S, "source", value="layer1.0.sn2"),
    "itself": put(*S, "source", value="layer1.0.sn1"),
    "a source that is not there": put(*S, "source", value="nowhere"),
    "a source that is a number": put(*S, "source", value=0),
    "readout reads the input": put("readout", "synapses", 0, "source", value="input"),
    "kind unknown": put(*S, "kind", value="python"),
    "kind missing": put(*S, "kind"),
    "kind identity": put(*S, "kind", value="identity"),
    "stride zero": put(*S, "stride", value=[0, 1]),
    "stride of three": put(*S, "stride", value=[1, 1, 1]),
    "stride of two": put(*S, "stride", value=[2, 2]),
    "padding negative": put(*S, "padding", value=[-1, 1]),
    "padding enormous": put(*S, "padding", value=[4096, 4096]),
    "padding for an endless output": put(*S, "padding", value=[2**31, 2**31]),
    "dilation zero": put(*S, "dilation", value=[0, 0]),
    "dilation past the input": put(*S, "dilation", value=[50, 50]),
    "groups zero": put(*S, "groups", value=0),
    "groups that do not divide": put(*S, "groups", value=3),
    "groups two": put(*S, "groups", value=2),
    "pools text": put(*S, "pools", value="max"),
    "pool unknown": put(*S, "pools", value=[{**POOL, "kind": "median"}]),
    "pool without a kernel": put(*S, "pools", value=[{"kind": "max"}]),
    "pool of nothing": put(*S, "pools", value=[{**POOL, "kernel": [0, 0]}]),
    "pool that fits": put(*S, "pools", value=[POOL]),
    "pool past the input": put(*S, "pools", value=[{**POOL, "kernel": [100, 100]}]),
    "pool padded too much": put(*S, "pools", value=[{**POOL, "padding": [2, 2]}]),
    "pool of pixels": put("layers", 0, "synapses", 0, "pools", value=[POOL]),
    "maximum of a sum": put(*S, "pools", value=[{**POOL, "kernel": [1, 1], "stride": [1, 1]}, {**POOL, "kind": "max"}]),
    "nine pools": put(*S, "pools", value=[{**POOL, "kernel": [1, 1], "stride": [1, 1]}] * 9),
    "n_max zero": put(*L, "neuron", "n_max", value=0),
    "n_max 256": put(*L, "neuron", "n_max", value=256),
    "n_max four": put(*L, "neuron", "n_max", value=4),
    "signed text": put(*L, "neuron", "signed", value="no"),
    "reset unknown": put(*L, "neuron", "reset", value="exec"),
    "leak above one": put(*L, "neuron", "leak", value=[3, 1]),
    "leak with a wide shift": put(*L, "neuron", "leak", value=[1, 64]),
    "leak with no shift": put(*L, "neuron", "leak", value=[0, 0]),
    "leak a number": put(*L, "neuron", "leak", value=0.5),
    "leak negative": put(*L, "neuron", "leak", value=[-1, 1]),
    "neuron missing": put(*L, "neuron", value=None),
    "neuron in the readout": lambda tree, _: tree["readout"].update(neuron=tree["layers"][1]["neuron"]),
    "golden text": put("golden", value="yes"),
    "golden without a layer": put("golden", "sn1"),
    "golden digests too few": put("golden", "sn1", value=[]),
    "golden digests no digests": put("golden", "sn1", value=["x", "y"]),
    "golden forgotten, tensors left": put("golden", value=None),
    "weight missing": _without(NAME),
    "weight of another shape": _tensor(NAME, lambda w: w[:, :, :2]),
    "weight flat": _tensor(NAME, np.ravel),
    "weight empty": _tensor(NAME, lambda w: w[:, :, :0]),
    "weight of int32": _tensor(NAME, lambda w: w.astype(np.int32)),
    "weight of bytes": _tensor(NAME, lambda w: w.view(np.uint8)),
    "weight of -128": _tensor(NAME, lambda w: _at(w, (0, 0, 0, 0), -128)),
    "weights heavier than stated": _tensor(NAME, lambda w: np.full_like(w, 127)),
    "weights wide and heavy": _tensor(NAME, lambda w: np.full(w.shape, 32767, np.int16)),
    "bias missing": _without("sn1/bias"),
    "bias of int64": _tensor("sn1/bias", lambda b: b.astype(np.int64)),
    "bias of another size": _tensor("sn1/bias", lambda b: b[:, :3]),
    "bias beyond the bound": _tensor("layer1.0.sn1/bias", lambda b: _at(b, 0, 2**31 - 1)),
    "bias of the most negative number": _tensor("layer1.0.sn1/bias", lambda b: _at(b, 0, -(2**31))),
    "readout bias beyond 2^53": _tensor("readout/bias", lambda b: _at(b, 0, 2**62)),
    "readout bias of the most negative number": _tensor("readout/bias", lambda b: _at(b, 0, -(2**63))),
    "shortcut wide": _tensor("layer1.0.sn2.shortcut/weight", lambda w: w.astype(np.int64)),
    "shortcut beyond the bound": _tensor("layer1.0.sn2.shortcut/weight", lambda w: np.full_like(w, 2**31 - 1)),
    "thresholds missing": _without("sn1/thresholds"),
    "thresholds falling": _tensor("sn1/thresholds", lambda t: t[:, ::-1].copy()),
    "thresholds zero": _tensor("sn1/thresholds", np.zeros_like),
    "thresholds negative": _tensor("sn1/thresholds", lambda t: -t),
    "thresholds beyond the bound": _tensor("sn1/thresholds", lambda t: np.full_like(t, 2**30 + 1)),
    "thresholds too few": _tensor("sn1/thresholds", lambda t: t[:, :-1].copy()),
    "reset negative": _tensor("sn1/reset", lambda r: -r),
    "reset enormous": _tensor("sn1/reset", lambda r: np.full_like(r, 2**31 - 1)),
    "golden input wide": _tensor("golden/input", lambda x: x.astype(np.int16)),
    "golden input of another shape": _tensor("golden/input", lambda x: x[:, :1]),
    "golden logits too few": _tensor("golden/logits", lambda x: x[:1]),
    "golden logits narrow": _tensor("golden/logits", lambda x: x.astype(np.int32)),
    "a tensor that belongs to nothing": lambda _, tensors: tensors.update(extra=np.zeros(3, np.uint8)),
}
