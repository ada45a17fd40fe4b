"""Every kind of picture that the program draws, as files: `python -m tests.pictures FOLDER`.

Tests measure them, and open them in a browser; people look at them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import make_order

if TYPE_CHECKING:
    from schedlang.report import Report
    from schedlang.viz.show import View

Drawn = Iterator[tuple[str, str]]  # file name, text
BLAMED = "3d.sched:14   attn.c_attn  shard(col, blocks=3, over=tp)"
ORDERS = (("1F1B", 4, 8, 1), ("ZB-V", 4, 8, 2), ("Chimera", 4, 8, 1), ("BPipe", 8, 8, 1))


def every() -> Drawn:
    """All of them; a few seconds, most of it for the plan of a small model."""
    yield from timelines()
    yield from reports()
    yield from plans()


def timelines() -> Drawn:
    """`simulate --svg` and `--html`, `run --timeline`."""
    from schedlang.viz.timeline_page import (
        InitialTimeline,
        measured_page,
        measured_svg,
        timeline_page,
    )
    from schedlang.viz.timeline_pictures import draw_timeline
    from tests.pipelines.test_measured import example

    for name, ranks, micro, chunks in ORDERS:
        made = make_order(name, ranks, micro, chunks)
        yield f"timeline_{name}.svg", draw_timeline(made, transfers=name == "1F1B")
    first = InitialTimeline("1F1B", make_order("1F1B", 4, 8))
    yield "timelines.html", timeline_page(first)
    tiny = Cost(0.00014, 0.00014, 0.00028, 0.0006)  # of a small model, as `simulate` estimates them
    yield (
        "estimated.html",
        timeline_page(InitialTimeline("1F1B", make_order("1F1B", 4, 8), "pp", "ms"), tiny),
    )
    found = example()
    yield "measured.svg", measured_svg(found, "net.sched")
    yield "measured.html", measured_page(found, "net.sched")


def reports() -> Drawn:
    """`verify --html`, of what is equal and of what is not; the fragment that notebooks show."""
    from schedlang.report import html_page

    good, bad = equal(), different()
    yield "report_equal.html", html_page(good)
    yield "report_different.html", html_page(bad)
    yield "report_notebook.html", f"<!doctype html><title>a</title>{bad._repr_html_()}"


def equal() -> Report:
    """A report on which all holds, with what it did not exercise."""
    from schedlang.report import CostExpectation, Gap, Report, Row

    word = "parameters in working dtype"
    rows = (
        Row("", "trainable set", "52 = 52", 0.0, 0.0, ok=True),
        Row("", "outputs", "logits", 7.3e-16, 1e-9, ok=True, shape=(2, 8, 257)),
        *(
            Row("", "gradients", f"h.{k}.attn.c_attn.weight", 1e-16 * k, 1e-9, ok=True)
            for k in range(12)
        ),
        Row("SGD", "parameters", "h.0.attn.c_attn.bias", 2.5e-13, 1e-9, ok=True, step=2),
        Row("SGD", word, "h.0.attn.c_attn.bias", 6.5e-2, 1.0, ok=True, step=2),
    )
    facts = (("mesh", "dp=2, pp=2, tp=2 (8 ranks)"), ("seed", "0"), ("torch", "2.13.0+cpu"))
    return Report(
        rows,
        "3d.sched",
        facts,
        seconds=28.4,
        bounds=(CostExpectation("memory(rank) <= 2MiB", holds=True),),
        gaps=(Gap("no float inputs", "wrong gradients of inputs"),),
    )


def different() -> Report:
    """A report of a mistake, with blame, and of what was not checked."""
    from schedlang.report import CostExpectation, Row

    one = equal()
    wrong = Row("SGD", "gradients", "h.3.attn.c_attn.weight", 0.5, 1e-9, ok=False, step=0)
    nothing = Row("", "loss", "loss", float("nan"), 1e-9, ok=False, note="it is not finite")
    return replace(
        one,
        rows=(*one.rows[:-2], nothing, wrong),
        unchecked=("kernel rms_norm was not run",),
        bounds=(
            CostExpectation(
                "bubble <= 20%", holds=False, found="33.3%", why=("pipeline: 2 stages",)
            ),
            CostExpectation("time(step) < 1s", holds=None),
        ),
        command="schedlang verify 3d.sched --seed 0 --mesh tp=2",
    ).blame(BLAMED, diagnosis="tp = 2 times what is right")


def plans() -> Drawn:
    """`plan --svg` and `--html`, `diff --html`; also of a mesh too large for a row a rank."""
    from schedlang.passes.simulate.account import compare_accounts
    from schedlang.viz import diff
    from schedlang.viz.diff import compare
    from schedlang.viz.picture import draw_plan, plan_page

    one, other = plan("dp=2, pp=2, tp=2"), plan("pp=2, tp=2", zero=False)
    yield "plan.svg", draw_plan(one)
    yield "plan.html", plan_page(one)
    yield "plan_many.svg", draw_plan(many(one))
    found = compare(one.plan, other.plan)
    costs = compare_accounts(one.account, other.account)
    yield "diff.html", diff.diff_page(("3d.sched", "2d.sched"), found, costs)


def plan(mesh: str, *, zero: bool = True) -> View:
    """A small GPT-2 on a mesh, with memory and collectives."""
    from schedlang.passes.simulate.account import account
    from schedlang.viz.show import make_view
    from tests.models import gpt2, tokens
    from tests.proofs import planned
    from tests.verifying.test_account import CHECKPOINT, PIPE, TENSOR

    rows = TENSOR + CHECKPOINT + PIPE.format("zero(stage=1, over=dp)" if zero else "")
    made = planned(gpt2(), rows, mesh)
    return make_view(made, account(made, tokens(rows=16), memory=True), "3d.sched")


def many(one: View) -> View:
    """The same on 16,384 ranks: what each sends stays as it was counted for few."""
    mesh = replace(one.plan.mesh, axes=(("dp", 512), ("pp", 4), ("tp", 8)))
    return replace(one, plan=replace(one.plan, mesh=mesh), title="16384 ranks")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in every():
        (folder / name).write_text(text)
        print(f"{name:28} {len(text.encode()):8} bytes")
