"""Tensor parallelism against torch and transformers: python -m tests.benchmarks.tensor_parallel

A transformers Llama on gloo ranks, float32, in four variants: a schedule with a row for each
projection, one with `complete`, parallelize_module with one shared input per region, and
transformers' own `tp_plan`.  Also printed as JSON (`--json`).
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
from tests.benchmarks.step_variants import (
    Sizes,
    StepVariant,
    batch,
    by_training_loop,
    llama,
    main,
    scheduled,
)

COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")


# -- ours ------------------------------------------------------------------------------------------


def by_rows(sizes: Sizes) -> StepVariant:
    """Return the variant with a row for each projection."""
    sch = split_vocab(sizes)
    for name in COLUMNS:
        sch[f"model.layers.*.{name}"].shard("col", over="tp")
    for name in ROWS:
        sch[f"model.layers.*.{name}"].shard("row", over="tp")
    return scheduled(sch, batch(sizes))


def by_complete(sizes: Sizes) -> StepVariant:
    """Return the variant with two rows per block, completed automatically."""
    sch = split_vocab(sizes)
    for name in ("self_attn.q_proj", "mlp.gate_proj"):
        sch[f"model.layers.*.{name}"].shard("col", over="tp")
    sch.complete(over="tp")
    return scheduled(sch, batch(sizes))


def split_vocab(sizes: Sizes) -> Schedule:
    """Return a schedule with split vocabulary and loss."""
    sch = create_schedule(llama(sizes))
    sch.mesh(tp=sizes.ranks)
    sch["model.embed_tokens"].shard("vocab", over="tp")
    sch["lm_head"].shard("vocab", over="tp")
    return sch


# -- the peers -------------------------------------------------------------------------------------


def by_torch(sizes: Sizes) -> StepVariant:
    """Return the variant with torch's parallelize_module and loss_parallel."""
    model, mesh, replicated = llama(sizes), _mesh(sizes), Replicate()
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    # as DTensors, so that q, k and v (gate and up) share one sum in backward
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": replicated},
        desired_input_kwarg_layouts={"hidden_states": replicated},
        use_local_output=False,
    )
    plan["mlp"] = PrepareModuleInput(
        input_layouts=(replicated,), desired_input_layouts=(replicated,), use_local_output=False
    )
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    embed = RowwiseParallel(input_layouts=replicated)
    parallelize_module(model, mesh, {"model.embed_tokens": embed, "lm_head": head})
    return by_training_loop(model, batch(sizes), _loss_share(), parallel=True)


def by_transformers(sizes: Sizes) -> StepVariant:
    """Return the variant with transformers' plan, which gathers the logits."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = llama(sizes)
    apply_tensor_parallelism(model, _mesh(sizes), model._expand_parallel_plan(model.tp_plan))
    return by_training_loop(model, batch(sizes), _loss_share())


def _mesh(sizes: Sizes) -> DeviceMesh:
    return init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("tp",))


def _loss_share() -> float:
    """Return the weight of this rank's loss: all are equal, and rank 0's counts."""
    return float(dist.get_rank() == 0)


SCHEDLANG = {"megatron": by_rows, "complete": by_complete}
PEERS = {"by hand": by_torch, "transformers": by_transformers}

if __name__ == "__main__":
    main(__doc__.partition("\n")[0], SCHEDLANG, PEERS)
