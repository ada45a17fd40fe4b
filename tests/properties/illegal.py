"""Illegal rows for drawn schedules, one for each kind of mistake."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.properties.schedules import Drawn, legal, step


def mistake_rows(drawn: Drawn) -> dict[str, str]:
    """Return the illegal row for each mistake that is possible in the drawn schedule."""
    sizes, last = dict(drawn.axes), len(drawn.config.blocks)
    rows = {
        "no such module": f"blocks.{last}  checkpoint()",
        "no such argument": "blocks.0  checkpoint(speed=3)",
        "no such verb": "blocks.0  accelerate()",
        "no such axis": "zero(stage=0, over=nowhere)",
        "no such stage": f"zero(stage=7, over={drawn.axes[0][0]})",
        "twice": "blocks.0  checkpoint()\n  blocks.0  checkpoint()",
        "nested": "blocks.*  checkpoint()\n  blocks.0.*  checkpoint()",
        "too many parts": 'pipeline(order="GPipe", micro=500)',
        "no such order": 'pipeline(order="backwards", micro=1)',
        "not a linear layer": "blocks.0  shard(col, over=tp)" if "tp" in sizes else "",
        "the whole model": "`blocks`  replace_kernel(rms_norm)",
    }
    n = next((size for axis, size in drawn.axes if size > 1), 1)
    axis = next((axis for axis, size in drawn.axes if size > 1), "")
    if drawn.config.width % n:
        rows["does not divide"] = f"norm  shard(weight=S(0), over={axis})"
    for s in drawn.steps:
        if s.verb == "zero":
            rows["an axis twice"] = s.rows[0]
        if s.verb == "pipeline":
            rows["an order twice"] = s.rows[0]
        if s.verb == "checkpoint":
            rows["a checkpoint twice"] = s.rows[0]
        if s.verb in ("checkpoint", "offload") and s.rows[0].startswith("blocks"):
            rows["too late"] = f"{s.rows[0].split()[0]}  fuse()"
    return {name: row for name, row in rows.items() if row}


@st.composite
def illegal(draw: st.DrawFn) -> Drawn:
    """Draw a legal schedule with one illegal row, which may only show when the batch is split."""
    drawn = draw(legal())
    mistakes = mistake_rows(drawn)
    row = mistakes[draw(st.sampled_from(sorted(mistakes)))]
    if "micro=500" in row:  # seen when the batch is split
        pipeline_step = step("pipeline", [row], ["order"])
        other_steps = tuple(s for s in drawn.steps if s.verb != "pipeline")
        return replace(drawn, steps=(*other_steps, pipeline_step), spare=drawn.spare - 490)
    return replace(drawn, illegal=row)
