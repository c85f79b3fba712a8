"""Files and modules of one's own, imported before a command runs: they register networks and neurons by name.

Only what the user names on the command line is imported; nothing in a configuration, a run or a record can ask for it.
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

GIVEN: list[str] = []  # as they were given, in order: for the commands that this one starts
_SOURCES: list[str] = []  # name and checksum of each file


def bring_in(name: str) -> None:
    """Import `name`, a Python file or a module, once."""
    if name in GIVEN:
        return
    if not name.endswith(".py") and Path(name).name != name:
        raise ConfigError(f"--import {name}: give the name of a Python file with its .py, or of a module")
    try:
        module = _run_file(Path(name)) if name.endswith(".py") else _find_module(name)
        _note(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--import {name}: {type(error).__name__}: {reason}{_where(error)}") from error
    GIVEN.append(name)


def _note(module: ModuleType) -> None:
    """Keep the checksum of a module's file, which may lie in an archive."""
    if source := getattr(module, "__file__", None):
        read = getattr(module.__loader__, "get_data", None) or (lambda path: Path(path).read_bytes())
        line = f"{Path(source).name} sha256 {hashlib.sha256(read(source)).hexdigest()}"
        if line not in _SOURCES:  # of two files of one name, both count
            _SOURCES.append(line)


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"--import {path}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"lbq_import_{path.stem}", path.absolute())
    if spec is None or spec.loader is None:
        raise ConfigError(f"--import {path} cannot be imported")
    folder = str(path.absolute().parent)  # what it imports itself may lie beside it
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _find_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _where(error: BaseException) -> str:
    """The place in the user's own files that an import failed at."""
    if isinstance(error, SyntaxError):
        return ""  # which says it itself
    others = ("<frozen", str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), *site.getsitepackages())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def options() -> list[str]:
    """The options that bring in the same in another process."""
    return [part for name in GIVEN for part in ("--import", name)]


def told() -> str:
    """What was imported, with checksums: "my_net.py sha256 ..."; "" where nothing was."""
    return "; ".join(_SOURCES)
