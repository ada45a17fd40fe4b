"""Parked, offloaded and recomputed activations: equal gradients, memory really freed."""

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
from tests.engine import Threads
from tests.models import batch_weight, split_batch
from tests.pipeline_runs import assert_same, cut_model, gradients, make_pipeline
from tests.random_orders import random_timeline
from tests.ranks import run_ranks

PAIRS = {"evict": (Kind.EVICT, Kind.LOAD), "offload": (Kind.OFFLOAD, Kind.RELOAD)}


def with_parking(plan: Timeline, method: str, rank: int = -1) -> Timeline:
    """The same order, with activations moved away after each forward and back before its use."""
    rows = []
    for number in range(plan.ranks):
        row: list[Op] = []
        for op in plan.rows(number):
            applies = rank in (-1, number)
            is_backward = op.kind in (Kind.B, Kind.I) and applies
            if is_backward and method == "again":
                row.append(op._replace(kind=Kind.RECOMPUTE))
            elif is_backward:
                peer = plan.ranks - 1 - number if method == "evict" else -1
                row.append(op._replace(kind=PAIRS[method][1], peer=peer))
            row.append(op)
            if op.kind is Kind.F and applies and method != "again":
                peer = plan.ranks - 1 - number if method == "evict" else -1
                row.append(op._replace(kind=PAIRS[method][0], peer=peer))
        rows.append(row)
    return timeline_from_rows(rows, plan.edges)


def _groups() -> list[Any]:
    return [dist.new_group() for _ in range(5)] if dist.is_initialized() else []


def _train(make: Any, batch: Any, plan: Timeline, shift: bool) -> Any:
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, parts, groups = make(), split_batch(batch, plan.microbatches), _groups()
    with Float64():
        pipe = make_pipeline(model, batch, plan, rank, parks=groups)
        total = sum(batch_weight(p, shift) for p in parts)
        results = pipe.run(parts, [batch_weight(p, shift) / total for p in parts])
    return results, gradients(model)


@pytest.mark.parametrize("how", ["evict", "offload", "again"])
@pytest.mark.parametrize("make", [models.Skipping, models.gpt2])
def test_equal(threads: Threads, make: Any, how: str) -> None:
    """Gradients equal the full model's with activations on a partner, on the host or recomputed."""
    skipping = make is models.Skipping
    batch = models.points() if skipping else models.tokens()
    edges = cut_model(make(), batch, 4).edges
    plan = random_timeline(random.Random(how), ((0, 1, 1, 0), (1, 0, 0, 1)), 4, edges)
    answers = threads.run(_train, plan.ranks, make, batch, with_parking(plan, how), not skipping)
    assert_same(make, batch, answers, not skipping)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of living storages that operations inside it have created."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, StorageWeakRef] = {}
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage)
                self._bytes[storage._cdata] = storage.nbytes()
        return result

    def alive(self) -> int:
        gc.collect()
        return sum(
            self._bytes[key] for key, reference in self._held.items() if not reference.expired()
        )


def _live_bytes(rank: int, plan: Timeline) -> int:
    """Bytes from this rank's forwards that are alive when its first backward begins."""
    batch, counter, live_bytes = models.points(8000), LiveBytes(), []
    pipe = make_pipeline(models.Skipping(), batch, plan, rank, parks=_groups())

    def on_op(event: ScheduledOp) -> None:
        if event.op.kind in (Kind.B, Kind.LOAD, Kind.RELOAD, Kind.RECOMPUTE) and not live_bytes:
            live_bytes.append(counter.alive())

    pipe.run(split_batch(batch, 4), around=lambda op: counter, on_op=on_op)
    assert pipe.parking is None or not pipe.parking.out._sent
    assert counter.alive() < 0.1 * live_bytes[0] + 1e5
    return live_bytes[0]


@pytest.mark.parametrize("how", ["evict", "offload", "again"])
def test_memory_is_freed(how: str) -> None:
    """Before the backwards rank 1 holds the activations of one microbatch, not of all four."""
    plan = make_order("gpipe", 2, 4).with_edges(
        cut_model(models.Skipping(), models.points(), 2).edges
    )
    unparked = run_ranks(2, _live_bytes, plan)
    parked_bytes = run_ranks(2, _live_bytes, with_parking(plan, how, rank=1))
    assert parked_bytes[1] < 0.45 * unparked[1], (parked_bytes, unparked)
    assert abs(parked_bytes[0] - unparked[0]) < 0.1 * unparked[0], (parked_bytes, unparked)


def test_not_with_slices() -> None:
    """Recomputing or offloading slices is refused: other slices read their keys."""
    plan, batch = make_order("gpipe", 1, 2), models.points()
    slices = SimpleNamespace(slicing=SimpleNamespace(count=1))
    for method in ("again", "offload"):
        with pytest.raises(Refusal, match=r"can be neither offloaded nor\s+recomputed"):
            make_pipeline(models.Skipping(), batch, with_parking(plan, method), 0, slices=slices)
    make_pipeline(models.Skipping(), batch, plan, 0, slices=slices)
