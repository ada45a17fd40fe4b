"""Pictures in a real browser, in the light and the dark: tests/browser.py says which it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser as chromium
from tests.pictures import every
from tests.tools.test_pictures import alone

LOOKED_AT = (Path(__file__).parents[1] / "looked_at.js").read_text()
BAD = """<!doctype html><meta name="color-scheme" content="light dark"><style>body{background:#fff}
</style><p style="color:#999">pale</p><div style="width:3000px">wide</div>
<svg width="100" height="40"><text x="5" y="20">one above</text><text x="8" y="21">another</text>
<text x="90" y="20">leaves the picture</text></svg><img src="none/there.png">
<script>console.error("a mistake"); missing()</script>"""

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    """One browser for all of them."""
    if chromium.program() is None:
        pytest.skip("no Chromium or Chrome is installed, and SCHEDLANG_BROWSER names none")
    with chromium.browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pictures as files."""
    where = tmp_path_factory.mktemp("pictures")
    for name, text in every():
        alone(text)
        (where / name).write_text(text)
    return where


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_picture(browser: chromium.Browser, folder: Path, dark: bool) -> None:
    """No complaint, no request, nothing that overflows or overlaps, no contrast below 4.5."""
    found = {}
    for file in sorted(folder.iterdir()):
        browser.open(file, dark=dark)
        faults = browser.tell(LOOKED_AT) + browser.complaints() + browser.requests()
        if faults:
            found[file.name] = faults[:5]
    assert not found
    assert len(list(folder.iterdir())) >= 12


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_of_timelines_is_used(browser: chromium.Browser, folder: Path, dark: bool) -> None:
    """Every order that can be chosen is drawn with blocks that can be read, and without a word."""
    browser.open(folder / "timelines.html", dark=dark)
    orders = browser.tell("[...document.getElementById('order').options].map(o => o.value)")
    assert len(orders) > 20
    for name in orders:
        browser.tell(f"page.order.value = '{name}'; page.show()")
        assert browser.tell("document.querySelectorAll('#drawing .b').length") > 8
    for name in ("ZB-V", "DualPipe"):
        browser.tell(f"page.order.value = '{name}'; page.show()")
        assert browser.tell(LOOKED_AT) == []
    assert not browser.complaints() + browser.requests()


def test_a_narrow_window_scrolls(browser: chromium.Browser, folder: Path) -> None:
    """On a phone no page is wider than the window: pictures shrink, tables scroll."""
    pages = sorted(folder.glob("*.html"))
    assert len(pages) >= 6
    for page in pages:
        browser.open(page, dark=False, width=400)
        wide = browser.tell("document.documentElement.scrollWidth")
        assert wide <= 400, (page.name, wide)


SMALLEST = """[...document.querySelectorAll("body *, svg *")].filter(
  (node) => !["SCRIPT", "STYLE", "OPTION", "style", "title"].includes(node.tagName)
    && node.checkVisibility() && [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim())
).map((node) => {
  const drawn = node instanceof SVGElement ? node.getScreenCTM().d : 1;
  return [parseFloat(getComputedStyle(node).fontSize) * drawn, node.textContent.trim()];
}).reduce((a, b) => (b[0] < a[0] ? b : a))"""


@pytest.mark.parametrize("width", [400, 1200])
def test_every_word_can_be_read(browser: chromium.Browser, folder: Path, width: int) -> None:
    """However narrow the window is, no word of a page is smaller than nine points."""
    pages = sorted(folder.glob("*.html"))
    assert pages
    for page in pages:
        browser.open(page, dark=False, width=width)
        size, words = browser.tell(SMALLEST)
        assert size >= 9, (page.name, size, words)


@pytest.mark.parametrize("width", [400, 1200])
def test_a_measured_timeline_is_whole(browser: chromium.Browser, folder: Path, width: int) -> None:
    """The last bar of each rank lies in the picture, and can be scrolled to."""
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
    """Estimated costs far below a millisecond have a unit; orders differ where their times do."""
    browser.open(folder / "estimated.html", dark=False)
    shown = browser.tell(
        "[...document.querySelectorAll('#others tr')].map(r => r.cells[2].textContent)"
    )
    times = browser.tell(
        "page.book.entries.filter(e => e.ranks === 4 && e.micro === 8)"
        ".map(e => figures(page.timeline(e), timed(page.timeline(e), page.cost())).makespan)"
    )
    assert len(shown) == len(times) > 20 and all(one.endswith(" ns") for one in shown)
    told = [float(one.split()[0]) for one in shown]
    assert all(abs(a - b) < 1e-3 * b for a, b in zip(sorted(told), sorted(times), strict=True))
    assert len(set(shown)) > 10 and not any(one.startswith("0.00") for one in shown)


def test_a_phone_breaks_no_word(browser: chromium.Browser, folder: Path) -> None:
    """The kinds of a report are broken between words, never within one."""
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
    """Without scrolling, and a number with its unit on one line."""
    browser.open(folder / name, dark=False, width=400)
    found = browser.tell(
        f"[...document.querySelector('table').querySelectorAll('{cells}')].map(cell => {{"
        "const range = document.createRange(); range.selectNodeContents(cell);"
        "const tops = new Set([...range.getClientRects()].map(r => Math.round(r.top)));"
        "return [cell.textContent, tops.size, cell.getBoundingClientRect().right]})"
    )
    assert len(found) > 6
    assert not [one for one in found if one[1] > 1 or one[2] > 400], found


def test_what_is_wrong_is_seen(browser: chromium.Browser, tmp_path: Path) -> None:
    """Pale words, a wide page, words on words or outside, requests and errors are all found."""
    (tmp_path / "bad.html").write_text(BAD)
    browser.open(tmp_path / "bad.html", dark=False)
    said = " ".join(browser.tell(LOOKED_AT))
    for words in ("contrast of 2.8", "too wide", "lies on", "leaves the picture"):
        assert words in said, (words, said)
    assert any("none/there.png" in url for url in browser.requests())
    told = " ".join(browser.complaints())
    assert "a mistake" in told and "missing is not defined" in told
