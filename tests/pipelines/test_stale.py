"""Stale weights: programs equal a sequential replay of the same versions, and of no other."""

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
from tests.proofs import adamw, assert_near, planned, sgd, trained
from tests.properties.profiles import examples

GATE = 1e-12


class Chain(nn.Module):
    """Layers of which autograd saves the weight itself (the norm's gain) and views of it."""

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


def series(rows: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn(rows, 5, generator=g, dtype=torch.float64) for k in ("x", "y")}


def stale(
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
    return planned(model, body, mesh, relax)


def replayed(
    plan: Plan, batches: Sequence[Any], optimizer: Any, made: Prepared | None = None
) -> dict[str, Tensor]:
    """What the replay leaves, under the names that `trained` gives."""
    case = Case(plan, tuple(batches))
    case = prepare_case(case) if made is None else replace(case, prepared=made)
    subject = make_original_subject(case, Condition("", optimizer, tuple(batches)))
    assert isinstance(subject, SequentialStale)
    seen: dict[str, Tensor] = {}
    with enter_modes(Float64()):
        for step, batch in enumerate(batches):
            seen[f"loss {step}"] = subject.train_step(batch).clone()
            seen[f"norm {step}"] = torch.as_tensor(subject.grad_norm)
            grads = {n: g for n, g in subject.gradients().items() if g is not None}
            seen |= {f"grad {step} {name}": grad.clone() for name, grad in grads.items()}
    seen |= {f"state {name}": value.clone() for name, value in subject.state_dict().items()}
    for name, slots in subject.optimizer_state().items():
        for slot, value in slots.items():
            seen[f"optimizer {slot} {name}"] = torch.as_tensor(value).clone()
    return seen


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
    plan = stale(Chain(), ORDERS[name], f"pp={stages}")
    batches = [series(17, seed) for seed in range(3)]  # uneven microbatches
    seen = trained(threads, plan, batches, optimizer)
    assert_near(seen, replayed(plan, batches, optimizer), GATE)


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
    """A recomputed forward meets the weights of the first; halves of a backward meet the same."""
    plan = stale(Chain(), order, "pp=2", rows)
    batches = [series(12, seed) for seed in range(2)]
    assert_near(trained(threads, plan, batches), replayed(plan, batches, sgd), GATE)


def test_staleness_is_real() -> None:
    """The orders differ from each other by far more than rounding, and so do sizes of updates."""
    batches = [series(16, 0), series(16, 1)]
    texts = [*ORDERS.values(), '"PipeDream", micro=8, every=2', '"PipeMare", micro=8, every=4']
    losses = [float(replayed(stale(Chain(), t, "pp=4"), batches, sgd)["loss 1"]) for t in texts]
    apart = [abs(a - b) for k, a in enumerate(losses) for b in losses[:k]]
    assert min(apart) > 1e-6


def linear(weights: Sequence[Tensor], x: Tensor, y: Tensor) -> Any:
    """Loss and gradients of |x A B - y|^2 / n at A and B of the forward, and B of the backward."""
    a, b, back = weights
    residual = x @ a @ b - y
    d = 2 * residual / residual.numel()
    return float(residual.square().mean()), x.T @ (d @ back.T), (x @ a).T @ d


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
    """Plain SGD with the papers' rules written out in matrices, without autograd or a table."""
    plan, batch = stale(Product(), order, "pp=2"), series(8, 3)
    made = trained(
        threads, plan, [batch], lambda named: torch.optim.SGD([p for _, p in named], lr=0.5)
    )
    a = [Product().layers[0].weight.detach().T.clone()]
    b = [Product().layers[1].weight.detach().T.clone()]
    parts = [(batch["x"][k : k + 2], batch["y"][k : k + 2]) for k in range(0, 8, 2)]
    if first is not None:
        for k, (x, y) in enumerate(parts):  # delays of F and B on each stage
            fa, fb, bb = max(0, k - first[0]), k - second[0], k - second[1]
            _, ga, gb = linear((a[fa], b[fb], b[bb]), x, y)
            a.append(a[-1] - 0.5 * ga)
            b.append(b[-1] - 0.5 * gb)
    else:
        for t, pair in enumerate((parts[:2], parts[2:])):
            at = max(0, t - 1)
            both = [linear((a[at], b[at], b[at]), x, y)[1:] for x, y in pair]
            a.append(a[-1] - 0.5 * (both[0][0] + both[1][0]) / 2)
            b.append(b[-1] - 0.5 * (both[0][1] + both[1][1]) / 2)
    for name, want in (("layers.0.weight", a[-1].T), ("layers.1.weight", b[-1].T)):
        assert float((made[f"state {name}"] - want).norm()) < GATE * float(want.norm())


@st.composite
def tables(draw: st.DrawFn) -> Timeline:
    """1F1B over two stages with an update after any microbatch, and any version kept for each."""
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
@given(tables())
def test_any_table_of_versions(threads: Threads, table: Timeline) -> None:
    """Whatever versions rows read, the program equals the replay of the same table."""
    plan = stale(Pair(), '"PipeDream", micro=4', "pp=2")
    batches = [series(9, seed) for seed in range(2)]
    case = prepare_case(Case(plan, tuple(batches)))
    assert case.prepared is not None
    made = replace(case.prepared, staged=replace(case.prepared.staged, timeline=table))
    if update_versions(table).max() == 1:
        return  # the plain loop, which other tests compare
    seen = trained(threads, plan, batches, prepared=made)
    assert_near(seen, replayed(plan, batches, sgd, made), GATE)


# -- real models, the whole proof ---------------------------------------------------------------

CASES = {
    "gpt2": lambda: stale(
        models.gpt2(2, 0.1, tied=False),
        '"PipeDream", micro=2',
        "dp=2, pp=2",
        zero="zero(stage=0, over=dp)",
    ),
    "llama, not kept": lambda: stale(
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
    """With replicas, shards, dropout, recomputation, uneven labels; and where nothing is stale."""
    batches = tuple(models.tokens(rows=6, seed=seed) for seed in (5, 2))
    report = prove(Case(CASES[name](), batches, dtype="none"), pool=threads)  # type: ignore[arg-type]
    assert report.ok, str(report)
    assert report.equivalence == "relaxed (staleness)"
    assert max(row.error for row in report.rows) < GATE
    limit = {row.kind for row in report.rows if "`staleness` vanishes" in row.condition}
    assert {"loss", "gradients", "gradient norm", "parameters"} <= limit


def test_on_processes_and_in_the_working_dtype(pool: Pool) -> None:
    """The proof on ranks of their own, with a model in float32 beside float64."""
    plan = stale(Chain().float(), '"PipeDream", micro=4', "pp=2")
    batches = tuple({k: v.float() for k, v in series(8, s).items()} for s in (1, 2))
    report = prove(Case(plan, batches), pool=pool)
    assert report.ok, str(report)
    assert any("working dtype" in row.kind for row in report.rows)


# -- what is kept, and for how long -------------------------------------------------------------


def most_kept(plan: Plan, batch: Any) -> tuple[int, int]:
    """On this rank: the most versions held at a time, and those held after the step."""
    made = build(plan, batch, optimizer=sgd)
    versions, seen = made._versions, []
    assert isinstance(versions, WeightVersions)
    plain = versions.prepare

    def before(op: Any) -> None:
        plain(op)
        seen.append(versions.stored_count)

    vars(versions)["prepare"] = before
    made.train_step(batch)
    return max(seen), versions.stored_count


@pytest.mark.parametrize("name", ORDERS)
def test_as_many_copies_as_the_timeline_says(name: str, threads: Threads) -> None:
    """A rank never holds more versions than `weight_copies`, reaches them, and ends with one."""
    plan = stale(Chain(), ORDERS[name], "pp=4")
    assert plan.order is not None
    want = weight_copies(plan.order.timeline(4)).tolist()
    assert threads.run(most_kept, 4, plan, series(16, 0)) == [(most, 1) for most in want]


def test_an_update_without_labels_changes_nothing(threads: Threads) -> None:
    """Its microbatches weigh nothing: no moment decays, and the versions go on from the same."""
    plan = stale(models.gpt2(2, tied=False), '"PipeDream", micro=4', "pp=2")
    batch = models.tokens(rows=8, seed=5)
    batch["labels"][2:4] = -100
    seen = trained(threads, plan, [batch, batch], adamw)
    assert_near(seen, replayed(plan, [batch, batch], adamw), GATE)
    assert float(seen["optimizer step lm_head.weight"]) == 6


def by_rank(plan: Plan, batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """On this rank: steps on its own rows alone, and the state that they leave."""
    with enter_modes(Float64()):
        made = build(plan, batches[0], optimizer=sgd)
        mine = made.assembly.ranks.mesh.index(made.assembly.ranks.rank, ("dp",))
        for batch in batches:
            made.train_step({k: v.chunk(2)[mine] for k, v in batch.items()}, local=True)
    return {name: value.clone() for name, value in made.state_dict().items()}


def test_each_rank_brings_its_rows(threads: Threads) -> None:
    """With `local=True` replicas tell each other what the parts of every update weigh."""
    plan = stale(
        models.gpt2(2, tied=False),
        '"PipeDream", micro=3, every=1',
        "dp=2, pp=2",
        zero="zero(stage=0, over=dp)",
    )
    batches = [models.tokens(rows=8, seed=seed) for seed in (5, 2)]
    want = replayed(plan, batches, sgd)
    for seen in threads.run(by_rank, 4, plan, batches):
        for name, value in seen.items():
            assert float((value - want[f"state {name}"]).norm()) < 1e-9 * float(value.norm()), name


def test_the_static_proof_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums, messages and weights of each update are in order; weights of the whole step are not."""
    plan = stale(Chain(), '"PipeDream", micro=8', "dp=2, pp=2", zero="zero(stage=0, over=dp)")
    assert not static(plan, series(16, 0)).problems
    plain = program.sum_update_weights
    monkeypatch.setattr(
        program, "sum_update_weights", lambda *args: {k: 16.0 for k in plain(*args)}
    )
    assert [one.code for one in static(plan, series(16, 0)).problems] == ["S716"]
