"""The page about pipeline orders is up to date with the registry."""

from __future__ import annotations

from schedlang.pipeline.schedules import ORDERS
from tests.order_pages import BEGIN, END, PAGE, doc_text, rewrite_page


def test_every_order_is_on_the_page() -> None:
    """The page equals the generated one; each order has its source and its rule."""
    page = PAGE.read_text()
    assert page == rewrite_page(page), "`python -m tests.order_pages` writes it again"
    text = page.split(BEGIN)[1].split(END)[0]
    for order in ORDERS:
        assert f"\n### {order.name}\n" in text and order.source in text
        assert doc_text(order.make), f"the generator of {order.name} does not say what it does"
