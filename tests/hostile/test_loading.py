"""Files of deployed networks that would take long to check: the work of loading is bounded by a number of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq import engine
from lbq.engine.file import container
from lbq.errors import ArtefactError, LbqError
from lbq.graph import Synapse, integer
from lbq.graph.integer import IntegerLayer, IntegerNeuron, membrane_bounds

T = integer.MOST_TIMESTEPS


def layer(leak: tuple[int, int] | None, reset: int = 0, late: bool = False, channels: int = 3) -> IntegerLayer:
    thresholds = np.full((channels, 1), 8, np.int32)
    neuron = IntegerNeuron(1, False, thresholds, np.full(channels, reset, np.int32), "once", leak, not late)
    weight = np.ones((channels, 1, 1, 1), np.int8)
    synapse = Synapse("conv", "a", "conv", weight, (1, 1, 1), (channels, 1, 1), absorbed=True)
    return IntegerLayer(
        "sn", (synapse,), np.arange(channels, dtype=np.int32), (channels, 1, 1), 0, neuron, np.ones(channels)
    )


@pytest.mark.parametrize(
    ("leak", "reset", "late", "steps", "bound"),
    [
        (None, 0, False, 2, 7 * T),  # grows by the same at each timestep: known at once
        (None, 8, False, 2, 7 * T),  # no reset below 0
        ((1, 1), 0, False, 7, 14),  # halves, rounding half up
        ((1, 1), 64, True, 13, 142),
        ((0, 1), 500, False, 4, 7),
    ],
)
def test_a_bound_ends_at_its_fixed_point(leak: Any, reset: int, late: bool, steps: int, bound: int) -> None:
    bounds = [value for value, _ in membrane_bounds(layer(leak, reset, late), {"conv": 5}, T)]
    assert max(bounds) == bound
    assert len(bounds) <= steps


def forged(layers: int, timesteps: int, leak: Any, late: bool = False) -> bytes:
    """A chain of layers of one channel, with right bounds."""
    tensors: dict[str, Any] = {}

    def synapse(name: str, source: str) -> dict[str, Any]:
        tensors[f"{name}/weight"] = np.zeros((1, 1, 1, 1), np.int8)
        pairs = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
        return {"name": name, "source": source, "kind": "conv", "pools": [], "groups": 1, **pairs}

    def described(name: str, source: str, bias: Any) -> dict[str, Any]:
        tensors[f"{name}/bias"] = bias
        return {"name": name, "fraction": 0, "unit": [1], "synapses": [synapse(f"{name}.w", source)], "bound": 0}

    chain = []
    for i in range(layers):
        one = described(f"n{i}", f"n{i - 1}" if i else "input", np.ones(1, np.int32))
        tensors[f"n{i}/thresholds"], tensors[f"n{i}/reset"] = np.full((1, 1), 64, np.int32), np.full(1, late, np.int32)
        neuron = {"n_max": 1, "signed": False, "reset": "once", "leak": leak, "decay_reset": not late}
        chain.append({**one, "neuron": neuron, "bound": timesteps})
    readout = described("readout", f"n{layers - 1}", np.zeros(1, np.int64))
    inputs = {"shape": [1, 1, 1], "timesteps": timesteps, "static": True, "max": 255}
    tree = {"format": "lbq integer network", "version": 1, "producer": "x", "input": inputs, "layers": chain}
    return container.encode(
        tensors, json.dumps({**tree, "readout": readout, "scale": 1, "classes": [], "facts": {}, "golden": None})
    )


def test_a_file_may_spend_so_many_steps_on_its_bounds_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, right, path = 0, integer.membrane_bounds, tmp_path / "slow.lbq"

    def counted(*arguments: Any) -> Any:
        nonlocal steps
        for result in right(*arguments):
            steps += 1
            yield result

    monkeypatch.setattr(integer, "membrane_bounds", counted)
    path.write_bytes(forged(100, T, None))
    engine.load(path)
    assert steps <= 2 * 100
    assert integer.MOST_WORK // integer.STEP_WORK == 16384  # steps, of some 30 us
    monkeypatch.setattr(integer, "MOST_WORK", 50 * integer.STEP_WORK)
    for leak, late in (([65535, 16], False), (None, True)):
        steps = 0
        path.write_bytes(forged(3, T, leak, late))
        with pytest.raises(ArtefactError, match="takes too long to prove: deploy it over fewer timesteps"):
            engine.load(path)
        assert steps <= 51


def test_a_file_holds_so_many_tensors_and_no_more() -> None:
    many = {f"{i}": np.zeros(0, np.int8) for i in range(container.MOST_TENSORS + 1)}
    with pytest.raises(ArtefactError, match="it holds 8,193 tensors, at most 8,192 are read"):
        container.encode(many, "{}")
    with pytest.raises(ArtefactError, match="it holds 8,193 tensors"):
        container._tensors(many, memoryview(b""))


@pytest.mark.parametrize("timesteps", [T + 1, 2**31, 2**62, 10**30])
def test_timesteps_beyond_all_bounds(timesteps: int, tmp_path: Path) -> None:
    path = tmp_path / "model.lbq"
    path.write_bytes(forged(1, 4, None))
    with pytest.raises(LbqError, match="at most 4096"):
        engine.load(path).over(timesteps)
