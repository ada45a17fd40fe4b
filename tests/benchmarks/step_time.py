"""Step time over hand-written torch: python -m tests.benchmarks.step_time [--pairs N] [--hidden H]

Two comparisons, each in the same processes, step by step in turn:

* a Llama of transformers under tensor and data parallelism, parameters sliced, blocks recomputed,
  against the same written directly: parallelize_module, fully_shard and torch's checkpoint;
* the same Llama, world of one and an empty schedule, against the plain module.

Both sides do the same work: the loss of the whole batch (summed over ranks, as one logs it),
clipping by the global norm, AdamW.  Beside the ratio stand the collectives of one step, counted
alike on both sides, see `counting`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from schedlang.runtime.launch.pool import Pool, progress
from schedlang.schedule import create_schedule
from tests.benchmarks.counting import Counted
from tests.benchmarks.pairs import Ratio, interleaved
from tests.benchmarks.ways import CLIP, VOCAB, Trained, adamw, clip, llama


@dataclass(frozen=True)
class Sizes(Trained):
    """And the mesh of its ranks."""

    hidden: int = 384
    seq: int = 192
    pairs: int = 40
    dp: int = 2
    tp: int = 2


def batch(sizes: Sizes) -> dict[str, Tensor]:
    """Full rows: every token counts, so that both sides weigh alike."""
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(VOCAB, (sizes.rows, sizes.seq), generator=generator)}


def loss_of(output: Any, batch: Any) -> Tensor:
    """The next token, without shifting: what is learned does not matter here."""
    return F.cross_entropy(output.logits.view(-1, VOCAB), batch["input_ids"].view(-1))


# -- ours ------------------------------------------------------------------------------------------


def ours(sizes: Sizes, parallel: bool) -> Callable[[], Any]:
    """A step under a schedule; an empty one where nothing is parallel."""
    sch = create_schedule(llama(sizes))
    if parallel:
        sch.mesh(dp=sizes.dp, tp=sizes.tp)
        sch["model.embed_tokens"].shard("vocab", over="tp")
        for name in ("q_proj", "k_proj", "v_proj"):
            sch[f"model.layers.*.self_attn.{name}"].shard("col", over="tp")
        sch["model.layers.*.self_attn.o_proj"].shard("row", over="tp")
        for name in ("gate_proj", "up_proj"):
            sch[f"model.layers.*.mlp.{name}"].shard("col", over="tp")
        sch["model.layers.*.mlp.down_proj"].shard("row", over="tp")
        sch["lm_head"].shard("vocab", over="tp")
        sch["model.layers.*"].checkpoint()
        sch.zero(stage=3, over="dp")
    data = batch(sizes)
    program = sch.build(batch=data, loss=loss_of, optimizer=adamw, clip=CLIP)
    return lambda: program.train_step(data)


# -- the peer --------------------------------------------------------------------------------------

LAYER = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def by_hand(sizes: Sizes) -> Callable[[], Any]:
    """The same with torch's own parts, as its documentation puts them together."""
    made: Any = llama(sizes)
    mesh = init_device_mesh("cpu", (sizes.dp, sizes.tp), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    embed = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(made, tp, {"model.embed_tokens": embed, "lm_head": head})
    for layer in made.model.layers:
        parallelize_module(layer, tp, {name: style() for name, style in LAYER.items()})
        layer.forward = _recomputed(layer.forward)
        fully_shard(layer, mesh=dp)
    fully_shard(made, mesh=dp)
    parameters = list(made.parameters())
    optimizer = adamw(list(made.named_parameters()))
    whole, place = batch(sizes), dp.get_local_rank()
    own = {name: value.chunk(sizes.dp)[place] for name, value in whole.items()}

    def step() -> Tensor:
        optimizer.zero_grad()
        with loss_parallel():
            loss = loss_of(made(**own), own)
            loss.backward()
        value = loss.detach()
        value = value.to_local() if isinstance(value, DTensor) else value
        speaks = tp.get_local_rank() == 0
        share = value / sizes.dp if speaks else torch.zeros_like(value)
        # those over tp are parts of their own, those alike over tp have one mesh alone
        whole = clip(parameters, share, speaks, lambda grad: grad.device_mesh.ndim == 2)
        optimizer.step()
        return whole

    return step


def _recomputed(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(inner, *args, use_reentrant=False, **kwargs)


def plain(sizes: Sizes) -> Callable[[], Any]:
    """The module alone."""
    made = llama(sizes)
    made.train()
    optimizer = adamw(list(made.named_parameters()))
    data = batch(sizes)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(made(**data), data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    return step


# -- measuring -------------------------------------------------------------------------------------


def compared(sizes: Sizes, parallel: bool) -> dict[str, Any]:
    """One rank's part of a comparison."""
    torch.set_num_threads(1)
    mine = ours(sizes, parallel)
    theirs = by_hand(sizes) if parallel else plain(sizes)
    losses = float(mine()), float(theirs())
    counts = []
    for step in (mine, theirs):
        with Counted() as counted:
            step()
        counts.append((dict(counted.calls), dict(counted.bytes)))
    progress()
    ratio = interleaved(mine, theirs, sizes.pairs)
    last = float(mine()), float(theirs())
    return {"losses": losses, "last": last, "counts": counts, "ratio": ratio}


def show(title: str, limit: float, found: dict[str, Any], peer: str) -> None:
    """A comparison as text."""
    ratio: Ratio
    ratio, cpu = found["ratio"]
    a, b = found["losses"]
    verdict = "met" if ratio.met(limit) else "NOT MET"
    print(f"\n{title}")
    print(f"  first loss        ours {a:.6f}   {peer} {b:.6f}")
    a, b = found["last"]
    print(f"  last loss         ours {a:.6f}   {peer} {b:.6f}")
    print(
        f"  median step       ours {ratio.ours * 1e3:.1f} ms   {peer} {ratio.theirs * 1e3:.1f} ms"
    )
    print(f"  ratio of {ratio.pairs} pairs {ratio}   limit {limit}: {verdict}")
    print(f"  in CPU time       {cpu}   {cpu.ours * 1e3:.1f} ms over {cpu.theirs * 1e3:.1f} ms")
    mine, theirs = found["counts"]
    kinds = sorted({*mine[0], *theirs[0]})
    if kinds:
        print(f"  collectives of a step, rank 0{'ours':>14}{'bytes':>14}{peer:>14}{'bytes':>14}")
    for kind in kinds:
        cells = [side.get(kind, 0) for side in (*mine, *theirs)]
        print(f"    {kind:<27}" + "".join(f"{cell:>14,}" for cell in cells))
    if kinds:
        sums = [sum(side.values()) for side in (*mine, *theirs)]
        print(f"    {'all':<27}" + "".join(f"{cell:>14,}" for cell in sums))


def main() -> None:
    """Both comparisons."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = Sizes(**vars(parser.parse_args()))
    print(f"torch {torch.__version__}, {sizes}")
    with Pool() as pool:
        found = pool.run(compared, 1, sizes, False, hang_after=120.0)[0]
        show("world of one, empty schedule, over the plain module", 1.01, found, "plain")
        found = pool.run(compared, sizes.dp * sizes.tp, sizes, True, hang_after=120.0)[0]
        show(
            f"dp={sizes.dp} x tp={sizes.tp}, ZeRO-3, recomputation, over hand-written torch",
            1.05,
            found,
            "by hand",
        )


if __name__ == "__main__":
    main()
