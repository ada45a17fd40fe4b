"""Tensor parallelism over torch's and transformers': python -m tests.benchmarks.tensor_parallel

A Llama of transformers on ranks of gloo, float32, in four ways: the schedule with a row for each
projection, the one with `complete`, parallelize_module with the input of each region entered once,
and transformers' own `tp_plan`.  Also printed as JSON (`--json`).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from schedlang.schedule import Schedule, create_schedule
from tests.benchmarks.ways import Sizes, Way, batch, by_loop, llama, main, scheduled

COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")


# -- ours ------------------------------------------------------------------------------------------


def megatron(sizes: Sizes) -> Way:
    """A row for each projection."""
    sch = tables(sizes)
    for name in COLUMNS:
        sch[f"model.layers.*.{name}"].shard("col", over="tp")
    for name in ROWS:
        sch[f"model.layers.*.{name}"].shard("row", over="tp")
    return scheduled(sch, batch(sizes))


def complete(sizes: Sizes) -> Way:
    """Two rows of a block; what belongs to them follows."""
    sch = tables(sizes)
    for name in ("self_attn.q_proj", "mlp.gate_proj"):
        sch[f"model.layers.*.{name}"].shard("col", over="tp")
    sch.complete(over="tp")
    return scheduled(sch, batch(sizes))


def tables(sizes: Sizes) -> Schedule:
    """The vocabulary is split in both, and so is the loss."""
    sch = create_schedule(llama(sizes))
    sch.mesh(tp=sizes.ranks)
    sch["model.embed_tokens"].shard("vocab", over="tp")
    sch["lm_head"].shard("vocab", over="tp")
    return sch


# -- the peers -------------------------------------------------------------------------------------


def by_hand(sizes: Sizes) -> Way:
    """With torch's parts; gradients of a region's input are summed once, the loss is parallel."""
    made, axis, whole = llama(sizes), _mesh(sizes), Replicate()
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    # as DTensors, so that q, k and v (gate and up) share one sum in backward
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": whole},
        desired_input_kwarg_layouts={"hidden_states": whole},
        use_local_output=False,
    )
    plan["mlp"] = PrepareModuleInput(
        input_layouts=(whole,), desired_input_layouts=(whole,), use_local_output=False
    )
    for layer in made.model.layers:
        parallelize_module(layer, axis, plan)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    embed = RowwiseParallel(input_layouts=whole)
    parallelize_module(made, axis, {"model.embed_tokens": embed, "lm_head": head})
    return by_loop(made, batch(sizes), _alike(), parallel=True)


def transformers_own(sizes: Sizes) -> Way:
    """With the plan that transformers has for the model; it gathers the logits."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    made = llama(sizes)
    apply_tensor_parallelism(made, _mesh(sizes), made._expand_parallel_plan(made.tp_plan))
    return by_loop(made, batch(sizes), _alike())


def _mesh(sizes: Sizes) -> DeviceMesh:
    return init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("tp",))


def _alike() -> float:
    """The loss is alike on all ranks: the first speaks for them."""
    return float(dist.get_rank() == 0)


OURS = {"megatron": megatron, "complete": complete}
PEERS = {"by hand": by_hand, "transformers": transformers_own}

if __name__ == "__main__":
    main(__doc__.partition("\n")[0], OURS, PEERS)
