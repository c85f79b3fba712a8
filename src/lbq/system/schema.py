"""Checks a JSON value against a schema, once, when a file is read. No torch.

`problem` compares a JSON value with a schema and says in words which field is wrong and what it should be. A schema is a
`Kind` of plain value, or is made of others: `Fields` (an object with known keys), `Values` (an object with any keys),
`Items` (a list), `Maybe` (or null). Keys that a schema does not know are passed over: a newer file may say more.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A value for which `holds` is true; `expected` completes "must be ..."."""

    expected: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Fields:
    """An object with all the needed keys, and any of the optional ones. Other keys are passed over."""

    needed: Mapping[str, Schema] = field(default_factory=dict)
    optional: Mapping[str, Schema] = field(default_factory=dict)


@dataclass(frozen=True)
class Values:
    """An object whose values are all alike, whatever its keys are."""

    of: Schema


@dataclass(frozen=True)
class Items:
    """A list whose items are all alike, `least` of them or more."""

    of: Schema
    least: int = 0


@dataclass(frozen=True)
class Maybe:
    """The same, or null."""

    of: Schema


Schema = Kind | Fields | Values | Items | Maybe


def problem(value: Any, schema: Schema, where: str = "") -> str | None:
    """`"log[3].loss must be a number, not 'x'"`, or None where everything is as it should be."""
    if isinstance(schema, Maybe):
        return None if value is None else problem(value, schema.of, where)
    if isinstance(schema, Kind):
        return None if schema.holds(value) else _wrong(value, schema.expected, where)
    if isinstance(schema, Items):
        if not isinstance(value, list | tuple) or len(value) < schema.least:
            return _wrong(value, "a list" + " that is not empty" * bool(schema.least), where)
        parts = [(f"{where}[{i}]", item, schema.of) for i, item in enumerate(value)]
    else:
        if not isinstance(value, dict):
            return _wrong(value, "an object", where)
        if odd := next((key for key in value if not _text(key)), None):
            return f"{where or 'it'} has the key {odd[:40]!a}, which has control characters"
        known: Mapping[str, Schema]
        if isinstance(schema, Values):
            known = dict.fromkeys(value, schema.of)
        else:
            known = {**schema.needed, **schema.optional}
            missing = next((key for key in schema.needed if key not in value), None)
            if missing is not None:
                return f"{_inside(where, missing)} is missing"
        parts = [(_inside(where, key), value[key], of) for key, of in known.items() if key in value]
    return next((wrong for place, part, of in parts if (wrong := problem(part, of, place))), None)


def _inside(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _wrong(value: Any, expected: str, where: str) -> str:
    shown = repr(value)
    return f"{where or 'it'} must be {expected}, not {shown if len(shown) <= 40 else shown[:37] + '...'}"


def _number(low: float = -math.inf, high: float = math.inf) -> Callable[[Any], bool]:
    low, high = max(low, -sys.float_info.max), min(high, sys.float_info.max)  # an integer may lie beyond all floats

    def holds(value: Any) -> bool:
        return type(value) in (int, float) and low <= value <= high

    return holds


def whole(low: int, high: int = 2**63 - 1) -> Callable[[Any], bool]:
    """Whether a value is a whole number from `low` to `high`, by default all that 64 bits hold."""
    return lambda value: type(value) is int and low <= value <= high


def _text(value: Any) -> bool:
    """That can be written anywhere: whole characters, none that control a terminal or end a line."""
    return isinstance(value, str) and re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", value) is None


TEXT = Kind("a text without control characters", _text)
LEVELS = Kind("a whole number from 1 to 2^20", whole(1, 2**20))
BITS = Kind("a whole number from 0 to 22", whole(0, 22))  # of a level and its sign
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a number", _number())
AMOUNT = Kind("a number, not negative", _number(0))
ABOVE = Kind("a number above 0", _number(math.ulp(0.0)))
PLACE = Kind("a number from 0 to 2^53", _number(0, 2**53))  # whose bins can be counted
PERCENT = Kind("a number from 0 to 100", _number(0, 100))
COUNT = Kind("a whole number, not negative", whole(0))
TALLY = Kind("a whole number, not negative", whole(0, 2**53 - 1))  # which add up
POSITIVE = Kind("a whole number above 0", whole(1))
INTEGER = Kind("a whole number", whole(-(2**63)))
