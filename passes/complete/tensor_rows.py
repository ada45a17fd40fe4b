"""Rows of tensor parallelism: projections of a model, split over one axis.

A flow is a set of projections that can be split together: the outputs of the sources are split, and
are inputs of the sinks, which reduce. Each flow gets the first form of rows that is legal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from schedlang.ir.model import Site, common_parent
from schedlang.ir.placement import R, S
from schedlang.language import nodes as n
from schedlang.passes.complete.proposed_rows import ProposedRow, make_call, names_text
from schedlang.passes.reduce_model.blocks import TABLES, Blocks, can_split_module, leaf_kind

if TYPE_CHECKING:
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.passes.complete.proposed_rows import RowTrial
    from schedlang.runtime.propagation.sources import ProjectionUse


@dataclass(frozen=True)
class Flow:
    """Projections that are split together: sources by outputs, sinks by inputs.

    Names are common to all blocks. `mixed`: tokens are mixed between sources and sinks, as in
    attention. `impure` are sources whose outputs are also read by the projections `others`.
    """

    sources: tuple[str, ...]
    sinks: tuple[str, ...]
    mixed: bool = False
    impure: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all projections."""
        return frozenset((*self.sources, *self.sinks))


def find_flows(uses: Mapping[str, ProjectionUse], blocks: Blocks) -> tuple[Flow, ...]:
    """Return the flows of a model, in the order of their first calls.

    A sink is a projection that reads only outputs of other projections, and not the residual
    stream. Later projections choose their sources first, so that a chain is paired from its end.
    """
    groups: list[_Group] = []
    roles: dict[str, str] = {}
    for fqn, use in sorted(uses.items(), key=lambda item: -item[1].order):
        reads = _sources_of(fqn, use, blocks)
        if not reads or roles.get(fqn) == "source" or not can_split_module(blocks.facts, fqn):
            continue
        reads = {name for name in reads if roles.get(name) != "sink"}
        if not reads:
            continue
        roles[fqn] = "sink"
        roles.update(dict.fromkeys(reads, "source"))
        groups.append(_Group(reads, {fqn}, "@" in use.reads))
    return _merge_groups(groups, uses, blocks)


@dataclass
class _Group:
    sources: set[str]
    sinks: set[str]
    mixed: bool


def _sources_of(fqn: str, use: ProjectionUse, blocks: Blocks) -> set[str]:
    """Return the projections that a projection reads; empty if it also reads anything else."""
    from schedlang.runtime.propagation.sources import MIXED, STREAM

    everywhere = not blocks.lists
    kind = leaf_kind(blocks.facts.sites[fqn])
    sources = set(use.reads) - {MIXED}
    if kind in TABLES or STREAM in sources or not (everywhere or blocks.is_inside(fqn)):
        return set()
    return sources if all(everywhere or blocks.is_inside(name) for name in sources) else set()


def _merge_groups(
    groups: list[_Group], uses: Mapping[str, ProjectionUse], blocks: Blocks
) -> tuple[Flow, ...]:
    """Return flows with names common to all blocks; groups that share a name are merged."""
    merged: list[_Group] = []
    for group in reversed(groups):
        common = _Group(
            {blocks.common_name(name) for name in group.sources},
            {blocks.common_name(name) for name in group.sinks},
            group.mixed,
        )
        for overlap in [
            earlier
            for earlier in merged
            if (earlier.sources | earlier.sinks) & (common.sources | common.sinks)
        ]:
            merged.remove(overlap)
            common.sources |= overlap.sources
            common.sinks |= overlap.sinks
            common.mixed |= overlap.mixed
        merged.append(common)
    order: dict[str, int] = {}
    readers: dict[str, set[str]] = {}
    for fqn, use in uses.items():
        order.setdefault(blocks.common_name(fqn), use.order)
        for name in use.reads:
            readers.setdefault(blocks.common_name(name), set()).add(blocks.common_name(fqn))
    flows = [_flow_of(group, order, readers) for group in merged]
    return tuple(sorted(flows, key=lambda flow: min(order[name] for name in flow.names)))


def _flow_of(group: _Group, order: Mapping[str, int], readers: Mapping[str, set[str]]) -> Flow:
    sources = sorted(group.sources - group.sinks, key=order.__getitem__)
    sinks = tuple(sorted(group.sinks, key=order.__getitem__))
    other_readers = {name: readers.get(name, set()) - set(sinks) for name in sources}
    impure = frozenset(name for name in sources if other_readers[name])
    others = tuple(sorted(set().union(*other_readers.values()), key=order.__getitem__))
    return Flow(tuple(sources), sinks, group.mixed, impure, others)


def flow_variants(flow: Flow) -> tuple[Flow, ...]:
    """Return the flow, the flow with `others` as sinks, and the flow without impure sources."""
    if not flow.impure:
        return (flow,)
    widened = replace(flow, sinks=(*flow.sinks, *flow.others), impure=frozenset(), others=())
    pure = tuple(name for name in flow.sources if name not in flow.impure)
    narrowed = (replace(flow, sources=pure, impure=frozenset(), others=()),) if pure else ()
    return (flow, widened, *narrowed)


REMEDY_ARGUMENTS = ("blocks", "heads", "uneven")  # arguments that refusals offer in their facts
MAX_REMEDIES = 8  # remedies for one flow
MAX_REASON = 200  # characters of a reason


@dataclass
class RowFinder:
    """The rows found so far; further rows are tried together with these."""

    trial: RowTrial
    axis: str
    ranks: int
    rows: list[ProposedRow]
    notes: list[str]
    # names with a note why they stay replicated
    replicated_names: set[str] = field(default_factory=set)
    blamed_row: int = -1  # index of the row that the last refusal names; -1: none

    def repair_rows(self, rows: Sequence[ProposedRow]) -> list[ProposedRow] | str:
        """Return rows, repaired by the remedies of their refusals, or the reason why not legal."""
        rows, reason, counted = list(rows), "", ""
        for _ in range(MAX_REMEDIES):
            refused = self.trial.find_refusal([*self.rows, *rows], self.axis, self.ranks)
            if refused is None:
                return rows
            refusal, index = refused
            reason = refusal.diagnostic.title[:MAX_REASON] + (refusal.diagnostic.fact("line") or "")
            index -= len(self.rows)
            self.blamed_row = index if 0 <= index < len(rows) else -1
            missing = self._missing_row(refusal)
            if missing is not None and missing not in rows:
                rows = _with_row(rows, missing)
                continue
            better = self._with_remedies(rows, index, refusal) if 0 <= index < len(rows) else rows
            if better == rows:
                break
            if any(row.argument("heads") for row in better) and not counted:
                counted = reason  # the next refusal is about heads that the user did not write
            rows = better
        return counted or reason

    def _with_remedies(
        self, rows: list[ProposedRow], index: int, refusal: Refusal
    ) -> list[ProposedRow]:
        """Return rows with the arguments that a refusal offers for one; heads change all rows."""
        offers = {
            name: fact for name in REMEDY_ARGUMENTS if (fact := refusal.diagnostic.fact(name))
        }
        if "heads" in offers:
            size = self._width(rows[index]) // _count_blocks(rows[index]) // int(offers["heads"])
            return [self.with_uneven_heads(row, size) for row in rows] if size else rows
        repaired = rows[index]
        for name, value in offers.items():
            repaired = repaired.with_argument(name, _value_of(value))
        return [*rows[:index], repaired, *rows[index + 1 :]]

    def with_uneven_heads(self, row: ProposedRow, size: int) -> ProposedRow:
        """Return a row with `heads` and `with_uneven_heads`, if ranks do not divide its heads of
        `size`."""
        blocks = _count_blocks(row)
        heads, remainder = divmod(self._width(row), size * blocks)
        if remainder or heads % self.ranks == 0 or isinstance(row.argument("blocks"), n.List):
            return row
        is_shared = row.style == "col" and self.ranks % heads == 0 and blocks == 1
        row = row.with_argument("heads", heads)
        return row.with_argument("uneven", "replicate" if is_shared else "pad")

    def _width(self, row: ProposedRow) -> int:
        """Return the size of the dim that a row splits: outputs, or inputs for the style `row`."""
        blocks = self.trial.blocks
        site = blocks.facts.sites[blocks.modules_by_name[row.names[0]][0]]
        dims = site.dims.get("weight", ())
        dim = "in" if row.style == "row" else "out"
        return site.parameters["weight"].shape[dims.index(dim)] if dim in dims else 1

    def _missing_row(self, refusal: Refusal) -> ProposedRow | None:
        """Return the row for another module that a refusal names, or None.

        The module shares a split weight, or its parameter is combined with a split tensor.
        """
        module, splits = map(refusal.diagnostic.fact, ("module", "splits"))
        if module is not None and splits is not None:
            dims = (dim_text.split("=") for dim_text in splits.split(", "))
            call = make_call("shard", **{name: S(int(dim)) for name, dim in dims}, over=self.axis)
            return ProposedRow((self.trial.blocks.common_name(module),), call, "for its heads")
        name = refusal.diagnostic.fact("parameter")
        if name is None:
            return None
        owner, _, parameter = name.rpartition(".")
        blocks = self.trial.blocks
        if leaf_kind(blocks.facts.sites[owner]):
            call = make_call("shard", "vocab", over=self.axis)
        else:
            call = make_call("shard", **{parameter: S(0)}, over=self.axis)
        return ProposedRow((blocks.common_name(owner),), call, "the same weight")

    def note_replicated(self, names: Sequence[str], reason: str) -> None:
        """Note modules that stay replicated, and the reason."""
        self.replicated_names.update(names)
        self.notes.append(f"replicated: {names_text(names)}: {reason}")


def _with_row(rows: list[ProposedRow], missing: ProposedRow) -> list[ProposedRow]:
    """Return rows with one more; parameters of a module that has a row by names join that row."""
    for index, row in enumerate(rows):
        if row.names == missing.names and not (row.style or missing.style):
            for argument in missing.call.args:
                if isinstance(argument, n.Keyword):
                    row = row.with_argument(argument.name, argument.value)
            return [*rows[:index], row, *rows[index + 1 :]]
    return [*rows, missing]


def add_tensor_rows(finder: RowFinder) -> None:
    """Add the rows of each flow that is legal with the rows before; note the other flows."""
    taken: set[str] = set()
    for flow in find_flows(finder.trial.feeds.uses, finder.trial.blocks):
        if flow.names & taken:
            continue  # it reads the sources of an earlier flow, and became a sink of that flow
        reason = _try_flow(finder, flow)
        if reason:
            finder.note_replicated((*flow.sources, *flow.sinks), reason)
        taken |= {name for row in finder.rows for name in row.names} & {*flow.others}


def _try_flow(finder: RowFinder, flow: Flow) -> str:
    """Add the rows of a flow in its first legal form and return ""; else return the reason."""
    reason = ""
    for rows in _forms(finder, flow):
        repaired = finder.repair_rows(rows)
        if isinstance(repaired, list):
            finder.rows += repaired
            return ""
        reason = repaired
    convolves = any(not _kind(finder, name) for name in flow.sources)
    # full images are too large to be gathered
    for variant in () if convolves else flow_variants(flow):
        repaired = finder.repair_rows(_gathering_rows(finder, variant))
        if isinstance(repaired, list):
            finder.rows += repaired
            finder.notes.append(f"gathered: {names_text(variant.sources)}: {reason}")
            return ""
    return reason


def _forms(finder: RowFinder, flow: Flow) -> Iterator[list[ProposedRow]]:
    """Yield forms of a flow's rows: with blocks that the model splits outputs into, and without.

    Where a view splits outputs twice, the first number may count blocks side by side (q, k and v)
    or heads: both are tried.  At last the input of an attention enters the attention as a whole:
    legal if a full tensor in it, such as a key that all heads share, meets split heads.
    """
    forms = list(_forms_of_rows(finder, flow))
    yield from forms
    parent = common_parent(flow.sources + flow.sinks)
    if flow.mixed and parent in finder.trial.blocks.modules_by_name:
        enters = make_call("shard", input=R, over=finder.axis)
        region = ProposedRow((parent,), enters, "gradients of its input are summed")
        yield from ([*rows, region] for rows in forms)


def _forms_of_rows(finder: RowFinder, flow: Flow) -> Iterator[list[ProposedRow]]:
    """Yield the forms of a flow's rows without a row of the module around them."""
    for variant in flow_variants(flow):
        plain_rows = rows_of_flow(finder, variant)
        sizes = {_head_size(finder, name) for name in variant.sources}
        if len(sizes) == 1 and (size := sizes.pop()):
            plain_rows = [finder.with_uneven_heads(row, size) for row in plain_rows]
        packed = [_with_part_sizes(finder, row) for row in plain_rows]
        viewed = [_with_view_blocks(finder, row) for row in plain_rows]
        for form_rows in (packed, viewed):
            if form_rows != plain_rows:
                yield form_rows
        yield plain_rows


def rows_of_flow(finder: RowFinder, flow: Flow) -> list[ProposedRow]:
    """Return the rows of a flow: its sources split by outputs, its sinks by inputs."""
    comment = "split by heads" if flow.mixed else "split by width"
    rows = []
    if not flow.mixed and not all(_kind(finder, name) for name in flow.sources):
        comment = "split by channels"
    for name in flow.sources:
        if _kind(finder, name) in TABLES:
            split = make_call("shard", weight=S("hidden"), over=finder.axis)
        else:
            split = make_call("shard", "col", over=finder.axis)
        rows.append(ProposedRow((name,), split, comment))
    summed = make_call("shard", "row", over=finder.axis)
    return [*rows, *(ProposedRow((name,), summed, "parts are summed") for name in flow.sinks)]


def _gathering_rows(finder: RowFinder, flow: Flow) -> list[ProposedRow]:
    gathered = make_call("shard", "col", output=R, over=finder.axis)
    summed = make_call("shard", "row", over=finder.axis)
    tables = [name for name in flow.sources if _kind(finder, name) in TABLES]
    return [
        *(
            ProposedRow((name,), gathered, "split, then gathered")
            for name in flow.sources
            if name not in tables
        ),
        *(ProposedRow((name,), summed, "parts are summed") for name in flow.sinks),
    ]


def _with_part_sizes(finder: RowFinder, row: ProposedRow) -> ProposedRow:
    """Return a row with `blocks`: the sizes of the parts into which the model splits outputs."""
    blocks = finder.trial.blocks
    module = blocks.modules_by_name[row.names[0]][0]
    parts = finder.trial.feeds.piece_sizes.get(module, [])
    site = blocks.facts.sites[module]
    if row.style != "col" or len(parts) < 2 or sum(parts) != outputs_of(site):
        return row
    return row.with_argument("blocks", parts if len(set(parts)) > 1 else len(parts))


def _count_blocks(row: ProposedRow) -> int:
    """Return the number of equal blocks in the dim that a row splits; each block has its heads."""
    blocks = row.argument("blocks")
    return int(blocks.text) if isinstance(blocks, n.Lit) else 1


def _with_view_blocks(finder: RowFinder, row: ProposedRow) -> ProposedRow:
    """Return a row with `blocks`: the first number into which a view splits outputs."""
    module = finder.trial.blocks.modules_by_name[row.names[0]][0]
    count = finder.trial.feeds.packed.get(module, 0)
    splits = row.style == "col" and count > 1
    return row.with_argument("blocks", count) if splits else row


def _head_size(finder: RowFinder, name: str) -> int:
    """Return the size of the heads into which a projection's outputs are split, or 0."""
    return finder.trial.feeds.head_sizes.get(finder.trial.blocks.modules_by_name[name][0], 0)


def outputs_of(site: object) -> int:
    """Return the number of outputs of a projection."""
    assert isinstance(site, Site)
    return site.parameters["weight"].shape[site.dims["weight"].index("out")]


def _kind(finder: RowFinder, name: str) -> str:
    blocks = finder.trial.blocks
    return leaf_kind(blocks.facts.sites[blocks.modules_by_name[name][0]])


def _value_of(value: str) -> object:
    """Return the value of an argument in a fact: a number, a list of numbers, or a word."""
    return json.loads(value) if value[:1] in "[0123456789" else value
