"""`split_backward` and `overlap`: what waits, what runs beside the computation, equal results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schedlang.passes.lower.build import build
from schedlang.passes.partition.staging import timeline_of
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.table import Kind, split_backwards
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.pipeline import overlapped_reduction
from schedlang.runtime.storage.offloaded_gradients import in_backward
from tests import models
from tests.engine.threads import Threads
from tests.proofs import (
    adamw,
    assert_near,
    make_plan,
    refusal_text,
    train_on_ranks,
    train_sequential,
)
from tests.tiers import thin_out

STAGES = "transformer.h  pipeline_split(over=pp)\n"
BATCHES = [models.tokens(rows=9, seed=seed) for seed in range(3)]


def gpt2() -> Any:
    return models.gpt2(layers=4)


@pytest.mark.parametrize(
    ("rows", "mesh"),
    thin_out(
        [
            (
                "at **.c_fc, **.c_attn { split_backward() }\n"
                + STAGES
                + 'pipeline(order="1F1B", micro=3)',
                "pp=2",
            ),
            (STAGES + 'overlap(transfers, ahead=0)\npipeline(order="1F1B", micro=3)', "pp=2"),
            (
                STAGES + "zero(stage=0, over=dp)\noverlap(transfers, gradients, ahead=3)\n"
                'pipeline(order="Interleaved1F1B", micro=2)',
                "dp=2, pp=2",
            ),
            (
                "transformer.h.0 split_backward()\n" + STAGES + "zero(stage=2, over=dp)\n"
                'overlap(gradients)\npipeline(order="1F1B", micro=2)',
                "dp=2, pp=2",
            ),
        ]
    ),
    ids=["late", "ahead", "early", "sliced"],
)
def test_trained(threads: Threads, rows: str, mesh: str) -> None:
    """Losses, norms, gradients, parameters and moments equal those of the plain loop."""
    plan = make_plan(gpt2(), rows, mesh)
    results = train_on_ranks(threads, plan, BATCHES, adamw, clip=0.5)
    assert_near(results, train_sequential(plan.model.model, BATCHES, adamw, clip=0.5))


def test_halved() -> None:
    """Two halves replace a whole backward, with its send between them."""
    plan = make_plan(
        gpt2(), "**.c_fc split_backward()\n" + STAGES + 'pipeline(order="1F1B", micro=3)', "pp=2"
    )
    timeline = timeline_of(plan)
    check_timeline(with_transfers(timeline))
    kinds = [op.kind for op in with_transfers(timeline).rows(1) if op.microbatch == 1]
    start = kinds.index(Kind.I)
    assert kinds[start : start + 3] == [Kind.I, Kind.SEND_B, Kind.W]
    assert split_backwards(timeline) == timeline


def grads_by_half(plan: Any, batch: Any) -> dict[str, set[str]]:
    """On this rank: return which gradients of the last backward arrive in its first and second
    half."""
    with enter_modes(Float64()):
        program = build(plan, batch)
        names = {id(p): n for n, p in program.assembly.parameters.items()}
        half: list[str] = []
        arrived: dict[str, set[str]] = {"I": set(), "W": set()}
        for parameter in program.assembly.parameters.values():
            parameter.register_post_accumulate_grad_hook(
                in_backward(lambda p: arrived[half[-1]].add(names[id(p)]))
            )
        original = program.assembly.pipeline.run

        def told(*args: Any, on_op: Any, **more: Any) -> Any:
            def both(event: Any) -> None:
                half.append(event.op.kind.name)
                if on_op is not None:
                    on_op(event)

            return original(*args, on_op=both, **more)

        program.assembly.pipeline.run = told  # type: ignore[method-assign]
        program.train_step(batch)
    return arrived


def test_only_named_weights_wait(threads: Threads) -> None:
    """W accumulates the gradients of the named modules, and no others."""
    rows = "**.c_fc split_backward()\n" + STAGES + 'pipeline(order="1F1B", micro=3)'
    plan = make_plan(gpt2(), rows, "pp=2")
    for arrived in threads.run(grads_by_half, 2, plan, BATCHES[0])[1:]:
        assert arrived["W"] and all(".c_fc." in name for name in arrived["W"]), arrived


def early_sums(plan: Any, batch: Any) -> list[tuple[int, int]]:
    """On this rank: for each early sum return the operations before it, and the total."""
    counts: list[int] = []
    count = [0]
    original = overlapped_reduction.begin_bucket

    def begin_one(*args: Any) -> Any:
        counts.append(count[0])
        return original(*args)

    with enter_modes(Float64()):
        program = build(plan, batch)
        sums = program.assembly.early_reductions
        assert sums is not None
        prepare = sums.prepare

        def counted(stage: int, last: bool) -> None:
            prepare(stage, last)
            count[0] += 1

        sums.prepare = counted  # type: ignore[method-assign]
        overlapped_reduction.begin_bucket = begin_one
        try:
            program.train_step(batch)
        finally:
            overlapped_reduction.begin_bucket = original
    return [(k, count[0]) for k in counts]


def test_sums_begin_before_the_step_ends() -> None:
    """With two stages on a rank the sums of the first to end begin beside the other stage."""
    from tests.ranks import run_ranks

    rows = STAGES + "zero(stage=0, over=dp)\noverlap(gradients)\n"
    plan = make_plan(gpt2(), rows + 'pipeline(order="Interleaved1F1B", micro=2)', "dp=2, pp=2")
    for sums in run_ranks(4, sums_on_rank, plan, BATCHES[0]):
        assert any(k < total for k, total in sums), sums


def sums_on_rank(rank: int, plan: Any, batch: Any) -> list[tuple[int, int]]:
    torch.set_num_threads(1)
    return early_sums(plan, batch)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("overlap(transfers)\n", "S412"),
        ("overlap()\n", "S304"),
        ("overlap(gradients, ahead=-1)\n", "S304"),
        ("overlap(gradients)\noverlap(gradients)\n", "S509"),
        ("transformer.drop split_backward()\n", "S411"),
        ("transformer.h.0 split_backward()\ntransformer.h.0 split_backward()\n", "S509"),
    ],
)
def test_refused(rows: str, says: str) -> None:
    """Rows without effect are refused, with rows that have one."""
    text = refusal_text(gpt2(), rows)
    assert says in text and "help" in text
