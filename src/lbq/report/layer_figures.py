"""Figure 4 with what records and analyses hold: steps, activity, entropy and levels by layer."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from lbq.counting.analysis import Analysis
from lbq.report.cells import shown_dataset
from lbq.report.figures import Figure, by_task, level_colour, padded, seeds, series_of, slug, titles
from lbq.report.membrane_figures import membranes, membranes_of_all
from lbq.report.plot import Plot
from lbq.results import paper
from lbq.results.result import SUFFIX_LETTERS, Gathered, Group, Result

NAME_LETTERS = 18  # of a run in a file's name
WHISKERS = "Whiskers: a sample standard deviation over seeds to either side of their mean."
PANELS = {"v1": "(c)", "v2": "(d)", "v3": "(e)", "lbq": "(f)"}  # of Figure 4, at N_max = 5 and T = 2


@dataclass(frozen=True)
class Shown:
    """A configuration in the figures of one task. series: its colour and mark; title: its name there."""

    series: int
    title: str
    group: Group

    def name(self, results: Sequence[Result]) -> str:
        """The title, with the seeds that are drawn where the configuration has several."""
        return f"{self.title}, {seeds(results)}" if len(self.group.results) > 1 else self.title

    @property
    def file(self) -> str:
        """The name in files: after the configuration's name and its key, which no other run changes."""
        return f"{slug(self.group.first.name, NAME_LETTERS)}-{self.group.first.key[:SUFFIX_LETTERS]}"

    @property
    def panel(self) -> str | None:
        """The part of the paper's Figure 4 that it stands for."""
        return PANELS.get(str(self.group.record["variant"])) if self.group.first.plain else None


@dataclass(frozen=True)
class Curve:
    """A value for each layer. ends: of whiskers, over seeds or over channels; by_channel: whether these have own values."""

    series: int
    name: str
    values: dict[str, float]
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    seeds: int = 1
    by_channel: bool = False

    def tip(self, layer: str) -> str:
        text = f"{self.name}, {layer}: {self.values[layer]:.4g}"
        if layer not in self.ends:
            return text
        low, high = self.ends[layer]
        return f"{text} ± {high - self.values[layer]:.2g}" if self.seeds > 1 else f"{text}, {low:.4g} to {high:.4g}"


def layer_figures(gathered: Gathered) -> list[Figure]:
    """Fig. 4 (a) steps, (b) entropy against activity, (c-f) level distributions, with what the records hold."""
    colour = series_of(gathered)
    groups = {id(g.first): g for g in gathered.groups if any(r.active or r.steps for r in g.results)}

    def draw(heading: str, file: str, firsts: list[Result]) -> list[Figure]:
        task = [groups[id(first)] for first in firsts]
        names = titles([g.results for g in task])
        shown = [Shown(colour[g.first.source], name, g) for name, g in zip(names, task, strict=True)]
        return _figures_of_task(shown, heading, file)

    return by_task([g.first for g in groups.values()], draw)


def _figures_of_task(configurations: Sequence[Shown], heading: str, file: str) -> list[Figure]:
    together = [_steps(configurations, heading)]
    analysed = [(c, a) for c in configurations if (a := c.group.analysis) is not None]
    bursts = [(c, a) for c, a in analysed if any(layer.n_max > 1 for layer in a.layers)]
    if bursts:
        in_paper = {c.series for c, _ in bursts if c.panel}
        spots = [(c.series, c.name([r for r, _ in c.group.analysed]), c.group.analyses) for c, _ in bursts]
        together.append(_entropy(spots, heading, in_paper, bursts[0][0].group.record["dataset"] == "cifar10"))
    named = [(c.series, c.name([r for r, _ in c.group.analysed[:1]]), a) for c, a in analysed]
    together.append(membranes_of_all(named, heading))
    figures = [replace(figure, id=f"{figure.id}-{file}") for figure in together if figure is not None]
    order = list(PANELS)
    bursts.sort(key=lambda entry: order.index(v) if (v := entry[0].group.record["variant"]) in order else len(order))
    for c, analysis in bursts:
        first = c.name([r for r, _ in c.group.analysed[:1]])  # the seed that is drawn
        levels = _levels(f"{first}, {heading}", analysis)
        caption = levels.caption + (f" The paper's Figure 4 {c.panel}." if c.panel else "")
        figures.append(replace(levels, caption=caption, id=f"levels-{c.file}"))
    return figures


def _layer_axis(count: int) -> list[tuple[float, str]]:
    every = 1 if count <= 10 else 2 if count <= 20 else 5
    return [(i, str(i)) for i in range(1, count + 1) if (i - 1) % every == 0]


def _by_layer(title: str, label: str, subtitle: str, curves: Sequence[Curve]) -> Plot:
    count = max(len(curve.values) for curve in curves)
    highs = [high for c in curves for high in (*c.values.values(), *(end for _, end in c.ends.values()))]
    ranges = (f"{c.name}: {min(c.values.values()):.3g} to {max(c.values.values()):.3g}" for c in curves)
    plot = Plot(
        title,
        f"{title}; {'; '.join(ranges)}",
        (0.5, count + 0.5),
        (0, 1.08 * max(*highs, 0.0)),
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
    """The part of a subtitle that says over how many seeds means are, where there are several."""
    several = sorted({count for count in counts if count > 1})
    most = f" to {several[-1]}" if len(several) > 1 else ""
    return f", mean ± sd of {several[0]}{most} seeds" if several else ""


def _of_channels(curves: Sequence[Curve]) -> str:
    """The part of a subtitle that says what is over channels."""
    ranges = any(curve.ends and curve.seeds == 1 for curve in curves)
    text = ", steps averaged over channels" + (", whiskers from least to largest" if ranges else "")
    return text if any(curve.by_channel for curve in curves) else ""


def _curve(configuration: Shown, seeds: Sequence[tuple[Result, dict[str, float]]]) -> Curve:
    """The mean of the seeds that have such values, by layer, with whiskers of a sample standard deviation."""
    first = seeds[0][1]
    seeds = [(result, values) for result, values in seeds if values.keys() == first.keys()]  # files may hold anything
    name = configuration.name([result for result, _ in seeds])
    if len(seeds) == 1:
        return Curve(configuration.series, name, first)
    means = {layer: fmean(values[layer] for _, values in seeds) for layer in first}
    deviations = {layer: stdev(values[layer] for _, values in seeds) for layer in first}
    ends = {layer: (mean - deviations[layer], mean + deviations[layer]) for layer, mean in means.items()}
    return Curve(configuration.series, name, means, ends, len(seeds))


def _steps(configurations: Sequence[Shown], dataset: str) -> Figure | None:
    learned = [c for c in configurations if c.group.record.get("step") != "fixed"]
    shown = [(c, steps) for c in learned if (steps := [(r, r.steps) for r in c.group.results if r.steps])]
    curves = [_curve(c, steps) for c, steps in shown]
    if not curves:
        return None
    several = any(curve.seeds > 1 for curve in curves)
    for i, (_, steps) in enumerate(shown):
        result = steps[0][0]
        ranges = _step_ranges(result.analysis) if result.analysis else {}
        own = bool(ranges) or bool(result.record["config"].get("neuron", {}).get("per_channel"))
        # in one figure all whiskers are of one kind
        curves[i] = replace(curves[i], by_channel=own, ends=curves[i].ends if several else ranges)
    plot = _by_layer("Learned step of each layer", "step γ", dataset, curves)
    caption = f"After training{f'. {WHISKERS}' if several else ', of the first seed.'} The paper's Figure 4 (a)."
    return Figure("steps", "Steps", caption, plot.svg())


def _step_ranges(analysis: Analysis) -> dict[str, tuple[float, float]]:
    """The least and the largest step of the layers that have one per channel."""
    return {layer.name: layer.step_range for layer in analysis.layers if layer.step_range is not None}


def _entropy(
    networks: Sequence[tuple[int, str, Sequence[Analysis]]],
    dataset: str,
    in_paper: Set[int] = frozenset(),
    on_cifar10: bool = False,
) -> Figure:
    """Each network (series, name, analyses of its seeds) by its mean over layers, with the paper's means on CIFAR-10.

    Layers are shown of the networks whose series are `in_paper`, or of all where there are none.
    """
    by_layer = [network for network in networks if network[0] in in_paper] or networks
    spots = []  # series, name, active ratios and entropies of the seeds
    for i, name, analyses in by_layer:
        for layers in zip(*(a.layers for a in analyses), strict=False):
            histograms = [layer.histogram for layer in layers]
            ratios, entropies = [h.active_ratio for h in histograms], [h.normalised_entropy for h in histograms]
            spots.append((i, f"{name}, {layers[0].name}", ratios, entropies))
    means = [
        (i, name, [a.mean("active_ratio") for a in analyses], [a.mean("normalised_entropy") for a in analyses])
        for i, name, analyses in networks
    ]
    published = [(row.active, row.entropy) for row in paper.LAYER_WISE.values() if on_cifar10]
    ends = [(*_ends(active), *_ends(entropy)) for _, _, active, entropy in (*spots, *means)]
    across = padded([*(end for low, high, *_ in ends for end in (low, high)), *(x for x, _ in published)])
    up = padded([*(end for *_, low, high in ends for end in (low, high)), *(y for _, y in published)])
    plot = Plot(
        "Burst entropy against active ratio",
        "; ".join(f"{name}: mean {fmean(active):.3f}, {fmean(entropy):.3f}" for _, name, active, entropy in means),
        across,
        up,
        "active ratio",
        "normalised burst entropy",
        subtitle=dataset + _of_seeds([len(analyses) for _, _, analyses in networks]),
    )
    for i, name, active, entropy in spots:
        _spot(plot, i, name, active, entropy, 2.6, hollow=False)
    for i, name, active, entropy in means:
        _spot(plot, i, f"{name}, mean over layers", active, entropy, 8, hollow=True)
    caption = "Small: layers; large: mean over layers"
    if on_cifar10:
        caption += "; ×: the means that the paper publishes"
        for variant, row in paper.LAYER_WISE.items():
            x, y = plot.at((row.active, row.entropy))
            for slope in (-1, 1):
                plot.path([(x - 4, y - 4 * slope), (x + 4, y + 4 * slope)], "line s7")
            side = -1 if variant == "v1" else 1  # V1 and LBQ lie close together
            plot.text(x + 7 * side, y + 4, variant.upper(), "start" if side > 0 else "end", "small halo")
    plot.legend([(name, i) for i, name, _ in networks])
    if len(by_layer) < len(networks):
        caption += ". Layers are shown of the networks that the paper's figure has"
    if any(len(analyses) > 1 for _, _, analyses in networks):
        caption += f". {WHISKERS[:-1]}"
    return Figure("entropy", "Entropy", f"{caption}. The paper's Figure 4 (b).", plot.svg())


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """A sample standard deviation to either side of the mean."""
    aside = stdev(values) if len(values) > 1 else 0.0
    return fmean(values) - aside, fmean(values) + aside


def _spot(
    plot: Plot, series: int, tip: str, active: Sequence[float], entropy: Sequence[float], size: float, hollow: bool
) -> None:
    """Draw the mean of the seeds' active ratios and entropies, with whiskers where there are several seeds."""
    x, y = fmean(active), fmean(entropy)
    if len(active) > 1:
        aside, up = stdev(active), stdev(entropy)
        tip += f": active ratio {x:.3f} ± {aside:.2g}, entropy {y:.3f} ± {up:.2g}"
        plot.whisker((x - aside, y), (x + aside, y), series)
        plot.whisker((x, y - up), (x, y + up), series)
    plot.mark(*plot.at((x, y)), series, size, tip, hollow)


def _levels(title: str, analysis: Analysis) -> Figure:
    layers, n_max = analysis.layers, max(layer.n_max for layer in analysis.layers)
    shares = (f"{layer.name}: " + " ".join(f"{100 * p:.0f}" for p in layer.histogram.conditional) for layer in layers)
    plot = Plot(
        "Use of each level, P(k | k > 0)",
        "; ".join(shares),
        (0.5, len(layers) + 0.5),
        (0, 1),
        "spiking layer, from the input",
        "share of active neuron-steps",
        xticks=_layer_axis(len(layers)),
        subtitle=title,
    )
    for j, layer in enumerate(layers):
        below = 0.0
        for k, p in enumerate(layer.histogram.conditional, 1):
            x, top = plot.at_x(j + 0.58), plot.at_y(below + p)
            size = plot.at_x(j + 1.42) - x, plot.at_y(below) - top
            plot.rect(x, top, *size, fill=level_colour(k, n_max), tip=f"{layer.name}, level {k}: {100 * p:.1f} %")
            below += float(p)
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
    whole = f"all {analysis.images:,}" if analysis.complete else f"the first {analysis.images:,}"
    caption = f"How often each non-zero level is used, over {whole} {_inputs(analysis)}."
    return Figure("levels", "Levels", caption, plot.svg())


def _inputs(analysis: Analysis) -> str:
    return f"images of {analysis.other_data}" if analysis.other_data else "test images"


ANALYSIS_FIGURES = ("steps", "active", "entropy", "levels", "membranes")  # all that there may be


def analysis_figures(analysis: Analysis) -> dict[str, Figure]:
    """The figures of one analysis, by file name."""
    title = str(analysis.facts.get("name") or analysis.facts.get("model") or "network")
    data = str(analysis.facts.get("dataset") or analysis.facts.get("data") or "dataset not named")
    dataset = shown_dataset(data)
    figures: dict[str, Figure | None] = {}

    def by_layer(id: str, heading: str, label: str, curve: Curve) -> None:
        figures[id] = Figure(id, "", "", _by_layer(heading, label, dataset, [curve]).svg())

    if analysis.steps:
        ranges = _step_ranges(analysis)
        by_layer("steps", "Step of each layer", "step γ", Curve(0, title, analysis.steps, ranges, 1, bool(ranges)))
    by_layer("active", "Active ratio of each layer", "active ratio", Curve(0, title, analysis.active))
    if max(layer.n_max for layer in analysis.layers) > 1:
        figures["entropy"] = _entropy([(0, title, [analysis])], dataset, on_cifar10=data == "cifar10")
        figures["levels"] = _levels(f"{title}, {dataset}", analysis)
    figures["membranes"] = membranes(title, dataset, analysis)
    return {id: figure for id, figure in figures.items() if figure is not None}
