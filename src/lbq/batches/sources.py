"""From a configuration to batches on a device: what the trainer, the evaluation and the measurements read.

A source gives training batches by sample numbers, augmented as a function of (seed, epoch, sample). It gives the whole of
its held-out or test part, divided among processes.
"""

from __future__ import annotations

import hashlib
import signal
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lbq.batches.event_augment import EventAugment
from lbq.batches.policies import ImageAugment
from lbq.batches.random import key
from lbq.config import Config
from lbq.data.dataset import Dataset, Inputs
from lbq.data.image_files import FileSplit, load_eval, load_train
from lbq.data.registry import FILES, OWN_DATA, REGISTRY
from lbq.data.testset import EVAL_RATIO, file_inputs, load_whole, scan_files
from lbq.errors import ConfigError, DataError
from lbq.native import cpus
from lbq.system.signals import STOPS

Part = Literal["test", "holdout"]
Batch = tuple[Tensor, Tensor]  # inputs on the device, labels
Split = Literal["train", "test"]  # of the dataset
Numbers = list[NDArray[np.int64]]  # of the samples of each batch
Crops = tuple[int, int] | None  # the seed and epoch of random crops
Loaded = tuple[Tensor, Tensor, Tensor]  # inputs, labels and numbers of a batch's samples, on the device

USER_ARRAYS = "arrays"


def open_source(config: Config, device: torch.device | str = "cpu") -> Source:
    """The configured dataset, ready to train on `device`."""
    d, device = config.data, torch.device(device)
    if d.name in FILES:
        return FolderSource(config, device)
    data = load_whole(d.name, d.root, config.model.timesteps, d.size, d.frames, d.window_ms)
    return (ImageSource if data.inputs.static else EventSource)(config, data, device)


def held_out(count: int, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sample numbers that train and those held out: the same for every seed and run."""
    order = np.random.default_rng(0).permutation(count)
    apart = round(share * count)
    if share and not 0 < apart < count:
        raise ConfigError(
            f"data.holdout {share:g} of {count} samples keeps {apart} apart: it must leave some on both sides"
        )
    return np.sort(order[apart:]), np.sort(order[:apart])


def limited(count: int, limit: int) -> NDArray[np.int64]:
    """At most `limit` sample numbers in order, drawn at random, the same for every seed; 0: all."""
    if not 0 < limit < count:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:limit])


def fingerprint(*labels: NDArray[np.int64]) -> str:
    """A hash of all labels in order, which differs for other datasets and for other orders of samples."""
    return hashlib.sha256(b"".join(np.asarray(part, np.int64).tobytes() for part in labels)).hexdigest()[:12]


def _check_cutout(square: int, side: int, name: str) -> None:
    if square >= side:
        raise ConfigError(f"augment.cutout must be less than {side}, the side of an image of {name}, got {square}")


class Source(ABC):
    """Samples as batches on a device. name, classes and shape (C, H, W) describe them.

    static: images; otherwise event frames [T, B, C, H, W]. inputs: what deployment needs to know of the data. about: where
    the data came from, its checksum and its split, for run records.
    """

    augment: ImageAugment | EventAugment | None  # of images, unless a subclass chooses another

    def __init__(
        self,
        config: Config,
        device: torch.device,
        inputs: Inputs,
        train_size: int,
        test_size: int,
        about: dict[str, str],
    ) -> None:
        self.name, self.shape, self.static, self.classes = inputs.name, inputs.shape, inputs.static, len(inputs.classes)
        self.inputs, self.about = inputs, about
        self.device, self.batch_size = device, config.train.batch_size
        train, self.test_numbers = (limited(size, config.data.limit) for size in (train_size, test_size))
        self.train_numbers, self.holdout_numbers = (train[part] for part in held_out(len(train), config.data.holdout))
        self.train_size, self.holdout_size = len(self.train_numbers), len(self.holdout_numbers)
        self.test_size = len(self.test_numbers)
        if config.data.title and config.data.name not in OWN_DATA:
            raise ConfigError(
                f"data.title is for data of your own ({', '.join(OWN_DATA)}): {config.data.name} has its name"
            )
        if config.data.limit:
            if config.data.limit >= max(train_size, test_size):
                raise ConfigError(
                    f"data.limit={config.data.limit} leaves out none of {train_size:,} and {test_size:,} samples: leave it out"
                )
            about["limit"] = str(config.data.limit)
        if inputs.static:
            a = config.augment
            self.augment = ImageAugment(
                crop_padding=a.crop or a.shift,
                flip=a.flip,
                policy=a.policy or None,
                cutout=a.cutout,
                mean=inputs.mean,
                std=inputs.std,
                scale=float(inputs.scale),
                border="replicate" if a.shift else "fill",
                plain_from=config.plain_from,
            )

    @abstractmethod
    def _load(self, split: Split, batches: Numbers, crops: Crops) -> Iterator[Loaded]:
        """Batch after batch of a split, not augmented but for crops."""

    def train_batches(self, batches: Sequence[Tensor], epoch: int, seed: int) -> Iterator[Batch]:
        """One batch for each tensor of sample numbers below `train_size`, augmented."""
        chosen = [self.train_numbers[batch.numpy()] for batch in batches]
        for x, y, numbers in self._load("train", chosen, (seed, epoch)):
            yield x if self.augment is None else self.augment(x, numbers, seed, epoch), y

    def train_samples(self, numbers: Tensor) -> Batch:
        """The samples of these numbers, below `train_size`, not augmented."""
        (batch,) = self._not_augmented("train", [self.train_numbers[numbers.numpy()]])
        return batch

    def eval_batches(self, part: Part, rank: int = 0, size: int = 1) -> Iterator[Batch]:
        """Every `size`-th sample of a part, from `rank` on, not augmented."""
        numbers = (self.test_numbers if part == "test" else self.holdout_numbers)[rank::size]
        batches = [numbers[start : start + self.batch_size] for start in range(0, len(numbers), self.batch_size)]
        return self._not_augmented("test" if part == "test" else "train", batches)

    def _not_augmented(self, split: Split, batches: Numbers) -> Iterator[Batch]:
        for x, y, _ in self._load(split, batches, None):
            yield self.augment.normalised(x) if isinstance(self.augment, ImageAugment) else x, y


class ImageSource(Source):
    """Images as uint8 on the device; augmentation and normalisation happen there."""

    def __init__(self, config: Config, dataset: Dataset, device: torch.device) -> None:
        a, name, (_, height, width) = config.augment, dataset.inputs.name, dataset.inputs.shape
        for kind, size in (("crop", a.crop), ("shift", a.shift)):
            if size > height // 2:
                raise ConfigError(
                    f"augment.{kind} must be at most {height // 2} for {name}, half of the height {height}, got {size}: set "
                    f"augment.{kind}={height // 2}"
                )
        if a.flip and height == 1:
            raise ConfigError(
                f"augment.flip turns the last axis round, and {name} holds signals or features, of height 1: set "
                "augment.flip=false"
            )
        _check_cutout(a.cutout, min(height, width), name)
        if a.crop and a.shift:
            raise ConfigError("augment.crop and augment.shift exclude each other: set one of them to 0")
        if a.events:
            raise ConfigError(
                f"augment.events is for event frames, and {name} holds images: set augment.events=false, or give frames"
            )
        if config.data.size not in (0, height):
            raise ConfigError(f"data.size must be 0 or {height} for {name}, got {config.data.size}")
        about = {"dataset": name, "source": dataset.source, "sha256": dataset.checksum}
        super().__init__(config, device, dataset.inputs, len(dataset.train), len(dataset.test), about)
        self.dataset = dataset

        def on_device(array: NDArray[Any]) -> Tensor:
            with warnings.catch_warnings():  # the array may be mapped from a file; the tensor is not written to
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.parts = {
            "train": (on_device(dataset.train.images), on_device(dataset.train.labels)),
            "test": (on_device(dataset.test.images), on_device(dataset.test.labels)),
        }

    def _load(self, split: Split, batches: Numbers, _: Crops) -> Iterator[Loaded]:
        images, labels = self.parts[split]
        for numbers in batches:
            chosen = torch.from_numpy(numbers).to(self.device)
            yield images[chosen], labels[chosen], chosen


class EventSource(Source):
    """Event frames, from the cache of decoded recordings or from arrays; counts, not normalised."""

    def __init__(self, config: Config, data: Dataset, device: torch.device) -> None:
        d, a = config.data, config.augment
        timesteps, _, height, _ = data.train.images.shape[1:]
        if timesteps != config.model.timesteps:
            raise ConfigError(f"model.timesteps must be {timesteps}, the frames of a sample in {data.source}")
        if d.size not in (0, height):
            raise ConfigError(f"data.size must be 0 or {height} for {d.name}, got {d.size}")
        off = {"crop": "0", "shift": "0", "policy": '""', "cutout": "0"}
        if remedies := [f"augment.{key}={value}" for key, value in off.items() if getattr(a, key)]:
            raise ConfigError(
                f"augment.crop, shift, policy and cutout are for images; {d.name} has event frames, for which there is "
                f"augment.events: set {' '.join(remedies)}"
            )
        if a.flip and d.name != USER_ARRAYS:
            raise ConfigError(
                f"augment.flip is for images and for arrays; augment.events says whether {d.name} is flipped"
            )
        if d.holdout and REGISTRY[d.name].several_per_recording:
            raise ConfigError(
                f"data.holdout: {d.name} has several samples of each recording, which would lie on both sides: leave it at 0"
            )
        labels = fingerprint(data.train.labels, data.test.labels)
        about = {"dataset": data.inputs.name, "source": data.source, "split": data.split, "labels": labels}
        about |= {"sha256": data.checksum} if data.checksum else {}
        inputs = replace(data.inputs, name=d.name)
        super().__init__(config, device, inputs, len(data.train), len(data.test), about)
        self.data = data
        # Only users know whether a mirrored frame of their arrays keeps its label: `flip` says so.
        flip = a.flip if d.name == USER_ARRAYS else a.events and REGISTRY[d.name].mirrored
        self.augment = None
        if a.events or flip:
            self.augment = EventAugment(0.5 if flip else 0.0, config.plain_from if a.events else 0)

    def _load(self, split: Split, batches: Numbers, _: Crops) -> Iterator[Loaded]:
        data = self.data.train if split == "train" else self.data.test
        for numbers in batches:
            arrays = (np.ascontiguousarray(data.images[numbers]), data.labels[numbers], numbers)
            x, y, chosen = (torch.from_numpy(array).to(self.device) for array in arrays)
            yield x.transpose(0, 1).float(), y, chosen


class _Decoder(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """Image files decoded, cropped and scaled in worker processes."""

    def __init__(self, split: FileSplit, size: int, crops: Crops, min_area: float) -> None:
        self.split, self.size, self.crops, self.min_area = split, size, crops, min_area

    def __getitem__(self, number: int) -> tuple[Tensor, int, int]:
        path = self.split.path(number)
        if self.crops is None:
            image = load_eval(path, round(self.size * EVAL_RATIO), self.size)
        else:
            seed, epoch = self.crops
            image = load_train(path, self.size, key(seed, "crop", epoch, number), self.min_area)
        return torch.from_numpy(image), int(self.split.labels[number]), number


def _ignore_stops(_: int) -> None:
    """Make a worker ignore the signals that end a job. They reach every process of the job, but the one that trains needs
    its workers until it has saved. Workers end with it."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def lost_worker(error: RuntimeError, workers: int) -> DataError | None:
    """What to say of this error of PyTorch's if a decoding process was killed, as systems without memory do. It may come out
    of any line, since a signal brings it."""
    if not str(error).startswith("DataLoader worker"):
        return None
    return DataError(
        f"a process that decodes images was killed, perhaps for want of memory: lower data.workers (now {workers}), or "
        "data.size"
    )


class FolderSource(Source):
    """Image files in class folders or tar shards, decoded by workers; the rest happens on the device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        d, a = config.data, config.augment
        if a.crop or a.shift or a.events:
            raise ConfigError(
                f"augment.crop, shift and events do not apply to {d.name}: its crops are random and resized"
            )
        index = scan_files(d.name, d.root)
        self.index, self.workers, self.side, self.min_area = index, d.workers, d.size or 224, a.min_area
        _check_cutout(a.cutout, self.side, d.name)
        counts, labels = f"{len(index.train)} + {len(index.test)}", fingerprint(index.train.labels, index.test.labels)
        about = {"dataset": d.name, "source": str(index.root), "images": counts, "labels": labels}
        about["sha256"] = index.checksum()
        super().__init__(
            config, device, file_inputs(d.name, index, self.side), len(index.train), len(index.test), about
        )

    def _load(self, split: Split, batches: Numbers, crops: Crops) -> Iterator[Loaded]:
        loader = torch.utils.data.DataLoader(
            _Decoder(self.index.train if split == "train" else self.index.test, self.side, crops, self.min_area),
            batch_sampler=[numbers.tolist() for numbers in batches],
            num_workers=min(self.workers, cpus()),  # torch warns of more workers than processors
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_stops,
        )
        try:
            for x, y, numbers in loader:
                yield tuple(t.to(self.device, non_blocking=True) for t in (x, y, numbers))
        except RuntimeError as error:
            if lost := lost_worker(error, self.workers):
                raise lost from None
            raise
        except DataError as error:  # a worker's error has its traceback in the text
            error.__traceback__ = None  # its frames would keep the workers, which would hold up the end of the process
            raise DataError(str(error).rsplit("DataError: ", 1)[-1].strip()) from None
