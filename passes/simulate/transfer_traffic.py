"""Traffic of a transfer from one plan's layout into another's, counted without ranks (`diff`,
`plan`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Refusal, quote_names
from schedlang.diagnostics.tables import format_bytes, format_count
from schedlang.ir.plan import Plan

if TYPE_CHECKING:
    from schedlang.runtime.checkpointing.holdings import Holding
    from schedlang.runtime.redistribution.route import Route, TensorLayout


@dataclass(frozen=True)
class Transfer:
    """Figures of a transfer; ranks are those of the job.

    world             number of ranks; apart: ranks of the second layout come after those of the
                      first
    bound             the fewest bytes that any transfer sends
    sender, receiver  the rank with most bytes, and these bytes
    """

    world: int
    apart: bool
    tensors: int
    bytes: int
    bound: int
    sender: tuple[int, int]
    receiver: tuple[int, int]
    pairs: int
    messages: int
    bucket: int

    def to_json(self) -> dict[str, object]:
        """Return the figures as plain values."""
        return {
            "ranks": self.world,
            "apart": self.apart,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "bound": self.bound,
            "largest_sender": dict(zip(("rank", "bytes"), self.sender)),
            "largest_receiver": dict(zip(("rank", "bytes"), self.receiver)),
            "pairs_of_ranks": self.pairs,
            "messages": self.messages,
            "bucket_bytes": self.bucket,
        }

    def text(self, first: str, second: str) -> str:
        """Format the figures for a terminal."""
        where_text = ", on other ranks" if self.apart else ""
        if not self.bytes:
            nothing = "nothing is sent: every rank holds what it is to hold"
            return f"transfer {first} -> {second}, {self.world} ranks{where_text}\n  {nothing}"
        return "\n".join(
            (
                f"transfer {first} -> {second}, {self.world} ranks{where_text}",
                f"  sent      {format_bytes(self.bytes)} of {format_count(self.tensors)} tensors,"
                f" at least {format_bytes(self.bound)} are needed",
                f"  sender    rank {self.sender[0]} sends most, {format_bytes(self.sender[1])}",
                f"  receiver  rank {self.receiver[0]} receives most,"
                f" {format_bytes(self.receiver[1])}",
                f"  messages  {self.messages} of at most {format_bytes(self.bucket)},"
                f" between {self.pairs} pairs of ranks",
            )
        )


def count_transfer(
    first: Plan,
    second: Plan,
    batch: Mapping[str, Any] | None,
    loss: Any = None,
    *,
    apart: bool = False,
) -> Transfer:
    """Count what `schedlang.transfer` sends between programs of two plans of one model.

    Raises Refusal S634 or S635 where the plans are of different models.
    """
    from schedlang.runtime.redistribution.route import find_route, group_by_layout

    shift = first.mesh.world if apart else 0
    world = max(first.mesh.world, shift + second.mesh.world)
    source = _layouts_of(first, batch, loss, range(first.mesh.world), world)
    target = _layouts_of(second, batch, loss, range(shift, shift + second.mesh.world), world)
    if unmatched := sorted(source.keys() ^ target.keys()):
        helps = ("give two schedules of the same model",)
        raise Refusal.of("S634", f"only one of them has {quote_names(unmatched)}", helps=helps)
    route = find_route(group_by_layout(source, target), world)
    return _figures(route, apart)


def _figures(route: Route, apart: bool) -> Transfer:
    from schedlang.runtime.transfer.transfer import BUCKET

    sender, receiver = int(route.sent.argmax()), int(route.received.argmax())
    return Transfer(
        route.world,
        apart,
        sum(len(kind.names) for kind in route.kinds),
        int(route.bytes.sum()),
        int(route.bound.sum()),
        (sender, int(route.sent[sender])),
        (receiver, int(route.received[receiver])),
        len(route.pairs[0]),
        route.messages(BUCKET),
        BUCKET,
    )


def _layouts_of(
    plan: Plan, batch: Mapping[str, Any] | None, loss: Any, ranks: range, world: int
) -> dict[str, TensorLayout]:
    """Return the layout of each parameter of a plan's program in a job."""
    from schedlang.runtime.redistribution.route import TensorLayout

    params = plan.model.unique_parameters
    return {
        name: TensorLayout(holding.sharding(plan.mesh, ranks, world), params[name].itemsize)
        for name, holding in _holdings(plan, batch, loss).items()
    }


def _holdings(plan: Plan, batch: Mapping[str, Any] | None, loss: Any) -> Mapping[str, Holding]:
    from schedlang.passes.analyze.holdings import holdings_of
    from schedlang.passes.analyze.input_checks import add_forward_line
    from schedlang.passes.analyze.prepare import prepare
    from schedlang.passes.partition.staging import stages_of
    from schedlang.passes.propagate.propagate import Traced
    from schedlang.runtime.batch import largest_part

    if not any(plan.mesh.size(cut.axis) > 1 for cut in plan.cuts):
        return holdings_of(plan, stages_of(plan, Traced(), {}, None))
    if batch is None:
        title = "which stage holds what is not known: there is no batch to cut the model with"
        helps = ("define `batch(seed)` in the model file",)
        raise Refusal.of("S642", title, helps=helps)
    with add_forward_line(plan.model.model):
        sample = largest_part(batch, plan.share_weights, plan.micro)
    return prepare(plan, sample, loss).holdings
