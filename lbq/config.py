"""One typed configuration tree, strict: an unknown key is an error that names the nearest known one. No torch.

Configurations are TOML. What a run used is saved beside its weights, resolved, so that the run can be repeated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lbq.errors import ConfigError, nearest


@dataclass(frozen=True)
class ModelConfig:
    id: str = "resnet8w16"
    num_classes: int = 10
    in_channels: int = 1
    timesteps: int = 2
    stem_stride: int = 1
    share_tail: bool = False


@dataclass(frozen=True)
class DataConfig:
    name: str = "digits"
    shift: int = 1  # random shift of training images, in pixels

    def check(self) -> None:
        _require(self.name == "digits", "data.name", "'digits'", self.name)
        _require(0 <= self.shift <= 4, "data.shift", "0 to 4 pixels", self.shift)


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 15
    batch_size: int = 64
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4  # on synaptic weights alone: never on steps, tails, leaks, BatchNorm or biases
    warmup_epochs: int = 1

    def check(self) -> None:
        _require(self.epochs >= 1, "train.epochs", ">= 1", self.epochs)
        _require(self.batch_size >= 2, "train.batch_size", ">= 2 (BatchNorm needs two samples)", self.batch_size)
        _require(self.lr > 0, "train.lr", "> 0", self.lr)
        _require(0 <= self.momentum < 1, "train.momentum", "in [0, 1)", self.momentum)
        _require(self.weight_decay >= 0, "train.weight_decay", ">= 0", self.weight_decay)
        _require(
            0 <= self.warmup_epochs < self.epochs,
            "train.warmup_epochs",
            "less than train.epochs",
            self.warmup_epochs,
        )


@dataclass(frozen=True)
class Config:
    """`neuron` holds a registry name and that neuron's own options; they are checked when the network is built."""

    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    neuron: dict[str, Any] = field(default_factory=lambda: {"name": "lbq", "n_max": 5})
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Config:
        config = _build(cls, tree, "")
        _require(0 <= config.seed < 2**63, "seed", "a non-negative integer", config.seed)
        config.data.check()
        config.train.check()
        return config

    @classmethod
    def load(cls, path: Path | str) -> Config:
        try:
            with open(path, "rb") as file:
                return cls.from_dict(tomllib.load(file))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        return to_toml(self.to_dict())

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved configuration, independent of formatting and key order."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def _require(ok: bool, key: str, expected: str, got: object) -> None:
    if not ok:
        raise ConfigError(f"{key} must be {expected}, got {got!r}")


def _build(kind: Any, tree: Any, path: str) -> Any:
    """A dataclass from a mapping, with every key and type checked."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path or 'the configuration'} must be a table, got {tree!r}")
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise ConfigError(f"unknown key {where!r}{nearest(str(key), hints)}")
        values[key] = _convert(hints[key], value, where)
    return kind(**values)


def _convert(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where)
    if isinstance(kind, types.GenericAlias):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a table, got {value!r}")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} must be {_NAMES[kind]}, got {value!r}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{where} must be finite, got {value!r}")
    return value


_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def to_toml(tree: Mapping[str, Any]) -> str:
    """A mapping of scalars, lists of scalars and tables of those as TOML that `tomllib` reads back equal."""
    lines: list[str] = []

    def write(table: Mapping[str, Any], path: tuple[str, ...]) -> None:
        nested = {k: v for k, v in table.items() if isinstance(v, Mapping)}
        if path:
            lines.extend(["", f"[{'.'.join(map(_key, path))}]"] if lines else [f"[{'.'.join(map(_key, path))}]"])
        lines.extend(f"{_key(k)} = {_scalar(v)}" for k, v in table.items() if k not in nested)
        for key, value in nested.items():
            write(value, (*path, key))

    write(tree, ())
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key) else _scalar(key)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_scalar(v) for v in value)}]"
    raise ConfigError(f"{value!r} has no TOML form")
