"""Each crossing's forward and backward against autograd of the whole computation."""

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
    """What each rank multiplies by after a crossing, where ranks compute differently."""
    return [_seeded(ROWS, WIDTH, seed=10 + rank) for rank in range(world)]


def _crossed(source: Any, target: Any, differ: bool, turned: bool) -> tuple[Tensor, Tensor]:
    """On a rank: what came out, and the gradient of what went in."""
    group = _group()
    world, rank = group.size, group.rank
    whole = _seeded(ROWS, WIDTH)
    if isinstance(source, S):
        mine = whole.chunk(world, source.dim)[rank]  # type: ignore[arg-type]
    elif isinstance(source, P):
        mine = _seeded(ROWS, WIDTH, seed=20 + rank)
    else:
        mine = whole
    leaf = mine.detach().clone().requires_grad_()
    given = leaf.T.contiguous().T if turned else leaf * 1  # turned: not contiguous
    out = redistribute(given, source, target, group, differ)
    scale = _weights(world)[rank if differ else 0]
    if isinstance(target, S):
        scale = _weights(world)[0].chunk(world, target.dim)[rank]  # type: ignore[arg-type]
    (out * scale).sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


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
    """The parts on all ranks are those of one tensor, and gradients those of one sum."""
    found = pool.run(_crossed, world, source, target, differ, turned)
    scales = _weights(world)
    if isinstance(source, P):
        terms = [_seeded(ROWS, WIDTH, seed=20 + rank).requires_grad_() for rank in range(world)]
        whole = sum(terms)
        leaves = terms
    else:
        whole = _seeded(ROWS, WIDTH).requires_grad_()
        leaves = [whole] * world
    scale = sum(scales) if differ else scales[0]
    (whole * scale).sum().backward()  # type: ignore[union-attr]
    for rank, (out, grad) in enumerate(found):
        value, expected = whole.detach(), leaves[rank].grad  # type: ignore[union-attr]
        assert expected is not None
        if isinstance(target, S):
            value = value.chunk(world, target.dim)[rank]  # type: ignore[arg-type]
        if isinstance(source, S):
            expected = expected.chunk(world, source.dim)[rank]  # type: ignore[arg-type]
        torch.testing.assert_close(out, value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def _aliased() -> tuple[Tensor, Tensor]:
    """One gradient tensor that autograd hands to two branches."""
    x = _seeded(3).requires_grad_()
    y = _seeded(3, seed=1).requires_grad_()
    entered = redistribute(x, R, R, _group(), True)
    (entered + y).backward(torch.ones(3, dtype=torch.float64))
    assert x.grad is not None and y.grad is not None
    return x.grad, y.grad


def test_a_gradient_of_two_branches_is_not_written_into(pool: Pool) -> None:
    """The sum over ranks reaches the branch that entered, and no other."""
    for x, y in pool.run(_aliased, 2):
        assert x.tolist() == [2, 2, 2] and y.tolist() == [1, 1, 1]


def _once() -> list[str]:
    heard: list[str] = []
    change, near = (S(0), R, _group(), True), RedistributionCache()
    x = _seeded(2, 2)

    def block(x: Tensor) -> None:
        first, second = near.redistribute(x, *change), near.redistribute(x, *change)
        assert first is second and not near.written
        x.add_(1)  # another value in the same tensor
        assert near.redistribute(x, *change) is not first and near.written

    with listen_to_collectives(lambda kind, group, size: heard.append(kind)):
        near(block, x)
        near.redistribute(x, *change)
        with torch.inference_mode():  # such tensors do not tell whether they were written into
            y = x.clone()
            near.redistribute(y, *change), near.redistribute(y, *change)
    return heard


def test_modules_that_take_one_tensor_share_its_gather(pool: Pool) -> None:
    """Two calls gather once; a changed tensor, or a new call of their block, gathers anew."""
    assert pool.run(_once, 2) == [["all-gather"] * 5] * 2


def _moved() -> tuple[Tensor, Tensor]:
    """On a rank: rows that go to the ranks in unequal numbers, and the gradient of their squares.

    Rank r gives r + j + 1 rows to rank j.
    """
    group = _group()
    give = [group.rank + place + 1 for place in range(group.size)]
    rows = torch.arange(float(sum(give) * 2)).view(-1, 2).double() + 100 * group.rank
    leaf = rows.requires_grad_()
    out = exchange_rows(leaf * 1, group, give, give)  # r + j is the same both ways
    (out * out).sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def test_rows_go_to_their_ranks_and_gradients_back(pool: Pool) -> None:
    """Each rank gets the rows meant for it, in rank order; each row's gradient is twice the row."""
    world = 3
    found = pool.run(_moved, world)
    given = [grad / 2 for _, grad in found]
    for rank, (got, _) in enumerate(found):
        parts = []
        for source in range(world):
            counts = [source + place + 1 for place in range(world)]
            parts.append(given[source].split(counts)[rank])
        torch.testing.assert_close(got, torch.cat(parts), rtol=0, atol=0)
    for rank, (_, grad) in enumerate(found):
        rows = torch.arange(float(grad.numel())).view(-1, 2).double() + 100 * rank
        torch.testing.assert_close(grad, 2 * rows, rtol=0, atol=0)
