"""Native dropout on several ranks: which masks must be equal or different, under every row."""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.passes.prove import prove
from schedlang.passes.verify.proof_case import Case
from schedlang.passes.verify.randomness import RankDraws, check_native_draws, describe_wrong_draws
from schedlang.runtime.declined_calls import declined_in
from schedlang.runtime.forward import layers_of
from schedlang.runtime.fusion.fuse import why_unavailable
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.rng.native_dropout import NativeDropout, _is_nan_placeholder
from tests.proofs import make_plan, run_prepared, sgd

TENSOR_ROWS = """blocks.*.{q,k,v,up} shard(col, over=tp)
blocks.*.{o,down} shard(row, over=tp)
"""
SEQUENCE_ROWS = """blocks.0 shard(input=S(seq), over=tp)
blocks.*.norm shard(input=S(seq), output=S(seq), over=tp)
blocks.*.{q,k,v} shard(col, over=tp)
blocks.*.o shard(row, output=S(seq), over=tp)
blocks.*.up shard(col, input=R, over=tp)
blocks.*.down shard(row, output=S(seq), over=tp)
head shard(input=R, over=tp)
"""


class Block(nn.Module):
    """Attention with dropped weights, and an MLP that drops twice in the block's forward."""

    def __init__(self, width: int = 16, size: int = 4, on: float = 1.0) -> None:
        super().__init__()
        self.size, self.on = size, on
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        self.o, self.drop = nn.Linear(width, width), nn.Dropout(0.2 * on)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of both pre-norm halves."""
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        rate = 0.1 * self.on if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.drop(self.o(attended.transpose(1, 2).flatten(2)))
        y = F.dropout(F.gelu(self.up(x)), 0.3 * self.on, self.training)
        return x + F.dropout(self.down(y), 0.2 * self.on, self.training)


class Net(nn.Module):
    """Tokens, blocks, logits and a loss."""

    def __init__(self, layers: int = 2, on: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block(on=on) for _ in range(layers))
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


class OtherDropouts(nn.Module):
    """An LSTM with dropout between its layers, and torch's multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.lstm = nn.LSTM(16, 16, 3, dropout=0.3, batch_first=True)
        self.attend = nn.MultiheadAttention(16, 4, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        x = self.lstm(self.embed(ids))[0]
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


class SharedDropout(nn.Module):
    """One dropout before the blocks and after them, as in T5: in a pipeline, between units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop = nn.Embedding(11, 16), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Return a loss that reads the first dropout's result at the end, too."""
        x = embedded = self.drop(self.embed(ids))
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.drop(x + embedded)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def _batch() -> dict[str, Tensor]:
    return {"ids": torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(1))}


def check_masks(plan: Any, prepared: Any) -> tuple[str, int, list[str]]:
    """On one rank: return why dropout is not native, the masks of two steps, and their mistakes."""
    program = build(plan, _batch(), optimizer=sgd, seed=0, prepared=prepared)
    dropout = program.assembly.dropout
    assert dropout is not None
    dropout.noted = {}
    program.train_step(_batch())
    count, mistakes = check_native_draws(program, _batch()) or (0, ["nothing is drawn natively"])
    return program.assembly.logical_dropout_reason, count, mistakes


def stages_rows(order: str, *more: str) -> str:
    return f"blocks pipeline_split(over=pp)\npipeline(order={order}, {', '.join(more)})\n"


ROWS = {
    "data": (Net, "zero(stage=0, over=dp)", "dp=2"),
    "zero 1": (Net, "zero(stage=1, over=dp)", "dp=2"),
    "zero 2": (Net, "zero(stage=2, over=dp)", "dp=2"),
    "zero 3": (Net, "zero(stage=3, over=dp)", "dp=2"),
    "tensor": (Net, TENSOR_ROWS, "tp=2"),
    "tensor, data, recomputed": (
        Net,
        TENSOR_ROWS + "blocks.* checkpoint()\nzero(stage=1, over=dp)",
        "dp=2, tp=2",
    ),
    "sequence": (Net, SEQUENCE_ROWS, "tp=2"),
    "recomputed": (Net, "blocks.* checkpoint()\nzero(stage=3, over=dp)", "dp=2"),
    "attention kept": (
        Net,
        "blocks.* checkpoint(save=[attention])\nzero(stage=0, over=dp)",
        "dp=2",
    ),
    "offloaded": (Net, "blocks.* offload(activations)\nzero(stage=0, over=dp)", "dp=2"),
    "accumulated": (Net, "zero(stage=0, over=dp)\npipeline(order=GPipe, micro=2)", "dp=2"),
    "1F1B": (Net, stages_rows('"1F1B"', "micro=4"), "pp=2"),
    "1F1B, tensor": (Net, TENSOR_ROWS + stages_rows('"1F1B"', "micro=2"), "pp=2, tp=2"),
    "interleaved": (lambda: Net(4), stages_rows("Interleaved1F1B", "micro=4", "chunks=2"), "pp=2"),
    "stages run again": (Net, stages_rows("Varuna", "micro=4"), "pp=2"),
    "halves": (Net, stages_rows('"ZB-H1"', "micro=4"), "pp=2"),
    "between stages": (SharedDropout, stages_rows('"1F1B"', "micro=2"), "pp=2"),
    "context": (Net, "blocks.* context_parallel(ring, over=cp)", "cp=2"),
    "context, tensor": (
        Net,
        TENSOR_ROWS + "blocks.* context_parallel(gather, over=cp)",
        "cp=2, tp=2",
    ),
    "recurrent": (OtherDropouts, "zero(stage=2, over=dp)", "dp=2"),
    "recurrent, recomputed": (
        OtherDropouts,
        "{lstm,attend} checkpoint()\nzero(stage=0, over=dp)",
        "dp=2",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_replicas_draw_alike_and_all_others_apart(name: str, pool: Pool) -> None:
    """Two native steps draw where the proof does; all parts of a mask draw by one number."""
    make, rows, mesh = ROWS[name]
    plan = make_plan(make(), rows, mesh)
    for reason, count, mistakes in run_prepared(pool, check_masks, plan, _batch()):
        assert not reason and count and not mistakes, (reason, count, mistakes[:3])


# -- what is found ---------------------------------------------------------------------------------


def rank_draws(**changes: Any) -> RankDraws:
    """Return a rank that draws two masks for rows 0 and 1, with changes."""
    content = (0, (0, 1), "drop", 0, None), (1, (0, 1), "drop", 0, None)
    defaults: dict[str, Any] = {
        "begun": {content[0]: {0.1}, content[1]: {0.2}},
        "sites": [{("drop", 0): {0, 1}}] * 2,
        "logical": {("drop", 0): {0, 1}},
    }
    return RankDraws(**defaults | changes)


OTHER_ROWS = {(0, (2, 3), "drop", 0, None): {0.3}, (1, (2, 3), "drop", 0, None): {0.4}}
WRONG: dict[str, tuple[list[RankDraws], str]] = {
    "replicas apart": (
        [rank_draws(), rank_draws(begun={(0, (0, 1), "drop", 0, None): {0.5}})],
        "draws otherwise on ranks",
    ),
    "data ranks alike": (
        [rank_draws(), rank_draws(begun={(0, (2, 3), "drop", 0, None): {0.1}})],
        "draws as",
    ),
    "steps alike": (
        [rank_draws(begun={(k, (0, 1), "drop", 0, None): {0.1} for k in range(2)})],
        "draws as",
    ),
    "recomputed apart": (
        [rank_draws(begun={(0, (0, 1), "drop", 0, None): {0.1, 0.2}})],
        "when it is computed again",
    ),
    "not drawn": ([rank_draws(sites=[{}])], "not drawn in training"),
    "drawn once more": (
        [rank_draws(sites=[{("drop", 0): {0, 1}, ("drop", 1): {0, 1}}])],
        "drawn otherwise",
    ),
    "other rows": ([rank_draws(sites=[{("drop", 0): {0}}])], "drawn otherwise"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_told(name: str) -> None:
    """Wrong draws of some ranks are described; right ones give no text."""
    ranks, words = WRONG[name]
    assert any(words in text for text in describe_wrong_draws(ranks)), describe_wrong_draws(ranks)
    assert not describe_wrong_draws([rank_draws(), rank_draws(), rank_draws(begun=OTHER_ROWS)])


# -- what a user meets -----------------------------------------------------------------------------


def train_on_rank(
    plan: Any, prepared: Any, seed: int, count: int, first: int, options: Any
) -> tuple[Any, ...]:
    """On this rank: return losses of some steps, and the next number of the process's generator."""
    torch.manual_seed(seed + torch.distributed.get_rank())
    program = build(plan, _batch(), prepared=prepared, **options)
    program.step = first
    losses = [float(program.train_step(_batch())) for _ in range(count)]
    return losses, float(torch.rand(())), repr(program)


def train_steps(
    pool: Pool, plan: Any, seed: int = 5, count: int = 2, first: int = 0, **options: Any
):
    return run_prepared(pool, train_on_rank, plan, _batch(), seed, count, first, options)


def test_masks_follow_the_seed_and_the_step(pool: Pool) -> None:
    """Masks follow rank 0's seed; a run resumed at a step draws the masks of that step."""
    plan = make_plan(Net(), TENSOR_ROWS, "tp=2")
    losses, process_draw, _ = train_steps(pool, plan)[0]
    assert train_steps(pool, plan)[0][0] == losses  # without an optimizer only masks differ
    assert losses[0] != losses[1]
    assert train_steps(pool, plan, count=1, first=1)[0][0] == losses[1:]
    assert train_steps(pool, plan, seed=6)[0][0][0] != losses[0]
    torch.manual_seed(5)
    assert process_draw == float(torch.rand(()))  # the process's generator was not used


def test_both_ranks_see_one_loss(pool: Pool) -> None:
    """Ranks with different seeds agree on the masks that they share."""
    plan = make_plan(Net(), TENSOR_ROWS, "tp=2")
    rank0, rank1 = train_steps(pool, plan)
    assert rank0[0] == rank1[0]


def test_a_seed_asks_for_logical_masks(pool: Pool) -> None:
    """They do not depend on the layout: data parallelism gives the same loss."""
    losses = [
        train_steps(pool, make_plan(Net(), rows, mesh), dropout="logical")[0][0]
        for rows, mesh in ((TENSOR_ROWS, "tp=2"), ("zero(stage=0, over=dp)", "dp=2"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert train_steps(pool, make_plan(Net(), TENSOR_ROWS, "tp=2"))[0][0] != losses[0]


class FunctionDropout(SharedDropout):
    """Drops by a function, in the forward that calls the stages."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the loss; no module draws."""
        x = F.dropout(self.embed(ids), 0.2, self.training)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def test_what_all_stages_run_is_drawn_logically(pool: Pool) -> None:
    """The plan says so, and so does the program; training goes on."""
    from schedlang.passes.simulate.account import account

    plan = make_plan(FunctionDropout(), stages_rows('"1F1B"', "micro=2"), "pp=2")
    notes = account(plan, _batch()).notes
    reason = "`the model` draws between stages, which all of them run"
    assert f"dropout is drawn logically in training, too: {reason}" in notes
    assert reason in train_steps(pool, plan)[0][2]


def test_a_stage_that_drops_nothing_is_proven_with_the_rest(pool: Pool) -> None:
    """Its rank trains the steps whose masks are checked, since the others wait for it."""
    net = Net()
    net.blocks[1] = Block(on=0.0)
    plan = make_plan(net, stages_rows('"1F1B"', "micro=2"), "pp=2")
    report = prove(Case(plan, (_batch(), _batch()), dtype="none"), pool=pool)
    assert report.ok, str(report)
    assert any(row.kind == "native draws" for row in report.rows)


def test_one_rank_draws_as_torch_does() -> None:
    """No generator is seeded or restored, unless a seed is given."""
    plan = make_plan(Net(), "", "")
    assert build(plan, _batch()).assembly.dropout is None
    seeded = build(plan, _batch(), seed=3, dropout="native")
    assert isinstance(seeded.assembly.dropout, NativeDropout)
    torch.manual_seed(1)
    loss = seeded.train_step(_batch())
    seeded.step = 0
    torch.manual_seed(2)
    assert torch.equal(loss, seeded.train_step(_batch()))


# -- compiled regions ------------------------------------------------------------------------------

compiles = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


class DropoutMlp(nn.Module):
    """Drops inside, where hidden sizes may be split, and optionally its output."""

    def __init__(self, last: float) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(16, 32), nn.Linear(32, 16), last

    def forward(self, x: Tensor) -> Tensor:
        """Return up, drop, down."""
        y = self.down(F.dropout(torch.tanh(self.up(x)), 0.2, self.training))
        return F.dropout(y, self.last, self.training) if self.last else y


class FusedMlps(nn.Module):
    """Tokens, two such MLPs with shortcuts, a loss."""

    def __init__(self, last: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList(DropoutMlp(last) for _ in range(2))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def fuse_on_rank(plan: Any) -> tuple[int, list[str], list[float]]:
    """On this rank: return the compiled regions, the reasons of eager ones, losses of two steps."""
    program = build(plan, _batch(), seed=3, dropout="native")
    losses = [float(program.train_step(_batch())) for _ in range(2)]
    module = program.assembly.module
    layers = [
        layer_list.kinds.get("fuse") for part in module.modules() if (layer_list := layers_of(part))
    ]
    compiled = sum(getattr(layer, "compiled", None) is not None for layer in layers)
    return compiled, [part.reason for part in declined_in(module)], losses


FUSED = "blocks.* fuse()\n"
SPLIT = "blocks.*.up shard(col, over=tp)\nblocks.*.down shard(row, over=tp)\n"


@compiles
@pytest.mark.parametrize(
    "rows, more, mesh",
    [
        ("", "zero(stage=0, over=dp)", "dp=2"),
        pytest.param(SPLIT, "", "tp=2", marks=pytest.mark.deep),
        pytest.param("", stages_rows('"1F1B"', "micro=2"), "pp=2", marks=pytest.mark.deep),
    ],
    ids=["data", "tensor", "pipeline"],
)
def test_a_region_compiles_and_draws_as_without(
    rows: str, more: str, mesh: str, pool: Pool
) -> None:
    """On several ranks it draws exactly the masks of the schedule without the row."""
    unfused, fused = (make_plan(FusedMlps(), row + rows + more, mesh) for row in ("", FUSED))
    for (_, _, losses), (compiled, eager, fused_losses) in zip(
        pool.run(fuse_on_rank, 2, unfused), pool.run(fuse_on_rank, 2, fused), strict=True
    ):
        assert compiled == (1 if "pipeline" in more else 2) and not eager
        assert fused_losses == pytest.approx(losses, rel=1e-5)


def test_a_region_that_draws_both_ways_says_that_it_runs_eagerly(pool: Pool) -> None:
    """It drops split and full tensors: it is not compiled, and the program says why."""
    plan = make_plan(FusedMlps(0.3), FUSED + SPLIT, "tp=2")
    bare = make_plan(FusedMlps(0.3), SPLIT, "tp=2")
    (compiled, eager, losses), _ = pool.run(fuse_on_rank, 2, plan)
    assert compiled == 0 and "some masks equal on all ranks, and others different" in eager[0]
    assert losses == pool.run(fuse_on_rank, 2, bare)[0][2]


# -- what it costs ---------------------------------------------------------------------------------


def count_calls(plan: Any) -> int:
    """Return how many Python functions a warm step calls on this rank."""
    program, count = build(plan, _batch(), optimizer=sgd), 0

    def called(frame: Any, event: str, value: Any) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(2):
        program.train_step(_batch())
    gc.collect()
    gc.disable()  # finalizers of earlier programs are called, too
    sys.setprofile(called)
    try:
        program.train_step(_batch())
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_step_that_drops_calls_no_more_than_one_that_does_not(pool: Pool) -> None:
    """Except for its seed: a model whose rates are all 0 calls the same functions."""
    plans = [make_plan(Net(on=on), "zero(stage=0, over=dp)", "dp=2") for on in (1.0, 0.0)]
    dropping, without = (pool.run(count_calls, 2, plan)[0] for plan in plans)
    assert without < dropping <= without + 40, (dropping, without)


def test_what_stands_for_another_stage_draws_nothing() -> None:
    """A placeholder of one NaN is the same under any mask; all else is dropped out."""
    inner = partial(nn.Dropout.forward, nn.Dropout(0.5))
    nan = torch.full((), torch.nan)
    assert _is_nan_placeholder(inner, (nan.expand(2, 3),), {})
    for tensor in (nan.expand(2, 3).clone(), torch.ones(()).expand(2, 3), nan):
        assert not _is_nan_placeholder(inner, (tensor,), {})
    assert not _is_nan_placeholder(
        partial(nn.Linear.forward, nn.Linear(3, 3)), (nan.expand(2, 3),), {}
    )
