"""The ends of titles that tell runs apart: the settings in which they differ."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lbq.config import recipe
from lbq.results.result import SUFFIX_LETTERS, Result

SHOWN_FACTS = ("dataset", "model", "timesteps", "n_max", "epochs")  # that tables and figures show beside a name
MOST_SETTINGS, LONGEST_SUFFIX = 2, 48  # settings that a title names, and their letters


def tell_apart(results: Iterable[Result]) -> None:
    """End the titles of runs that look the same, though their configurations differ, in the settings that differ; where these
    are many or none, in a part of a hash.

    Unfinished runs are apart: they have a table of their own, and do not know their split.
    """
    alike = defaultdict(list)
    for result in results:
        alike[result.finished, result.name, *(result.record.get(key) for key in SHOWN_FACTS)].append(result)
    for some in alike.values():
        if len(keys := {result.key for result in some}) > 1:
            settings = _differing([result.record["config"] for result in some])
            distinct = len(set(settings)) == len(keys) and max(map(len, settings)) <= LONGEST_SUFFIX
            for result, text in zip(some, settings, strict=True):
                result.suffix = f", {text}" if distinct else f" #{result.key[:SUFFIX_LETTERS]}"


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each configuration, the settings that are not the same in all. Of an analysis alone none are known."""
    flat = [_flat(recipe(config)) for config in configs]
    names = sorted({name for one in flat for name in one} - {"analysis"})
    other = [name for name in names if len({json.dumps(one.get(name)) for one in flat}) > 1]
    if len(other) > MOST_SETTINGS:
        return [""] * len(configs)
    return [", ".join(f"{name}={_shown(one.get(name))}" for name in other) for one in flat]


def _flat(config: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{lead}{key}.") if isinstance(value, Mapping) else {lead + key: value}
    return flat


def _shown(value: object) -> str:
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
