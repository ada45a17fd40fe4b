"""split_backward and overlap: what waits, what runs beside the computation, and equal results."""

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
from tests import models
from tests.engine.threads import Threads
from tests.proofs import adamw, assert_near, planned, refused, sequential, trained
from tests.tiers import thinned

CUT = "transformer.h  pipeline_split(over=pp)\n"
BATCHES = [models.tokens(rows=9, seed=seed) for seed in range(3)]


def _model() -> Any:
    return models.gpt2(layers=4)


@pytest.mark.parametrize(
    ("rows", "mesh"),
    thinned(
        [
            (
                "at **.c_fc, **.c_attn { split_backward() }\n"
                + CUT
                + 'pipeline(order="1F1B", micro=3)',
                "pp=2",
            ),
            (CUT + 'overlap(transfers, ahead=0)\npipeline(order="1F1B", micro=3)', "pp=2"),
            (
                CUT + "zero(stage=0, over=dp)\noverlap(transfers, gradients, ahead=3)\n"
                'pipeline(order="Interleaved1F1B", micro=2)',
                "dp=2, pp=2",
            ),
            (
                "transformer.h.0 split_backward()\n" + CUT + "zero(stage=2, over=dp)\n"
                'overlap(gradients)\npipeline(order="1F1B", micro=2)',
                "dp=2, pp=2",
            ),
        ]
    ),
    ids=["late", "ahead", "early", "sliced"],
)
def test_trained(threads: Threads, rows: str, mesh: str) -> None:
    """Losses, norms, gradients, parameters and moments are those of the plain loop."""
    plan = planned(_model(), rows, mesh)
    seen = trained(threads, plan, BATCHES, adamw, clip=0.5)
    assert_near(seen, sequential(plan.model.model, BATCHES, adamw, clip=0.5))


def test_halved() -> None:
    """A whole backward becomes its two halves in its place; what it sends stands between them."""
    plan = planned(
        _model(), "**.c_fc split_backward()\n" + CUT + 'pipeline(order="1F1B", micro=3)', "pp=2"
    )
    made = timeline_of(plan)
    check_timeline(with_transfers(made))
    kinds = [op.kind for op in with_transfers(made).rows(1) if op.microbatch == 1]
    at = kinds.index(Kind.I)
    assert kinds[at : at + 3] == [Kind.I, Kind.SEND_B, Kind.W]
    assert split_backwards(made) == made


def _late(plan: Any, batch: Any) -> dict[str, set[str]]:
    """On this rank, of the last backward: which gradients arrive in its first and second half."""
    with enter_modes(Float64()):
        program = build(plan, batch)
        names = {id(p): n for n, p in program.assembly.parameters.items()}
        half: list[str] = []
        seen: dict[str, set[str]] = {"I": set(), "W": set()}
        for parameter in program.assembly.parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda p: seen[half[-1]].add(names[id(p)]))
        run = program.assembly.pipeline.run

        def told(*args: Any, on_op: Any, **more: Any) -> Any:
            def both(event: Any) -> None:
                half.append(event.op.kind.name)
                if on_op is not None:
                    on_op(event)

            return run(*args, on_op=both, **more)

        program.assembly.pipeline.run = told  # type: ignore[method-assign]
        program.train_step(batch)
    return seen


def test_only_named_weights_wait(threads: Threads) -> None:
    """W accumulates the gradients of the modules named, and of nothing else."""
    rows = "**.c_fc split_backward()\n" + CUT + 'pipeline(order="1F1B", micro=3)'
    plan = planned(_model(), rows, "pp=2")
    for seen in threads.run(_late, 2, plan, BATCHES[0])[1:]:
        assert seen["W"] and all(".c_fc." in name for name in seen["W"]), seen


def _begun(plan: Any, batch: Any) -> list[tuple[int, int]]:
    """On this rank: for each early sum the operations done before it, and how many there are."""
    found: list[int] = []
    done = [0]
    real = overlapped_reduction.begin_bucket

    def begin_one(*args: Any) -> Any:
        found.append(done[0])
        return real(*args)

    with enter_modes(Float64()):
        program = build(plan, batch)
        sums = program.assembly.early_reductions
        assert sums is not None
        before = sums.prepare

        def counted(stage: int, last: bool) -> None:
            before(stage, last)
            done[0] += 1

        sums.prepare = counted  # type: ignore[method-assign]
        overlapped_reduction.begin_bucket = begin_one
        try:
            program.train_step(batch)
        finally:
            overlapped_reduction.begin_bucket = real
    return [(k, done[0]) for k in found]


def test_sums_begin_before_the_step_ends() -> None:
    """With two stages on a rank the sums of the one that ends first begin beside the other."""
    from tests.ranks import run_ranks

    rows = CUT + "zero(stage=0, over=dp)\noverlap(gradients)\n"
    plan = planned(_model(), rows + 'pipeline(order="Interleaved1F1B", micro=2)', "dp=2, pp=2")
    for found in run_ranks(4, _begun_on, plan, BATCHES[0]):
        assert any(k < total for k, total in found), found


def _begun_on(rank: int, plan: Any, batch: Any) -> list[tuple[int, int]]:
    torch.set_num_threads(1)
    return _begun(plan, batch)


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
    """What would do nothing is refused, with what would do something."""
    text = refused(_model(), rows)
    assert says in text and "help" in text
