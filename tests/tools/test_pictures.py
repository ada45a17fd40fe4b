"""Pictures: small, alone, light and dark, and told apart by every kind of sight."""

from __future__ import annotations

import re

import pytest

from schedlang import report as report_page
from schedlang.viz import cost_pictures, picture
from schedlang.viz.timeline_pictures import LOOKS, Kind, shade_of
from tests.pictures import different, equal, reports, timelines
from tests.sight import contrast, nearest

MOST = 300_000
BLOCKS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE)
CLASSES = {
    "blocks of a timeline": [LOOKS[kind].fill for kind in BLOCKS],
    "marks of a timeline": [LOOKS[kind].fill for kind in (Kind.EVICT, Kind.LOAD, Kind.STEP)],
    "bytes per rank": [fill for _, fill in picture.BARS],
    "bytes over a step": list(cost_pictures.COLOURS.values()),
    "stages of the tree": list(picture.STAGES),
    "equal and different": ["#0072b2", "#d55e00"],
    "equal and different, dark": ["#56b4e9", "#ff9d5c"],
}
STEPS = {"in the light": list(cost_pictures.LIGHT), "in the dark": list(cost_pictures.DARK)}


def alone(text: str) -> None:
    """Whether a picture is small, and asks for nothing and runs nothing from elsewhere."""
    assert len(text.encode()) < MOST
    assert "prefers-color-scheme:dark" in text
    bare = text.replace("http://www.w3.org/2000/svg", "")
    found = re.findall(r"https?:|\bsrc=|\bhref=|url\((?!#)|@import|import\(|fetch\(|XMLHttp", bare)
    assert not found, found


def test_pictures_are_small_and_alone() -> None:
    """Every picture of timelines and of reports: below 300 kB, no address, light and dark."""
    drawn = [*timelines(), *reports()]
    for _, text in drawn:
        alone(text)
    assert {name.rpartition(".")[2] for name, _ in drawn} == {"svg", "html"}


@pytest.mark.parametrize("what", CLASSES)
def test_classes_are_told_apart(what: str) -> None:
    """Colours that mean different things differ for those who see no red, green or blue."""
    least, whose = nearest(CLASSES[what])
    assert least > 14, (least, whose)


@pytest.mark.parametrize("ground", STEPS)
def test_shades_are_told_apart(ground: str) -> None:
    """Bytes from rank to rank: each shade is darker, or lighter, than the one before."""
    least, whose = nearest(STEPS[ground])
    assert least > 10, (least, whose)
    away = [contrast(one, STEPS[ground][0]) for one in STEPS[ground]]
    assert away == sorted(away)


def test_a_palette_of_red_and_green_would_fail() -> None:
    """What people without red cannot tell apart is found: the test is one."""
    assert nearest(["#a05000", "#508000"])[0] < 14


def test_colours_are_those_of_the_styles() -> None:
    """The colours that are tested here are those that the report's style says."""
    for colour in (*CLASSES["equal and different"], *CLASSES["equal and different, dark"]):
        assert colour in report_page.STYLE


def test_words_on_colours_can_be_read() -> None:
    """What is written on blocks, stages and cells has a contrast of 4.5 or more."""
    for kind in BLOCKS:
        assert all(contrast(shade_of(kind, level, 3), "#111111") >= 4.5 for level in range(4))
    assert all(contrast(fill, "#111111") >= 4.5 for fill in picture.STAGES)
    assert all(contrast(fill, "#111111") >= 4.5 for fill in cost_pictures.LIGHT)
    for fill, words in zip(cost_pictures.DARK, cost_pictures.WORDS, strict=True):
        assert contrast(fill, words) >= 4.5


def test_a_report_says_what_its_text_says() -> None:
    """Page and terminal have the same kinds, verdicts, gaps, bounds and rows to blame."""
    for report in (equal(), different()):
        page, text = report_page.html_page(report), str(report)
        for one in report.summary:
            assert one.kind in page and one.kind in text
        words = [gap.condition for gap in report.gaps]
        words += [*report.unchecked, *report.blamed, report.diagnosis, report.command]
        assert all(word in page and word in text for word in words)
        verdict = "PASS" if report.ok else "FAIL"
        assert verdict in page and verdict in text
        assert page.count("DIFFERENT") == sum(not one.ok for one in report.summary)
    assert page.count('class="cross"') == 2 and page.count('class="dot"') == 2


def test_an_error_stands_where_its_gate_says() -> None:
    """Left of the gate what is equal, right of it what is not; nothing is off the scale."""
    for error in (0.0, 1e-30, 1e-16, 1e-3, 1e9, float("inf"), float("nan")):
        assert 0.0 <= report_page._scale_x(error) <= report_page.WIDE
    assert report_page._scale_x(1e-12) < report_page._scale_x(1e-9) < report_page._scale_x(1e-6)
    assert report_page._scale_x(float("nan")) == report_page.WIDE
