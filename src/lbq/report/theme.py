"""Colours and marks of the drawings, as CSS variables, so that they follow the page's theme.

Series differ by colour, dash and marker, in Okabe and Ito's colours, which colour-blind readers can tell apart. The shades of
levels differ in lightness, so that their order survives greyscale print.
"""

from __future__ import annotations

DASHES = ("", "6 3", "2 3", "8 3 2 3", "4 2", "1 2", "10 4", "3 5")
MARKERS = ("circle", "square", "triangle", "diamond", "cross")
SERIES = len(DASHES)  # colours; further series take them again with another dash and hollow markers, then with others
SHADES = 21  # of levels; the paper's N_max of 20 still has one for each


def _shades(*anchors: str) -> dict[str, str]:
    """`v0` .. `v20`, evenly along the anchors."""
    colours = {}
    for i in range(SHADES):
        share = i / (SHADES - 1) * (len(anchors) - 1)
        low = min(int(share), len(anchors) - 2)
        a, b = (tuple(int(anchors[j][k : k + 2], 16) for k in (1, 3, 5)) for j in (low, low + 1))
        mixed = (round(x + (y - x) * (share - low)) for x, y in zip(a, b, strict=True))
        colours[f"v{i}"] = "#" + "".join(f"{c:02x}" for c in mixed)
    return colours


# light and dark values of every variable that a drawing uses; the page defines the same ones
LIGHT = {
    "ink": "#1b1f24", "soft": "#5b6570", "grid": "#e3e7ec", "paper": "#ffffff",
    "s0": "#0072b2", "s1": "#d55e00", "s2": "#009e73", "s3": "#aa4499", "s4": "#8c6d00",
    "s5": "#4477aa", "s6": "#882255", "s7": "#444444",
    **_shades("#de7a00", "#d03f55", "#97278f", "#561d86", "#1d0f45"),
}  # fmt: skip
DARK = {
    "ink": "#e8ebee", "soft": "#a3adb8", "grid": "#30363d", "paper": "#14181d",
    "s0": "#56b4e9", "s1": "#ff9d4d", "s2": "#3fd6a6", "s3": "#e9a3d6", "s4": "#f0e442",
    "s5": "#9ec5ff", "s6": "#ff9fbf", "s7": "#cccccc",
    **_shades("#8c5fd9", "#d65c9c", "#f58a55", "#fcbf3f", "#fdf7a0"),
}  # fmt: skip
RULES = (
    "svg.plot{font:13px system-ui,sans-serif;fill:var(--ink)}"
    "svg.plot .soft{fill:var(--soft)}svg.plot .axis{stroke:var(--soft);fill:none}"
    "svg.plot .grid{stroke:var(--grid);fill:none}svg.plot .rule{stroke:var(--soft);stroke-dasharray:4 4;fill:none}"
    "svg.plot .silent{stroke:var(--soft);fill:none}"
    "svg.plot .line{fill:none;stroke-width:2;stroke-linejoin:round}"
    + "".join(f"svg.plot .s{i}{{stroke:var(--s{i});fill:var(--s{i})}}svg.plot .line.s{i}{{fill:none}}" for i in range(SERIES))
    + "svg.plot .mark{stroke-width:1.5}svg.plot .hollow{fill:var(--paper)}svg.plot text{stroke:none}"
    "svg.plot .bold{font-weight:600}svg.plot .small{font-size:11px}"
    "svg.plot .halo{stroke:var(--paper);stroke-width:3px;paint-order:stroke}"
)  # fmt: skip


def variables(values: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())


def shade(k: int, n_max: int) -> str:
    """The variable of level k = 1..n_max, from the shade nearest to the paper to the one furthest from it."""
    return f"v{round((k - 1) / max(n_max - 1, 1) * (SHADES - 1))}"


def dash_of(series: int) -> str:
    return DASHES[(series + 3 * (series // SERIES)) % SERIES]
