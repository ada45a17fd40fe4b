"""The page of timelines: it needs nothing else, and its script times as the program does."""

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
    """The page of all orders, which takes a while to make."""
    return timeline_page(cost=COST)


def data(page: str) -> str:
    """What the page carries, as it stands in it."""
    found = re.search(r'id="data">([^<]*)<', page)
    assert found is not None
    return found[1]


def book(page: str) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(data(page))))  # type: ignore[no-any-return]


def test_the_page_is_whole_and_alone(page: str) -> None:
    """It is small, refers to nothing outside, knows dark and light, has all named orders."""
    assert len(page.encode()) < 300_000 and "prefers-color-scheme:dark" in page
    alone = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?:|\bsrc=|\bhref=|url\((?!#)|@import|import\(|fetch\(|XMLHttp", alone
    )
    entries = book(page)["entries"]
    assert {entry["order"] for entry in entries} == {
        known.name for known in ORDERS if not known.searched
    }
    assert page.count("<script") == page.count("</script>") == 2


def test_every_size_that_an_order_has_is_offered(page: str) -> None:
    """What can be chosen is what the registry makes, to the last row."""
    entries = {
        (e["order"], e["ranks"], e["micro"], e["variant"]): e["timeline"]
        for e in book(page)["entries"]
    }
    for known in ORDERS:
        for chunks, slices, name in order_variants(known):
            for ranks, micro in ((p, m) for p in RANKS for m in MICRO):
                found = entries.pop((known.name, ranks, micro, name), None)
                try:
                    t = make_order(known.name, ranks, micro, chunks, slices=slices, cost=COST)
                except OrderError:
                    assert found is None
                    continue
                assert found is not None and sum(found["rows"]) == len(t.compute())
    assert not entries


def test_it_opens_with_what_was_asked_for() -> None:
    """A timeline of other sizes is among the entries, and the one that is shown first."""
    shown = InitialTimeline("1F1B", make_order("1F1B", 3, 7))
    found = book(timeline_page(shown))
    assert found["first"] == {"order": "1F1B", "ranks": 3, "micro": 7, "variant": ""}
    mine = [e for e in found["entries"] if all(e[k] == v for k, v in found["first"].items())]
    assert len(mine) == 1 and mine[0]["timeline"]["rows"] == [14, 14, 14]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_times_as_the_program(page: str, tmp_path: Path) -> None:
    """Starts, ends, makespan, spans and bubbles of every entry are those of `timing`."""
    ask = tmp_path / "ask.js"
    ask.write_text(ASK)
    cost = json.dumps({"f": 3, "i": 4, "w": 2, "comm": 0.5})
    done = subprocess.run(
        ["node", str(ask), str(SCRIPT), cost], input=data(page), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    entries = book(page)["entries"]
    answers = json.loads(done.stdout)
    assert len(answers) == len(entries) > 10
    made = {
        (known.name, ranks, micro, name): (known.name, ranks, micro, chunks, slices)
        for known in ORDERS
        for chunks, slices, name in order_variants(known)
        for ranks in RANKS
        for micro in MICRO
    }
    for entry, found in zip(entries, answers):
        key = made[entry["order"], entry["ranks"], entry["micro"], entry["variant"]]
        t = make_order(*key[:4], slices=key[4], cost=COST).compute()
        times = simulate_timeline(t, COST)
        assert np.allclose(found["start"], times.start, atol=1e-9), key
        assert np.allclose(found["end"], times.end, atol=1e-9), key
        names = {
            "makespan": "makespan",
            "bubble": "bubble",
            "span": "rank_span",
            "spanBubble": "span_bubble",
        }
        for mine, theirs in names.items():
            assert abs(found[mine] - getattr(times, theirs)) < 1e-9, (key, mine)
        assert np.allclose(entry["timeline"]["peak"], peak_activations(t).astype(float)), key


def test_the_verb_writes_the_page(tmp_path: Path) -> None:
    """`simulate --html` opens with the order, the sizes and the costs that it was given."""
    out = tmp_path / "out.html"
    words = ["simulate", "--order", "interleaved1f1b", "--ranks", "2", "--micro", "6"]
    words += ["--chunks", "2", "--cost", "F=1,B=2,comm=0.25", "--html", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = book(out.read_text())
    wanted = {"order": "Interleaved1F1B", "ranks": 2, "micro": 6, "variant": "2 stages a rank"}
    assert found["first"] == wanted and found["cost"]["comm"] == 0.25


def test_estimated_costs_have_a_unit_that_can_be_read() -> None:
    """Times far below a millisecond are told in one that fits; lanes are places of the axis; every
    order is there at the sizes of the schedule."""
    shown = InitialTimeline("1F1B", make_order("1F1B", 2, 2), "pp", "ms")
    page = timeline_page(shown, Cost(0.00014, 0.00014, 0.00028, 0.0006))
    found = book(page)
    assert (found["unit"], found["who"]) == ("ns", "pp=")
    assert found["cost"] == {"f": 140.0, "i": 140.0, "w": 280.0, "comm": 600.0}
    assert "F (ns)" in page and "transfer (ns)" in page
    assert len({e["order"] for e in found["entries"] if e["micro"] == e["ranks"] == 2}) > 10
    assert readable_cost(Cost(2, 3, 4), "ms") == (Cost(2, 3, 4), "ms")
    assert readable_cost(Cost(2000, 3000, 4000, between={(0, 1): 500}), "ms")[0].between == {
        (0, 1): 0.5
    }
    assert readable_cost(COST, "") == (COST, "")
