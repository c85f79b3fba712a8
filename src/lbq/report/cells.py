"""What the tables of a report are made of: cells with what they sort by, rows that say whose they are. No markup."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lbq.results.result import Group, Result

Kind = Literal["", "published", "ours"]
TIMESTEPS = 2  # of the networks whose counts and costs the paper publishes
DATASETS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet-1K",
    "cifar10_dvs": "CIFAR10-DVS",
    "dvs_gesture": "DVS128-Gesture",
    "digits": "UCI digits",
    "mnist": "MNIST",
    "nmnist": "N-MNIST",
    "dvs_objects": "DVS128 objects",
}


@dataclass(frozen=True)
class Cell:
    """Text, what to sort it by where that is not the text, and the id of the place on the page that it leads to.

    sd, n: of a value that is a mean over seeds.
    """

    text: str
    value: float | None = None
    hint: str = ""
    link: str = ""
    sd: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    kind: Kind = ""


@dataclass
class Table:
    """id: short and unique in a report. numeric: the columns that are right-aligned."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numeric: frozenset[int] = frozenset()

    def add(self, cells: Sequence[Cell | str | float | None], kind: Kind = "") -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"table {self.id} has {len(self.columns)} columns, got {len(cells)} cells")
        self.rows.append(Row(tuple(c if isinstance(c, Cell) else cell(c) for c in cells), kind))

    @property
    def has_ours(self) -> bool:
        return any(row.kind == "ours" for row in self.rows)


def cell(value: str | float | None, digits: int | None = None, hint: str = "") -> Cell:
    if value is None:
        return Cell("")
    if isinstance(value, str):
        return Cell(value, hint=hint)
    if isinstance(value, int) and digits is None:
        return Cell(f"{value:,}", float(value), hint)
    return Cell(f"{value:,.{2 if digits is None else digits}f}", float(value), hint)


def dataset_name(result: Result | Group) -> str:
    name = str(result.record["dataset"])
    return DATASETS.get(name, name)


def decimals(value: float) -> int:
    """How many to write of a value: two, or as many more as three digits of a small one take."""
    return 2 if value <= 0 else max(2, 2 - math.floor(math.log10(value)))


def epochs_cell(group: Group) -> int | str:
    """Nothing where an analysis does not say them."""
    return int(group.record["epochs"]) or ""


def accuracy_cell(group: Group) -> Cell:
    return _seeds_cell(group, [r.accuracy for r in group.results])


def holdout_cell(group: Group) -> Cell:
    return _seeds_cell(group, [r.holdout_accuracy for r in group.results])


def _seeds_cell(group: Group, of_seeds: Sequence[float | None]) -> Cell:
    """mean ± sd over the seeds that have a value (n): a single seed has no deviation, and says so."""
    known = [(r.record["seed"], value) for r, value in zip(group.results, of_seeds, strict=True) if value is not None]
    if not known:
        return Cell("")
    mean = spread_cell([value for _, value in known], 2)
    spread = "1 seed" if mean.sd is None else f"n = {mean.n}"
    hint = ", ".join(f"seed {seed}: {value:.2f}" for seed, value in known)
    return replace(mean, text=f"{mean.text} ({spread})", hint=hint)


def integer_cell(group: Group) -> Cell:
    """Mean accuracy of the deployed networks, where every seed has one that was run on the whole test set, all of as many
    bits; it says how many where these are not the usual 8."""
    found, bits = group.integer_accuracies, {r.integer_bits for r in group.results} - {None}
    if not found or len(found) < len(group.results) or len(bits) > 1:
        return Cell("")
    mean = spread_cell(found, 2)
    hint = "; ".join(str(r.integer.get("arithmetic", "")) for r in group.results if r.integer is not None)
    return replace(mean, text=mean.text + "".join(f" ({b} bits)" for b in bits - {8}), hint=hint)


def spread_cell(values: Sequence[float], digits: int) -> Cell:
    """Mean ± sample standard deviation over seeds; a single one as it is."""
    if not values:
        return Cell("")
    mean, sd = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
    return Cell(f"{mean:,.{digits}f}" + ("" if sd is None else f" ± {sd:,.{digits}f}"), mean, sd=sd, n=len(values))


def run_id(result: Result) -> str:
    """Where the page tells all about a run."""
    return "run-" + hashlib.sha256(result.source.encode()).hexdigest()[:10]


def short(text: str, length: int = 10) -> str:
    return text[:length]


def images_cells(group: Group) -> tuple[Cell, Cell]:
    """How many images were analysed, of how many seeds, and on which form of the network."""
    analysis = group.analysis
    if analysis is None:
        return Cell(""), Cell("")
    part = "" if analysis.complete else "first "
    seeds = len(group.analyses)
    times = "" if len(group.results) == 1 else f" × {seeds} seed{'s' * (seeds > 1)}"
    of = f" of {analysis.other_data}" if analysis.other_data else ""
    form = "on integers" if analysis.deployed else "as trained"
    return Cell(f"{part}{analysis.images:,}{of}{times}", float(analysis.images)), Cell(form)


def title_at(group: Group) -> str:
    """The title in tables whose rows are at N_max = 5 unless they say otherwise."""
    return group.title + ("" if group.first.has_usual_levels else f", N_max = {group.record.get('n_max')}")


def method_name(group: Group) -> str:
    """As in the paper's tables of costs, which are at T = 2: with N_max, and T where it is another."""
    n_max, steps = group.record.get("n_max") or 0, group.record["timesteps"]
    return group.title + (f" ({n_max})" if n_max > 1 else "") + (f", T = {steps}" if steps != TIMESTEPS else "")
