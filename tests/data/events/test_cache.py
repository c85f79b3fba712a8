"""The cache of event frames: checked at every load, and built anew if it is damaged, forged or of other files."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq.data.events import cache
from lbq.data.events.datasets import cache_folders
from lbq.errors import DataError


def built(count: int = 5, seed: int = 0) -> dict[str, list[cache.Sample]]:
    rng = np.random.default_rng(seed)
    return {
        part: [(rng.integers(0, 256, (2, 2, 3, 3), np.uint8), int(rng.integers(10))) for _ in range(n)]
        for part, n in (("train", count), ("test", 2))
    }


def cached(folder: Path, build: Callable[[], Any] = built, sources: str = "s", **parameters: Any) -> Any:
    return cache.cached([folder], "name", {"size": (3, 3), **parameters}, sources, build, (2, 2, 3, 3), 10)


def never(*arguments: Any, **named: Any) -> Any:
    raise AssertionError("decoded again")


def test_second_load_does_not_decode(tmp_path: Path) -> None:
    first = cached(tmp_path)
    second = cached(tmp_path, never)
    for part, samples in built().items():
        for loaded in (first[part], second[part]):
            assert isinstance(loaded.images, np.memmap)
            assert len(loaded) == len(samples)
            np.testing.assert_array_equal(loaded.images, np.stack([f for f, _ in samples]))
            assert loaded.labels.tolist() == [y for _, y in samples]


def test_cache_is_keyed_by_parameters_and_sources(tmp_path: Path) -> None:
    cached(tmp_path)
    assert len(cached(tmp_path, lambda: built(7), timesteps=3, by="count")["train"]) == 7
    assert len(list(tmp_path.iterdir())) == 2
    assert len(cached(tmp_path, never, by="count", timesteps=3)["train"]) == 7  # in any order
    assert len(cached(tmp_path, never)["train"]) == 5
    assert len(cached(tmp_path, lambda: built(6), sources="changed")["train"]) == 6
    assert len(list(tmp_path.iterdir())) == 2


def test_damage_anywhere_is_detected_and_mended(tmp_path: Path) -> None:
    cached(tmp_path)
    (entry,) = tmp_path.iterdir()
    rng = random.Random(0)
    content = entry.read_bytes()
    offsets = {0, len(content) - 1, *range(len(content) - 48, len(content) - 30), *rng.sample(range(len(content)), 30)}
    changes = [content[:i] + bytes([content[i] ^ 1 << rng.randrange(8)]) + content[i + 1 :] for i in offsets]
    for changed in [*changes, content[:-1], content[:10], b"", content + b"\0", b"[" * 10**5, None]:
        if changed is None:
            entry.unlink()
        else:
            entry.write_bytes(changed)
        calls: list[int] = []

        def build(calls: list[int] = calls) -> Any:
            calls.append(1)
            return built()

        parts = cached(tmp_path, build)
        assert calls, changed
        np.testing.assert_array_equal(parts["train"].images, np.stack([f for f, _ in built()["train"]]))
        assert list(tmp_path.iterdir()) == [entry]


def forged(frames: bytes, index: Any, length: int | None = None) -> bytes:
    """An entry with the checksum that belongs to it."""
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    body = frames + text + (len(text) if length is None else length).to_bytes(8, "little")
    return body + hashlib.sha256(body).digest()


def test_forged_entries_are_not_believed(tmp_path: Path) -> None:
    """A dataset's folder may come from anybody, the cache in it too: every label is a class, and every frame is there."""
    cached(tmp_path)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    size = 7 * 36
    frames, index = whole[:size], json.loads(whole[size:-40])
    assert forged(frames, whole[size:-40]) == whole
    train = index["labels"]["train"]
    wrong_labels: tuple[Any, ...] = (
        {},
        {"train": train},
        {"train": [*train[:4], 99], "test": [0, 1]},
        {"train": [*train[:4], -1], "test": [0, 1]},
        {"train": [*train[:4], 1.0], "test": [0, 1]},
        {"train": [*train[:4], True], "test": [0, 1]},
        {"train": train, "test": [0]},
        {"train": [*train, 1, 1], "test": []},
        {"train": "01234", "test": [0, 1]},
        {"train": 3, "test": [0, 1]},
        3,
    )
    for content in (
        *(forged(frames, {**index, "labels": labels}) for labels in wrong_labels),
        *(forged(frames, {**index, name: "other"}) for name in index),
        *(forged(frames, text) for text in (b"", b"[]", b"3", b"[" * 10**5, b"\xff")),
        *(forged(frames, index, length) for length in (0, 10**6, 2**64 - 1)),
        forged(frames[:-1], index),
        forged(b"", index),
        hashlib.sha256(b"").digest(),
    ):
        entry.write_bytes(content)
        parts = cached(tmp_path)
        np.testing.assert_array_equal(parts["train"].images, np.stack([f for f, _ in built()["train"]]))
        assert entry.read_bytes() == whole
    entry.unlink()
    os.mkfifo(entry)
    assert len(cached(tmp_path)["train"]) == 5


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> Any:
        def samples() -> Any:
            yield built()["train"][0]
            raise DataError("file 2 is damaged")

        return {"train": samples()}

    with pytest.raises(DataError, match="file 2 is damaged"):
        cached(tmp_path, fails)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="train part of the dataset has no samples"):
        cached(tmp_path, lambda: {"train": []})
    assert list(tmp_path.iterdir()) == []


def test_remains_of_killed_builds_are_removed_when_old(tmp_path: Path) -> None:
    cached(tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.unlink()
    old, new = (tmp_path / f".{entry.name}.{tag * 8}.partial" for tag in "ab")
    for leftover in (old, new):
        leftover.write_bytes(b"")
    os.utime(old, (0, 0))
    cached(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([new, entry])


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_failing_writes_are_named_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Whichever call to the system fails, at whatever time, the error is one line and the next load is right."""
    real_call = getattr(os, call)
    for k in range(30):
        seen = 0

        def fail(*arguments: Any, k: int = k, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == k + 1:
                raise OSError(28, "No space left on device")
            return real_call(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            try:
                parts = cached(tmp_path)
            except DataError as error:
                text = str(error)
                assert "No space left on device; give another folder" in text or "does not read back" in text
            else:
                assert len(parts["train"]) == 5
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        np.testing.assert_array_equal(cached(tmp_path)["train"].images, np.stack([f for f, _ in built()["train"]]))
        next(tmp_path.iterdir()).unlink()
        if seen <= k:
            break
    assert k > 0


def test_another_process_may_finish_first(tmp_path: Path) -> None:
    def slow() -> Any:
        cached(tmp_path)  # the other process, meanwhile
        return built(9)

    assert len(cached(tmp_path, slow)["train"]) == 9  # the last one stays
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_forgets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_load", lambda *_: None)
    with pytest.raises(DataError, match="does not read back as it was written"):
        cached(tmp_path)


def test_where_nothing_may_be_written_the_cache_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    beside, own = tmp_path / ".lbq-cache", tmp_path / "mine" / "lbq" / ("d" * 16)
    for made in (False, True):
        if made:
            beside.mkdir()  # by somebody who may
        assert cache_folders(tmp_path, "d" * 64) == [beside]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "access", lambda *_: False)
            assert cache_folders(tmp_path, "d" * 64) == [beside, own]


def test_an_entry_beside_the_data_is_used_and_others_are_kept_elsewhere(tmp_path: Path) -> None:
    beside, own = tmp_path / "beside", tmp_path / "own"
    cached(beside)

    def both(build: Callable[[], Any], **parameters: Any) -> Any:
        return cache.cached([beside, own], "name", {"size": (3, 3), **parameters}, "s", build, (2, 2, 3, 3), 10)

    assert len(both(never)["train"]) == 5
    assert not own.exists()
    assert len(both(lambda: built(7), timesteps=3)["train"]) == 7
    assert len(both(never, timesteps=3)["train"]) == 7
    assert [len(list(folder.iterdir())) for folder in (beside, own)] == [1, 1]
