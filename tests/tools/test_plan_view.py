"""The view of a plan: text, folded modules, JSON, picture and trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

from schedlang.diagnostics.tables import format_bytes, format_count
from schedlang.passes.elaborate.rows import describe_group
from schedlang.passes.simulate.account import account, compare_accounts
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.viz.picture import draw_plan, plan_page
from schedlang.viz.show import View, format_view, make_view
from schedlang.viz.timeline_page import format_trace
from tests.models import tokens
from tests.verifying.test_account import CHECKPOINT, MESH, PIPE, TENSOR, make_plan

ROWS = TENSOR + "  transformer.h[:2]  checkpoint()\n" + PIPE.format("zero(stage=1, over=dp)")


def build_view(rows: str = ROWS, mesh: str = "dp=2, pp=2, tp=2", **options: bool) -> View:
    """The view of a plan of the small GPT-2."""
    plan = make_plan(MESH.format(mesh, rows))
    return make_view(plan, account(plan, tokens(rows=16)), "x.sched", **options)


def test_text_is_golden() -> None:
    """The text of a small plan equals the reviewed one in tests/data/plan.txt."""
    assert (
        format_view(build_view()) + "\n"
        == (Path(__file__).parents[1] / "data").joinpath("plan.txt").read_text()
    )


def test_each_names_every_module() -> None:
    """Unfolded, every module has its own line, with the same total of collectives."""
    folded, unfolded = build_view(), build_view(each=True)
    lines = [line for step in unfolded.steps for line in step.lines]
    assert all(len(line.sites) == 1 for line in lines)
    assert unfolded.changes == folded.changes == len(lines)
    sums = [
        sum(e.bytes for step in view.steps for line in step.lines for e in line.effects)
        for view in (folded, unfolded)
    ]
    assert sums[0] == sums[1] > 0


def test_lines_hold_all_collectives() -> None:
    """Every collective of a row is on one of its lines."""
    view = build_view()
    lines = sum(e.bytes for step in view.steps for line in step.lines for e in line.effects)
    assert lines == sum(c.total for c in view.account.collectives or () if c.row is not None)


def test_json_is_plain() -> None:
    """The view survives JSON unchanged."""
    value = build_view().to_json()
    assert json.loads(json.dumps(value)) == value


def test_picture_is_whole_and_alone() -> None:
    """The picture is well-formed, small and self-contained, light and dark."""
    view = build_view()
    for picture in (draw_plan(view), plan_page(view)):
        assert len(picture.encode()) < 300_000
        assert "prefers-color-scheme:dark" in picture
        assert not re.search(r"(src|href)=|url\(|@import|<script", picture)
    root = ElementTree.fromstring(draw_plan(view))
    labels = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for label in ("f64[64@tp, 16]", "checkpoint", "pipeline_split over=pp", "0..1", "as above"):
        assert label in labels, label
    assert any("= transformer.wte" in label for label in labels)


def test_picture_names_ranks_and_shards_alike() -> None:
    """Timeline lanes are named as in the tables; sharded modules have framed rows and marked
    axes."""
    view = build_view()
    picture = draw_plan(view)
    labels = re.findall(r"<text[^>]*>(.*?)</text>", picture)
    assert {"pp=0", "pp=1"} <= set(labels) and not any(w.startswith("rank ") for w in labels)
    assert labels.count("pp=0") == 2, "bytes per rank, timeline"
    frames = len(re.findall(r'<rect class="f"', picture))
    acting = [w for w in labels if w.partition(" ")[0] in ("shard", "checkpoint", "zero", "pad")]
    assert len(acting) <= frames and sum(w.startswith("shard") for w in acting) >= 5
    assert picture.count('<tspan class="a">@tp</tspan>') >= 5


def test_large_pictures_stay_small() -> None:
    """A long pipeline shows its first ranks, and says so."""
    from dataclasses import replace

    from schedlang.pipeline.schedules import make_order

    view = build_view()
    account_of_many = replace(view.account, timeline=make_order("1F1B", 32, 64))
    picture = draw_plan(replace(view, account=account_of_many))
    assert len(picture.encode()) < 300_000 and "of 32 ranks" in picture


def test_trace_has_every_operation() -> None:
    """The trace has each operation once, on its rank, at its time."""
    timeline = build_view().account.timeline
    assert timeline is not None
    times = simulate_timeline(timeline)
    events = [e for e in json.loads(format_trace(times))["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(timeline)
    assert max(e["ts"] + e["dur"] for e in events) == times.makespan * 1000


def test_patterns() -> None:
    """Module groups print as a glob, a slice or a list."""
    all_names = [f"h.{k}.mlp" for k in range(8)]
    assert describe_group(all_names, all_names) == "h.*.mlp"
    assert describe_group(all_names[2:5], all_names) == "h[2:5].mlp"
    assert describe_group(all_names[::2], all_names) == "h[0:7:2].mlp"
    assert describe_group([all_names[1], all_names[5], all_names[6]], all_names) == "h[1, 5, 6].mlp"
    assert describe_group(all_names[:1], all_names) == "h.0.mlp"
    grid = [f"a.{i}.b.{k}" for i in range(2) for k in range(2)]
    assert describe_group(grid[:3], grid) == "a.0.b.0 and 2 more"


def test_sizes() -> None:
    """Bytes and counts are rounded for people."""
    assert [format_bytes(n) for n in (0, 999, 1024, 65_011_712)] == [
        "0 B",
        "999 B",
        "1 KiB",
        "62 MiB",
    ]
    assert [format_count(n) for n in (12, 124_439_808)] == ["12", "124.4 M"]


def test_delta() -> None:
    """Recomputation sends more and holds as many parameters."""
    original, recomputing = (build_view(TENSOR + rows, "tp=2").account for rows in ("", CHECKPOINT))
    changed = {cost.name: cost for cost in compare_accounts(original, recomputing)}
    assert (
        changed["parameters per rank, at most"].old == changed["parameters per rank, at most"].new
    )
    sent = changed["their bytes, at most"]
    assert sent.old is not None and sent.new is not None and sent.new > sent.old
    assert "->" in str(sent) and "unchanged" in str(changed["bubble"])
