"""Stale weights: programs equal a sequential replay of exactly the same weight versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import Prepared
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.passes.static_checks.static import static
from schedlang.passes.verify.observe import Condition
from schedlang.passes.verify.proof_case import make_original_subject, prepare_case
from schedlang.passes.verify.relaxed_original import SequentialStale
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.table import Kind, Op, Timeline, timeline_from_rows
from schedlang.pipeline.timeline.versions import update_versions, weight_copies
from schedlang.runtime import program
from schedlang.runtime.float64 import Float64
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.pipeline.weight_versions import WeightVersions
from tests import models
from tests.engine.threads import Threads
from tests.proofs import adamw, assert_near, make_plan, sgd, train_on_ranks
from tests.properties.profiles import examples

GATE = 1e-12


class Chain(nn.Module):
    """Layers for which autograd saves weights (the norm's gain) and views of them."""

    def __init__(self, layers: int = 4, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))
            for _ in range(layers)
        )
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


def random_batch(rows: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn(rows, 5, generator=g, dtype=torch.float64) for k in ("x", "y")}


def stale_plan(
    model: nn.Module,
    order: str,
    mesh: str,
    rows: str = "",
    zero: str = "",
    relax: str = "staleness",
) -> Plan:
    """The plan of a pipeline under an order (its arguments), in a step that allows staleness."""
    trunk = {"GPT2LMHeadModel": "transformer.h", "LlamaForCausalLM": "model.layers"}
    cut = trunk.get(type(model).__name__, "layers")
    body = f"{rows}\n{cut}  pipeline_split(over=pp)\n{zero}\npipeline(order={order})"
    return make_plan(model, body, mesh, relax)


def replay(
    plan: Plan, batches: Sequence[Any], optimizer: Any, prepared: Prepared | None = None
) -> dict[str, Tensor]:
    """Observations of a sequential replay, under the names of `train_on_ranks`."""
    case = Case(plan, tuple(batches))
    case = prepare_case(case) if prepared is None else replace(case, prepared=prepared)
    replayer = make_original_subject(case, Condition("", optimizer, tuple(batches)))
    assert isinstance(replayer, SequentialStale)
    observed: dict[str, Tensor] = {}
    with enter_modes(Float64()):
        for step, batch in enumerate(batches):
            observed[f"loss {step}"] = replayer.train_step(batch).clone()
            observed[f"norm {step}"] = torch.as_tensor(replayer.grad_norm)
            grads = {n: g for n, g in replayer.gradients().items() if g is not None}
            observed |= {f"grad {step} {name}": grad.clone() for name, grad in grads.items()}
    observed |= {f"state {name}": value.clone() for name, value in replayer.state_dict().items()}
    for name, slots in replayer.optimizer_state().items():
        for slot, value in slots.items():
            observed[f"optimizer {slot} {name}"] = torch.as_tensor(value).clone()
    return observed


class Pair(Chain):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(2)


ORDERS = {
    "PipeDream": '"PipeDream", micro=8',
    "2BW": '"PipeDream-2BW", micro=8',
    "PipeMare": '"PipeMare", micro=8, every=2',
    "PB": '"Pipelined-Backprop", micro=8',
}


@pytest.mark.parametrize(("stages", "optimizer"), [(2, adamw), (4, sgd)])
@pytest.mark.parametrize("name", ORDERS)
def test_equal_to_the_replay(name: str, stages: int, optimizer: Any, threads: Threads) -> None:
    """Three steps of SGD with momentum and of AdamW: losses, gradients, weights, moments."""
    plan = stale_plan(Chain(), ORDERS[name], f"pp={stages}")
    batches = [random_batch(17, seed) for seed in range(3)]  # uneven microbatches
    observed = train_on_ranks(threads, plan, batches, optimizer)
    assert_near(observed, replay(plan, batches, optimizer), GATE)


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        ('"2BW", micro=6, every=2', "layers.*  checkpoint()"),
        ('"PipeDream", micro=6', "layers.*  checkpoint()"),
        ('"PB", micro=4', "layers.*  split_backward()"),
        ('"PipeDream", micro=4, every=2', "layers.*  offload(activations, to=cpu)"),
    ],
)
def test_with_rows_that_change_backwards(order: str, rows: str, threads: Threads) -> None:
    """Recomputed forwards, split backwards and offloads read the weights of their forward."""
    plan = stale_plan(Chain(), order, "pp=2", rows)
    batches = [random_batch(12, seed) for seed in range(2)]
    assert_near(train_on_ranks(threads, plan, batches), replay(plan, batches, sgd), GATE)


def test_staleness_is_real() -> None:
    """Orders and sizes of updates differ by far more than rounding."""
    batches = [random_batch(16, 0), random_batch(16, 1)]
    texts = [*ORDERS.values(), '"PipeDream", micro=8, every=2', '"PipeMare", micro=8, every=4']
    losses = [float(replay(stale_plan(Chain(), t, "pp=4"), batches, sgd)["loss 1"]) for t in texts]
    differences = [abs(a - b) for k, a in enumerate(losses) for b in losses[:k]]
    assert min(differences) > 1e-6


def loss_and_gradients(weights: Sequence[Tensor], x: Tensor, y: Tensor) -> Any:
    """Loss and gradients of |x A B - y|^2 / n at A and B of the forward, and B of the backward."""
    a, b, b_backward = weights
    residual = x @ a @ b - y
    output_grad = 2 * residual / residual.numel()
    return (
        float(residual.square().mean()),
        x.T @ (output_grad @ b_backward.T),
        (x @ a).T @ output_grad,
    )


class Product(nn.Module):
    """x A B, so small that gradients are written by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [
        ('"PipeDream", micro=4', (1, 1), (0, 0)),
        ('"Pipelined-Backprop", micro=4', (2, 0), (0, 0)),
        ('"2BW", micro=4, every=2', None, None),
    ],
)
def test_equal_to_gradients_by_hand(order: str, first: Any, second: Any, threads: Threads) -> None:
    """SGD with the papers' rules, computed by hand in matrices without autograd."""
    plan, batch = stale_plan(Product(), order, "pp=2"), random_batch(8, 3)
    observed = train_on_ranks(
        threads, plan, [batch], lambda named: torch.optim.SGD([p for _, p in named], lr=0.5)
    )
    a = [Product().layers[0].weight.detach().T.clone()]
    b = [Product().layers[1].weight.detach().T.clone()]
    parts = [(batch["x"][k : k + 2], batch["y"][k : k + 2]) for k in range(0, 8, 2)]
    if first is not None:
        for k, (x, y) in enumerate(parts):  # delays of F and B on each stage
            fa, fb, bb = max(0, k - first[0]), k - second[0], k - second[1]
            _, ga, gb = loss_and_gradients((a[fa], b[fb], b[bb]), x, y)
            a.append(a[-1] - 0.5 * ga)
            b.append(b[-1] - 0.5 * gb)
    else:
        for t, pair in enumerate((parts[:2], parts[2:])):
            version = max(0, t - 1)
            gradient_pairs = [
                loss_and_gradients((a[version], b[version], b[version]), x, y)[1:] for x, y in pair
            ]
            a.append(a[-1] - 0.5 * (gradient_pairs[0][0] + gradient_pairs[1][0]) / 2)
            b.append(b[-1] - 0.5 * (gradient_pairs[0][1] + gradient_pairs[1][1]) / 2)
    for name, expected in (("layers.0.weight", a[-1].T), ("layers.1.weight", b[-1].T)):
        assert float((observed[f"state {name}"] - expected).norm()) < GATE * float(expected.norm())


@st.composite
def version_tables(draw: st.DrawFn) -> Timeline:
    """Strategy: 1F1B over two stages, with updates after any microbatch and any versions."""
    micro = 4
    ends = draw(st.sets(st.integers(0, micro - 2))) | {micro - 1}
    rows = []
    for rank in range(2):
        row: list[Op] = []
        read: dict[int, int] = {}
        newest = 0
        for op in make_order("1F1B", 2, micro).rows(rank):
            if op.kind is Kind.F:
                read[op.microbatch] = draw(st.integers(0, newest))
            row.append(op._replace(version=read[op.microbatch]))
            if op.kind is Kind.B and op.microbatch in ends:
                newest += 1
                row.append(Op(Kind.STEP, rank, op.microbatch, version=newest))
        rows.append(row)
    return timeline_from_rows(rows)


@examples(5)
@given(version_tables())
def test_any_table_of_versions(threads: Threads, table: Timeline) -> None:
    """Whatever versions rows read, the program equals the replay of the same table."""
    plan = stale_plan(Pair(), '"PipeDream", micro=4', "pp=2")
    batches = [random_batch(9, seed) for seed in range(2)]
    case = prepare_case(Case(plan, tuple(batches)))
    assert case.prepared is not None
    prepared = replace(case.prepared, staged=replace(case.prepared.staged, timeline=table))
    if update_versions(table).max() == 1:
        return  # not stale: other tests compare this
    observed = train_on_ranks(threads, plan, batches, prepared=prepared)
    assert_near(observed, replay(plan, batches, sgd, prepared), GATE)


# -- real models, the whole proof ---------------------------------------------------------------

CASES = {
    "gpt2": lambda: stale_plan(
        models.gpt2(2, 0.1, tied=False),
        '"PipeDream", micro=2',
        "dp=2, pp=2",
        zero="zero(stage=0, over=dp)",
    ),
    "llama, not kept": lambda: stale_plan(
        models.llama(2),
        '"PipeMare", micro=3, every=1',
        "pp=2, tp=2",
        """at model.layers.* {
             self_attn.{q,k,v}_proj  shard(col, over=tp)
             self_attn.o_proj        shard(row, over=tp)
             mlp.{gate,up}_proj      shard(col, over=tp)
             mlp.down_proj           shard(row, over=tp)
           }""",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_proof_holds(name: str, threads: Threads) -> None:
    """The proof holds with replicas, shards and dropout, also in the limit without staleness."""
    batches = tuple(models.tokens(rows=6, seed=seed) for seed in (5, 2))
    report = prove(Case(CASES[name](), batches, dtype="none"), pool=threads)  # type: ignore[arg-type]
    assert report.ok, str(report)
    assert report.equivalence == "relaxed (staleness)"
    assert max(row.error for row in report.rows) < GATE
    limit = {row.kind for row in report.rows if "`staleness` vanishes" in row.condition}
    assert {"loss", "gradients", "gradient norm", "parameters"} <= limit


def test_on_processes_and_in_the_working_dtype(pool: Pool) -> None:
    """The proof on ranks of their own, with a model in float32 beside float64."""
    plan = stale_plan(Chain().float(), '"PipeDream", micro=4', "pp=2")
    batches = tuple({k: v.float() for k, v in random_batch(8, s).items()} for s in (1, 2))
    report = prove(Case(plan, batches), pool=pool)
    assert report.ok, str(report)
    assert any("working dtype" in row.kind for row in report.rows)


# -- what is kept, and for how long -------------------------------------------------------------


def count_versions(plan: Plan, batch: Any) -> tuple[int, int]:
    """On this rank: the largest number of versions in a step, and the number after it."""
    built = build(plan, batch, optimizer=sgd)
    versions, counts = built._versions, []
    assert isinstance(versions, WeightVersions)
    original = versions.prepare

    def before(op: Any) -> None:
        original(op)
        counts.append(versions.stored_count)

    vars(versions)["prepare"] = before
    built.train_step(batch)
    return max(counts), versions.stored_count


@pytest.mark.parametrize("name", ORDERS)
def test_as_many_copies_as_the_timeline_says(name: str, threads: Threads) -> None:
    """A rank holds at most exactly `weight_copies` versions, and one after the step."""
    plan = stale_plan(Chain(), ORDERS[name], "pp=4")
    assert plan.order is not None
    expected = weight_copies(plan.order.timeline(4)).tolist()
    assert threads.run(count_versions, 4, plan, random_batch(16, 0)) == [
        (count, 1) for count in expected
    ]


def test_an_update_without_labels_changes_nothing(threads: Threads) -> None:
    """An update whose microbatches have no labels changes no weight and no moment."""
    plan = stale_plan(models.gpt2(2, tied=False), '"PipeDream", micro=4', "pp=2")
    batch = models.tokens(rows=8, seed=5)
    batch["labels"][2:4] = -100
    observed = train_on_ranks(threads, plan, [batch, batch], adamw)
    assert_near(observed, replay(plan, [batch, batch], adamw), GATE)
    assert float(observed["optimizer step lm_head.weight"]) == 6


def train_own_rows(plan: Plan, batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """On this rank: train on its own rows, and return the state."""
    with enter_modes(Float64()):
        built = build(plan, batches[0], optimizer=sgd)
        index = built.assembly.ranks.mesh.index(built.assembly.ranks.rank, ("dp",))
        for batch in batches:
            built.train_step({k: v.chunk(2)[index] for k, v in batch.items()}, local=True)
    return {name: value.clone() for name, value in built.state_dict().items()}


def test_each_rank_brings_its_rows(threads: Threads) -> None:
    """With `local=True` replicas exchange the weights of each update's parts."""
    plan = stale_plan(
        models.gpt2(2, tied=False),
        '"PipeDream", micro=3, every=1',
        "dp=2, pp=2",
        zero="zero(stage=0, over=dp)",
    )
    batches = [models.tokens(rows=8, seed=seed) for seed in (5, 2)]
    expected = replay(plan, batches, sgd)
    for observed in threads.run(train_own_rows, 4, plan, batches):
        for name, value in observed.items():
            assert float((value - expected[f"state {name}"]).norm()) < 1e-9 * float(value.norm()), (
                name
            )


def test_the_static_proof_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static proofs hold; weights of the full step instead of each update are found (S716)."""
    plan = stale_plan(Chain(), '"PipeDream", micro=8', "dp=2, pp=2", zero="zero(stage=0, over=dp)")
    assert not static(plan, random_batch(16, 0)).problems
    original = program.sum_update_weights
    monkeypatch.setattr(
        program, "sum_update_weights", lambda *args: {k: 16.0 for k in original(*args)}
    )
    assert [problem.code for problem in static(plan, random_batch(16, 0)).problems] == ["S716"]
