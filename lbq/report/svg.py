"""A small drawing kit: plots as SVG text, coloured by CSS variables so that they follow the page's theme. No dependency.

Series differ by colour, dash and marker; colours are Okabe and Ito's, which colour-blind readers can tell apart. Every
drawing has a title and a description for those who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

Point = tuple[float, float]

DASHES = ("", "6 3", "2 3", "8 3 2 3", "4 2", "1 2", "10 4", "3 5")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "circle", "square", "triangle")
SERIES = len(DASHES)  # colours; further series take them again with another dash and hollow markers

# light and dark values of every variable that a drawing uses; the page defines the same ones
LIGHT = {
    "ink": "#1b1f24", "soft": "#5b6570", "grid": "#e3e7ec", "paper": "#ffffff",
    "s0": "#0072b2", "s1": "#d55e00", "s2": "#009e73", "s3": "#aa4499", "s4": "#8c6d00",
    "s5": "#4477aa", "s6": "#882255", "s7": "#444444",
}  # fmt: skip
DARK = {
    "ink": "#e8ebee", "soft": "#a3adb8", "grid": "#30363d", "paper": "#14181d",
    "s0": "#56b4e9", "s1": "#ff9d4d", "s2": "#3fd6a6", "s3": "#e9a3d6", "s4": "#f0e442",
    "s5": "#9ec5ff", "s6": "#ff9fbf", "s7": "#cccccc",
}  # fmt: skip
RULES = (
    "svg.plot{font:13px system-ui,sans-serif;fill:var(--ink)}"
    "svg.plot .soft{fill:var(--soft)}svg.plot .axis{stroke:var(--soft);fill:none}"
    "svg.plot .grid{stroke:var(--grid);fill:none}svg.plot .rule{stroke:var(--soft);stroke-dasharray:4 4;fill:none}"
    "svg.plot .line{fill:none;stroke-width:2;stroke-linejoin:round}"
    + "".join(f"svg.plot .s{i}{{stroke:var(--s{i});fill:var(--s{i})}}svg.plot .line.s{i}{{fill:none}}" for i in range(SERIES))
    + "svg.plot .mark{stroke-width:1.5}svg.plot .hollow{fill:var(--paper)}svg.plot text{stroke:none}"
    "svg.plot .bold{font-weight:600}svg.plot .small{font-size:11px}"
)  # fmt: skip


def variables(values: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())


def standalone(svg: str) -> str:
    """A drawing that carries its own colours, for a file of its own."""
    style = (
        f"<style>svg{{{variables(LIGHT)}}}@media(prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}"
        f"svg.plot{{background:var(--paper)}}{RULES}</style>"
    )
    head, tail = svg.split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head} xmlns="http://www.w3.org/2000/svg">{style}{tail}\n'


def number(value: float) -> str:
    """A coordinate with at most two decimals."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers within [low, high]."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    unit = 10 ** math.floor(math.log10(span / most))
    step = next(unit * m for m in (1, 2, 5, 10) if span / (unit * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of every decade within [low, high]; only 1 where there are many decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leads = (1, 2, 5) if len(decades) <= 3 else (1,)
    return [m * 10.0**d for d in decades for m in leads if low * 0.999 <= m * 10.0**d <= high * 1.001]


def label(value: float) -> str:
    return f"{value:.4g}".replace("e+0", "e").replace("e-0", "e-")


def dash_of(series: int) -> str:
    return DASHES[(series + 3 * (series // SERIES)) % SERIES]


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Of boxes (left, top, right, bottom)."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


class Drawing:
    """Shapes in a box of `width` x `height` units; text is 13 units high."""

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self.parts: list[str] = []

    def add(self, text: str) -> None:
        self.parts.append(text)

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "", rotate: bool = False) -> None:
        turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if rotate else ""
        named = f' class="{kind}"' if kind else ""
        self.add(f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"{named}{turn}>{escape(text)}</text>')

    def segment(self, a: Point, b: Point, kind: str = "axis") -> None:
        self.add(
            f'<line x1="{number(a[0])}" y1="{number(a[1])}" x2="{number(b[0])}" y2="{number(b[1])}" class="{kind}"/>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str = "", tip: str = "", **style: str
    ) -> None:
        extra = "".join(f' {k.replace("_", "-")}="{escape(v)}"' for k, v in style.items())
        named = f' class="{kind}"' if kind else ""
        inside = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self.add(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(max(width, 0))}" height="{number(max(height, 0))}"'
            f"{named}{extra}{inside}"
        )

    def path(self, points: Sequence[Point], kind: str, dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        joined = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.add(f'<path d="M{joined}" class="{kind}"{dashed}/>')

    def mark(self, x: float, y: float, series: int, size: float = 4, tip: str = "", hollow: bool = False) -> None:
        """One point of a series, in the series' own shape."""
        r, shape = size, MARKERS[series % SERIES]
        hollow = hollow or series // SERIES % 2 == 1
        kind = f'class="mark s{series % SERIES}{" hollow" if hollow else ""}"'
        inside = f"><title>{escape(tip)}</title></" if tip else "></"
        if shape == "circle":
            self.add(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(r)}" {kind}{inside}circle>')
            return
        shapes: dict[str, list[Point]] = {
            "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
            "triangle": [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
            "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
            "cross": [(-1, -0.4), (-0.4, -0.4), (-0.4, -1), (0.4, -1), (0.4, -0.4), (1, -0.4), (1, 0.4), (0.4, 0.4),
                      (0.4, 1), (-0.4, 1), (-0.4, 0.4), (-1, 0.4)],
        }  # fmt: skip
        outline = shapes[shape]
        joined = " ".join(f"{number(x + dx * r)},{number(y + dy * r)}" for dx, dy in outline)
        self.add(f'<polygon points="{joined}" {kind}{inside}polygon>')

    def svg(self) -> str:
        body = "".join(self.parts)
        return (
            f'<svg class="plot" role="img" viewBox="0 0 {number(self.width)} {number(self.height)}">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>{body}</svg>"
        )


class Plot(Drawing):
    """Axes with data coordinates. x or y may be logarithmic; ticks may be given with their labels."""

    def __init__(
        self,
        title: str,
        description: str,
        x: tuple[float, float],
        y: tuple[float, float],
        xlabel: str = "",
        ylabel: str = "",
        *,
        width: float = 480,
        height: float = 300,
        xlog: bool = False,
        ylog: bool = False,
        xticks: Iterable[tuple[float, str]] | None = None,
        yticks: Iterable[tuple[float, str]] | None = None,
        right: float = 14,
        heading: bool = True,
    ) -> None:
        super().__init__(width, height, title, description)
        self.x, self.y, self.xlog, self.ylog = x, y, xlog, ylog
        self.left, self.right, self.top, self.bottom = 62.0, width - right, 30.0 if heading else 12.0, height - 44.0
        self.entries: list[tuple[str, int, bool]] = []
        if heading:
            self.text(self.left, 18, title, kind="bold")
        for value, text in yticks if yticks is not None else [(v, label(v)) for v in self._ticks(y, ylog)]:
            at = self.at_y(value)
            self.segment((self.left, at), (self.right, at), "grid")
            self.text(self.left - 6, at + 4, text, "end", "soft")
        for value, text in xticks if xticks is not None else [(v, label(v)) for v in self._ticks(x, xlog)]:
            at = self.at_x(value)
            self.segment((at, self.bottom), (at, self.bottom + 4))
            self.text(at, self.bottom + 18, text, "middle", "soft")
        self.segment((self.left, self.bottom), (self.right, self.bottom))
        if xlabel:
            self.text((self.left + self.right) / 2, height - 8, xlabel, "middle")
        if ylabel:
            self.text(13, (self.top + self.bottom) / 2, ylabel, "middle", rotate=True)

    @staticmethod
    def _ticks(span: tuple[float, float], log: bool) -> list[float]:
        return log_ticks(*span) if log else ticks(*span)

    @staticmethod
    def _share(value: float, span: tuple[float, float], log: bool) -> float:
        low, high = (math.log(span[0]), math.log(span[1])) if log else span
        at = math.log(value) if log else value
        return (at - low) / (high - low) if high > low else 0.5

    def at_x(self, value: float) -> float:
        return self.left + self._share(value, self.x, self.xlog) * (self.right - self.left)

    def at_y(self, value: float) -> float:
        return self.bottom - self._share(value, self.y, self.ylog) * (self.bottom - self.top)

    def at(self, point: Point) -> Point:
        return self.at_x(point[0]), self.at_y(point[1])

    def line(self, points: Sequence[Point], series: int, marks: bool = False, tips: Sequence[str] = ()) -> None:
        if len(points) > 1:
            self.path([self.at(p) for p in points], f"line s{series % SERIES}", dash_of(series))
        if marks or len(points) == 1:
            for i, p in enumerate(points):
                self.mark(*self.at(p), series, 3.4, tips[i] if i < len(tips) else "")

    def level(self, y: float, text: str = "") -> None:
        """A dashed horizontal rule with a note at its right end."""
        self.segment((self.left, self.at_y(y)), (self.right, self.at_y(y)), "rule")
        if text:
            self.text(self.right - 2, self.at_y(y) - 5, text, "end", "soft small")

    def names(self, points: Sequence[tuple[float, float, str, str]]) -> None:
        """Small labels (x, y, text, class) beside points of the drawing, moved until none lies on another or on a point."""
        taken = [(x - 6, y - 6, x + 6, y + 6) for x, y, _, _ in points]
        for x, y, text, kind in points:
            wide = (6.2 if "bold" in kind else 5.8) * len(text)
            places = [
                (x + dx if dx > 0 else x + dx - wide, y + dy) for dy in (4, -7, 14, -19, 26, -31, 38) for dx in (9, -9)
            ]
            boxes = [(at, (at[0], at[1] - 9, at[0] + wide, at[1] + 2)) for at in places]
            inside = [
                (at, b)
                for at, b in boxes
                if b[0] >= self.left and b[2] <= self.width and self.top <= b[1] <= self.bottom
            ]
            free = [(at, b) for at, b in inside if not any(_overlap(b, other) for other in taken)]
            (tx, ty), box = (free or inside or boxes)[0]
            if abs(ty - y) > 15:
                self.segment((x, y), (tx if tx > x else tx + wide, ty - 4), "grid")
            self.text(tx, ty, text, kind=f"{kind} small")
            taken.append(box)

    def legend(self, entries: Sequence[tuple[str, int]], hollow: Sequence[bool] = ()) -> None:
        """Below the plot, as many to a row as fit; the drawing grows."""
        x, y = self.left, self.height + 14
        for i, (text, series) in enumerate(entries):
            wide = 34 + 6.9 * len(text)
            if x + wide > self.width and x > self.left:
                x, y = self.left, y + 20
            middle = y - 4
            self.path([(x, middle), (x + 22, middle)], f"line s{series % SERIES}", dash_of(series))
            self.mark(x + 11, middle, series, 4, hollow=bool(hollow) and hollow[i])
            self.text(x + 28, y, text)
            x += wide + 12
        self.height = y + 10
