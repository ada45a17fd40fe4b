"""The executor: losses, outputs and every gradient of a pipeline equal those of the whole model."""

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
from tests.executing import GATE, assert_same, cut_model, gradients, pipeline, split_backward, train
from tests.models import split, weight
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"), [("GPipe", 2, 1), ("1F1B", 2, 1), ("Interleaved1F1B", 2, 2)]
)
def test_gpt2_tied(name: str, ranks: int, chunks: int) -> None:
    """Tied GPT-2, ragged labels, padding, 7 rows in 4 microbatches: gradients are the model's."""
    batch, plan = models.tokens(), make_order(name, ranks, 4, chunks)
    answers = run_ranks(ranks, train, models.gpt2, batch, plan, True)
    assert_same(models.gpt2, batch, answers)
    tied = [rank for rank, (_, grads) in enumerate(answers) if "transformer.wte.weight" in grads]
    assert tied == [0, 1]
    own = [
        rank for rank, (_, grads) in enumerate(answers) if "transformer.h.0.ln_1.weight" in grads
    ]
    assert own == [0]


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
    """Llama with its cache on, BERT, and an encoder with a decoder need no code of their own."""
    batch, plan = models.tokens(), make_order(name, ranks, 4)
    answers = run_ranks(ranks, train, make, batch, plan, shift)
    assert_same(make, batch, answers, shift)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_skip_over_stages(name: str, apart: bool) -> None:
    """A skip from stage 0 to 2, a flag, glue parameters and tensors written into: all as whole."""
    batch, plan = models.points(), make_order(name, 3, 4)
    if apart:
        plan = split_backward(plan)
    made = cut_model(models.Skipping(), batch, 3)
    assert made.edges == ((0, 1), (0, 2), (1, 2)) and made.graph.glue_parameters == ("gain",)
    answers = run_ranks(3, train, models.Skipping, batch, plan, False)
    assert_same(models.Skipping, batch, answers)


@pytest.mark.parametrize("make", [models.gpt2, models.llama])
def test_split_backward(make: Any) -> None:
    """Input and weight gradients apart, weights late, give the gradients of the whole model."""
    batch, plan = models.tokens(), split_backward(make_order("interleaved1f1b", 2, 4, 2))
    assert_same(make, batch, run_ranks(2, train, make, batch, plan, True))


def test_stages_on_one_rank() -> None:
    """Several stages on one rank hand over without any process group, and give the same."""
    batch = models.points()
    plan = make_order("1f1b", 3, 4)
    rows = sorted((op for r in range(3) for op in plan.rows(r)), key=_by_turn)
    alone = timeline_from_rows([rows], plan.edges)
    assert_same(models.Skipping, batch, [train(0, models.Skipping, batch, alone, False)])


def _by_turn(op: Op) -> tuple[int, int, int]:
    back = op.kind is Kind.B
    return (op.microbatch, back, -op.stage if back else op.stage)


def test_one_stage() -> None:
    """Without a cut the model is called as it is: no switch, no stub, the same gradients."""
    batch = models.tokens()
    answer = train(0, models.gpt2, batch, make_order("1f1b", 1, 4), True)
    assert_same(models.gpt2, batch, [answer])


def _steps(rank: int) -> Any:
    """Three steps of two shapes, then an evaluation; counts the headers that were sent."""
    headers = []
    made = p2p._header
    p2p._header = lambda *args: headers.append(1) or made(*args)
    model = models.gpt2()
    with Float64():
        plan = make_order("1f1b", 2, 2)
        pipe = pipeline(model, models.tokens(4), plan, rank)
        counts, grads = [], []
        for rows, length in ((4, 8), (4, 8), (4, 5), (4, 8)):
            model.zero_grad()
            parts = split(models.tokens(rows, length, seed=length), 2)
            pipe.run(parts, [0.5, 0.5])
            counts.append(len(headers))
            grads.append({n: g.clone() for n, g in gradients(model).items() if g is not None})
        model.zero_grad()
        model.eval()
        evaluated = pipe.run(split(models.tokens(5), 3), train=False, keep_outputs=True)
    logits = torch.cat([r.output.logits for r in evaluated.values()]) if evaluated else None
    return counts, grads, logits, [n for n, g in gradients(model).items() if g is not None]


def test_shapes_change() -> None:
    """Shapes may change from step to step; sizes are sent once per shape; evaluation is exact."""
    answers = run_ranks(2, _steps)
    assert answers[0][0] == [1, 1, 2, 2] and answers[1][0] == [0, 0, 0, 0]
    for step, length in enumerate((8, 8, 5, 8)):
        model = models.gpt2()
        with Float64():
            for part in split(models.tokens(4, length, seed=length), 2):
                (model(**part).loss / 2).backward()
        for name, grad in gradients(model).items():
            found = sum(grads[step][name] for _, grads, _, _ in answers if name in grads[step])
            assert float((found - grad).norm()) <= GATE * float(grad.norm())
    model = models.gpt2().eval()
    with Float64(), torch.no_grad():
        wanted = model(**models.tokens(5)).logits
    assert answers[0][2] is None
    assert float((answers[1][2] - wanted).norm()) <= GATE * float(wanted.norm())
    assert answers[0][3] == answers[1][3] == []


def test_hooks() -> None:
    """`around` encloses each forward and backward; the last backward of each stage is announced."""
    seen: list[Any] = []

    @contextmanager
    def around(op: Op) -> Any:
        seen.append(("enter", op.microbatch))
        yield
        seen.append(("leave", op.microbatch))

    def on_op(event: ScheduledOp) -> None:
        seen.append((event.op.kind.name, event.op.microbatch, event.last))

    model, batch = models.Skipping(), models.points(4)
    pipe = pipeline(model, batch, make_order("1f1b", 1, 2), 0)
    pipe.run(split(batch, 2), around=around, on_op=on_op)
    expected = []
    for kind, microbatch, last in (("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 1)):
        expected += [(kind, microbatch, bool(last)), ("enter", microbatch), ("leave", microbatch)]
    assert seen == expected


def test_frozen_parameters() -> None:
    """Parameters that do not train get no gradient; the others get the same as in the whole."""

    def frozen() -> nn.Module:
        model = models.gpt2()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".h.2." in name or "ln_f" in name)
        return model

    batch = models.tokens()
    answers = run_ranks(2, train, frozen, batch, make_order("1f1b", 2, 4), True)
    assert_same(frozen, batch, answers)


def _dropout(rank: int, batch: Any, plan: Timeline) -> Any:
    model, parts = models.gpt2(dropout=0.3), split(batch, plan.microbatches)
    named_sites(model)
    samples = [tuple(rows.tolist()) for rows in torch.arange(7).tensor_split(len(parts))]

    def around(op: Op) -> Any:
        return enter_scope(Scope(0, op.microbatch, samples[op.microbatch]))

    with enter_modes(Float64()), enter_modes(LogicalDropout(3)):
        pipe = pipeline(model, batch, plan, rank)
        total = sum(weight(p) for p in parts)
        results = pipe.run(parts, [weight(p) / total for p in parts], around=around)
    return results, gradients(model)


def test_dropout() -> None:
    """Masks drawn logically are those of the whole model, in forward and around every stub."""
    batch = models.tokens()
    answers = run_ranks(2, _dropout, batch, make_order("interleaved1f1b", 2, 4, 2))
    model = models.gpt2(dropout=0.3)
    named_sites(model)
    with (
        enter_modes(Float64()),
        enter_modes(LogicalDropout(3)),
        enter_scope(Scope(0, 0, tuple(range(7)))),
    ):
        model(**batch).loss.backward()
    for name, wanted in gradients(model).items():
        found = sum(grads[name] for _, grads in answers if grads.get(name) is not None)
        assert float((found - wanted).norm()) <= GATE * float(wanted.norm()), name


def test_split_can_be_off() -> None:
    """A stage that must not split its backward does all of it at I, and W finds nothing to do."""
    batch, plan = models.points(), split_backward(make_order("1f1b", 1, 2))
    model = models.Skipping()
    pipe = pipeline(model, batch, plan, 0)
    pipe.stages[0].split = False
    seen: list[Any] = []

    def on_op(event: ScheduledOp) -> None:
        ready = model.head.weight.grad
        seen.append((event.op.kind.name, None if ready is None else ready.clone()))
        announced.append(event.last)

    announced: list[bool] = []
    pipe.run(split(batch, 2), on_op=on_op)
    kinds = [kind for kind, _ in seen]
    assert kinds == ["F", "I", "F", "W", "I", "W"]
    assert announced == [False, False, False, False, True, False]
    assert seen[1][1] is None and seen[2][1] is not None
    assert torch.equal(seen[3][1], seen[2][1]) and torch.equal(seen[5][1], model.head.weight.grad)


def test_a_timeline_for_other_edges_is_refused() -> None:
    """An order that would run a backward before the gradients of a skip arrive never starts."""
    batch = models.points()
    plan = make_order("1f1b", 3, 1)
    rows = [list(plan.rows(r)) for r in range(3)]
    wrong = replace(timeline_from_rows([rows[0][::-1], *rows[1:]]))
    pipe = pipeline(models.Skipping(), batch, wrong, 0)
    with pytest.raises(ValueError, match="F before B"):
        pipe.run(split(batch, 1))
