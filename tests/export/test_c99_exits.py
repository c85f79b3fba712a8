"""Early exit in exported C: compiled, inputs stop where the engine stops them, with the same logits; both forms."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq import engine
from lbq.engine import Network
from lbq.engine.file.reading import Golden
from lbq.errors import LbqError
from lbq.export.c99 import Sources
from lbq.graph.integer import Exits
from tests.export.test_c99 import compile_, sanitizers, write
from tests.support.commands import Call
from tests.support.small_nets import branched, deployed, eventful, pixels

IMAGES, FRAMES = pixels(12, 3, 4, 4, seed=1), pixels(3, 8, 2, 4, 4, seed=2)
SOURCES = ["example.c", "model.c", "model_data.c"]


@pytest.fixture(scope="module")
def early() -> Network:
    return deployed("resnet8w2", shape=(3, 4, 4), timesteps=3).with_exits(IMAGES, (0.5, 0.25), "these images")


def compiled(net: Network, x: Any, folder: Path, form: Any, *flags: str) -> Path:
    """The example with these inputs, which must stop at different timesteps."""
    stops = net.run(x, "bitplane", exit=True).timesteps
    assert stops is not None
    assert len(set(stops.tolist())) == net.network.timesteps
    made = Sources(net.network, golden=Golden(x, net.run(x, "bitplane").logits, {}), form=form)
    assert made.early is not None
    assert made.early.timesteps is not None
    assert made.early.timesteps.tolist() == stops.tolist()
    write(folder, made)
    return compile_(folder, SOURCES, flags)


def printed(program: Path) -> tuple[int, str]:
    done = subprocess.run([program], capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("form", ["run", "step"])
def test_images_stop_where_the_engine_stops_them(early: Network, tmp_path: Path, form: str) -> None:
    program = compiled(early, IMAGES, tmp_path, form, "-O0")
    assert printed(program) == (0, "12 of 12 inputs stop early where they should, with the expected logits")
    example = (tmp_path / "example.c").read_text()
    (tmp_path / "example.c").write_text(re.sub(r"(stops\[EXAMPLES\] = \{)", r"\g<1>9 + ", example))
    other = compile_(tmp_path, SOURCES, ("-O0",), "other")
    assert printed(other) == (1, "11 of 12 inputs stop early where they should, with the expected logits")


@pytest.mark.parametrize(
    ("made", "x", "form"), [(eventful, FRAMES, "step"), (branched, pixels(8, 3, 6, 6, seed=5), "run")]
)
def test_frames_and_branches_stop_early_too_under_sanitizers(made: Any, x: Any, form: str, tmp_path: Path) -> None:
    program = compiled(made().with_exits(x, (0.6, 0.3), "these"), x, tmp_path, form, *sanitizers())
    assert printed(program) == (0, "8 of 8 inputs stop early where they should, with the expected logits")


def test_null_pointers_and_states_without_a_timestep(early: Network, tmp_path: Path) -> None:
    functions = {}
    for form in ("run", "step"):
        write(tmp_path, Sources(early.network, form=form))
        functions[form] = ctypes.CDLL(str(compile_(tmp_path, SOURCES[1:], ("-O0", "-shared", "-fPIC"), f"{form}.so")))
    room = [ctypes.create_string_buffer(2**16) for _ in range(4)]
    run, stop = functions["run"].model_run_early, functions["step"].model_stop
    assert run(*room) == 0
    for i in range(4):
        assert run(*room[:i], None, *room[i + 1 :]) == 1
    before = bytes(room[1])
    assert (stop(None, room[1]), stop(room[2], None)) == (0, 0)
    functions["step"].model_reset(room[2])
    assert stop(room[2], room[1]) == 0
    assert bytes(room[1]) == before


def test_margins_take_constants_and_no_memory(call: Call, early: Network, tmp_path: Path) -> None:
    path, plain = tmp_path / "early.lbq", Sources(replace(early.network, exits=None))
    engine.save(path, early)
    facts = call.json("export", path, "-o", tmp_path / "c")
    assert facts["memory_bytes"] == plain.memory_bytes
    assert facts["constant_bytes"] == plain.constant_bytes + 2 * (1 + early.network.readout.shape[0]) * 8
    assert not any("model_run_early" in text for text in plain.files().values())
    assert "int model_run_early(" in (tmp_path / "c" / "model.h").read_text()


def test_one_class_leads_nothing() -> None:
    net = deployed("resnet8w2", shape=(3, 4, 4), num_classes=1)
    with pytest.raises(LbqError, match="^the network has one class, which leads no second one"):
        net.with_exits(pixels(2, 3, 4, 4), (0.5,), "images")
    forged = replace(net.network, exits=Exits((3,), np.zeros((1, 1), np.int64), (0.1,), "forged"))
    with pytest.raises(LbqError, match="^the network has one class"):
        Sources(forged)
