"""What exports refuse: networks that have no form elsewhere, names that C cannot have, files that no export wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lbq.errors import GraphError, LbqError
from lbq.graph import Layered

COMMON_BYTES = 24  # that files of the same name begin with in every export
FILE_ENDINGS = ("_data", "_levels", "_net", "_products", "_rows")  # of the files of a network, behind its name
# the headers of C, which a folder on the include path must not hide
C_HEADERS = {
    "assert", "complex", "ctype", "errno", "fenv", "float", "inttypes", "iso646", "limits", "locale", "math",
    "setjmp", "signal", "stdalign", "stdarg", "stdatomic", "stdbool", "stddef", "stdint", "stdio", "stdlib",
    "stdnoreturn", "string", "tgmath", "threads", "time", "uchar", "wchar", "wctype",
}  # fmt: skip


def refuse_unknown(network: Layered[Any], format: str) -> None:
    """Refuse networks of LM-HT's neurons: these formats run one timestep after the other."""
    if names := network.mixed_layers:
        raise GraphError(
            f"layer {names[0]!r} mixes the currents of all timesteps (LM-HT), which has no form in {format}: use model.lbq "
            "with lbq run, or another neuron"
        )


def check_name(name: str) -> None:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,39}", name) is None:
        raise LbqError(f"--name {name!r} is no name in C: give a letter, then up to 39 letters, digits, underscores")
    if name.lower() in ("board", "example", "makefile"):
        raise LbqError(f"--name {name} is the name of a file beside it: give another one")
    if ending := next((e for e in FILE_ENDINGS if name.endswith(e)), None):
        raise LbqError(
            f"--name {name}: a network called {name.removesuffix(ending)} has files of this name: give another one"
        )
    if name.lower() in C_HEADERS:
        raise LbqError(f"--name {name}: {name}.h would stand before C's own <{name.lower()}.h>: give another one")


def check_neighbours(out: Path, name: str) -> None:
    """Refuse a name that differs only in case from a network's in the same folder: their headers have the same guard."""
    for path in out.glob("*_net.h"):
        other = path.name.removesuffix("_net.h")
        if other != name and other.lower() == name.lower():
            raise LbqError(f"--name {name}: {out} holds a network called {other}: give another name or folder")


def check_ours(path: Path, text: str) -> None:
    """Refuse to replace a file that no export wrote: files of one name begin alike in all exports."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        if file.read(COMMON_BYTES) != text.encode()[:COMMON_BYTES]:
            raise LbqError(f"{path} is there already and was not written by lbq export: give another folder")
