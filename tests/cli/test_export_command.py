"""`lbq export` in its formats other than C."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lbq import engine
from tests.support.commands import Call
from tests.support.report_runs import runs_folder, trained
from tests.support.small_nets import pixels


def test_onnx_in_both_forms(call: Call, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="writing ONNX needs the package onnx")
    from onnx.reference import ReferenceEvaluator

    model = runs_folder() / "lbq-0" / "model.lbq"
    net = engine.load(model)
    images = pixels(2, *net.network.input_shape) // 16
    assert "a.onnx" in call.printed("export", str(model), "--format", "onnx", "-o", str(tmp_path / "a.onnx"))
    (logits,) = ReferenceEvaluator(str(tmp_path / "a.onnx")).run(None, {"images": images})
    np.testing.assert_array_equal(logits, net.run(images).logits)
    facts = call.json("export", str(model), "--format", "onnx-step", "-o", str(tmp_path / "b.onnx"))
    assert facts["bytes"] == (tmp_path / "b.onnx").stat().st_size
    names = [value.name for value in onnx.load(tmp_path / "b.onnx").graph.input]
    assert names[0] == "image"
    assert "sums" in names


def test_nir_of_a_run(call: Call, tmp_path: Path) -> None:
    nir = pytest.importorskip("nir", reason="writing NIR needs the package nir")
    run = trained(tmp_path / "run", name="if")
    call.printed("export", str(run), "--format", "nir", "--reset", "subtract", "-o", str(tmp_path / "a.nir"))
    kinds = {type(node).__name__ for node in nir.read(str(tmp_path / "a.nir")).nodes.values()}
    assert {"IF", "Conv2d", "Input", "Output"} <= kinds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--format", "nir", "--reset", "subtract", "-o", "a.nir"], "layer 'sn1'"),  # several levels
        (["RUN", "--format", "nir", "-o", "a.nir"], "say what your reader does with --reset subtract or v_reset"),
        (["RUN", "--format", "nir", "--reset", "zero", "-o", "a.nir"], "reset must be one of subtract, v_reset"),
        (["MODEL", "--format", "nir", "-o", "a.nir"], "NIR is written from a run folder"),
        (["MODEL", "data.root=x", "--format", "onnx", "-o", "a.onnx"], "key=value is for a run folder"),
        (["MODEL", "--reset", "subtract", "-o", "a"], "--reset and --accept-ties are for --format nir, not c"),
        (["MODEL", "--format", "onxx", "-o", "a"], "--format 'onxx' is not known; did you mean 'onnx'?"),
        (["MODEL"], "say where to with -o"),
        (["missing.lbq", "--format", "onnx", "-o", "."], "missing.lbq cannot be read"),
        (["MODEL", "--format", "onnx", "-o", "MODEL"], "is the network that is to be exported: give another name with -o"),
        (["RUN", "--format", "onnx", "-o", "a.onnx"], "is a run folder, not a deployed network: give"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    pytest.importorskip("nir")
    pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)
    known = {"RUN": str(runs_folder() / "lbq-0"), "MODEL": str(runs_folder() / "lbq-0" / "model.lbq")}
    assert message in call.refused("export", *(known.get(a, a) for a in arguments))
    assert not list(tmp_path.iterdir())
