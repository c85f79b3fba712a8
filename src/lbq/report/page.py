"""The report as one page of HTML: tables, figures and a tour. It loads nothing from anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from lbq._version import __version__
from lbq.counting.technology import DEFAULT, Technology
from lbq.report import svg
from lbq.report.cells import Table, dataset_name, run_id
from lbq.report.cost_figures import cost_figures, speed_figures
from lbq.report.cost_tables import accounts
from lbq.report.figures import Figure
from lbq.report.layer_figures import layer_figures
from lbq.report.schematics import neuron_figures, surrogates
from lbq.report.tables import all_tables
from lbq.report.tour import SILENT, Picture, Tour, level_pixel
from lbq.report.training_figures import training_figures
from lbq.results import paper
from lbq.results.result import Gathered, Group, Result, names

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render(
    gathered: Gathered, technology: Technology = DEFAULT, tour: Tour | None = None, title: str = "LBQ report"
) -> str:
    """The whole page. The same results give the same bytes."""
    tables = {table.id: table for table in all_tables(gathered, technology)}

    def with_prefix(*prefixes: str) -> list[Table]:
        return [table for id, table in tables.items() if id.startswith(prefixes)]

    published = with_prefix("table2", "table3", "table4", "table5")
    costs = with_prefix("table6", "table7", "honest")
    sections = [
        ("runs-section", "Our runs", [_cards(gathered), *map(_table, with_prefix("unfinished")),
                                      *map(_table, with_prefix("runs"))]),
        ("training", "Training", [_figures(training_figures(gathered))]),
        (
            "tables", "The paper's tables, with our rows",
            [
                "<p>Published rows are cited and marked <i>published</i>; ours are in bold, with the number of seeds. Budgets "
                "differ: look at the column of epochs before comparing.</p>",
                *(_table(table, folded=not table.has_ours) for table in published),
            ],
        ),
        (
            "layers", "What the layers learned",
            [_table(tables["figure4"]), _figures(layer_figures(gathered))],
        ),
        (
            "costs", "What it costs: modelled",
            [
                "<p>Every energy on this page is <b>modelled</b>: counted operations times published prices. Nothing here was "
                "measured with a meter.</p>",
                _figures(cost_figures(accounts(gathered.groups), technology)),
                *(_table(table, folded=i > 2) for i, table in enumerate(costs)),  # of the honest ones, the first is open
                _table(tables["technology"], folded=True),
            ],
        ),
        ("speed", "Engine speed: measured", [_figures(speed_figures(gathered.benchmarks))]),
        ("neuron", "The neuron", [_figures(_neuron(gathered))]),
        ("tour", "A tour of one image", [_tour(tour) if tour is not None else ""]),
        ("details", "Every run in full", [*map(_details, gathered.results, names(gathered.results))]),
    ]  # fmt: skip
    return _document(title, [(id, heading, "".join(parts)) for id, heading, parts in sections if any(parts)])


def all_figures(gathered: Gathered, technology: Technology = DEFAULT) -> list[Figure]:
    """Every figure that these results give, without the tour."""
    return [
        *training_figures(gathered),
        *layer_figures(gathered),
        *cost_figures(accounts(gathered.groups), technology),
        *speed_figures(gathered.benchmarks),
        *_neuron(gathered),
    ]


def _neuron(gathered: Gathered) -> list[Figure]:
    """Figs. 1 and 2 on traces of the network that stands for all, where one was analysed, and Fig. 3."""
    group = max((g for g in gathered.groups if g.traces), key=lambda g: g.first.prominence, default=None)
    if group is None:
        return [surrogates()]
    network = f"{group.title}, {group.record['model']}, {dataset_name(group)}"
    return [*neuron_figures(group.traces, network), surrogates()]


def _document(title: str, sections: Sequence[tuple[str, str, str]]) -> str:
    style = (files("lbq.report") / "style.css").read_text(encoding="utf-8")
    script = (files("lbq.report") / "script.js").read_text(encoding="utf-8")
    light, dark = svg.variables(svg.LIGHT), svg.variables(svg.DARK)
    themes = (
        f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f":root[data-theme=light]{{color-scheme:light;{light}}}:root[data-theme=dark]{{color-scheme:dark;{dark}}}"
        f"@media print{{:root,:root[data-theme]{{color-scheme:light;{light}}}}}"
    )
    links = "".join(f'<li><a href="#{id}">{escape(heading)}</a></li>' for id, heading, _ in sections)
    body = "".join(
        f'<section id="{id}" aria-labelledby="{id}-h"><h2 id="{id}-h">{escape(heading)}</h2>{content}</section>'
        for id, heading, content in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape(title)}</title>'
        f"<style>{themes}{style}{svg.RULES}</style></head>\n<body>"
        '<a class="skip" href="#main">Skip to the results</a>'
        f'<header><button id="theme" type="button" hidden>Dark theme</button><h1>{escape(title)}</h1>'
        '<p class="soft">Learnable burst quantization: our runs beside the published numbers.</p>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main id="main">{body}</main>\n'
        f"<footer><p>Published numbers: {escape(paper.CITATION)}. Made by lbq {escape(__version__)} from the files named "
        "above; the page loads nothing from anywhere.</p></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _cards(gathered: Gathered) -> str:
    """A line of the most telling numbers."""
    if not gathered.results:
        return ""
    groups = [g for g in gathered.groups if g.mean is not None]
    runs = sum(not result.alone for result in gathered.finished)
    cards = [(f"finished run{'s' * (runs != 1)}", str(runs))]
    datasets = dict.fromkeys(g.record["dataset"] for g in groups)
    cards += [_best([g for g in groups if g.record["dataset"] == dataset]) for dataset in datasets]
    inside = "".join(f'<div class="card"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in cards)
    return f'<div class="cards">{inside}</div>'


def _best(groups: Sequence[Group]) -> tuple[str, str]:
    """The best configuration on one dataset, by held-out samples where all have these, and its test accuracy."""
    selected = all(g.holdout_mean is not None for g in groups)
    place = max(range(len(groups)), key=lambda i: (groups[i].holdout_mean if selected else groups[i].mean) or 0.0)
    best, title = groups[place], names([g.first for g in groups])[place]
    data, name = dataset_name(best), f"highest of {len(groups)}"
    text = f"{name} on {data}"
    if selected:
        text = f"on the test set of {data}, chosen as the {name} on held-out samples ({best.holdout_mean:.2f} %)"
    return f"{text}: {title}", f"{best.mean:.2f} %"


def _table(table: Table, folded: bool = False) -> str:
    classes = [' class="n"' if i in table.numeric else "" for i in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{kind}><button type="button">{escape(column)}</button></th>'
        for kind, column in zip(classes, table.columns, strict=True)
    )
    rows = []
    for row in table.rows:
        cells = []
        for kind, c in zip(classes, row.cells, strict=True):
            value = "" if c.value is None else f' data-v="{c.value:.12g}"'
            hint = f' title="{escape(c.hint)}"' if c.hint else ""
            text = f'<a href="#{c.link}">{escape(c.text)}</a>' if c.link else escape(c.text)
            cells.append(f"<td{kind}{value}{hint}>{text}</td>")
        owner = f' class="{row.kind}"' if row.kind else ""
        rows.append(f"<tr{owner}>{''.join(cells)}</tr>")
    coded = (re.sub("`([^`]+)`", r"<code>\1</code>", escape(note)) for note in table.notes)
    notes = "".join(f'<p class="note">{note}</p>' for note in coded)
    body = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f'<table class="sortable" id="{escape(table.id)}"><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{notes}"
    )
    if not folded:
        return body
    why = " (published only)" if table.id.startswith("table") else ""
    return f"<details><summary>{escape(table.title)}{why}</summary>{body}</details>"


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    inside = "".join(
        f'<figure id="figure-{escape(f.id)}"><div class="drawing" tabindex="0">{f.svg}</div>'
        f"<figcaption><b>{escape(f.title)}.</b> {escape(f.caption)}</figcaption></figure>"
        for f in figures
    )
    return f'<div class="figures">{inside}</div>'


def _image(picture: Picture, caption: str) -> str:
    return (
        f'<figure><img class="px" alt="{escape(picture.text)}" src="{picture.address}" width="{picture.width}" '
        f'height="{picture.height}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _tour(tour: Tour) -> str:
    start = "".join(_image(p, p.text) for p in tour.image[:4])
    stops = []
    for stop in tour.stops:
        channels, height, width = stop.shape
        levels = "".join(_image(p, f"levels, t = {t + 1}") for t, p in enumerate(stop.levels[:2]))
        lowest_first = enumerate(reversed(stop.planes))
        planes = "".join(reversed([_image(p, f"plane {k}, worth {2**k}") for k, p in lowest_first]))
        stops.append(
            f'<div class="stop"><div><h3>{escape(stop.layer)}</h3><small>{channels} channels of {height} × {width}; '
            f"{100 * stop.active:.1f} % active; {stop.additions:.3f} set bits and {stop.unary:.3f} unary spikes per neuron-step"
            f'</small></div><div><div class="strip">{levels}</div><div class="strip">{planes}</div></div></div>'
        )
    bars = "".join(
        f'<span>{escape(name)}</span><i style="width:{100 * share:.1f}%"></i><span>{100 * share:.1f} %</span>'
        for name, share in tour.classes
    )
    about = f" {escape(tour.about)}" if tour.about else ""
    return (
        f"<p>One image through the deployed network on integers, from the trace of its engine.{about} For each layer, its "
        "busiest channels: levels at the first timesteps, then the bit planes of the first timestep, the highest first. A "
        "black pixel is one set bit: one addition for each synapse that reads it.</p>"
        f'{_key(tour)}<div class="strip">{start}</div>{"".join(stops)}<h3>Output</h3>'
        f"<p>The likeliest classes, as a softmax of the network's logits.</p>"
        f'<div class="bars">{bars}</div>'
    )


def _key(tour: Tour) -> str:
    """Which colour is which level; layers may differ in how many they have."""
    keys, limits = [], sorted({stop.n_max for stop in tour.stops})
    for n_max in limits:
        few = sorted({1, n_max, *(round(1 + i * (n_max - 1) / 9) for i in range(10))})
        colours = [(0, SILENT), *((k, level_pixel(k, n_max)) for k in few)]
        shown = "".join(f'<span><i style="background:{colour}"></i>{k}</span>' for k, colour in colours)
        of = f" of layers up to {n_max}" if len(limits) > 1 else ""
        keys.append(f'<p class="key">level{of} {shown}</p>')
    return "".join(keys)


LOGGED = (
    "epoch", "loss", "train_accuracy", "holdout_accuracy", "test_accuracy", "lr", "step_min", "step_max", "seconds",
)  # fmt: skip


def _details(result: Result, title: str) -> str:
    """Checksums, versions, configuration and log of one run, folded."""
    record = result.record
    shown = {k: v for k, v in record.items() if isinstance(v, str | int | float) and k != "format"}
    shown |= {f"versions.{k}": v for k, v in record.get("versions", {}).items()}
    facts = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in shown.items())
    held_out = any(entry.get("holdout_accuracy") is not None for entry in record["log"])
    logged = [key for key in LOGGED if held_out or key != "holdout_accuracy"]
    log = [[entry.get(key) for key in logged] for entry in record["log"]]
    head = "".join(f'<th scope="col"><button type="button">{escape(key)}</button></th>' for key in logged)
    rows = "".join(
        "<tr>" + "".join("<td></td>" if v is None else f"<td>{v:.6g}</td>" for v in entry) + "</tr>" for entry in log
    )
    table = (
        f'<div class="scroll" tabindex="0"><table class="sortable numbers"><caption>Log: {escape(title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    config = escape(json.dumps(record["config"], indent=1))
    state = "" if result.finished else " (not finished)"
    return (
        f'<details id="{run_id(result)}"><summary>{escape(title)}{state}</summary><div class="scroll" tabindex="0">'
        f'<table class="facts"><caption>Record: {escape(result.source)}</caption><tbody>{facts}</tbody></table></div>'
        f"{table if log else ''}<details><summary>configuration</summary><pre>{config}</pre></details></details>"
    )
