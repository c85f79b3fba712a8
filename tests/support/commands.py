"""The command line, called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lbq import cli

Call = Callable[..., tuple[int, str, str]]  # the fixture `call`


def status(*arguments: object) -> int:
    """The exit status of `lbq` with these arguments."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The same, with what it wrote to stdout and stderr."""
    code = status(*arguments)
    out, err = capsys.readouterr()
    return code, out, err
