"""Layouts of a model's operators, found for all axes of a mesh at once, as rows of a schedule.

The solver's choice is tried on the model like any other rows.  An option that the language refuses
is banned, and the next best is solved for.  So the graph may allow more than is legal, while the
written rows are legal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from schedlang.ir.placement import R, S
from schedlang.ir.primitive import Facet
from schedlang.language import lift, printer
from schedlang.language import nodes as n
from schedlang.language.syntax import parse
from schedlang.passes.autoshard.propose import FORWARD, padding_rows
from schedlang.passes.complete.proposed_rows import (
    ProposedRow,
    fold_statements,
    make_call,
    make_schedule_file,
    make_step,
    precision_step,
)
from schedlang.passes.complete.tensor_rows import RowFinder
from schedlang.passes.planner.operators.fixed_rows import FixedRows
from schedlang.passes.planner.operators.layout_requests import (
    ENTERED,
    PARTIAL,
    UNSPLIT,
    LayoutRequest,
    NodeLayout,
)
from schedlang.passes.planner.operators.operator_graph import build_graph
from schedlang.passes.planner.operators.paper_planners import BestLayout, combine_requests
from schedlang.passes.planner.operators.placements import AxisPlacement, MeshPlacement
from schedlang.passes.planner.operators.solver import Solution, Solver, solve
from schedlang.passes.planner.operators.unity import (
    SubstitutionPrice,
    find_substitutions,
    search_substitutions,
)

if TYPE_CHECKING:
    from schedlang.diagnostics.source import Source
    from schedlang.passes.complete.proposed_rows import RowTrial
    from schedlang.passes.planner.operators.operator_graph import Edge, Graph

PROOF = make_call("verify", "train", steps=2)
MAX_TRIES = 8  # number of solutions that are tried


@dataclass(frozen=True)
class AxisLayout:
    """The layout of one axis: its part of the solution, and its rows.

    The solution's seconds and bytes are those of all axes.

    refused     reasons of refused options, which are banned
    first_rows  rows of substitutions, of all axes
    """

    axis: str
    placed: AxisPlacement
    solution: Solution
    rows: tuple[ProposedRow, ...]
    refused: tuple[str, ...] = ()
    first_rows: tuple[ProposedRow, ...] = ()

    @property
    def splits_rows(self) -> bool:
        """Whether the axis splits the batch."""
        return self.placed.asked.mode == "rows"

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.solution.seconds


def find_axis_layout(
    trial: RowTrial, graph: Graph, axis: str, request: LayoutRequest, limit: float = math.inf
) -> AxisLayout | None:
    """Find the best legal layout of a graph over one axis within `limit` bytes; None where none
    exists.

    Tries activations with and without a split along the sequence, and returns the quicker legal
    one.
    """
    layouts = _quickest(trial, _joints(graph, [(request,)]), (axis,), limit, FixedRows())
    return layouts[0] if layouts else None


def find_legal_layouts(
    trial: RowTrial,
    axes: Mapping[str, LayoutRequest],
    limit: float = math.inf,
    given: FixedRows | None = None,
    refusals: list[str] | None = None,
    graph: Graph | None = None,
    substituted: bool = False,
    rows: bool | None = None,
    solver: Solver = solve,
) -> tuple[AxisLayout, ...] | None:
    """Find a legal layout over all axes at once, beside existing rows (`given`).

    Appends refusals to `refusals`; `graph` is the model's graph, if known.  `rows` says whether an
    axis must split rows (True) or may not (False); None for whatever is quicker.

    Every axis splits tensors or rows, whichever is quicker and fits, rows at the smallest stage of
    ZeRO that fits; at most one axis splits rows, and its row is the last.  With `substituted`
    operators are chosen as well, as in Unity; another `solver` chooses layouts alone.  None where
    nothing fits in `limit` bytes.
    """
    given, graph = given or FixedRows(), graph or build_graph(trial)
    menu = combine_requests([given.requests(axis, request) for axis, request in axes.items()])
    split = ((requests, any(part.mode == "rows" for part in requests)) for requests in menu)
    joints = _joints(graph, [requests for requests, by_rows in split if rows in (None, by_rows)])
    if not joints:
        return None
    if not substituted:
        return _quickest(trial, joints, tuple(axes), limit, given, refusals, solver)
    rules = find_substitutions(trial, graph)
    price = SubstitutionPrice(joints, rules, limit)
    for _, state in search_substitutions(rules, price)[:MAX_TRIES]:
        first_rows = tuple(rules[k].row for k in sorted(state, key=lambda k: rules[k].recompute))
        base = replace(given, first_rows=first_rows)
        layouts = _quickest(trial, price.problems_after(state), tuple(axes), limit, base, refusals)
        if layouts is not None:
            return tuple(replace(part, first_rows=first_rows) for part in layouts)
    return None


def _joints(graph: Graph, menu: Iterable[tuple[LayoutRequest, ...]]) -> list[MeshPlacement]:
    """Build the problems: with and without activations split along the sequence."""
    combos = list(menu)
    for group in list(combos):
        if any(req.mode == "tensors" and req.tokens and req.name is None for req in group):
            combos.append(tuple(replace(req, tokens=False) for req in group))
    return [MeshPlacement(tuple(AxisPlacement(graph, req) for req in group)) for group in combos]


def _quickest(
    trial: RowTrial,
    joints: Sequence[MeshPlacement],
    axes: tuple[str, ...],
    limit: float,
    fixed: FixedRows,
    refusals: list[str] | None = None,
    solver: Solver = solve,
) -> tuple[AxisLayout, ...] | None:
    """Return the quickest legal layout of several problems: the most promising are tried first."""
    solved = ((joint, solver(joint.problem, limit)) for joint in joints)
    bounds = [BestLayout(joint, item, joint.problem, solver) for joint, item in solved if item]
    best: tuple[AxisLayout, ...] | None = None
    for bound in sorted(bounds, key=lambda item: item.seconds):
        if best is not None and bound.seconds >= best[0].seconds:
            break
        refused: list[str] = []
        layouts = _legal(trial, bound, axes, limit, fixed, refused)
        if refusals is not None:
            refusals += refused
        if layouts is not None and (best is None or layouts[0].seconds < best[0].seconds):
            best = layouts
    return best


def _legal(
    trial: RowTrial,
    layout: BestLayout | None,
    axes: tuple[str, ...],
    limit: float,
    fixed: FixedRows,
    refused: list[str],
) -> tuple[AxisLayout, ...] | None:
    """Return the best layout that the language accepts: a refused option is banned, the next best
    tried."""
    for _ in range(MAX_TRIES):
        if layout is None:
            return None
        joint, solution = layout.joint, layout.solution
        outcome = _tried(trial, layout, axes, fixed)
        if isinstance(outcome, dict):
            reasons = tuple(refused)
            parts = [
                AxisLayout(
                    axis,
                    part,
                    replace(solution, choice=joint.choice_on_axis(solution.choice, k)),
                    outcome[axis],
                    reasons,
                )
                for k, (axis, part) in enumerate(zip(axes, joint.axes))
            ]
            return tuple(parts)
        if isinstance(outcome, int):  # all ranks of this axis would do the same work
            layout = _busy(layout, outcome, limit)
            continue
        reason, axis, blamed, by_itself = outcome
        refused.append(reason)
        if not blamed:
            return None
        layout = _without(layout, limit, blamed, [axis] if by_itself else range(len(axes)))
    return None


def _without(
    layout: BestLayout, limit: float, blamed: Iterable[int], axes: Sequence[int]
) -> BestLayout | None:
    """Return the best layout without an option of some nodes on axes, banned for all nodes of the
    module."""
    nodes, options = layout.joint.graph.nodes, layout.joint.options

    def way(i: int, k: int) -> tuple[str, list[NodeLayout]]:
        return nodes[i].site, [options[i][k][axis] for axis in axes]

    bans = [way(i, layout.solution.choice[i]) for i in blamed]
    banned = ([way(i, k) in bans for k in range(len(menu))] for i, menu in enumerate(options))
    return _masked(layout, limit, dict(enumerate(banned)))


def _masked(
    layout: BestLayout, limit: float, banned: Mapping[int, Sequence[bool]]
) -> BestLayout | None:
    """Return the best layout without some options of nodes."""
    seconds = list(layout.problem.seconds)
    for index, mask in banned.items():
        seconds[index] = np.where(mask, np.inf, seconds[index])
    problem = replace(layout.problem, seconds=tuple(seconds))
    solution = layout.solver(problem, limit)
    return None if solution is None else BestLayout(layout.joint, solution, problem, layout.solver)


def _busy(layout: BestLayout, axis: int, limit: float) -> BestLayout | None:
    """Return the best layout in which an axis splits at least one module."""
    best: BestLayout | None = None
    for index, node in enumerate(layout.joint.graph.nodes):
        if node.step.module and len(layout.joint.axes[axis].options[index]) > 1:
            idle = [not option[axis].split for option in layout.joint.options[index]]
            masked = _masked(layout, limit, {index: idle})
            if masked is not None and (best is None or masked.seconds < best.seconds):
                best = masked
    return best


RefusedRows = tuple[str, int, Sequence[int], bool]


def _tried(
    trial: RowTrial, best: BestLayout, axes: tuple[str, ...], fixed: FixedRows
) -> dict[str, tuple[ProposedRow, ...]] | RefusedRows | int:
    """Return the legal rows of each axis; or why they are refused; or the number of an idle axis.

    A refusal has its reason, the axis, the nodes to blame, and whether these rows are refused by
    themselves.
    """
    sizes = {axis: part.asked.ranks for axis, part in zip(axes, best.joint.axes)}
    axis_rows: dict[str, tuple[ProposedRow, ...]] = {}
    before: list[ProposedRow] = [*fixed.first_rows]
    for k in sorted(range(len(axes)), key=lambda k: best.joint.axes[k].asked.mode == "rows"):
        axis, part = axes[k], best.joint.axes[k]
        solved = replace(best.solution, choice=best.joint.choice_on_axis(best.solution.choice, k))
        existing = fixed.rows_along(axis)
        modules = {name for row in existing for name in row.names}
        zero = any(row.changes_facet(Facet.STATE) for row in existing)
        rows = [
            (index, row)
            for index, row in _rows(part, solved, axis)
            if not modules & {*row.names} and not (zero and row.changes_facet(Facet.STATE))
        ]
        trial_axes = {other_axis: sizes[other_axis] for other_axis in (*axis_rows, axis)}
        finder = RowFinder(trial.with_axes(trial_axes), axis, sizes[axis], [*before, *existing], [])
        vocab_modules = [row.names[0] for _, row in rows if row.style == "vocab"]
        rows = [*((-1, pad) for pad in padding_rows(finder, vocab_modules)), *rows]
        repaired = finder.repair_rows([row for _, row in rows])
        if isinstance(repaired, str):
            blamed = _blamed(rows, finder.blamed_row)
            bare = RowFinder(trial, axis, sizes[axis], [*fixed.first_rows, *existing], [])
            by_itself = before == [*fixed.first_rows] or isinstance(
                bare.repair_rows([row for _, row in rows]), str
            )
            return repaired, k, blamed, by_itself
        if not (repaired or existing):
            return k
        axis_rows[axis] = tuple(repaired)
        before += [*existing, *repaired]
    return axis_rows


def _blamed(rows: Sequence[tuple[int, ProposedRow]], position: int) -> Sequence[int]:
    """Return the node whose row a refusal names; if it names none, the nodes that split tokens."""
    if 0 <= position < len(rows) and rows[position][0] >= 0:
        return [rows[position][0]]
    return [node for node, row in rows if node >= 0 and row.argument("input") is not None]


def _rows(
    placed: AxisPlacement, solution: Solution, axis: str
) -> Iterator[tuple[int, ProposedRow]]:
    """Yield the rows of a solution, each with its node: -1 for a row of a block."""
    graph = placed.graph
    read = _readers(placed, solution)
    yield from _entries(placed, solution, axis)
    sites: set[str] = set()
    for index, node in enumerate(graph.nodes):
        option = placed.options[index][solution.choice[index]]
        if node.step.module and node.site not in sites:
            row = _row(graph, index, option, read.get(index, []), axis)
            if row is not None:
                sites.add(node.site)
                yield index, row
    if placed.asked.mode == "rows":  # after the rows of experts
        yield -1, ProposedRow((), make_call("zero", stage=placed.asked.zero, over=axis))


def _readers(placed: AxisPlacement, solution: Solution) -> dict[int, list[tuple[Edge, int]]]:
    """Return the edges out of each node, with the layout that their target reads."""
    readers: dict[int, list[tuple[Edge, int]]] = {}
    for edge in placed.graph.edges:
        layout = placed.options[edge.target][solution.choice[edge.target]].inputs[edge.input_index]
        readers.setdefault(edge.source[0], []).append((edge, layout))
    return readers


def _entries(
    placed: AxisPlacement, solution: Solution, axis: str
) -> Iterator[tuple[int, ProposedRow]]:
    """Yield a row for the first block, where its input is split along the sequence."""
    graph = placed.graph
    for name, pairs in placed.shared.items():
        produced, split = pairs[solution.choice[placed.variable_index[name]]]
        node = int(next(e.source[0] for e in graph.edges if e.value == name))
        inside = {
            graph.nodes[edge.target].site
            for edge in graph.edges
            if edge.value == name and "*" in graph.nodes[edge.target].site
        }
        if produced < 0 <= split and inside and "*" not in graph.nodes[node].site:
            head = min(inside).partition("*")[0]
            yield (
                -1,
                ProposedRow(
                    (f"{head}0",), make_call("shard", input=_dim(graph, node, split), over=axis)
                ),
            )


def _row(
    graph: Graph, index: int, option: NodeLayout, readers: Sequence[tuple[Edge, int]], axis: str
) -> ProposedRow | None:
    """Return the row of one module, if it is split."""
    node, x, out = graph.nodes[index], option.inputs[0], option.outputs[0]
    read_layouts = {layout for _, layout in readers}
    gathered = out >= 0 and read_layouts <= {UNSPLIT, ENTERED} and bool(read_layouts)
    if not option.split:
        return None
    if node.step.module == "experts":
        spread = option.inputs[-1] == 0
        return (
            ProposedRow((node.site,), make_call("expert_parallel", over=axis)) if spread else None
        )
    if x >= 0 and out == x:
        if graph.dim_name(graph.inputs_of(index)[0], x) in graph.row_dims:
            return None
        leaves_block = gathered and any("*" not in graph.nodes[e.target].site for e, _ in readers)
        after = R if leaves_block else _dim(graph, index, out)
        before = _dim(graph, index, x)
        return ProposedRow((node.site,), make_call("shard", input=before, output=after, over=axis))
    if out == PARTIAL:
        style = "vocab" if node.step.module == "table" else "row"
        row = ProposedRow((node.site,), make_call("shard", style, over=axis))
        split = next((layout for layout in read_layouts if layout >= 0), None)
        inside = "*" in node.site
        return (
            row.with_argument("output", _dim(graph, index, split))
            if split is not None and inside
            else row
        )
    if node.step.module == "table":
        row = ProposedRow((node.site,), make_call("shard", weight=S("hidden"), over=axis))
    elif node.site in graph.vocabulary_weights and not gathered:
        row = ProposedRow((node.site,), make_call("shard", "vocab", over=axis))
    else:
        row = ProposedRow((node.site,), make_call("shard", "col", over=axis))
    return row.with_argument("output", R) if gathered else row


def _dim(graph: Graph, index: int, dim: int) -> S:
    """Return a dim of an activation, by its name if the language has one."""
    name = graph.result_name(index, 0)
    token = graph.dim_name(name, dim) in graph.token_dims and len(graph.values[name].shape) == 3
    return S("seq") if token and dim == 1 else S(dim)


def _statements(layout: AxisLayout, trial: RowTrial) -> tuple[n.Stmt, ...]:
    """List the rows of an axis: rows of modules, then rows of the full model."""
    named_rows = [row for row in layout.rows if row.names]
    return *fold_statements(named_rows, trial.full_blocks), *(
        row.at_paths() for row in layout.rows if not row.names
    )


def _steps(
    parts: Sequence[AxisLayout], trial: RowTrial, dtype: str = "", relax: str = ""
) -> list[n.Step]:
    """Make a step of each axis; the axis that splits rows is the last, and has the proof.

    `relax` is the word that this axis gives up.
    """
    steps: list[n.Step] = []
    if parts[0].first_rows:
        steps.append(
            make_step("operators", fold_statements(parts[0].first_rows, trial.full_blocks), FORWARD)
        )
    if dtype:
        steps.append(precision_step(dtype, trial.full_blocks, FORWARD))
    axes = sorted((part for part in parts if part.rows), key=lambda part: part.splits_rows)
    axis_steps = [
        (f"over {part.axis}", _statements(part, trial), relax * part.splits_rows) for part in axes
    ] or [("whole", (), "")]
    for name, rows, relaxed in axis_steps:
        proof = PROOF if name == axis_steps[-1][0] else None
        steps.append(make_step(name, rows, proof, relaxed))
    return steps


def insert_rows(source: Source, layouts: Sequence[AxisLayout], trial: RowTrial) -> n.File:
    """Insert rows into a schedule, at the beginning of its first step, so that all steps prove
    them.

    Rows that split the batch become the last step.
    """
    file = printer.with_printed_spans(parse(source), source.name)
    first_step = next((entry for entry in file.items if isinstance(entry, n.Step)), None)
    if first_step is None:
        items = (*file.items, *_steps(layouts, trial))
    else:
        split = [entry for entry in layouts if entry.splits_rows and entry.rows]
        rows = [row for entry in layouts if entry not in split for row in _statements(entry, trial)]
        body = (*rows, *first_step.block.body)
        extended = replace(first_step, block=replace(first_step.block, body=body))
        last = _steps(split, trial) if split else ()
        items = (*(extended if entry is first_step else entry for entry in file.items), *last)
    return printer.with_printed_spans(replace(file, items=items), source.name)


def layout_schedule(
    name: str,
    mesh: Mapping[str, int],
    layouts: Sequence[AxisLayout],
    trial: RowTrial,
    dtype: str = "",
    relax: str = "",
) -> n.File:
    """Write a schedule of these rows alone, which computes in `dtype`.

    A step that splits rows gives up the word `relax`.
    """
    return make_schedule_file(
        "layouts.sched", name, lift.mesh(mesh), _steps(layouts, trial, dtype, relax)
    )
