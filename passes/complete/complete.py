"""Complete a plan: add the `shard` rows that its `complete` rows stand for.

From the projections that a row shards, data flows of the model lead to the projections that must
be sharded with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.ir.placement import R
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.language import lift
from schedlang.language import nodes as n
from schedlang.passes.complete.proposed_rows import (
    ProposedRow,
    RowTrial,
    make_call,
    names_text,
    plan_of_proposal,
)
from schedlang.passes.complete.tensor_rows import (
    Flow,
    RowFinder,
    find_flows,
    flow_variants,
    rows_of_flow,
)
from schedlang.passes.reduce_model.blocks import Blocks, blocks_of

Loss = Callable[..., Any]


@dataclass(frozen=True)
class _StartedRows:
    """The rows above `complete`, by common names of modules, and the blocks with these rows."""

    rows: Mapping[str, ProposedRow]
    places: frozenset[str]
    line: Label

    def of(self, flow: Flow) -> list[str]:
        """Return the projections of a flow that have a row."""
        return [name for name in (*flow.sources, *flow.sinks) if name in self.rows]


def complete_plan(plan: Plan, batch: Mapping[str, Any] | None, loss: Loss | None = None) -> Plan:
    """Return the plan with the rows that its `complete` rows stand for.

    Raises Refusal at the `complete` row: S426 where rows can be completed in several ways, S427
    where they cannot be completed, S605 without a batch, which the trace of the model needs.
    """
    for axis, row in [
        (completion.axis, plan.origin(completion)) for completion in plan.completions
    ]:
        assert row is not None
        if batch is None:
            raise Refusal.of(
                "S605",
                "completing rows needs a batch",
                Label(row.span),
                helps=("define `batch(seed)` in the model file",),
            )
        if plan.mesh.size(axis) > 1:
            plan = _complete_axis(plan, axis, batch, loss, row)
    return replace(plan, completions=())


def _complete_axis(
    plan: Plan, axis: str, batch: Mapping[str, Any], loss: Loss | None, row: Action
) -> Plan:
    """Return the plan with the added rows of one axis, in the order of the flows."""
    blocks = blocks_of(plan.model)
    trial = RowTrial(plan.model, blocks, batch, loss)
    row_count = len(plan.actions)
    for started in _find_started(plan, axis, blocks, row):
        done_sites = {fqn for action in plan.actions[row_count:] for fqn in action.sites}
        plan = _complete_blocks(plan, axis, trial, started, row, done_sites)
    new_rows, index = plan.actions[row_count:], plan.actions.index(row) + 1
    actions = (*plan.actions[:index], *new_rows, *plan.actions[index:row_count])
    return replace(plan, actions=actions)


def _complete_blocks(
    plan: Plan,
    axis: str,
    trial: RowTrial,
    started: _StartedRows,
    row: Action,
    done_sites: Collection[str],
) -> Plan:
    """Return the plan with the added rows of blocks that have equal rows above.

    Modules in `done_sites` have added rows already, and are skipped.
    """
    blocks = trial.blocks
    finder = RowFinder(trial, axis, plan.mesh.size(axis), _shape_rows(plan, blocks), [])
    for flow in find_flows(trial.feeds.uses, trial.blocks):
        if started.of(flow):
            _complete_flow(finder, flow, started)
    _refuse_unpaired(finder, started)
    _complete_rest(finder, started)
    initial_rows = (*started.rows.values(), *_shape_rows(plan, blocks))
    added = [added_row for added_row in finder.rows if added_row not in initial_rows]
    for action in _actions_of(plan, axis, blocks, added):
        places = ((fqn, blocks.enclosing_block(fqn)) for fqn in action.sites)
        sites = [fqn for fqn, block in places if not block or block in started.places]
        sites = [fqn for fqn in sites if fqn not in done_sites]
        plan = _add_row(plan, action, sites, row) if sites else plan
    return plan


def _placement_rows(plan: Plan, axis: str, row: Action) -> Iterator[Action]:
    """Yield the rows that set layouts along the axis, without the `complete` row."""
    for action in plan.rows_changing(Facet.PLACEMENT):
        shards = action.primitive.along == (axis,) and action.sites[0] in plan.boundaries
        if shards and action is not row:
            yield action


def _find_started(plan: Plan, axis: str, blocks: Blocks, row: Action) -> list[_StartedRows]:
    """Return the rows above, grouped by blocks of a list with equal rows; S425 without rows."""
    rows_by_block: dict[str, dict[str, ProposedRow]] = {}
    for action in _placement_rows(plan, axis, row):
        for fqn in action.sites:
            name = blocks.common_name(fqn)
            proposed = ProposedRow((name,), lift.call_of(action.primitive))
            rows_by_block.setdefault(blocks.enclosing_block(fqn), {}).setdefault(name, proposed)
    if not rows_by_block:
        raise Refusal.of(
            "S425",
            f"no row shards anything over `{axis}`",
            Label(row.span),
            helps=(
                f"start with one projection of a block: `shard(col, over={axis})`",
                "or let `schedlang init` write the whole schedule",
            ),
        )
    outside = rows_by_block.pop("", {})
    lists: dict[str, dict[tuple[ProposedRow, ...], list[str]]] = {}
    for block, rows in rows_by_block.items():
        groups = lists.setdefault(next(iter(rows)).rpartition("*")[0], {})
        groups.setdefault(tuple(rows.values()), []).append(block)
    by_list = [list(groups.items()) for groups in lists.values()]
    return [
        _StartedRows(
            outside
            | {proposed.names[0]: proposed for rows, _ in groups_chosen for proposed in rows},
            frozenset(block for _, places in groups_chosen for block in places),
            Label(row.span),
        )
        for groups_chosen in zip_longest(*by_list, fillvalue=((), ()))
    ] or [_StartedRows(outside, frozenset(), Label(row.span))]


def _shape_rows(plan: Plan, blocks: Blocks) -> list[ProposedRow]:
    """Return the rows that change shapes (padding), on which splits depend."""
    rows = [
        ProposedRow((blocks.common_name(fqn),), lift.call_of(action.primitive))
        for action in plan.rows_changing(Facet.SHAPE)
        for fqn in action.sites
    ]
    return list(dict.fromkeys(rows))


def _complete_flow(finder: RowFinder, flow: Flow, started: _StartedRows) -> None:
    """Add the missing rows of a flow; refuse (S426, S427) unless exactly one form is legal."""
    source_rows = (started.rows[name] for name in flow.sources if name in started.rows)
    if any(variant.argument("output") == n.Name(("R",)) for variant in source_rows):
        finder.rows += [started.rows[name] for name in started.of(flow)]
        return  # outputs of its sources are gathered: no other row is needed
    solutions: list[list[ProposedRow]] = []
    reason = ""
    for variant in flow_variants(flow):
        if not set(started.of(flow)) <= {*variant.sources, *variant.sinks}:
            continue
        rows = [started.rows.get(row.names[0], row) for row in rows_of_flow(finder, variant)]
        repaired = finder.repair_rows(rows)
        if isinstance(repaired, str):
            reason = reason or repaired
        elif repaired not in solutions:
            solutions.append(repaired)
    if not solutions:
        raise Refusal(_no_completion(finder, flow, started, reason))
    if len(solutions) > 1:
        raise Refusal(_several_completions(flow, started, solutions))
    finder.rows += solutions[0]


def _refuse_unpaired(finder: RowFinder, started: _StartedRows) -> None:
    """Refuse (S426) a row at a projection in the middle of a chain.

    Its output may be reduced by the next projection or gathered; both are legal.
    """
    blocks, uses = finder.trial.blocks, finder.trial.feeds.uses
    for name, row in started.rows.items():
        splits = row.changes_facet(Facet.PLACEMENT) and row.style == "col"
        if row in finder.rows or not splits or row.argument("output") is not None:
            continue
        readers = {
            blocks.common_name(fqn)
            for fqn, use in uses.items()
            if name in map(blocks.common_name, use.reads)
        }
        reading_call = make_call("shard", "row", over=finder.axis)
        rows = [row, *(ProposedRow((reader,), reading_call) for reader in readers)]
        gathered = [row.with_argument("output", R)]
        if readers and isinstance(finder.repair_rows(rows), list):
            flow = Flow((name,), tuple(readers))
            raise Refusal(_several_completions(flow, started, [rows[1:], gathered]))


def _complete_rest(finder: RowFinder, started: _StartedRows) -> None:
    """Add the rows that start no flow, and rows for other names of split weights (S427)."""
    repaired = finder.repair_rows([row for row in started.rows.values() if row not in finder.rows])
    if isinstance(repaired, str):
        raise Refusal.of(
            "S427",
            f"the rows over `{finder.axis}` cannot be completed",
            started.line,
            notes=(repaired,),
        )
    finder.rows += repaired


def _no_completion(finder: RowFinder, flow: Flow, started: _StartedRows, reason: str) -> Diagnostic:
    tried_rows = (row for row in rows_of_flow(finder, flow) if row.names[0] not in started.rows)
    rows = "; ".join(f"`{row}`" for row in tried_rows)
    gathered = [n for n in flow.sources if n in started.rows]
    helps = [
        f"gather its output: `{name} shard(col, output=R, over={finder.axis})`"
        for name in gathered[:2]
    ]
    return Diagnostic(
        "S427",
        f"`{names_text(started.of(flow))}` cannot be completed over `{finder.axis}`",
        started.line,
        notes=(f"tried {rows}: {reason}",),
        helps=tuple(helps),
    )


def _several_completions(
    flow: Flow, started: _StartedRows, choices: Sequence[Sequence[ProposedRow]]
) -> Diagnostic:
    texts = [
        "; ".join(f"`{row}`" for row in rows if row not in started.rows.values())
        for rows in choices
    ]
    return Diagnostic(
        "S426",
        f"`{names_text(started.of(flow))}` can be completed in {len(choices)} ways",
        started.line,
        helps=tuple(f"write one of them: {text}" for text in texts),
    )


def _add_row(plan: Plan, action: Action, sites: Sequence[str], origin: Action) -> Plan:
    """Return the plan with one more row, at the line of the `complete` row `origin`."""
    try:
        return plan.add(action.primitive, sites, step=origin.step, span=origin.span)
    except Refusal as refusal:
        raise refusal.at(origin.span) from refusal


def _actions_of(
    plan: Plan, axis: str, blocks: Blocks, rows: Sequence[ProposedRow]
) -> Iterator[Action]:
    """Yield proposed rows, at all modules of their names, as actions of a separate plan."""
    if not rows:
        return
    all_rows = (*_shape_rows(plan, blocks), *rows)
    proposed_plan = plan_of_proposal(
        all_rows, blocks.in_model(plan.model), {axis: plan.mesh.size(axis)}, "completed"
    )
    yield from (action for action in proposed_plan.actions if not action.changes(Facet.SHAPE))
