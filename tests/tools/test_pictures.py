"""Pictures: small, self-contained, light and dark, and legible with colour blindness."""

from __future__ import annotations

import re

import pytest

from schedlang import report as report_page
from schedlang.viz import cost_pictures, picture
from schedlang.viz.timeline_pictures import LOOKS, Kind, shade_of
from tests.colour_vision import contrast, nearest_pair
from tests.pictures import different_report, equal_report, report_pictures, timeline_pictures

BYTE_LIMIT = 300_000
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


def check_self_contained(text: str) -> None:
    """Check that a picture is small and loads nothing from elsewhere."""
    assert len(text.encode()) < BYTE_LIMIT
    assert "prefers-color-scheme:dark" in text
    content = text.replace("http://www.w3.org/2000/svg", "")
    requests = re.findall(
        r"https?:|\bsrc=|\bhref=|url\((?!#)|@import|import\(|fetch\(|XMLHttp", content
    )
    assert not requests, requests


def test_pictures_are_small_and_alone() -> None:
    """Every picture of timelines and reports is below 300 kB, without addresses, light and dark."""
    pictures = [*timeline_pictures(), *report_pictures()]
    for _, text in pictures:
        check_self_contained(text)
    assert {name.rpartition(".")[2] for name, _ in pictures} == {"svg", "html"}


@pytest.mark.parametrize("what", CLASSES)
def test_classes_are_told_apart(what: str) -> None:
    """Colours with different meanings differ under each kind of colour blindness."""
    distance, pair = nearest_pair(CLASSES[what])
    assert distance > 14, (distance, pair)


@pytest.mark.parametrize("ground", STEPS)
def test_shades_are_told_apart(ground: str) -> None:
    """Each shade of the traffic matrix is darker, or lighter, than the one before."""
    distance, pair = nearest_pair(STEPS[ground])
    assert distance > 10, (distance, pair)
    contrasts = [contrast(shade, STEPS[ground][0]) for shade in STEPS[ground]]
    assert contrasts == sorted(contrasts)


def test_a_palette_of_red_and_green_would_fail() -> None:
    """A red-green palette is rejected, so the check is real."""
    assert nearest_pair(["#a05000", "#508000"])[0] < 14


def test_colours_are_those_of_the_styles() -> None:
    """The tested colours are those of the report's style."""
    for colour in (*CLASSES["equal and different"], *CLASSES["equal and different, dark"]):
        assert colour in report_page.STYLE


def test_words_on_colours_can_be_read() -> None:
    """Text on blocks, stages and cells has a contrast of at least 4.5."""
    for kind in BLOCKS:
        assert all(contrast(shade_of(kind, level, 3), "#111111") >= 4.5 for level in range(4))
    assert all(contrast(fill, "#111111") >= 4.5 for fill in picture.STAGES)
    assert all(contrast(fill, "#111111") >= 4.5 for fill in cost_pictures.LIGHT)
    for fill, text_colour in zip(cost_pictures.DARK, cost_pictures.WORDS, strict=True):
        assert contrast(fill, text_colour) >= 4.5


def test_a_report_says_what_its_text_says() -> None:
    """The report's page has the same kinds, verdicts, gaps, bounds and rows to blame as its
    text."""
    for report in (equal_report(), different_report()):
        page, text = report_page.html_page(report), str(report)
        for part in report.summary:
            assert part.kind in page and part.kind in text
        fragments = [gap.condition for gap in report.gaps]
        fragments += [*report.unchecked, *report.blamed, report.diagnosis, report.command]
        assert all(fragment in page and fragment in text for fragment in fragments)
        verdict = "PASS" if report.ok else "FAIL"
        assert verdict in page and verdict in text
        assert page.count("DIFFERENT") == sum(not part.ok for part in report.summary)
    assert page.count('class="cross"') == 2 and page.count('class="dot"') == 2


def test_an_error_stands_where_its_gate_says() -> None:
    """Errors below the bound are left of it, others right; all are on the scale."""
    for error in (0.0, 1e-30, 1e-16, 1e-3, 1e9, float("inf"), float("nan")):
        assert 0.0 <= report_page._scale_x(error) <= report_page.WIDE
    assert report_page._scale_x(1e-12) < report_page._scale_x(1e-9) < report_page._scale_x(1e-6)
    assert report_page._scale_x(float("nan")) == report_page.WIDE
