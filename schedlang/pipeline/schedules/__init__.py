"""Pipeline schedules ("orders") by name: one short generator each, with its paper and closed
form."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TypedDict, Unpack

from schedlang.diagnostics.diagnostic import find_closest
from schedlang.diagnostics.other_systems import ORDERS as OTHER_ORDERS
from schedlang.pipeline.cost import Cost
from schedlang.pipeline.schedules import (
    bidirectional,
    looped,
    one_stage,
    search,
    sliced,
    v_shaped,
    zero_bubble,
)
from schedlang.pipeline.schedules.csv_table import read_table, table_order, write_table
from schedlang.pipeline.schedules.registry import Order, OrderError, Size
from schedlang.pipeline.timeline.table import Timeline

NAMED_ORDERS: tuple[Order, ...] = (
    *one_stage.FLUSHED_ORDERS,
    *looped.INTERLEAVED_ORDERS,
    *looped.BREADTH_FIRST_ORDERS,
    *one_stage.ZERO_BUBBLE_ORDERS,
    *zero_bubble.ORDERS,
    *v_shaped.PHASE_ORDERS,
    *v_shaped.BLOCK_ORDERS,
    *looped.GROUPED_ORDERS,
    *bidirectional.ALTERNATING_ORDERS,
    *bidirectional.OVERLAPPED_ORDERS,
    *looped.WAVE_ORDERS,
    *sliced.ORDERS,
    *one_stage.PARTNER_ORDERS,
    *one_stage.RECOMPUTED_ORDERS,
    *one_stage.STALE_ORDERS,
)
ORDERS: tuple[Order, ...] = (*NAMED_ORDERS, search.search_as_order(NAMED_ORDERS))

__all__ = [
    "ORDERS",
    "Order",
    "OrderError",
    "Size",
    "default_chunks",
    "find_order",
    "guess_order",
    "make_order",
    "read_table",
    "checked_size",
    "write_table",
]


class OrderArguments(TypedDict, total=False):
    """Arguments of an order besides ranks, microbatches and chunks; see `Size`."""

    slices: int
    cost: Cost
    memory: float | None
    every: int | None
    barrier: bool


def make_order(
    name: str, ranks: int, micro: int, chunks: int | None = None, **given: Unpack[OrderArguments]
) -> Timeline:
    """Return the compute operations of every rank under a named order.

    `name` in any case, torch's class names included; `micro` microbatches; `chunks` stages per
    rank, None: the order's own number. Raises OrderError for sizes that the order does not have.
    """
    found = find_order(name)
    return found.make(checked_size(found, ranks, micro, chunks, **given))


def checked_size(
    found: Order, ranks: int, micro: int, chunks: int | None = None, **given: Unpack[OrderArguments]
) -> Size:
    """Return the checked sizes of an order; `chunks` None is its own number. Raises OrderError."""
    memory = given.pop("memory", None)
    chunks = default_chunks(name=found.name) if chunks is None else chunks
    size = Size(ranks, micro, chunks, **given)  # type: ignore[arg-type]
    size = replace(size, memory=None if memory is None else Fraction(memory))
    if min(ranks, micro, chunks, size.slices) < 1:
        raise OrderError(
            f"a pipeline of {ranks} ranks, {micro} microbatches and {chunks} chunks is empty",
            "each of them is at least 1",
        )
    if found.chunks is not None and chunks not in found.chunks:
        raise OrderError(*_other_chunks(found, chunks))
    if (
        found.chunks is None
        and chunks == 1
        and found.default_chunks > 1
        and not found.allows_one_stage
    ):
        raise OrderError(
            f"{found.name} needs several stages per rank",
            f'chunks={found.default_chunks}, or order="1F1B"',
        )
    if size.slices > 1 and not found.sliced:
        able = ", ".join(o.name for o in ORDERS if o.sliced)
        raise OrderError(f"{found.name} does not cut sequences", f"slices=1, or one of {able}")
    if size.every is not None:
        _check_every(found, micro, size.every)
    problem = found.problem(size)
    if problem is not None:
        raise OrderError(*problem)
    return size


def default_chunks(name: str) -> int:
    """Return the number of stages that an order puts on each rank by default."""
    found = find_order(name)
    return found.default_chunks if found.chunks is None else found.chunks[0]


def find_order(name: str) -> Order:
    """Return the order of this name or alias, in any case, or of the table in a file `*.csv`."""
    if name.lower().endswith(".csv"):
        return table_order(name)
    for known in ORDERS:
        if name.lower() in (known.name.lower(), *(a.lower() for a in known.aliases)):
            return known
    raise OrderError(f"there is no order `{name}`", _legal(name))


def guess_order(name: str) -> str | None:
    """Return the order that an alias, a name of another system, or a misspelling stands for."""
    every = {known: one.name for one in ORDERS for known in (one.name, *one.aliases)}
    near = find_closest(name, every)
    return OTHER_ORDERS.get(name.lower()) or (every[near] if near else None)


def _legal(name: str) -> str:
    """Return help on what to write in place of an unknown order."""
    found = guess_order(name)
    return f'write `order="{found}"`' if found else "orders: " + ", ".join(o.name for o in ORDERS)


def _check_every(found: Order, micro: int, every: int) -> None:
    """Refuse updates inside a step that differ in microbatches, or that the order does not have."""
    if "staleness" not in found.relaxed:
        stale = ", ".join(o.name for o in ORDERS if "staleness" in o.relaxed)
        raise OrderError(
            f"{found.name} makes one update a step", f"leave `every` out, or one of {stale}"
        )
    if every < 1 or micro % every:
        legal = ", ".join(str(n) for n in range(1, micro + 1) if micro % n == 0)
        raise OrderError(
            f"{micro} microbatches are no whole number of updates of {every}", f"every= {legal}"
        )


def _other_chunks(found: Order, chunks: int) -> tuple[str, str]:
    legal = " or ".join(str(n) for n in found.chunks or ())
    stages = "one stage" if legal == "1" else f"{legal} stages"
    other = f', or order="Interleaved1F1B", chunks={chunks}' if chunks > 1 else ""
    return f"this order runs {stages} per rank, not {chunks}", f"chunks={legal}{other}"
