"""A measured step beside its simulated one, as a picture, as a page and as a trace."""

from __future__ import annotations

import json
from html import escape

from schedlang.passes.running.measured import Measured
from schedlang.passes.showing.trace import trace
from schedlang.timeline.svg import drawn

MICROSECONDS = 1e6  # of a second
WIDEST = 1100.0
SHEET = (
    "body{margin:2em auto;max-width:1340px;padding:0 1em;font:14px system-ui,sans-serif;"
    "background:#fff;color:#1f2328}#frame{overflow:auto}"
    "#frame svg{width:100%;min-width:640px;height:auto}td,th{padding:1px 14px 1px 0;"
    "text-align:left;font-variant-numeric:tabular-nums}"
    "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}"
)


def measured_svg(found: Measured, title: str, who: str = "rank ") -> str:
    """Each rank's planned bars, and the measured ones under them; `who` names a lane, as `pp=`."""
    layers = {"planned": found.planned, "measured": found.times}
    words = " · ".join((title, *found.text().split("   ")))
    return drawn(layers, title=words, widest=WIDEST, unit=float("inf"), who=who)


def measured_page(found: Measured, title: str, who: str = "rank ") -> str:
    """The picture as a self-contained page, with the figures and the means below it."""
    value = found.to_json()
    names = ("makespan", "makespan_bubble", "rank_span", "bubble")
    words = ("step of the pipeline", "its bubble", "longest rank", "its bubble")
    rows = "".join(
        f"<tr><td>{word}</td><td>{_said(name, value['measured'][name])}</td>"
        f"<td>{_said(name, value['simulated'][name])}</td></tr>"
        for name, word in zip(names, words)
    )
    means = "".join(
        f"<tr><td>{one['kind']}</td><td>{one['stage']}</td>"
        f"<td>{one['seconds'] * 1e3:.3f} ms</td></tr>"
        for one in value["means"]
    )
    said = escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{said}</title>\n'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        f'content="light dark"><style>{SHEET}</style>\n<h1>{said}</h1>\n'
        f'<div id="frame">{measured_svg(found, title, who)}</div>\n'
        "<p>Planned: the same timeline, simulated with the mean time of each kind of operation at "
        f"each stage and {value['transfer'] * 1e3:.3f} ms for a transfer, all as measured.</p>\n"
        f"<table><tr><th></th><th>measured</th><th>simulated</th></tr>{rows}</table>\n"
        f"<table><tr><th>kind</th><th>stage</th><th>mean</th></tr>{means}</table>\n</html>\n"
    )


def measured_trace(found: Measured) -> str:
    """Both as processes of one trace for Perfetto; `pipeline` holds the figures."""
    text = trace({"planned": found.planned, "measured": found.times}, MICROSECONDS)
    return text.rstrip()[:-1] + f', "pipeline": {json.dumps(found.to_json())}}}\n'


def _said(name: str, value: float) -> str:
    return f"{value:.2%}" if "bubble" in name else f"{value * 1e3:.2f} ms"
