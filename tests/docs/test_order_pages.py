"""The pages about orders say what the registry says today."""

from __future__ import annotations

from schedlang.pipeline.schedules import ORDERS
from tests.order_pages import BEGIN, END, PAGE, rewritten, said


def test_every_order_is_on_the_page() -> None:
    """The page is what the registry says; each order has its source and its rule."""
    page = PAGE.read_text()
    assert page == rewritten(page), "`python -m tests.order_pages` writes it again"
    text = page.split(BEGIN)[1].split(END)[0]
    for known in ORDERS:
        assert f"\n### {known.name}\n" in text and known.source in text
        assert said(known.make), f"the generator of {known.name} does not say what it does"
