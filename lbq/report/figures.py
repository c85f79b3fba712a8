"""The figures of a report, drawn as SVG from results and analyses."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lbq import paper
from lbq.account import Account, energy_mj
from lbq.analyze import Analysis, Membrane
from lbq.errors import LbqError
from lbq.report.svg import Drawing, Plot, number
from lbq.report.tables import DATASETS
from lbq.results import Gathered, Group, Result, names
from lbq.technology import DEFAULT, PAPER, Technology

# lightness falls with the level, so that the order survives greyscale print
LEVEL_COLOURS = ("#fde725", "#7ad151", "#22a884", "#2a788e", "#414487", "#5a1a6e")


@dataclass(frozen=True)
class Figure:
    """caption: what is seen and from what; modelled: whether an energy is in it."""

    id: str
    title: str
    caption: str
    svg: str
    wide: bool = False


def level_colour(k: int, n_max: int) -> str:
    """Of level k = 1..n_max, light to dark."""
    share = (k - 1) / max(n_max - 1, 1) * (len(LEVEL_COLOURS) - 1)
    low = min(int(share), len(LEVEL_COLOURS) - 2)
    a, b = (tuple(int(LEVEL_COLOURS[i][j : j + 2], 16) for j in (1, 3, 5)) for i in (low, low + 1))
    mixed = (round(x + (y - x) * (share - low)) for x, y in zip(a, b, strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)


def series_of(found: Gathered) -> dict[str, int]:
    """One colour for each run, the same in all figures: by where it came from."""
    return {result.source: i for i, result in enumerate(found.results)}


def padded(values: Sequence[float], floor: float | None = None) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return (low - room if floor is None else floor), high + room


def _by_dataset(found: Gathered, draw: Callable[[Gathered, dict[str, int]], list[Figure]]) -> list[Figure]:
    """Figures of each dataset's runs for themselves: curves of different tasks do not belong on one axis."""
    datasets = list(dict.fromkeys(str(r.record["dataset"]) for r in found.results))
    figures = []
    for i, dataset in enumerate(datasets):
        part = replace(found, results=[r for r in found.results if r.record["dataset"] == dataset])
        for figure in draw(part, series_of(found)):
            id = f"{figure.id}-{dataset}" if i else figure.id
            on = f"{figure.title} on {DATASETS.get(dataset, dataset)}" if len(datasets) > 1 else figure.title
            figures.append(replace(figure, id=id, title=on))
    return figures


# Training ------------------------------------------------------------------------------------------------------------


def training_figures(found: Gathered) -> list[Figure]:
    """Loss, accuracy and the range of steps over epochs, of all runs that have a log; unfinished ones end early."""
    return _by_dataset(found, _training)


def _training(found: Gathered, colour: dict[str, int]) -> list[Figure]:
    results = [r for r in found.results if r.record["log"]]
    if not results:
        return []
    titles = [
        f"{name} (unfinished)" if not r.finished else name for name, r in zip(names(results), results, strict=True)
    ]
    figures = []
    for key, title, label in (("loss", "Training loss", "loss"), ("test_accuracy", "Test accuracy", "accuracy %")):
        curves = [
            [(float(e["epoch"]), float(e[key])) for e in r.record["log"] if e.get(key) is not None] for r in results
        ]
        if not any(curves):
            continue
        values = [y for curve in curves for _, y in curve]
        last = max(x for curve in curves for x, _ in curve)
        plot = Plot(
            title,
            f"{title} over epochs; at the end: "
            + "; ".join(f"{t} {c[-1][1]:.4g}" for t, c in zip(titles, curves, strict=True) if c),
            (1 if last > 1 else 0, last),
            padded(values),
            "epoch",
            label,
        )  # fmt: skip
        shown = [(i, curve) for i, curve in enumerate(curves) if curve]
        for i, curve in shown:
            few = len(curve) <= 20
            plot.line(
                curve,
                colour[results[i].source],
                marks=few,
                tips=[f"{titles[i]}, epoch {x:.0f}: {y:.4g}" for x, y in curve],
            )
        plot.legend([(titles[i], colour[results[i].source]) for i, _ in shown])
        note = "Every epoch." if key == "loss" else "At the epochs at which it was measured; the last is the result."
        figures.append(Figure(f"training-{key}", title, note, plot.svg()))
    return [*figures, *_step_ranges(results, titles, colour)]


def _step_ranges(results: Sequence[Result], titles: Sequence[str], colour: dict[str, int]) -> list[Figure]:
    learned = [(i, r) for i, r in enumerate(results) if any("step_min" in e for e in r.record["log"])]
    learned = [(i, r) for i, r in learned if r.record.get("step") != "fixed"]
    if not learned:
        return []
    logs = {i: [e for e in r.record["log"] if "step_min" in e] for i, r in learned}
    high = max(e["step_max"] for log in logs.values() for e in log)
    last = max(e["epoch"] for log in logs.values() for e in log)
    plot = Plot(
        "Smallest and largest step",
        "The range of the learned steps over all layers, by epoch",
        (1 if last > 1 else 0, last),
        (0, 1.06 * high),
        "epoch",
        "step γ",
    )
    for i, log in logs.items():
        for key in ("step_min", "step_max"):
            plot.line([(e["epoch"], e[key]) for e in log], colour[results[i].source])
    plot.legend([(titles[i], colour[r.source]) for i, r in learned])
    return [Figure("training-steps", plot.title, "Over all layers of a network; two curves for each run.", plot.svg())]


# Figure 4 ------------------------------------------------------------------------------------------------------------


def layer_figures(found: Gathered) -> list[Figure]:
    """Fig. 4 (a) steps, (b) entropy against activity, (c-f) level distributions, with what the records hold."""
    return _by_dataset(found, _layers)


def _layers(found: Gathered, colour: dict[str, int]) -> list[Figure]:
    groups = [g for g in found.groups if g.first.active or g.first.steps]
    if not groups:
        return []
    named = [(colour[g.first.source], t, g) for t, g in zip(names([g.first for g in groups]), groups, strict=True)]
    figures = [_steps(named), _active(named)]
    analysed = [(i, t, g, g.analysis) for i, t, g in named if g.analysis is not None and g.analysis.layers]
    analysed = [entry for entry in analysed if max(layer.n_max for layer in entry[3].layers) > 1]
    if analysed:
        figures.append(_entropy([(i, t, a) for i, t, _, a in analysed]))
    ids = _ids({i: t for i, t, _ in named})
    figures += [replace(_levels(t, g, a), id=f"levels-{ids[i]}") for i, t, g, a in analysed]
    for i, t, g in named:
        if g.analysis is not None:
            figures += [replace(figure, id=f"membranes-{ids[i]}") for figure in _membranes(t, g.analysis)]
    return [figure for figure in figures if figure is not None]


def _ids(titles: dict[int, str]) -> dict[int, str]:
    """By series, what its figures' files are called: after its title, and its number where two have the same."""
    slugs = {i: re.sub("[^a-z0-9]+", "-", title.lower()).strip("-") for i, title in titles.items()}
    times = Counter(slugs.values())
    return {i: slug if times[slug] == 1 else f"{slug}-{i}" for i, slug in slugs.items()}


def _layer_axis(count: int) -> list[tuple[float, str]]:
    every = 1 if count <= 10 else 2 if count <= 20 else 5
    return [(i, str(i)) for i in range(1, count + 1) if (i - 1) % every == 0]


def _by_layer(title: str, label: str, curves: Sequence[tuple[int, str, dict[str, float]]]) -> Plot:
    count = max(len(values) for _, _, values in curves)
    high = max(max(values.values()) for _, _, values in curves)
    plot = Plot(
        title,
        f"{title}; "
        + "; ".join(f"{name}: {min(v.values()):.3g} to {max(v.values()):.3g}" for _, name, v in curves),
        (0.5, count + 0.5),
        (0, 1.08 * high),
        "spiking layer, from the input",
        label,
        xticks=_layer_axis(count),
    )  # fmt: skip
    for i, name, values in curves:
        tips = [f"{name}, {layer}: {value:.4g}" for layer, value in values.items()]
        plot.line([(j + 1, value) for j, value in enumerate(values.values())], i, marks=True, tips=tips)
    plot.legend([(name, i) for i, name, _ in curves])
    return plot


def _steps(named: Sequence[tuple[int, str, Group]]) -> Figure | None:
    curves = [(i, t, g.first.steps) for i, t, g in named if g.first.steps and g.record.get("step") != "fixed"]
    if not curves:
        return None
    plot = _by_layer("(a) Learned step of each layer", "step γ", curves)
    return Figure("steps", "Figure 4 (a)", "Steps after training, of the first seed.", plot.svg())


def _active(named: Sequence[tuple[int, str, Group]]) -> Figure | None:
    curves = [(i, t, g.first.active) for i, t, g in named if g.first.active]
    if not curves:
        return None
    plot = _by_layer("Active ratio of each layer", "active ratio", curves)
    return Figure(
        "active", "Activity by layer", "Share of neuron-steps with a non-zero level, over test images.", plot.svg()
    )


def _entropy(analysed: Sequence[tuple[int, str, Analysis]]) -> Figure:
    high = max(layer.histogram.active_ratio for _, _, a in analysed for layer in a.layers)
    plot = Plot(
        "(b) Burst entropy against active ratio",
        "; ".join(
            f"{name}: mean {a.mean('active_ratio'):.3f}, {a.mean('normalised_entropy'):.3f}" for _, name, a in analysed
        ),
        (0, max(1.08 * high, 0.3)),
        (0, 1.02),
        "active ratio",
        "normalised burst entropy",
    )
    for i, name, a in analysed:
        for layer in a.layers:
            h = layer.histogram
            plot.mark(*plot.at((h.active_ratio, h.normalised_entropy)), i, 2.6, f"{name}, {layer.name}")
        plot.mark(
            *plot.at((a.mean("active_ratio"), a.mean("normalised_entropy"))), i, 8, f"{name}, mean over layers", True
        )
    for variant, row in paper.LAYER_WISE.items():
        x, y = plot.at((row.active, row.entropy))
        for slope in (-1, 1):
            plot.path([(x - 4, y - 4 * slope), (x + 4, y + 4 * slope)], "line s7")
        side = -1 if variant == "v1" else 1  # V1 and LBQ lie close together
        plot.text(x + 7 * side, y + 4, variant.upper(), "start" if side > 0 else "end", "soft small")
    plot.legend([(name, i) for i, name, _ in analysed])
    caption = "Small: layers; large: mean over layers; ×: the means that the paper publishes."
    return Figure("entropy", "Figure 4 (b)", caption, plot.svg())


def _levels(title: str, group: Group, analysis: Analysis) -> Figure:
    figure = _level_bars(title, analysis)
    part = {"v1": "(c)", "v2": "(d)", "v3": "(e)", "lbq": "(f)"}.get(str(group.record["variant"]), "")
    if group.record.get("step_gradient"):
        part = ""
    return replace(figure, title=f"Figure 4 {part}".strip())


def _level_bars(title: str, analysis: Analysis) -> Figure:
    count, n_max = len(analysis.layers), max(layer.n_max for layer in analysis.layers)
    plot = Plot(
        f"P(k | k > 0): {title}",
        "; ".join(
            f"{layer.name}: " + " ".join(f"{100 * p:.0f}" for p in layer.histogram.conditional) for layer in analysis.layers
        ),
        (0.5, count + 0.5),
        (0, 1),
        "spiking layer, from the input",
        "share of active neuron-steps",
        xticks=_layer_axis(count),
    )  # fmt: skip
    for j, layer in enumerate(analysis.layers):
        below = 0.0
        for k, p in enumerate(layer.histogram.conditional, 1):
            x, top = plot.at_x(j + 0.58), plot.at_y(below + p)
            plot.rect(
                x, top, plot.at_x(j + 1.42) - x, plot.at_y(below) - top, fill=level_colour(k, n_max),
                tip=f"{layer.name}, level {k}: {100 * p:.1f} %",
            )  # fmt: skip
            below += float(p)
    _level_legend(plot, n_max)
    whole = f"all {analysis.images:,}" if analysis.complete else f"the first {analysis.images:,}"
    caption = f"How often each non-zero level is used, over {whole} test images."
    return Figure("levels", "Levels by layer", caption, plot.svg())


def _level_legend(plot: Plot, n_max: int) -> None:
    x, y = plot.left, plot.height + 14
    plot.text(x, y, "level", kind="soft")
    x += 40
    for k in range(1, n_max + 1):
        if x > plot.width - 34:
            x, y = plot.left + 40, y + 18
        plot.rect(x, y - 10, 12, 12, fill=level_colour(k, n_max))
        plot.text(x + 16, y, str(k))
        x += 36
    plot.height = y + 10


def _membranes(title: str, analysis: Analysis) -> list[Figure]:
    """Small multiples: a histogram of r = U / step for every layer, thresholds as lines."""
    layers = [layer for layer in analysis.layers if layer.membrane is not None]
    if not layers:
        return []
    columns = 4 if len(layers) > 4 else len(layers)
    wide, high, gap = 230.0, 120.0, 34.0
    rows = math.ceil(len(layers) / columns)
    drawing = Drawing(
        columns * wide, rows * (high + gap) + 24, f"Membranes before emission: {title}",
        f"Histograms of r = U / step of {len(layers)} layers, with the thresholds at which levels begin",
    )  # fmt: skip
    for j, layer in enumerate(layers):
        membrane = layer.membrane
        assert membrane is not None
        left, top = (j % columns) * wide + 8, (j // columns) * (high + gap) + 20
        counts = membrane.counts.sum(0)
        counts[0] = counts[-1] = 0  # what lies beyond
        peak = max(float(counts.max()), 1.0)
        each = (wide - 22) / len(counts)
        drawing.text(left, top - 6, layer.name, kind="bold small")
        drawing.text(left + wide - 22, top - 6, f"γ {layer.step:.3g}" if layer.step else "", "end", "soft small")
        points = [(left, top + high)]
        for b, value in enumerate(counts):
            y = top + high - float(value) / peak * high
            points += [(left + b * each, y), (left + (b + 1) * each, y)]
        points.append((left + wide - 22, top + high))
        joined = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        drawing.add(f'<polygon points="{joined}" class="s0" fill-opacity="0.75"/>')
        for threshold in membrane.thresholds[:40]:
            x = left + (threshold - Membrane.LOW) / Membrane.WIDTH * each
            drawing.segment((x, top), (x, top + high), "rule")
        for mark in (0.0, membrane.thresholds[0], membrane.thresholds[-1]):
            x = left + (mark - Membrane.LOW) / Membrane.WIDTH * each
            drawing.text(x, top + high + 13, f"{mark:g}", "middle", "soft small")
        drawing.segment((left, top + high), (left + wide - 22, top + high))
    caption = (
        "r = U / γ just before emission, all timesteps, on every n-th test image; dashed: where the levels begin. What "
        "lies beyond the axis is not drawn."
    )
    return [Figure("membranes", drawing.title, caption, drawing.svg(), wide=True)]


# Costs ---------------------------------------------------------------------------------------------------------------


def cost_figures(measured: Sequence[tuple[Group, Account, Account]], technology: Technology = DEFAULT) -> list[Figure]:
    return [_accuracy_energy(measured, technology), _counts(measured)]


def _accuracy_energy(measured: Sequence[tuple[Group, Account, Account]], technology: Technology) -> Figure:
    published = [(row.method, energy_mj(row.operations, technology.paper), row.accuracy) for row in paper.cost_rows()]
    chosen = [
        (g, rate)
        for g, _, rate in measured
        if g.mean is not None and g.record["dataset"] == "cifar10" and g.record["model"] == "resnet20w128"
    ]
    alike = Counter(g.title for g, _ in chosen)
    ours = [
        (
            f"{g.title}, {g.record['epochs']} ep" if alike[g.title] > 1 else g.title,
            energy_mj(rate.operations(), technology.paper),
            g.mean or 0.0,
        )
        for g, rate in chosen
    ]
    energies = [e for _, e, _ in (*published, *ours)]
    accuracies = [a for _, _, a in (*published, *ours)]
    plot = Plot(
        "Accuracy against modelled energy",
        "; ".join(f"{name}: {e:.3g} mJ, {a:.2f} %" for name, e, a in (*published, *ours)),
        (min(energies) / 1.6, max(energies) * 1.8),
        padded(accuracies),
        "modelled arithmetic energy per image, mJ",
        "accuracy %",
        xlog=True,
    )
    for group, series, size in ((published, 0, 4.5), (ours, 1, 5.0)):
        for name, energy, accuracy in group:
            tip = f"{name}: {energy:.2f} mJ, {accuracy:.2f} %"
            plot.mark(*plot.at((energy, accuracy)), series, size, tip, hollow=series == 0)
    labels = [(*plot.at((e, a)), name, "soft") for name, e, a in published]
    plot.names(labels + [(*plot.at((e, a)), name, "bold") for name, e, a in ours])
    theirs = "published" if technology.as_published else "published counts, other prices"
    plot.legend([(theirs, 0), ("ours", 1)] if ours else [(theirs, 0)], [True, False])
    caption = (
        f"CIFAR-10, ResNet-20 (resnet20w128), T = 2. Energy is modelled, in the paper's regime ({technology.label(*PAPER)}), "
        "counts as rate x MACs. Our accuracy and the published one come from different budgets: see the tables."
    )
    return Figure("accuracy-energy", plot.title, caption, plot.svg())


def _counts(measured: Sequence[tuple[Group, Account, Account]]) -> Figure:
    published = {int(m[5:-1]): v for m, v in paper.ACCUMULATIONS.items() if m.startswith("LBQ")}
    ours = [
        (int(g.record["n_max"]), rate.total.unary / 1e6, rate.total.bit_sparse / 1e6, g.title)
        for g, _, rate in measured
        if g.record["dataset"] == "cifar10" and g.record["model"] == "resnet20w128" and not rate.unit_events
    ]
    high = max(v for pair in (*published.values(), *((u, b) for _, u, b, _ in ours)) for v in pair)
    plot = Plot(
        "Accumulations against N_max",
        "; ".join(f"N_max {n}: unary {u:.0f} M, bit-sparse {b:.0f} M" for n, (u, b) in published.items()),
        (1.7, 24),
        (0, 1.08 * high),
        "N_max",
        "accumulations per image, M",
        xlog=True,
        xticks=[(n, str(n)) for n in (2, 5, 10, 20)],
    )
    for series, (part, name) in enumerate(((0, "unary"), (1, "bit-sparse"))):
        points = [(float(n), pair[part]) for n, pair in published.items()]
        plot.line(points, series)
        for x, y in points:
            plot.mark(*plot.at((x, y)), series, 4.5, f"published, N_max {x:.0f}, {name}: {y:.1f} M", hollow=True)
    for n, unary, sparse, name in ours:
        for series, value in ((0, unary), (1, sparse)):
            plot.mark(*plot.at((n, value)), series, 6, f"ours, {name}, N_max {n}: {value:.1f} M")
    plot.legend([("unary", 0), ("bit-sparse", 1)])
    caption = "CIFAR-10, ResNet-20, T = 2, rate x MACs. Hollow and joined: published; filled: ours."
    return Figure("counts", plot.title, caption, plot.svg())


def speed_figures(benchmarks: Sequence[dict[str, Any]]) -> list[Figure]:
    """Milliseconds per image by planes and densely against the share of active neurons (benchmarks/engine_speed.py)."""
    found = [figure for benchmark in benchmarks if (figure := _speed(benchmark)) is not None]
    return [replace(figure, id=f"{figure.id}-{i}" if i else figure.id) for i, figure in enumerate(found)]


def _speed(benchmark: dict[str, Any]) -> Figure | None:
    points = _sweep(benchmark)
    if not points:
        return None
    features = benchmark.get("features") or ()
    unit = next((f", {name}" for key, name in (("amx", "AMX"), ("vnni", "VNNI")) if key in features), "")
    top = 1.08 * max(max(planes, dense) for _, planes, dense in points)
    plot = Plot(
        f"Engine: time against density{unit}",
        "; ".join(f"{100 * x:.0f} % active: planes {p:.1f} ms, dense {d:.1f} ms" for x, p, d in points),
        (0, 1.05 * max(x for x, _, _ in points)),
        (0, top),
        "share of active neuron-steps",
        "ms per image, one thread",
    )
    for series, column, name in ((0, 1, "bit planes"), (1, 2, "dense")):
        tips = [f"{name}, {100 * p[0]:.0f} % active: {p[column]:.1f} ms" for p in points]
        plot.line([(p[0], p[column]) for p in points], series, marks=True, tips=tips)
    plot.legend([("bit planes", 0), ("dense", 1)])
    return Figure(
        "speed", plot.title, "Measured by benchmarks/engine_speed.py on the machine of that file.", plot.svg()
    )


def _sweep(benchmark: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Of the sweep over `active`: share, ms by planes, ms densely."""
    try:
        return sorted(
            (float(share), float(planes), float(dense)) for share, planes, dense in benchmark["sweeps"]["active"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LbqError("a benchmark must hold sweeps.active, as benchmarks/engine_speed.py writes it") from error


def analysis_figures(analysis: Analysis) -> dict[str, Figure]:
    """The figures of one analysis, by file name."""
    title = str(analysis.facts.get("name") or analysis.facts.get("model") or "network")
    found = {}
    if analysis.steps:
        found["steps"] = Figure(
            "steps", "", "", _by_layer("Step of each layer", "step γ", [(0, title, analysis.steps)]).svg()
        )
    active = {layer.name: layer.histogram.active_ratio for layer in analysis.layers}
    found["active"] = Figure(
        "active", "", "", _by_layer("Active ratio of each layer", "active ratio", [(0, title, active)]).svg()
    )
    if max(layer.n_max for layer in analysis.layers) > 1:
        found["entropy"] = _entropy([(0, title, analysis)])
        found["levels"] = _level_bars(title, analysis)
    for figure in _membranes(title, analysis):
        found["membranes"] = figure
    return found
