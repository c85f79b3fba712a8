"""Commands about what was trained or deployed: account, analyze, record, report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbq.cli.options import Changes, Device, Json, Limit, data_of_a_run, print_json, start, thread_count
from lbq.cli.progress import CountProgress
from lbq.cli.render import NOISE, make_console, make_table, render_account, render_analysis, render_twins, size_of
from lbq.errors import LbqError

if TYPE_CHECKING:
    from lbq.counting.technology import Technology
    from lbq.data.testset import TestSet
    from lbq.engine import Network

Data = Annotated[
    str | None,
    typer.Option(
        help="For model.lbq: its dataset's folder, or a .npz; default its golden inputs, for digits their test set."
    ),
]
Constants = Annotated[
    Path | None, typer.Option("--technology", help="TOML or JSON with your own prices: see docs/howto/analyse.md.")
]


def _subject(path: Path, changes: list[str] | None, data: str | None, device: str | None) -> bool:
    """Whether it is a deployed network; options that are for the other kind are refused."""
    if not path.exists():
        raise LbqError(f"{path} does not exist: give a run folder, or a model.lbq that `lbq deploy` wrote")
    deployed = path.is_file()
    if deployed and (changes or device is not None):
        raise LbqError("key=value and --device are for a run folder; a deployed network takes --data")
    if not deployed and data is not None:
        raise LbqError("--data is for a deployed network, model.lbq; a run takes data.root=DIR")
    return deployed


def _is_noise(net: Network, test: TestSet) -> bool:
    """Whether a deployed network is measured on golden inputs that were drawn at random."""
    from lbq.counting.analysis import GOLDEN

    return test.name == GOLDEN and net.network.facts.get("golden") == "noise"


def _technology(path: Path | None) -> Technology:
    from lbq.counting import technology

    return technology.DEFAULT if path is None else technology.load(path)


def account(
    paper: Annotated[bool, typer.Option("--paper", help="Price the counts published in the paper.")] = False,
    run: Annotated[Path | None, typer.Argument(help="Run folder, or a deployed network: model.lbq.")] = None,
    changes: Changes = None,
    data: Data = None,
    limit: Limit = None,
    device: Device = None,
    technology: Constants = None,
    as_json: Json = False,
) -> None:
    """Count a trained network's operations on its test images and model their energy, layer by layer."""
    if paper == (run is not None):
        both = f", not {run} and --paper" if paper else ""
        raise LbqError(f"account: give a run folder or a model.lbq, or --paper for the paper's own counts{both}")
    if paper and (data is not None or limit is not None or device is not None):
        raise LbqError("--data, --limit and --device are for a network that is run; --paper takes counts as published")
    prices, noise = _technology(technology), False
    if run is None:
        _account_of_the_paper(prices, as_json)
        return
    if _subject(run, changes, data, device):
        from lbq.counting.deployed_counts import measure
        from lbq.counting.inputs import inputs_of
        from lbq.engine import load

        net = load(run)
        test = inputs_of(net, data)
        noise = _is_noise(net, test)
        with CountProgress(str(run), min(limit or test.size, test.size)) as progress:
            measured = measure(net, test, thread_count(), limit, progress.advance)
    else:
        from lbq.measuring.measure import measure_run

        where = start(device)
        with data_of_a_run(), CountProgress(str(run), limit) as progress:
            measured = measure_run(run, where, changes or [], limit=limit, progress=progress.advance)
    from lbq.counting.costs import costs

    honest = None if measured.exact is None else costs(measured.exact, prices)
    if as_json:
        inputs = measured.inputs + NOISE * noise
        costs_of_it = None if honest is None else honest.to_dict()
        print_json({"inputs": inputs, **measured.to_dict(prices.paper), "costs": costs_of_it})
    else:
        render_account(measured, honest, prices, noise)


def _account_of_the_paper(prices: Technology, as_json: bool) -> None:
    from lbq.counting.operations import cost_table
    from lbq.counting.technology import PAPER
    from lbq.results.paper import accumulation_table, cost_rows

    counts, costs = accumulation_table(), cost_table(cost_rows(), prices.paper)
    credit = prices.credit(*PAPER)
    if as_json:
        print_json({"accumulations": counts, "modelled_cost": costs, "prices": credit})
        return
    own = "" if prices.as_published else " at other prices"
    for title, rows in (
        ("Accumulations per image, published", counts),
        (f"Accuracy and modelled arithmetic cost, from the paper's own counts{own}", costs),
    ):
        table = make_table(title, *rows[0])
        for row in rows:
            table.add_row(*row.values())
        make_console().print(table)
    make_console().print(f"prices: {credit}")


def analyze(
    subject: Annotated[Path, typer.Argument(help="Run folder, or a deployed network: model.lbq.")],
    changes: Changes = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder; default RUN/analysis, MODEL.analysis (golden inputs: MODEL.golden)."),
    ] = None,
    data: Data = None,
    limit: Limit = None,
    membranes: Annotated[
        int, typer.Option(min=0, help="Histogram the membranes of every n-th image; 0: of none.")
    ] = 32,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """How a network uses its levels over its test set: steps, activity, distributions, entropy, membranes; with counts."""
    from lbq.system import files

    noise = False
    if _subject(subject, changes, data, device):
        from lbq.counting.analysis import GOLDEN
        from lbq.counting.deployed_counts import analyze as analyze_deployed
        from lbq.counting.inputs import inputs_of
        from lbq.engine import load

        net = load(subject)
        test = inputs_of(net, data)
        noise = _is_noise(net, test)
        folder = out or subject.with_suffix(".golden" if test.name == GOLDEN else ".analysis")
        files.check_folder(folder)
        with CountProgress(str(subject), min(limit or test.size, test.size)) as progress:
            analysis = analyze_deployed(net, test, thread_count(), limit, progress.advance, membranes, subject.name)
    else:
        from lbq.measuring.measure import analyze_run

        folder = out or subject / "analysis"
        files.check_folder(folder)
        where = start(device)
        with data_of_a_run(), CountProgress(str(subject), limit) as progress:
            analysis = analyze_run(subject, where, changes or [], membranes, limit, progress.advance)
    from lbq.report.output import write_analysis

    written = write_analysis(folder, analysis)
    if as_json:
        print_json({**analysis.to_dict(), "written": [str(path) for path in written]})
    else:
        render_analysis(analysis, folder, noise)


def record(
    run: Annotated[Path, typer.Argument(help="Run folder of a finished run.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File to write; default the standard output.")] = None,
    note: Annotated[str, typer.Option(help="A sentence that goes into the record.")] = "",
    as_json: Json = False,
) -> None:
    """Everything that a reader needs to believe and repeat a run, as one JSON file that outlives its weights."""
    from lbq.runs.records import record_of
    from lbq.system import files

    if out is not None:
        files.check_file(out)
    made = record_of(run, note)
    if out is None:
        print_json(made)
        return
    files.write(out, json.dumps(made, indent=1) + "\n")
    if as_json:
        print_json({"path": str(out), **{key: made[key] for key in ("variant", "dataset", "test_accuracy")}})
        return
    make_console().print(f"{out}: {made['variant']} on {made['dataset']}, {_accuracy_of(made)}", soft_wrap=True)


def _accuracy_of(record: Mapping[str, Any]) -> str:
    """In words: of the test set, or of the held-out samples where a run was not tested."""
    if (accuracy := record["test_accuracy"]) is not None:
        return f"{accuracy:.2f} %"
    held_out = record.get("holdout_accuracy")
    return "not tested" if held_out is None else f"not tested, {held_out:.2f} % of what was held out"


def report(
    results: Annotated[
        list[Path], typer.Argument(help="Records, run folders, analyses, model.lbq, engine_speed.json.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File; default report.html or report.FORMAT.")] = None,
    format: Annotated[
        str, typer.Option(help="html; md, latex: the tables; csv, svg: a folder of tables or figures.")
    ] = "html",
    image: Annotated[
        Path | None, typer.Option(help="For the tour: an image file or uint8 .npy instead of a golden input.")
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "LBQ report",
    technology: Constants = None,
    as_json: Json = False,
) -> None:
    """The paper's tables and figures with your results in them: one page that needs no network, or tables for a paper."""
    from lbq.report.output import SUFFIXES, make

    if format not in SUFFIXES:
        raise LbqError(f"--format must be one of {', '.join(SUFFIXES)}, got {format!r}")
    if image is not None and format != "html":
        raise LbqError(f"--image is for the tour, which --format {format} does not have: leave it out, or take html")
    from lbq.results.gather import gather
    from lbq.system import files

    target = out or Path(f"report{SUFFIXES[format]}")
    (files.check_file if SUFFIXES[format] else files.check_folder)(target)

    def read_run(folder: Path) -> dict[str, Any]:
        from lbq.runs.records import read

        return read(folder)

    gathered = gather(results, read_run)
    render_twins(gathered)
    size = make(target, gathered, format, _technology(technology), image, title)
    alone = sum(result.alone for result in gathered.finished)
    if as_json:
        counts = {"finished": len(gathered.finished) - alone, "analyses": alone, "unfinished": len(gathered.unfinished)}
        print_json({"path": str(target), "bytes": size, "format": format, **counts})
        return
    unfinished = f", {len(gathered.unfinished)} not finished" if gathered.unfinished else ""
    runs = f"{len(gathered.finished) - alone} finished run{'s' * (len(gathered.finished) - alone != 1)}"
    analyses = f", {alone} analys{'i' if alone == 1 else 'e'}s without a run" if alone else ""
    make_console().print(f"{target}: {size_of(size)}, {runs}{analyses}{unfinished}", soft_wrap=True)
