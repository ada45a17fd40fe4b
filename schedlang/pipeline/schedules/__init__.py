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
    name: str, ranks: int, micro: int, chunks: int | None = None, **options: Unpack[OrderArguments]
) -> Timeline:
    """Return the compute operations of every rank under a named order.

    `name` in any case, torch's class names included; `micro` microbatches; `chunks` stages per
    rank, None: the order's own number. Raises OrderError for sizes that the order does not have.
    """
    order = find_order(name)
    return order.make(checked_size(order, ranks, micro, chunks, **options))


def checked_size(
    order: Order,
    ranks: int,
    micro: int,
    chunks: int | None = None,
    **options: Unpack[OrderArguments],
) -> Size:
    """Return the checked sizes of an order; `chunks` None is its own number. Raises OrderError."""
    memory = options.pop("memory", None)
    chunks = default_chunks(name=order.name) if chunks is None else chunks
    size = Size(ranks, micro, chunks, **options)  # type: ignore[arg-type]
    size = replace(size, memory=None if memory is None else Fraction(memory))
    if min(ranks, micro, chunks, size.slices) < 1:
        raise OrderError(
            f"a pipeline of {ranks} ranks, {micro} microbatches and {chunks} chunks is empty",
            "each of them is at least 1",
        )
    if order.chunks is not None and chunks not in order.chunks:
        raise OrderError(*_other_chunks(order, chunks))
    if (
        order.chunks is None
        and chunks == 1
        and order.default_chunks > 1
        and not order.allows_one_stage
    ):
        raise OrderError(
            f"{order.name} needs several stages per rank",
            f'chunks={order.default_chunks}, or order="1F1B"',
        )
    if size.slices > 1 and not order.sliced:
        names = ", ".join(o.name for o in ORDERS if o.sliced)
        raise OrderError(f"{order.name} does not cut sequences", f"slices=1, or one of {names}")
    if size.every is not None:
        _check_every(order, micro, size.every)
    problem = order.problem(size)
    if problem is not None:
        raise OrderError(*problem)
    return size


def default_chunks(name: str) -> int:
    """Return the number of stages that an order puts on each rank by default."""
    order = find_order(name)
    return order.default_chunks if order.chunks is None else order.chunks[0]


def find_order(name: str) -> Order:
    """Return the order of this name or alias, in any case, or of the table in a file `*.csv`."""
    if name.lower().endswith(".csv"):
        return table_order(name)
    for order in ORDERS:
        if name.lower() in (order.name.lower(), *(alias.lower() for alias in order.aliases)):
            return order
    raise OrderError(f"there is no order `{name}`", _legal(name))


def guess_order(name: str) -> str | None:
    """Return the order that an alias, a name of another system, or a misspelling stands for."""
    canonical = {alias: order.name for order in ORDERS for alias in (order.name, *order.aliases)}
    closest = find_closest(name, canonical)
    return OTHER_ORDERS.get(name.lower()) or (canonical[closest] if closest else None)


def _legal(name: str) -> str:
    """Return help on what to write in place of an unknown order."""
    guess = guess_order(name)
    return f'write `order="{guess}"`' if guess else "orders: " + ", ".join(o.name for o in ORDERS)


def _check_every(order: Order, micro: int, every: int) -> None:
    """Refuse updates inside a step that differ in microbatches, or that the order does not have."""
    if "staleness" not in order.relaxed:
        stale = ", ".join(o.name for o in ORDERS if "staleness" in o.relaxed)
        raise OrderError(
            f"{order.name} makes one update a step", f"leave `every` out, or one of {stale}"
        )
    if every < 1 or micro % every:
        legal = ", ".join(str(n) for n in range(1, micro + 1) if micro % n == 0)
        raise OrderError(
            f"{micro} microbatches are no whole number of updates of {every}", f"every= {legal}"
        )


def _other_chunks(order: Order, chunks: int) -> tuple[str, str]:
    legal = " or ".join(str(n) for n in order.chunks or ())
    stages = "one stage" if legal == "1" else f"{legal} stages"
    hint = f', or order="Interleaved1F1B", chunks={chunks}' if chunks > 1 else ""
    return f"this order runs {stages} per rank, not {chunks}", f"chunks={legal}{hint}"
