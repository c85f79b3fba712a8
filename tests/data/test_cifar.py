"""CIFAR: both forms, archives, preparation; damaged and hostile files."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbq.data import cifar, cifar_files, folder, idx
from lbq.data.dataset import Dataset, moments
from lbq.errors import DataError
from tests.support.hosting import Host
from tests.support.reading import QUICK, RNG, memory_under, one_line, real, refused

# CIFAR: a small dataset in both forms, written as the official ones are


def py2_pickle(value: Any) -> bytes:
    """Protocol 2 as Python 2 wrote it: byte strings, and arrays through numpy.core.multiarray."""

    def put(value: Any) -> bytes:
        if isinstance(value, dict):
            return b"}(" + b"".join(put(key) + put(item) for key, item in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(put, value)) + b"e"
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if isinstance(value, bytes):
            return b"T" + struct.pack("<i", len(value)) + value
        array, (rows, columns) = value, value.shape
        return b"".join(
            [
                b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
                b"(K\x01" + put(rows) + put(columns) + b"\x86",
                b"cnumpy\ndtype\nU\x02u1\x89\x88\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
                (b"\x88" if array.flags.f_contiguous else b"\x89") + put(array.tobytes("A")) + b"tb",
            ]
        )

    return b"\x80\x02" + put(value) + b"."


class Tiny:
    """A dataset of `counts` images a file, in both forms, and the spec that describes it."""

    def __init__(self, name: str, counts: tuple[int, ...], labels: int) -> None:
        original, rng = cifar.SPECS[name], RNG(7)
        self.records = [
            np.concatenate(
                [rng.integers(0, 10, (n, labels), np.uint8), rng.integers(0, 256, (n, 3072), np.uint8)], axis=1
            )
            for n in counts
        ]
        order = "F" if labels == 2 else "C"
        self.binary = [records.tobytes() for records in self.records]
        self.python = [
            py2_pickle(
                {
                    b"data": np.array(records[:, labels:], order=order),  # type: ignore[call-overload]
                    **{key: records[:, i].tolist() for i, key in enumerate(original.label_keys)},
                    b"batch_label": b"batch of 5",
                }
            )
            for records in self.records
        ]
        self.spec = replace(
            original, binary=self.form(original.binary, self.binary), python=self.form(original.python, self.python)
        )

    @staticmethod
    def form(form: cifar_files.Form, contents: list[bytes]) -> cifar_files.Form:
        files = tuple(
            cifar_files.File(file.name, hashlib.md5(data).hexdigest(), len(data))
            for file, data in zip(form.files, contents, strict=True)
        )
        packed = archive(form, contents)
        whole = cifar_files.File(form.archive.name, hashlib.md5(packed).hexdigest(), len(packed))
        return replace(form, archive=whole, files=files)

    def put(self, root: Path, form: str, packed: bool) -> Path:
        """Write one form into `root`; where it is."""
        of, contents = (self.spec.binary, self.binary) if form == "binary" else (self.spec.python, self.python)
        root.mkdir(parents=True, exist_ok=True)
        if packed:
            (root / of.archive.name).write_bytes(archive(of, contents))
            return root / of.archive.name
        for file, data in zip(of.files, contents, strict=True):
            (root / file.name).write_bytes(data)
        return root

    def check(self, data: Dataset) -> None:
        images = np.concatenate([records[:, -3072:] for records in self.records]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([records[:, -3073] for records in self.records])
        split = len(labels) - len(self.records[-1])
        assert np.array_equal(data.train.images, images[:split])
        assert np.array_equal(data.test.images, images[split:])
        assert np.array_equal(data.train.labels, labels[:split])
        assert np.array_equal(data.test.labels, labels[split:])


def archive(form: cifar_files.Form, contents: list[bytes], extra: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w|") as tar,
    ):
        for info in extra:
            tar.addfile(info)
        for file, data in zip(form.files, contents, strict=True):
            info = tarfile.TarInfo(f"{form.folder}/{file.name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture(scope="module")
def tinies() -> dict[str, Tiny]:
    return {"cifar10": Tiny("cifar10", (3, 2, 4, 3, 2, 5), 1), "cifar100": Tiny("cifar100", (8, 4), 2)}


@pytest.fixture
def tiny(tinies: dict[str, Tiny], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tiny]:
    monkeypatch.setattr(cifar, "SPECS", {name: tiny.spec for name, tiny in tinies.items()})
    return tinies


LOADERS = {"cifar10": cifar.load_cifar10, "cifar100": cifar.load_cifar100}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_from_every_form(tiny: dict[str, Tiny], tmp_path: Path, name: str, form: str, packed: bool) -> None:
    below = "cifar-10-batches-py" if packed else ""
    where = tiny[name].put(tmp_path / below, form, packed)
    (tmp_path / "other").mkdir()
    data = LOADERS[name](tmp_path)
    tiny[name].check(data)
    assert data.inputs.name == name
    assert str(where) in data.source
    assert data.train.images.flags.c_contiguous
    assert data.train.images.flags.writeable


def test_missing_cifar_says_what_to_do(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError) as error:
            cifar.load_cifar10(root)
        text = one_line(error)
        assert f"`lbq data cifar10 --root {root}`" in text
        assert "cifar-10-binary.tar.gz (md5 c32a1d4ab5d03f1284b67883e8d87530)" in text
        assert "cifar-10-python.tar.gz (md5 c58f30108f718f92721af3b95e74349a)" in text
        assert "https://www.cs.toronto.edu/~kriz/cifar.html" in text
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file is not a folder"):
        cifar.load_cifar100(tmp_path / "file")


def test_the_folder_of_the_other_cifar_is_named(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    for packed in (False, True):
        other = tmp_path / f"other{packed}"
        tiny["cifar100"].put(other, "python", packed)
        for read in (cifar.load_cifar10, lambda root: cifar.prepare_cifar("cifar10", tmp_path / "new", root)):
            with pytest.raises(DataError, match=r"other.* holds CIFAR-100: give the folder of CIFAR-10$"):
                read(other)
    (tmp_path / "otherFalse" / "test").unlink()  # what is not whole is not the other one either
    with pytest.raises(DataError, match="CIFAR-10 is not in .*otherFalse: run `lbq data cifar10"):
        cifar.load_cifar10(tmp_path / "otherFalse")
    with pytest.raises(DataError, match=r"run `lbq data cifar10 --root '.*/my data'`"):
        cifar.load_cifar10(tmp_path / "my data")


def test_incomplete_and_damaged_cifar_is_named(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    root = tiny["cifar10"].put(tmp_path / "cifar-10-batches-bin", "binary", False)
    good = (root / "data_batch_3.bin").read_bytes()
    (root / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"batches-bin lacks data_batch_3.bin of CIFAR-10: unpack cifar-10-binary.tar"):
        cifar.load_cifar10(tmp_path)
    for bad, message in (
        (good[:-1], f"data_batch_3.bin has {len(good) - 1} bytes instead of {len(good)}"),
        (good + b"x", f"has {len(good) + 1} or more bytes instead of {len(good)}"),
        (
            good[:-1] + bytes([good[-1] ^ 1]),
            "data_batch_3.bin is damaged or another file: md5 .* instead of .*; get the official",
        ),
    ):
        (root / "data_batch_3.bin").write_bytes(bad)
        with refused(message):
            cifar.load_cifar10(tmp_path)


def test_unreadable_files_are_named(tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny["cifar10"].put(tmp_path, "binary", False)

    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    calls: list[tuple[Any, str, Callable[[], object]]] = [
        (Path, "open", lambda: cifar.load_cifar10(tmp_path)),
        (Path, "iterdir", lambda: cifar.load_cifar10(tmp_path)),
        (Path, "is_file", lambda: cifar.load_cifar10(tmp_path)),
        (Path, "is_file", lambda: cifar.prepare_cifar("cifar10", tmp_path / "new", tmp_path)),
        (Path, "iterdir", lambda: idx.load_idx(tmp_path, "mnist")),
        (os, "scandir", lambda: folder.scan_folder(tmp_path)),
    ]
    for owner, method, read in calls:
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, refuse)
            with pytest.raises(DataError, match="cannot read .*: Permission denied"):
                read()


def test_an_unverified_pickle_is_never_opened(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "owned",)

    evil = pickle.dumps(Evil(), 2)
    root = tiny["cifar100"].put(tmp_path / "data", "python", False)
    size = tiny["cifar100"].spec.python.files[-1].size
    (root / "test").write_bytes(evil + bytes(size - len(evil)))
    with pytest.raises(DataError, match="test is damaged or another file: md5"):
        cifar.load_cifar100(root)
    assert not (tmp_path / "owned").exists()


def refused_pickles() -> dict[str, tuple[bytes, str]]:
    rows = RNG(0).integers(0, 256, (2, 3072), np.uint8)
    good = py2_pickle({b"labels": [1, 2], b"data": rows})
    return {
        "global": (b"\x80\x02cos\nsystem\nU\x04true\x85R.", "asks for os.system"),
        "builtins": (pickle.dumps(print, 2), "asks for __builtin__.print"),
        "numpy": (b"\x80\x02cnumpy\nload\n.", "asks for numpy.load"),
        "dtype": (good.replace(b"U\x02u1", b"U\x02O8"), "array of type b'O8'"),
        "no type": (b"\x80\x02cnumpy\nndarray\n)R(K\x01K\x01\x85NI00\nU\x01xtb.", "no known type"),
        "no labels": (py2_pickle({b"data": rows}), "labels"),
        "no dictionary": (py2_pickle([1, 2]), "indices"),
        "list as data": (py2_pickle({b"labels": [1, 2], b"data": [1, 2]}), "values"),
        "narrow": (py2_pickle({b"labels": [1, 2], b"data": rows[:, :3000]}), "reshape"),
        "few labels": (py2_pickle({b"labels": [1], b"data": rows}), "dimensions"),
        "label too large": (py2_pickle({b"labels": [1, 256], b"data": rows}), "256"),
        "cut": (good[:-3000], "truncated"),
        "empty": (b"", "Ran out of input"),
    }


@pytest.mark.parametrize("case", refused_pickles())
def test_even_a_verified_pickle_calls_nothing(
    tinies: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The check of the digest is switched off here: the unpickler has to refuse by itself."""
    data, message = refused_pickles()[case]
    spec = tinies["cifar10"].spec
    forms = Tiny.form(spec.python, [data] * 6)
    monkeypatch.setattr(cifar, "SPECS", {"cifar10": replace(spec, python=forms)})
    for file in forms.files:
        (tmp_path / file.name).write_bytes(data)
    with refused(f"data_batch_1 is no batch of CIFAR-10 .*{message}"):
        cifar.load_cifar10(tmp_path)


def test_hostile_archives(tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, contents = tiny["cifar10"].spec.binary, tiny["cifar10"].binary
    path = tmp_path / form.archive.name
    link = tarfile.TarInfo("x/data_batch_1.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    climbing = tarfile.TarInfo("../../data_batch_9.bin")
    path.write_bytes(archive(form, contents, (link, climbing)))
    before = sorted(tmp_path.parent.rglob("*"))
    tiny["cifar10"].check(cifar.load_cifar10(tmp_path))  # neither the link nor the path does anything
    assert sorted(tmp_path.parent.rglob("*")) == before

    good = archive(form, contents)
    for bad, message in (
        (good[: len(good) // 2], "cannot be read .*end"),
        (good[:40] + b"\xff" * 40 + good[80:], "cannot be read"),
        (b"", "cannot be read"),
        (b"not an archive", "cannot be read .*gzip"),
        (gzip.compress(b"x" * 2000), "cannot be read"),
        (archive(form, [contents[0][:-1], *contents[1:]]), "data_batch_1.bin has .* bytes instead of"),
        (archive(form, [contents[0] + b"x", *contents[1:]]), "data_batch_1.bin has .* or more bytes instead of"),
        (archive(form, [contents[1], contents[0], *contents[2:]]), "data_batch_1.bin has"),
        (archive(replace(form, files=form.files[1:]), contents[1:]), "does not hold CIFAR-10: expected cifar-10-bin"),
        (archive(tiny["cifar100"].spec.binary, tiny["cifar100"].binary), "does not hold CIFAR-10"),
    ):
        path.write_bytes(bad)
        with refused(f"{form.archive.name}.*{message}"):
            cifar.load_cifar10(tmp_path)
    big = tarfile.TarInfo("big")
    big.size = 1 << 40
    path.write_bytes(gzip.compress(big.tobuf() + bytes(50_000_000), 1))
    monkeypatch.setattr(cifar, "MAX_UNPACKED_BYTES", 5_000_000)
    with memory_under(20_000_000), pytest.raises(DataError, match=r"cannot be read as .tar.gz \(too large"):
        cifar.load_cifar10(tmp_path)


@QUICK
@given(data=st.data())
def test_a_changed_archive_is_refused_or_still_right(
    tinies: dict[str, Tiny], tmp_path: Path, data: st.DataObject
) -> None:
    tiny = tinies["cifar100"]
    form = tiny.spec.binary
    packed = bytearray(gzip.decompress(archive(form, tiny.binary)))
    header = st.integers(0, 511)
    body = st.integers(0, len(packed) - 1)
    for at in data.draw(st.lists(header | body, min_size=1, max_size=5)):
        packed[at] = data.draw(st.integers(0, 255))
    (tmp_path / form.archive.name).write_bytes(gzip.compress(packed, 1))
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(DataError):
        patch.setattr(cifar, "SPECS", {"cifar100": tiny.spec})
        tiny.check(cifar.load_cifar100(tmp_path))


# prepare_cifar


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "form"), [("cifar10", "binary"), ("cifar100", "python")])
def test_prepare_from_a_local_copy(tiny: dict[str, Tiny], tmp_path: Path, name: str, form: str, packed: bool) -> None:
    source = tiny[name].put(tmp_path / "source", form, packed)
    if packed:
        source = source.rename(source.with_name("some.download"))  # its name does not matter
    steps: list[tuple[int, int | None]] = []
    root = tmp_path / "deep" / "root"
    where = cifar.prepare_cifar(name, root, source, lambda done, total: steps.append((done, total)))
    binary = tiny[name].spec.binary
    assert where == root / binary.folder
    assert [(where / file.name).read_bytes() for file in binary.files] == tiny[name].binary
    assert [path.name for path in root.iterdir()] == [binary.folder]
    total = sum(map(len, tiny[name].binary))
    assert steps[-1] == (total, total)
    assert len(steps) == len(binary.files)
    tiny[name].check(LOADERS[name](root))
    assert cifar.prepare_cifar(name, root, None) == where  # there already: no download is tried
    (where / binary.files[-1].name).write_bytes(b"broken")
    with pytest.raises(DataError, match=f"{binary.files[-1].name} has 6 bytes instead"):
        cifar.prepare_cifar(name, root, source)


def test_prepare_leaves_nothing_half_done(
    tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny["cifar10"].put(tmp_path / "source", "python", False)
    root = tmp_path / "root"
    (source / "test_batch").write_bytes(b"")
    with pytest.raises(DataError, match="test_batch has 0 bytes"):
        cifar.prepare_cifar("cifar10", root / "deep", source)
    assert not root.exists()  # nor what was made on the way
    root.mkdir()
    tiny["cifar10"].put(source, "python", False)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"cannot write .*data_batch_1\.bin: No space left"):
            cifar.prepare_cifar("cifar10", root, source)
    assert list(root.iterdir()) == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="CIFAR-10 is not in .*empty: give cifar-10-binary.tar.gz, "):
        cifar.prepare_cifar("cifar10", root, tmp_path / "empty")


def test_prepare_by_download(
    tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host
) -> None:
    host.body = archive(tiny["cifar10"].spec.binary, tiny["cifar10"].binary)
    monkeypatch.setattr(cifar, "HOME", host.url.removesuffix("file"))
    steps: list[int] = []
    where = cifar.prepare_cifar("cifar10", tmp_path, progress=lambda done, _: steps.append(done))
    assert host.paths == ["/cifar-10-binary.tar.gz"]
    assert steps[-1] == len(host.body)
    assert [path.name for path in tmp_path.iterdir()] == [where.name] == ["cifar-10-batches-bin"]
    tiny["cifar10"].check(cifar.load_cifar10(tmp_path))


# Real CIFAR


def test_real_cifar10() -> None:
    data = cifar.load_cifar10(real("cifar10"))
    check_real(data, 10)
    assert data.test.labels[:5].tolist() == [3, 8, 8, 0, 6]  # the famous cat, ships and frog
    assert data.checksum == "9048fcbac9c08a64d57a7c5a5a66750a974ad4eab380914df129f7e223d823df"


def test_real_cifar100(tmp_path: Path) -> None:
    root = real("cifar100")
    data = cifar.load_cifar100(root)
    check_real(data, 100)
    names = pickle.loads((root / "meta").read_bytes(), encoding="bytes") if (root / "meta").is_file() else None
    if names is not None:
        assert [name.decode() for name in names[b"fine_label_names"]] == list(data.inputs.classes)
    where = cifar.prepare_cifar("cifar100", tmp_path, root)  # to the binary form, whose digests are known
    assert sorted(path.name for path in where.iterdir()) == ["test.bin", "train.bin"]
    assert cifar.load_cifar100(tmp_path).checksum == data.checksum
    for path in where.iterdir():
        path.unlink()


def check_real(data: Dataset, classes: int) -> None:
    assert data.train.images.shape == (50000, 3, 32, 32)
    assert data.test.images.shape == (10000, 3, 32, 32)
    assert np.bincount(data.train.labels).tolist() == [50000 // classes] * classes
    assert np.bincount(data.test.labels).tolist() == [10000 // classes] * classes
    assert len(set(data.inputs.classes)) == classes
    mean, std = moments(data.train.images)
    assert data.inputs.mean == tuple(round(value, 4) for value in mean)
    assert data.inputs.std == tuple(round(value, 4) for value in std)
