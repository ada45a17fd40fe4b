"""Programs that claim a dtype for sums of gradients over ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typing_extensions
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge.async_collectives import CallMonitor
from schedlang.passes.judge.program import check_program
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import ReduceFromSplit, shard_param, world_size
from tests.judging.net import batch_part
from tests.judging.test_shard_steps import SHARDED, WIDTH, autocast_backward, judge_program, squared


def sharded(reduce_dtype: torch.dtype) -> Any:
    """Return float32 weights in shards, computed in bfloat16, with gradients that are summed in a
    dtype."""

    def program(model: Any) -> TrainingProgram:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        module = fully_shard(model.float(), mp_policy=policy)

        def step(batch: Any) -> Tensor:
            part = batch_part(batch, dist.get_rank(), world_size())
            value = squared(module(part["input"]).float(), part)
            value.backward()
            return value

        return TrainingProgram(module, step, reduce_dtype="float32")

    return program


def by_hand(dtype: torch.dtype, wide: bool = True, **options: Any) -> Any:
    """Return weights in float32 or bfloat16, with gradients that are cast and summed."""
    options = {"reduce_dtype": torch.float32, **options}

    def program(model: Any) -> TrainingProgram:
        module = model.float() if wide else model

        def step(batch: Any) -> Tensor:
            value = autocast_backward(module, batch)
            for p in module.parameters():
                total = p.grad.to(dtype)
                dist.all_reduce(total)
                p.grad = (total / world_size()).to(p.dtype)
            return value

        return TrainingProgram(module, step, **options)

    return program


def tensor_parallel(model: Any) -> TrainingProgram:
    """Return shards in float32 whose outputs are summed in bfloat16, and gradients by nobody."""
    module = model.float()
    for name, dim in SHARDED.items():
        shard_param(module[int(name[0])], name[2:], dim)

    def step(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            inner = module[0](batch["input"]).tanh()
            output = ReduceFromSplit.apply(F.linear(inner, module[2].weight)) + module[2].bias
        value = squared(output.float(), batch)
        value.backward()
        return value

    layouts = {name: Shard(dim) for name, dim in SHARDED.items()}
    return TrainingProgram(module, step, reduce_dtype="float32", layouts=layouts)


class Rows(nn.Module):
    """A table, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        """Look up, and compute."""
        weight = self.emb.weight.to(self.head.weight.dtype)
        if torch.is_autocast_enabled("cpu"):
            weight = weight.bfloat16()
        return self.head(F.embedding(input, weight).tanh())


def distinct_rows(seed: int) -> dict[str, Tensor]:
    """Return a batch in which no two rows look up the same."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randperm(64, generator=draw)[:32]
    return {"input": ids, "y": torch.randn(32, WIDTH, generator=draw)}


def logging(model: Any) -> TrainingProgram:
    """Sum gradients in float32, and as many random numbers in bfloat16."""
    program = by_hand(torch.float32)(model)

    def step(batch: Any) -> Tensor:
        dist.all_reduce(torch.randn(64 * WIDTH).bfloat16())
        return program.step(batch)

    return replace(program, step=step)


@pytest.mark.parametrize("make", [sharded, by_hand])
def test_sums_in_fewer_bits_than_claimed(make: Any, pool: Pool) -> None:
    """A wrong claim fails, with the line of the reduction; a right one passes."""
    report = judge_program(pool, make(torch.float32), dtype="bfloat16")
    assert report.ok and not any("reduce_dtype" in gap.condition for gap in report.gaps)
    report = judge_program(pool, make(torch.bfloat16), dtype="bfloat16")
    text = dict(report.localised)["reduction dtype"]
    assert report.exit_code == 1 and text.startswith("2 (`0.weight`, `2.weight`)"), str(report)
    assert "summed in bfloat16" in text and "test_reduction_dtype.py:" in text


def test_gradients_that_are_computed_in_few_bits(pool: Pool) -> None:
    """Gradients of a low dtype that are not summed in it pass beside other sums in it."""
    assert (report := judge_program(pool, tensor_parallel, dtype="bfloat16")).ok, str(report)
    options: dict[str, Any] = {"model": Rows(), "batch": distinct_rows, "loss": squared}
    report = verify_program(logging, ranks=2, pool=pool, dtype="bfloat16", **options)
    assert report.ok, str(report)


def test_the_line_of_a_deprecated_reduction() -> None:
    """It is the user's, not that of the warning."""
    monitor = CallMonitor()
    monitor.keeps = True
    call = typing_extensions.deprecated("use another")(partial(monitor.keep))
    with pytest.deprecated_call():
        call(dist.all_reduce, (torch.ones(2, dtype=torch.bfloat16),), {}, None)
    assert monitor.reductions[0][1].startswith("test_reduction_dtype.py:")


def test_what_a_claim_cannot_show(pool: Pool) -> None:
    """Sums in bfloat16 without a claim pass; unshown claims are lines in the report."""
    unclaimed = by_hand(torch.bfloat16, reduce_dtype=None)
    assert judge_program(pool, unclaimed, dtype="bfloat16").ok
    for options, text in (({"dtype": "bfloat16"}, "rounded to it"), ({}, "--dtype bfloat16")):
        report = judge_program(pool, by_hand(torch.float32, wide=not options), **options)
        gaps = [gap.condition for gap in report.gaps if "reduce_dtype" in gap.condition]
        assert report.ok and len(gaps) == 1 and text in gaps[0], str(report)
    with pytest.raises(Refusal, match="`reduce_dtype` is 'fp32'"):
        check_program(TrainingProgram(nn.Linear(1, 1), len, reduce_dtype="fp32"), 0)
