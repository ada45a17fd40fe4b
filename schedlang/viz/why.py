"""Reasons: the rows that act on a module, and the reason for each collective of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Span
from schedlang.diagnostics.tables import format_bytes
from schedlang.language import nodes as n
from schedlang.language import printer
from schedlang.passes.elaborate.base_schedules import splice_file
from schedlang.passes.elaborate.rows import fold_names

if TYPE_CHECKING:
    from schedlang.ir.plan import Action, Plan
    from schedlang.passes.simulate.account import Account
    from schedlang.passes.simulate.traffic import Collective

# -- rows at a module or a parameter ---------------------------------------------------------------


def explain_rows(plan: Plan, file: n.File, fqn: str) -> str:
    """Describe the rows at a module, or at a parameter's module; refuses S209 an unknown name."""
    facts = plan.model
    site = facts.owner(fqn).fqn if fqn in facts.parameters else fqn
    if site not in facts.sites:
        names = [*facts.sites, *facts.parameters]
        title = f"the model has no module or parameter `{fqn}`"
        raise Refusal.unknown("S209", title, fqn, names, "there are")
    head = fqn or "the model"
    if fqn in facts.parameters:
        fact = facts.parameters[fqn]
        head += f"   {fact.dtype}{plan.layout(fqn).show()}"
    # without markers, which change nothing
    acting = (a for a in plan.rows_at(site) if a.has_effect)
    rows = [row_text(action, file) for action in acting]
    return "\n".join([head, *(rows or ["  no row acts on it"])])


def row_text(action: Action, file: n.File) -> str:
    """Describe one row: its place, its text, its step, and the selectors around it."""
    span, items = action.span, splice_file(file).items
    text = str(action.primitive)
    location = str(span) if span else ""
    if span:
        row = span.source.line(span.line)
        end = span.end_col - 1 if span.end_line == span.line else len(row)
        text = row[span.col - 1 : end] or text
    step = f'step "{action.step}"' if action.step else "outside of steps"
    selectors = next(_selectors_around(items, span, ()), ()) if span else ()
    by = " then ".join(f"`{path}`" for path in selectors)
    return f"  {location}   {text}   {step}" + (f", selected by {by}" if by else "")


def _selectors_around(
    node: object, span: Span, above: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Yield the selectors around and before the call at `span`."""
    if isinstance(node, tuple):
        for item in node:
            yield from _selectors_around(item, span, above)
    elif isinstance(node, n.Rule):
        if node.call.span == span:
            yield (*above, printer.paths(node.paths))
    elif isinstance(node, n.Do):
        if node.call.span == span:
            yield above
    elif isinstance(node, n.At):
        paths = printer.paths(node.paths)
        yield from _selectors_around(node.block.body, span, (*above, paths))
    elif isinstance(node, n.When):
        orelse = node.orelse.body if node.orelse else ()
        yield from _selectors_around((*node.block.body, *orelse), span, above)
    elif isinstance(node, n.Step | n.Def):
        yield from _selectors_around(node.block.body, span, above)


# -- collectives -----------------------------------------------------------------------------------


# why a kind of collective is needed at all
KINDS = {
    "all-reduce": "each rank has a partial sum, and all ranks need the full sum",
    "all-gather": "each rank has a shard, and all ranks need the full tensor",
    "reduce-scatter": "each rank has a partial sum, and needs one shard of the full sum",
    "all-to-all": "each rank has data for each other rank, or another dim is to be sharded",
    "send": "the next stage is on another rank",
    "broadcast": "one rank has what all need",
}
# the reason for a collective, by the first words of what it sends
REASONS = {
    "output": "the module is sharded, and the next one needs its full output",
    "input": "the module is sharded, and needs its input in a different placement",
    "parameters": "they are sharded over ranks that have different rows of the batch (ZeRO)",
    "grads of parts": "a whole parameter is used beside split tensors: each rank has a part of "
    "its gradient",
    "grads of ties": "stages on different ranks use one weight",
    "grads": "the ranks had different rows of the batch",
    "loss and gradient norm": "each rank has the loss of its rows and the norm of its parameters",
    "loss": "the logits are sharded, and the loss needs sums over all classes",
    "keys and values": "each rank has some tokens, and attends to those of all",
    "token": "the experts that tokens are routed to are on other ranks",
    "expert": "experts are sharded over ranks",
    "statistics": "the model takes sums over all rows of a batch",
    "to stage": "activations go forward along the pipeline",
    "grad to stage": "gradients go back along the pipeline",
}


@dataclass(frozen=True)
class Group:
    """Collectives that differ only in their module."""

    members: tuple[Collective, ...]

    @property
    def first(self) -> Collective:
        """One of them."""
        return self.members[0]

    def __str__(self) -> str:
        first, modules = self.first, fold_names([member.fqn for member in self.members])
        total = sum(member.total for member in self.members)
        times = sum(member.count for member in self.members)
        axes = ", ".join(first.axes)
        return (
            f"{first.kind} over {axes}   {first.phase}: {first.what}   {modules}   "
            f"{times} x {format_bytes(first.bytes)} = {format_bytes(total)}"
        )


def group_collectives(account: Account) -> tuple[Group, ...]:
    """Return all collectives of a step, in the order of `plan`, folded over equal modules."""
    groups: dict[object, list[Collective]] = {}
    for comm in account.collectives or ():
        key = comm.kind, comm.axes, comm.phase, comm.what, comm.bytes, comm.row
        groups.setdefault(key, []).append(comm)
    return tuple(Group(tuple(members)) for members in groups.values())


def list_collectives(account: Account) -> str:
    """List every kind of collective with its number."""
    lines = [f"{number:>4}  {group}" for number, group in enumerate(group_collectives(account))]
    return "\n".join(lines) or "no rank sends anything"


def explain_collective(plan: Plan, file: n.File, account: Account, number: int) -> str:
    """Explain the collective of a number: its row, and why it is needed.

    Raises Refusal S866 for an unknown number.
    """
    groups = group_collectives(account)
    if not 0 <= number < len(groups):
        none = "no rank sends anything" if account.collectives is not None else account.notes[-1]
        legal = (
            f"they are numbered 0 to {len(groups) - 1}: `why FILE --collectives`"
            if groups
            else none
        )
        title = f"there is no collective {number}"
        raise Refusal.of("S866", title, helps=(legal,))
    group = groups[number]
    return "\n".join([f"{number}  {group}", *_reason_lines(plan, file, group.members)])


def _reason_lines(plan: Plan, file: n.File, members: Sequence[Collective]) -> list[str]:
    first = members[0]
    ranks = plan.mesh.size(first.axes)
    lines = [f"  who     groups of {ranks} ranks along {', '.join(first.axes)}"]
    if first.places is not None and plan.cuts:
        places = sorted({stage for member in members for stage in member.places or ()})
        lines[-1] += f", at {plan.cuts[0].axis}={','.join(map(str, places))}"
    lines.append(f"  why     {KINDS.get(first.kind, first.kind)}")
    reason = next((text for prefix, text in REASONS.items() if first.what.startswith(prefix)), "")
    lines += [f"          {reason}"] if reason else []
    if first.what.endswith("again"):
        lines.append("          it is sent again, because the forward is computed again")
    row = next((action for action in plan.actions if action.row == first.row), None)
    lines.append(
        "  asked   by no row: it follows from several ranks"
        if row is None
        else f"  asked {row_text(row, file)}"
    )
    return lines
