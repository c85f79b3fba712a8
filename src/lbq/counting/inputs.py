"""What a deployed network is run on: its dataset, a .npz file, single files, or the golden inputs that it carries. No torch.

Inputs must be like those of training: their shape, range, classes and labels are compared with what the network says.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lbq.counting.analysis import GOLDEN
from lbq.data.arrays import load_array
from lbq.data.dataset import unlike
from lbq.data.image_files import EXTENSIONS, load_eval
from lbq.data.registry import FILES
from lbq.data.testset import EVAL_RATIO, TestSet, open_arrays, open_test
from lbq.engine.engine import Network
from lbq.errors import ArtefactError, DataError
from lbq.graph import shortest, with_sides
from lbq.graph.integer import IntegerNetwork

DATASET_DEFAULTS = {"size": 0, "frames": "count", "window_ms": 1000}
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in a grey image


def inputs_of(net: Network, data: str | None) -> TestSet:
    """The data that a user names; else the network's test set where that comes with lbq, or its golden inputs."""
    embedded = net.network.dataset.get("name") == "digits"
    return golden_set(net) if data is None and not embedded else open_data(net.network, data)


def golden_set(net: Network) -> TestSet:
    """The inputs that a network carries, without labels."""
    if net.golden is None:
        raise ArtefactError("the network carries no golden inputs: give data with --data")
    inputs, static = net.golden.inputs, net.network.static
    return TestSet(
        name=GOLDEN,
        shape=net.network.input_shape,
        static=static,
        size=len(net.golden.logits),
        read=lambda start, stop: inputs[start:stop] if static else inputs[:, start:stop],
    )


def open_data(network: IntegerNetwork, data: str | None) -> TestSet:
    """What a user means by DATA: the folder of the dataset that the network was trained on, or a .npz file."""
    if data is not None and data.endswith(".npz"):
        test = open_arrays(data, network.static, network.input_shape, network.timesteps, network.input_max)
        _check_shape(test, network)
        _check_range(test.read(0, test.size), network, data)
    else:
        if data is not None:
            _point_to_predict(Path(data))
        test = _open_dataset(network, data)
        _check_shape(test, network)
    _check_classes(test, network)
    return test


def _point_to_predict(path: Path) -> None:
    """Images without labels are no test set: `lbq predict` takes them."""
    if path.is_file():
        kind = "an image" if path.suffix.lower() in EXTENSIONS else "a file"
        raise DataError(
            f"{path} is {kind}, not a dataset's folder, nor a .npz with images and labels: `lbq predict MODEL {path}` takes "
            "images and arrays, `lbq watch` recordings"
        )
    if path.is_dir() and any(p.suffix.lower() in EXTENSIONS for p in path.iterdir()):
        raise DataError(
            f"{path} holds images without labels, and is no dataset's folder: `lbq predict MODEL {path}` classifies them"
        )


def _open_dataset(network: IntegerNetwork, data: str | None) -> TestSet:
    """The test set of the dataset that the network's facts name; data: its folder."""
    settings = network.dataset
    name = settings.get("name", "digits" if data == "digits" else None)
    if not isinstance(name, str):
        raise DataError(
            "the network does not say which dataset it is for: give a .npz file with images and labels, or deploy it "
            'with facts={"data": {"name": "cifar10"}} or another dataset\'s name'
        )
    if data is None and name != "digits":
        raise DataError(f"give the folder of {name}, or a .npz file with images and labels")
    if name == "digits" and data not in (None, "digits"):
        raise DataError(f"{data!r} is not what the network was trained on: give digits, or a .npz file with images")
    if name == "arrays" and not any(map(os.path.exists, (f"{data}/train.npz", f"{data}/train"))):
        test = Path(str(data)) / "test.npz"  # its training part is not needed here
        if not test.is_file():
            raise DataError(
                f"{data} has no test.npz: put 'images' and 'labels' there, or give a .npz file; predict takes images"
            )
        return open_arrays(test, network.static, network.input_shape, network.timesteps)
    return open_test(name, data or "", network.timesteps, *frame_settings(network))


def frame_settings(network: IntegerNetwork) -> tuple[int, str, int]:
    """`data.size`, `data.frames` and `data.window_ms` of the training, as the network's facts say them."""
    size, frames, window = (network.dataset.get(key, default) for key, default in DATASET_DEFAULTS.items())
    if type(size) is not int or type(window) is not int or frames not in ("count", "time") or min(size, window) < 0:
        raise ArtefactError("the network's facts about its dataset make no sense")
    return size, str(frames), window


def _check_shape(test: TestSet, network: IntegerNetwork) -> None:
    if test.static == network.static and test.shape == network.input_shape:
        return
    mine, theirs = (f"{'images' if x.static else 'event frames'} of" for x in (network, test))
    raise DataError(
        f"{test.name} has {theirs} {test.shape}, the network reads {mine} {network.input_shape}: give data like what it "
        "was trained on"
    )


def _check_range(values: NDArray[np.uint8], network: IntegerNetwork, where: Path | str) -> None:
    if values.size and (most := int(values.max())) > network.input_max:
        raise DataError(
            f"{where} has values up to {most}, the network was trained on 0 to {network.input_max}: scale them to that"
        )


def _check_classes(test: TestSet, network: IntegerNetwork) -> None:
    """Compare the names of classes where both have some, and check labels. Numbers count as no names."""
    numbers = set(map(str, range(len(network.classes))))
    unnamed = set(network.classes) == numbers and numbers.isdisjoint(test.classes)
    if test.classes and network.classes and test.classes != network.classes and not unnamed:
        first = unlike(test.classes, network.classes)
        raise DataError(
            f"{test.name} has other classes than the network ({first}): give data like what it was trained on"
        )
    labels, outputs = test.labels, network.readout.shape[0]
    if labels is not None and len(labels) and not 0 <= labels.min() <= labels.max() < outputs:
        hint = ", labels - 1, from 0 on" if labels.min() == 1 and labels.max() == outputs else ""
        raise DataError(
            f"{test.name} has labels from {labels.min()} to {labels.max()}, the network knows classes 0 to "
            f"{outputs - 1}: number them as in training{hint}"
        )


def read_input(path: Path | str, network: IntegerNetwork) -> NDArray[np.uint8]:
    """One input from a file, uint8 `[C, H, W]` as the network reads it: what `lbq predict` does before it runs the network.

    An image is turned upright by its EXIF tag, its shorter side is scaled to the network's (to 8/7 of it for networks of
    `folder` and `imagenet`, as in their tests), and its middle is cut out. It becomes RGB, or grey where the network reads one
    channel, without transparency. Pixels are scaled to 0..input_max. A uint8 .npy array is taken as it is; it may lack height
    and width where they are 1.
    """
    path = Path(path)
    return read_array(path, network) if path.suffix == ".npy" else _read_image(path, network)


def read_array(path: Path, network: IntegerNetwork, several: bool = False) -> NDArray[np.uint8]:
    """The uint8 input of a .npy file; where there may be several, perhaps with one axis more in front."""
    lead, stored = lead_of(network), load_array(path)
    for more in (1, 0) if several else (0,):
        array = with_sides(stored, network.input_shape, len(lead) + more)
        if array.dtype == np.uint8 and array.shape[more:] == (*lead, *network.input_shape):
            _check_range(array, network, path)
            return np.asarray(array, np.uint8)
    expected = [*lead, *shortest(network.input_shape)]
    several_too = ", or several of these with an axis more in front" if several else ""
    raise DataError(f"{path} must be uint8 {expected}{several_too}, not {stored.dtype} {list(stored.shape)}")


def _read_image(path: Path, network: IntegerNetwork) -> NDArray[np.uint8]:
    shape = network.input_shape
    if not network.static:
        frames = [*lead_of(network), *shortest(shape)]
        raise DataError(
            f"the network reads event frames, and {path} is no .npy file of them: give uint8 {frames}; `lbq watch` reads "
            "recordings"
        )
    if shape[0] not in (1, 3) or shape[1] != shape[2]:
        raise DataError(f"the network reads {list(shortest(shape))}, which is no square image: give a uint8 .npy file")
    if not path.is_file():
        raise DataError(f"{path} is not a file: give an image")
    side, files = shape[1], network.dataset.get("name") in FILES
    image = load_eval(path, round(side * EVAL_RATIO) if files else side, side).astype(np.float64)
    if shape[0] == 1:
        red, green, blue = (weight * channel for weight, channel in zip(LUMA, image, strict=True))
        image = ((red + green) + blue)[None]  # in this order everywhere, in exported pages too
    return np.rint(image * (network.input_max / 255)).astype(np.uint8)


def lead_of(network: IntegerNetwork) -> tuple[int, ...]:
    """The sizes in front of one input's channels."""
    return () if network.static else (network.timesteps,)
