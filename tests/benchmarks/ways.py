"""Ways to do the same training step, compared: losses, gradients, bytes, kept tensors, times.

A benchmark gives a function for each way, of ours and of its peers; all are made in the same
processes and run in turn.  Losses and gradients are asserted equal first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from schedlang.runtime.launch.pool import Pool, report_progress
from tests.benchmarks.counting import Counted, sent
from tests.benchmarks.kept import kept_bytes
from tests.benchmarks.pairs import Ratio, in_turn, ratio_of

VOCAB, CLIP = 1024, 1.0


@dataclass(frozen=True)
class Sizes:
    """What is trained, `rows` a step over all `ranks`, and how often each way is timed."""

    hidden: int = 256
    layers: int = 4
    seq: int = 128
    rows: int = 4
    pairs: int = 30
    ranks: int = 2


@dataclass(frozen=True)
class Way:
    """A step that gives the loss of the whole batch, and the whole gradients of the last one."""

    step: Callable[[], Tensor]
    gradients: Callable[[], Mapping[str, Tensor]]


Ways = Mapping[str, Callable[[Sizes], Way]]


# -- what is trained -------------------------------------------------------------------------------


def shapes(sizes: Any) -> dict[str, Any]:
    """Of a decoder of transformers, as its configuration calls them; of any benchmark's sizes."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.hidden * 11 // 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": sizes.seq,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


def llama(sizes: Any) -> Any:
    """The same on every rank and for every way; no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shapes(sizes)))


def batch(sizes: Sizes) -> dict[str, Tensor]:
    """Full rows; the model makes the loss itself."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (sizes.rows, sizes.seq), generator=generator)
    return {"input_ids": ids, "labels": ids}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Of all ways."""
    return torch.optim.AdamW(named, lr=1e-3)


def scheduled(schedule: Any, data: dict[str, Tensor]) -> Way:
    """Ours, from a schedule with all its rows."""
    program = schedule.build(batch=data, optimizer=adamw, clip=CLIP)
    return Way(lambda: program.train_step(data), program.gradients)


def by_loop(made: nn.Module, data: dict[str, Tensor], share: float, parallel: bool = False) -> Way:
    """The loop that one writes around a module that is already parallel.

    data: this rank's; share: of its loss in the loss of the whole batch; parallel: the logits are
    split over the vocabulary.
    """
    made.train()
    parameters = dict(made.named_parameters())
    optimizer = adamw(list(parameters.items()))

    def step() -> Tensor:
        optimizer.zero_grad()
        with loss_parallel() if parallel else contextlib.nullcontext():
            loss: Tensor = made(**data).loss
            loss.backward()
        value = loss.detach()
        value = value.to_local() if isinstance(value, DTensor) else value
        whole = clip(list(parameters.values()), value * share)
        optimizer.step()
        return whole

    def gradients() -> dict[str, Tensor]:
        there = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in there.items()}

    return Way(step, gradients)


def clip(
    parameters: list[Any],
    loss: Tensor,
    speaks: bool | None = None,
    parts: Callable[[Any], bool] | None = None,
) -> Tensor:
    """Clip by the global norm; one reduction for it and the loss, which is given back.

    By hand, as `clip_grad_norm_` refuses plain tensors beside DTensors, and tensors of two meshes:
    norms of parts (`parts(grad)`, else what is split) are added on every rank, others on the one
    that speaks for them (else rank 0).
    """
    speaks, parts = dist.get_rank() == 0 if speaks is None else speaks, parts or is_split
    grads = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    counted = [part for part, grad in zip(local, grads) if speaks or parts(grad)]
    squares = torch.stack(torch._foreach_norm(counted)).square().sum()
    both = torch.stack([squares, loss])
    dist.all_reduce(both)
    norm = float(both[0].sqrt())
    if norm > CLIP:
        torch._foreach_mul_(local, CLIP / (norm + 1e-6))
    return both[1]


def is_split(grad: Tensor) -> bool:
    """Does this rank hold only a part?"""
    return isinstance(grad, DTensor) and any(p.is_shard() for p in grad.placements)


# -- measuring -------------------------------------------------------------------------------------


def measured(sizes: Sizes, ours: Ways, peers: Ways) -> dict[str, Any]:
    """One rank's part: what each way sends and keeps, and the ratios of ours over the peers'."""
    torch.set_num_threads(1)
    made = {name: make(sizes) for name, make in {**ours, **peers}.items()}
    agree(made, next(iter(peers)))
    report_progress()
    found: dict[str, Any] = {"ways": {}, "wall": {}, "cpu": {}}
    for name, way in made.items():
        with Counted() as counted:
            way.step()
        bytes_sent, kept = sent(counted.bytes, sizes.ranks), kept_bytes(way.step)
        found["ways"][name] = {"calls": dict(counted.calls), "sent": bytes_sent, "kept": kept}
    times = in_turn([way.step for way in made.values()], sizes.pairs)
    columns = dict(zip(made, zip(*times)))
    for mine in ours:
        for peer in peers:
            for number, clock in enumerate(("wall", "cpu")):
                pairs = [(a[number], b[number]) for a, b in zip(columns[mine], columns[peer])]
                found[clock][f"{mine} / {peer}"] = ratio_of(pairs)
    return found


def agree(made: Mapping[str, Way], peer: str) -> None:
    """All ways have the losses and gradients of one peer, before and after a step."""
    for _ in range(2):
        losses = {name: float(way.step()) for name, way in made.items()}
        assert all(abs(loss - losses[peer]) < 1e-4 for loss in losses.values()), losses
        found = {name: way.gradients() for name, way in made.items()}
        expected = found[peer]
        for name, grads in found.items():
            if grads or dist.get_rank() == 0:  # ours are whole on rank 0
                assert grads.keys() == expected.keys(), name
            for key, grad in grads.items():
                torch.testing.assert_close(grad, expected[key], rtol=2e-3, atol=2e-5)


def show(sizes: Sizes, found: dict[str, Any]) -> None:
    """The comparison as text."""
    print(f"torch {torch.__version__}, {sizes}, rank 0")
    print(f"  {'':14}{'sent, bytes':>14}{'kept, bytes':>14}   collectives")
    for name, way in found["ways"].items():
        calls = ", ".join(f"{n} {kind}" for kind, n in sorted(way["calls"].items()))
        print(f"  {name:14}{way['sent']:>14,}{way['kept']:>14,}   {calls}")
    for clock in ("wall", "cpu"):
        for pair, ratio in found[clock].items():
            each = f"{ratio.ours * 1e3:.1f} ms over {ratio.theirs * 1e3:.1f} ms"
            print(f"  {clock:5}{pair:26} {ratio}   {each}")


def as_json(sizes: Sizes, found: dict[str, Any]) -> str:
    """The same for machines."""

    def plain(value: Any) -> Any:
        assert isinstance(value, Ratio)
        return asdict(value)

    return json.dumps({"sizes": asdict(sizes), **found}, default=plain)


def main(description: str, ours: Ways, peers: Ways) -> None:
    """Measure once and print."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="for machines")
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    machine = given.pop("json")
    sizes = Sizes(**given)
    with Pool() as pool:
        found = pool.run(measured, sizes.ranks, sizes, ours, peers, hang_after=180.0)[0]
    if machine:
        print(as_json(sizes, found))
    else:
        show(sizes, found)
