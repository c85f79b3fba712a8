"""Tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from html import escape

from lbq.report.cells import Row, Table

COLUMNS_PER_PAGE = 7  # more are scaled down
LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "†": r"$^{\dagger}$", "µ": r"$\mu$", "γ": r"$\gamma$",
    "|": r"$|$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def markdown(tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        rule = ["---:" if i in table.numeric else "---" for i in range(len(table.columns))]
        lines = [[_as_text(c) for c in table.columns], rule, *(_texts(row, _as_text, "**{}**") for row in table.rows)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "\n".join(f"{_as_text(note)}  " for note in table.notes)
        parts.append(f"## {_as_text(table.title)}\n\n{body}\n" + (f"\n{notes}\n" if notes else ""))
    return "\n".join(parts)


def _texts(row: Row, escaped: Callable[[str], str], bold: str) -> list[str]:
    """The texts of a row. The first one is bold in a row of ours."""
    first, *others = (escaped(c.text) for c in row.cells)
    return [bold.format(first) if row.kind == "ours" else first, *others]


def _as_text(text: str) -> str:
    """A text of a record as text alone: no tag, no link, no border of a cell."""
    shown = escape(" ".join(text.split()), quote=False).replace("|", "\\|")
    return shown.replace("](", "]\\(").replace("]:", "]\\:")


def latex(tables: Sequence[Table]) -> str:
    """Tables that compile with the packages that the first line names. The paper around them numbers them."""
    parts = ["% \\usepackage{booktabs,graphicx}\n"]
    for table in tables:
        columns = "".join("r" if i in table.numeric else "l" for i in range(len(table.columns)))
        rows = [list(map(_escape, table.columns)), *(_texts(row, _escape, r"\textbf{{{}}}") for row in table.rows)]
        header, *lines = (" & ".join(texts) + r" \\" for texts in rows)
        notes = " ".join(map(_escape, table.notes))
        body = "\n  ".join([header, r"\midrule", *lines])
        caption = re.sub(r"^(Table \d+): (.*)$", r"\2 (\1 of the LBQ paper)", table.title)
        wide = len(table.columns) > COLUMNS_PER_PAGE
        start, end = ("  \\resizebox{\\textwidth}{!}{%\n", "}") if wide else ("", "")
        parts.append(
            "\\begin{table}\n  \\centering\\footnotesize\n"
            f"  \\caption{{{_escape(caption)}.}}\n  \\label{{tab:{table.id}}}\n{start}"
            f"  \\begin{{tabular}}{{{columns}}}\n  \\toprule\n  {body}\n  \\bottomrule\n  \\end{{tabular}}{end}\n"
            + (f"  \\par\\smallskip {notes}\n" if notes else "")
            + "\\end{table}\n"
        )
    return "\n".join(parts)


def _escape(text: str) -> str:
    return re.sub("|".join(map(re.escape, LATEX)), lambda m: LATEX[m[0]], " ".join(text.split()))


def comma_separated(table: Table) -> str:
    """Numbers in full, without thousands' commas. Deviation and number of seeds follow a column of means."""
    means = [any(row.cells[i].n is not None for row in table.rows) for i in range(len(table.columns))]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        name for column, mean in zip(table.columns, means, strict=True)
        for name in ((column, f"{column} sd", f"{column} n") if mean else (column,))
    )  # fmt: skip
    for row in table.rows:
        cells: list[object] = []
        for cell, mean in zip(row.cells, means, strict=True):
            cells.append(_plain(cell.text) if cell.value is None else f"{cell.value:.10g}")
            cells += ["" if v is None else f"{v:.10g}" for v in (cell.sd, cell.n)] if mean else []
        writer.writerow(cells)
    return out.getvalue()


def _plain(text: str) -> str:
    """The text, quoted where a spreadsheet would take it for a formula."""
    negative = re.fullmatch(r"-[\d.,\s±%-]*", text) is not None
    return f"'{text}" if text[:1] in ("=", "+", "@", "\t") or (text[:1] == "-" and not negative) else text
