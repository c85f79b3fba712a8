"""Tables, the page and its other formats: what they say, and that nothing can break out of them."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shutil
import statistics
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lbq.config import Config
from lbq.counting.analysis import Analysis
from lbq.counting.costs import costs
from lbq.counting.measurement import account_from
from lbq.counting.technology import load
from lbq.report.cells import Table, decimals, images_cells
from lbq.report.cost_figures import cost_figures
from lbq.report.cost_tables import accounts
from lbq.report.formats import comma_separated, latex, markdown
from lbq.report.output import make, tour_of
from lbq.report.page import all_figures, render
from lbq.report.tables import all_tables
from lbq.results import paper
from lbq.results.gather import gather
from lbq.results.result import Gathered, Group, Result
from lbq.runs import records
from lbq.runs.records import read
from tests.support.commands import Call
from tests.support.paths import ROOT
from tests.support.report_runs import BENCHMARK, of_cifar, record, runs_folder

STORED = Path(__file__).parent / "records"


@pytest.fixture(scope="module")
def gathered() -> Gathered:
    return gather([runs_folder()], read)


def by_id(gathered: Gathered) -> dict[str, Table]:
    return {table.id: table for table in all_tables(gathered)}


# Tables --------------------------------------------------------------------------------------------------------------


def on_cifar(gathered: Gathered) -> Gathered:
    """The same with a run on the dataset whose costs the paper publishes."""
    return replace(gathered, results=[*gathered.results, of_cifar(name="Mine")])


def test_published_rows_are_there_for_the_datasets_of_our_runs_alone(gathered: Gathered) -> None:
    assert not any(table.has("published") for table in all_tables(gathered))
    alone = render(gathered)
    assert not any(text in alone for text in ('id="published"', "GLIF", "Ternary Spike", "CIFAR-10", "accuracy-energy"))
    datasets = ("cifar10", "cifar100", "imagenet", "cifar10_dvs", "dvs_gesture")
    tables = by_id(Gathered([of_cifar(dataset=dataset) for dataset in datasets]))
    published = [row for table in tables.values() for row in table.rows if row.kind == "published"]
    values = {c.text for row in published for c in row.cells}
    for row in paper.ACCURACIES:
        for t, accuracy in row.accuracy.items():
            assert {f"{accuracy:.2f}", f"{t:,}"} <= values
    assert all(row.cells[-1].text == "published" for row in published)
    assert all(any("Bai" in note for note in tables[id].notes) for id in tables if id.startswith("table"))


def test_our_rows_say_mean_deviation_and_number(gathered: Gathered) -> None:
    rows = {row.cells[0].text: row for row in by_id(gathered)["runs"].rows}
    assert set(rows) == {"ANN", "LBQ"}
    (group,) = [g for g in gathered.groups if g.title == "LBQ"]
    assert rows["LBQ"].cells[6].text == f"{group.mean:.2f} ± {statistics.stdev(group.accuracies):.2f} (n = 2)"
    assert rows["ANN"].cells[6].text.endswith("(1 seed)")
    assert rows["LBQ"].cells[9].hint.split() == [r.record["weights_sha256"] for r in group.results]


def held_out(seed: int, lr: float, test: float, selection: float | None) -> Result:
    facts = {"name": f"LBQ, lr={lr}", "weights_sha256": f"{seed}{lr}", "holdout_accuracy": selection}
    made = record(seed=seed, test_accuracy=test, **facts)
    made["config"] = {"optim": {"lr": lr}, "data": {"holdout": 0.2}}
    made["log"][-1]["holdout_accuracy"] = selection
    return Result(made, f"{lr}-{seed}")


def test_what_was_held_out_has_a_column() -> None:
    results = [held_out(0, 0.1, 90.0, 80.0), held_out(1, 0.1, 91.0, 82.0), held_out(0, 0.2, 95.0, None)]
    table = by_id(Gathered(results))["runs"]
    place = table.columns.index("Held out %")
    assert [row.cells[place].text for row in table.rows] == ["81.00 ± 1.41 (n = 2)", ""]
    assert table.rows[0].cells[place].hint == "seed 0: 80.00, seed 1: 82.00"
    assert place in table.numeric
    assert table.columns[max(table.numeric) + 1] == "Config"
    rows = list(csv.DictReader(io.StringIO(comma_separated(table))))
    assert [(row["Held out %"], row["Held out % n"]) for row in rows] == [("81", "2"), ("", "")]
    for text in (markdown([table]), latex([table]).replace("\\%", "%").replace("$\\pm$", "±")):
        assert "Held out %" in text
        assert "81.00 ± 1.41 (n = 2)" in text
    assert "Held out %" not in by_id(Gathered([held_out(0, 0.1, 90.0, None)]))["runs"].columns


def test_the_best_is_chosen_by_what_was_held_out_where_all_have_it() -> None:
    chosen, higher = held_out(0, 0.1, 90.0, 82.0), held_out(0, 0.2, 95.0, 80.0)
    page = render(Gathered([higher, chosen]))
    assert "<b>LBQ, lr=0.1</b> reads <b>90.00 %</b> of the test images of UCI digits right" in page
    assert "It is the highest of 2 on held-out samples (82.00 %)." in page
    assert page.count(">holdout_accuracy</button>") == 2  # in the logs
    page = render(Gathered([chosen, held_out(1, 0.1, 90.0, None), higher]))  # of one seed it is not known
    assert "<b>LBQ, lr=0.2</b> reads <b>95.00 %</b>" in page
    assert "It is the highest of 2 on the test set itself." in page
    page = render(Gathered([of_cifar(), of_cifar(dataset="cifar100", test_accuracy=80.0)]))
    assert "holdout_accuracy" not in page
    for dataset in ("CIFAR-10", "CIFAR-100"):
        assert f"of the test images of {dataset} right" in page
    assert "highest of" not in page


def test_runs_on_a_part_of_a_dataset_are_kept_apart_from_the_whole() -> None:
    config = Config.from_dict({"data": {"name": "cifar10", "limit": 200, "root": "x"}})
    part = of_cifar(dataset=records.dataset_of(config), test_accuracy=99.9)
    assert "so many samples" not in markdown([by_id(Gathered([part, of_cifar()]))["runs"]])
    part.record["config"] = config.to_dict()
    tables = by_id(Gathered([part, of_cifar()]))
    assert [row.cells[1].text for row in tables["runs"].rows] == ["CIFAR-10, 200 samples", "CIFAR-10"]
    assert "A dataset of so many samples: that many train and that many test" in markdown([tables["runs"]])
    for table in ("table2-cifar-10", "table5-ablation"):
        text = markdown([tables[table]])
        assert "95.50 (1 seed)" in text
        assert "99.90" not in text
    page = render(Gathered([part]))
    assert "of the test images of CIFAR-10, 200 samples right" in page


def test_what_is_not_finished_is_apart(gathered: Gathered) -> None:
    (row,) = by_id(gathered)["unfinished"].rows
    assert row.cells[5].text == "1 of 2"
    assert gathered.unfinished[0].record["config_hash"][:10] == row.cells[7].text
    assert sum(len(g.results) for g in gathered.groups) == 3


def test_our_runs_stand_in_the_papers_tables() -> None:
    results = [of_cifar(), of_cifar(variant="v3", test_accuracy=95.9, surrogate="box", timesteps=2)]
    tables = by_id(Gathered(results))
    ours = [row for row in tables["table2-cifar-10"].rows if row.kind == "ours"]
    assert [row.cells[0].text for row in ours] == ["LBQ", "V3 (learned + box)"]
    columns = tables["table2-cifar-10"].columns
    assert [ours[0].cells[columns.index(name)].text for name in ("T", "Accuracy %")] == ["2", "95.50 (1 seed)"]
    ablation = [(row.cells[0].text, row.cells[6].text) for row in tables["table5-ablation"].rows if row.kind == "ours"]
    assert ablation == [("V3 (learned + box)", "95.90 (1 seed)"), ("LBQ", "95.50 (1 seed)")]
    assert "table3-imagenet-1k" not in tables


def test_costs_come_from_the_analysis(gathered: Gathered) -> None:
    tables = by_id(gathered)
    (group, exact, rate) = accounts(gathered.groups)[0]
    (row,) = [row for row in tables["table6-counts"].rows if row.kind == "ours"]
    columns = tables["table6-counts"].columns
    assert row.cells[columns.index("Bit-sparse (M)")].value == pytest.approx(rate.total.bit_sparse / 1e6)
    assert row.cells[columns.index("Border-exact (M)")].value == pytest.approx(exact.total.bit_sparse / 1e6)
    energy = tables["energy-1"]
    assert group.title in energy.title
    methods = {row.cells[0].text for row in energy.rows}
    assert methods >= {"bit planes", "signed digits", "ANN, int8", "binary at equal slots"}
    assert "modelled" in energy.title
    assert any("NeuroBench" in note for note in energy.notes)
    shown = {row.cells[0].text: row.cells[energy.columns.index("Break-even, with memory")] for row in energy.rows}
    expected = {b.rival: b.text for b in costs(exact).break_even if b.regime == "memory"}
    assert {name: cell.text for name, cell in shown.items() if cell.text} == expected


def test_other_timesteps_are_named_and_stay_out_of_figures_at_two() -> None:
    two, four = of_cifar(), of_cifar(timesteps=4, weights_sha256="b" * 64)
    rows = [row.cells[0].text for row in by_id(Gathered([two, four]))["table6-counts"].rows if row.kind == "ours"]
    assert rows == ["LBQ (5)", "LBQ (5), T = 4"]
    for figure in cost_figures(accounts(Gathered([two, four]).groups)):
        assert figure.svg.count(">LBQ, ours<") == 1


def test_small_values_keep_three_digits() -> None:
    shown = {v: f"{v:.{decimals(v)}f}" for v in (0.0, 12345.678, 1.0, 0.0999, 0.1, 4.56e-5)}
    assert list(shown.values()) == ["0.00", "12345.68", "1.00", "0.0999", "0.100", "0.0000456"]


def test_several_seeds_are_averaged_everywhere(gathered: Gathered) -> None:
    """Counts, energies and layers, not accuracies alone."""
    one = of_cifar()
    (analysis,) = one.analyses
    rate = analysis.accounts["rate"]
    twice = {name: {k: 2 * v for k, v in count.items()} for name, count in rate["synapses"].items()}
    other = of_cifar(seed=1, weights_sha256="b" * 64)
    other.record["config"] = one.record["config"]
    other.analyses = [replace(analysis, accounts={**analysis.accounts, "rate": {**rate, "synapses": twice}})]
    tables = by_id(Gathered([one, other]))
    (row,) = [row for row in tables["table6-counts"].rows if row.kind == "ours"]
    cells = dict(zip(tables["table6-counts"].columns, row.cells, strict=True))
    bits = account_from(rate, "rate", 599).total.bit_sparse / 1e6
    assert cells["Bit-sparse (M)"].value == pytest.approx(1.5 * bits)
    digits = decimals(bits)
    assert cells["Bit-sparse (M)"].text == f"{1.5 * bits:,.{digits}f} ± {bits * 0.5**0.5:,.{digits}f}"
    assert cells["Images"].text == "599 × 2 seeds"
    (row,) = [row for row in tables["table7-cost"].rows if row.kind == "ours"]
    assert "±" in row.cells[tables["table7-cost"].columns.index("Modelled energy (mJ)")].text
    assert "seed 0" in tables["energy-1"].title


def test_analyses_say_what_they_are_of(gathered: Gathered) -> None:
    analysis = gathered.groups[-1].analysis
    assert analysis is not None

    def of(*analyses: Analysis) -> tuple[str, str]:
        images, form = images_cells(Group([Result(record(), "x", [analysis]) for analysis in analyses]))
        return images.text, form.text

    assert of(analysis) == ("599", "as trained")
    assert of(replace(analysis, complete=False, facts={"kind": "artefact"})) == ("first 599", "on integers")
    assert of(analysis, analysis) == ("599 × 2 seeds", "as trained")
    assert [cell.text for cell in images_cells(Group([Result(record(), "x")]))] == ["", ""]


# Formats -------------------------------------------------------------------------------------------------------------


def test_markdown_shows_texts_of_records_as_texts() -> None:
    hostile = '<img src=x onerror="alert(1)"> [here](javascript:alert(1)) a|b [x]: javascript:alert(1)'
    table = Table("one", hostile, hostile, hostile)
    table.add(hostile)
    text = markdown([table])
    assert text.count("&lt;img src=x onerror=") == 4
    assert not any(sign in text for sign in ("<img", "](", "]: java"))


def test_markdown_latex_csv(gathered: Gathered) -> None:
    tables = all_tables(on_cifar(gathered))
    text = markdown(tables)
    header = next(line for line in text.splitlines() if line.startswith("| Method"))
    assert all(line.count(" | ") >= 2 for line in text.splitlines() if line.startswith("| "))
    assert header.count("|") == 12
    assert "**LBQ**" in text
    tex = latex(tables)
    assert tex.count(r"\begin{table}") == tex.count(r"\end{table}") == len(tables)
    assert r"$\pm$" in tex
    assert tex.startswith("% \\usepackage{booktabs,graphicx}\n")
    assert tex.count(r"\resizebox{\textwidth}{!}{%") > 3
    assert r"\caption{accuracy and modelled cost (Table 7 of the LBQ paper).}" in tex
    assert not re.search(r"(?<!\\)[%#]", tex.split("\n", 1)[1].replace("{!}{%", ""))
    for line in tex.splitlines():
        if line.endswith(r" \\"):
            assert len(re.split(r"(?<!\\)&", line)) >= 3
    by = {table.id: list(csv.DictReader(io.StringIO(comma_separated(table)))) for table in tables}
    assert all(len(by[table.id]) == len(table.rows) for table in tables)
    assert float(by["table7-cost"][0]["FP MACs (M)"]) == pytest.approx(2587.24, abs=0.01)
    (group,) = [g for g in gathered.groups if g.title == "LBQ"]
    (row,) = [row for row in by["runs"] if row["Method"] == "LBQ"]
    mean = [float(row[f"Test accuracy %{part}"]) for part in ("", " sd", " n")]
    assert mean == pytest.approx([group.mean, statistics.stdev(group.accuracies), 2])
    (alone,) = [row for row in by["runs"] if row["Method"] == "ANN"]
    assert (alone["Test accuracy % sd"], alone["Test accuracy % n"]) == ("", "1")


def test_spreadsheets_get_no_formulas() -> None:
    table = Table("x", "x", "a")
    table.add("=1+1")
    assert "'=1+1" in comma_separated(table)
    with pytest.raises(ValueError, match="1 columns, got 2 cells"):
        table.add("one", "more")


# The page ------------------------------------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Tags that match, ids that are unique, links that lead somewhere, nothing loaded from outside."""

    VOID = frozenset({"meta", "img", "br", "circle", "rect", "line", "path", "polygon", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.outside: list[str] = []
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        given = dict(attrs)
        if tag not in self.VOID or tag in ("circle", "rect", "polygon"):
            self.stack.append(tag)
        if "id" in given:
            self.ids.append(str(given["id"]))
        if str(given.get("href", "")).startswith("#"):
            self.targets.append(str(given["href"])[1:])
        for key in ("src", "href", "srcset", "action"):
            value = str(given.get(key, "#"))
            if not value.startswith(("#", "data:image/png")):
                self.outside.append(value)
        assert not any(name.startswith("on") for name in given)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.stack and self.stack[-1] == tag:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def checked(page: str) -> Checker:
    parser = Checker()
    parser.feed(page)
    assert parser.stack == []
    assert len(set(parser.ids)) == len(parser.ids)
    assert set(parser.targets) <= set(parser.ids)
    assert parser.outside == []
    return parser


def test_the_page_is_whole_and_needs_nothing(gathered: Gathered) -> None:
    ours = on_cifar(gathered).results
    page = render(Gathered(ours, [BENCHMARK], gathered.artefacts), tour=tour_of(gathered))
    assert len(page.encode()) < 5e6
    parser = checked(page)
    assert parser.tags["table"] >= 12
    assert parser.tags["svg"] >= 10
    assert parser.tags["img"] >= 7 * 5
    ids = "runs unfinished table2-cifar-10 table7-cost figure-surrogates figure-speed tour"
    assert set(ids.split()) <= set(parser.ids)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_every_run_is_told_in_full(gathered: Gathered) -> None:
    page = render(gathered)
    for result in gathered.results:
        assert result.record["config_hash"] in page
        if result.finished:
            assert result.record["weights_sha256"] in page
            assert result.record["data_sha256"] in page
    assert page.count("Log: ") == 4
    assert "(not finished)" in page


def test_the_same_results_give_the_same_bytes(gathered: Gathered) -> None:
    assert render(gathered) == render(gather([runs_folder()], read))


def test_hostile_records_cannot_break_out() -> None:
    nasty = "</script><img src=x onerror=alert(1)>\"'&"
    result = of_cifar(variant=nasty, model=nasty, config_hash=nasty, hardware=nasty)
    page = render(Gathered([result, of_cifar()]), title=nasty)
    parser = checked(page)
    assert parser.tags.get("img", 0) == 0
    assert "onerror=alert" not in page.replace("&lt;img src=x onerror", "")


def test_stored_records_make_a_report() -> None:
    """Two seeds with a name, another configuration of that name, and a record from before records had names."""
    gathered = gather([STORED])
    titles = {Path(g.first.source).stem: (g.title, len(g.results)) for g in gathered.groups}
    assert titles.keys() == {"lbq_s0", "lbq_lr", "v1_unnamed"}
    assert titles["v1_unnamed"] == ("V1 (fixed + box)", 1)
    assert (titles["lbq_s0"], titles["lbq_lr"]) == (("LBQ, optim.lr=0.1", 2), ("LBQ, optim.lr=0.2", 1))
    page = render(gathered)
    parser = checked(page)
    assert {"figure-training-loss-digits-2ep", "figure-steps-digits-2ep"} <= set(parser.ids)
    for title, _ in titles.values():
        assert f">{title}<" in page
    ids = [figure.id for figure in all_figures(gathered)]
    assert len(set(ids)) == len(ids)
    assert max(map(len, ids)) <= 40


@pytest.mark.no_cover  # three times as slow with it, and no line that the tests above do not reach
def test_the_figures_in_docs_are_shown_and_can_be_renewed() -> None:
    """`make figures` copies those that lie there; their content is made anew, and not compared."""
    root = ROOT
    texts = [path.read_text(encoding="utf-8") for path in (root / "README.md", *(root / "docs").rglob("*.md"))]
    shown = {name for text in texts for name in re.findall(r"figures/([\w.-]+)\.svg", text)}
    stored = {path.stem for path in (root / "docs" / "figures").glob("*.svg")}
    assert stored == shown
    assert stored <= {figure.id for figure in all_figures(gather([root / "results"]))}


def test_small_words_of_the_page(gathered: Gathered) -> None:
    page = render(gathered, tour=tour_of(gathered))
    assert "<code>lbq train ... --resume auto</code>" in page
    assert "softmax" in page
    headings = [int(level) for level in re.findall(r"<h(\d)", page)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))
    assert [f"</i>{k}</span>" in page for k in (0, 1, 5, 6)] == [True, True, True, False]  # the key to the levels
    assert "finished run" not in page  # a count says nothing
    assert "<h1>LBQ on UCI digits</h1>" in page


def test_pages_of_little(gathered: Gathered) -> None:
    """A record without steps or log, a deployed network alone, a benchmark alone."""
    bare = record(log=[], steps={}, tails={}, active={})
    tour = tour_of(gathered)
    assert tour is not None
    checked(render(Gathered([Result(bare, "x")])))
    checked(render(Gathered(benchmarks=[BENCHMARK])))
    page = render(Gathered(artefacts=gathered.artefacts), tour=replace(tour, about="The image is a <cat>."))
    assert "The image is a &lt;cat&gt;." in page
    checked(page)


# The command ---------------------------------------------------------------------------------------------------------


def test_what_was_written_as_json(call: Call, tmp_path: Path) -> None:
    page, held = tmp_path / "r.html", tmp_path / "r.json"
    facts = call.json("report", str(runs_folder()), "-o", str(page))
    counted = {"finished": 3, "analyses": 0, "unfinished": 1}
    assert facts == {"path": str(page), "bytes": page.stat().st_size, "format": "html", **counted}
    facts = call.json("record", str(runs_folder() / "lbq-0"), "-o", str(held))
    made = json.loads(held.read_text())
    about = {"variant": "lbq", "dataset": "digits", "test_accuracy": made["test_accuracy"]}
    assert facts == {"path": str(held), **about}
    assert call.json("record", str(runs_folder() / "lbq-0")) == made


@pytest.mark.parametrize(("form", "suffix"), [("html", "html"), ("md", "md"), ("latex", "tex")])
def test_the_command(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, suffix: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call("report", str(runs_folder()), "--format", form)
    assert (code, err) == (0, "")
    assert f"report.{suffix}: " in out
    assert "3 finished runs, 1 not finished" in out
    assert [path.name for path in tmp_path.iterdir()] == [f"report.{suffix}"]


def test_a_second_report_leaves_nothing_of_the_first(call: Call, tmp_path: Path) -> None:
    """Old tables beside new ones would look current. What somebody else put there stays."""
    for form in ("csv", "svg"):
        (tmp_path / form).mkdir()
        (tmp_path / form / f"mine.{form}").write_text("")
        for runs in (runs_folder(), runs_folder() / "ann"):
            code, _, err = call("report", str(runs), "--format", form, "-o", str(tmp_path / form))
            assert (code, err) == (0, "")
        listed = csv.DictReader(io.StringIO(next((tmp_path / form).glob("[ft]*s.csv")).read_text(encoding="utf-8")))
        there = {path.name for path in (tmp_path / form).iterdir()} - {"figures.csv", "tables.csv"}
        assert there == {row["File"] for row in listed} | {f"mine.{form}"}


@pytest.mark.parametrize("content", [b"name\nmeasured.csv\n", b"\xff\xfe", b""])
def test_a_list_of_somebody_elses_is_left_alone(content: bytes, call: Call, tmp_path: Path) -> None:
    (tmp_path / "tables.csv").write_bytes(content)
    (tmp_path / "measured.csv").write_text("1\n")
    line = call.refused("report", str(runs_folder() / "ann"), "--format", "csv", "-o", str(tmp_path))
    assert f"{tmp_path / 'tables.csv'} is not " in line
    assert (tmp_path / "tables.csv").read_bytes() == content
    assert (tmp_path / "measured.csv").exists()


def test_figures_and_tables_as_files(call: Call, tmp_path: Path) -> None:
    for form in ("svg", "csv", "csv"):  # the second time, files are there
        code, _, err = call("report", str(runs_folder()), "--format", form, "-o", str(tmp_path / form))
        assert (code, err) == (0, "")
    tables = {path.name for path in (tmp_path / "csv").iterdir()}
    assert {"runs.csv", "table6-counts.csv", "table7-cost.csv", "energy-1.csv"} <= tables
    listed = list(csv.DictReader(io.StringIO((tmp_path / "csv" / "tables.csv").read_text(encoding="utf-8"))))
    assert {row["File"] for row in listed} | {"tables.csv"} == tables
    assert re.search(
        r"^Energy: .*; modelled µJ per image$", next(r["Title"] for r in listed if r["File"] == "energy-1.csv")
    )
    files = {path.stem: path for path in (tmp_path / "svg").glob("*.svg")}
    titles = list(csv.DictReader(io.StringIO((tmp_path / "svg" / "figures.csv").read_text(encoding="utf-8"))))
    assert {row["File"] for row in titles} == {path.name for path in files.values()}
    kinds = {re.sub(r"-digits-\d+ep$", "", name) for name in files}
    assert max(map(len, files)) <= 40
    assert {"steps", "planes", "training-loss", "surrogates", "neuron", "membranes"} <= kinds
    for path in files.values():
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme:dark" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["RUNS", "--format", "pdf"], "--format must be one of html, md, latex, csv, svg"),
        (["RUNS", "-o", "/dev/null/x.html"], "cannot write"),
        (["RUNS", "--technology", "none.toml"], "cannot read none.toml"),
        (["RUNS", "--image", "none.png"], "none.png is not a file"),
        (["RUNS", "--image", "none.png", "--format", "md"], "--image is for the tour, which --format md does not have"),
        ([], "Missing argument"),
    ],
)
def test_bad_input(call: Call, arguments: list[str], message: str) -> None:
    given = [str(runs_folder()) if a == "RUNS" else a for a in arguments]
    assert message in call.refused("report", *given)


def test_the_documented_commands_work_in_their_order(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {"RUN": "run", "ANN": "ann"}
    shutil.copytree(runs_folder() / "lbq-0", "run")
    shutil.copytree(runs_folder() / "ann", "ann")
    shutil.copy("run/model.lbq", "model.lbq")
    Path("engine_speed.json").write_text(json.dumps(BENCHMARK))
    block = (ROOT / "docs" / "howto" / "analyse.md").read_text().partition("```sh\n")[2].partition("```")[0]
    commands = [line.partition("#")[0].split()[1:] for line in block.splitlines()]
    assert [command[0] for command in commands] == ["analyze", "account", "record", "compare", "report", "report"]
    for command in commands:
        code, _, err = call(*(folders.get(word, word) for word in command))
        assert code == 0, err


def with_prices(folder: Path, gathered: Gathered, price: str, format: str) -> str:
    (folder / "t.toml").write_text(f'name = "5 nm"\nsource = "a guess"\n{price}\n')
    make(folder / "r", gathered, format, load(folder / "t.toml"))
    return (folder / "r").read_text()


def test_own_prices_change_the_report(tmp_path: Path, gathered: Gathered) -> None:
    gathered = on_cifar(gathered)
    text = with_prices(tmp_path, gathered, "fp32_mac = 1.0", "md")
    assert "## Technology constants" in text
    ann = next(line for line in text.splitlines() if line.startswith("| ANN | CIFAR-10 | ResNet-20"))
    assert "2.59" in ann
    assert ann.endswith("| published counts, other prices |")
    assert "at the prices below: not the energies that it published" in text
    assert "Prices: fp32_mac: 5 nm (a guess); the rest: 45 nm CMOS, 0.9 V (M. Horowitz" in text
    page = with_prices(tmp_path, gathered, "fp32_mac = 1.0", "html")
    assert "counts as rate x MACs. Prices: fp32_mac: 5 nm (a guess); the rest: 45 nm CMOS" in page


def test_prices_that_the_paper_does_not_use_leave_its_rows_published(tmp_path: Path, gathered: Gathered) -> None:
    text = with_prices(tmp_path, on_cifar(gathered), "int8_mac = 0.01", "md")
    seven = text.partition("Table 7")[2].partition("## Energy")[0]
    assert "| published |" in seven
    assert "a guess" not in seven
    assert "Prices: int8_mac: 5 nm (a guess); the rest: 45 nm CMOS, 0.9 V (M. Horowitz" in text
