"""What ranks tell each other: everyone's value, by rank, however long it is and on whom."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from schedlang.runtime.comm.world import _SHORT, all_gather_object, pickle_value
from schedlang.runtime.launch.pool import Pool

EDGE = 2 * _SHORT - len(pickle_value(bytes(_SHORT)))  # so many bytes are just short when pickled


def _told(sizes: list[int]) -> list[list[Any]]:
    """On a rank: what it hears where each rank tells so many bytes, and where it tells tensors."""
    rank = dist.get_rank()
    whole = all_gather_object(bytes([rank]) * sizes[rank])
    mixed = all_gather_object(
        {"rank": rank, "tensor": torch.full((rank * 400,), rank), "none": None}
    )
    return [
        [(set(one), len(one)) for one in whole],
        [(one["rank"], one["tensor"].tolist(), one["none"]) for one in mixed],
    ]


def test_everyone_hears_everyone(pool: Pool) -> None:
    """Nothing at all, just short enough, a byte too long, and long on one rank alone."""
    for sizes in ([0, 1, 7], [EDGE, 0, EDGE], [EDGE + 1, 1, 1], [3, 3, 100_000]):
        for whole, mixed in pool.run(_told, 3, sizes):
            assert whole == [({k} if n else set(), n) for k, n in enumerate(sizes)]
            assert mixed == [(k, [k] * (k * 400), None) for k in range(3)]
