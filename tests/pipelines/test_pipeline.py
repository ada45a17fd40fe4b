"""The executor: losses, outputs and all gradients of a pipeline equal the full model's."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, timeline_from_rows
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.pipeline import p2p
from schedlang.runtime.pipeline.executor import ScheduledOp
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.scope import Scope, enter_scope, named_sites
from tests import models
from tests.models import batch_weight, split_batch
from tests.pipeline_runs import (
    GATE,
    assert_same,
    cut_model,
    gradients,
    make_pipeline,
    split_backward,
    train_rank,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"), [("GPipe", 2, 1), ("1F1B", 2, 1), ("Interleaved1F1B", 2, 2)]
)
def test_gpt2_tied(name: str, ranks: int, chunks: int) -> None:
    """Tied GPT-2, ragged labels, padding, 7 rows in 4 microbatches: gradients are the model's."""
    batch, plan = models.tokens(), make_order(name, ranks, 4, chunks)
    answers = run_ranks(ranks, train_rank, models.gpt2, batch, plan, True)
    assert_same(models.gpt2, batch, answers)
    tied = [rank for rank, (_, grads) in enumerate(answers) if "transformer.wte.weight" in grads]
    assert tied == [0, 1]
    holders = [
        rank for rank, (_, grads) in enumerate(answers) if "transformer.h.0.ln_1.weight" in grads
    ]
    assert holders == [0]


@pytest.mark.parametrize(
    ("make", "name", "ranks", "shift"),
    [
        (models.llama, "1F1B", 3, True),
        (models.bert, "1F1B", 2, False),
        (models.bart, "GPipe", 2, False),
        (models.bart, "1F1B", 4, False),
    ],
)
def test_models(make: Any, name: str, ranks: int, shift: bool) -> None:
    """Llama with its cache on, BERT and BART (encoder and decoder) need no special code."""
    batch, plan = models.tokens(), make_order(name, ranks, 4)
    answers = run_ranks(ranks, train_rank, make, batch, plan, shift)
    assert_same(make, batch, answers, shift)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_skip_over_stages(name: str, apart: bool) -> None:
    """A skip from stage 0 to 2, a bool tensor, glue parameters and in-place writes."""
    batch, plan = models.points(), make_order(name, 3, 4)
    if apart:
        plan = split_backward(plan)
    stage_split = cut_model(models.Skipping(), batch, 3)
    assert stage_split.edges == ((0, 1), (0, 2), (1, 2)) and stage_split.graph.glue_parameters == (
        "gain",
    )
    answers = run_ranks(3, train_rank, models.Skipping, batch, plan, False)
    assert_same(models.Skipping, batch, answers)


@pytest.mark.parametrize("make", [models.gpt2, models.llama])
def test_split_backward(make: Any) -> None:
    """Separate input and weight gradients, with late weights, give the full model's gradients."""
    batch, plan = models.tokens(), split_backward(make_order("interleaved1f1b", 2, 4, 2))
    assert_same(make, batch, run_ranks(2, train_rank, make, batch, plan, True))


def test_stages_on_one_rank() -> None:
    """Several stages on one rank need no process group, and give the same."""
    batch = models.points()
    plan = make_order("1f1b", 3, 4)
    rows = sorted((op for r in range(3) for op in plan.rows(r)), key=_sort_key)
    single_rank = timeline_from_rows([rows], plan.edges)
    assert_same(models.Skipping, batch, [train_rank(0, models.Skipping, batch, single_rank, False)])


def _sort_key(op: Op) -> tuple[int, int, int]:
    is_backward = op.kind is Kind.B
    return (op.microbatch, is_backward, -op.stage if is_backward else op.stage)


def test_one_stage() -> None:
    """One stage calls the original model, and gives the same gradients."""
    batch = models.tokens()
    answer = train_rank(0, models.gpt2, batch, make_order("1f1b", 1, 4), True)
    assert_same(models.gpt2, batch, [answer])


def _run_steps(rank: int) -> Any:
    """Train four steps of two shapes, then evaluate; also count the headers sent."""
    headers = []
    original = p2p._header
    p2p._header = lambda *args: headers.append(1) or original(*args)
    model = models.gpt2()
    with Float64():
        plan = make_order("1f1b", 2, 2)
        pipe = make_pipeline(model, models.tokens(4), plan, rank)
        counts, grads = [], []
        for rows, length in ((4, 8), (4, 8), (4, 5), (4, 8)):
            model.zero_grad()
            parts = split_batch(models.tokens(rows, length, seed=length), 2)
            pipe.run(parts, [0.5, 0.5])
            counts.append(len(headers))
            grads.append({n: g.clone() for n, g in gradients(model).items() if g is not None})
        model.zero_grad()
        model.eval()
        evaluated = pipe.run(split_batch(models.tokens(5), 3), train=False, keep_outputs=True)
    logits = torch.cat([r.output.logits for r in evaluated.values()]) if evaluated else None
    return counts, grads, logits, [n for n, g in gradients(model).items() if g is not None]


def test_shapes_change() -> None:
    """Shapes may change from step to step; sizes are sent once per shape; evaluation is exact."""
    answers = run_ranks(2, _run_steps)
    assert answers[0][0] == [1, 1, 2, 2] and answers[1][0] == [0, 0, 0, 0]
    for step, length in enumerate((8, 8, 5, 8)):
        model = models.gpt2()
        with Float64():
            for part in split_batch(models.tokens(4, length, seed=length), 2):
                (model(**part).loss / 2).backward()
        for name, grad in gradients(model).items():
            summed = sum(grads[step][name] for _, grads, _, _ in answers if name in grads[step])
            assert float((summed - grad).norm()) <= GATE * float(grad.norm())
    model = models.gpt2().eval()
    with Float64(), torch.no_grad():
        expected = model(**models.tokens(5)).logits
    assert answers[0][2] is None
    assert float((answers[1][2] - expected).norm()) <= GATE * float(expected.norm())
    assert answers[0][3] == answers[1][3] == []


def test_hooks() -> None:
    """`around` encloses each forward and backward; `on_op` announces each stage's last backward."""
    events: list[Any] = []

    @contextmanager
    def around(op: Op) -> Any:
        events.append(("enter", op.microbatch))
        yield
        events.append(("leave", op.microbatch))

    def on_op(event: ScheduledOp) -> None:
        events.append((event.op.kind.name, event.op.microbatch, event.last))

    model, batch = models.Skipping(), models.points(4)
    pipe = make_pipeline(model, batch, make_order("1f1b", 1, 2), 0)
    pipe.run(split_batch(batch, 2), around=around, on_op=on_op)
    expected = []
    for kind, microbatch, last in (("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 1)):
        expected += [(kind, microbatch, bool(last)), ("enter", microbatch), ("leave", microbatch)]
    assert events == expected


def test_frozen_parameters() -> None:
    """Frozen parameters get no gradient; the others get the full model's."""

    def frozen() -> nn.Module:
        model = models.gpt2()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".h.2." in name or "ln_f" in name)
        return model

    batch = models.tokens()
    answers = run_ranks(2, train_rank, frozen, batch, make_order("1f1b", 2, 4), True)
    assert_same(frozen, batch, answers)


def _train_with_dropout(rank: int, batch: Any, plan: Timeline) -> Any:
    model, parts = models.gpt2(dropout=0.3), split_batch(batch, plan.microbatches)
    named_sites(model)
    samples = [tuple(rows.tolist()) for rows in torch.arange(7).tensor_split(len(parts))]

    def around(op: Op) -> Any:
        return enter_scope(Scope(0, op.microbatch, samples[op.microbatch]))

    with enter_modes(Float64()), enter_modes(LogicalDropout(3)):
        pipe = make_pipeline(model, batch, plan, rank)
        total = sum(batch_weight(p) for p in parts)
        results = pipe.run(parts, [batch_weight(p) / total for p in parts], around=around)
    return results, gradients(model)


def test_dropout() -> None:
    """Logical dropout draws the full model's masks in every stage."""
    batch = models.tokens()
    answers = run_ranks(2, _train_with_dropout, batch, make_order("interleaved1f1b", 2, 4, 2))
    model = models.gpt2(dropout=0.3)
    named_sites(model)
    with (
        enter_modes(Float64()),
        enter_modes(LogicalDropout(3)),
        enter_scope(Scope(0, 0, tuple(range(7)))),
    ):
        model(**batch).loss.backward()
    for name, expected in gradients(model).items():
        summed = sum(grads[name] for _, grads in answers if grads.get(name) is not None)
        assert float((summed - expected).norm()) <= GATE * float(expected.norm()), name


def test_split_can_be_off() -> None:
    """A stage that does not split its backward does all of it at I, and nothing at W."""
    batch, plan = models.points(), split_backward(make_order("1f1b", 1, 2))
    model = models.Skipping()
    pipe = make_pipeline(model, batch, plan, 0)
    pipe.stages[0].split = False
    events: list[Any] = []

    def on_op(event: ScheduledOp) -> None:
        ready = model.head.weight.grad
        events.append((event.op.kind.name, None if ready is None else ready.clone()))
        announced.append(event.last)

    announced: list[bool] = []
    pipe.run(split_batch(batch, 2), on_op=on_op)
    kinds = [kind for kind, _ in events]
    assert kinds == ["F", "I", "F", "W", "I", "W"]
    assert announced == [False, False, False, False, True, False]
    assert events[1][1] is None and events[2][1] is not None
    assert torch.equal(events[3][1], events[2][1]) and torch.equal(
        events[5][1], model.head.weight.grad
    )


def test_a_timeline_for_other_edges_is_refused() -> None:
    """A timeline that ignores the model's skip edges is refused."""
    batch = models.points()
    plan = make_order("1f1b", 3, 1)
    rows = [list(plan.rows(r)) for r in range(3)]
    wrong_timeline = replace(timeline_from_rows([rows[0][::-1], *rows[1:]]))
    pipe = make_pipeline(models.Skipping(), batch, wrong_timeline, 0)
    with pytest.raises(ValueError, match="F before B"):
        pipe.run(split_batch(batch, 1))
