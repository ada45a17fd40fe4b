"""Steps that are compared: a decoder under schedules, and under the same written by hand.

Peers are as torch's documentation has them: the loss of the whole batch on every rank, clipping by
the global norm, AdamW.
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
from tests.benchmarks.ways import CLIP, VOCAB, adamw, clip

HEADS, MICRO = 4, 4
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What is trained, `rows` a step over all ranks."""

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
    """Attention and an MLP, each on what was normed, added to what came."""

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
    """The same on every rank and on both sides."""
    torch.manual_seed(0)
    return Decoder(sizes)


def batch(sizes: Sizes) -> dict[str, Tensor]:
    """Full rows: every token counts."""
    generator = torch.Generator().manual_seed(1)
    both = torch.randint(VOCAB, (2, sizes.rows, sizes.seq), generator=generator)
    return {"ids": both[0], "labels": both[1]}


def loss_of(logits: Tensor, batch: Any) -> Tensor:
    """Of all tokens alike."""
    return cross_entropy(logits, batch["labels"])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """As torch's schedules ask for it."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# -- ours ------------------------------------------------------------------------------------------


def scheduled(rows: Callable[[Schedule, Sizes], None], sizes: Sizes) -> Step:
    """A step of ours."""
    sch = create_schedule(decoder(sizes))
    rows(sch, sizes)
    data = batch(sizes)
    program = sch.build(batch=data, loss=loss_of, optimizer=adamw, clip=CLIP)
    return lambda: program.train_step(data)


def overlapped(sch: Schedule, sizes: Sizes) -> None:
    """Gradients are summed while backward runs."""
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=0, over="dp")
    sch.overlap("gradients")


def replicated(sch: Schedule, sizes: Sizes) -> None:
    """Gradients are summed after it."""
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=0, over="dp")


def accumulated(stage: int, sch: Schedule, sizes: Sizes) -> None:
    """Gradients are added up over microbatches."""
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=stage, over="dp")
    sch.pipeline(order="GPipe", micro=MICRO)


def sharded(sch: Schedule, sizes: Sizes) -> None:
    """Parameters in slices, a block at a time."""
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=3, over="dp")


def sharded_low(sch: Schedule, sizes: Sizes) -> None:
    """And gathered in the dtype in which all is computed."""
    sch.mesh(dp=sizes.ranks)
    with sch.step("low", relax="dtype"):
        sch.cast("bf16", params=True)
    sch.zero(stage=3, over="dp")


def autocast(sch: Schedule, sizes: Sizes) -> None:
    """Computed in torch's own choice of dtypes."""
    with sch.step("low", relax="dtype"):
        sch.cast("bf16")


def autocast_accumulated(sch: Schedule, sizes: Sizes) -> None:
    """The same for each microbatch."""
    with sch.step("low", relax="dtype"):
        sch.cast("bf16")
    sch.pipeline(order="GPipe", micro=MICRO)


def tensor(sch: Schedule, sizes: Sizes) -> None:
    """Heads and hidden features over ranks, the vocabulary too."""
    sch.mesh(tp=sizes.ranks)
    _split(sch)


def tensor_recomputed(sch: Schedule, sizes: Sizes) -> None:
    """And blocks run again in backward."""
    tensor(sch, sizes)
    recomputed(sch, sizes)


def tensor_sharded(sch: Schedule, sizes: Sizes) -> None:
    """And each part of a parameter in slices over further ranks."""
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


def piped(order: str, each: int, sch: Schedule, sizes: Sizes) -> None:
    """So many stages a rank."""
    sch.mesh(pp=sizes.ranks)
    stages = sizes.ranks * each
    for cut in range(1, stages):
        sch[f"blocks.{cut * sizes.layers // stages}"].pipeline_split(over="pp")
    sch.pipeline(order=order, micro=MICRO)


def recomputed(sch: Schedule, sizes: Sizes) -> None:
    """Blocks run again in backward."""
    sch["blocks.*"].checkpoint()


# -- the peers -------------------------------------------------------------------------------------


def looped(
    made: nn.Module,
    data: dict[str, Tensor],
    share: float = 1.0,
    parallel: bool = False,
    clipped: Callable[..., Tensor] | None = None,
    micro: int = 1,
    around: Callable[[bool], contextlib.AbstractContextManager[Any]] | None = None,
) -> Step:
    """The loop that one writes around a module; `share` of its loss in that of the whole batch.

    around: what each microbatch runs in; it is told which one is the last
    """
    made.train()
    optimizer = adamw(list(made.named_parameters()))
    parameters = list(made.parameters())
    norm = clipped or partial(clip_and_tell, parameters)
    parts = [dict(zip(data, one)) for one in zip(*(v.chunk(micro) for v in data.values()))]

    def run(part: dict[str, Tensor]) -> Tensor:
        loss = loss_of(made(part["ids"]), part)
        loss = loss / micro if micro > 1 else loss
        loss.backward()
        return loss

    def step() -> Tensor:
        optimizer.zero_grad()
        losses = []
        for place, part in enumerate(parts):
            with loss_parallel() if parallel else contextlib.nullcontext():
                if around is None:
                    loss = run(part)
                else:
                    with around(place == micro - 1):
                        loss = run(part)
            value = loss.detach()
            losses.append(value.to_local() if isinstance(value, DTensor) else value)
        value = losses[0] if micro == 1 else torch.stack(losses).sum()
        whole = norm(value * share)
        optimizer.step()
        return whole

    return step


def clip_and_tell(parameters: list[nn.Parameter], loss: Tensor) -> Tensor:
    """Of gradients that are whole everywhere."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(loss)
    nn.utils.clip_grad_norm_(parameters, CLIP)
    return loss


def own_rows(sizes: Sizes, parts: int = 0, place: int = -1) -> dict[str, Tensor]:
    """This rank's part of a batch, of as many as there are ranks if nothing is said."""
    parts, place = parts or sizes.ranks, dist.get_rank() if place < 0 else place
    return {n: v.chunk(parts)[place] for n, v in batch(sizes).items()}


def plain(sizes: Sizes) -> Step:
    """The module alone."""
    return looped(decoder(sizes), batch(sizes))


def ddp(sizes: Sizes, unused: bool = False) -> Step:
    """Torch's own data parallelism, with gradients in the buckets that are summed.

    unused: ranks agree on parameters that none of them used
    """
    made = _replicated(sizes, unused)
    return looped(made, own_rows(sizes), 1 / sizes.ranks)


def _replicated(sizes: Sizes, unused: bool) -> DistributedDataParallel:
    both = {"gradient_as_bucket_view": True, "find_unused_parameters": unused}
    return DistributedDataParallel(decoder(sizes), **both)


def ddp_accumulated(sizes: Sizes, unused: bool = False) -> Step:
    """The same, which sums in the last microbatch."""
    made = _replicated(sizes, unused)

    def around(last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else made.no_sync()

    return looped(made, own_rows(sizes), 1 / sizes.ranks, micro=MICRO, around=around)


def fsdp(sizes: Sizes, low: torch.dtype | None = None) -> Step:
    """fully_shard, block by block; gradients are averaged, as the parts of a batch are equal."""
    policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=low is not None)
    outer = MixedPrecisionPolicy(low, torch.float32, torch.float32, policy.cast_forward_inputs)
    made = decoder(sizes)
    mesh = init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("dp",))
    for block in made.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(made, mesh=mesh, mp_policy=outer if low is not None else policy)
    clipped = partial(clip, list(made.parameters()))
    return looped(made, own_rows(sizes), 1 / sizes.ranks, clipped=clipped)


def fsdp_accumulated(stage: int, sizes: Sizes) -> Step:
    """fully_shard over microbatches, as its documentation has stages 1 to 3."""
    made: Any = decoder(sizes)
    mesh = init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("dp",))
    for block in made.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3)
    fully_shard(made, mesh=mesh, reshard_after_forward=stage == 3)

    def around(last: bool) -> contextlib.AbstractContextManager[Any]:
        made.set_is_last_backward(last)
        made.set_requires_gradient_sync(last or stage > 1)
        made.set_reshard_after_backward(last or stage == 3)
        return contextlib.nullcontext()

    clipped = partial(clip, list(made.parameters()))
    share = 1 / sizes.ranks
    return looped(made, own_rows(sizes), share, clipped=clipped, micro=MICRO, around=around)


def autocasted(micro: int, sizes: Sizes) -> Step:
    """The module under torch.autocast."""

    def around(last: bool) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)

    return looped(decoder(sizes), batch(sizes), micro=micro, around=around)


def parallelized(sizes: Sizes, again: bool = False) -> Step:
    """parallelize_module, the input of q, k and v entered once."""
    made = decoder(sizes)
    _parallelize(made, init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("tp",)))
    if again:
        _recompute(made)
    clipped = partial(clip, list(made.parameters()))
    return looped(made, batch(sizes), float(dist.get_rank() == 0), True, clipped)


def parallelized_sharded(sizes: Sizes) -> Step:
    """And recomputed, and fully_shard over further ranks."""
    made = decoder(sizes)
    both = init_device_mesh("cpu", (2, sizes.ranks // 2), mesh_dim_names=("dp", "tp"))
    tp, dp = both["tp"], both["dp"]
    _parallelize(made, tp)
    _recompute(made)
    for block in made.blocks:
        fully_shard(block, mesh=dp)
    fully_shard(made, mesh=dp)
    # those over tp are parts of their own, those alike over tp have one mesh alone
    speaks = tp.get_local_rank() == 0
    clipped = partial(
        clip, list(made.parameters()), speaks=speaks, parts=lambda g: g.device_mesh.ndim == 2
    )
    data = own_rows(sizes, 2, dp.get_local_rank())
    return looped(made, data, float(speaks) / 2, True, clipped)


def _parallelize(made: Decoder, mesh: DeviceMesh) -> None:
    whole = (Replicate(),)
    entered = partial(
        PrepareModuleInput, input_layouts=whole, desired_input_layouts=whole, use_local_output=False
    )
    for block in made.blocks:
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
    parallelize_module(made, mesh, {"embed": embed, "head": head})


def _recompute(made: Decoder) -> None:
    for block in made.blocks:
        inner = block.forward
        block.forward = partial(checkpoint, inner, use_reentrant=False)  # type: ignore[method-assign]


class Part(nn.Module):
    """One of some stages, as torch's pipelines have it written by hand."""

    def __init__(self, sizes: Sizes, stage: int, stages: int) -> None:
        super().__init__()
        made, each = decoder(sizes), sizes.layers // stages
        first, last = stage == 0, stage == stages - 1
        blocks = made.blocks[stage * each : (stage + 1) * each]
        before = [made.embed, made.drop] if first else []
        self.all = nn.Sequential(*before, *blocks, *([made.norm, made.head] if last else []))

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, tokens, hidden] -> the same shape, or logits"""
        return self.all(x)


def torch_pipeline(kind: Any, each: int, sizes: Sizes) -> Step:
    """Torch's own schedules."""
    rank, device, count = dist.get_rank(), torch.device("cpu"), sizes.ranks * each
    made = nn.ModuleDict(
        {str(place): Part(sizes, place, count) for place in range(rank, count, sizes.ranks)}
    )
    made.train()
    data, first, last = batch(sizes), rank == 0, rank == sizes.ranks - 1
    stages = [pipelining.PipelineStage(p, int(n), count, device) for n, p in made.items()]
    given_stages: Any = stages if each > 1 else stages[0]
    schedule = kind(given_stages, MICRO, loss_fn=cross_entropy)
    parameters = list(made.parameters())
    optimizer = adamw(list(made.named_parameters()))

    def step() -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (data["ids"],) if first else ()
        target = {"target": data["labels"], "losses": losses} if last else {}
        schedule.step(*given, **target, return_outputs=False)
        loss = torch.stack(losses).detach().mean() if last else torch.zeros(())
        whole = clip(parameters, loss, speaks=True)
        optimizer.step()
        return whole

    return step


def checkpointed(sizes: Sizes) -> Step:
    """Torch's, around each block."""
    made = decoder(sizes)
    _recompute(made)
    return looped(made, batch(sizes))


# -- the rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A comparison: ours by the rows of a schedule, the peer's name and how it is made.

    axes  on how many axes of ranks; each has as many as are asked for, a second one two
    near  how near their first losses are
    knows the peer whose bytes are counted, where the other one does less for its calls and time: of
          a parameter that no rank used, DDP is to know it, as ours does
    each   of a pipeline, the stages of each rank
    """

    ours: Callable[[Schedule, Sizes], None]
    name: str
    peer: Callable[[Sizes], Step]
    axes: int = 1
    dropout: float = 0.0
    near: float = 1e-4
    knows: Callable[[Sizes], Step] | None = None
    each: int = 0

    def fitted(self, asked: Sizes) -> Sizes:
        """On as many ranks as it takes; of a pipeline each stage has as many layers."""
        ranks = (1, asked.ranks, 2 * asked.ranks)[self.axes]
        stages = max(self.each * ranks, 1)
        return replace(asked, ranks=ranks, layers=-(-asked.layers // stages) * stages)


def nothing(sch: Schedule, sizes: Sizes) -> None:
    """No row at all."""


_1F1B = partial(torch_pipeline, pipelining.Schedule1F1B, 1)
_GPIPE = partial(torch_pipeline, pipelining.ScheduleGPipe, 1)
_INTERLEAVED = partial(torch_pipeline, pipelining.ScheduleInterleaved1F1B, 2)
_LOW = partial(fsdp, low=torch.bfloat16)
_TP = "parallelize_module"
_KNOWS = partial(ddp, unused=True)

ROWS = {
    "one": Row(nothing, "plain module", plain, axes=0),
    "overlapped": Row(overlapped, "DDP", ddp, knows=_KNOWS),
    "dp": Row(replicated, "DDP", ddp, knows=_KNOWS),
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
    "tp": Row(tensor, _TP, parallelized),
    "tp-checkpoint": Row(tensor_recomputed, _TP, partial(parallelized, again=True)),
    "tp-zero3-checkpoint": Row(tensor_sharded, "both by hand", parallelized_sharded, axes=2),
    "1f1b": Row(partial(piped, "1F1B", 1), "Schedule1F1B", _1F1B, each=1),
    "gpipe": Row(partial(piped, "GPipe", 1), "ScheduleGPipe", _GPIPE, each=1),
    "interleaved": Row(
        partial(piped, "Interleaved1F1B", 2), "Interleaved1F1B", _INTERLEAVED, each=2
    ),
    "checkpoint": Row(recomputed, "torch's checkpoint", checkpointed, axes=0),
    "cast": Row(autocast, "torch.autocast", partial(autocasted, 1), axes=0, near=1e-2),
    "cast-micro": Row(
        autocast_accumulated, "torch.autocast", partial(autocasted, MICRO), axes=0, near=1e-2
    ),
    "zero3-cast": Row(sharded_low, "fully_shard, mp_policy", _LOW, near=1e-2),
    "overlapped-dropout": Row(overlapped, "DDP", ddp, dropout=0.1, knows=_KNOWS),
    "zero3-dropout": Row(sharded, "fully_shard", fsdp, dropout=0.1),
    "tp-dropout": Row(tensor, _TP, parallelized, dropout=0.1),
    "1f1b-dropout": Row(partial(piped, "1F1B", 1), "Schedule1F1B", _1F1B, dropout=0.1, each=1),
    "checkpoint-dropout": Row(recomputed, "torch's checkpoint", checkpointed, axes=0, dropout=0.1),
}
