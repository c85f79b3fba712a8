"""Values of a file's description, read one by one with their type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lbq.errors import ArtefactError
from lbq.graph import integer


class Fields:
    """A JSON object with known keys, whose values are read one by one with their type."""

    def __init__(self, value: Any, where: str, *keys: str) -> None:
        if not isinstance(value, dict):
            raise ArtefactError(f"{where} must be an object")
        if set(value) != set(keys):
            odd = ", ".join(sorted(set(value) ^ set(keys)))[:80]
            raise ArtefactError(f"{where} must have the entries {', '.join(keys)[:400]}; wrong or missing: {odd!r}")
        self.value, self.where = value, where

    def take(self, key: str, kind: type, ok: Callable[[Any], bool] = lambda _: True) -> Any:
        value = self.value[key]
        if type(value) is not kind or not ok(value):
            raise ArtefactError(f"{self.where}: {key} is {str(value)[:40]!r}, which is not possible")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        return self._inside(key, self.take(key, int), low, high)

    def pair(self, key: str, low: int, high: int) -> tuple[int, int]:
        first, second = self.take(key, list, lambda v: len(v) == 2 and all(type(x) is int for x in v))
        return self._inside(key, first, low, high), self._inside(key, second, low, high)

    def _inside(self, key: str, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            raise ArtefactError(f"{self.where}: {key} must be in {low}..{high}, not {str(value)[:40]}")
        return value

    def name(self, key: str) -> str:
        return str(self.take(key, str, lambda v: "/" not in v and integer.is_name(v)))
