"""Commands about networks with a name: models, models export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lbq.cli.options import Json, print_result
from lbq.cli.render import print_line, print_note, print_table, size_of
from lbq.errors import LbqError

app = typer.Typer(invoke_without_command=True)


@app.callback()
def models(context: typer.Context, as_json: Json = False) -> None:
    """List the networks that come with lbq, and those in the folder that LBQ_MODELS names.

    A name stands for its file in `lbq.engine.load`, and in deploy, run, exits, predict, watch, export, account and analyze.
    """
    if context.invoked_subcommand is not None:
        return
    from lbq.engine import load, published
    from lbq.export.hub import facts_of

    rows = []
    for name, path in published.names().items():
        try:
            rows.append(facts_of(name, path, load(path)))
        except LbqError as error:  # the others are shown all the same
            print_note(f"{name}: {error}")
    print_result(as_json, rows, lambda: _render(rows))


def _render(rows: list[dict[str, Any]]) -> None:
    if not rows:
        print_line("no networks: name a folder of model files with LBQ_MODELS")
        return
    columns = ("name", "dataset", "test %", "classes", "T", "weights", "size")
    cells = [
        (
            row["name"],
            str(row["dataset"] or "-"),
            "-" if row["test_accuracy"] is None else f"{row['test_accuracy']:.2f}",
            str(row["classes"]),
            str(row["timesteps"]),
            f"{row['weights']:,}",
            size_of(row["bytes"]),
        )
        for row in rows
    ]
    print_table("Networks by name", columns, cells)


@app.command("export")
def export(
    name: Annotated[str, typer.Argument(help="A name of `lbq models`, or a deployed network: model.lbq.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder to make; default the network's name.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="The run folder that it was deployed from: adds its trained weights.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="An identifier such as mit; default apache-2.0 if it came with lbq.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a network as a folder for a model hub: card, config.json, model.lbq; with --run its weights too."""
    from lbq.export.hub import write_folder

    made = write_folder(name, out or Path(Path(name).name.removesuffix(".lbq")), run, license)
    text = f"{made['path']}: {', '.join(made['files'])}, {size_of(made['bytes'])}, {made['verified']} golden inputs verified"
    print_result(as_json, made, lambda: print_line(text))
