"""Benchmarks, as far as a CPU of any kind can tell: what they call is there and takes a step."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lbq import engine
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


@pytest.fixture
def latency(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import latency

    yield latency
    for name in ("latency", "engine_speed"):
        sys.modules.pop(name, None)


def test_contenders_of_the_latency_benchmark_take_turns_at_every_image(latency: Any) -> None:
    images = np.arange(60, dtype=np.uint8)
    seen: list[tuple[str, int]] = []
    runs = {name: lambda image, name=name: seen.append((name, int(image))) for name in "ab"}
    times = latency.one_by_one(runs, images)
    assert {name: len(each) for name, each in times.items()} == {"a": 60, "b": 60}
    after_warm_up = seen[2 * len(images[: latency.WARM_UP]) :]
    turns = [
        (name, image)
        for first in (0, 25, 50)
        for name in "ab"
        for image in [(first - 1) % 60, *range(first, min(first + 25, 60))]
    ]
    assert after_warm_up == turns


def test_a_file_with_margins_runs_with_early_exit_too(latency: Any, tmp_path: Path) -> None:
    net = engine.load("digits_resnet8w16_t2_lbq")
    images = np.zeros((4, *net.network.input_shape), np.uint8)
    early = net.with_exits(images, [0.5], "zeros")
    engine.save(tmp_path / "early.lbq", early)
    runs = latency.contenders(tmp_path / "early.lbq", 1)
    assert list(runs) == ["early, T = 2", "early, early exit"]
    assert runs["early, early exit"](images[0]).timesteps is not None


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="a system call of Linux on x86-64"
)
@pytest.mark.parametrize("off", [False, True])
def test_rivals_are_refused_the_matrix_unit(off: bool) -> None:
    """In a process of its own: no filter of system calls can be taken back."""
    code = (
        "import ctypes, matrix_unit\n"
        "matrix_unit.keep_rivals_off()\n"
        "asked = ctypes.CDLL(None, use_errno=True).syscall(matrix_unit.ARCH_PRCTL, matrix_unit.REQUEST_PERMISSION, 18)\n"
        "print(ctypes.get_errno() if asked else 0)"
    )
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "RIVALS_AMX": "off" if off else "on"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert (int(done.stdout) == errno.EPERM) == off
