"""A user's Python files and modules, imported before a command runs: they register networks and neurons by name.

Only what the user names on the command line is imported. No configuration, run or record can ask for an import.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import site
import sys
import traceback
from pathlib import Path
from types import ModuleType

from lbq.errors import ConfigError

IMPORTED: list[str] = []  # the names as typed, in order: the commands that this one starts get them too
_CHECKSUMS: list[str] = []  # "NAME sha256 DIGEST" of each file


def bring_in(name: str) -> None:
    """Import `name`, a Python file or a module, once."""
    if name in IMPORTED:
        return
    if not name.endswith(".py") and Path(name).name != name:
        raise ConfigError(f"--import {name}: give the name of a Python file with its .py, or of a module")
    try:
        if name.endswith(".py"):
            module = _run_file(Path(name))
        else:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
            module = importlib.import_module(name)
        _record_checksum(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--import {name}: {type(error).__name__}: {reason}{_where(error)}") from error
    IMPORTED.append(name)


def _record_checksum(module: ModuleType) -> None:
    """Add the checksum of a module's file, which may lie in an archive."""
    if source := getattr(module, "__file__", None):
        read = getattr(module.__loader__, "get_data", None) or (lambda path: Path(path).read_bytes())
        line = f"{Path(source).name} sha256 {hashlib.sha256(read(source)).hexdigest()}"
        if line not in _CHECKSUMS:  # two files of one name both count
            _CHECKSUMS.append(line)


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"--import {path}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"lbq_import_{path.stem}", path.absolute())
    if spec is None or spec.loader is None:
        raise ConfigError(f"--import {path} cannot be imported")
    folder = str(path.absolute().parent)  # the file may import modules beside it
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _where(error: BaseException) -> str:
    """The line of the user's files at which an import failed."""
    if isinstance(error, SyntaxError):
        return ""  # its text says the line already
    others = ("<frozen", str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), *site.getsitepackages())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def options() -> list[str]:
    """The options that import the same in another process."""
    return [part for name in IMPORTED for part in ("--import", name)]


def checksums() -> str:
    """The imported files with checksums: "my_net.py sha256 ..."; "" if there are none."""
    return "; ".join(_CHECKSUMS)


def changed(before: str) -> str:
    """The files that were imported when `checksums` gave `before`, and are not now as they were; "" if there are none."""
    now = {line.rpartition(" ")[2] for line in _CHECKSUMS}  # a file may have been renamed since
    then = (line.rpartition(" sha256 ") for line in before.split("; "))  # it may be anything: it is read from a file
    return ", ".join(dict.fromkeys(name for name, _, digest in then if name and digest not in now))
