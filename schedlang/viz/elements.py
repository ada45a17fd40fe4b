"""Elements of pictures and pages: boxes, words and legends as SVG, and the frames of both."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

Length = int | float | str  # points; a float has one digit, text stays as it is


def svg_document(
    kind: str,
    width: int,
    height: int,
    label: str,
    style: str,
    parts: Iterable[str],
    *,
    corner: int = 0,
    at: tuple[int, int] | None = None,
) -> str:
    """Return a picture as SVG text of `width` x `height` points, with its own ground and style.

    `kind` is the class in the rules of `style`, `label` the picture's description, `corner` the
    radius of its corners. `at`: its position inside of another picture.
    """
    position = f' x="{at[0]}" y="{at[1]}"' if at is not None else ""
    size = f'width="{width}" height="{height}"'
    rounded = f' rx="{corner}"' if corner else ""
    head = (
        f'<svg{position} xmlns="http://www.w3.org/2000/svg" class="{kind}" '
        f'viewBox="0 0 {width} {height}" {size} role="img" aria-label="{escape(label)}">'
    )
    ground = f'<rect class="bg" {size}{rounded}/>'
    return "\n".join([head, f"<style>{style}</style>", ground, *parts, "</svg>\n"])


def draw_box(
    x: Length,
    y: Length,
    width: Length,
    height: Length,
    kind: str = "",
    look: str = "",
    title: str = "",
) -> str:
    """Return a rectangle as SVG: its class, more attributes (`fill="#..."`), and its tooltip."""
    class_attr = f' class="{kind}"' if kind else ""
    names = zip(("x", "y", "width", "height"), (x, y, width, height))
    geometry = "".join(f' {name}="{_points(value)}"' for name, value in names)
    end = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return f"<rect{class_attr}{geometry}{' ' if look else ''}{look}{end}"


def _points(value: Length) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def draw_text(x: float, y: float, text: str, kind: str = "") -> str:
    """Return words as SVG, beginning at a point; `kind` is their class in the picture's style."""
    class_attr = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{class_attr}>{escape(text)}</text>'


def draw_legend_entry(x: float, y: float, look: str, text: str) -> str:
    """Return one entry of a legend: a square with a look (`fill="#..."` or a class), and its
    words."""
    return f"{draw_box(f'{x:.0f}', y - 10, 12, 12, look=look)}\n{draw_text(x + 17, y, text)}"


LIGHT = (
    "body{{margin:2em auto;max-width:{widest}px;padding:0 1em;font:14px system-ui,sans-serif;"
    "background:#fff;color:#1f2328}}"
)
DARK = "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}"


def html_page(title: str, style: str, body: str, widest: int) -> str:
    """Return a self-contained HTML page, light or dark as the reader prefers; `body` is HTML.

    `style` is the page's own style; `widest` the page's width in points.
    """
    sheet = LIGHT.format(widest=widest) + DARK + style
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        f'content="light dark"><style>{sheet}</style>\n{body}'
    )
