"""Zero bubble: the paper's Table 5 from its own times, and guarantees of the heuristic."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import checked_size, find_order, make_order
from schedlang.pipeline.schedules.looped import paper_span
from schedlang.pipeline.schedules.zero_bubble import PAPER_KEPT_SHARE, Knobs, build_draft
from schedlang.pipeline.timeline.memory import peak_activations
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.simulation import simulate_timeline

# Qi et al., Zero Bubble, 2023: the bubbles of Table 5, and the times of Table 9 in milliseconds
TABLE = json.loads((Path(__file__).parents[1] / "data" / "zero_bubble.json").read_text())
COSTS = [
    Cost(),
    Cost(3, 4, 2, Fraction(1, 2)),
    Cost(5, 2, 1, 1),
    Cost(2, 3, 4),
    Cost(Fraction(7, 3), 1, 5, Fraction(1, 9)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r['model']}-{r['m']}")
def test_table_5(row: dict[str, Any]) -> None:
    """All bubbles of the paper's Table 5 follow from its times, to the four digits printed."""
    cost, p, m = Cost(row["f"], row["i"], row["w"], row["comm"]), row["p"], row["m"]
    bubbles = {}
    for name in row["bubble"]:
        chunks = (row["layers"] + 2) // p if name == "1F1B-I" else None
        span = simulate_timeline(make_order(name, p, m, chunks, cost=cost), cost).rank_span
        if name == "1F1B-I":
            span = paper_span(span, checked_size(find_order(name), p, m, chunks, cost=cost))
        bubbles[name] = round(1 - m * (row["f"] + row["i"] + row["w"]) / span, 4)
    assert bubbles == row["bubble"]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_1p_holds_what_1f1b_holds(p: int, cost: Cost) -> None:
    """ZB-1p holds p microbatches whatever the costs, and takes no longer than 1F1B."""
    for m in (1, 2, p, 2 * p + 1):
        t = make_order("ZB-1p", p, m, cost=cost)
        check_timeline(with_transfers(t))
        assert max(peak_activations(t)) == min(p, m)
        assert (
            simulate_timeline(t, cost).rank_span
            <= simulate_timeline(make_order("1F1B", p, m), cost).rank_span
        )


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("kept", [1, PAPER_KEPT_SHARE, Fraction(1, 10), 0])
def test_memory_is_kept(cost: Cost, kept: Fraction) -> None:
    """No rank exceeds its memory limit in the simulator."""
    cost = replace(cost, kept=kept)
    for p, m in ((1, 3), (2, 5), (4, 4), (4, 11), (6, 13)):
        for memory in (1, 2, Fraction(5, 2), p, 2 * p):
            t = make_order("ZB-2p", p, m, cost=cost, memory=memory)
            check_timeline(t)
            assert max(peak_activations(t, cost)) <= memory, (p, m, memory)


@pytest.mark.parametrize("cost", COSTS)
def test_2p_as_the_paper_counts(cost: Cost) -> None:
    """Without a limit ZB-2p keeps to 2p as the paper counts, and takes no longer than ZB-1p."""
    for p, m in ((2, 5), (4, 4), (4, 12), (6, 18)):
        t = make_order("ZB-2p", p, m, cost=cost)
        assert max(peak_activations(t, replace(cost, kept=PAPER_KEPT_SHARE))) <= 2 * p
        assert (
            simulate_timeline(t, cost).rank_span
            <= simulate_timeline(make_order("ZB-1p", p, m, cost=cost), cost).rank_span
        )


@pytest.mark.parametrize(
    ("knob", "value", "cost", "p", "m", "limit"),
    [
        ("overfill", False, Cost(6, 3, 7, 0, 0), 5, 5, 7),
        ("overfill", True, Cost(8, 3, 5, 2, 0), 3, 6, 5),
        ("skip", False, Cost(9, 1, 6, 3, 0), 5, 5, 6),
        ("skip", True, Cost(5, 8, 5, 1, 1), 4, 7, 6),
        ("idle", False, Cost(7, 2, 3, 1, 0), 3, 6, 4),
        ("idle", True, Cost(1, 4, 8, 3, Fraction(1, 2)), 4, 8, 7),
    ],
)
def test_every_choice_pays(knob: str, value: bool, cost: Cost, p: int, m: int, limit: int) -> None:
    """Each choice of the heuristic is the best for some sizes, and is then taken."""
    size = checked_size(find_order("ZB-2p"), p, m, cost=cost, memory=limit)
    spans: dict[bool, list[Any]] = {True: [], False: []}
    for choice in itertools.product((True, False), repeat=3):
        knobs = Knobs(*choice)
        spans[getattr(knobs, knob)].append(build_draft(size, Fraction(limit), knobs).span)
    best = min(spans[value])
    assert best < min(spans[not value])
    assert (
        simulate_timeline(make_order("ZB-2p", p, m, cost=cost, memory=limit), cost).rank_span
        == best
    )


@pytest.mark.parametrize("cost", [*COSTS, Cost(4, 3, 2, 1, shares=(Fraction(1, 2), 1, 1, 1.5))])
def test_a_draft_knows_its_time(cost: Cost) -> None:
    """The heuristic's span of each of its eight orders equals the simulator's."""
    size = checked_size(find_order("ZB-2p"), 4, 11, cost=cost)
    for knobs in itertools.product((True, False), repeat=3):
        draft = build_draft(size, Fraction(6), Knobs(*knobs))
        assert draft.span == simulate_timeline(draft.timeline(), cost).rank_span, knobs


@pytest.mark.parametrize(
    "row", [r for r in TABLE if r["p"] < 32], ids=lambda r: f"{r['p']}-{r['m']}"
)
def test_memory_that_is_enough(row: dict[str, Any]) -> None:
    """((p-1) (I + 2 comm) + p F) / F microbatches are nearly enough (§5.4), 3 less are not."""
    p, m = row["p"], row["m"]
    f, i, w, comm = (Fraction(str(row[name])) for name in ("f", "i", "w", "comm"))
    cost = Cost(f, i, w, comm, PAPER_KEPT_SHARE)
    enough = ((p - 1) * (i + 2 * comm) + p * f) / f
    too_little, sufficient, unlimited = (
        simulate_timeline(make_order("ZB-2p", p, m, cost=cost, memory=limit), cost).span_bubble
        for limit in (enough - 3, enough, m)
    )
    assert unlimited <= sufficient < unlimited + Fraction(1, 100)
    assert too_little > sufficient + Fraction(8, 1000)


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_few_microbatches(p: int) -> None:
    """For m <= p ZB-H1 takes (m+p-1) (F+I) + W, and 1F1B (m+p-1) (F+I+W), as in Appendix H."""
    f, i, w = Fraction(7, 3), Fraction(5, 2), Fraction(4, 3)
    for m in range(1, p + 1):
        spans = [
            simulate_timeline(make_order(n, p, m), Cost(f, i, w)).rank_span
            for n in ("ZB-H1", "1F1B")
        ]
        assert spans == [(m + p - 1) * (f + i) + w, (m + p - 1) * (f + i + w)]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 3, 4])
def test_gis_within_its_bounds(p: int, v: int) -> None:
    """GIS and GIS-H idle no longer, and hold no more, than PipeOffload's Table 1 says."""
    for f, i, w in ((1, 1, 1), (2, 2, 1), (3, 4, 2)):
        cost, m = Cost(Fraction(f, v), Fraction(i, v), Fraction(w, v)), 4 * p
        for name, extra, limit in (
            ("GIS", 0, p),
            ("GIS-H", Fraction((v - 1) * p, 2) * (f + i - w), Fraction((v + 1) * p + v - 1, 2 * v)),
        ):
            t = make_order(name, p, m, v)
            idle = simulate_timeline(t, Cost(f, i, w)).rank_span - m * (f + i + w)
            assert idle * v <= (p - 1) * (f + i) + extra, (name, cost)
            assert max(peak_activations(t)) <= limit


def test_gis_h_takes_the_memory_it_gets() -> None:
    """GIS-H has smaller rounds for less memory, from p down to p/2; less is refused."""
    peaks = [
        max(peak_activations(make_order("GIS-H", 8, 64, 2, memory=m / 4))) for m in range(24, 36)
    ]
    assert peaks == sorted(peaks) and peaks[0] == 6 and peaks[-1] == 8
    with pytest.raises(ValueError, match="memory=6"):
        make_order("GIS-H", 8, 64, 2, memory=5)
