"""The HTML page of timelines: self-contained, and its script computes the program's times."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from schedlang.cli import app
from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import ORDERS, OrderError, make_order
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.simulation import simulate_timeline
from schedlang.viz.timeline_page import (
    MICRO,
    RANKS,
    InitialTimeline,
    order_variants,
    readable_cost,
    timeline_page,
)

COST = Cost(3, 4, 2, 0.5)
SCRIPT = resources.files("schedlang.viz").joinpath("page.js")
ASK = """
const page = require(process.argv[2]), cost = JSON.parse(process.argv[3]);
page.book(require("fs").readFileSync(0, "utf8")).then((book) => {
  const found = book.entries.map((entry) => {
    const t = page.unpack(entry.timeline);
    return { ...page.timed(t, cost), ...page.figures(t, page.timed(t, cost)) };
  });
  console.log(JSON.stringify(found));
});
"""


@pytest.fixture(scope="module")
def page() -> str:
    """The page of all orders (slow to create)."""
    return timeline_page(cost=COST)


def embedded_data(page: str) -> str:
    """The encoded data of a page."""
    match = re.search(r'id="data">([^<]*)<', page)
    assert match is not None
    return match[1]


def read_book(page: str) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(embedded_data(page))))  # type: ignore[no-any-return]


def test_the_page_is_whole_and_alone(page: str) -> None:
    """The page is small and self-contained, has dark and light colours, and all orders."""
    assert len(page.encode()) < 300_000 and "prefers-color-scheme:dark" in page
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?:|\bsrc=|\bhref=|url\((?!#)|@import|import\(|fetch\(|XMLHttp", without_namespace
    )
    entries = read_book(page)["entries"]
    assert {entry["order"] for entry in entries} == {
        order.name for order in ORDERS if not order.searched
    }
    assert page.count("<script") == page.count("</script>") == 2


def test_every_size_that_an_order_has_is_offered(page: str) -> None:
    """The page offers all sizes of all orders, with complete timelines."""
    entries = {
        (e["order"], e["ranks"], e["micro"], e["variant"]): e["timeline"]
        for e in read_book(page)["entries"]
    }
    for order in ORDERS:
        for chunks, slices, name in order_variants(order):
            for ranks, micro in ((p, m) for p in RANKS for m in MICRO):
                timeline = entries.pop((order.name, ranks, micro, name), None)
                try:
                    t = make_order(order.name, ranks, micro, chunks, slices=slices, cost=COST)
                except OrderError:
                    assert timeline is None
                    continue
                assert timeline is not None and sum(timeline["rows"]) == len(t.compute())
    assert not entries


def test_it_opens_with_what_was_asked_for() -> None:
    """An initial timeline of other sizes is among the entries and is shown first."""
    initial = InitialTimeline("1F1B", make_order("1F1B", 3, 7))
    book_read = read_book(timeline_page(initial))
    assert book_read["first"] == {"order": "1F1B", "ranks": 3, "micro": 7, "variant": ""}
    matching = [
        e for e in book_read["entries"] if all(e[k] == v for k, v in book_read["first"].items())
    ]
    assert len(matching) == 1 and matching[0]["timeline"]["rows"] == [14, 14, 14]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_times_as_the_program(page: str, tmp_path: Path) -> None:
    """Times, spans and bubbles of the script equal the simulator's for every entry."""
    script = tmp_path / "ask.js"
    script.write_text(ASK)
    cost = json.dumps({"f": 3, "i": 4, "w": 2, "comm": 0.5})
    result = subprocess.run(
        ["node", str(script), str(SCRIPT), cost],
        input=embedded_data(page),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    entries = read_book(page)["entries"]
    answers = json.loads(result.stdout)
    assert len(answers) == len(entries) > 10
    arguments = {
        (order.name, ranks, micro, name): (order.name, ranks, micro, chunks, slices)
        for order in ORDERS
        for chunks, slices, name in order_variants(order)
        for ranks in RANKS
        for micro in MICRO
    }
    for entry, script_times in zip(entries, answers):
        key = arguments[entry["order"], entry["ranks"], entry["micro"], entry["variant"]]
        t = make_order(*key[:4], slices=key[4], cost=COST).compute()
        times = simulate_timeline(t, COST)
        assert np.allclose(script_times["start"], times.start, atol=1e-9), key
        assert np.allclose(script_times["end"], times.end, atol=1e-9), key
        names = {
            "makespan": "makespan",
            "bubble": "bubble",
            "span": "rank_span",
            "spanBubble": "span_bubble",
        }
        for script_name, timing_name in names.items():
            assert abs(script_times[script_name] - getattr(times, timing_name)) < 1e-9, (
                key,
                script_name,
            )
        assert np.allclose(entry["timeline"]["peak"], peak_activations(t).astype(float)), key


def test_the_verb_writes_the_page(tmp_path: Path) -> None:
    """`simulate --html` shows the given order, sizes and costs first."""
    output_file = tmp_path / "out.html"
    arguments = ["simulate", "--order", "interleaved1f1b", "--ranks", "2", "--micro", "6"]
    arguments += ["--chunks", "2", "--cost", "F=1,B=2,comm=0.25", "--html", str(output_file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    book_read = read_book(output_file.read_text())
    expected = {"order": "Interleaved1F1B", "ranks": 2, "micro": 6, "variant": "2 stages a rank"}
    assert book_read["first"] == expected and book_read["cost"]["comm"] == 0.25


def test_estimated_costs_have_a_unit_that_can_be_read() -> None:
    """Times far below a millisecond get a fitting unit; lanes are named by the axis; all orders are
    offered at the sizes of the schedule."""
    initial = InitialTimeline("1F1B", make_order("1F1B", 2, 2), "pp", "ms")
    page = timeline_page(initial, Cost(0.00014, 0.00014, 0.00028, 0.0006))
    book_read = read_book(page)
    assert (book_read["unit"], book_read["who"]) == ("ns", "pp=")
    assert book_read["cost"] == {"f": 140.0, "i": 140.0, "w": 280.0, "comm": 600.0}
    assert "F (ns)" in page and "transfer (ns)" in page
    assert len({e["order"] for e in book_read["entries"] if e["micro"] == e["ranks"] == 2}) > 10
    assert readable_cost(Cost(2, 3, 4), "ms") == (Cost(2, 3, 4), "ms")
    assert readable_cost(Cost(2000, 3000, 4000, between={(0, 1): 500}), "ms")[0].between == {
        (0, 1): 0.5
    }
    assert readable_cost(COST, "") == (COST, "")
