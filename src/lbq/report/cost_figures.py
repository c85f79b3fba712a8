"""Figures of what networks cost: modelled energy, counted accumulations, the engine's measured speed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lbq.counting.operations import Account, energy_mj
from lbq.counting.technology import DEFAULT, PAPER, Technology
from lbq.errors import LbqError
from lbq.report.cells import PAPER_TIMESTEPS, title_at
from lbq.report.cost_tables import accounts_of
from lbq.report.figures import Figure, padded
from lbq.report.svg import Plot
from lbq.results import paper
from lbq.results.result import Group

SETTING = f"CIFAR-10, ResNet-20 (resnet20w128), T = {PAPER_TIMESTEPS}"
RIVAL = "int8 ANN once, onnxruntime"  # as benchmarks/engine_speed.py calls it


@dataclass(frozen=True)
class _Ours:
    """A run of ours in the paper's setting. number: what it is called in these figures."""

    number: int
    name: str
    group: Group
    account: Account


def cost_figures(measured: Sequence[tuple[Group, Account, Account]], technology: Technology = DEFAULT) -> list[Figure]:
    setting = ("cifar10", "resnet20w128", PAPER_TIMESTEPS)
    chosen = [
        (g, rate) for g, _, rate in measured if tuple(g.record[k] for k in ("dataset", "model", "timesteps")) == setting
    ]
    budgets = len({g.record["epochs"] for g, _ in chosen})
    first = len(paper.cost_rows()) + 1
    ours = [
        _Ours(number, title_at(g) + (f", {g.record['epochs']} ep" if budgets > 1 else ""), g, rate)
        for number, (g, rate) in enumerate(chosen, first)
    ]
    return [_accuracy_energy(ours, technology), _counts(ours)]


def _accuracy_energy(ours: Sequence[_Ours], technology: Technology) -> Figure:
    """Points are numbered, since no name of theirs would fit beside them; the list below says which is which."""
    published = [(row.method, energy_mj(row.operations, technology.paper), row.accuracy) for row in paper.cost_rows()]
    theirs = "published" if technology.as_published else "published counts, other prices"
    points = [(str(i), 0, f"{name}, {theirs}", e, a) for i, (name, e, a) in enumerate(published, 1)]
    points += [
        (str(o.number), 1, f"{o.name}, ours", _energy(o.group, technology), o.group.mean)
        for o in ours
        if o.group.mean is not None
    ]
    energies = [e for *_, e, _ in points]
    plot = Plot(
        "Accuracy against modelled energy",
        "; ".join(f"{name}: {e:.3g} mJ, {a:.2f} %" for _, _, name, e, a in points),
        (min(energies) / 1.6, max(energies) * 1.8),
        padded([a for *_, a in points]),
        "modelled arithmetic energy per image, mJ",
        "accuracy %",
        xlog=True,
        subtitle=SETTING,
    )
    for number, series, name, e, a in points:
        plot.mark(*plot.at((e, a)), series, 4.5, f"{number}: {name}: {e:.2f} mJ, {a:.2f} %", hollow=series == 0)
    plot.numbers([(plot.at((e, a)), number) for number, _, _, e, a in points])
    plot.listing([(n, series, name, f"{e:.2f} mJ, {a:.2f} %") for n, series, name, e, a in points], hollow=[0])
    caption = f"Energy is modelled, in the paper's regime ({technology.label(*PAPER)}), counts as rate x MACs."
    if ours:
        caption += " Our accuracy and the published one come from different budgets: see the tables."
    return Figure("accuracy-energy", plot.title, caption, plot.svg())


def _energy(group: Group, technology: Technology) -> float:
    """Mean over seeds, mJ."""
    return statistics.fmean(energy_mj(rate.operations(), technology.paper) for _, rate in accounts_of(group))


def _counts(ours: Sequence[_Ours]) -> Figure:
    """Every N_max has a band: what is published stands first in it, our runs beside that, each in a place of its own."""
    published = {int(m[5:-1]): v for m, v in paper.ACCUMULATIONS.items() if m.startswith("LBQ")}
    ours = [o for o in ours if not o.account.unit_events]
    bands: dict[int, list[_Ours]] = {n: [] for n in sorted({*published, *(int(o.group.record["n_max"]) for o in ours)})}
    for o in ours:
        bands[int(o.group.record["n_max"])].append(o)
    starts, end = {}, 0.5
    for n, inside in bands.items():
        starts[n] = end
        end += 1.5 + len(inside)
    pairs = [*published.values(), *((o.account.total.unary / 1e6, o.account.total.bit_sparse / 1e6) for o in ours)]
    plot = Plot(
        "Accumulations against N_max",
        "; ".join(f"N_max {n}: unary {u:.0f} M, bit-sparse {b:.0f} M" for n, (u, b) in published.items()),
        (0, end),
        (0, 1.1 * max(max(pair) for pair in pairs) / 1e3),
        "N_max (not to scale)" if ours else "N_max",
        "accumulations per image, billions",
        xticks=[(starts[n] + len(inside) / 2, str(n)) for n, inside in bands.items()],
        subtitle=SETTING,
    )
    for start in list(starts.values())[1:] if ours else ():
        border = plot.at_x(start - 0.75)
        plot.segment((border, plot.top), (border, plot.bottom), "grid")
    for series, name in enumerate(("unary", "bit-sparse")):
        points = [(starts[n], pair[series] / 1e3) for n, pair in published.items()]
        tips = [f"published, N_max {n}, {name}: {pair[series]:.1f} M" for n, pair in published.items()]
        plot.line(points, series, tips, hollow=True)
    rows, numbered, others = [], [], []
    for n, inside in bands.items():
        for i, o in enumerate(inside, 1):
            total = o.account.total
            values = (total.unary / 1e6, total.bit_sparse / 1e6)
            places = [plot.at((starts[n] + i, value / 1e3)) for value in values]
            for series, (value, place) in enumerate(zip(values, places, strict=True)):
                plot.mark(*place, series, 4.5, f"{o.name}, N_max {n}: {value:.1f} M")
            numbered.append((places[0], str(o.number)))
            others.append(places[1])
            rows.append((o.number, o.name, f"{values[0]:.1f} and {values[1]:.1f} M"))
    plot.numbers(numbered, others)
    plot.legend([("unary", 0), ("bit-sparse", 1)])
    plot.listing([(str(number), None, f"{name}, ours", value) for number, name, value in sorted(rows)])
    caption = "Counts as rate x MACs. Hollow and joined: published."
    if ours:
        caption += " Filled: ours, under their numbers of the figure before; the list says unary and bit-sparse counts."
    return Figure("counts", plot.title, caption, plot.svg())


def speed_figures(benchmarks: Sequence[dict[str, Any]]) -> list[Figure]:
    """Milliseconds per image by planes and densely against the share of active neurons (benchmarks/engine_speed.py)."""
    found = [figure for benchmark in benchmarks if (figure := _speed(benchmark)) is not None]
    return [replace(figure, id=f"{figure.id}-{i}" if i else figure.id) for i, figure in enumerate(found)]


def _speed(benchmark: dict[str, Any]) -> Figure | None:
    points = _sweep(benchmark)
    if not points:
        return None
    machine, rival = _machine(benchmark), _rival(benchmark)
    curves = [
        ("bit planes", [(share, planes) for share, planes, _ in points]),
        ("dense", [(share, dense) for share, _, dense in points]),
    ]
    if rival is not None:
        curves.append(("int8 ANN, onnxruntime", [(points[0][0], rival), (points[-1][0], rival)]))
    plot = Plot(
        "Engine: time against density",
        "; ".join(f"{100 * x:.0f} % active: planes {p:.1f} ms, dense {d:.1f} ms" for x, p, d in points),
        (0, 1.05 * max(x for x, _, _ in points)),
        (0, 1.08 * max(y for _, curve in curves for _, y in curve)),
        "share of active neuron-steps",
        "ms per image, one thread",
        subtitle=f"resnet20w128 on {machine}",
    )
    for series, (name, curve) in enumerate(curves):
        plot.line(curve, series, [f"{name}, {100 * x:.0f} % active: {y:.1f} ms" for x, y in curve])
    plot.legend([(name, series) for series, (name, _) in enumerate(curves)])
    caption = f"Measured by benchmarks/engine_speed.py on {machine}."
    if rival is not None:
        caption += " The int8 ANN takes one pass, whatever is active."
    return Figure("speed", plot.title, caption, plot.svg())


def _machine(benchmark: dict[str, Any]) -> str:
    """What the file says of it: the processor's name where it has one, and the instructions that the engine found."""
    shown = {
        "avx2": "AVX2",
        "avx512": "AVX-512",
        "vnni": "VNNI",
        "amx": "AMX",
        "neon": "NEON",
        "dotprod": "dot products",
    }
    features = [shown[f] for f in benchmark.get("features") or () if f in shown]
    kind = "Arm" if "NEON" in features else "x86-64" if features else "a machine that the file does not name"
    name = str(benchmark.get("machine") or kind)
    return f"{name} with {', '.join(features)}" if features else name


def _rival(benchmark: dict[str, Any]) -> float | None:
    """Milliseconds of the int8 ANN on one thread, where it was measured beside the engine."""
    taken = [part[RIVAL].get("1") for part in benchmark.values() if isinstance(part, dict) and RIVAL in part]
    return float(taken[0]) if taken and isinstance(taken[0], int | float) else None


def _sweep(benchmark: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Of the sweep over `active`: share, ms by planes, ms densely."""
    try:
        return sorted(
            (float(share), float(planes), float(dense)) for share, planes, dense in benchmark["sweeps"]["active"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LbqError("a benchmark must hold sweeps.active, as benchmarks/engine_speed.py writes it") from error
