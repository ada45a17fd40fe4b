"""Features on 4 and 8 simulated devices: as the model alone trains.

`test_features_run.py` has each feature on the fewest ranks that show it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from schedlang.testing.accelerator import unavailable
from tests.accelerator.test_features_run import (
    PIPE,
    RING,
    SUM,
    Words,
    alone,
    check,
    on_ranks,
)

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there"),
]

TENSOR = (
    "blocks.*.up  shard(col, over=tp)\nblocks.*.down  shard(row, over=tp)\n"
    "embed  shard(vocab, over=tp)\nhead  shard(vocab, over=tp)\n"
)
ULYSSES = "blocks.*.attn  context_parallel(ulysses, over=cp)\n"
# feature -> mesh and rows by the number of ranks; the model has four heads
WIDER = {
    **{f"zero {k}": dict.fromkeys((4, 8), f"zero(stage={k}, over=dp)") for k in range(4)},
    "overlapped sums": dict.fromkeys((4, 8), SUM + "overlap(gradients)"),
    "tensor": {4: TENSOR, 8: TENSOR + SUM},
    "ring": dict.fromkeys((4, 8), RING.format("ring", "cp", "cp")),
    "zigzag": {4: RING.format("ring, layout=zigzag", "cp", "cp")},
    "ulysses": {
        4: ULYSSES + "zero(stage=0, over=cp)",
        8: ULYSSES + "zero(stage=0, over=(dp, cp))",
    },
    "checkpoint": dict.fromkeys((4, 8), SUM + "blocks.*  checkpoint()"),
    "activations on the host": dict.fromkeys((4, 8), SUM + "blocks.*  offload(activations)"),
    "activations on disk": dict.fromkeys((4, 8), SUM + "blocks.*  offload(activations, to=disk)"),
    "parameters on the host": dict.fromkeys(
        (4, 8), "zero(stage=3, over=dp)\nblocks.*  offload(parameters)"
    ),
    "optimizer on disk": dict.fromkeys(
        (4, 8), "zero(stage=2, over=dp)\noffload(optimizer, to=disk)"
    ),
    "parked on a peer": {4: "blocks.*  offload(activations, to=peer, over=pp)\n" + PIPE},
}
MESHES = {
    ("tensor", 4): "tp=4",
    ("tensor", 8): "dp=2, tp=4",
    ("ulysses", 8): "dp=2, cp=4",
}


def mesh_of(feature: str, ranks: int) -> str:
    """The axis that the rows name, of all ranks, unless it takes two."""
    rows = WIDER[feature][ranks]
    axis = next(one for one in ("dp", "cp", "pp") if f"over={one}" in rows or one == "pp")
    return MESHES.get((feature, ranks), f"{axis}={ranks}")


def deep_words(depth: int = 8) -> nn.Module:
    """The language model, of so many blocks."""
    torch.manual_seed(0)
    return Words(0.0, depth).double()


@pytest.mark.parametrize(
    "feature,ranks", [(feature, ranks) for feature, some in WIDER.items() for ranks in some]
)
def test_as_the_model_alone(feature: str, ranks: int) -> None:
    """Losses, norms and parameters of some steps, with no race on the way."""
    rows = WIDER[feature][ranks]
    check(on_ranks(deep_words, mesh_of(feature, ranks), rows, "sim"), alone(deep_words))
