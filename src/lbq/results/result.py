"""Results that a report can show: single runs, their names, and which of them are seeds of one thing.

Runs that differ in nothing but their seed form a `Group` with a mean. An unfinished run enters none. `lbq.results.gather`
reads them from files.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lbq.config import recipe_hash
from lbq.counting.analysis import Analysis, Trace
from lbq.data.registry import EVENTS
from lbq.results import paper

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
    "ternary_half": "Ternary Spike",
    "qann": "Quantised ANN",
    "lmht": "LM-HT",
    "ilif": "I-LIF",
    "mlf": "MLF",
    "deployed": "Deployed network",
}
BURSTS = ("lbq", "v1", "v2", "v3", "burst", "qann")  # how variants with several levels begin
SUFFIX_LETTERS = 6  # of a hash, where it tells runs of one name apart


def title_of(variant: str) -> str:
    """The title of a run of this variant that has no name of its own."""
    return TITLES.get(variant, variant)


@dataclass
class Result:
    """One run. record: as in results/*.json; source: its file or folder; analyses: of the network as trained and deployed.

    integer: the record of its deployed network; repeat: its number among the finished runs of its configuration and seed;
    suffix: the end of its title, which tells it from another configuration of its name; data: the end of its dataset's name,
    which tells a user's own data from other data of that name.
    """

    record: dict[str, Any]
    source: str
    analyses: list[Analysis] = field(default_factory=list)
    integer: dict[str, Any] | None = None
    repeat: int = 1
    suffix: str = ""
    data: str = ""

    @property
    def analysis(self) -> Analysis | None:
        """The one for layers and counts: preferably of the whole test set, and on integers."""
        return max(self.analyses, key=lambda a: (a.of_test_set, a.deployed, a.images), default=None)

    @property
    def traces(self) -> tuple[Trace, ...]:
        return next((a.traces for a in self.analyses if a.traces), ())

    @property
    def integer_accuracy(self) -> float | None:
        """Percent, of the deployed network on the whole test set."""
        if self.integer is not None:
            return float(self.integer["test_accuracy"])
        return next((a.accuracy for a in self.analyses if a.deployed and a.of_test_set), None)

    @property
    def integer_bits(self) -> int | None:
        """Bits of that network's weights, where its analysis says it."""
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
        """Percent, on samples held out of training."""
        return self.record.get("holdout_accuracy")

    @property
    def limit(self) -> int:
        """How many samples of each part of its dataset it was trained and tested on (`data.limit`); 0: on all."""
        limit = self.record["config"].get("data", {}).get("limit", 0)
        return limit if isinstance(limit, int) else 0

    @property
    def of_events(self) -> bool:
        """Whether its inputs are event frames. An older record says it only by its dataset."""
        return not self.record.get("static", self.record["dataset"] not in EVENTS)

    @property
    def dataset(self) -> str:
        """The name of its dataset, made unique."""
        return str(self.record["dataset"]) + self.data

    @property
    def name(self) -> str:
        """The record's own name, else the title of its variant."""
        return str(self.record.get("name") or title_of(str(self.record["variant"])))

    @property
    def title(self) -> str:
        """The name, made unique."""
        return self.name + self.suffix + (f", run {self.repeat}" * (self.repeat > 1))

    @property
    def recipe(self) -> str:
        """The training that figures keep apart: decayed BatchNorm alone makes steps several times smaller."""
        epochs = int(self.record["epochs"])
        length = f"{epochs} epoch{'' if epochs == 1 else 's'}" if epochs else "epochs not known"
        return length + (f", {' and '.join(self.decayed)} decayed" if self.decayed else "")

    @property
    def decayed(self) -> list[str]:
        """What weight decay acts on, besides weights."""
        optim = self.record["config"].get("optim", {})
        parts = ["BN"] if optim.get("norm_decay") else []
        if (neurons := optim.get("neuron_decay", "none")) != "none":
            factor = optim.get("neuron_decay_factor", 1.0)
            parts.append(("steps" if neurons == "step" else "neurons") + (f" × {factor:g}" if factor != 1 else ""))
        return parts

    @property
    def plain(self) -> bool:
        """Whether it stands for its row of the paper's ablation, by its facts and by its title."""
        return paper.ablation_row(self.record) is not None and self.title == title_of(str(self.record["variant"]))

    @property
    def has_usual_levels(self) -> bool:
        """Whether N_max is what the paper takes where it names none: 5, or 1 for neurons with one level."""
        n_max = self.record.get("n_max", 5)
        return n_max == 5 or (n_max in (0, 1) and not str(self.record["variant"]).startswith(BURSTS))

    @property
    def prominence(self) -> tuple[bool, bool, bool, int, float]:
        """The highest stands for all runs: the paper's method and dataset, trained longest and best."""
        record = self.record
        epochs, accuracy = int(record["epochs"]), self.accuracy or 0.0
        return record["variant"] == "lbq", self.plain, record["dataset"] == "cifar10", epochs, accuracy

    @property
    def key(self) -> str:
        """A hash that is equal for runs which differ in their seed alone.

        The reference kernel has its own key: it rounds BatchNorm's output in another way. So has a run that repeats a seed,
        and code of a user's own, by the checksum of its file.
        """
        record = self.record
        differing = [record.get(key) for key in ("split", "data_sha256", "init_sha256")]
        reference = record.get("versions", {}).get("kernel") == "reference"
        facts = [recipe_hash(record["config"]), *differing, reference, self.repeat, *filter(None, [self.own_code])]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def own_code(self) -> str:
        """The files that it was trained with (`--import`), with their checksums."""
        return str(self.record.get("versions", {}).get("imports", ""))

    @property
    def steps(self) -> dict[str, float]:
        return self.record.get("steps") or (self.analysis.steps if self.analysis else {})

    @property
    def active(self) -> dict[str, float]:
        return (self.analysis.active if self.analysis else {}) or self.record.get("active") or {}


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
    def dataset(self) -> str:
        return self.first.dataset

    @property
    def accuracies(self) -> list[float]:
        return [r.accuracy for r in self.results if r.accuracy is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def holdout_mean(self) -> float | None:
        """On held-out samples. None where a seed has none: a mean over some would select by chance."""
        known = [a for r in self.results if (a := r.holdout_accuracy) is not None]
        return statistics.fmean(known) if known and len(known) == len(self.results) else None

    @property
    def analysed(self) -> list[tuple[Result, Analysis]]:
        """One analysis of each seed that has one. Of unlike ones, those of the commonest kind: only like ones have a mean."""
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
    """results: in the order of their paths; benchmarks: of the engine, as benchmarks/engine_speed.py writes them.

    twins: run folders that are left out, and the earlier folder with the same weights.
    """

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
        """Whether tables have a column of held-out accuracies."""
        return any(r.holdout_accuracy is not None for r in self.finished)

    @property
    def groups(self) -> list[Group]:
        return [Group(results) for results in by_key(self.finished)]


def by_key(results: Iterable[Result]) -> list[list[Result]]:
    """The seeds of each configuration, in order of appearance. Unfinished runs are apart."""
    groups: dict[tuple[bool, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.finished, result.key), []).append(result)
    return list(groups.values())


def names(results: Sequence[Result]) -> list[str]:
    """Titles, and what tells results of one title apart: the dataset, network, epochs and seed only where they differ."""
    parts = [[r.title] for r in results]
    alike = defaultdict(list)
    for part, result in zip(parts, results, strict=True):
        alike[result.title].append((part, result))
    for key, text in (("dataset", "{}"), ("model", "{}"), ("timesteps", "T={}"), ("n_max", "N={}"), ("epochs", "{} ep"),
                      ("seed", "seed {}")):  # fmt: skip
        for some in alike.values():
            values = [_fact(r, key) if _has(r, key) else None for _, r in some]
            if len(set(values) - {None}) > 1:
                for (part, _), value in zip(some, values, strict=True):
                    part += [] if value is None else [text.format(value)]
    return [", ".join(part) for part in parts]


def _fact(result: Result, key: str) -> object:
    return result.dataset if key == "dataset" else result.record.get(key)


def _has(result: Result, key: str) -> bool:
    """Whether a fact says something of a run: N_max and T not of an ANN, but for T event frames; epochs where known."""
    if key == "epochs":
        return bool(result.record.get(key))
    ann = not result.record.get("n_max")
    return not ann or key not in ("timesteps", "n_max") or (key == "timesteps" and result.of_events)
