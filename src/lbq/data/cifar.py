"""CIFAR-10 and CIFAR-100 from the official files: python or binary form, archived or unpacked. NumPy only.

Every file is verified against its published MD5 before it is used. The pickles of the python form are opened only after
that, by an unpickler that knows one array type and calls nothing. Archives are read as streams, not unpacked to disk.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import pickle
import shlex
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from lbq.data.cifar_files import SPECS as SPECS
from lbq.data.cifar_files import File, Form, Spec
from lbq.data.dataset import Dataset, Inputs, Samples
from lbq.data.download import Progress, fetch
from lbq.errors import DataError
from lbq.system import files

HOME = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32
MAX_UNPACKED_BYTES = 256 << 20  # contents of an archive; the real ones hold less than 190 MB


def load_cifar10(root: Path) -> Dataset:
    """CIFAR-10 from `root` or a folder in it: 50,000 and 10,000 images `[N, 3, 32, 32]`, 10 classes."""
    return _load(SPECS["cifar10"], Path(root))


def load_cifar100(root: Path) -> Dataset:
    """CIFAR-100 from `root` or a folder in it, with its 100 fine classes as labels."""
    return _load(SPECS["cifar100"], Path(root))


def prepare_cifar(name: str, root: Path, source: Path | None = None, progress: Progress | None = None) -> Path:
    """Put the dataset into `root`, verified, and return its folder.

    A correct dataset that is already in `root` stays. Otherwise it comes from `source`, an official archive or a folder
    with its files, or by download. The binary form's folder is written, all of it or nothing.
    """
    spec, root = SPECS[name], Path(root)
    if (place := _find(spec, root)) is not None:
        for _ in _records(spec, place):  # verifies each file
            pass
        return place.path
    if source is not None:
        return _write(spec, root, _find_source(spec, Path(source)), progress)
    archive = root / spec.binary.archive.name
    fetch(HOME + archive.name, archive, spec.binary.archive.md5, spec.binary.archive.size, progress)
    folder = _write(spec, root, _Place(archive, None), None)
    archive.unlink()
    return folder


@dataclass(frozen=True)
class _Place:
    """Where a dataset is: a folder with the files of a form, or an archive (form None, until it is unpacked)."""

    path: Path
    form: Form | None


def _load(spec: Spec, root: Path) -> Dataset:
    a, b = spec.binary.archive, spec.python.archive
    remedy = (
        f"run `lbq data {spec.name} --root {shlex.quote(str(root))}`, or download {a.name} (md5 {a.md5}) or {b.name} (md5 "
        f"{b.md5}) from {HOME}cifar.html into it"
    )
    place = _located(spec, root, remedy)
    *train, test = (records for _, records in _records(spec, place))
    source = f"{spec.title}, official files in {place.path}"
    inputs = Inputs(spec.name, (3, 32, 32), True, spec.classes, spec.mean, spec.std)
    return Dataset(inputs, _samples(spec, train), _samples(spec, [test]), source)


def _samples(spec: Spec, batches: list[NDArray[np.uint8]]) -> Samples:
    """Batches of records `[N, labels + 3072]`; the class is the last label byte."""
    labels = len(spec.label_keys)
    return Samples(
        np.concatenate([records[:, labels:] for records in batches]).reshape(-1, 3, 32, 32),
        np.concatenate([records[:, labels - 1] for records in batches]).astype(np.int64),
    )


# Where the files are


def _find(spec: Spec, root: Path) -> _Place | None:
    """The dataset in `root` or one level below; unpacked before archived, binary before python."""
    forms = (spec.binary, spec.python)
    try:
        if not root.is_dir():
            if root.exists():
                raise DataError(f"{root} is not a folder: give the folder that holds {spec.title}")
            return None
        folders = [root, *sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")]
        incomplete = None
        for folder, form in itertools.product(folders, forms):
            missing = [file.name for file in form.files if not (folder / file.name).is_file()]
            if not missing:
                return _Place(folder, form)
            if len(missing) < len(form.files):
                incomplete = incomplete or (folder, missing, form)
        for folder, form in itertools.product(folders, forms):
            if (folder / form.archive.name).is_file():
                return _Place(folder / form.archive.name, None)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or root}: {error.strerror}") from error
    if incomplete is not None:
        folder, missing, form = incomplete
        names = ", ".join(missing)
        raise DataError(f"{folder} lacks {names} of {spec.title}: unpack {form.archive.name} there again")
    return None


def _located(spec: Spec, root: Path, remedy: str) -> _Place:
    """The dataset in `root`; the error says where that holds the other one, else the remedy."""
    if (place := _find(spec, root)) is not None:
        return place
    for other in SPECS.values():
        try:
            place = _find(other, root)
        except DataError:  # an incomplete one does not matter here
            continue
        if place is not None:
            raise DataError(f"{place.path} holds {other.title}: give the folder of {spec.title}")
    raise DataError(f"{spec.title} is not in {root}: {remedy}")


def _find_source(spec: Spec, source: Path) -> _Place:
    """The dataset in a folder, or an archive of any name."""
    try:
        if source.is_file():
            return _Place(source, None)
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror}") from error
    archives = f"{spec.binary.archive.name}, {spec.python.archive.name}"
    return _located(spec, source, f"give {archives} or a folder with the files of either")


# Verified bytes, then records


def _records(spec: Spec, place: _Place) -> Iterator[tuple[File, NDArray[np.uint8]]]:
    """Each training file's records `[N, labels + 3072]`, then the test file's, with the binary file they make up."""
    form, contents = _unpack(spec, place.path) if place.form is None else (place.form, {})
    for file, binary in zip(form.files, spec.binary.files, strict=True):
        where = place.path / file.name
        data = contents.pop(file.name) if place.form is None else _read(where, file)
        _verify(data, file, where)
        if form is spec.python:
            yield binary, _from_pickle(spec, data, where)
        else:
            yield binary, np.frombuffer(data, np.uint8).reshape(-1, len(spec.label_keys) + PIXELS)


def _read(path: Path, file: File) -> bytes:
    files.refuse_pipe(path, DataError)
    try:
        with path.open("rb") as stream:
            return stream.read(file.size + 1)  # one more shows that the file is too long
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _verify(data: bytes, file: File, where: Path) -> None:
    remedy = "get the official file again"
    if len(data) != file.size:
        more = "or more " if len(data) > file.size else ""
        raise DataError(f"{where} has {len(data)} {more}bytes instead of {file.size}: {remedy}")
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if md5 != file.md5:
        raise DataError(f"{where} is damaged or another file: md5 {md5} instead of {file.md5}; {remedy}")


class _Bounded:
    """A stream that raises after `limit` bytes: a small archive may inflate to any size."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self.stream, self.left = stream, limit

    def read(self, count: int) -> bytes:
        data = self.stream.read(min(count, self.left + 1))
        self.left -= len(data)
        if self.left < 0:
            raise tarfile.ReadError("too large")
        return data


def _unpack(spec: Spec, path: Path) -> tuple[Form, dict[str, bytes]]:
    """The form that an archive holds, and its files by name. Other members, links and paths are ignored."""
    forms = (spec.binary, spec.python)
    archives = " or ".join(f"{form.archive.name} (md5 {form.archive.md5})" for form in forms)
    files.refuse_pipe(path, DataError)
    try:
        with gzip.open(path) as stream:
            bounded = cast("IO[bytes]", _Bounded(stream, MAX_UNPACKED_BYTES))
            with tarfile.open(fileobj=bounded, mode="r|", bufsize=1 << 20) as archive:
                found = _complete_form(archive, forms)
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError, ArithmeticError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as .tar.gz ({error}): {spec.title} is {archives} from {HOME}cifar.html"
        ) from error
    if found is None:
        raise DataError(f"{path} does not hold {spec.title}: expected {archives} from {HOME}cifar.html")
    return found


def _complete_form(archive: tarfile.TarFile, forms: Sequence[Form]) -> tuple[Form, dict[str, bytes]] | None:
    """The first form whose files have all come, and the files. Nothing behind them is read."""
    sizes = {file.name: file.size for form in forms for file in form.files}
    contents: dict[str, bytes] = {}
    for member in archive:
        name = PurePosixPath(member.name).name
        if name not in sizes or not member.isreg():
            continue
        if (extracted := archive.extractfile(member)) is not None:
            contents[name] = extracted.read(sizes[name] + 1)  # one more shows that it is too long
        for form in forms:
            if all(file.name in contents for file in form.files):
                return form, contents
    return None


class _Array:
    """Stands in for a uint8 array in a pickle; takes its state as bytes."""

    def __init__(self, *_: object) -> None:
        self.values: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], object, bool, bytes]) -> None:
        _, shape, kind, fortran, data = state
        if not isinstance(kind, _Uint8):
            raise pickle.UnpicklingError("it holds an array of no known type")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Uint8:
    """Stands in for the array's type, which must be uint8."""

    def __init__(self, code: bytes, *_: object) -> None:
        if code != b"u1":
            raise pickle.UnpicklingError(f"it holds an array of type {code!r}")

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment mean nothing for single bytes."""


class _Unpickler(pickle.Unpickler):
    """Unpickles lists, dictionaries, numbers, bytes and uint8 arrays as Python 2 wrote them; refuses all else.

    No name in the pickle reaches Python or NumPy: the three that it may use mean the stand-ins above.
    """

    KNOWN: ClassVar[dict[tuple[str, str], type]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Uint8,
    }

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.KNOWN[module, name]


def _from_pickle(spec: Spec, data: bytes, where: Path) -> NDArray[np.uint8]:
    """Records `[N, labels + 3072]`, as in the binary form, from a verified python file."""
    try:
        batch = _Unpickler(BytesIO(data), encoding="bytes").load()
        labels = [np.array(batch[key], np.uint8)[:, None] for key in spec.label_keys]
        pixels = batch[b"data"].values
        return np.concatenate([*labels, np.ascontiguousarray(pixels).reshape(-1, PIXELS)], axis=1)
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ArithmeticError, ValueError) as e:
        raise DataError(f"{where} is no batch of {spec.title} ({e}): get the official file again") from e


# Writing the binary form


def _write(spec: Spec, root: Path, place: _Place, progress: Progress | None) -> Path:
    """Write the binary form's folder, verified. A failure leaves nothing behind."""
    folder = root / spec.binary.folder
    total = sum(file.size for file in spec.binary.files)
    done = 0
    with files.new_folder(folder, DataError) as partial:
        for file, records in _records(spec, place):
            data = records.tobytes()
            _verify(data, file, place.path / file.name)
            files.write(partial / file.name, data, DataError)
            done += file.size
            if progress is not None:
                progress(done, total)
    return folder
