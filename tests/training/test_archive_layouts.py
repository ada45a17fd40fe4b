"""What experts, contexts, grids and uneven heads have saved, every other layout loads."""

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
from tests.layouts import equal, seen
from tests.proofs import planned

HEADS = "model.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)\n"
SHARE = """
model.layers.*.self_attn.q_proj      shard(col, over=tp)
model.layers.*.self_attn.{k,v}_proj  shard(col, over=tp, heads=2, uneven=replicate)
model.layers.*.self_attn.o_proj      shard(row, over=tp)
"""
SPREAD = "model.layers.*.mlp.experts  expert_parallel(over={})\n"
RING = "model.layers.*.self_attn  context_parallel(ring, over=cp, layout=zigzag)\n"
STAGES = 'model.layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
GRID = """
model.embed_tokens  pad(vocab, multiple=8)
model.embed_tokens  grid(summa, over=(r, c))
model.layers.*.{input_layernorm,post_attention_layernorm}  grid(summa, over=(r, c))
model.layers.*.self_attn.{q,k,v,o}_proj  grid(summa, over=(r, c))
model.norm  grid(summa, output=R, over=(r, c))
"""
DENSE = "model.layers.*.mlp.{gate,up,down}_proj  grid(summa, over=(r, c))\n"
Layouts = dict[str, tuple[str, str]]
EXPERTS: Layouts = {
    "one": ("", ""),
    "tp": (HEADS + "model.layers.*.self_attn.o_proj  shard(row, over=tp)", "tp=2"),
    "zero3": ("zero(stage=3, over=dp)", "dp=2"),
    "ep": (SPREAD.format("dp") + "zero(stage=1, over=dp)", "dp=2"),
    "ep, replicas": (SPREAD.format("b") + "zero(stage=3, over=(a, b))", "a=2, b=2"),
    "pp, ep": (SPREAD.format("tp") + STAGES, "pp=2, tp=2"),
}
DENSES: Layouts = {
    "one": ("", ""),
    "cp": (RING + "zero(stage=3, over=cp)", "cp=2"),
    "grid": (GRID + DENSE + "zero(stage=0, over=r)", "r=2, c=2"),
    "heads shared": (SHARE, "tp=4"),
}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Two groups with a learning rate each."""
    held = list(named)
    groups = [
        {"params": [p for name, p in held if ("norm" in name) == norm], "lr": rate}
        for norm, rate in ((True, 2e-2), (False, 1e-2))
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], eps=1e-5)


def program(plan: Plan) -> Program:
    """A program whose gradients are clipped."""
    return build(plan, models.tokens(8), optimizer=adamw, clip=0.5, seed=3)


def saving(plan: Plan, path: str) -> Any:
    """Two steps, saved, and one more: what was saved, and what came after it."""
    with enter_modes(Float64()):
        one = program(plan)
        for seed in range(2):
            one.train_step(models.tokens(8, seed=seed))
        one.save(path)
        before = seen(one)
        one.train_step(models.tokens(8, seed=2))
        return before, one.state_dict()


def loading(plan: Plan, paths: dict[str, str]) -> Any:
    """From other values: what each file gives, and what comes after a step."""
    found = {}
    with enter_modes(Float64()):
        one = program(plan)
        one.train_step(models.tokens(8, seed=9))
        for name, path in paths.items():
            one.load(path)
            before = seen(one)
            one.train_step(models.tokens(8, seed=2))
            found[name] = before, one.state_dict()
    return found


def crossed(make: Callable[[], nn.Module], layouts: Layouts, folder: Path, pool: Threads) -> None:
    """Each layout loads what each has saved: the same to the last bit, and so it goes on."""
    plans = {name: planned(make(), rows, mesh) for name, (rows, mesh) in layouts.items()}
    paths = {name: str(folder / name) for name in plans}
    saved = {n: pool.run(saving, p.mesh.world, p, paths[n])[0] for n, p in plans.items()}
    for name, plan in plans.items():
        for rank in pool.run(loading, plan.mesh.world, plan, paths):
            for source, (before, after) in rank.items():
                told = f"{source} -> {name}"
                for part in ("state", "moments", "step"):
                    equal(before[part], saved[source][0][part], f"{told}: {part}")
                for key, value in after.items():
                    wanted = saved[source][1][key]
                    gap = float((value - wanted).norm())
                    limit = 0.0 if source == name else 1e-11 * float(wanted.norm()) + 1e-13
                    assert gap <= limit, (told, key, gap)


def mixtral() -> nn.Module:
    """Two layers of experts."""
    return small_models.mixtral(2)


def llama() -> nn.Module:
    """Two layers with eight heads for queries and two for keys."""
    return models.kin("LlamaForCausalLM", hidden_size=32, num_attention_heads=8)


@pytest.mark.deep
def test_spread_experts(tmp_path: Path, threads: Threads) -> None:
    """Experts spread over data ranks, and within stages."""
    crossed(mixtral, {name: EXPERTS[name] for name in ("ep", "pp, ep")}, tmp_path, threads)


@pytest.mark.deep
def test_all_layouts_of_experts(tmp_path: Path, threads: Threads) -> None:
    """Experts spread over data, over some of it, or within stages; split around, or sliced."""
    crossed(mixtral, EXPERTS, tmp_path, threads)


@pytest.mark.deep
def test_all_layouts_of_a_dense_model(tmp_path: Path, threads: Threads) -> None:
    """Sequences in rings, a grid with padded words, two key heads on four ranks, and one rank."""
    crossed(llama, DENSES, tmp_path, threads)
