"""Results that a report can show: single runs, what to call them, and which of them are seeds of one thing.

Runs that differ in nothing but their seed form a `Group` with mean and standard deviation. A run that is not finished is
kept apart and enters no mean. `lbq.results.gather` reads them from files.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lbq.config import BOOKKEEPING, LATER, READINGS
from lbq.counting.analysis import Analysis, Trace
from lbq.data.testset import EVENTS

TITLES = {
    "ann": "ANN",
    "lif": "Binary LIF",
    "lbq": "LBQ",
    "v1": "V1 (fixed + box)",
    "v2": "V2 (fixed + ReLSG-ET)",
    "v3": "V3 (learned + box)",
    "burst_fixed": "Burst, fixed step",
    "burst_learned": "Burst, learned step",
    "ternary_fixed": "Ternary, fixed",
    "ternary_learned": "Ternary, learned",
    "qann": "Quantised ANN",
    "lmht": "LM-HT",
    "ilif": "I-LIF",
    "mlf": "MLF",
}
USUAL = {"beta": 0.5, "alpha": 1.0, "tail": 0.5, "learn_beta": False, "learn_alpha": False, "reset_grad": True}
SWITCHED = {"learn_beta": "learned beta", "learn_alpha": "learned alpha", "reset_grad": "no gradient through the reset"}
SINGLE = {"lif": "arctan", "ternary_fixed": "box", "ternary_learned": "box"}  # their usual surrogates
BURST_NEURONS = ("lbq", "v1", "v2", "v3", "burst")  # variants that are a BurstNeuron
BURSTS = (*BURST_NEURONS, "qann")  # variants with several levels
UNNAMED = {"learn_tail": True, "membrane": "lif", "per_channel": False}  # and what titles do not name
TOLD = ("name", "surrogate", "n_max", "step_gradient")  # of a neuron, by the record itself
WAYS: dict[str, tuple[str, Any]] = {  # of training, which titles tell always: how they call them, and the value without
    "optim.name": ("AdamW", "sgd"),
    "train.loss": ("TET loss", "ce"),
    "augment.mixup": ("mixup {}", 0),
    "augment.cutmix": ("CutMix {}", 0),
    "augment.label_smoothing": ("label smoothing {}", 0),
    "augment.plain_epochs": ("last {} epochs plain", 0),
    "optim.clip": ("gradients clipped at {}", 0),
    "optim.sam": ("SAM {}", 0),
    "data.holdout": ("{} of the training set held out", 0),
    "train.init_from": ("from trained weights {}", ""),
}
OF_EVENTS = {"optim.name": "adamw", "augment.mixup": 0.5, "augment.label_smoothing": 0.1}
PUBLISHED: dict[str, dict[str, Any]] = {  # what the paper's recipes have that CIFAR's has not
    "imagenet": {"augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.label_smoothing": 0.1},
    "cifar10_dvs": OF_EVENTS,
    "dvs_gesture": OF_EVENTS,
}
SIDES = {"cifar10": 32, "cifar100": 32, "mnist": 28, "fashion_mnist": 28}  # of images that have one size only


def always_told(dataset: Any) -> set[str]:
    """Settings in which two runs on a dataset cannot differ without different titles."""
    return (WAYS.keys() | {"optim.sam_epochs"}) - PUBLISHED.get(str(dataset), {}).keys()


@dataclass
class Result:
    """One run. record: as in results/*.json; source: the file or folder it came from; analyses: of the network as trained
    and as deployed; integer: the record of its deployed network, which says `of` which record it is;
    repeat: which it is of the finished runs that have its configuration and seed. batch_told, lr_told: whether its name says
    its batch and learning rate, as one must that differs in them from a run of the same name; told: what else it says."""

    record: dict[str, Any]
    source: str
    analyses: list[Analysis] = field(default_factory=list)
    integer: dict[str, Any] | None = None
    repeat: int = 1
    batch_told: bool = False
    lr_told: bool = False
    told: tuple[str, ...] = ()

    @property
    def analysis(self) -> Analysis | None:
        """For layers and counts: of the whole test set rather than of a part, on integers rather than as trained."""
        return max(self.analyses, key=lambda a: (a.of_test_set, a.deployed, a.images), default=None)

    @property
    def traces(self) -> tuple[Trace, ...]:
        return next((a.traces for a in self.analyses if a.traces), ())

    @property
    def integer_accuracy(self) -> float | None:
        """Of the deployed network on the whole test set."""
        if self.integer is not None:
            return float(self.integer["test_accuracy"])
        return next((a.accuracy for a in self.analyses if a.deployed and a.of_test_set), None)

    @property
    def integer_bits(self) -> int | None:
        """Of the weights of that network, where its analysis says it."""
        return next((a.facts.get("bits") for a in self.analyses if a.deployed and a.of_test_set), None)

    @property
    def finished(self) -> bool:
        return not self.record.get("unfinished", False)

    @property
    def alone(self) -> bool:
        """Whether only an analysis is left of it."""
        return "analysis" in self.record["config"]

    @property
    def accuracy(self) -> float | None:
        return self.record.get("test_accuracy")

    @property
    def holdout_accuracy(self) -> float | None:
        """On what was held out of training, where something was and the record says it."""
        return self.record.get("holdout_accuracy")

    @property
    def of_events(self) -> bool:
        """Whether its inputs are event frames; an older record says it by its dataset, or counts as one of images."""
        return not self.record.get("static", self.record["dataset"] not in EVENTS)

    @property
    def title(self) -> str:
        """What the method is called in tables, with what its recipe does otherwise than the others'."""
        return self.method + (", BN decayed" if self._decays_norm else "")

    @property
    def title_but_ways(self) -> str:
        """The title, whatever it does otherwise than the paper."""
        return self._named(()) + (", BN decayed" if self._decays_norm else "")

    @property
    def recipe(self) -> str:
        """How it was trained, as far as tables tell it apart from others."""
        epochs = int(self.record["epochs"])
        trained = f"{epochs} epoch{'' if epochs == 1 else 's'}" if epochs else "epochs not known"
        return trained + (", BN decayed" if self._decays_norm else "")

    @property
    def _decays_norm(self) -> bool:
        return bool(self.record["config"].get("optim", {}).get("norm_decay"))

    @property
    def plain(self) -> bool:
        """Whether it is the method as the paper has it, with no option of ours."""
        usual = self.kind == TITLES.get(str(self.record["variant"])) and self._neuron_lr == 1.0
        return usual and self.has_usual_levels and not self._averages and not self._otherwise

    @property
    def has_usual_levels(self) -> bool:
        """As many as the paper has where it does not say how many: 5, but for neurons that have one."""
        n_max = self.record.get("n_max", 5)
        return n_max == 5 or (n_max in (0, 1) and not str(self.record["variant"]).startswith(BURSTS))

    @property
    def prominence(self) -> tuple[bool, bool, bool, int, float]:
        """The highest is shown where one run has to stand for all: the paper's method and dataset, trained longest and best."""
        record = self.record
        epochs, accuracy = int(record["epochs"]), self.accuracy or 0.0
        return record["variant"] == "lbq", self.plain, record["dataset"] == "cifar10", epochs, accuracy

    @property
    def method(self) -> str:
        """The title without the recipe."""
        return self._named(self._otherwise)

    def _named(self, ways: Sequence[str]) -> str:
        return (
            self.kind
            + (f", lr {self.record['lr']:g}" if self.lr_told else "")
            + (f", neurons' lr × {self._neuron_lr:g}" if self._neuron_lr != 1.0 else "")
            + (f", batch {self.record['batch_size']}" if self.batch_told else "")
            + (", averaged weights" if self._averages else "")
            + "".join(f", {way}" for way in ways)
            + "".join(f", {setting}" for setting in self.told)
        )

    @property
    def _otherwise(self) -> list[str]:
        """How it was trained otherwise than the paper trains on such data; what is merely left out is not told."""
        config, published = self.record["config"], PUBLISHED.get(str(self.record["dataset"]), {})
        found = []
        for place, (way, without) in WAYS.items():
            part, key = place.split(".")
            value = config.get(part, {}).get(key, without)
            if value not in (without, published.get(place, without)):
                shown = self.record.get("init_sha256", "")[:8] if key == "init_from" else value
                if key == "sam" and (last := config[part].get("sam_epochs")):
                    shown = f"{value} in the last {last} epochs"
                found.append(way.format(shown).strip())
        return found

    @property
    def _averages(self) -> bool:
        return bool(self.record["config"].get("train", {}).get("ema"))

    @property
    def _neuron_lr(self) -> float:
        return float(self.record["config"].get("optim", {}).get("neuron_lr", 1.0))

    @property
    def kind(self) -> str:
        """What was trained, whatever the learning rates and the batch."""
        variant = str(self.record["variant"])
        title = TITLES.get(variant, variant)
        surrogate = self.record.get("surrogate", "")
        if surrogate == "box_et" and variant in ("v1", "v3"):
            title = title.replace("box)", "box-ET)")
        if surrogate not in (SINGLE.get(variant, surrogate), ""):
            title += f", {surrogate}"
        neuron = self.record["config"].get("neuron", {})
        if variant in ("burst_fixed", "burst_learned") and surrogate not in ("", "relsg_et"):
            title += f", {surrogate}"
        if neuron.get("per_channel"):
            title += ", a step per channel"
        if (membrane := neuron.get("membrane", "lif")) != "lif":
            title += f", {str(membrane).upper()} membrane"
        if gradient := self.record.get("step_gradient"):
            title += f", {gradient.upper()} step gradient"
        usual_step = 2 / neuron["n_max"] if "n_max" in neuron else 1.0 if variant.startswith("ternary") else None
        if usual_step is not None and (neuron.get("step") or usual_step) != usual_step:
            title += f", step {'from ' * (self.record.get('step') == 'learned')}{neuron['step']:g}"
        title += "".join(
            f", {SWITCHED.get(k) or f'{k} {neuron[k]}'}" for k, usual in USUAL.items() if neuron.get(k, usual) != usual
        )
        if self.record["config"].get("model", {}).get("share_tail"):
            title += ", one tail for all layers"
        if surrogate == "relsg_et" and neuron.get("learn_tail") is False:
            title += ", fixed tails"
        if self.reference:
            title += ", reference kernel"
        return title if self.repeat == 1 else f"{title}, run {self.repeat}"

    @property
    def reference(self) -> bool:
        """Whether it ran by the reference kernel, which rounds BatchNorm's output as the others do not."""
        return bool(self.record.get("versions", {}).get("kernel") == "reference")

    @property
    def key(self) -> str:
        """Equal for runs that differ only in their seed, in what changes no result, and in whether a default is spelt out. One
        that repeats a seed is no other sample of it: it has a key of its own."""
        kinds = ("variant", "step", "surrogate", "n_max", "step_gradient", "split", "init_sha256")
        told = [self.record.get(k) for k in kinds]
        return json.dumps([self.settings, told, self.reference, self.repeat], sort_keys=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Its configuration without the seed, what changes no result, defaults, and what the record says of the neuron."""
        record, n_max = self.record, self.record.get("n_max")
        bursts = str(record["variant"]).startswith(BURST_NEURONS)  # the others have other defaults
        usual: dict[str, dict[str, tuple[Any, ...]]] = {
            "neuron": {k: (v,) for k, v in {**USUAL, **UNNAMED, "step": 2 / n_max}.items()} if n_max and bursts else {},
            "data": {"size": (0, SIDES.get(record["dataset"], 0))},
            **{part: {k: (v,) for k, v in defaults.items()} for part, defaults in LATER.items()},
        }

        def matters(part: str, key: str, value: Any) -> bool:
            told = (part == "neuron" and key in TOLD) or (key == "init_from" and bool(record.get("init_sha256")))
            changes_nothing = key in BOOKKEEPING.get(part, ()) or key in READINGS.get(part, ())
            changes_nothing |= key == "sam_epochs" and not record["config"]["optim"].get("sam")
            return not (told or changes_nothing or value in usual.get(part, {}).get(key, ()))

        return {
            part: {k: v for k, v in value.items() if matters(part, k, v)} if isinstance(value, dict) else value
            for part, value in {**record["config"], "neuron": _plain(record["config"].get("neuron", {}))}.items()
            if part != "seed"
        }

    @property
    def data(self) -> str:
        """What tells the data from other data of the same name; empty in older records of events and folders."""
        return str(self.record.get("data_sha256") or "")

    def may_share_data(self, other: Result) -> bool:
        """Whether nothing says that they are of other data."""
        return self.data == other.data or not (self.data and other.data)

    @property
    def steps(self) -> dict[str, float]:
        return self.record.get("steps") or (self.analysis.steps if self.analysis else {})

    @property
    def active(self) -> dict[str, float]:
        if self.analysis and self.analysis.layers:
            return {layer.name: layer.histogram.active_ratio for layer in self.analysis.layers}
        return self.record.get("active") or {}


def _plain(value: Any) -> Any:
    """A neuron's options, which are recorded as they were given: 1 and 1.0 are one number."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass
class Group:
    """Finished runs of one configuration over several seeds."""

    results: list[Result]

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def record(self) -> dict[str, Any]:
        return self.first.record

    @property
    def title(self) -> str:
        return self.first.title

    @property
    def accuracies(self) -> list[float]:
        return [r.accuracy for r in self.results if r.accuracy is not None]

    @property
    def n(self) -> int:
        return len(self.accuracies)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds; None for a single one."""
        return statistics.stdev(self.accuracies) if self.n > 1 else None

    @property
    def holdout_mean(self) -> float | None:
        """On what was held out of training; None where not every seed has it, for a mean over some selects by chance."""
        found = [a for r in self.results if (a := r.holdout_accuracy) is not None]
        return statistics.fmean(found) if found and len(found) == len(self.results) else None

    @property
    def integer_accuracies(self) -> list[float]:
        return [a for r in self.results if (a := r.integer_accuracy) is not None]

    @property
    def analysed(self) -> list[tuple[Result, Analysis]]:
        """One analysis of each seed that has one. Where they are unlike, deployed or not, of other images, those that are most:
        a mean over others would be of nothing."""
        pairs = [(r, r.analysis) for r in self.results if r.analysis is not None]
        kinds = Counter[tuple[bool, bool, int]]((a.of_test_set, a.deployed, a.images) for _, a in pairs)
        most = max(kinds, key=lambda kind: (kinds[kind], kind), default=None)
        return [(r, a) for r, a in pairs if (a.of_test_set, a.deployed, a.images) == most]

    @property
    def analyses(self) -> list[Analysis]:
        return [a for _, a in self.analysed]

    @property
    def analysis(self) -> Analysis | None:
        """Of the first seed that was analysed."""
        return next(iter(self.analyses), None)

    @property
    def traces(self) -> tuple[Trace, ...]:
        return next((r.traces for r in self.results if r.traces), ())


@dataclass
class Gathered:
    """results: in the order given. benchmarks: of the engine, as benchmarks/engine_speed.py writes them. twins: run folders
    that are left out, for one before them has the same weights, and which that is."""

    results: list[Result] = field(default_factory=list)
    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    artefacts: list[Path] = field(default_factory=list)
    twins: dict[Path, Path] = field(default_factory=dict)

    @property
    def finished(self) -> list[Result]:
        return [r for r in self.results if r.finished]

    @property
    def unfinished(self) -> list[Result]:
        return [r for r in self.results if not r.finished]

    @property
    def has_holdout(self) -> bool:
        """Whether tables have a column of accuracies on what was held out of training."""
        return any(r.holdout_accuracy is not None for r in self.finished)

    @property
    def groups(self) -> list[Group]:
        groups: list[Group] = []
        by_key: dict[str, list[Group]] = {}
        for result in self.finished:
            alike = by_key.setdefault(result.key, [])
            group = next((g for g in alike if all(map(result.may_share_data, g.results))), None)
            if group is None:
                group = Group([])
                alike.append(group)
                groups.append(group)
            group.results.append(result)
        return groups


def names(results: Sequence[Result], recipe: bool = True) -> list[str]:
    """Titles that tell results apart: the dataset, network, epochs and seed only where they differ. recipe: False for
    results of one recipe, which is named elsewhere."""
    parts = [[r.title if recipe else r.method] for r in results]
    for key, text in (("dataset", "{}"), ("model", "{}"), ("timesteps", "T={}"), ("n_max", "N={}"), ("epochs", "{} ep"),
                      ("seed", "seed {}")):  # fmt: skip
        counted = [r for r in results if _has(r, key)]
        if len({str(r.record.get(key)) for r in counted}) > 1:
            for part, r in zip(parts, results, strict=True):
                if r in counted:
                    part.append(text.format(r.record.get(key)))
    return [", ".join(part) for part in parts]


def _has(result: Result, key: str) -> bool:
    """Of an ANN, N says nothing, and T only where its inputs are as many event frames; epochs may not be known."""
    if key == "epochs":
        return bool(result.record.get(key))
    ann = not result.record.get("n_max")
    return not ann or key not in ("timesteps", "n_max") or (key == "timesteps" and result.of_events)
