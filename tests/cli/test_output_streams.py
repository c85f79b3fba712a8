"""Output that cannot be written: letters that an encoding lacks, a full disk, a reader that is gone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lbq import engine
from lbq.cli import streams
from tests.support.commands import status
from tests.support.small_nets import deployed
from tests.support.small_runs import use_few_digits

FULL = Path("/dev/full")
SOME: list[tuple[list[str], dict[str, str]]] = [  # what fails is flushed at the end, by rich, or never held back
    (["account", "--paper", "--json"], {}),
    (["account", "--paper"], {}),
    (["--version"], {"PYTHONUNBUFFERED": "1"}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.lbq"
    engine.save(path, deployed("resnet8w2"))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text("model = {id = 'resnet8w2'}\ntrain = {epochs = 2, batch_size = 128}\n")
    return path


def lbq(
    *arguments: object, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "lbq", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(command, text=True, check=False, env=clean | (environment or {}), **pipes)


@pytest.mark.parametrize(("encoding", "micro"), [("ascii", "\\xb5J"), ("cp1252", "µJ")])
def test_letters_that_the_encoding_lacks_are_shown_by_their_code(model: Path, encoding: str, micro: str) -> None:
    done = lbq("account", model, environment={"PYTHONIOENCODING": encoding}, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"; modelled {micro} per image" in done.stdout


def test_a_run_folder_may_have_any_name(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_digits(monkeypatch)
    folder = tmp_path / os.fsdecode(b"\xc3\xbc\xff")  # one letter that ASCII lacks, and one byte that is none
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    assert status("train", config, "train.batch_size=25", "--device", "cpu", "--out", folder) == 0
    assert out.buffer.getvalue().endswith(b"\\xfc\\udcff\n")
    assert json.loads((folder / "result.json").read_text())["epoch"] == 2


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("arguments", "buffering"), SOME)
def test_a_full_disk_is_named_in_one_line(arguments: list[str], buffering: dict[str, str]) -> None:
    with FULL.open("w") as full:
        done = lbq(*arguments, stdout=full, environment=buffering)
    assert done.returncode == 2
    assert done.stderr == "lbq: cannot write to the standard output: No space left on device\n"


def closed_pipe() -> int:
    """The end to write into of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(("arguments", "buffering"), SOME)
def test_a_reader_that_is_gone_is_left_in_peace(arguments: list[str], buffering: dict[str, str]) -> None:
    writer = closed_pipe()
    try:
        done = lbq(*arguments, stdout=writer, environment=buffering)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (streams.READER_GONE, "")


def test_training_goes_on_where_its_reader_is_gone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lbq train ... 2>&1 | head -2`"""
    use_few_digits(monkeypatch)
    with os.fdopen(closed_pipe(), "w") as out, os.fdopen(closed_pipe(), "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        arguments = ("train", config, "train.batch_size=25", "--device", "cpu", "--out", tmp_path / "run")
        assert status(*arguments) == streams.READER_GONE
    assert json.loads((tmp_path / "run" / "result.json").read_text())["epoch"] == 2


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_training_goes_on_where_its_log_fills_the_disk(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_few_digits(monkeypatch)
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert status("train", config, "train.batch_size=25", "--device", "cpu", "--out", tmp_path / "run") == 0
    assert "after epoch 2" in capsys.readouterr().out


def test_streams_may_be_closed_from_the_start() -> None:
    command = f"'{sys.executable}' -m lbq account --paper --json >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_results_fail_and_remarks_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, FULL.open("w"))
    before = sys.stdout, sys.stderr
    with streams.guarded():
        assert sys.stdout.encoding == before[0].encoding
        assert sys.stderr.write("a remark") == 8
        sys.stderr.flush()
        sys.stdout.write("a result")
        with pytest.raises(streams.OutputError, match="No space left"):
            sys.stdout.flush()
        with pytest.raises(streams.OutputError, match="No space left"):
            sys.stdout.write("x" * 100_000)
    assert (sys.stdout, sys.stderr) == before
    for stream in before:
        stream.close()  # what it held went nowhere


def test_a_pipe_without_reader_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with os.fdopen(closed_pipe(), "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with streams.guarded():
            sys.stdout.write("a result")
            with pytest.raises(SystemExit, match=str(streams.READER_GONE)):
                sys.stdout.flush()
