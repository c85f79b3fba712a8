"""The package as a whole: what importing it costs and brings, and that documentation points at things that exist."""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lbq
from lbq.config import Config
from lbq.data import load_digits
from lbq.runs import run_folder
from lbq.runs.build import build
from tests.support.paths import ROOT


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_drop_in_use_from_the_readme() -> None:
    out = python(
        "import torch; from lbq import BurstNeuron; n=BurstNeuron(n_max=5, step=0.4);"
        "x=torch.randn(2,8,16,requires_grad=True); n(x).sum().backward(); print(x.grad.shape, n.step)"
    )
    assert out == "torch.Size([2, 8, 16]) tensor(0.4000, grad_fn=<AddBackward0>)"


def test_import_is_light() -> None:
    out = python(
        "import torch, time, sys; before=set(sys.modules); t=time.process_time(); import lbq; lbq.BurstNeuron;"
        "print(time.process_time()-t, *sorted(set(sys.modules)-before))"
    )
    seconds, *modules = out.split()
    assert float(seconds) < 2
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
        "        if not module.name.endswith(('.cuda', '._lbq')): importlib.import_module(module.name)\n"
        "from lbq.data import load_digits; print(len(load_digits().train))\n"
        "try: lbq.BurstNeuron\n"
        "except ModuleNotFoundError as e: print(e)"
    )
    assert out == "1198\nlbq.BurstNeuron needs PyTorch, which is not installed: pip install 'lbq[train]'"


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


def equation_rows() -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| \d+ \| `(\w+)` \| .* \| (.*) \| (.*) \|$", (ROOT / "docs/equations.md").read_text(), re.M)
    assert rows
    return rows


def test_equations_map_to_functions_and_tests_that_exist() -> None:
    for equation, functions, tests in equation_rows():
        for target in re.findall(r"`lbq\.([\w.]+)`", functions):
            module, name = target.rsplit(".", 1)
            owner, _, attribute = module.rpartition(".")
            try:
                found = getattr(importlib.import_module(f"lbq.{module}"), name)
            except ModuleNotFoundError:
                found = getattr(getattr(importlib.import_module(f"lbq.{owner}"), attribute), name)
            assert found, (equation, target)
        named = re.findall(r"`(test_\w+)\.(test_\w+)`", tests)
        assert named, equation
        for file, test in named:
            (path,) = (ROOT / "tests").rglob(f"{file}.py")
            assert f"def {test}(" in path.read_text(), (equation, file, test)


def test_every_numbered_equation_is_mapped() -> None:
    expected = [
        "lif", "bispiking", "burst_count", "fixed_burst_quantizer", "lbq_fire", "lbq_level", "lif_burst_integrate",
        "lif_burst_reset", "surrogate_level", "ste_level", "surrogate_grad", "scale_grad_middle", "absorb",
        "bitplane_decomp", "bit_sparse_product", "unary_acs", "bit_sparse_acs", "explicit_shifts", "energy_proxy",
    ]  # fmt: skip
    assert [equation for equation, _, _ in equation_rows()] == expected


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_the_documentation_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "models/README.md"]
    linked = 0
    for page in pages:
        for file, anchor in re.findall(r"(?:\]\(|src=\")([^)#:\"]*)(?:#([\w-]+))?[)\"]", page.read_text()):
            target = page.parent / file if file else page
            assert target.exists(), (page.name, file)
            assert not anchor or anchor in anchors(target), (page.name, file, anchor)
            linked += bool(anchor)
    assert linked > 20


def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its blocks and those on deployment and conversion, each for itself, with what the reader is told to have:
    currents, a run, images."""
    run = tmp_path / "runs" / "demo-001"
    config = Config.from_dict({})
    run_folder.save(run, build(config), config, [], {})
    monkeypatch.chdir(tmp_path)
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/deploy.md", "docs/convert.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.S)]
    assert len(blocks) == 6
    told = {"currents": torch.randn(2, 4, 6), "images": load_digits().test.images[:4]}
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in blocks:
            own = dict(told)
            exec(block, own)
            namespace |= own
    assert namespace["outputs"].shape == (2, 4, 6)
    assert namespace["logits"].shape == (4, 10)
    executed, counted, compared, *converted = printed.getvalue().splitlines()
    accumulations, energy = map(float, counted.split())
    assert float(executed) / 4 > accumulations > 0
    assert energy > 0
    assert namespace["out"].logits.shape == (4, 10)
    found = re.fullmatch(r"([\d.]+)% as in PyTorch, ([\d.]+)% right", compared)
    assert found is not None
    assert float(found[1]) > 98
    assert float(found[2]) > 90
    assert [line.split()[0] for line in converted] == ["ANN", "burst", "integers"]
    assert all(float(line.split()[1].rstrip("%")) > 90 for line in converted)


def test_the_page_on_python_runs_and_names_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/python.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.S))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "page"})
    first, second, *rest = printed.getvalue().splitlines()
    assert first.startswith("epoch 1: loss")
    assert second.startswith("epoch 2: loss")
    assert sum(line.startswith(("sn1", "layer")) for line in rest) == 7
    assert "<html" in Path("runs/python/report.html").read_text()
    for name in set(re.findall(r"`(lbq(?:\.\w+)+)`", page)):
        assert pkgutil.resolve_name(name), name


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
