"""The messages of one sum of gradients: buckets of whole ones, codes of compressed ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from schedlang.passes.cutting.staging import Staged
from schedlang.passes.preparing.reductions import Reduction
from schedlang.plan import Plan

if TYPE_CHECKING:
    from schedlang.runtime.saving.holding import Holding

Message = tuple[str, str, int, str]  # kind, what it says ("": gradients), bytes, module

CODED = {  # by what is sent, as runtime/summing/compressed.py has it
    "there": ("all-reduce", "which grads there are"), "small": ("all-reduce", "grads"),
    "p": ("all-reduce", "grads, low rank"), "q": ("all-reduce", "grads, low rank"),
    "codes": ("all-gather", "grads, coded"), "scales": ("all-gather", "scales of grads"),
}  # fmt: skip


def messages(
    plan: Plan, staged: Staged, holdings: Mapping[str, Holding], one: Reduction, place: int | None
) -> Iterator[Message]:
    """What is sent for one sum at a place of the pipeline; sizes whole, as they arrive."""
    rank = 0
    if place is not None and staged.axis is not None:
        rank = plan.mesh.member(0, staged.axis, place)
    names = [n for n in one.names if holdings[n].held(plan.mesh, rank)]
    shapes = [holdings[n].local_shape(plan.mesh, rank) for n in names]
    if one.kind == "compressed":
        yield from _coded(plan, one, names, shapes)
        return
    for size, fqn in _buckets(plan, names, shapes, one.bucket):
        yield "all-reduce", "", size, fqn


def _buckets(
    plan: Plan, names: list[str], shapes: list[tuple[int, ...]], bytes_: int | None
) -> Iterator[tuple[int, str]]:
    """Bytes of each bucket, with the module that holds all of it (one number more a parameter)."""
    from schedlang.runtime.summing.held import buckets

    facts = [plan.model.unique[n] for n in names]
    counts = [math.prod(shape) for shape in shapes]
    sizes = [(count * f.itemsize, f.dtype) for count, f in zip(counts, facts)]
    for bucket in buckets(sizes, bytes_):
        elements = sum(counts[k] for k in bucket) + len(bucket)
        owners = [plan.model.owner(names[k]).fqn for k in bucket]
        yield elements * facts[bucket[0]].itemsize, _common(owners)


def _coded(
    plan: Plan, one: Reduction, names: list[str], shapes: list[tuple[int, ...]]
) -> Iterator[Message]:
    from schedlang.runtime.summing.compressed import Codec, message_bytes

    how = plan.compression
    assert how is not None
    codec = Codec(how.kind, how.rank, how.block, how.feedback)
    sizes = [plan.model.unique[n].itemsize for n in names]
    found = message_bytes(codec, list(zip(shapes, sizes)), plan.mesh.size(one.axes))
    for what, size in found.items():
        kind, words = CODED[what]
        yield kind, words, size, ""


def _common(owners: list[str]) -> str:
    """The innermost module that holds all of them."""
    rows = [owner.split(".") for owner in owners]
    shared = []
    for column in zip(*rows):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return ".".join(shared)
