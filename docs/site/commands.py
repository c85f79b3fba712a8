"""docs/reference/commands.md from the command line itself: `python docs/site/commands.py` writes it, a test compares it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from lbq.cli import app

PAGE = Path(__file__).resolve().parents[1] / "reference" / "commands.md"
HEAD = """# Commands

This page is written by `python docs/site/commands.py` from the command line itself. `lbq COMMAND --help` says the same.

Results go to standard output, progress and errors to standard error: bars on a terminal, elsewhere a line at least
every 30 seconds. A mistake of the user ends in one line and exit code 2.
`--json` prints a result as JSON. `--import` comes before the command: `lbq --import FILE COMMAND ...`.
"""


def cell(text: str | None) -> str:
    """A help text as a cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


def first_sentence(text: str) -> str:
    """What a command does, in short."""
    return " ".join(text.split()).split(". ")[0].rstrip(".")


def default_of(parameter: Any) -> str:
    """The default as it would be typed; empty where there is none to speak of."""
    value = parameter.default
    if value is None or value is False or callable(value) or value == []:
        return ""
    return f"`{value}`"


def usage(name: str, command: Any) -> str:
    """One line that shows the order of what a command takes."""
    words = ["lbq", name]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            word = parameter.name.upper() + ("..." if parameter.nargs == -1 or parameter.multiple else "")
            words.append(word if parameter.required else f"[{word}]")
    return " ".join([*words, "[OPTIONS]"])


def value_of(parameter: Any, hints: Mapping[str, Any]) -> str:
    """What stands for the value of an option; empty for a flag. hints: the types of the command's parameters."""
    if parameter.is_flag:
        return ""
    if parameter.metavar:
        return f" {parameter.metavar}"
    hint = hints.get(parameter.name, str)
    kinds = {inner for part in (hint, *get_args(hint)) for inner in (part, *get_args(part))}
    if kinds & {int, float}:
        return " N"
    if Path in kinds:
        return " FOLDER" if re.match(r"(the )?(run )?folder\b", parameter.help or "", re.IGNORECASE) else " FILE"
    return " PATH" if parameter.name in ("out", "data") else f" {parameter.name.upper()}"


def rows(command: Any) -> list[str]:
    """A row for each argument and option of a command."""
    lines, hints = [], get_type_hints(command.callback)
    for parameter in command.params:
        if parameter.hidden or parameter.name == "help":
            continue
        option = parameter.param_type_name == "option"
        names = ", ".join(f"`{name}`" for name in (parameter.opts if option else [parameter.name.upper()]))
        if option:
            names = f"{names[:-1]}{value_of(parameter, hints)}`"
        lines.append(f"| {names} | {default_of(parameter)} | {cell(parameter.help)} |")
    return lines


def section(heading: str, text: str | None, command: Any) -> str:
    """A command's heading, what it does, and its table."""
    table = rows(command)
    head = "| argument or option | default | meaning |\n|---|---|---|\n"
    return f"\n{heading}\n\n{' '.join((text or '').split())}\n" + (
        f"\n{head}" + "\n".join(table) + "\n" if table else ""
    )


def commands_of(root: Any) -> dict[str, Any]:
    """Every command by its name, those of a command, such as `models export`, after it."""
    commands: dict[str, Any] = {}
    for name, command in root.commands.items():
        commands[name] = command
        commands |= {f"{name} {inner}": below for inner, below in getattr(command, "commands", {}).items()}
    return commands


def page() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    commands = commands_of(root)
    overview = [
        f"| [`lbq {n}`](#lbq-{n.replace(' ', '-')}) | {cell(first_sentence(command.help))} |"
        for n, command in commands.items()
    ]
    text = HEAD + "\n| command | what it does |\n|---|---|\n" + "\n".join(overview) + "\n"
    text += section("## Before every command", "These options stand between `lbq` and the command.", root)
    for name, command in commands.items():
        body = section(f"## lbq {name}", f"`{usage(name, command)}`", command)
        head, _, rest = body.partition("\n\n|")
        text += head + f"\n\n{' '.join(command.help.split())}\n" + (f"\n|{rest}" if rest else "")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
