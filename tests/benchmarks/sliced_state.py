"""State sliced over data (ZeRO-3) over fully_shard: python -m tests.benchmarks.sliced_state

A Llama of transformers on ranks of gloo, float32: `zero(stage=3)` against fully_shard of each block
and of the rest, written by hand.  Also printed as JSON (`--json`).
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from schedlang.schedule import create_schedule
from tests.benchmarks.ways import Sizes, Way, batch, by_loop, llama, main, scheduled


def zero(sizes: Sizes) -> Way:
    """One row."""
    sch = create_schedule(llama(sizes))
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=3, over="dp")
    return scheduled(sch, batch(sizes))


def by_hand(sizes: Sizes) -> Way:
    """With torch's parts; each rank has its rows."""
    made = llama(sizes)
    axis = init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("dp",))
    for layer in made.model.layers:
        fully_shard(layer, mesh=axis)
    fully_shard(made, mesh=axis)
    own = {name: t.chunk(sizes.ranks)[dist.get_rank()] for name, t in batch(sizes).items()}
    return by_loop(made, own, 1 / sizes.ranks)


OURS = {"zero": zero}
PEERS = {"by hand": by_hand}

if __name__ == "__main__":
    main(__doc__.partition("\n")[0], OURS, PEERS)
