"""Figures of membranes before emission: of all runs over the same images, and layer by layer of one network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lbq.counting.analysis import Analysis, LayerAnalysis, Membrane
from lbq.report.figures import Figure
from lbq.report.plot import Plot
from lbq.report.svg import Drawing, number

SEEN = 0.005  # of the highest share: what is lower, at both ends of the axis, is not drawn


def membranes_of_all(networks: Sequence[tuple[int, str, Analysis]], heading: str) -> Figure | None:
    """Each network (series, name, analysis) as a curve: the mean over its layers. All are over the same images."""
    watched = [(series, name, analysis, _watched(analysis)) for series, name, analysis in networks]
    kinds = Counter(images for *_, images in watched if images is not None)
    if not kinds:
        return None
    images = max(kinds, key=lambda kind: (kinds[kind], kind))
    shown = [(series, name, _shares(analysis)) for series, name, analysis, seen in watched if seen == images]
    longest = max((shares for *_, shares in shown), key=len)
    highest = max(float(shares.max()) for *_, shares in shown)
    inside = [int(b) for *_, shares in shown for b in np.flatnonzero(shares >= SEEN * highest)]
    low, high = min(inside), max(inside) + 1
    centres = Membrane.LOW + Membrane.WIDTH * (np.arange(len(longest)) + 0.5)
    plot = Plot(
        "Membranes before emission",
        "; ".join(f"{name}: most often at {centres[shares.argmax()]:.2f} steps" for _, name, shares in shown),
        (float(centres[low]), float(centres[high - 1])),
        (0, 108 * highest),
        "membrane in steps, r = U / γ",
        "share of neuron-steps, %",
        subtitle=heading,
    )
    for series, _, shares in shown:
        plot.line([(float(centres[b]), 100 * float(shares[b])) for b in range(low, min(high, len(shares)))], series)
    plot.legend([(name, series) for series, name, _ in shown])
    other = [name for _, name, _, seen in watched if seen not in (None, images)]
    over = f"the same {images[1]:,} test images for all runs" if len(shown) > 1 else f"{images[1]:,} test images"
    caption = f"Mean over layers, in bins of {Membrane.WIDTH} steps, over {over}."
    if other:
        caption += f" Left out, for they were watched on other images: {'; '.join(other)} (lbq analyze --membranes)."
    return Figure("membranes", "Membranes", caption, plot.svg())


def _watched(analysis: Analysis) -> tuple[str, int, int] | None:
    """The images whose membranes were watched: of which data, how many, of how many. None: no image."""
    looked_at = [(layer, layer.membrane.counts) for layer in analysis.layers if layer.membrane is not None]
    seen = max((int(counts.sum()) // (len(counts) * math.prod(layer.shape)) for layer, counts in looked_at), default=0)
    return (analysis.other_data, seen, analysis.images) if seen else None


def _shares(analysis: Analysis) -> NDArray[np.float64]:
    """The share of neuron-steps in each bin, mean over layers; the bins at both ends, which hold what lies beyond, are 0."""
    layers = [layer.membrane.counts.sum(0) for layer in analysis.layers if layer.membrane is not None]
    total = np.zeros(max(map(len, layers)))
    for counts in layers:
        total[1 : len(counts) - 1] += counts[1:-1] / counts.sum() / len(layers)
    return total


CELL_WIDTH, HISTOGRAM_HEIGHT, LABEL_HEIGHT = 230.0, 120.0, 58.0  # of one histogram of membranes


def membranes(title: str, dataset: str, analysis: Analysis) -> Figure | None:
    """Small multiples: a histogram of r = U / step for every layer, thresholds as lines."""
    layers = [(layer, layer.membrane) for layer in analysis.layers if layer.membrane is not None]
    if not layers:
        return None
    columns = min(len(layers), 4)
    height = HISTOGRAM_HEIGHT + LABEL_HEIGHT
    drawing = Drawing(
        columns * CELL_WIDTH,
        math.ceil(len(layers) / columns) * height + 42,
        f"Membranes before emission: {title}",
        f"Histograms of r = U / step of {len(layers)} layers, with the thresholds at which levels begin",
    )
    lower = drawing.head(8, "Membranes before emission, r = U / γ", f"{title}, {dataset}")
    drawing.height += lower
    for j, (layer, membrane) in enumerate(layers):
        _histogram(drawing, j % columns * CELL_WIDTH + 8, j // columns * height + 80 + lower, layer, membrane)
    return Figure("membranes", drawing.title, "", drawing.svg())


def _histogram(drawing: Drawing, left: float, top: float, layer: LayerAnalysis, membrane: Membrane) -> None:
    counts = membrane.counts.sum(0)
    beyond = float(counts[0] + counts[-1]) / max(float(counts.sum()), 1.0)
    counts[0] = counts[-1] = 0
    wide, bottom, peak = CELL_WIDTH - 22, top + HISTOGRAM_HEIGHT, max(float(counts.max()), 1.0)
    each = wide / len(counts)

    def at(r: float) -> float:
        return left + (r - Membrane.LOW) / Membrane.WIDTH * each

    step = f"{'mean ' * (layer.step_range is not None)}γ {layer.step:.3g}; " if layer.step else ""
    drawing.text(left, top - 20, layer.name, kind="bold small")
    drawing.text(left, top - 6, f"{step}{100 * beyond:.1f} % beyond the axis", kind="soft small")
    outline = "".join(
        f"V{number(bottom - float(value) / peak * HISTOGRAM_HEIGHT)}H{number(left + (b + 1) * each)}"
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
    """Whether it also fires below -threshold: then its activity is that of both sides."""
    counts, first = membrane.counts.sum(0), membrane.thresholds[0]
    total, edges = max(float(counts.sum()), 1.0), membrane.edges
    above = float(counts[edges[:-1] >= first - 1e-6].sum()) / total
    below = float(counts[edges[1:] <= -first + 1e-6].sum()) / total
    active = layer.histogram.active_ratio
    return abs(active - above - below) < abs(active - above)
