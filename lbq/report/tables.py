"""The tables of a report: the paper's with our rows in them, our runs, and the honest costs. Text and numbers, no markup."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lbq import paper
from lbq.account import Account, energy_mj, saved
from lbq.costs import Costs, costs
from lbq.measurement import account_from
from lbq.results import Gathered, Group, Result, names
from lbq.technology import DEFAULT, PAPER, Technology

Kind = Literal["", "published", "ours"]
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
    """id: short and unique in a report. numeric: the columns that are right-aligned. ours: whether a row is of our own."""

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


def accuracy_cell(group: Group) -> Cell:
    """mean ± sd over seeds (n): a single seed has no deviation, and says so."""
    if group.mean is None:
        return Cell("")
    spread = "1 seed" if group.sd is None else f"n = {group.n}"
    middle = f" ± {group.sd:.2f}" if group.sd is not None else ""
    hint = ", ".join(f"seed {r.record['seed']}: {r.accuracy:.2f}" for r in group.results if r.accuracy is not None)
    return Cell(f"{group.mean:.2f}{middle} ({spread})", group.mean, hint, sd=group.sd, n=group.n)


def integer_cell(group: Group) -> Cell:
    """Mean accuracy of the deployed networks, where every seed has one that was run on the whole test set."""
    found = group.integer_accuracies
    if not found or len(found) < len(group.results):
        return Cell("")
    hint = "; ".join(str(r.integer.get("arithmetic", "")) for r in group.results if r.integer is not None)
    return replace(spread_cell(found, 2), hint=hint)


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


def all_tables(found: Gathered, technology: Technology = DEFAULT) -> list[Table]:
    """Every table of the report, in its order."""
    tables = [runs_table(found)] if found.results else []
    if found.unfinished:
        tables.append(unfinished_table(found))
    groups = found.groups
    tables += accuracy_tables(groups)
    tables.append(ablation_table(groups))
    tables.append(layer_table(groups))
    tables += [counts_table(groups), cost_table(groups, technology)]
    measured = accounts(groups)
    titles = names([group.first for group, _, _ in measured])
    for i, ((group, exact, _), title) in enumerate(zip(measured, titles, strict=True), 1):
        tables.append(honest_table(f"honest-{i}", group, title, costs(exact, technology)))
    tables.append(technology_table(technology))
    return tables


# Ours ----------------------------------------------------------------------------------------------------------------


def runs_table(found: Gathered) -> Table:
    table = Table(
        "runs",
        "Our runs",
        (
            "Method",
            "Dataset",
            "Network",
            "T",
            "N_max",
            "Epochs",
            "Test accuracy %",
            "On integers %",
            "Config",
            "Weights",
            "From",
        ),
        numeric=frozenset({3, 4, 5, 6, 7}),
        notes=[
            "Accuracy of the last epoch on the test set; mean ± sample standard deviation over seeds, a single seed has none.",
            "Config and weights: first digits of their SHA-256.",
        ],
    )
    for group in found.groups:
        r = group.record
        weights = [str(x.record.get("weights_sha256", "")) for x in group.results]
        hashes = [str(x.record["config_hash"]) for x in group.results]
        table.add(
            [
                group.title, dataset_name(group), str(r["model"]), int(r["timesteps"]), r.get("n_max") or "", int(r["epochs"]),
                accuracy_cell(group), integer_cell(group),
                Cell(" ".join(map(short, hashes)), hint="\n".join(hashes), link=run_id(group.first)),
                Cell(" ".join(map(short, weights)), hint="\n".join(weights)),
                Cell(" ".join(_basename(x.source) for x in group.results), hint="\n".join(x.source for x in group.results)),
            ],
            "ours",
        )  # fmt: skip
    return table


def _basename(source: str) -> str:
    return source.rstrip("/").rsplit("/", 1)[-1]


def unfinished_table(found: Gathered) -> Table:
    table = Table(
        "unfinished",
        "Runs that are not finished",
        ("Method", "Dataset", "Network", "T", "Seed", "Epochs done", "Last loss", "Config", "From"),
        numeric=frozenset({3, 4, 5, 6}),
        notes=["They are in no mean and in no other table; `lbq train ... --resume auto` continues them."],
    )
    for result in found.unfinished:
        r, log = result.record, result.record["log"]
        done = f"{r.get('epochs_done', 0)} of {r['epochs']}"
        table.add(
            [
                result.title, dataset_name(result), str(r["model"]), int(r["timesteps"]), int(r["seed"]),
                Cell(done, float(r.get("epochs_done", 0))), cell(log[-1]["loss"], 4) if log else None,
                Cell(short(r["config_hash"]), hint=r["config_hash"], link=run_id(result)),
                Cell(_basename(result.source), hint=result.source),
            ],
            "ours",
        )  # fmt: skip
    return table


# The paper's Tables 2-5 ----------------------------------------------------------------------------------------------

PUBLISHED_NOTE = f"Published rows: as quoted in {paper.CITATION}; venue as named there. They were not run by us."
REPRODUCED_NOTE = "†: reproduced by that paper's authors."
GROUPS = {"conversion": "converted from an ANN", "training": "trained directly"}


def accuracy_tables(groups: Sequence[Group]) -> list[Table]:
    """Tables 2, 3 and 4, one for each dataset; ours are the rows of the same dataset."""
    tables = []
    for dataset in dict.fromkeys(row.dataset for row in paper.ACCURACIES):
        rows = [row for row in paper.ACCURACIES if row.dataset == dataset]
        number = rows[0].table
        ours = [g for g in groups if dataset_name(g) == dataset]
        steps = sorted(
            {1, 2, 4} | {int(g.record["timesteps"]) for g in ours} if number == 2
            else {t for row in rows for t in row.accuracy} | {int(g.record["timesteps"]) for g in ours}
        )  # fmt: skip
        wide = number == 2
        columns: tuple[str, ...] = ("Method", "Venue", "Architecture", "Training")
        columns += (*(f"T={t}" for t in steps), "Other T") if wide else ("T", "Accuracy %")
        table = Table(
            f"table{number}-{dataset.lower()}",
            f"Table {number}: accuracy (%) on {dataset}",
            (*columns, "Origin"),
            numeric=frozenset(range(4, len(columns))),
            notes=[PUBLISHED_NOTE, *([REPRODUCED_NOTE] if any(row.reproduced for row in rows) else [])],
        )
        for row in rows:
            method = row.method + ("†" if row.reproduced else "")
            head: list[Cell | str | float | None] = [method, row.venue, row.architecture, GROUPS[row.group]]
            if wide:
                other = [f"{a:.2f} (T={t})" for t, a in row.accuracy.items() if t not in steps]
                values = [cell(row.accuracy.get(t)) for t in steps]
                table.add([*head, *values, " ".join(other), "published"], "published")
            else:
                for t, accuracy in row.accuracy.items():
                    table.add([*head, t, cell(accuracy), "published"], "published")
        for group in ours:
            r = group.record
            head = [group.title, "", str(r["model"]), f"{r['epochs']} epochs"]
            t = int(r["timesteps"])
            if wide:
                table.add([*head, *(accuracy_cell(group) if t == s else "" for s in steps), "", "ours"], "ours")
            else:
                table.add([*head, t, accuracy_cell(group), "ours"], "ours")
        tables.append(table)
    return tables


def ablation_table(groups: Sequence[Group]) -> Table:
    """Table 5 and, beside each of its rows, our runs of that variant."""
    table = Table(
        "table5-ablation",
        "Table 5: ablation on CIFAR-10, N_max = 5",
        ("Method", "Spike output", "Step", "Surrogate", "T", "Training", "Accuracy %", "Origin"),
        numeric=frozenset({4, 6}),
        notes=[
            f"Published rows: {paper.CITATION}; ResNet-20, which is resnet20w128 here, 300 epochs.",
            "The paper's Box-ET is ambiguous: its text says boxes have hard cut-offs. Each of our rows names its surrogate.",
        ],
    )
    for row in paper.ABLATION:
        table.add(
            [
                row.method,
                row.output,
                row.step,
                row.surrogate,
                row.timesteps,
                "300 epochs",
                cell(row.accuracy),
                "published",
            ],
            "published",
        )
        for group in groups:
            r = group.record
            same = r["variant"] == row.variant and dataset_name(group) == "CIFAR-10" and r["model"] == "resnet20w128"
            if same and r["timesteps"] == row.timesteps and r.get("n_max", 0) in (0, 1, 5):
                table.add(
                    [group.title, row.output, str(r.get("step", "")), str(r.get("surrogate", "")), int(r["timesteps"]),
                     f"{r['epochs']} epochs", accuracy_cell(group), "ours"],
                    "ours",
                )  # fmt: skip
    return table


def layer_table(groups: Sequence[Group]) -> Table:
    """What the paper's text says of its Fig. 4, and ours."""
    table = Table(
        "figure4",
        "Figure 4 in numbers: means over layers",
        (
            "Method",
            "Dataset",
            "Network",
            "Epochs",
            "Active ratio",
            "Burst entropy",
            "P(k=1 | k>0) %",
            "Smallest step",
            "Largest step",
            "Step CV",
            "Images",
            "Network ran",
            "Origin",
        ),
        numeric=frozenset(range(3, 11)),
        notes=[
            "Burst entropy: of P(k | k > 0), divided by log N_max. CV: standard deviation over mean of the layers' steps.",
            "Several seeds: mean ± sample standard deviation, the smallest and largest step of all of them.",
            "Ours: entropy and P(k=1) where the run was analysed (lbq analyze).",
        ],
    )
    for variant, row in paper.LAYER_WISE.items():
        method = next(a.method for a in paper.ABLATION if a.variant == variant)
        low, high = row.steps or (None, None)
        table.add(
            [method, "CIFAR-10", "ResNet-20", 300, cell(row.active, 3), cell(row.entropy, 3), cell(100 * row.first, 1),
             cell(low, 3), cell(high, 3), cell(row.variation, 2), "", "", "published"],
            "published",
        )  # fmt: skip
    for group in groups:
        active = [statistics.fmean(r.active.values()) for r in group.results if r.active]
        if not active:
            continue
        summaries = [a.summary() for a in group.analyses if a.layers]
        burst = (group.record.get("n_max") or 0) > 1  # with one level only, there is nothing to distribute
        steps_of = [list(r.steps.values()) for r in group.results if r.steps and group.record.get("step") != "fixed"]
        learned = [step for steps in steps_of for step in steps]
        table.add(
            [
                group.title, dataset_name(group), str(group.record["model"]), int(group.record["epochs"]),
                spread_cell(active, 3),
                spread_cell([s["normalised_entropy"] for s in summaries], 3) if burst else None,
                spread_cell([100 * s["first_level"] for s in summaries], 1) if burst else None,
                cell(min(learned), 3) if learned else None, cell(max(learned), 3) if learned else None,
                spread_cell([_variation(steps) for steps in steps_of if len(steps) > 1], 2),
                *images_cells(group), "ours",
            ],
            "ours",
        )  # fmt: skip
    return table


def _variation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return float((sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5 / mean)


# Costs, all modelled -------------------------------------------------------------------------------------------------


def accounts_of(group: Group) -> list[tuple[Account, Account]]:
    """Both accounts, border-exact and by rate, of each seed that was counted."""
    return [
        (account_from(a.accounts["exact"], "exact", a.images), account_from(a.accounts["rate"], "rate", a.images))
        for a in group.analyses
        if "exact" in a.accounts
    ]


def accounts(groups: Sequence[Group]) -> list[tuple[Group, Account, Account]]:
    """Groups whose counts are known, with both accounts of their first seed."""
    return [(group, *found[0]) for group in groups if (found := accounts_of(group))]


def images_cells(group: Group) -> tuple[Cell, Cell]:
    """How many images were analysed, of how many seeds, and on which form of the network."""
    analysis = group.analysis
    if analysis is None:
        return Cell(""), Cell("")
    part = "" if analysis.complete else "first "
    seeds = len(group.analyses)
    times = "" if len(group.results) == 1 else f" × {seeds} seed{'s' * (seeds > 1)}"
    form = "on integers" if analysis.deployed else "as trained"
    return Cell(f"{part}{analysis.images:,}{times}", float(analysis.images)), Cell(form)


def method_name(group: Group) -> str:
    n_max = group.record.get("n_max", 0)
    return f"{group.title} ({n_max})" if n_max and n_max > 1 else group.title


def counts_table(groups: Sequence[Group]) -> Table:
    table = Table(
        "table6-counts",
        "Table 6: synaptic accumulations per image under unary and bit-sparse execution",
        (
            "Method",
            "Dataset",
            "Network",
            "Epochs",
            "Unary (M)",
            "Bit-sparse (M)",
            "Saved %",
            "Border-exact (M)",
            "Images",
            "Network ran",
            "Origin",
        ),
        numeric=frozenset(range(3, 9)),
        notes=[
            f"Published: {paper.CITATION}, T = 2; N_max in brackets. Several seeds: mean ± sample standard deviation.",
            "Unary and bit-sparse: rate x MACs, padded taps included, as the paper counts. Border-exact: bit-sparse at valid "
            "positions only, the readout once on its sums.",
        ],
    )
    for method, (unary, sparse) in paper.ACCUMULATIONS.items():
        table.add(
            [method, "CIFAR-10", "ResNet-20", 300, cell(unary), cell(sparse), cell(saved(sparse, unary)), "", "",
             "", "published"],
            "published",
        )  # fmt: skip
    for group in groups:
        if not (found := accounts_of(group)):
            continue
        rates, exacts = [rate for _, rate in found], [exact for exact, _ in found]
        digits = 2 if rates[0].executed > 1e6 else 4  # of millions
        table.add(
            [method_name(group), dataset_name(group), str(group.record["model"]), int(group.record["epochs"]),
             spread_cell([a.total.unary / 1e6 for a in rates], digits),
             spread_cell([a.executed / 1e6 for a in rates], digits),
             spread_cell([saved(a.executed, a.total.unary) for a in rates], 2),
             spread_cell([a.executed / 1e6 for a in exacts], digits), *images_cells(group), "ours"],
            "ours",
        )  # fmt: skip
    return table


def cost_table(groups: Sequence[Group], technology: Technology = DEFAULT) -> Table:
    table = Table(
        "table7-cost",
        "Table 7: accuracy and modelled arithmetic cost",
        ("Method", "Dataset", "Network", "Epochs", "Accuracy %", "On integers %", "FP MACs (M)", "Synaptic ACs (M)",
         "Formations (M)", "Modelled energy (mJ)", "ANN / it, modelled", "Images", "Network ran", "Origin"),
        numeric=frozenset(range(3, 12)),
        notes=[
            f"Published: {paper.CITATION}; its energies again from its counts"
            + ("." if technology.as_published else ", at the prices below: not the energies that it published."),
            f"Modelled, never measured: {technology.fp32_mac:g} pJ for a MAC, {technology.fp32_add:g} pJ for an accumulation, "
            f"{technology.int32_add:g} pJ for a formation. Memory, routing and state updates are not in it.",
            f"Prices: {technology.credit(*PAPER)}.",
            "Counted as rate x MACs, padded taps included, as the paper counts; the tables below: at valid positions only.",
        ],
    )  # fmt: skip
    rows = paper.cost_rows()
    reference = energy_mj(rows[0].operations, technology.paper)
    for row in rows:
        ops, energy = row.operations, energy_mj(row.operations, technology.paper)
        table.add(
            [row.method, "CIFAR-10", "ResNet-20", 300, cell(row.accuracy), "", cell(ops.fp_macs / 1e6),
             cell(ops.accumulations / 1e6) if row.spiking else "N/A",
             cell(ops.formations / 1e6, 3) if row.bit_planes else "N/A", cell(energy, 2),
             cell(reference / energy) if row.spiking else "", "", "",
             "published" if technology.as_published else "published counts, other prices"],
            "published",
        )  # fmt: skip
    for group in groups:
        rates = [rate for _, rate in accounts_of(group)]
        if not rates:
            continue
        operations = [rate.operations() for rate in rates]
        energies = [energy_mj(ops, technology.paper) for ops in operations]
        anns = [rate.ann_macs * technology.fp32_mac * 1e-9 for rate in rates]
        small = energies[0] < 0.1  # an image of a few pixels
        table.add(
            [method_name(group), dataset_name(group), str(group.record["model"]), int(group.record["epochs"]),
             accuracy_cell(group), integer_cell(group), cell(operations[0].fp_macs / 1e6, 4 if small else 2),
             spread_cell([ops.accumulations / 1e6 for ops in operations], 4 if small else 2),
             spread_cell([ops.formations / 1e6 for ops in operations], 3) if operations[0].formations else "N/A",
             spread_cell(energies, 5 if small else 2), spread_cell([a / e for a, e in zip(anns, energies, strict=True)], 2),
             *images_cells(group), "ours"],
            "ours",
        )  # fmt: skip
    return table


def honest_table(id: str, group: Group, title: str, found: Costs) -> Table:
    """title: what tells the group from others."""
    seed = f", seed {group.record['seed']}" if len(group.results) > 1 else ""
    table = Table(
        id,
        f"Beyond the paper's table: {title}, {group.record['model']}, T = {group.record['timesteps']}{seed}; modelled µJ per "
        "image",
        ("Method", "Paper's regime", "Integer arithmetic", "With memory", "int8 ANN / it", "Note"),
        numeric=frozenset({1, 2, 3, 4}),
    )
    int8 = next(m for m in found.methods if m.name == "ANN, int8")
    for method in found.methods:
        table.add(
            [method.name, microjoules(method.paper_uj), microjoules(method.integer_uj), microjoules(method.memory_uj),
             cell(int8.memory_uj / method.memory_uj), method.note],
            "ours" if method is found.methods[0] else "",
        )  # fmt: skip
    t = found.technology
    meets = "; ".join(f"{b.rival} ({b.regime}) {b.text}" for b in found.break_even)
    shifts = "; ".join(
        f"{line.what} {line.count / 1e6:,.3f} M, {microjoules(line.microjoules).text} µJ" for line in found.shifts
    )
    table.notes = [
        "All energies are modelled. Counts are border-exact.",
        "Integer arithmetic adds state updates, identity shortcuts and sums to integer prices; memory adds weight bytes "
        f"({t.weight_byte:g} pJ, each used {t.weight_reuse:g} times), membranes and levels ({t.state_byte:g} pJ a byte).",
        f"Density: {found.density:.3f} set bits per synapse and timestep; bit planes meet a rival's cost at: {meets}.",
        f"Shifts, not in the table: {shifts}.",
        f"Read as other tools do (NeuroBench, syops, SpikingJelly: a level above 1 is a MAC): "
        f"{found.reading.count / 1e6:,.2f} M MACs, {microjoules(found.reading.microjoules).text} µJ at fp32.",
    ]
    return table


def microjoules(value: float | None) -> Cell:
    """Three digits or more."""
    if value is None:
        return Cell("")
    return cell(value, 1 if value >= 100 else 2 if value >= 1 else 4)


def technology_table(technology: Technology) -> Table:
    table = Table(
        "technology",
        f"Technology constants: {technology.label()}",
        ("Constant", "pJ", "Origin"),
        numeric=frozenset({1}),
        notes=[f"Prices: {technology.credit()}. Replace them with --technology FILE (TOML or JSON)."],
    )
    for name, value, origin in technology.table():
        table.add([name, Cell(f"{value:g}", value), origin])
    return table
