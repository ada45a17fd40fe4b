"""A step beside hand-written torch, row by row: python -m tests.benchmarks.steps [ROW ...]

A decoder of plain torch trains under schedules and under what torch's documentation writes by hand
for the same: the loss of the whole batch on every rank, clipping by the global norm, AdamW.
Counted on rank 0, alike on both sides: Python functions entered in a step, collectives (and how
many bytes the largest tensor of each has), and, of a model four times as wide, bytes that live
between steps and at the peak of one.  With `--pairs N`, the ratios of wall and CPU time of steps in
turn.
`--profile ROW` prints where our step calls most.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import pathlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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

import schedlang
from schedlang.runtime.launch.pool import Pool, progress
from schedlang.schedule import Schedule, create_schedule
from tests.benchmarks.counting import Counted
from tests.benchmarks.pairs import Ratio, interleaved
from tests.benchmarks.ways import CLIP, VOCAB, adamw, clip

HEADS, MICRO = 4, 4
WIDER = 4  # where bytes are counted
_M_MMAP_THRESHOLD = -3  # of mallopt
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


def sharded(sch: Schedule, sizes: Sizes) -> None:
    """Parameters in slices, a block at a time."""
    sch.mesh(dp=sizes.ranks)
    sch.zero(stage=3, over="dp")


def tensor(sch: Schedule, sizes: Sizes) -> None:
    """Heads and hidden features over ranks, the vocabulary too."""
    sch.mesh(tp=sizes.ranks)
    sch["embed"].shard("vocab", over="tp")
    for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
        sch[f"blocks.*.{name}"].shard("col", over="tp")
    for name in ("attn.o", "mlp.down"):
        sch[f"blocks.*.{name}"].shard("row", over="tp")
    sch["head"].shard("vocab", over="tp")


def piped(sch: Schedule, sizes: Sizes) -> None:
    """A stage a rank."""
    sch.mesh(pp=sizes.ranks)
    for cut in range(1, sizes.ranks):
        sch[f"blocks.{cut * sizes.layers // sizes.ranks}"].pipeline_split(over="pp")
    sch.pipeline(order="1F1B", micro=MICRO)


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
) -> Step:
    """The loop that one writes around a module; `share` of its loss in that of the whole batch."""
    from contextlib import nullcontext

    made.train()
    optimizer = adamw(list(made.named_parameters()))
    parameters = list(made.parameters())
    norm = clipped or partial(clip_and_tell, parameters)

    def step() -> Tensor:
        optimizer.zero_grad()
        with loss_parallel() if parallel else nullcontext():
            loss = loss_of(made(data["ids"]), data)
            loss.backward()
        value = loss.detach()
        value = value.to_local() if isinstance(value, DTensor) else value
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


def own_rows(sizes: Sizes) -> dict[str, Tensor]:
    """This rank's part of a batch."""
    return {n: v.chunk(sizes.ranks)[dist.get_rank()] for n, v in batch(sizes).items()}


def plain(sizes: Sizes) -> Step:
    """The module alone."""
    return looped(decoder(sizes), batch(sizes))


def ddp(sizes: Sizes) -> Step:
    """Torch's own data parallelism, with gradients in the buckets that are summed."""
    made = DistributedDataParallel(decoder(sizes), gradient_as_bucket_view=True)
    return looped(made, own_rows(sizes), 1 / sizes.ranks)


def fsdp(sizes: Sizes) -> Step:
    """fully_shard, block by block; gradients are averaged, as the parts of a batch are equal."""
    made = decoder(sizes)
    mesh = init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("dp",))
    for block in made.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    clipped = partial(clip, list(made.parameters()))
    return looped(made, own_rows(sizes), 1 / sizes.ranks, clipped=clipped)


def parallelized(sizes: Sizes) -> Step:
    """parallelize_module, the input of q, k and v entered once."""
    made = decoder(sizes)
    mesh = init_device_mesh("cpu", (sizes.ranks,), mesh_dim_names=("tp",))
    whole = (Replicate(),)
    entered = partial(
        PrepareModuleInput,
        input_layouts=whole,
        desired_input_layouts=whole,
        use_local_output=False,
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
    clipped = partial(clip, list(made.parameters()))
    return looped(made, batch(sizes), float(dist.get_rank() == 0), True, clipped)


class Part(nn.Module):
    """The stage of a rank, as torch's pipelines have it written by hand."""

    def __init__(self, sizes: Sizes, rank: int) -> None:
        super().__init__()
        made, each = decoder(sizes), sizes.layers // sizes.ranks
        first, last = rank == 0, rank == sizes.ranks - 1
        blocks = made.blocks[rank * each : (rank + 1) * each]
        before = [made.embed, made.drop] if first else []
        self.all = nn.Sequential(*before, *blocks, *([made.norm, made.head] if last else []))

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, tokens, hidden] -> the same shape, or logits"""
        return self.all(x)


def torch_pipeline(sizes: Sizes) -> Step:
    """Schedule1F1B."""
    rank, device = dist.get_rank(), torch.device("cpu")
    made = Part(sizes, rank)
    made.train()
    data, first, last = batch(sizes), rank == 0, rank == sizes.ranks - 1
    stage = pipelining.PipelineStage(made, rank, sizes.ranks, device)
    schedule = pipelining.Schedule1F1B(stage, MICRO, loss_fn=cross_entropy)
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
    for block in made.blocks:
        inner = block.forward
        block.forward = partial(checkpoint, inner, use_reentrant=False)  # type: ignore[method-assign]
    return looped(made, batch(sizes))


# -- the rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A comparison: ours by the rows of a schedule, the peer's name and how it is made."""

    ours: Callable[[Schedule, Sizes], None]
    name: str
    peer: Callable[[Sizes], Step]
    alone: bool = False
    dropout: float = 0.0


def nothing(sch: Schedule, sizes: Sizes) -> None:
    """No row at all."""


ROWS = {
    "one": Row(nothing, "plain module", plain, alone=True),
    "overlapped": Row(overlapped, "DDP", ddp),
    "dp": Row(replicated, "DDP", ddp),
    "zero3": Row(sharded, "fully_shard", fsdp),
    "tp": Row(tensor, "parallelize_module", parallelized),
    "1f1b": Row(piped, "Schedule1F1B", torch_pipeline),
    "checkpoint": Row(recomputed, "torch's checkpoint", checkpointed, alone=True),
    "overlapped-dropout": Row(overlapped, "DDP", ddp, dropout=0.1),
    "zero3-dropout": Row(sharded, "fully_shard", fsdp, dropout=0.1),
    "1f1b-dropout": Row(piped, "Schedule1F1B", torch_pipeline, dropout=0.1),
}


# -- measuring -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Of one step of one side."""

    calls: int
    collectives: int
    sent: int
    live: int = 0
    peak: int = 0


def calls_of(step: Step) -> int:
    """Python functions entered in a step; on a CPU, backward runs in this thread too."""
    found = 0

    def heard(frame: Any, event: str, arg: Any) -> None:
        nonlocal found
        found += event == "call"

    gc.collect()
    gc.disable()  # or whose finalizers run is chance
    sys.setprofile(heard)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def bytes_of(make: Callable[[], Step], steps: int = 3) -> tuple[int, int]:
    """Bytes that live after some steps, and the most of the last one; of a program made here.

    Resident ones, as Linux counts them: whoever allocates, in whatever thread.  What is larger than
    a few pages is mapped for itself, and so is gone when it is freed.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**15)
    gc.collect()
    before = _resident()[0]
    step = make()
    for _ in range(steps - 1):
        step()
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
    step()
    peak = _resident()[1]
    gc.collect()
    return _resident()[0] - before, peak - before


def _resident() -> tuple[int, int]:
    """Bytes now, and the most since it was set back."""
    time.sleep(0.05)  # gloo's threads let go of tensors after they have told who waits
    ctypes.CDLL(None).malloc_trim(0)
    told = dict(re.findall(r"(Vm\w+):\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text()))
    return int(told["VmRSS"]) << 10, int(told["VmHWM"]) << 10


def measured(
    name: str, sizes: Sizes, pairs: int, memory: bool
) -> tuple[list[Counts], tuple[Ratio, Ratio] | None]:
    """One rank's part of a row: the counts of both sides."""
    torch.set_num_threads(1)
    row = ROWS[name]
    sizes = replace(sizes, dropout=row.dropout)
    makes = [partial(scheduled, row.ours, sizes), partial(row.peer, sizes)]
    held = [(0, 0), (0, 0)]
    if memory:  # each once before: libraries are loaded, threads have their heaps
        wide = replace(sizes, hidden=sizes.hidden * WIDER)
        makes_wide = [partial(scheduled, row.ours, wide), partial(row.peer, wide)]
        for _ in range(2):
            held = [bytes_of(make) for make in makes_wide]
            progress()
    steps = [make() for make in makes]
    for _ in range(3):
        a, b = (float(step()) for step in steps)
        assert row.dropout or abs(a - b) < 1e-4, (a, b)
    counts = []
    for step, bytes_ in zip(steps, held):
        calls = calls_of(step)
        with Counted() as counted:
            step()
        sent = sum(counted.calls.values()), sum(counted.bytes.values())
        counts.append(Counts(calls, *sent, *bytes_))
        progress()
    return counts, interleaved(*steps, pairs) if pairs else None


def profiled(name: str, sizes: Sizes, side: int) -> str:
    """Where one side's step on rank 0 enters functions: by the lines of ours (of the peer, all)."""
    torch.set_num_threads(1)
    row = ROWS[name]
    sizes = replace(sizes, dropout=row.dropout)
    step = [partial(scheduled, row.ours, sizes), partial(row.peer, sizes)][side]()
    for _ in range(3):
        step()
    found: Counter[str] = Counter()
    own = str(pathlib.Path(schedlang.__file__).parent)

    def heard(frame: Any, event: str, arg: Any) -> None:
        if event != "call":
            return
        where = frame.f_back
        while where is not None and own not in where.f_code.co_filename:
            where = where.f_back
        if where is None:
            found[f"outside: {frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
            return
        code = where.f_code
        file = code.co_filename.removeprefix(own)
        found[f"{file}:{where.f_lineno} {code.co_qualname} -> {frame.f_code.co_qualname}"] += 1

    sys.setprofile(heard)
    try:
        step()
    finally:
        sys.setprofile(None)
    return "\n".join(f"{count:7} {where}" for where, count in found.most_common(120))


def shown(name: str, counts: Sequence[Counts], ratios: tuple[Ratio, Ratio] | None) -> str:
    """A row of the table."""
    ours, peer = counts
    cells = [
        f"{getattr(ours, key):,} / {getattr(peer, key):,}"
        for key in ("calls", "collectives", "sent", "live", "peak")
    ]
    calls = ours.calls / peer.calls
    title = f"{name} / {ROWS[name].name}"
    return (
        f"{title:36}{cells[0]:>18}{calls:6.2f}"
        + "".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], (12, 24, 26, 26)))
        + "".join(f"   {name} {one}" for name, one in zip(("wall", "CPU"), ratios or ()))
    )


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--no-memory", action="store_true", help="leave the bytes out")
    parser.add_argument("--profile", choices=list(ROWS))
    parser.add_argument("--peer", action="store_true", help="profile the peer")
    for name in ("hidden", "layers", "seq", "rows", "ranks"):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=getattr(Sizes(), name),
            dest=f"size_{name}",
            metavar="N",
        )
    asked = parser.parse_args()
    given = vars(asked)
    sizes = Sizes(**{n.removeprefix("size_"): v for n, v in given.items() if n[:5] == "size_"})
    with Pool() as pool:
        if asked.profile:
            ranks = 1 if ROWS[asked.profile].alone else sizes.ranks
            work = (profiled, ranks, asked.profile, sizes, int(asked.peer))
            print(pool.run(*work, hang_after=120.0)[0])
            return
        heads = ("Python calls", "collectives", "of bytes", "live bytes", "peak bytes")
        print(f"torch {torch.__version__}, {sizes}; ours / peer, rank 0")
        print(f"{'':36}" + "".join(f"{h:>{w}}" for h, w in zip(heads, (24, 12, 24, 26, 26))))
        for name in asked.rows or ROWS:
            ranks = 1 if ROWS[name].alone else sizes.ranks
            work = (
                measured,
                ranks,
                name,
                replace(sizes, ranks=ranks),
                asked.pairs,
                not asked.no_memory,
            )
            print(shown(name, *pool.run(*work, hang_after=180.0)[0]), flush=True)


if __name__ == "__main__":
    main()
