"""What all commands share: options, how they print a result, and how they end."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lbq.config import CHANGEABLE
from lbq.errors import DataError
from lbq.system.shown import shown

if TYPE_CHECKING:
    import torch

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Changes = Annotated[list[str] | None, typer.Argument(help=f"For a run: key=value; keys {', '.join(CHANGEABLE)}.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default a GPU where there is one.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Stop after this many samples.")]


def fail(message: str, code: int = 2) -> NoReturn:
    sys.stderr.write(f"lbq: {shown(' '.join(message.split()))}\n")
    sys.exit(code)


def print_json(value: Any) -> None:
    """As other programs read it: JSON has no NaN and no infinity, `null` stands for them."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_result(as_json: bool, value: Any, render: Callable[[], None]) -> None:
    """Print a command's result: `value` as JSON where it is asked for, otherwise what `render` prints."""
    if as_json:
        print_json(value)
    else:
        render()


@contextmanager
def data_of_a_run() -> Iterator[None]:
    """Where a run's data cannot be read, say how to name its folder: it may have moved since training."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}; where the run's data lies elsewhere now, add data.root=DIR") from error


def start(device: str | None) -> torch.device:
    """The device that one process works on."""
    from lbq.native import choose as kernels
    from lbq.training import distributed

    where = distributed.start(device)[1]
    kernels.check(where.type)
    return where
