"""The datasets by name: what each one is, and who reads it. A new one gets its entry here. NumPy only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from lbq.data import digits
from lbq.data.cifar import load_cifar10, load_cifar100
from lbq.data.dataset import Dataset
from lbq.data.events import datasets
from lbq.data.idx import load_idx
from lbq.data.user_arrays import load_own
from lbq.errors import ConfigError

Kind = Literal["images", "files", "events"]


@dataclass(frozen=True)
class Frames:
    """The settings of a configuration that say how events become frames. size: of a side; 0: the sensor's."""

    timesteps: int
    size: int
    form: str
    window_ms: int


@dataclass(frozen=True)
class Registered:
    """A dataset.

    title: in tables and figures. kind: `images` in memory, image `files`, or `events`. load: reads the first and the last of
    these from a folder. split: what divides training from test. mirrored: whether a mirrored sample is of the same class.
    several_per_recording: whether samples are parts of recordings, and so alike. crop: pixels of zeros around images before
    they are cropped at random, as is usual. own: whether users name it themselves.
    """

    title: str
    kind: Kind
    load: Callable[[Path, Frames], Dataset] | None = None
    split: str = "official"
    mirrored: bool = True
    several_per_recording: bool = False
    crop: int = 0
    own: bool = False


def _images(load: Callable[[Path], Dataset]) -> Callable[[Path, Frames], Dataset]:
    return lambda folder, _: load(folder)


def _events(load: Callable[..., Dataset]) -> Callable[[Path, Frames], Dataset]:
    def loaded(folder: Path, frames: Frames) -> Dataset:
        try:
            return load(folder, frames.timesteps, (frames.size, frames.size) if frames.size else None, frames.form)
        except ValueError as error:  # sizes that no frame can have
            raise ConfigError(f"data.size, data.window_ms or model.timesteps: {error}") from error

    return loaded


def _objects(folder: Path, frames: Frames) -> Dataset:
    return _events(partial(datasets.load_dvs_objects, window_us=1000 * frames.window_ms))(folder, frames)


_CIFAR_SPLIT = "official 50,000 / 10,000"
REGISTRY = {  # in the order of reports; lbq.config.DATASETS has the same names
    "cifar10": Registered("CIFAR-10", "images", _images(load_cifar10), _CIFAR_SPLIT, crop=4),
    "cifar100": Registered("CIFAR-100", "images", _images(load_cifar100), _CIFAR_SPLIT, crop=4),
    "imagenet": Registered("ImageNet-1K", "files"),
    "cifar10_dvs": Registered("CIFAR10-DVS", "events", _events(datasets.load_cifar10_dvs)),
    # left and right hands are two classes
    "dvs_gesture": Registered(
        "DVS128-Gesture", "events", _events(datasets.load_dvs_gesture), mirrored=False, several_per_recording=True
    ),
    "digits": Registered("UCI digits", "images", _images(lambda _: digits.load_digits()), digits.SPLIT),
    "mnist": Registered("MNIST", "images", _images(partial(load_idx, name="mnist"))),
    "fashion_mnist": Registered("Fashion-MNIST", "images", _images(partial(load_idx, name="fashion_mnist"))),
    # a mirrored digit is no digit
    "nmnist": Registered("N-MNIST", "events", _events(datasets.load_nmnist), mirrored=False),
    "dvs_objects": Registered("DVS128 objects", "events", _objects, several_per_recording=True),
    "folder": Registered("folder", "files", split="the folder's own train and val", own=True),
    "arrays": Registered("arrays", "images", _images(load_own), own=True),
}
EVENTS = tuple(name for name, dataset in REGISTRY.items() if dataset.kind == "events")
FILES = tuple(name for name, dataset in REGISTRY.items() if dataset.kind == "files")
OWN_DATA = tuple(name for name, dataset in REGISTRY.items() if dataset.own)
