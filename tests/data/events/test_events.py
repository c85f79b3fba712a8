"""Event recordings: readers against an independent writer, hostile files, and the checks of `Events`."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbq.data.events import Events, read_bounded
from lbq.data.events.aedat2 import decode_aedat2, read_aedat2
from lbq.data.events.aedat3 import decode_aedat3, read_aedat3
from lbq.data.events.frames import to_frames
from lbq.data.events.nmnist import decode_nmnist, read_nmnist
from lbq.errors import DataError
from tests.support import aedat_writer as writer
from tests.support.some_events import EVENTS, SMALL, as_tuples, event_lists, events_of, random_events

Decoder = Callable[[bytes, str], Events]


# ---- readers against the writer


@given(event_lists(128))
def test_readers_return_what_the_writer_wrote(events: list[writer.Event]) -> None:
    assert as_tuples(decode_aedat2(writer.aedat2(events), "file")) == events
    assert as_tuples(decode_aedat3(writer.aedat3(events, per_packet=7), "file")) == events


@given(event_lists(34))
def test_nmnist_returns_what_the_writer_wrote(events: list[writer.Event]) -> None:
    assert as_tuples(decode_nmnist(writer.nmnist(events), "file")) == events


def test_reading_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks smaller than the file, packets larger than a chunk and smaller ones."""
    for module in ("aedat2", "aedat3"):
        monkeypatch.setattr(f"lbq.data.events.{module}.CHUNK_EVENTS", 64)
    events = random_events(1000, start=2**31 - 100_000)
    (tmp_path / "a").write_bytes(writer.aedat2(events))
    (tmp_path / "b").write_bytes(writer.aedat3(events, per_packet=150))
    (tmp_path / "c").write_bytes(
        writer.nmnist([(t % 10 + 100 * i, x % 34, y % 34, p) for i, (t, x, y, p) in enumerate(events)])
    )
    assert as_tuples(read_aedat2(tmp_path / "a")) == events
    assert as_tuples(read_aedat3(tmp_path / "b")) == events
    assert len(read_nmnist(tmp_path / "c")) == 1000
    swapped = read_aedat2(tmp_path / "a", transpose=True)
    assert as_tuples(swapped) == [(t, y, x, p) for t, x, y, p in events]


def test_orientation_of_the_dvs128() -> None:
    """Raw address 0 is the lower right pixel, ON; the last is the upper left, OFF."""
    data = writer.JAER_HEADER + struct.pack(">IIII", 0, 1, 0x7FFF, 2)
    assert as_tuples(decode_aedat2(data, "file")) == [(1, 127, 127, 1), (2, 0, 0, 0)]


def test_aedat2_clock_wraps_and_special_events_are_dropped() -> None:
    start = 2**32 - 5_000_000
    events = [(start, 0, 0, 1), *random_events(500, step=60_000_000, start=start)]  # 4 hours
    assert events[-1][0] > 3 * 2**32
    assert as_tuples(decode_aedat2(writer.aedat2(events), "file")) == events
    specials = [struct.pack(">II", address, 0) for address in (0x8000, 0xFFFF, 0x80000000)]
    mixed = b"".join(part for event in events for part in (writer.aedat2_event(event), specials[event[1] % 3]))
    assert as_tuples(decode_aedat2(writer.JAER_HEADER + mixed, "file")) == events
    assert len(decode_aedat2(writer.JAER_HEADER + b"".join(specials), "file")) == 0


def test_aedat3_overflow_validity_other_packets_and_capacity() -> None:
    events = [(2**31 - 1, 1, 2, 1), (2**31, 3, 4, 0), (5 * 2**31 + 7, 127, 0, 1)]
    assert as_tuples(decode_aedat3(writer.aedat3(events), "file")) == events
    bodies = [writer.aedat3_event(e, valid=v) for e, v in ((events[0], True), ((9, 200, 300, 0), False))]
    data = writer.CAER_HEADER
    data += writer.packet(0, [bytes(8)])  # a special event
    data += writer.packet(2, [bytes(100)])  # a frame
    data += writer.packet(1, bodies, valid=1, spare=3)
    data += writer.packet(1, [])
    data += writer.packet(3, [bytes(36)] * 2)
    data += writer.packet(1, [writer.aedat3_event(events[1])], overflow=1)
    assert as_tuples(decode_aedat3(data, "file")) == events[:2]
    wide = [(1, 345, 259, 1)]
    assert as_tuples(decode_aedat3(writer.aedat3(wide), "file", width=346, height=260)) == wide


def test_nmnist_overflow_marker() -> None:
    data = writer.nmnist([(5, 1, 2, 1), (8000, 0, 240, 0), (10, 3, 4, 0), (20, 0, 240, 0), (30, 33, 33, 1)])
    assert as_tuples(decode_nmnist(data, "file")) == [(5, 1, 2, 1), (8202, 3, 4, 0), (16414, 33, 33, 1)]


def test_late_events_are_sorted_on_request_alone() -> None:
    events = [(100, 1, 1, 1), (90, 2, 2, 0), (95, 3, 3, 1), (200, 4, 4, 0)]
    for data, decode in ((writer.aedat2(events), decode_aedat2), (writer.aedat3(events), decode_aedat3)):
        with pytest.raises(DataError, match=r"^file: time goes back at event 1, from 100 to 90 us: .*sort_within_us"):
            decode(data, "file")
        with pytest.raises(DataError, match="time goes back"):
            decode(data, "file", sort_within_us=9)
        assert as_tuples(decode(data, "file", sort_within_us=10)) == sorted(events)
    with pytest.raises(DataError, match="time goes back"):
        decode_nmnist(writer.nmnist([(e[0], 1, 1, 1) for e in events]), "file")


def test_late_events_are_found_across_chunks_and_sorted_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """CHUNK_EVENTS bounds what is looked at together: the latest event is late beside those of the chunk before."""
    for module in ("lbq.data.events", "lbq.data.events.aedat2", "lbq.data.events.aedat3"):
        monkeypatch.setattr(f"{module}.CHUNK_EVENTS", 2)
    late = [(0, 1, 1, 1), (1000, 2, 2, 0), (10, 3, 3, 1), (20, 4, 4, 0)]
    many = [
        (1 - i % 2, i % 100, i // 100, 1) for i in range(400)
    ]  # of many times that are equal, the first stays first
    for data, decode in ((writer.aedat2, decode_aedat2), (writer.aedat3, decode_aedat3)):
        with pytest.raises(DataError, match="time goes back at event 2, from 1000 to 10 us"):
            decode(data(late), "file", sort_within_us=989)
        assert as_tuples(decode(data(late), "file", sort_within_us=990)) == sorted(late)
        assert as_tuples(decode(data(many), "file", sort_within_us=1)) == many[1::2] + many[::2]


# ---- hostile files


VALID: dict[str, tuple[bytes, Decoder]] = {
    "aedat2": (writer.aedat2(EVENTS), decode_aedat2),
    "aedat3": (writer.aedat3(EVENTS, per_packet=9), decode_aedat3),
    "nmnist": (writer.nmnist(SMALL), decode_nmnist),
}


def packet_header(*fields: int) -> bytes:
    return writer.CAER_HEADER + struct.pack("<hhiiiiii", *fields)


BAD: dict[str, tuple[Decoder, bytes, str]] = {
    "empty 2": (decode_aedat2, b"", "not AEDAT 2.0: its first line is 'nothing'"),
    "empty 3": (decode_aedat3, b"", "not AEDAT 3.1"),
    "wrong version": (decode_aedat2, writer.CAER_HEADER, "not AEDAT 2.0: its first line is '#!AER-DAT3.1'"),
    "version cut off": (decode_aedat3, b"#!AER-DAT3.1", "not AEDAT 3.1"),
    "binary": (decode_aedat2, bytes(range(256)), "not AEDAT 2.0"),
    "header cut off": (decode_aedat2, writer.JAER_HEADER[:-5], "header is cut off"),
    "header without end": (decode_aedat3, writer.CAER_HEADER[:-3], "header is cut off"),
    "endless header line": (decode_aedat2, b"#!AER-DAT2.0\r\n#" + b"a" * 2**21, "longer than 1,048,576 bytes"),
    "endless header": (decode_aedat3, b"#!AER-DAT3.1\r\n" + b"#a\r\n" * 2**20 + b"#!END-HEADER\r\n", "cut off"),
    "header line without #": (decode_aedat3, b"#!AER-DAT3.1\r\nhello\r\n#!END-HEADER\r\n", "does not begin with '#'"),
    "compressed": (decode_aedat3, b"#!AER-DAT3.1\r\n#Format: PNGFrames\r\n#!END-HEADER\r\n", "format 'PNGFrames'"),
    "other camera": (decode_aedat2, b"#!AER-DAT2.0\r\n# AEChip: eu.Davis640\r\n", "camera 'eu.Davis640'"),
    "other addresses": (decode_aedat2, writer.JAER_HEADER + struct.pack(">II", 0x12345, 0), "0x00012345 is not of a"),
    "event cut off 2": (decode_aedat2, writer.aedat2(EVENTS)[:-3], "cut off: 5 bytes after event 39"),
    "event cut off n": (decode_nmnist, writer.nmnist(SMALL)[:-1], "cut off: 4 bytes after event 39"),
    "packet cut off": (decode_aedat3, writer.aedat3(EVENTS)[:-1], "it ends inside packet 0"),
    "packet header cut off": (decode_aedat3, writer.aedat3(EVENTS) + bytes(27), "inside the header of packet 1"),
    "absurd number": (decode_aedat3, packet_header(1, 1, 8, 4, 0, 2**31 - 1, 2**31 - 1, 0), "claims a wrong size"),
    "absurd size": (decode_aedat3, packet_header(0, 1, 2**31 - 1, 4, 0, 2**31 - 1, 0, 0), "claims a wrong size"),
    "negative number": (decode_aedat3, packet_header(1, 1, 8, 4, 0, 5, -5, 0), "makes no sense"),
    "negative size": (decode_aedat3, packet_header(0, 1, -8, 4, 0, 5, 5, 5), "makes no sense"),
    "negative overflow": (decode_aedat3, packet_header(1, 1, 8, 4, -1, 0, 0, 0), "makes no sense"),
    "more valid than there": (decode_aedat3, packet_header(1, 1, 8, 4, 0, 0, 0, 1), "makes no sense"),
    "other event size": (decode_aedat3, packet_header(1, 1, 12, 4, 0, 0, 0, 0), "events of 12 bytes, not 8"),
    "negative time": (decode_aedat3, writer.CAER_HEADER + writer.packet(1, [struct.pack("<Ii", 1, -1)]), "a negative"),
    "pixel outside 3": (decode_aedat3, writer.aedat3([(0, 128, 0, 1)]), "event 0 has x = 128, but x must be below 128"),
    "pixel outside n": (decode_nmnist, writer.nmnist([(0, 33, 34, 1)]), "event 0 has y = 34, but y must be below 34"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_one_line(case: str) -> None:
    decode, data, message = BAD[case]
    with pytest.raises(DataError) as caught:
        decode(data, "some/file")
    text = str(caught.value)
    assert text.startswith("some/file")
    assert message in text
    assert "\n" not in text
    assert len(text) < 250


@pytest.mark.parametrize("case", ["event cut off 2", "event cut off n", "packet cut off", "packet header cut off"])
def test_what_is_whole_of_a_recording_that_was_cut_off_is_read(case: str) -> None:
    """By the command that the error gives."""
    decode, data, _ = BAD[case]
    with pytest.raises(DataError) as caught:
        decode(data, "some file")
    (size,) = re.findall(r"keep what is whole: truncate -s (\d+) 'some file'$", str(caught.value))
    whole = decode(data[: int(size)], "some file")
    assert len(whole) == {"packet cut off": 0, "packet header cut off": 40}.get(case, 39)


@pytest.mark.parametrize("kind", VALID)
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_mutated_files_give_events_or_a_data_error(kind: str, seed: int) -> None:
    original, decode = VALID[kind]
    rng = random.Random(seed)
    data = bytearray(original)
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(4):
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                data[rng.randrange(len(data))] = rng.choice((0, 255, 128, 35, 10))
            case 2:
                del data[rng.randrange(len(data)) :]
            case 3:
                at, length = rng.randrange(len(data)), rng.randrange(20)
                data[at : at + length] = rng.randbytes(rng.randrange(20))
        data = data or bytearray(1)
    try:
        events = decode(bytes(data), "file")
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
    else:
        to_frames(events, 3, "time", (5, 5))


LARGE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (15, 15))  # of the processor: they take less than one
from pathlib import Path
from lbq.data.events.aedat2 import read_aedat2
from lbq.data.events.aedat3 import read_aedat3
from lbq.data.events.nmnist import read_nmnist
from lbq.errors import DataError
try:
    {"2": read_aedat2, "3": read_aedat3, "n": read_nmnist}[sys.argv[1]](sys.argv[2])
except DataError as error:
    status = Path("/proc/self/status")  # getrusage would count what the parent had before exec
    lines = status.read_text().splitlines() if status.exists() else []
    print(*[line.split()[1] for line in lines if line.startswith("VmHWM:")] or [0], error)
"""


def write_large(path: Path, kind: str) -> None:
    """As large as is accepted, and wrong at the very end."""
    limit = 128 * 2**20
    with open(path, "wb") as file:
        if kind == "sparse":
            file.truncate(2**40)
        elif kind == "aedat2":
            count = (limit - len(writer.JAER_HEADER)) // 8
            words = np.zeros((count, 2), ">u4")
            words[:, 1] = np.arange(count)
            words[-1, 1] = 0
            file.write(writer.JAER_HEADER + words.tobytes())
        elif kind == "aedat3":
            count = (limit - len(writer.CAER_HEADER) - 28) // 8
            words = np.ones((count, 2), "<u4")
            words[:, 1] = np.arange(count)
            words[-1, 0] = 2**32 - 1
            file.write(packet_header(1, 1, 8, 4, 0, count, count, count) + words.tobytes())
        elif kind == "empty packets":
            file.write(writer.CAER_HEADER + writer.packet(1, []) * (limit // 28 - 10))
        elif kind == "single events":
            file.write(
                writer.CAER_HEADER + writer.packet(1, [writer.aedat3_event((9, 1, 1, 1))]) * (2**19 - 1) + bytes(3)
            )


@pytest.mark.parametrize(
    ("kind", "reader", "message"),
    [
        ("sparse", "2", "raise max_bytes"),
        ("sparse", "n", "raise max_bytes"),
        ("aedat2", "2", "time goes back"),
        ("aedat3", "3", "x = 32767"),
        ("empty packets", "3", "more than 524,288 packets"),
        ("single events", "3", "cut off"),
    ],
)
def test_large_hostile_files_end_soon_within_512_mb(tmp_path: Path, kind: str, reader: str, message: str) -> None:
    path = tmp_path / "file"
    write_large(path, kind)
    command = [sys.executable, "-c", LARGE, reader, str(path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    path.unlink()
    kilobytes, error = out.stdout.split(" ", 1)
    assert message in error
    assert int(kilobytes) < 512 * 1024


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read .*absent: No such file"):
        read_bounded(tmp_path / "absent")
    with pytest.raises(DataError, match="cannot read|not a regular file"):
        read_bounded(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        read_bounded(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(bytes(10))
    assert read_bounded(tmp_path / "file", 10) == bytes(10)
    with pytest.raises(DataError, match="has 10 bytes, more than the limit of 9: raise max_bytes"):
        read_bounded(tmp_path / "file", 9)


def test_events_are_validated() -> None:
    good = events_of(EVENTS)
    with pytest.raises(ValueError, match="^p must be an array .* as long as t, not uint8"):
        Events(good.t, good.x, good.y, good.p[1:], 128, 128)
    with pytest.raises(ValueError, match=r"^x must be an array \[N\] of whole numbers, .* not float64 \[40\]"):
        Events(good.t, good.x / 2, good.y, good.p, 128, 128)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^t must be .*\(1e6 \* t\).astype\(np.int64\) of seconds"):
        Events(good.t / 1e6, good.x, good.y, good.p, 128, 128)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^t must be an array .* not list"):
        Events([1], good.x, good.y, good.p, 128, 128)  # type: ignore[arg-type]
    sizes: tuple[Any, ...] = ((0, 4), (4, 65537), (4.5, 4), (4, "4"))
    for size in sizes:
        with pytest.raises(ValueError, match=r"(width|height) must be 1 to 65536 pixels, got"):
            Events(good.t, good.x, good.y, good.p, *size)
    side: Any = np.int32(128)
    assert len(Events(good.t, good.x, good.y, good.p, side, 128)) == 40
    with pytest.raises(DataError, match="y must be below 2"):
        Events(good.t, good.x, np.full_like(good.y, 2), good.p, 128, 2)
    with pytest.raises(DataError, match=r"time goes back .*: np.argsort\(t, kind='stable'\) is the order"):
        Events(good.t[::-1].copy(), good.x, good.y, good.p, 128, 128)


def test_whole_numbers_of_any_type_that_fit_are_converted() -> None:
    good = events_of(EVENTS)
    kinds: tuple[tuple[Any, Any, Any], ...] = (
        (np.uint64, np.int16, np.bool_), (np.int32, np.int32, np.int8), (np.uint32, np.uint8, np.int64), (">i8", ">u2", ">i2"),
    )  # fmt: skip
    for stamp, pixel, polarity in kinds:
        x, y = good.x.astype(pixel), good.y.astype(pixel)
        events = Events(good.t.astype(stamp), x, y, good.p.astype(polarity), 128, 128)
        assert [a.dtype for a in (events.t, events.x, events.y, events.p)] == [np.int64, np.uint16, np.uint16, np.uint8]
        assert as_tuples(events) == EVENTS


@pytest.mark.parametrize(
    ("name", "dtype", "values", "message"),
    [
        ("x", np.int16, [0, -3, -4, 200], "event 1 has x = -3, but x must be at least 0"),
        ("x", np.int64, [0, 1, 2**16 + 1, -1], "event 2 has x = 65537, but x must be below 128"),
        ("y", np.uint64, [0, 2**64 - 1, 0, 0], "event 1 has y = 18446744073709551615, but y must be below 128"),
        ("p", np.int32, [0, 1, 256, 1], "event 2 has p = 256, but p must be below 2"),
        ("p", np.int8, [1, -1, 1, 0], "event 3 has p = 0 where others have -1: OFF is either 0 or -1"),
        ("p", np.int8, [-1, 2, 1, 1], "event 1 has p = 2 where others have -1"),
        ("p", np.int8, [1, -128, 1, 1], "event 1 has p = -128, but p must be at least 0"),
        ("t", np.uint64, [0, 1, 2, 2**63], "event 3 has t = 9223372036854775808, but t must be below"),
    ],
)
def test_values_that_do_not_fit_are_named(name: str, dtype: Any, values: list[int], message: str) -> None:
    columns: Any = {n: np.zeros(4, np.int64) for n in "txyp"} | {name: np.array(values, dtype)}
    with pytest.raises(DataError) as caught:
        Events(**columns, width=128, height=128)
    assert str(caught.value).startswith(message)


def test_polarities_of_minus_one_are_off() -> None:
    zero: Any = np.zeros(3, np.int64)
    for values, expected in (([-1, 1, -1], [0, 1, 0]), ([-1, -1, -1], [0, 0, 0]), ([1, 1, 1], [1, 1, 1])):
        for dtype in (np.int8, np.int64):
            p: Any = np.array(values, dtype)
            assert Events(zero, zero, zero, p, 4, 4).p.tolist() == expected


@pytest.mark.parametrize("name", list("txyp"))
def test_masked_arrays_are_refused(name: str) -> None:
    columns: Any = {n: np.arange(2) for n in "txyp"}
    columns[name] = np.ma.masked_array(columns[name], [False, True])
    with pytest.raises(ValueError, match=rf"^{name} must not be a masked array: give np.asarray\(a\)"):
        Events(**columns, width=4, height=4)
    unmasked = {n: np.asarray(a)[~np.ma.getmaskarray(columns[name])] for n, a in columns.items()}
    assert len(Events(**unmasked, width=4, height=4)) == 1


def test_structured_arrays() -> None:
    """As readers name and type their fields, in any order and with others between them."""
    for kinds, shared in (
        ({"x": np.int16, "y": np.int16, "t": np.int64, "p": np.bool_}, "tp"),
        ({"t": np.uint32, "p": np.uint8, "y": np.uint16, "x": np.uint16}, "xyp"),
        ({"timestamp": np.int64, "x": np.int16, "y": np.int16, "polarity": np.int8, "_p1": np.uint8}, "t"),
    ):
        array = np.zeros(len(EVENTS), list(kinds.items()))
        for name, column in zip("txyp", zip(*EVENTS, strict=True), strict=True):
            array[name if name in kinds else {"t": "timestamp", "p": "polarity"}[name]] = column
        events = Events.from_array(array, 128, 128)
        assert as_tuples(events) == EVENTS
        assert [n for n in "txyp" if np.shares_memory(getattr(events, n), array)] == [n for n in "txyp" if n in shared]
    with pytest.raises(ValueError, match="no field 'p': its fields are x, y, t"):
        Events.from_array(np.zeros(3, [("x", int), ("y", int), ("t", int)]), 128, 128)
    with pytest.raises(ValueError, match=r"must be a structured array .*Events\(t, x, y, p, ...\) takes four"):
        Events.from_array(np.zeros((3, 4), np.int64), 128, 128)
