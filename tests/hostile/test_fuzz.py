"""The fuzzer finds planted faults, and what it once found is still refused or right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lbq import engine
from lbq.data import arrays
from lbq.engine.file.reading import Reader
from tests.fuzz.__main__ import FOUND, expected_of, fuzz, wrong
from tests.fuzz.subjects import SUBJECTS, Subject
from tests.support.small_runs import use_few_digits

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limits of its children need Linux")


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Subjects with their expected results, each made when it is first asked for."""
    made: dict[str, tuple[Subject, str, Path]] = {}

    def get(kind: str) -> tuple[Subject, str, Path]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            subject = SUBJECTS[kind](folder)
            made[kind] = subject, expected_of(subject, folder), folder
        return made[kind]

    with pytest.MonkeyPatch.context() as patch:
        use_few_digits(patch)
        yield get


@pytest.mark.parametrize("path", sorted(FOUND.iterdir()), ids=lambda path: path.name)
def test_what_was_found_once(path: Path, subjects: Any) -> None:
    subject, expected, _ = subjects(path.name.partition("-")[0])
    assert wrong(subject, expected, path, 60.0) is None


def careless_units(_: Reader, value: Any, where: str, channels: int) -> Any:
    import numpy as np

    return np.array([float(v) for v in value[:channels]])  # whatever they are


def unverified(self: engine.Network, *_: Any) -> int:
    return 0  # says that all is well


def endless(*_: Any) -> Any:
    while True:
        time.sleep(1)


@pytest.mark.parametrize(
    ("kind", "where", "name", "fault", "problem", "seeds"),
    [
        ("artefact", Reader, "_unit", careless_units, "traceback", 90),
        ("artefact", engine.Network, "verify", unverified, "other result", 90),
        ("data", arrays, "_unreadable", endless, "hang", 50),
    ],
)
def test_planted_faults_are_noticed(
    kind: str,
    where: Any,
    name: str,
    fault: Any,
    problem: str,
    seeds: int,
    subjects: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject, expected, folder = subjects(kind)
    monkeypatch.setattr(where, name, fault)
    seconds = 1.0 if problem == "hang" else 60.0
    for _, _, noticed in fuzz(subject, expected, folder, range(seeds), seconds):
        if noticed is not None:
            assert noticed[0] == problem
            return
    raise AssertionError(f"{seeds} files did not show it")
