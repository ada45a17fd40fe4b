"""attend: one call of attention over a sequence that lies on several ranks, by a named method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.context_parallel import nbody
from schedlang.runtime.context_parallel import ring as around
from schedlang.runtime.context_parallel.local_attention import BLOCK, Rules, Tokens
from schedlang.runtime.context_parallel.masks import Dropout, Mask, Reach
from schedlang.runtime.context_parallel.ring import Gathered, Ring, Rounds
from schedlang.runtime.context_parallel.token_layout import Layout, place_at
from schedlang.runtime.context_parallel.ulysses import Team, copied

# method -> how many groups it takes, the outermost first
METHODS: dict[str, tuple[int, ...]] = {
    "gather": (1,),  # keys and values of all ranks at once
    "ring": (1,),  # one block after the other
    "double ring": (2,),  # ring of nodes, ring inside each
    "ulysses": (1,),  # all-to-all between tokens and heads
    "usp": (2, 3),  # ring, or double ring, outside; Ulysses inside
    "nbody": (2,),  # a ring of teams, whose ranks share its steps
}


def ranks_of(groups: Sequence[Group]) -> int:
    """Over how many ranks the sequence is split."""
    return math.prod(group.size for group in groups)


def place_of(groups: Sequence[Group]) -> int:
    """This rank's place in a Layout over all of them: the last group's number counts fastest."""
    return place_at([group.rank for group in groups], [group.size for group in groups])


@dataclass(frozen=True)
class Way:
    """How a call runs: by which method, over which ranks, and with what of their tokens.

    groups   as many as `METHODS` says, the outermost first
    layout   which tokens each place has
    scale    of the scores; 1/sqrt(head_dim) if None
    block    scores of so many queries and keys exist at once, for each row and head
    """

    method: str
    groups: tuple[Group, ...]
    layout: Layout
    scale: float | None = None
    dropout: Dropout | None = None
    block: int = BLOCK

    @property
    def place(self) -> int:
        """This rank's place in the layout."""
        return place_of(self.groups)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, way: Way) -> Tensor:
    """The attention of this rank's queries to the keys of the whole sequence: [.., v's head_dim].

    q        [rows, heads, local tokens, head_dim], this place's tokens under the layout
    k, v     as many tokens, heads that divide q's
    mask     its tensors that lie with tokens: this rank's; `slopes`: those of all of q's heads.
             Their gradient is what this rank's queries give: a part, to be summed over the groups

    The result has q's dtype.  Refusal S681 for heads that Ulysses cannot divide.
    """
    return _attend(q, k, v, mask, way, False)[0]


def attend_lse(q: Tensor, k: Tensor, v: Tensor, mask: Mask, way: Way) -> tuple[Tensor, Tensor]:
    """As `attend`, with the log-sum-exp of each query's scores, [rows, heads, local tokens].

    It is -inf where a query sees nothing, does not count `sinks`, and has a gradient too.
    """
    return _attend(q, k, v, mask, way, True)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, way: Way, lse: bool
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, way)
    scale = q.shape[-1] ** -0.5 if way.scale is None else way.scale
    rules = Rules(mask.reach, scale, mask.cap, mask.slopes, mask.rows, way.dropout, way.block)
    if way.method in ("ulysses", "usp"):
        return _swapped(q, k, v, mask, rules, way, lse)
    if way.method == "nbody":
        ring, team = way.groups
        if mask.rows is not None and mask.rows.shape[2] == 1:
            rules = replace(rules, rows=mask.rows.expand(-1, -1, q.shape[2], -1))
        return _shared(q, k, v, mask, rules, nbody.Bodies(ring, team, way.layout))
    at = Tokens(way.layout.runs[way.place], mask.tags)
    return _run(q, k, v, rules, mask.sinks, _rounds(way, mask.reach), at)


def _rounds(way: Way, reach: Reach) -> Rounds:
    if way.method == "gather":
        return Gathered(way.groups[0], way.layout)
    return Ring(way.groups, way.layout, reach)


def _swapped(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, rules: Rules, way: Way, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Ulysses around what is left of the ring, if anything is."""
    *outer, inner = way.groups
    layout = way.layout
    refuse_heads(q.shape[1], k.shape[1], inner.size)
    k, v = copied(k, inner.size), copied(v, inner.size)
    place, joined = place_of(outer), layout.joined(inner.size)
    team = Team(inner, layout, place, joined.runs[place])
    mine = q.shape[1] // inner.size
    heads = slice(inner.rank * mine, (inner.rank + 1) * mine)
    rules = replace(
        rules,
        slopes=None if mask.slopes is None else mask.slopes[heads],
        rows=None if mask.rows is None else team.rows(mask.rows, q.shape[1]),
        dropout=None if rules.dropout is None else rules.dropout.of_heads(heads),
    )
    sinks = None if mask.sinks is None else mask.sinks[heads]
    at = Tokens(joined.runs[place], team.tags(mask.tags))
    ring = Ring(tuple(outer), joined, rules.reach)
    out, lse = _run(team.heads(q), team.heads(k), team.heads(v), rules, sinks, ring, at)
    return team.tokens(out), team.tokens(lse[..., None])[..., 0] if with_lse else lse


def refuse_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Refusal S681 unless `ranks` can share the heads in Ulysses; kv heads are copied as needed."""
    if heads % ranks:
        legal = [n for n in range(2, heads + 1) if heads % n == 0]
        raise Refusal(
            Diagnostic(
                "S681",
                f"Ulysses cannot divide {heads} heads between {ranks} ranks",
                notes=(f"{kv_heads} heads of keys and values would be copied as needed",),
                helps=(
                    f"an axis of {' or '.join(map(str, legal)) or 'one'} ranks",
                    "or a ring, which does not split heads: `context_parallel(ring, ...)`",
                    "or a ring around a smaller Ulysses: `context_parallel(usp, ...)`",
                ),
            )
        )


def _check(q: Tensor, k: Tensor, v: Tensor, way: Way) -> None:
    assert len(way.groups) in METHODS[way.method], (way.method, len(way.groups))
    assert ranks_of(way.groups) == len(way.layout.runs), "the layout is over all of their ranks"
    tokens = way.layout.counts[way.place]
    assert q.shape[2] == k.shape[2] == v.shape[2] == tokens, (q.shape, k.shape, v.shape, tokens)
    assert q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1], (q.shape, k.shape, v.shape)


def _run(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, sinks: Tensor | None, rounds: Rounds, at: Tokens
) -> tuple[Tensor, Tensor]:
    plain = replace(rules, slopes=None, rows=None)
    out, lse = cast(
        tuple[Tensor, Tensor],
        around.Attention.apply(  # type: ignore[no-untyped-call]
            q, k, v, rules.slopes, rules.rows, around.Call(plain, rounds, at.runs), *at.tags
        ),
    )
    return _beside(out, lse, sinks), lse


def _shared(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, rules: Rules, teams: nbody.Bodies
) -> tuple[Tensor, Tensor]:
    given = nbody.Given(teams, replace(rules, slopes=None, rows=None))
    out, lse = cast(
        tuple[Tensor, Tensor],
        nbody.Attention.apply(  # type: ignore[no-untyped-call]
            q, k, v, rules.slopes, rules.rows, given, *mask.tags
        ),
    )
    return _beside(out, lse, mask.sinks), lse


def _beside(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The result where sinks take a part of the softmax."""
    if sinks is None:
        return out
    share = (lse - sinks[:, None].to(lse.dtype)).sigmoid()
    return out * share[..., None].to(out.dtype)
