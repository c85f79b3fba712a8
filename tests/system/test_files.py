"""Files are written whole or not at all; what is no regular file is never replaced; what cannot be written is said first."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lbq import deploy
from lbq.counting.analysis import load
from lbq.errors import LbqError, RunError, Stopped
from lbq.measuring import measure
from lbq.report.output import make, write_analysis
from lbq.results import gather, result
from lbq.runs import records
from lbq.system import files
from lbq.training import job
from tests.support.commands import Call
from tests.support.report_runs import of_cifar, runs_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_made_and_replaced_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.txt"
    assert files.write(path, "é") == 2
    assert files.write(path, b"new", keep_as=path.with_name("old.txt")) == 3
    assert path.read_bytes() == b"new"
    assert path.with_name("old.txt").read_text() == "é"
    assert names(path.parent) == ["old.txt", "x.txt"]


def test_several_files_appear_together_or_not_at_all(tmp_path: Path) -> None:
    contents: dict[str, bytes | str] = {"a.txt": "first", "b.txt": "second", "c.txt": b"third"}
    folder = tmp_path / "new" / "one"
    for name in contents:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "open", opener(name), raising=False)
            with pytest.raises(LbqError, match=rf"cannot write .*{name}: File too large"):
                files.write_all(folder, contents)
        assert names(tmp_path) == []  # nor is a folder left that was not there
    assert files.write_all(folder, contents) == 16
    assert names(folder) == ["a.txt", "b.txt", "c.txt"]
    (folder / "c.txt").unlink()
    (folder / "c.txt").mkdir()  # which cannot be replaced: then the others are not either
    with pytest.raises(LbqError, match=r"cannot write .*c.txt: it is a folder"):
        files.write_all(folder, dict.fromkeys(contents, "new"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open", opener("b.txt"), raising=False)
        with pytest.raises(LbqError, match=r"cannot write .*b.txt: File too large"):
            files.write_all(folder, {"a.txt": "new", "b.txt": "new"})
    assert names(folder) == ["a.txt", "b.txt", "c.txt"]
    assert [(folder / name).read_text() for name in ("a.txt", "b.txt")] == ["first", "second"]


@pytest.mark.parametrize(("format", "last"), [("svg", "surrogates.svg"), ("csv", "technology.csv")])
def test_a_report_in_many_files_is_whole_or_absent(tmp_path: Path, format: str, last: str) -> None:
    target = tmp_path / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open", opener(last), raising=False)
        with pytest.raises(LbqError, match="File too large"):
            make(target, result.Gathered([of_cifar()]), format)
    assert names(tmp_path) == []
    make(target, result.Gathered([of_cifar()]), format)
    assert last in names(target)


def test_an_analysis_is_whole_or_absent(tmp_path: Path) -> None:
    analysis = load(runs_folder() / "lbq-0" / "analysis" / "analysis.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open", opener("layers.csv"), raising=False)
        with pytest.raises(LbqError, match=r"layers.csv: File too large"):
            write_analysis(tmp_path / "analysis", analysis)
    assert names(tmp_path) == []


def test_a_new_analysis_leaves_no_figure_of_an_older_one(tmp_path: Path) -> None:
    folder, analysis = tmp_path / "analysis", load(runs_folder() / "lbq-0" / "analysis" / "analysis.json")
    bare = replace(analysis, layers=tuple(replace(layer, membrane=None) for layer in analysis.layers))
    folder.mkdir()
    (folder / "membranes.svg").write_text("mine")
    assert folder / "membranes.svg" not in write_analysis(folder, bare)
    assert (folder / "membranes.svg").read_text() == "mine"  # there was no analysis that it could be of
    assert folder / "membranes.svg" in write_analysis(folder, analysis)
    (folder / "notes.svg").write_text("mine")
    written = write_analysis(folder, bare)
    assert names(folder) == sorted([*(path.name for path in written), "notes.svg"])
    assert "membranes.svg" not in names(folder)
    (folder / "membranes.svg").mkdir()
    with pytest.raises(LbqError, match=r"cannot remove .*membranes.svg, which is of an older report or analysis"):
        write_analysis(folder, bare)


def opener(name: str) -> Any:
    """`open` that fails for one file, as under `ulimit -f`."""

    def refuse(path: Path, mode: str) -> Any:
        if name in path.name:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return open(path, mode)

    return refuse


def test_a_pipe_and_a_folder_are_refused_and_stay(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for act in (lambda path: files.write(path, "x"), files.check_file):
        with pytest.raises(LbqError, match=r"cannot write .*pipe: it is a device or a pipe, give the name of a file"):
            act(pipe)
        with pytest.raises(LbqError, match=r"cannot write .*folder: it is a folder, give the name of a file"):
            act(folder)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == ["folder", "pipe"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, pipe, loop = tmp_path / "link", tmp_path / "to-pipe", tmp_path / "loop"
    link.symlink_to("there/file")  # does not exist yet
    for text in ("first", "second"):
        files.write(link, text)
        assert link.is_symlink()
        assert (tmp_path / "there" / "file").read_text() == text
    os.mkfifo(tmp_path / "pipe")
    pipe.symlink_to("pipe")
    loop.symlink_to("loop")
    for path in (pipe, loop):
        with pytest.raises(LbqError, match="cannot write"):
            files.write(path, "x")
        assert path.is_symlink()
    assert names(tmp_path) == ["link", "loop", "pipe", "there", "to-pipe"]
    assert names(tmp_path / "there") == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("reason", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=str)
def test_nothing_half_written_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, reason: BaseException
) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")

    def fail(*_: Any) -> None:
        raise reason

    monkeypatch.setattr(os, call, fail)
    full = isinstance(reason, OSError)
    with pytest.raises(RunError if full else KeyboardInterrupt, match="free some space" if full else None):
        files.write(path, "new", RunError)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x.txt"]


def test_what_a_killed_process_left_is_removed_a_day_later_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    left, young, another = (
        tmp_path / f".{name}.partial" for name in ("x.txt.00000000", "x.txt.11111111", "y.22222222")
    )
    for place in (left, young, another):
        place.symlink_to("other")
    for place in (left, another):
        os.utime(place, (0, 0), follow_symlinks=False)
    files.write(tmp_path / "x.txt", "x")
    assert (tmp_path / "other").read_text() == "other"
    assert names(tmp_path) == sorted([young.name, another.name, "other", "x.txt"])
    files.remove_leftovers(tmp_path / "x.txt")  # by one who knows that nobody is writing it
    assert names(tmp_path) == [another.name, "other", "x.txt"]


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second writes all of it while the first has half: each gets its own file under the name, and both succeed."""
    path, seen, real = tmp_path / "x.txt", [], os.fsync

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        files.write(path, "second")
        seen.append(path.read_text())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    files.write(path, "first")
    assert [*seen, path.read_text()] == ["second", "first"]
    assert names(tmp_path) == ["x.txt"]


def test_a_file_has_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "x.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.txt").stat().st_mode) == 0o640


def test_places_are_checked_without_touching_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    files.check_folder(tmp_path / "new" / "folder")
    files.check_file(tmp_path / "new" / "x.txt")
    monkeypatch.chdir(tmp_path)
    files.check_file("x.txt")
    with pytest.raises(LbqError, match=r"cannot write .*file: it is a file, give a folder"):
        files.check_folder(tmp_path / "file")
    with pytest.raises(LbqError, match=r"cannot write .*file is not a folder"):
        files.check_folder(tmp_path / "file" / "folder")
    with pytest.raises(LbqError, match=r"cannot write .*file/x.txt"):
        files.check_file(tmp_path / "file" / "x.txt")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LbqError, match="may not be written, choose another place"):
        files.check_folder(tmp_path / "new")
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze", "RUN", "-o", "FILE"], "it is a file, give a folder"),
        (["deploy", "RUN", "-o", "PIPE"], "it is a device or a pipe"),
        (["deploy", "RUN", "-o", "model.lbq", "--levels", "."], "it is a folder, give the name of a file"),
        (["deploy", "RUN", "-o", "model.lbq", "--levels", "--stream"], "--stream: a name does not begin with '-'"),
        (["deploy", "RUN", "-o", "--noise"], "did you forget the file's name?"),
        (["exits", "RUN", "-o", "--json"], "did you forget the file's name?"),
        (["analyze", "RUN", "-o", "--json"], "did you forget the folder's name?"),
        (["record", "RUN", "-o", "PIPE"], "it is a device or a pipe"),
        (["report", "RUN", "-o", "PIPE"], "it is a device or a pipe"),
        (["report", "RUN", "-o", "FILE", "--format", "svg"], "it is a file, give a folder"),
        (["train", "CONFIG", "--out", "FILE"], "it is a file, give a folder"),
    ],
)
def test_the_commands_look_where_they_write_before_they_work(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    run = runs_folder() / "lbq-0"

    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("work was begun")

    for module, name in (
        (measure, "analyze_run"), (deploy, "deploy_run"), (records, "record_of"), (gather, "gather"), (job, "open_source"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("mine")
    os.mkfifo(tmp_path / "PIPE")
    named = {"RUN": str(run), "CONFIG": str(run / "config.toml")}
    assert message in call.refused(*(named.get(a, a) for a in arguments))
    assert (tmp_path / "FILE").read_text() == "mine"
    assert names(tmp_path) == ["FILE", "PIPE"]


def test_folders_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    with files.new_folder(tmp_path / "deep" / "run") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "deep" / "run").exists()
    assert (tmp_path / "deep" / "run" / "file").read_text() == "x"
    with pytest.raises(RunError, match="exists already"), files.new_folder(tmp_path / "deep" / "run", RunError):
        pass
    with pytest.raises(ZeroDivisionError), files.new_folder(tmp_path / "failed"):
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="^cannot write .*/full/x: "), files.new_folder(tmp_path / "full") as partial:
        raise RunError(f"cannot write {partial}/x: the disk is full")
    with (
        pytest.raises(Stopped, match="^stopped; .*/run continues$") as stopped,
        files.new_folder(tmp_path / "run") as partial,
    ):
        raise Stopped(f"stopped; {partial} continues", 143)
    assert stopped.value.code == 143
    with pytest.raises(RunError, match="cannot write under"), files.new_folder(tmp_path / "file" / "run", RunError):
        pass
    with (
        pytest.raises(RunError, match="/late was made by another process"),
        files.new_folder(tmp_path / "late", RunError),
    ):
        (tmp_path / "late" / "another").mkdir(parents=True)  # by another process, meanwhile
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
