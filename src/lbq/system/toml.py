"""TOML files: reading with composition from a base, dotted overrides, and writing. No torch.

A file may name another one in a top-level key `base`, relative to itself. Its own tables are laid over those of the base. A
top-level `name` belongs to the file that gives it alone.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lbq.errors import ConfigError
from lbq.system import files

MAX_BASES = 8  # in a row
MOST_BYTES = 2**20  # of a file
MOST_DEPTH = 32  # of tables and lists in each other: the parser takes time and memory that grow with its square
BETWEEN_KEYS = re.compile(r"[^\w'.-]+")  # what ends a dotted key
TOO_DEEP = f"tables or lists lie more than {MOST_DEPTH} deep in each other"
LARGEST_INTEGER = 2**63 - 1
# Strings and comments. One that does not end goes on to the end of its line or of the text, so that nothing is read twice.
STRINGS = re.compile(
    r'"{3}(?:\\.|[^\\])*?(?:"{3}|\Z)|' r"'{3}.*?(?:'{3}|\Z)|" r'"(?:\\.|[^"\\\n])*+"?|' r"'[^'\n]*+'?|#[^\n]*+",
    re.DOTALL,
)


class LargeInteger(ValueError):
    """An integer of more than 64 bits: a value of TOML, but no setting takes it."""


def _instead(path: Path, depth: int) -> str:
    """What to give in place of a file that cannot be read."""
    if (path / "config.toml").is_file():
        return f"give {path / 'config.toml'}"
    if depth > 0:
        return "correct the `base` that names it"
    return "give one of its files" if path.is_dir() else "give a TOML file, such as configs/digits/lbq.toml"


def read(path: Path | str, depth: int = 0) -> dict[str, Any]:
    """The tree of a file, laid over its base, if it names one."""
    path = Path(path)
    text = files.text_of(path, ConfigError, MOST_BYTES, _instead(path, depth))
    try:
        tree = parsed(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {' '.join(str(error).split())[:200]}") from error
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base must be the path of another configuration, got {base!r}")
    if depth == MAX_BASES:
        raise ConfigError(f"{path}: more than {MAX_BASES} bases in a row; do they name each other?")
    below = read(path.parent / base, depth + 1)
    below.pop("name", None)  # a changed recipe is not what its base is called
    return merge(below, tree)


def parsed(text: str) -> dict[str, Any]:
    """The tree of a text, or a ValueError that says what is wrong with it. Its size must be limited already."""
    bare = STRINGS.sub("''", text)
    opened = itertools.accumulate((char in "[{") - (char in "]}") for char in bare if char in "[]{}")
    keys = BETWEEN_KEYS.split(bare.replace(" ", "").replace("\t", ""))  # a space may stand beside a dot; and numbers
    dots = max(key.count(".") for key in keys)
    if max(max(opened, default=0), dots + 1) > MOST_DEPTH:
        raise ValueError(TOO_DEEP)
    tree = tomllib.loads(text)
    _check(tree)
    return tree


def _check(tree: Mapping[str, Any]) -> None:
    """Refuse what lies too deep, as dotted keys in each other may, and integers of more than 64 bits."""
    waiting: list[tuple[str, Any, int]] = [("", tree, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise ValueError(TOO_DEEP)
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            text = str(value)
            shown = text if len(text) <= 20 else f"{text[:20]}..."
            raise LargeInteger(f"{name} must be an integer between -2^63 and 2^63, got {shown}")
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{key}" if name else key, inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(name, inner, depth + 1) for inner in value]


def merge(base: Mapping[str, Any], over: Mapping[str, Any], layers: bool = True) -> dict[str, Any]:
    """`over` laid over `base`, table by table. A `neuron` table with a `name` replaces the base's table whole, because one
    neuron's options mean nothing to another.

    layers: False if both are parts of one layer, such as the assignments of one command line, which all count.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        replaces = layers and key == "neuron" and isinstance(value, Mapping) and "name" in value
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        if not layers and key in merged and isinstance(old, Mapping) != isinstance(value, Mapping):
            raise ConfigError(f"{key} is given both as a table and as a value: leave one of them out")
        merged[key] = merge(old, value, layers) if both and not replaces else value  # type: ignore[arg-type]
    return merged


def overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """`["train.epochs=3", "model.id=resnet8w16"]` as a tree. Values are TOML; a bare word is a string."""
    tree: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(f"{assignment!r} must have the form key=value, such as train.epochs=3")
        try:
            leaf: Any = parsed(f"value = {text}")["value"] if is_value(text) else text
        except LargeInteger as error:
            raise ConfigError(f"{key.strip()}{str(error).removeprefix('value')}") from error
        for name in reversed(names):
            leaf = {name: leaf}
        tree = merge(tree, leaf, layers=False)
    return tree


def is_value(text: str) -> bool:
    """Whether a text is a TOML value; otherwise it is a bare word, or nothing."""
    try:
        return list(parsed(f"value = {text}")) == ["value"]  # several lines give several keys
    except ValueError as error:
        return isinstance(error, LargeInteger)


def assignment(key: str, text: str) -> str:
    """The assignment that `overrides` reads as this text: quoted if it would be another value."""
    return f"{key}={_value(text) if is_value(text) else text}"


def write(tree: Mapping[str, Any]) -> str:
    """A mapping of scalars, lists of scalars and tables of those as TOML that `tomllib` reads back equal."""
    lines: list[str] = []

    def table(entries: Mapping[str, Any], path: tuple[str, ...]) -> None:
        nested = {k: v for k, v in entries.items() if isinstance(v, Mapping)}
        if path:
            lines.extend([""] * bool(lines) + [f"[{'.'.join(map(_key, path))}]"])
        lines.extend(f"{_key(k)} = {_value(v)}" for k, v in entries.items() if k not in nested)
        for key, value in nested.items():
            table(value, (*path, key))

    table(tree, ())
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        if re.search(r"[\ud800-\udfff]", value):  # how Python shows bytes of a path that are not UTF-8
            raise ConfigError(f"{value!a} cannot be written as TOML, it is not UTF-8: use a path whose name is")
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(v) for v in value)}]"
    raise ConfigError(f"{value!r} has no TOML form")
