"""What lies on the next rank of a pipeline: what is refused, and in which rounds state goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NoReturn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.cutting.parks import peer_rows
from schedlang.plan import Action, Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from schedlang.passes.cutting.staging import Staged
    from schedlang.passes.running.build import Builder
    from schedlang.runtime.keeping.away import Tiers
    from schedlang.runtime.keeping.peer import Peer
    from schedlang.runtime.saving.holding import Holding

NEAR = "keep it in host memory: `offload(optimizer, to=cpu)`"
HOST = "keep them in host memory: `offload({}, to=cpu)`"


def check_peers(plan: Plan, staged: Staged) -> None:
    """Refuse rows to a peer that would gain nothing, or that could not be run (S851)."""
    for row in peer_rows(plan):
        _check_axis(row, staged)
    states, lodgings = peer_rows(plan, "optimizer"), peer_rows(plan, "activations")
    if states and any(store.tier == "disk" for store in plan.stores):
        _refuse(
            states[0], "optimizer state cannot be sent to a peer where another row offloads to"
                       " disk",
            "a step that finds the disk full is undone, but the state has been sent already",
            (NEAR, "or keep everything in memory: `to=cpu`"),
        )  # fmt: skip
    if states:
        _check_homes(plan, states[0])
    if lodgings and staged.timeline.slices > 1:
        _refuse(
            lodgings[0], "activations of slices cannot be sent to a peer",
            "slices of one sequence share keys and values, which sending one slice would remove",
            (f"leave `slices` out, or {HOST.format('activations')}",),
        )  # fmt: skip


def _check_axis(row: Action, staged: Staged) -> None:
    """A peer is the next rank of the pipeline: along other axes ranks hold as much."""
    over, what = row.primitive.over, row.primitive.what  # type: ignore[attr-defined]
    if over == staged.axis:
        return
    said = "state" if what == "optimizer" else f"of {what}"
    near = NEAR if what == "optimizer" else HOST.format(what)
    less = {
        "optimizer": f"or keep a shard on each rank: `zero(stage=1, over={over})`",
        "activations": "or save fewer of them: `layers.*  checkpoint()`",
    }
    _refuse(
        row, f"`to=peer` over `{over}` saves no memory: each rank keeps as much {said}",
        "ranks would only exchange it: none would hold less",
        (f"use the axis of the pipeline: `over={staged.axis}`" if staged.axis else near,
         less[what]),
    )  # fmt: skip


def _check_homes(plan: Plan, row: Action) -> None:
    """State goes to a peer from parameters that lie on the device."""
    from schedlang.passes.preparing.residence import tiers_of

    lost = (n for n, t in tiers_of(plan).items() if t.state == "peer" and t.parameter != "device")
    name = next(lost, None)
    if name is not None:
        _refuse(
            row, f"`{name}` is in host memory, and is updated there",
            "its optimizer state would go to the host through another rank",
            (NEAR, "or keep its parameters on the device"),
        )  # fmt: skip


def _refuse(row: Action, said: str, note: str, helps: tuple[str, ...]) -> NoReturn:
    refusal = Refusal(Diagnostic("S851", said, notes=(note,), helps=helps))
    raise refusal.at(row.span) if row.span is not None else refusal


def peer_of(
    builder: Builder,
    found: Mapping[str, nn.Parameter],
    tiers: Mapping[str, Tiers],
    optimizer: Callable[..., torch.optim.Optimizer] | None,
) -> Peer | None:
    """This rank's place in the ring; None where no state goes to a peer, or nobody steps here."""
    from schedlang.runtime.collectives import comm
    from schedlang.runtime.keeping.peer import Peer
    from schedlang.runtime.stepping.elementwise import is_elementwise, is_tensorwise
    from schedlang.runtime.storage.leaving import local

    rows = peer_rows(builder.plan, "optimizer")
    if not rows or optimizer is None:
        return None
    if not (is_elementwise(optimizer) and is_tensorwise(optimizer)):
        _refuse(
            rows[0], "this optimizer is not elementwise",
            "the state is moved back for only a few parameters at a time",
            ("use an elementwise optimizer (SGD, Adam, AdamW, ...)", NEAR),
        )  # fmt: skip
    names = [n for n, t in tiers.items() if t.state == "peer" and found[n].requires_grad]
    rounds = [[names[k] for k in turn] for turn in _rounds([local(found[n]).nbytes for n in names])]
    axis: str = rows[0].primitive.over  # type: ignore[attr-defined]
    everyone = comm.gathered(len(rounds))
    group = replace(builder.ranks.group(axis), pg=builder.ranks.again(axis, "peer"))
    return Peer(group, found, rounds, max(everyone[rank] for rank in group.ranks))


def state_rounds(plan: Plan, holdings: Mapping[str, Holding], rank: int) -> Iterator[int]:
    """By round the bytes of a rank's parameters whose state goes to its peer."""
    from schedlang.passes.preparing.residence import tiers_of

    out = [n for n, t in tiers_of(plan).items() if t.state == "peer" and n in holdings]
    held = [n for n in out if holdings[n].held(plan.mesh, rank)]
    facts = [plan.model.unique[n] for n in held if plan.model.unique[n].requires_grad]
    sizes = [f.itemsize * prod(holdings[f.name].local_shape(plan.mesh, rank)) for f in facts]
    for turn in _rounds(sizes):
        yield sum(sizes[k] for k in turn)


def _rounds(sizes: Sequence[int]) -> list[list[int]]:
    """Which parameters of these bytes travel together."""
    from schedlang.runtime.summing.held import buckets

    return buckets([(size, None) for size in sizes])
