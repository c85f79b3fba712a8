"""The report in a real browser: no errors, tables that sort, figures that are there, themes, a phone's width, the keyboard."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from lbq.report.output import make
from lbq.results.gather import gather
from lbq.runs.records import read
from tests.support import browser
from tests.support.browser import Page
from tests.support.paths import ROOT
from tests.support.report_runs import of_cifar, runs_folder

UNFOLDED = "section:not(#details) details, #details > details:first-of-type"  # all but most records
UNFOLD = f"document.querySelectorAll('{UNFOLDED}').forEach(d => d.open = true)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser.opened() as tab:
        path = tmp_path_factory.mktemp("page") / "report.html"
        gathered = gather([runs_folder()], read)
        make(path, replace(gathered, results=[*gathered.results, of_cifar()]))
        tab.resize(1280)
        tab.open(path)
        yield tab


def column(page: Page, table: str, index: int) -> list[str]:
    return page.run(f"[...document.querySelectorAll('#{table} tbody tr')].map(r => r.cells[{index}].textContent)")


def test_it_opens_without_errors_and_loads_nothing(page: Page) -> None:
    assert page.run("performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length") == 0
    assert all(address.startswith(("file:", "data:")) for address in page.requests)
    assert page.errors == []


def test_figures_and_tour_are_there(page: Page) -> None:
    page.run(UNFOLD)
    sizes = page.run("[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().width)")
    assert len(sizes) >= 9
    assert min(sizes) > 200
    images = page.run("[...document.querySelectorAll('img.px')].map(i => i.complete && i.naturalWidth > 0)")
    assert len(images) >= 35
    assert all(images)
    inked = page.run("getComputedStyle(document.querySelector('[id^=figure-steps] .line')).stroke")
    assert inked == "rgb(0, 114, 178)"  # the first run's colour on its dataset
    assert overlapping(page) == []


def test_tables_sort_by_click_and_by_key(page: Page) -> None:
    table = "table7-cost"
    heads = page.run(f"[...document.querySelectorAll('#{table} thead th')].map(h => h.textContent)")
    accuracy = heads.index("Accuracy %")
    head = f"document.querySelector('#{table} thead').rows[0].cells[{accuracy}]"
    before = column(page, table, accuracy)
    page.run(f"{head}.querySelector('button').click()")
    up = [float(text.split()[0]) for text in column(page, table, accuracy)]
    assert up == sorted(up)
    assert sorted(column(page, table, accuracy)) == sorted(before)
    assert page.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    page.run(f"{head}.querySelector('button').focus()")
    page.press("Enter", "\r")
    page.wait(f"{head}.getAttribute('aria-sort') == 'descending'")
    down = [float(text.split()[0]) for text in column(page, table, accuracy)]
    assert down == sorted(down, reverse=True)
    page.run(f"document.querySelector('#{table} thead').rows[0].cells[0].querySelector('button').click()")
    names = column(page, table, 0)
    order = [
        "ANN",
        "Binary",
        "LBQ (2)",
        "LBQ (5)",
        "LBQ (5)",
        "LBQ (5)",
        "LBQ (10)",
        "LBQ (20)",
        "Ternary",
    ]  # as numbers
    assert names == order
    assert page.errors == []


def test_empty_cells_stay_at_the_end(page: Page) -> None:
    table = "table2-cifar-10"
    for _ in range(2):
        page.run(f"document.querySelector('#{table} thead').rows[0].cells[1].querySelector('button').click()")
        texts = column(page, table, 1)
        filled = [bool(text) for text in texts]
        assert filled == sorted(filled, reverse=True)
        assert 0 < sum(filled) < len(filled)


def test_logs_sort_by_what_they_show(page: Page) -> None:
    log = "document.querySelector('table.numbers')"
    heads = page.run(f"[...{log}.tHead.rows[0].cells].map(h => h.textContent)")
    place = heads.index("lr")  # as texts, 1e-05 would come after 0.05
    page.run(f"{log}.tHead.rows[0].cells[{place}].querySelector('button').click()")
    rates = [float(text) for text in page.run(f"[...{log}.tBodies[0].rows].map(r => r.cells[{place}].textContent)")]
    assert len(set(rates)) > 1
    assert rates == sorted(rates)


def test_the_theme_changes_and_is_remembered(page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.run(colour)
    page.run("document.getElementById('theme').focus()")
    page.press(" ", " ")
    assert page.run(colour) != before
    assert page.run("document.documentElement.dataset.theme") == "dark"
    page.run("document.getElementById('theme').click()")
    assert page.run(colour) == before


def test_a_curve_stands_out_while_the_pointer_is_on_its_name(page: Page) -> None:
    plot = "document.querySelector('[id^=figure-training-loss] svg')"
    parts = page.run(f"[...{plot}.querySelectorAll('[data-of]')].map(g => g.dataset.of)")
    shown = f"[...{plot}.querySelectorAll('[data-of]')].filter(g => getComputedStyle(g).opacity === '1').map(g => g.dataset.of)"
    assert page.run(shown) == parts
    name = f"[...{plot}.querySelectorAll('[data-of] text')].at(-1)"
    page.run(f"{name}.dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}))")
    assert page.run(shown) == [part for part in parts if part == parts[-1]]  # the curves of its seeds and their name
    page.run(f"{plot}.dispatchEvent(new PointerEvent('pointerleave'))")
    assert page.run(shown) == parts
    assert page.errors == []


def test_a_run_leads_to_its_record(page: Page) -> None:
    page.run("document.querySelector('#runs a').click()")
    page.run("new Promise(done => setTimeout(done, 50))")
    assert page.run("document.querySelector(location.hash).open") is True
    assert "weights_sha256" in page.run("document.querySelector(location.hash).textContent")
    page.run("history.replaceState(null, '', location.pathname)")
    assert page.errors == []


def overlapping(page: Page) -> list[str]:
    """Labels of one figure that overlap, as the browser lays them out."""
    return page.run(
        """[...document.querySelectorAll('figure[id]')].flatMap(f => {
          const boxes = [...f.querySelectorAll('svg text')].map(t => [t.textContent, t.getBoundingClientRect()]);
          const bad = [];
          for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
            const [a, b] = [boxes[i][1], boxes[j][1]];
            const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (w > 2 && h > 4) bad.push(f.id + ': ' + boxes[i][0] + ' / ' + boxes[j][0]);
          }
          return bad;
        })"""
    )


def test_headings_images_and_tables_have_names(page: Page) -> None:
    assert page.run("document.documentElement.lang") == "en"
    for kind, unnamed in (
        ("img", "!e.alt"),
        ("table", "!e.caption"),
        ("svg[role=img]", "!e.querySelector('title')"),
    ):
        assert page.run(f"[...document.querySelectorAll('{kind}')].filter(e => {unnamed}).length") == 0, kind


def test_the_skip_link_is_first_on_the_keyboard(page: Page) -> None:
    page.run("document.activeElement.blur(); getSelection().removeAllRanges()")
    page.run("document.body.tabIndex = -1; document.body.focus()")
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"


def printed(page: Page) -> bytes:
    return base64.b64decode(page.call("Page.printToPDF", printBackground=False)["data"])


def filled(page: Page, colour: str) -> list[int]:
    """How often each part of the printed page takes a colour, given as a pattern, to fill shapes or letters."""
    counts = []
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", printed(page), re.DOTALL):
        with suppress(zlib.error):  # fonts and pictures may be packed otherwise
            counts.append(len(re.findall(f"{colour} rg".encode(), zlib.decompress(stream))))
    return [count for count in counts if count]


def test_the_outputs_bars_are_printed(page: Page) -> None:
    """Also where a browser leaves out backgrounds, as it does by default. The last of this page: it takes the rest away."""

    page.run("document.querySelectorAll('main > section:not(#tour)').forEach(s => s.remove())")
    assert sum(filled(page, "0 \\.447\\d* \\.698\\d*")) == page.run("document.querySelectorAll('.bars i').length") > 0


@pytest.fixture(scope="module")
def crowded(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Our own records: many runs, long names, long file names. After it, the page is another."""
    path = tmp_path_factory.mktemp("page") / "crowded.html"
    make(path, gather([ROOT / "results"]))
    page.open(path)
    page.run(UNFOLD)
    yield page
    page.call("Emulation.setEmulatedMedia", media="")
    page.resize(1280)


@pytest.mark.parametrize("width", [1280, 768, 390, 320])
def test_nothing_is_wider_than_the_window(crowded: Page, width: int) -> None:
    crowded.resize(width)
    assert crowded.run("innerWidth") == width  # a phone's grows with what is too wide
    assert crowded.run("document.scrollingElement.scrollWidth") <= width
    right = "Math.max(...[...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect().right))"
    assert crowded.run(right) <= width


@pytest.mark.parametrize("width", [1280, 390])
def test_text_in_figures_can_be_read(crowded: Page, width: int) -> None:
    crowded.resize(width)
    sizes = crowded.run(
        """[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width
          * Math.min(...[...s.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize))))"""
    )
    assert min(sizes) >= 10
    assert overlapping(crowded) == []


@pytest.mark.parametrize("width", [390])
def test_on_a_phone_nothing_is_cut(crowded: Page, width: int) -> None:
    """Rows of tables are blocks whose cells say their columns; only logs, which are folded twice, scroll sideways."""
    crowded.resize(width)
    cut = """[...document.querySelectorAll('.scroll')].filter(e => !e.querySelector('.numbers, pre'))
        .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 40))"""
    assert crowded.run(cut) == []
    assert crowded.run("getComputedStyle(document.querySelector('#runs thead')).display") == "none"
    label = "getComputedStyle(document.querySelector('#runs tbody tr').cells[1], '::before').content"
    assert "Dataset" in crowded.run(label)


@pytest.mark.parametrize("width", [390])
def test_one_line_leads_through_the_page_and_stays(crowded: Page, width: int) -> None:
    crowded.resize(width)
    wait = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 60)))"
    line = "document.querySelector('nav').getBoundingClientRect()"
    tops = "new Set([...document.querySelectorAll('nav a')].map(a => a.getBoundingClientRect().top)).size"
    assert crowded.run(tops) == 1
    assert crowded.run(f"{line}.height") < 60
    crowded.run(
        "document.documentElement.style.scrollBehavior = 'auto'; document.querySelector('#costs').scrollIntoView()"
    )
    crowded.run(wait)
    assert crowded.run(f"{line}.top") == 0
    assert crowded.run("document.querySelector('nav [aria-current]').hash") == "#costs"
    assert (
        crowded.run("document.querySelector('#costs h2').getBoundingClientRect().top")
        >= crowded.run(f"{line}.bottom") - 1
    )
    shown = "document.querySelector('nav [aria-current]').getBoundingClientRect()"
    assert 0 <= crowded.run(f"{shown}.left") < crowded.run(f"{shown}.right") <= width
    crowded.run("scrollTo(0, 0)")


def test_on_paper_nothing_is_cut(crowded: Page) -> None:
    """A4 within its margins is 717 pixels wide."""
    crowded.call("Emulation.setEmulatedMedia", media="print")
    crowded.resize(717)
    cut = crowded.run(
        """[...document.querySelectorAll('main table, main svg')]
          .filter(e => e.getBoundingClientRect().right > 717).map(e => e.id)"""
    )
    assert cut == []


def test_on_paper_a_long_table_repeats_its_heads(crowded: Page) -> None:
    """On every page. The last of all, as it takes the rest away."""
    crowded.call("Emulation.setEmulatedMedia", media="")
    crowded.run("document.querySelectorAll('main > section:not(#runs-section)').forEach(s => s.remove())")
    crowded.run(
        "document.head.insertAdjacentHTML('beforeend', '<style>th { color: #f0f; print-color-adjust: exact }</style>')"
    )
    assert len(filled(crowded, "1 0 1")) == len(re.findall(rb"/Type /Page\b", printed(crowded))) > 1
