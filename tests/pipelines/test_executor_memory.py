"""Activations that lie elsewhere, or are made again: equal gradients, memory really freed."""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, timeline_from_rows
from schedlang.runtime.float64 import Float64
from schedlang.runtime.pipeline.executor import ScheduledOp
from tests import models
from tests.drawn_orders import drawn
from tests.engine import Threads
from tests.executing import assert_same, cut_model, gradients, pipeline
from tests.models import split, weight
from tests.ranks import run_ranks

PAIRS = {"evict": (Kind.EVICT, Kind.LOAD), "offload": (Kind.OFFLOAD, Kind.RELOAD)}


def parked(plan: Timeline, how: str, rank: int = -1) -> Timeline:
    """The same order; what a forward of some rank saved leaves right after it, and comes back."""
    rows = []
    for at in range(plan.ranks):
        row: list[Op] = []
        for op in plan.rows(at):
            mine = rank in (-1, at)
            back = op.kind in (Kind.B, Kind.I) and mine
            if back and how == "again":
                row.append(op._replace(kind=Kind.RECOMPUTE))
            elif back:
                peer = plan.ranks - 1 - at if how == "evict" else -1
                row.append(op._replace(kind=PAIRS[how][1], peer=peer))
            row.append(op)
            if op.kind is Kind.F and mine and how != "again":
                peer = plan.ranks - 1 - at if how == "evict" else -1
                row.append(op._replace(kind=PAIRS[how][0], peer=peer))
        rows.append(row)
    return timeline_from_rows(rows, plan.edges)


def _groups() -> list[Any]:
    return [dist.new_group() for _ in range(5)] if dist.is_initialized() else []


def _train(make: Any, batch: Any, plan: Timeline, shift: bool) -> Any:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, parts, groups = make(), split(batch, plan.microbatches), _groups()
    with Float64():
        pipe = pipeline(model, batch, plan, rank, parks=groups)
        total = sum(weight(p, shift) for p in parts)
        results = pipe.run(parts, [weight(p, shift) / total for p in parts])
    return results, gradients(model)


@pytest.mark.parametrize("how", ["evict", "offload", "again"])
@pytest.mark.parametrize("make", [models.Skipping, models.gpt2])
def test_equal(threads: Threads, make: Any, how: str) -> None:
    """Parked on a partner, in host memory, or run again: the gradients of the whole model."""
    skipping = make is models.Skipping
    batch = models.points() if skipping else models.tokens()
    edges = cut_model(make(), batch, 4).edges
    plan = drawn(random.Random(how), ((0, 1, 1, 0), (1, 0, 0, 1)), 4, edges)
    answers = threads.run(_train, plan.ranks, make, batch, parked(plan, how), not skipping)
    assert_same(make, batch, answers, not skipping)


class Made(TorchDispatchMode):
    """Counts the bytes of storages that operations within it have made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, StorageWeakRef] = {}
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage)
                self._bytes[storage._cdata] = storage.nbytes()
        return out

    def alive(self) -> int:
        gc.collect()
        return sum(self._bytes[key] for key, one in self._held.items() if not one.expired())


def _live(rank: int, plan: Timeline) -> int:
    """Bytes that forwards of this rank have made and that live when its first backward begins."""
    batch, made, seen = models.points(8000), Made(), []
    pipe = pipeline(models.Skipping(), batch, plan, rank, parks=_groups())

    def on_op(event: ScheduledOp) -> None:
        if event.op.kind in (Kind.B, Kind.LOAD, Kind.RELOAD, Kind.RECOMPUTE) and not seen:
            seen.append(made.alive())

    pipe.run(split(batch, 4), around=lambda op: made, on_op=on_op)
    assert pipe.parking is None or not pipe.parking.out._sent
    assert made.alive() < 0.1 * seen[0] + 1e5
    return seen[0]


@pytest.mark.parametrize("how", ["evict", "offload", "again"])
def test_memory_is_freed(how: str) -> None:
    """Before the backwards rank 1 holds what one microbatch needs, not what all four do."""
    plan = make_order("gpipe", 2, 4).with_edges(
        cut_model(models.Skipping(), models.points(), 2).edges
    )
    plain = run_ranks(2, _live, plan)
    freed = run_ranks(2, _live, parked(plan, how, rank=1))
    assert freed[1] < 0.45 * plain[1], (freed, plain)
    assert abs(freed[0] - plain[0]) < 0.1 * plain[0], (freed, plain)


def test_not_with_slices() -> None:
    """Rows that would run a slice twice, or take away keys that others read, are refused."""
    plan, batch = make_order("gpipe", 1, 2), models.points()
    slices = SimpleNamespace(slicing=SimpleNamespace(count=1))
    for how in ("again", "offload"):
        with pytest.raises(Refusal, match=r"can be neither offloaded nor\s+recomputed"):
            pipeline(models.Skipping(), batch, parked(plan, how), 0, slices=slices)
    pipeline(models.Skipping(), batch, plan, 0, slices=slices)
