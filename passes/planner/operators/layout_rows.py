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
    trial: RowTrial, graph: Graph, axis: str, asked: LayoutRequest, limit: float = math.inf
) -> AxisLayout | None:
    """Find the best legal layout of a graph over one axis within `limit` bytes; None where none
    exists.

    Tries activations with and without a split along the sequence, and returns the quicker legal
    one.
    """
    found = _quickest(trial, _joints(graph, [(asked,)]), (axis,), limit, FixedRows())
    return found[0] if found else None


def find_legal_layouts(
    trial: RowTrial,
    axes: Mapping[str, LayoutRequest],
    limit: float = math.inf,
    given: FixedRows | None = None,
    said: list[str] | None = None,
    graph: Graph | None = None,
    substituted: bool = False,
    rows: bool | None = None,
    solver: Solver = solve,
) -> tuple[AxisLayout, ...] | None:
    """Find a legal layout over all axes at once, beside existing rows (`given`).

    Appends refusals to `said`; `graph` is the model's graph, if known.  `rows` says whether an axis
    must split rows (True) or may not (False); None for whatever is quicker.

    Every axis splits tensors or rows, whichever is quicker and fits, rows at the smallest stage of
    ZeRO that fits; at most one axis splits rows, and its row is the last.  With `substituted`
    operators are chosen as well, as in Unity; another `solver` chooses layouts alone.  None where
    nothing fits in `limit` bytes.
    """
    given, graph = given or FixedRows(), graph or build_graph(trial)
    menu = combine_requests([given.requests(axis, asked) for axis, asked in axes.items()])
    split = ((several, any(one.mode == "rows" for one in several)) for several in menu)
    joints = _joints(graph, [several for several, own in split if rows in (None, own)])
    if not joints:
        return None
    if not substituted:
        return _quickest(trial, joints, tuple(axes), limit, given, said, solver)
    rules = find_substitutions(trial, graph)
    price = SubstitutionPrice(joints, rules, limit)
    for _, state in search_substitutions(rules, price)[:MAX_TRIES]:
        above = tuple(rules[k].row for k in sorted(state, key=lambda k: rules[k].recompute))
        beside = replace(given, first_rows=above)
        found = _quickest(trial, price.problems_after(state), tuple(axes), limit, beside, said)
        if found is not None:
            return tuple(replace(one, first_rows=above) for one in found)
    return None


def _joints(graph: Graph, menu: Iterable[tuple[LayoutRequest, ...]]) -> list[MeshPlacement]:
    """Build the problems: with and without activations split along the sequence."""
    every = list(menu)
    for several in list(every):
        if any(one.mode == "tensors" and one.tokens and one.name is None for one in several):
            every.append(tuple(replace(one, tokens=False) for one in several))
    return [MeshPlacement(tuple(AxisPlacement(graph, one) for one in several)) for several in every]


def _quickest(
    trial: RowTrial,
    joints: Sequence[MeshPlacement],
    axes: tuple[str, ...],
    limit: float,
    given: FixedRows,
    said: list[str] | None = None,
    solver: Solver = solve,
) -> tuple[AxisLayout, ...] | None:
    """Return the quickest legal layout of several problems: the most promising are tried first."""
    solved = ((joint, solver(joint.problem, limit)) for joint in joints)
    bounds = [BestLayout(joint, one, joint.problem, solver) for joint, one in solved if one]
    best: tuple[AxisLayout, ...] | None = None
    for bound in sorted(bounds, key=lambda one: one.seconds):
        if best is not None and bound.seconds >= best[0].seconds:
            break
        refused: list[str] = []
        found = _legal(trial, bound, axes, limit, given, refused)
        if said is not None:
            said += refused
        if found is not None and (best is None or found[0].seconds < best[0].seconds):
            best = found
    return best


def _legal(
    trial: RowTrial,
    found: BestLayout | None,
    axes: tuple[str, ...],
    limit: float,
    given: FixedRows,
    refused: list[str],
) -> tuple[AxisLayout, ...] | None:
    """Return the best layout that the language accepts: a refused option is banned, the next best
    tried."""
    for _ in range(MAX_TRIES):
        if found is None:
            return None
        joint, solution = found.joint, found.solution
        made = _tried(trial, found, axes, given)
        if isinstance(made, dict):
            reasons = tuple(refused)
            parts = [
                AxisLayout(
                    axis,
                    part,
                    replace(solution, choice=joint.choice_on_axis(solution.choice, k)),
                    made[axis],
                    reasons,
                )
                for k, (axis, part) in enumerate(zip(axes, joint.axes))
            ]
            return tuple(parts)
        if isinstance(made, int):  # all ranks of this axis would do the same work
            found = _busy(found, made, limit)
            continue
        why, axis, blamed, alone = made
        refused.append(why)
        if not blamed:
            return None
        found = _without(found, limit, blamed, [axis] if alone else range(len(axes)))
    return None


def _without(
    found: BestLayout, limit: float, blamed: Iterable[int], axes: Sequence[int]
) -> BestLayout | None:
    """Return the best layout without an option of some nodes on axes, banned for all nodes of the
    module."""
    nodes, options = found.joint.graph.nodes, found.joint.options

    def way(at: int, k: int) -> tuple[str, list[NodeLayout]]:
        return nodes[at].site, [options[at][k][axis] for axis in axes]

    bans = [way(at, found.solution.choice[at]) for at in blamed]
    banned = ([way(at, k) in bans for k in range(len(one))] for at, one in enumerate(options))
    return _masked(found, limit, dict(enumerate(banned)))


def _masked(
    found: BestLayout, limit: float, banned: Mapping[int, Sequence[bool]]
) -> BestLayout | None:
    """Return the best layout without some options of nodes."""
    seconds = list(found.problem.seconds)
    for at, gone in banned.items():
        seconds[at] = np.where(gone, np.inf, seconds[at])
    problem = replace(found.problem, seconds=tuple(seconds))
    solution = found.solver(problem, limit)
    return None if solution is None else BestLayout(found.joint, solution, problem, found.solver)


def _busy(found: BestLayout, axis: int, limit: float) -> BestLayout | None:
    """Return the best layout in which an axis splits at least one module."""
    best: BestLayout | None = None
    for at, node in enumerate(found.joint.graph.nodes):
        if node.step.module and len(found.joint.axes[axis].options[at]) > 1:
            idle = [not one[axis].split for one in found.joint.options[at]]
            made = _masked(found, limit, {at: idle})
            if made is not None and (best is None or made.seconds < best.seconds):
                best = made
    return best


RefusedRows = tuple[str, int, Sequence[int], bool]


def _tried(
    trial: RowTrial, found: BestLayout, axes: tuple[str, ...], given: FixedRows
) -> dict[str, tuple[ProposedRow, ...]] | RefusedRows | int:
    """Return the legal rows of each axis; or why they are refused; or the number of an idle axis.

    A refusal has its reason, the axis, the nodes to blame, and whether these rows are refused by
    themselves.
    """
    sizes = {axis: part.asked.ranks for axis, part in zip(axes, found.joint.axes)}
    made: dict[str, tuple[ProposedRow, ...]] = {}
    above: list[ProposedRow] = [*given.first_rows]
    for k in sorted(range(len(axes)), key=lambda k: found.joint.axes[k].asked.mode == "rows"):
        axis, part = axes[k], found.joint.axes[k]
        mine = replace(found.solution, choice=found.joint.choice_on_axis(found.solution.choice, k))
        own = given.rows_along(axis)
        named = {name for row in own for name in row.names}
        zero = any(row.changes_facet(Facet.STATE) for row in own)
        rows = [
            (at, row)
            for at, row in _rows(part, mine, axis)
            if not named & {*row.names} and not (zero and row.changes_facet(Facet.STATE))
        ]
        beside = {other: sizes[other] for other in (*made, axis)}
        finder = RowFinder(trial.with_axes(beside), axis, sizes[axis], [*above, *own], [])
        words = [row.names[0] for _, row in rows if row.style == "vocab"]
        rows = [*((-1, pad) for pad in padding_rows(finder, words)), *rows]
        legal = finder.repair_rows([row for _, row in rows])
        if isinstance(legal, str):
            blamed = _blamed(rows, finder.blamed_row)
            bare = RowFinder(trial, axis, sizes[axis], [*given.first_rows, *own], [])
            alone = above == [*given.first_rows] or isinstance(
                bare.repair_rows([row for _, row in rows]), str
            )
            return legal, k, blamed, alone
        if not (legal or own):
            return k
        made[axis] = tuple(legal)
        above += [*own, *legal]
    return made


def _blamed(rows: Sequence[tuple[int, ProposedRow]], place: int) -> Sequence[int]:
    """Return the node whose row a refusal names; if it names none, the nodes that split tokens."""
    if 0 <= place < len(rows) and rows[place][0] >= 0:
        return [rows[place][0]]
    return [at for at, row in rows if at >= 0 and row.argument("input") is not None]


def _rows(
    placed: AxisPlacement, solution: Solution, axis: str
) -> Iterator[tuple[int, ProposedRow]]:
    """Yield the rows of a solution, each with its node: -1 for a row of a block."""
    graph = placed.graph
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
    if placed.asked.mode == "rows":  # after the rows of experts
        yield -1, ProposedRow((), make_call("zero", stage=placed.asked.zero, over=axis))


def _readers(placed: AxisPlacement, solution: Solution) -> dict[int, list[tuple[Edge, int]]]:
    """Return the edges out of each node, with the layout that their target reads."""
    found: dict[int, list[tuple[Edge, int]]] = {}
    for edge in placed.graph.edges:
        wanted = placed.options[edge.target][solution.choice[edge.target]].inputs[edge.input_index]
        found.setdefault(edge.source[0], []).append((edge, wanted))
    return found


def _entries(
    placed: AxisPlacement, solution: Solution, axis: str
) -> Iterator[tuple[int, ProposedRow]]:
    """Yield a row for the first block, where its input is split along the sequence."""
    graph = placed.graph
    for name, pairs in placed.shared.items():
        given, handed = pairs[solution.choice[placed.variable_index[name]]]
        node = int(next(e.source[0] for e in graph.edges if e.value == name))
        inside = {
            graph.nodes[edge.target].site
            for edge in graph.edges
            if edge.value == name and "*" in graph.nodes[edge.target].site
        }
        if given < 0 <= handed and inside and "*" not in graph.nodes[node].site:
            head = min(inside).partition("*")[0]
            yield (
                -1,
                ProposedRow(
                    (f"{head}0",), make_call("shard", input=_dim(graph, node, handed), over=axis)
                ),
            )


def _row(
    graph: Graph, at: int, option: NodeLayout, readers: Sequence[tuple[Edge, int]], axis: str
) -> ProposedRow | None:
    """Return the row of one module, if it is split."""
    node, x, out = graph.nodes[at], option.inputs[0], option.outputs[0]
    wanted = {layout for _, layout in readers}
    gathered = out >= 0 and wanted <= {UNSPLIT, ENTERED} and bool(wanted)
    if not option.split:
        return None
    if node.step.module == "experts":
        spread = option.inputs[-1] == 0
        return (
            ProposedRow((node.site,), make_call("expert_parallel", over=axis)) if spread else None
        )
    if x >= 0 and out == x:
        if graph.dim_name(graph.inputs_of(at)[0], x) in graph.row_dims:
            return None
        whole = gathered and any("*" not in graph.nodes[e.target].site for e, _ in readers)
        there = R if whole else _dim(graph, at, out)
        given = _dim(graph, at, x)
        return ProposedRow((node.site,), make_call("shard", input=given, output=there, over=axis))
    if out == PARTIAL:
        style = "vocab" if node.step.module == "table" else "row"
        made = ProposedRow((node.site,), make_call("shard", style, over=axis))
        split = next((layout for layout in wanted if layout >= 0), None)
        inside = "*" in node.site
        return (
            made.with_argument("output", _dim(graph, at, split))
            if split is not None and inside
            else made
        )
    if node.step.module == "table":
        made = ProposedRow((node.site,), make_call("shard", weight=S("hidden"), over=axis))
    elif node.site in graph.vocabulary_weights and not gathered:
        made = ProposedRow((node.site,), make_call("shard", "vocab", over=axis))
    else:
        made = ProposedRow((node.site,), make_call("shard", "col", over=axis))
    return made.with_argument("output", R) if gathered else made


def _dim(graph: Graph, at: int, dim: int) -> S:
    """Return a dim of an activation, by its name if the language has one."""
    made = graph.result_name(at, 0)
    token = graph.dim_name(made, dim) in graph.token_dims and len(graph.values[made].shape) == 3
    return S("seq") if token and dim == 1 else S(dim)


def _statements(one: AxisLayout, trial: RowTrial) -> tuple[n.Stmt, ...]:
    """List the rows of an axis: rows of modules, then rows of the full model."""
    named = [row for row in one.rows if row.names]
    return *fold_statements(named, trial.full_blocks), *(
        row.at_paths() for row in one.rows if not row.names
    )


def _steps(
    found: Sequence[AxisLayout], trial: RowTrial, dtype: str = "", relax: str = ""
) -> list[n.Step]:
    """Make a step of each axis; the axis that splits rows is the last, and has the proof.

    `relax` is the word that this axis gives up.
    """
    steps: list[n.Step] = []
    if found[0].first_rows:
        steps.append(
            make_step("operators", fold_statements(found[0].first_rows, trial.full_blocks), FORWARD)
        )
    if dtype:
        steps.append(precision_step(dtype, FORWARD))
    axes = sorted((one for one in found if one.rows), key=lambda one: one.splits_rows)
    named = [
        (f"over {one.axis}", _statements(one, trial), relax * one.splits_rows) for one in axes
    ] or [("whole", (), "")]
    for name, rows, gives in named:
        proof = PROOF if name == named[-1][0] else None
        steps.append(make_step(name, rows, proof, gives))
    return steps


def insert_rows(source: Source, found: Sequence[AxisLayout], trial: RowTrial) -> n.File:
    """Insert rows into a schedule, at the beginning of its first step, so that all steps prove
    them.

    Rows that split the batch become the last step.
    """
    file = printer.with_printed_spans(parse(source), source.name)
    begun = next((one for one in file.items if isinstance(one, n.Step)), None)
    if begun is None:
        items = (*file.items, *_steps(found, trial))
    else:
        split = [one for one in found if one.splits_rows and one.rows]
        first = [row for one in found if one not in split for row in _statements(one, trial)]
        body = (*first, *begun.block.body)
        more = replace(begun, block=replace(begun.block, body=body))
        last = _steps(split, trial) if split else ()
        items = (*(more if one is begun else one for one in file.items), *last)
    return printer.with_printed_spans(replace(file, items=items), source.name)


def layout_schedule(
    name: str,
    mesh: Mapping[str, int],
    found: Sequence[AxisLayout],
    trial: RowTrial,
    dtype: str = "",
    relax: str = "",
) -> n.File:
    """Write a schedule of these rows alone, which computes in `dtype`.

    A step that splits rows gives up the word `relax`.
    """
    return make_schedule_file(
        "layouts.sched", name, lift.mesh(mesh), _steps(found, trial, dtype, relax)
    )
