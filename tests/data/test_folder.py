"""Folders of images: scanning, decoding, crops."""

from __future__ import annotations

import math
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from lbq.data import folder, image_files
from lbq.errors import DataError
from tests.support.reading import QUICK, RNG, real, refused


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
    (root / "train" / "README.txt").write_text("")
    (root / "train" / "Thumbs.db").write_text("")
    (root / held_out / "desktop.ini").write_text("")
    (root / "train" / "cat" / ".hidden").write_text("")
    (root / "train" / "cat" / "Thumbs.db").write_text("")
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


def test_folders_in_disorder_are_named(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "x")

    def says(message: str) -> None:
        with refused(message):
            folder.scan_folder(root)

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
    (root / "val" / "fox.tar").write_bytes(b"")
    says("val/fox.tar is an archive beside class folders: extract it, or move it elsewhere")
    (root / "val" / "eel").symlink_to(tmp_path / "gone")
    says("val/eel is neither a file nor a folder: restore what it links to, or remove it")
    (root / "val").rename(root / "other")
    says("has neither val nor test")
    (root / "test").mkdir()
    (root / "test" / "notes.txt").write_text("")
    says("test has no class folders: image folders are test/CLASS")
    (root / "train").rename(root / "training")
    says("train is not there: image folders are train/CLASS")


def saved(path: Path, image: Image.Image, **options: Any) -> Path:
    image.save(path, **options)
    return path


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    rgb = Image.fromarray(picture(16, 16))
    grey = rgb.convert("L")
    expected = np.asarray(rgb).transpose(2, 0, 1).astype(int)
    greys = np.broadcast_to(np.asarray(grey), (3, 16, 16)).astype(int)

    def near(path: Path, target: NDArray[np.int_], tolerance: int) -> None:
        image = image_files.load_eval(path, 16, 16)  # all of it
        assert image.dtype == np.uint8
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


def test_images_are_turned_upright(tmp_path: Path) -> None:
    """In training, in testing and by `lbq predict` alike. What EXIF that cannot be read says is not known."""
    image = picture(160, 200)
    flat = saved(tmp_path / "flat.png", Image.fromarray(image))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned right by a quarter
    turned = Image.fromarray(np.rot90(image))
    png = saved(tmp_path / "turned.png", turned, exif=exif)
    jpeg = saved(tmp_path / "turned.jpg", turned, exif=exif, quality=98, subsampling=0)
    broken = saved(tmp_path / "broken.jpg", Image.fromarray(image), exif=b"Exif\0\0no TIFF", quality=98, subsampling=0)
    reads = [partial(image_files.load_eval, resize=64, crop=64)]
    reads += [partial(image_files.load_train, size=32, seed=seed) for seed in range(5)]
    for read in reads:
        expected = read(flat)
        assert np.array_equal(read(png), expected)
        for path in (jpeg, broken):
            assert np.abs(read(path).astype(int) - expected).max() < 12


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
        for read in (partial(image_files.load_eval, resize=8, crop=8), partial(image_files.load_train, size=8, seed=0)):
            with refused(f"bad.jpg {message}"):
                read(tmp_path / "bad.jpg")
    with pytest.raises(DataError, match="none.jpg cannot be decoded"):
        image_files.load_eval(tmp_path / "none.jpg", 8, 8)


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match="needs Pillow, which is not installed: pip install pillow"):
        image_files.load_eval(tmp_path / "x.jpg", 8, 8)


def plain_crop(path: Path, size: int, seed: int) -> NDArray[np.uint8]:
    """The training crop of an image that is decoded whole."""
    with Image.open(path) as image:
        top, left, height, width = image_files.crop_box(image.height, image.width, seed)
        cut = image.convert("RGB").crop((left, top, left + width, top + height))
    return np.asarray(cut.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)


def test_large_jpegs_are_decoded_small(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.jpg", Image.fromarray(picture(1200, 1600)), quality=95)
    for seed in range(8):
        slow, fast = plain_crop(path, 100, seed), image_files.load_train(path, 100, seed)
        assert fast.shape == (3, 100, 100)
        assert np.abs(slow.astype(int) - fast).max() < 12  # the same crop, to a pixel of the reduced image
    assert not np.array_equal(slow, fast)  # it was decoded small, not whole
    png = saved(tmp_path / "x.png", Image.fromarray(picture(600, 800)))
    assert np.array_equal(image_files.load_train(png, 50, 3), plain_crop(png, 50, 3))
    assert not np.array_equal(image_files.load_train(png, 50, 3), image_files.load_train(png, 50, 4))


def test_crops_are_not_decoded_smaller_than_they_will_be(tmp_path: Path) -> None:
    """Half as large, a crop that is twice `size` wide but not twice as high would have too few rows."""
    path = saved(tmp_path / "x.jpg", Image.fromarray(picture(240, 320)), quality=95)
    boxes = {seed: image_files.crop_box(240, 320, seed)[2:] for seed in range(200)}
    oblong = [seed for seed, (height, width) in boxes.items() if min(height, width) < 2 * 80 <= max(height, width)]
    assert len(oblong) > 10
    for seed in oblong:
        assert np.array_equal(image_files.load_train(path, 80, seed), plain_crop(path, 80, seed))


@QUICK
@given(height=st.integers(1, 70), width=st.integers(1, 70), resize=st.integers(1, 40), data=st.data())
def test_testing_scales_then_cuts_the_centre(
    tmp_path: Path, height: int, width: int, resize: int, data: st.DataObject
) -> None:
    crop = data.draw(st.integers(1, resize))
    image = Image.fromarray(picture(height, width))
    path = saved(tmp_path / "x.png", image)
    short = min(height, width)
    size = (resize * width // short, resize * height // short)
    rows = image.resize((size[0], height), Image.Resampling.BILINEAR)
    scaled = np.asarray(rows.resize(size, Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    top, left = round((scaled.shape[1] - crop) / 2), round((scaled.shape[2] - crop) / 2)
    assert np.array_equal(image_files.load_eval(path, resize, crop), scaled[:, top : top + crop, left : left + crop])


def test_an_image_too_long_to_scale_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "long.png", Image.new("RGB", (5000, 1)))
    with pytest.raises(DataError, match="long.png: an image of 5000 x 1 pixels is too long to scale to 256: crop it"):
        image_files.load_eval(path, 256, 224)


@given(height=st.integers(1, 900), width=st.integers(1, 900), seed=st.integers(0, 2**63))
def test_random_crops_obey_their_definition(height: int, width: int, seed: int) -> None:
    top, left, h, w = box = image_files.crop_box(height, width, seed)
    assert box == image_files.crop_box(height, width, seed)
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
    boxes = np.array([image_files.crop_box(300, 400, seed) for seed in range(4000)], float)
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
    shares = np.prod([image_files.crop_box(300, 400, seed, 0.5)[2:] for seed in range(1000)], axis=1) / 120_000
    assert 0.49 < shares.min() < 0.52
    assert shares.max() > 0.95
    assert image_files.crop_box(10, 1000, 5) == (0, 493, 10, 13)  # nothing fits: the centre, 4/3
    assert image_files.crop_box(1000, 12, 5) == (492, 0, 16, 12)


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
        assert isinstance(path, Path)
        with Image.open(path) as image:
            assert min(image.size) == 160
        assert image_files.load_eval(path, 160, 160).std() > 5
        assert np.array_equal(image_files.load_train(path, 128, i), plain_crop(path, 128, i))
