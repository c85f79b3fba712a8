"""Deployed networks as files, `model.lbq`: writing them, and reading them with every statement checked.

The graph is JSON in the file's header, weights and constants are tensors (`container`). Shapes follow from the input's
shape, and a layer may read only the input and layers before it. docs/explanation/integers.md describes the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq._version import __version__
from lbq.engine.file import container
from lbq.engine.file.packing import pack, packed_synapses
from lbq.engine.file.reading import FORMAT, VERSION, Golden, Reader, needs_later_version
from lbq.engine.file.synapses import LATER_VERSION
from lbq.errors import ArtefactError
from lbq.graph import Synapse
from lbq.graph.integer import IntegerLayer, IntegerNetwork, membrane_bound, readout_bound


def level_digests(levels: Mapping[str, NDArray[Any]]) -> dict[str, tuple[str, ...]]:
    """For each layer, the SHA-256 of its levels `[T, B, C, H, W]` (uint8 or int8, C order) at each timestep."""
    return {
        name: tuple(hashlib.sha256(np.ascontiguousarray(step).tobytes()).hexdigest() for step in level)
        for name, level in levels.items()
    }


def fingerprint(network: IntegerNetwork) -> str:
    """The SHA-256 of what a network computes: equal for files that differ in golden inputs, exits and facts alone."""
    tensors, text = proved(replace(network, exits=None))
    for name in ("producer", "version", "facts", "classes"):
        del text[name]
    digest = hashlib.sha256(json.dumps(text, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype.str} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


# Writing ---------------------------------------------------------------------------------------------------------------


def save(path: Path | str, network: IntegerNetwork, golden: Golden | None = None) -> int:
    """Write a network; return the size of the file in bytes."""
    try:
        tensors, text = proved(network, golden)
    except ArtefactError as error:
        raise ArtefactError(f"{path}: no file can hold this network: {error}") from error
    return container.write(path, tensors, json.dumps(text, separators=(",", ":"), sort_keys=True, allow_nan=False))


def proved(network: IntegerNetwork, golden: Golden | None = None) -> tuple[container.Tensors, dict[str, Any]]:
    """The tensors and the description of a network's file; a reader has checked them."""
    tensors: container.Tensors = {}
    packed = packed_synapses(network)
    layers: list[dict[str, Any]] = []
    for layer in network.all_layers:
        tensors |= _tensors_of(layer, packed)
        layers.append(_describe_layer(network, layer, packed))
        layers += [{"name": g.name, "gate": list(g.operands)} for g in network.gates_behind(layer.name)]
    text: dict[str, Any] = {
        "format": FORMAT,
        "version": LATER_VERSION if packed or needs_later_version(network) else VERSION,
        "producer": f"lbq {__version__}",
        "input": {
            "shape": list(network.input_shape),
            "timesteps": network.timesteps,
            "static": network.static,
            "max": network.input_max,
        },
        "layers": layers[:-1],
        "readout": layers[-1],
        "scale": network.scale,
        "classes": list(network.classes),
        "facts": dict(network.facts),
        "golden": None,
    }
    if (exits := network.exits) is not None:
        tensors["exit/bias"] = exits.bias
        text["exit"] = {"margins": list(exits.margins), "shares": list(exits.shares), "source": exits.source}
    if golden is not None:
        tensors["golden/input"], tensors["golden/logits"] = golden.inputs, golden.logits
        text["golden"] = {name: list(digests) for name, digests in golden.digests.items()}
    Reader(tensors).network(text)
    return tensors, text


def _tensors_of(layer: IntegerLayer, packed: Collection[str]) -> container.Tensors:
    """The tensors of a layer by their names in a file. packed: the synapses whose weights lie two to a byte."""
    tensors = {f"{layer.name}/bias": layer.bias}
    for s in layer.synapses:
        tensors[f"{s.name}/weight"] = pack(s.weight) if s.name in packed else s.weight
    if layer.neuron is not None:
        tensors[f"{layer.name}/thresholds"] = layer.neuron.thresholds
        tensors[f"{layer.name}/reset"] = layer.neuron.reset
    return tensors


def _describe_layer(network: IntegerNetwork, layer: IntegerLayer, packed: Collection[str]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": layer.name,
        "fraction": layer.fraction,
        "unit": layer.unit.tolist(),
        "synapses": [_describe(s, s.name in packed) for s in layer.synapses],
    }
    if (neuron := layer.neuron) is None:
        return described | {"bound": readout_bound(network)}
    largest = {s.name: network.largest(s) for s in layer.synapses}
    described["bound"] = membrane_bound(layer, largest, network.timesteps)
    described["neuron"] = {
        "n_max": neuron.n_max,
        "signed": neuron.signed,
        "reset": neuron.reset_kind,
        "leak": None if neuron.leak is None else list(neuron.leak),
        "decay_reset": neuron.decay_reset,
    }
    if (mixing := neuron.mixing) is not None:
        described["neuron"]["mixing"] = {"bits": mixing.bits, "weights": mixing.weights.tolist()}
    return described


def _describe(synapse: Synapse, packed: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"name": synapse.name, "source": synapse.source, "kind": synapse.kind}
    described["pools"] = [
        {"kind": p.kind, "kernel": list(p.kernel), "stride": list(p.stride), "padding": list(p.padding)}
        | ({"channels": p.channels} if p.channels > 1 else {})
        for p in synapse.pools
    ]
    if synapse.kind == "matmul":
        described |= {name: value for name in ("keys", "values", "heads") if (value := getattr(synapse, name))}
    if synapse.kind == "conv":
        described |= {name: list(getattr(synapse, name)) for name in ("stride", "padding", "dilation")}
        described["groups"] = synapse.groups
        if packed:
            described["packed"] = list(synapse.weight.shape)
    if synapse.copy_of:
        described["copy_of"] = synapse.copy_of
    return described


# Reading ---------------------------------------------------------------------------------------------------------------


def load(path: Path | str) -> tuple[IntegerNetwork, Golden | None, container.Mapped]:
    """Read a network and check all of it. Its weights are in the mapped file, which must stay as it is."""
    tensors, text, file = container.read(path)
    try:
        network, golden = Reader(tensors).network(container.parse_json(text, "its description"))
    except ArtefactError as error:
        raise ArtefactError(f"{path}: {error}") from error
    for tensor in tensors.values():
        container.forget(tensor)  # the checks have read all of it
    return network, golden, file
