"""The command line, called in this process."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import typer.main

from lbq import cli

# every call of an app makes all of its commands anew, which takes longer than most of what they are asked here
typer.main.get_command = functools.cache(typer.main.get_command)


def status(*arguments: object) -> int:
    """The exit status of `lbq` with these arguments."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


class Call:
    """Runs `lbq` with the given arguments: its exit status, stdout and stderr. The fixture `call`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.capsys.readouterr()
        code = status(*arguments)
        out, err = self.capsys.readouterr()
        return code, out, err

    def printed(self, *arguments: object) -> str:
        """What a command that succeeds writes to stdout."""
        code, out, err = self(*arguments)
        assert code == 0, err
        return out

    def json(self, *arguments: object) -> Any:
        """What it says with --json, read as strictly as other languages do."""
        return json.loads(self.printed(*arguments, "--json"), parse_constant=_no_json)

    def refused(self, *arguments: object) -> str:
        """The one line with which it ends in exit status 2, and nothing else written."""
        code, out, err = self(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("lbq: ")
        return err
