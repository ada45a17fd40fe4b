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

from schedlang.passes.planner.operators.asked import Asked
from schedlang.passes.planner.operators.graph import Dim, Graph
from schedlang.passes.planner.operators.placements import Joint, Placed
from schedlang.passes.planner.operators.solve import Problem, Solution, Solver, solve
from schedlang.passes.planner.operators.walked import walked

STAGES: tuple[Literal[0, 1, 3], ...] = (0, 1, 3)  # of ZeRO, the smallest first


@dataclass(frozen=True)
class Laid:
    """The best layout over all axes, with the problem that it solves."""

    joint: Joint
    solution: Solution
    problem: Problem  # of the joint, without options that were refused since
    solver: Solver = solve

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.solution.seconds

    def only(self) -> tuple[Placed, ...]:
        """Return the axes with all layouts decided."""
        choice = self.solution.choice
        every = enumerate(self.joint.parts)
        return tuple(part.only(self.joint.alone(choice, k)) for k, part in every)


@dataclass(frozen=True)
class Named:
    """A planner: its paper, and its search over axes of the given ranks, slowest last."""

    paper: str
    search: Callable[[Graph, Sequence[Asked], float], Laid | None]


def menu(asked: Asked) -> list[Asked]:
    """List the requests of one axis: split tensors, or split rows under each stage of ZeRO."""
    rows = [replace(asked, mode="rows", zero=stage) for stage in STAGES]
    return [replace(asked, mode="tensors"), *rows]


def modes(menus: Sequence[Sequence[Asked]]) -> Iterator[tuple[Asked, ...]]:
    """Combine the requests of several axes; at most one axis splits rows."""
    for several in itertools.product(*menus):
        if sum(one.mode == "rows" for one in several) < 2:
            yield several


def best(
    graph: Graph,
    axes: Sequence[Asked],
    limit: float = math.inf,
    done: tuple[Placed, ...] = (),
    solver: Solver = solve,
) -> Laid | None:
    """Find the best layout over axes at once, given axes that are already decided (`done`).

    Each axis splits tensors or rows, rows under the smallest stage of ZeRO that fits.  None where
    nothing fits in `limit` bytes.
    """
    rows = any(part.asked.mode == "rows" for part in done)
    every = modes([menu(asked)[: 1 if rows else None] for asked in axes])
    found = (laid(graph, one, limit, done, solver) for one in every)
    return min((one for one in found if one), key=lambda one: one.seconds, default=None)


def laid(
    graph: Graph,
    axes: Sequence[Asked],
    limit: float = math.inf,
    done: tuple[Placed, ...] = (),
    solver: Solver = solve,
) -> Laid | None:
    """Find the best layout for these requests, given axes that are already decided."""
    joint = Joint((*done, *(Placed(graph, asked) for asked in axes)))
    solution = solver(joint.problem, limit)
    return None if solution is None else Laid(joint, solution, joint.problem, solver)


def tofu(graph: Graph, axes: Sequence[Asked], limit: float = math.inf) -> Laid | None:
    """Decide one axis after the other, each of two ranks: the best for the remaining shards."""
    found: Laid | None = None
    for k, asked in enumerate(axes):
        rest = limit * math.prod(one.ranks for one in axes[k + 1 :])
        found = best(graph, [asked], rest, found.only() if found else ())
        if found is None:
            return None
    return found


def mesh_tensorflow(graph: Graph, axes: Sequence[Asked], limit: float = math.inf) -> Laid | None:
    """Choose one name of dims for the axis, split wherever it occurs: the best of all names."""
    (asked,) = axes
    every = [replace(asked, name=name) for name in names(graph) if name not in graph.rows]
    every.append(replace(asked, mode="rows"))
    found = (laid(graph, [one], limit) for one in every)
    return min((one for one in found if one), key=lambda one: one.seconds, default=None)


def names(graph: Graph) -> list[Dim]:
    """List the names of dims of activations that some node may split."""
    found: dict[Dim, None] = {}
    for at, node in enumerate(graph.nodes):
        for way in node.step.ways:
            dims = ((graph.result(at, k), d) for k, d in enumerate(way.outputs) if d >= 0)
            found.update(dict.fromkeys(graph.name(*one) for one in dims))
    return list(found)


PLANNERS: Mapping[str, Named] = MappingProxyType(
    {
        "Alpa": Named("Zheng et al. 2022, intra-operator parallelism on a mesh of axes", best),
        "Tofu": Named("Wang, Huang & Li 2019, recursive two-way partition", tofu),
        "Mesh-TensorFlow": Named("Shazeer et al. 2018, dims of one name", mesh_tensorflow),
        "FlexFlow": Named(
            "Jia, Zaharia & Aiken 2019, a walk over operators", partial(best, solver=walked)
        ),
    }
)
