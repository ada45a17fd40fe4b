"""Training steps that are compared: a decoder under schedules, and written by hand with torch.

Peers follow torch's documentation: the loss of the full batch on every rank, clipping by the
global norm, AdamW.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from schedlang.schedule import Schedule, create_schedule
from tests.benchmarks.step_variants import CLIP, VOCAB, adamw, clip

HEADS, MICRO = 4, 4
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the batch; `rows` per step over all ranks."""

    hidden: int = 64
    layers: int = 4
    seq: int = 32
    rows: int = 8
    ranks: int = 2
    dropout: float = 0.0


# -- what is trained -------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.size, self.dropout = hidden // HEADS, dropout

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, tokens, hidden] -> the same shape, or logits"""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for proj in (self.q, self.k, self.v)
        )
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two projections."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, tokens, hidden] -> the same shape, or logits"""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it and a residual."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(hidden), Attention(hidden, dropout)
        self.norm2, self.mlp = nn.LayerNorm(hidden), Mlp(hidden)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, tokens, hidden] -> the same shape, or logits"""
        x = x + self.drop1(self.attn(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """Logits of the next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, sizes.hidden)
        self.drop = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes.hidden, sizes.dropout) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids[rows, tokens] -> logits"""
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(sizes: Sizes) -> Decoder:
    """Return the same decoder on every rank and on both sides."""
    torch.manual_seed(0)
    return Decoder(sizes)


def batch(sizes: Sizes) -> dict[str, Tensor]:
    """Return rows without padding: every token counts."""
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randint(VOCAB, (2, sizes.rows, sizes.seq), generator=generator)
    return {"ids": pairs[0], "labels": pairs[1]}


def batch_loss(logits: Tensor, batch: Any) -> Tensor:
    """Return the loss of a batch: the mean over all tokens."""
    return cross_entropy(logits, batch["labels"])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss with the signature of torch's pipeline schedules."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# -- ours ------------------------------------------------------------------------------------------


def scheduled(rows: Callable[[Schedule, Sizes], None], sizes: Sizes) -> Step:
    """Return a training step of a schedule with the given rows."""
    sch = create_schedule(decoder(sizes))
    rows(sch, sizes)
    data = batch(sizes)
    program = sch.build(batch=data, loss=batch_loss, optimizer=adamw, clip=CLIP)
    return lambda: program.train_step(data)


def overlapped(sch: Schedule, sizes: Sizes) -> None:
    """Data parallel, with gradients summed during backward."""
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=0, over="dp")
    sch.overlap("gradients")


def replicated(sch: Schedule, sizes: Sizes) -> None:
    """Data parallel, with gradients summed after backward."""
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=0, over="dp")


def accumulated(stage: int, sch: Schedule, sizes: Sizes) -> None:
    """Data parallel with a ZeRO stage, and gradients accumulated over microbatches."""
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=stage, over="dp")
    sch.pipeline(order="GPipe", micro=MICRO)


def sharded(sch: Schedule, sizes: Sizes) -> None:
    """ZeRO stage 3, gathered block by block."""
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=3, over="dp")


def sharded_low(sch: Schedule, sizes: Sizes) -> None:
    """ZeRO stage 3, with parameters gathered in bfloat16."""
    sch.mesh(dp=sizes.ranks)
    with sch.step("low", relax="dtype"):
        sch.cast("bf16", params=True)
    sch.zero(stage=3, over="dp")


def autocast(sch: Schedule, sizes: Sizes) -> None:
    """Autocast to bfloat16."""
    with sch.step("low", relax="dtype"):
        sch.cast("bf16")


def autocast_accumulated(sch: Schedule, sizes: Sizes) -> None:
    """Autocast with microbatches."""
    with sch.step("low", relax="dtype"):
        sch.cast("bf16")
    sch.pipeline(order="GPipe", micro=MICRO)


def tensor_parallel(sch: Schedule, sizes: Sizes) -> None:
    """Tensor parallel heads, hidden features and vocabulary."""
    sch.mesh(tp=sizes.ranks)
    _split(sch)


def tp_recomputed(sch: Schedule, sizes: Sizes) -> None:
    """Tensor parallel, with recomputed blocks."""
    tensor_parallel(sch, sizes)
    recomputed(sch, sizes)


def tp_sharded(sch: Schedule, sizes: Sizes) -> None:
    """Tensor parallel, recomputed, with ZeRO stage 3 over another axis."""
    sch.mesh(dp=2, tp=sizes.ranks // 2)
    _split(sch)
    recomputed(sch, sizes)
    sch.zero(stage=3, over="dp")


def _split(sch: Schedule) -> None:
    sch["embed"].shard("vocab", over="tp")
    for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
        sch[f"blocks.*.{name}"].shard("col", over="tp")
    for name in ("attn.o", "mlp.down"):
        sch[f"blocks.*.{name}"].shard("row", over="tp")
    sch["head"].shard("vocab", over="tp")


def pipelined(order: str, each: int, sch: Schedule, sizes: Sizes) -> None:
    """A pipeline with `each` stages per rank."""
    sch.mesh(pp=sizes.ranks)
    stages = sizes.ranks * each
    for cut in range(1, stages):
        sch[f"blocks.{cut * sizes.layers // stages}"].pipeline_split(over="pp")
    sch.pipeline(order=order, micro=MICRO)


def recomputed(sch: Schedule, sizes: Sizes) -> None:
    """Recompute blocks in backward."""
    sch["blocks.*"].checkpoint()


# -- the peers -------------------------------------------------------------------------------------


def training_loop(
    model: nn.Module,
    data: dict[str, Tensor],
    share: float = 1.0,
    parallel: bool = False,
    clipped: Callable[..., Tensor] | None = None,
    micro: int = 1,
    around: Callable[[bool], contextlib.AbstractContextManager[Any]] | None = None,
) -> Step:
    """Return a hand-written training step; `share` is the weight of its loss in the batch's.

    around: returns the context of a microbatch, given whether it is the last
    """
    model.train()
    optimizer = adamw(list(model.named_parameters()))
    parameters = list(model.parameters())
    norm = clipped or partial(clip_plain, parameters)
    parts = [dict(zip(data, chunk)) for chunk in zip(*(v.chunk(micro) for v in data.values()))]

    def run(part: dict[str, Tensor]) -> Tensor:
        loss = batch_loss(model(part["ids"]), part)
        loss = loss / micro if micro > 1 else loss
        loss.backward()
        return loss

    def step() -> Tensor:
        optimizer.zero_grad()
        losses = []
        for k, part in enumerate(parts):
            with loss_parallel() if parallel else contextlib.nullcontext():
                if around is None:
                    loss = run(part)
                else:
                    with around(k == micro - 1):
                        loss = run(part)
            value = loss.detach()
            losses.append(value.to_local() if isinstance(value, DTensor) else value)
        value = losses[0] if micro == 1 else torch.stack(losses).sum()
        full_loss = norm(value * share)
        optimizer.step()
        return full_loss

    return step


def clip_plain(parameters: list[nn.Parameter], loss: Tensor) -> Tensor:
    """Clip replicated gradients by their norm, and return the summed loss."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(loss)
    nn.utils.clip_grad_norm_(parameters, CLIP)
    return loss


def local_batch(sizes: Sizes, parts: int = 0, index: int = -1) -> dict[str, Tensor]:
    """Return this rank's part of a batch, of `parts` (default: one per rank)."""
    parts, index = parts or sizes.ranks, dist.get_rank() if index < 0 else index
    return {n: v.chunk(parts)[index] for n, v in batch(sizes).items()}


def plain_module(sizes: Sizes) -> Step:
    """Return a step of the plain module."""
    return training_loop(decoder(sizes), batch(sizes))


def ddp(sizes: Sizes, unused: bool = False) -> Step:
    """Return a step of DDP, with gradients as views of its buckets.

    unused: find_unused_parameters
    """
    wrapped = _replicated(sizes, unused)
    return training_loop(wrapped, local_batch(sizes), 1 / sizes.ranks)


def _replicated(sizes: Sizes, unused: bool) -> DistributedDataParallel:
    options = {"gradient_as_bucket_view": True, "find_unused_parameters": unused}
    return DistributedDataParallel(decoder(sizes), **options)


def ddp_accumulated(sizes: Sizes, unused: bool = False) -> Step:
    """Return a step of DDP that reduces in the last microbatch."""
    wrapped = _replicated(sizes, unused)

    def around(last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else wrapped.no_sync()

    return training_loop(wrapped, local_batch(sizes), 1 / sizes.ranks, micro=MICRO, around=around)


def fsdp(sizes: Sizes, low: torch.dtype | None = None) -> Step:
    """Return a step of fully_shard, block by block, with averaged gradients."""
    policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=low is not None)
    outer = MixedPrecisionPolicy(low, torch.float32, torch.float32, policy.cast_forward_inputs)
    model = decoder(sizes)
    mesh = init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=outer if low is not None else policy)
    clipped = partial(clip, list(model.parameters()))
    return training_loop(model, local_batch(sizes), 1 / sizes.ranks, clipped=clipped)


def fsdp_accumulated(stage: int, sizes: Sizes) -> Step:
    """Return a step of fully_shard with microbatches, as documented for ZeRO stages 1 to 3."""
    model: Any = decoder(sizes)
    mesh = init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=stage == 3)

    def around(last: bool) -> contextlib.AbstractContextManager[Any]:
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or stage > 1)
        model.set_reshard_after_backward(last or stage == 3)
        return contextlib.nullcontext()

    clipped = partial(clip, list(model.parameters()))
    share = 1 / sizes.ranks
    return training_loop(
        model, local_batch(sizes), share, clipped=clipped, micro=MICRO, around=around
    )


def autocasted(micro: int, sizes: Sizes) -> Step:
    """Return a step of the module under torch.autocast."""

    def around(last: bool) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)

    return training_loop(decoder(sizes), batch(sizes), micro=micro, around=around)


def parallelized(sizes: Sizes, again: bool = False) -> Step:
    """Return a step of parallelize_module, with one shared input for q, k and v."""
    model = decoder(sizes)
    _parallelize(model, init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("tp",)))
    if again:
        _recompute(model)
    clipped = partial(clip, list(model.parameters()))
    return training_loop(model, batch(sizes), float(dist.get_rank() == 0), True, clipped)


def parallelized_sharded(sizes: Sizes) -> Step:
    """Return a step of parallelize_module, recomputed, with fully_shard over another axis."""
    model = decoder(sizes)
    mesh = init_device_mesh("cpu", (2, sizes.ranks // 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    _parallelize(model, tp)
    _recompute(model)
    for block in model.blocks:
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    # parameters split over tp have a 2-D mesh, replicated ones only the dp mesh
    speaks = tp.get_local_rank() == 0
    clipped = partial(
        clip, list(model.parameters()), speaks=speaks, parts=lambda g: g.device_mesh.ndim == 2
    )
    data = local_batch(sizes, 2, dp.get_local_rank())
    return training_loop(model, data, float(speaks) / 2, True, clipped)


def _parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    replicated_layout = (Replicate(),)
    entered = partial(
        PrepareModuleInput,
        input_layouts=replicated_layout,
        desired_input_layouts=replicated_layout,
        use_local_output=False,
    )
    for block in model.blocks:
        plan = {
            "attn": entered(),
            "attn.q": ColwiseParallel(),
            "attn.k": ColwiseParallel(),
            "attn.v": ColwiseParallel(),
            "attn.o": RowwiseParallel(),
            "mlp": entered(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    embed = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"embed": embed, "head": head})


def _recompute(model: Decoder) -> None:
    for block in model.blocks:
        inner = block.forward
        block.forward = partial(checkpoint, inner, use_reentrant=False)  # type: ignore[method-assign]


class StageModule(nn.Module):
    """One hand-written stage of a torch pipeline."""

    def __init__(self, sizes: Sizes, stage: int, stages: int) -> None:
        super().__init__()
        model, per_stage = decoder(sizes), sizes.layers // stages
        is_first, is_last = stage == 0, stage == stages - 1
        blocks = model.blocks[stage * per_stage : (stage + 1) * per_stage]
        input_layers = [model.embed, model.drop] if is_first else []
        self.all = nn.Sequential(
            *input_layers, *blocks, *([model.norm, model.head] if is_last else [])
        )

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, tokens, hidden] -> the same shape, or logits"""
        return self.all(x)


def torch_pipeline(kind: Any, chunks: int, sizes: Sizes) -> Step:
    """Return a step of one of torch's pipeline schedules."""
    rank, device, count = dist.get_rank(), torch.device("cpu"), sizes.ranks * chunks
    parts = nn.ModuleDict(
        {str(k): StageModule(sizes, k, count) for k in range(rank, count, sizes.ranks)}
    )
    parts.train()
    data, is_first, is_last = batch(sizes), rank == 0, rank == sizes.ranks - 1
    stages = [pipelining.PipelineStage(p, int(n), count, device) for n, p in parts.items()]
    given_stages: Any = stages if chunks > 1 else stages[0]
    schedule = kind(given_stages, MICRO, loss_fn=cross_entropy)
    parameters = list(parts.parameters())
    optimizer = adamw(list(parts.named_parameters()))

    def step() -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        inputs = (data["ids"],) if is_first else ()
        target = {"target": data["labels"], "losses": losses} if is_last else {}
        schedule.step(*inputs, **target, return_outputs=False)
        loss = torch.stack(losses).detach().mean() if is_last else torch.zeros(())
        full_loss = clip(parameters, loss, speaks=True)
        optimizer.step()
        return full_loss

    return step


def checkpointed(sizes: Sizes) -> Step:
    """Return a step with torch's checkpoint around each block."""
    model = decoder(sizes)
    _recompute(model)
    return training_loop(model, batch(sizes))


# -- the rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A comparison: the rows of a schedule, the peer's name, and the function that builds its step.

    axes  number of axes of ranks; the first has the requested size, a second one two
    near  tolerance of their first losses
    knows the peer whose bytes are counted, if the other does less: DDP must find parameters that
    no rank used, as schedlang does
    each   stages per rank of a pipeline
    """

    ours: Callable[[Schedule, Sizes], None]
    name: str
    peer: Callable[[Sizes], Step]
    axes: int = 1
    dropout: float = 0.0
    near: float = 1e-4
    knows: Callable[[Sizes], Step] | None = None
    each: int = 0

    def fitted(self, sizes: Sizes) -> Sizes:
        """Return sizes with the ranks that the row needs, and equal layers per pipeline stage."""
        ranks = (1, sizes.ranks, 2 * sizes.ranks)[self.axes]
        stages = max(self.each * ranks, 1)
        return replace(sizes, ranks=ranks, layers=-(-sizes.layers // stages) * stages)


def no_rows(sch: Schedule, sizes: Sizes) -> None:
    """Add no rows."""


_1F1B = partial(torch_pipeline, pipelining.Schedule1F1B, 1)
_GPIPE = partial(torch_pipeline, pipelining.ScheduleGPipe, 1)
_INTERLEAVED = partial(torch_pipeline, pipelining.ScheduleInterleaved1F1B, 2)
_LOW = partial(fsdp, low=torch.bfloat16)
_TP = "parallelize_module"
_DDP_UNUSED = partial(ddp, unused=True)

ROWS = {
    "one": Row(no_rows, "plain module", plain_module, axes=0),
    "overlapped": Row(overlapped, "DDP", ddp, knows=_DDP_UNUSED),
    "dp": Row(replicated, "DDP", ddp, knows=_DDP_UNUSED),
    "dp-micro": Row(
        partial(accumulated, 0),
        "DDP, no_sync",
        ddp_accumulated,
        knows=partial(ddp_accumulated, unused=True),
    ),
    "zero1": Row(partial(accumulated, 1), "fully_shard", partial(fsdp_accumulated, 1)),
    "zero2": Row(partial(accumulated, 2), "fully_shard", partial(fsdp_accumulated, 2)),
    "zero3": Row(sharded, "fully_shard", fsdp),
    "zero3-micro": Row(partial(accumulated, 3), "fully_shard", partial(fsdp_accumulated, 3)),
    "tp": Row(tensor_parallel, _TP, parallelized),
    "tp-checkpoint": Row(tp_recomputed, _TP, partial(parallelized, again=True)),
    "tp-zero3-checkpoint": Row(tp_sharded, "both by hand", parallelized_sharded, axes=2),
    "1f1b": Row(partial(pipelined, "1F1B", 1), "Schedule1F1B", _1F1B, each=1),
    "gpipe": Row(partial(pipelined, "GPipe", 1), "ScheduleGPipe", _GPIPE, each=1),
    "interleaved": Row(
        partial(pipelined, "Interleaved1F1B", 2), "Interleaved1F1B", _INTERLEAVED, each=2
    ),
    "checkpoint": Row(recomputed, "torch's checkpoint", checkpointed, axes=0),
    "cast": Row(autocast, "torch.autocast", partial(autocasted, 1), axes=0, near=1e-2),
    "cast-micro": Row(
        autocast_accumulated, "torch.autocast", partial(autocasted, MICRO), axes=0, near=1e-2
    ),
    "zero3-cast": Row(sharded_low, "fully_shard, mp_policy", _LOW, near=1e-2),
    "overlapped-dropout": Row(overlapped, "DDP", ddp, dropout=0.1, knows=_DDP_UNUSED),
    "zero3-dropout": Row(sharded, "fully_shard", fsdp, dropout=0.1),
    "tp-dropout": Row(tensor_parallel, _TP, parallelized, dropout=0.1),
    "1f1b-dropout": Row(partial(pipelined, "1F1B", 1), "Schedule1F1B", _1F1B, dropout=0.1, each=1),
    "checkpoint-dropout": Row(recomputed, "torch's checkpoint", checkpointed, axes=0, dropout=0.1),
}
