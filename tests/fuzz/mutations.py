"""Changes of trees of plain values, tensors and bytes."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

INTEGERS = (0, 1, -1, -5, 2, 255, 4096, 2**31 - 1, 2**31, -(2**31), 2**32, 10**9, 2**53, 2**63 - 1, 2**63, 10**400)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"))
TEXTS = (
    "", "input", "../..", "/dev/zero", "a\nb", "\x1b[2J", "\u202egnp", "\ud800", "\0", "x" * 3000, "<img src=x onerror=a()>",
    "[a](javascript:b)", "{{7*7}}", "nan", "1e999", "0", "true", "é", "\N{GRINNING FACE}",
)  # fmt: skip
SHAPES: tuple[list[int], ...] = ([0], [-1], [2**39] * 7 + [0], [2**31], [1] * 9, [2**62, 4], [])


def value(random: Random) -> Any:
    """Any plain value."""
    kinds: tuple[Any, ...] = (
        INTEGERS,
        FLOATS,
        TEXTS,
        (None, True, False),
        ([], {}, [[]], {"a": 1}, [0] * 2000),
        SHAPES,
    )
    return copy.deepcopy(random.choice(random.choice(kinds)))


def change(tree: Any, random: Random) -> Any:
    """A copy of a tree with one place changed: another value, another type, gone, doubled, renamed or exchanged."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    if not places:
        return value(random)
    parent, key = random.choice(places)
    match random.randrange(6):
        case 0 | 1:
            parent[key] = value(random)
        case 2:
            parent[key] = _near(parent[key], random)
        case 3:
            del parent[key]
        case 4 if isinstance(parent, dict):
            parent[random.choice(TEXTS)] = parent.pop(key)
        case 4:
            parent.insert(key, copy.deepcopy(parent[key]))
        case 5:
            other, theirs = random.choice(places)
            parent[key], other[theirs] = copy.deepcopy(other[theirs]), copy.deepcopy(parent[key])
    return tree


def _near(old: Any, random: Random) -> Any:
    """A value of the same type, a little away."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return random.choice([old - 1, old + 1, -old, 2 * old, old << 31])
    if isinstance(old, float):
        return random.choice([-old, old * 2, int(old) if abs(old) < 1e300 else 0, str(old)])
    if isinstance(old, str):
        return random.choice([old + random.choice(TEXTS), old[:-1], old.upper(), [old]])
    if isinstance(old, list):
        return random.choice([old[1:], old * 2, old[::-1], old * 300])
    return random.choice([{}, [old], value(random)])


def _places(tree: Any) -> Any:
    """Every place of a tree, as its container and its key there."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _places(tree[key])


def change_array(array: NDArray[Any], random: Random) -> NDArray[Any]:
    """Integers of another type, shape or size, or some of them others."""
    match random.randrange(9):
        case 0:
            return array.astype(random.choice([np.int8, np.int16, np.int32, np.int64, np.uint8]))
        case 1:
            return array[: random.randrange(len(array) + 1)] if array.ndim else array
        case 2:
            return array.reshape(-1)
        case 3:
            return array[None]
        case 4:
            return np.concatenate([array, array]) if array.ndim else array
    flat = array.reshape(-1).copy()
    if flat.size:
        one, other = random.randrange(flat.size), random.randrange(flat.size)
        if random.random() < 0.5:  # which leaves sums and bounds as they are
            flat[one], flat[other] = flat[other], flat[one]
        else:
            flat[one] = random.choice([np.iinfo(array.dtype).min, np.iinfo(array.dtype).max, 0, int(flat[other])])
    return flat.reshape(array.shape)


def change_bytes(data: bytes, random: Random) -> bytes:
    """Bytes with a few places changed: another byte, another number, a run of the largest byte put in, some gone."""
    for _ in range(random.choice([1, 1, 2, 3])):
        at = random.randrange(len(data) + 1)
        match random.randrange(4):
            case 0:
                data = data[:at] + random.randbytes(1) + data[at + 1 :]
            case 1:
                size = random.choice([2, 4, 8])
                number = random.choice(INTEGERS) % 256**size
                data = data[:at] + number.to_bytes(size, "little") + data[at + size :]
            case 2:
                data = data[:at] + b"\xff" * random.choice([1, 2**8, 2**14]) + data[at:]
            case _:
                data = data[:at] + data[at + random.choice([1, 8, 16, len(data)]) :]
    return data
