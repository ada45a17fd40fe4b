"""A line of words in a picture."""

from __future__ import annotations

import html


def say(x: float, y: float, words: str, kind: str = "") -> str:
    """Words as SVG, beginning at a point; `kind` is their class in the picture's style."""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{named}>{html.escape(words)}</text>'
