"""The rows that split a model's projections over one axis: each flow in the first legal form.

* Pairs of projections that can be split together: outputs of the first feed only the second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from schedlang.ir.model import Site
from schedlang.ir.placement import R, S
from schedlang.language import nodes as n
from schedlang.passes.complete.proposal import Row, call, names_text
from schedlang.passes.reduce_model.blocks import TABLES, Blocks, leaf_kind, splits

if TYPE_CHECKING:
    from schedlang.diagnostics.diagnostic import Refusal
    from schedlang.passes.complete.proposal import Trial
    from schedlang.runtime.propagation.feeds import Use


@dataclass(frozen=True)
class Flow:
    """Projections whose outputs are split, and those that sum over what is split.

    Names are common to all blocks.  `mixed`: tokens are mixed in between, as in attention.
    `impure` are sources whose outputs also go elsewhere, to the projections `others`.
    """

    sources: tuple[str, ...]
    sinks: tuple[str, ...]
    mixed: bool = False
    impure: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All of its projections."""
        return frozenset((*self.sources, *self.sinks))


def flows(uses: Mapping[str, Use], blocks: Blocks) -> tuple[Flow, ...]:
    """The flows of a model, in the order of their first calls.

    A projection that reads only other projections' outputs, nothing of the residual stream, is
    where a flow ends; later ones choose first, so that a chain pairs from its end.
    """
    groups: list[_Group] = []
    roles: dict[str, str] = {}
    for fqn, use in sorted(uses.items(), key=lambda item: -item[1].order):
        reads = _sources(fqn, use, uses, blocks)
        if not reads or roles.get(fqn) == "source" or not splits(blocks.facts, fqn):
            continue
        reads = {name for name in reads if roles.get(name) != "sink"}
        if not reads:
            continue
        roles[fqn] = "sink"
        roles.update(dict.fromkeys(reads, "source"))
        groups.append(_Group(reads, {fqn}, "@" in use.reads))
    return _common(groups, uses, blocks)


@dataclass
class _Group:
    sources: set[str]
    sinks: set[str]
    mixed: bool


def _sources(fqn: str, use: Use, uses: Mapping[str, Use], blocks: Blocks) -> set[str]:
    """List what a projection reads, if it is nothing but other projections of blocks."""
    from schedlang.runtime.propagation.feeds import MIXED, STREAM

    everywhere = not blocks.lists
    kind = leaf_kind(blocks.facts.sites[fqn])
    found = set(use.reads) - {MIXED}
    if kind in TABLES or STREAM in found or not (everywhere or blocks.inside(fqn)):
        return set()
    return found if all(everywhere or blocks.inside(name) for name in found) else set()


def _common(groups: list[_Group], uses: Mapping[str, Use], blocks: Blocks) -> tuple[Flow, ...]:
    """Groups under names common to all blocks; those that share one are one."""
    made: list[_Group] = []
    for group in reversed(groups):
        mine = _Group(
            {blocks.common(name) for name in group.sources},
            {blocks.common(name) for name in group.sinks},
            group.mixed,
        )
        for other in [o for o in made if (o.sources | o.sinks) & (mine.sources | mine.sinks)]:
            made.remove(other)
            mine.sources |= other.sources
            mine.sinks |= other.sinks
            mine.mixed |= other.mixed
        made.append(mine)
    order: dict[str, int] = {}
    readers: dict[str, set[str]] = {}
    for fqn, use in uses.items():
        order.setdefault(blocks.common(fqn), use.order)
        for name in use.reads:
            readers.setdefault(blocks.common(name), set()).add(blocks.common(fqn))
    found = [_flow(group, order, readers) for group in made]
    return tuple(sorted(found, key=lambda flow: min(order[name] for name in flow.names)))


def _flow(group: _Group, order: Mapping[str, int], readers: Mapping[str, set[str]]) -> Flow:
    sources = sorted(group.sources - group.sinks, key=order.__getitem__)
    sinks = tuple(sorted(group.sinks, key=order.__getitem__))
    also = {name: readers.get(name, set()) - set(sinks) for name in sources}
    impure = frozenset(name for name in sources if also[name])
    others = tuple(sorted(set().union(*also.values()), key=order.__getitem__))
    return Flow(tuple(sources), sinks, group.mixed, impure, others)


def variants(flow: Flow) -> tuple[Flow, ...]:
    """The flow, with all that reads its outputs, and without the sources that others read too."""
    if not flow.impure:
        return (flow,)
    wide = replace(flow, sinks=(*flow.sinks, *flow.others), impure=frozenset(), others=())
    pure = tuple(name for name in flow.sources if name not in flow.impure)
    alone = (replace(flow, sources=pure, impure=frozenset(), others=()),) if pure else ()
    return (flow, wide, *alone)


ASKED = ("blocks", "heads", "uneven")  # the arguments that a refusal asks for, as its facts
MOST = 8  # remedies for one flow
SAID = 200  # characters of a reason


@dataclass
class Finder:
    """The rows found so far, and how more are tried beside them."""

    trial: Trial
    axis: str
    ranks: int
    rows: list[Row]
    notes: list[str]
    left: set[str] = field(default_factory=set)  # names of which is noted why they stay whole
    blamed: int = -1  # the place of the row that the last refusal was about; -1: of none

    def mended(self, rows: Sequence[Row]) -> list[Row] | str:
        """The rows with what their refusals ask for, if they are legal then; else why not."""
        rows, said, counted = list(rows), "", ""
        for _ in range(MOST):
            found = self.trial.refusal([*self.rows, *rows], self.axis, self.ranks)
            if found is None:
                return rows
            refusal, place = found
            said = _said(refusal)
            place -= len(self.rows)
            self.blamed = place if 0 <= place < len(rows) else -1
            more = self._shared(refusal)
            if more is not None and more not in rows:
                rows.append(more)
                continue
            better = self._better(rows, place, refusal) if 0 <= place < len(rows) else rows
            if better == rows:
                break
            if any(row.argument("heads") for row in better) and not counted:
                counted = said  # what is refused next is refused of heads that nobody wrote
            rows = better
        return counted or said

    def _better(self, rows: list[Row], place: int, refusal: Refusal) -> list[Row]:
        """The rows with the arguments that a refusal asks for at one; heads concern all of them."""
        asked = {name: found for name in ASKED if (found := refusal.diagnostic.fact(name))}
        if "heads" in asked:
            size = self._width(rows[place]) // _beside(rows[place]) // int(asked["heads"])
            return [self.uneven(row, size) for row in rows] if size else rows
        better = rows[place]
        for name, value in asked.items():
            better = better.with_argument(name, _valued(value))
        return [*rows[:place], better, *rows[place + 1 :]]

    def uneven(self, row: Row, size: int) -> Row:
        """A row with its number of heads of a size, if the ranks do not divide it."""
        blocks = _beside(row)
        heads, rest = divmod(self._width(row), size * blocks)
        if rest or heads % self.ranks == 0 or isinstance(row.argument("blocks"), n.List):
            return row
        shared = row.style == "col" and self.ranks % heads == 0 and blocks == 1
        row = row.with_argument("heads", heads)
        return row.with_argument("uneven", "replicate" if shared else "pad")

    def _width(self, row: Row) -> int:
        """The size of the dim that a row splits: of outputs, or of what is summed over."""
        blocks = self.trial.blocks
        site = blocks.facts.sites[blocks.named[row.names[0]][0]]
        dims = site.dims.get("weight", ())
        dim = "in" if row.style == "row" else "out"
        return site.parameters["weight"].shape[dims.index(dim)] if dim in dims else 1

    def _shared(self, refusal: Refusal) -> Row | None:
        """The row for a module that shares a weight which is split, or has one that meets it."""
        module, splits = map(refusal.diagnostic.fact, ("module", "splits"))
        if module is not None and splits is not None:
            dims = (one.split("=") for one in splits.split(", "))
            made = call("shard", **{name: S(int(dim)) for name, dim in dims}, over=self.axis)
            return Row((self.trial.blocks.common(module),), made, "for its heads")
        name = refusal.diagnostic.fact("parameter")
        if name is None:
            return None
        owner, _, parameter = name.rpartition(".")
        blocks = self.trial.blocks
        if leaf_kind(blocks.facts.sites[owner]):
            made = call("shard", "vocab", over=self.axis)
        else:
            made = call("shard", **{parameter: S(0)}, over=self.axis)
        return Row((blocks.common(owner),), made, "the same weight")

    def whole(self, names: Sequence[str], why: str) -> None:
        """Note what stays replicated, and why."""
        self.left.update(names)
        self.notes.append(f"replicated: {names_text(names)}: {why}")


def tensor_rows(finder: Finder) -> None:
    """Add the rows of every flow that is legal beside those before it; note the others."""
    taken: set[str] = set()
    for flow in flows(finder.trial.fed.uses, finder.trial.blocks):
        if flow.names & taken:
            continue  # what reads the same as a sink of a flow before it has become one, too
        why = _why_not(finder, flow)
        if why:
            finder.whole((*flow.sources, *flow.sinks), why)
        taken |= {name for row in finder.rows for name in row.names} & {*flow.others}


def _why_not(finder: Finder, flow: Flow) -> str:
    """Add a flow in its first legal form; else say why none is."""
    said = ""
    for rows in _forms(finder, flow):
        made = finder.mended(rows)
        if isinstance(made, list):
            finder.rows += made
            return ""
        said = made
    convolves = any(not _kind(finder, name) for name in flow.sources)
    for one in () if convolves else variants(flow):  # whole pictures are too much to be gathered
        made = finder.mended(_gathered(finder, one))
        if isinstance(made, list):
            finder.rows += made
            finder.notes.append(f"gathered: {names_text(one.sources)}: {said}")
            return ""
    return said


def _forms(finder: Finder, flow: Flow) -> Iterator[list[Row]]:
    """The rows of a flow with the parts that the model takes out of outputs, and without.

    Where a view takes outputs apart twice, what it counts first lies side by side (q, k and v), or
    counts heads: both are tried.
    """
    for one in variants(flow):
        plain = split_rows(finder, one)
        sizes = {_heads(finder, name) for name in one.sources}
        if len(sizes) == 1 and (size := sizes.pop()):
            plain = [finder.uneven(row, size) for row in plain]
        packed = [_packed(finder, row) for row in plain]
        viewed = [_viewed(finder, row) for row in plain]
        for form in (packed, viewed):
            if form != plain:
                yield form
        yield plain


def split_rows(finder: Finder, flow: Flow) -> list[Row]:
    """The rows of a flow: its sources split by outputs, its sinks by inputs."""
    said = "split by heads" if flow.mixed else "split by width"
    rows = []
    if not flow.mixed and not all(_kind(finder, name) for name in flow.sources):
        said = "split by channels"
    for name in flow.sources:
        if _kind(finder, name) in TABLES:
            split = call("shard", weight=S("hidden"), over=finder.axis)
        else:
            split = call("shard", "col", over=finder.axis)
        rows.append(Row((name,), split, said))
    summed = call("shard", "row", over=finder.axis)
    return [*rows, *(Row((name,), summed, "parts are summed") for name in flow.sinks)]


def _gathered(finder: Finder, flow: Flow) -> list[Row]:
    gathered = call("shard", "col", output=R, over=finder.axis)
    summed = call("shard", "row", over=finder.axis)
    tables = [name for name in flow.sources if _kind(finder, name) in TABLES]
    return [
        *(
            Row((name,), gathered, "split, then gathered")
            for name in flow.sources
            if name not in tables
        ),
        *(Row((name,), summed, "parts are summed") for name in flow.sinks),
    ]


def _packed(finder: Finder, row: Row) -> Row:
    """A row with the sizes of the parts that are taken out of its modules' outputs."""
    blocks = finder.trial.blocks
    first = blocks.named[row.names[0]][0]
    parts = finder.trial.fed.parts.get(first, [])
    site = blocks.facts.sites[first]
    if row.style != "col" or len(parts) < 2 or sum(parts) != outputs_of(site):
        return row
    return row.with_argument("blocks", parts if len(set(parts)) > 1 else len(parts))


def _beside(row: Row) -> int:
    """Return the number of equal blocks, each with heads of its own, in what a row splits."""
    blocks = row.argument("blocks")
    return int(blocks.text) if isinstance(blocks, n.Lit) else 1


def _viewed(finder: Finder, row: Row) -> Row:
    """A row with as many blocks as a view first takes its modules' outputs apart into."""
    first = finder.trial.blocks.named[row.names[0]][0]
    count = finder.trial.fed.packed.get(first, 0)
    splits = row.style == "col" and count > 1
    return row.with_argument("blocks", count) if splits else row


def _heads(finder: Finder, name: str) -> int:
    """The size of the heads into which a projection's outputs are taken apart, or 0."""
    return finder.trial.fed.heads.get(finder.trial.blocks.named[name][0], 0)


def outputs_of(site: object) -> int:
    """The outputs of a projection."""
    assert isinstance(site, Site)
    return site.parameters["weight"].shape[site.dims["weight"].index("out")]


def _kind(finder: Finder, name: str) -> str:
    blocks = finder.trial.blocks
    return leaf_kind(blocks.facts.sites[blocks.named[name][0]])


def _valued(fact: str) -> object:
    """The value that a fact gives an argument: a number, a list of numbers, or a word."""
    return json.loads(fact) if fact[:1] in "[0123456789" else fact


def _said(refusal: Refusal) -> str:
    """Return the title of a refusal, with the line of the model where that is known."""
    return refusal.diagnostic.title[:SAID] + (refusal.diagnostic.fact("line") or "")
