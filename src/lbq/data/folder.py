"""Images in folders, `root/train/<class>/*` and `root/val/<class>/*` (or `test`): ImageNet's usual layout, or your own.

NumPy, and Pillow for decoding, imported when the first image is opened. Images are uint8 `[3, H, W]`, RGB. EXIF
orientation is ignored, as it is in the usual ImageNet pipelines, unless `upright` asks for it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from lbq.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
ARCHIVES = (".tar", ".zip", ".gz", ".tgz", ".xz", ".bz2", ".7z", ".rar")  # which may be a class that is not extracted
LITTER = ("thumbs.db", "desktop.ini")  # what Windows leaves in folders that it has shown
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # told by content: ImageNet has a PNG that is called .JPEG
MAX_PIXELS = 1 << 26  # 8,192 x 8,192
SCALE = (0.08, 1.0)  # a random crop's share of the area
RATIO = (3 / 4, 4 / 3)  # its width by its height
TRIES = 10


class Opens(Protocol):
    """An image that is not a file of its own, such as a member of a shard; its text says where it is."""

    def open(self) -> BinaryIO: ...


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """Paths `[N]`, relative to `root`, sorted by class and name; labels `[N]` int64.

    Paths are encoded bytes in one array, because a million string objects would be copied, page by page, into every
    forked worker that touches them.
    """

    root: Path
    paths: NDArray[np.bytes_]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        """Where image `index` is."""
        return self.root / os.fsdecode(bytes(self.paths[index]))


@dataclass(frozen=True, eq=False)
class FolderIndex:
    """A dataset in folders: sorted class names, and what is in `train` and in `val` (or `test`)."""

    root: Path
    classes: tuple[str, ...]
    train: FolderSplit
    test: FolderSplit


def scan_folder(root: Path) -> FolderIndex:
    """Index `root/train` and `root/val`, or `root/test` where there is no `val`, without opening images."""
    root = Path(root)
    try:
        train = root / "train"
        if not train.is_dir():
            raise DataError(f"{train} is not there: image folders are train/CLASS/*.jpg and val/CLASS/*.jpg")
        held_out = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
        if held_out is None:
            raise DataError(f"{root} has neither val nor test: image folders are train/CLASS/*.jpg and val/CLASS/*.jpg")
        classes = _classes(train)
        found = _classes(held_out)
        if found != classes:
            extra, lacking = sorted(set(found) - set(classes)), sorted(set(classes) - set(found))
            facts = [
                f"{len(names)} {what} ({names[0]})" for what, names in (("more", extra), ("less", lacking)) if names
            ]
            raise DataError(f"{held_out} has other classes than train: {' and '.join(facts)}; make the folders agree")
        return FolderIndex(root, classes, scan_split(train, classes), scan_split(held_out, classes))
    except OSError as error:
        raise DataError(f"cannot read {error.filename or root}: {error.strerror}") from error


def scan_split(folder: Path, classes: tuple[str, ...] | None = None) -> FolderSplit:
    """Index one folder of class folders (its own, sorted, where `classes` is not given)."""
    paths: list[bytes] = []
    labels: list[int] = []
    try:
        for label, name in enumerate(_classes(folder) if classes is None else classes):
            files = sorted(entry.name for entry in _entries(folder / name))
            if not files:
                raise DataError(f"{folder / name} is empty: add images or remove the class")
            for file in files:
                if not file.lower().endswith(EXTENSIONS):
                    raise DataError(f"{folder / name / file} is not an image ({', '.join(EXTENSIONS)}): move it away")
            paths += [os.fsencode(f"{name}/{file}") for file in files]
            labels += [label] * len(files)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or folder}: {error.strerror}") from error
    return FolderSplit(folder, np.array(paths, np.bytes_), np.array(labels, np.int64))


def _classes(folder: Path) -> tuple[str, ...]:
    """Sorted names of the folders in `folder`, which holds no images, archives or broken links beside them, for a class
    that is left out would shift the labels of others; other files are passed over."""
    entries = _entries(folder)
    classes = {entry.name for entry in entries if entry.is_dir()}
    others = sorted((e for e in entries if e.name not in classes), key=lambda e: e.name)
    for entry in others:
        if not entry.is_file():
            raise DataError(f"{entry.path} is neither a file nor a folder: restore what it links to, or remove it")
        if entry.name.lower().endswith(ARCHIVES):
            raise DataError(f"{entry.path} is an archive beside class folders: extract it, or move it elsewhere")
        if entry.name.lower().endswith(EXTENSIONS):
            raise DataError(f"{entry.path} is not in a class folder: sort images into {folder}/CLASS")
    if not classes:
        raise DataError(f"{folder} has no class folders: image folders are {folder.name}/CLASS/*.jpg")
    return tuple(sorted(classes))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, but for hidden files and what a system leaves there."""
    return [e for e in os.scandir(folder) if not e.name.startswith(".") and e.name.lower() not in LITTER]


def decode(path: Path | Opens, size: int | None = None) -> NDArray[np.uint8]:
    """The image in `path` as uint8 `[3, H, W]`.

    With `size`, a JPEG may be decoded at 1/2, 1/4 or 1/8, which is much faster, as long as both sides stay >= `size`.
    """
    return _array(_open(path, size))


def eval_crop(image: NDArray[np.uint8], resize: int, crop: int) -> NDArray[np.uint8]:
    """Scale the shorter side of `[3, H, W]` to `resize` pixels (bilinear, with anti-aliasing), cut the centre.

    Returns `[3, crop, crop]`.
    """
    return _array(_eval_crop(_image(image), resize, crop))


def random_resized_crop(image: NDArray[np.uint8], size: int, seed: int) -> NDArray[np.uint8]:
    """The Inception-style training crop that `seed` chooses (see `crop_box`), scaled to `[3, size, size]`."""
    return _array(_cut(_image(image), crop_box(image.shape[1], image.shape[2], seed), size))


def load_eval(path: Path | Opens, resize: int, crop: int, upright: bool = False) -> NDArray[np.uint8]:
    """`eval_crop(decode(path), resize, crop)` with fewer copies: a JPEG gives what its pixels in any other format give.
    upright: turned as its EXIF orientation says."""
    image = _open(path, None, upright=upright)
    try:
        return _array(_eval_crop(image, resize, crop))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def load_train(path: Path | Opens, size: int, seed: int) -> NDArray[np.uint8]:
    """`random_resized_crop(decode(path), size, seed)` with fewer copies, and large JPEGs decoded smaller.

    The crop is chosen first, so that a JPEG is decoded only as large as leaves the crop `size` pixels or more.
    """
    return _array(_open(path, size, seed))


def crop_box(height: int, width: int, seed: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop: 8 to 100 % of the area, 3/4 to 4/3 as wide as high.

    Uniform in area and in the logarithm of the ratio, redrawn where it does not fit; after ten tries the largest
    central crop of an allowed ratio. A function of size and seed alone.
    """
    draws = np.random.default_rng(seed).random((TRIES, 4))
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for share, shape, down, right in draws.tolist():
        area = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * share)
        ratio = math.exp(low + (high - low) * shape)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    w, h = width, height
    if width < RATIO[0] * height:
        h = round(width / RATIO[0])
    elif width > RATIO[1] * height:
        w = round(height * RATIO[1])
    return (height - h) // 2, (width - w) // 2, h, w


def _pillow() -> ModuleType:
    try:
        import PIL.Image
    except ModuleNotFoundError as error:
        raise DataError("decoding images needs Pillow, which is not installed: pip install pillow") from error
    return PIL.Image


def _open(path: Path | Opens, size: int | None, seed: int | None = None, upright: bool = False) -> Image:
    """The image as RGB; with a seed, its random crop of `size`; a JPEG decoded no larger than `size` needs."""
    pil = _pillow()
    try:
        with pil.open(path if isinstance(path, Path) else path.open(), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(f"{path} is too large: {width} x {height} pixels, at most {MAX_PIXELS} are decoded")
            if seed is None or size is None:
                if size is not None:
                    image.draft(None, (size, size))  # only JPEGs can; others pass
                return _rgb(_turned(image) if upright else image)
            box = crop_box(height, width, seed)
            shrink = min(box[2:]) // size
            if shrink > 1 and (reduced := image.draft(None, (width // shrink, height // shrink))) is not None:
                by = width / reduced[1][2]  # Pillow answers with the mode and the exact reduced frame
                top, left, bottom, right = (at / by for at in (*box[:2], box[0] + box[2], box[1] + box[3]))
                return _rgb(image).resize((size, size), pil.Resampling.BILINEAR, box=(left, top, right, bottom))
            return _cut(_rgb(image), box, size)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on a broken file
        reason = " ".join(str(error).split()) or type(error).__name__
        kinds = ", ".join(kind.upper() for kind in FORMATS)
        raise DataError(f"{path} cannot be decoded as {kinds} ({reason}): convert or remove it") from error


def _turned(image: Image) -> Image:
    from PIL import ImageOps

    turned: Image = ImageOps.exif_transpose(image)
    return turned


def _rgb(image: Image) -> Image:
    """Any mode as RGB: grey, 16-bit grey, palette, CMYK; transparency is dropped."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip
        pil = _pillow()
        return pil.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def _image(array: NDArray[np.uint8]) -> Image:
    if array.ndim != 3 or array.shape[0] != 3 or array.dtype != np.uint8 or not array.size:
        raise ValueError(f"image: must be uint8 [3, H, W], not {array.dtype} {list(array.shape)}")
    image: Image = _pillow().fromarray(np.ascontiguousarray(array.transpose(1, 2, 0)))
    return image


def _array(image: Image) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _cut(image: Image, box: tuple[int, int, int, int], size: int) -> Image:
    top, left, height, width = box
    cut = image.crop((left, top, left + width, top + height))
    return cut.resize((size, size), _pillow().Resampling.BILINEAR)


def _eval_crop(image: Image, resize: int, crop: int) -> Image:
    if not 0 < crop <= resize:
        raise ValueError(f"crop: must be in 1..resize ({resize}), not {crop}")
    width, height = image.size
    short = min(width, height)
    width, height = width * resize // short, height * resize // short
    if width * height > MAX_PIXELS:
        raise DataError(
            f"an image of {image.size[0]} x {image.size[1]} pixels is too long to scale to {resize}: crop it"
        )
    scaled = image.resize((width, height), _pillow().Resampling.BILINEAR)
    top, left = round((height - crop) / 2), round((width - crop) / 2)
    return scaled.crop((left, top, left + crop, top + crop))
