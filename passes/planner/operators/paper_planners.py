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
        indexed = enumerate(self.joint.axes)
        return tuple(part.decided(self.joint.choice_on_axis(choice, k)) for k, part in indexed)


@dataclass(frozen=True)
class PaperPlanner:
    """A planner: its paper, and its search over axes of the given ranks, slowest last."""

    paper: str
    search: Callable[[Graph, Sequence[LayoutRequest], float], BestLayout | None]


def axis_requests(request: LayoutRequest) -> list[LayoutRequest]:
    """List the requests of one axis: split tensors, or split rows under each stage of ZeRO."""
    rows = [replace(request, mode="rows", zero=stage) for stage in ZERO_STAGES]
    return [replace(request, mode="tensors"), *rows]


def combine_requests(
    menus: Sequence[Sequence[LayoutRequest]],
) -> Iterator[tuple[LayoutRequest, ...]]:
    """Combine the requests of several axes; at most one axis splits rows."""
    for requests in itertools.product(*menus):
        if sum(request.mode == "rows" for request in requests) < 2:
            yield requests


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
    choices = combine_requests([axis_requests(request)[: 1 if rows else None] for request in axes])
    layouts = (find_layout(graph, c, limit, done, solver) for c in choices)
    return min((c for c in layouts if c), key=lambda c: c.seconds, default=None)


def find_layout(
    graph: Graph,
    axes: Sequence[LayoutRequest],
    limit: float = math.inf,
    done: tuple[AxisPlacement, ...] = (),
    solver: Solver = solve,
) -> BestLayout | None:
    """Find the best layout for these requests, given axes that are already decided."""
    joint = MeshPlacement((*done, *(AxisPlacement(graph, request) for request in axes)))
    solution = solver(joint.problem, limit)
    return None if solution is None else BestLayout(joint, solution, joint.problem, solver)


def plan_tofu(
    graph: Graph, axes: Sequence[LayoutRequest], limit: float = math.inf
) -> BestLayout | None:
    """Decide one axis after the other, each of two ranks: the best for the remaining shards."""
    layout: BestLayout | None = None
    for k, request in enumerate(axes):
        room = limit * math.prod(later.ranks for later in axes[k + 1 :])
        layout = find_best_layout(graph, [request], room, layout.decided_axes() if layout else ())
        if layout is None:
            return None
    return layout


def plan_mesh_tensorflow(
    graph: Graph, axes: Sequence[LayoutRequest], limit: float = math.inf
) -> BestLayout | None:
    """Choose one name of dims for the axis, split wherever it occurs: the best of all names."""
    (request,) = axes
    requests = [
        replace(request, name=name) for name in splittable_dims(graph) if name not in graph.row_dims
    ]
    requests.append(replace(request, mode="rows"))
    layouts = (find_layout(graph, [c], limit) for c in requests)
    return min((c for c in layouts if c), key=lambda c: c.seconds, default=None)


def splittable_dims(graph: Graph) -> list[Dim]:
    """List the names of dims of activations that some node may split."""
    names: dict[Dim, None] = {}
    for index, node in enumerate(graph.nodes):
        for split in node.step.splits:
            dims = ((graph.result_name(index, k), d) for k, d in enumerate(split.outputs) if d >= 0)
            names.update(dict.fromkeys(graph.dim_name(*dim) for dim in dims))
    return list(names)


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
