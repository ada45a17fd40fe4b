"""Why ranks send something to each other: one kind of collective, its row, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlang.amounts import size
from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.reading.fold import folded
from schedlang.passes.showing.why import row_text

if TYPE_CHECKING:
    from schedlang import nodes as n
    from schedlang.passes.costs.account import Account
    from schedlang.passes.costs.sent import Collective
    from schedlang.plan import Plan

# why a kind of collective is needed at all
KINDS = {
    "all-reduce": "each rank has a partial sum, and all ranks need the full sum",
    "all-gather": "each rank has a shard, and all ranks need the full tensor",
    "reduce-scatter": "each rank has a partial sum, and needs one shard of the full sum",
    "all-to-all": "each rank has data for each other rank, or another dim is to be sharded",
    "send": "the next stage is on another rank",
    "broadcast": "one rank has what all need",
}
# what it means for what is sent, by its first words
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
    """Collectives that differ in nothing but their module."""

    members: tuple[Collective, ...]

    @property
    def first(self) -> Collective:
        """One of them."""
        return self.members[0]

    def __str__(self) -> str:
        one, where = self.first, folded([each.fqn for each in self.members])
        total = sum(each.total for each in self.members)
        times = sum(each.count for each in self.members)
        axes = ", ".join(one.axes)
        return (
            f"{one.kind} over {axes}   {one.phase}: {one.what}   {where}   "
            f"{times} x {size(one.bytes)} = {size(total)}"
        )


def groups(account: Account) -> tuple[Group, ...]:
    """All collectives of a step, in the order of `plan`, folded over equal modules."""
    found: dict[object, list[Collective]] = {}
    for one in account.collectives or ():
        key = one.kind, one.axes, one.phase, one.what, one.bytes, one.row
        found.setdefault(key, []).append(one)
    return tuple(Group(tuple(members)) for members in found.values())


def listed(account: Account) -> str:
    """Every kind with its number."""
    lines = [f"{number:>4}  {group}" for number, group in enumerate(groups(account))]
    return "\n".join(lines) or "no rank sends anything"


def why_collective(plan: Plan, file: n.File, account: Account, number: int) -> str:
    """What the collective of a number is, the row that asks for it, and why it is needed.

    Raises Refusal S866 for a number that none has.
    """
    known = groups(account)
    if not 0 <= number < len(known):
        none = "no rank sends anything" if account.collectives is not None else account.notes[-1]
        legal = (
            f"they are numbered 0 to {len(known) - 1}: `why FILE --collectives`" if known else none
        )
        title = f"there is no collective {number}"
        raise Refusal(Diagnostic("S866", title, helps=(legal,)))
    group = known[number]
    return "\n".join([f"{number}  {group}", *_told(plan, file, group.members)])


def _told(plan: Plan, file: n.File, members: Sequence[Collective]) -> list[str]:
    one = members[0]
    ranks = plan.mesh.size(one.axes)
    lines = [f"  who     groups of {ranks} ranks along {', '.join(one.axes)}"]
    if one.places is not None and plan.cuts:
        places = sorted({place for each in members for place in each.places or ()})
        lines[-1] += f", at {plan.cuts[0].axis}={','.join(map(str, places))}"
    lines.append(f"  why     {KINDS.get(one.kind, one.kind)}")
    reason = next((text for word, text in REASONS.items() if one.what.startswith(word)), "")
    lines += [f"          {reason}"] if reason else []
    if one.what.endswith("again"):
        lines.append("          it is sent again, because the forward is computed again")
    row = next((action for action in plan.actions if action.row == one.row), None)
    lines.append(
        "  asked   by no row: it follows from several ranks" if row is None
        else f"  asked {row_text(row, file)}"
    )  # fmt: skip
    return lines
