"""Figures, drawn without a display. Colours distinguish levels by lightness, so they survive greyscale printing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lbq.analyze import LevelHistogram


def step_profile(
    path: Path | str,
    steps: Mapping[str, float],
    initial: float,
    histograms: Mapping[str, LevelHistogram],
    title: str,
) -> None:
    """Layer-wise learned steps (left) and how each layer uses its non-zero levels (right), as one PNG."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(steps)
    at = np.arange(len(names))
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)

    left.axhline(initial, color="0.55", linestyle="--", linewidth=1, label=f"initial step {initial:g}")
    left.plot(at, list(steps.values()), color="#1f4e79", marker="o")
    for i, value in zip(at, steps.values(), strict=True):
        left.annotate(
            f"{value:.3f}", (i, value), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip
    left.set(ylabel="learned step γ", title="Learned step of each layer")
    left.set_ylim(0, max(*steps.values(), initial) * 1.2)
    left.legend(loc="upper left", frameon=False)

    shares = np.array([histograms[name].conditional for name in names])  # [layer, level]
    colours = colormaps["viridis_r"](np.linspace(0.1, 0.95, shares.shape[1]))
    bottom = np.zeros(len(names))
    for k in range(shares.shape[1]):
        right.bar(at, shares[:, k], bottom=bottom, color=colours[k], label=f"{k + 1}", width=0.8)
        bottom += shares[:, k]
    for i, name in zip(at, names, strict=True):
        active = f"{100 * histograms[name].active_ratio:.0f} %"
        right.annotate(active, (i, 1.0), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    right.set(ylabel="P(level | level > 0)", title="Levels that neurons emit (above: share of active neurons)")
    right.set_ylim(0, 1.12)
    right.legend(title="level", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
    for axes in (left, right):
        axes.set_xticks(at, names, rotation=35, ha="right", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
