"""Write one file for each kind of picture that schedlang draws: `python -m tests.pictures FOLDER`.

Tests measure them and open them in a browser.
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


def all_pictures() -> Drawn:
    """Yield all pictures; takes a few seconds, most of them for the plan of a small model."""
    yield from timeline_pictures()
    yield from report_pictures()
    yield from plan_pictures()


def timeline_pictures() -> Drawn:
    """`simulate --svg` and `--html`, `run --timeline`."""
    from schedlang.viz.timeline_page import (
        InitialTimeline,
        measured_page,
        measured_svg,
        timeline_page,
    )
    from schedlang.viz.timeline_pictures import draw_timeline
    from tests.pipelines.test_measured import example_step

    for name, ranks, micro, chunks in ORDERS:
        timeline = make_order(name, ranks, micro, chunks)
        yield f"timeline_{name}.svg", draw_timeline(timeline, transfers=name == "1F1B")
    initial = InitialTimeline("1F1B", make_order("1F1B", 4, 8))
    yield "timelines.html", timeline_page(initial)
    tiny = Cost(0.00014, 0.00014, 0.00028, 0.0006)  # of a small model, as `simulate` estimates them
    yield (
        "estimated.html",
        timeline_page(InitialTimeline("1F1B", make_order("1F1B", 4, 8), "pp", "ms"), tiny),
    )
    measured = example_step()
    yield "measured.svg", measured_svg(measured, "net.sched")
    yield "measured.html", measured_page(measured, "net.sched")


def report_pictures() -> Drawn:
    """`verify --html` of equal and of different programs; the fragment for notebooks."""
    from schedlang.report import html_page

    equal_case, different_case = equal_report(), different_report()
    yield "report_equal.html", html_page(equal_case)
    yield "report_different.html", html_page(different_case)
    yield "report_notebook.html", f"<!doctype html><title>a</title>{different_case._repr_html_()}"


def equal_report() -> Report:
    """A report in which all rows hold, with one gap."""
    from schedlang.report import CostExpectation, Gap, Report, Row

    kind = "parameters in working dtype"
    rows = (
        Row("", "trainable set", "52 = 52", 0.0, 0.0, ok=True),
        Row("", "outputs", "logits", 7.3e-16, 1e-9, ok=True, shape=(2, 8, 257)),
        *(
            Row("", "gradients", f"h.{k}.attn.c_attn.weight", 1e-16 * k, 1e-9, ok=True)
            for k in range(12)
        ),
        Row("SGD", "parameters", "h.0.attn.c_attn.bias", 2.5e-13, 1e-9, ok=True, step=2),
        Row("SGD", kind, "h.0.attn.c_attn.bias", 6.5e-2, 1.0, ok=True, step=2),
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


def different_report() -> Report:
    """A report of a mistake, with the blamed row and an unchecked kernel."""
    from schedlang.report import CostExpectation, Row

    report = equal_report()
    wrong_row = Row("SGD", "gradients", "h.3.attn.c_attn.weight", 0.5, 1e-9, ok=False, step=0)
    nothing = Row("", "loss", "loss", float("nan"), 1e-9, ok=False, note="it is not finite")
    return replace(
        report,
        rows=(*report.rows[:-2], nothing, wrong_row),
        unchecked=("kernel rms_norm was not run",),
        bounds=(
            CostExpectation(
                "bubble <= 20%", holds=False, found="33.3%", why=("pipeline: 2 stages",)
            ),
            CostExpectation("time(step) < 1s", holds=None),
        ),
        command="schedlang verify 3d.sched --seed 0 --mesh tp=2",
    ).blame(BLAMED, diagnosis="tp = 2 times what is right")


def plan_pictures() -> Drawn:
    """`plan --svg` and `--html`, `diff --html`; also with too many ranks for a row each."""
    from schedlang.passes.simulate.account import compare_accounts
    from schedlang.viz import diff
    from schedlang.viz.diff import compare
    from schedlang.viz.picture import draw_plan, plan_page

    full, smaller = plan_view("dp=2, pp=2, tp=2"), plan_view("pp=2, tp=2", zero=False)
    yield "plan.svg", draw_plan(full)
    yield "plan.html", plan_page(full)
    yield "plan_many.svg", draw_plan(many_ranks_view(full))
    changes = compare(full.plan, smaller.plan)
    costs = compare_accounts(full.account, smaller.account)
    yield "diff.html", diff.diff_page(("3d.sched", "2d.sched"), changes, costs)


def plan_view(mesh: str, *, zero: bool = True) -> View:
    """A small GPT-2 on a mesh, with memory and collectives."""
    from schedlang.passes.simulate.account import account
    from schedlang.viz.show import make_view
    from tests.models import gpt2, tokens
    from tests.proofs import make_plan
    from tests.verifying.test_account import CHECKPOINT, PIPE, TENSOR

    rows = TENSOR + CHECKPOINT + PIPE.format("zero(stage=1, over=dp)" if zero else "")
    full_plan = make_plan(gpt2(), rows, mesh)
    return make_view(full_plan, account(full_plan, tokens(rows=16), memory=True), "3d.sched")


def many_ranks_view(view: View) -> View:
    """The same view on 16,384 ranks, with the counts of the small mesh."""
    mesh = replace(view.plan.mesh, axes=(("dp", 512), ("pp", 4), ("tp", 8)))
    return replace(view, plan=replace(view.plan, mesh=mesh), title="16384 ranks")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in all_pictures():
        (folder / name).write_text(text)
        print(f"{name:28} {len(text.encode()):8} bytes")
