"""Static proofs: correct schedules hold; each injected bug is found at its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.ir.plan import Plan
from schedlang.passes.analyze import holdings as book
from schedlang.passes.static_checks import static as ownership
from schedlang.passes.static_checks.static import Static, static
from schedlang.pipeline.timeline.table import Kind
from schedlang.runtime import program
from schedlang.runtime.comm import collectives
from schedlang.runtime.pipeline import executor
from schedlang.runtime.propagation import dry_run, follower
from schedlang.runtime.sharding import edges, embedding
from tests import layouts, models
from tests.proofs import make_plan
from tests.sharding import test_uneven
from tests.training.test_build import GPT2, LLAMA, LLAMA_ENDS
from tests.zoo import heads, replicas, tensor
from tests.zoo.pipeline import last_microbatch_dropped, ties_not_summed, ties_summed_twice

TOKENS = models.tokens(rows=4)
BERT = """
  at bert.encoder.layer.* {
    attention.self.{query,key,value}  shard(col, over=tp)
    attention.output.dense            shard(row, over=tp)
    intermediate.dense                shard(col, over=tp)
    output.dense                      shard(row, over=tp)
  }
"""
T5 = """
  {encoder,decoder}.block.*.layer[-1].DenseReluDense.wi  shard(col, over=tp)
  {encoder,decoder}.block.*.layer[-1].DenseReluDense.wo  shard(row, over=tp)
  zero(stage=0, over=dp)
"""


def _pipeline_rows(trunk: str, order: str = "GPipe", chunks: int = 1, more: str = "") -> str:
    return f"""
  {trunk}  pipeline_split(over=pp)
  {more}
  pipeline(order="{order}", micro=2, chunks={chunks})
"""


@cache
def _plan_and_batch(name: str) -> tuple[Plan, Mapping[str, Any]]:
    """Return a plan and its batch by name; proofs do not change them."""
    model, rows, mesh, batch = PLANS[name]
    return make_plan(model(), rows, mesh), batch


def prove_static(name: str) -> Static:
    plan, batch = _plan_and_batch(name)
    return static(plan, batch)


Case = tuple[Callable[[], nn.Module], str, str, Mapping[str, Any]]
PLANS: dict[str, Case] = {
    "gpt2 tp": (lambda: models.gpt2(1), GPT2, "tp=2", TOKENS),
    "gpt2 tp pp zero": (
        lambda: models.gpt2(2, 0.1),
        f"{GPT2}  transformer.h[0]  checkpoint()\n"
        + _pipeline_rows("transformer.h", "1F1B", more="zero(stage=1, over=dp)"),
        "dp=2, pp=2, tp=2",
        TOKENS,
    ),
    "gpt2 pp": (lambda: models.gpt2(2), _pipeline_rows("transformer.h"), "pp=2", TOKENS),
    "gpt2 interleaved": (
        lambda: models.gpt2(4),
        _pipeline_rows("transformer.h", "Interleaved1F1B", 2),
        "pp=2",
        TOKENS,
    ),
    "gpt2 dp": (lambda: models.gpt2(1), "zero(stage=0, over=dp)", "dp=3", models.tokens(rows=6)),
    "gpt2 zero": (lambda: models.gpt2(1), "zero(stage=2, over=dp)", "dp=2", TOKENS),
    "hybrid": (
        lambda: models.gpt2(1),
        "zero(stage=3, over=a)\n  zero(stage=0, over=b)",
        "a=2, b=2",
        TOKENS,
    ),
    "llama sp": (lambda: models.llama(1), LLAMA + LLAMA_ENDS, "tp=2", TOKENS),
    "llama sp pp": (
        lambda: models.llama(2),
        LLAMA + LLAMA_ENDS + _pipeline_rows("model.layers"),
        "pp=2, tp=2",
        TOKENS,
    ),
    "bert tp": (models.bert, BERT, "tp=2", TOKENS),
    "bart pp": (models.bart, _pipeline_rows("model.decoder.layers"), "pp=2", TOKENS),
    "t5 tp dp": (lambda: models.t5(1, d_kv=8, dropout_rate=0.1), T5, "tp=2, dp=2", TOKENS),
    "skipping three": (
        models.Skipping,
        "blocks  pipeline_split(over=pp)\nzero(stage=0, over=dp)",
        "pp=3, dp=2",
        models.points(8),
    ),
    "skipping pp": (models.Skipping, _pipeline_rows("blocks", "1F1B"), "pp=2", models.points(8)),
    "odd zero": (layouts.OddModel, "zero(stage=1, over=dp)", "dp=2", layouts.points(0)),
    "heads on pairs of ranks": (
        lambda: test_uneven.llama(8, 2),
        test_uneven.attention_rows("", ", heads=2, uneven=replicate"),
        "tp=4",
        TOKENS,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_right_schedules_hold(name: str) -> None:
    """Every static proof holds for correct schedules."""
    report = prove_static(name)
    assert report.problems == (), [(d.code, d.title, d.notes) for d in report.problems]
    assert all(claim.holds for claim in report.claims)
    assert [claim.name for claim in report.claims] == [
        "reductions",
        "placement types",
        "loss weights",
        "matching",
        "ownership",
    ]


def _problems_with(static: Static, code: str) -> list[Diagnostic]:
    return [problem for problem in static.problems if problem.code == code]


def _source_line(problem: Diagnostic) -> str:
    return problem.primary.span.source.line(problem.primary.span.line).strip()


# bug, schedule, code, text of the reported line
BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = [
    (tensor.enter_without_all_reduce, "gpt2 tp", "S711", "shard(col"),
    (tensor.reduce_reduces_again, "gpt2 tp", "S712", "shard("),
    (tensor.gather_returns_local_grad, "llama sp", "S711", "shard("),
    (tensor.bias_on_every_rank, "gpt2 tp", "S713", "shard(row"),
    (tensor.embedding_without_mask, "gpt2 tp", "S713", "shard(vocab"),
    (heads.partial_sums_skipped, "llama sp", "S711", "layernorm"),
    (ties_not_summed, "gpt2 pp", "S711", "pipeline_split"),
    (ties_summed_twice, "gpt2 pp", "S712", "pipeline_split"),
    (replicas.replicas_not_summed, "gpt2 dp", "S711", "zero("),
    (replicas.averaged_by_fully_shard, "gpt2 zero", "S712", "zero("),
    (replicas.mean_of_means, "gpt2 dp", "S716", "zero("),
    (last_microbatch_dropped, "gpt2 pp", "S716", "pipeline("),
]


@pytest.mark.parametrize("bug, name, code, line", BUGS, ids=[bug[0].__name__ for bug in BUGS])
def test_injected_bugs_are_found_at_their_row(
    bug: Callable[[pytest.MonkeyPatch], None],
    name: str,
    code: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug in the runtime fails the proof that covers it, at the row that causes it."""
    bug(monkeypatch)
    problems = _problems_with(prove_static(name), code)
    assert problems and any(line in _source_line(problem) for problem in problems), problems


# -- bugs of the planner --------------------------------------------------------------------------


def _patch_reductions(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Change the reductions in the plan and on ranks."""
    from schedlang.passes.lower import build

    reductions_of = book.reductions

    def reductions(plan: Any, traced: Any, holdings: Any) -> list[Any]:
        return [
            new for reduction in reductions_of(plan, traced, holdings) for new in change(reduction)
        ]

    for module in (book, build):
        monkeypatch.setattr(module, "reductions", reductions)


def test_a_sum_over_the_wrong_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas reduced over the tensor axis: one reduction is missing, one is too many."""
    _patch_reductions(monkeypatch, lambda problem: [replace(problem, axes=("tp",))])
    plan = make_plan(models.gpt2(1), GPT2 + "zero(stage=0, over=dp)", "dp=3, tp=2")
    report = static(plan, models.tokens(rows=6))
    missing, too_many = _problems_with(report, "S711"), _problems_with(report, "S712")
    assert any("zero(" in _source_line(problem) and "`dp`" in problem.title for problem in missing)
    assert any(
        "shard(" in _source_line(problem) and "`tp`" in problem.title for problem in too_many
    )


def test_a_stage_that_trains_nothing() -> None:
    """A rank without trained parameters has no optimizer: no false alarm."""
    rows = f'freeze(keep="lm_head.*")\n{LLAMA}{LLAMA_ENDS}{_pipeline_rows("model.layers")}'
    plan = make_plan(models.llama(2), rows, "pp=2, tp=2", "updates")
    assert static(plan, TOKENS).problems == ()


@pytest.mark.parametrize(("axes", "code"), [(None, "S711"), (("tp",), "S712")])
def test_copies_of_heads(
    axes: tuple[str, ...] | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of ranks hold a head: its gradient must be summed over the pair only."""

    def change(reduction: Any) -> list[Any]:
        if reduction.axes != ("tp/2",):
            return [reduction]
        return [] if axes is None else [replace(reduction, axes=axes)]

    _patch_reductions(monkeypatch, change)
    problems = _problems_with(prove_static("heads on pairs of ranks"), code)
    assert problems and all("uneven=replicate" in _source_line(problem) for problem in problems)


def test_one_parameter_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter missing in a reduction is named."""
    name = "transformer.wpe.weight"
    _patch_reductions(
        monkeypatch,
        lambda reduction: [replace(reduction, names=tuple(set(reduction.names) - {name}))],
    )
    (problem,) = _problems_with(prove_static("gpt2 dp"), "S711")
    assert problem.notes[0] == f"of `{name}`" and "zero(" in _source_line(problem)


def test_a_sum_that_is_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double reduction is reported with its factor, the size of the axis."""
    _patch_reductions(monkeypatch, lambda reduction: [reduction, reduction])
    (problem,) = _problems_with(prove_static("gpt2 dp"), "S712")
    assert "3 times too large" in problem.title and "zero(" in _source_line(problem)


def test_a_mean_where_a_sum_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients divided by the number of replicas after their sum are reported."""
    sum_gradients = program.sum_gradients

    def averaged(parameters: Any, sums: Any) -> None:
        sum_gradients(parameters, sums)
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(3)

    monkeypatch.setattr(program, "sum_gradients", averaged)
    (problem,) = _problems_with(prove_static("gpt2 dp"), "S712")
    assert "divided by 3" in problem.title and "zero(" in _source_line(problem)


# -- bugs of the trace --------------------------------------------------------------------------


def test_a_trace_that_forgets_what_is_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the trace misses partial gradients of norms, the proof still finds them."""
    monkeypatch.setattr(follower.Follower, "note_use", lambda self, name, parts: None)
    problems = _problems_with(prove_static("llama sp"), "S711")
    assert problems and all(
        "`tp`" in problem.title and "shard(" in _source_line(problem) for problem in problems
    )


def test_a_trace_that_sums_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full gradients treated as partial are reported as summed too often."""
    note_leaf = dry_run._note_leaf

    def noted(leaf: Any, edges: Any, note: Any, output: Any, follower: Any) -> None:
        note_leaf(leaf, edges, note, output, follower)
        if leaf.bias is not None:
            follower.partial.setdefault(leaf.bias, set()).add(edges[0].group.axes[0])

    monkeypatch.setattr(dry_run, "_note_leaf", noted)
    problems = _problems_with(prove_static("gpt2 tp"), "S712")
    assert problems and all("shard(row" in _source_line(problem) for problem in problems)


def test_an_edge_that_forgets_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing reduction of input gradients, where ranks compute differently, is found."""
    make_edge = dry_run._edge
    without_differ = lambda *args: replace(make_edge(*args), differ=False)  # noqa: E731
    monkeypatch.setattr(dry_run, "_edge", without_differ)
    problems = _problems_with(prove_static("bert tp"), "S711")
    assert problems and any("shard(col" in _source_line(problem) for problem in problems)


# -- pending sums ------------------------------------------------------------------------------


def test_only_linear_calls_stand_before_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nonlinear function before a pending sum is named, with the row of the late sum."""
    product = edges.PRODUCTS_BY_KIND["Conv1D"]
    late = lambda module, x, bias: torch.tanh(product(module, x, bias))  # noqa: E731
    monkeypatch.setitem(edges.PRODUCTS_BY_KIND, "Conv1D", late)  # type: ignore[arg-type]
    problems = _problems_with(prove_static("gpt2 tp"), "S713")
    assert problems and all("`tanh` is not linear" in problem.title for problem in problems)
    assert {"shard(row" in _source_line(problem) for problem in problems} == {True}


# -- ranks that do not agree ------------------------------------------------------------------


def test_a_rank_that_does_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra collective on one rank is found."""
    reduce_forward = collectives._Reduce.forward

    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        if group.rank == 0:
            collectives.all_gather(x, 0, group)
        return reduce_forward(ctx, x, group)

    monkeypatch.setattr(collectives._Reduce, "forward", staticmethod(forward))
    problems = _problems_with(prove_static("gpt2 tp"), "S714")
    assert (
        problems and "ranks 0 and 1" in problems[0].title and "shard(" in _source_line(problems[0])
    )


def test_ranks_that_send_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal operations with different shapes on ranks are found."""
    original = collectives.all_reduce

    def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
        if group.rank == 1:
            original(x.flatten()[1:], group)
            return x.clone()
        return original(x, group)

    monkeypatch.setattr(collectives, "all_reduce", all_reduce)
    problems = _problems_with(prove_static("gpt2 tp"), "S714")
    assert problems and "do not agree on a collective" in problems[0].title


def test_messages_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages of equal shape in the wrong order are found by their names."""
    original = executor.Pipeline._order

    def order(self: Any, count: int, train: bool) -> Any:
        events = list(original(self, count, train))
        sends = [k for k, event in enumerate(events) if event.op.kind is Kind.SEND_B]
        if len(sends) > 1:
            first_send, second_send = sends[:2]
            events.insert(second_send, events.pop(first_send))
        return tuple(events)

    monkeypatch.setattr(executor.Pipeline, "_order", order)
    problems = _problems_with(prove_static("gpt2 pp"), "S714")
    assert problems and "takes a message" in problems[0].title
    assert "pipeline_split" in _source_line(problems[0]) and "microbatch" in problems[0].notes[1]


# -- owners ----------------------------------------------------------------------------------------


def test_a_buffer_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of a stage's module that no stage owns is found."""
    buffer_stages = ownership.buffer_stages
    forgets = lambda stages: {k: v for k, v in buffer_stages(stages).items() if "0" not in k}  # noqa: E731
    monkeypatch.setattr(ownership, "buffer_stages", forgets)
    plan = make_plan(Buffered(), _pipeline_rows("blocks"), "pp=2")
    (problem,) = _problems_with(static(plan, models.points(4)), "S715")
    assert "blocks.0.shift" in problem.notes[0] and "pipeline_split" in _source_line(problem)


def test_a_parameter_that_no_optimizer_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained parameter that is missing in the optimizer is found."""
    from schedlang.passes.static_checks import rank_steps

    simulate_rank = rank_steps._simulate_rank
    lost = lambda *args: replace(rank_state := simulate_rank(*args), trained=rank_state.trained[1:])  # noqa: E731
    monkeypatch.setattr(rank_steps, "_simulate_rank", lost)
    problems = _problems_with(prove_static("gpt2 dp"), "S715")
    assert problems and "does not train it exactly once" in problems[0].title


def test_a_kernel_that_forgets_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """`replace_kernel` must keep hooks, dtypes and `requires_grad`; a violation is found."""
    from schedlang.runtime.kernel_injection import kernel

    rows = "model.**:LlamaRMSNorm  replace_kernel(rms_norm)"
    model = models.llama(1)
    model.model.norm.register_forward_hook(print)
    plan = make_plan(model, rows)
    assert not _problems_with(static(plan, TOKENS), "S715")
    replace_kernel = kernel.replace

    def replaced(module: nn.Module, *args: Any) -> None:
        replace_kernel(module, *args)
        for parameter in module.parameters():
            parameter.requires_grad_(False)

    monkeypatch.setattr(kernel, "replace", replaced)
    problems = _problems_with(static(plan, TOKENS), "S715")
    assert problems and "`replace_kernel` changes its requires_grad" in problems[0].title
    assert "replace_kernel(" in _source_line(problems[0])


class BufferedLayer(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x) + self.shift  # type: ignore[no-any-return]


class Buffered(nn.Module):
    """Layers with buffers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BufferedLayer() for _ in range(2))
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.sum(1) - y).square().mean()


class Unread(Buffered):
    """As Buffered, with an extra buffer of which layers take an unused view."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("unread", torch.arange(4), persistent=False)
            block.register_forward_pre_hook(lambda module, args: (module.unread[:2], None)[1])


def test_a_buffer_that_nothing_reads_needs_no_stage() -> None:
    """A buffer with an unused view passes, also under stages."""
    plan = make_plan(Unread(), _pipeline_rows("blocks"), "pp=2")
    assert not static(plan, models.points(4)).problems


class EmbeddingBags(nn.Module):
    """Two embedding bags: sum, weighted sum, or mean."""

    def __init__(self, mode: str = "sum", weighed: bool = False) -> None:
        super().__init__()
        self.weighed = weighed
        self.bags = nn.ModuleList(nn.EmbeddingBag(8, 4, mode=mode) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scales = torch.full(ids.shape, 0.5, device=ids.device) if self.weighed else None
        x = sum(bag(ids, None, scales) for bag in self.bags)
        return (self.head(x)[..., 0] - y).square().mean()


BAG_BATCH = {"ids": torch.arange(12).reshape(4, 3) % 8, "y": torch.ones(4)}


@pytest.mark.parametrize("style", ["vocab", "col"])
@pytest.mark.parametrize(("mode", "weighed"), [("sum", False), ("sum", True), ("mean", False)])
def test_bags_split_by_rows_or_columns_hold(mode: str, weighed: bool, style: str) -> None:
    """Embedding bags sharded by rows or columns pass."""
    plan = make_plan(
        EmbeddingBags(mode, weighed), f"bags.*  shard({style}, output=R, over=tp)", "tp=2"
    )
    assert not static(plan, BAG_BATCH).problems


def test_bags_without_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sums rows for ids that it does not hold is reported at the row."""
    look_up_bags = embedding._look_up_bags

    def unmasked(module: Any, ids: Any, weight: Any, offsets: Any, scales: Any, *args: Any) -> Any:
        return look_up_bags(
            module, ids, weight, offsets, torch.ones(ids.shape, device="meta"), *args
        )

    monkeypatch.setattr(embedding, "_look_up_bags", unmasked)
    problems = _problems_with(
        static(make_plan(EmbeddingBags(), "bags.*  shard(vocab, over=tp)", "tp=2"), BAG_BATCH),
        "S713",
    )
    assert problems and "even for ids that it does not hold" in problems[0].title
    assert "shard(vocab" in _source_line(problems[0])
