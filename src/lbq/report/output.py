"""Reports and analyses as files: whole or not at all."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Iterable
from pathlib import Path

from lbq import engine
from lbq.counting import analysis
from lbq.counting.analysis import Analysis
from lbq.counting.inputs import read_input
from lbq.counting.technology import DEFAULT, Technology
from lbq.errors import LbqError
from lbq.report.cells import Table
from lbq.report.formats import comma_separated, latex, markdown
from lbq.report.layer_figures import ANALYSIS_FIGURES, analysis_figures
from lbq.report.page import all_figures, render
from lbq.report.svg import standalone
from lbq.report.tables import all_tables
from lbq.report.tour import Tour, take
from lbq.results.gather import ACCOUNT, ANALYSIS
from lbq.results.result import Gathered
from lbq.system import files
from lbq.system.shown import shown

SUFFIXES = {"html": ".html", "md": ".md", "latex": ".tex", "csv": "", "svg": ""}


def make(
    path: Path,
    gathered: Gathered,
    format: str = "html",
    technology: Technology = DEFAULT,
    image: Path | None = None,
    title: str = "",
) -> int:
    """Write a report; returns its size in bytes. image: for the tour, instead of a network's first golden input.
    title: of the page; default the first network's name and dataset.

    For the formats `svg` and `csv`, `path` is a folder that gets one file for each figure or table.
    """
    if format != "html":
        _check_contents(gathered, format)
    if format == "svg":
        figures = all_figures(gathered, technology)
        listed = Table("figures", "Figures", "File; Title; Caption")
        for figure in figures:
            listed.add(f"{figure.id}.svg", figure.title, figure.caption)
        return _fill(path, listed, {f"{figure.id}.svg": shown(standalone(figure.svg)) for figure in figures})
    if format == "html":
        return files.write(path, shown(render(gathered, technology, tour_of(gathered, image), title)))
    tables = all_tables(gathered, technology)
    if format == "csv":
        listed = Table("tables", "Tables", "File; Title; Notes")
        for table in tables:
            listed.add(f"{table.id}.csv", table.title, " ".join(table.notes))
        return _fill(path, listed, {f"{table.id}.csv": shown(comma_separated(table)) for table in tables})
    return files.write(path, shown({"md": markdown, "latex": latex}[format](tables)))


def _fill(folder: Path, listed: Table, texts: dict[str, str]) -> int:
    """Write files into a folder, with a list of what they show, and remove those that only an older list names."""
    index = folder / f"{listed.id}.csv"
    older = _listed(index, listed.columns) if index.is_file() else set()
    size = files.write_all(folder, {**texts, index.name: shown(comma_separated(listed))})
    suffixes = {Path(name).suffix for name in texts}
    _remove(
        folder, {name for name in older - texts.keys() if Path(name).name == name and Path(name).suffix in suffixes}
    )
    return size


def _listed(index: Path, columns: list[str]) -> set[str]:
    """The names of files in an older list. Another file of its name is refused: it may name anything."""
    try:
        head, *rows = csv.reader(files.text_of(index).splitlines())
    except (csv.Error, ValueError):
        head, rows = [], []
    if head != columns:
        raise LbqError(f"{index} is not a list that lbq wrote: give another folder")
    return {row[0] for row in rows if row and row[0] != index.name}


def _remove(folder: Path, names: Iterable[str]) -> None:
    """Remove files that an older report or analysis left."""
    for stale in [folder / name for name in sorted(names)]:
        try:
            stale.unlink(missing_ok=True)
        except OSError as error:
            raise LbqError(
                f"cannot remove {stale}, which is of an older report or analysis: {error.strerror}"
            ) from error


def _check_contents(gathered: Gathered, format: str) -> None:
    """Refuse what has no table, or for svg no figure: an empty file would look like a report."""
    if gathered.results or (format == "svg" and gathered.benchmarks):
        return
    if gathered.artefacts:
        model, remedy = gathered.artefacts[0], shlex.join(["lbq", "analyze", str(gathered.artefacts[0])])
        raise LbqError(f"{model} alone is only for the tour of html; {remedy} first, then report what it wrote")
    raise LbqError(
        f"benchmarks have figures and no tables, so none for --format {format}: take svg or html, or add results"
    )


def tour_of(gathered: Gathered, image: Path | None = None) -> Tour | None:
    """A tour through the first deployed network; None without one."""
    if not gathered.artefacts:
        if image is None:
            return None
        raise LbqError("--image needs a deployed network to run it: add a model.lbq, or a run folder that holds one")
    net, name = engine.load(gathered.artefacts[0]), gathered.artefacts[0].name
    if image is not None:
        return take(net, read_input(image, net.network), f"The image is {image.name}, the network {name}.")
    if net.golden is None:
        return None
    noise = ", which is noise" if net.network.facts.get("golden") == "noise" else ""
    about = f"The image is the first golden input of {name}{noise}; --image shows another."
    return take(net, net.golden.inputs[0] if net.network.static else net.golden.inputs[:, 0], about)


def write_account(folder: Path, counted: Analysis) -> None:
    """Keep the counts of a whole set beside what `lbq analyze` writes, for reports. Golden inputs are no such set."""
    if counted.complete and not counted.golden:
        files.write(folder / ACCOUNT, json.dumps(counted.to_dict(), separators=(",", ":")) + "\n")


def keep_whole(folder: Path, limit: int | None, size: int | None = None) -> None:
    """Refuse a folder whose analysis is of a whole set, where the next one would be of a part: `limit` of `size` samples.

    size: None where the next one is of the same set.
    """
    if limit is None or not (folder / ANALYSIS).exists():
        return
    try:
        there = analysis.load(folder / ANALYSIS)
    except LbqError:
        return  # damaged, and about to be made again
    if there.complete and limit < (there.images if size is None else size):
        raise LbqError(
            f"{folder} holds an analysis of all {there.images:,} samples, which one of {limit:,} would replace: give another "
            "folder with -o"
        )


def write_analysis(folder: Path, made: Analysis) -> list[Path]:
    """Write `analysis.json`, `layers.csv` and one SVG for each figure; remove files that an older analysis left."""
    older = (folder / ANALYSIS).exists()
    texts = {ANALYSIS: json.dumps(made.to_dict(), separators=(",", ":")) + "\n"}
    if made.layers:
        texts["layers.csv"] = shown(made.csv())
        texts |= {f"{name}.svg": shown(standalone(figure.svg)) for name, figure in analysis_figures(made).items()}
    files.write_all(folder, texts)
    possible = {"layers.csv", *(f"{name}.svg" for name in ANALYSIS_FIGURES)}
    if older:
        _remove(folder, possible - texts.keys())
    return [folder / name for name in texts]
