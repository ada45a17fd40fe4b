"""Rows of schedules that tests of several rooms share."""

from tests import models
from tests.engine import Threads
from tests.proofs import planned, proven

GPT2 = """
  transformer.wte  pad(vocab, multiple=8)
  transformer.wte  shard(vocab, over=tp)
  at transformer.h.* {
    attn.c_attn  shard(col, blocks=3, over=tp)
    attn.c_proj  shard(row, over=tp)
    mlp.c_fc     shard(col, over=tp)
    mlp.c_proj   shard(row, over=tp)
  }
  lm_head  shard(vocab, over=tp)
"""
# below rows that replace something in each layer of a Llama: the rest of a schedule, and its mesh
STAGES = ('model.layers pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2")
HEADS = (
    """model.layers.*.self_attn.{q,k,v}_proj shard(col, over=tp)
    model.layers.*.self_attn.o_proj shard(row, over=tp)
    model.layers.* checkpoint()
    zero(stage=3, over=dp)""",
    "dp=2, tp=2",
)


def llama_proven(threads: Threads, above: str, rest: tuple[str, str]) -> None:
    """A Llama of two layers under rows, in batches that differ, is the same program."""
    plan = planned(models.llama(layers=2), above + rest[0], rest[1])
    proven(threads, plan, [models.tokens(rows=6, seed=seed) for seed in (1, 2, 3)])
