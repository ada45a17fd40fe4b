"""The picture of memory over a step: stacked areas by class, one scale for all ranks."""

from __future__ import annotations

import re
from typing import Any

from schedlang.diagnostics.tables import format_bytes
from schedlang.ir.memory import CLASSES, OperationMemory, RankMemory
from schedlang.passes.simulate.account import account
from schedlang.viz import cost_pictures
from schedlang.viz.cost_pictures import HIGH, MOST_PANELS, MOST_POINTS, draw_memory
from schedlang.viz.picture import draw_plan
from schedlang.viz.show import make_view
from tests import models
from tests.models import tokens
from tests.proofs import make_plan


def make_rank(index: int, *levels: tuple[int, ...]) -> RankMemory:
    """A rank with these bytes at each operation."""
    operations = tuple(OperationMemory(f"op{k}", level, level) for k, level in enumerate(levels))
    return RankMemory(2, index, index, operations)


def upper_edges(parts: list[str], name: str) -> list[list[float]]:
    """The upper edges of a class's areas, one list for each panel."""
    fill = cost_pictures.COLOURS[name]
    matches = (re.search(rf'points="([^"]*)" fill="{fill}"', part) for part in parts)
    points = [match[1].split() for match in matches if match]
    return [
        [float(p.split(",")[1]) for p in coordinates[: len(coordinates) // 2]]
        for coordinates in points
    ]


def test_areas_are_stacked_on_one_scale() -> None:
    """The rank with the highest peak fills its panel; others are drawn on its scale."""
    full, half = (100, 0, 0, 300, 0, 0), (100, 0, 0, 100, 0, 0)
    parts, _ = draw_memory([make_rank(0, half, full), make_rank(1, half, half)], "pp", 0)
    first, second = upper_edges(parts, "activations")
    assert min(first) == 12.0, "the top of the first panel"
    assert max(second) - min(second) == 0
    bottom = 12 + HIGH + cost_pictures.GAP + HIGH
    assert abs((bottom - second[0]) / HIGH - 0.5) < 0.01
    text = "".join(parts)
    assert "peak 400 B in op1" in text and "pp=0" in text and "pp=1" in text
    assert "gradients: at most" not in text and "parameters: at most 100 B" in text


def test_a_long_step_of_many_ranks_stays_small() -> None:
    """Points are thinned without losing a peak, and the fullest rank is always shown."""
    base, peak = (1, 0, 0, 1, 0, 0), (1, 0, 0, 999, 0, 0)
    ranks = [
        make_rank(k, *[base] * 700, *([peak] if k == 9 else []), *[base] * 700) for k in range(12)
    ]
    parts, _ = draw_memory(ranks, "pp", 0)
    text = "".join(parts)
    assert len(text) < 100_000 and "and 8 more kinds of ranks" in text
    edges = upper_edges(parts, "activations")
    assert len(edges) == MOST_PANELS and all(len(panel) <= MOST_POINTS for panel in edges)
    assert "pp=9" in text and f"activations: at most {format_bytes(999)}" in text
    assert max(edges[-1]) - min(edges[-1]) > 0.9 * HIGH and max(edges[0]) == min(edges[0])


def test_plan_draws_what_it_estimates() -> None:
    """A plan's picture has the curve if memory was estimated, else says that it was not."""
    rows = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
    plan, batch = make_plan(models.gpt2(), rows, "pp=2"), tokens(rows=4)
    with_curve: Any = draw_plan(make_view(plan, account(plan, batch, memory=True)))
    without: Any = draw_plan(make_view(plan, account(plan, batch)))
    assert "bytes over a step" in with_curve and "not estimated" not in with_curve
    assert "bytes over a step" not in without and "activations not estimated" in without
    assert all(name in with_curve for name in CLASSES)


def test_a_panel_says_what_its_sides_are() -> None:
    """Axes are labelled with bytes and operations, and the peak is marked at its place."""
    rows = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
    plan, batch = make_plan(models.gpt2(), rows, "pp=2"), tokens(rows=4)
    memory = account(plan, batch, memory=True).memory
    assert memory
    text = "".join(draw_memory(memory, "pp", 0)[0])
    top = max(rank_memory.peak for rank_memory in memory)
    assert text.count(f">{format_bytes(top)}</text>") == len(memory) and text.count(
        ">0</text>"
    ) == len(memory)
    assert "backward (B) of microbatch 2 on stage 0" in text
    assert all(f">{rank_memory.place}F0</text>" in text for rank_memory in memory)
    lines = [float(x) for x in re.findall(rf"M(\d+\.\d) \d+v{HIGH:.0f}\" stroke-dash", text)]
    tops = [min(rank_memory) for rank_memory in _panel_edges(text, len(memory))]
    assert [x for _, x in tops] == lines


def _panel_edges(text: str, panels: int) -> list[list[tuple[float, float]]]:
    """The upper edge of all areas of each panel, as (y, x)."""
    shapes = [shape.split() for shape in re.findall(r'points="([^"]*)"', text)]
    per_panel = len(shapes) // panels
    assert len(shapes) == panels * per_panel
    edges = []
    for k in range(panels):
        points = [
            p
            for shape in shapes[k * per_panel : (k + 1) * per_panel]
            for p in shape[: len(shape) // 2]
        ]
        edges.append([(float(y), float(x)) for x, y in (p.split(",") for p in points)])
    return edges
