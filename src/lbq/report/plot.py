"""Plots: a drawing with axes, curves, whiskers, numbered points and a legend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lbq.report.svg import LEGEND_LETTER, SMALL_LETTER, WIDTH, Drawing, Point, broken
from lbq.report.theme import MARKERS, SERIES, dash_of

LEGEND_LEFT = 14.0
MISLEADING = 100  # times as bad as another: a line that crosses a point with a label of its own
Box = tuple[float, float, float, float]  # left, top, right, bottom


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
    return f"{value:,.4g}".replace("e+0", "e").replace("e-0", "e-")


def _repeats(series: int) -> bool:
    """Whether its mark has the shape of an earlier series: colours outnumber shapes."""
    return series % SERIES >= len(MARKERS)


def _around(point: Point, x: float, y: float) -> Box:
    return point[0] - x, point[1] - y, point[0] + x, point[1] + y


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _crossed(line: Sequence[Box], others: Iterable[Sequence[Box]]) -> int:
    """How many of the others a line meets."""
    return sum(any(_overlap(mine, box) for mine in line for box in other) for other in others)


class _Spot(NamedTuple):
    """Where a label of a point goes: its middle, its box, and the line that leads to it, empty beside the point."""

    place: Point
    label: Box
    line: Sequence[Box]
    end: Point


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

        As long as there is room, no label lies on a point, one of the other `marks` or a label, and no line crosses one. Where
        there is none, a line rather crosses one of the marks than another line, a label rather lies on a mark, and no line
        crosses a point or a label of another but in the last resort.
        """
        spots: dict[int, _Spot] = {}
        for _ in range(3):  # each in turn makes room for where the others went before
            before = dict(spots)
            for i in range(len(points)):
                spots[i] = self._spot(i, points, marks, [spot for j, spot in spots.items() if j != i])
            if spots == before:
                break
        for (point, _), spot in zip(points, spots.values(), strict=True):
            if spot.line:
                self.segment(self._along(point, spot.place, 6), spot.end, "axis")
        for (_, text), spot in zip(points, spots.values(), strict=True):
            self.text(spot.place[0], spot.place[1] + 4, text, "middle", "bold small halo")

    def _spot(
        self, own: int, points: Sequence[tuple[Point, str]], marks: Sequence[Point], spots: Sequence[_Spot]
    ) -> _Spot:
        """The best place for the label of one point, given those of others."""
        point, text = points[own]
        named = [_around(other, 6, 6) for other, _ in points if other != point]
        small = [_around(mark, 6, 6) for mark in marks if mark != point]
        labels, lines = [spot.label for spot in spots], [spot.line for spot in spots]
        near = 11 + 3 * len(text)
        best, least = None, math.inf
        for r in (near, 24, 34, 46, 60, 76, 94):
            length = (r - near) / 10
            if least <= length:
                break
            for turn in (0, 8, 4, 12, 2, 6, 14, 10, 1, 7, 15, 9, 3, 5, 13, 11):
                place = point[0] + r * math.cos(turn * math.pi / 8), point[1] - r * math.sin(turn * math.pi / 8)
                box = _around(place, 3.5 * len(text) + 1, 6)
                inside = self.left <= box[0] and box[2] <= self.right and self.top <= box[1] and box[3] <= self.bottom
                crowded = r == near and any(math.dist(place, other) < r + 4 for other, _ in points if other != point)
                free = inside and not crowded and not any(_overlap(box, other) for other in (*named, *labels))
                if best is not None and not free:
                    continue
                line = [_around(self._along(point, place, d), 1, 1) for d in range(7, r - 5, 3)] if r > near else []
                crossed = _crossed(line, ([other] for other in (*named, *labels))) + _crossed([box], lines)
                hidden = sum(_overlap(box, mark) for mark in small)
                cost = MISLEADING * crossed + 10 * (hidden + _crossed(line, lines)) + length
                cost += 2 * _crossed(line, ([mark] for mark in small))
                if best is None or cost < least:
                    best = _Spot(place, box, line, self._along(point, place, r - 6))
                    least = cost if free else math.inf
        assert best is not None
        return best

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
