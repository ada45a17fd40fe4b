"""The rows that complete a plan: what `shard` rows began, followed through the model's flows."""

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
from schedlang.passes.complete.proposal import (
    Row,
    Trial,
    call,
    names_text,
    planned,
)
from schedlang.passes.complete.tensor_rows import Finder, Flow, flows, split_rows, variants
from schedlang.passes.reduce_model.blocks import Blocks, blocks_of

Loss = Callable[..., Any]


@dataclass(frozen=True)
class _Begun:
    """The rows that stand above, by the common names of their modules, and in which blocks."""

    rows: Mapping[str, Row]
    places: frozenset[str]
    line: Label

    def of(self, flow: Flow) -> list[str]:
        """The projections of a flow for which a row stands."""
        return [name for name in (*flow.sources, *flow.sinks) if name in self.rows]


def completed(plan: Plan, batch: Mapping[str, Any] | None, loss: Loss | None = None) -> Plan:
    """The plan with the rows that its `complete` rows stand for; the plan itself without such rows.

    Raises Refusal S426 where there are two ways, S427 where there is none, at the `complete` row;
    S605 where there is no batch to follow the model with.
    """
    for axis, row in [(one.axis, plan.origin(one)) for one in plan.completing]:
        assert row is not None
        if batch is None:
            raise Refusal.of(
                "S605",
                "completing rows needs a batch",
                Label(row.span),
                helps=("define `batch(seed)` in the model file",),
            )
        if plan.mesh.size(axis) > 1:
            plan = _completed(plan, axis, batch, loss, row)
    return replace(plan, completing=())


def _completed(
    plan: Plan, axis: str, batch: Mapping[str, Any], loss: Loss | None, row: Action
) -> Plan:
    """The plan with the rows that are added, in the order of the flows."""
    blocks = blocks_of(plan.model)
    trial = Trial(plan.model, blocks, batch, loss)
    known = len(plan.actions)
    for begun in _begun(plan, axis, blocks, row):
        done = {fqn for action in plan.actions[known:] for fqn in action.sites}
        plan = _continued(plan, axis, trial, begun, row, done)
    more, place = plan.actions[known:], plan.actions.index(row) + 1
    actions = (*plan.actions[:place], *more, *plan.actions[place:known])
    return replace(plan, actions=actions)


def _continued(
    plan: Plan, axis: str, trial: Trial, begun: _Begun, row: Action, done: Collection[str]
) -> Plan:
    """The plan with the rows that are added to blocks that began alike, but for what is done."""
    blocks = trial.blocks
    finder = Finder(trial, axis, plan.mesh.size(axis), _shapes(plan, blocks), [])
    for flow in flows(trial.fed.uses, trial.blocks):
        if begun.of(flow):
            _complete(finder, flow, begun)
    _loose(finder, begun)
    _tied(finder, begun)
    own = (*begun.rows.values(), *_shapes(plan, blocks))
    added = [one for one in finder.rows if one not in own]
    for action in _actions(plan, axis, blocks, added):
        places = ((fqn, blocks.around(fqn)) for fqn in action.sites)
        sites = [fqn for fqn, place in places if not place or place in begun.places]
        sites = [fqn for fqn in sites if fqn not in done]
        plan = _added(plan, action, sites, row) if sites else plan
    return plan


def _placing(plan: Plan, axis: str, row: Action) -> Iterator[Action]:
    """The rows that say how something lies along the axis."""
    for action in plan.rows_changing(Facet.PLACEMENT):
        shards = action.primitive.along == (axis,) and action.sites[0] in plan.boundaries
        if shards and action is not row:
            yield action


def _begun(plan: Plan, axis: str, blocks: Blocks, row: Action) -> list[_Begun]:
    """List what is begun, apart for blocks of one list that began unlike; S425: nothing is."""
    found: dict[str, dict[str, Row]] = {}
    for action in _placing(plan, axis, row):
        for fqn in action.sites:
            name = blocks.common(fqn)
            one = Row((name,), lift.call_of(action.primitive))
            found.setdefault(blocks.around(fqn), {}).setdefault(name, one)
    if not found:
        raise Refusal.of(
            "S425",
            f"no row shards anything over `{axis}`",
            Label(row.span),
            helps=(
                f"start with one projection of a block: `shard(col, over={axis})`",
                "or let `schedlang init` write the whole schedule",
            ),
        )
    outside = found.pop("", {})
    lists: dict[str, dict[tuple[Row, ...], list[str]]] = {}
    for place, rows in found.items():
        alike = lists.setdefault(next(iter(rows)).rpartition("*")[0], {})
        alike.setdefault(tuple(rows.values()), []).append(place)
    ways = [list(alike.items()) for alike in lists.values()]
    return [
        _Begun(
            outside | {one.names[0]: one for rows, _ in chosen for one in rows},
            frozenset(place for _, places in chosen for place in places),
            Label(row.span),
        )
        for chosen in zip_longest(*ways, fillvalue=((), ()))
    ] or [_Begun(outside, frozenset(), Label(row.span))]


def _shapes(plan: Plan, blocks: Blocks) -> list[Row]:
    """The rows that change shapes (padding), which splits follow."""
    rows = [
        Row((blocks.common(fqn),), lift.call_of(action.primitive))
        for action in plan.rows_changing(Facet.SHAPE)
        for fqn in action.sites
    ]
    return list(dict.fromkeys(rows))


def _complete(finder: Finder, flow: Flow, begun: _Begun) -> None:
    """Add what a flow lacks, in its one legal form."""
    known = (begun.rows[name] for name in flow.sources if name in begun.rows)
    if any(one.argument("output") == n.Name(("R",)) for one in known):
        finder.rows += [begun.rows[name] for name in begun.of(flow)]
        return  # it is gathered behind its sources: nothing else follows
    legal: list[list[Row]] = []
    said = ""
    for one in variants(flow):
        if not set(begun.of(flow)) <= {*one.sources, *one.sinks}:
            continue
        rows = [begun.rows.get(row.names[0], row) for row in split_rows(finder, one)]
        made = finder.mended(rows)
        if isinstance(made, str):
            said = said or made
        elif made not in legal:
            legal.append(made)
    if not legal:
        raise Refusal(_none(finder, flow, begun, said))
    if len(legal) > 1:
        raise Refusal(_several(flow, begun, legal))
    finder.rows += legal[0]


def _loose(finder: Finder, begun: _Begun) -> None:
    """Refuse a projection in the middle of a chain: sum behind it, or gather, is equally good."""
    blocks, uses = finder.trial.blocks, finder.trial.fed.uses
    for name, row in begun.rows.items():
        splits = row.changes(Facet.PLACEMENT) and row.style == "col"
        if row in finder.rows or not splits or row.argument("output") is not None:
            continue
        readers = {
            blocks.common(f) for f, use in uses.items() if name in map(blocks.common, use.reads)
        }
        after = call("shard", "row", over=finder.axis)
        rows = [row, *(Row((reader,), after) for reader in readers)]
        gathered = [row.with_argument("output", R)]
        if readers and isinstance(finder.mended(rows), list):
            flow = Flow((name,), tuple(readers))
            raise Refusal(_several(flow, begun, [rows[1:], gathered]))


def _tied(finder: Finder, begun: _Begun) -> None:
    """Take the rows that begin no flow, and add those for the other names of split weights."""
    made = finder.mended([row for row in begun.rows.values() if row not in finder.rows])
    if isinstance(made, str):
        raise Refusal.of(
            "S427",
            f"the rows over `{finder.axis}` cannot be completed",
            begun.line,
            notes=(made,),
        )
    finder.rows += made


def _none(finder: Finder, flow: Flow, begun: _Begun, said: str) -> Diagnostic:
    more = (row for row in split_rows(finder, flow) if row.names[0] not in begun.rows)
    rows = "; ".join(f"`{row}`" for row in more)
    gathered = [n for n in flow.sources if n in begun.rows]
    helps = [
        f"gather its output: `{name} shard(col, output=R, over={finder.axis})`"
        for name in gathered[:2]
    ]
    return Diagnostic(
        "S427",
        f"`{names_text(begun.of(flow))}` cannot be completed over `{finder.axis}`",
        begun.line,
        notes=(f"tried {rows}: {said}",),
        helps=tuple(helps),
    )


def _several(flow: Flow, begun: _Begun, legal: Sequence[Sequence[Row]]) -> Diagnostic:
    texts = [
        "; ".join(f"`{row}`" for row in rows if row not in begun.rows.values()) for rows in legal
    ]
    return Diagnostic(
        "S426",
        f"`{names_text(begun.of(flow))}` can be completed in {len(legal)} ways",
        begun.line,
        helps=tuple(f"write one of them: {text}" for text in texts),
    )


def _added(plan: Plan, action: Action, sites: Sequence[str], at: Action) -> Plan:
    """The plan with one more row, at the line of the row that stands for it."""
    try:
        return plan.add(action.primitive, sites, step=at.step, span=at.span)
    except Refusal as refusal:
        raise refusal.at(at.span) from refusal


def _actions(plan: Plan, axis: str, blocks: Blocks, rows: Sequence[Row]) -> Iterator[Action]:
    """The rows at all modules of the model, as actions of a plan of their own."""
    if not rows:
        return
    every = (*_shapes(plan, blocks), *rows)
    made = planned(every, blocks.of(plan.model), {axis: plan.mesh.size(axis)}, "completed")
    yield from (action for action in made.actions if not action.changes(Facet.SHAPE))
