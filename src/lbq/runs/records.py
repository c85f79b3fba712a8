"""From a finished run to a record: one JSON file that holds everything a reader needs to believe and repeat a result.

Records live under `results/` and outlive the weights: the configuration, its hash, the seed, the log of every epoch, the
versions, the machine, and the checksum of weights and data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lbq.config import Config
from lbq.counting import analysis
from lbq.counting.analysis import Analysis
from lbq.data.registry import REGISTRY
from lbq.errors import ConfigError, RunError
from lbq.neuron.base import neurons_of
from lbq.results.result import title_of
from lbq.runs import run_folder
from lbq.runs.build import outline
from lbq.system import files

ABLATION_VARIANTS = {  # by step and surrogate, with tails or without
    ("fixed", "box"): "v1",
    ("fixed", "relsg"): "v2",
    ("learned", "box"): "v3",
    ("learned", "relsg"): "lbq",
}
FORMAT, VERSION = "lbq record", 1
ANALYSIS = Path("analysis") / "analysis.json"


def record_of(run: Path | str, note: str = "") -> dict[str, Any]:
    """The record of a finished run folder. `weights.sha256` may stand for weights that were not kept."""
    folder = run_folder.check_folder(run, "config.toml", "result.json", "metrics.jsonl")
    config, result = run_folder.load_config(folder), files.json_of(folder / "result.json", RunError)
    log = log_of(folder)
    run_folder.warn_of_other_files(folder)  # the plan below asks the network for its levels
    try:
        epoch, accuracy, last = result.get("epoch"), result["accuracy"], log[-1] if log else {}
        if log and epoch and (last["epoch"] != epoch or not _agree(last.get("test_accuracy"), accuracy)):
            raise RunError(
                f"{folder}: metrics.jsonl ends with epoch {last['epoch']} and {last.get('test_accuracy')} %, result.json "
                f"says epoch {epoch} and {accuracy} %: they are not of one training; train it again"
            )
        environment = result["environment"]
        record = {
            **_plan(config),
            "split": split_of(config, result["data"]),
            **_known(result.get("inputs") or {}, "static"),
            "test_accuracy": result["accuracy"],
            **_known(result, "holdout_accuracy", "accuracy_as_trained", "holdout_accuracy_as_trained", "tested_in"),
            **_known(result, "weight_decay"),
            "arithmetic": "float",
            "train_loss": round(result["train_loss"], 5),
            "config_hash": result["config_hash"],
            "weights_sha256": run_folder.weights_checksum(folder),
            "data_sha256": result["data"].get("sha256") or result["data"].get("labels", ""),
            "hardware": environment["machine"],
            "versions": {
                **{k: environment[k] for k in ("lbq", "python", "torch", "kernel")},
                **{k: environment[k] for k in (*run_folder.PACKAGES, "imports") if k in environment},
            },
            "commit": environment["commit"],
            **{k: result[k] for k in ("earlier", "init_sha256") if result.get(k)},
            "processes": result["processes"],
            "wall_seconds": round(result["training_seconds"]),
            "command": "lbq train CONFIG (the configuration below, with data.root set)",
            "steps": result["steps"],
            "tails": result["tails"],
            "active": result["active"],
            **_known(result, "outcomes"),
            "config": _tree(config),
            "log": log,
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{folder / 'result.json'} lacks {error}: it was written by another version of lbq, or by hand"
        ) from error
    measured = analysis_of(folder)
    return record | ({"note": note} if note else {}) | ({"analysis": measured.to_dict()} if measured else {})


def unfinished_of(run: Path | str) -> dict[str, Any]:
    """What is known of a run without a result: its plan and its log so far. It has no accuracy."""
    config = run_folder.load_config(run)
    log = log_of(run) if (Path(run) / "metrics.jsonl").exists() else []
    return {
        **_plan(config),
        "unfinished": True,
        "epochs_done": log[-1]["epoch"] if log else 0,
        "config_hash": config.hash,
        "config": _tree(config),
        "log": log,
    }


def read(run: Path | str) -> dict[str, Any]:
    """The record of a run folder, finished or not."""
    finished = any((Path(run) / name).exists() for name in ("result.json", run_folder.CONVERSION))
    try:
        return record_of(run) if finished else unfinished_of(run)
    except ConfigError as error:  # such as a user's own network that was not imported
        said = run_folder.with_imports(Path(run), error)
        raise ConfigError(said if str(run) in said else f"{run}: {said}") from error


def _plan(config: Config) -> dict[str, Any]:
    """The part of a record that the configuration gives."""
    neurons = describe(config)
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": config.name or title_of(neurons["variant"]),
        "dataset": dataset_of(config),
        "model": config.model.id,
        **neurons,
        "timesteps": config.model.timesteps,
        "epochs": config.train.epochs,
        "warmup_epochs": config.train.warmup_epochs,
        "batch_size": config.train.batch_size,
        "lr": config.optim.lr,
        "seed": config.seed,
    }


def _tree(config: Config) -> dict[str, Any]:
    tree = config.to_dict()
    tree["data"]["root"] = ""  # a place on one machine
    return tree


def log_of(run: Path | str) -> list[dict[str, Any]]:
    """The epochs of a run folder, shortened. A last line that was cut off is left out."""
    path = Path(run) / "metrics.jsonl"
    text = files.text_of(path, RunError, remedy="restore the file or train again")
    lines, epochs = text.split("\n")[:-1], []
    for number, line in enumerate(lines, 1):
        try:
            epochs.append(_short(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"[:80]
            raise RunError(
                f"{path} is not the log of a run, line {number} is no epoch ({why}): restore the file or train again"
            ) from error
    return epochs


def analysis_of(run: Path | str) -> Analysis | None:
    """The analysis that `lbq analyze` wrote in a run folder, if any. It must be of the folder's weights."""
    path = Path(run) / ANALYSIS
    if not path.exists():
        return None
    stored = analysis.load(path)
    if stored.facts.get("weights_sha256") != run_folder.weights_checksum(run):
        raise RunError(f"{path} is of other weights than {run} holds: run lbq analyze again")
    return stored


def facts_of(run: Path | str) -> dict[str, Any]:
    """What identifies a run, finished or not, in files made from it."""
    config = run_folder.load_config(run)
    return {
        "name": Path(run).resolve().name,
        "dataset": dataset_of(config),
        "model": config.model.id,
        **describe(config),
        "timesteps": config.model.timesteps,
        "seed": config.seed,
        "epochs": config.train.epochs,
        "config_hash": config.hash,
        "weights_sha256": run_folder.weights_checksum(run),
    }


def describe(config: Config) -> dict[str, Any]:
    """The network's neurons: variant, step (fixed, learned, none), its gradient, surrogate, n_max."""
    name = str(config.neuron.get("name"))
    neurons = list(neurons_of(outline(config)).values())
    if not neurons:
        return {"variant": "ann" if name == "relu" else name, "step": "none", "surrogate": "none", "n_max": 0}
    neuron = neurons[0]
    learned = any("rho" in dict(n.named_parameters(recurse=False)) for n in neurons)
    step = "learned" if learned else "fixed"
    if name in ("ternary", "ternary_learned"):
        name = f"ternary_{step}"
    if name in ABLATION_VARIANTS.values():  # its options may make another variant of it
        name = ABLATION_VARIANTS.get((step, neuron.surrogate.name.removesuffix("_et")), f"burst_{step}")
    facts = {"variant": name, "step": step, "surrogate": neuron.surrogate.name, "n_max": neuron.n_max}
    if learned and getattr(neuron, "step_gradient", "sum") != "sum":
        facts["step_gradient"] = neuron.step_gradient
    return facts


def dataset_of(config: Config) -> str:
    """A part of a dataset has a name of its own: reports do not put its accuracies beside those of the whole."""
    name = config.data.title or config.data.name
    return f"{name}, {config.data.limit} samples" if config.data.limit else name


def split_of(config: Config, data: Mapping[str, str]) -> str:
    """Which samples train and which test. data: `Source.about`; readers of events name their split there."""
    split = data.get("split") or REGISTRY[config.data.name].split
    images = f", {data['images']} images" if "images" in data else ""
    images += f", limited to {config.data.limit} samples of each part" if config.data.limit else ""
    return split + images + (f", {config.data.holdout:g} held out of training" if config.data.holdout else "")


def _agree(logged: float | None, stored: float | None) -> bool:
    """Whether two accuracies are equal up to the log's rounding; None where the network was not tested."""
    if logged is None or stored is None:
        return logged == stored
    return abs(logged - stored) <= 1e-3


def _known(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """The entries of `keys` that are there: older runs lack some."""
    return {key: values[key] for key in keys if values.get(key) is not None}


def _short(line: Mapping[str, Any]) -> dict[str, Any]:
    steps = line["steps"].values()
    short = {k: line[k] for k in ("epoch", "loss", "train_accuracy", "lr", "seconds", "test_accuracy")}
    short |= _known(line, "unaveraged_accuracy", "holdout_accuracy", "test_accuracy_as_trained", "tested_in")
    short = {k: round(v, 5) if isinstance(v, float) else v for k, v in short.items()}
    return short | ({"step_min": round(min(steps), 4), "step_max": round(max(steps), 4)} if steps else {})
