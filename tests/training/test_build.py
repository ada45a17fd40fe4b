"""Whole programs on several ranks, in every combination, against the plain loop in float64."""

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
    Seen,
    adamw,
    assert_near,
    assert_same,
    planned,
    proven,
    refused,
    sequential,
    sgd,
    steps,
    trained,
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
def gpt2() -> Seen:
    """Two steps of AdamW on GPT-2 with dropout, clipped."""
    return sequential(models.gpt2(4, 0.1), BATCHES, adamw, clip=0.5, seed=SEED)


@pytest.fixture(scope="module")
def gpt2_sgd() -> Seen:
    """Two steps of SGD with decay on some parameters only."""
    return sequential(models.gpt2(2, 0.1), BATCHES, sgd, seed=SEED)


def _all(order: str = "1F1B", micro: int = 2, zero: int = 1, chunks: int = 1) -> str:
    return f"""{GPT2}
  transformer.h[1:3]  checkpoint()
  transformer.h[0]    offload(activations, to=cpu)
  transformer.h       pipeline_split(over=pp)
  zero(stage={zero}, over=dp)
  pipeline(order="{order}", micro={micro}, chunks={chunks})
"""


def _mesh(order: tuple[str, ...]) -> str:
    return ", ".join(f"{axis}=2" for axis in order)


ORDERS = list(itertools.permutations(("dp", "pp", "tp")))


@pytest.mark.parametrize(
    "order, zero", [(("tp", "pp", "dp"), 3), (("pp", "dp", "tp"), 2)], ids=["tp-pp-dp", "pp-dp-tp"]
)
def test_three_axes_at_once(order: tuple[str, ...], zero: int, pool: Pool, gpt2: Seen) -> None:
    """Data x pipeline x tensor parallelism with sliced state, recomputation and offloading."""
    plan = planned(models.gpt2(4, 0.1), _all(zero=zero), _mesh(order))
    alone = {"prepared": None}  # each rank prepares the plan by itself, as those of a job do
    assert_near(trained(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED, **alone), gpt2)


@pytest.mark.deep
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_order_of_the_axes(zero: int, pool: Pool, gpt2: Seen) -> None:
    """No order of dp, pp and tp in the mesh, and no stage of ZeRO, changes a result."""
    for order in ORDERS:
        for name, chunks in (("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)):
            plan = planned(models.gpt2(4, 0.1), _all(name, 2, zero, chunks), _mesh(order))
            assert_near(trained(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED), gpt2)


def test_unequal_axes(pool: Pool) -> None:
    """Three data-parallel ranks by two tensor-parallel ones: no sum over the wrong axis fits."""
    model = models.gpt2(1, 0.1)
    plan = planned(model, GPT2 + "zero(stage=2, over=dp)", "dp=3, tp=2")
    expected = sequential(model, BATCHES, adamw, clip=0.5, seed=SEED)
    assert_near(trained(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED), expected)


def test_sequence_parallel_llama(pool: Pool) -> None:
    """Llama with a stream split along the sequence, in two pipeline stages: sp x pp on 4 ranks;
    there blocks keep their products alone, and attention is recomputed."""
    model = models.llama(2)
    batches = [models.tokens(rows=6, seed=seed) for seed in (1, 2)]
    expected = sequential(model, batches, adamw, clip=0.5, seed=SEED)
    alone = planned(model, LLAMA + LLAMA_ENDS, "tp=2")
    assert_near(trained(pool, alone, batches, adamw, clip=0.5, seed=SEED), expected)
    split = "model.layers pipeline_split(over=pp)"
    again = "model.layers.*  checkpoint(save=[linear])"
    rows = f'{LLAMA}{LLAMA_ENDS}  {again}\n  {split}\n  pipeline(order="GPipe", micro=2)'
    both = planned(model, rows, "pp=2, tp=2")
    found = trained(pool, both, batches, adamw, clip=0.5, seed=SEED, prepared=None)
    assert_near(found, expected)


# -- data-parallel state ------------------------------------------------------------


def _without_norm(seen: Seen) -> Seen:
    return {name: value for name, value in seen.items() if not name.startswith("norm")}


@pytest.mark.parametrize("rows", ["", 'pipeline(order="GPipe", micro=2)'], ids=["one", "two"])
def test_stages_of_zero_are_one_computation(rows: str, pool: Pool, gpt2_sgd: Seen) -> None:
    """Stage 1, 2 and 3 give the bits of stage 0: losses, gradients, parameters, momentum."""
    model = models.gpt2(2, 0.1)
    seen = []
    for stage in range(4):
        plan = planned(model, f"zero(stage={stage}, over=dp)\n{rows}", "dp=2")
        seen.append(trained(pool, plan, BATCHES, sgd, seed=SEED))
    assert_near(seen[0], gpt2_sgd)
    # 2 and 3 add what each microbatch reduced, 0 and 1 reduce what microbatches added
    pairs = [(1, 0), (3, 2)] if rows else [(1, 0), (2, 0), (3, 0)]
    for one, other in pairs:
        assert_same(_without_norm(seen[one]), _without_norm(seen[other]))
    for other in seen[1:]:
        assert_near(other, seen[0], 1e-13)


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
def test_two_data_axes(rows: str, pool: Pool, gpt2_sgd: Seen) -> None:
    """Slice within and replicate across, or slice over both axes folded in either order."""
    plan = planned(models.gpt2(2, 0.1), rows, "a=2, b=2")
    assert_near(trained(pool, plan, BATCHES, sgd, seed=SEED), gpt2_sgd)


def test_parameters_that_do_not_divide_are_sliced_to_the_last_element(pool: Pool) -> None:
    """Three ranks slice dims of 5, 2 and 1: nothing is lost at the end, nothing counted twice."""
    model = Small()
    batches = [_series(rows=9, seed=seed) for seed in (1, 2)]
    expected = sequential(model, batches, adamw, clip=0.1, seed=SEED)
    for stage in (1, 3):
        plan = planned(model, f"zero(stage={stage}, over=dp)", "dp=3")
        assert_near(trained(pool, plan, batches, adamw, clip=0.1, seed=SEED), expected)


# -- pipelines ------------------------------------------------------------


@pytest.mark.parametrize(
    "order, micro, chunks", [("GPipe", 1, 1), ("1F1B", 3, 1), ("Interleaved1F1B", 4, 2)]
)
def test_orders_of_a_pipeline(order: str, micro: int, chunks: int, pool: Pool, gpt2: Seen) -> None:
    """Each order, with one microbatch, with uneven ones, with several stages on a rank."""
    cut = "transformer.h pipeline_split(over=pp)"
    rows = f'{cut}\npipeline(order="{order}", micro={micro}, chunks={chunks})'
    plan = planned(models.gpt2(4, 0.1), rows, "pp=2")
    assert_near(trained(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED), gpt2)


@pytest.mark.parametrize("micro", [2, 3, 9])
def test_the_number_of_microbatches_does_not_matter(micro: int, gpt2_sgd: Seen) -> None:
    """9 rows in 2, 3 and 9 parts, with unequal counts of labels: one and the same mean."""
    plan = planned(models.gpt2(2, 0.1), f'pipeline(order="GPipe", micro={micro})')
    assert_near(steps(plan, BATCHES, sgd, None, {"seed": SEED}), gpt2_sgd)


def test_a_part_without_labels_weighs_nothing(pool: Pool) -> None:
    """A replica whose rows have no label that counts adds nothing, and breaks nothing."""
    batch = models.tokens(rows=6)
    batch["labels"][:3] = -100
    model = models.gpt2(1)
    plan = planned(model, "zero(stage=2, over=dp)", "dp=2")
    assert_near(trained(pool, plan, [batch], sgd), sequential(model, [batch], sgd))


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
def test_memory_rows_change_no_bit(row: str, pool: Pool, plain: Seen) -> None:
    """With dropout and tensor parallelism: the same bits as the same schedule without the row."""
    assert_same(_split(pool, row), plain)


@pytest.fixture(scope="module")
def plain(pool: Pool) -> Seen:
    """GPT-2 split over two ranks, with no other row."""
    return _split(pool)


def _split(pool: Pool, row: str = "") -> Seen:
    plan = planned(models.gpt2(2, 0.1), GPT2 + row, "tp=2")
    return trained(pool, plan, BATCHES, adamw, clip=0.5, seed=SEED)


# -- kinds of models ------------------------------------------------------------


class Small(nn.Module):
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


def _series(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x.sum(1)}


def test_frozen_parameters_stay(pool: Pool) -> None:
    """What is not trained gets no gradient and no update on any rank, and stays in the state."""
    model = models.gpt2(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.0" not in name and "wpe" not in name)
    expected = sequential(model, BATCHES, adamw, clip=0.5)
    cut = "transformer.h pipeline_split(over=pp)"
    rows = f'{cut}\nzero(stage=3, over=dp)\npipeline(order="1F1B", micro=2)'
    for plan in (planned(model, GPT2, "tp=2"), planned(model, rows, "dp=2, pp=2")):
        seen = trained(pool, plan, BATCHES, adamw, clip=0.5)
        assert not any("grad" in name and ("h.0" in name or "wpe" in name) for name in seen)
        assert_near(seen, expected)


class Normed(nn.Module):
    """Batch statistics: the mean over a part is not a part of the mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.head(self.norm(self.enter(x)))[:, 0] - y) ** 2).mean()


def test_batch_statistics_are_refused_or_relaxed(pool: Pool) -> None:
    """`verify` refuses batch norm over parts, says why, and lets `relax(batch_stats)` pass it."""
    batches = tuple(_series(8, seed) for seed in range(2))
    row = "zero(stage=0, over=dp)"
    with pytest.raises(Refusal) as caught:
        prove(Case(planned(Normed(), row, "dp=2"), batches, dtype="none"), pool=pool)
    said = caught.value.render()
    assert "S703" in said and "relax(batch_stats)" in said
    whole = planned(Normed(), row, "dp=1")
    assert proven(pool, whole, batches).ok


class Fused(nn.Module):
    """Grouped-query attention from one weight, a tied head, a smoothed loss of its own."""

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
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, -1))
        logits = self.head(x)
        return F.cross_entropy(
            logits.view(-1, self.classes), target.view(-1), ignore_index=-1, label_smoothing=0.1
        )


def _words(seed: int, rows: int = 6) -> dict[str, Tensor]:
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
    model, batches = Fused(), [_words(1), _words(2)]
    for mesh, more in (("tp=2", ""), ("dp=2, tp=2", "zero(stage=1, over=dp)")):
        plan = planned(model, FUSED + more, mesh)
        assert_near(
            trained(pool, plan, batches, adamw, clip=0.1),
            sequential(model, batches, adamw, clip=0.1),
        )


def test_blocks_that_are_not_said_are_refused() -> None:
    """The same weight split as if it were one is refused with what to write."""
    rows = FUSED.replace("blocks=[16, 8, 8], ", "")
    assert "`blocks=[16, 8, 8]`" in refused(Fused(), rows, "tp=2", _words(1))


def test_an_optimizer_of_whole_matrices_is_given_them(threads: Threads) -> None:
    """An update that mixes the elements of a matrix is done on the whole of it."""

    class Mixing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(p.grad.norm() + 1e-3)
            return super().step(closure)

    def made(named: Any) -> Any:
        return Mixing([p for _, p in named], lr=0.1)

    found = trained(threads, planned(Fused(), FUSED, "tp=2"), [_words(1)], made)
    wanted = sequential(Fused(), [_words(1)], made)  # whose gradients the update has written into
    kept = [name for name in wanted if name.startswith("state")]
    assert_near({n: found[n] for n in kept}, {n: wanted[n] for n in kept})


# -- one rank ------------------------------------------------------------


def _plain(model: nn.Module, batches: Any, clip: float | None) -> Seen:
    subject = Sequential(model, adamw, clip=clip)
    torch.manual_seed(11)
    seen = {f"loss {k}": subject.train_step(batch).clone() for k, batch in enumerate(batches)}
    return seen | {name: value.clone() for name, value in subject.state_dict().items()}


def _alone(plan: Plan, batches: Any, clip: float | None) -> Seen:
    program = build(plan, batches[0], optimizer=adamw, clip=clip)
    torch.manual_seed(11)
    seen = {f"loss {k}": program.train_step(batch).clone() for k, batch in enumerate(batches)}
    return seen | {name: value.clone() for name, value in program.state_dict().items()}


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_mesh_of_ones_is_the_model(clip: float | None) -> None:
    """In float32, with torch's own dropout: the bits of the plain loop, in one and in all rows."""
    model = models.gpt2(2, 0.1).float()
    batches = [models.tokens(seed=seed) for seed in range(3)]
    expected = _plain(models.gpt2(2, 0.1).float(), batches, clip)
    for rows, mesh in (("verify(loss)", ""), (_all(micro=1), "dp=1, pp=1, tp=1")):
        assert_same(_alone(planned(model, rows, mesh), batches, clip), expected)


def test_an_idle_axis_is_refused() -> None:
    """Ranks along an axis that no row uses would all do the same work."""
    with pytest.raises(Refusal, match="no row uses the axis `dp`"):
        build(planned(Small(), "verify(loss)", "dp=2"), _series(4, 1))


@pytest.mark.parametrize("order", ["GPipe", "1F1B"])
def test_accumulation_keeps_one_microbatch(order: str) -> None:
    """Where nothing is cut each backward follows its forward, as in a loop by hand."""
    seen: list[str] = []

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.up(x)
            if not out.is_meta and out.requires_grad:
                seen.append("forward")
                out.register_hook(lambda grad: seen.append("backward"))
            return out.square().mean()

    plan = planned(Told(), f'pipeline(order="{order}", micro=3)')
    batch = {"x": torch.randn(6, 4)}
    program = build(plan, batch)
    seen.clear()
    program.train_step(batch)
    assert seen == ["forward", "backward"] * 3
