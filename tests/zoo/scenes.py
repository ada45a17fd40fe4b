"""Scenes on which bugs are hunted: a model, a schedule, and the batches of two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from schedlang.passes.prove import Case
from tests import expert_models, models, spacetime, towers
from tests.drawn.networks import Sharing
from tests.proofs import make_plan
from tests.rows import GPT2
from tests.zoo import networks
from tests.zoo.networks import points, token_batch

LLAMA = """
  model.layers.0  shard(input=S(seq), over=tp)
  at model.layers.* {
    {input,post_attention}_layernorm  shard(input=S(seq), output=S(seq), over=tp)
    self_attn.{q,k,v}_proj            shard(col, over=tp)
    self_attn.o_proj                  shard(row, output=S(seq), over=tp)
    mlp.{gate,up}_proj                shard(col, over=tp)
    mlp.down_proj                     shard(row, output=S(seq), over=tp)
  }
  model.norm      shard(input=S(seq), output=R, over=tp)
"""
PIPELINE = 'pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'


HEADS = """
  at model.layers.* {
    self_attn.{q,k,v}_proj  shard(col, over=tp)
    self_attn.o_proj        shard(row, over=tp)
  }
"""
BLOCK = "blocks.*.up shard(col, over=tp)\nblocks.*.down shard(row, over=tp)"
BOTH = f"{BLOCK}\nzero(stage=0, over=dp)"

GRID = """
  blocks.*.{up,norm}  grid(summa, over=(r, c))
  blocks.*.down       grid(summa, output=R, over=(r, c))
  zero(stage=0, over=r)
"""
CUBE = """
  blocks.*.up    grid(cube, over=(x, y, z))
  blocks.*.norm  grid(cube, over=(x, z, y))
  blocks.*.down  grid(cube, output=R, over=(x, z, y))
  zero(stage=0, over=x)
"""


@dataclass(frozen=True)
class Scene:
    """A program and its batches: `batches(seed)` for each seed of `steps`."""

    model: Callable[[], nn.Module]
    rows: str
    mesh: str
    batches: Callable[[int], Any]
    steps: tuple[int, ...] = (5, 2)
    loss: Any = None
    optimizer: Any = None  # instead of AdamW in the second condition
    holds: bool = True  # False: the faithful runtime refuses it
    relax: str = ""  # what the schedule relaxes
    dtype: str = "none"  # second dtype of the proof besides float64

    def case(self) -> Case:
        """Return the proof case of the scene."""
        batches = tuple(self.batches(seed) for seed in self.steps)
        plan = make_plan(self.model(), self.rows, self.mesh, self.relax)
        return Case(plan, batches, self.loss, dtype=self.dtype)


def _token_batches(rows: int = 6) -> Callable[[int], Any]:
    return lambda seed: models.tokens(rows=rows, seed=seed)


def _gpt2_scene(rows: str, mesh: str, layers: int = 2, count: int = 6) -> Scene:
    return Scene(lambda: models.gpt2(layers, 0.1), rows, mesh, _token_batches(count))


def _block_scene(kind: Callable[[], nn.Module], rows: str) -> Scene:
    return Scene(networks.module_maker(lambda: networks.Points(kind())), rows, "tp=2", points)


def _cast_scene(rows: str, mesh: str) -> Scene:
    """Return a scene of two low-precision blocks, proven in float32 too to show rounding."""
    make_model = networks.module_maker(
        lambda: networks.Points(networks.Residual(), networks.Residual())
    )
    return Scene(make_model, rows, mesh, points, relax="dtype", dtype="float32")


def _single_process(
    kind: Callable[[], nn.Module],
    rows: str,
    shape: tuple[int, ...] = (networks.WIDTH,),
    holds: bool = True,
) -> Scene:
    batches = lambda seed: points(seed, 6, shape)  # noqa: E731
    return Scene(
        networks.module_maker(lambda: networks.Points(kind())), rows, "", batches, holds=holds
    )


def _routed_scene(arguments: str, mesh: str, relax: str = "") -> Scene:
    rows = f"layers.*.experts expert_parallel({arguments})"
    rows += "\nzero(stage=0, over=dp)" if mesh.startswith("dp") else ""
    return Scene(expert_models.tiny_model, rows, mesh, expert_models.batch, relax=relax)


SCENES: dict[str, Scene] = {
    "tp": _gpt2_scene(GPT2, "tp=2"),
    "tp, recomputed": _gpt2_scene(GPT2 + "transformer.h.* checkpoint()", "tp=2"),
    "dp": _gpt2_scene("zero(stage=0, over=dp)", "dp=2"),
    "dp, drops inside": Scene(
        networks.module_maker(lambda: networks.Points(networks.Drops(), networks.Drops())),
        "zero(stage=0, over=dp)",
        "dp=2",
        lambda seed: points(seed, 6, (4, networks.WIDTH)),
    ),
    "paired": Scene(
        towers.model,
        "{image,text}  gather_rows(over=dp)\nzero(stage=1, over=dp)",
        "dp=2",
        towers.batch,
    ),
    "sliced": _gpt2_scene("zero(stage=2, over=dp)", "dp=2"),
    "sliced, keys in a dict": Scene(
        networks.module_maker(Sharing),
        "zero(stage=3, over=dp)",
        "dp=2",
        lambda seed: models.tokens(rows=4, mask=False, seed=seed),
        loss=lambda output, batch: output[0],
    ),
    "sp": Scene(lambda: models.llama(1), LLAMA, "tp=2", _token_batches()),
    "pp": _gpt2_scene(f"transformer.h {PIPELINE}", "pp=2"),
    "pp, ragged": _gpt2_scene(f"transformer.h {PIPELINE}", "pp=2", count=7),
    "pp, dp": _gpt2_scene(f"transformer.h {PIPELINE}\nzero(stage=1, over=dp)", "dp=2, pp=2"),
    "pp, all forward": _gpt2_scene(f"transformer.h {PIPELINE}".replace("1F1B", "GPipe"), "pp=2"),
    "pp, by layer": Scene(
        lambda: models.gpt2(2, 0.1, by_layer=True),
        f"transformer.h {PIPELINE}",
        "pp=2",
        _token_batches(),
    ),
    "pp, rotary": Scene(
        lambda: models.llama(2), f"model.layers {PIPELINE}", "pp=2", _token_batches()
    ),
    "chunks": Scene(
        networks.module_maker(lambda: networks.Points(*(networks.Residual() for _ in range(4)))),
        'blocks pipeline_split(over=pp)\npipeline(order="Interleaved1F1B", micro=2, chunks=2)',
        "pp=2",
        points,
    ),
    "halves": _gpt2_scene(
        "at transformer.h.* { split_backward() }\ntransformer.h pipeline_split(over=pp)\n"
        'pipeline(order="1F1B", micro=3)',
        "pp=2",
    ),
    "early": _gpt2_scene(
        "transformer.h pipeline_split(over=pp)\nzero(stage=0, over=dp)\noverlap(gradients)\n"
        'pipeline(order="1F1B", micro=2)',
        "pp=2, dp=2",
    ),
    "two ways": _gpt2_scene(
        'transformer.h pipeline_split(over=pp)\npipeline(order="Chimera", micro=4)', "pp=2"
    ),
    "stale": Scene(
        networks.module_maker(lambda: networks.Points(*(networks.NormedBlock() for _ in range(2)))),
        'blocks pipeline_split(over=pp)\npipeline(order="PipeDream", micro=4)',
        "pp=2",
        lambda seed: points(seed, 6),
        relax="staleness",
    ),
    "stale, not kept": Scene(
        networks.module_maker(lambda: networks.Points(*(networks.Residual() for _ in range(2)))),
        'blocks pipeline_split(over=pp)\npipeline(order="PipeMare", micro=4, every=1)',
        "pp=2",
        lambda seed: points(seed, 6),
        relax="staleness",
    ),
    "stages run again": _gpt2_scene(f"transformer.h {PIPELINE}".replace("1F1B", "Varuna"), "pp=2"),
    "recomputed": _gpt2_scene("transformer.h.* checkpoint()", ""),
    "dropping twice": _single_process(networks.DroppingTwice, "blocks.* checkpoint()"),
    "dropping again": Scene(
        networks.module_maker(networks.DroppedAgain), f"blocks {PIPELINE}", "pp=2", points
    ),
    "heard": Scene(networks.module_maker(networks.HookLoss), f"blocks {PIPELINE}", "pp=2", points),
    "recomputed front": _single_process(
        networks.Residual, "embed checkpoint()\nblocks.* checkpoint()"
    ),
    "counting": _single_process(networks.Counting, "blocks.* checkpoint()", holds=False),
    "written after": _single_process(
        networks.WrittenAfter, "blocks.*.inner checkpoint()", holds=False
    ),
    "chosen": _gpt2_scene(
        f"transformer.h.* checkpoint(plan=pareto, memory=300KiB)\ntransformer.h {PIPELINE}",
        "pp=2",
        layers=4,
    ),
    "budget": _gpt2_scene("transformer.h.* checkpoint(plan=dtr, memory=130KiB)", ""),
    "budget, written after": _single_process(
        networks.WrittenLater, "blocks.*.inner checkpoint(plan=dtr, memory=1700B)", holds=False
    ),
    "recomputed pairs": replace(
        _block_scene(
            networks.Pair,
            BLOCK.replace("blocks.*", "blocks.*.*")
            + """
            blocks.* checkpoint()
            zero(stage=0, over=dp)""",
        ),
        mesh="dp=2, tp=2",
    ),
    "offloaded": Scene(
        networks.module_maker(lambda: networks.Points(networks.Residual(64), width=64)),
        'blocks.* offload(activations, to=cpu)\npipeline(order="GPipe", micro=2)',
        "",
        lambda seed: points(seed, 8, (40, 64)),
    ),
    "offloaded, small": Scene(
        networks.module_maker(lambda: networks.Points(networks.Residual())),
        'blocks.* offload(activations, to=cpu)\npipeline(order="GPipe", micro=2)',
        "",
        points,
    ),
    "offloaded, pp": Scene(  # two microbatches at once
        networks.module_maker(
            lambda: networks.Points(networks.Residual(64), networks.Residual(64), width=64)
        ),
        "blocks.* offload(activations, to=cpu)\nblocks pipeline_split(over=pp)\n"
        'pipeline(order="GPipe", micro=2)',
        "pp=2",
        lambda seed: points(seed, 8, (40, 64)),
    ),
    "streamed": _gpt2_scene(
        'offload(parameters)\noffload(optimizer, to=disk)\npipeline(order="GPipe", micro=2)', ""
    ),
    "fused": _gpt2_scene("transformer.h.*.mlp fuse()", ""),
    "fused, recomputed": _gpt2_scene(
        "transformer.h.*.mlp fuse()\ntransformer.h.* checkpoint()", ""
    ),
    "compiled": replace(_single_process(networks.Masked, "blocks.*.inner fuse()"), dtype="float32"),
    "writing": _single_process(networks.Writing, "blocks.*.inner fuse()"),
    "two results": Scene(networks.module_maker(networks.TwoResults), "block fuse()", "", points),
    "normed by kernel": Scene(
        lambda: models.llama(1), "model.**.*norm replace_kernel(rms_norm)", "", _token_batches()
    ),
    "normed beside": Scene(
        models.gemma2, "model.**.*norm replace_kernel(rms_norm)", "", _token_batches()
    ),
    "normed middle": _single_process(
        networks.NormedBlock, "blocks.*.norm replace_kernel(rms_norm)"
    ),
    "by kernels": Scene(
        lambda: models.llama(1),
        "model.layers.*.mlp replace_kernel(gated)\nmodel.layers.*.self_attn replace_kernel(rope)\n"
        "model.layers.* replace_kernel(add_norm)\nlm_head replace_kernel(linear_cross_entropy)",
        "",
        _token_batches(),
    ),
    "by other kernels": _gpt2_scene(
        "transformer.h.*.ln_1 replace_kernel(layer_norm)\nlm_head replace_kernel(cross_entropy)", ""
    ),
    "crossing": _single_process(
        networks.Crossed, 'pipeline(order="GPipe", micro=2)', (5, networks.WIDTH)
    ),
    "skipping": Scene(
        models.Skipping,
        "blocks[1, 2] pipeline_split(over=pp)\n" + PIPELINE.split("\n")[1],
        "pp=3",
        lambda seed: models.points(rows=6, seed=seed),
    ),
    "micro": _gpt2_scene('pipeline(order="GPipe", micro=3)', ""),
    "mesh of one": _gpt2_scene("zero(stage=0, over=(dp, x))", "dp=2, x=1"),
    "accumulated": _gpt2_scene('zero(stage=0, over=dp)\npipeline(order="GPipe", micro=2)', "dp=2"),
    "frozen": Scene(
        networks.module_maker(lambda: networks.Points(networks.Residual(), networks.Frozen())),
        "zero(stage=1, over=dp)",
        "dp=2",
        points,
    ),
    "experts": Scene(
        networks.module_maker(lambda: networks.Points(networks.Experts())),
        "zero(stage=0, over=dp)",
        "dp=2",
        lambda seed: points(seed, 6, (5, networks.WIDTH)),
    ),
    "routed": _routed_scene("over=dp", "dp=2"),
    "routed alike": _routed_scene("over=tp", "tp=2"),
    "routed, cut": Scene(
        expert_models.biased_model,
        "layers.*.experts expert_parallel(over=ep, inner=tp)",
        "ep=1, tp=2",
        expert_models.batch,
    ),
    "balanced": Scene(
        expert_models.balanced_model, "zero(stage=0, over=dp)", "dp=2", expert_models.batch
    ),
    "routed, dropped": _routed_scene("over=dp, capacity=0.75", "dp=2", "routing"),
    "whole updates": replace(_block_scene(networks.Residual, BLOCK), optimizer=networks.adafactor),
    "spare": Scene(
        networks.module_maker(lambda: networks.Points(networks.Residual(), networks.Spare())),
        "zero(stage=0, over=dp)",
        "dp=2",
        points,
    ),
    "frozen front": replace(_gpt2_scene("transformer.h.1.mlp freeze()", ""), relax="updates"),
    "low rank": replace(
        _gpt2_scene(
            "transformer.h.*.mlp.c_fc, transformer.h.*.mlp.c_proj adapt(lora, rank=4)\n"
            "transformer.h.*.mlp.c_fc shard(col, over=tp)\n"
            "transformer.h.*.mlp.c_proj shard(row, over=tp)",
            "tp=2",
        ),
        relax="model",
    ),
    "tied blocks": replace(_gpt2_scene("transformer.h.*.mlp tie()", ""), relax="model"),
    "untied head": replace(_gpt2_scene("lm_head untie(weight)", ""), relax="model"),
    "compressed": replace(
        _gpt2_scene(
            "zero(stage=0, over=dp)\ncompress(gradients, powersgd, rank=2, over=dp)", "dp=2"
        ),
        relax="lossy",
    ),
    "scaled": _cast_scene("cast(fp16, scale=1024)\nzero(stage=0, over=dp)", "dp=2"),
    "overflowing": _cast_scene(f"cast(fp16, scale={2**40})\nzero(stage=0, over=dp)", "dp=2"),
    "rounded": Scene(
        networks.module_maker(lambda: networks.Points(networks.Residual(16), width=16)),
        "blocks.* compress(activations, int4, block=16)\nzero(stage=0, over=dp)\n"
        'pipeline(order="GPipe", micro=2)',
        "dp=2",
        lambda seed: points(seed, 10, (16,)),
        relax="lossy",
    ),
    "rounded parts": replace(
        _block_scene(networks.Residual, BLOCK + "\nblocks.* compress(activations, int4, block=8)"),
        relax="lossy",
    ),
    "lent": Scene(
        networks.module_maker(lambda: networks.Points(*(networks.Residual() for _ in range(2)))),
        f"offload(optimizer, to=peer, over=pp)\nblocks {PIPELINE}",
        "pp=2",
        points,
    ),
    "parked": Scene(
        networks.module_maker(lambda: networks.Points(*(networks.Residual() for _ in range(2)))),
        f"offload(activations, to=peer, over=pp, prefetch=0)\nblocks {PIPELINE}",
        "pp=2",
        points,
    ),
    "three by two": replace(_block_scene(networks.Residual, BOTH), mesh="dp=3, tp=2"),
    "two by two": replace(_block_scene(networks.Residual, BOTH), mesh="dp=2, tp=2"),
    "predicting": Scene(
        networks.module_maker(networks.Predicting),
        'head pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)',
        "pp=2",
        points,
        loss=networks.squared_loss,
    ),
    "odd": Scene(
        networks.module_maker(lambda: networks.Points(networks.Residual(7), width=7)),
        "zero(stage=1, over=dp)",
        "dp=2",
        lambda seed: points(seed, 7, (7,)),
    ),
    "gathered": Scene(
        networks.module_maker(lambda: networks.Points(networks.Residual(), networks.Residual())),
        "blocks.*.up shard(col, output=R, over=tp)",
        "tp=2",
        lambda seed: points(seed, 6, (5, networks.WIDTH)),
    ),
    "turned": _block_scene(networks.Strided, BLOCK),
    "adapted": Scene(
        networks.module_maker(lambda: networks.Points(networks.AdaptedBlock())),
        "blocks.*.up.{base,b} shard(col, over=tp)\nblocks.*.down shard(row, over=tp)",
        "tp=2",
        points,
    ),
    "grid": replace(_block_scene(networks.NormedParts, GRID), mesh="r=2, c=2"),
    "cube": Scene(
        networks.module_maker(lambda: networks.Points(networks.NormedParts(8), width=8)),
        CUBE,
        "x=1, y=2, z=2",
        lambda seed: points(seed, 6, (8,)),
    ),
    "gated": _block_scene(networks.Gated, BLOCK),
    "regrouped": replace(_block_scene(networks.Regrouped, BLOCK), holds=False),
    "normed": replace(_block_scene(networks.NormedMiddle, BLOCK), holds=False),
    "packed": Scene(
        lambda: models.phi3(1),
        "model.layers.*.mlp.gate_up_proj shard(col, blocks=2, over=tp)\n"
        "model.layers.*.mlp.down_proj shard(row, over=tp)",
        "tp=2",
        _token_batches(),
    ),
    "normed heads": Scene(lambda: models.qwen3(1), HEADS, "tp=2", _token_batches()),
    "one key head": Scene(
        networks.module_maker(lambda: networks.Points(networks.OneKeyHead())),
        BLOCK.replace("up", "q"),
        "tp=2",
        lambda seed: points(seed, 6, (5, networks.WIDTH)),
        holds=False,
    ),
    "sp, biases": Scene(lambda: models.llama(1, bias=True), LLAMA, "tp=2", _token_batches()),
    "attending": Scene(
        lambda: models.llama(1, attend="eager"),
        "model.layers.*.self_attn replace_kernel(sdpa)",
        "",
        lambda seed: models.pad_left(models.tokens(rows=6, seed=seed)),
    ),
    "attending by flex": Scene(
        models.gemma2,
        "model.layers.*.self_attn replace_kernel(flex_attention)",
        "",
        _token_batches(),
    ),
    "grouped": Scene(
        lambda: expert_models.tiny_model(layers=1),
        "layers.*.experts replace_kernel(grouped)\n"
        "layers.*.experts expert_parallel(over=dp)\nzero(stage=0, over=dp)",
        "dp=2",
        expert_models.batch,
    ),
    "cp": Scene(
        lambda: models.gpt2(2),
        "transformer.h.*.attn context_parallel(ring, over=cp, layout=zigzag)",
        "cp=2",
        _token_batches(),
    ),
    "cp, rotary": Scene(
        lambda: models.llama(2),
        "model.layers.*.self_attn context_parallel(gather, over=cp)",
        "cp=2",
        _token_batches(),
    ),
    "cp, bias": Scene(
        lambda: models.bloom(1),
        "transformer.h.*.self_attention context_parallel(gather, over=cp)",
        "cp=2",
        _token_batches(),
    ),
    "switch": Scene(
        spacetime.Video,
        "blocks.*.space shard(input=S(1), output=S(1), over=sp)\nblocks.0.time "
        "shard(input=S(2), output=S(2), over=sp)\nblocks.1.time shard(input=S(2), output=R, "
        "over=sp)",
        "sp=2",
        spacetime.batch,
    ),
    "cp, sections": Scene(
        networks.module_maker(networks.Sections),
        "attn context_parallel(ring, over=cp, layout=zigzag)",
        "cp=2",
        networks.sections_batch,
    ),
    "decomposed": _single_process(networks.Residual, "blocks.*.up decompose(bias)"),
    "patterned": _single_process(
        lambda: networks.Residual(dropout=0.3), 'blocks.* fuse("p(x, y) { x + dropout(y) }")'
    ),
    "rowwise": _single_process(networks.NormedBlock, "blocks.*.norm fuse(backend=rowwise)"),
    "replaced": Scene(
        networks.module_maker(networks.Replaced), "blocks.* replace(whole)", "", points
    ),
    "smoothed": Scene(
        networks.module_maker(networks.Smoothed), "head shard(vocab, over=tp)", "tp=2", token_batch
    ),
}


@cache
def scene_case(name: str) -> Case:
    """Return the proof case of a scene, cached."""
    return SCENES[name].case()
