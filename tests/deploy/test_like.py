"""`deploy(like=)`: another normalisation than training's is refused, with the one that was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lbq.batches.policies import ImageAugment
from lbq.data.dataset import Inputs
from lbq.deploy.like import check_like
from lbq.deploy.pipeline import deploy
from lbq.errors import GraphError, RunError
from lbq.runs import run_folder
from tests.support.own_nets import SHAPE, Own, made
from tests.support.small_nets import pixels

IMAGES = pixels(4, *SHAPE)
TENSORS = torch.from_numpy((IMAGES / 255 - 0.5) / 0.25).float()


def test_the_normalisation_of_training_is_accepted() -> None:
    made(Own(), like=(IMAGES, TENSORS), bits=8)
    made(Own(), like=(IMAGES, TENSORS.numpy().astype(np.float16)), bits=8)
    frames = np.zeros((2, *SHAPE), np.uint8)
    deploy(Own(), SHAPE, static=False, like=(frames, torch.zeros(2, *SHAPE)))


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"mean": [0.4]}, "mean=[0.4], std=[0.25], scale=255"),
        ({"std": [0.2]}, "mean=[0.5], std=[0.2], scale=255"),
        ({"mean": None, "std": None, "scale": 255}, "mean=[0], std=[1], scale=255"),
    ],
)
def test_another_one_is_refused_with_the_one_that_was_meant(options: dict[str, Any], given: str) -> None:
    with pytest.raises(GraphError) as refused:
        made(Own(), like=(IMAGES, TENSORS), **options)
    assert str(refused.value) == (
        f"{given} do not give the tensors of `like`: in training it was mean=[0.5], std=[0.25]"
    )


@pytest.mark.parametrize(
    ("like", "reason"),
    [
        ((IMAGES, TENSORS.flip(0)), "nor does any other: give the tensors of the same images, in order and not augmented"),
        ((IMAGES, -TENSORS), "nor does any other"),
        ((np.zeros_like(IMAGES), TENSORS), "nor does any other"),
        ((IMAGES, TENSORS[:2]), "tensors of the same shape"),
        ((IMAGES.astype(np.float32), TENSORS), r"uint8 images \[B, 1, ...\]"),
        (IMAGES, "two things"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(like: Any, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        made(Own(), like=like)


def test_training_makes_of_images_what_the_deployment_of_a_run_says() -> None:
    augment = ImageAugment(mean=(0.5,), std=(0.25,), scale=16.0)
    check_like((IMAGES, augment.normalised(torch.from_numpy(IMAGES))), (0.5,), (0.25,), 16)


def test_a_converted_run_reads_what_its_ann_read(tmp_path: Path) -> None:
    inputs = '{"name": "arrays", "shape": [1, 8, 8], "static": true, "classes": [], "mean": [0.1], "std": [0.2], "scale": 16}'
    (tmp_path / "conversion.json").write_text(f'{{"inputs": {inputs}}}')
    assert run_folder.read_inputs(tmp_path) == Inputs("arrays", (1, 8, 8), True, (), (0.1,), (0.2,), 16)
    (tmp_path / "conversion.json").write_text(f'{{"inputs": {inputs.replace("0.2", "-1")}}}')
    with pytest.raises(RunError, match=r"conversion.json is damaged: inputs: .*std.*convert the ANN again"):
        run_folder.read_inputs(tmp_path)
    (tmp_path / "conversion.json").write_text("{}")  # of an older version
    assert run_folder.read_inputs(tmp_path) is None
