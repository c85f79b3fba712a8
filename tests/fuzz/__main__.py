"""`python -m tests.fuzz --seconds 60`: change files until the time is over; exit 1 if one was neither refused nor right."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from tests.fuzz.children import SECONDS, outcome
from tests.fuzz.subjects import SUBJECTS, Subject, changed
from tests.support.small_runs import use_few_digits

FOUND = Path(__file__).parent / "found"


def wrong(subject: Subject, expected: str, path: Path, seconds: float = SECONDS) -> tuple[str, str] | None:
    """What is wrong with how a file is read: None where it is refused in one line, or gives the expected result."""
    kind, text = outcome(subject.read, path, seconds)
    if kind == "refused" or (kind, text) == ("result", expected):
        return None
    return ("other result", text) if kind == "result" else (kind, text)


def expected_of(subject: Subject, folder: Path) -> str:
    """The result of the valid file."""
    path = folder / f"original{subject.suffix}"
    path.write_bytes(subject.original)
    kind, text = outcome(subject.read, path, 60.0)
    assert kind == "result", text
    return text


def fuzz(
    subject: Subject, expected: str, folder: Path, seeds: Iterable[int], seconds: float = SECONDS
) -> Iterator[tuple[int, bytes, tuple[str, str] | None]]:
    """Each seed's file, and what is wrong with how it is read."""
    path = folder / f"changed{subject.suffix}"
    for seed in seeds:
        data = changed(subject, Random(seed))
        path.write_bytes(data)
        yield seed, data, wrong(subject, expected, path, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--only", choices=sorted(SUBJECTS), action="append")
    arguments = parser.parse_args()
    use_few_digits(pytest.MonkeyPatch())
    counts, problems = Counter[str](), set[str]()
    with TemporaryDirectory(prefix="lbq-fuzz-") as temporary:
        folder = Path(temporary)
        subjects = {name: SUBJECTS[name](folder) for name in arguments.only or SUBJECTS}
        runs = {
            name: fuzz(subject, expected_of(subject, folder), folder, itertools.count(arguments.seed))
            for name, subject in subjects.items()
        }
        end = time.monotonic() + arguments.seconds
        for name in itertools.cycle(runs):
            if time.monotonic() > end:
                break
            seed, data, problem = next(runs[name])
            counts[name] += 1
            if problem is None:
                continue
            kind, text = problem
            last = text.strip().splitlines()[-1][:200] if text.strip() else ""
            if (summary := f"{name}: {kind}: {last}") not in problems:
                problems.add(summary)
                place = FOUND / f"{name}-{hashlib.sha256(data).hexdigest()[:8]}{subjects[name].suffix}"
                place.write_bytes(data)
                sys.stdout.write(f"{summary}\n  seed {seed}, kept as {place}\n{text[-1200:]}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{sum(counts.values())} files ({counts}), {len(problems)} problems\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
