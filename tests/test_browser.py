"""The report in a real browser: no errors, tables that sort, figures that are there, themes, a phone's width, the keyboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lbq.records import read
from lbq.report.folder import make
from lbq.results import gather
from tests import browser
from tests.browser import Page
from tests.report_runs import runs_folder

SECONDS = 1.0  # to be interactive


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    chromium = browser.executable()
    if chromium is None:
        pytest.skip(
            "no Chromium: install it (apt install chromium), or name it in LBQ_CHROMIUM, to test the report's page"
        )
    path = tmp_path_factory.mktemp("page") / "report.html"
    make(path, gather([runs_folder()], read))
    with browser.opened(chromium) as found:
        found.resize(1280)
        found.open(path)
        found.open(path)  # the second time is without the browser's own start
        yield found


def column(page: Page, table: str, index: int) -> list[str]:
    return page.run(f"[...document.querySelectorAll('#{table} tbody tr')].map(r => r.cells[{index}].textContent)")


def test_it_opens_without_errors_and_loads_nothing(page: Page) -> None:
    seconds = page.run("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd") / 1e3
    assert seconds < SECONDS
    assert page.run("performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length") == 0
    assert all(address.startswith(("file:", "data:")) for address in page.requests)
    assert page.errors == []


def test_figures_and_tour_are_there(page: Page) -> None:
    sizes = page.run("[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().width)")
    assert len(sizes) >= 12
    assert min(sizes) > 200
    images = page.run("[...document.querySelectorAll('img.px')].map(i => i.complete && i.naturalWidth > 0)")
    assert len(images) >= 35
    assert all(images)
    inked = page.run("getComputedStyle(document.querySelector('#figure-steps .line')).stroke")
    assert inked == "rgb(0, 158, 115)"  # the third run's colour


def test_tables_sort_by_click_and_by_key(page: Page) -> None:
    table, accuracy = "table7-cost", 2
    head = f"document.querySelector('#{table} thead').rows[0].cells[{accuracy}]"
    before = column(page, table, accuracy)
    page.run(f"{head}.querySelector('button').click()")
    up = [float(text.split()[0]) for text in column(page, table, accuracy)]
    assert up == sorted(up)
    assert sorted(column(page, table, accuracy)) == sorted(before)
    assert page.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    page.run(f"{head}.querySelector('button').focus()")
    page.press("Enter", "\r")
    down = [float(text.split()[0]) for text in column(page, table, accuracy)]
    assert down == sorted(down, reverse=True)
    assert page.run(f"{head}.getAttribute('aria-sort')") == "descending"
    page.run(f"document.querySelector('#{table} thead').rows[0].cells[0].querySelector('button').click()")
    names = column(page, table, 0)
    order = ["ANN", "Binary", "LBQ (2)", "LBQ (5)", "LBQ (5)", "LBQ (10)", "LBQ (20)", "Ternary"]  # numbers as numbers
    assert names == order
    assert page.errors == []


def test_empty_cells_stay_at_the_end(page: Page) -> None:
    table = "table2-cifar-10"
    for _ in range(2):
        page.run(f"document.querySelector('#{table} thead').rows[0].cells[4].querySelector('button').click()")
        texts = column(page, table, 4)
        filled = [bool(text) for text in texts]
        assert filled == sorted(filled, reverse=True)
        assert 0 < sum(filled) < len(filled)


def test_the_theme_changes_and_is_remembered(page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.run(colour)
    page.run("document.getElementById('theme').focus()")
    page.press(" ", " ")
    assert page.run(colour) != before
    assert page.run("document.documentElement.dataset.theme") == "dark"
    page.run("document.getElementById('theme').click()")
    assert page.run(colour) == before


def test_two_runs_are_compared(page: Page) -> None:
    rows = "[...document.querySelectorAll('#compared tbody tr')].map(r => r.cells[0].textContent)"
    assert "config.neuron.name" in page.run(rows)
    page.run(
        "(() => { const s = document.getElementById('run-b'); s.value = '0'; s.dispatchEvent(new Event('change')); })()"
    )
    assert page.run(rows) == ["nothing"]
    page.run(
        "(() => { const s = document.getElementById('run-b'); s.value = '3'; s.dispatchEvent(new Event('change')); })()"
    )
    assert "test_accuracy" in page.run(rows)
    assert page.run("document.querySelectorAll('#compared svg path.line').length") >= 4
    assert page.errors == []


def test_a_run_leads_to_its_record(page: Page) -> None:
    page.run("document.querySelector('#runs a').click()")
    page.run("new Promise(done => setTimeout(done, 50))")
    assert page.run("document.querySelector(location.hash).open") is True
    assert "weights_sha256" in page.run("document.querySelector(location.hash).textContent")
    page.run("history.replaceState(null, '', location.pathname)")
    assert page.errors == []


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.resize(width)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert (
        page.run("Math.max(...[...document.querySelectorAll('figure')].map(f => f.getBoundingClientRect().right))")
        <= width
    )
    page.resize(1280)


def test_text_in_figures_does_not_overlap(page: Page) -> None:
    """Labels of one figure, as the browser lays them out."""
    overlapping = page.run(
        """[...document.querySelectorAll('#training figure, #layers figure:not(.wide), #neuron figure')].flatMap(f => {
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
    assert overlapping == []


def test_headings_images_and_tables_have_names(page: Page) -> None:
    assert page.run("document.documentElement.lang") == "en"
    assert page.run("[...document.querySelectorAll('img')].filter(i => !i.alt).length") == 0
    assert page.run("[...document.querySelectorAll('table')].filter(t => !t.caption).length") == 0
    assert (
        page.run(
            "[...document.querySelectorAll('svg[role=img]')].filter(s => !s.querySelector('title') && !s.ariaLabel).length"
        )
        == 0
    )
    assert page.run("[...document.querySelectorAll('select')].filter(s => !s.labels.length).length") == 0


def test_the_skip_link_is_first_on_the_keyboard(page: Page) -> None:
    page.run("document.activeElement.blur(); getSelection().removeAllRanges()")
    page.run("document.body.tabIndex = -1; document.body.focus()")
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
