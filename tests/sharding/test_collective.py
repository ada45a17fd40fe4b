"""Redistribution between placements: forward and backward against autograd of the full tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.ir.placement import P, R, S
from schedlang.runtime.comm.collectives import Group, exchange_rows, listen_to_collectives
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.sharding.edges import RedistributionCache, redistribute

ROWS, WIDTH = 6, 12


def _group() -> Group:
    world = dist.get_world_size()
    return Group(("tp",), tuple(range(world)), dist.get_rank(), dist.group.WORLD)


def _seeded(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _weights(world: int) -> list[Tensor]:
    """Factors after a redistribution, one for each rank, where ranks compute differently."""
    return [_seeded(ROWS, WIDTH, seed=10 + rank) for rank in range(world)]


def _redistributed(source: Any, target: Any, differ: bool, turned: bool) -> tuple[Tensor, Tensor]:
    """On a rank: the output of a redistribution, and the gradient of its input."""
    group = _group()
    world, rank = group.size, group.rank
    full = _seeded(ROWS, WIDTH)
    if isinstance(source, S):
        local = full.chunk(world, source.dim)[rank]  # type: ignore[arg-type]
    elif isinstance(source, P):
        local = _seeded(ROWS, WIDTH, seed=20 + rank)
    else:
        local = full
    leaf = local.detach().clone().requires_grad_()
    source_tensor = leaf.T.contiguous().T if turned else leaf * 1  # turned: not contiguous
    output = redistribute(source_tensor, source, target, group, differ)
    scale = _weights(world)[rank if differ else 0]
    if isinstance(target, S):
        scale = _weights(world)[0].chunk(world, target.dim)[rank]  # type: ignore[arg-type]
    (output * scale).sum().backward()
    assert leaf.grad is not None
    return output.detach(), leaf.grad


CASES = [
    (R, R, True),
    (R, S(0), False),
    (R, S(-1), False),
    (S(0), R, True),
    (S(-1), R, True),
    (S(0), R, False),
    (S(1), R, False),
    (P(), R, False),
    (P(), S(0), False),
    (P(), S(-1), False),
]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
@pytest.mark.parametrize("source, target, differ", CASES, ids=str)
def test_a_crossing_is_what_it_says(
    source: Any, target: Any, differ: bool, turned: bool, world: int, pool: Pool
) -> None:
    """All ranks have the right shards of the full tensor, and of its gradient."""
    results = pool.run(_redistributed, world, source, target, differ, turned)
    scales = _weights(world)
    if isinstance(source, P):
        terms = [_seeded(ROWS, WIDTH, seed=20 + rank).requires_grad_() for rank in range(world)]
        full = sum(terms)
        leaves = terms
    else:
        full = _seeded(ROWS, WIDTH).requires_grad_()
        leaves = [full] * world
    scale = sum(scales) if differ else scales[0]
    (full * scale).sum().backward()  # type: ignore[union-attr]
    for rank, (output, grad) in enumerate(results):
        value, expected = full.detach(), leaves[rank].grad  # type: ignore[union-attr]
        assert expected is not None
        if isinstance(target, S):
            value = value.chunk(world, target.dim)[rank]  # type: ignore[arg-type]
        if isinstance(source, S):
            expected = expected.chunk(world, source.dim)[rank]  # type: ignore[arg-type]
        torch.testing.assert_close(output, value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def _two_gradients() -> tuple[Tensor, Tensor]:
    """Gradients of two inputs for which autograd uses one gradient tensor."""
    x = _seeded(3).requires_grad_()
    y = _seeded(3, seed=1).requires_grad_()
    entered = redistribute(x, R, R, _group(), True)
    (entered + y).backward(torch.ones(3, dtype=torch.float64))
    assert x.grad is not None and y.grad is not None
    return x.grad, y.grad


def test_a_gradient_of_two_branches_is_not_written_into(pool: Pool) -> None:
    """The sum over ranks changes only the gradient of the redistributed branch."""
    for x, y in pool.run(_two_gradients, 2):
        assert x.tolist() == [2, 2, 2] and y.tolist() == [1, 1, 1]


def _shared_gathers() -> list[str]:
    heard: list[str] = []
    change, cache = (S(0), R, _group(), True), RedistributionCache()
    x = _seeded(2, 2)

    def block(x: Tensor) -> None:
        first_gather, second_gather = cache.redistribute(x, *change), cache.redistribute(x, *change)
        assert first_gather is second_gather and not cache.written
        x.add_(1)  # another value in the same tensor
        assert cache.redistribute(x, *change) is not first_gather and cache.written

    with listen_to_collectives(lambda kind, group, size: heard.append(kind)):
        cache(block, x)
        cache.redistribute(x, *change)
        with torch.inference_mode():  # such tensors do not tell whether they were written into
            y = x.clone()
            cache.redistribute(y, *change), cache.redistribute(y, *change)
    return heard


def test_modules_that_take_one_tensor_share_its_gather(pool: Pool) -> None:
    """Two calls gather once; a changed tensor, or a new call of the block, gathers again."""
    assert pool.run(_shared_gathers, 2) == [["all-gather"] * 5] * 2


def _exchanged() -> tuple[Tensor, Tensor]:
    """On a rank: exchange unequal numbers of rows; return them and the gradient of their squares.

    Rank r sends r + j + 1 rows to rank j.
    """
    group = _group()
    counts = [group.rank + peer + 1 for peer in range(group.size)]
    rows = torch.arange(float(sum(counts) * 2)).view(-1, 2).double() + 100 * group.rank
    leaf = rows.requires_grad_()
    received = exchange_rows(leaf * 1, group, counts, counts)  # r + j is the same both ways
    (received * received).sum().backward()
    assert leaf.grad is not None
    return received.detach(), leaf.grad


def test_rows_go_to_their_ranks_and_gradients_back(pool: Pool) -> None:
    """Each rank receives its rows in rank order; each row's gradient is twice the row."""
    world = 3
    results = pool.run(_exchanged, world)
    sent_rows = [grad / 2 for _, grad in results]
    for rank, (received, _) in enumerate(results):
        parts = []
        for source in range(world):
            counts = [source + peer + 1 for peer in range(world)]
            parts.append(sent_rows[source].split(counts)[rank])
        torch.testing.assert_close(received, torch.cat(parts), rtol=0, atol=0)
    for rank, (_, grad) in enumerate(results):
        rows = torch.arange(float(grad.numel())).view(-1, 2).double() + 100 * rank
        torch.testing.assert_close(grad, 2 * rows, rtol=0, atol=0)
