"""The paper's Figs. 1 to 3 as drawings: the neuron on a real membrane trace, its execution by planes, the surrogates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lbq.counting.analysis import Trace
from lbq.report.figures import Figure, level_colour
from lbq.report.plot import Plot
from lbq.report.svg import WIDTH, Drawing

N_MAX, TAIL = 5, 0.5  # of the paper's Fig. 3
MOST_BARS = 12  # of the neuron at work, gaps between neurons included: more would be too narrow for their levels


# name: the range in which the slope is 1, and the tail outside it
SURROGATES = {
    "ReLSG-ET": (1.0, float(N_MAX), TAIL),
    "box": (0.5, N_MAX + 0.5, 0.0),
    "box-ET": (0.5, N_MAX + 0.5, TAIL),
}


def slope(r: float, low: float, high: float, tail: float) -> float:
    """Eq. surrogate_grad: 1 on [low, high], exponential tails outside."""
    if low <= r <= high:
        return 1.0
    return tail * math.exp(r - low if r < low else high - r)


def surrogates() -> Figure:
    """Fig. 3: dS_fwd/dU against r = U / γ."""
    plot = Plot(
        "Surrogate gradients",
        "ReLSG-ET is 1 from 1 to N_max with exponential tails outside; box is 1 from 1/2 to N_max + 1/2 and 0 outside",
        (-3, N_MAX + 4),
        (0, 1.15),
        "r = U / γ",
        "dS_fwd / dU",
    )
    grid = [-3 + i / 20 for i in range(20 * (N_MAX + 7) + 1)]
    for i, (low, high, tail) in reversed(list(enumerate(SURROGATES.values()))):
        points = []
        for r in grid:
            before, at, after = (slope(x, low, high, tail) for x in (r - 1e-9, r, r + 1e-9))
            # both sides of a jump are drawn, so that it is upright
            points += [(r, before), (r, after)] if abs(before - after) > 0.1 else [(r, at)]
        plot.line(points, i)
    plot.legend([(name, i) for i, name in enumerate(SURROGATES)])
    return Figure(
        "surrogates", "Surrogate gradients", f"N_max = {N_MAX}, λ = {TAIL}, as in the paper's figure.", plot.svg()
    )


def neuron_figures(traces: Sequence[Trace], of: str) -> list[Figure]:
    """Figs. 1 and 2 on traces of the network `of`."""
    where = f"{of}, layer {traces[0].layer}, first test image"
    busiest = max(traces, key=lambda t: max(map(abs, t.levels)))
    return [_membrane(traces, where), _execution(busiest, where)]


def _membrane(traces: Sequence[Trace], where: str) -> Figure:
    """Membranes as bars, thresholds as lines, the reset as an arrow, the level above. As many neurons as have room."""
    timesteps = min(len(traces[0].levels), MOST_BARS - 1)
    traces = traces[: max(1, MOST_BARS // (timesteps + 1))]
    steps = len(traces) * (timesteps + 1)
    high = max(max(t.n_max + 1, max(t.before) / t.step) for t in traces)
    low = min(0.0, min(min(*t.before, *t.after) / t.step for t in traces))
    plot = Plot(
        "The neuron at work",
        "; ".join(f"membrane {', '.join(f'{u / t.step:.2f}' for u in t.before)} steps gives levels {t.levels}" for t in traces),
        (0, steps),
        (low * 1.1, high * 1.08),
        "timestep of each neuron",
        "membrane U in steps γ",
        xticks=[],
        yticks=[(k, f"{k}γ" if k else "0") for k in range(max(t.n_max for t in traces) + 1)],
        subtitle=where,
    )  # fmt: skip
    at, wide = 0.5, 0.45 * (plot.at_x(1) - plot.at_x(0))
    for n, t in enumerate(traces):
        if n:
            plot.segment((plot.at_x(at - 0.5), plot.top), (plot.at_x(at - 0.5), plot.bottom), "grid")
        for i, level in enumerate(t.levels[:timesteps]):
            u, v, x = t.before[i] / t.step, t.after[i] / t.step, at + i
            top, bottom = plot.at_y(max(u, 0)), plot.at_y(min(u, 0))
            look = {"fill": level_colour(abs(level), t.n_max)} if level else {"kind": "silent"}
            middle, edge = plot.at_x(x + 0.35), plot.at_x(x + 0.75)
            plot.rect(
                middle - wide / 2, top, wide, bottom - top, tip=f"t = {i + 1}: U = {u:.2f} γ, S = {level}", **look
            )
            if level:
                plot.segment((edge, plot.at_y(u)), (edge, plot.at_y(v)), "axis")
                plot.path([(edge - 3, plot.at_y(v) - 5), (edge, plot.at_y(v)), (edge + 3, plot.at_y(v) - 5)], "axis")
            plot.text(middle, top - 6, f"{level}", "middle", "bold small")
            plot.text(middle, plot.bottom + 16, f"{i + 1}", "middle", "soft small")
        at += timesteps + 1
    shown = f"The first {timesteps} timesteps. " if timesteps < len(traces[0].levels) else ""
    caption = (
        f"Real traces: {where}. {shown}Bars: U just before emission, in steps. The number above is the level S: how many "
        "thresholds U reaches, at most N_max. Arrows: the reset, which takes one step away wherever S > 0. What is left, "
        "times β, is there at the next timestep."
    )
    return Figure("neuron", "From membrane to level", caption, plot.svg())


def _additions(count: int) -> str:
    return f"{count} addition{'' if count == 1 else 's'} a weight"


def _execution(trace: Trace, where: str) -> Figure:
    """Fig. 2 (b): one level as bit planes and as additions of weights."""
    level = max(abs(s) for s in trace.levels) or N_MAX
    planes = max(trace.n_max.bit_length(), 1)
    drawing = Drawing(
        WIDTH, 196, "One level by bit planes",
        f"Level {level} has {level.bit_count()} set bits, so {level.bit_count()} additions of shifted weights replace {level}",
    )  # fmt: skip
    colour = level_colour(min(level, trace.n_max), trace.n_max)
    y = drawing.head(8, f"Level {level}, executed in two ways", where)
    drawing.height += y
    drawing.text(8, y + 60, f"by unary spikes: {_additions(level)}")
    for i in range(min(level, 8)):
        drawing.rect(8 + 43 * i, y + 70, 37, 22, fill=colour)
        drawing.text(26 + 43 * i, y + 108, "+ Ŵ", "middle")
    drawing.text(8, y + 140, f"by bit planes, {level} = ({level:0{planes}b})₂: {_additions(level.bit_count())}")
    wide = min(72.0, (drawing.width - 8) / planes)
    for i, k in enumerate(reversed(range(planes))):
        bit = level >> k & 1
        style = {"fill": colour} if bit else {"fill": "none", "stroke": "var(--soft)", "stroke_dasharray": "3 3"}
        drawing.rect(8 + wide * i, y + 150, wide - 6, 22, **style)
        added = f"+ {2**k if k else ''}Ŵ" if bit else "skipped"
        drawing.text(8 + wide * (i + 0.5) - 3, y + 188, added, "middle", "" if bit else "soft")
    caption = (
        "The busiest level of the traces. The step has been absorbed into the weights, Ŵ = γW; "
        "plane k adds 2^k Ŵ, and planes without a bit add nothing."
    )
    return Figure("planes", "From level to additions", caption, drawing.svg())
