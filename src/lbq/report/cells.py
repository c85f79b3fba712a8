"""The parts of a report's tables: cells with a sort value, rows that say whose they are. No markup."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lbq.data.registry import REGISTRY
from lbq.results.result import Group, Result

Kind = Literal["", "published", "ours"]
PAPER_TIMESTEPS = 2  # of the networks whose counts and costs the paper publishes


@dataclass(frozen=True)
class Cell:
    """Text. value: sorts it, where the text does not; link: an id on the page; sd, n: of a mean over seeds."""

    text: str
    value: float | None = None
    hint: str = ""
    link: str = ""
    sd: float | None = None
    n: int | None = None


Content = Cell | str | float | None


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    kind: Kind = ""


class Table:
    """id: short and unique in a report. columns: their names, separated by `; `. `#` marks those of numbers.

    of_columns: the columns that some of the notes are about, by the note.
    """

    def __init__(self, id: str, title: str, columns: str, *notes: str) -> None:
        names = columns.split("; ")
        self.id, self.title, self.notes = id, title, list(notes)
        self.columns = [name.removeprefix("#") for name in names]
        self.of_columns: dict[str, tuple[str, ...]] = {}
        self.numeric = {i for i, name in enumerate(names) if name.startswith("#")}
        self.rows: list[Row] = []

    def note(self, text: str, *columns: str) -> None:
        """A note on columns: where a table is shown without these, it has no place."""
        self.notes.append(text)
        self.of_columns[text] = columns

    def add(self, *cells: Content, kind: Kind = "") -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"table {self.id} has {len(self.columns)} columns, got {len(cells)} cells")
        self.rows.append(Row(tuple(c if isinstance(c, Cell) else cell(c) for c in cells), kind))

    def texts(self, *left_out: str) -> list[dict[str, str]]:
        """Each row's texts by column, without columns `left_out` and those that are empty in all rows."""
        filled = [i for i in range(len(self.columns)) if any(row.cells[i].text for row in self.rows)]
        shown = [i for i in filled if self.columns[i] not in left_out]
        return [{self.columns[i]: row.cells[i].text for i in shown} for row in self.rows]

    def notes_without(self, *left_out: str) -> list[str]:
        """The notes, but for those on columns `left_out` alone."""
        on = self.of_columns
        return [note for note in self.notes if not (on.get(note) and set(on[note]) <= set(left_out))]

    def ours(self, id: str) -> Table:
        """Our rows alone, without the column that says whose they are, under the title without the paper's number."""
        title = self.title.partition(": ")[2].capitalize()
        columns = "; ".join("#" * (i in self.numeric) + name for i, name in enumerate(self.columns[:-1]))
        table = Table(id, title, columns, *(note for note in self.notes if not note.startswith("Published")))
        table.rows = [Row(row.cells[:-1], row.kind) for row in self.rows if row.kind == "ours"]
        return table

    def has(self, kind: Kind) -> bool:
        return any(row.kind == kind for row in self.rows)


def cell(value: str | float | None, digits: int | None = None) -> Cell:
    if value is None:
        return Cell("")
    if isinstance(value, str):
        return Cell(value)
    if isinstance(value, int) and digits is None:
        return Cell(f"{value:,}", float(value))
    return Cell(f"{value:,.{2 if digits is None else digits}f}", float(value))


def dataset_name(result: Result | Group) -> str:
    return shown_dataset(result.dataset)


def shown_dataset(name: str) -> str:
    """The name of a dataset as readers know it, or of a part of it: `cifar10, 200 samples`."""
    whole, comma, part = name.partition(", ")
    return (REGISTRY[whole].title if whole in REGISTRY else whole) + comma + part


def decimals(value: float) -> int:
    """Decimals that a value needs: two, or enough for three digits of a small one."""
    return 2 if value <= 0 else max(2, 2 - math.floor(math.log10(value)))


def setting_cells(group: Group) -> tuple[str, str, int | str]:
    """Dataset, network and epochs; no epochs where an analysis does not name them."""
    return dataset_name(group), str(group.record["model"]), int(group.record["epochs"]) or ""


def accuracy_cell(group: Group, held_out: bool = False) -> Cell:
    """mean ± sd over the seeds that have a value (n). A single seed has no deviation, and the text says so."""
    values = [(r.record["seed"], r.holdout_accuracy if held_out else r.accuracy) for r in group.results]
    known = [(seed, value) for seed, value in values if value is not None]
    if not known:
        return Cell("")
    mean = spread_cell([value for _, value in known], 2)
    spread = "1 seed" if mean.sd is None else f"n = {mean.n}"
    hint = ", ".join(f"seed {seed}: {value:.2f}" for seed, value in known)
    return replace(mean, text=f"{mean.text} ({spread})", hint=hint)


def integer_cell(group: Group) -> Cell:
    """Mean accuracy of the deployed networks; empty unless every seed has one, all of equal bits, on the whole test set.

    It says how many bits where these are not 8.
    """
    accuracies = [a for r in group.results if (a := r.integer_accuracy) is not None]
    bits = {r.integer_bits for r in group.results} - {None}
    if not accuracies or len(accuracies) < len(group.results) or len(bits) > 1:
        return Cell("")
    mean = spread_cell(accuracies, 2)
    hint = "; ".join(str(r.integer.get("arithmetic", "")) for r in group.results if r.integer is not None)
    return replace(mean, text=mean.text + "".join(f" ({b} bits)" for b in bits - {8}), hint=hint)


def spread_cell(values: Sequence[float], digits: int) -> Cell:
    """Mean ± sample standard deviation over seeds; a single value as it is."""
    if not values:
        return Cell("")
    mean, sd = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
    return Cell(f"{mean:,.{digits}f}" + ("" if sd is None else f" ± {sd:,.{digits}f}"), mean, sd=sd, n=len(values))


def run_id(result: Result) -> str:
    """The id of the page's details of a run."""
    return "run-" + hashlib.sha256(result.source.encode()).hexdigest()[:10]


def images_cells(group: Group) -> tuple[Cell, Cell]:
    """The number of analysed images and seeds, and the form of the network that ran."""
    analysis, seeds = group.analysis, len(group.analyses)
    if analysis is None:
        return Cell(""), Cell("")
    first = "" if analysis.complete else "first "
    source = f" of {analysis.other_data}" if analysis.other_data else ""
    times = "" if len(group.results) == 1 else f" × {seeds} seed{'s' * (seeds > 1)}"
    form = "on integers" if analysis.deployed else "as trained"
    return Cell(f"{first}{analysis.images:,}{source}{times}", float(analysis.images)), Cell(form)


def title_at(group: Group) -> str:
    """The title in tables where rows without N_max have the paper's."""
    return group.title + ("" if group.first.has_usual_levels else f", N_max = {group.record.get('n_max')}")


def method_name(group: Group) -> str:
    """The title in the paper's tables of costs: with N_max, and with T where it is not 2."""
    n_max, steps = group.record.get("n_max") or 0, group.record["timesteps"]
    return group.title + (f" ({n_max})" if n_max > 1 else "") + (f", T = {steps}" if steps != PAPER_TIMESTEPS else "")
