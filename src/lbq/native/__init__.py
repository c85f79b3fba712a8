"""The native library: C kernels that the installation compiles and ctypes loads. The CPU decides which path runs.

`library()` returns it, or None with the reason in `report()`. Environment variables change this, for tests and to find
faults: LBQ_NATIVE=off does without the library, LBQ_NATIVE_ISA=portable|avx2|avx512|neon forces an instruction path,
LBQ_NATIVE_AMX=off does without the matrix unit of newer x86 CPUs, and LBQ_NATIVE_LIBRARY names another build (`make
sanitize` uses one with checks).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lbq.errors import LbqError
from lbq.system.lazy import submodules as _submodules

HERE = Path(__file__).parent
ISAS = {"portable": 0, "avx2": 1, "avx512": 2, "neon": 3}  # the numbers of enum lbq_isa
CPU_EXTRAS = {"vnni": 8, "dotprod": 9, "compress": 10, "amx": 11}  # bits of enum lbq_feature
C_TYPES: dict[str, Any] = {
    "int64": ctypes.c_int64,
    "pointer": ctypes.c_void_p,
    "float": ctypes.c_float,
    "int32": ctypes.c_int32,
    "double": ctypes.c_double,
}
REBUILD = "install lbq again (pip install -e . in a clone)"


@dataclass(frozen=True)
class Report:
    """What is there of the native library.

    path: its file. features: instruction paths and extras of this CPU. isa: the path that runs. reason: why there is no
    library, else None.
    """

    path: str | None
    features: tuple[str, ...]
    isa: str | None
    reason: str | None


def structure(**names: str) -> type[ctypes.Structure]:
    """A structure of native.h with these fields, in order: for each type of `C_TYPES`, the names separated by spaces."""

    class Structure(ctypes.Structure):
        _fields_ = tuple((name, C_TYPES[kind]) for kind, group in names.items() for name in group.split())

    return Structure


def cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def source_hash() -> str:
    """The hash of the C sources beside this file. A library that was built from other sources is not used."""
    digest = hashlib.sha256()
    for path in sorted(p for p in HERE.iterdir() if p.suffix in (".c", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


def find(folder: Path = HERE) -> Path | None:
    """The library file that the installation left in `folder`, or the one that LBQ_NATIVE_LIBRARY names."""
    if other := os.environ.get("LBQ_NATIVE_LIBRARY"):
        return Path(other)
    names = (folder / f"_lbq{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in names if path.is_file()), None)


def open_library(path: Path | None) -> ctypes.CDLL | str:
    """The library in that file, or why it cannot be used."""
    if path is None:
        return f"the native library was not built, a C compiler was missing or failed: install a C compiler, then {REBUILD}"
    try:
        library = ctypes.CDLL(str(path))
        library.lbq_source_hash.restype = ctypes.c_char_p
        built_from = library.lbq_source_hash().decode()
    except (OSError, AttributeError) as error:
        return f"the native library {path.name} cannot be loaded ({error}): {REBUILD}"
    if built_from != source_hash():
        return f"the native library {path.name} was built from other sources: {REBUILD}"
    return library


_found = cache(find)


@cache
def _opened() -> ctypes.CDLL | str:
    return open_library(_found())


def switched_off() -> bool:
    """Whether LBQ_NATIVE says to do without the library."""
    if (value := os.environ.get("LBQ_NATIVE", "")) not in ("", "on", "off"):
        raise LbqError(f"LBQ_NATIVE={value}: it may be on or off")
    return value == "off"


def library() -> ctypes.CDLL | None:
    """The native library, or None: see `report().reason`."""
    if switched_off():
        return None
    opened = _opened()
    return None if isinstance(opened, str) else opened


@cache
def _features() -> tuple[str, ...]:
    opened = _opened()
    if isinstance(opened, str):
        return ()
    bits = opened.lbq_features()
    return tuple(name for name, bit in {**ISAS, **CPU_EXTRAS}.items() if bits >> bit & 1)


def isas() -> tuple[str, ...]:
    """The instruction paths that run on this CPU, narrowest first; empty without a library."""
    return tuple(name for name in _features() if name in ISAS)


def isa() -> str:
    """The instruction path that runs: the widest, or the one that LBQ_NATIVE_ISA names."""
    forced = os.environ.get("LBQ_NATIVE_ISA")
    if not forced:
        return isas()[-1]
    if forced not in isas():
        raise LbqError(f"LBQ_NATIVE_ISA={forced}: this CPU and build have {', '.join(isas())}: name one of them")
    return forced


def report() -> Report:
    """What is there of the library, for `lbq doctor` and run records."""
    if switched_off():
        return Report(None, (), None, "switched off by LBQ_NATIVE=off")
    opened = _opened()
    if isinstance(opened, str):
        return Report(None, (), None, opened)
    without = ("amx",) if os.environ.get("LBQ_NATIVE_AMX") == "off" else ()
    return Report(str(_found()), tuple(name for name in _features() if name not in without), isa(), None)


_submodules(__name__)
