"""Rows that split tensors: for transformers' decoders, Whisper, and convolutions."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.matrix_models import MIXTRAL, PICTURES, WHISPER, Subject

ATTENTION = """
  model.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)
  model.layers.*.self_attn.o_proj        shard(row, over=tp)
"""
MLP = """
  model.layers.*.mlp.{gate,up}_proj  shard(col, over=tp)
  model.layers.*.mlp.down_proj       shard(row, over=tp)
"""
NORMS = """
  model.layers.0  shard(input=S(seq), over=tp)
  model.layers.*.{input,post_attention}_layernorm  shard(input=S(seq), output=S(seq), over=tp)
"""
LAST = "model.norm  shard(input=S(seq), output=R, over=tp)"
SOUND = """
  encoder.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)
  encoder.layers.*.self_attn.out_proj      shard(row, over=tp)
  encoder.layers.*.fc1                     shard(col, over=tp)
  encoder.layers.*.fc2                     shard(row, over=tp)
"""
SOUND_NORMS = """
  encoder.layers.0  shard(input=S(seq), over=tp)
  encoder.layers.*.{self_attn,final}_layer_norm  shard(input=S(seq), output=S(seq), over=tp)
"""
CHANNELS = """
  blocks.*.up    shard(col, over=h)
  blocks.*.norm  shard(weight=S(0), bias=S(0), input=S(1), output=S(1), over=h)
  blocks.*.down  shard(row, over=h)
"""
SPATIAL = """
  blocks.*.up    shard(input=S(2), output=S(2), over=w)
  blocks.*.norm  shard(input=S(2), output=S(2), over=w)
  blocks.*.down  shard(input=S(2), output=S(2), over=w)
  blocks.*       shard(input=S(2), output=R, over=w)
"""
SOUND_CHANNELS = """
  encoder.conv1  shard(col, over=h)
  encoder.conv2  shard(row, over=h)
"""
SOUND_SPATIAL = """
  encoder.conv1  shard(input=S(2), output=S(2), over=w)
  encoder.conv2  shard(input=S(2), output=R, over=w)
"""
SUMMA = "summa, over=(r, c)"
GRID = f"""
  model.embed_tokens  pad(vocab, multiple=8)
  lm_head  pad(out, multiple=8)
  model.{{embed_tokens,norm}}  grid({SUMMA})
  model.layers.*.{{input_layernorm,post_attention_layernorm}}  grid({SUMMA})
  lm_head  grid(summa, output=S(vocab), over=(r, c))
"""
SOUND_GRID = f"""
  encoder.layers.0  shard(input=S(-1), over=c)
  encoder.layers.*.{{self_attn,final}}_layer_norm  grid({SUMMA})
  encoder.layers.*.self_attn.{{q,k,v,out}}_proj  grid({SUMMA})
  encoder.layers.*.{{fc1,fc2}}  grid({SUMMA})
  encoder.layer_norm  grid(summa, output=R, over=(r, c))
"""


def split_rows(model: Subject, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the rows of `shard`, `grid`, `context_parallel` and `expert_parallel`."""
    if model is PICTURES:
        yield from (text for name, text in _conv_rows() if name in names)
    elif model is WHISPER:
        yield from _whisper_rows(names)
    else:
        yield from _decoder_rows(model, names)
    trunk = model.trunk
    if "ring" in names:
        yield f"{trunk}.*.self_attn  context_parallel(ring, over=cp, layout=zigzag)"
    if "ulysses" in names:
        yield f"{trunk}.*.self_attn  context_parallel(ulysses, over=cp)"
    if "expert" in names:
        yield f"{trunk}.*.mlp.experts  expert_parallel(over=ep)"


def _conv_rows() -> tuple[tuple[str, str], ...]:
    return ("channels", CHANNELS), ("spatial", SPATIAL)


def _whisper_rows(names: tuple[str, ...]) -> Iterator[str]:
    if "sequence" in names:
        yield SOUND_NORMS
        yield SOUND.replace("shard(row, ", "shard(row, output=S(seq), ")
        yield "encoder.layer_norm  shard(input=S(seq), output=R, over=tp)"
    elif "tensor" in names:
        yield SOUND
    if "grid" in names:
        yield SOUND_GRID
    if "channels" in names:
        yield SOUND_CHANNELS
    if "spatial" in names:
        yield SOUND_SPATIAL


def _decoder_rows(model: Subject, names: tuple[str, ...]) -> Iterator[str]:
    dense = model is not MIXTRAL
    if "sequence" in names:
        yield NORMS
        sharded_row = "shard(row, output=S(seq), "
        rows = ATTENTION + (MLP if dense and "grid" not in names else "")
        yield rows.replace("shard(row, ", sharded_row)
        yield LAST
    elif "tensor" in names:
        yield ATTENTION + (MLP if dense and "grid" not in names else "")
    if "grid" in names:
        yield from _grid_rows(names, dense)


def _grid_rows(names: tuple[str, ...], dense: bool) -> Iterator[str]:
    """Yield `grid` rows for everything that no other row has split."""
    yield GRID
    if {"tensor", "sequence"} & set(names):
        yield "model.layers.*.self_attn  shard(input=R, output=S(-1), over=c)"
    else:
        yield f"model.layers.*.self_attn.{{q,k,v,o}}_proj  grid({SUMMA})"
    if dense:
        yield f"model.layers.*.mlp.{{gate,up,down}}_proj  grid({SUMMA})"
    else:  # tokens choose experts by the whole of their hidden dim
        yield "model.layers.*.mlp  shard(input=R, output=S(-1), over=c)"
