"""The tables of what networks cost, the paper's and ours. All energies are modelled."""

from __future__ import annotations

from collections.abc import Sequence

from lbq.counting.costs import Costs
from lbq.counting.measurement import account_from
from lbq.counting.operations import Account, Operations, energy_mj, saved
from lbq.counting.technology import DEFAULT, PAPER, Technology
from lbq.report import cells
from lbq.report.cells import Cell, Table, cell, decimals, spread_cell
from lbq.results import paper
from lbq.results.result import Group

PAPER_SETTING = ("CIFAR-10", "ResNet-20", 300)  # dataset, network, epochs
METHODS = f"N_max in brackets; T = {cells.PAPER_TIMESTEPS} where a method names no other."


def accounts_of(group: Group) -> list[tuple[Account, Account]]:
    """Both accounts, border-exact and by rate, of each seed that was counted."""
    return [
        (account_from(a.accounts["exact"], "exact", a.images), account_from(a.accounts["rate"], "rate", a.images))
        for a in group.analyses
        if "exact" in a.accounts
    ]


def accounts(groups: Sequence[Group]) -> list[tuple[Group, Account, Account]]:
    """Groups whose counts are known, with both accounts of the first seed."""
    return [(group, *counted[0]) for group in groups if (counted := accounts_of(group))]


def counts_table(groups: Sequence[Group]) -> Table:
    table = Table(
        "table6-counts",
        "Table 6: accumulations per image",
        "Method; Dataset; Network; #Epochs; #Unary (M); #Bit-sparse (M); #Saved %; #Border-exact (M); #Images; "
        "Network ran; Origin",
        f"Published: {paper.CITATION}.",
        f"{METHODS} Several seeds: mean ± sample standard deviation.",
        "Unary, bit-sparse: rate x MACs, padded taps included, as the paper counts. Border-exact: bit-sparse at valid "
        "positions only, the readout once on its sums.",
    )
    for method, (unary, sparse) in paper.ACCUMULATIONS.items():
        counts = map(cell, (unary, sparse, saved(sparse, unary)))
        table.add(method, *PAPER_SETTING, *counts, "", "", "", "published", kind="published")
    for group in groups:
        if not (counted := accounts_of(group)):
            continue
        exacts, rates = zip(*counted, strict=True)
        digits = decimals(rates[0].executed / 1e6)
        table.add(
            cells.method_name(group),
            *cells.setting_cells(group),
            spread_cell([a.total.unary / 1e6 for a in rates], digits),
            spread_cell([a.executed / 1e6 for a in rates], digits),
            spread_cell([saved(a.executed, a.total.unary) for a in rates], 2),
            spread_cell([a.executed / 1e6 for a in exacts], digits),
            *cells.images_cells(group),
            "ours",
            kind="ours",
        )
    return table


def cost_table(groups: Sequence[Group], technology: Technology = DEFAULT) -> Table:
    repriced = not technology.as_published
    table = Table(
        "table7-cost",
        "Table 7: accuracy and modelled cost",
        "Method; Dataset; Network; #Epochs; #Accuracy %; #On integers %; #FP MACs (M); #Synaptic ACs (M); "
        "#Formations (M); #Modelled energy (mJ); #ANN / it, modelled; #Images; Network ran; Origin",
        f"Published: {paper.CITATION}; its energies again from its counts"
        + (", at the prices below: not the energies that it published." if repriced else "."),
        METHODS,
        f"Modelled, never measured: {technology.fp32_mac:g} pJ for a MAC, {technology.fp32_add:g} pJ for an accumulation, "
        f"{technology.int32_add:g} pJ for a formation. Memory, routing and state updates are not in it.",
        f"Prices: {technology.credit(*PAPER)}.",
        "Counted as rate x MACs, padded taps included, as the paper counts; beyond its table: at valid positions only.",
    )
    rows = paper.cost_rows()
    reference = energy_mj(rows[0][2], technology.paper)
    for method, accuracy, ops in rows:
        energy = energy_mj(ops, technology.paper)
        table.add(
            method,
            *PAPER_SETTING,
            cell(accuracy),
            "",
            cell(ops.fp_macs / 1e6),
            cell(ops.accumulations / 1e6) if ops.accumulations else "N/A",
            cell(ops.formations / 1e6, 3) if ops.formations else "N/A",
            cell(energy, 2),
            cell(reference / energy) if ops.accumulations else "",
            "",
            "",
            "published counts, other prices" if repriced else "published",
            kind="published",
        )
    for group in groups:
        rates = [rate for _, rate in accounts_of(group)]
        if not rates:
            continue
        operations = [rate.operations() for rate in rates]
        energies = [energy_mj(ops, technology.paper) for ops in operations]
        anns = [energy_mj(Operations(rate.ann_macs), technology.paper) for rate in rates]
        macs, accumulations = operations[0].fp_macs / 1e6, [ops.accumulations / 1e6 for ops in operations]
        formations = [ops.formations / 1e6 for ops in operations]
        table.add(
            cells.method_name(group),
            *cells.setting_cells(group),
            cells.accuracy_cell(group),
            cells.integer_cell(group),
            cell(macs, decimals(macs)),
            spread_cell(accumulations, decimals(accumulations[0])),
            spread_cell(formations, max(3, decimals(formations[0]))) if formations[0] else "N/A",
            spread_cell(energies, decimals(energies[0])),
            spread_cell([a / e for a, e in zip(anns, energies, strict=True)], 2),
            *cells.images_cells(group),
            "ours",
            kind="ours",
        )
    return table


def energy_table(id: str, subject: str, costs: Costs) -> Table:
    """What the paper's table leaves out. subject: what was counted."""
    t = costs.technology
    shifts = "; ".join(
        f"{line.what} {line.count / 1e6:,.3f} M, {microjoules(line.microjoules).text} µJ" for line in costs.shifts
    )
    table = Table(
        id,
        f"Energy: {subject}; modelled µJ per image",
        "Method; #Paper's regime; #Integer arithmetic; #With memory; #int8 ANN / it; #Break-even, arithmetic; "
        "#Break-even, with memory; Note",
        "All energies are modelled. Counts are border-exact.",
        "Integer arithmetic adds state updates, identity shortcuts and sums to integer prices; memory adds weight bytes "
        f"({t.weight_byte:g} pJ, each used {t.reuse}), membranes and levels ({t.state_byte:g} pJ a byte).",
        f"Break-even: the density at which bit planes would cost what this rival costs; theirs is {costs.density:.3f} set bits "
        "that a weight meets at a timestep.",
        f"Shifts, not in the table: {shifts}.",
        f"Read as other tools do (NeuroBench, syops, SpikingJelly: a level above 1 is a MAC): "
        f"{costs.reading.count / 1e6:,.2f} M MACs, {microjoules(costs.reading.microjoules).text} µJ at fp32.",
    )
    int8 = next(m for m in costs.methods if m.name == "ANN, int8")
    meets = {(b.rival, b.regime): Cell(b.text, b.density) for b in costs.break_even}
    for method in costs.methods:
        table.add(
            method.name,
            *map(microjoules, (method.paper_uj, method.integer_uj, method.memory_uj)),
            cell(int8.memory_uj / method.memory_uj),
            *(meets.get((method.name, regime)) for regime in ("integer", "memory")),
            method.note,
            kind="ours" if method is costs.methods[0] else "",
        )
    return table


def microjoules(value: float | None) -> Cell:
    """Three digits or more."""
    if value is None:
        return Cell("")
    return cell(value, 1 if value >= 100 else 2 if value >= 1 else 4)


def technology_table(technology: Technology) -> Table:
    table = Table(
        "technology",
        "Technology constants",
        "Constant; #pJ; Origin",
        f"Prices: {technology.credit()}. Replace them with --technology FILE (TOML or JSON).",
    )
    for name, value, origin in technology.table():
        table.add(name, Cell(f"{value:g}", value), origin)
    return table
