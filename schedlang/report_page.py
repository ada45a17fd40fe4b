"""A report of equivalence as a picture: how far each comparison is from its gate, and the verdict.

A fragment for notebooks and a page of its own; both need nothing else, in the light and the dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from schedlang.report_text import verdict

if TYPE_CHECKING:
    from schedlang.report import Bound, Report, Summary

LOW, HIGH, WIDE = -18.0, 1.0, 228.0  # decades that a scale shows, and its points
HOLDS: dict[bool | None, str] = {True: "equal", False: "different", None: "open"}
# Okabe and Ito's blue and vermilion; what fails has another mark, and a word
STYLE = (
    ".eq{font:14px system-ui,sans-serif;color:#1f2328;background:#fff;padding:1px 0}"
    ".eq h1{font-size:20px;font-weight:600;margin:.6em 0 .3em}"
    ".eq p{margin:.3em 0}.eq .s{color:#59636e}.eq .equal{color:#0067a5}"
    ".eq .different{color:#b34700;font-weight:600}.eq .open{color:#7a5a00}"
    ".eq .verdict{font-size:16px;font-weight:600}"
    ".eq .frame{overflow-x:auto}.eq table{border-collapse:collapse;margin:1em 0;color:inherit}"
    ".eq td,.eq th{padding:3px 14px 3px 0;text-align:left;vertical-align:top;background:none;"
    "border:0;border-bottom:1px solid #d1d9e0;font-variant-numeric:tabular-nums}"
    ".eq tr{background:none}.eq .n{text-align:right}.eq code,.eq pre{font:12px ui-monospace,Menlo,"
    "Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;color:inherit;background:none}"
    ".eq svg{display:block}.eq .axis{stroke:#8c959f}.eq .free{fill:#eef1f4}"
    ".eq .gate{stroke:#1f2328;stroke-width:2}.eq .dot{fill:#0072b2}"
    ".eq .cross{stroke:#d55e00;stroke-width:2.5}"
    "@media(prefers-color-scheme:dark){.eq{color:#e6edf3;background:#0d1117}.eq .s{color:#9198a1}"
    ".eq .equal{color:#56b4e9}.eq .different{color:#ff9d5c}.eq .open{color:#f0e442}"
    ".eq td,.eq th{border-color:#3d444d}.eq .free{fill:#22272e}.eq .gate{stroke:#e6edf3}"
    ".eq .dot{fill:#56b4e9}.eq .cross{stroke:#ff9d5c}}"
)


def fragment(report: Report) -> str:
    """The report as HTML inside of another page."""
    parts = [*_head(report), *_table(report), *_failure(report), *_rest(report)]
    return f'<div class="eq"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</div>"


def page(report: Report) -> str:
    """The report as one self-contained page."""
    title = html.escape(report.title or "equivalence")
    style = (
        "body{margin:2em auto;max-width:1100px;padding:0 1em;background:#fff}"
        "@media(prefers-color-scheme:dark){body{background:#0d1117}}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        f'content="light dark"><style>{style}</style>\n{fragment(report)}\n</html>\n'
    )


def _head(report: Report) -> Iterator[str]:
    if report.title:
        yield f"<h1>{html.escape(report.title)}</h1>"
    kind = {0: "equal", 1: "different"}.get(report.exit_code, "open")
    yield f'<p class="verdict {kind}">{html.escape(verdict(report))}</p>'
    said = " · ".join(f"{name} {value}".strip() for name, value in report.facts)
    if said:
        yield f'<p class="s">{html.escape(said)}</p>'


def _table(report: Report) -> Iterator[str]:
    heads = ("", "compared", "worst", "gate", "error and its gate, by decades", "verdict")
    numbers = ("worst", "gate")
    cells = "".join(f"<th{' class=n' * (h in numbers)}>{html.escape(h)}</th>" for h in heads)
    yield f'<div class="frame"><table><tr>{cells}</tr>'
    for one in report.summary:
        kind, word = ("equal", "equal") if one.ok else ("different", "DIFFERENT")
        gate = f"{one.worst.gate:.0e}" if one.worst.gate else "exact"
        yield (
            f"<tr><td>{html.escape(one.kind)}</td><td>{html.escape(one.compared)}</td>"
            f'<td class="n">{one.worst.error:.1e}</td><td class="n">{gate}</td>'
            f'<td>{_scale(one)}</td><td class="{kind}">{word}</td></tr>'
        )
    yield "</table></div>"


def _scale(one: Summary) -> str:
    """Where the error lies: a dot, or a cross beyond the gate; no error is the left end."""
    x, gate = _at(one.worst.error), _at(one.worst.gate)
    said = f"error {one.worst.error:.1e}, gate {one.worst.gate:.0e}"
    mark = f'<circle class="dot" cx="{x:.1f}" cy="8" r="4.5"/>'
    if not one.ok:
        mark = f'<path class="cross" d="M{x - 4:.1f} 4l8 8m0 -8l-8 8"/>'
    return (
        f'<svg width="{WIDE + 12:.0f}" height="16" viewBox="-6 0 {WIDE + 12:.0f} 16" role="img" '
        f'aria-label="{said}"><title>{said}</title>'
        f'<rect class="free" y="5" width="{max(gate, 1.0):.1f}" height="6"/>'
        f'<path class="axis" d="M0 8H{WIDE:.0f}"/><path class="gate" d="M{gate:.1f} 1v14"/>'
        f"{mark}</svg>"
    )


def _at(error: float) -> float:
    """The place of a relative error; what is no number lies at the right end."""
    if not error:
        return 0.0
    decade = math.log10(error) if 0 < error < math.inf else HIGH
    return WIDE * (min(max(decade, LOW), HIGH) - LOW) / (HIGH - LOW)


def _failure(report: Report) -> Iterator[str]:
    rows = "".join(
        f'<tr><td class="different">{html.escape(name)}</td>'
        f"<td><code>{html.escape(text)}</code></td></tr>"
        for name, text in report.account
    )
    if rows:
        yield f"<table>{rows}</table>"


def _rest(report: Report) -> Iterator[str]:
    for bound in report.bounds:
        yield _bound(bound)
    for what in report.unchecked:
        yield f'<p class="open">not checked: {html.escape(what)}</p>'
    for gap in report.gaps:
        words = f"not exercised: {gap.condition} (could hide {gap.hides})"
        yield f'<p class="s">{html.escape(words)}</p>'


def _bound(bound: Bound) -> str:
    why = "".join(f"<br>{html.escape(text)}" for text in bound.why)
    return f'<p class="{HOLDS[bound.holds]}">expected: {html.escape(str(bound))}{why}</p>'
