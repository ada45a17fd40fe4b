"""Built programs on several ranks, in all combinations of rows, against the plain loop in
float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.original import Sequential
from schedlang.runtime.launch.pool import Pool
from tests import models
from tests.engine import Threads
from tests.proofs import (
    Observed,
    adamw,
    assert_near,
    assert_proven,
    assert_same,
    make_plan,
    refusal_text,
    sgd,
    train_on_ranks,
    train_sequential,
    train_steps,
)
from tests.rows import GPT2

LLAMA = """
  at model.layers.* {
    {input,post_attention}_layernorm  shard(input=S(seq), output=S(seq), over=tp)
    self_attn.{q,k,v}_proj            shard(col, over=tp)
    self_attn.o_proj                  shard(row, output=S(seq), over=tp)
    mlp.{gate,up}_proj                shard(col, over=tp)
    mlp.down_proj                     shard(row, output=S(seq), over=tp)
  }
"""
LLAMA_ENDS = """
  model.layers.0  shard(input=S(seq), over=tp)
  model.norm      shard(input=S(seq), output=R, over=tp)
"""
SEED = 5
BATCHES = [models.tokens(rows=9, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def gpt2() -> Observed:
    """Return results of two AdamW steps on GPT-2 with dropout, clipped."""
    return train_sequential(models.gpt2(4, 0.1), BATCHES, adamw, clip=0.5, seed=SEED)


@pytest.fixture(scope="module")
def gpt2_sgd() -> Observed:
    """Return results of two SGD steps with decay on some parameters only."""
    return train_sequential(models.gpt2(2, 0.1), BATCHES, sgd, seed=SEED)


def all_axes_rows(order: str = "1F1B", micro: int = 2, zero: int = 1, chunks: int = 1) -> str:
    return f"""{GPT2}
  transformer.h[1:3]  checkpoint()
  transformer.h[0]    offload(activations, to=cpu)
  transformer.h       pipeline_split(over=pp)
  zero(stage={zero}, over=dp)
  pipeline(order="{order}", micro={micro}, chunks={chunks})
"""


def mesh_text(order: tuple[str, ...]) -> str:
    return ", ".join(f"{axis}=2" for axis in order)


ORDERS = list(itertools.permutations(("dp", "pp", "tp")))


@pytest.mark.parametrize(
    "order, zero", [(("tp", "pp", "dp"), 3), (("pp", "dp", "tp"), 2)], ids=["tp-pp-dp", "pp-dp-tp"]
)
def test_three_axes_at_once(order: tuple[str, ...], zero: int, pool: Pool, gpt2: Observed) -> None:
    """Data x pipeline x tensor parallelism with sliced state, recomputation and offloading."""
    plan = make_plan(models.gpt2(4, 0.1), all_axes_rows(zero=zero), mesh_text(order))
    options = {"prepared": None}  # each rank prepares the plan itself, as in a job
    assert_near(train_on_ranks(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED, **options), gpt2)


@pytest.mark.deep
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_order_of_the_axes(zero: int, pool: Pool, gpt2: Observed) -> None:
    """Neither the order of dp, pp and tp in the mesh nor the ZeRO stage changes a result."""
    for order in ORDERS:
        for name, chunks in (("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)):
            plan = make_plan(
                models.gpt2(4, 0.1), all_axes_rows(name, 2, zero, chunks), mesh_text(order)
            )
            assert_near(train_on_ranks(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED), gpt2)


def test_unequal_axes(pool: Pool) -> None:
    """Three data-parallel by two tensor-parallel ranks: a sum over the wrong axis would show."""
    model = models.gpt2(1, 0.1)
    plan = make_plan(model, GPT2 + "zero(stage=2, over=dp)", "dp=3, tp=2")
    expected = train_sequential(model, BATCHES, adamw, clip=0.5, seed=SEED)
    assert_near(train_on_ranks(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED), expected)


def test_sequence_parallel_llama(pool: Pool) -> None:
    """Llama split along the sequence, in two pipeline stages, on 4 ranks; blocks save only their
    linear products and recompute attention."""
    model = models.llama(2)
    batches = [models.tokens(rows=6, seed=seed) for seed in (1, 2)]
    expected = train_sequential(model, batches, adamw, clip=0.5, seed=SEED)
    tensor_plan = make_plan(model, LLAMA + LLAMA_ENDS, "tp=2")
    assert_near(train_on_ranks(pool, tensor_plan, batches, adamw, clip=0.5, seed=SEED), expected)
    split = "model.layers pipeline_split(over=pp)"
    checkpoint = "model.layers.*  checkpoint(save=[linear])"
    rows = f'{LLAMA}{LLAMA_ENDS}  {checkpoint}\n  {split}\n  pipeline(order="GPipe", micro=2)'
    staged_plan = make_plan(model, rows, "pp=2, tp=2")
    results = train_on_ranks(pool, staged_plan, batches, adamw, clip=0.5, seed=SEED, prepared=None)
    assert_near(results, expected)


# -- data-parallel state ------------------------------------------------------------


def without_norm(results: Observed) -> Observed:
    """Drop the gradient norms."""
    return {name: value for name, value in results.items() if not name.startswith("norm")}


@pytest.mark.parametrize("rows", ["", 'pipeline(order="GPipe", micro=2)'], ids=["one", "two"])
def test_stages_of_zero_are_one_computation(rows: str, pool: Pool, gpt2_sgd: Observed) -> None:
    """ZeRO stages 1, 2 and 3 give the bits of stage 0: losses, gradients, parameters, momentum."""
    model = models.gpt2(2, 0.1)
    results = []
    for stage in range(4):
        plan = make_plan(model, f"zero(stage={stage}, over=dp)\n{rows}", "dp=2")
        results.append(train_on_ranks(pool, plan, BATCHES, sgd, seed=SEED))
    assert_near(results[0], gpt2_sgd)
    # 2 and 3 add what each microbatch reduced, 0 and 1 reduce what microbatches added
    pairs = [(1, 0), (3, 2)] if rows else [(1, 0), (2, 0), (3, 0)]
    for left, right in pairs:
        assert_same(without_norm(results[left]), without_norm(results[right]))
    for right in results[1:]:
        assert_near(right, results[0], 1e-13)


@pytest.mark.parametrize(
    "rows",
    [
        "zero(stage=3, over=a)\n  zero(stage=0, over=b)",
        "zero(stage=1, over=b)\n  zero(stage=0, over=a)",
        "zero(stage=2, over=(a, b))",
        "zero(stage=3, over=(b, a))",
    ],
    ids=["3 within a", "1 within b", "2 over both", "3 over both, turned"],
)
def test_two_data_axes(rows: str, pool: Pool, gpt2_sgd: Observed) -> None:
    """Slice within one axis and replicate across the other, or slice over both, in either order."""
    plan = make_plan(models.gpt2(2, 0.1), rows, "a=2, b=2")
    assert_near(train_on_ranks(pool, plan, BATCHES, sgd, seed=SEED), gpt2_sgd)


def test_parameters_that_do_not_divide_are_sliced_to_the_last_element(pool: Pool) -> None:
    """Three ranks slice dims of 5, 2 and 1: no element is lost or counted twice."""
    model = OddSizes()
    batches = [series(rows=9, seed=seed) for seed in (1, 2)]
    expected = train_sequential(model, batches, adamw, clip=0.1, seed=SEED)
    for stage in (1, 3):
        plan = make_plan(model, f"zero(stage={stage}, over=dp)", "dp=3")
        assert_near(train_on_ranks(pool, plan, batches, adamw, clip=0.1, seed=SEED), expected)


# -- pipelines ------------------------------------------------------------


@pytest.mark.parametrize(
    "order, micro, chunks", [("GPipe", 1, 1), ("1F1B", 3, 1), ("Interleaved1F1B", 4, 2)]
)
def test_orders_of_a_pipeline(
    order: str, micro: int, chunks: int, pool: Pool, gpt2: Observed
) -> None:
    """Each order, with one microbatch, with uneven ones, with several stages on a rank."""
    cut = "transformer.h pipeline_split(over=pp)"
    rows = f'{cut}\npipeline(order="{order}", micro={micro}, chunks={chunks})'
    plan = make_plan(models.gpt2(4, 0.1), rows, "pp=2")
    assert_near(train_on_ranks(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED), gpt2)


@pytest.mark.parametrize("micro", [2, 3, 9])
def test_the_number_of_microbatches_does_not_matter(micro: int, gpt2_sgd: Observed) -> None:
    """9 rows in 2, 3 and 9 parts with unequal counts of labels have the same mean."""
    plan = make_plan(models.gpt2(2, 0.1), f'pipeline(order="GPipe", micro={micro})')
    assert_near(train_steps(plan, BATCHES, sgd, None, {"seed": SEED}), gpt2_sgd)


def test_a_part_without_labels_weighs_nothing(pool: Pool) -> None:
    """A replica whose rows have no counted label adds nothing to the loss."""
    batch = models.tokens(rows=6)
    batch["labels"][:3] = -100
    model = models.gpt2(1)
    plan = make_plan(model, "zero(stage=2, over=dp)", "dp=2")
    assert_near(train_on_ranks(pool, plan, [batch], sgd), train_sequential(model, [batch], sgd))


# -- recomputation and residence ------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        "transformer.h.*  checkpoint()",
        "transformer.h.*  checkpoint(save=[linear, attention, collective])",
        "transformer.h.*  offload(activations, to=cpu)",
        "transformer.h.*  checkpoint()\n  transformer.h.*  offload(activations, prefetch=0)",
    ],
    ids=["checkpoint", "saving", "offload", "both"],
)
def test_memory_rows_change_no_bit(row: str, pool: Pool, plain: Observed) -> None:
    """With dropout and tensor parallelism: the same bits as without the row."""
    assert_same(train_split(pool, row), plain)


@pytest.fixture(scope="module")
def plain(pool: Pool) -> Observed:
    """Return results of GPT-2 split over two ranks, with no other row."""
    return train_split(pool)


def train_split(pool: Pool, row: str = "") -> Observed:
    """Train GPT-2 split over two ranks, with this row, and return the results."""
    plan = make_plan(models.gpt2(2, 0.1), GPT2 + row, "tp=2")
    return train_on_ranks(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED)


# -- kinds of models ------------------------------------------------------------


class OddSizes(nn.Module):
    """A few odd sizes, a buffer, and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(3, 5)
        self.middle = nn.Linear(5, 2, bias=False)
        self.head = nn.Linear(2, 1)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.tensor([0.1, -0.2]))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.enter(x))) * self.gain + self.shift
        return ((self.head(hidden)[:, 0] - y) ** 2).mean()


def series(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x.sum(1)}


def test_frozen_parameters_stay(pool: Pool) -> None:
    """A frozen parameter gets no gradient and no update on any rank, and stays in the state."""
    model = models.gpt2(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.0" not in name and "wpe" not in name)
    expected = train_sequential(model, BATCHES, adamw, clip=0.5)
    split = "transformer.h pipeline_split(over=pp)"
    rows = f'{split}\nzero(stage=3, over=dp)\npipeline(order="1F1B", micro=2)'
    for plan in (make_plan(model, GPT2, "tp=2"), make_plan(model, rows, "dp=2, pp=2")):
        results = train_on_ranks(pool, plan, BATCHES, adamw, clip=0.5)
        assert not any("grad" in name and ("h.0" in name or "wpe" in name) for name in results)
        assert_near(results, expected)


class BatchNormed(nn.Module):
    """Batch norm: its statistics over a part are not those over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.head(self.norm(self.enter(x)))[:, 0] - y) ** 2).mean()


def test_batch_statistics_are_refused_or_relaxed(pool: Pool) -> None:
    """`verify` refuses batch norm over parts, with the reason; `relax(batch_stats)` allows it."""
    batches = tuple(series(8, seed) for seed in range(2))
    row = "zero(stage=0, over=dp)"
    with pytest.raises(Refusal) as caught:
        prove(Case(make_plan(BatchNormed(), row, "dp=2"), batches, dtype="none"), pool=pool)
    message = caught.value.render()
    assert "S703" in message and "relax(batch_stats)" in message
    one_rank = make_plan(BatchNormed(), row, "dp=1")
    assert assert_proven(pool, one_rank, batches).ok


class FusedAttention(nn.Module):
    """Grouped-query attention from one fused weight, a tied head, its own smoothed loss."""

    def __init__(self, classes: int = 13) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classes, self.heads, self.groups, self.size = classes, 4, 2, 4
        self.words = nn.Embedding(classes, 8)
        self.qkv, self.out = nn.Linear(8, 32), nn.Linear(16, 8)
        self.head = nn.Linear(8, classes, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.words(ids)
        rows, length, _ = x.shape
        widths = [self.heads * self.size, self.groups * self.size, self.groups * self.size]
        q, k, v = self.qkv(x).split(widths, -1)
        q, k, v = (t.view(rows, length, -1, self.size).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, -1))
        logits = self.head(x)
        return F.cross_entropy(
            logits.view(-1, self.classes), target.view(-1), ignore_index=-1, label_smoothing=0.1
        )


def word_batch(seed: int, rows: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(13, (rows, 5), generator=generator)
    target = ids.roll(-1, 1)
    target[:, -1] = -1
    target[0, :2] = -1
    return {"ids": ids, "target": target}


FUSED = """
  words  pad(vocab, multiple=4)
  words  shard(vocab, over=tp)
  qkv    shard(col, blocks=[16, 8, 8], over=tp)
  out    shard(row, over=tp)
  head   shard(vocab, over=tp)
"""


def test_unequal_blocks_ties_padding_and_smoothing(pool: Pool) -> None:
    """q, k and v of unequal width in one weight; 13 classes over 2 ranks; a smoothed loss."""
    model, batches = FusedAttention(), [word_batch(1), word_batch(2)]
    for mesh, zero_row in (("tp=2", ""), ("dp=2, tp=2", "zero(stage=1, over=dp)")):
        plan = make_plan(model, FUSED + zero_row, mesh)
        assert_near(
            train_on_ranks(pool, plan, batches, adamw, clip=0.1),
            train_sequential(model, batches, adamw, clip=0.1),
        )


def test_blocks_that_are_not_said_are_refused() -> None:
    """A fused weight split as one block is refused, with the row to write."""
    rows = FUSED.replace("blocks=[16, 8, 8], ", "")
    assert "`blocks=[16, 8, 8]`" in refusal_text(FusedAttention(), rows, "tp=2", word_batch(1))


def test_an_optimizer_of_whole_matrices_is_given_them(threads: Threads) -> None:
    """An update that mixes the elements of a matrix gets the full matrix."""

    class Mixing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(p.grad.norm() + 1e-3)
            return super().step(closure)

    def made(named: Any) -> Any:
        return Mixing([p for _, p in named], lr=0.1)

    results = train_on_ranks(
        threads, make_plan(FusedAttention(), FUSED, "tp=2"), [word_batch(1)], made
    )
    expected = train_sequential(
        FusedAttention(), [word_batch(1)], made
    )  # the update has overwritten its gradients
    states = [name for name in expected if name.startswith("state")]
    assert_near({n: results[n] for n in states}, {n: expected[n] for n in states})


# -- one rank ------------------------------------------------------------


def train_original(model: nn.Module, batches: Any, clip: float | None) -> Observed:
    """Train the original: return losses and state."""
    reference = Sequential(model, adamw, clip=clip)
    torch.manual_seed(11)
    results = {f"loss {k}": reference.train_step(batch).clone() for k, batch in enumerate(batches)}
    return results | {name: value.clone() for name, value in reference.state_dict().items()}


def train_program(plan: Plan, batches: Any, clip: float | None) -> Observed:
    """Train the built program in this process: return losses and state."""
    program = build(plan, batches[0], optimizer=adamw, clip=clip)
    torch.manual_seed(11)
    results = {f"loss {k}": program.train_step(batch).clone() for k, batch in enumerate(batches)}
    return results | {name: value.clone() for name, value in program.state_dict().items()}


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_mesh_of_ones_is_the_model(clip: float | None) -> None:
    """On one rank in float32, with torch's dropout: the bits of the plain loop, with one row and
    with all."""
    model = models.gpt2(2, 0.1).float()
    batches = [models.tokens(seed=seed) for seed in range(3)]
    expected = train_original(models.gpt2(2, 0.1).float(), batches, clip)
    for rows, mesh in (("verify(loss)", ""), (all_axes_rows(micro=1), "dp=1, pp=1, tp=1")):
        assert_same(train_program(make_plan(model, rows, mesh), batches, clip), expected)


def test_an_idle_axis_is_refused() -> None:
    """Ranks along an axis that no row uses would all repeat the same work."""
    with pytest.raises(Refusal, match="no row uses the axis `dp`"):
        build(make_plan(OddSizes(), "verify(loss)", "dp=2"), series(4, 1))


@pytest.mark.parametrize("order", ["GPipe", "1F1B"])
def test_accumulation_keeps_one_microbatch(order: str) -> None:
    """Without pipeline stages each backward follows its forward, as in a loop by hand."""
    calls: list[str] = []

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.up(x)
            if not output.is_meta and output.requires_grad:
                calls.append("forward")
                output.register_hook(lambda grad: calls.append("backward"))
            return output.square().mean()

    plan = make_plan(Told(), f'pipeline(order="{order}", micro=3)')
    batch = {"x": torch.randn(6, 4)}
    program = build(plan, batch)
    calls.clear()
    program.train_step(batch)
    assert calls == ["forward", "backward"] * 3
