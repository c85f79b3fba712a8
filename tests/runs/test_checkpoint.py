"""Checkpoint files: whole or refused. Bits flipped, files cut, foreign files, full disks."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from lbq.errors import RunError
from lbq.runs import checkpoint
from tests.support import small_runs
from tests.support.small_runs import tensor_bytes

Stored = tuple[dict[str, Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def two_states() -> tuple[Stored, Stored]:
    """A trainer's state after one step and after two, of a network of one block: hundreds of times it is read."""
    states: list[Stored] = []

    def keep(_trainer: object) -> bool:
        tensors, values = made.state()
        states.append(({k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(values))))
        return len(states) == 2

    made = small_runs.trainer(small_runs.config("optim.name=adamw", small_runs.TINY), between_steps=keep)
    list(made.fit())
    return states[0], states[1]


@pytest.fixture
def saved(tmp_path: Path, two_states: tuple[Stored, Stored]) -> Path:
    """A folder with both: `previous` after one step, `last` after two."""
    for tensors, values in two_states:
        checkpoint.save(tmp_path, tensors, values)
    return tmp_path


def load(folder: Path) -> checkpoint.Loaded:
    loaded = checkpoint.load(folder)
    assert loaded is not None
    return loaded


def same(loaded: checkpoint.Loaded, state: Stored) -> bool:
    return tensor_bytes(loaded.tensors) == tensor_bytes(state[0]) and loaded.values == state[1]


def test_last_and_previous(saved: Path, two_states: tuple[Stored, Stored]) -> None:
    assert sorted(p.name for p in saved.iterdir()) == [checkpoint.LAST, checkpoint.PREVIOUS]
    loaded = load(saved)
    assert same(loaded, two_states[1])
    assert not same(loaded, two_states[0])
    assert (loaded.path, loaded.skipped) == (saved / checkpoint.LAST, ())
    (saved / checkpoint.LAST).unlink()  # killed between the two renames
    loaded = load(saved)
    assert same(loaded, two_states[0])
    assert checkpoint.load(saved / "nowhere") is None


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.no_cover  # hypothesis lists all of Unicode first
@given(data=st.data())
@settings(max_examples=40)
def test_any_tree_comes_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
    names = names.filter(lambda name: name != "__metadata__")
    shapes = st.lists(st.integers(0, 3), max_size=3)
    made = data.draw(st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPES)), max_size=5))
    tensors = {name: (torch.randn(shape) * 100).to(dtype) for name, (shape, dtype) in made.items()}
    numbers = (
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    )
    values = data.draw(st.dictionaries(names, numbers | st.lists(numbers, max_size=3) | names, max_size=4))
    folder = tmp_path_factory.mktemp("tree")
    checkpoint.save(folder, tensors, values)
    loaded = load(folder)
    assert loaded.values == values
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor)


def test_views_and_layouts_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    tensors = {"a": base, "view": base[1:], "last": base.to(memory_format=torch.channels_last), "t": base[0, 0].T}
    checkpoint.save(tmp_path, tensors, {})
    base.zero_()  # what is stored is a copy
    loaded = load(tmp_path)
    expected = torch.arange(24.0).reshape(2, 3, 2, 2)
    assert torch.equal(loaded.tensors["view"], expected[1:])
    assert torch.equal(loaded.tensors["last"], expected)
    assert torch.equal(loaded.tensors["t"], expected[0, 0].T)


def test_flipped_bits_and_cuts_never_give_wrong_numbers(saved: Path, two_states: tuple[Stored, Stored]) -> None:
    """200 and 50. Half of the offsets are in the header, where a file has its structure."""
    path = saved / checkpoint.LAST
    good = path.read_bytes()
    header = 8 + struct.unpack("<Q", good[:8])[0]
    draw = random.Random(0)
    offsets = [*range(8), *(draw.randrange(8, header) for _ in range(92)), header - 1, len(good) - 1]
    offsets += [draw.randrange(header, len(good)) for _ in range(200 - len(offsets))]
    assert len(offsets) == 200
    lengths = [0, 1, 7, 8, 9, 100, len(good) - 1, len(good) - 8]
    lengths += [draw.randrange(len(good)) for _ in range(50 - len(lengths))]
    contents = [
        good[:offset] + bytes([good[offset] ^ 1 << draw.randrange(8)]) + good[offset + 1 :] for offset in offsets
    ]
    for damaged in (*contents, *(good[:length] for length in lengths), good + b"\0"):  # and a byte too many
        path.write_bytes(damaged)
        loaded = load(saved)
        assert same(loaded, two_states[0])  # the one before
        assert loaded.path.name == checkpoint.PREVIOUS
        assert len(loaded.skipped) == 1
        assert str(path) in loaded.skipped[0]
        assert "\n" not in loaded.skipped[0]


def test_both_damaged_names_both(saved: Path) -> None:
    for name in (checkpoint.LAST, checkpoint.PREVIOUS):
        damaged = bytearray((saved / name).read_bytes())
        damaged[-1] ^= 1
        (saved / name).write_bytes(damaged)
    with pytest.raises(RunError, match=r"last\.safetensors is damaged.*previous\.safetensors is damaged") as caught:
        checkpoint.load(saved)
    assert "\n" not in str(caught.value)


def test_only_a_damaged_last_is_set_aside(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = saved / checkpoint.LAST
    whole = last.read_bytes()
    last.unlink()  # as if the process had been killed between two renames
    loaded = load(saved)
    checkpoint.set_aside(loaded)
    assert [path.name for path in saved.iterdir()] == [checkpoint.PREVIOUS]
    last.write_bytes(whole[:-1])
    loaded = load(saved)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(RunError, match=r"cannot rename .*: Read-only file system"):
            checkpoint.set_aside(loaded)
    checkpoint.set_aside(loaded)
    assert {path.name for path in saved.iterdir()} == {checkpoint.PREVIOUS, "damaged.safetensors"}


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_the_checksum_is_of_names_types_shapes_bytes_and_values() -> None:
    x = torch.zeros(2, 3)
    states = [
        ({"x": x}, "{}"),
        ({"y": x}, "{}"),
        ({"x": x.int()}, "{}"),
        ({"x": x.T}, "{}"),
        ({"x": x + 1}, "{}"),
        ({"x": x}, ""),
    ]
    assert len({checkpoint.digest(*state) for state in states}) == len(states)


def claimed_header(length: int, body: bytes = b"{}") -> bytes:
    return struct.pack("<Q", length) + body


def header_only(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return claimed_header(len(text), text)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "plain": lambda path: save_file({"x": torch.zeros(3)}, path),
    "weights": lambda path: save_file({"model/fc.weight": torch.zeros(3)}, path, {"format": "pt"}),
    "later": lambda path: save_file({}, path, {"format": "lbq-checkpoint-2", "values": "{}", "sha256": ""}),
    "no-checksum": lambda path: save_file({}, path, {"format": checkpoint.FORMAT, "values": "{}"}),
    "values-no-json": lambda path: save_file(
        {}, path, {"format": checkpoint.FORMAT, "values": "{", "sha256": checkpoint.digest({}, "{")}
    ),
    "values-no-table": lambda path: save_file(
        {}, path, {"format": checkpoint.FORMAT, "values": "[1]", "sha256": checkpoint.digest({}, "[1]")}
    ),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"model": [1, 2, 3]})),
    "torch-save": lambda path: torch.save({"x": torch.zeros(3)}, path),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("seed = 0\n"),
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "huge-header": lambda path: path.write_bytes(claimed_header(2**63 - 1)),
    "large-header": lambda path: path.write_bytes(claimed_header(99_000_000)),
    "large-tensor": lambda path: path.write_bytes(
        header_only({"x": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}})
    ),
    "overflow": lambda path: path.write_bytes(
        header_only({"x": {"dtype": "F64", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}) + bytes(8)
    ),
    "strange-type": lambda path: path.write_bytes(
        header_only({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}) + bytes(1)
    ),
    "deep": lambda path: path.write_bytes(claimed_header(200_000, b"[" * 200_000)),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "not-utf-8": lambda path: path.write_bytes(claimed_header(4, b"{\xff\xfe}")),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused(kind: str, tmp_path: Path, two_states: tuple[Stored, Stored]) -> None:
    path = tmp_path / checkpoint.LAST
    FOREIGN[kind](path)
    with pytest.raises(RunError, match=r"last\.safetensors") as caught:
        checkpoint.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    checkpoint.save(tmp_path / "other", two_states[0][0], {})
    (tmp_path / "other" / checkpoint.LAST).rename(tmp_path / checkpoint.PREVIOUS)
    assert same(load(tmp_path), (two_states[0][0], {}))


def test_a_checkpoint_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write .*file/checkpoints/last.safetensors: Not a directory"):
        checkpoint.save(tmp_path / "file" / "checkpoints", {}, {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpoint.save(tmp_path, {}, {"loss": float("nan")})
    checkpoint.save(tmp_path, {"x": torch.ones(2)}, {"n": 1})

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device; free some space"):
        checkpoint.save(tmp_path, {"x": torch.zeros(2)}, {"n": 2})
    loaded = load(tmp_path)
    assert loaded.values == {"n": 1}
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".partial")] == []


def test_a_failed_clean_up_does_not_hide_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(RunError, match="cannot write .*: Read-only file system"):
        checkpoint.save(tmp_path, {}, {})
