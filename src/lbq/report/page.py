"""The report as one page of HTML: its story, figures, tables and a tour. It loads nothing from anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files

from lbq._version import __version__
from lbq.counting.technology import DEFAULT, Technology
from lbq.report import theme
from lbq.report.cells import Table, dataset_name, images_cells, run_id
from lbq.report.cost_figures import cost_figures, speed_figures
from lbq.report.cost_tables import PAPER_SETTING, accounts
from lbq.report.figures import Figure, seeds
from lbq.report.front import front_figures
from lbq.report.layer_figures import layer_figures
from lbq.report.schematics import neuron_figures, surrogates
from lbq.report.story import Story, picture, sentences, stories
from lbq.report.tables import all_tables
from lbq.report.tour import SILENT, Attention, Picture, Tour, level_pixel
from lbq.report.training_figures import training_figures
from lbq.results import paper
from lbq.results.result import Gathered, Result, names

MOST_ROWS, MOST_FIGURES = 12, 6  # of a table, and of a section's figures, that are not folded
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render(gathered: Gathered, technology: Technology = DEFAULT, tour: Tour | None = None, title: str = "") -> str:
    """The whole page. The same results give the same bytes. title: default the first network and its dataset."""
    tables = all_tables(gathered, technology)
    leads = stories(gathered, technology)
    title = title or (f"{leads[0].lead.title} on {leads[0].dataset}" if leads else "LBQ report")

    def with_prefix(*prefixes: str, folded: bool = False) -> list[str]:
        return [_table(table, folded) for table in tables if table.id.startswith(prefixes)]

    def ours(id: str) -> list[str]:
        """Our rows of a table of the paper's, which stands below with all rows."""
        several = [
            t.ours(f"our-{id}") if t.columns[-1] == "Origin" else t for t in tables if t.id == id and t.has("ours")
        ]
        return [_table(table, len(table.rows) > MOST_ROWS) for table in several]

    runs = max(len(gathered.groups), len(gathered.unfinished))
    energies = with_prefix("energy")
    sections = [
        ("result", "Result", [_result(leads, title)]),
        ("runs-section", "Runs", with_prefix("unfinished") + with_prefix("runs", folded=runs > MOST_ROWS)),
        ("training", "Training", [_figures(training_figures(gathered))]),
        ("layers", "Layers", [_figures(layer_figures(gathered)), *ours("figure4")]),
        (
            "costs", "Cost",
            [
                "<p>Every energy on this page is <b>modelled</b>: counted operations times published prices. Nothing here was "
                "measured with a meter.</p>" if energies else "",
                _figures(front_figures(gathered)),
                *ours("table6-counts"), *ours("table7-cost"), *energies[:1], _folded("The others' energy", energies[1:]),
                *(with_prefix("technology", folded=True) if energies else []),
            ],
        ),
        ("speed", "Speed", [_figures(speed_figures(gathered.benchmarks))]),
        ("neuron", "Neuron", [_figures(_neuron(gathered))]),
        ("tour", "Tour", [_tour(tour) if tour is not None else ""]),
        ("published", "Published", [_published(gathered, technology, [t for t in tables if t.has("published")])]),
        ("details", "Records", [*map(_details, gathered.results, names(gathered.results))]),
    ]  # fmt: skip
    return _document(title, [(id, heading, "".join(parts)) for id, heading, parts in sections if any(parts)])


def all_figures(gathered: Gathered, technology: Technology = DEFAULT) -> list[Figure]:
    """Every figure that these results give, without the tour."""
    return [
        *map(picture, stories(gathered, technology)),
        *training_figures(gathered),
        *layer_figures(gathered),
        *front_figures(gathered),
        *_beside_published(gathered, technology),
        *speed_figures(gathered.benchmarks),
        *_neuron(gathered),
    ]


def _beside_published(gathered: Gathered, technology: Technology) -> list[Figure]:
    """The paper's costs with ours: for results on its dataset."""
    if not any(dataset_name(result) == PAPER_SETTING[0] for result in gathered.results):
        return []
    return cost_figures(accounts(gathered.groups), technology)


def _published(gathered: Gathered, technology: Technology, tables: Sequence[Table]) -> str:
    """The paper's rows on the datasets of these results, folded."""
    if not tables:
        return ""
    figures = _figures(_beside_published(gathered, technology))
    return (
        "<p>What the paper publishes for the same datasets; ours are in bold, with the number of seeds. Budgets differ: "
        "look at the column of epochs before comparing.</p>"
        f"{_folded('Figures', [figures])}{''.join(_table(table, folded=True) for table in tables)}"
    )


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
    light, dark = theme.variables(theme.LIGHT), theme.variables(theme.DARK)
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
        f"<style>{themes}{style}{theme.RULES}</style></head>\n<body>"
        '<a class="skip" href="#main">Skip to the results</a>'
        f"<header><h1>{escape(title)}</h1></header>"
        f'<nav aria-label="Sections"><ul>{links}</ul><button id="theme" type="button" hidden>Dark</button></nav>\n'
        f'<main id="main">{body}</main>\n'
        f"<footer><p>Learnable burst quantization: {escape(paper.CITATION)}. Made by lbq {escape(__version__)} from the files "
        "named above; the page loads nothing from anywhere.</p></footer>"
        f"<script>{script}</script></body></html>\n"
    )


def _result(leads: Sequence[Story], title: str) -> str:
    """The first network in full, and those of other datasets as pictures with their stories below."""
    if not leads:
        return ""
    first, name = leads[0].lead, f"{leads[0].lead.title} on {leads[0].dataset}"
    record, (images, form) = first.record, images_cells(first)
    facts = [
        str(record["model"]), f"T = {record['timesteps']}", *[f"N_max = {record['n_max']}"] * bool(record.get("n_max")),
        *[f"{record['epochs']} epoch{'s' * (record['epochs'] != 1)}"] * bool(record["epochs"]),
        *[seeds(first.results)] * (not first.first.alone),
        *[f"counted on {images.text} test images, {form.text}"] * bool(images.text),
    ]  # fmt: skip
    said = "".join(f"<p>{_marked(sentence)}</p>" for sentence in sentences(leads[0]))
    others = [replace(picture(s), title=s.dataset, caption=" ".join(sentences(s))) for s in leads[1:]]
    return (
        f'<div class="story"><div class="words">{f"<h3>{escape(name)}</h3>" if title != name else ""}{said}'
        f'<p class="soft">{escape(" · ".join(facts))} · <a href="#{run_id(first.first)}">record</a></p></div>'
        f"{_figures([picture(leads[0])])}</div>{_figures(others)}"
    )


def _marked(text: str) -> str:
    """Text with `code` and **bold** parts as HTML."""
    coded = re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", coded)


def _folded(summary: str, parts: Sequence[str]) -> str:
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>" if any(parts) else ""


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
    notes = "".join(f'<p class="note">{_marked(note)}</p>' for note in table.notes)
    body = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f'<table class="sortable" id="{escape(table.id)}"><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{notes}"
    )
    return _folded(f"{table.title} ({len(table.rows)})", [body]) if folded else body


def _figures(figures: Sequence[Figure]) -> str:
    """Figures beside one another; of many, the first, and the others folded."""
    drawn = [
        f'<figure id="figure-{escape(f.id)}"><div class="drawing">{f.svg}</div>'
        f"<figcaption><b>{escape(f.title)}.</b> {_marked(f.caption)}</figcaption></figure>"
        for f in figures
    ]
    if not drawn:
        return ""
    few = drawn if len(drawn) <= MOST_FIGURES + 1 else drawn[:MOST_FIGURES]
    more = f'<div class="figures">{"".join(drawn[len(few) :])}</div>' if len(few) < len(drawn) else ""
    return f'<div class="figures">{"".join(few)}</div>{_folded(f"{len(drawn) - len(few)} more figures", [more])}'


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
        attention = "".join(map(_attention, stop.attention))
        stops.append(
            f'<div class="stop"><div><h3>{escape(stop.layer)}</h3><small>{channels} channels of {height} × {width}; '
            f"{100 * stop.active:.1f} % active; {stop.additions:.3f} set bits and {stop.unary:.3f} unary spikes per neuron-step"
            f'</small></div><div><div class="strip">{levels}</div><div class="strip">{planes}</div>{attention}</div></div>'
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


def _attention(attention: Attention) -> str:
    few, (height, width) = len(attention.heads) < attention.count, attention.grid
    heads = f"the {len(attention.heads)} busiest of {attention.count} heads" if few else "each head"
    most = attention.most
    what = "levels, in the colours above" if attention.levels else f"scores Q Kᵀ, from 0 (white) to {most} (darkest)"
    pictures = "".join(_image(picture, f"head {head}") for head, picture in attention.heads.items())
    return (
        f"<p><small>Which token attends to which, in {heads} at t = {attention.timestep}. Tokens are {height} × {width} places "
        f"of the image. The small map at a token's place shows how much it attends to each of them: {what}.</small></p>"
        f'<div class="strip">{pictures}</div>'
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
    logged = [key for key in LOGGED if any(entry.get(key) is not None for entry in record["log"])]
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
