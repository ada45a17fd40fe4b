"""Programs that claim a dtype for sums of gradients over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from schedlang import TrainingProgram
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import world_size
from tests.judging.net import batch_part
from tests.judging.test_shard_steps import judge_program, squared


def sharded(reduce_dtype: torch.dtype, claim: str | None = "float32") -> Any:
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

        return TrainingProgram(module, step, reduce_dtype=claim)

    return program


def by_hand(dtype: torch.dtype, wide: bool = True) -> Any:
    """Return weights in float32 or bfloat16, with gradients that are cast and summed."""

    def program(model: Any) -> TrainingProgram:
        module = model.float() if wide else model

        def step(batch: Any) -> Tensor:
            part = batch_part(batch, dist.get_rank(), world_size())
            with torch.autocast("cpu", torch.bfloat16):
                value = squared(module(part["input"]).float(), part)
            value.backward()
            for p in module.parameters():
                total = p.grad.to(dtype)
                dist.all_reduce(total)
                p.grad = (total / world_size()).to(p.dtype)
            return value

        return TrainingProgram(module, step, reduce_dtype="float32")

    return program


@pytest.mark.parametrize("make", [sharded, by_hand])
def test_sums_in_fewer_bits_than_claimed(make: Any, pool: Pool) -> None:
    """A wrong claim fails, with the line of the reduction; a right one passes."""
    report = judge_program(pool, make(torch.float32), dtype="bfloat16")
    assert report.ok and not any("reduce_dtype" in gap.condition for gap in report.gaps)
    report = judge_program(pool, make(torch.bfloat16), dtype="bfloat16")
    text = dict(report.localised)["reduction dtype"]
    assert report.exit_code == 1 and text.startswith("2 (`0.weight`, `2.weight`)"), str(report)
    assert "summed in bfloat16" in text and "test_reduction_dtype.py:" in text


def test_what_a_claim_cannot_show(pool: Pool) -> None:
    """Sums in bfloat16 without a claim pass; unshown claims are lines in the report."""
    assert judge_program(pool, sharded(torch.bfloat16, None), dtype="bfloat16").ok
    for options, text in (({"dtype": "bfloat16"}, "rounded to it"), ({}, "--dtype bfloat16")):
        report = judge_program(pool, by_hand(torch.float32, wide=not options), **options)
        gaps = [gap.condition for gap in report.gaps if "reduce_dtype" in gap.condition]
        assert report.ok and len(gaps) == 1 and text in gaps[0], str(report)
    with pytest.raises(Refusal, match="`reduce_dtype` is 'fp32'"):
        judge_program(pool, sharded(torch.float32, "fp32"))
