"""Variants of the same training step, compared: losses, gradients, bytes, saved tensors, times.

A benchmark gives a function for each variant, of schedlang and of its peers; all are built in the
same processes and run alternately.  Losses and gradients are asserted equal first.
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
from tests.benchmarks.counting import CollectiveCounter, sent_bytes
from tests.benchmarks.kept import saved_bytes_of
from tests.benchmarks.pairs import Ratio, ratio_of, timed_rounds

VOCAB, CLIP = 1024, 1.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of model and batch (`rows` over all `ranks`), and how often each variant is timed."""

    hidden: int = 256
    layers: int = 4
    seq: int = 128
    rows: int = 4
    pairs: int = 30
    ranks: int = 2


@dataclass(frozen=True)
class StepVariant:
    """A step that returns the loss of the full batch, and a function of its full gradients."""

    step: Callable[[], Tensor]
    gradients: Callable[[], Mapping[str, Tensor]]


StepVariants = Mapping[str, Callable[[Sizes], StepVariant]]


# -- what is trained -------------------------------------------------------------------------------


def config_sizes(sizes: Any) -> dict[str, Any]:
    """Return sizes as arguments of a transformers configuration."""
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
    """Return the same Llama on every rank and for every variant; no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config_sizes(sizes)))


def batch(sizes: Sizes) -> dict[str, Tensor]:
    """Return rows without padding; the model computes the loss."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (sizes.rows, sizes.seq), generator=generator)
    return {"input_ids": ids, "labels": ids}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all variants."""
    return torch.optim.AdamW(named, lr=1e-3)


def scheduled(schedule: Any, data: dict[str, Tensor]) -> StepVariant:
    """Return the variant of a schedule."""
    program = schedule.build(batch=data, optimizer=adamw, clip=CLIP)
    return StepVariant(lambda: program.train_step(data), program.gradients)


def by_training_loop(
    model: nn.Module, data: dict[str, Tensor], share: float, parallel: bool = False
) -> StepVariant:
    """Return the variant of a hand-written loop around a parallel module.

    data: this rank's; share: of its loss in the loss of the whole batch; parallel: the logits are
    split over the vocabulary.
    """
    model.train()
    parameters = dict(model.named_parameters())
    optimizer = adamw(list(parameters.items()))

    def step() -> Tensor:
        optimizer.zero_grad()
        with loss_parallel() if parallel else contextlib.nullcontext():
            loss: Tensor = model(**data).loss
            loss.backward()
        value = loss.detach()
        value = value.to_local() if isinstance(value, DTensor) else value
        full_loss = clip(list(parameters.values()), value * share)
        optimizer.step()
        return full_loss

    def gradients() -> dict[str, Tensor]:
        own_grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in own_grads.items()}

    return StepVariant(step, gradients)


def clip(
    parameters: list[Any],
    loss: Tensor,
    speaks: bool | None = None,
    parts: Callable[[Any], bool] | None = None,
) -> Tensor:
    """Clip by the global norm, with one all-reduce for norm and loss; return the loss.

    By hand, since `clip_grad_norm_` refuses plain tensors beside DTensors and tensors of two
    meshes: norms of parts (`parts(grad)`, default: split DTensors) are added on every rank, others
    only where `speaks` (default: on rank 0).
    """
    speaks, parts = dist.get_rank() == 0 if speaks is None else speaks, parts or is_split
    grads = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    counted = [part for part, grad in zip(local, grads) if speaks or parts(grad)]
    squares = torch.stack(torch._foreach_norm(counted)).square().sum()
    squares_and_loss = torch.stack([squares, loss])
    dist.all_reduce(squares_and_loss)
    norm = float(squares_and_loss[0].sqrt())
    if norm > CLIP:
        torch._foreach_mul_(local, CLIP / (norm + 1e-6))
    return squares_and_loss[1]


def is_split(grad: Tensor) -> bool:
    """Return whether this rank holds only a part."""
    return isinstance(grad, DTensor) and any(p.is_shard() for p in grad.placements)


# -- measuring -------------------------------------------------------------------------------------


def measure(sizes: Sizes, schedlang_variants: StepVariants, peers: StepVariants) -> dict[str, Any]:
    """Measure on one rank: bytes sent and saved by each variant, and ratios of times."""
    torch.set_num_threads(1)
    variants = {name: make(sizes) for name, make in {**schedlang_variants, **peers}.items()}
    assert_agree(variants, next(iter(peers)))
    report_progress()
    results: dict[str, Any] = {"ways": {}, "wall": {}, "cpu": {}}
    for name, variant in variants.items():
        with CollectiveCounter() as counted:
            variant.step()
        bytes_sent, saved_bytes = (
            sent_bytes(counted.bytes, sizes.ranks),
            saved_bytes_of(variant.step),
        )
        results["ways"][name] = {
            "calls": dict(counted.calls),
            "sent": bytes_sent,
            "kept": saved_bytes,
        }
    times = timed_rounds([variant.step for variant in variants.values()], sizes.pairs)
    columns = dict(zip(variants, zip(*times)))
    for name_of_ours in schedlang_variants:
        for peer in peers:
            for number, clock in enumerate(("wall", "cpu")):
                pairs = [
                    (a[number], b[number]) for a, b in zip(columns[name_of_ours], columns[peer])
                ]
                results[clock][f"{name_of_ours} / {peer}"] = ratio_of(pairs)
    return results


def assert_agree(variants: Mapping[str, StepVariant], peer: str) -> None:
    """Assert that all variants have the losses and gradients of one peer, in two steps."""
    for _ in range(2):
        losses = {name: float(variant.step()) for name, variant in variants.items()}
        assert all(abs(loss - losses[peer]) < 1e-4 for loss in losses.values()), losses
        all_grads = {name: variant.gradients() for name, variant in variants.items()}
        expected = all_grads[peer]
        for name, grads in all_grads.items():
            if grads or dist.get_rank() == 0:  # schedlang's are complete on rank 0
                assert grads.keys() == expected.keys(), name
            for key, grad in grads.items():
                torch.testing.assert_close(grad, expected[key], rtol=2e-3, atol=2e-5)


def show(sizes: Sizes, results: dict[str, Any]) -> None:
    """Print the comparison."""
    print(f"torch {torch.__version__}, {sizes}, rank 0")
    print(f"  {'':14}{'sent, bytes':>14}{'kept, bytes':>14}   collectives")
    for name, figures in results["ways"].items():
        calls = ", ".join(f"{n} {kind}" for kind, n in sorted(figures["calls"].items()))
        print(f"  {name:14}{figures['sent']:>14,}{figures['kept']:>14,}   {calls}")
    for clock in ("wall", "cpu"):
        for pair, ratio in results[clock].items():
            durations = f"{ratio.ours * 1e3:.1f} ms over {ratio.theirs * 1e3:.1f} ms"
            print(f"  {clock:5}{pair:26} {ratio}   {durations}")


def as_json(sizes: Sizes, results: dict[str, Any]) -> str:
    """Return the comparison as JSON."""

    def plain(value: Any) -> Any:
        assert isinstance(value, Ratio)
        return asdict(value)

    return json.dumps({"sizes": asdict(sizes), **results}, default=plain)


def main(description: str, schedlang_variants: StepVariants, peers: StepVariants) -> None:
    """Measure once and print."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="for machines")
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = vars(parser.parse_args())
    as_machine = arguments.pop("json")
    sizes = Sizes(**arguments)
    with Pool() as pool:
        results = pool.run(
            measure, sizes.ranks, sizes, schedlang_variants, peers, hang_after=180.0
        )[0]
    if as_machine:
        print(as_json(sizes, results))
    else:
        show(sizes, results)
