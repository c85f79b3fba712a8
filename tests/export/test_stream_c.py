"""Endless streams in C: the worst frames under sanitizers, a short run of what benchmarks/stream_c.py does for a million."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq import engine
from lbq.engine import Network
from lbq.errors import GraphError
from lbq.export.c99 import Sources
from lbq.graph.integer import MEMBRANE_BOUND
from tests.engine.test_stream import worst_network
from tests.export.test_c99 import compiler, sanitizers
from tests.support.commands import Call
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("stream_c", ROOT / "benchmarks" / "stream_c.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_worst_frames_stay_within_the_bound(script: Any, tmp_path: Path) -> None:
    assert compiler()
    net = Network(worst_network((15, 4), -240))
    facts = script.run(net, tmp_path, 2400, 1200, sanitizers())
    assert facts["bound"] < MEMBRANE_BOUND < 1.2 * facts["bound"]
    assert facts["largest"] >= facts["bound"] * 15 / 16 - 32  # dark frames let it rise, bright ones push it to its rest


def test_the_window_of_the_logits_is_the_callers(call: Call, tmp_path: Path) -> None:
    network = worst_network((15, 4), 240)
    path = tmp_path / "net.lbq"
    golden = np.random.default_rng(0).integers(0, 256, (2, 8, 1, 1, 1), np.uint8)
    engine.save(path, Network(network).with_golden(golden))
    facts = call.json("export", path, "--format", "c-step", "--window", 7, "-o", tmp_path / "c")
    assert (facts["endless"], facts["window"]) == (True, 7)
    text = (tmp_path / "c" / "model.h").read_text()
    assert "#define MODEL_WINDOW 7 " in text
    assert "#define MODEL_ENDLESS 1 " in text
    assert "#define MODEL_TIMESTEPS 2\n" in text
    assert (
        call.refused("export", path, "--window", 7, "-o", tmp_path / "d")
        == "lbq: --window is for --format c-step, not c\n"
    )
    assert not (tmp_path / "d").exists()
    with pytest.raises(GraphError, match="layer 'sn' has no leak"):
        Sources(worst_network(None, 1), form="step", window=7)
    assert not Sources(worst_network(None, 1), form="step").endless
