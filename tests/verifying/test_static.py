"""Static proofs: right schedules hold; each injected bug is found, at the line it belongs to."""

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
from schedlang.passes.static_checks import ownership
from schedlang.passes.static_checks.static import Static, static
from schedlang.pipeline.timeline.table import Kind
from schedlang.runtime import program
from schedlang.runtime.comm import collectives
from schedlang.runtime.pipeline import executor
from schedlang.runtime.propagation import dry_run, follower
from schedlang.runtime.sharding import edges, embedding
from tests import layouts, models
from tests.proofs import planned
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


def _pipe(trunk: str, order: str = "GPipe", chunks: int = 1, more: str = "") -> str:
    return f"""
  {trunk}  pipeline_split(over=pp)
  {more}
  pipeline(order="{order}", micro=2, chunks={chunks})
"""


@cache
def _plan(name: str) -> tuple[Plan, Mapping[str, Any]]:
    """A plan by name, with its batch; none is changed by what is proven of it."""
    model, rows, mesh, batch = PLANS[name]
    return planned(model(), rows, mesh), batch


def proven(name: str) -> Static:
    plan, batch = _plan(name)
    return static(plan, batch)


Case = tuple[Callable[[], nn.Module], str, str, Mapping[str, Any]]
PLANS: dict[str, Case] = {
    "gpt2 tp": (lambda: models.gpt2(1), GPT2, "tp=2", TOKENS),
    "gpt2 tp pp zero": (
        lambda: models.gpt2(2, 0.1),
        f"{GPT2}  transformer.h[0]  checkpoint()\n"
        + _pipe("transformer.h", "1F1B", more="zero(stage=1, over=dp)"),
        "dp=2, pp=2, tp=2",
        TOKENS,
    ),
    "gpt2 pp": (lambda: models.gpt2(2), _pipe("transformer.h"), "pp=2", TOKENS),
    "gpt2 interleaved": (
        lambda: models.gpt2(4),
        _pipe("transformer.h", "Interleaved1F1B", 2),
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
        LLAMA + LLAMA_ENDS + _pipe("model.layers"),
        "pp=2, tp=2",
        TOKENS,
    ),
    "bert tp": (models.bert, BERT, "tp=2", TOKENS),
    "bart pp": (models.bart, _pipe("model.decoder.layers"), "pp=2", TOKENS),
    "t5 tp dp": (lambda: models.t5(1, d_kv=8, dropout_rate=0.1), T5, "tp=2, dp=2", TOKENS),
    "skipping three": (
        models.Skipping,
        "blocks  pipeline_split(over=pp)\nzero(stage=0, over=dp)",
        "pp=3, dp=2",
        models.points(8),
    ),
    "skipping pp": (models.Skipping, _pipe("blocks", "1F1B"), "pp=2", models.points(8)),
    "odd zero": (layouts.Odd, "zero(stage=1, over=dp)", "dp=2", layouts.points(0)),
    "heads on pairs of ranks": (
        lambda: test_uneven.llama(8, 2),
        test_uneven.attention("", ", heads=2, uneven=replicate"),
        "tp=4",
        TOKENS,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_right_schedules_hold(name: str) -> None:
    """Every proof holds of schedules that compute what their model computes."""
    found = proven(name)
    assert found.problems == (), [(d.code, d.title, d.notes) for d in found.problems]
    assert all(claim.holds for claim in found.claims)
    assert [claim.name for claim in found.claims] == [
        "reductions",
        "placement types",
        "loss weights",
        "matching",
        "ownership",
    ]


def _found(static: Static, code: str) -> list[Diagnostic]:
    return [one for one in static.problems if one.code == code]


def _line(one: Diagnostic) -> str:
    return one.primary.span.source.line(one.primary.span.line).strip()


# bug, schedule, code, what stands in the line it is reported at
BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = [
    (tensor.enter_without_all_reduce, "gpt2 tp", "S711", "shard(col"),
    (tensor.reduce_reduces_again, "gpt2 tp", "S712", "shard("),
    (tensor.gather_turns_the_other_way, "llama sp", "S711", "shard("),
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
    """A bug in what ranks do fails the proof that it concerns, with the row that brings it."""
    bug(monkeypatch)
    found = _found(proven(name), code)
    assert found and any(line in _line(one) for one in found), found


# -- bugs of the planner --------------------------------------------------------------------------


def _mutated(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Both what is planned and what ranks do follow other reductions."""
    from schedlang.passes.lower import build

    plain = book.reductions

    def reductions(plan: Any, traced: Any, holdings: Any) -> list[Any]:
        return [made for one in plain(plan, traced, holdings) for made in change(one)]

    for module in (book, build):
        monkeypatch.setattr(module, "reductions", reductions)


def test_a_sum_over_the_wrong_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas summed over the tensor axis instead: one is missing, one too many."""
    _mutated(monkeypatch, lambda one: [replace(one, axes=("tp",))])
    plan = planned(models.gpt2(1), GPT2 + "zero(stage=0, over=dp)", "dp=3, tp=2")
    found = static(plan, models.tokens(rows=6))
    missing, more = _found(found, "S711"), _found(found, "S712")
    assert any("zero(" in _line(one) and "`dp`" in one.title for one in missing)
    assert any("shard(" in _line(one) and "`tp`" in one.title for one in more)


def test_a_stage_that_trains_nothing() -> None:
    """A rank without an optimizer is not said to train what `build` showed to one."""
    rows = f'freeze(keep="lm_head.*")\n{LLAMA}{LLAMA_ENDS}{_pipe("model.layers")}'
    plan = planned(models.llama(2), rows, "pp=2, tp=2", "updates")
    assert static(plan, TOKENS).problems == ()


@pytest.mark.parametrize(("axes", "code"), [(None, "S711"), (("tp",), "S712")])
def test_copies_of_heads(
    axes: tuple[str, ...] | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of ranks hold a head: its gradient is summed over the pair, and over no more ranks."""

    def change(one: Any) -> list[Any]:
        if one.axes != ("tp/2",):
            return [one]
        return [] if axes is None else [replace(one, axes=axes)]

    _mutated(monkeypatch, change)
    found = _found(proven("heads on pairs of ranks"), code)
    assert found and all("uneven=replicate" in _line(one) for one in found)


def test_one_parameter_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that lacks one name is told with that name."""
    name = "transformer.wpe.weight"
    _mutated(monkeypatch, lambda one: [replace(one, names=tuple(set(one.names) - {name}))])
    (found,) = _found(proven("gpt2 dp"), "S711")
    assert found.notes[0] == f"of `{name}`" and "zero(" in _line(found)


def test_a_sum_that_is_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large by the size of the axis, which the message tells."""
    _mutated(monkeypatch, lambda one: [one, one])
    (found,) = _found(proven("gpt2 dp"), "S712")
    assert "3 times too large" in found.title and "zero(" in _line(found)


def test_a_mean_where_a_sum_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are divided by the number of replicas once more, after their sum."""
    plain = program.sum_gradients

    def averaged(parameters: Any, sums: Any) -> None:
        plain(parameters, sums)
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(3)

    monkeypatch.setattr(program, "sum_gradients", averaged)
    (found,) = _found(proven("gpt2 dp"), "S712")
    assert "divided by 3" in found.title and "zero(" in _line(found)


# -- bugs of the trace --------------------------------------------------------------------------


def test_a_trace_that_forgets_what_is_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms between split tokens, which the planner does not note: the proof has its own notes."""
    monkeypatch.setattr(follower.Follower, "note_use", lambda self, name, parts: None)
    found = _found(proven("llama sp"), "S711")
    assert found and all("`tp`" in one.title and "shard(" in _line(one) for one in found)


def test_a_trace_that_sums_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in a sharded module is taken for a part."""
    plain = dry_run._note_leaf

    def noted(leaf: Any, edges: Any, note: Any, out: Any, follower: Any) -> None:
        plain(leaf, edges, note, out, follower)
        if leaf.bias is not None:
            follower.partial.setdefault(leaf.bias, set()).add(edges[0].group.axes[0])

    monkeypatch.setattr(dry_run, "_note_leaf", noted)
    found = _found(proven("gpt2 tp"), "S712")
    assert found and all("shard(row" in _line(one) for one in found)


def test_an_edge_that_forgets_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks compute differently, gradients of what all hold alike have to be summed."""
    plain = dry_run._edge
    same = lambda *args: replace(plain(*args), differ=False)  # noqa: E731
    monkeypatch.setattr(dry_run, "_edge", same)
    found = _found(proven("bert tp"), "S711")
    assert found and any("shard(col" in _line(one) for one in found)


# -- pending sums ------------------------------------------------------------------------------


def test_only_linear_calls_stand_before_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not linear is named, with the row whose sum comes too late."""
    plain = edges.PRODUCTS_BY_KIND["Conv1D"]
    late = lambda module, x, bias: torch.tanh(plain(module, x, bias))  # noqa: E731
    monkeypatch.setitem(edges.PRODUCTS_BY_KIND, "Conv1D", late)  # type: ignore[arg-type]
    found = _found(proven("gpt2 tp"), "S713")
    assert found and all("`tanh` is not linear" in one.title for one in found)
    assert {"shard(row" in _line(one) for one in found} == {True}


# -- ranks that do not agree ------------------------------------------------------------------


def test_a_rank_that_does_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control flow that depends on the rank: one more collective on one of them."""
    plain = collectives._Reduce.forward

    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        if group.rank == 0:
            collectives.all_gather(x, 0, group)
        return plain(ctx, x, group)

    monkeypatch.setattr(collectives._Reduce, "forward", staticmethod(forward))
    found = _found(proven("gpt2 tp"), "S714")
    assert found and "ranks 0 and 1" in found[0].title and "shard(" in _line(found[0])


def test_ranks_that_send_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations in the same order, of different sizes."""
    plain = collectives.all_reduce

    def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
        if group.rank == 1:
            plain(x.flatten()[1:], group)
            return x.clone()
        return plain(x, group)

    monkeypatch.setattr(collectives, "all_reduce", all_reduce)
    found = _found(proven("gpt2 tp"), "S714")
    assert found and "do not agree on a collective" in found[0].title


def test_messages_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gradients of equal shape are sent in the wrong order: no shape tells, their names do."""
    plain = executor.Pipeline._order

    def order(self: Any, count: int, train: bool) -> Any:
        events = list(plain(self, count, train))
        sends = [k for k, event in enumerate(events) if event.op.kind is Kind.SEND_B]
        if len(sends) > 1:
            first, second = sends[:2]
            events.insert(second, events.pop(first))
        return tuple(events)

    monkeypatch.setattr(executor.Pipeline, "_order", order)
    found = _found(proven("gpt2 pp"), "S714")
    assert found and "takes a message" in found[0].title
    assert "pipeline_split" in _line(found[0]) and "microbatch" in found[0].notes[1]


# -- owners ----------------------------------------------------------------------------------------


def test_a_buffer_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that a stage's module has and no stage is said to hold."""
    plain = ownership.buffer_stages
    forgets = lambda staged: {k: v for k, v in plain(staged).items() if "0" not in k}  # noqa: E731
    monkeypatch.setattr(ownership, "buffer_stages", forgets)
    plan = planned(Buffered(), _pipe("blocks"), "pp=2")
    (found,) = _found(static(plan, models.points(4)), "S715")
    assert "blocks.0.shift" in found.notes[0] and "pipeline_split" in _line(found)


def test_a_parameter_that_no_optimizer_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained parameter of a rank that its optimizer was not given."""
    from schedlang.passes.static_checks import rank_steps

    played = rank_steps._simulate_rank
    lost = lambda *args: replace(made := played(*args), trained=made.trained[1:])  # noqa: E731
    monkeypatch.setattr(rank_steps, "_simulate_rank", lost)
    found = _found(proven("gpt2 dp"), "S715")
    assert found and "does not train it exactly once" in found[0].title


def test_a_kernel_that_forgets_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks, dtypes and `requires_grad` survive `replace_kernel`; a bug that drops them is told."""
    from schedlang.runtime.kernel_injection import kernel

    rows = "model.**:LlamaRMSNorm  replace_kernel(rms_norm)"
    model = models.llama(1)
    model.model.norm.register_forward_hook(print)
    plan = planned(model, rows)
    assert not _found(static(plan, TOKENS), "S715")
    plain = kernel.replace

    def replaced(module: nn.Module, *given: Any) -> None:
        plain(module, *given)
        for parameter in module.parameters():
            parameter.requires_grad_(False)

    monkeypatch.setattr(kernel, "replace", replaced)
    found = _found(static(plan, TOKENS), "S715")
    assert found and "`replace_kernel` changes its requires_grad" in found[0].title
    assert "replace_kernel(" in _line(found[0])


class Shifted(nn.Module):
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
        self.blocks = nn.ModuleList(Shifted() for _ in range(2))
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.sum(1) - y).square().mean()


class Unread(Buffered):
    """Whose layers take a view of one more buffer, and drop it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("unread", torch.arange(4), persistent=False)
            block.register_forward_pre_hook(lambda module, given: (module.unread[:2], None)[1])


def test_a_buffer_that_nothing_reads_needs_no_stage() -> None:
    """A forward that takes a view of a buffer and drops it holds, under stages, too."""
    plan = planned(Unread(), _pipe("blocks"), "pp=2")
    assert not static(plan, models.points(4)).problems


class Bags(nn.Module):
    """Two tables whose rows are added up by bags: a sum, weighed or not, and a mean."""

    def __init__(self, mode: str = "sum", weighed: bool = False) -> None:
        super().__init__()
        self.weighed = weighed
        self.bags = nn.ModuleList(nn.EmbeddingBag(8, 4, mode=mode) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scales = torch.full(ids.shape, 0.5, device=ids.device) if self.weighed else None
        x = sum(bag(ids, None, scales) for bag in self.bags)
        return (self.head(x)[..., 0] - y).square().mean()


BAGS = {"ids": torch.arange(12).reshape(4, 3) % 8, "y": torch.ones(4)}


@pytest.mark.parametrize("style", ["vocab", "col"])
@pytest.mark.parametrize(("mode", "weighed"), [("sum", False), ("sum", True), ("mean", False)])
def test_bags_split_by_rows_or_columns_hold(mode: str, weighed: bool, style: str) -> None:
    """Each rank adds up the rows that it holds, and the sum over the ranks has them all."""
    plan = planned(Bags(mode, weighed), f"bags.*  shard({style}, output=R, over=tp)", "tp=2")
    assert not static(plan, BAGS).problems


def test_bags_without_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that adds up rows for ids that it does not hold is told, at the row."""
    plain = embedding._look_up_bags

    def unmasked(module: Any, ids: Any, weight: Any, offsets: Any, scales: Any, *how: Any) -> Any:
        return plain(module, ids, weight, offsets, torch.ones(ids.shape, device="meta"), *how)

    monkeypatch.setattr(embedding, "_look_up_bags", unmasked)
    found = _found(static(planned(Bags(), "bags.*  shard(vocab, over=tp)", "tp=2"), BAGS), "S713")
    assert found and "even for ids that it does not hold" in found[0].title
    assert "shard(vocab" in _line(found[0])
