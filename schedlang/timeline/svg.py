"""A picture of a timeline: one self-contained SVG, light and dark, safe for colour blindness."""

from __future__ import annotations

from schedlang.timeline.durations import Costs
from schedlang.timeline.table import UNIT, Kind, Timeline
from schedlang.timeline.timing import Timing, timing

# Okabe and Ito's palette, apart in lightness too; text colour that reads on each
FILL = {Kind.F: "#56b4e9", Kind.B: "#e69f00", Kind.I: "#f0c75e", Kind.W: "#009e73"}
WORD = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
ROW, UNIT_WIDTH, LEFT, TOP = 26, 24.0, 58, 30
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#1f2328}.op{fill:#111;text-anchor:middle}"
    ".lane{fill:#eef1f4}rect.b{stroke:#fff;stroke-width:.7}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.op{fill:#111}"
    ".lane{fill:#22272e}rect.b{stroke:#0d1117}}"
)


def svg(
    timeline: Timeline,
    cost: Costs = UNIT,
    transfer: float = 0.0,
    title: str = "",
    widest: float = 4000.0,
    ranks: int | None = None,
    unit: float = UNIT_WIDTH,
) -> str:
    """The operations of every rank over time, as SVG text.

    A block is named by its microbatch; on a rank with several stages later stages are darker.
    A unit of cost is `unit` points wide, or less where all would be more than `widest`.  `ranks`:
    only the first so many are drawn, at their times among all.
    """
    times = timing(timeline, cost, transfer)
    t = times.timeline
    lanes = t.ranks if ranks is None else min(ranks, t.ranks)
    end = max(float(times.makespan), 1e-9)
    scale = min(unit, widest / end)
    width, height = LEFT + end * scale + 10, TOP + lanes * ROW + 26
    kinds = [kind for kind in FILL if (t.kind == kind).any()]
    text = title or f"bubble {float(times.bubble):.1%}, {end:g} units"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img" aria-label="{_escape(text)}">',
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="18">{_escape(text)}</text>',
    ]
    for rank in range(lanes):
        y = TOP + rank * ROW
        parts.append(f'<text x="4" y="{y + 16}">rank {rank}</text>')
        parts.append(
            f'<rect class="lane" x="{LEFT}" y="{y}" width="{end * scale:.1f}" height="{ROW - 4}"/>'
        )
    parts += _blocks(times, scale, lanes)
    x, y = float(LEFT), TOP + lanes * ROW + 6
    for kind in kinds:
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{FILL[kind]}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{y + 10}">{WORD[kind]}</text>')
        x += 32 + 6.5 * len(WORD[kind])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _blocks(times: Timing, scale: float, lanes: int) -> list[str]:
    t = times.timeline
    chunk = t.stage // max(1, t.ranks)
    most = max(1, int(chunk.max(initial=0)))
    columns = (t.rank, t.kind, t.stage, t.microbatch, chunk, times.start, times.end)
    found = []
    for rank, kind, stage, microbatch, level, start, end in zip(*(c.tolist() for c in columns)):
        x, y, wide = LEFT + start * scale, TOP + rank * ROW, (end - start) * scale
        if wide <= 0 or rank >= lanes:
            continue
        name = f"{Kind(kind).name} stage {stage} microbatch {microbatch}"
        opacity = 1.0 - 0.45 * (most - level) / most if int(chunk.max(initial=0)) else 1.0
        found.append(
            f'<rect class="b" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 4}" '
            f'fill="{FILL[Kind(kind)]}" fill-opacity="{opacity:.2f}"><title>{name}</title></rect>'
        )
        if wide >= 7 * len(str(microbatch)) + 4:
            found.append(
                f'<text class="op" x="{x + wide / 2:.1f}" y="{y + 15}">{microbatch}</text>'
            )
    return found


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
