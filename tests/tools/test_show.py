"""A printed plan: its text, its folding, and the picture."""

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
from tests.verifying.test_account import CHECKPOINT, MESH, PIPE, TENSOR, planned

ROWS = TENSOR + "  transformer.h[:2]  checkpoint()\n" + PIPE.format("zero(stage=1, over=dp)")


def shown(rows: str = ROWS, mesh: str = "dp=2, pp=2, tp=2", **options: bool) -> View:
    plan = planned(MESH.format(mesh, rows))
    return make_view(plan, account(plan, tokens(rows=16)), "x.sched", **options)


def test_text_is_golden() -> None:
    """The whole text of a small plan is as it was read and found right."""
    assert (
        format_view(shown()) + "\n"
        == (Path(__file__).parents[1] / "data").joinpath("plan.txt").read_text()
    )


def test_each_names_every_module() -> None:
    """Unfolded, every module has a line of its own; the collectives are the same in sum."""
    folded, each = shown(), shown(each=True)
    lines = [line for step in each.steps for line in step.lines]
    assert all(len(line.sites) == 1 for line in lines)
    assert each.changes == folded.changes == len(lines)
    sums = [
        sum(e.bytes for step in one.steps for line in step.lines for e in line.effects)
        for one in (folded, each)
    ]
    assert sums[0] == sums[1] > 0


def test_lines_hold_all_collectives() -> None:
    """No collective that a row asks for is lost between the account and the lines."""
    one = shown()
    lines = sum(e.bytes for step in one.steps for line in step.lines for e in line.effects)
    assert lines == sum(c.total for c in one.account.collectives or () if c.row is not None)


def test_json_is_plain() -> None:
    """The value goes through JSON unchanged."""
    value = shown().to_json()
    assert json.loads(json.dumps(value)) == value


def test_picture_is_whole_and_alone() -> None:
    """The picture is well-formed, small, refers to nothing outside, and knows dark and light."""
    one = shown()
    for drawn in (draw_plan(one), plan_page(one)):
        assert len(drawn.encode()) < 300_000
        assert "prefers-color-scheme:dark" in drawn
        assert not re.search(r"(src|href)=|url\(|@import|<script", drawn)
    root = ElementTree.fromstring(draw_plan(one))
    words = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for word in ("f64[64@tp, 16]", "checkpoint", "pipeline_split over=pp", "0..1", "as above"):
        assert word in words, word
    assert any("= transformer.wte" in word for word in words)


def test_picture_names_ranks_and_shards_alike() -> None:
    """Lanes of the timeline are places of the axis as in the tables; each sharded module has its
    row in a frame, and the axis of its shards stands out."""
    one = shown()
    drawn = draw_plan(one)
    words = re.findall(r"<text[^>]*>(.*?)</text>", drawn)
    assert {"pp=0", "pp=1"} <= set(words) and not any(w.startswith("rank ") for w in words)
    assert words.count("pp=0") == 2, "bytes per rank, timeline"
    frames = len(re.findall(r'<rect class="f"', drawn))
    acting = [w for w in words if w.partition(" ")[0] in ("shard", "checkpoint", "zero", "pad")]
    assert len(acting) <= frames and sum(w.startswith("shard") for w in acting) >= 5
    assert drawn.count('<tspan class="a">@tp</tspan>') >= 5


def test_large_pictures_stay_small() -> None:
    """A pipeline of many operations shows its first ranks, and says so."""
    from dataclasses import replace

    from schedlang.pipeline.schedules import make_order

    one = shown()
    long = replace(one.account, timeline=make_order("1F1B", 32, 64))
    drawn = draw_plan(replace(one, account=long))
    assert len(drawn.encode()) < 300_000 and "of 32 ranks" in drawn


def test_trace_has_every_operation() -> None:
    """The trace names each operation once, on its rank, at its time."""
    timeline = shown().account.timeline
    assert timeline is not None
    times = simulate_timeline(timeline)
    events = [e for e in json.loads(format_trace(times))["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(timeline)
    assert max(e["ts"] + e["dur"] for e in events) == times.makespan * 1000


def test_patterns() -> None:
    """All that stand alike are a glob, others a slice of the language, others a list."""
    every = [f"h.{k}.mlp" for k in range(8)]
    assert describe_group(every, every) == "h.*.mlp"
    assert describe_group(every[2:5], every) == "h[2:5].mlp"
    assert describe_group(every[::2], every) == "h[0:7:2].mlp"
    assert describe_group([every[1], every[5], every[6]], every) == "h[1, 5, 6].mlp"
    assert describe_group(every[:1], every) == "h.0.mlp"
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
    """What a change costs: recomputation sends more and holds as much."""
    plain, again = (shown(TENSOR + rows, "tp=2").account for rows in ("", CHECKPOINT))
    changed = {cost.name: cost for cost in compare_accounts(plain, again)}
    assert (
        changed["parameters per rank, at most"].old == changed["parameters per rank, at most"].new
    )
    sent = changed["their bytes, at most"]
    assert sent.old is not None and sent.new is not None and sent.new > sent.old
    assert "->" in str(sent) and "unchanged" in str(changed["bubble"])
