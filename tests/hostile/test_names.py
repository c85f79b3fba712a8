"""Names that would move the cursor or turn the direction of reading are shown as codes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq.cli import options, render, streams
from lbq.system.shown import HIDDEN, shown
from tests.support.commands import Call
from tests.support.paths import ROOT

EVIL = "gnp\u202e.exe\x1b[2J\u200f\x9b2J"
CODED = r"gnp\u202e.exe\x1b[2J\u200f\x9b2J"


def test_hidden_characters_are_codes_and_others_stay() -> None:
    assert shown(EVIL) == CODED
    kept = "Émile \N{GRINNING FACE} שלום\tand\n人"
    assert shown(kept) == kept
    assert shown("\x00\x7f\u2028\u2066\ud800") == r"\x00\x7f\u2028\u2066\ud800"


def test_tables_texts_and_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal, whose escapes stay
    render.print_table(f"title {EVIL}", ["name"], [[EVIL]])
    render.make_console().print(EVIL, style="bold")
    with pytest.raises(SystemExit):
        options.fail(f"the class {EVIL}")
    out, err = capsys.readouterr()
    assert out.count(CODED) == 3
    assert "\x1b[1m" in out
    assert "\x1b[2J" not in out
    assert err == f"lbq: the class {CODED}\n"


def test_streams_show_codes_but_colours() -> None:
    with pytest.MonkeyPatch.context() as patch:
        out = io.StringIO()
        patch.setattr("sys.stdout", out)
        with streams.guarded():
            sys.stdout.write("\x1b[1mbold\x1b[0m \u202eturned\x07\rback\n")
    assert out.getvalue() == "\x1b[1mbold\x1b[0m \\u202eturned\\x07\rback\n"


@pytest.mark.parametrize("format", ["html", "md", "latex"])
def test_reports(format: str, tmp_path: Path, call: Call) -> None:
    record: dict[str, Any] = json.loads((ROOT / "results" / "cifar10_resnet20w128_ann_60ep_s0.json").read_text())
    for key in ("model", "name", "variant"):
        record[key] = "gnp\u202e\u2066x"
    (tmp_path / "record.json").write_text(json.dumps(record))
    call("report", tmp_path / "record.json", "--format", format, "-o", out := tmp_path / "report")
    text = out.read_text(encoding="utf-8")
    assert HIDDEN.search(text) is None
    assert "u202e" in text


def test_names_of_classes_in_data(tmp_path: Path, call: Call) -> None:
    images = np.zeros((2, 3, 8, 8), np.uint8)
    for part in ("train", "test"):
        classes = np.array(["a", EVIL if part == "train" else "b"])
        np.savez(tmp_path / f"{part}.npz", images=images, labels=np.array([0, 1]), classes=classes)
    (tmp_path / "own.toml").write_text(f'[data]\nname = "arrays"\nroot = "{tmp_path}"\n')
    assert f"class 1 is 'b', not '{CODED}'" in call.refused("train", tmp_path / "own.toml", "--out", tmp_path / "run")
