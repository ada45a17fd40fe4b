"""Tests of native draws: who draws alike and who apart, under every kind of row, with no reruns."""

from __future__ import annotations

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
from tests.proofs import planned, sgd

TP = """blocks.*.{q,k,v,up} shard(col, over=tp)
blocks.*.{o,down} shard(row, over=tp)
"""
SP = """blocks.0 shard(input=S(seq), over=tp)
blocks.*.norm shard(input=S(seq), output=S(seq), over=tp)
blocks.*.{q,k,v} shard(col, over=tp)
blocks.*.o shard(row, output=S(seq), over=tp)
blocks.*.up shard(col, input=R, over=tp)
blocks.*.down shard(row, output=S(seq), over=tp)
head shard(input=R, over=tp)
"""


class Block(nn.Module):
    """Attention that drops weights, and an MLP that drops twice in the block's own forward."""

    def __init__(self, width: int = 16, size: int = 4, on: float = 1.0) -> None:
        super().__init__()
        self.size, self.on = size, on
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        self.o, self.drop = nn.Linear(width, width), nn.Dropout(0.2 * on)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Pre-norm, both halves."""
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        rate = 0.1 * self.on if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.drop(self.o(seen.transpose(1, 2).flatten(2)))
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
        """The loss."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}


class Others(nn.Module):
    """An LSTM that drops between its layers, and torch's own multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.lstm = nn.LSTM(16, 16, 3, dropout=0.3, batch_first=True)
        self.attend = nn.MultiheadAttention(16, 4, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """The loss."""
        x = self.lstm(self.embed(ids))[0]
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


class Shared(nn.Module):
    """One dropout before the blocks and behind them, as T5 has it: in a pipeline, between units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop = nn.Embedding(11, 16), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """The first dropout's result is needed at the end, too."""
        x = first = self.drop(self.embed(ids))
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.drop(x + first)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def _batch() -> dict[str, Tensor]:
    return {"ids": torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(1))}


def drawn(plan: Any) -> tuple[str, int, list[str]]:
    """One rank: why not natively, the masks of two native steps, and what is wrong with them."""
    program = build(plan, _batch(), optimizer=sgd, seed=0)
    dropout = program.assembly.dropout
    assert dropout is not None
    dropout.noted = {}
    program.train_step(_batch())
    count, wrong = check_native_draws(program, _batch()) or (0, ["nothing is drawn natively"])
    return program.assembly.logical_dropout_reason, count, wrong


def _pipe(order: str, *more: str) -> str:
    return f"blocks pipeline_split(over=pp)\npipeline(order={order}, {', '.join(more)})\n"


ROWS = {
    "data": (Net, "zero(stage=0, over=dp)", "dp=2"),
    "zero 1": (Net, "zero(stage=1, over=dp)", "dp=2"),
    "zero 2": (Net, "zero(stage=2, over=dp)", "dp=2"),
    "zero 3": (Net, "zero(stage=3, over=dp)", "dp=2"),
    "tensor": (Net, TP, "tp=2"),
    "tensor, data, recomputed": (
        Net,
        TP + "blocks.* checkpoint()\nzero(stage=1, over=dp)",
        "dp=2, tp=2",
    ),
    "sequence": (Net, SP, "tp=2"),
    "recomputed": (Net, "blocks.* checkpoint()\nzero(stage=3, over=dp)", "dp=2"),
    "attention kept": (
        Net,
        "blocks.* checkpoint(save=[attention])\nzero(stage=0, over=dp)",
        "dp=2",
    ),
    "offloaded": (Net, "blocks.* offload(activations)\nzero(stage=0, over=dp)", "dp=2"),
    "accumulated": (Net, "zero(stage=0, over=dp)\npipeline(order=GPipe, micro=2)", "dp=2"),
    "1F1B": (Net, _pipe('"1F1B"', "micro=4"), "pp=2"),
    "1F1B, tensor": (Net, TP + _pipe('"1F1B"', "micro=2"), "pp=2, tp=2"),
    "interleaved": (lambda: Net(4), _pipe("Interleaved1F1B", "micro=4", "chunks=2"), "pp=2"),
    "stages run again": (Net, _pipe("Varuna", "micro=4"), "pp=2"),
    "halves": (Net, _pipe('"ZB-H1"', "micro=4"), "pp=2"),
    "between stages": (Shared, _pipe('"1F1B"', "micro=2"), "pp=2"),
    "context": (Net, "blocks.* context_parallel(ring, over=cp)", "cp=2"),
    "context, tensor": (Net, TP + "blocks.* context_parallel(gather, over=cp)", "cp=2, tp=2"),
    "recurrent": (Others, "zero(stage=2, over=dp)", "dp=2"),
    "recurrent, recomputed": (Others, "{lstm,attend} checkpoint()\nzero(stage=0, over=dp)", "dp=2"),
}


@pytest.mark.parametrize("name", ROWS)
def test_replicas_draw_alike_and_all_others_apart(name: str, pool: Pool) -> None:
    """Two native steps draw at the places of the proof, each part of a mask from one number."""
    make, rows, mesh = ROWS[name]
    plan = planned(make(), rows, mesh)
    for why, count, wrong in pool.run(drawn, plan.mesh.world, plan):
        assert not why and count and not wrong, (why, count, wrong[:3])


# -- what is found ---------------------------------------------------------------------------------


def _mine(**changes: Any) -> RankDraws:
    """A rank that draws two masks for rows 0 and 1, and what differs of it."""
    content = (0, (0, 1), "drop", 0, None), (1, (0, 1), "drop", 0, None)
    given: dict[str, Any] = {
        "begun": {content[0]: {0.1}, content[1]: {0.2}},
        "sites": [{("drop", 0): {0, 1}}] * 2,
        "logical": {("drop", 0): {0, 1}},
    }
    return RankDraws(**given | changes)


OTHER_ROWS = {(0, (2, 3), "drop", 0, None): {0.3}, (1, (2, 3), "drop", 0, None): {0.4}}
WRONG: dict[str, tuple[list[RankDraws], str]] = {
    "replicas apart": (
        [_mine(), _mine(begun={(0, (0, 1), "drop", 0, None): {0.5}})],
        "draws otherwise on ranks",
    ),
    "data ranks alike": ([_mine(), _mine(begun={(0, (2, 3), "drop", 0, None): {0.1}})], "draws as"),
    "steps alike": (
        [_mine(begun={(k, (0, 1), "drop", 0, None): {0.1} for k in range(2)})],
        "draws as",
    ),
    "recomputed apart": (
        [_mine(begun={(0, (0, 1), "drop", 0, None): {0.1, 0.2}})],
        "when it is computed again",
    ),
    "not drawn": ([_mine(sites=[{}])], "not drawn in training"),
    "drawn once more": (
        [_mine(sites=[{("drop", 0): {0, 1}, ("drop", 1): {0, 1}}])],
        "drawn otherwise",
    ),
    "other rows": ([_mine(sites=[{("drop", 0): {0}}])], "drawn otherwise"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_told(name: str) -> None:
    """What is wrong with the draws of some ranks is said; right ones have nothing to be said."""
    everyone, words = WRONG[name]
    assert any(words in said for said in describe_wrong_draws(everyone)), describe_wrong_draws(
        everyone
    )
    assert not describe_wrong_draws([_mine(), _mine(), _mine(begun=OTHER_ROWS)])


# -- what a user meets -----------------------------------------------------------------------------


def _steps(plan: Any, seed: int, count: int, first: int, options: Any) -> tuple[Any, ...]:
    """On this rank: losses of some steps, and what the process's own generator gives then."""
    torch.manual_seed(seed + torch.distributed.get_rank())
    program = build(plan, _batch(), **options)
    program.step = first
    losses = [float(program.train_step(_batch())) for _ in range(count)]
    return losses, float(torch.rand(())), repr(program)


def _trained(pool: Pool, plan: Any, seed: int = 5, count: int = 2, first: int = 0, **options: Any):
    return pool.run(_steps, plan.mesh.world, plan, seed, count, first, options)


def test_masks_follow_the_seed_and_the_step(pool: Pool) -> None:
    """From rank 0's seed; a run that goes on at a step draws what it would have drawn there."""
    plan = planned(Net(), TP, "tp=2")
    losses, own, _ = _trained(pool, plan)[0]
    assert _trained(pool, plan)[0][0] == losses  # without an optimizer: masks alone make them apart
    assert losses[0] != losses[1]
    assert _trained(pool, plan, count=1, first=1)[0][0] == losses[1:]
    assert _trained(pool, plan, seed=6)[0][0][0] != losses[0]
    torch.manual_seed(5)
    assert own == float(torch.rand(()))  # the process's generator stands where it stood


def test_both_ranks_see_one_loss(pool: Pool) -> None:
    """Ranks that were seeded apart agree on the masks that they share."""
    plan = planned(Net(), TP, "tp=2")
    first, second = _trained(pool, plan)
    assert first[0] == second[0]


def test_a_seed_asks_for_logical_masks(pool: Pool) -> None:
    """They do not depend on the layout: the loss is that of data parallelism, too."""
    losses = [
        _trained(pool, planned(Net(), rows, mesh), dropout="logical")[0][0]
        for rows, mesh in ((TP, "tp=2"), ("zero(stage=0, over=dp)", "dp=2"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert _trained(pool, planned(Net(), TP, "tp=2"))[0][0] != losses[0]


class Loose(Shared):
    """Drops by a function, in the forward that calls the stages."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """No module of its own draws."""
        x = F.dropout(self.embed(ids), 0.2, self.training)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def test_what_all_stages_run_is_drawn_logically(pool: Pool) -> None:
    """The plan says so, and the program; training goes on."""
    from schedlang.passes.simulate.account import account

    plan = planned(Loose(), _pipe('"1F1B"', "micro=2"), "pp=2")
    notes = account(plan, _batch()).notes
    why = "`the model` draws between stages, which all of them run"
    assert f"dropout is drawn logically in training, too: {why}" in notes
    assert why in _trained(pool, plan)[0][2]


def test_a_stage_that_drops_nothing_is_proven_with_the_rest(pool: Pool) -> None:
    """Its rank trains the steps whose draws are judged, in which the others wait for it."""
    net = Net()
    net.blocks[1] = Block(on=0.0)
    plan = planned(net, _pipe('"1F1B"', "micro=2"), "pp=2")
    report = prove(Case(plan, (_batch(), _batch()), dtype="none"), pool=pool)
    assert report.ok, str(report)
    assert any(row.kind == "native draws" for row in report.rows)


def test_one_rank_draws_as_torch_does() -> None:
    """Nothing is seeded, nothing put back, unless it is asked for."""
    plan = planned(Net(), "", "")
    assert build(plan, _batch()).assembly.dropout is None
    asked = build(plan, _batch(), seed=3, dropout="native")
    assert isinstance(asked.assembly.dropout, NativeDropout)
    torch.manual_seed(1)
    first = asked.train_step(_batch())
    asked.step = 0
    torch.manual_seed(2)
    assert torch.equal(first, asked.train_step(_batch()))


# -- compiled regions ------------------------------------------------------------------------------

compiles = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


class Mlp(nn.Module):
    """Drops inside, where hidden sizes may be split, and, if asked for, what comes out."""

    def __init__(self, last: float) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(16, 32), nn.Linear(32, 16), last

    def forward(self, x: Tensor) -> Tensor:
        """Up, drop, down."""
        y = self.down(F.dropout(torch.tanh(self.up(x)), 0.2, self.training))
        return F.dropout(y, self.last, self.training) if self.last else y


class Fused(nn.Module):
    """Tokens, two such MLPs with shortcuts, a loss."""

    def __init__(self, last: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList(Mlp(last) for _ in range(2))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """The loss."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def _fused(plan: Any) -> tuple[int, list[str], list[float]]:
    """On this rank: regions that ran compiled, what ran eagerly and why, losses of two steps."""
    program = build(plan, _batch(), seed=3, dropout="native")
    losses = [float(program.train_step(_batch())) for _ in range(2)]
    module = program.assembly.module
    layers = [found.kinds.get("fuse") for one in module.modules() if (found := layers_of(one))]
    ran = sum(getattr(layer, "compiled", None) is not None for layer in layers)
    return ran, [one.reason for one in declined_in(module)], losses


FUSED = "blocks.* fuse()\n"
SPLIT = "blocks.*.up shard(col, over=tp)\nblocks.*.down shard(row, over=tp)\n"


@compiles
@pytest.mark.parametrize(
    "rows, more, mesh",
    [
        ("", "zero(stage=0, over=dp)", "dp=2"),
        pytest.param(SPLIT, "", "tp=2", marks=pytest.mark.deep),
        pytest.param("", _pipe('"1F1B"', "micro=2"), "pp=2", marks=pytest.mark.deep),
    ],
    ids=["data", "tensor", "pipeline"],
)
def test_a_region_compiles_and_draws_as_without(
    rows: str, more: str, mesh: str, pool: Pool
) -> None:
    """In training on several ranks, with the very masks of the schedule without the row."""
    plain, fused = (planned(Fused(), row + rows + more, mesh) for row in ("", FUSED))
    for (_, _, losses), (made, left, found) in zip(
        pool.run(_fused, 2, plain), pool.run(_fused, 2, fused), strict=True
    ):
        assert made == (1 if "pipeline" in more else 2) and not left
        assert found == pytest.approx(losses, rel=1e-5)


def test_a_region_that_draws_both_ways_says_that_it_runs_eagerly(pool: Pool) -> None:
    """It drops what is split and what is whole: no graph, and the reason."""
    plan = planned(Fused(0.3), FUSED + SPLIT, "tp=2")
    bare = planned(Fused(0.3), SPLIT, "tp=2")
    (made, left, losses), _ = pool.run(_fused, 2, plan)
    assert made == 0 and "some masks equal on all ranks, and others different" in left[0]
    assert losses == pool.run(_fused, 2, bare)[0][2]


# -- what it costs ---------------------------------------------------------------------------------


def _calls(plan: Any) -> int:
    """Python functions that a step calls on this rank, once all is warm."""
    program, count = build(plan, _batch(), optimizer=sgd), 0

    def called(frame: Any, event: str, value: Any) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(2):
        program.train_step(_batch())
    sys.setprofile(called)
    try:
        program.train_step(_batch())
    finally:
        sys.setprofile(None)
    return count


def test_a_step_that_drops_calls_no_more_than_one_that_does_not(pool: Pool) -> None:
    """But for its seed: a model whose rates are all 0 calls the same functions."""
    plans = [planned(Net(on=on), "zero(stage=0, over=dp)", "dp=2") for on in (1.0, 0.0)]
    dropping, without = (pool.run(_calls, 2, plan)[0] for plan in plans)
    assert without < dropping <= without + 40, (dropping, without)


def test_what_stands_for_another_stage_draws_nothing() -> None:
    """One NaN everywhere is the same under any mask; all else is dropped out."""
    inner = partial(nn.Dropout.forward, nn.Dropout(0.5))
    nan = torch.full((), torch.nan)
    assert _is_nan_placeholder(inner, (nan.expand(2, 3),), {})
    for other in (nan.expand(2, 3).clone(), torch.ones(()).expand(2, 3), nan):
        assert not _is_nan_placeholder(inner, (other,), {})
    assert not _is_nan_placeholder(
        partial(nn.Linear.forward, nn.Linear(3, 3)), (nan.expand(2, 3),), {}
    )
