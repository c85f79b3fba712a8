"""Inputs that a user has, one or many, and what a deployed network says of each: what `lbq predict` does. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.counting.inputs import lead_of, open_data, read_array, read_input
from lbq.data.image_files import EXTENSIONS
from lbq.engine.engine import Network
from lbq.errors import DataError
from lbq.graph.integer import IntegerNetwork

BATCH = 64  # inputs that run together
READ = (*EXTENSIONS, ".npy")  # what is taken from a folder
MOST_KINDS = 5  # of other files, that a warning names

Named = tuple[str, NDArray[np.uint8]]


def files_of(path: Path | str) -> list[Path]:
    """A file, or all images and .npy files of a folder, by name, those in folders below it too."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    files = [p for p in found if p.suffix.lower() in READ]
    if not files:
        raise DataError(f"{path} holds no images and no .npy files ({', '.join(READ)}): give another folder")
    if others := len(found) - len(files):
        kinds = ", ".join(sorted({p.suffix.lower() or p.name for p in found} - {*READ})[:MOST_KINDS])
        left = f"{others} of {len(found)} files are left out, as neither images nor .npy ({kinds})"
        warnings.warn(f"{path}: {left}", stacklevel=2)
    return files


def read_inputs(path: Path, network: IntegerNetwork) -> Iterator[Named]:
    """Names and inputs of a file, each uint8 as the network reads one.

    An image and a .npy of one input go by their path, each input of a .npy or .npz of several by path and number, `x.npz[3]`.
    """
    if path.suffix == ".npz":
        test = open_data(network, str(path))
        _refuse_empty(path, test.size)
        for i in range(test.size):
            batch = test.read(i, i + 1)
            yield f"{path}[{i}]", batch[0] if network.static else batch[:, 0]
    elif path.suffix == ".npy":
        array = read_array(path, network, several=True)
        one = array.ndim == len(lead_of(network)) + len(network.input_shape)
        _refuse_empty(path, len(array))
        yield from [(str(path), array)] if one else ((f"{path}[{i}]", x) for i, x in enumerate(array))
    else:
        yield str(path), read_input(path, network)


@contextmanager
def _noted(path: Path | str, unread: dict[str, str] | None) -> Iterator[None]:
    """An error that ends the block goes into `unread`, where that is given."""
    try:
        yield
    except DataError as error:
        if unread is None:
            raise
        unread[str(path)] = str(error)


def _read_all(paths: Iterable[Path | str], network: IntegerNetwork, unread: dict[str, str] | None) -> Iterator[Named]:
    """The inputs of all files. Where `unread` is given, what cannot be read goes there, by its path, with the reason."""
    for path in paths:
        with _noted(path, unread):
            for file in files_of(path):
                with _noted(file, unread):
                    yield from read_inputs(file, network)


def _refuse_empty(path: Path, count: int) -> None:
    if not count:
        raise DataError(f"{path} has no samples: give one with some")


def classify(
    net: Network,
    paths: Path | str | Iterable[Path | str],
    top: int | None = None,
    unread: dict[str, str] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """For each input of these files and folders, its classes, the likeliest first: `class`, `index`, `share`, `logit`.

    A file that cannot be read ends it. Where `unread` is given, such files go there instead, each with the reason.
    """
    paths = [paths] if isinstance(paths, str | Path) else paths
    inputs = _read_all(paths, net.network, unread)
    rankings: dict[str, list[dict[str, Any]]] = {}
    while batch := list(islice(inputs, BATCH)):
        out = net.run(np.stack([x for _, x in batch], net.network.batch_axis))
        rankings |= {name: out.ranked(net.network.classes, i)[:top] for i, (name, _) in enumerate(batch)}
    return rankings
