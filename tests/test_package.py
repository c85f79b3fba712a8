"""The package as a whole: what importing it costs and brings, and what a source distribution holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lbq
from tests.support.paths import ROOT


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_is_light() -> None:
    out = python(
        "import torch, sys; before=set(sys.modules); import lbq; lbq.BurstNeuron;"
        "print(*sorted(set(sys.modules)-before))"
    )
    modules = out.split()
    tops = {m.split(".")[0] for m in modules}
    assert not tops & {"matplotlib", "typer", "rich", "click", "pandas", "PIL", "safetensors"}
    assert not any(m.startswith("lbq.data") for m in modules)


def test_without_torch_everything_but_training_imports() -> None:
    out = python(
        "import sys; sys.modules['torch']=None\n"
        "import importlib, pkgutil, lbq\n"
        "folders = 'cli counting data engine export graph native report results system'.split()\n"
        "for name in folders:\n"
        "    package = importlib.import_module(f'lbq.{name}')\n"
        "    for module in pkgutil.walk_packages(package.__path__, f'lbq.{name}.'):\n"
        "        if '.cuda.' not in module.name and not module.name.endswith('._lbq'): importlib.import_module(module.name)\n"
        "from lbq.data import load_digits; print(len(load_digits().train))\n"
        "try: lbq.BurstNeuron\n"
        "except ModuleNotFoundError as e: print(e)"
    )
    assert out == "1198\nlbq.BurstNeuron needs PyTorch, which is not installed: pip install torch"


def test_public_names_exist() -> None:
    for name in dir(lbq):
        assert getattr(lbq, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'BurstNeurone'"):
        _ = lbq.BurstNeurone


def test_other_missing_modules_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(lbq, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        _ = lbq.LIF


def test_a_source_distribution_holds_the_package_and_no_tests(tmp_path: Path) -> None:
    """setuptools would add test files without what they import."""
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120)
    listed = set((tmp_path / "lbq.egg-info/SOURCES.txt").read_text().splitlines())
    assert {
        "src/lbq/native/conv.h",
        "src/lbq/native/conv.c",
        "src/lbq/data/digits.npz",
        "src/lbq/export/c/model.c",
        "src/lbq/export/c/step/model.c",
    } < listed
    assert not [name for name in listed if name.startswith("tests/")]
