"""Readers of image datasets: common form, CIFAR, idx files, image folders, downloads; hostile files among them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import math
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
import tracemalloc
import warnings
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from lbq.data import base, cifar, download, folder, idx
from lbq.data.base import Dataset, Images
from lbq.errors import DataError

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RNG = np.random.default_rng


def real(name: str) -> Path:
    """A folder of real data, where there is one."""
    path = Path(os.environ.get("LBQ_DATA", "")) / name
    if not os.environ.get("LBQ_DATA") or not path.is_dir():
        pytest.skip(f"set LBQ_DATA to a folder that holds {name} to test on real data")
    return path


@contextlib.contextmanager
def memory_under(limit: int) -> Iterator[None]:
    """Peak of what Python and NumPy allocate inside, in bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_readers_need_neither_torch_nor_pillow() -> None:
    code = (
        "import sys, lbq.data.base, lbq.data.cifar, lbq.data.download, lbq.data.folder, lbq.data.idx;"
        "sys.exit(bool({'torch', 'PIL'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The common form


def some_images(count: int = 6, **changes: Any) -> Images:
    pixels = RNG(0).integers(0, 256, (count, 3, 4, 5), np.uint8)
    labels = np.arange(count, dtype=np.int64) % 2
    fields = {"images": pixels, "labels": labels, "classes": ("a", "b"), "mean": (0.5,) * 3, "std": (0.2,) * 3}
    return Images(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((6, 3, 4), np.uint8)}, r"uint8 \[N, C, H, W\], not uint8 \[6, 3, 4\]"),
        ({"images": np.zeros((6, 3, 4, 5), np.float32)}, "not float32"),
        ({"labels": np.zeros(6, np.int32)}, "labels must be int64"),
        ({"labels": np.zeros((6, 1), np.int64)}, r"int64 \[6, 1\]"),
        ({"labels": np.zeros(5, np.int64)}, "6 images but 5 labels"),
        ({"labels": np.full(6, 2)}, r"in 0..1 for 2 classes, but run from 2 to 2"),
        ({"labels": np.full(6, -1)}, "run from -1"),
        ({"mean": (0.5,)}, "each of 3 channels, not 1 and 3"),
        ({"std": (0.2, 0.2)}, "not 3 and 2"),
        ({"std": (0.2, 0.0, 0.2)}, "std must be above 0"),
        ({"std": (0.2, math.nan, 0.2)}, "std must be above 0"),
        ({"scale": 0}, "scale must be in 1..255"),
        ({"scale": 16}, "scale is 16, but pixels reach"),
    ],
)
def test_images_check_what_they_hold(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        some_images(**changes)


def test_subsets_keep_order_and_facts() -> None:
    images = some_images(scale=255)
    chosen = images.subset([4, 1, 1])
    assert len(chosen) == 3
    assert np.array_equal(chosen.images, images.images[[4, 1, 1]])
    assert chosen.labels.tolist() == [0, 1, 1]
    assert (chosen.classes, chosen.mean, chosen.scale) == (images.classes, images.mean, images.scale)
    assert np.array_equal(images.subset(images.labels == 1).images, images.images[1::2])
    assert len(images.subset([])) == 0


def test_checksum_is_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = some_images(6), some_images(4)
    expected = hashlib.sha256()
    for part in (train, test):
        expected.update(part.images.tobytes())
        expected.update(part.labels.tobytes())
    assert base.checksum(train, test) == expected.hexdigest()
    monkeypatch.setattr(base, "CHUNK", 100)  # several parts, not a multiple of an image
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=train.images.shape)
    mapped[:] = train.images
    views = Images(mapped[::-1][::-1], train.labels, train.classes, train.mean, train.std)
    assert base.checksum(views, test) == expected.hexdigest()
    pixels = train.images.copy()
    pixels[5, 2, 3, 4] ^= 1
    assert base.checksum(replace(train, images=pixels), test) != expected.hexdigest()


def test_a_dataset_is_of_one_kind() -> None:
    train = some_images()
    data = Dataset.build("x", train, train.subset([1]), "here")
    assert data.checksum == base.checksum(train, train.subset([1]))
    for test, what in (
        (some_images(classes=("a", "c")), "classes"),
        (some_images(images=np.zeros((6, 3, 4, 4), np.uint8)), "image shapes"),
        (some_images(mean=(0.4,) * 3), "mean, std and scale"),
    ):
        with pytest.raises(DataError, match=f"x: {what} of train and test differ"):
            Dataset.build("x", train, test, "here")
    with pytest.raises(DataError, match="checksum must be 64"):
        Dataset("x", train, train, "here", "abc")


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
    def form(form: cifar.Form, contents: list[bytes]) -> cifar.Form:
        *train, test = (
            cifar.File(file.name, hashlib.md5(data).hexdigest(), len(data))
            for file, data in zip(form.files, contents, strict=True)
        )
        packed = archive(form, contents)
        whole = cifar.File(form.archive.name, hashlib.md5(packed).hexdigest(), len(packed))
        return replace(form, archive=whole, train=tuple(train), test=test)

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


def archive(form: cifar.Form, contents: list[bytes], extra: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
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


def test_the_test_pickles_are_what_numpy_wrote(tinies: dict[str, Tiny]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old module name
        batch = pickle.loads(tinies["cifar100"].python[0], encoding="bytes")
    assert batch[b"data"].flags.f_contiguous
    assert np.array_equal(batch[b"data"], tinies["cifar100"].records[0][:, 2:])


@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_from_every_form(
    tiny: dict[str, Tiny], tmp_path: Path, name: str, form: str, packed: bool, below: str
) -> None:
    where = tiny[name].put(tmp_path / below, form, packed)
    (tmp_path / "other").mkdir()
    data = LOADERS[name](tmp_path)
    tiny[name].check(data)
    assert data.name == name
    assert str(where) in data.source
    assert data.checksum == base.checksum(data.train, data.test)
    assert data.train.images.flags.c_contiguous
    assert data.train.images.flags.writeable


def test_cifar_forms_have_one_checksum(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    sums = set()
    for form in ("binary", "python"):
        for packed in (False, True):
            tiny["cifar100"].put(tmp_path / f"{form}{packed}", form, packed)
            sums.add(cifar.load_cifar100(tmp_path / f"{form}{packed}").checksum)
    assert len(sums) == 1


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
        with pytest.raises(DataError, match=message) as error:
            cifar.load_cifar10(tmp_path)
        one_line(error)


def test_unreadable_files_are_named(tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny["cifar10"].put(tmp_path, "binary", False)

    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for method in ("open", "iterdir", "is_file"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            with pytest.raises(DataError, match="cannot read .*: Permission denied"):
                cifar.load_cifar10(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", refuse)
        with pytest.raises(DataError, match="cannot read .*: Permission denied"):
            cifar.prepare_cifar("cifar10", tmp_path / "new", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        with pytest.raises(DataError, match="cannot read .*: Permission denied"):
            idx.load_idx(tmp_path, "mnist")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(DataError, match="cannot read .*: Permission denied"):
            folder.scan_split(tmp_path)


def test_an_unverified_pickle_is_never_opened(tiny: dict[str, Tiny], tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "owned",)

    evil = pickle.dumps(Evil(), 2)
    root = tiny["cifar100"].put(tmp_path / "data", "python", False)
    size = tiny["cifar100"].spec.python.test.size
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
    with pytest.raises(DataError, match=f"data_batch_1 is no batch of CIFAR-10 .*{message}") as error:
        cifar.load_cifar10(tmp_path)
    one_line(error)


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
        (archive(replace(form, train=form.train[1:]), contents[1:]), "does not hold CIFAR-10: expected cifar-10-bin"),
        (archive(tiny["cifar100"].spec.binary, tiny["cifar100"].binary), "does not hold CIFAR-10"),
    ):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=f"{form.archive.name}.*{message}") as error:
            cifar.load_cifar10(tmp_path)
        one_line(error)
    big = tarfile.TarInfo("big")
    big.size = 1 << 40
    path.write_bytes(gzip.compress(big.tobuf() + bytes(50_000_000), 1))
    monkeypatch.setattr(cifar, "MAX_UNPACKED", 5_000_000)
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
@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
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
    (where / binary.test.name).write_bytes(b"broken")
    with pytest.raises(DataError, match=f"{binary.test.name} has 6 bytes instead"):
        cifar.prepare_cifar(name, root, source)


def test_prepare_leaves_nothing_half_done(
    tiny: dict[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny["cifar10"].put(tmp_path / "source", "python", False)
    root = tmp_path / "root"
    (source / "test_batch").write_bytes(b"")
    with pytest.raises(DataError, match="test_batch has 0 bytes"):
        cifar.prepare_cifar("cifar10", root, source)
    assert list(root.iterdir()) == []
    tiny["cifar10"].put(source, "python", False)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="cannot write .*cifar-10-batches-bin: No space left"):
            cifar.prepare_cifar("cifar10", root, source)
    assert list(root.iterdir()) == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="CIFAR-10 is not in .*empty: give cifar-10-binary.tar.gz, "):
        cifar.prepare_cifar("cifar10", root, tmp_path / "empty")
    with pytest.raises(DataError, match="unknown dataset 'cifar11'; did you mean 'cifar10'"):
        cifar.prepare_cifar("cifar11", root)


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
        assert [name.decode() for name in names[b"fine_label_names"]] == list(data.train.classes)
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
    assert len(set(data.train.classes)) == classes
    for channel in range(3):
        counts = np.bincount(data.train.images[:, channel].ravel(), minlength=256)
        pixels = np.arange(256) / 255
        mean = np.average(pixels, weights=counts)
        deviation = math.sqrt(np.average((pixels - mean) ** 2, weights=counts))
        assert data.train.mean[channel] == round(mean, 4)
        assert data.train.std[channel] == round(deviation, 4)


# idx files


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">2xBB{array.ndim}I", 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(root: Path, zipped: bool = True, dash: str = "-") -> tuple[list[NDArray[np.uint8]], list[Path]]:
    rng = RNG(3)
    arrays, paths = [], []
    root.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 30), ("t10k", 7)):
        for what, shape, top in (("images-idx3", (count, 6, 5), 256), ("labels-idx1", (count,), 10)):
            array = rng.integers(0, top, shape, np.uint8)
            data = idx_bytes(array)
            path = root / (f"{part}-{what}-ubyte".replace("-idx", f"{dash}idx") + (".gz" if zipped else ""))
            path.write_bytes(gzip.compress(data) if zipped else data)
            arrays.append(array)
            paths.append(path)
    return arrays, paths


@pytest.mark.parametrize("below", ["", "raw"])
@pytest.mark.parametrize("dash", ["-", "."])
@pytest.mark.parametrize("zipped", [True, False])
def test_idx_datasets(tmp_path: Path, zipped: bool, dash: str, below: str) -> None:
    arrays, _ = idx_files(tmp_path / below, zipped, dash)
    for name, first in (("mnist", "0"), ("fashion_mnist", "T-shirt/top")):
        data = idx.load_idx(tmp_path, name)
        assert np.array_equal(data.train.images, arrays[0][:, None])
        assert np.array_equal(data.train.labels, arrays[1])
        assert np.array_equal(data.test.images, arrays[2][:, None])
        assert np.array_equal(data.test.labels, arrays[3])
        assert data.train.mean == (round((arrays[0] / 255).mean(), 4),)
        assert data.train.std == (round((arrays[0] / 255).std(), 4),)
        assert data.train.classes[0] == first
        assert len(data.train.classes) == 10


def test_missing_idx_files_are_named(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"mnist is not in .*: download train-images-idx3-ubyte.gz, .* from https"):
            idx.load_idx(root, "mnist")
    _, paths = idx_files(tmp_path / "raw")
    paths[3].unlink()
    with pytest.raises(DataError, match=r"mnist is not in .*raw: download t10k-labels-idx1-ubyte.gz from"):
        idx.load_idx(tmp_path, "mnist")
    with pytest.raises(DataError, match="unknown dataset 'fashion'; did you mean 'fashion_mnist'"):
        idx.load_idx(tmp_path, "fashion")


def test_idx_files_that_do_not_belong_together(tmp_path: Path) -> None:
    _, paths = idx_files(tmp_path)
    for which, array, message in (
        (1, np.zeros(29, np.uint8), "train-labels-idx1-ubyte.gz has 29 labels for the 30 images"),
        (1, np.full(30, 10, np.uint8), "has a label 10, but there are 10 classes"),
        (2, np.zeros((7, 6, 6), np.uint8), "image shapes of train and test differ"),
        (0, np.zeros((30, 6, 5), np.uint8), "are all images the same"),
    ):
        before = paths[which].read_bytes()
        paths[which].write_bytes(gzip.compress(idx_bytes(array)))
        with pytest.raises(DataError, match=message) as error:
            idx.load_idx(tmp_path, "mnist")
        one_line(error)
        paths[which].write_bytes(before)
    for which, array in ((0, np.zeros((0, 6, 5), np.uint8)), (1, np.zeros(0, np.uint8))):
        paths[which].write_bytes(idx_bytes(array))
    with pytest.raises(DataError, match="holds no training images"):
        idx.load_idx(tmp_path, "mnist")


GOOD_IDX = idx_bytes(RNG(1).integers(0, 256, (5, 4, 3), np.uint8))
BAD_IDX = {
    "empty": (b"", "is not an idx file"),
    "short": (GOOD_IDX[:3], "is not an idx file"),
    "text": (b"hello world, this is text", "is not an idx file"),
    "float": (b"\0\0\x0d\x03" + GOOD_IDX[4:], "holds type 0xd in 3 dimensions"),
    "labels": (idx_bytes(np.zeros(9, np.uint8)), "holds type 0x8 in 1 dimensions, not unsigned bytes"),
    "header": (GOOD_IDX[:10], "ends within its header"),
    "absurd": (struct.pack(">2xBB3I", 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "claims the absurd size 4294967295 x"),
    "absurd and empty": (struct.pack(">2xBB3I", 8, 3, 2**32 - 1, 0, 28), "claims the absurd size"),
    "large": (struct.pack(">2xBB3I", 8, 3, 200_000, 28, 28) + GOOD_IDX[16:], "is truncated: it claims 156800000"),
    "truncated": (GOOD_IDX[:-1], "is truncated"),
    "trailing": (GOOD_IDX + b"\0", "goes on after its 60 values"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("case", BAD_IDX)
def test_bad_idx_files(tmp_path: Path, case: str, zipped: bool) -> None:
    data, message = BAD_IDX[case]
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(data) if zipped else data)
    with memory_under(3_000_000), pytest.raises(DataError, match=f"x {message}.*get the official file again") as error:
        idx.read_idx(path, 3)
    one_line(error)


def test_gzip_bombs_and_broken_gzips(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(GOOD_IDX + bytes(100_000_000), 1))
    with memory_under(3_000_000), pytest.raises(DataError, match="goes on after its 60 values"):
        idx.read_idx(path, 3)
    good = gzip.compress(GOOD_IDX)
    for bad in (good[:-1], good[:20], good[:-6] + b"\0\0" + good[-4:], good + b"garbage", good[:12] + b"\xff" * 9):
        path.write_bytes(bad)
        with pytest.raises(DataError, match="x cannot be read"):
            idx.read_idx(path, 3)
    with pytest.raises(DataError, match="y cannot be read"):
        idx.read_idx(tmp_path / "y", 3)


@QUICK
@given(shape=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.integers(0, 99), data=st.data())
def test_idx_files_round_trip_and_no_cut_passes(
    tmp_path: Path, shape: list[int], seed: int, data: st.DataObject
) -> None:
    array = RNG(seed).integers(0, 256, shape, np.uint8)
    path = tmp_path / "x"
    whole = idx_bytes(array)
    path.write_bytes(gzip.compress(whole, 1) if seed % 2 else whole)
    assert np.array_equal(idx.read_idx(path, len(shape)), array)
    path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size - 1))])
    with pytest.raises(DataError):
        idx.read_idx(path, len(shape))


# Image folders


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """A smooth image, uint8 [H, W, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(2 * np.pi * ((i + 1) * y / height + (2 - i) * x / width + seed / 7)) for i in range(3)]
    return (127.5 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)


def image_folder(root: Path, held_out: str = "val") -> Path:
    for part, names in (("train", ("a.jpg", "b.PNG", "c.bmp")), (held_out, ("d.webp", "e.jpeg"))):
        for label, name in enumerate(("cat", "dog", "Émile")):
            (root / part / name).mkdir(parents=True)
            for file in names:
                Image.fromarray(picture(20, 24, label)).save(root / part / name / file)
    (root / "train" / ".DS_Store").write_text("")
    (root / "train" / "cat" / ".hidden").write_text("")
    return root


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_scanning_folders(tmp_path: Path, held_out: str) -> None:
    index = folder.scan_folder(image_folder(tmp_path, held_out))
    assert index.classes == ("cat", "dog", "Émile")
    assert (len(index.train), len(index.test)) == (9, 6)
    assert index.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert index.test.path(5) == tmp_path / held_out / "Émile" / "e.jpeg"
    paths = [index.train.path(i) for i in range(9)]
    assert paths == sorted(p for p in (tmp_path / "train").rglob("[a-c].*"))
    assert folder.decode(paths[8]).shape == (3, 20, 24)
    alone = folder.scan_split(tmp_path / held_out)
    assert np.array_equal(alone.paths, index.test.paths)


def test_folders_in_disorder_are_named(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "x")

    def says(message: str) -> None:
        with pytest.raises(DataError, match=message) as error:
            folder.scan_folder(root)
        one_line(error)

    (root / "val" / "dog").rename(root / "val" / "fox")
    says(r"val has other classes than train: 1 more \(fox\) and 1 less \(dog\); make the folders agree")
    (root / "val" / "fox").rename(root / "val" / "dog")
    (root / "train" / "dog" / "notes.txt").write_text("")
    says(r"dog/notes.txt is not an image \(.jpg, .*move it away")
    (root / "train" / "dog" / "notes.txt").unlink()
    for file in (root / "val" / "cat").iterdir():
        file.unlink()
    says("val/cat is empty: add images or remove the class")
    (root / "val" / "loose.jpg").write_bytes(b"")
    says("val/loose.jpg is not in a class folder: sort images into")
    (root / "val").rename(root / "other")
    says("has neither val nor test")
    (root / "test").mkdir()
    says("test is empty")
    (root / "train").rename(root / "training")
    says("train is not there: image folders are train/CLASS")


def saved(path: Path, image: Image.Image, **options: Any) -> Path:
    image.save(path, **options)
    return path


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    rgb = Image.fromarray(picture(16, 12))
    grey = rgb.convert("L")
    expected = np.asarray(rgb).transpose(2, 0, 1).astype(int)
    greys = np.broadcast_to(np.asarray(grey), (3, 16, 12)).astype(int)

    def near(path: Path, target: NDArray[np.int_], tolerance: int) -> None:
        image = folder.decode(path)
        assert image.dtype == np.uint8
        assert image.shape == (3, 16, 12)
        assert image.flags.c_contiguous
        assert np.abs(image - target).max() <= tolerance, path

    near(saved(tmp_path / "rgb.png", rgb), expected, 0)
    near(saved(tmp_path / "rgb.bmp", rgb), expected, 0)
    near(saved(tmp_path / "rgb.webp", rgb, lossless=True), expected, 0)
    near(saved(tmp_path / "rgb.jpg", rgb, quality=100, subsampling=0), expected, 6)
    near(saved(tmp_path / "grey.jpg", grey, quality=100), greys, 3)
    near(saved(tmp_path / "grey.png", grey), greys, 0)
    near(saved(tmp_path / "cmyk.jpg", rgb.convert("CMYK"), quality=100), expected, 8)
    near(saved(tmp_path / "rgba.png", rgb.convert("RGBA")), expected, 0)
    near(saved(tmp_path / "la.png", grey.convert("LA")), greys, 0)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    near(saved(tmp_path / "deep.png", deep), greys, 0)
    palette = rgb.quantize(64)
    near(saved(tmp_path / "p.png", palette), np.asarray(palette.convert("RGB")).transpose(2, 0, 1).astype(int), 0)
    clear = saved(tmp_path / "clear.png", palette, transparency=bytes(range(64)))
    near(clear, np.asarray(palette.convert("RGB")).transpose(2, 0, 1).astype(int), 0)
    renamed = (tmp_path / "rgb.png").rename(tmp_path / "really_png.JPEG")  # as one image of ImageNet
    near(renamed, expected, 0)
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate": ignored
    near(saved(tmp_path / "turned.jpg", rgb, quality=100, subsampling=0, exif=exif), expected, 6)


def test_broken_images_are_named(tmp_path: Path) -> None:
    jpeg = saved(tmp_path / "x.jpg", Image.fromarray(picture(64, 64))).read_bytes()
    png = saved(tmp_path / "x.png", Image.fromarray(picture(64, 64))).read_bytes()
    huge = bytearray(png)
    huge[16:24] = struct.pack(">II", 30_000, 30_000)
    large = bytearray(png)
    large[16:24] = struct.pack(">II", 9_000, 9_000)
    for at in (large, huge):
        at[29:33] = struct.pack(">I", __import__("zlib").crc32(at[12:29]))
    for data, message in (
        (b"", "cannot be decoded"),
        (b"GIF89a" + bytes(100), "cannot be decoded"),
        (jpeg[: len(jpeg) // 2], "cannot be decoded .*truncated"),
        (png[: len(png) // 2], "cannot be decoded"),
        (png[:40] + b"\xff" * 20 + png[60:], "cannot be decoded"),
        (bytes(large), "is too large: 9000 x 9000 pixels"),
        (bytes(huge), "cannot be decoded .*decompression bomb"),
    ):
        (tmp_path / "bad.jpg").write_bytes(data)
        for read in (folder.decode, lambda path: folder.load_eval(path, 8, 8), lambda p: folder.load_train(p, 8, 0)):
            with pytest.raises(DataError, match=f"bad.jpg {message}") as error:
                read(tmp_path / "bad.jpg")
            one_line(error)
    with pytest.raises(DataError, match="none.jpg cannot be decoded"):
        folder.decode(tmp_path / "none.jpg")


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match="needs Pillow, which is not installed: pip install pillow"):
        folder.decode(tmp_path / "x.jpg")


def test_large_jpegs_are_decoded_small(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.jpg", Image.fromarray(picture(1200, 1600)), quality=95)
    whole, small = folder.decode(path), folder.decode(path, 200)
    assert whole.shape == (3, 1200, 1600)
    assert small.shape == (3, 300, 400)  # 1/4: at 1/8 the height would be under 200
    assert np.abs(small.astype(int) - whole.reshape(3, 300, 4, 400, 4).mean((2, 4))).max() < 4
    assert folder.decode(path, 1201).shape == (3, 1200, 1600)
    png = saved(tmp_path / "x.png", Image.fromarray(picture(600, 800)))
    assert folder.decode(png, 100).shape == (3, 600, 800)
    assert np.array_equal(folder.load_eval(path, 200, 160), folder.eval_crop(small, 200, 160))
    for seed in range(8):
        slow, fast = folder.random_resized_crop(whole, 100, seed), folder.load_train(path, 100, seed)
        assert fast.shape == (3, 100, 100)
        assert np.abs(slow.astype(int) - fast).max() < 12  # the same crop, to a pixel of the reduced image
    assert not np.array_equal(slow, fast)  # it was decoded small, not whole
    array = folder.decode(png)
    assert np.array_equal(folder.load_train(png, 50, 3), folder.random_resized_crop(array, 50, 3))


@QUICK
@given(height=st.integers(1, 70), width=st.integers(1, 70), resize=st.integers(1, 40), data=st.data())
def test_eval_crop_is_resize_then_centre(height: int, width: int, resize: int, data: st.DataObject) -> None:
    crop = data.draw(st.integers(1, resize))
    image = picture(height, width)
    result = folder.eval_crop(np.ascontiguousarray(image.transpose(2, 0, 1)), resize, crop)
    short = min(height, width)
    size = (int(resize * width / short), int(resize * height / short))
    if height == short:
        size = (size[0], resize)
    if width == short:
        size = (resize, size[1])
    scaled = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    top, left = round((scaled.shape[1] - crop) / 2), round((scaled.shape[2] - crop) / 2)
    assert np.array_equal(result, scaled[:, top : top + crop, left : left + crop])


def test_crops_check_their_arguments() -> None:
    image = np.zeros((3, 9, 9), np.uint8)
    for crop in (0, 33):
        with pytest.raises(ValueError, match=r"crop: must be in 1..resize \(32\)"):
            folder.eval_crop(image, 32, crop)
    bads: list[NDArray[Any]] = [
        np.zeros((9, 9, 3), np.uint8),
        np.zeros((3, 9, 9)),
        np.zeros((3, 0, 9), np.uint8),
        image[0],
    ]
    for bad in bads:
        with pytest.raises(ValueError, match=r"image: must be uint8 \[3, H, W\]"):
            folder.random_resized_crop(bad, 4, 0)
    with pytest.raises(DataError, match="5000 x 1 pixels is too long to scale to 256"):
        folder.eval_crop(np.zeros((3, 1, 5000), np.uint8), 256, 224)


@given(height=st.integers(1, 900), width=st.integers(1, 900), seed=st.integers(0, 2**63))
def test_random_crops_obey_their_definition(height: int, width: int, seed: int) -> None:
    top, left, h, w = box = folder.crop_box(height, width, seed)
    assert box == folder.crop_box(height, width, seed)
    assert 0 <= top <= top + h <= height
    assert 0 <= left <= left + w <= width
    assert h > 0
    assert w > 0
    # In the box of half a pixel around (h, w) there is a crop of an allowed ratio ...
    assert (w - 0.5) / (h + 0.5) <= 4 / 3 + 1e-9
    assert (w + 0.5) / (h - 0.5) >= 3 / 4 - 1e-9
    # ... and of an allowed area, but for the central crop of a very long image
    if 3 / 4 <= width / height <= 4 / 3:
        assert (h + 0.5) * (w + 0.5) >= 0.08 * height * width


def test_random_crops_have_the_usual_distribution() -> None:
    """Against the definition written out again, drawn from another stream."""
    boxes = np.array([folder.crop_box(300, 400, seed) for seed in range(4000)], float)
    rng = RNG(11)
    expected = []
    for _ in range(4000):
        while True:
            area, ratio = 120_000 * rng.uniform(0.08, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if w <= 400 and h <= 300:
                expected.append((rng.integers(0, 300 - h + 1), rng.integers(0, 400 - w + 1), h, w))
                break
    ours, theirs = np.sort(boxes, axis=0), np.sort(np.array(expected, float), axis=0)
    largest = np.abs(ours - theirs).max(axis=0) / [300, 400, 300, 400]
    assert largest[:2].max() < 0.12  # tails of the position are thin
    assert largest[2:].max() < 0.05
    assert np.abs(boxes.mean(0) - theirs.mean(0)).max() < 6
    assert folder.crop_box(10, 1000, 5) == (0, 493, 10, 13)  # nothing fits: the centre, 4/3
    assert folder.crop_box(1000, 12, 5) == (492, 0, 16, 12)


def test_random_resized_crop_scales_the_box() -> None:
    image = np.ascontiguousarray(picture(90, 120).transpose(2, 0, 1))
    out = folder.random_resized_crop(image, 32, 9)
    top, left, h, w = folder.crop_box(90, 120, 9)
    cut = Image.fromarray(np.ascontiguousarray(image[:, top : top + h, left : left + w].transpose(1, 2, 0)))
    assert np.array_equal(out, np.asarray(cut.resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1))
    assert not np.array_equal(out, folder.random_resized_crop(image, 32, 10))


def test_real_imagenet_images(tmp_path: Path) -> None:
    root = real("imagenet1k_sample")
    for part in ("train", "val"):
        (tmp_path / part).symlink_to(root / "val", target_is_directory=True)
    index = folder.scan_folder(tmp_path)
    assert len(index.classes) == len(index.test) == 1000
    assert (index.classes[0], index.classes[-1]) == ("n01440764", "n15075141")
    assert index.test.labels.tolist() == list(range(1000))
    for i in range(0, 1000, 20):
        path = index.test.path(i)
        image = folder.decode(path)
        assert min(image.shape[1:]) == 160
        assert image.std() > 5
        with Image.open(path) as plain:
            assert np.array_equal(image, np.asarray(plain.convert("RGB")).transpose(2, 0, 1))
        assert np.array_equal(folder.load_eval(path, 146, 128), folder.eval_crop(image, 146, 128))
        assert np.array_equal(folder.load_train(path, 128, i), folder.random_resized_crop(image, 128, i))


# Downloads, from a server in this process


class Host(ThreadingHTTPServer):
    """Serves `body` at `url`; `plan` says how each request in turn is answered ("plain" when it runs out)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = RNG(5).integers(0, 256, 700_000, np.uint8).tobytes()
        self.plan: list[str] = []
        self.ranges: list[str | None] = []
        self.paths: list[str] = []
        self.release = threading.Event()  # ends a request that stalls
        self.url = f"http://127.0.0.1:{self.server_address[1]}/file"

    @property
    def md5(self) -> str:
        return hashlib.md5(self.body).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Host

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.ranges.append(asked)
        self.server.paths.append(self.path)
        how, _, option = (self.server.plan.pop(0) if self.server.plan else "plain").partition(":")
        body, start = self.server.body, 0
        if how == "status":
            self.send_error(int(option))
            return
        if asked and how not in ("ignore", "empty", "page"):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                self.send_error(416)
                return
        if how == "page":
            body = b"  <!DOCTYPE html><html>log in first</html>"
        if how == "empty":
            body = b""
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", "text/html" if option == "typed" else "application/octet-stream")
        if start:
            start = 0 if how == "shifted" else start
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if how != "unsized":
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        part = body[start:]
        if how in ("cut", "ignore") and option:
            part = part[: int(option)]
        if how == "stall":
            self.wfile.write(part[: int(option)])
            self.server.release.wait(5)
            return
        with contextlib.suppress(OSError):
            self.wfile.write(part)
        self.close_connection = True


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("no_proxy", "*")
    with Host() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
        thread.join()


def test_a_whole_download(host: Host, tmp_path: Path) -> None:
    steps: list[tuple[int, int | None]] = []
    target = tmp_path / "new" / "file"
    download.fetch(host.url, target, host.md5, len(host.body), lambda done, total: steps.append((done, total)))
    assert target.read_bytes() == host.body
    assert [path.name for path in target.parent.iterdir()] == ["file"]
    assert steps == sorted(steps)
    assert steps[-1] == (700_000, 700_000)
    assert len(steps) > 1
    download.fetch(host.url, target, host.md5)
    assert len(host.ranges) == 1  # it was there
    target.write_bytes(b"wrong")
    download.fetch(host.url, target, host.md5)
    assert target.read_bytes() == host.body


def test_a_cut_download_continues(host: Host, tmp_path: Path) -> None:
    target = tmp_path / "file"
    host.plan = ["cut:100000", "cut:0", "cut:50000"]
    with pytest.raises(DataError, match="cut 3 times after 150000 bytes.*run the same command again.*by hand") as error:
        download.fetch(host.url, target, host.md5, len(host.body))
    one_line(error)
    assert [path.name for path in tmp_path.iterdir()] == ["file.partial"]
    host.plan = ["cut:1000"]
    steps: list[int] = []
    download.fetch(host.url, target, host.md5, len(host.body), lambda done, _: steps.append(done))
    assert host.ranges == [None, "bytes=100000-", "bytes=100000-", "bytes=150000-", "bytes=151000-"]
    assert steps[0] == 151_000
    assert target.read_bytes() == host.body


@pytest.mark.parametrize("how", ["ignore", "shifted", "unsized"])
def test_servers_that_resume_badly(host: Host, tmp_path: Path, how: str) -> None:
    target = tmp_path / "file"
    (tmp_path / "file.partial").write_bytes(host.body[:1000])
    host.plan = [how]
    download.fetch(host.url, target, host.md5)
    assert host.ranges[0] == "bytes=1000-"
    assert target.read_bytes() == host.body
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_answer_without_bytes_costs_nothing(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_bytes(host.body[:1000])
    host.plan = ["ignore:0"]  # begins again from the start, and is cut at once
    download.fetch(host.url, tmp_path / "file", host.md5)
    assert host.ranges == ["bytes=1000-", "bytes=1000-"]


def test_partials_that_are_whole_or_wrong(host: Host, tmp_path: Path) -> None:
    target, partial, size = tmp_path / "file", tmp_path / "file.partial", len(host.body)
    partial.write_bytes(host.body)
    download.fetch(host.url, target, host.md5, size)
    assert host.ranges == []  # only verified
    target.unlink()
    partial.write_bytes(host.body)
    download.fetch(host.url, target, host.md5)  # of unknown size: the host says that nothing is left
    assert host.ranges == ["bytes=700000-"]
    target.unlink()
    partial.write_bytes(host.body + b"x")
    download.fetch(host.url, target, host.md5, size)
    assert host.ranges[1:] == [None]
    target.unlink()
    partial.write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match=r"gave a file with md5 \w{32} instead of \w{32}: it was removed; download"):
        download.fetch(host.url, target, host.md5, size)
    assert list(tmp_path.iterdir()) == []
    download.fetch(host.url, target, host.md5, size)
    assert target.read_bytes() == host.body


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("empty", "with zero bytes"),
        ("page", "with a web page instead of the file"),
        ("plain:typed", "with a web page instead of the file"),
        ("status:404", "with HTTP 404 Not Found"),
        ("status:503", "with HTTP 503"),
    ],
)
def test_answers_that_are_not_the_file(host: Host, tmp_path: Path, how: str, message: str) -> None:
    target, partial = tmp_path / "file", tmp_path / "file.partial"
    for before in (None, host.body[:1000]):
        if before:
            partial.write_bytes(before)
        host.plan = [how]
        with pytest.raises(DataError, match=f"the host answered .*/file {message}") as error:
            download.fetch(host.url, target, host.md5, None)
        text = one_line(error)
        assert f"download {host.url} by hand (md5 {host.md5}) to {target}" in text
        assert not target.exists()
        assert (partial.read_bytes() if partial.exists() else None) == before  # nothing of it was written


def test_wrong_sizes_are_refused(host: Host, tmp_path: Path) -> None:
    target = tmp_path / "file"
    with pytest.raises(DataError, match="with a file of 700000 bytes instead of 123"):
        download.fetch(host.url, target, host.md5, 123)
    host.body, md5, size = host.body + bytes(2_000_000), host.md5, len(host.body)
    host.plan = ["unsized"]
    with pytest.raises(DataError, match="with more than 700000 bytes"):
        download.fetch(host.url, target, md5, size)
    assert list(tmp_path.iterdir()) == []


def test_hosts_and_disks_that_fail(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    port = host.server_address[1]
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        address = f"http://127.0.0.1:{closed.server_address[1]}/x"
    for url, message in (
        (address, "cannot reach .*refused.*: download .* by hand"),
        (f"ftp://127.0.0.1:{port}/x", "is not an http or https address"),
        ("file:///etc/passwd", "is not an http or https address"),
    ):
        with pytest.raises(DataError, match=message) as error:
            download.fetch(url, target, host.md5)
        one_line(error)
    (tmp_path / "flat").write_text("")
    with pytest.raises(DataError, match="cannot write .*flat/file: .*free space or choose another root"):
        download.fetch(host.url, tmp_path / "flat" / "file", host.md5)
    monkeypatch.setattr(download, "TIMEOUT", 0.05)
    host.plan = ["stall:0", "stall:300000", "plain"]  # timeouts in mid-air count as cuts
    download.fetch(host.url, target, host.md5)
    assert host.ranges == [None, None, "bytes=262144-"]
    assert target.read_bytes() == host.body
    target.unlink()
    monkeypatch.setattr(Handler, "do_GET", lambda self: host.release.wait(5))
    with pytest.raises(DataError, match="cannot reach .*timed out"):
        download.fetch(host.url, target, host.md5)
    assert not target.exists()
