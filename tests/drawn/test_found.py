"""The fewest rows by which drawn schedules once ended wrongly: they hold, or say why not."""

from __future__ import annotations

import pytest

from tests.drawn.judge import PASSED, REFUSED, judged
from tests.drawn.models import NAMES
from tests.engine import Threads

SEED = 20261129
# what a copy is for one process is a view for a rank with one head: rounded once, not twice
ONE_HEAD = """
  model.encoder.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)
  model.encoder.layers.*.self_attn.out_proj  shard(row, over=tp)
  model.encoder.layers.0  compress(activations, int8, block=8)
"""
# a teacher that the forward moves: once in each replica, by the parts that this replica takes
TEACHER = """
  zero(stage=3, over=dp)
"""
# sizes that a module reads of its input, beneath the mode that exchanges keys
COUNTED = """
  block.attn.c_attn  shard(col, blocks=3, over=tp)
  block.attn.c_proj  shard(row, over=tp)
  block.attn  context_parallel(ring, over=cp)
"""
# a second run from inputs that do not follow one another in memory
TURNED = """
  head  checkpoint()
  head  compress(activations, int4, block=8)
"""
# which adapters are called is decided by values
ADAPTERS = """
  adapters.{en,fr,de}  shard(col, output=R, over=tp)
  zero(stage=0, over=dp)
"""
# a router's mean over all tokens, beside sums in fewer bits
ROUTER = """
  zero(stage=0, over=dp)
  compress(gradients, powersgd, rank=2, over=dp)
"""
# rows of experts, as many as tokens chose them
CHOSEN = """
  model.layers.*.self_attn  context_parallel(ring, over=cp)
  model.layers.*  compress(activations, int2, block=8)
"""
# what meets a part of the sequence is looked for among weights of one dim, too
MEETING = """
  bert.encoder.layer.*.attention.self.{query,key,value}  shard(col, over=tp)
  bert.encoder.layer.*.attention.output.dense  shard(row, output=S(seq), over=tp)
  bert.encoder.layer.*.attention.output.LayerNorm  shard(input=S(seq), output=S(seq), over=tp)
  bert.encoder.layer.0  shard(input=S(seq), over=tp)
"""
# a region that a later stage replays: what it keeps is not made again there
REPLAYED = """
  vit.layers.0  checkpoint()
  vit.layers.*.attention.v_proj  unroll(1)
  vit.layers  pipeline_split(over=pp)
"""
# as many keys on a rank as queries, but those of other queries: keys are not sharded
KEYS = """
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
        ("whisper", "tp=2", "lossy", ONE_HEAD, ""),
        ("taught", "dp=2", "batch_stats", TEACHER, ""),
        ("looped", "tp=2, cp=2", "", COUNTED, ""),
        ("lstm", "", "lossy", TURNED, ""),
        ("routed", "dp=4, tp=2", "", ADAPTERS, "S664"),
        ("qwen2moe", "dp=2", "lossy", ROUTER, "S717"),
        ("taught", "dp=2", "lossy", ROUTER, "S717"),
        ("taught", "dp=2", "batch_stats, lossy", ROUTER, ""),
        ("bert", "tp=2", "", MEETING, "S405"),
        ("mixtral", "cp=2", "batch_stats, lossy", CHOSEN, "S858"),
        ("vit", "pp=2", "", REPLAYED, ""),
        ("qwen3", "tp=2", "", KEYS, "S405"),
    ],
)
def test_what_was_found(
    threads: Threads, model: str, mesh: str, relax: str, rows: str, ends: str
) -> None:
    """Each equals its original, or is refused with the code that tells why."""
    head = f"mesh({mesh})\n\n" if mesh else ""
    word = f"relax({relax}) " if relax else ""
    text = f'schedule 1\n\n{head}step "drawn" {word}{{{rows}}}\n'
    found = judged(NAMES.index(model), SEED, threads, text=text)
    assert (found.kind, found.why[:4]) == ((REFUSED, ends) if ends else (PASSED, "")), found.why
