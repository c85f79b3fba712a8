"""The house: every folder has its place, imports point downwards, former names answer, and git ignores no source."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import lbq
from lbq import native
from lbq._moved import MOVED
from tests.support.paths import ROOT

SOURCE = ROOT / "src" / "lbq"
TAUGHT = (ROOT / "tests" / "taught_names.txt").read_text().split()  # by README and docs, when all lay in one folder


def folders() -> list[Path]:
    return [path.parent for path in sorted(SOURCE.rglob("__init__.py"))]


# Names
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:lbq:DeprecationWarning")
@pytest.mark.parametrize("name", TAUGHT)
def test_every_name_that_was_ever_taught_still_answers(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_former_name_says_the_new_one_and_gives_the_same_module(old: str, new: str) -> None:
    sys.modules.pop(f"lbq.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"^lbq.{old} is now lbq.{new}$") as caught:
        module = importlib.import_module(f"lbq.{old}")
    assert module is importlib.import_module(f"lbq.{new}")
    assert module.__spec__ is not None
    assert module.__spec__.name == f"lbq.{new}"
    assert len(caught) == 1
    if "." not in old:
        vars(lbq).pop(old, None)
        with pytest.warns(DeprecationWarning, match=f"^lbq.{old} is now lbq.{new}$") as caught:
            assert getattr(lbq, old) is module
        assert caught[0].filename == __file__


def test_importing_the_package_itself_uses_no_former_name() -> None:
    code = (
        "import importlib, pkgutil, lbq\n"
        "for m in pkgutil.walk_packages(lbq.__path__, 'lbq.'):\n"
        "    if not m.name.endswith(('__main__', '_lbq')): importlib.import_module(m.name)"
    )
    done = subprocess.run([sys.executable, "-W", "error::DeprecationWarning:lbq", "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr


# The plan
# ---------------------------------------------------------------------------------------------------------------------


def test_no_name_of_a_package_hides_one_of_its_modules() -> None:
    names = [m.name for m in pkgutil.walk_packages(lbq.__path__, "lbq.") if not m.name.endswith(("__main__", "_lbq"))]
    hidden = []
    for name in names:
        module = importlib.import_module(name)
        package, _, leaf = name.rpartition(".")
        if getattr(importlib.import_module(package), leaf) is not module:
            hidden.append(name)
    assert hidden == []


def test_every_folder_says_what_lives_there() -> None:
    for folder in folders():
        text = (folder / "__init__.py").read_text().removeprefix('"""').partition('"""')[0]
        assert len(text) > 40, folder


def test_tests_mirror_the_folders() -> None:
    places = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    known = {folder.relative_to(SOURCE) for folder in folders()}
    assert places - known <= {Path("docs"), Path("hostile")}


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("counting/extra.py", "import torch", "needs no torch BROKEN"),
        ("graph/extra.py", "def f():\n    import torch", "needs no torch BROKEN"),
        (
            "engine/extra.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
            "needs no torch BROKEN",
        ),
        ("system/extra.py", "from lbq.engine import load", "downwards only BROKEN"),
        ("attic/__init__.py", "", "attic"),
    ],
)
def test_the_import_rules_hold_for_files_that_nobody_listed(tmp_path: Path, file: str, line: str, broken: str) -> None:
    shutil.copytree(
        SOURCE, tmp_path / "lbq", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.c", "*.h", "*.npz")
    )
    path = tmp_path / "lbq" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n")
    lint = str(Path(sys.executable).parent / "lint-imports")
    command = [lint, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert broken in done.stdout


def test_git_ignores_no_source() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no clone: git is not asked")
    asked = [(folder / "new_file.py").relative_to(ROOT).as_posix() for folder in [*folders(), ROOT / "tests" / "runs"]]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=ROOT,
        input="\n".join([*asked, *tracked]),
        capture_output=True,
        text=True,
    )
    assert done.stdout == ""


# Installing
# ---------------------------------------------------------------------------------------------------------------------


def test_it_imports_beside_a_folder_of_its_own_name(tmp_path: Path) -> None:
    """As in the folder that holds a clone: the clone's folder must not be taken for the package."""
    (tmp_path / "lbq").mkdir()
    (tmp_path / "script.py").write_text("from lbq.errors import LbqError\nprint(LbqError.__name__)\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "LbqError\n", done.stderr


def test_an_installed_copy_is_complete(tmp_path: Path) -> None:
    """What pip copies runs a network by itself: data, C sources and templates are in it."""
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info"))
    library = native.report().path
    if library is None:
        pytest.skip(f"no native library: {native.report().reason}")
    compiler = tmp_path / "cc"  # these sources have been compiled before: it gives the library of then
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "{library}" "$2"\n')
    compiler.chmod(0o755)
    quick = ("--no-deps", "--no-build-isolation", "--no-index", "--no-compile")
    pip = [sys.executable, "-m", "pip", "install", "-q", *quick]
    command = [*pip, "--target", str(tmp_path / "site"), str(source)]
    environment = {**os.environ, "CC": str(compiler)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (tmp_path / "beside" / "lbq").mkdir(parents=True)
    code = (
        "import lbq, lbq.native; from lbq.data import load_digits; from importlib import resources\n"
        "print(lbq.__file__, len(load_digits().train), lbq.native.report().path is not None)\n"
        "print(*(resources.files('lbq').joinpath(p).is_file() for p in"
        " ('export/c/model.c', 'report/style.css', 'data/splits/README.md', 'py.typed', 'native/conv.h')))"
    )
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "beside", env=environment, capture_output=True, text=True
    )
    where, *rest = done.stdout.split()
    assert where == str(tmp_path / "site" / "lbq" / "__init__.py"), done.stderr
    assert rest == ["1198", "True", *["True"] * 5]


def test_warnings_of_former_names_reach_the_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vars(lbq).pop("optim", None)
        sys.modules.pop("lbq.optim", None)
        from lbq.optim import parameter_groups  # type: ignore[import-not-found]
    assert callable(parameter_groups)
    assert [w.filename for w in caught] == [__file__]
