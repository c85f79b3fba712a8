"""From what a user names (records, run folders, deployed networks, analyses, benchmarks) to the results in it, checked."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lbq.counting import analysis as analyze
from lbq.counting.analysis import Analysis
from lbq.errors import LbqError, RunError
from lbq.results.result import SUFFIX_LETTERS, Gathered, Result
from lbq.results.schemas import FINISHED, INTEGER_RECORD, RECORD
from lbq.system.schema import problem

ARCHIVE = "model.lbq"
ARCHIVE_ANALYSIS = Path(ARCHIVE).with_suffix(".analysis") / "analysis.json"  # where lbq analyze puts it
SHOWN = ("dataset", "model", "timesteps", "n_max", "epochs")  # what tables and figures say beside a name
CONVERSION = "conversion.json"  # of a folder that `lbq convert` wrote: what its network was made of


def gather(paths: Sequence[Path | str], read_run: Callable[[Path], dict[str, Any]] | None = None) -> Gathered:
    """Read everything that is named. A folder may be a run, or hold runs and records. Of runs that have the same weights, as
    where a setting was varied that changed nothing, the first is taken.

    read_run: from a run folder to its record, as `lbq.runs.records.read` does; it needs torch, and nothing else here does.
    """
    found = Gathered()
    analyses: list[tuple[Analysis, str]] = []
    integers: list[tuple[dict[str, Any], Path]] = []
    folders: dict[tuple[str, int], Path] = {}
    for path in dict.fromkeys(p for given in paths for p in _expanded(Path(given))):
        if not found.twins.keys().isdisjoint(path.parents):
            continue
        if path.is_dir():
            if read_run is None:
                raise LbqError(f"{path} is a run folder: make a record of it with lbq record")
            result = _checked(read_run(path), str(path))
            if (network := _network(result)) and folders.setdefault(network, path) != path:
                found.twins[path] = folders[network]
                continue
            found.results.append(result)
            if (path / ARCHIVE).is_file():
                found.artefacts.append(path / ARCHIVE)
        elif path.suffix == ".lbq":
            found.artefacts.append(path)
        else:
            value = read_json(path)
            if value.get("format") == analyze.FORMAT:
                analyses.append((Analysis.from_dict(value, str(path)), str(path)))
                _refuse_stale(analyses[-1][0], path, found.results)
            elif isinstance(value.get("of"), str):
                integers.append((value, path))
            elif "sweeps" in value:
                found.benchmarks.append(value)
            else:
                found.results.append(_record(value, path))
    _attach(found, analyses)
    for value, path in integers:
        _owner_of(value, path, found.results).integer = value
    _refuse_twins(found.results)
    _tell_apart(found.results)  # before repeats are numbered, whose keys are their own
    _number_repeats(found.finished)
    if not (found.results or found.artefacts or found.benchmarks):
        raise LbqError("nothing to report: give records, run folders, model.lbq files or analyses")
    return found


def _refuse_stale(analysis: Analysis, path: Path, before: Sequence[Result]) -> None:
    """What lies in a run folder as the analysis of its deployed network must be of its weights."""
    if not before or path != Path(before[-1].source) / ARCHIVE_ANALYSIS:
        return
    if _of_other_weights(analysis, before[-1].record):
        raise LbqError(f"{path} is of other weights than {path.parents[1]} holds: deploy the run and analyse it again")


def _of_other_weights(analysis: Analysis, record: Mapping[str, Any]) -> bool:
    """Whether both name their weights, and not the same ones."""
    theirs, ours = analysis.facts.get("weights_sha256"), record.get("weights_sha256")
    return bool(theirs and ours and theirs != ours)


def _tell_apart(results: Iterable[Result]) -> None:
    """Have the titles of runs that would look the same, though their configurations differ, end in a part of a hash. Those
    that are not finished have a table of their own, and do not know their split."""
    alike = defaultdict(list)
    for result in results:
        alike[result.finished, result.name, *(result.record.get(key) for key in SHOWN)].append(result)
    for some in alike.values():
        if len({result.key for result in some}) > 1:
            for result in some:
                result.suffix = result.key[:SUFFIX_LETTERS]


def _number_repeats(results: Iterable[Result]) -> None:
    """Which of the runs with its configuration and seed each is."""
    times = Counter[tuple[str, int]]()
    for result in results:
        run = result.key, result.record["seed"]
        times[run] += 1
        result.repeat = times[run]


def _expanded(path: Path) -> Iterable[Path]:
    """The path itself, or what a folder that is no run holds: runs, and records in JSON."""
    if not path.exists():
        raise LbqError(f"{path} does not exist: give a record, a run folder, a model.lbq or an analysis")
    if path.is_file():
        if path.suffix not in (".json", ".lbq"):
            raise LbqError(f"{path} is neither a record or analysis (.json) nor a deployed network (.lbq)")
        return [path]
    if (path / "config.toml").exists():
        return [path, *_beside(path)]
    inside = sorted(p for p in path.iterdir() if p.suffix == ".json" or _is_run(p))
    if not inside:
        raise LbqError(f"{path} holds no runs and no records: give a run folder, or a folder of records")
    return [found for p in inside for found in (p, *_beside(p))]


def _is_run(path: Path) -> bool:
    """Whether a folder is a run that has, or will have, a result; a converted network has none."""
    return (path / "config.toml").exists() and not (path / CONVERSION).exists()


def _beside(run: Path) -> Iterable[Path]:
    """What else lies in a run folder: the analysis of its deployed network, and the demo's baselines."""
    analysis = run / ARCHIVE_ANALYSIS
    baselines = run / "baselines"
    inside = sorted(p for p in baselines.iterdir() if (p / "config.toml").exists()) if baselines.is_dir() else []
    return [*([analysis] if analysis.is_file() else []), *inside]


def read_json(path: Path, remedy: str = "restore it, or make it again") -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read as JSON: {' '.join(str(error).split())[:100]}; {remedy}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} must hold a JSON object: a record or an analysis; {remedy}")
    return value


def _record(value: dict[str, Any], path: Path) -> Result:
    if value.get("format", "lbq record") != "lbq record" or value.get("version", 1) != 1:
        raise LbqError(
            f"{path} is {value.get('format')!r}, version {value.get('version')!r}: not a record of version 1; make it again "
            "with lbq record RUN, or use the lbq that wrote it"
        )
    missing = [key for key in RECORD.needed if key not in value]
    if missing:
        raise LbqError(f"{path} is not a record of lbq: {', '.join(missing)} missing; make one with lbq record RUN")
    return _checked(value, str(path))


def _checked(record: dict[str, Any], source: str) -> Result:
    """A result whose record holds what the rest of the program takes for granted."""
    wrong = problem(record, RECORD)
    if wrong is None and not record.get("unfinished"):
        wrong = problem(record, FINISHED)
    if wrong is not None:
        raise LbqError(f"{source} is damaged: {wrong}; restore it, or make it again with lbq record RUN")
    held = record.get("analysis")
    analyses = [Analysis.from_dict(held, f"{source}: analysis")] if held else []
    if any(_of_other_weights(analysis, record) for analysis in analyses):
        raise LbqError(f"{source}: its analysis is of other weights: make it again with lbq analyze and lbq record")
    return Result(record, source, analyses)


def _attach(found: Gathered, analyses: list[tuple[Analysis, str]]) -> None:
    """Give every analysis to its run; one without a run stands for itself."""

    def owner_of(facts: Mapping[str, Any]) -> Result | None:
        """By its weights; a file that does not name them (or an older one) by the configuration of a run. One that was deployed
        over other timesteps is no other form of the network that was trained."""
        weights, config = facts.get("weights_sha256"), facts.get("config_hash")
        alike = [
            r
            for r in reversed(found.results)
            if (
                r.record.get("weights_sha256") == weights
                if weights
                else r.record["config_hash"] == config and not r.alone
            )
        ]
        return next((r for r in alike if facts.get("timesteps", r.record["timesteps"]) == r.record["timesteps"]), None)

    for analysis, source in analyses:
        if analysis.golden:
            raise LbqError(
                f"{source} is of {analysis.images} golden inputs, not of a test set: make it again with "
                "lbq analyze model.lbq --data FOLDER"
            )
        owner = owner_of(analysis.facts)
        if owner is None:
            owner = _standing_alone(analysis, source)
            found.results.append(owner)
        else:
            owner.analyses.append(analysis)
            if owner.alone and owner.accuracy is None:
                owner.record["test_accuracy"] = _float_accuracy(analysis)


def _owner_of(value: Mapping[str, Any], path: Path, results: Iterable[Result]) -> Result:
    """Whose integer network a record in `path` is of."""
    named = [r for r in results if Path(r.source).name == value["of"]]
    owners = [r for r in named if Path(r.source).parent == path.parent] or named
    if not owners:
        raise LbqError(f"{path} is of the integer network of {value['of']}: give that record too")
    if len(owners) > 1:
        raise LbqError(
            f"{path} is of {value['of']}, and there are {len(owners)} of that name: put it beside its record"
        )
    if (wrong := problem(value, INTEGER_RECORD)) is not None:
        raise LbqError(f"{path} is damaged: {wrong}; restore it")
    return owners[0]


def _standing_alone(analysis: Analysis, source: str) -> Result:
    """A result of which only an analysis is left: no log, no configuration beyond its facts. A deployed network that names
    neither dataset nor model, as one of a user's own, is called after its files."""
    facts = analysis.facts
    record: dict[str, Any] = {
        "dataset": facts.get("dataset") or facts.get("data") or "?",
        "model": facts.get("model") or facts.get("name") or "?",
        "variant": facts.get("variant", "?"),
        "n_max": facts.get("n_max", max((layer.n_max for layer in analysis.layers), default=0)),
        "timesteps": facts.get("timesteps", 0),
        "epochs": facts.get("epochs", 0),
        "seed": facts.get("seed", 0),
        "config_hash": facts.get("config_hash", ""),
        "weights_sha256": facts.get("weights_sha256", ""),
        "config": {"analysis": source},
        "log": [],
        "test_accuracy": _float_accuracy(analysis),
        "steps": analysis.steps,
        **{key: facts[key] for key in ("step", "surrogate", "step_gradient") if key in facts},
    }
    return Result(record, source, [analysis])


def _float_accuracy(analysis: Analysis) -> float | None:
    return analysis.accuracy if analysis.complete and not analysis.deployed else None


def _refuse_twins(results: Sequence[Result]) -> None:
    """The same run given twice would count twice in a mean."""
    seen: dict[tuple[str, int], str] = {}
    for result in results:
        if network := _network(result):
            if network in seen:
                raise LbqError(f"{result.source} and {seen[network]} are the same run: give it once")
            seen[network] = result.source


def _network(result: Result) -> tuple[str, int] | None:
    """What no two finished runs have in common; None where that is not known."""
    weights = result.record.get("weights_sha256", "")
    return (weights, result.record["timesteps"]) if result.finished and weights else None
