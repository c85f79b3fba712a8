"""The parts of `make wheels`: what is wrong with a wheel is named, a failed compilation ends it, and its commands exist."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from lbq import native
from tests.support.paths import ROOT

WHEELS: dict[str, Any] = runpy.run_path(str(ROOT / "release" / "wheels.py"))
TARGETS = WHEELS["TARGETS"]


def library(target: Any, *extra: bytes) -> bytes:
    """Bytes that a target's library would have."""
    return b"\0" * target.offset + target.magic + b"\0".join((native.source_hash().encode(), *extra))


def wheel(folder: Path, tag: str, **files: bytes) -> Path:
    path = folder / f"lbq-0.1.0-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"lbq/native/{name.replace('__', '.')}", data)
    return path


@pytest.mark.parametrize("name", TARGETS)
def test_a_wheel_as_it_should_be_has_no_problem(tmp_path: Path, name: str) -> None:
    target = TARGETS[name]
    right = {target.library.replace(".", "__"): library(target, b"GLIBC_2.17", b"GLIBC_2.2.5")}
    assert WHEELS["problem"](wheel(tmp_path, target.tag, **right), target) is None
    assert WHEELS["wheel_for"](name, tmp_path).parent == tmp_path
    with pytest.raises(SystemExit, match="has 0 wheels for"):
        WHEELS["wheel_for"](name, tmp_path / "nowhere")


def test_what_is_wrong_with_a_wheel_is_named(tmp_path: Path) -> None:
    target, other = TARGETS["linux-x86_64"], TARGETS["linux-aarch64"]
    right = library(target)
    cases: list[tuple[str, dict[str, bytes], str]] = [
        ("linux_x86_64", {"_lbq__so": right}, "is not tagged py3-none-manylinux_2_17_x86_64"),
        (target.tag, {}, "holds no library"),
        (target.tag, {"_lbq__so": right, "_lbq__pyd": right}, "not lbq/native/_lbq.so alone"),
        (target.tag, {"_lbq__so": library(other)}, "for another processor"),
        (target.tag, {"_lbq__so": b"\0" * target.offset + target.magic}, "built from other sources"),
        (target.tag, {"_lbq__so": library(target, b"GLIBC_2.34", b"GLIBC_2.4")}, "needs glibc 2.34"),
    ]
    for tag, files, words in cases:
        assert words in WHEELS["problem"](wheel(tmp_path, tag, **files), target), words


def test_wheels_are_made_of_sources_alone() -> None:
    leave = WHEELS["not_a_source"]
    assert leave(str(ROOT), ["src", "models", "build", ".git", "setup.py"]) == {"build", ".git"}
    assert leave("src/lbq/native", ["_lbq.so", "_lbq.pyd", "pool.c", "__pycache__"]) == {
        "_lbq.so", "_lbq.pyd", "__pycache__",
    }  # fmt: skip
    assert all((ROOT / name).exists() for name in WHEELS["SOURCES"])


def test_a_failed_compilation_ends_the_build(tmp_path: Path) -> None:
    """Without a target it is optional; with one the command must fail."""
    pytest.importorskip("setuptools")
    (tmp_path / "ziglang.py").write_text("import sys\nsys.exit('no such target')\n")  # stands for a compiler that fails
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib")]
    variables = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "LBQ_WHEEL_TARGET": "x86_64-linux-gnu.2.17"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "no such target" in done.stderr
    assert not list(tmp_path.rglob("*_lbq*"))


def test_unknown_targets_are_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        WHEELS["main"](["build", "amiga"])
    assert "there is no target amiga: there are linux-x86_64" in capsys.readouterr().err


def test_the_release_calls_commands_that_exist() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert "make wheels TARGETS=all" in commands
    assert "python release/wheels.py check dist" in commands
    assert re.search(
        r"^wheels:.*\n(\t.*\n)*\t.*release/wheels.py build \$\(TARGETS\)", (ROOT / "Makefile").read_text(), re.M
    )
    assert jobs["publish"]["needs"] == "check"
