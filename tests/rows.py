"""Schedule rows that tests of several folders share."""

from tests import models
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan

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
# what follows rows about each layer of a Llama: the rest of a schedule, and its mesh
STAGES = ('model.layers pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2")
HEADS = (
    """model.layers.*.self_attn.{q,k,v}_proj shard(col, over=tp)
    model.layers.*.self_attn.o_proj shard(row, over=tp)
    model.layers.* checkpoint()
    zero(stage=3, over=dp)""",
    "dp=2, tp=2",
)


def assert_llama_proven(threads: Threads, above: str, stages: tuple[str, str]) -> None:
    """Assert that the proof of a two-layer Llama under these rows holds for three batches."""
    plan = make_plan(models.llama(layers=2), above + stages[0], stages[1])
    assert_proven(threads, plan, [models.tokens(rows=6, seed=seed) for seed in (1, 2, 3)])
