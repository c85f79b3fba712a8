"""Errors that a user can cause. The command line prints them in one line and exits with code 2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable


class LbqError(Exception):
    """Something in the input is wrong; the message says what, where, and what to do."""


class ConfigError(LbqError):
    """A configuration cannot be used."""


class GraphError(LbqError):
    """A network holds something that the integer form cannot express."""


class TooSmall(GraphError):
    """The input is too small for the network's poolings and strides."""


class RunError(LbqError):
    """A run folder is missing, incomplete or damaged."""


class Stopped(LbqError):
    """A signal stopped the work. Started again, it continues from here. `code` is the process's exit status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Busy(RunError):
    """Another process holds a run folder."""


class DataError(LbqError):
    """A dataset is missing, incomplete or damaged."""


class ArtefactError(LbqError):
    """A deployed network's file is missing, damaged, or holds something that cannot be run."""


YOUR_OWN = " (one of your own: lbq --import FILE ..., in Python import it)"  # follows the error for an unknown name


def check_new(name: str, built_in: Container[str], kind: str) -> None:
    """Refuse to register a user's `kind` under a malformed name, or under a name that lbq uses itself."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise ConfigError(f"register: a name is letters, digits and '_', beginning with a letter, got {name!r}")
    if name in built_in:
        raise ConfigError(f"register: {name!r} is a {kind} of lbq: choose another name")


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or the whole list if nothing is close."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(options) or 'none'}"
