"""`all_gather_object`: every rank gets every value, in rank order, for short and long values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from schedlang.runtime.comm.world import _SHORT, all_gather_object, pickle_value
from schedlang.runtime.launch.pool import Pool

EDGE = 2 * _SHORT - len(pickle_value(bytes(_SHORT)))  # the longest that is short when pickled


def gather_on_rank(sizes: list[int]) -> list[list[Any]]:
    """On a rank: gather so many bytes from each rank, then tensors; return a summary."""
    rank = dist.get_rank()
    gathered = all_gather_object(bytes([rank]) * sizes[rank])
    mixed = all_gather_object(
        {"rank": rank, "tensor": torch.full((rank * 400,), rank), "none": None}
    )
    return [
        [(set(entry), len(entry)) for entry in gathered],
        [(entry["rank"], entry["tensor"].tolist(), entry["none"]) for entry in mixed],
    ]


def test_everyone_hears_everyone(pool: Pool) -> None:
    """Empty, just short enough, one byte too long, and long on one rank only."""
    for sizes in ([0, 1, 7], [EDGE, 0, EDGE], [EDGE + 1, 1, 1], [3, 3, 100_000]):
        for gathered, mixed in pool.run(gather_on_rank, 3, sizes):
            assert gathered == [({k} if n else set(), n) for k, n in enumerate(sizes)]
            assert mixed == [(k, [k] * (k * 400), None) for k in range(3)]
