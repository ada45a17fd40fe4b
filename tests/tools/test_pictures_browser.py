"""Pictures in a real browser, light and dark (tests/browser.py says which browser)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser as chromium
from tests.pictures import all_pictures
from tests.tools.test_pictures import check_self_contained

PAGE_CHECKS = (Path(__file__).parents[1] / "looked_at.js").read_text()
BAD = """<!doctype html><meta name="color-scheme" content="light dark"><style>body{background:#fff}
</style><p style="color:#999">pale</p><div style="width:3000px">wide</div>
<svg width="100" height="40"><text x="5" y="20">one above</text><text x="8" y="21">another</text>
<text x="90" y="20">leaves the picture</text></svg><img src="none/there.png">
<script>console.error("a mistake"); missing()</script>"""

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    """One browser for all tests."""
    if chromium.find_browser() is None:
        pytest.skip("no Chromium or Chrome is installed, and SCHEDLANG_BROWSER names none")
    with chromium.open_browser(tmp_path_factory.mktemp("browser")) as session:
        yield session


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all pictures as files."""
    pictures = tmp_path_factory.mktemp("pictures")
    for name, text in all_pictures():
        check_self_contained(text)
        (pictures / name).write_text(text)
    return pictures


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_picture(browser: chromium.Browser, folder: Path, dark: bool) -> None:
    """No console message, request, overflow, overlap, or contrast below 4.5."""
    problems = {}
    for file in sorted(folder.iterdir()):
        browser.open(file, dark=dark)
        faults = browser.tell(PAGE_CHECKS) + browser.complaints() + browser.requests()
        if faults:
            problems[file.name] = faults[:5]
    assert not problems
    assert len(list(folder.iterdir())) >= 12


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_of_timelines_is_used(browser: chromium.Browser, folder: Path, dark: bool) -> None:
    """Every order that can be chosen is drawn, legibly and without console messages."""
    browser.open(folder / "timelines.html", dark=dark)
    orders = browser.tell("[...document.getElementById('order').options].map(o => o.value)")
    assert len(orders) > 20
    for name in orders:
        browser.tell(f"page.order.value = '{name}'; page.show()")
        assert browser.tell("document.querySelectorAll('#drawing .b').length") > 8
    for name in ("ZB-V", "DualPipe"):
        browser.tell(f"page.order.value = '{name}'; page.show()")
        assert browser.tell(PAGE_CHECKS) == []
    assert not browser.complaints() + browser.requests()


def test_a_narrow_window_scrolls(browser: chromium.Browser, folder: Path) -> None:
    """At 400 pixels no page is wider than the window."""
    pages = sorted(folder.glob("*.html"))
    assert len(pages) >= 6
    for page in pages:
        browser.open(page, dark=False, width=400)
        page_width = browser.tell("document.documentElement.scrollWidth")
        assert page_width <= 400, (page.name, page_width)


SMALLEST = """[...document.querySelectorAll("body *, svg *")].filter(
  (node) => !["SCRIPT", "STYLE", "OPTION", "style", "title"].includes(node.tagName)
    && node.checkVisibility() && [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim())
).map((node) => {
  const drawn = node instanceof SVGElement ? node.getScreenCTM().d : 1;
  return [parseFloat(getComputedStyle(node).fontSize) * drawn, node.textContent.trim()];
}).reduce((a, b) => (b[0] < a[0] ? b : a))"""


@pytest.mark.parametrize("width", [400, 1200])
def test_every_word_can_be_read(browser: chromium.Browser, folder: Path, width: int) -> None:
    """At any width no text is smaller than nine pixels."""
    pages = sorted(folder.glob("*.html"))
    assert pages
    for page in pages:
        browser.open(page, dark=False, width=width)
        size, smallest = browser.tell(SMALLEST)
        assert size >= 9, (page.name, size, smallest)


@pytest.mark.parametrize("width", [400, 1200])
def test_a_measured_timeline_is_whole(browser: chromium.Browser, folder: Path, width: int) -> None:
    """The last bar of each rank is in the picture, and can be scrolled to."""
    browser.open(folder / "measured.html", dark=False, width=width)
    last, edge, right = browser.tell(
        "(() => { const frame = document.getElementById('frame'); frame.scrollLeft = 1e6;"
        "const right = (node) => node.getBoundingClientRect().right;"
        "const bars = [...frame.querySelectorAll('.b')];"
        "const svg = frame.querySelector('svg');"
        "return [Math.max(...bars.map(right)), right(svg), right(frame)] })()"
    )
    assert last <= edge <= right + 1 <= width + 1


def test_unlike_makespans_look_unlike(browser: chromium.Browser, folder: Path) -> None:
    """Makespans below a millisecond have a unit, and different ones look different."""
    browser.open(folder / "estimated.html", dark=False)
    cells = browser.tell(
        "[...document.querySelectorAll('#others tr')].map(r => r.cells[2].textContent)"
    )
    times = browser.tell(
        "page.book.entries.filter(e => e.ranks === 4 && e.micro === 8)"
        ".map(e => figures(page.timeline(e), timed(page.timeline(e), page.cost())).makespan)"
    )
    assert len(cells) == len(times) > 20 and all(cell.endswith(" ns") for cell in cells)
    numbers = [float(cell.split()[0]) for cell in cells]
    assert all(abs(a - b) < 1e-3 * b for a, b in zip(sorted(numbers), sorted(times), strict=True))
    assert len(set(cells)) > 10 and not any(cell.startswith("0.00") for cell in cells)


def test_a_phone_breaks_no_word(browser: chromium.Browser, folder: Path) -> None:
    """At 400 pixels the kinds of a report are broken only between words."""
    for name in ("report_equal.html", "report_different.html", "report_notebook.html"):
        browser.open(folder / name, dark=False, width=400)
        broken = browser.tell(
            "[...document.querySelectorAll('tr td:first-child')].flatMap(cell => {"
            "const text = cell.firstChild, found = [...text.data.matchAll(/\\S+/g)];"
            "return found.filter(word => { const range = document.createRange();"
            "range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length);"
            "return range.getClientRects().length > 1 }).map(word => word[0]) })"
        )
        assert broken == [], (name, broken)
    assert browser.tell("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("report_different.html", ".n, td:last-child"),
        ("report_equal.html", ".n, td:last-child"),
        ("diff.html", ".n"),
    ],
)
def test_a_phone_shows_the_numbers_and_the_verdict(
    browser: chromium.Browser, folder: Path, name: str, cells: str
) -> None:
    """At 400 pixels numbers and verdicts are visible without scrolling, each on one line."""
    browser.open(folder / name, dark=False, width=400)
    measured = browser.tell(
        f"[...document.querySelector('table').querySelectorAll('{cells}')].map(cell => {{"
        "const range = document.createRange(); range.selectNodeContents(cell);"
        "const tops = new Set([...range.getClientRects()].map(r => Math.round(r.top)));"
        "return [cell.textContent, tops.size, cell.getBoundingClientRect().right]})"
    )
    assert len(measured) > 6
    assert not [cell for cell in measured if cell[1] > 1 or cell[2] > 400], measured


def test_what_is_wrong_is_seen(browser: chromium.Browser, tmp_path: Path) -> None:
    """The checks find pale text, wide pages, overlaps, requests and errors on a bad page."""
    (tmp_path / "bad.html").write_text(BAD)
    browser.open(tmp_path / "bad.html", dark=False)
    problems = " ".join(browser.tell(PAGE_CHECKS))
    for fragment in ("contrast of 2.8", "too wide", "lies on", "leaves the picture"):
        assert fragment in problems, (fragment, problems)
    assert any("none/there.png" in url for url in browser.requests())
    complaints = " ".join(browser.complaints())
    assert "a mistake" in complaints and "missing is not defined" in complaints
