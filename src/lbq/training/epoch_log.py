"""The log of a run, `metrics.jsonl`: a line of JSON for each epoch."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lbq.counting.outcomes import OUTCOMES
from lbq.errors import RunError
from lbq.results.schemas import EPOCH
from lbq.runs import run_folder
from lbq.system import files, schema
from lbq.system.schema import Fields, Maybe, Values, problem
from lbq.training.position import EpochRecord

LINE = Fields(
    {
        **EPOCH.needed,
        **dict.fromkeys(("test_accuracy", "holdout_accuracy"), Maybe(schema.PERCENT)),
        **dict.fromkeys(("steps", "tails", "active"), Values(schema.NUMBER)),
        "seconds": schema.AMOUNT,
    },
    {"outcomes": OUTCOMES},
)
REMEDY = "start again in another folder"


class EpochLog:
    """The log in a run folder, which one process writes. Anybody may have written what lies there before."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"

    @property
    def size(self) -> int:
        """Bytes; 0 where there is none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, record: EpochRecord) -> None:
        """Add an epoch; it is on disk then."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}; free some space") from error

    def lines(self) -> list[dict[str, Any]]:
        """All epochs, as this run wrote or checked them."""
        return [json.loads(line) for line in files.text_of(self.path, RunError).splitlines()]

    def cut(self, length: int, epochs: int) -> None:
        """Drop what is behind the first `length` bytes: epochs that will be trained again. The rest must be so many epochs."""
        files.refuse_pipe(self.path, RunError)
        if self.size < length:
            raise RunError(f"{self.path} is shorter than its checkpoint says: {REMEDY}")
        self.check(length, epochs)
        try:
            if self.size > length:
                os.truncate(self.path, length)
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from error

    def check(self, length: int, epochs: int) -> None:
        """Refuse a log whose first `length` bytes are not the lines of so many epochs."""
        data = files.bytes_of(self.path, RunError, remedy=REMEDY)[:length] if self.path.exists() else b""
        try:
            lines = [json.loads(line) for line in data.decode().splitlines()]
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:80]
            raise RunError(f"{self.path} is not the log of a run ({reason})") from error
        if len(lines) != epochs:
            raise RunError(f"{self.path} holds {len(lines)} epochs, its checkpoint says {epochs}: {REMEDY}")
        for number, line in enumerate(lines, 1):
            wrong = problem(line, LINE) or ("" if line["epoch"] == number else f"its epoch is {line['epoch']}")
            if wrong:
                raise RunError(f"{self.path} is damaged: line {number}: {wrong}; {REMEDY}")

    def set_aside(self) -> Path | None:
        """Give a log that is not empty another name, and return that."""
        if not self.size:
            return None
        numbered = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
        old_log = next(path for path in numbered if not path.exists())
        run_folder.rename(self.path, old_log)
        return old_log
