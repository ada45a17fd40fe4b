"""Common training recipes, right and with one mistake each: the verdict and its message."""

from __future__ import annotations

from contextlib import nullcontext
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from schedlang import TrainingProgram, verify_program
from schedlang.runtime.launch.pool import Pool
from tests.judging.by_hand import FirstStage, LastStage
from tests.judging.net import Net, batch, batch_part, loss, loss_share
from tests.judging.wrapped import fsdp2

MICRO, SCALE = 2, 1024.0
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class LoRALinear(nn.Module):
    """A frozen linear layer with a LoRA adapter."""

    def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        self.dropout, self.scaling = nn.Dropout(0.1), alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output to the layer's."""
        learned: Tensor = self.lora_b(self.lora_a(self.dropout(x)))
        return F.linear(x, self.weight, self.bias) + self.scaling * learned


def with_adapters() -> nn.Module:
    """Return the decoder with adapters on queries and values; all else is frozen."""
    model = Net().requires_grad_(False)
    for block in model.blocks:
        attention: Any = block.attention
        attention.q, attention.v = LoRALinear(attention.q), LoRALinear(attention.v)
    return model


def no_dropout() -> nn.Module:
    """Return the decoder without dropout: torch's pipelining draws masks when it infers shapes."""
    model = Net()
    for block in model.blocks:
        block.drop = nn.Identity()  # type: ignore[assignment]
    return model


def fine_tuning(mistake: str = "", policy: MixedPrecisionPolicy | None = None) -> Any:
    """Return FSDP2 with summed losses, and gradients divided by the global label count."""

    def program(model: Any) -> TrainingProgram:
        model = model.float() if policy else model  # weights are kept in float32
        model = fsdp2(model, **({"mp_policy": policy} if policy else {})).module
        rank, size = dist.get_rank(), dist.get_world_size()

        def step(batch: Any) -> Tensor:
            local = batch_part(batch, rank, size)
            labels, total = torch.zeros(()), torch.zeros(())
            for k in range(MICRO):
                micro = batch_part(local, k, MICRO)
                model.set_requires_gradient_sync(k == MICRO - 1 and mistake != "never reduced")
                output = model(micro["ids"]).flatten(0, 1)
                value = F.cross_entropy(output, micro["labels"].flatten(), reduction="sum")
                value.backward()
                labels += (micro["labels"] != -100).sum()
                total = total + value.detach()
            if mistake != "own labels":
                dist.all_reduce(labels)
                dist.all_reduce(total)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad *= (size / labels) ** (2 if mistake == "scaled twice" else 1)
            return total / labels

        return TrainingProgram(model, step)

    return program


def accumulating(skipped: bool = False) -> Any:
    """Return DDP that reduces after the last micro-batch."""

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)
        rank, size = dist.get_rank(), dist.get_world_size()

        def step(batch: Any) -> Any:
            local, total = batch_part(batch, rank, size), torch.zeros(())
            for k in range(MICRO):
                micro = batch_part(local, k, MICRO)
                with nullcontext() if k == MICRO - 1 and not skipped else module.no_sync():
                    value = loss_share(module(micro["ids"]), micro, batch) * size
                    value.backward()
                total = total + value.detach()
            return total

        return TrainingProgram(module, step)

    return program


def unscaling(late: bool = False) -> Any:
    """Return DDP with a scaled loss; gradients are unscaled before (or `late`: after) clipping."""

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)
        rank, size = dist.get_rank(), dist.get_world_size()

        def back() -> None:
            for p in module.parameters():
                p.grad /= SCALE

        def step(batch: Any) -> Any:
            local = batch_part(batch, rank, size)
            value = loss_share(module(local["ids"]), local, batch) * size
            (value * SCALE).backward()
            if not late:
                back()
            return value

        def clip(max_norm: float) -> Tensor:
            norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            if late:
                back()
            return norm

        return TrainingProgram(module, step, clip=clip)

    return program


def autocast(model: Any) -> TrainingProgram:
    """DDP with float32 weights under bfloat16 autocast, with saved state."""
    module = DistributedDataParallel(model.float())
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(batch: Any) -> Any:
        local = batch_part(batch, rank, size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(local["ids"])
        value = loss_share(output.float(), local, batch) * size
        value.backward()
        return value, output

    return TrainingProgram(
        module, step, state_dict=module.module.state_dict, load=module.module.load_state_dict
    )


def averaging(loaded: str = "model", whole: bool = True) -> Any:
    """Return FSDP2 with a moving average of its shards, saved beside the weights."""

    def program(model: Any) -> TrainingProgram:
        sharded = fsdp2(model)
        mean = {name: p.detach().clone() for name, p in model.named_parameters()}

        def step(batch: Any) -> Any:
            result = sharded.step(batch)
            for name, p in model.named_parameters():
                mean[name].lerp_(p.detach(), 0.1)
            return result

        def save(optimizer: Any) -> Any:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments, "mean": {**weights, **mean}}

        def load(state: Any, optimizer: Any) -> None:
            states = {"model_state_dict": state[loaded], "optim_state_dict": state["optimizer"]}
            if whole:
                set_state_dict(model, optimizer, **states)
            else:
                model.load_state_dict(state[loaded])

        return TrainingProgram(model, step, state_dict=save, load=load)

    return program


def loss_of_labels(full_batch: Any) -> Any:
    """Return the loss of a micro-batch as its share of the mean over the full batch."""
    return lambda output, labels: loss_share(output, {"labels": labels}, full_batch)


def pipelined(count: int = 4) -> Any:
    """Return two stages with torch's pipelining that run `count` of four micro-batches."""

    def program(model: Any) -> TrainingProgram:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank = dist.get_rank()
        stage = FirstStage(model) if rank == 0 else LastStage(model)

        def step(batch: Any) -> Any:
            rows = {name: value[: 2 * count] for name, value in batch.items()}
            stage_line = PipelineStage(stage, rank, 2, torch.device("cpu"))
            order = Schedule1F1B(
                stage_line, count, loss_fn=loss_of_labels(batch), scale_grads=False
            )
            losses: list[Tensor] = []
            if rank == 0:
                order.step(rows["ids"])
                return None
            order.step(target=rows["labels"], losses=losses)
            return torch.stack(losses).sum()

        return TrainingProgram(stage, step)

    return program


def own_attention(model: Any) -> TrainingProgram:
    """Return a program that replaces torch's attention by a wrapper of it."""
    torch_attention = getattr(
        F.scaled_dot_product_attention, "theirs", F.scaled_dot_product_attention
    )

    def larger(*args: Any, **kwargs: Any) -> Tensor:
        return 1.5 * torch_attention(*args, **kwargs)

    larger.theirs = torch_attention  # type: ignore[attr-defined]
    F.scaled_dot_product_attention = larger  # type: ignore[assignment]
    for block in model.blocks:
        block.attention.o.register_forward_pre_hook(lambda _, given: (given[0] / 1.5,))
    program: TrainingProgram = accumulating()(model)
    return program


Case = tuple[Any, Any, str | None]
RIGHT: dict[str, Case] = {
    "an adapter, micro-batches, FSDP2": (with_adapters, fine_tuning(), None),
    "a policy of precision, in float64": (with_adapters, fine_tuning(policy=LOW), None),
    "a policy of precision, as it runs": (with_adapters, fine_tuning(policy=LOW), "bfloat16"),
    "autocast, as it runs": (Net, autocast, "bfloat16"),
    "DDP that reduces once": (Net, accumulating(), None),
    "a scaled loss": (Net, unscaling(), None),
    "a mean of shards": (Net, averaging(), None),
    "a pipeline": (no_dropout, pipelined(), None),
    "an attention of its own": (Net, own_attention, None),
}
WRONG: dict[str, tuple[Case, str, str]] = {
    "scaled twice": (
        (with_adapters, fine_tuning("scaled twice"), None),
        "gradients",
        "8 of 8 (*): ranks (or microbatches)/labels = 2/43 times the right value everywhere",
    ),
    "scaled twice, as it runs": (
        (with_adapters, fine_tuning("scaled twice", LOW), "bfloat16"),
        "gradients",
        "8 of 8 (*): 0.047 times the right value everywhere",
    ),
    "each rank's own count": (
        (with_adapters, fine_tuning("own labels"), None),
        "gradients",
        "8 of 8 (*): each rank divides what it holds of the sum over all labels by the count of "
        "its own (22, 21 of 43)",
    ),
    "never reduced": (
        (with_adapters, fine_tuning("never reduced"), None),
        "gradients",
        "8 of 8 (*): no rank has one: detached, or never computed",
    ),
    "no last reduction": (
        (Net, accumulating(skipped=True), None),
        "gradients",
        "34 of 36 (*): ranks differ and their mean is right: they are not averaged",
    ),
    "clipped before it is scaled back": (
        (Net, unscaling(late=True), None),
        "gradient norm",
        "it is that of gradients which the step leaves 1024 times as large as the right ones: "
        "they are clipped before they are scaled",
    ),
    "the mean is loaded": (
        (Net, averaging("mean"), None),
        "loaded state",
        "36 (*): not what was saved",
    ),
    "moments are not loaded": (
        (Net, averaging(whole=False), None),
        "loaded state",
        "108 (*): lost",
    ),
    "a dropped micro-batch": (
        (no_dropout, pipelined(3), None),
        "gradients",
        "34 of 36 (*): 4 parts of the batch count 1, 1, 1, 0 times what they should",
    ),
}


def judge_case(case: Case) -> Any:
    """Return the verdict on two fresh ranks: some programs leave state in their processes."""
    model, program, dtype = case
    torch.manual_seed(0)
    inputs = {"model": model(), "batch": batch, "loss": loss, "ranks": 2, "dtype": dtype}
    with Pool() as pool:
        return verify_program(program, **inputs, pool=pool)


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_a_right_one_passes(case: Case) -> None:
    """A right recipe passes, in float64 or in its own precision."""
    report = judge_case(case)
    assert report.ok, str(report)


@pytest.mark.parametrize("case, kind, said", WRONG.values(), ids=WRONG)
def test_a_mistake_is_named(case: Case, kind: str, said: str) -> None:
    """One sentence names the mistake; no module is named where all are right."""
    report = judge_case(case)
    assert not report.ok
    messages = dict(report.localised)
    assert fnmatch(messages.get(kind, ""), said), str(report)
    assert not {"first module", "only where"} & messages.keys(), messages


def test_a_lower_precision_than_it_is_judged_in() -> None:
    """A program in bfloat16 that is judged in float32 gets a hint to use `--dtype`."""
    messages = dict(judge_case((with_adapters, fine_tuning(policy=LOW), "float32")).localised)
    assert (
        "it is computed in bfloat16: judge the program by `--dtype bfloat16`"
        in messages["first module"]
    )
