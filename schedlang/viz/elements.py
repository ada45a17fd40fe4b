"""Elements of pictures and pages: words and legends as SVG, and the frame of a page."""

from __future__ import annotations

from html import escape


def say(x: float, y: float, words: str, kind: str = "") -> str:
    """Words as SVG, beginning at a point; `kind` is their class in the picture's style."""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{named}>{escape(words)}</text>'


def key(x: float, y: float, look: str, words: str) -> str:
    """One entry of a legend: a square with a look (`fill="#..."` or a class), and its words."""
    square = f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" {look}/>'
    return f"{square}\n{say(x + 17, y, words)}"


LIGHT = (
    "body{{margin:2em auto;max-width:{widest}px;padding:0 1em;font:14px system-ui,sans-serif;"
    "background:#fff;color:#1f2328}}"
)
DARK = "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}"


def framed(title: str, style: str, body: str, widest: int) -> str:
    """A self-contained HTML page, light or dark as its reader has it; `body` is HTML.

    `style` is that of the page beside its ground, words and margins; `widest` in points.
    """
    sheet = LIGHT.format(widest=widest) + DARK + style
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        f'content="light dark"><style>{sheet}</style>\n{body}'
    )
