"""The command line: parse, call, render. Results go to stdout, progress and errors to stderr.

What a user got wrong ends in one line and exit code 2; a bug ends in a traceback.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from lbq._version import __version__
from lbq.cli import deploy_commands, measure_commands, model_commands, streams, train_commands, watch
from lbq.cli.options import fail
from lbq.errors import LbqError, Stopped
from lbq.system import plugins
from lbq.system.shown import shown

app = typer.Typer(
    name="lbq",
    help="Train spiking networks that learn their own burst resolution; run them as integer, bit-sparse networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
COMMANDS: dict[str, Callable[..., None]] = {  # in the order of the help
    "demo": train_commands.demo,
    "train": train_commands.train,
    "sweep": train_commands.sweep,
    "eval": train_commands.evaluate,
    "convert": train_commands.convert,
    "data": train_commands.data,
    "deploy": deploy_commands.deploy,
    "run": deploy_commands.run,
    "exits": deploy_commands.exits,
    "predict": deploy_commands.predict,
    "export": deploy_commands.export,
    "watch": watch.watch,
    "account": measure_commands.account,
    "analyze": measure_commands.analyze,
    "record": measure_commands.record,
    "report": measure_commands.report,
    "compare": measure_commands.compare,
    "doctor": train_commands.doctor,
}
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(model_commands.app, name="models")


def main(arguments: list[str] | None = None) -> None:
    """What `lbq` and `python -m lbq` call."""
    # one line: PyTorch's warnings may end in the frames of a C++ stack
    warnings.formatwarning = lambda message, *_: f"lbq: {shown(str(message).partition(chr(10))[0])}\n"
    warnings.filterwarnings("once", "running in NumPy")
    # of forks: the workers that decode images do nothing else
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    # Set before torch is loaded. Its threads would spin for milliseconds while they wait, and take cores from other work.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    with streams.guarded():
        _run(arguments)


def _run(arguments: list[str] | None) -> None:
    try:
        status = app(arguments, prog_name="lbq", standalone_mode=False)
        sys.stdout.flush()
    except Stopped as stopped:
        fail(str(stopped), stopped.code)
    except LbqError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        fail("this command needs PyTorch, which is not installed: pip install torch")
    except Exception as error:
        # the option parser's own errors, whose classes moved between versions of typer
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        if not describe():  # no command: the help has been shown
            sys.exit(2)
        if "No such option: --import" in describe():
            fail("--import stands before the command: lbq --import FILE COMMAND ...")
        context: Any = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "lbq"
        if command in ("lbq train", "lbq sweep") and (setting := _setting(describe())):
            fail(f"{describe().rstrip('.')}; settings have no dashes: {setting}")
        if "No such command" in describe() and context is not None:
            fail(f"{describe()} Commands: {', '.join(context.command.list_commands(context))} (see {command} --help)")
        fail(f"{describe()} (see {command} --help)")
    if status == 130:  # the option parser turns a keyboard interrupt into this
        fail("interrupted", 130)
    sys.exit(status if isinstance(status, int) else 0)


def _setting(message: str) -> str:
    """The setting that an unknown option of `lbq train` is meant for, as KEY=...; "" if there is none."""
    from lbq.config import Config

    if not (found := re.match(r"No such option: --([a-z_-]+)", message)):
        return ""
    name, tree = found[1].replace("-", "_"), Config().to_dict()
    keys = [f"{part}.{name}" for part, values in tree.items() if isinstance(values, dict) and name in values]
    keys += [name] if name in tree else []
    return " or ".join(f"{key}=..." for key in keys)


def _show_version(requested: bool) -> None:
    if requested:
        sys.stdout.write(f"lbq {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    imported: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="FILE", help="Python file or module with networks or neurons of your own."),
    ] = None,
) -> None:
    for name in imported or ():
        plugins.bring_in(name)
