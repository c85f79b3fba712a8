"""Figures of what networks cost: modelled energy, counted accumulations, the engine's measured speed."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lbq.counting.operations import Account, energy_mj
from lbq.counting.technology import DEFAULT, PAPER, Technology
from lbq.errors import LbqError
from lbq.report.cells import PAPER_TIMESTEPS, title_at
from lbq.report.cost_tables import accounts_of
from lbq.report.figures import Figure, padded, unbeaten
from lbq.report.plot import Plot
from lbq.report.svg import Point
from lbq.results import paper
from lbq.results.result import Group

SETTING = f"CIFAR-10, ResNet-20 (resnet20w128), T = {PAPER_TIMESTEPS}"
RIVAL = "int8 ANN once, onnxruntime"  # in benchmarks/engine_speed.py
MOST_NUMBERED = 8  # of our runs; of more, those that matter


@dataclass(frozen=True)
class _Ours:
    """A network of ours in the paper's setting. numbered: whether figures label and list it; each counts them anew. account: of
    its first seed. unary, sparse: millions of accumulations, means over its seeds."""

    numbered: bool
    name: str
    group: Group
    account: Account
    unary: float
    sparse: float


def cost_figures(measured: Sequence[tuple[Group, Account, Account]], technology: Technology = DEFAULT) -> list[Figure]:
    """Beside the published points: only for results on the paper's dataset."""
    setting = ("cifar10", "resnet20w128", PAPER_TIMESTEPS)
    keys = ("dataset", "model", "timesteps")
    chosen = [(g, rate) for g, _, rate in measured if tuple(g.record[key] for key in keys) == setting]
    budgets = len({g.record["epochs"] for g, _ in chosen})
    ours, numbered = [], _numbered(chosen)
    for group, rate in chosen:
        epochs = f", {group.record['epochs']} ep" if budgets > 1 else ""
        totals = [account.total for _, account in accounts_of(group)]
        counts = [statistics.fmean(each) / 1e6 for each in zip(*((t.unary, t.bit_sparse) for t in totals), strict=True)]
        ours.append(_Ours(any(group is one for one in numbered), title_at(group) + epochs, group, rate, *counts))
    return [_accuracy_energy(ours, technology), _counts(ours)]


def _numbered(chosen: Sequence[tuple[Group, Account]]) -> list[Group]:
    """All of few runs. Of many the best of each N_max, and those that no other beats in accuracy and accumulations."""
    if len(chosen) <= MOST_NUMBERED:
        return [group for group, _ in chosen]
    best: dict[int, Group] = {}
    for group, _ in chosen:
        n_max = int(group.record["n_max"])
        best[n_max] = max(best.get(n_max, group), group, key=lambda one: one.mean or 0.0)
    front = unbeaten(chosen, lambda pair: pair[1].executed, lambda pair: pair[0].mean or 0.0)
    return [*best.values(), *(group for group, _ in front)]


def _accuracy_energy(ours: Sequence[_Ours], technology: Technology) -> Figure:
    """Points are numbered, for names would not fit beside them; the list below names them. Of many runs some have none."""
    theirs = "published" if technology.as_published else "published counts, other prices"
    points = [
        (str(i), 0, f"{name}, {theirs}", energy_mj(operations, technology.paper), accuracy)
        for i, (name, accuracy, operations) in enumerate(paper.cost_rows(), 1)
    ]
    numbers = itertools.count(len(points) + 1)
    for o in ours:
        if o.group.mean is not None:
            energy = statistics.fmean(
                energy_mj(rate.operations(), technology.paper) for _, rate in accounts_of(o.group)
            )
            points.append((str(next(numbers)) if o.numbered else "", 1, f"{o.name}, ours", energy, o.group.mean))
    energies, named = [e for *_, e, _ in points], [point for point in points if point[0]]
    plot = Plot(
        "Accuracy against modelled energy",
        "; ".join(f"{name}: {e:.3g} mJ, {a:.2f} %" for _, _, name, e, a in named),
        (min(energies) / 1.6, max(energies) * 1.8),
        padded([a for *_, a in points]),
        "modelled arithmetic energy per image, mJ",
        "accuracy %",
        xlog=True,
        subtitle=SETTING,
    )
    small = [point for point in points if not point[0]]
    for number, series, name, e, a in (*small, *named):
        tip = f"{name}: {e:.2f} mJ, {a:.2f} %"
        plot.mark(*plot.at((e, a)), series, 4.5 if number else 2.5, tip, hollow=series == 0)
    plot.numbers([(plot.at((e, a)), number) for number, _, _, e, a in named], [plot.at((e, a)) for *_, e, a in small])
    plot.listing([(n, series, name, f"{e:.2f} mJ, {a:.2f} %") for n, series, name, e, a in named], hollow=[0])
    caption = f"Energy is modelled, in the paper's regime, counts as rate x MACs. Prices: {technology.credit(*PAPER)}."
    if ours:
        caption += " Our accuracy and the published one come from different budgets: see the tables."
    if small:
        caption += f" Small: {len(small)} more runs of ours."
    return Figure("accuracy-energy", plot.title, caption, plot.svg())


def _counts(ours: Sequence[_Ours]) -> Figure:
    """Every N_max has a band, with the published point first and our runs beside it."""
    published = {int(m[5:-1]): v for m, v in paper.ACCUMULATIONS.items() if m.startswith("LBQ")}
    left_out = sum(not o.numbered for o in ours)
    ours = [o for o in ours if o.numbered and not o.account.unit_events]
    bands: dict[int, list[_Ours]] = {n: [] for n in sorted({*published, *(int(o.group.record["n_max"]) for o in ours)})}
    for o in ours:
        bands[int(o.group.record["n_max"])].append(o)
    starts, end = {}, 0.5
    for n, inside in bands.items():
        starts[n] = end
        end += 1.5 + len(inside)
    pairs = [*published.values(), *((o.unary, o.sparse) for o in ours)]
    plot = Plot(
        "Accumulations against N_max",
        "; ".join(f"N_max {n}: unary {u:,.0f} M, bit-sparse {b:,.0f} M" for n, (u, b) in published.items()),
        (0, end),
        (0, 1.1 * max(max(pair) for pair in pairs) / 1e3),
        "N_max (not to scale)" if ours else "N_max",
        "accumulations, billions",
        xticks=[(starts[n] + len(inside) / 2, str(n)) for n, inside in bands.items()],
        subtitle=SETTING,
    )
    for start in list(starts.values())[1:] if ours else ():
        border = plot.at_x(start - 0.75)
        plot.segment((border, plot.top), (border, plot.bottom), "grid")
    for series, name in enumerate(("unary", "bit-sparse")):
        points = [(starts[n], pair[series] / 1e3) for n, pair in published.items()]
        tips = [f"published, N_max {n}, {name}: {pair[series]:,.1f} M" for n, pair in published.items()]
        plot.line(points, series, tips, hollow=True)
    numbered: list[tuple[Point, str]] = []
    rows, others = [], []
    for n, inside in bands.items():
        for i, o in enumerate(inside, 1):
            places = [plot.at((starts[n] + i, value / 1e3)) for value in (o.unary, o.sparse)]
            for series, value in enumerate((o.unary, o.sparse)):
                plot.mark(*places[series], series, 4.5, f"{o.name}, N_max {n}: {value:,.1f} M")
            numbered.append((places[0], str(len(numbered) + 1)))
            others.append(places[1])
            rows.append((numbered[-1][1], None, f"{o.name}, ours", f"{o.unary:,.1f} and {o.sparse:,.1f} M"))
    plot.numbers(numbered, others)
    plot.legend([("unary", 0), ("bit-sparse", 1)])
    plot.listing(rows)
    caption = "For an image, as rate x MACs, means over seeds. Hollow and joined: published."
    if ours:
        caption += " Filled and numbered: ours; the list says unary and bit-sparse counts."
    if left_out:
        caption += f" Left out: {left_out} more runs of ours, which Table 6 has."
    return Figure("counts", plot.title, caption, plot.svg())


def speed_figures(benchmarks: Sequence[dict[str, Any]]) -> list[Figure]:
    """Milliseconds per image by planes and densely against the share of active neurons (benchmarks/engine_speed.py)."""
    figures = [figure for benchmark in benchmarks if (figure := _speed(benchmark)) is not None]
    return [replace(figure, id=f"{figure.id}-{i}" if i else figure.id) for i, figure in enumerate(figures)]


def _speed(benchmark: dict[str, Any]) -> Figure | None:
    try:  # share of active neurons, ms by planes, ms densely
        points = sorted((float(x), float(planes), float(dense)) for x, planes, dense in benchmark["sweeps"]["active"])
    except (KeyError, TypeError, ValueError) as error:
        raise LbqError("a benchmark must hold sweeps.active, as benchmarks/engine_speed.py writes it") from error
    if not points:
        return None
    machine = _machine(benchmark)
    curves = [
        ("bit planes", [(share, planes) for share, planes, _ in points]),
        ("dense", [(share, dense) for share, _, dense in points]),
    ]
    caption = f"Measured by benchmarks/engine_speed.py on {machine}."
    threads = str(benchmark.get("sweep_threads", 1))
    rivals = [part[RIVAL].get(threads) for part in benchmark.values() if isinstance(part, dict) and RIVAL in part]
    if rivals and isinstance(rivals[0], int | float):  # on as many threads
        curves.append(("int8 ANN, onnxruntime", [(points[0][0], rivals[0]), (points[-1][0], rivals[0])]))
        caption += " The int8 ANN takes one pass, whatever is active."
    plot = Plot(
        "Engine: time against density",
        "; ".join(f"{100 * x:.0f} % active: planes {p:.1f} ms, dense {d:.1f} ms" for x, p, d in points),
        (0, 1.05 * max(x for x, _, _ in points)),
        (0, 1.08 * max(y for _, curve in curves for _, y in curve)),
        "share of active neuron-steps",
        "ms per image, one thread" if threads == "1" else f"ms per image, {threads} threads",
        subtitle=f"resnet20w128 on {machine}",
    )
    for series, (name, curve) in enumerate(curves):
        plot.line(curve, series, [f"{name}, {100 * x:.0f} % active: {y:.1f} ms" for x, y in curve])
    plot.legend([(name, series) for series, (name, _) in enumerate(curves)])
    return Figure("speed", plot.title, caption, plot.svg())


def _machine(benchmark: dict[str, Any]) -> str:
    """The processor's name where the file has one, and what of its instructions the engine uses."""
    features = [str(feature) for feature in benchmark.get("features") or () if feature != "portable"]
    name = re.sub(r"\((R|TM)\)", "", str(benchmark.get("machine") or "a machine that the file does not name"))
    return f"{name} with {', '.join(features)}" if features else name
