"""Regression tests: minimal schedules that once failed are equal to the original, or refused."""

from __future__ import annotations

import pytest

from tests.drawn.judge import PASSED, REFUSED, judge_schedule
from tests.drawn.models import NAMES
from tests.engine import Threads

SEED = 20261129
# a copy in one process is a view on a rank with one head: rounded once, not twice
ONE_HEAD_ROWS = """
  model.encoder.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)
  model.encoder.layers.*.self_attn.out_proj  shard(row, over=tp)
  model.encoder.layers.0  compress(activations, int8, block=8)
"""
# a teacher that is updated in forward: once in each replica, with the rows of that replica
TEACHER_ROWS = """
  zero(stage=3, over=dp)
"""
# input sizes that a module reads below the mode that exchanges keys
SIZE_ROWS = """
  block.attn.c_attn  shard(col, blocks=3, over=tp)
  block.attn.c_proj  shard(row, over=tp)
  block.attn  context_parallel(ring, over=cp)
"""
# recomputation from non-contiguous inputs
STRIDED_ROWS = """
  head  checkpoint()
  head  compress(activations, int4, block=8)
"""
# values decide which adapters are called
ADAPTER_ROWS = """
  adapters.{en,fr,de}  shard(col, output=R, over=tp)
  zero(stage=0, over=dp)
"""
# a router's mean over all tokens, with compressed gradients
ROUTER_ROWS = """
  zero(stage=0, over=dp)
  compress(gradients, powersgd, rank=2, over=dp)
"""
# experts whose number of rows depends on routing
EXPERT_ROWS = """
  model.layers.*.self_attn  context_parallel(ring, over=cp)
  model.layers.*  compress(activations, int2, block=8)
"""
# weights of one dim that are combined with a part of the sequence
SEQUENCE_ROWS = """
  bert.encoder.layer.*.attention.self.{query,key,value}  shard(col, over=tp)
  bert.encoder.layer.*.attention.output.dense  shard(row, output=S(seq), over=tp)
  bert.encoder.layer.*.attention.output.LayerNorm  shard(input=S(seq), output=S(seq), over=tp)
  bert.encoder.layer.0  shard(input=S(seq), over=tp)
"""
# a region that a later stage replays: its saved tensors are not created there
REPLAY_ROWS = """
  vit.layers.0  checkpoint()
  vit.layers.*.attention.v_proj  unroll(1)
  vit.layers  pipeline_split(over=pp)
"""
# a rank has as many keys as queries, but of other queries: keys are not sharded
KEY_ROWS = """
  model.layers.*.self_attn.{q,v}_proj  shard(col, over=tp)
  model.layers.*.self_attn.o_proj  shard(row, output=S(seq), over=tp)
  model.layers.*.input_layernorm  shard(input=S(seq), output=S(seq), over=tp)
  model.layers.*.post_attention_layernorm  shard(input=S(seq), output=S(seq), over=tp)
  model.layers.0  shard(input=S(seq), over=tp)
  model.layers.1  shard(output=R, over=tp)
"""


@pytest.mark.parametrize(
    "model, mesh, relax, rows, ends",
    [
        ("whisper", "tp=2", "lossy", ONE_HEAD_ROWS, ""),
        ("taught", "dp=2", "batch_stats", TEACHER_ROWS, ""),
        ("looped", "tp=2, cp=2", "", SIZE_ROWS, ""),
        ("lstm", "", "lossy", STRIDED_ROWS, ""),
        ("routed", "dp=4, tp=2", "", ADAPTER_ROWS, "S664"),
        ("qwen2moe", "dp=2", "lossy", ROUTER_ROWS, "S717"),
        ("taught", "dp=2", "lossy", ROUTER_ROWS, "S717"),
        ("taught", "dp=2", "batch_stats, lossy", ROUTER_ROWS, ""),
        ("bert", "tp=2", "", SEQUENCE_ROWS, "S405"),
        ("mixtral", "cp=2", "batch_stats, lossy", EXPERT_ROWS, "S858"),
        ("vit", "pp=2", "", REPLAY_ROWS, ""),
        ("qwen3", "tp=2", "", KEY_ROWS, "S405"),
    ],
)
def test_what_was_found(
    threads: Threads, model: str, mesh: str, relax: str, rows: str, ends: str
) -> None:
    """Each schedule equals its original, or is refused with the right code."""
    head = f"mesh({mesh})\n\n" if mesh else ""
    relax_clause = f"relax({relax}) " if relax else ""
    text = f'schedule 1\n\n{head}step "drawn" {relax_clause}{{{rows}}}\n'
    outcome = judge_schedule(NAMES.index(model), SEED, threads, text=text)
    assert (outcome.kind, outcome.why[:4]) == ((REFUSED, ends) if ends else (PASSED, "")), (
        outcome.why
    )
