"""Modules of a package at first use: `import lbq` is enough to write `lbq.training.optim.parameter_groups`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType


def submodules(package: str) -> None:
    """Let attribute access import the modules of a package that is being imported."""

    def __getattr__(name: str) -> ModuleType:
        inner = f"{package}.{name}"
        if name.startswith("_") or importlib.util.find_spec(inner) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(inner)

    # not by a name that type checkers see: they check what they know
    vars(sys.modules[package])["__getattr__"] = __getattr__
