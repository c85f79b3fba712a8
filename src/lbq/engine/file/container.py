"""The file of a deployed network: safetensors with integers only, text in its header, and a SHA-256 over every byte.

A safetensors file is 8 bytes with the header's length, the header as JSON, and the tensors' bytes. `__metadata__` holds two
strings: `lbq`, a JSON text, and `sha256`, the digest of the whole file with zeros in place of the digest's own 64 characters.
Equal networks give equal files. Reading trusts nothing: every offset, shape and type is checked before it is used.

A file is mapped, not copied, so that weights are not in memory twice. It must stay as it is while the network is in use, and
`Mapped` checks that. To replace it by another file, as `write` does, is safe.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lbq.errors import ArtefactError
from lbq.system import files

DTYPES: dict[str, type[np.integer[Any]]] = {
    "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
}  # fmt: skip
DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
MOST_BYTES = 2**32
MOST_HEADER_BYTES = 2**22  # a network of a hundred layers has a hundredth of it; parsing takes 25 times as much memory
MOST_TENSORS = 2**13  # of 2048 layers; a reader checks each
ALIGNMENT_BYTES = 8
PLACEHOLDER = "0" * 64
REMEDY = "give a model.lbq that `lbq deploy` wrote"

Tensors = dict[str, NDArray[Any]]


def encode(tensors: Mapping[str, NDArray[Any]], text: str) -> bytes:
    """The bytes of a file: always the same for the same content."""
    _check_count(tensors)
    # widest types first keeps every tensor aligned, as the format's own writer does
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"lbq": text, "sha256": PLACEHOLDER}}
    end = 0
    for name in order:
        value = tensors[name]
        start, end = end, end + value.nbytes
        header[name] = {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    encoded += b" " * (-len(encoded) % ALIGNMENT_BYTES)
    if len(encoded) > MOST_HEADER_BYTES:
        raise ArtefactError(
            f"its description takes {len(encoded):,} bytes, at most {MOST_HEADER_BYTES:,} are read: give fewer facts"
        )
    parts = [len(encoded).to_bytes(8, "little"), encoded]
    parts += (tensors[name].astype(tensors[name].dtype.newbyteorder("<"), copy=False).tobytes() for name in order)
    data = b"".join(parts)
    digest = hashlib.sha256(data).hexdigest()
    return data.replace(f'"sha256":"{PLACEHOLDER}"'.encode(), f'"sha256":"{digest}"'.encode(), 1)


def write(path: Path | str, tensors: Mapping[str, NDArray[Any]], text: str) -> int:
    """Write a file, whole or not at all; return its size in bytes."""
    return files.write(path, encode(tensors, text), ArtefactError)


class Mapped:
    """A mapped file; `check` refuses it once it has been written to."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)
        self.status, self.digest = os.fstat(self.descriptor), ""

    def check(self) -> None:
        before, now = self.status, os.fstat(self.descriptor)
        same = (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)
        if same and before.st_ctime_ns != now.st_ctime_ns:  # its rights or names changed, or its time was set back
            same, self.status = self._digest() == self.digest, now
        if not same:
            raise ArtefactError(
                f"{self.path} was written to while its network was in use: load it again, and replace such files by renaming "
                "another (mv), not in place (cp)"
            )

    def _digest(self) -> str:
        with mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ) as data:
            try:
                return checked_header(data).digest
            except ArtefactError:
                return ""


def read(path: Path | str) -> tuple[Tensors, str, Mapped]:
    """The tensors of a file (read-only views of its bytes), its text, and the file."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ArtefactError(f"{path} is not a file: {REMEDY}")
        if size > MOST_BYTES:
            raise ArtefactError(f"{path} is not a deployed network: it has {size} bytes, at most {MOST_BYTES} are read")
        with open(path, "rb") as file:
            mapped = Mapped(path, file.fileno())
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise ArtefactError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
    try:
        tensors, text, mapped.digest = decode(data)
        return tensors, text, mapped
    except ArtefactError as error:
        raise ArtefactError(f"{path}: {error}") from error


def forget(tensor: NDArray[Any]) -> None:
    """Release the memory of a mapped file's tensor until it is read again. Tensors that own their memory stay."""
    base: Any = tensor
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else None
    if isinstance(mapped, mmap.mmap) and hasattr(mapped, "madvise"):
        start = tensor.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
        first, last = start // mmap.PAGESIZE, -(-(start + tensor.nbytes) // mmap.PAGESIZE)
        if last > first:
            mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


class Header(NamedTuple):
    """The head of a file whose checksum is right: what it says of its tensors, its text, that checksum, and where it ends."""

    tensors: dict[str, Any]
    text: str
    digest: str
    end: int


def decode(data: bytes | mmap.mmap) -> tuple[Tensors, str, str]:
    """The tensors and the text that `encode` wrote, and the file's checksum."""
    header = checked_header(data)
    return _tensors(header.tensors, memoryview(data)[header.end :]), header.text, header.digest


def checked_header(data: bytes | mmap.mmap) -> Header:
    """The head of a file that anybody may have written. Nothing else of the file is read before its checksum is found right."""
    if len(data) < 8:
        raise ArtefactError(f"it is too short for a deployed network: {REMEDY}")
    length = int.from_bytes(data[:8], "little")
    if length > min(MOST_HEADER_BYTES, len(data) - 8):
        raise ArtefactError(f"it is not a deployed network, or was cut off: {REMEDY}, or copy it again")
    header = parse_json(data[8 : 8 + length], "its header")
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or set(metadata) != {"lbq", "sha256"}:
        raise ArtefactError(f"it is not a deployed network, its header lacks the entries lbq and sha256: {REMEDY}")
    text, digest = metadata["lbq"], metadata["sha256"]
    if not isinstance(text, str) or not isinstance(digest, str):
        raise ArtefactError("it is not a deployed network: lbq and sha256 in its header must be strings")
    hexadecimal = re.fullmatch("[0-9a-f]{64}", digest) is not None
    at = data.find(f'"sha256":"{digest}"'.encode(), 8, 8 + length) if hexadecimal else -1
    if at < 0:
        raise ArtefactError("it is damaged: its checksum is not where it belongs")
    at += len('"sha256":"')
    whole = hashlib.sha256(data[:at])
    whole.update(PLACEHOLDER.encode())
    with memoryview(data) as view, view[at + 64 :] as rest:
        whole.update(rest)
    if whole.hexdigest() != digest:
        raise ArtefactError("it is damaged: its SHA-256 does not match; export or copy it again")
    return Header(header, text, digest, 8 + length)


def _tensors(header: Mapping[str, Any], body: memoryview) -> Tensors:
    _check_count(header)
    tensors: Tensors = {}
    places = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ArtefactError(f"tensor {name!r:.200} needs dtype, shape and data_offsets")
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(kind, str) or kind not in DTYPES:
            raise ArtefactError(f"tensor {name!r:.200} has type {kind!r:.40}, which is none of {', '.join(DTYPES)}")
        if not (_naturals(shape) and _naturals(offsets) and len(shape) <= 8 and len(offsets) == 2):
            raise ArtefactError(f"tensor {name!r:.200} has a shape or offsets that are not lists of whole numbers")
        start, end = offsets
        if math.prod(size or 1 for size in shape) > MOST_BYTES:
            raise ArtefactError(f"tensor {name!r:.200} has a shape that no array can have")
        if not start <= end <= len(body) or math.prod(shape) * np.dtype(DTYPES[kind]).itemsize != end - start:
            raise ArtefactError(f"tensor {name!r:.200} does not fit its shape or the file")
        places.append((start, end))
        dtype = np.dtype(DTYPES[kind]).newbyteorder("<")
        tensors[name] = np.frombuffer(body[start:end], dtype).reshape(shape).astype(DTYPES[kind], copy=False)
    places.sort()
    joined = all(a[1] == b[0] for a, b in zip([(0, 0), *places], places, strict=False))
    if not joined or (places[-1][1] if places else 0) != len(body):
        raise ArtefactError("its tensors overlap or leave gaps")
    return tensors


def _check_count(tensors: Mapping[str, Any]) -> None:
    if len(tensors) > MOST_TENSORS:
        raise ArtefactError(f"it holds {len(tensors):,} tensors, at most {MOST_TENSORS:,} are read: use fewer layers")


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**40 for v in values)


def parse_json(text: bytes | str, what: str) -> Any:
    """Parse JSON as the standard has it: no NaN, no repeated key, no depth that would exhaust the stack."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) != len(items):
            raise ArtefactError(f"{what} says something twice")
        return dict(items)

    def refuse(constant: str) -> Any:
        raise ArtefactError(f"{what} holds {constant:.20}, which is not a number")

    def finite(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else refuse(number)

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{what} is not JSON: it is damaged or no deployed network") from error
