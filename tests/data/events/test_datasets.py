"""Event datasets: splits, layouts on disk and in archives, real recordings."""

from __future__ import annotations

import io
import os
import random
import shutil
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lbq.data.events import datasets
from lbq.data.events.aedat2 import read_aedat2
from lbq.data.events.datasets import load_cifar10_dvs, load_dvs_gesture, load_dvs_objects, load_nmnist, read_split
from lbq.data.events.frames import to_frames
from lbq.data.events.tree import pick, tree_of
from lbq.errors import DataError
from tests.support import aedat_writer as writer
from tests.support.reading import real
from tests.support.some_events import SMALL, as_tuples, event_lists, events_of, random_events

SPLITS = Path(datasets.__file__).parents[1] / "splits"


# ---- splits


def test_the_shipped_splits_follow_their_rule() -> None:
    by_number, by_name = (
        read_split((SPLITS / f"cifar10_dvs_{kind}.txt").read_text(), kind) for kind in ("natural", "lexicographic")
    )
    for parts, key in ((by_number, int), (by_name, lambda n: f"cifar10_x_{n}.aedat")):
        for label in datasets.CIFAR10_CLASSES:
            order = sorted(range(1000), key=key)
            assert {n for name, n in parts["train"] if name == label} == set(order[:900])
            assert {n for name, n in parts["test"] if name == label} == set(order[900:])
        assert (len(parts["train"]), len(parts["test"])) == (9000, 1000)
    shared = set(by_number["test"]) & set(by_name["test"])
    assert len(shared) == 910  # the README says 91 of 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train airplane 0-3\nteste bird 1", "line 2: expected 'train|test class numbers'"),
        ("train airplane 0-3\ntest plane 1", "line 2"),
        ("train airplane 0-3\ntest airplane 3", "named twice"),
        ("train airplane 0-3", "part is empty"),
        ("train airplane 0-3,\ntest bird 1", "line 1"),
        ("train airplane 0-999999\ntrain bird 0-999999", "more than a million"),
        ("train airplane " + ",".join(["0-999999"] * 70_000), "more than a million"),
        (b"\xff\xfe", "is not text"),
    ],
)
def test_bad_split_files(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_cifar10_dvs(tmp_path, split=write(tmp_path / "split.txt", text))
    assert message in str(caught.value)


# ---- loaders


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


SPLIT = "# a small one\ntrain airplane 0-1,5\ntrain truck 10\ntest truck 2\n"


def cifar(root: Path) -> dict[tuple[str, int], list[writer.Event]]:
    """Five recordings; what they hold."""
    recordings = {}
    for seed, (label, number) in enumerate(
        [("airplane", 0), ("airplane", 1), ("airplane", 5), ("truck", 10), ("truck", 2)]
    ):
        events = random_events(200, seed=seed)
        recordings[label, number] = events
        write(root / label / f"cifar10_{label}_{number}.aedat", writer.aedat2([(t, y, x, p) for t, x, y, p in events]))
    return recordings


def test_cifar10_dvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = cifar(tmp_path / "data")
    split = write(tmp_path / "split.txt", SPLIT)
    data = load_cifar10_dvs(tmp_path / "data", 4, (32, 32), split=split)
    assert data.inputs.name == "cifar10-dvs"
    assert data.split.startswith("split.txt (sha256 ")
    assert data.inputs.classes[9] == "truck"
    assert data.train.labels.tolist() == [0, 0, 0, 9]
    assert data.test.labels.tolist() == [9]
    for frame, key in zip(
        data.train.images, [("airplane", 0), ("airplane", 1), ("airplane", 5), ("truck", 10)], strict=True
    ):
        np.testing.assert_array_equal(frame, to_frames(events_of(recordings[key]), 4, size=(32, 32)))

    def never(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("decoded again")

    monkeypatch.setattr(datasets, "decode_aedat2", never)
    again = load_cifar10_dvs(tmp_path / "data", 4, 32, split=split)  # the same size
    np.testing.assert_array_equal(again.test.images, data.test.images)
    with pytest.raises(AssertionError, match="decoded again"):
        load_cifar10_dvs(tmp_path / "data", 4, (32, 32), "time", split=split)
    os.utime(tmp_path / "data/truck/cifar10_truck_2.aedat", (1, 1))
    with pytest.raises(AssertionError, match="decoded again"):
        load_cifar10_dvs(tmp_path / "data", 4, (32, 32), split=split)


def test_loaders_put_late_events_in_order(tmp_path: Path) -> None:
    """Time goes back by 5 ms in these recordings; loaders allow 10 ms."""
    late = [(5000, 2, 2, 1), (0, 1, 1, 1), (9000, 3, 3, 0)]
    split = write(tmp_path / "split.txt", "train truck 1\ntest truck 2\n")
    for number in (1, 2):
        write(tmp_path / "cifar" / "truck" / f"cifar10_truck_{number}.aedat", writer.aedat2(late))
    for part, name in (("train", "user01_led"), ("test", "user02_led")):
        write(tmp_path / "gesture" / f"{name}.aedat", writer.aedat3(late))
        write(tmp_path / "gesture" / f"{name}_labels.csv", HEADER + "1,0,10000\n")
        write(tmp_path / "gesture" / f"trials_to_{part}.txt", f"{name}.aedat\n")
        write(tmp_path / "nmnist" / part.title() / "4" / "00001.bin", writer.nmnist(late))
    for data in (
        load_cifar10_dvs(tmp_path / "cifar", 3, split=split),
        load_dvs_gesture(tmp_path / "gesture", 3),
        load_nmnist(tmp_path / "nmnist", 3, allow_partial=True),
    ):
        assert data.train.images.sum((0, 2, 3, 4)).tolist() == [1, 1, 1]


def test_cifar10_dvs_from_archives(tmp_path: Path) -> None:
    cifar(tmp_path / "data")
    split = write(tmp_path / "split.txt", SPLIT)
    expected = load_cifar10_dvs(tmp_path / "data", 4, split=split, cache=tmp_path / "cache0")
    (tmp_path / "mixed").mkdir()
    with zipfile.ZipFile(tmp_path / "mixed/airplane.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((tmp_path / "data/airplane").iterdir()):
            archive.write(path, f"airplane/{path.name}")
            archive.writestr(f"__MACOSX/airplane/{path.name}", b"clutter")
            archive.writestr(f"../{path.name}", b"climbs")
    with tarfile.open(tmp_path / "mixed/truck.tar", "w") as bundle:
        bundle.add(tmp_path / "data/truck", "truck")
        link = tarfile.TarInfo("truck/cifar10_truck_77.aedat")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        bundle.addfile(link)
    shutil.copytree(tmp_path / "data/truck", tmp_path / "mixed/truck")  # extracted as well: no ambiguity
    data = load_cifar10_dvs(tmp_path / "mixed", 4, split=split, cache=tmp_path / "cache1")
    np.testing.assert_array_equal(data.train.images, expected.train.images)
    np.testing.assert_array_equal(data.test.images, expected.test.images)
    shutil.rmtree(tmp_path / "mixed/truck")
    data = load_cifar10_dvs(tmp_path / "mixed", 4, split=split, cache=tmp_path / "cache1")
    np.testing.assert_array_equal(data.test.images, expected.test.images)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache0", "cache1", "data", "mixed", "split.txt"]
    shutil.copytree(tmp_path / "data/truck", tmp_path / "data/copy")
    with pytest.raises(DataError, match="are the same recording: keep one"):
        load_cifar10_dvs(tmp_path / "data", 4, split=split)


def test_cifar10_dvs_that_is_incomplete_or_damaged(tmp_path: Path) -> None:
    cifar(tmp_path / "data")
    with pytest.raises(DataError, match=r"not complete under .*: cifar10_airplane_2.aedat and 9,994 more of 10,000"):
        load_cifar10_dvs(tmp_path / "data")
    with pytest.raises(DataError, match="does not exist: give the folder"):
        load_cifar10_dvs(tmp_path / "absent")
    with pytest.raises(ValueError, match="^timesteps "):
        load_cifar10_dvs(tmp_path / "data", 0, split=write(tmp_path / "split.txt", SPLIT))
    path = tmp_path / "data/truck/cifar10_truck_2.aedat"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"cifar10_truck_2.aedat is cut off"):
        load_cifar10_dvs(tmp_path / "data", split=tmp_path / "split.txt")
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot read .*cifar10_truck_2.aedat"):
        load_cifar10_dvs(tmp_path / "data", split=tmp_path / "split.txt")


def test_damaged_archives(tmp_path: Path) -> None:
    split = write(tmp_path / "split.txt", "train bird 0\ntest bird 1\n")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(2):
            archive.writestr(f"bird/cifar10_bird_{i}.aedat", writer.aedat2(random_events(300, seed=i)))
    whole = stream.getvalue()
    rng = random.Random(1)
    for i in range(40):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        content = bytes(changed) if i else whole[: len(whole) // 2]
        path = write(tmp_path / "bird.zip", content)
        try:
            load_cifar10_dvs(path, 2, (4, 4), split=split)
        except DataError as error:
            assert "\n" not in str(error)  # noqa: PT017
    lying = bytearray(whole)  # the directory understates a member's size
    at = lying.rindex(b"PK\x01\x02")
    lying[at + 24 : at + 28] = struct.pack("<I", 10)
    with pytest.raises(DataError, match="bird.zip/bird/cifar10_bird_1.aedat (cannot be read|has not the 10 bytes)"):
        load_cifar10_dvs(write(tmp_path / "bird.zip", bytes(lying)), 2, (4, 4), split=split)
    lying[at + 24 : at + 28] = struct.pack("<I", 2**31)
    with pytest.raises(DataError, match="more than the limit"):
        load_cifar10_dvs(write(tmp_path / "bird.zip", bytes(lying)), 2, (4, 4), split=split)
    with pytest.raises(DataError, match="is no folder, .zip or .tar: extract it"):
        load_cifar10_dvs(write(tmp_path / "bird.rar", b"x"), split=split)
    with pytest.raises(DataError, match="bird.tar is damaged or cannot be read"):
        load_cifar10_dvs(write(tmp_path / "bird.tar", b"x" * 2000), split=split)
    with zipfile.ZipFile(tmp_path / "bird.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("bird/cifar10_bird_0.aedat", random.Random(0).randbytes(5000))
        archive.writestr("bird/cifar10_bird_1.aedat", b"")
    torn = bytearray((tmp_path / "bird.zip").read_bytes())
    torn[100:160] = bytes(b ^ 255 for b in torn[100:160])
    with pytest.raises(DataError, match="bird_0.aedat cannot be read"):
        load_cifar10_dvs(write(tmp_path / "bird.zip", bytes(torn)), 2, (4, 4), split=split)


def test_a_damaged_header_does_not_end_a_tar_in_silence(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "whole.tar", "w") as tar:
        for name in ("a.txt", "b.txt", "c.txt"):
            tar.addfile(tarfile.TarInfo(name))
    data = bytearray((tmp_path / "whole.tar").read_bytes())
    write(tmp_path / "short.tar", bytes(data[: 3 * 512]))  # some writers leave the zeros at the end out
    for name in ("whole.tar", "short.tar"):
        with tree_of(tmp_path / name) as tree:
            assert [*tree] == [f"{name}/{member}" for member in ("a.txt", "b.txt", "c.txt")]
    data[512 + 100] ^= 1
    with (
        pytest.raises(DataError, match=r"torn.tar is damaged .*the header at byte 512 is damaged.*: download it again"),
        tree_of(write(tmp_path / "torn.tar", bytes(data))),
    ):
        pass


HEADER = "class,startTime_usec,endTime_usec\n"


def gesture(root: Path) -> dict[str, list[writer.Event]]:
    recordings = {}
    for seed, name in enumerate(("user01_led", "user02_lab", "user24_led")):
        recordings[name] = random_events(600, seed=seed, step=100, start=2**31 - 5000)
        write(root / f"{name}.aedat", writer.aedat3(recordings[name]))
        first = recordings[name][0][0]
        rows = [(11, first + 1000, first + 9000), (8, first + 9000, first + 12000), (8, first + 12000, first + 20000)]
        write(root / f"{name}_labels.csv", HEADER + "".join(f"{c},{a},{b}\n" for c, a, b in rows))
    write(root / "trials_to_train.txt", "user01_led.aedat\nuser02_lab.aedat\n\n")
    write(root / "trials_to_test.txt", "user24_led.aedat\n")
    return recordings


def test_dvs_gesture(tmp_path: Path) -> None:
    recordings = gesture(tmp_path / "DvsGesture")
    for by in ("count", "time"):
        data = load_dvs_gesture(tmp_path, 3, (16, 16), by)
        assert data.train.images.shape == (6, 3, 2, 16, 16)  # one per row, though class 8 comes twice
        assert data.train.labels.tolist() == [10, 7, 7] * 2
        assert [data.inputs.classes[i] for i in data.test.labels] == ["other_gestures", "arm_roll", "arm_roll"]
        first = recordings["user24_led"][0][0]
        cut = events_of([e for e in recordings["user24_led"] if first + 9000 <= e[0] < first + 12000])
        span = (first + 9000, first + 12000) if by == "time" else None
        np.testing.assert_array_equal(data.test.images[1], to_frames(cut, 3, by, (16, 16), span))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("trials_to_test.txt", None, "trials_to_test.txt not found"),
        ("trials_to_test.txt", "../../etc/passwd\n", "../../etc/passwd and 1 more of 2 not found"),
        ("trials_to_test.txt", "user01_led.aedat\n", "listed twice"),
        ("trials_to_test.txt", "", "the test part of the dataset has no samples"),
        ("user02_lab.aedat", None, "user02_lab.aedat not found"),
        ("user24_led_labels.csv", b"\xff\xfe", "is not text"),
        ("user24_led_labels.csv", "", "does not begin with the line class,"),
        ("user24_led_labels.csv", HEADER + "12,1,2\n", "line 2: expected class 1 to 11"),
        ("user24_led_labels.csv", HEADER + "\n1,5,5\n", "line 3: expected class 1 to 11, start < end"),
        ("user24_led_labels.csv", HEADER + "1,a,5\n", "line 2"),
        ("user24_led_labels.csv", HEADER + "1,1,5\n", "has no events from 1 to 5 us"),
    ],
)
def test_dvs_gesture_that_is_damaged(tmp_path: Path, file: str, content: bytes | str | None, message: str) -> None:
    gesture(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        write(tmp_path / file, content)
    with pytest.raises(DataError) as caught:
        load_dvs_gesture(tmp_path, 2, (4, 4))
    assert message in str(caught.value)


def test_nmnist_in_its_official_layout(tmp_path: Path) -> None:
    for part, digit, number in (("Train", 3, 7), ("Train", 0, 12), ("Test", 9, 1)):
        write(tmp_path / "data" / part / str(digit) / f"{number:05}.bin", writer.nmnist(SMALL[: digit + 10]))
    with pytest.raises(DataError, match=r"holds 2 \+ 1 of N-MNIST's 60,000 \+ 10,000 recordings"):
        load_nmnist(tmp_path / "data")
    data = load_nmnist(tmp_path / "data", 2, allow_partial=True)
    assert data.train.labels.tolist() == [0, 3]
    assert data.train.images.shape == (2, 2, 2, 34, 34)
    assert data.train.images.sum(axis=(1, 2, 3, 4)).tolist() == [10, 13]
    (tmp_path / "zipped").mkdir()
    for part in ("Train", "Test"):
        shutil.make_archive(str(tmp_path / "zipped" / part), "zip", tmp_path / "data", part)
    zipped = load_nmnist(tmp_path / "zipped", 2, allow_partial=True)
    np.testing.assert_array_equal(zipped.train.images, data.train.images)
    with pytest.raises(DataError, match="no N-MNIST under"):
        load_nmnist(tmp_path / "data" / "Train" / "3")
    (tmp_path / "data" / "Train" / "3" / "00001.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"00001\.bin has no events: fetch it again$"):
        load_nmnist(tmp_path / "data", 2, allow_partial=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [("2 x", "line 2: expected a number and a digit"), ("3 1", "there is no 3.bs2"), ("1 5", "listed twice")],
)
def test_nmnist_lists_that_are_damaged(tmp_path: Path, line: str, message: str) -> None:
    for number in (1, 2):
        write(tmp_path / f"{number}.bs2", writer.nmnist(SMALL))
    write(tmp_path / "train1K.txt", f"#sample #class\n{line}\n1 5\n")
    write(tmp_path / "test100.txt", "#sample #class\n2\t5\n")
    with pytest.raises(DataError) as caught:
        load_nmnist(tmp_path)
    assert message in str(caught.value)


def objects(root: Path) -> None:
    for folder in ("NeuromorphicObjectDataSet_100", "DataSet2"):
        for seed, name in enumerate((*datasets.OBJECTS.values(), "Mouse")):
            events = [(0, 0, 0, 1), *random_events(100, seed=seed, step=200), (10**5 - 1, 1, 1, 1)]
            write(root / folder / f"{name}.aedat", writer.aedat2(events))
    events = random_events(50, seed=9, step=2)
    write(root / "NeuromorphicObjectDataSet_100/Estilete_1.aedat", writer.aedat2(events))


def test_dvs_objects(tmp_path: Path) -> None:
    objects(tmp_path)
    data = load_dvs_objects(tmp_path, 2, (8, 8), window_us=25_000)
    assert data.inputs.classes == ("box", "mug", "cutter", "pencil", "scissors")
    assert np.bincount(data.train.labels).tolist() == [2] * 5  # two hold no event; the second cutter is too short
    assert np.bincount(data.test.labels).tolist() == [2] * 5
    assert int(data.test.images.sum()) == 5 * 102
    by_time = load_dvs_objects(tmp_path, 2, (8, 8), "time", window_us=25_000)
    assert by_time.test.images[1].sum(axis=(1, 2, 3)).tolist() == [0, 1]
    with pytest.raises(ValueError, match="^window_us must be"):
        load_dvs_objects(tmp_path, window_us=1)
    (tmp_path / "DataSet2/Tesoura.aedat").unlink()
    with pytest.raises(DataError, match="DVS128 objects is not complete under .*: DataSet2/Tesoura.aedat"):
        load_dvs_objects(tmp_path)


@given(event_lists(8), st.integers(1, 2**20))
def test_windows_are_whole_and_disjoint(events: list[writer.Event], window_us: int) -> None:
    recording = events_of(events, 8, 8)
    first, last = (events[0][0], events[-1][0]) if events else (0, -1)
    whole = (last - first + 1) // window_us
    cut = list(datasets.windows(recording, window_us))
    numbers = [(start - first) // window_us for _, (start, _) in cut]
    assert numbers == sorted({n for e in events if (n := (e[0] - first) // window_us) < whole})  # none without events
    for n, (part, (start, stop)) in zip(numbers, cut, strict=True):
        assert (start, stop) == (first + n * window_us, first + (n + 1) * window_us)
        assert as_tuples(part) == [e for e in events if start <= e[0] < stop]


# ---- real recordings


def test_real_nmnist(tmp_path: Path) -> None:
    data = load_nmnist(real("nmnist_small"), 10, cache=tmp_path)
    assert data.train.images.shape == (1000, 10, 2, 34, 34)
    assert data.test.images.shape == (100, 10, 2, 34, 34)
    assert np.bincount(data.train.labels).tolist() == [97, 116, 99, 93, 105, 92, 94, 117, 87, 100]
    assert data.train.labels[:5].tolist() == [5, 0, 4, 1, 9]  # as in MNIST
    files = sorted(real("nmnist_small").rglob("*.bs2"))
    assert len(files) == 1100
    total = sum(path.stat().st_size for path in files) // 5
    assert data.train.images.max() < 255
    assert int(data.train.images.sum(dtype=np.int64) + data.test.images.sum(dtype=np.int64)) == total
    # orientation: a 7 is wide above and narrow below, and a 1 slants from the lower left to the upper right; turned by
    # half a circle the first fails, mirrored the second
    seven, one = (data.train.images[data.train.labels == n].sum(axis=(0, 1, 2), dtype=np.float64) for n in (7, 1))
    (_, wide), (_, narrow) = spread(seven[7:14]), spread(seven[20:27])
    (right, _), (left, _) = spread(one[6:12]), spread(one[20:26])
    assert wide > 1.3 * narrow
    assert right > left + 3


def spread(rows: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and deviation of x."""
    weight, x = rows.sum(0) / rows.sum(), np.arange(rows.shape[1])
    mean = float(weight @ x)
    return mean, float(weight @ (x - mean) ** 2) ** 0.5


def test_real_dvs128() -> None:
    files = sorted(real("dvs128_objects").rglob("*.aedat"))
    assert len(files) == 14
    for path in files:
        events = read_aedat2(path)
        assert len(events) == (path.stat().st_size - 3412) // 8
        seconds = (events.t[-1] - events.t[0]) / 1e6
        assert 17 < seconds < 37
        # objects turn in the middle; the border sees the noise of the pixels, which leak currents make ON
        border = (np.minimum(events.x, 127 - events.x) < 8) | (np.minimum(events.y, 127 - events.y) < 8)
        assert border.mean() < 0.23
        assert events.p[border].mean() > 0.5


def test_real_dvs_objects(tmp_path: Path) -> None:
    data = load_dvs_objects(real("dvs128_objects"), 4, (32, 32), window_us=1_000_000, cache=tmp_path)
    assert np.bincount(data.train.labels).tolist() == [32, 33, 67, 36, 33]
    assert np.bincount(data.test.labels).tolist() == [18, 20, 18, 18, 18]
    assert data.train.images.any(axis=(1, 2, 3, 4)).all()


def test_a_tree_leaves_out_clutter_and_refuses_what_two_archives_hold(tmp_path: Path) -> None:
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "a.txt").write_text("hidden")
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfone")  # as some editors begin a text
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    with tarfile.open(tmp_path / "two.tar", "w") as tar:
        for name in ("._b.txt", "b.txt"):
            tar.addfile(tarfile.TarInfo(name))
    with tree_of(tmp_path) as tree:
        assert list(tree) == ["list.txt", "one.zip/a.txt", "two.tar/b.txt"]
        assert tree["list.txt"].text() == "one"
        assert set(pick(tree, r"([a-z])\.txt")) == {("a",), ("b",)}
    shutil.copy(tmp_path / "one.zip", tmp_path / "other.zip")
    with (
        tree_of(tmp_path) as tree,
        pytest.raises(DataError, match=r"one\.zip/a\.txt and .*other\.zip/a\.txt are the same recording: keep one"),
    ):
        pick(tree, r"([a-z])\.txt")
    (tmp_path / "below").mkdir()
    (tmp_path / "other.zip").replace(tmp_path / "below" / "one.zip")  # nor does one of the same name hide the other
    with tree_of(tmp_path) as tree, pytest.raises(DataError, match=r"one\.zip/a\.txt .*are the same recording"):
        pick(tree, r"([a-z])\.txt")
    (tmp_path / "a.txt").write_text("extracted")
    shutil.rmtree(tmp_path / "below")
    with tree_of(tmp_path) as tree:
        assert pick(tree, r"([a-z])\.txt")["a",].text() == "extracted"
        before = tree["one.zip/a.txt"].stamp
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr("a.txt", "z")  # as long, but something else
    with tree_of(tmp_path) as tree:
        assert tree["one.zip/a.txt"].stamp != before
