"""Checkpoints of experts, contexts, grids and uneven heads load under every other layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.program import Program
from tests import models, small_models
from tests.engine import Threads
from tests.layouts import assert_equal, program_state
from tests.proofs import make_plan

HEADS = "model.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)\n"
SHARED_HEADS = """
model.layers.*.self_attn.q_proj      shard(col, over=tp)
model.layers.*.self_attn.{k,v}_proj  shard(col, over=tp, heads=2, uneven=replicate)
model.layers.*.self_attn.o_proj      shard(row, over=tp)
"""
EXPERT_ROW = "model.layers.*.mlp.experts  expert_parallel(over={})\n"
RING = "model.layers.*.self_attn  context_parallel(ring, over=cp, layout=zigzag)\n"
STAGES = 'model.layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
GRID = """
model.embed_tokens  pad(vocab, multiple=8)
model.embed_tokens  grid(summa, over=(r, c))
model.layers.*.{input_layernorm,post_attention_layernorm}  grid(summa, over=(r, c))
model.layers.*.self_attn.{q,k,v,o}_proj  grid(summa, over=(r, c))
model.norm  grid(summa, output=R, over=(r, c))
"""
DENSE_GRID = "model.layers.*.mlp.{gate,up,down}_proj  grid(summa, over=(r, c))\n"
Layouts = dict[str, tuple[str, str]]
EXPERT_LAYOUTS: Layouts = {
    "one": ("", ""),
    "tp": (HEADS + "model.layers.*.self_attn.o_proj  shard(row, over=tp)", "tp=2"),
    "zero3": ("zero(stage=3, over=dp)", "dp=2"),
    "ep": (EXPERT_ROW.format("dp") + "zero(stage=1, over=dp)", "dp=2"),
    "ep, replicas": (EXPERT_ROW.format("b") + "zero(stage=3, over=(a, b))", "a=2, b=2"),
    "pp, ep": (EXPERT_ROW.format("tp") + STAGES, "pp=2, tp=2"),
}
DENSE_LAYOUTS: Layouts = {
    "one": ("", ""),
    "cp": (RING + "zero(stage=3, over=cp)", "cp=2"),
    "grid": (GRID + DENSE_GRID + "zero(stage=0, over=r)", "r=2, c=2"),
    "heads shared": (SHARED_HEADS, "tp=4"),
}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Return AdamW with two groups, each with its learning rate."""
    parameters = list(named)
    groups = [
        {"params": [p for name, p in parameters if ("norm" in name) == norm], "lr": rate}
        for norm, rate in ((True, 2e-2), (False, 1e-2))
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], eps=1e-5)


def build_program(plan: Plan) -> Program:
    """Build a program whose gradients are clipped."""
    return build(plan, models.tokens(8), optimizer=adamw, clip=0.5, seed=3)


def save_and_step(plan: Plan, path: str) -> Any:
    """Train two steps, save, train one more: return what was saved, and the state after it."""
    with enter_modes(Float64()):
        trained = build_program(plan)
        for seed in range(2):
            trained.train_step(models.tokens(8, seed=seed))
        trained.save(path)
        snapshot = program_state(trained)
        trained.train_step(models.tokens(8, seed=2))
        return snapshot, trained.state_dict()


def load_and_step(plan: Plan, paths: dict[str, str]) -> Any:
    """Load each path into a trained program: return what was loaded, and the state after a step."""
    results = {}
    with enter_modes(Float64()):
        trained = build_program(plan)
        trained.train_step(models.tokens(8, seed=9))
        for name, path in paths.items():
            trained.load(path)
            snapshot = program_state(trained)
            trained.train_step(models.tokens(8, seed=2))
            results[name] = snapshot, trained.state_dict()
    return results


def check_all_pairs(
    make: Callable[[], nn.Module], layouts: Layouts, folder: Path, pool: Threads
) -> None:
    """Load under each layout what each has saved: equal to the last bit, and in the next step."""
    plans = {name: make_plan(make(), rows, mesh) for name, (rows, mesh) in layouts.items()}
    paths = {name: str(folder / name) for name in plans}
    saved = {n: pool.run(save_and_step, p.mesh.world, p, paths[n])[0] for n, p in plans.items()}
    for name, plan in plans.items():
        for rank in pool.run(load_and_step, plan.mesh.world, plan, paths):
            for source, (before, after) in rank.items():
                label = f"{source} -> {name}"
                for part in ("state", "moments", "step"):
                    assert_equal(before[part], saved[source][0][part], f"{label}: {part}")
                for key, value in after.items():
                    expected = saved[source][1][key]
                    gap = float((value - expected).norm())
                    limit = 0.0 if source == name else 1e-11 * float(expected.norm()) + 1e-13
                    assert gap <= limit, (label, key, gap)


def mixtral() -> nn.Module:
    """Return two layers of experts."""
    return small_models.mixtral(2)


def llama() -> nn.Module:
    """Return two layers with eight query heads and two key heads."""
    return models.llama_like("LlamaForCausalLM", hidden_size=32, num_attention_heads=8)


@pytest.mark.deep
def test_spread_experts(tmp_path: Path, threads: Threads) -> None:
    """Experts distributed over data ranks, and within stages."""
    check_all_pairs(
        mixtral, {name: EXPERT_LAYOUTS[name] for name in ("ep", "pp, ep")}, tmp_path, threads
    )


@pytest.mark.deep
def test_all_layouts_of_experts(tmp_path: Path, threads: Threads) -> None:
    """Experts distributed over all or some data ranks or within stages; split beside them;
    sliced."""
    check_all_pairs(mixtral, EXPERT_LAYOUTS, tmp_path, threads)


@pytest.mark.deep
def test_all_layouts_of_a_dense_model(tmp_path: Path, threads: Threads) -> None:
    """Ring context parallelism, a grid with padded words, two key heads on four ranks, and one
    rank."""
    check_all_pairs(llama, DENSE_LAYOUTS, tmp_path, threads)
