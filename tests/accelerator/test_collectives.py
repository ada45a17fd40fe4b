"""The simulated collective library: its rules, and torch's own parallelism on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from schedlang.testing.accelerator import Raced, current, spawn, unavailable
from tests.accelerator import fsdp_variants, torch_training
from tests.accelerator.torch_training import local_device

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

TOLERANCE = 1e-6


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=local_device())


def error_text(fn: Callable[[], Any]) -> str:
    """Return the error that it raises, as `Name: text`, or ""."""
    try:
        fn()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def test_every_collective_and_transfer() -> None:
    """Every collective of c10d gives the right values, in one world."""

    def all_of_them() -> None:
        r = dist.get_rank()
        x = row(r + 1.0, 2.0)
        dist.all_reduce(x)
        assert x.tolist() == [3.0, 4.0]
        full, part = torch.empty(4, device=local_device()), torch.empty(2, device=local_device())
        dist.all_gather_into_tensor(full, row(r, r))
        assert full.tolist() == [0, 0, 1, 1]
        dist.reduce_scatter_tensor(part, row(0, 1, 2, 3), op=dist.ReduceOp.AVG)
        assert part.tolist() == [2 * r, 2 * r + 1]
        dist.reduce_scatter(part, [row(0, 1), row(2, 3)])
        assert part.tolist() == [4 * r, 4 * r + 2]
        lists = [torch.empty(2, device=local_device()) for _ in range(2)]
        dist.all_gather(lists, row(r, 7))
        assert [tensor.tolist() for tensor in lists] == [[0, 7], [1, 7]]
        dist.broadcast(part, 1)
        assert part.tolist() == [4, 6]
        dist.reduce(part, 0)
        assert part.tolist() == ([8, 12] if r == 0 else [4, 6])
        dist.all_to_all_single(full, row(*[10 * r + i for i in range(4)]))
        assert full.tolist() == [2 * r, 2 * r + 1, 10 + 2 * r, 11 + 2 * r]
        ragged = torch.empty(2, device=local_device())
        dist.all_to_all_single(ragged, row(r, r), [1, 1], [1, 1])
        assert ragged.tolist() == [0, 1]
        dist.scatter(part, [row(1, 2), row(3, 4)] if r == 0 else None, 0)
        assert part.tolist() == [1 + 2 * r, 2 + 2 * r]
        dist.gather(part, lists if r == 0 else None, 0)
        assert r or [tensor.tolist() for tensor in lists] == [[1, 2], [3, 4]]
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": r})
        assert objects == [{"rank": 0}, {"rank": 1}]
        half = torch.ones(3, device=local_device(), dtype=torch.bfloat16)
        dist.all_reduce(half)
        assert half.tolist() == [2, 2, 2]
        other = torch.empty(2, device=local_device())
        dist.send(part, 1) if r == 0 else dist.recv(other, 0)
        moves = [dist.P2POp(dist.isend, part, 1 - r), dist.P2POp(dist.irecv, other, 1 - r)]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
        assert other.tolist() == [3 - 2 * r, 4 - 2 * r]
        dist.barrier()

    spawn(all_of_them)


def test_tensors_that_nccl_would_not_take() -> None:
    """Tensors on the host, not contiguous, or of sizes that do not fit are refused."""

    def refusals() -> list[str]:
        return [
            error_text(lambda: dist.all_reduce(torch.ones(3))),
            error_text(lambda: dist.all_reduce(torch.ones(3, 4, device=local_device()).t())),
            error_text(lambda: dist.all_gather_into_tensor(row(1, 2, 3), row(1, 2))),
        ]

    host, strided, sizes = spawn(refusals)[0]
    assert "No backend type associated with device type cpu" in host
    assert "must be contiguous" in strided
    assert "do not fit" in sizes


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_result_that_nobody_waited_for(operation: str) -> None:
    """Reading it, or writing over an input, is a race; reading gives NaN."""

    def careless() -> bool:
        x, out = row(1, 2), torch.empty(4, device=local_device())
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        poison = bool((out + 0).isnan().all()) if operation == "read" else True
        if operation == "write":
            x.zero_()
        work.wait()
        assert out.tolist() == [1, 2, 1, 2]
        return poison

    with pytest.raises(Raced, match=r"simccl\.all_gather_into_tensor") as raised:
        spawn(careless)
    assert all("test_collectives.py:" in report.second.place for report in raised.value.reports)
    assert {report.rank for report in raised.value.reports} == {0, 1}
    assert spawn(careless, check=False) == [True, True]


def test_sends_of_both_ranks_first() -> None:
    """Sends and receives of a pair share one queue: a deadlock is found and described."""

    def circle() -> str:
        sent = dist.isend(row(1, 2, 3, 4), 1 - dist.get_rank())
        assert sent is not None
        return error_text(sent.wait)

    messages = spawn(circle)
    for text in messages:
        assert text.startswith("Deadlock: simccl: deadlock")
        assert "rank 0 waits for [1]: send float32[4] to rank 1" in text
        assert "rank 1 waits for [0]: send float32[4] to rank 0" in text


def test_one_queue_for_all_where_the_group_is_bound() -> None:
    """With `device_id` a receive that is posted early blocks the collective after it."""

    def early() -> str:
        if dist.get_rank() == 0:
            receive = dist.irecv(torch.empty(2, device=local_device()), 1)
            text = error_text(lambda: dist.all_reduce(row(1, 2)))
            assert text or error_text(receive.wait) == ""
            return text
        text = error_text(lambda: dist.all_reduce(row(1, 2)))
        if not text:
            dist.send(row(3, 4), 0)
        return text

    assert spawn(early) == ["", ""]
    messages = spawn(early, bind=True)
    assert all("deadlock" in text for text in messages)
    assert "behind recv float32[2] from rank 1" in messages[0]


def test_one_queue_for_each_pair_where_it_is_not() -> None:
    """Messages of two pairs do not wait for each other, in queues or on streams."""

    def crossing() -> str:
        x, rank = row(1, 2), dist.get_rank()

        def others_first() -> None:
            sent = dist.isend(x, 1)  # rank 1 receives it when the others are done
            dist.recv(torch.empty(2, device=local_device()), 2)
            dist.send(x, 2)
            assert sent is not None
            sent.wait()

        def last() -> None:
            for source in (2, 0):
                dist.recv(torch.empty(2, device=local_device()), source)

        def between() -> None:
            dist.send(x, 0)
            dist.recv(torch.empty(2, device=local_device()), 0)
            dist.send(x, 1)

        return error_text((others_first, last, between)[rank])

    def careless() -> None:
        if dist.get_rank():
            dist.send(row(1, 2), 0)
            return
        buffers = [torch.empty(2, device=local_device()) for _ in range(2)]
        first, second = dist.irecv(buffers[0], 1), dist.irecv(buffers[1], 2)
        assert first is not None and second is not None
        second.wait()
        buffers[0] + 1  # the wait for it comes too late
        first.wait()

    assert spawn(crossing, ranks=3) == [""] * 3
    assert all("deadlock" in text for text in spawn(crossing, ranks=3, bind=True))
    with pytest.raises(Raced, match=r"simccl\.recv"):
        spawn(careless, ranks=3)


def test_ranks_that_do_not_do_the_same() -> None:
    """A different collective, a message of a different size, and two ranks on one device are
    named."""

    def other() -> str:
        first = dist.all_reduce if dist.get_rank() == 0 else lambda x: dist.broadcast(x, 0)
        return error_text(lambda: first(row(1, 2)))

    def sizes() -> str:
        if dist.get_rank() == 0:
            return error_text(lambda: dist.send(row(1, 2), 1))
        return error_text(lambda: dist.recv(torch.empty(3, device=local_device()), 0))

    def shared() -> str:
        return error_text(lambda: dist.all_reduce(row(1, 2)))

    assert any("differs: rank" in text or "deadlock" in text for text in spawn(other))
    assert any("float32[2] to rank 1 on rank 0 meets 3 elements" in text for text in spawn(sizes))
    assert all("Duplicate device" in text for text in spawn(shared, set_device=False))


def test_worlds_of_every_kind() -> None:
    """Worlds with host and device backends, new groups, split groups, and no world."""

    def mixed() -> None:
        host, x = torch.ones(2), row(1, 1)
        dist.all_reduce(host)
        dist.all_reduce(x)
        group = dist.new_group([0, 1], backend="cpu:gloo,sim:simccl")
        dist.all_reduce(host, group=group)
        dist.all_reduce(x, group=group)
        assert host.tolist() == x.tolist() == [4, 4]

    def split() -> None:
        group = dist.split_group(split_ranks=[[0, 1]])
        x = row(1, 1)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2, 2]

    def nothing() -> tuple[bool, str]:
        return dist.is_initialized(), os.environ["LOCAL_RANK"]

    spawn(mixed, backend="cpu:gloo,sim:simccl")
    spawn(split, bind=True)
    assert spawn(nothing, backend=None) == [(False, "0"), (False, "1")]


def test_a_collective_runs_beside_what_does_not_need_it() -> None:
    """An asynchronous one overlaps other work until its wait; a synchronous one does not."""

    def overlapping(asynchronous: bool) -> int:
        x, y = row(1, 2), row(3, 4)
        work = dist.all_reduce(x, async_op=asynchronous)
        y.mul(2)
        if work is not None:
            work.wait()
        x.add(1)
        assert not current().could_overlap("simccl.all_reduce", "aten::add")
        return len(current().could_overlap("simccl.all_reduce", "aten::mul"))

    assert spawn(overlapping, True, timeline=True) == [1, 1]
    assert spawn(overlapping, False, timeline=True) == [0, 0]


def bucket_views() -> float:
    return torch_training.ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.001)


TORCH_2_12 = pytest.mark.skipif(
    torch.__version__.startswith("2.12."), reason="torch 2.12 asks CUDA for the draws of any device"
)
QUICK = (
    *(torch_training.ddp, bucket_views, torch_training.tensor_parallel),
    *(
        fsdp_variants.clipped,
        fsdp_variants.not_resharded,
        fsdp_variants.offloaded,
        fsdp_variants.bfloat16,
    ),
)
VARIANTS = [
    *((way, 2) for way in QUICK),
    pytest.param(torch_training.pipelined, 2, marks=TORCH_2_12),
]
LONG = [pytest.param(way, 2, marks=pytest.mark.deep) for way in fsdp_variants.TWO[4:]]
LONG += [pytest.param(way, 4, marks=pytest.mark.deep) for way in fsdp_variants.FOUR]


@pytest.mark.parametrize(
    ("way", "ranks"), [*VARIANTS, *LONG], ids=lambda v: getattr(v, "__name__", v)
)
def test_torch_trains_as_on_the_cpu(way: Callable[[], float], ranks: int) -> None:
    """DDP, FSDP2, DTensor and torch's pipeline equal one process, without a report."""
    assert all(max_error < TOLERANCE for max_error in spawn(way, ranks=ranks))
