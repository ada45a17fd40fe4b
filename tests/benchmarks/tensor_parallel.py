"""Tensor parallelism over torch's and transformers': python -m tests.benchmarks.tensor_parallel

A Llama of transformers on ranks of gloo, float32, in four ways in the same processes, step by step
in turn: the schedule with a row for each projection, the one with `complete`, parallelize_module
with each region's input entered once, and transformers' own `tp_plan`.  All do the same work: the
loss, the true norm of the gradients with clipping, AdamW.  Losses and gradients are asserted equal
first.  Beside the ratios stand the bytes that a rank sends in a step, counted alike on all sides,
and those of the tensors that autograd keeps between forward and backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from schedlang.runtime.launch import Pool, progress
from schedlang.schedule import create_schedule
from tests.benchmarks.counting import Counted, sent
from tests.benchmarks.kept import kept_bytes
from tests.benchmarks.pairs import Ratio, in_turn, ratio_of

VOCAB, CLIP = 1024, 1.0
OURS = ("megatron", "complete")
THEIRS = ("by hand", "transformers")


@dataclass(frozen=True)
class Sizes:
    """What is trained, on how many ranks, and how often each way is timed."""

    hidden: int = 256
    layers: int = 4
    seq: int = 128
    rows: int = 4
    tp: int = 2
    pairs: int = 30


@dataclass(frozen=True)
class Way:
    """One way to train: a step that gives the loss, and the whole gradients of the last one."""

    step: Callable[[], Tensor]
    gradients: Callable[[], Mapping[str, Tensor]]


def model(sizes: Sizes) -> Any:
    """The same on every rank and for every way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=sizes.hidden, intermediate_size=sizes.hidden * 11 // 4,
        num_hidden_layers=sizes.layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=sizes.seq, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(sizes: Sizes) -> dict[str, Tensor]:
    """Full rows; the model makes the loss itself."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (sizes.rows, sizes.seq), generator=generator)
    return {"input_ids": ids, "labels": ids}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Of all ways."""
    return torch.optim.AdamW(named, lr=1e-3)


# -- ours ------------------------------------------------------------------------------------------


def scheduled(sizes: Sizes, complete: bool) -> Way:
    """Under a schedule: every row, or two rows of a block and `complete`."""
    sch = create_schedule(model(sizes))
    sch.mesh(tp=sizes.tp)
    sch["model.embed_tokens"].shard("vocab", over="tp")
    if complete:
        sch["model.layers.*.self_attn.q_proj"].shard("col", over="tp")
        sch["model.layers.*.mlp.gate_proj"].shard("col", over="tp")
        sch["lm_head"].shard("vocab", over="tp")
        sch.complete(over="tp")
    else:
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            sch[f"model.layers.*.{name}"].shard("col", over="tp")
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            sch[f"model.layers.*.{name}"].shard("col", over="tp")
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            sch[f"model.layers.*.{name}"].shard("row", over="tp")
        sch["lm_head"].shard("vocab", over="tp")
    data = batch(sizes)
    program = sch.build(batch=data, optimizer=adamw, clip=CLIP)
    return Way(lambda: program.train_step(data), program.gradients)


# -- the peers -------------------------------------------------------------------------------------

LAYER = {
    "self_attn.q_proj": ColwiseParallel, "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel, "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}  # fmt: skip


def by_hand(sizes: Sizes) -> Way:
    """With torch's parts; gradients of a region's input are summed once, the loss is parallel."""
    made, mesh = model(sizes), init_device_mesh("cpu", (sizes.tp,), mesh_dim_names=("tp",))
    whole = Replicate()
    plan: dict[str, Any] = {name: style() for name, style in LAYER.items()}
    # as DTensors, so that q, k and v (gate and up) share one sum in backward
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": whole},
        desired_input_kwarg_layouts={"hidden_states": whole}, use_local_output=False,
    )  # fmt: skip
    plan["mlp"] = PrepareModuleInput(
        input_layouts=(whole,), desired_input_layouts=(whole,), use_local_output=False
    )
    for layer in made.model.layers:
        parallelize_module(layer, mesh, plan)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    embed = RowwiseParallel(input_layouts=whole)
    parallelize_module(made, mesh, {"model.embed_tokens": embed, "lm_head": head})
    return trained(made, mesh, batch(sizes), parallel=True)


def transformers_own(sizes: Sizes) -> Way:
    """With the plan that transformers has for the model; it gathers the logits."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    made, mesh = model(sizes), init_device_mesh("cpu", (sizes.tp,), mesh_dim_names=("tp",))
    apply_tensor_parallelism(made, mesh, made._expand_parallel_plan(made.tp_plan))
    return trained(made, mesh, batch(sizes), parallel=False)


def trained(made: nn.Module, mesh: DeviceMesh, data: dict[str, Tensor], parallel: bool) -> Way:
    """The loop around a module that is already parallel."""
    made.train()
    parameters = dict(made.named_parameters())
    optimizer = adamw(list(parameters.items()))

    def loss_of() -> Tensor:
        loss: Tensor = made(**data).loss
        loss.backward()
        value = loss.detach()
        return value.to_local() if isinstance(value, DTensor) else value

    def step() -> Tensor:
        optimizer.zero_grad()
        if parallel:
            with loss_parallel():
                loss = loss_of()
        else:
            loss = loss_of()
        clip(list(parameters.values()), speaks=mesh.get_local_rank() == 0)
        optimizer.step()
        return loss

    def gradients() -> dict[str, Tensor]:
        return {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in parameters.items() if p.grad is not None
        }  # fmt: skip

    return Way(step, gradients)


def clip(parameters: list[Any], speaks: bool) -> None:
    """Clip by the global norm: `clip_grad_norm_` refuses plain tensors beside DTensors."""
    grads = [p.grad for p in parameters]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    counted = [part for part, grad in zip(local, grads) if speaks or is_split(grad)]
    squares = torch.stack(torch._foreach_norm(counted)).square().sum()
    dist.all_reduce(squares)
    norm = float(squares.sqrt())
    if norm > CLIP:
        torch._foreach_mul_(local, CLIP / (norm + 1e-6))


def is_split(grad: Tensor) -> bool:
    """Does this rank hold only a part?"""
    return isinstance(grad, DTensor) and any(p.is_shard() for p in grad.placements)


# -- measuring -------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Sizes], Way]] = {
    "megatron": lambda sizes: scheduled(sizes, complete=False),
    "complete": lambda sizes: scheduled(sizes, complete=True),
    "by hand": by_hand,
    "transformers": transformers_own,
}


def measured(sizes: Sizes) -> dict[str, Any]:
    """One rank's part: what each way sends and keeps, and the ratios of ours over theirs."""
    torch.set_num_threads(1)
    made = {name: make(sizes) for name, make in WAYS.items()}
    agree(made)
    found: dict[str, Any] = {"ways": {}, "wall": {}, "cpu": {}}
    for name, way in made.items():
        with Counted() as counted:
            way.step()
        kept = kept_bytes(way.step)
        total = sent(counted.bytes, sizes.tp)
        found["ways"][name] = {"calls": dict(counted.calls), "sent": total, "kept": kept}
    progress()
    times = in_turn([way.step for way in made.values()], sizes.pairs)
    place = {name: number for number, name in enumerate(made)}
    for mine in OURS:
        for other in THEIRS:
            pairs = [(row[place[mine]], row[place[other]]) for row in times]
            for number, clock in enumerate(("wall", "cpu")):
                ratio = ratio_of([(a[number], b[number]) for a, b in pairs])
                found[clock][f"{mine} / {other}"] = ratio
    return found


def agree(made: Mapping[str, Way]) -> None:
    """All ways have the same losses and gradients, before and after a step."""
    for _ in range(2):
        losses = {name: float(way.step()) for name, way in made.items()}
        grads = {name: way.gradients() for name, way in made.items()}
        expected = grads["by hand"]
        for name in made:
            assert abs(losses[name] - losses["by hand"]) < 1e-4, losses
            if dist.get_rank() == 0 or grads[name]:
                assert grads[name].keys() == expected.keys(), name
                for key, grad in grads[name].items():
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
        return asdict(value) if isinstance(value, Ratio) else value

    return json.dumps({"sizes": asdict(sizes), **found}, default=plain)


def main() -> None:
    """Measure once and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="for machines")
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    machine = given.pop("json")
    sizes = Sizes(**given)
    with Pool() as pool:
        found = pool.run(measured, sizes.tp, sizes, hang_after=180.0)[0]
    if machine:
        print(as_json(sizes, found))
    else:
        show(sizes, found)


if __name__ == "__main__":
    main()
