"""What records and analyses must hold, checked once, when they are read. No torch.

`problem` compares a JSON value with a schema and says in words which field is wrong and what it should be. A schema is a
`Kind` of plain value, or is made of others: `Fields` (an object with known keys), `Values` (an object with any keys),
`Items` (a list), `Maybe` (or null). Keys that a schema does not know are passed over: a newer file may say more.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lbq.counting.operations import Count, LayerActivity


@dataclass(frozen=True)
class Kind:
    expected: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Fields:
    needed: Mapping[str, Schema] = field(default_factory=dict)
    optional: Mapping[str, Schema] = field(default_factory=dict)


@dataclass(frozen=True)
class Values:
    of: Schema


@dataclass(frozen=True)
class Items:
    of: Schema
    least: int = 0


@dataclass(frozen=True)
class Maybe:
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
    return next((found for place, part, of in parts if (found := problem(part, of, place))), None)


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


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value < 2**63


def _text(value: Any) -> bool:
    """That can be written anywhere: whole characters, none that control a terminal or end a line."""
    return isinstance(value, str) and re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", value) is None


TEXT = Kind("a text without control characters", _text)
LEVELS = Kind("a whole number from 1 to 2^20", lambda value: type(value) is int and 0 < value <= 2**20)
# of a level and its sign
BITS = Kind("a whole number from 0 to 22", lambda value: type(value) is int and 0 <= value <= 22)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a number", _number())
AMOUNT = Kind("a number, not negative", _number(0))
ABOVE = Kind("a number above 0", _number(math.ulp(0.0)))
PLACE = Kind("a number from 0 to 2^53", _number(0, 2**53))  # whose bins can be counted
PERCENT = Kind("a number from 0 to 100", _number(0, 100))
COUNT = Kind("a whole number, not negative", _whole(0))
TALLY = Kind("a whole number, not negative", lambda value: type(value) is int and 0 <= value < 2**53)  # which add up
POSITIVE = Kind("a whole number above 0", _whole(1))
INTEGER = Kind("a whole number", _whole(-(2**63)))

# Records
# ---------------------------------------------------------------------------------------------------------------------

EPOCH = Fields(
    {"epoch": COUNT, "loss": Maybe(NUMBER)},
    dict.fromkeys(
        ("train_accuracy", "test_accuracy", "holdout_accuracy", "lr", "seconds", "step_min", "step_max"),
        Maybe(NUMBER),
    ),
)
RECORD = Fields(
    {
        **dict.fromkeys(("dataset", "model", "variant", "config_hash"), TEXT),
        "n_max": COUNT,
        "timesteps": POSITIVE,
        "epochs": COUNT,
        "seed": COUNT,
        "config": Fields(
            optional={
                **dict.fromkeys(("model", "data", "augment", "optim", "train", "neuron"), Fields()),
            }
        ),
        "log": Items(EPOCH),
    },
    {
        **dict.fromkeys(
            (
                "name",
                "step",
                "surrogate",
                "step_gradient",
                "split",
                "weights_sha256",
                "init_sha256",
                "hardware",
                "commit",
                "earlier",
            ),
            TEXT,
        ),
        **dict.fromkeys(("steps", "active"), Maybe(Values(NUMBER))),
        **dict.fromkeys(("train_loss", "wall_seconds", "lr"), Maybe(NUMBER)),
        **dict.fromkeys(("holdout_accuracy", "accuracy_as_trained"), Maybe(PERCENT)),
        "tested_in": Maybe(TEXT),
        "batch_size": Maybe(POSITIVE),
        "versions": Values(TEXT),
        "unfinished": FLAG,
        "static": FLAG,
        "epochs_done": COUNT,
    },
)
INPUTS = Fields(
    {
        "name": TEXT,
        "shape": Kind(
            "three whole numbers above 0", lambda v: isinstance(v, list) and len(v) == 3 and all(map(_whole(1), v))
        ),
        "static": FLAG,
        "classes": Items(TEXT),
        "mean": Items(NUMBER),
        "std": Items(ABOVE),
        "scale": POSITIVE,
    }
)
# of a run; what training wrote has the first two, and no accuracy where it was not tested
RESULT = Fields(
    optional={"accuracy": Maybe(PERCENT), "epoch": COUNT, "inputs": INPUTS, "weights_sha256": TEXT, "config_hash": TEXT}
)
TRAINED = Fields(
    {"accuracy": Maybe(PERCENT), "epoch": COUNT}, {"inputs": INPUTS, "weights_sha256": TEXT, "config_hash": TEXT}
)
FINISHED = Fields({"test_accuracy": Maybe(PERCENT)})  # null where it was not tested; an unfinished one has none
INTEGER_RECORD = Fields({"of": TEXT, "test_accuracy": PERCENT})

# Analyses
# ---------------------------------------------------------------------------------------------------------------------

COUNTS = Fields({f.name: AMOUNT for f in fields(Count)})
ACCOUNT = Fields(
    {
        "fp_macs": ABOVE,
        "ann_macs": ABOVE,
        "pool_adds": AMOUNT,
        "unit_events": FLAG,
        "timesteps": POSITIVE,
        "neurons": COUNT,
        "n_max": LEVELS,
        "outputs": COUNT,
        "layers": Values(Fields({f.name: AMOUNT for f in fields(LayerActivity)})),
        "formations": Values(AMOUNT),
        **dict.fromkeys(("synapses", "shortcuts", "stem"), Values(COUNTS)),
    },
    {"frames": POSITIVE, "level_bits": BITS, "horner": AMOUNT},  # which older files lack
)
LAYER = Fields(
    {
        "name": TEXT,
        "shape": Items(POSITIVE),
        "n_max": LEVELS,
        "step": Maybe(NUMBER),
        "step_range": Maybe(Items(NUMBER, 2)),
        "tail": Maybe(NUMBER),
        "levels": Items(Items(TALLY, 2), 1),
        "membrane": Maybe(Fields({"counts": Items(Items(TALLY, 1), 1), "thresholds": Items(PLACE, 1)})),
    }
)
TRACE = Fields(
    {
        "layer": TEXT,
        "unit": COUNT,
        "n_max": LEVELS,
        "step": ABOVE,
        **dict.fromkeys(("leak", "alpha"), NUMBER),
        **dict.fromkeys(("current", "before", "after"), Items(NUMBER, 1)),
        "levels": Items(INTEGER, 1),
    }
)
ANALYSIS = Fields(
    {
        "images": POSITIVE,
        "complete": FLAG,
        "accuracy": Maybe(PERCENT),
        "facts": Fields(
            optional={
                **dict.fromkeys(("name", "dataset", "model", "variant", "config_hash", "weights_sha256"), TEXT),
                **dict.fromkeys(("timesteps", "n_max", "epochs", "seed"), COUNT),
            }
        ),
        "layers": Items(LAYER),
        "accounts": Fields(optional={"exact": ACCOUNT, "rate": ACCOUNT}),
        "traces": Items(TRACE),
    }
)
