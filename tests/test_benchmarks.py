"""Benchmarks that need a GPU, as far as a CPU can tell: what they call is there and takes a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lbq.native import choose

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def train_speed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import train_speed

    monkeypatch.setattr(train_speed, "DEVICE", torch.device("cpu"))
    yield train_speed
    del sys.modules["train_speed"]


@pytest.mark.parametrize("options", [{}, {"level_cost": 0.5}, {"weight_bits": 8}], ids=["plain", "priced", "rounded"])
@pytest.mark.parametrize("model", ["resnet8w4", "spikformer1x32"])
def test_the_trainers_step_of_the_training_benchmark(train_speed: Any, model: str, options: dict[str, Any]) -> None:
    train_speed.trained("lbq", 2, 4, model=model, **options)()


def test_the_plain_step_of_the_training_benchmark(train_speed: Any) -> None:
    with choose.use("reference"):
        before = (net := train_speed.ann("resnet8w4")).fc.weight.detach().clone()
        train_speed.plain(net, 4)()
    assert not torch.equal(net.fc.weight, before)
