"""The tables of a report: our runs, and the paper's with our rows in them. Text and numbers, no markup."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from lbq.counting.analysis import coefficient_of_variation
from lbq.counting.costs import costs
from lbq.counting.technology import DEFAULT, Technology
from lbq.report import cells
from lbq.report.cells import Cell, Table, cell, dataset_name, run_id, spread_cell, title_at
from lbq.report.cost_tables import PAPER_SETTING, accounts, cost_table, counts_table, energy_table, technology_table
from lbq.report.story import stories
from lbq.results import paper
from lbq.results.result import Gathered, Group, names

DIGITS_OF_HASH = 10
HELD_OUT_NOTE = "Held out: the last epoch on samples kept out of training; select by this, never by the test set."
LIMIT_NOTE = (
    "A dataset of so many samples: that many train and that many test (data.limit). On integers: all test samples."
)
PUBLISHED_NOTE = f"Published rows: as quoted in {paper.CITATION}; venue as named there. They were not run by us."
REPRODUCED_NOTE = "†: reproduced by that paper's authors."
TRAINING_OF_GROUP = {"conversion": "converted from an ANN", "training": "trained directly"}


def all_tables(gathered: Gathered, technology: Technology = DEFAULT) -> list[Table]:
    """Every table of the report, in its order."""
    groups, datasets = gathered.groups, set(map(dataset_name, gathered.results))
    published = PAPER_SETTING[0] in datasets  # of layers and costs
    # the first table of energy is shown open
    lead = next((story.lead.first.source for story in stories(gathered, technology)), None)
    measured = sorted(accounts(groups), key=lambda e: (e[0].first.source == lead, e[0].first.prominence), reverse=True)
    titles = names([group.first for group, _, _ in measured])
    return [
        *([runs_table(gathered)] if gathered.results else []),
        *([unfinished_table(gathered)] if gathered.unfinished else []),
        *(table for table in accuracy_tables(groups) if table.title.rpartition(" on ")[2] in datasets),
        *([ablation_table(groups)] if published else []),
        *(
            table if published else table.ours(table.id)
            for table in (layer_table(groups), counts_table(groups), cost_table(groups, technology))
            if published or table.has("ours")
        ),
        *(
            energy_table(f"energy-{i}", _counted_network(group, title), costs(exact, technology))
            for i, ((group, exact, _), title) in enumerate(zip(measured, titles, strict=True), 1)
        ),
        *([technology_table(technology)] if published or measured else []),
    ]


def _counted_network(group: Group, title: str) -> str:
    """The network of a group whose counts a table shows. title: what tells the group from others."""
    counted = next((r for r, a in group.analysed if "exact" in a.accounts), group.first)
    facts = [group.record["model"], f"T={group.record['timesteps']}"]
    if len(group.results) > 1:
        facts.append(f"seed {counted.record['seed']}")
    return ", ".join([title, *(fact for fact in facts if fact not in title.split(", "))])


def runs_table(gathered: Gathered) -> Table:
    held_out = gathered.has_holdout
    table = Table(
        "runs",
        "Our runs",
        f"Method; Dataset; Network; #T; #N_max; #Epochs; {'#Held out %; ' * held_out}#Test accuracy %; "
        "#On integers %; Config; Weights; From",
        "Accuracy of the last epoch on the test set; mean ± sample standard deviation over seeds, a single seed has none.",
        *[HELD_OUT_NOTE] * held_out,
        *[LIMIT_NOTE] * any(r.limit for r in gathered.finished),
    )
    table.note("Config and weights: first digits of their SHA-256.", "Config", "Weights")
    for group in gathered.groups:
        dataset, network, epochs = cells.setting_cells(group)
        sources = [result.source for result in group.results]
        table.add(
            group.title,
            dataset,
            network,
            int(group.record["timesteps"]),
            group.record.get("n_max") or "",
            epochs,
            *[cells.accuracy_cell(group, held_out=True)] * held_out,
            cells.accuracy_cell(group),
            cells.integer_cell(group),
            _hashes([str(r.record["config_hash"]) for r in group.results], link=run_id(group.first)),
            _hashes([str(r.record.get("weights_sha256", "")) for r in group.results]),
            Cell(" ".join(map(_basename, sources)), hint="\n".join(sources)),
            kind="ours",
        )
    return table


def _hashes(hashes: Sequence[str], link: str = "") -> Cell:
    return Cell(" ".join(h[:DIGITS_OF_HASH] for h in hashes), hint="\n".join(hashes), link=link)


def _basename(source: str) -> str:
    """The name of a file; of an analysis with the folder that tells it from others."""
    parts = source.rstrip("/").split("/")
    shown = 1 if parts[-1] != "analysis.json" else 3 if parts[-2:-1] == ["model.analysis"] else 2
    return "/".join(parts[-shown:])


def unfinished_table(gathered: Gathered) -> Table:
    table = Table(
        "unfinished",
        "Runs that are not finished",
        "Method; Dataset; Network; #T; #Seed; #Epochs done; #Last loss; Config; From",
        "They are in no mean and in no other table; `lbq train ... --resume auto` continues them.",
    )
    for result in gathered.unfinished:
        r, log, done = result.record, result.record["log"], result.record.get("epochs_done", 0)
        table.add(
            result.title,
            dataset_name(result),
            str(r["model"]),
            int(r["timesteps"]),
            int(r["seed"]),
            Cell(f"{done} of {r['epochs']}", float(done)),
            cell(log[-1]["loss"], 4) if log else None,
            _hashes([r["config_hash"]], link=run_id(result)),
            Cell(_basename(result.source), hint=result.source),
            kind="ours",
        )
    return table


def _tested(groups: Sequence[Group]) -> list[Group]:
    """The groups that may stand in a table of test accuracies."""
    return [group for group in groups if group.mean is not None or group.first.alone]


def accuracy_tables(groups: Sequence[Group]) -> list[Table]:
    """Tables 2, 3 and 4, one for each dataset, a row for each T; ours are the rows of the same dataset."""
    tables = []
    for dataset in dict.fromkeys(row.dataset for row in paper.ACCURACIES):
        rows = [row for row in paper.ACCURACIES if row.dataset == dataset]
        table = Table(
            f"table{rows[0].table}-{dataset.lower()}",
            f"Table {rows[0].table}: accuracy on {dataset}",
            "Method; Venue; Architecture; Training; #T; #Accuracy %; Origin",
            PUBLISHED_NOTE,
            *[REPRODUCED_NOTE] * any(row.reproduced for row in rows),
        )
        for row in rows:
            method = row.method + ("†" if row.reproduced else "")
            head = (method, row.venue, row.architecture, TRAINING_OF_GROUP[row.group])
            for t, percent in row.accuracy.items():
                table.add(*head, t, cell(percent), "published", kind="published")
        for group in (g for g in _tested(groups) if dataset_name(g) == dataset):
            r, t, accuracy = group.record, int(group.record["timesteps"]), cells.accuracy_cell(group)
            table.add(title_at(group), "", str(r["model"]), f"{r['epochs']} epochs", t, accuracy, "ours", kind="ours")
        tables.append(table)
    return tables


def ablation_table(groups: Sequence[Group]) -> Table:
    """Table 5 and, beside each of its rows, our runs of that variant."""
    table = Table(
        "table5-ablation",
        "Table 5: ablation on CIFAR-10, N_max = 5",
        "Method; Spike output; Step; Surrogate; #T; Training; #Accuracy %; Origin",
        f"Published rows: {paper.CITATION}; ResNet-20, which is resnet20w128 here, 300 epochs.",
        "The paper's Box-ET is ambiguous: its text says boxes have hard cut-offs. Each of our rows names its surrogate.",
    )
    for row in paper.ABLATION:
        facts = (row.method, row.output, row.step, row.surrogate, row.timesteps)
        table.add(*facts, "300 epochs", cell(row.accuracy), "published", kind="published")
        for group in _tested(groups):
            r = group.record
            if paper.ablation_row(r) == row:
                neuron = (row.output, str(r.get("step", "")), str(r.get("surrogate", "")), int(r["timesteps"]))
                accuracy = cells.accuracy_cell(group)
                table.add(group.title, *neuron, f"{r['epochs']} epochs", accuracy, "ours", kind="ours")
    return table


def layer_table(groups: Sequence[Group]) -> Table:
    """What the paper's text says of its Fig. 4, and ours."""
    table = Table(
        "figure4",
        "Figure 4: means over layers",
        "Method; Dataset; Network; #T; #Epochs; #Active ratio; #Burst entropy; #P(k=1 | k>0) %; #Smallest step; "
        "#Largest step; #Step CV; #Images; Network ran; Origin",
        "Burst entropy: of P(k | k > 0), divided by log N_max. CV: standard deviation over mean of the layers' steps.",
        "Several seeds: mean ± sample standard deviation, the smallest and largest step of all of them.",
        "Ours: entropy and P(k=1) where the run was analysed (lbq analyze).",
    )
    for variant, row in paper.LAYER_WISE.items():
        method = next(a.method for a in paper.ABLATION if a.variant == variant)
        low, high = row.steps or (None, None)
        table.add(
            method,
            *("CIFAR-10", "ResNet-20", 2, 300),
            *(cell(row.active, 3), cell(row.entropy, 3), cell(100 * row.first, 1)),
            *(cell(low, 3), cell(high, 3), cell(row.variation, 2)),
            *("", "", "published"),
            kind="published",
        )
    for group in groups:
        summaries = [a.summary() for a in group.analyses if a.layers]
        active = [s["active_ratio"] for s in summaries]
        active = active or [statistics.fmean(r.active.values()) for r in group.results if r.active]
        if not active:
            continue
        dataset, network, epochs = cells.setting_cells(group)
        bursts = summaries if (group.record.get("n_max") or 0) > 1 else []  # one level has no distribution
        steps_of = [list(r.steps.values()) for r in group.results if r.steps and group.record.get("step") != "fixed"]
        learned = [step for steps in steps_of for step in steps]
        table.add(
            title_at(group),
            *(dataset, network, int(group.record["timesteps"]), epochs),
            spread_cell(active, 3),
            spread_cell([s["normalised_entropy"] for s in bursts], 3),
            spread_cell([100 * s["first_level"] for s in bursts], 1),
            *(cell(min(learned), 3), cell(max(learned), 3)) if learned else ("", ""),
            spread_cell([coefficient_of_variation(np.array(steps)) for steps in steps_of if len(steps) > 1], 2),
            *cells.images_cells(group),
            "ours",
            kind="ours",
        )
    return table
