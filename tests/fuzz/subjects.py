"""The kinds of files that the fuzzer changes: a valid one of each, how it is changed, and what reading it gives."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import shutil
import struct
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.torch import save as serialise

from lbq import engine
from lbq.config import Config
from lbq.data.events.frames import to_frames
from lbq.data.events.live import time_frames
from lbq.data.events.recording import read_recording
from lbq.data.user_arrays import load_own
from lbq.engine.file import container
from lbq.errors import LbqError
from lbq.report import output
from lbq.results.gather import gather
from lbq.runs import checkpoint
from lbq.runs.build import build
from lbq.system import toml
from lbq.system.shown import HIDDEN
from lbq.training import job
from tests.fuzz.mutations import INTEGERS, TEXTS, change, change_array, change_bytes
from tests.support import event_writers, small_runs
from tests.support.paths import ROOT
from tests.support.small_nets import deployed
from tests.support.some_events import SMALL


@dataclass(frozen=True)
class Subject:
    """A kind of file. mutate: other bytes, sealed again. read: the result of a file, as a text."""

    suffix: str
    original: bytes
    mutate: Callable[[Random], bytes]
    read: Callable[[Path], str]


def _few(random: Random) -> range:
    return range(random.choice([1, 1, 2, 3]))


def artefact(folder: Path) -> Subject:
    """A deployed network; its golden inputs show whether it is still the same one."""
    path = folder / "model.lbq"
    engine.save(path, deployed("resnet8w2"))
    data = path.read_bytes()
    tensors, text, _ = container.decode(data)
    tree = json.loads(text)
    inputs = tensors["golden/input"].copy()

    def mutate(random: Random) -> bytes:
        mine, arrays = tree, dict(tensors)
        for _ in _few(random):
            if random.random() < 0.7:
                mine = change(mine, random)
                continue
            name = random.choice(sorted(arrays))
            match random.randrange(3):
                case 0:
                    arrays[name] = change_array(arrays[name], random)
                case 1:
                    del arrays[name]
                case _:
                    arrays[random.choice(TEXTS)] = arrays[name]
        return container.encode(arrays, json.dumps(mine))

    def read(path: Path) -> str:
        net = engine.load(path)
        net.verify()
        if net.golden is None or net.golden.inputs.shape != inputs.shape:
            raise LbqError("it has other golden inputs")
        return hashlib.sha256(net.run(inputs).logits.tobytes()).hexdigest()

    return Subject(".lbq", data, mutate, read)


def run_checkpoint(folder: Path) -> Subject:
    """A run that was interrupted; it must end with the weights that it would have had. Needs `small_runs.use_few_digits`."""
    settings = small_runs.config(small_runs.TINY, "train.epochs=2", "optim.momentum=0.9")
    stopped = folder / "run"
    try:
        with small_runs.after_step(6, small_runs.raising(small_runs.Killed)):
            small_runs.run(settings, stopped)
    except small_runs.Killed:
        pass
    file = stopped / job.CHECKPOINTS / checkpoint.LAST
    tensors, values = checkpoint.read(file)

    def mutate(random: Random) -> bytes:
        mine, arrays = values, dict(tensors)
        for _ in _few(random):
            if random.random() < 0.6:
                mine = change(mine, random)
                continue
            name = random.choice(sorted(arrays))
            tensor = arrays.pop(name)
            match random.randrange(5):
                case 1:
                    arrays[name] = random.choice([tensor.half(), tensor.double(), tensor.long()])
                case 2:
                    arrays[name] = tensor[None].contiguous()
                case 3:
                    arrays[name] = tensor.float() * float("nan")
                case 4:
                    arrays[name + random.choice(TEXTS)] = tensor
        text = json.dumps(mine)
        metadata = {"format": checkpoint.FORMAT, "values": text, "sha256": checkpoint.digest(arrays, text)}
        return serialise({name: tensor.clone() for name, tensor in arrays.items()}, metadata)

    def read(path: Path) -> str:
        with TemporaryDirectory(dir=folder) as temporary:
            copied = Path(temporary) / "run"
            shutil.copytree(stopped, copied, ignore=shutil.ignore_patterns("*.safetensors"))
            shutil.copy(path, copied / job.CHECKPOINTS / checkpoint.LAST)
            return str(small_runs.run(settings, copied)["weights_sha256"])

    return Subject(".safetensors", file.read_bytes(), mutate, read)


def configuration(_: Path) -> Subject:
    """Settings of a training: those that are accepted are written and read back as they are, and make a network."""
    text = small_runs.config().to_toml()
    tree = tomllib.loads(text)

    def mutate(random: Random) -> bytes:
        mine = tree
        for _ in _few(random):
            mine = change(mine, random)
        data = toml.write(mine).encode()
        if random.random() < 0.1:
            at = random.randrange(len(data))
            data = data[:at] + random.choice(TEXTS).encode() + data[at + random.randrange(3) :]
        return data

    def read(path: Path) -> str:
        config = Config.load(path)
        if Config.from_dict(toml.parsed(config.to_toml())) != config:
            return "another configuration is read back"
        build(config)
        return "read back"

    return Subject(".toml", text.encode(), mutate, read)


def record(folder: Path) -> Subject:
    """The record of a run: its report shows no markup and no hidden characters of the file."""
    tree = json.loads((ROOT / "results" / "cifar10_resnet20w128_ann_60ep_s0.json").read_text())
    tree["log"] = tree["log"][:2]

    def mutate(random: Random) -> bytes:
        mine = tree
        for _ in _few(random):
            mine = change(mine, random)
        return json.dumps(mine).encode()

    def read(path: Path) -> str:
        gathered = gather([path])
        with TemporaryDirectory(dir=folder) as temporary:
            texts = []
            for format in ("md", "html"):
                output.make(place := Path(temporary) / f"report.{format}", gathered, format)
                texts.append(place.read_text())
        bad = HIDDEN.search("".join(texts)) or any("<img src=x" in text for text in texts)
        return "the report holds what the record should not bring" if bad or "](javascript:" in texts[0] else "shown"

    return Subject(".json", json.dumps(tree).encode(), mutate, read)


def arrays(folder: Path) -> Subject:
    """A dataset as arrays: whatever its headers say, its numbers are those that are stored."""
    numbers = np.random.default_rng(0)
    stored: dict[str, Any] = {
        "images": numbers.integers(0, 256, (12, 1, 8, 8), np.uint8),
        "labels": np.arange(12) % 3,
        "classes": np.array(["a", "b", "c"]),
    }
    headers = {n: {"descr": a.dtype.str, "fortran_order": False, "shape": list(a.shape)} for n, a in stored.items()}
    np.savez(folder / "test.npz", **stored)

    def mutate(random: Random) -> bytes:
        mine = headers
        for _ in _few(random):
            mine = change(mine, random)
        return _packed(mine, random.random() < 0.2)

    def _packed(headers: Any, longer: bool = False) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, header in headers.items():
                if isinstance(header, dict) and isinstance(header.get("shape"), list):
                    header = {**header, "shape": tuple(header["shape"])}
                text = repr(header).encode()
                text += b" " * (-(len(text) + 11) % 64) + b"\n"
                data = stored[name].tobytes() if name in stored else b""
                start = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
                archive.writestr(f"{name}.npy", start + data + bytes(50_000_000 * longer))
        return file.getvalue()

    def read(path: Path) -> str:
        with TemporaryDirectory(dir=folder) as temporary:
            shutil.copy(folder / "test.npz", temporary)
            shutil.copy(path, Path(temporary) / "train.npz")
            data = load_own(temporary)
        pixels, labels = data.train.images, data.train.labels
        return f"{np.bincount(pixels.ravel(), minlength=256).tolist()} {np.bincount(labels).tolist()}"

    return Subject(".npz", _packed(headers), mutate, read)


def recording(_: Path) -> Subject:
    """An AEDAT 4 recording with LZ4. It has no checksum: whatever is read has as many events in its frames as in its arrays."""

    def mutate(random: Random) -> bytes:
        compression, place = random.randrange(2), random.choice(["time", "events", "packet", "file", "bomb"])
        _, *pixel = SMALL[-1]
        strange = struct.pack("<qhhB3x", random.choice([n for n in INTEGERS if n < 2**63]), *pixel)
        body = event_writers.event_packet(SMALL)
        body = body[:-16] + strange if place == "time" else body
        body = change_bytes(body, random) if place == "events" else body
        body = event_writers.lz4_frame(body) if compression else body
        body = change_bytes(body, random) if place == "packet" else body
        if place == "bomb":  # one byte, repeated 255 times for each byte of the file
            block = b"\x1f0\x01\x00" + b"\xff" * random.choice([9, 2**12, 2**19, 2**22]) + b"\0"
            body = struct.pack("<IBBBI", 0x184D2204, 0x60, 0x40, 0, len(block)) + block + bytes(4)
        data = event_writers.aedat4([], compression=compression) + struct.pack("<ii", 0, len(body)) + body
        return change_bytes(data, random) if place == "file" else data

    def read(path: Path) -> str:
        events = read_recording(path)
        size = min(8, events.height), min(8, events.width)
        for _ in itertools.islice(time_frames(events, 10**6, size), 4):
            pass
        sums = {int(to_frames(events, 4, by, size).sum()) for by in ("count", "time")}
        same = sums == {len(events)} or len(events) > 255  # a pixel counts no further
        return "read" if same else "its frames have other events"

    return Subject(".aedat4", event_writers.aedat4(SMALL, compression=1), mutate, read)


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "artefact": artefact,
    "checkpoint": run_checkpoint,
    "configuration": configuration,
    "record": record,
    "data": arrays,
    "recording": recording,
}


def changed(subject: Subject, random: Random) -> bytes:
    """Bytes that differ from the original's. A change that cannot be written at all is passed over."""
    while True:
        try:
            data = subject.mutate(random)
        except (LbqError, ValueError, TypeError, OverflowError, LookupError, AttributeError):
            continue
        if data != subject.original:
            return data
