"""The documentation site: builds without a warning, opens from the disk, is searched, and loads nothing from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import browser
from tests.support.browser import Page
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    variables = {name: value for name, value in os.environ.items() if name != "LBQ_REPOSITORY"}
    variables["NO_MKDOCS_2_WARNING"] = "1"
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    assert pages == sources | {"index", "404"}
    assert {path.name for path in (site / "notebooks").iterdir()} == {
        path.name for path in (ROOT / "notebooks").glob("*.ipynb")
    }


def test_no_page_asks_for_anything_outside(site: Path) -> None:
    """Scripts, styles, fonts and pictures come from the site itself; links may lead elsewhere."""
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"?(?:https?:)?//[^>]*>", text), path
        assert not re.findall(
            r"<link[^>]+(?:stylesheet|preconnect|icon|preload)[^>]+href=\"?(?:https?:)?//[^>]*>", text
        ), path
        assert not re.findall(r"(?:url\(|@import )\"?(?:https?:)?//", text), path


def test_the_api_page_shows_values_and_describes_each_parameter(site: Path) -> None:
    """Defaults are numbers, not names of constants; a sentence `name: text` of a docstring is an entry of its own."""
    text = re.sub(r"<[^>]+>", "", (site / "reference" / "api.html").read_text(encoding="utf-8"))
    assert "step: float | Tensor = 0.4" in text
    assert "seed: int = 0," in text
    assert not re.findall(r"INITIAL_STEP|BOX_ET_TAIL|_checked|__getstate__", text)
    assert re.search(r"target\s+\(\s*str \| None,\s+default:\s+None\s+\)\s+–\s+cortex-m makes", text)


def test_links_that_leave_the_pages_lead_to_files(site: Path) -> None:
    """Without a repository's address they lead to the checkout."""
    page = site / "explanation" / "ablations.html"
    links = re.findall(r'<a href="((?:\.\./)+[^"#]*)"', page.read_text(encoding="utf-8"))
    records = [link for link in links if link.endswith(".json")]
    assert len(records) > 20
    for link in records:
        assert (page.parent / link).resolve().is_relative_to(ROOT), link
        assert (page.parent / link).exists(), link


def test_links_that_leave_the_pages_lead_to_a_repository_if_it_is_named() -> None:
    code = (
        "import sys; sys.path.insert(0, 'docs/site')\n"
        "from types import SimpleNamespace as File; from hooks import resolve\n"
        "config = {'extra': {'repository': 'https://forge.example/lbq/blob/main/'}}\n"
        "files = File(get_file_from_path={'howto/train.md': 1}.get)\n"
        "text = '[a](../../models/README.md#caveats) [b](../howto/train.md) [c](https://pytorch.org) ![d](../none.svg)'\n"
        "print(resolve(text, File(src_uri='explanation/engines.md'), config, files))\n"
        "print(resolve('[b](docs/howto/train.md#speed)', File(src_uri='index.md'), config, files))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        '<a href="https://forge.example/lbq/blob/main/models/README.md#caveats">a</a> [b](../howto/train.md)'
        " [c](https://pytorch.org) ![d](../none.svg)",
        "[b](howto/train.md#speed)",
    ]


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Page]:
    with browser.opened() as tab:
        tab.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        tab.resize(1280)
        tab.open(site / "index.html")
        yield tab


def wait_for(page: Page, expression: str, seconds: float = 20) -> None:
    for _ in range(int(seconds * 10)):
        if page.run(expression):
            return
        time.sleep(0.1)
    raise AssertionError(f"never true: {expression}")


def test_search_finds_burst_from_the_disk(page: Page) -> None:
    page.run("document.querySelector('[data-md-toggle=search]').click()")
    page.run(
        "(() => { const q = document.querySelector('[data-md-component=search-query]'); q.focus(); q.value = 'burst';"
        " q.dispatchEvent(new Event('input', {bubbles: true}));"
        " q.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
    )
    wait_for(page, "document.querySelectorAll('.md-search-result__item').length > 3")
    hits = page.run("[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)")
    assert any("neuron" in hit for hit in hits)
    assert all(address.startswith(("file:", "data:")) for address in page.requests)
    assert page.errors == []


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_their_window(page: Page, site: Path, width: int) -> None:
    """What is wider, such as a table, scrolls in its own box."""
    page.resize(width)
    for name in ("index", "explanation/reproduction", "reference/configuration", "reference/api"):
        page.open(site / f"{name}.html")
        assert page.run("document.documentElement.scrollWidth") <= width, name
        assert page.run("[...document.images].every(i => i.complete && i.naturalWidth > 0)"), name
    assert all(address.startswith(("file:", "data:")) for address in page.requests)
    assert page.errors == []
