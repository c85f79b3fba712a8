"""A griffe extension: what the page of the API shows of parameters.

- Docstrings of this package describe them as lines or sentences `name: text`; they become a list. Names count that are
  parameters of the function, or attributes of the class; all others stay as they are.
- A default that is a constant's name, such as `INITIAL_STEP`, or a checked field, such as `_checked(0, ...)`, is shown as
  its value.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

CHECKED = ("_checked", "_one_of", "_at_least", "_positive", "_share")  # of lbq.config: the default comes first
NAMED = re.compile(r"(\w+(?:, \w+)*):(?!\S) ?(.*)")


def with_section(text: str, known: set[str], title: str) -> str:
    """The docstring with its descriptions moved into a section of Google's style."""
    prose: list[str] = []
    described: list[str] = []
    sentence = re.compile(rf"(?<=[.;)]) (?=(?:{'|'.join(map(re.escape, sorted(known)))}):\s)") if known else None
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        inside = False
        paragraph = sentence.sub("\n", paragraph) if sentence else paragraph
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


def value_of(default: Any, modules: griffe.ModulesCollection) -> Any:
    """A parameter's default as a reader would type it."""
    if isinstance(default, griffe.ExprCall) and default.arguments:
        if str(default.function) in CHECKED:
            return default.arguments[0]
        made = getattr(default.arguments[0], "value", None)  # field(default_factory=lambda: ...)
        if str(default.function) == "field" and isinstance(made, griffe.ExprLambda):
            return made.body
    if isinstance(default, (griffe.ExprName, griffe.ExprAttribute)):
        try:
            constant = modules[default.canonical_path]
        except KeyError:  # of another package
            return default
        if isinstance(constant, griffe.Attribute) and re.fullmatch(r"[-\d.]+|\".*\"|'.*'", str(constant.value)):
            return constant.value
    return default


class Parameters(griffe.Extension):
    """Rewrites docstrings before they are parsed, and defaults once everything is loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """All functions and classes: their defaults."""
        waiting: list[Any] = [pkg]
        while waiting:
            here = waiting.pop()
            waiting += [member for member in here.members.values() if not member.is_alias]
            if isinstance(here, griffe.Function):
                for parameter in here.parameters:
                    parameter.default = value_of(parameter.default, loader.modules_collection)
            elif isinstance(here, griffe.Class) and "dataclass" in here.labels:
                for field in here.attributes.values():
                    field.value = value_of(field.value, loader.modules_collection)

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
