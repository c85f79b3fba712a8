"""The tables of a report: our runs, and the paper's with our rows in them. Text and numbers, no markup."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from lbq.counting.analysis import coefficient_of_variation
from lbq.counting.costs import costs
from lbq.counting.technology import DEFAULT, Technology
from lbq.report.cells import (
    Cell,
    Table,
    accuracy_cell,
    cell,
    dataset_name,
    epochs_cell,
    holdout_cell,
    images_cells,
    integer_cell,
    run_id,
    short,
    spread_cell,
    title_at,
)
from lbq.report.cost_tables import accounts, cost_table, counts_table, honest_table, technology_table
from lbq.results import paper
from lbq.results.result import Gathered, Group, names


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
    # the first is shown open
    measured = sorted(accounts(groups), key=lambda entry: entry[0].first.prominence, reverse=True)
    titles = names([group.first for group, _, _ in measured])
    for i, ((group, exact, _), title) in enumerate(zip(measured, titles, strict=True), 1):
        tables.append(honest_table(f"honest-{i}", group, title, costs(exact, technology)))
    tables.append(technology_table(technology))
    return tables


# Ours ----------------------------------------------------------------------------------------------------------------

HELD_OUT_NOTE = "Held out: the last epoch on samples kept out of training; select by this, never by the test set."


def runs_table(found: Gathered) -> Table:
    held_out = found.has_holdout
    accuracies = (*["Held out %"] * held_out, "Test accuracy %", "On integers %")
    what = ("Method", "Dataset", "Network", "T", "N_max", "Epochs", *accuracies)
    table = Table(
        "runs",
        "Our runs",
        (*what, "Config", "Weights", "From"),
        numeric=frozenset(range(3, len(what))),
        notes=[
            "Accuracy of the last epoch on the test set; mean ± sample standard deviation over seeds, a single seed has none.",
            *[HELD_OUT_NOTE] * held_out,
            "Config and weights: first digits of their SHA-256.",
        ],
    )
    for group in found.groups:
        r = group.record
        weights = [str(x.record.get("weights_sha256", "")) for x in group.results]
        hashes = [str(x.record["config_hash"]) for x in group.results]
        table.add(
            [
                group.title, dataset_name(group), str(r["model"]), int(r["timesteps"]), r.get("n_max") or "",
                epochs_cell(group), *[holdout_cell(group)] * held_out, accuracy_cell(group), integer_cell(group),
                Cell(" ".join(map(short, hashes)), hint="\n".join(hashes), link=run_id(group.first)),
                Cell(" ".join(map(short, weights)), hint="\n".join(weights)),
                Cell(" ".join(_basename(x.source) for x in group.results), hint="\n".join(x.source for x in group.results)),
            ],
            "ours",
        )  # fmt: skip
    return table


def _basename(source: str) -> str:
    """Of an analysis with the folder that tells it from others."""
    parts = source.rstrip("/").split("/")
    shown = 1 if parts[-1] != "analysis.json" else 3 if parts[-2:-1] == ["model.analysis"] else 2
    return "/".join(parts[-shown:])


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


def _tested(groups: Sequence[Group]) -> list[Group]:
    """Without runs that were kept off the test set: they have no place in a table of test accuracies."""
    return [group for group in groups if group.mean is not None or group.first.alone]


def accuracy_tables(groups: Sequence[Group]) -> list[Table]:
    """Tables 2, 3 and 4, one for each dataset; ours are the rows of the same dataset."""
    tables = []
    for dataset in dict.fromkeys(row.dataset for row in paper.ACCURACIES):
        rows = [row for row in paper.ACCURACIES if row.dataset == dataset]
        number = rows[0].table
        wide = number == 2  # a column for each T, not a row
        ours = [g for g in _tested(groups) if dataset_name(g) == dataset]
        steps = sorted({1, 2, 4} | {int(g.record["timesteps"]) for g in ours})  # the columns of a wide one
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
            head = [title_at(group), "", str(r["model"]), f"{r['epochs']} epochs"]
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
        for group in _tested(groups):
            r = group.record
            if paper.ablation_row(r) == row:
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
            "T",
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
        numeric=frozenset(range(3, 12)),
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
            [method, "CIFAR-10", "ResNet-20", 2, 300, cell(row.active, 3), cell(row.entropy, 3), cell(100 * row.first, 1),
             cell(low, 3), cell(high, 3), cell(row.variation, 2), "", "", "published"],
            "published",
        )  # fmt: skip
    for group in groups:
        summaries = [a.summary() for a in group.analyses if a.layers]
        active = [s["active_ratio"] for s in summaries]
        active = active or [statistics.fmean(r.active.values()) for r in group.results if r.active]
        if not active:
            continue
        burst = (group.record.get("n_max") or 0) > 1  # with one level only, there is nothing to distribute
        steps_of = [list(r.steps.values()) for r in group.results if r.steps and group.record.get("step") != "fixed"]
        learned = [step for steps in steps_of for step in steps]
        table.add(
            [
                title_at(group), dataset_name(group), str(group.record["model"]), int(group.record["timesteps"]),
                epochs_cell(group), spread_cell(active, 3),
                spread_cell([s["normalised_entropy"] for s in summaries], 3) if burst else None,
                spread_cell([100 * s["first_level"] for s in summaries], 1) if burst else None,
                cell(min(learned), 3) if learned else None, cell(max(learned), 3) if learned else None,
                spread_cell([coefficient_of_variation(np.array(steps)) for steps in steps_of if len(steps) > 1], 2),
                *images_cells(group), "ours",
            ],
            "ours",
        )  # fmt: skip
    return table
