"""Planners of operators' layouts as the literature has them: each a setting of this solver.

What each of them searched, over which spaces, with the paper.  Costs, graph and solver are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from schedlang.passes.planner.operators.graph import Dim, Graph
from schedlang.passes.planner.operators.placements import ZERO1, ZERO3, Asked, Placed
from schedlang.passes.planner.operators.solve import Solution, solve

STAGES: tuple[Literal[0, 1, 3], ...] = (0, 1, 3)  # of ZeRO, the least first


@dataclass(frozen=True)
class Laid:
    """The layout over one axis."""

    placed: Placed
    solution: Solution

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.solution.seconds


@dataclass(frozen=True)
class Named:
    """A planner: its paper, and its search over axes of so many ranks each, slowest last."""

    paper: str
    search: Callable[[Graph, Sequence[Asked], float], tuple[Laid, ...] | None]


def best(graph: Graph, asked: Asked, limit: float = math.inf) -> Laid | None:
    """The best layout over one axis: rows or tensors are split, under ZeRO's least stage that fits.

    None where nothing fits in so many bytes.
    """
    menu = [replace(asked, mode="tensors")]
    menu += [replace(asked, mode="rows", zero=stage) for stage in STAGES]
    found = (laid(graph, one, limit) for one in menu)
    return min((one for one in found if one), key=lambda one: one.seconds, default=None)


def laid(graph: Graph, asked: Asked, limit: float = math.inf) -> Laid | None:
    """The best layout of what is asked."""
    placed = Placed(graph, asked)
    solution = solve(placed.problem, limit)
    return None if solution is None else Laid(placed, solution)


def alpa(graph: Graph, axes: Sequence[Asked], limit: float = math.inf) -> tuple[Laid, ...] | None:
    """The operators' layouts over one axis by an exact solver (Alpa's integer programme)."""
    (asked,) = axes
    found = best(graph, asked, limit)
    return None if found is None else (found,)


def tofu(graph: Graph, axes: Sequence[Asked], limit: float = math.inf) -> tuple[Laid, ...] | None:
    """One axis after the other, each of two ranks: the best for what is left of every tensor."""
    done: list[Laid] = []
    for k, asked in enumerate(axes):
        rest = limit * math.prod(one.ranks for one in axes[k + 1 :])
        found = best(graph, asked, rest)
        if found is None:
            return None
        done.append(found)
        graph = cut(graph, found)
    return tuple(done)


def mesh_tensorflow(
    graph: Graph, axes: Sequence[Asked], limit: float = math.inf
) -> tuple[Laid, ...] | None:
    """One name of dims for the axis, split wherever it occurs: the best of all names."""
    (asked,) = axes
    menu = [replace(asked, name=name) for name in names(graph) if name not in graph.rows]
    menu.append(replace(asked, mode="rows"))
    found = (laid(graph, one, limit) for one in menu)
    one = min((one for one in found if one), key=lambda one: one.seconds, default=None)
    return None if one is None else (one,)


def names(graph: Graph) -> list[Dim]:
    """The names of dims of activations that some node may split."""
    found: dict[Dim, None] = {}
    for at, node in enumerate(graph.nodes):
        for way in node.step.ways:
            dims = ((graph.result(at, k), d) for k, d in enumerate(way.outputs) if d >= 0)
            found.update(dict.fromkeys(graph.name(*one) for one in dims))
    return list(found)


def cut(graph: Graph, done: Laid) -> Graph:
    """The rest of a graph on one rank of an axis: smaller tensors, fewer operations."""
    placed, ranks = done.placed, done.placed.asked.ranks
    by_rows = placed.asked.mode == "rows"
    values, nodes, slices = dict(graph.values), list(graph.nodes), dict(graph.slices)
    held = {
        name: menu[done.solution.choice[placed.numbers[name]]]
        for name, menu in placed.parameters.items()
    }
    for at, node in enumerate(graph.nodes):
        option = placed.options[at][done.solution.choice[at]]
        if option.split and not by_rows:
            step = replace(node.step, flops=node.step.flops / ranks)
            nodes[at] = replace(node, step=step)
        for k, dim in enumerate(option.outputs if not by_rows else ()):
            held[graph.result(at, k)] = dim
    for name, dim in held.items():
        one = values[name]
        if dim in (ZERO1, ZERO3):
            own, beside = slices.get(name, (1.0, 1.0))
            slices[name] = own / (ranks if dim == ZERO3 else 1), beside / ranks
        if dim >= 0:
            size = math.ceil(one.shape[dim] / ranks)
            values[name] = replace(one, shape=(*one.shape[:dim], size, *one.shape[dim + 1 :]))
    scale = graph.scale / ranks if by_rows else graph.scale
    return Graph(nodes, list(graph.edges), values, dict(graph.counts), scale, slices)


PLANNERS: Mapping[str, Named] = MappingProxyType(
    {
        "Alpa": Named("Zheng et al. 2022, intra-operator parallelism", alpa),
        "Tofu": Named("Wang, Huang & Li 2019, recursive two-way partition", tofu),
        "Mesh-TensorFlow": Named("Shazeer et al. 2018, dims of one name", mesh_tensorflow),
    }
)
