"""README and documentation: short enough, true to the code, and every link, name and block of Python in them works."""

from __future__ import annotations

import contextlib
import io
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lbq.engine
from lbq.config import Config
from lbq.data import load_digits
from lbq.deploy import deploy_run
from lbq.models import create
from lbq.neuron import BurstNeuron
from lbq.runs.build import build
from tests.support import small_runs
from tests.support.paths import ROOT
from tests.support.report_runs import runs_folder

DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "models/README.md")),
    *sorted(DOCS.rglob("*.md")),
]  # and not a report.md that README's command wrote
FENCED = re.compile(r"```.*?```", re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)


# The README
# ---------------------------------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    text = text_of("README.md")
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 1250


def test_the_readme_says_where_to_change_what() -> None:
    """A stranger's four questions have one path each, and it exists."""
    rows = dict(re.findall(r"^\| ([^|]+) \| \[(src/[\w/.]+)\]", text_of("README.md"), re.MULTILINE))
    assert rows == {
        "how a neuron resets": "src/lbq/kernels/reference.py",
        "a dataset, or to add one": "src/lbq/data",
        "the price of an addition": "src/lbq/counting/technology.py",
        "a column of the report": "src/lbq/report/tables.py",
    }
    for path in rows.values():
        assert (ROOT / path).exists(), path
    assert "fp32_add" in text_of("src/lbq/counting/technology.py")
    assert "reset" in text_of("src/lbq/kernels/reference.py")


def test_the_map_shows_every_folder() -> None:
    tree = text_of("README.md").partition("src/lbq/\n")[2].partition("```")[0]
    inside, outside = tree.split("configs/ ")
    folders = {path.parent.name for path in (ROOT / "src/lbq").glob("*/__init__.py")}
    assert set(re.findall(r"(?<!\S)(\w+)/", inside)) == folders
    for name in re.findall(r"(?<!\S)(\w+)/", "configs/ " + outside):
        assert (ROOT / name).is_dir(), name


# Links, names and lists
# ---------------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What a forge makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_the_documentation_exist() -> None:
    with_anchors = 0
    for page in PAGES:
        for file, anchor in re.findall(r"(?:\]\(|src=\")([^)#:\"]*)(?:#([\w-]+))?[)\"]", page.read_text()):
            target = page.parent / file if file else page
            assert target.exists(), (page.name, file)
            assert not anchor or anchor in anchors(target), (page.name, file, anchor)
            with_anchors += bool(anchor)
    assert with_anchors > 20


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = re.findall(r"\]\(([^)#:]+\.md)", page.read_text(encoding="utf-8"))
            waiting += [(page.parent / link).resolve() for link in links]
    assert {page.resolve() for page in PAGES} <= reached


def test_dotted_names_need_no_other_import() -> None:
    """Every name in code font, as a reader types it after `import lbq`."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = sorted(set(re.findall(r"`(lbq(?:\.[A-Za-z_]\w*)+)[`(]", pages)) - {"lbq.toml"})
    code = f"import lbq\nfor name in {names!r}:\n    eval(name)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_names_in_the_documentation_exist() -> None:
    """Every name for mkdocstrings, and every file of the sources."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
            assert pkgutil.resolve_name(name).__doc__, (page.name, name)
        for path in re.findall(r"`((?:src|tests|benchmarks|docs)/[\w/]+\.\w+)`", text):
            assert (ROOT / path).exists(), (page.name, path)


def test_the_api_page_has_all_public_names() -> None:
    shown = set(re.findall(r"^::: lbq\.(\w+)$", text_of("docs/reference/api.md"), re.MULTILINE))
    assert shown | {"LbqError", "Statistics", "__version__"} == set(lbq.__all__)


def test_messages_name_pages_that_exist() -> None:
    """Sources and help texts send readers to pages."""
    named = 0
    for path in (ROOT / "src/lbq").rglob("*"):
        if path.suffix in (".py", ".h", ".c"):
            for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
                assert (ROOT / page).exists(), (path.name, page)
                named += 1
    assert named > 5


def test_the_page_of_commands_is_what_the_command_line_says() -> None:
    code = "import sys; sys.path.insert(0, 'docs/site'); import commands; print(commands.page(), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == text_of("docs/reference/commands.md"), "stale: python docs/site/commands.py"


def test_the_page_of_commands_tells_options_with_a_value_from_flags() -> None:
    page = text_of("docs/reference/commands.md")
    for option in ("--levels FILE", "--bits N", "--out FOLDER", "--engine ENGINE", "--noise", "--json"):
        assert f"`{option}` |" in page


def test_rows_with_a_record_have_its_accuracy() -> None:
    compared = 0
    for page in PAGES:
        for row in re.findall(r"^\|.*\d\d\.\d\d.*$", page.read_text(encoding="utf-8"), re.MULTILINE):
            for link in re.findall(r"\(([./]*results/[^)]+\.json)\)", row):
                record = json.loads((page.parent / link).read_text(encoding="utf-8"))
                accuracy = record.get("test_accuracy") or record.get("holdout_accuracy") or record["accuracy"]
                assert f"{accuracy:.2f}" in row, (page.name, link)
                compared += 1
    assert compared > 40


# Equations
# ---------------------------------------------------------------------------------------------------------------------


def equation_rows() -> list[tuple[str, str, str]]:
    page = text_of("docs/explanation/equations.md")
    rows = re.findall(r"^\| \d+ \| `(\w+)` \| .* \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert rows
    return rows


def test_equations_map_to_functions_and_tests_that_exist() -> None:
    for equation, functions, tests in equation_rows():
        for name in re.findall(r"`(lbq\.[\w.]+)`", functions):
            assert pkgutil.resolve_name(name), (equation, name)
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


# Python
# ---------------------------------------------------------------------------------------------------------------------

HERE = {  # page -> how many of its first blocks run here, in one namespace
    "README.md": 1,
    "docs/tutorials/first-network.md": 1,
    "docs/tutorials/own-data.md": 1,
    "docs/tutorials/convert-an-ann.md": 2,
    "docs/tutorials/on-integers.md": 2,
    "docs/tutorials/attention.md": 1,
    "docs/tutorials/microcontroller.md": 1,
    "docs/howto/own-network.md": 3,
    "docs/howto/fine-tune.md": 2,
    "docs/howto/few-bits.md": 1,
    "docs/howto/train.md": 1,
    "docs/howto/deploy.md": 1,
    "docs/howto/export-onnx.md": 2,
    "docs/howto/export-nir.md": 1,
    "docs/explanation/training-speed.md": 1,
    "docs/explanation/ablations.md": 1,
}
ELSEWHERE = {  # page -> how many blocks run in a test of their own, and where
    "docs/tutorials/own-data.md": (2, "data/test_user_arrays.py"),
    "docs/howto/own-network.md": (1, "system/test_plugins.py"),
    "docs/howto/streams.md": (2, "kernels/test_chunk.py"),  # the second one in engine/test_stream.py
    "docs/tutorials/watch.md": (1, "data/events/test_live.py"),
    "docs/howto/analyse.md": (1, "measuring/test_statistics.py"),
    "docs/howto/python.md": (3, "docs/test_pages.py"),
    "docs/howto/serve.md": (1, "docs/test_serve.py"),  # needs FastAPI
    "docs/howto/export-onnx.md": (1, "docs/test_pages.py"),  # needs onnxscript: compiled only
}


def test_every_block_of_python_is_run_by_some_test() -> None:
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        count, file = ELSEWHERE.get(name, (0, ""))
        assert len(python_blocks(name)) == HERE.get(name, 0) + count, name
        assert not file or f"{page.stem}.md" in (ROOT / "tests" / file).read_text(), (name, file)
    compile(python_blocks("docs/howto/export-onnx.md")[-1], "float.onnx", "exec")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what readers are told to have: an untrained run in the place of the demo's, and its integers."""
    folder = tmp_path_factory.mktemp("reader")
    config = Config.from_dict({})
    small_runs.save_run(folder / "runs/demo-001", build(config), config)
    lbq.engine.save(folder / "model.lbq", deploy_run(folder / "runs/demo-001"))
    (folder / "runs/demo-001/model.lbq").write_bytes((folder / "model.lbq").read_bytes())
    (folder / "DIR").mkdir()
    return folder


def told(page: str) -> dict[str, Any]:
    """The names that the pages take for granted."""
    digits = load_digits().test
    block = SimpleNamespace(
        conv1=nn.Conv2d(4, 4, 3, padding=1), bn1=nn.BatchNorm2d(4), sn1=BurstNeuron(),
        conv2=nn.Conv2d(4, 4, 3, padding=1), bn2=nn.BatchNorm2d(4), sn2=BurstNeuron(),
    )  # fmt: skip
    names = {
        "currents": torch.randn(2, 4, 6),
        "images": digits.images[:4],
        "labels": digits.labels[:4],
        "test_images": digits.images[4:6],
        "test_labels": digits.labels[4:6],
        "self": block,
        "x": torch.randn(2, 1, 4, 8, 8),
    }
    if page.endswith("export-nir.md"):
        names["net"] = create("resnet8w4", neuron="if").eval()
    return names


@pytest.mark.parametrize("page", HERE)
def test_the_python_of_a_page_runs(page: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reader)
    names = told(page)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in python_blocks(page)[: HERE[page]]:
            exec(block, names)
    lines = printed.getvalue().splitlines()
    if page in ("README.md", "docs/howto/own-network.md"):
        assert names["outputs"].shape == (2, 4, 6)
    if page.endswith("own-network.md"):
        assert names["logits"].shape == (4, 10)
    if page.endswith("first-network.md"):
        assert [line.split()[1] for line in lines[:7]] == ["0.4"] * 7  # an untrained network's steps
    if page.endswith("convert-an-ann.md"):
        *lines, other_activations = lines
        assert [line.split()[0] for line in lines] == ["ANN", "burst", "integers"]
        shares = [line.split()[1] for line in lines] + other_activations.split()
        assert all(float(share.rstrip("%")) > 90 for share in shares)
    if page.endswith("on-integers.md"):
        compared, executed, counted = lines
        same, right = re.fullmatch(r"([\d.]+)% as in PyTorch, ([\d.]+)% right", compared).groups()  # type: ignore[union-attr]
        assert float(same) > 98
        assert float(right) > 90
        accumulations, energy = map(float, counted.split())
        assert float(executed) / 4 > accumulations > 0
        assert energy > 0
    if page.endswith("ablations.md"):
        assert lines == ["0.35 0.34", "0.21 0.19"]  # as its comments say
    if page.endswith("export-onnx.md"):
        assert (names["out"]["logits"] == names["net"].run(names["images"]).logits).all()


def test_the_page_on_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec("\n".join(python_blocks("docs/howto/python.md")), {"__name__": "page"})
    first, second, *rest = printed.getvalue().splitlines()
    assert first.startswith("epoch 1: loss")
    assert second.startswith("epoch 2: loss")
    assert sum(line.startswith(("sn1", "layer")) for line in rest) == 7
    assert "<html" in Path("runs/python/report.html").read_text()


def test_the_page_on_files_names_every_key_that_a_run_writes() -> None:
    """And none that it does not, but for those that not every run has."""
    page = (ROOT / "docs/reference/files.md").read_text()
    lines, result = (
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", part, re.M))) for part in tables(page)
    )
    run = runs_folder() / "lbq-0"
    written = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(lines) == set(written)
    assert set(result) == set(json.loads((run / "result.json").read_text())) | {"init_sha256", "earlier"}


def tables(page: str) -> tuple[str, str]:
    """The parts on metrics.jsonl and on result.json."""
    _, lines, rest = re.split(r"^`metrics.jsonl` has|^`result.json` exists", page, flags=re.M)
    return lines, rest.partition("\n## ")[0]
