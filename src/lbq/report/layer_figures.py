"""Figure 4 with what records and analyses hold: steps, activity, entropy and levels by layer, membranes."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from lbq.counting.analysis import Analysis, LayerAnalysis, Membrane
from lbq.report.cells import DATASETS
from lbq.report.figures import Figure, by_task, level_colour, seeds, series_of, slug, titles
from lbq.report.svg import Drawing, Plot, number
from lbq.results import paper
from lbq.results.result import SUFFIX_LETTERS, Gathered, Group, Result

NAME_LETTERS = 18  # of a run in a file's name
WHISKERS = "Whiskers: a sample standard deviation over seeds to either side of their mean."
PARTS = {"v1": "(c)", "v2": "(d)", "v3": "(e)", "lbq": "(f)"}  # of Figure 4, at N_max = 5 and T = 2


@dataclass(frozen=True)
class Curve:
    """A value for each layer, the mean where it is of several seeds or channels. ends: of the whiskers, which are of seeds
    where there are several, else of channels; by_channel: whether these have values of their own."""

    series: int
    name: str
    values: dict[str, float]
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    seeds: int = 1
    by_channel: bool = False

    @property
    def high(self) -> float:
        return max(*self.values.values(), *(high for _, high in self.ends.values()), 0.0)

    def tip(self, layer: str) -> str:
        text = f"{self.name}, {layer}: {self.values[layer]:.4g}"
        if layer not in self.ends:
            return text
        low, high = self.ends[layer]
        return f"{text} ± {high - self.values[layer]:.2g}" if self.seeds > 1 else f"{text}, {low:.4g} to {high:.4g}"


def layer_figures(found: Gathered) -> list[Figure]:
    """Fig. 4 (a) steps, (b) entropy against activity, (c-f) level distributions, with what the records hold."""
    colour = series_of(found)
    groups = {id(g.first): g for g in found.groups if any(r.active or r.steps for r in g.results)}

    def draw(heading: str, file: str, firsts: list[Result]) -> list[Figure]:
        of = [groups[id(first)] for first in firsts]
        named = [(colour[g.first.source], t, g) for t, g in zip(titles([g.results for g in of]), of, strict=True)]
        return _of_one_task(named, heading, file)

    return by_task([g.first for g in groups.values()], draw)


def _of_one_task(named: Sequence[tuple[int, str, Group]], where: str, file: str) -> list[Figure]:
    together = [_steps(named, where), _active(named, where)]
    analysed = [(i, t, g, g.analysis) for i, t, g in named if g.analysis is not None and g.analysis.layers]
    analysed = [entry for entry in analysed if max(layer.n_max for layer in entry[3].layers) > 1]
    if analysed:
        plain = {i for i, _, g, _ in analysed if g.first.plain and g.record["variant"] in PARTS}
        on_paper = analysed[0][2].record["dataset"] == "cifar10"
        of = [(i, _name(t, g, [r for r, _ in g.analysed]), g.analyses) for i, t, g, _ in analysed]
        together.append(_entropy(of, where, plain, on_paper))
    figures = [replace(figure, id=f"{figure.id}-{file}") for figure in together if figure is not None]
    order = list(PARTS)
    analysed.sort(key=lambda entry: order.index(v) if (v := entry[2].record["variant"]) in order else len(order))
    for _, t, g, a in analysed:
        figures.append(replace(_levels(f"{_of_one_seed(t, g)}, {where}", g, a), id=f"levels-{_file(g)}"))
    for _, t, g in named:
        if g.analysis is not None and (drawn := _membranes(_of_one_seed(t, g), where, g.analysis)) is not None:
            figures.append(replace(drawn, id=f"membranes-{_file(g)}"))
    return figures


def _name(title: str, group: Group, shown: Sequence[Result]) -> str:
    """A configuration's title, with the seeds that are shown where it has several."""
    return f"{title}, {seeds(shown)}" if len(group.results) > 1 else title


def _of_one_seed(title: str, group: Group) -> str:
    """The title of what is shown of the first seed that was analysed alone."""
    return _name(title, group, [r for r, _ in group.analysed[:1]])


def _file(group: Group) -> str:
    """What files of a configuration's figures are called: after its name and its key, which no other run changes."""
    return f"{slug(group.first.name, NAME_LETTERS)}-{group.first.key[:SUFFIX_LETTERS]}"


def _layer_axis(count: int) -> list[tuple[float, str]]:
    every = 1 if count <= 10 else 2 if count <= 20 else 5
    return [(i, str(i)) for i in range(1, count + 1) if (i - 1) % every == 0]


def _by_layer(title: str, label: str, subtitle: str, curves: Sequence[Curve]) -> Plot:
    count = max(len(curve.values) for curve in curves)
    high = max(curve.high for curve in curves)
    plot = Plot(
        title,
        f"{title}; "
        + "; ".join(f"{c.name}: {min(c.values.values()):.3g} to {max(c.values.values()):.3g}" for c in curves),
        (0.5, count + 0.5),
        (0, 1.08 * high),
        "spiking layer, from the input",
        label,
        xticks=_layer_axis(count),
        subtitle=subtitle + _of_seeds([curve.seeds for curve in curves]) + _of_channels(curves),
    )
    spread = any(curve.ends for curve in curves)
    for k, curve in enumerate(curves):
        aside = (k - (len(curves) - 1) / 2) * min(0.12, 0.6 / len(curves)) if spread else 0  # no whisker on another
        for j, layer in enumerate(curve.values, 1):
            if layer in curve.ends:
                low, top = curve.ends[layer]
                plot.whisker((j + aside, low), (j + aside, top), curve.series)
        points = [(j + aside, value) for j, value in enumerate(curve.values.values(), 1)]
        plot.line(points, curve.series, [curve.tip(layer) for layer in curve.values])
    plot.legend([(curve.name, curve.series) for curve in curves])
    return plot


def _of_seeds(counts: Sequence[int]) -> str:
    """What a subtitle says of means over seeds: how many, where there are several."""
    several = sorted({count for count in counts if count > 1})
    if not several:
        return ""
    return f", mean ± sd of {several[0]}{f' to {several[-1]}' if len(several) > 1 else ''} seeds"


def _of_channels(curves: Sequence[Curve]) -> str:
    """What a subtitle says of steps per channel, and of whiskers where these are of them."""
    if not any(curve.by_channel for curve in curves):
        return ""
    ranges = any(curve.ends and curve.seeds == 1 for curve in curves)
    return ", steps averaged over channels" + (", whiskers from least to largest" if ranges else "")


def _curve(series: int, title: str, group: Group, shown: Sequence[tuple[Result, dict[str, float]]]) -> Curve:
    """The seeds of one configuration that have such values: their mean, with whiskers of a sample standard deviation."""
    first = shown[0][1]
    shown = [(result, of) for result, of in shown if of.keys() == first.keys()]  # files may hold anything
    name = _name(title, group, [result for result, _ in shown])
    if len(shown) == 1:
        return Curve(series, name, first)
    found = {layer: [of[layer] for _, of in shown] for layer in first}
    means = {layer: fmean(values) for layer, values in found.items()}
    ends = {layer: (mean - stdev(found[layer]), mean + stdev(found[layer])) for layer, mean in means.items()}
    return Curve(series, name, means, ends, len(shown))


def _steps(named: Sequence[tuple[int, str, Group]], dataset: str) -> Figure | None:
    learned = [(i, t, g) for i, t, g in named if g.record.get("step") != "fixed"]
    shown = [(i, t, g, of) for i, t, g in learned if (of := [(r, r.steps) for r in g.results if r.steps])]
    curves = [_curve(*entry) for entry in shown]
    if not curves:
        return None
    several = any(curve.seeds > 1 for curve in curves)
    curves = [_by_channel(curve, entry[3][0][0], drawn=not several) for curve, entry in zip(curves, shown, strict=True)]
    plot = _by_layer("(a) Learned step of each layer", "step γ", dataset, curves)
    caption = f"Steps after training{f'. {WHISKERS}' if several else ', of the first seed.'}"
    return Figure("steps", "Figure 4 (a)", caption, plot.svg())


def _by_channel(curve: Curve, result: Result, drawn: bool) -> Curve:
    """Whether it has steps per channel, and whiskers over these where `drawn`: in one figure all whiskers are of one kind."""
    ranges = _step_ranges(result.analysis) if result.analysis else {}
    own = bool(ranges) or bool(result.record["config"].get("neuron", {}).get("per_channel"))
    return replace(curve, by_channel=own, ends=ranges if drawn else curve.ends)


def _step_ranges(analysis: Analysis) -> dict[str, tuple[float, float]]:
    """The least and the largest step of the layers that have one per channel."""
    return {layer.name: layer.step_range for layer in analysis.layers if layer.step_range is not None}


def _active(named: Sequence[tuple[int, str, Group]], dataset: str) -> Figure | None:
    shown = [(i, t, g, _activities(g)) for i, t, g in named]
    curves = [_curve(*entry) for entry in shown if entry[3]]
    if not curves:
        return None
    plot = _by_layer("Active ratio of each layer", "active ratio", dataset, curves)
    caption = "Share of neuron-steps with a non-zero level, over test images."
    several = f" {WHISKERS}" if any(curve.seeds > 1 for curve in curves) else ""
    return Figure("active", "Activity by layer", f"{caption}{several}", plot.svg())


def _activities(group: Group) -> list[tuple[Result, dict[str, float]]]:
    """By seed, the active ratio of each layer: as analysed, or as training recorded it where that is of more seeds."""
    analysed = [(r, _active_ratios(a)) for r, a in group.analysed if a.layers]
    recorded = [(r, r.record["active"]) for r in group.results if r.record.get("active")]
    return max(analysed, recorded, key=len)


def _active_ratios(analysis: Analysis) -> dict[str, float]:
    return {layer.name: layer.histogram.active_ratio for layer in analysis.layers}


def _entropy(
    analysed: Sequence[tuple[int, str, Sequence[Analysis]]],
    dataset: str,
    plain: Set[int] = frozenset(),
    on_paper: bool = False,
) -> Figure:
    """Means of all networks, and the layers of the `plain` ones, or of all where none is; `on_paper`: the paper's means too.

    Each network by the analyses of its seeds, of which the mean is shown."""
    by_layer = [entry for entry in analysed if entry[0] in plain] or analysed
    small = [(i, name, Spot.of_layer(layers)) for i, name, of in by_layer for layers in _same_layers(of)]
    large = [(i, name, Spot.of_network(of)) for i, name, of in analysed]
    high = max(spot.reach for _, _, spot in (*small, *large))
    plot = Plot(
        "(b) Burst entropy against active ratio",
        "; ".join(f"{name}: mean {spot.active:.3f}, {spot.entropy:.3f}" for _, name, spot in large),
        (0, max(1.08 * high, 0.3)),
        (0, 1.02),
        "active ratio",
        "normalised burst entropy",
        subtitle=dataset + _of_seeds([len(of) for _, _, of in analysed]),
    )
    for i, name, spot in small:
        spot.draw(plot, i, 2.6, f"{name}, {spot.name}")
    for i, name, spot in large:
        spot.draw(plot, i, 8, f"{name}, mean over layers", True)
    caption = "Small: layers; large: mean over layers"
    if on_paper:
        caption += "; ×: the means that the paper publishes"
        for variant, row in paper.LAYER_WISE.items():
            x, y = plot.at((row.active, row.entropy))
            for slope in (-1, 1):
                plot.path([(x - 4, y - 4 * slope), (x + 4, y + 4 * slope)], "line s7")
            side = -1 if variant == "v1" else 1  # V1 and LBQ lie close together
            plot.text(x + 7 * side, y + 4, variant.upper(), "start" if side > 0 else "end", "small halo")
    plot.legend([(name, i) for i, name, _ in analysed])
    if len(by_layer) < len(analysed):
        caption += ". Layers are shown of the networks that the paper's figure has"
    if any(len(of) > 1 for _, _, of in analysed):
        caption += f". {WHISKERS[:-1]}"
    return Figure("entropy", "Figure 4 (b)", f"{caption}.", plot.svg())


def _same_layers(analyses: Sequence[Analysis]) -> list[tuple[LayerAnalysis, ...]]:
    """Each layer, as the seeds have it."""
    return list(zip(*(analysis.layers for analysis in analyses), strict=False))


@dataclass(frozen=True)
class Spot:
    """A point of entropy against activity: the mean of its seeds, and their deviations where there are several."""

    name: str
    active: float
    entropy: float
    deviations: tuple[float, float] | None

    @classmethod
    def of(cls, name: str, active: Sequence[float], entropy: Sequence[float]) -> Spot:
        deviations = (stdev(active), stdev(entropy)) if len(active) > 1 else None
        return cls(name, fmean(active), fmean(entropy), deviations)

    @classmethod
    def of_layer(cls, layers: Sequence[LayerAnalysis]) -> Spot:
        histograms = [layer.histogram for layer in layers]
        active, entropy = [h.active_ratio for h in histograms], [h.normalised_entropy for h in histograms]
        return cls.of(layers[0].name, active, entropy)

    @classmethod
    def of_network(cls, analyses: Sequence[Analysis]) -> Spot:
        return cls.of("", [a.mean("active_ratio") for a in analyses], [a.mean("normalised_entropy") for a in analyses])

    @property
    def reach(self) -> float:
        """How far to the right it goes."""
        return self.active + (self.deviations[0] if self.deviations else 0.0)

    def draw(self, plot: Plot, series: int, size: float, tip: str, hollow: bool = False) -> None:
        if self.deviations:
            x, y, (aside, up) = self.active, self.entropy, self.deviations
            tip += f": active ratio {x:.3f} ± {aside:.2g}, entropy {y:.3f} ± {up:.2g}"
            plot.whisker((x - aside, y), (x + aside, y), series)
            plot.whisker((x, y - up), (x, y + up), series)
        plot.mark(*plot.at((self.active, self.entropy)), series, size, tip, hollow)


def _levels(title: str, group: Group, analysis: Analysis) -> Figure:
    figure = _level_bars(title, analysis)
    part = PARTS.get(str(group.record["variant"])) if group.first.plain else None
    return replace(figure, title="Levels by layer" if part is None else f"Figure 4 {part}")


def _level_bars(title: str, analysis: Analysis) -> Figure:
    count, n_max = len(analysis.layers), max(layer.n_max for layer in analysis.layers)
    plot = Plot(
        "Use of each level, P(k | k > 0)",
        "; ".join(
            f"{layer.name}: " + " ".join(f"{100 * p:.0f}" for p in layer.histogram.conditional) for layer in analysis.layers
        ),
        (0.5, count + 0.5),
        (0, 1),
        "spiking layer, from the input",
        "share of active neuron-steps",
        xticks=_layer_axis(count),
        subtitle=title,
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
    caption = f"How often each non-zero level is used, over {whole} {_inputs(analysis)}."
    return Figure("levels", "Levels by layer", caption, plot.svg())


def _inputs(analysis: Analysis) -> str:
    return f"images of {analysis.other_data}" if analysis.other_data else "test images"


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


CELL, HIGH, GAP = 230.0, 120.0, 58.0  # of a histogram: its share of the width, its height, the room for its labels


def _membranes(title: str, dataset: str, analysis: Analysis) -> Figure | None:
    """Small multiples: a histogram of r = U / step for every layer, thresholds as lines."""
    layers = [(layer, layer.membrane) for layer in analysis.layers if layer.membrane is not None]
    if not layers:
        return None
    columns = min(len(layers), 4)
    drawing = Drawing(
        columns * CELL, math.ceil(len(layers) / columns) * (HIGH + GAP) + 42, f"Membranes before emission: {title}",
        f"Histograms of r = U / step of {len(layers)} layers, with the thresholds at which levels begin",
    )  # fmt: skip
    lower = drawing.head(8, "Membranes before emission, r = U / γ", f"{title}, {dataset}")
    drawing.height += lower
    for j, (layer, membrane) in enumerate(layers):
        _histogram(drawing, j % columns * CELL + 8, j // columns * (HIGH + GAP) + 80 + lower, layer, membrane)
    layer, membrane = layers[0]
    watched = round(int(membrane.counts.sum()) / (len(membrane.counts) * math.prod(layer.shape)))
    caption = (
        f"r = U / γ just before emission, all timesteps, on {watched:,} of {analysis.images:,} {_inputs(analysis)}; dashed: "
        "where the levels begin. Each histogram has a height of its own; the share that lies beyond its axis stands above it."
    )
    return Figure("membranes", drawing.title, caption, drawing.svg(), wide=True)


def _histogram(drawing: Drawing, left: float, top: float, layer: LayerAnalysis, membrane: Membrane) -> None:
    counts = membrane.counts.sum(0)
    beyond = float(counts[0] + counts[-1]) / max(float(counts.sum()), 1.0)
    counts[0] = counts[-1] = 0
    wide, bottom, peak = CELL - 22, top + HIGH, max(float(counts.max()), 1.0)
    each = wide / len(counts)

    def at(r: float) -> float:
        return left + (r - Membrane.LOW) / Membrane.WIDTH * each

    step = f"{'mean ' * (layer.step_range is not None)}γ {layer.step:.3g}; " if layer.step else ""
    drawing.text(left, top - 20, layer.name, kind="bold small")
    drawing.text(left, top - 6, f"{step}{100 * beyond:.1f} % beyond the axis", kind="soft small")
    outline = "".join(
        f"V{number(bottom - float(value) / peak * HIGH)}H{number(left + (b + 1) * each)}"
        for b, value in enumerate(counts)
    )
    drawing.add(
        f'<path d="M{number(left)} {number(bottom)}{outline}V{number(bottom)}Z" class="s0" fill-opacity="0.75"/>'
    )
    rising = membrane.thresholds[:40]
    thresholds = (*(-r for r in reversed(rising)), *rising) if _signed(layer, membrane) else rising
    for threshold in thresholds:
        drawing.segment((at(threshold), top), (at(threshold), bottom), "rule")
    written: list[tuple[float, float]] = [(left + wide - 8, left + wide)]
    for mark in dict.fromkeys((0.0, thresholds[-1], thresholds[0], rising[0])):  # those that collide are left out
        text, x = f"{mark:g}".replace("-", "−"), at(mark)
        ends = (x - 3.2 * len(text) - 2, x + 3.2 * len(text) + 2)
        if all(ends[1] < start or end < ends[0] for start, end in written):
            drawing.text(x, bottom + 13, text, "middle", "soft small")
            written.append(ends)
    drawing.text(left + wide, bottom + 13, "r", "end", "soft small")
    drawing.segment((left, bottom), (left + wide, bottom))


def _signed(layer: LayerAnalysis, membrane: Membrane) -> bool:
    """Whether it also fires below -threshold: its activity is then that of both sides, not of one."""
    counts, first = membrane.counts.sum(0), membrane.thresholds[0]
    total, edges = max(float(counts.sum()), 1.0), membrane.edges
    above = float(counts[edges[:-1] >= first - 1e-6].sum()) / total
    below = float(counts[edges[1:] <= -first + 1e-6].sum()) / total
    active = layer.histogram.active_ratio
    return abs(active - above - below) < abs(active - above)


ANALYSIS_FIGURES = ("steps", "active", "entropy", "levels", "membranes")  # all that there may be


def analysis_figures(analysis: Analysis) -> dict[str, Figure]:
    """The figures of one analysis, by file name."""
    title = str(analysis.facts.get("name") or analysis.facts.get("model") or "network")
    data = str(analysis.facts.get("dataset") or analysis.facts.get("data") or "dataset not named")
    dataset = DATASETS.get(data, data)
    found = {}
    if analysis.steps:
        ranges = _step_ranges(analysis)
        steps = Curve(0, title, analysis.steps, ranges, by_channel=bool(ranges))
        found["steps"] = Figure("steps", "", "", _by_layer("Step of each layer", "step γ", dataset, [steps]).svg())
    active = Curve(0, title, _active_ratios(analysis))
    found["active"] = Figure(
        "active", "", "", _by_layer("Active ratio of each layer", "active ratio", dataset, [active]).svg()
    )
    if max(layer.n_max for layer in analysis.layers) > 1:
        found["entropy"] = _entropy([(0, title, [analysis])], dataset, on_paper=data == "cifar10")
        found["levels"] = _level_bars(f"{title}, {dataset}", analysis)
    if (drawn := _membranes(title, dataset, analysis)) is not None:
        found["membranes"] = drawn
    return found
