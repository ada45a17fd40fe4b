"""Layouts of a model's operators, found for each axis of a mesh, as rows of the language.

What the solver chooses is tried on the model as any other rows are; an option that the language
refuses is banned, and the next best is looked for.  So the graph may believe in more than is legal,
and what is written is legal nevertheless.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedlang.diagnostics.source import Source
from schedlang.ir.placement import R, S
from schedlang.language import printer
from schedlang.passes.autoshard.propose import pads_of
from schedlang.passes.complete.proposal import Row, call, mesh_text, rows_text
from schedlang.passes.complete.tensor_rows import Finder
from schedlang.passes.planner.operators.placements import ENTERED, SUM, WHOLE, Asked, Option, Placed
from schedlang.passes.planner.operators.solve import Solution, solve

if TYPE_CHECKING:
    from schedlang.passes.complete.proposal import Trial
    from schedlang.passes.planner.operators.graph import Edge, Graph

TRIES = 8  # options that are banned before it is given up


@dataclass(frozen=True)
class Chosen:
    """One axis: what was asked, the solution, and its rows as the language takes them.

    banned  options that were refused, with the words of the refusal
    """

    axis: str
    placed: Placed
    solution: Solution
    rows: tuple[Row, ...]
    refused: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of a step over this axis alone."""
        return self.solution.seconds

    def option(self, node: int) -> Option:
        """The option of a node."""
        return self.placed.options[node][self.solution.choice[node]]


def chosen(
    trial: Trial, graph: Graph, axis: str, asked: Asked, limit: float = math.inf
) -> Chosen | None:
    """The best legal layout of a graph over one axis within so many bytes; None: there is none.

    With activations split along the sequence, and without: the quicker of both that are legal.
    """
    menu = [asked]
    if asked.mode == "tensors" and asked.tokens and asked.name is None:
        menu.append(replace(asked, tokens=False))
    found = [_legal(trial, graph, axis, one, limit) for one in menu]
    return min((one for one in found if one), key=lambda one: one.seconds, default=None)


def _legal(trial: Trial, graph: Graph, axis: str, asked: Asked, limit: float) -> Chosen | None:
    """The best of what the language takes: what it refuses is banned, and the next best tried."""
    refused: list[str] = []
    finder = Finder(trial, axis, asked.ranks, [], [])
    for _ in range(TRIES):
        placed = Placed(graph, asked)
        solution = solve(placed.problem, limit)
        if solution is None:
            return None
        rows = list(_rows(placed, solution, axis))
        pads = pads_of(finder, [row.names[0] for _, row in rows if row.style == "vocab"])
        rows = [*((-1, pad) for pad in pads), *rows]
        made = finder.mended([row for _, row in rows])
        if isinstance(made, list):
            return Chosen(axis, placed, solution, tuple(made), tuple(refused))
        refused.append(made)
        blamed = _blamed(trial, rows, axis, asked.ranks)
        bans = {(graph.nodes[at].site, placed.options[at][solution.choice[at]]) for at in blamed}
        asked = replace(asked, banned=asked.banned | bans)
        if not blamed:
            return None
    return None


def _blamed(trial: Trial, rows: Sequence[tuple[int, Row]], axis: str, ranks: int) -> Sequence[int]:
    """The nodes whose rows a refusal names; of one that names none, those that split tokens."""
    found = trial.refusal([row for _, row in rows], axis, ranks)
    if found is not None and 0 <= found[1] < len(rows) and rows[found[1]][0] >= 0:
        return [rows[found[1]][0]]
    return [at for at, row in rows if at >= 0 and row.argument("input") is not None]


def _rows(placed: Placed, solution: Solution, axis: str) -> Iterator[tuple[int, Row]]:
    """The rows of a solution, each with its node: -1 where it is about a block."""
    graph = placed.graph
    if placed.asked.mode == "rows":
        yield -1, Row((), call("zero", stage=placed.asked.zero, over=axis))
    read = _readers(placed, solution)
    yield from _entries(placed, solution, axis)
    done: set[str] = set()
    for at, node in enumerate(graph.nodes):
        option = placed.options[at][solution.choice[at]]
        if node.step.module and node.site not in done:
            made = _row(graph, at, option, read.get(at, []), axis)
            if made is not None:
                done.add(node.site)
                yield at, made


def _readers(placed: Placed, solution: Solution) -> dict[int, list[tuple[Edge, int]]]:
    """The edges out of each node, with the layout that is wanted there."""
    found: dict[int, list[tuple[Edge, int]]] = {}
    for edge in placed.graph.edges:
        wanted = placed.options[edge.target][solution.choice[edge.target]].inputs[edge.place]
        found.setdefault(edge.source[0], []).append((edge, wanted))
    return found


def _entries(placed: Placed, solution: Solution, axis: str) -> Iterator[tuple[int, Row]]:
    """A row for the first block, where what enters it is split along the sequence there."""
    graph = placed.graph
    for name, pairs in placed.shared.items():
        given, handed = pairs[solution.choice[placed.numbers[name]]]
        node = int(next(e.source[0] for e in graph.edges if e.value == name))
        inside = {
            graph.nodes[edge.target].site
            for edge in graph.edges
            if edge.value == name and "*" in graph.nodes[edge.target].site
        }
        if given < 0 <= handed and inside and "*" not in graph.nodes[node].site:
            head = min(inside).partition("*")[0]
            yield -1, Row((f"{head}0",), call("shard", input=_dim(graph, node, handed), over=axis))


def _row(
    graph: Graph, at: int, option: Option, readers: Sequence[tuple[Edge, int]], axis: str
) -> Row | None:
    """The row of one module, if it is split."""
    node, x, out = graph.nodes[at], option.inputs[0], option.outputs[0]
    wanted = {layout for _, layout in readers}
    gathered = out >= 0 and wanted <= {WHOLE, ENTERED} and bool(wanted)
    if not option.split:
        return None
    if node.step.module == "experts":
        spread = option.inputs[-1] == 0
        return Row((node.site,), call("expert_parallel", over=axis)) if spread else None
    if x >= 0 and out == x:
        if graph.name(graph.given(at)[0], x) in graph.rows:
            return None
        whole = gathered and any("*" not in graph.nodes[e.target].site for e, _ in readers)
        there = R if whole else _dim(graph, at, out)
        given = _dim(graph, at, x)
        return Row((node.site,), call("shard", input=given, output=there, over=axis))
    if out == SUM:
        style = "vocab" if node.step.module == "table" else "row"
        made = Row((node.site,), call("shard", style, over=axis))
        split = next((layout for layout in wanted if layout >= 0), None)
        inside = "*" in node.site
        return (
            made.with_argument("output", _dim(graph, at, split))
            if split is not None and inside
            else made
        )
    if node.step.module == "table":
        made = Row((node.site,), call("shard", weight=S("hidden"), over=axis))
    elif node.site in graph.worded and not gathered:
        made = Row((node.site,), call("shard", "vocab", over=axis))
    else:
        made = Row((node.site,), call("shard", "col", over=axis))
    return made.with_argument("output", R) if gathered else made


def _dim(graph: Graph, at: int, dim: int) -> S:
    """A dim of an activation, by its name where the language has one."""
    made = graph.result(at, 0)
    token = graph.name(made, dim) in graph.tokens and len(graph.values[made].shape) == 3
    return S("seq") if token and dim == 1 else S(dim)


def text(name: str, mesh: Mapping[str, int], found: Sequence[Chosen], trial: Trial) -> str:
    """The text of a schedule: the rows of every axis, in a step of its own."""
    parts = [f"schedule 1 for {name}\n", f"{mesh_text(mesh)}\n"]
    for one in found:
        body = "\n".join(str(row) for row in one.rows if not row.names)
        rows = rows_text([row for row in one.rows if row.names], trial.all)
        parts.append(f'step "{one.axis}" {{\n' + "\n".join(filter(None, (rows, body))) + "\n}\n")
    return printer.fmt(Source("planned", "\n".join(parts)))
