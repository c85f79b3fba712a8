"""AEDAT 4 and Prophesee's files: readers against an independent writer, by hand, hostile files, and formats told apart."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lbq.data.events import Events, prophesee
from lbq.data.events.aedat4 import decode_aedat4
from lbq.data.events.frames import to_frames
from lbq.data.events.live import time_frames
from lbq.data.events.lz4 import decompress
from lbq.data.events.prophesee import decode_prophesee
from lbq.data.events.recording import read_recording
from lbq.errors import DataError
from tests.support import aedat_writer, event_writers
from tests.support.some_events import SMALL, as_tuples, random_events

Decode = Callable[..., Events]
FORMATS: dict[str, tuple[Callable[..., bytes], Decode]] = {
    "aedat4": (event_writers.aedat4, decode_aedat4),
    "aedat4 table": (partial(event_writers.aedat4, table=True), decode_aedat4),
    "aedat4 lz4": (partial(event_writers.aedat4, compression=1), decode_aedat4),
    "aedat4 lz4 high": (partial(event_writers.aedat4, compression=2, per_packet=500), decode_aedat4),
    "evt2": (event_writers.evt2, decode_prophesee),
    "evt3": (event_writers.evt3, decode_prophesee),
    "dat": (event_writers.dat, decode_prophesee),
}


def rows_of_pixels(seed: int = 3) -> list[aedat_writer.Event]:
    """Events of which many come at one time in one row, as in a vector: in order of x, with gaps."""
    rng, events = np.random.default_rng(seed), list[aedat_writer.Event]()
    for t in np.cumsum(rng.integers(1, 900, 60)).tolist():
        y, p = (int(n) for n in rng.integers(0, (128, 2)))
        columns = np.sort(rng.choice(128, int(rng.integers(1, 40)), replace=False))
        events += [(t, x, y, p) for x in columns.tolist()]
    return events


@pytest.mark.parametrize("name", FORMATS)
def test_readers_return_what_the_writer_wrote(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, decode = FORMATS[name]
    for events in ([], random_events(300, seed=1), rows_of_pixels()):
        assert as_tuples(decode(write(events), "f")) == events
    monkeypatch.setattr(prophesee, "CHUNK_EVENTS", 12)  # three words at a time: all state goes from part to part
    assert as_tuples(decode(write(events), "f")) == events
    assert (decode(write(events, (200, 300)), "f").width, decode(write(events, (200, 300)), "f").height) == (200, 300)


@pytest.mark.parametrize(("name", "bits"), [("evt2", 34), ("evt3", 24), ("dat", 32)])
def test_clocks_wrap(name: str, bits: int) -> None:
    write, decode = FORMATS[name]
    events = random_events(100, start=2**bits - 10_000)
    assert events[0][0] < 2**bits < events[-1][0]
    assert as_tuples(decode(write(events), "f")) == events


def test_evt3_by_hand() -> None:
    """In front of a time and a row nothing is known; triggers and other words are passed over; vectors go on to the right."""
    words = [
        0x2805,
        0x8001,
        0x2805,
        0x0803,
        0x4FFF,
        0x2805,
        0x6010,
        0xA123,
        0x3064,
        0x4801,
        0x7777,
        0x5081,
        0xE000,
        0x2007,
    ]
    data = event_writers.raw_header("3.0", (128, 128)) + struct.pack(f"<{len(words)}H", *words)
    expected = [
        (4096, 5, 3, 1),
        (4112, 100, 3, 0),
        (4112, 111, 3, 0),
        (4112, 112, 3, 0),
        (4112, 119, 3, 0),
        (4112, 7, 3, 0),
    ]
    assert as_tuples(decode_prophesee(data, "f")) == expected


def test_the_upper_part_of_a_time_begins_with_a_lower_one_of_zero() -> None:
    """An event between both words of a new time is of its beginning, not 4 ms later. One said again changes nothing."""
    words = [0x8001, 0x6FF0, 0x0003, 0x2001, 0x8001, 0x2002, 0x8002, 0x2003, 0x6004, 0x2004]
    data = event_writers.raw_header("3.0", (128, 128)) + struct.pack(f"<{len(words)}H", *words)
    assert [t for t, *_ in as_tuples(decode_prophesee(data, "f"))] == [8176, 8176, 8192, 8196]


def test_evt2_by_hand() -> None:
    words = [
        0x10000000,
        0x80000002,
        0x1 << 28 | 5 << 22 | 9 << 11 | 4,
        0xA0000000,
        0xE1234567,
        6 << 22 | 127 << 11 | 127,
    ]
    data = event_writers.raw_header("2.0", (128, 128)) + struct.pack("<6I", *words)
    assert as_tuples(decode_prophesee(data, "f")) == [(133, 9, 4, 1), (134, 127, 127, 0)]


def test_the_size_of_a_sensor_stands_in_the_text_or_is_given() -> None:
    text = b"% format EVT3;height=30;width=40\n"
    assert decode_prophesee(event_writers.evt3([(5, 1, 2, 0)], header=text), "f").width == 40
    bare = event_writers.dat(SMALL, None, kind=0)
    assert decode_prophesee(bare, "f", size=(34, 34)).height == 34
    with pytest.raises(
        DataError, match=r"f does not say how large its sensor is: give size=\(width, height\), lbq watch"
    ):
        decode_prophesee(bare, "f")


# ---- hostile files


def packets(*bodies: bytes, compression: int = 0) -> bytes:
    """An AEDAT 4 file of these packets."""
    whole = event_writers.aedat4([], compression=compression)
    return whole + b"".join(struct.pack("<ii", 0, len(body)) + body for body in bodies)


GOOD, LZ4 = event_writers.aedat4(SMALL), event_writers.aedat4(SMALL, compression=1)
RAW = event_writers.raw_header
BAD: dict[str, tuple[Decode, bytes, str]] = {
    "zstd": (decode_aedat4, event_writers.aedat4([], compression=3), "compressed with Zstandard; none and LZ4 can be read"),
    "compression 9": (decode_aedat4, event_writers.aedat4([], compression=9), "compressed with kind 9"),
    "no stream": (decode_aedat4, event_writers.aedat4([], kinds=("FRME", "IMUS")), "has 0 streams of events"),
    "two streams": (decode_aedat4, event_writers.aedat4([], kinds=("EVTS", "EVTS")), "has 2 streams of events"),
    "no size": (decode_aedat4, event_writers.aedat4([], (0, 128)), "does not say how large its sensor is"),
    "another version": (decode_aedat4, b"#!AER-DAT4.1\r\n", "is not AEDAT 4.0"),
    "endless header": (decode_aedat4, GOOD[:14] + event_writers.io_header(0, -1, bytes(2**20)), "header is longer than"),
    "header cut off": (decode_aedat4, GOOD[:60], "cut off, or its tables are damaged"),
    "packet cut off": (decode_aedat4, GOOD[:-1], "cut off inside packet"),
    "packet header cut off": (decode_aedat4, GOOD + bytes(5), "cut off, or its tables are damaged"),
    "table beyond": (decode_aedat4, event_writers.aedat4(SMALL, table=True)[:-30], "its table of packets would begin at byte"),
    "other packet": (decode_aedat4, packets(event_writers.event_packet([], b"FRME")), "packet 0 holds no events"),
    "more events than bytes": (decode_aedat4, packets(event_writers.event_packet(SMALL)[:-16]), "its tables are damaged"),
    "negative pixel": (decode_aedat4, event_writers.aedat4([(1, -1, 0, 0)]), "an event at a negative pixel"),
    "beyond the sensor 4": (decode_aedat4, event_writers.aedat4(SMALL, (8, 8)), "must be below 8: the file is damaged"),
    "end of time": (decode_aedat4, event_writers.aedat4([(2**63 - 1, 0, 0, 0)]), "event 0 has the time 9223372036854775807 us"),
    "before all time": (decode_aedat4, event_writers.aedat4([(0, 0, 0, 0), (-(2**63), 0, 0, 0)]), "event 1 has the time -9223"),
    "time goes back": (decode_aedat4, event_writers.aedat4(SMALL[::-1]), "time goes back at event 1"),
    "not lz4": (decode_aedat4, packets(event_writers.event_packet(SMALL), compression=1), "packet 0 is no LZ4 frame"),
    "packets of nothing": (decode_aedat4, GOOD + struct.pack("<ii", 1, 0) * 2**19, "has more than 524,288 packets"),
    "not prophesee": (decode_prophesee, b"%no", "is not of a Prophesee camera"),
    "no encoding": (decode_prophesee, b"% end\n", "encoded as one that it does not name"),
    "evt 2.1": (decode_prophesee, RAW("2.1", (8, 8)), r"encoded as 2\.1; EVT 2\.0, EVT 3\.0 and DAT can be read"),
    "histograms": (decode_prophesee, b"% format HISTO3D;height=320;width=320\n% end\n", "encoded as HISTO3D"),
    "big-endian": (decode_prophesee, b"% endianness big\n" + RAW("3.0", (8, 8)), "is big-endian"),
    "endless text": (decode_prophesee, b"% evt 3.0" + b" " * 2**20 + b"\n", "text header is cut off, or longer"),
    "huge sensor": (decode_prophesee, RAW("3.0", (99999, 8)), "a sensor of 99999 x 8 pixels"),
    "word cut off": (decode_prophesee, event_writers.evt2(SMALL)[:-1], "cut off: 3 bytes after word"),
    "beyond the sensor": (decode_prophesee, event_writers.evt2(SMALL, (8, 8)), "must be below 8: the file is damaged"),
    "dat of triggers": (decode_prophesee, event_writers.dat(SMALL, kind=14), "holds events of kind 14 and 8 bytes"),
    "dat cut off": (decode_prophesee, b"% Data file containing CD events\n% Width 3\n% Height 3\n", "cut off behind its text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_one_line(case: str) -> None:
    decode, data, message = BAD[case]
    with pytest.raises(DataError, match=message) as refused:
        decode(data, "f")
    assert str(refused.value).startswith("f")
    assert "\n" not in str(refused.value)


def test_the_longest_times_that_are_read_can_be_cut_and_compared() -> None:
    ends = [(1 - 2**62, 0, 0, 0), (2**62 - 1, 0, 0, 0)]
    assert to_frames(decode_aedat4(event_writers.aedat4(ends), "f"), 2, "time").sum(axis=(1, 2, 3)).tolist() == [1, 1]
    assert next(time_frames(decode_aedat4(event_writers.aedat4(ends[1:]), "f"), 10**9)).sum() == 1
    with pytest.raises(DataError, match="time goes back at event 1"):
        decode_aedat4(event_writers.aedat4(ends[::-1]), "f", sort_within_us=10_000)


def test_few_bytes_that_hold_very_many_events_are_refused_before_they_take_memory() -> None:
    vectors = RAW("3.0", (128, 128)) + b"\xff\x4f" * 2**21
    with pytest.raises(DataError, match="f has 25,165,824 events, more than the limit of 16,777,216: raise max_events"):
        decode_prophesee(vectors, "f")
    with pytest.raises(DataError, match="f has 25,165,824 events, more than the limit of 100"):
        decode_prophesee(vectors, "f", max_events=100)
    with pytest.raises(DataError, match="f has more than 39 events"):
        decode_aedat4(event_writers.aedat4(SMALL, per_packet=500), "f", max_events=39)
    repeats = b"\x1f0\x01\x00" + b"\xff" * 2**15 + b"\x00"  # of one byte: 8 million times
    bomb = struct.pack("<IBBBI", 0x184D2204, 0x60, 0x40, 0, len(repeats)) + repeats
    tracemalloc.start()
    with pytest.raises(DataError, match="f holds more than 5,000 bytes"):
        decompress(bomb, "f", 5000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20


@pytest.mark.parametrize("name", ["aedat4", "aedat4 lz4", "evt2", "evt3", "dat"])
def test_mutated_files_give_events_or_a_data_error(name: str) -> None:
    write, decode = FORMATS[name]
    rng, good = np.random.default_rng(0), write(SMALL[:12])
    for _ in range(150):
        data = np.frombuffer(good, np.uint8).copy()
        at = rng.integers(0, len(data), rng.integers(1, 4))
        data[at] = rng.integers(0, 256, len(at))
        cut = int(rng.integers(0, len(data) + 1)) if rng.random() < 0.3 else len(data)
        with suppress(DataError):
            assert len(decode(data[:cut].tobytes(), "f")) <= 12 * 12


def test_lz4_frames_give_what_went_in_and_cut_ones_are_refused() -> None:
    rng = np.random.default_rng(1)
    content = (
        bytes(rng.integers(0, 4, 900, np.uint8))
        + b"abcabcabcabc" * 80
        + bytes(70_000)
        + bytes(rng.integers(0, 256, 99, np.uint8))
    )
    for size in (64, 1000, 90_000):
        frame = event_writers.lz4_frame(content, size, checks=size == 1000)
        with pytest.raises(DataError, match="f holds more than"):
            decompress(frame, "f", len(content) - 1)
        assert decompress(frame, "f", len(content)) == content
    for end in range(0, len(frame) - 4, 7):
        with pytest.raises(DataError, match="f: its LZ4 frame is cut off or damaged"):
            decompress(frame[:end], "f", len(content))
    for block in (b"\x10a\x00\x00", b"\x10a\x02\x00", b"\x10a\x01", b"\x50a", b"\xf0\xff", b"\x1f0\x01\x00\xff"):
        frame = struct.pack("<IBBBI", 0x184D2204, 0x60, 0x40, 0, len(block)) + block + bytes(4)
        with pytest.raises(DataError, match="cut off or damaged"):
            decompress(frame, "f", 99)


# ---- whatever the format


def test_recordings_of_all_formats_are_told_apart(tmp_path: Path) -> None:
    files: dict[str, Any] = {name: write(SMALL, (34, 34)) for name, (write, _) in FORMATS.items()}
    files |= {"2": aedat_writer.aedat2(SMALL), "3": aedat_writer.aedat3(SMALL), "n.bin": aedat_writer.nmnist(SMALL)}
    for name, data in files.items():
        path = tmp_path / name.replace(" ", "_")
        path.write_bytes(data)
        assert as_tuples(read_recording(path)) == SMALL, name
    (tmp_path / "x.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="is no recording that can be read: AEDAT 2.0, 3.1, 4.0, Prophesee RAW or DAT"):
        read_recording(tmp_path / "x.png")
    with pytest.raises(DataError, match="cannot read"):
        read_recording(tmp_path / "none.raw")


def test_what_an_error_tells_to_raise_can_be_raised(tmp_path: Path) -> None:
    path = tmp_path / "r.raw"
    late = [(20_000, 1, 1, 0), (5, 2, 2, 1)]
    path.write_bytes(event_writers.evt2(late))
    with pytest.raises(DataError, match="are sorted, sort_within_us of the reader"):
        read_recording(path)
    assert as_tuples(read_recording(path, sort_within_us=50_000)) == late[::-1]
    with pytest.raises(DataError, match="raise max_events"):
        read_recording(path, sort_within_us=50_000, max_events=1)
    for size in ((0, 5), (10,), "640x480"):
        with pytest.raises(ValueError, match="size must be \\(width, height\\) in pixels"):
            read_recording(path, cast("Any", size))
