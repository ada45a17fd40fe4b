"""Pairs of projections that can be split together: outputs of the first feed only the second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedlang.passes.shrinking.blocks import TABLES, Blocks, leaf_kind, splits

if TYPE_CHECKING:
    from schedlang.runtime.following.feeds import Use


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
    """What a projection reads, if it is nothing but other projections of blocks."""
    from schedlang.runtime.following.feeds import MIXED, STREAM

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
            {blocks.common(name) for name in group.sinks}, group.mixed,
        )  # fmt: skip
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
