"""Commands about what was trained or deployed: account, analyze, compare, record, report."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbq.cli import render
from lbq.cli.options import Changes, Device, Json, Limit, data_of_a_run, print_json, print_result, start
from lbq.cli.progress import CountProgress
from lbq.errors import LbqError

if TYPE_CHECKING:
    from lbq.counting.measurement import Measurement
    from lbq.counting.technology import Technology
    from lbq.data.testset import TestSet
    from lbq.engine import Network
    from lbq.results.result import Result

Data = Annotated[
    str | None,
    typer.Option(
        help="For model.lbq: its dataset's folder, or a .npz; default its golden inputs, for digits their test set."
    ),
]
Constants = Annotated[
    Path | None, typer.Option("--technology", help="TOML or JSON with your own prices: see docs/howto/energy.md.")
]


def _is_deployed(path: Path, changes: list[str] | None, data: str | None, device: str | None) -> bool:
    """Whether `path` is a deployed network, not a run folder. Refuses options of the other kind."""
    from lbq.engine.published import is_deployed

    deployed = is_deployed(path)
    if not deployed and not path.exists():
        raise LbqError(f"{path} does not exist: give a run folder, or a model.lbq that `lbq deploy` wrote")
    if deployed and changes and "=" not in changes[0] and data is None:
        raise LbqError(f"give the dataset of a deployed network as an option: --data {shlex.quote(changes[0])}")
    if deployed and (changes or device is not None):
        raise LbqError("key=value and --device are for a run folder; a deployed network takes --data")
    if not deployed and data is not None:
        raise LbqError("--data is for a deployed network, model.lbq; a run takes data.root=DIR")
    return deployed


def _open_deployed(path: Path, data: str | None) -> tuple[Network, TestSet, bool]:
    """A deployed network, what it is measured on, and whether that is random noise among its golden inputs."""
    from lbq.counting.analysis import GOLDEN
    from lbq.counting.inputs import inputs_of
    from lbq.engine import load

    net = load(path)
    test = inputs_of(net, data)
    return net, test, test.name == GOLDEN and net.network.facts.get("golden") == "noise"


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
    exit: Annotated[
        bool, typer.Option("--exit", help="For model.lbq: images stop early, by the margins that lbq exits chose.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Count a trained network's operations on its test images and model their energy, layer by layer."""
    if paper == (run is not None):
        both = f", not {run} and --paper" if paper else ""
        raise LbqError(f"account: give a run folder or a model.lbq, or --paper for the paper's own counts{both}")
    if paper and (data is not None or limit is not None or device is not None or exit):
        raise LbqError(
            "--data, --limit, --device and --exit are for a network that is run; --paper takes counts as published"
        )
    if exit and technology is not None:
        raise LbqError("--exit counts and prices nothing: leave --technology out")
    prices = _technology(technology)
    if run is None:
        _account_of_the_paper(prices, as_json)
        return
    if exit:
        _account_with_exits(run, changes, data, device, limit, as_json)
        return
    if _is_deployed(run, changes, data, device):
        measured, about, noise = _measure_deployed(run, data, limit)
        folder = _beside(run, ".analysis")
    else:
        measured, about = _measure_run(run, changes, device, limit)
        folder, noise = run / "analysis", False
    from lbq.counting.costs import costs
    from lbq.report.output import write_account

    full_costs = None if measured.exact is None else costs(measured.exact, prices)
    facts = {
        "inputs": measured.inputs + render.NOISE * noise,
        **measured.to_dict(prices.paper),
        "costs": None if full_costs is None else full_costs.to_dict(),
    }
    try:
        write_account(folder, measured.analysis(about))
    except LbqError as error:  # as where a model lies on a disk of others: its counts are shown all the same
        render.print_note(f"a report will not find these counts: {error}")
    print_result(as_json, facts, lambda: render.render_account(measured, full_costs, prices, noise))


def _beside(subject: Path, suffix: str) -> Path:
    """The folder of that suffix for a network's file, its folder for a hub, or its name."""
    place = subject.resolve() if subject.name in ("", "..") else subject
    return place.with_name(place.name.removesuffix(".lbq") + suffix)


def _measure_deployed(path: Path, data: str | None, limit: int | None) -> tuple[Measurement, dict[str, Any], bool]:
    """Counts of a deployed network, what identifies it, and whether it ran on random noise."""
    from lbq.counting.deployed_counts import facts_of, measure

    net, test, noise = _open_deployed(path, data)
    with CountProgress(str(path), min(limit or test.size, test.size)) as progress:
        measured = measure(net, test, None, limit, progress.advance)
    return measured, facts_of(net, test, path.name), noise


def _measure_run(
    run: Path, changes: list[str] | None, device: str | None, limit: int | None
) -> tuple[Measurement, dict[str, Any]]:
    """Counts of a trained network, and what identifies it."""
    from lbq.measuring.measure import measure_run
    from lbq.runs import records

    where = start(device)
    with data_of_a_run(), CountProgress(str(run), limit) as progress:
        measured = measure_run(run, changes=changes or [], device=where, limit=limit, progress=progress.advance)
    return measured, {"kind": "run", **records.facts_of(run)}


def _account_with_exits(
    model: Path, changes: list[str] | None, data: str | None, device: str | None, limit: int | None, as_json: bool
) -> None:
    from lbq.counting.exits import measure_exits

    if not _is_deployed(model, changes, data, device):
        raise LbqError(f"--exit is for a deployed network, model.lbq; {model} is a run folder")
    net, test, noise = _open_deployed(model, data)
    with CountProgress(str(model), min(limit or test.size, test.size)) as progress:
        measured = measure_exits(net, test, None, limit, progress.advance)
    inputs = test.name + render.NOISE * noise
    print_result(as_json, {"inputs": inputs, **asdict(measured)}, lambda: render.render_exits(measured, inputs))


def _account_of_the_paper(prices: Technology, as_json: bool) -> None:
    from lbq.counting.technology import PAPER
    from lbq.report.cost_tables import cost_table, counts_table

    counts, costs = counts_table([]), cost_table([], prices)
    if as_json:
        credit = prices.credit(*PAPER)
        print_json({"accumulations": counts.texts(), "modelled_cost": costs.texts(), "prices": credit})
        return
    for table in (counts, costs):
        render.render_table(table)


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
    from lbq.report.output import keep_whole, write_analysis
    from lbq.system import files

    noise = False
    if _is_deployed(subject, changes, data, device):
        from lbq.counting.analysis import GOLDEN
        from lbq.counting.deployed_counts import analyze as analyze_deployed

        net, test, noise = _open_deployed(subject, data)
        folder = out or _beside(subject, ".golden" if test.name == GOLDEN else ".analysis")
        files.check_folder(folder)
        keep_whole(folder, limit, test.size)
        with CountProgress(str(subject), min(limit or test.size, test.size)) as progress:
            analysis = analyze_deployed(net, test, None, limit, progress.advance, membranes, subject.name)
    else:
        from lbq.measuring.measure import analyze_run

        folder = out or subject / "analysis"
        files.check_folder(folder)
        keep_whole(folder, limit)
        where = start(device)
        with data_of_a_run(), CountProgress(str(subject), limit) as progress:
            analysis = analyze_run(
                subject,
                changes=changes or [],
                device=where,
                membranes=membranes,
                limit=limit,
                progress=progress.advance,
            )
    written = [str(path) for path in write_analysis(folder, analysis)]
    facts = {**analysis.to_dict(), "written": written}
    print_result(as_json, facts, lambda: render.render_analysis(analysis, folder, noise))


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
    facts = {"path": str(out), **{key: made[key] for key in ("variant", "dataset", "test_accuracy")}}
    text = f"{out}: {made['variant']} on {made['dataset']}, {render.accuracy_text(made['test_accuracy'], made)}"
    print_result(as_json, facts, lambda: render.print_line(text))


def compare(
    ours: Annotated[list[Path], typer.Argument(help="Records, run folders or analyses: one for each training.")],
    against: Annotated[list[Path], typer.Option(metavar="RUN", help="The others, likewise; repeat it for each.")],
    in_float: Annotated[
        bool, typer.Option("--float", help="The trained networks, also where deployed ones were measured.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap over test samples.")] = 0,
    as_json: Json = False,
) -> None:
    """The difference between two kinds of networks in test accuracy, with its uncertainty over trainings and test samples."""
    from lbq.results.compare import compare as compared

    comparison = compared(_finished(ours), _finished(against), in_float, seed)
    print_result(as_json, comparison.to_dict(), lambda: render.print_line(str(comparison)))


def _finished(paths: list[Path]) -> list[Result]:
    """The results at these paths, none of which may be without one."""
    from lbq.results.gather import gather

    gathered = gather(paths, _read_run)
    render.render_twins(gathered)
    if gathered.unfinished:
        raise LbqError(f"{gathered.unfinished[0].source} is not finished: leave it out, or train it to its end")
    if not gathered.finished:
        raise LbqError(
            f"{paths[0]} has no accuracy to compare: give a run folder, a record, or what lbq analyze MODEL --data DIR wrote"
        )
    return gathered.finished


def _read_run(folder: Path) -> dict[str, Any]:
    from lbq.runs.records import read

    return read(folder)


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
    title: Annotated[str, typer.Option(help="Heading of the page; default the network and its dataset.")] = "",
    technology: Constants = None,
    as_json: Json = False,
) -> None:
    """Your results as one page that opens offline, beside the paper's on the same dataset; or as tables for a paper."""
    from lbq.report.output import SUFFIXES, make

    if format not in SUFFIXES:
        raise LbqError(f"--format must be one of {', '.join(SUFFIXES)}, got {format!r}")
    if image is not None and format != "html":
        raise LbqError(f"--image is for the tour, which --format {format} does not have: leave it out, or take html")
    from lbq.results.gather import gather
    from lbq.system import files

    target = out or Path(f"report{SUFFIXES[format]}")
    (files.check_file if SUFFIXES[format] else files.check_folder)(target)
    gathered = gather(results, _read_run)
    render.render_twins(gathered)
    size = make(target, gathered, format, _technology(technology), image, title)
    alone = sum(result.alone for result in gathered.finished)
    finished, unfinished = len(gathered.finished) - alone, len(gathered.unfinished)
    facts = {"path": str(target), "bytes": size, "format": format}
    facts |= {"finished": finished, "analyses": alone, "unfinished": unfinished}
    text = f"{target}: {render.size_of(size)}, {finished} finished run{'s' * (finished != 1)}"
    text += f", {alone} analys{'i' if alone == 1 else 'e'}s without a run" if alone else ""
    text += f", {unfinished} not finished" if unfinished else ""
    print_result(as_json, facts, lambda: render.print_line(text))
