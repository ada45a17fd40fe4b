"""Two rows that meet: whether the second may stand below the first, from what both declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Label, Refusal
from schedlang.diagnostics.source import Span
from schedlang.ir.features import Injected, Renewing
from schedlang.ir.model import titled
from schedlang.ir.primitive import Facet, Primitive, both_change, conflicts, overturned
from schedlang.ir.sharing import above, holders

if TYPE_CHECKING:
    from schedlang.ir.plan import Action, Plan

Meeting = tuple[str, str]  # a site of the first row and one of the second


def check(plan: Plan, primitive: Primitive, sites: Sequence[str], span: Span) -> None:
    """Refuse a row that may not stand below one that is already in the plan (S501 to S504).

    Rows meet where their sites are equal, one lies in the other, or they share a tied parameter; a
    verb that changes which parameters there are meets all rows.
    """
    sites = tuple(sites)
    if primitive.changes(Facet.RECOMPUTE):
        _once_each(sites, span)
    rows = range(len(plan.actions))
    near = rows if primitive.foremost else sorted(plan.trail.around(sites, plan.model.ties))
    for first in map(plan.actions.__getitem__, near):
        relation = conflicts(first.primitive, primitive)
        if relation not in ("clash", "both"):
            continue
        pairs = Meetings(plan, first.sites, sites)
        if relation == "clash":
            _clash(first, primitive, pairs or [(first.sites[0], sites[0])], span)
        if primitive.foremost and not pairs:
            continue
        for rule in filter(None, map(RULES.get, both_change(first.primitive, primitive))):
            rule(plan, first, primitive, pairs, span)


class Meetings(Sequence[Meeting]):
    """The meetings of two rows, found when they are asked for: most rules look at other things
    first."""

    def __init__(self, plan: Plan, first: Sequence[str], then: Sequence[str]) -> None:
        self._given = plan, first, then

    @cached_property
    def _found(self) -> list[Meeting]:
        return list(meetings(*self._given))

    def __getitem__(self, place: Any) -> Any:
        return self._found[place]

    def __len__(self) -> int:
        return len(self._found)


def _once_each(sites: tuple[str, ...], span: Span) -> None:
    """Refuse a row that recomputes a module, and another one inside of it (S502)."""
    here = set(sites)
    if not above(sites) & here:
        return
    for site in sites:
        outer = next((h for h in holders(site) if h in here), None)
        if outer is not None:
            label = Label(span, f"selects {titled(site)}, and {titled(outer)} around it")
            helps = ("select only one of the two: `*` in a path stands for one level",)
            title = "nested checkpoints recompute the inner module twice"
            raise Refusal.of("S502", title, label, helps=helps)


def meetings(plan: Plan, first: Sequence[str], then: Sequence[str]) -> Iterator[Meeting]:
    """Pairs of sites that are equal or nested, then those that share a tensor."""
    outer, inner = set(first), set(then)
    for site in then:
        for holder in (site, *holders(site)):
            if holder in outer:
                yield holder, site
    for site in first:
        for holder in holders(site):
            if holder in inner:
                yield site, holder
    for names in plan.model.ties:
        owners = [name.rpartition(".")[0] for name in names]
        for one in owners:
            for other in owners:
                if one != other and one in outer and other in inner:
                    yield one, other


def tied(plan: Plan, sites: Sequence[str]) -> Iterator[str]:
    """The modules elsewhere that share a tensor with one of these or with what they hold."""
    here = set(sites)
    for names in plan.model.ties:
        owners = {name.rpartition(".")[0] for name in names}
        if any(holder in here for owner in owners for holder in (owner, *holders(owner))):
            yield from owners


def _more(meetings: Sequence[Meeting]) -> tuple[str, ...]:
    return (f"and {len(meetings) - 1} more like it",) if len(meetings) > 1 else ()


def _refuse(
    code: str,
    title: str,
    now: str,
    before: str,
    first: Action,
    span: Span,
    notes: Iterable[str] = (),
    helps: Iterable[str] = (),
) -> None:
    also = (Label(first.span, before),)
    raise Refusal.of(code, title, Label(span, now), also, tuple(notes), tuple(helps))


NOUNS = {
    "recompute": "recomputation",
    "residence": "offloading",
    "state": "optimizer state",
    "trained": "trainable parameters",
}


def _clash(first: Action, then: Primitive, meetings: Sequence[Meeting], span: Span) -> None:
    name = type(then).__name__
    facets = overturned(first.primitive, then)
    what = " and ".join(NOUNS.get(facet, facet) for facet in facets) or "parameters"
    one, other = meetings[0]
    _refuse(
        "S503",
        f"`{name}` must stand above `{first.name}`",
        f"changes the {what} of {titled(other)}",
        f"uses the {what} of {titled(one)}",
        first,
        span,
        _more(meetings),
        [f"move `{name}` above this `{first.name}`"],
    )


# ---- two rows that write one facet: each facet's own rule ----------------------------------


def _recompute(
    plan: Plan, first: Action, then: Primitive, meetings: Sequence[Meeting], span: Span
) -> None:
    """Nested or equal regions would be recomputed twice."""
    one, other = meetings[0]
    more = _more(meetings)
    if one == other:
        title = f"{titled(one)} is already checkpointed"
        before, now = "first checkpointed here", "would recompute it twice"
        _refuse("S501", title, now, before, first, span, more, ["drop one of the two"])
    inner, outer = (one, other) if one.startswith(f"{other}." if other else "") else (other, one)
    _refuse(
        "S502",
        "nested checkpoints recompute the inner module twice",
        f"covers {titled(other)}",
        f"covers {titled(one)}",
        first,
        span,
        (f"{titled(inner)} lies inside {titled(outer)}", *more),
        ["keep the outer `checkpoint`, and list what it saves: `checkpoint(save=[...])`"],
    )


def _over(plan: Plan, primitive: Primitive) -> set[str]:
    """The plain axes that a row names."""
    return set(plan.mesh.fold(primitive.along))


def _placement(
    plan: Plan, first: Action, then: Primitive, meetings: Sequence[Meeting], span: Span
) -> None:
    """An axis can split a tensor once; another axis may split it again."""
    shared = sorted(_over(plan, first.primitive) & _over(plan, then))
    if not shared or type(then) is not type(first.primitive):
        return
    same = [pair for pair in meetings if pair[0] == pair[1]]
    if not same:
        return
    site = titled(same[0][0])
    _refuse(
        "S504",
        f"{site} is already sharded over `{shared[0]}`",
        f"shards {site} again",
        "first sharded here",
        first,
        span,
        ("a mesh axis can shard a tensor only once", *_more(same)),
        ["drop one of the two rows, or use another axis"],
    )


def _once(done: str) -> Callable[[Plan, Action, Primitive, Sequence[Meeting], Span], None]:
    """The rule of a facet that one row per module may write."""

    def rule(
        plan: Plan, first: Action, then: Primitive, meetings: Sequence[Meeting], span: Span
    ) -> None:
        if isinstance(first.primitive, Renewing) and not isinstance(then, Renewing):
            return
        same = [pair for pair in meetings if pair[0] == pair[1]]
        parts = {_part(first.primitive), _part(then)}
        apart = len(parts) == 2 and "" not in parts
        if same and not apart:
            title = f"{titled(same[0][0])} {done} twice"
            now, before = "this is the second time", "first here"
            helps = ["drop one of the two"]
            _refuse("S501", title, now, before, first, span, _more(same), helps)

    return rule


def _part(primitive: Primitive) -> str:
    return primitive.part if isinstance(primitive, Injected) else ""


def _residence(
    plan: Plan, first: Action, then: Primitive, meetings: Sequence[Meeting], span: Span
) -> None:
    """A tensor class lives in one place; two rows may move two classes."""
    if type(first.primitive) is type(then) and _subject(first.primitive) == _subject(then):
        one, other = meetings[0]
        title = f"{titled(other)} is offloaded already"
        now, before = f"offloads {titled(other)}", f"offloads {titled(one)}"
        helps = ["drop one of the two"]
        _refuse("S501", title, now, before, first, span, _more(meetings), helps)


def _subject(primitive: Primitive) -> object:
    """The first argument: which of a module's tensors a row is about."""
    return next(iter(vars(primitive).values()), None)


Rule = Callable[["Plan", "Action", Primitive, Sequence[Meeting], Span], None]

# stage, state and order are facts of the whole plan: their verbs' own checks compare them there
RULES: Mapping[str, Rule] = {
    "structure": _once("is computed by a kernel"),
    "shape": _once("is padded"),
    "dtype": _once("is cast"),
    "placement": _placement,
    "recompute": _recompute,
    "residence": _residence,
}


def check_cuts(plan: Plan) -> None:
    """Refuse cuts that do not make the stages that the order needs (S609)."""
    starts = [fqn for cut in plan.cuts for fqn in cut.before]
    if not starts:
        return
    ranks = plan.mesh.size(plan.cuts[0].axis)
    needed = plan.stages(plan.cuts[0].axis)
    if len(starts) + 1 == needed or needed == 1:
        return
    chunks = needed // ranks
    row = plan.rows_changing(Facet.STAGE)[0]
    made = f"{len(starts)} cut{'s make' if len(starts) > 1 else ' makes'} {len(starts) + 1} stages"
    each = f"{ranks} ranks with {chunks} chunk{'s' * (chunks > 1)} each"
    title = f"{made}, and {needed} are needed"
    helps = (f"select {needed - 1} modules at which stages start",)
    raise Refusal.of("S609", title, Label(row.span), notes=(each,), helps=helps)
