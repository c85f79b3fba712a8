"""Image files: where each lies, on the disk or inside a shard, and how it is decoded.

NumPy, and Pillow, imported when the first image is opened. Images are uint8 `[3, H, W]`, RGB, turned as their EXIF
orientation says.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lbq.errors import DataError
from lbq.system import files

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # recognised by content: ImageNet has a PNG that is called .JPEG
MAX_PIXELS = 1 << 26  # 8,192 x 8,192
MIN_AREA = 0.08  # of a random crop, as a share of the image's area
CROP_RATIO = (3 / 4, 4 / 3)  # its width by its height
CROP_TRIES = 10
ORIENTATION, TURNED = 0x0112, range(2, 9)  # the EXIF tag, and its values of images that do not lie as they are stored
HASHED_FILES = 500  # of each part, whose first bytes go into the checksum
HASHED_BYTES = 1 << 20  # of each of them


@dataclass(frozen=True)
class Member:
    """One image inside a shard."""

    shard: Path
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.shard} at byte {self.offset}"

    def open(self) -> io.BytesIO:
        files.refuse_pipe(self.shard, DataError)
        try:
            with open(self.shard, "rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise DataError(f"cannot read {self.shard}: {error.strerror}") from error
        if len(data) != self.size:
            raise DataError(f"{self}: the shard ends early: copy it again")
        return io.BytesIO(data)


@dataclass(frozen=True, eq=False)
class FileSplit(ABC):
    """Image files by number, and their labels `[N]` int64."""

    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def path(self, index: int) -> Path | Member:
        """Where image `index` is."""


@dataclass(frozen=True)
class FileIndex:
    """A dataset of image files: the class names that labels number, the training part and the test part."""

    root: Path
    classes: tuple[str, ...]
    train: FileSplit
    test: FileSplit

    def checksum(self) -> str:
        """SHA-256 of all labels, in order, and of the first bytes of some files, spread evenly over each part.

        To read all bytes would take as long as an epoch. Names do not count, so that folders and shards of the same images in
        the same order have one checksum.
        """
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            digest.update(part.labels.astype("<i8").tobytes())
            count = min(len(part), HASHED_FILES)
            for i in range(count):
                digest.update(hashlib.sha256(_first_bytes(part.path(i * len(part) // count))).digest())
        return digest.hexdigest()


def load_eval(path: Path | Member, resize: int, crop: int) -> NDArray[np.uint8]:
    """The image in `path` for testing, `[3, crop, crop]`: the centre, after the shorter side was scaled to `resize` pixels.

    Scaling is bilinear with anti-aliasing. A JPEG gives what its pixels in any other format give.
    """
    with _opened(path) as source:
        image = _rgb(_upright(source))
    short = min(image.size)
    width, height = (side * resize // short for side in image.size)
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{path}: an image of {image.size[0]} x {image.size[1]} pixels is too long to scale to {resize}: crop it"
        )
    bilinear = _pillow().Resampling.BILINEAR  # rows first: which axis one call begins with depends on Pillow's version
    scaled = image.resize((width, image.size[1]), bilinear).resize((width, height), bilinear)
    top, left = round((height - crop) / 2), round((width - crop) / 2)
    return _array(scaled.crop((left, top, left + crop, top + crop)))


def load_train(path: Path | Member, size: int, seed: int, min_area: float = MIN_AREA) -> NDArray[np.uint8]:
    """The image in `path` for training: the random crop that `seed` chooses (see `crop_box`), as `[3, size, size]`.

    The crop is chosen first, so that a JPEG is decoded only as large as leaves the crop `size` pixels or more.
    """
    bilinear = _pillow().Resampling.BILINEAR
    with _opened(path) as source:
        image = _upright(source)
        width, height = image.size
        top, left, crop_height, crop_width = crop_box(height, width, seed, min_area)
        box = (left, top, left + crop_width, top + crop_height)
        shrink = min(crop_height, crop_width) // size
        if shrink > 1 and (reduced := image.draft(None, (width // shrink, height // shrink))) is not None:
            factor = width / reduced[1][2]  # Pillow answers with the mode and the exact reduced frame
            small = (box[0] / factor, box[1] / factor, box[2] / factor, box[3] / factor)
            return _array(_rgb(image).resize((size, size), bilinear, box=small))
        return _array(_rgb(image).crop(box).resize((size, size), bilinear))


def crop_box(height: int, width: int, seed: int, min_area: float = MIN_AREA) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop: `min_area` to all of the area, 3/4 to 4/3 as wide as high.

    Area and the logarithm of the ratio are uniform. A crop that does not fit is drawn again; after ten tries it is the
    largest central crop of an allowed ratio. Size, seed and `min_area` alone decide.
    """
    draws = np.random.default_rng(seed).random((CROP_TRIES, 4))
    low, high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    for share, shape, down, right in draws.tolist():
        area = height * width * (min_area + (1.0 - min_area) * share)
        ratio = math.exp(low + (high - low) * shape)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    w, h = width, height
    if width < CROP_RATIO[0] * height:
        h = round(width / CROP_RATIO[0])
    elif width > CROP_RATIO[1] * height:
        w = round(height * CROP_RATIO[1])
    return (height - h) // 2, (width - w) // 2, h, w


def _first_bytes(path: Path | Member) -> bytes:
    """Up to `HASHED_BYTES` of an encoded image."""
    if isinstance(path, Member):
        return path.open().read(HASHED_BYTES)
    files.refuse_pipe(path, DataError)
    try:
        with path.open("rb") as file:
            return file.read(HASHED_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _pillow() -> ModuleType:
    try:
        import PIL.Image
    except ModuleNotFoundError as error:
        raise DataError("decoding images needs Pillow, which is not installed: pip install pillow") from error
    return PIL.Image


@contextmanager
def _opened(path: Path | Member) -> Iterator[Image]:
    """An image file, not decoded yet. Whatever Pillow raises while it is used becomes a `DataError` that names the file."""
    if isinstance(path, Path):
        files.refuse_pipe(path, DataError)
    try:
        with _pillow().open(path if isinstance(path, Path) else path.open(), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(f"{path} is too large: {width} x {height} pixels, at most {MAX_PIXELS} are decoded")
            yield image
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on a broken file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} cannot be decoded as {', '.join(FORMATS)} ({reason}): convert or remove it") from error


def _upright(image: Image) -> Image:
    """`image` turned as its EXIF orientation says; itself where there is none, or none that can be read."""
    try:
        with warnings.catch_warnings():  # of broken EXIF
            warnings.simplefilter("ignore")
            orientation = image.getexif().get(ORIENTATION)
    except Exception:  # Pillow raises almost anything on broken EXIF, and the pixels may be whole
        return image
    if orientation not in TURNED:
        return image
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _rgb(image: Image) -> Image:
    """Any mode as RGB: grey, 16-bit grey, palette, CMYK; transparency is dropped."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip
        pil = _pillow()
        return pil.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def _array(image: Image) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
