"""Conflicts between rows: whether a new row may stand below the rows that a plan has.

`check` is called for each row before it is added. Two rows can conflict where their sites are
equal, nested or share a parameter; the rules depend on the facets that both primitives declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Label, Refusal
from schedlang.diagnostics.source import Span
from schedlang.ir.features import Injected, Renewing
from schedlang.ir.model import quote_module
from schedlang.ir.primitive import Facet, Primitive, find_overturned, relation_of, shared_facets
from schedlang.ir.sharing import all_parents_of, parents_of

if TYPE_CHECKING:
    from schedlang.ir.plan import Action, Plan

SitePair = tuple[str, str]  # a site of the first row and one of the second


def check_row(plan: Plan, primitive: Primitive, sites: Sequence[str], span: Span) -> None:
    """Refuse a row that conflicts with a row that is already in the plan (S501 to S504).

    Rows are compared where their sites are equal, one contains the other, or they share a tied
    parameter. A primitive that changes the set of parameters is compared with all rows.
    """
    sites = tuple(sites)
    if primitive.changes(Facet.RECOMPUTE):
        _check_nested_sites(sites, span)
    rows = range(len(plan.actions))
    nearby = rows if primitive.foremost else sorted(plan.trail.rows_around(sites, plan.model.ties))
    for earlier in map(plan.actions.__getitem__, nearby):
        relation = relation_of(earlier.primitive, primitive)
        if relation not in ("clash", "both"):
            continue
        pairs = SitePairs(plan, earlier.sites, sites)
        if relation == "clash":
            _refuse_clash(earlier, primitive, pairs or [(earlier.sites[0], sites[0])], span)
        if primitive.foremost and not pairs:
            continue
        for rule in filter(None, map(RULES.get, shared_facets(earlier.primitive, primitive))):
            rule(plan, earlier, primitive, pairs, span)


class SitePairs(Sequence[SitePair]):
    """The pairs of common sites of two rows, computed on first use: most rules do not need them."""

    def __init__(self, plan: Plan, first_sites: Sequence[str], second_sites: Sequence[str]) -> None:
        self._arguments = plan, first_sites, second_sites

    @cached_property
    def _found(self) -> list[SitePair]:
        return list(find_site_pairs(*self._arguments))

    def __getitem__(self, index: Any) -> Any:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)


def _check_nested_sites(sites: tuple[str, ...], span: Span) -> None:
    """Refuse a row that recomputes a module and also a module inside it (S502)."""
    site_set = set(sites)
    if not all_parents_of(sites) & site_set:
        return
    for site in sites:
        outer = next((h for h in parents_of(site) if h in site_set), None)
        if outer is not None:
            label = Label(
                span, f"selects {quote_module(site)}, and {quote_module(outer)} around it"
            )
            helps = ("select only one of the two: `*` in a path stands for one level",)
            title = "nested checkpoints recompute the inner module twice"
            raise Refusal.of("S502", title, label, helps=helps)


def find_site_pairs(
    plan: Plan, first_sites: Sequence[str], second_sites: Sequence[str]
) -> Iterator[SitePair]:
    """Yield pairs of sites that are equal or nested, then pairs that share a tensor."""
    outer, inner = set(first_sites), set(second_sites)
    for site in second_sites:
        for holder in (site, *parents_of(site)):
            if holder in outer:
                yield holder, site
    for site in first_sites:
        for holder in parents_of(site):
            if holder in inner:
                yield site, holder
    for names in plan.model.ties:
        owners = [name.rpartition(".")[0] for name in names]
        for owner in owners:
            for other_owner in owners:
                if owner != other_owner and owner in outer and other_owner in inner:
                    yield owner, other_owner


def tied_modules(plan: Plan, sites: Sequence[str]) -> Iterator[str]:
    """Yield the modules that share a tensor with one of `sites` or with a module inside one."""
    site_set = set(sites)
    for names in plan.model.ties:
        owners = {name.rpartition(".")[0] for name in names}
        if any(holder in site_set for owner in owners for holder in (owner, *parents_of(owner))):
            yield from owners


def _count_more(meetings: Sequence[SitePair]) -> tuple[str, ...]:
    return (f"and {len(meetings) - 1} more like it",) if len(meetings) > 1 else ()


def _refuse(
    code: str,
    title: str,
    label: str,
    first_label: str,
    first: Action,
    span: Span,
    notes: Iterable[str] = (),
    helps: Iterable[str] = (),
) -> None:
    labels = (Label(first.span, first_label),)
    raise Refusal.of(code, title, Label(span, label), labels, tuple(notes), tuple(helps))


NOUNS = {
    "recompute": "recomputation",
    "residence": "offloading",
    "state": "optimizer state",
    "trained": "trainable parameters",
}


def _refuse_clash(first: Action, then: Primitive, meetings: Sequence[SitePair], span: Span) -> None:
    """Refuse (S503) a row that must stand above the row `first`."""
    name = type(then).__name__
    facets = find_overturned(first.primitive, then)
    changed = " and ".join(NOUNS.get(facet, facet) for facet in facets) or "parameters"
    first_site, site = meetings[0]
    _refuse(
        "S503",
        f"`{name}` must stand above `{first.name}`",
        f"changes the {changed} of {quote_module(site)}",
        f"uses the {changed} of {quote_module(first_site)}",
        first,
        span,
        _count_more(meetings),
        [f"move `{name}` above this `{first.name}`"],
    )


# ---- two rows that write one facet: each facet's own rule ----------------------------------


def _check_recompute(
    plan: Plan, first: Action, then: Primitive, meetings: Sequence[SitePair], span: Span
) -> None:
    """Refuse equal (S501) and nested (S502) regions, which would be recomputed twice."""
    earlier, site = meetings[0]
    notes = _count_more(meetings)
    if earlier == site:
        title = f"{quote_module(earlier)} is already checkpointed"
        first_label, label = "first checkpointed here", "would recompute it twice"
        _refuse("S501", title, label, first_label, first, span, notes, ["drop one of the two"])
    inner, outer = (
        (earlier, site) if earlier.startswith(f"{site}." if site else "") else (site, earlier)
    )
    _refuse(
        "S502",
        "nested checkpoints recompute the inner module twice",
        f"covers {quote_module(site)}",
        f"covers {quote_module(earlier)}",
        first,
        span,
        (f"{quote_module(inner)} lies inside {quote_module(outer)}", *notes),
        ["keep the outer `checkpoint`, and list what it saves: `checkpoint(save=[...])`"],
    )


def _axes_of(plan: Plan, primitive: Primitive) -> set[str]:
    """Return the mesh axes that a row names, with views replaced by their axes."""
    return set(plan.mesh.fold(primitive.along))


def _check_placement(
    plan: Plan, first: Action, then: Primitive, meetings: Sequence[SitePair], span: Span
) -> None:
    """Refuse (S504) a second split of a tensor over the same axis; another axis is allowed."""
    shared = sorted(_axes_of(plan, first.primitive) & _axes_of(plan, then))
    if not shared or type(then) is not type(first.primitive):
        return
    shared_sites = [pair for pair in meetings if pair[0] == pair[1]]
    if not shared_sites:
        return
    site = quote_module(shared_sites[0][0])
    _refuse(
        "S504",
        f"{site} is already sharded over `{shared[0]}`",
        f"shards {site} again",
        "first sharded here",
        first,
        span,
        ("a mesh axis can shard a tensor only once", *_count_more(shared_sites)),
        ["drop one of the two rows, or use another axis"],
    )


def _one_per_module(
    action_text: str,
) -> Callable[[Plan, Action, Primitive, Sequence[SitePair], Span], None]:
    """Return the rule of a facet that only one row per module may change (S501)."""

    def rule(
        plan: Plan, first: Action, then: Primitive, meetings: Sequence[SitePair], span: Span
    ) -> None:
        if isinstance(first.primitive, Renewing) and not isinstance(then, Renewing):
            return
        same_sites = [pair for pair in meetings if pair[0] == pair[1]]
        parts = {_part_of(first.primitive), _part_of(then)}
        different = len(parts) == 2 and "" not in parts
        if same_sites and not different:
            title = f"{quote_module(same_sites[0][0])} {action_text} twice"
            label, first_label = "this is the second time", "first here"
            helps = ["drop one of the two"]
            _refuse("S501", title, label, first_label, first, span, _count_more(same_sites), helps)

    return rule


def _part_of(primitive: Primitive) -> str:
    return primitive.part if isinstance(primitive, Injected) else ""


def _check_residence(
    plan: Plan, first: Action, then: Primitive, meetings: Sequence[SitePair], span: Span
) -> None:
    """Refuse (S501) a second place for one class of tensors; rows may move different classes."""
    if type(first.primitive) is type(then) and _tensor_class(first.primitive) == _tensor_class(
        then
    ):
        earlier, site = meetings[0]
        title = f"{quote_module(site)} is offloaded already"
        label, text = f"offloads {quote_module(site)}", f"offloads {quote_module(earlier)}"
        helps = ["drop one of the two"]
        _refuse("S501", title, label, text, first, span, _count_more(meetings), helps)


def _tensor_class(primitive: Primitive) -> object:
    """Return the first argument of a row: which of a module's tensors the row moves."""
    return next(iter(vars(primitive).values()), None)


Rule = Callable[["Plan", "Action", Primitive, Sequence[SitePair], Span], None]

# stage, state and order belong to the whole plan: the `check` of their primitives compares them
RULES: Mapping[str, Rule] = {
    "structure": _one_per_module("is computed by a kernel"),
    "shape": _one_per_module("is padded"),
    "dtype": _one_per_module("is cast"),
    "placement": _check_placement,
    "recompute": _check_recompute,
    "residence": _check_residence,
}


def check_cuts(plan: Plan) -> None:
    """Refuse stage cuts whose number does not fit the ranks and chunks of the order (S609)."""
    starts = [fqn for cut in plan.cuts for fqn in cut.before]
    if not starts:
        return
    ranks = plan.mesh.size(plan.cuts[0].axis)
    needed = plan.stages(plan.cuts[0].axis)
    if len(starts) + 1 == needed or needed == 1:
        return
    chunks = needed // ranks
    row = plan.rows_changing(Facet.STAGE)[0]
    cuts = f"{len(starts)} cut{'s make' if len(starts) > 1 else ' makes'} {len(starts) + 1} stages"
    needed_text = f"{ranks} ranks with {chunks} chunk{'s' * (chunks > 1)} each"
    title = f"{cuts}, and {needed} are needed"
    helps = (f"select {needed - 1} modules at which stages start",)
    raise Refusal.of("S609", title, Label(row.span), notes=(needed_text,), helps=helps)
