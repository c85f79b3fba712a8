"""A small drawing kit: plots as SVG text, coloured by CSS variables so that they follow the page's theme. No dependency.

Series differ by colour, dash and marker, in Okabe and Ito's colours, which colour-blind readers can tell apart. The shades of
levels differ in lightness, so that their order survives greyscale print. Every drawing has a title and a description.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from textwrap import wrap

Point = tuple[float, float]

DASHES = ("", "6 3", "2 3", "8 3 2 3", "4 2", "1 2", "10 4", "3 5")
MARKERS = ("circle", "square", "triangle", "diamond", "cross")
SERIES = len(DASHES)  # colours; further series take them again with another dash and hollow markers, then with others
SMALL_LETTER, LEGEND_LETTER, BOLD_LETTER = 6.2, 7.5, 8.0  # width of a letter, in units; in legends with some room
WIDTH, LEGEND_LEFT = 360, 14.0  # of a drawing: a phone shows it at its own size, a desktop three beside one another
SHADES = 21  # of levels; the paper's N_max of 20 still has one for each
OUTLINES: dict[str, list[Point]] = {
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
    "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    "cross": [(-1, -0.4), (-0.4, -0.4), (-0.4, -1), (0.4, -1), (0.4, -0.4), (1, -0.4), (1, 0.4), (0.4, 0.4), (0.4, 1),
              (-0.4, 1), (-0.4, 0.4), (-1, 0.4)],
}  # fmt: skip


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


def standalone(svg: str) -> str:
    """A drawing that carries its own colours, for a file of its own."""
    style = (
        f"<style>svg{{{variables(LIGHT)}}}@media(prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}"
        f"svg.plot{{background:var(--paper)}}{RULES}</style>"
    )
    head, tail = svg.split(">", 1)
    width = number(min(1.5 * float(head.partition('viewBox="0 0 ')[2].split()[0]), 960))  # in pixels
    head += f' width="{width}" xmlns="http://www.w3.org/2000/svg"'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>{style}{tail}\n'


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


def shade(k: int, n_max: int) -> str:
    """The variable of level k = 1..n_max, from the shade nearest to the paper to the one furthest from it."""
    return f"v{round((k - 1) / max(n_max - 1, 1) * (SHADES - 1))}"


def label(value: float) -> str:
    return f"{value:.4g}".replace("e+0", "e").replace("e-0", "e-")


def _repeats(series: int) -> bool:
    """Whether its mark has the shape of an earlier series: colours outnumber shapes."""
    return series % SERIES >= len(MARKERS)


def dash_of(series: int) -> str:
    return DASHES[(series + 3 * (series // SERIES)) % SERIES]


Box = tuple[float, float, float, float]  # left, top, right, bottom


def _around(point: Point, x: float, y: float) -> Box:
    return point[0] - x, point[1] - y, point[0] + x, point[1] + y


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _between(points: Sequence[Point], top: float, bottom: float) -> list[list[Point]]:
    """The pieces of a line that lie between two heights, cut where it crosses them."""
    pieces: list[list[Point]] = []
    for (x, y), (to_x, to_y) in pairwise(points):
        rise = to_y - y
        start, end = sorted(((top - y) / rise, (bottom - y) / rise)) if rise else (0.0, float(top <= y <= bottom))
        start, end = max(start, 0.0), min(end, 1.0)
        if start >= end:
            continue
        first = (x, y) if start == 0 else (x + start * (to_x - x), y + start * rise)
        last = (to_x, to_y) if end == 1 else (x + end * (to_x - x), y + end * rise)
        if pieces and pieces[-1][-1] == first:
            pieces[-1].append(last)
        else:
            pieces.append([first, last])
    return pieces


def broken(text: str, most: int) -> list[str]:
    """`text` in lines of at most `most` characters, broken after commas or, where a part is too long, anywhere."""
    lines = [""]
    parts = text.split(", ")
    for i, part in enumerate(parts, 1):  # a line that another follows ends with a comma
        if lines[-1] and len(lines[-1]) + 2 + len(part) + (i < len(parts)) > most:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] += f", {part}" if lines[-1] else part
    if max(map(len, lines)) <= most:
        return lines
    return [
        line.replace("_ ", "_") for line in wrap(text.replace("_", "_ "), most)
    ]  # names of files have no other gaps


class Drawing:
    """Shapes in a box of `width` x `height` units; text is 13 units high."""

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self.parts: list[str] = []

    def add(self, text: str) -> None:
        self.parts.append(text)

    def head(self, x: float, title: str, subtitle: str = "") -> float:
        """Write title and subtitle from `x` on. Returns the height of their lines after the first of each."""
        names = broken(title, int((self.width - x) / BOLD_LETTER))
        for i, line in enumerate(names):
            self.text(x, 18 + 17 * i, line, kind="bold")
        lower = 17.0 * (len(names) - 1)
        lines = broken(subtitle, int((self.width - x) / SMALL_LETTER))
        for i, line in enumerate(lines if subtitle else ()):
            self.text(x, 35 + lower + 14 * i, line, kind="soft small")
        return lower + 14.0 * (len(lines) - 1)

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "", rotate: bool = False) -> None:
        turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if rotate else ""
        named = f' class="{kind}"' if kind else ""
        self.add(f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"{named}{turn}>{escape(text)}</text>')

    def segment(self, a: Point, b: Point, kind: str = "axis") -> None:
        (x1, y1), (x2, y2) = map(number, a), map(number, b)
        self.add(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}"/>')

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
        r, shape = size, MARKERS[(series % SERIES + series // (2 * SERIES)) % len(MARKERS)]
        hollow = hollow or series // SERIES % 2 == 1
        kind = f'class="mark s{series % SERIES}{" hollow" if hollow else ""}"'
        inside = f"><title>{escape(tip)}</title></" if tip else "></"
        if shape == "circle":
            self.add(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(r)}" {kind}{inside}circle>')
            return
        joined = " ".join(f"{number(x + dx * r)},{number(y + dy * r)}" for dx, dy in OUTLINES[shape])
        self.add(f'<polygon points="{joined}" {kind}{inside}polygon>')

    def svg(self) -> str:
        body = "".join(self.parts)
        return (
            f'<svg class="plot" role="img" viewBox="0 0 {number(self.width)} {number(self.height)}">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>{body}</svg>"
        )


class Plot(Drawing):
    """Axes with data coordinates. x may be logarithmic; ticks may have labels of their own."""

    def __init__(
        self,
        title: str,
        description: str,
        x: tuple[float, float],
        y: tuple[float, float],
        xlabel: str = "",
        ylabel: str = "",
        *,
        xlog: bool = False,
        xticks: Iterable[tuple[float, str]] | None = None,
        yticks: Iterable[tuple[float, str]] | None = None,
        subtitle: str = "",
    ) -> None:
        super().__init__(WIDTH, 262, title, description)
        self.x, self.y, self.xlog = x, y, xlog
        self.left, self.right = 54.0, self.width - 14
        lower = self.head(self.left, title, subtitle) + (17 if subtitle else 0)
        self.height += lower
        self.top, self.bottom = 30.0 + lower, self.height - 44.0
        for value, text in yticks if yticks is not None else [(v, label(v)) for v in ticks(*y)]:
            at = self.at_y(value)
            self.segment((self.left, at), (self.right, at), "grid")
            self.text(self.left - 6, at + 4, text, "end", "soft")
        along = log_ticks(*x) if xlog else ticks(*x)
        for value, text in xticks if xticks is not None else [(v, label(v)) for v in along]:
            at = self.at_x(value)
            self.segment((at, self.bottom), (at, self.bottom + 4))
            self.text(at, self.bottom + 18, text, "middle", "soft")
        self.segment((self.left, self.bottom), (self.right, self.bottom))
        self.text((self.left + self.right) / 2, self.height - 8, xlabel, "middle")
        self.text(13, (self.top + self.bottom) / 2, ylabel, "middle", rotate=True)

    @staticmethod
    def _share(value: float, span: tuple[float, float], log: bool = False) -> float:
        low, high = (math.log(span[0]), math.log(span[1])) if log else span
        at = math.log(value) if log else value
        return (at - low) / (high - low) if high > low else 0.5

    def at_x(self, value: float) -> float:
        return self.left + self._share(value, self.x, self.xlog) * (self.right - self.left)

    def at_y(self, value: float) -> float:
        return self.bottom - self._share(value, self.y) * (self.bottom - self.top)

    def at(self, point: Point) -> Point:
        return self.at_x(point[0]), self.at_y(point[1])

    def line(
        self,
        points: Sequence[Point],
        series: int,
        tips: Sequence[str] = (),
        hollow: bool = False,
        dash: str | None = None,
    ) -> None:
        """A curve, marked at its points, or at eight of many, and cut off at the axes.

        dash: where it says something else than the series, which then differs by colour and mark alone.
        """
        self.add(f'<g data-of="{series}">')
        hollow = hollow or (dash is not None and _repeats(series))
        drawn = [self.at(p) for p in points]
        for piece in _between(drawn, self.top, self.bottom):
            self.path(piece, f"line s{series % SERIES}", dash_of(series) if dash is None else dash)
        every = 1 if len(points) <= 20 else math.ceil(len(points) / 8)
        for i in range(series * every // 5 % every, len(points), every):  # not all series at the same places
            x, y = drawn[i]
            if self.left - 1 <= x <= self.right + 1 and self.top - 1 <= y <= self.bottom + 1:
                self.mark(x, y, series, 3.4, tips[i] if i < len(tips) else "", hollow)
        self.add("</g>")

    def whisker(self, a: Point, b: Point, series: int) -> None:
        """A thin bar, level or upright, with a cap at either end. An end beyond the axes is cut off, with its cap."""
        kind, start, end = f"s{series % SERIES}", self.at(a), self.at(b)
        inside = [(min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)) for x, y in (start, end)]
        self.add(f'<g data-of="{series}">')
        self.segment(inside[0], inside[1], kind)
        across = (0, 3) if start[1] == end[1] else (3, 0)
        for x, y in (place for place in inside if place in (start, end)):
            self.segment((x - across[0], y - across[1]), (x + across[0], y + across[1]), kind)
        self.add("</g>")

    def numbers(self, points: Sequence[tuple[Point, str]], marks: Sequence[Point] = ()) -> None:
        """Short labels of points: beside them where no other point is as near, else apart and joined by a line.

        As long as there is room, no label lies on a point, one of the other `marks` or a label, and no line crosses one.
        """
        occupied = [_around(point, 6, 6) for point in (*(point for point, _ in points), *marks)]
        for point, text in points:
            near = 11 + 3 * len(text)
            others = [box for box in occupied if box != _around(point, 6, 6)]
            places = [
                (r, (point[0] + r * math.cos(turn * math.pi / 8), point[1] - r * math.sin(turn * math.pi / 8)))
                for r in (near, 24, 34, 46, 60, 76)
                for turn in (0, 8, 4, 12, 2, 6, 14, 10, 1, 7, 15, 9, 3, 5, 13, 11)
            ]
            best: tuple[int, Point, list[Box]] = (*places[0], [])
            for r, place in places:
                box = _around(place, 3.5 * len(text) + 1, 6)
                inside = self.left <= box[0] and box[2] <= self.right and self.top <= box[1] and box[3] <= self.bottom
                crowded = r == near and any(math.dist(place, other) < r + 4 for other, _ in points if other != point)
                if crowded or not inside or any(_overlap(box, other) for other in others):
                    continue
                line = [_around(self._along(point, place, d), 1, 1) for d in range(7, r - 5, 3)] if r > near else []
                if not any(_overlap(mine, other) for mine in line for other in others):
                    best = (r, place, [box, *line])
                    break
                if not best[2]:  # a line that crosses something still says whose the label is
                    best = (r, place, [box])
            r, place, boxes = best
            occupied += boxes
            if r > near:
                self.segment(self._along(point, place, 6), self._along(point, place, r - 6), "axis")
            self.text(place[0], place[1] + 4, text, "middle", "bold small halo")

    @staticmethod
    def _along(a: Point, b: Point, distance: float) -> Point:
        share = distance / math.dist(a, b)
        return a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])

    def listing(self, rows: Sequence[tuple[str, int | None, str, str]], hollow: Sequence[int] = ()) -> None:
        """Below the plot, a row for each (number, series, name, value), marked where it has a series; the drawing grows."""
        y = self.height + 14
        for text, series, name, value in rows:
            self.text(24, y, text, "end", "bold small")
            if series is not None:
                self.mark(40, y - 4, series, 4, hollow=series in hollow)
            x = 34 if series is None else 54
            lines = broken(name, int((self.width - x) / SMALL_LETTER))
            for line in lines:
                self.text(x, y, line, kind="small")
                y += 14
            if x + SMALL_LETTER * (len(lines[-1]) + len(value) + 1) <= self.right:
                y -= 14
            self.text(self.right, y, value, "end", "soft small")
            y += 16
        self.height = y - 6

    def legend(self, entries: Sequence[tuple[str, int]], dashes: Sequence[tuple[str, str]] = ()) -> None:
        """Below the plot, as many to a row as fit; the drawing grows. dashes: what they mean where not the series."""
        x, y = LEGEND_LEFT, self.height + 14
        for text, series in entries:
            lines = broken(text, int((self.width - LEGEND_LEFT - 34) / LEGEND_LETTER))
            x, y, after = self._placed(x, y, 34 + LEGEND_LETTER * max(map(len, lines)))
            self.add(f'<g data-of="{series}">')
            line_class = f"line s{series % SERIES}"
            self.path([(x, y - 4), (x + 22, y - 4)], line_class, "" if dashes else dash_of(series))
            self.mark(x + 11, y - 4, series, 4, hollow=bool(dashes) and _repeats(series))
            for i, line in enumerate(lines):
                self.text(x + 28, y + 16 * i, line)
            self.add("</g>")
            x, y = after, y + 16 * (len(lines) - 1)
        self.height = y + 10
        x, y = LEGEND_LEFT, y + 20
        for text, dash in dashes:
            x, y, after = self._placed(x, y, 44 + LEGEND_LETTER * len(text))
            self.path([(x, y - 4), (x + 32, y - 4)], "line axis", dash)
            self.text(x + 38, y, text)
            x, self.height = after, y + 10

    def _placed(self, x: float, y: float, width: float) -> tuple[float, float, float]:
        """Where an entry of a legend goes, here or in the next row, and where the one after it does."""
        if x + width > self.width and x > LEGEND_LEFT:
            x, y = LEGEND_LEFT, y + 20
        return x, y, x + width + 12
