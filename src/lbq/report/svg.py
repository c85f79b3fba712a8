"""A small drawing kit: shapes and words as SVG text. No dependency. Every drawing has a title and a description."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

from lbq.report.theme import DARK, LIGHT, MARKERS, RULES, SERIES, variables

Point = tuple[float, float]

WIDTH = 360  # of most drawings: a phone shows it at its own size, a desktop three beside one another
SMALL_LETTER, LEGEND_LETTER, BOLD_LETTER = 6.2, 7.5, 8.0  # width of a letter, in units; in legends with some room
OUTLINES: dict[str, list[Point]] = {
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
    "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    "cross": [(-1, -0.4), (-0.4, -0.4), (-0.4, -1), (0.4, -1), (0.4, -0.4), (1, -0.4), (1, 0.4), (0.4, 0.4), (0.4, 1),
              (-0.4, 1), (-0.4, 0.4), (-1, 0.4)],
}  # fmt: skip


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
    # names of files have no other gaps
    return [line.replace("_ ", "_") for line in wrap(text.replace("_", "_ "), most)]


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
