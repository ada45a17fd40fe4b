"""`complete` adds the rows that a few `shard` rows leave open, or says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.complete.complete import complete_plan
from schedlang.runtime.launch.pool import Pool
from tests import models
from tests.proofs import assert_proven, make_plan

MEGATRON = """
  model.embed_tokens  pad(vocab, multiple=2)
  lm_head             pad(out, multiple=2)
  model.embed_tokens  shard(vocab, over=tp)
  at model.layers.* {
    self_attn.{q,k,v}_proj  shard(col, over=tp)
    self_attn.o_proj        shard(row, over=tp)
    mlp.{gate,up}_proj      shard(col, over=tp)
    mlp.down_proj           shard(row, over=tp)
  }
  lm_head  shard(vocab, over=tp)
"""


def _layouts_of(plan: Plan) -> dict[str, Any]:
    return {"layouts": dict(plan.layouts), "boundaries": dict(plan.boundaries)}


@pytest.mark.parametrize("first, second", [("q", "up"), ("v", "gate")])
def test_two_rows_of_a_block_give_megatrons_plan(first: str, second: str) -> None:
    """From any first projection of a block, layouts are those of Megatron's rows."""
    model, batch = models.llama(), models.tokens()
    rows = f"""
      model.embed_tokens  pad(vocab, multiple=2)
      lm_head             pad(out, multiple=2)
      model.embed_tokens  shard(vocab, over=tp)
      at model.layers.* {{
        self_attn.{first}_proj  shard(col, over=tp)
        mlp.{second}_proj  shard(col, over=tp)
      }}
      lm_head  shard(vocab, over=tp)
      complete(over=tp)
    """
    completed = complete_plan(make_plan(model, rows, "tp=2"), batch)
    assert _layouts_of(completed) == _layouts_of(make_plan(model, MEGATRON, "tp=2"))
    assert not completed.completions
    added = [
        a
        for a in completed.actions
        if a.span == next(b.span for b in completed.actions if b.name == "complete")
    ]
    assert len(added) == 1 + 3 + 2  # itself, two of q, k, v and o, one of gate and up, and down


@pytest.mark.parametrize(
    "rows",
    [
        "model.layers.*.mlp.up_proj  shard(col, over=tp)\n"
        "model.layers[0].mlp.down_proj  shard(row, over=tp)",
        "model.layers[0].mlp.up_proj  shard(col, over=tp)\n"
        "model.layers[1:].mlp.down_proj  shard(row, over=tp)",
    ],
)
def test_blocks_may_begin_unlike(rows: str) -> None:
    """Blocks whose first rows shard different projections get the same completed rows."""
    written = """
      model.layers.*.mlp.{gate,up}_proj  shard(col, over=tp)
      model.layers.*.mlp.down_proj       shard(row, over=tp)
    """
    model = models.llama()
    completed = complete_plan(
        make_plan(model, f"{rows}\ncomplete(over=tp)", "tp=2"), models.tokens()
    )
    assert _layouts_of(completed) == _layouts_of(make_plan(model, written, "tp=2"))


@pytest.mark.deep
def test_completed_rows_are_proven(pool: Pool) -> None:
    """A tied model with packed projections, completed from one row each, equals the original."""
    rows = """
      transformer.wte  pad(vocab, multiple=2)
      transformer.wte  shard(vocab, over=tp)
      at transformer.h.* {
        attn.c_proj  shard(row, over=tp)
        mlp.c_fc     shard(col, over=tp)
      }
      complete(over=tp)
      zero(stage=1, over=dp)
    """
    model = models.gpt2()
    plan = make_plan(model, rows, "dp=2, tp=2")
    batches = [models.tokens(), models.tokens(rows=8, seed=2)]
    completed = complete_plan(plan, batches[0])
    assert {"transformer.h.0.attn.c_attn", "lm_head", "transformer.h.1.mlp.c_proj"} <= {
        site for action in completed.actions for site in action.sites
    }
    assert_proven(pool, plan, batches)


def test_only_blocks_that_were_begun() -> None:
    """Rows for the first blocks complete the first blocks."""
    rows = "model.layers[:2].mlp.up_proj  shard(col, over=tp)\ncomplete(over=tp)"
    completed = complete_plan(make_plan(models.llama(), rows, "tp=2"), models.tokens())
    split = {name.rpartition(".mlp")[0] for name in completed.layouts}
    assert split == {"model.layers.0", "model.layers.1"}, split


def test_axes_of_size_one_add_nothing() -> None:
    """On one rank there is nothing to complete."""
    plan = make_plan(
        models.llama(), "lm_head  shard(col, output=R, over=tp)\ncomplete(over=tp)", "tp=1"
    )
    completed = complete_plan(plan, models.tokens())
    assert completed.actions == plan.actions and not completed.completions


class Gated(nn.Module):
    """Two gated blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"gate": nn.Linear(8, 16), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["down"](F.silu(block["gate"](x)) * block["up"](x))
        return self.head(x).square().mean()


def test_nothing_begun_is_refused() -> None:
    """Without a row to complete, the message gives one (S425)."""
    plan = make_plan(Gated(), "complete(over=tp)", "tp=2")
    with pytest.raises(Refusal, match="no row shards anything over `tp`"):
        complete_plan(plan, {"x": torch.randn(4, 8)})


def test_what_cannot_follow_is_refused() -> None:
    """Too few heads: the message has the rows that would follow, the reason, and a legal row."""
    rows = "model.layers.*.self_attn.q_proj  shard(col, over=tp)\ncomplete(over=tp)"
    plan = make_plan(models.llama(keys=1), rows, "tp=2")
    with pytest.raises(Refusal) as refusal:
        complete_plan(plan, models.tokens())
    message = refusal.value.render()
    assert "S427" in message and "k_proj  shard(col" in message and "output=R" in message, message


class Chain(nn.Module):
    """Three projections in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.silu(self.second(F.silu(self.first(x))))).square().mean()


def test_several_ways_are_named() -> None:
    """In a chain, a row split next or a gather now cost the same: the message names both."""
    plan = make_plan(Chain(), "first  shard(col, over=tp)\ncomplete(over=tp)", "tp=2")
    with pytest.raises(Refusal) as refusal:
        complete_plan(plan, {"x": torch.randn(4, 8)})
    message = refusal.value.render()
    assert "S426" in message and "`first` can be completed in 2 ways" in message, message
    assert "second  shard(row, over=tp)" in message and "first  shard(col, output=R" in message, (
        message
    )
