"""Memory over a step as a picture: areas by class add up to the estimate, on one scale."""

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
from tests.proofs import planned


def rank(place: int, *levels: tuple[int, ...]) -> RankMemory:
    """A rank that holds so much, operation by operation."""
    moments = tuple(OperationMemory(f"op{k}", level, level) for k, level in enumerate(levels))
    return RankMemory(2, place, place, moments)


def heights(parts: list[str], name: str) -> list[list[float]]:
    """The upper edges of a class's areas, one list for each panel."""
    fill = cost_pictures.COLOURS[name]
    found = (re.search(rf'points="([^"]*)" fill="{fill}"', part) for part in parts)
    points = [match[1].split() for match in found if match]
    return [[float(p.split(",")[1]) for p in one[: len(one) // 2]] for one in points]


def test_areas_are_stacked_on_one_scale() -> None:
    """The fullest rank fills its panel at its peak, another one as much as it holds of that."""
    full, half = (100, 0, 0, 300, 0, 0), (100, 0, 0, 100, 0, 0)
    parts, _ = draw_memory([rank(0, half, full), rank(1, half, half)], "pp", 0)
    first, second = heights(parts, "activations")
    assert min(first) == 12.0, "the top of the first panel"
    assert max(second) - min(second) == 0
    bottom = 12 + HIGH + cost_pictures.GAP + HIGH
    assert abs((bottom - second[0]) / HIGH - 0.5) < 0.01
    text = "".join(parts)
    assert "peak 400 B in op1" in text and "pp=0" in text and "pp=1" in text
    assert "gradients: at most" not in text and "parameters: at most 100 B" in text


def test_a_long_step_of_many_ranks_stays_small() -> None:
    """Points are thinned without losing a peak, and the fullest rank is always among the panels."""
    low, peak = (1, 0, 0, 1, 0, 0), (1, 0, 0, 999, 0, 0)
    long = [rank(k, *[low] * 700, *([peak] if k == 9 else []), *[low] * 700) for k in range(12)]
    parts, _ = draw_memory(long, "pp", 0)
    text = "".join(parts)
    assert len(text) < 100_000 and "and 8 more kinds of ranks" in text
    drawn = heights(parts, "activations")
    assert len(drawn) == MOST_PANELS and all(len(one) <= MOST_POINTS for one in drawn)
    assert "pp=9" in text and f"activations: at most {format_bytes(999)}" in text
    assert max(drawn[-1]) - min(drawn[-1]) > 0.9 * HIGH and max(drawn[0]) == min(drawn[0])


def test_plan_draws_what_it_estimates() -> None:
    """The picture of a plan has the curve where memory was estimated, and else says it was not."""
    rows = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
    plan, given = planned(models.gpt2(), rows, "pp=2"), tokens(rows=4)
    with_curve: Any = draw_plan(make_view(plan, account(plan, given, memory=True)))
    without: Any = draw_plan(make_view(plan, account(plan, given)))
    assert "bytes over a step" in with_curve and "not estimated" not in with_curve
    assert "bytes over a step" not in without and "activations not estimated" in without
    assert all(name in with_curve for name in CLASSES)


def test_a_panel_says_what_its_sides_are() -> None:
    """Bytes stand at the left, operations below, their names are told, the peak is where it is."""
    rows = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
    plan, given = planned(models.gpt2(), rows, "pp=2"), tokens(rows=4)
    found = account(plan, given, memory=True).memory
    assert found
    text = "".join(draw_memory(found, "pp", 0)[0])
    top = max(one.peak for one in found)
    assert text.count(f">{format_bytes(top)}</text>") == len(found) and text.count(
        ">0</text>"
    ) == len(found)
    assert "backward (B) of microbatch 2 on stage 0" in text
    assert all(f">{one.place}F0</text>" in text for one in found)
    lines = [float(x) for x in re.findall(rf"M(\d+\.\d) \d+v{HIGH:.0f}\" stroke-dash", text)]
    tops = [min(one) for one in _edges(text, len(found))]
    assert [x for _, x in tops] == lines


def _edges(text: str, panels: int) -> list[list[tuple[float, float]]]:
    """The upper edge of all areas of each panel, as (y, x)."""
    shapes = [shape.split() for shape in re.findall(r'points="([^"]*)"', text)]
    each = len(shapes) // panels
    assert len(shapes) == panels * each
    found = []
    for k in range(panels):
        points = [
            p for shape in shapes[k * each : (k + 1) * each] for p in shape[: len(shape) // 2]
        ]
        found.append([(float(y), float(x)) for x, y in (p.split(",") for p in points)])
    return found
