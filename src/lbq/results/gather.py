"""Read the records, run folders, deployed networks, analyses and benchmarks that a user names, and check them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lbq import engine
from lbq.counting import analysis as analyze
from lbq.counting.analysis import Analysis
from lbq.engine.file.artefact import fingerprint
from lbq.engine.published import is_deployed, resolve
from lbq.errors import LbqError, RunError
from lbq.results import suffixes
from lbq.results.result import Gathered, Result
from lbq.results.schemas import FINISHED, INTEGER_RECORD, RECORD
from lbq.system import files
from lbq.system.schema import problem

ARCHIVE = "model.lbq"
ANALYSIS, ACCOUNT = "analysis.json", "account.json"  # of lbq analyze and lbq account, in RUN/analysis or MODEL.analysis
ARCHIVE_ANALYSIS = Path(ARCHIVE).with_suffix(".analysis") / ANALYSIS
CONVERSION = "conversion.json"  # in a folder that `lbq convert` wrote


def gather(paths: Sequence[Path | str], read_run: Callable[[Path], dict[str, Any]] | None = None) -> Gathered:
    """Read everything at these paths. A folder may be a run, or hold runs and records. What `lbq analyze` and `lbq account`
    wrote is looked for: in a run folder, else beside it; beside a model.lbq; beside a record, as NAME_analysis.json.

    Of run folders with the same weights, as where a setting changed nothing, the first is taken. read_run: from a run
    folder to its record, as `lbq.runs.records.read` does; it alone needs torch.
    """
    gathered = Gathered()
    analyses: list[tuple[Analysis, str]] = []
    integers: list[tuple[dict[str, Any], Path]] = []
    folders: dict[tuple[object, ...], Path] = {}
    for path in dict.fromkeys(inner for named in paths for inner in _expanded(Path(named))):
        if not gathered.twins.keys().isdisjoint(path.parents):
            continue
        if path.is_dir():
            if read_run is None:
                raise LbqError(f"{path} is a run folder: make a record of it with lbq record")
            _add_run(gathered, path, _checked(read_run(path), str(path)), folders)
        elif path.suffix == ".lbq":
            gathered.artefacts.append(path)
        elif (value := files.json_of(path, RunError)).get("format") == analyze.FORMAT:
            analysis = Analysis.from_dict(value, str(path))
            _refuse_stale(analysis, path, gathered)
            analyses.append((analysis, str(path)))
        elif isinstance(value.get("of"), str):
            integers.append((value, path))
        elif "sweeps" in value:
            gathered.benchmarks.append(value)
        else:
            gathered.results.append(_record(value, path))
    for analysis, source in analyses:
        _attach(gathered.results, analysis, source)
    for value, path in integers:
        _owner_of(value, path, gathered.results).integer = value
    _refuse_twins(gathered.results)
    suffixes.tell_data_apart(gathered.results)
    suffixes.tell_apart(gathered.results)  # before repeats are numbered, whose keys are their own
    _number_repeats(gathered.finished)
    if not (gathered.results or gathered.artefacts or gathered.benchmarks):
        raise LbqError("nothing to report: give records, run folders, model.lbq files or analyses")
    return gathered


def _add_run(gathered: Gathered, path: Path, result: Result, folders: dict[tuple[object, ...], Path]) -> None:
    """Add a run folder's result and its deployed network, unless another folder holds the same. folders: by network."""
    if (network := _network(result)) and folders.setdefault(network, path) != path:
        gathered.twins[path] = folders[network]
        return
    gathered.results.append(result)
    if (path / ARCHIVE).is_file():
        gathered.artefacts.append(path / ARCHIVE)


def _refuse_stale(analysis: Analysis, path: Path, before: Gathered) -> None:
    """An analysis inside a run folder must be of the run's weights, one beside a deployed network of that network."""
    run, model = path.parents[1], before.artefacts[-1] if before.artefacts else None
    if before.results and Path(before.results[-1].source) == run:
        if _of_other_weights(analysis, before.results[-1].record):
            raise LbqError(f"{path} is of other weights than {run} holds: deploy the run and analyse it again")
    elif model is not None and model.with_suffix(".analysis") == path.parent:
        network = engine.load(model).network
        deployed = {"timesteps": network.timesteps, "bits": network.facts.get("bits")}
        ours = {**network.facts, **deployed, "network_sha256": fingerprint(network)}
        if _of_other_weights(analysis, ours) or not _same_deployment(analysis.facts, ours):
            raise LbqError(f"{path} is of another network than {model} holds: run lbq analyze on it again")


def _of_other_weights(analysis: Analysis, record: Mapping[str, Any]) -> bool:
    """Whether both name their weights, and not the same ones."""
    theirs, ours = analysis.facts.get("weights_sha256"), record.get("weights_sha256")
    return bool(theirs and ours and theirs != ours)


def _same_deployment(some: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two files are of one deployed network, as far as both say it. An older analysis does not name its network."""
    key = ("network_sha256",) if some.get("network_sha256") and other.get("network_sha256") else ("timesteps", "bits")
    return all(some[name] == other[name] for name in key if some.get(name) and other.get(name))


def _number_repeats(results: Iterable[Result]) -> None:
    """Number the runs of one configuration and seed."""
    times = Counter[tuple[str, int]]()
    for result in results:
        run = result.key, result.record["seed"]
        times[run] += 1
        result.repeat = times[run]


def _expanded(path: Path) -> Iterable[Path]:
    """The path itself, or what a folder that is no run holds: runs, deployed networks, and records in JSON."""
    if is_deployed(path):  # by its name, or in a folder for a hub
        path = resolve(path) if path.suffix not in (".json", ".lbq") else path
    if not path.exists():
        raise LbqError(f"{path} does not exist: give a record, a run folder, a model.lbq or an analysis")
    files.refuse_pipe(path)
    if path.is_file():
        if path.suffix not in (".json", ".lbq"):
            raise LbqError(
                f"{path} is neither a record or analysis (.json) nor a deployed network (.lbq): "
                "give one of these, or a run folder"
            )
        return [path, *_written(path)]
    if (path / "config.toml").exists():
        return [path, *_written(path)]
    inside = sorted(p for p in path.iterdir() if p.suffix in (".json", ".lbq") or _is_run(p))
    if not inside:
        raise LbqError(
            f"{path} holds no runs, no records and no deployed networks: give a run folder, or a folder of these"
        )
    return [nested for p in inside for nested in (p, *_written(p))]


def _is_run(path: Path) -> bool:
    """Whether a folder is a run that has, or will have, a result. A converted network has none."""
    return (path / "config.toml").exists() and not (path / CONVERSION).exists()


def _written(path: Path) -> Iterable[Path]:
    """What was written about a run, a deployed network or a record, and the demo's baselines in a run folder.

    An analysis of a run as trained is a part of its record. Folders beside a run are looked at if it holds nothing itself.
    """
    names = (ANALYSIS, ACCOUNT)
    if path.is_file():
        folder = path.with_suffix(".analysis")
        files = [folder / name for name in names if path.suffix == ".lbq"]
        return [p for p in (*files, path.with_name(f"{path.stem}_{ANALYSIS}")) if p.is_file()]
    folders = [path / "analysis", *sorted(path.glob("*.analysis"))]
    inside = [p for folder in folders for name in names if (p := folder / name).is_file()]
    beside = [] if inside else [p for name in names for p in sorted(path.parent.glob(f"*/{name}")) if _is_of(p, path)]
    baselines = sorted(p.parent for p in path.glob("baselines/*/config.toml"))
    return [*(p for p in inside if p != folders[0] / ANALYSIS), *beside, *baselines]


def _is_of(analysis: Path, run: Path) -> bool:
    """Whether both files name the same weights. What cannot be read is of none."""
    with suppress(RunError, AttributeError, KeyError):
        theirs = (
            files.json_of(analysis, RunError)["facts"].get("weights_sha256")
            if (run / "result.json").is_file()
            else None
        )
        return bool(theirs) and theirs == files.json_of(run / "result.json", RunError).get("weights_sha256")
    return False


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
    """A result whose record holds what the rest of the program relies on."""
    wrong = problem(record, RECORD)
    if wrong is None and not record.get("unfinished"):
        wrong = problem(record, FINISHED)
    if wrong is not None:
        raise LbqError(f"{source} is damaged: {wrong}; restore it, or make it again with lbq record RUN")
    stored = record.get("analysis")
    analyses = [Analysis.from_dict(stored, f"{source}: analysis")] if stored else []
    if any(_of_other_weights(analysis, record) for analysis in analyses):
        raise LbqError(f"{source}: its analysis is of other weights: make it again with lbq analyze and lbq record")
    return Result(record, source, analyses)


def _attach(results: list[Result], analysis: Analysis, source: str) -> None:
    """Give an analysis to its run; without one, it stands for itself.

    Its run has its weights or, where a file does not name these, its configuration. A network deployed over other timesteps
    than it was trained with is another, called after its run; so is a second one, as with other bits.
    """
    facts, trained = analysis.facts, None
    if analysis.golden:
        raise LbqError(
            f"{source} is of {analysis.images} golden inputs, not of a test set: make it again with "
            "lbq analyze model.lbq --data FOLDER"
        )
    for owner in reversed(results):
        record = owner.record
        deployed = [a for a in owner.analyses if a.deployed and analysis.deployed]
        if weights := facts.get("weights_sha256"):
            same = record.get("weights_sha256") == weights
        elif owner.alone:
            same = bool(own := facts.get("network_sha256")) and any(
                a.facts.get("network_sha256") == own for a in deployed
            )
        else:
            same = record["config_hash"] == facts.get("config_hash")
        fits = all(_same_deployment(facts, a.facts) for a in deployed)
        if same and fits and facts.get("timesteps", record["timesteps"]) == record["timesteps"]:
            owner.analyses.append(analysis)
            if owner.alone and owner.accuracy is None:
                record["test_accuracy"] = _float_accuracy(analysis)
            return
        if same and not owner.alone:
            trained = owner
    results.append(_standing_alone(analysis, source, trained))


def _owner_of(value: Mapping[str, Any], path: Path, results: Iterable[Result]) -> Result:
    """The run whose integer network the record in `path` describes."""
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


def _standing_alone(analysis: Analysis, source: str, trained: Result | None) -> Result:
    """A result made of an analysis alone. A deployed network is called after its file, and so are its images and its
    model where it does not name them; after its run where that was trained over other timesteps."""
    facts = analysis.facts
    if trained is not None:
        of_run = {key: value for key, value in trained.record.items() if key in ("variant", "n_max", "epochs", "seed")}
        timesteps, trained_over = facts.get("timesteps"), trained.record["timesteps"]
        other = f"over T = {timesteps} (trained over {trained_over})" if timesteps != trained_over else ""
        facts = {**facts, **of_run, "name": f"{trained.name}, {other or _bits(facts)}"}
    own_name = (
        {"name": facts["name"]} if facts.get("kind") == "artefact" and facts.get("name") and facts.get("model") else {}
    )
    record: dict[str, Any] = {
        **own_name,
        "dataset": facts.get("dataset") or facts.get("data") or "?",
        "model": facts.get("model") or facts.get("name") or "?",
        "variant": facts.get("variant", "?"),
        "n_max": facts.get("n_max", max((layer.n_max for layer in analysis.layers), default=0)),
        **{key: facts.get(key, 0) for key in ("timesteps", "epochs", "seed")},
        **{key: facts.get(key, "") for key in ("config_hash", "weights_sha256")},
        "config": {"analysis": source},
        "log": [],
        "test_accuracy": _float_accuracy(analysis),
        "steps": analysis.steps,
        **{key: facts[key] for key in ("step", "surrogate", "step_gradient") if key in facts},
    }
    return Result(record, source, [analysis])


def _bits(facts: Mapping[str, Any]) -> str:
    return "deployed again" if facts.get("bits") is None else f"{facts['bits']} bits"


def _float_accuracy(analysis: Analysis) -> float | None:
    return analysis.accuracy if analysis.complete and not analysis.deployed else None


def _refuse_twins(results: Sequence[Result]) -> None:
    """Refuse a run that is named twice: it would count twice in a mean."""
    seen: dict[tuple[object, ...], str] = {}
    for result in results:
        if network := _network(result):
            if network in seen:
                raise LbqError(f"{result.source} and {seen[network]} are the same run: give it once")
            seen[network] = result.source


def _network(result: Result) -> tuple[object, ...] | None:
    """Weights, timesteps and what came of them, which no two finished runs share; None where weights are not known. Of one
    that only an analysis is left of, what was deployed too."""
    record = result.record
    if not (result.finished and record.get("weights_sha256")):
        return None
    facts = result.analyses[0].facts if result.alone else {}
    keys = ("weights_sha256", "timesteps", "test_accuracy", "holdout_accuracy", "data_sha256")
    return *map(record.get, keys), facts.get("network_sha256"), facts.get("bits")
