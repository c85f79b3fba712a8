"""A griffe extension: docstrings of this package describe parameters as lines `name: text`; show them as a list.

Lines count whose names are parameters of the function, or attributes of the class; all others stay as they are.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

NAMED = re.compile(r"(\w+(?:, \w+)*): (.*)")


def with_section(text: str, known: set[str], title: str) -> str:
    """The docstring with its descriptions moved into a section of Google's style."""
    prose: list[str] = []
    described: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        inside = False
        for line in paragraph.splitlines():
            match = NAMED.match(line)
            if match and set(match[1].split(", ")) <= known:
                inside = True
                described.append(f"    {match[1]}: {match[2]}")
            elif inside:
                described.append(f"        {line.strip()}")
            else:
                prose.append(line)
        prose.append("")
    if not described:
        return text
    return "\n".join([*prose, f"{title}:", *described])


class Parameters(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """A function or a method: its parameters."""
        if func.docstring is not None and "Args:" not in func.docstring.value:
            known = {parameter.name for parameter in func.parameters}
            func.docstring.value = with_section(func.docstring.value, known, "Args")

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """A class: what its constructor takes, or its attributes."""
        if cls.docstring is None or "Args:" in cls.docstring.value:
            return
        members = cls.members
        if "__init__" in members and isinstance(members["__init__"], griffe.Function):
            known = {parameter.name for parameter in members["__init__"].parameters}
            cls.docstring.value = with_section(cls.docstring.value, known, "Args")
        else:
            cls.docstring.value = with_section(cls.docstring.value, set(members), "Attributes")
