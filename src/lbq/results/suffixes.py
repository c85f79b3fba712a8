"""The ends of titles that tell runs apart, by the settings in which they differ, and of names of datasets."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lbq.config import recipe
from lbq.data.registry import OWN_DATA
from lbq.results.result import SUFFIX_LETTERS, Result
from lbq.system import toml

SHOWN_FACTS = ("model", "timesteps", "n_max", "epochs")  # that tables and figures show beside a name and a dataset
MOST_SETTINGS, LONGEST_SUFFIX = 2, 48  # settings that a title names, and their letters


def tell_apart(results: Iterable[Result]) -> None:
    """End the titles of runs that look the same, though their configurations differ, in the settings that differ; where these
    are many or none, in a part of a hash.

    Unfinished runs are apart: they have a table of their own, and do not know their split.
    """
    alike = defaultdict(list)
    for result in results:
        facts = (result.record.get(key) for key in SHOWN_FACTS)
        alike[result.finished, result.name, result.dataset, *facts].append(result)
    for some in alike.values():
        if len(keys := {result.key for result in some}) > 1:
            settings = _differing([result.record["config"] for result in some])
            distinct = len(set(settings)) == len(keys) and max(map(len, settings)) <= LONGEST_SUFFIX
            for result, text in zip(some, settings, strict=True):
                result.suffix = f", {text}" if distinct else f" #{result.key[:SUFFIX_LETTERS]}"


def tell_data_apart(results: Iterable[Result]) -> None:
    """End the names of users' own datasets that are alike, though their data differ, in the names of the data's folders. Where
    one is not known, or two are the same, parts of hashes do it."""
    alike = defaultdict(list)
    for result in results:
        if _is_own(result.record):
            alike[str(result.record["dataset"])].append((result, _root(result)))
    for some in alike.values():
        hashes = {root: sha for r, root in some if root and (sha := r.record.get("data_sha256"))}  # for unfinished runs
        of = [str(r.record.get("data_sha256") or hashes.get(root) or "") for r, root in some]
        folders: dict[str, set[str]] = {sha: set() for sha in of if sha}
        if len(folders) < 2:
            continue
        for sha, (_, root) in zip(of, some, strict=True):
            if sha and root:
                folders[sha].add(Path(root).name)
        names = [name for known in folders.values() for name in known if name and name.isprintable()]
        one_each = all(map(folders.get, folders)) and len(set(names)) == len(names) == len(folders)
        for sha, (result, _) in zip(of, some, strict=True):
            shown = next(iter(folders[sha])) if one_each and sha else f"data {sha[:SUFFIX_LETTERS] or 'not known'}"
            result.data = f" ({shown})"


def _is_own(record: Mapping[str, Any]) -> bool:
    """Whether users name the dataset themselves. The configuration says so; that of an analysis alone is not known."""
    return record["config"].get("data", {}).get("name", record["dataset"]) in OWN_DATA


def _root(result: Result) -> str:
    """Where the data of a run folder lay; empty where that is not known, as of a record."""
    path = Path(result.source) / "config.toml"
    data = toml.read(path).get("data") if path.is_file() else None
    root = data.get("root") if isinstance(data, Mapping) else None
    return root if isinstance(root, str) else ""


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
