"""A file of every layer's levels for a few inputs, bit plane by bit plane: it helps to find where another engine errs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine.file import container
from lbq.errors import ArtefactError
from lbq.graph.levels import bit_planes, planes_of

FORMAT = "lbq levels"
MOST_VALUES = 2**32


def save_levels(path: Path | str, levels: Mapping[str, NDArray[Any]]) -> int:
    """Write each layer's levels `[T, B, C, H, W]`: planes of |S|, eight bits to a byte, then the signs of signed levels."""
    tensors: container.Tensors = {}
    described = {}
    for name, level in levels.items():
        planes = max(planes_of(level), 1)
        bits = bit_planes(level, planes)
        if level.dtype.kind == "i":
            bits = np.concatenate([bits, (level < 0)[None]])
        tensors[name] = np.packbits(bits.reshape(len(bits), -1), axis=1)
        described[name] = {"shape": list(level.shape), "signed": level.dtype.kind == "i"}
    text = json.dumps({"format": FORMAT, "version": 1, "layers": described}, separators=(",", ":"), sort_keys=True)
    return container.write(path, tensors, text)


def load_levels(path: Path | str) -> dict[str, NDArray[Any]]:
    """Each layer's levels, as they were saved."""
    tensors, text, _ = container.read(path)
    described = container.parse_json(text, f"{path}: its description")
    layers = described.get("layers") if isinstance(described, dict) else None
    if not isinstance(layers, dict) or described.get("format") != FORMAT or set(layers) != set(tensors):
        raise ArtefactError(f"{path} holds no levels: give a file that `lbq deploy --levels` wrote")
    levels = {}
    for name, packed in tensors.items():
        shape, signed = (
            layers[name].get(key) if isinstance(layers[name], dict) else None for key in ("shape", "signed")
        )
        whole = isinstance(shape, list) and all(type(n) is int and 0 < n < 2**31 for n in shape)
        values = math.prod(shape or ()) if whole else MOST_VALUES + 1
        fits = packed.dtype == np.uint8 and packed.ndim == 2 and values <= MOST_VALUES
        fits = fits and type(signed) is bool and packed.shape[1] == -(-values // 8)
        if not fits or not (2 if signed else 1) <= len(packed) <= 8:  # of int8 and uint8
            raise ArtefactError(f"{path}: layer {name!r} is not described as it is stored")
        bits = np.unpackbits(packed, axis=1, count=values).astype(np.int16)
        magnitudes = bits[:-1] if signed else bits
        level = (magnitudes << np.arange(len(magnitudes), dtype=np.int16)[:, None]).sum(0)
        if signed:
            level = np.where(bits[-1], -level, level)
        levels[name] = level.astype(np.int8 if signed else np.uint8).reshape(shape)
    return levels
