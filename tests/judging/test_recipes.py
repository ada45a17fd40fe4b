"""Recipes of today, right and with one mistake each: the verdict, and what it says."""

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
from tests.judging.by_hand import First, Last
from tests.judging.net import Net, batch, loss, part, share
from tests.judging.wrapped import fsdp2

MICRO, SCALE = 2, 1024.0
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class LoRALinear(nn.Module):
    """A frozen layer with an adapter, as recipes write it."""

    def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        self.dropout, self.scaling = nn.Dropout(0.1), alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """The layer, and what is learned."""
        learned: Tensor = self.lora_b(self.lora_a(self.dropout(x)))
        return F.linear(x, self.weight, self.bias) + self.scaling * learned


def adapted() -> nn.Module:
    """The decoder with adapters at queries and values; all else is frozen."""
    model = Net().requires_grad_(False)
    for block in model.blocks:
        attention: Any = block.attention
        attention.q, attention.v = LoRALinear(attention.q), LoRALinear(attention.v)
    return model


def plain() -> nn.Module:
    """The decoder without dropout: torch's pipelining draws where it learns shapes."""
    model = Net()
    for block in model.blocks:
        block.drop = nn.Identity()  # type: ignore[assignment]
    return model


def tuned(wrong: str = "", policy: MixedPrecisionPolicy | None = None) -> Any:
    """Sums over micro-batches under FSDP2, divided in the end by the labels of all ranks."""

    def program(model: Any) -> TrainingProgram:
        model = model.float() if policy else model  # weights are kept in float32
        model = fsdp2(model, **({"mp_policy": policy} if policy else {})).module
        rank, size = dist.get_rank(), dist.get_world_size()

        def step(batch: Any) -> Tensor:
            mine = part(batch, rank, size)
            labels, total = torch.zeros(()), torch.zeros(())
            for k in range(MICRO):
                micro = part(mine, k, MICRO)
                model.set_requires_gradient_sync(k == MICRO - 1 and wrong != "never reduced")
                output = model(micro["ids"]).flatten(0, 1)
                value = F.cross_entropy(output, micro["labels"].flatten(), reduction="sum")
                value.backward()
                labels += (micro["labels"] != -100).sum()
                total = total + value.detach()
            if wrong != "own labels":
                dist.all_reduce(labels)
                dist.all_reduce(total)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad *= (size / labels) ** (2 if wrong == "scaled twice" else 1)
            return total / labels

        return TrainingProgram(model, step)

    return program


def accumulated(skipped: bool = False) -> Any:
    """DDP that reduces after the last micro-batch."""

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)
        rank, size = dist.get_rank(), dist.get_world_size()

        def step(batch: Any) -> Any:
            mine, total = part(batch, rank, size), torch.zeros(())
            for k in range(MICRO):
                micro = part(mine, k, MICRO)
                with nullcontext() if k == MICRO - 1 and not skipped else module.no_sync():
                    value = share(module(micro["ids"]), micro, batch) * size
                    value.backward()
                total = total + value.detach()
            return total

        return TrainingProgram(module, step)

    return program


def unscaled(late: bool = False) -> Any:
    """A loss that is scaled, and gradients that are scaled back before they are clipped."""

    def program(model: Any) -> TrainingProgram:
        module = DistributedDataParallel(model)
        rank, size = dist.get_rank(), dist.get_world_size()

        def back() -> None:
            for p in module.parameters():
                p.grad /= SCALE

        def step(batch: Any) -> Any:
            mine = part(batch, rank, size)
            value = share(module(mine["ids"]), mine, batch) * size
            (value * SCALE).backward()
            if not late:
                back()
            return value

        def clip(most: float) -> Tensor:
            norm = nn.utils.clip_grad_norm_(module.parameters(), most)
            if late:
                back()
            return norm

        return TrainingProgram(module, step, clip=clip)

    return program


def autocast(model: Any) -> TrainingProgram:
    """DDP around weights in float32, products in bfloat16, and a state that is saved as it is."""
    module = DistributedDataParallel(model.float())
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(batch: Any) -> Any:
        mine = part(batch, rank, size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(mine["ids"])
        value = share(output.float(), mine, batch) * size
        value.backward()
        return value, output

    return TrainingProgram(
        module, step, state_dict=module.module.state_dict, load=module.module.load_state_dict
    )


def averaged(loaded: str = "model", whole: bool = True) -> Any:
    """FSDP2 with a mean of its shards over time, saved beside them."""

    def program(model: Any) -> TrainingProgram:
        made = fsdp2(model)
        mean = {name: p.detach().clone() for name, p in model.named_parameters()}

        def step(batch: Any) -> Any:
            found = made.step(batch)
            for name, p in model.named_parameters():
                mean[name].lerp_(p.detach(), 0.1)
            return found

        def save(optimizer: Any) -> Any:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments, "mean": {**weights, **mean}}

        def load(state: Any, optimizer: Any) -> None:
            given = {"model_state_dict": state[loaded], "optim_state_dict": state["optimizer"]}
            if whole:
                set_state_dict(model, optimizer, **given)
            else:
                model.load_state_dict(state[loaded])

        return TrainingProgram(model, step, state_dict=save, load=load)

    return program


def of_labels(whole: Any) -> Any:
    """What a micro-batch adds to the mean over the whole."""
    return lambda output, labels: share(output, {"labels": labels}, whole)


def piped(count: int = 4) -> Any:
    """Two stages by torch's pipelining; so many of four micro-batches are run."""

    def program(model: Any) -> TrainingProgram:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank = dist.get_rank()
        stage = First(model) if rank == 0 else Last(model)

        def step(batch: Any) -> Any:
            given = {name: value[: 2 * count] for name, value in batch.items()}
            line = PipelineStage(stage, rank, 2, torch.device("cpu"))
            order = Schedule1F1B(line, count, loss_fn=of_labels(batch), scale_grads=False)
            losses: list[Tensor] = []
            if rank == 0:
                order.step(given["ids"])
                return None
            order.step(target=given["labels"], losses=losses)
            return torch.stack(losses).sum()

        return TrainingProgram(stage, step)

    return program


def with_attention_of_its_own(model: Any) -> TrainingProgram:
    """A function in the place of torch's attention that calls it: it is called once."""
    theirs = getattr(F.scaled_dot_product_attention, "theirs", F.scaled_dot_product_attention)

    def larger(*args: Any, **kwargs: Any) -> Tensor:
        return 1.5 * theirs(*args, **kwargs)

    larger.theirs = theirs  # type: ignore[attr-defined]
    F.scaled_dot_product_attention = larger  # type: ignore[assignment]
    for block in model.blocks:
        block.attention.o.register_forward_pre_hook(lambda _, given: (given[0] / 1.5,))
    made: TrainingProgram = accumulated()(model)
    return made


Case = tuple[Any, Any, str | None]
RIGHT: dict[str, Case] = {
    "an adapter, micro-batches, FSDP2": (adapted, tuned(), None),
    "a policy of precision, in float64": (adapted, tuned(policy=LOW), None),
    "a policy of precision, as it runs": (adapted, tuned(policy=LOW), "bfloat16"),
    "autocast, as it runs": (Net, autocast, "bfloat16"),
    "DDP that reduces once": (Net, accumulated(), None),
    "a scaled loss": (Net, unscaled(), None),
    "a mean of shards": (Net, averaged(), None),
    "a pipeline": (plain, piped(), None),
    "an attention of its own": (Net, with_attention_of_its_own, None),
}
WRONG: dict[str, tuple[Case, str, str]] = {
    "scaled twice": (
        (adapted, tuned("scaled twice"), None),
        "gradients",
        "8 of 8 (*): ranks (or microbatches)/labels = 2/43 times the right value everywhere",
    ),
    "scaled twice, as it runs": (
        (adapted, tuned("scaled twice", LOW), "bfloat16"),
        "gradients",
        "8 of 8 (*): 0.047 times the right value everywhere",
    ),
    "each rank's own count": (
        (adapted, tuned("own labels"), None),
        "gradients",
        "8 of 8 (*): each rank divides what it holds of the sum over all labels by the count of "
        "its own (22, 21 of 43)",
    ),
    "never reduced": (
        (adapted, tuned("never reduced"), None),
        "gradients",
        "8 of 8 (*): no rank has one: detached, or never computed",
    ),
    "no last reduction": (
        (Net, accumulated(skipped=True), None),
        "gradients",
        "34 of 36 (*): ranks differ and their mean is right: they are not averaged",
    ),
    "clipped before it is scaled back": (
        (Net, unscaled(late=True), None),
        "gradient norm",
        "it is that of gradients which the step leaves 1024 times as large as the right ones: "
        "they are clipped before they are scaled",
    ),
    "the mean is loaded": (
        (Net, averaged("mean"), None),
        "loaded state",
        "36 (*): not what was saved",
    ),
    "moments are not loaded": ((Net, averaged(whole=False), None), "loaded state", "108 (*): lost"),
    "a dropped micro-batch": (
        (plain, piped(3), None),
        "gradients",
        "34 of 36 (*): 4 parts of the batch count 1, 1, 1, 0 times what they should",
    ),
}


def judged(case: Case) -> Any:
    """The verdict on two ranks of their own: some leave things in their processes."""
    model, program, dtype = case
    torch.manual_seed(0)
    given = {"model": model(), "batch": batch, "loss": loss, "ranks": 2, "dtype": dtype}
    with Pool() as pool:
        return verify_program(program, **given, pool=pool)


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_a_right_one_passes(case: Case) -> None:
    """In float64, or in the precision that it runs in."""
    report = judged(case)
    assert report.ok, str(report)


@pytest.mark.parametrize("case, kind, said", WRONG.values(), ids=WRONG)
def test_a_mistake_is_named(case: Case, kind: str, said: str) -> None:
    """One sentence has the kind, and none misleads: no module is named where all are right."""
    report = judged(case)
    assert not report.ok
    told = dict(report.localised)
    assert fnmatch(told.get(kind, ""), said), str(report)
    assert not {"first module", "only where"} & told.keys(), told


def test_a_lower_precision_than_it_is_judged_in() -> None:
    """It is told by the module that computes in it, and by which option it is judged."""
    told = dict(judged((adapted, tuned(policy=LOW), "float32")).localised)
    assert (
        "it is computed in bfloat16: judge the program by `--dtype bfloat16`"
        in told["first module"]
    )
