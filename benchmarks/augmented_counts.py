"""Accumulations of training images as augmentation leaves them, beside plain ones and test images:

    python benchmarks/augmented_counts.py MODEL CIFAR10_FOLDER [--images 400]

MODEL is a network deployed for CIFAR-10. `train.level_cost_above` is a count of augmented images, so the last column says how
much more a test image takes. Executed by bit planes, the first layer left out, in millions of an image.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from augment_speed import MEAN, STD
from numpy.typing import NDArray

from lbq import engine
from lbq.batches.policies import ImageAugment
from lbq.data.cifar import load_cifar10

PLAIN: dict[str, Any] = {"crop_padding": 4, "flip": True}
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "crop, flip": PLAIN,
    "crop, flip, AutoAugment": {**PLAIN, "policy": "cifar10"},
    "crop, flip, Cutout": {**PLAIN, "cutout": 16},
    "crop, flip, AutoAugment, Cutout": {**PLAIN, "policy": "cifar10", "cutout": 16},
}


def augmented(images: NDArray[np.uint8], options: dict[str, Any]) -> NDArray[np.uint8]:
    """Pixels of the first epoch. Cutout's square is the mean colour, as in training, rounded."""
    augment = ImageAugment(mean=MEAN, std=STD, **options)
    made = augment(torch.from_numpy(images.copy()), torch.arange(len(images)), 0, 0).double().numpy()
    pixels = (made * np.reshape(STD, (3, 1, 1)) + np.reshape(MEAN, (3, 1, 1))) * 255
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


def accumulations(net: engine.Network, images: NDArray[np.uint8]) -> float:
    """Millions of an image."""
    counts = net.run(images, "bitplane").counts
    weighted = [synapse.name for layer in net.network.layers[1:] for synapse in layer.synapses]
    return sum(counts[name].accumulations for name in weighted) / len(images) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--images", type=int, default=400)
    options = parser.parse_args()
    net, data = engine.load(options.model), load_cifar10(options.data)
    test = accumulations(net, data.test.images[: options.images])
    print(f"{'test images':<50}{test:8.1f} M")
    for name, chosen in AUGMENTATIONS.items():
        count = accumulations(net, augmented(data.train.images[: options.images], chosen))
        print(f"{'training images, ' + name:<50}{count:8.1f} M  {test / count:.3f}")


if __name__ == "__main__":
    main()
