"""Planners of operator layouts from the literature, each a setting of this solver.

Each has the search space of its paper.  Costs, graph and solver are ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

from schedlang.passes.planner.operators.layout_requests import LayoutRequest
from schedlang.passes.planner.operators.layout_walk import solve_by_walk
from schedlang.passes.planner.operators.operator_graph import Dim, Graph
from schedlang.passes.planner.operators.placements import AxisPlacement, MeshPlacement
from schedlang.passes.planner.operators.solver import Problem, Solution, Solver, solve

ZERO_STAGES: tuple[Literal[0, 1, 3], ...] = (0, 1, 3)  # of ZeRO, the smallest first


@dataclass(frozen=True)
class BestLayout:
    """The best layout over all axes, with the problem that it solves."""

    joint: MeshPlacement
    solution: Solution
    problem: Problem  # of the joint, without options that were refused since
    solver: Solver = solve

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.solution.seconds

    def decided_axes(self) -> tuple[AxisPlacement, ...]:
        """Return the axes with all layouts decided."""
        choice = self.solution.choice
        every = enumerate(self.joint.axes)
        return tuple(part.decided(self.joint.choice_on_axis(choice, k)) for k, part in every)


@dataclass(frozen=True)
class PaperPlanner:
    """A planner: its paper, and its search over axes of the given ranks, slowest last."""

    paper: str
    search: Callable[[Graph, Sequence[LayoutRequest], float], BestLayout | None]


def axis_requests(asked: LayoutRequest) -> list[LayoutRequest]:
    """List the requests of one axis: split tensors, or split rows under each stage of ZeRO."""
    rows = [replace(asked, mode="rows", zero=stage) for stage in ZERO_STAGES]
    return [replace(asked, mode="tensors"), *rows]


def combine_requests(
    menus: Sequence[Sequence[LayoutRequest]],
) -> Iterator[tuple[LayoutRequest, ...]]:
    """Combine the requests of several axes; at most one axis splits rows."""
    for several in itertools.product(*menus):
        if sum(one.mode == "rows" for one in several) < 2:
            yield several


def find_best_layout(
    graph: Graph,
    axes: Sequence[LayoutRequest],
    limit: float = math.inf,
    done: tuple[AxisPlacement, ...] = (),
    solver: Solver = solve,
) -> BestLayout | None:
    """Find the best layout over axes at once, given axes that are already decided (`done`).

    Each axis splits tensors or rows, rows under the smallest stage of ZeRO that fits.  None where
    nothing fits in `limit` bytes.
    """
    rows = any(part.asked.mode == "rows" for part in done)
    every = combine_requests([axis_requests(asked)[: 1 if rows else None] for asked in axes])
    found = (find_layout(graph, one, limit, done, solver) for one in every)
    return min((one for one in found if one), key=lambda one: one.seconds, default=None)


def find_layout(
    graph: Graph,
    axes: Sequence[LayoutRequest],
    limit: float = math.inf,
    done: tuple[AxisPlacement, ...] = (),
    solver: Solver = solve,
) -> BestLayout | None:
    """Find the best layout for these requests, given axes that are already decided."""
    joint = MeshPlacement((*done, *(AxisPlacement(graph, asked) for asked in axes)))
    solution = solver(joint.problem, limit)
    return None if solution is None else BestLayout(joint, solution, joint.problem, solver)


def plan_tofu(
    graph: Graph, axes: Sequence[LayoutRequest], limit: float = math.inf
) -> BestLayout | None:
    """Decide one axis after the other, each of two ranks: the best for the remaining shards."""
    found: BestLayout | None = None
    for k, asked in enumerate(axes):
        rest = limit * math.prod(one.ranks for one in axes[k + 1 :])
        found = find_best_layout(graph, [asked], rest, found.decided_axes() if found else ())
        if found is None:
            return None
    return found


def plan_mesh_tensorflow(
    graph: Graph, axes: Sequence[LayoutRequest], limit: float = math.inf
) -> BestLayout | None:
    """Choose one name of dims for the axis, split wherever it occurs: the best of all names."""
    (asked,) = axes
    every = [
        replace(asked, name=name) for name in splittable_dims(graph) if name not in graph.row_dims
    ]
    every.append(replace(asked, mode="rows"))
    found = (find_layout(graph, [one], limit) for one in every)
    return min((one for one in found if one), key=lambda one: one.seconds, default=None)


def splittable_dims(graph: Graph) -> list[Dim]:
    """List the names of dims of activations that some node may split."""
    found: dict[Dim, None] = {}
    for at, node in enumerate(graph.nodes):
        for way in node.step.splits:
            dims = ((graph.result_name(at, k), d) for k, d in enumerate(way.outputs) if d >= 0)
            found.update(dict.fromkeys(graph.dim_name(*one) for one in dims))
    return list(found)


PLANNERS: Mapping[str, PaperPlanner] = MappingProxyType(
    {
        "Alpa": PaperPlanner(
            "Zheng et al. 2022, intra-operator parallelism on a mesh of axes", find_best_layout
        ),
        "Tofu": PaperPlanner("Wang, Huang & Li 2019, recursive two-way partition", plan_tofu),
        "Mesh-TensorFlow": PaperPlanner(
            "Shazeer et al. 2018, dims of one name", plan_mesh_tensorflow
        ),
        "FlexFlow": PaperPlanner(
            "Jia, Zaharia & Aiken 2019, a walk over operators",
            partial(find_best_layout, solver=solve_by_walk),
        ),
    }
)
