"""Event datasets as frames: CIFAR10-DVS, DVS128-Gesture, N-MNIST, and a small set of DVS128 recordings of objects.

A loader takes the folder of the dataset, extracted or as its .zip and .tar archives (their members are read in place).
Splits and their rules are in `src/lbq/data/splits/README.md`. Frames are decoded once and kept in `cache` (default:
`.lbq-cache` inside the folder). NumPy only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files as resources
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from lbq.data.cifar_files import SPECS
from lbq.data.dataset import Dataset, Inputs
from lbq.data.events import LATE_US, MAX_BYTES, Events, nmnist, read_bounded
from lbq.data.events.aedat2 import decode_aedat2
from lbq.data.events.aedat3 import decode_aedat3
from lbq.data.events.cache import PARTS, Sample, cached
from lbq.data.events.frames import By, Size, to_frames
from lbq.data.events.tree import MAX_TEXT_BYTES, File, pick, tree_of
from lbq.errors import DataError

CIFAR10_CLASSES = SPECS["cifar10"].classes
GESTURES = (
    "hand_clapping", "right_hand_wave", "left_hand_wave", "right_arm_clockwise", "right_arm_counter_clockwise",
    "left_arm_clockwise", "left_arm_counter_clockwise", "arm_roll", "air_drums", "air_guitar", "other_gestures",
)  # fmt: skip
OBJECTS = {"box": "Caixa", "mug": "Caneca", "cutter": "Estilete", "pencil": "Lapiseira", "scissors": "Tesoura"}
OBJECT_FOLDERS = {"train": "NeuromorphicObjectDataSet_100", "test": "DataSet2"}
# a sample's events, their (start, stop) in us if cut by time, its label
Cut = tuple[Events, tuple[int, int] | None, int]


@dataclass(frozen=True)
class Recordings:
    """A dataset before decoding. `split` names the rule that divided it.

    `listed` has the recordings of each part, each with what `cuts` needs to make samples of it. `settings` says how they
    were made, beside frames. `side`: of the sensor, in pixels. `used`: all files, if there are others than recordings.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    listed: Mapping[str, Sequence[tuple[File, Any]]]
    cuts: Callable[[File, Any], Iterator[Cut]]
    settings: Mapping[str, object] = field(default_factory=lambda: {"sort_within_us": LATE_US})
    side: int = 128
    used: Sequence[File] = ()


def loader(find: Callable[..., Recordings]) -> Callable[..., Dataset]:
    """A function that loads what `find(root, tree, **options)` lists: frames from the cache or, the first time, decoded."""

    def load(
        root: Path | str,
        timesteps: int = 10,
        size: Size | None = None,
        by: By = "count",
        *,
        cache: Path | str | None = None,
        **options: Any,
    ) -> Dataset:
        with tree_of(root) as tree:
            return _dataset(find(root, tree, **options), Path(root), timesteps, size, by, cache)

    load.__doc__ = find.__doc__
    return load


def _dataset(
    data: Recordings, root: Path, timesteps: int, size: Size | None, by: By, cache: Path | str | None
) -> Dataset:
    """`source` is the folder and the fingerprint of its files."""
    used = data.used or [file for file, _ in itertools.chain(*data.listed.values())]
    if twice := [where for where, count in Counter(file.where for file in used).items() if count > 1]:
        raise DataError(f"{twice[0]} is listed twice: the lists under {root} are damaged")
    nothing = np.zeros(0, np.uint16)
    empty = Events(np.zeros(0, np.int64), nothing, nothing, np.zeros(0, np.uint8), data.side, data.side)
    shape = to_frames(empty, timesteps, by, size).shape
    digest = _digest([(PurePosixPath(file.where).name, file.stamp) for file in used])
    folders = [Path(cache)] if cache is not None else cache_folders(root if root.is_dir() else root.parent, digest)
    listing = _digest({part: [facts for _, facts in files] for part, files in data.listed.items()})
    made_by = {"timesteps": timesteps, "size": shape[2:], "by": by, "split": data.split, "listing": listing}

    def samples(part: str) -> Iterator[Sample]:
        for file, facts in data.listed[part]:
            for events, span, label in data.cuts(file, facts):
                if not len(events):  # it would be a blank sample with a label
                    where = f" from {span[0]} to {span[1]} us, where its labels put one" if span else ": fetch it again"
                    raise DataError(f"{file.where} has no events{where}")
                yield to_frames(events, timesteps, by, size, span if by == "time" else None), label

    def build() -> dict[str, Iterator[Sample]]:
        return {part: samples(part) for part in PARTS}

    parts = cached(folders, data.name, {**made_by, **data.settings}, digest, build, shape, len(data.classes))
    source = f"{root} ({len(used):,} files, fingerprint {digest[:12]})"
    inputs = Inputs(data.name, (2, shape[2], shape[3]), False, data.classes)
    return Dataset(inputs, parts["train"], parts["test"], source, data.split, hashed=False)


@loader
def load_cifar10_dvs(root: Path | str, tree: Mapping[str, File], split: str | Path = "natural") -> Recordings:
    """CIFAR10-DVS, 128x128, 10,000 recordings: class folders, or the ten class archives as published.

    `split`: "natural" or "lexicographic", or the path of an index file of your own in the same format.

    The sensor saw the images lying on their side. x and y are swapped after the DVS128's own orientation, as in public
    readers, so that objects stand upright. Whether left and right are then as in CIFAR-10 is not known.
    """
    rule, parts = _cifar10_split(split)
    recordings = pick(tree, r"cifar10_([a-z]+)_([0-9]+)\.aedat")
    everything = [(label, str(number)) for label, number in itertools.chain(*parts.values())]
    missing = [f"cifar10_{key[0]}_{key[1]}.aedat" for key in everything if key not in recordings]
    _refuse_missing(root, "CIFAR10-DVS", missing, len(everything))
    listed = {part: [(recordings[key[0], str(key[1])], key) for key in keys] for part, keys in parts.items()}

    def cuts(file: File, key: tuple[str, int]) -> Iterator[Cut]:
        data = file.read(MAX_BYTES)
        events = decode_aedat2(data, file.where, transpose=True, sort_within_us=LATE_US)
        yield events, None, CIFAR10_CLASSES.index(key[0])

    return Recordings("cifar10-dvs", rule, CIFAR10_CLASSES, listed, cuts)


@loader
def load_dvs_gesture(root: Path | str, tree: Mapping[str, File]) -> Recordings:
    """DVS128-Gesture, 128x128: the official folder, or an uncompressed tar of it.

    The recordings named in `trials_to_train.txt` and `trials_to_test.txt` are cut by their `*_labels.csv`, one sample
    per row: start <= t < end. With by="time", slices divide that interval.
    """
    pattern = r"(user[^/]*\.aedat|user[^/]*_labels\.csv|trials_to_[a-z]+\.txt)"
    files = {name: file for (name,), file in pick(tree, pattern, fold=False).items()}
    trials: dict[str, list[tuple[File, list[tuple[int, int, int]]]]] = {}
    used = []
    for part in ("train", "test"):
        _refuse_missing(root, "DVS128-Gesture", [n for n in (f"trials_to_{part}.txt",) if n not in files], 1)
        names = [line.strip() for line in files[f"trials_to_{part}.txt"].text().splitlines() if line.strip()]
        pairs = [(name, f"{name.removesuffix('.aedat')}_labels.csv") for name in names]
        _refuse_missing(root, "DVS128-Gesture", [n for n in itertools.chain(*pairs) if n not in files], 2 * len(pairs))
        trials[part] = [(files[recording], _gestures(files[table])) for recording, table in pairs]
        used += [files[n] for n in itertools.chain(*pairs)]

    def cuts(file: File, rows: list[tuple[int, int, int]]) -> Iterator[Cut]:
        events = decode_aedat3(file.read(MAX_BYTES), file.where, sort_within_us=LATE_US)
        for label, start, stop in rows:
            yield events.window(start, stop), (start, stop), label

    rule = "official trials, one sample per row of labels"
    return Recordings("dvs128-gesture", rule, GESTURES, trials, cuts, used=used)


@loader
def load_nmnist(root: Path | str, tree: Mapping[str, File], allow_partial: bool = False) -> Recordings:
    """N-MNIST, 34x34: folders or archives `Train` and `Test` of `<digit>/<number>.bin`, 60,000 and 10,000 recordings.

    Other numbers are refused unless `allow_partial`. Also reads a folder of `<number>.bs2` files whose labels are
    listed in `train*.txt` and `test*.txt`, lines of number and digit: small selections of N-MNIST are published so.
    """
    rule = "official folders"
    listed: dict[str, list[tuple[File, int]]] = {"train": [], "test": []}
    for (part, digit, _), file in sorted(pick(tree, r"(train|test)/([0-9])/([0-9]+)\.bin").items()):
        listed[part].append((file, int(digit)))
    if not any(listed.values()):
        rule = "lists beside the recordings"
        recordings = pick(tree, r"([0-9]+)\.bs2")
        for (part, _), file in sorted(pick(tree, r"(train|test)([^/]*)\.txt").items()):
            listed[part] += _labelled(file, recordings)
    counts = {part: len(items) for part, items in listed.items()}
    if not all(counts.values()):
        raise DataError(f"no N-MNIST under {root}: expected Train/<digit>/*.bin and Test/<digit>/*.bin, or .zip")
    if rule == "official folders" and not allow_partial and counts != {"train": 60_000, "test": 10_000}:
        raise DataError(
            f"{root} holds {counts['train']:,} + {counts['test']:,} of N-MNIST's 60,000 + 10,000 recordings: "
            "extract it again (or load it in Python with allow_partial=True)"
        )

    def cuts(file: File, label: int) -> Iterator[Cut]:
        data = file.read(nmnist.MAX_BYTES)
        yield nmnist.decode_nmnist(data, file.where, sort_within_us=LATE_US), None, label

    return Recordings("n-mnist", rule, tuple("0123456789"), listed, cuts, side=nmnist.SIZE)


@loader
def load_dvs_objects(root: Path | str, tree: Mapping[str, File], window_us: int = 500_000) -> Recordings:
    """Five objects filmed twice by a DVS128 (AEDAT 2.0): one folder trains, the other tests.

    Recordings (`Caixa.aedat`, also `Caixa_1.aedat`) are cut into whole windows of `window_us` microseconds from their
    first event on. Windows without an event are left out, and so are objects that only one folder holds.
    """
    if not 1000 <= window_us <= 10**9:
        raise ValueError(f"window_us must be 1,000 to 1,000,000,000 microseconds, got {window_us}")
    names = list(OBJECTS.values())
    recordings = sorted(pick(tree, rf"([^/]+)/({'|'.join(names)})((?:_[0-9]+)?)\.aedat", fold=False).items())
    listed: dict[str, list[tuple[File, int]]] = {}
    for part, folder in OBJECT_FOLDERS.items():
        listed[part] = [(file, names.index(key[1])) for key, file in recordings if key[0] == folder]
        labels = {label for _, label in listed[part]}
        missing = [f"{folder}/{name}.aedat" for label, name in enumerate(names) if label not in labels]
        _refuse_missing(root, "DVS128 objects", missing, len(OBJECTS))

    def cuts(file: File, label: int) -> Iterator[Cut]:
        events = decode_aedat2(file.read(MAX_BYTES), file.where, sort_within_us=LATE_US)
        for window, span in windows(events, window_us):
            yield window, span, label

    rule = f"{OBJECT_FOLDERS['train']} trains, {OBJECT_FOLDERS['test']} tests"
    settings = {"window_us": window_us, "empty windows": "left out"}
    return Recordings("dvs128-objects", rule, tuple(OBJECTS), listed, cuts, settings)


def windows(events: Events, window_us: int) -> Iterator[tuple[Events, tuple[int, int]]]:
    """The whole windows of a recording from its first event on that hold events, and their (start, stop) in microseconds."""
    if window_us < 1:
        raise ValueError(f"window_us must be at least 1 microsecond, got {window_us}")
    if len(events):
        first, last = int(events.t[0]), int(events.t[-1])
        for i in np.unique((events.t - first) // window_us).tolist():
            start, stop = first + i * window_us, first + (i + 1) * window_us
            if stop <= last + 1:
                yield events.window(start, stop), (start, stop)


def read_split(text: str, where: str) -> dict[str, list[tuple[str, int]]]:
    """(class, number) of the recordings of each part, in the file's order; see `src/lbq/data/splits/README.md`."""
    parts: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(
            r"(train|test) ([a-z]+) ([0-9]{1,6}(?:-[0-9]{1,6})?(?:,[0-9]{1,6}(?:-[0-9]{1,6})?)*)", line.strip()
        )
        if not match or match[2] not in CIFAR10_CLASSES:
            raise DataError(f"{where}, line {number}: expected 'train|test class numbers', got {line[:60]!r}")
        for item in match[3].split(","):
            low, _, high = item.partition("-")
            numbers = range(int(low), int(high or low) + 1)
            if sum(map(len, (*parts.values(), numbers))) > 10**6:  # before they take memory
                raise DataError(f"{where}, line {number}: more than a million recordings")
            parts[match[1]] += [(match[2], i) for i in numbers]
    everything = parts["train"] + parts["test"]
    if not all(parts.values()) or len(set(everything)) < len(everything):
        raise DataError(f"{where}: a part is empty, or a recording is named twice")
    return parts


def _cifar10_split(split: str | Path) -> tuple[str, dict[str, list[tuple[str, int]]]]:
    if split in ("natural", "lexicographic"):
        name = f"cifar10_dvs_{split}.txt"
        return name, read_split((resources("lbq.data") / "splits" / name).read_text("utf-8"), name)
    try:
        text = read_bounded(split, MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{split} is not text") from error
    return f"{Path(split).name} (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})", read_split(text, str(split))


def _gestures(file: File) -> list[tuple[int, int, int]]:
    """(label from 0, start, end in microseconds) of every row of a `*_labels.csv`."""
    header, *lines = file.text().splitlines() or [""]
    rows = []
    if [c.strip() for c in header.split(",")] != ["class", "startTime_usec", "endTime_usec"]:
        raise DataError(f"{file.where} does not begin with the line class,startTime_usec,endTime_usec")
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        match = re.fullmatch(r"\s*([0-9]{1,2})\s*,\s*([0-9]{1,18})\s*,\s*([0-9]{1,18})\s*", line)
        label, start, stop = map(int, match.groups()) if match else (0, 0, 0)
        if not 1 <= label <= len(GESTURES) or start >= stop:
            raise DataError(f"{file.where}, line {number}: expected class 1 to 11, start < end, got {line[:60]!r}")
        rows.append((label - 1, start, stop))
    return rows


def _labelled(table: File, recordings: Mapping[tuple[str, ...], File]) -> list[tuple[File, int]]:
    """The recordings that a list of 'number digit' lines names."""
    rows = []
    for line_number, line in enumerate(table.text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([0-9]{1,9})\s+([0-9])", line.strip())
        if not match:
            raise DataError(f"{table.where}, line {line_number}: expected a number and a digit, got {line[:60]!r}")
        if (match[1],) not in recordings:
            raise DataError(f"{table.where} names recording {match[1]}, but there is no {match[1]}.bs2")
        rows.append((recordings[match[1],], int(match[2])))
    return rows


def _refuse_missing(root: Path | str, name: str, missing: list[str], of: int) -> None:
    if missing:
        more = f" and {len(missing) - 1:,} more of {of:,}" if len(missing) > 1 else ""
        raise DataError(f"{name} is not complete under {root}: {missing[0]}{more} not found; extract it again")


def cache_folders(top: Path, digest: str) -> list[Path]:
    """Where decoded frames may lie: beside the recordings, or in the user's cache. The last folder can be written to."""
    beside = top / ".lbq-cache"
    if os.access(beside if beside.is_dir() else top, os.W_OK | os.X_OK):
        return [beside]
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lbq" / digest[:16]
    return [beside, own]  # somebody who may write there may have left the entry


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
