"""Tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from lbq.report.tables import Table

LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "†": r"$^{\dagger}$", "µ": r"$\mu$", "γ": r"$\gamma$",
    "|": r"$|$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def markdown(tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        rule = ["---:" if i in table.numeric else "---" for i in range(len(table.columns))]
        lines = [[_bar(c) for c in table.columns], rule]
        for row in table.rows:
            texts = [_bar(c.text) for c in row.cells]
            if row.kind == "ours":
                texts[0] = f"**{texts[0]}**"
            lines.append(texts)
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "\n".join(f"{note}  " for note in table.notes)
        parts.append(f"## {table.title}\n\n{body}\n\n{notes}\n" if notes else f"## {table.title}\n\n{body}\n")
    return "\n".join(parts)


def _bar(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def latex(tables: Sequence[Table]) -> str:
    """booktabs tables that compile as they are with \\usepackage{booktabs}."""
    parts = []
    for table in tables:
        columns = "".join("r" if i in table.numeric else "l" for i in range(len(table.columns)))
        lines = [" & ".join(map(_escape, table.columns)) + r" \\", r"\midrule"]
        for row in table.rows:
            texts = [_escape(c.text) for c in row.cells]
            if row.kind == "ours":
                texts[0] = rf"\textbf{{{texts[0]}}}"
            lines.append(" & ".join(texts) + r" \\")
        notes = " ".join(map(_escape, table.notes))
        body = "\n  ".join(lines)
        parts.append(
            "\\begin{table}\n  \\centering\\footnotesize\n"
            f"  \\caption{{{_escape(table.title)}.}}\n  \\label{{tab:{table.id}}}\n"
            f"  \\begin{{tabular}}{{{columns}}}\n  \\toprule\n  {body}\n  \\bottomrule\n  \\end{{tabular}}\n"
            + (f"  \\par\\smallskip {notes}\n" if notes else "")
            + "\\end{table}\n"
        )
    return "\n".join(parts)


def _escape(text: str) -> str:
    return re.sub("|".join(map(re.escape, LATEX)), lambda m: LATEX[m[0]], text)


def comma_separated(tables: Sequence[Table]) -> str:
    """One table after the other, an empty line between; the first column names the table. Numbers are written in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for i, table in enumerate(tables):
        if i:
            out.write("\n")
        writer.writerow(["table", *table.columns])
        for row in table.rows:
            writer.writerow([table.id, *(_plain(c.text) for c in row.cells)])
    return out.getvalue()


def _plain(text: str) -> str:
    """Thousands without commas; a text that a spreadsheet would take for a formula is quoted."""
    if re.fullmatch(r"-?\d{1,3}(,\d{3})*(\.\d+)?", text):
        return text.replace(",", "")
    return f"'{text}" if text[:1] in ("=", "+", "@") else text
