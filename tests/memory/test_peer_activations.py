"""Activations on the next rank of a pipeline: the same bits, counted, freed here, and refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.passes.simulate.account import account
from schedlang.pipeline.schedules import make_order
from schedlang.pipeline.timeline.memory import with_evictions
from schedlang.pipeline.timeline.proof import check_timeline, with_transfers
from schedlang.pipeline.timeline.table import Kind, Timeline
from schedlang.runtime.storage.tiers import TierCounter
from tests import models
from tests.drawn_orders import drawn
from tests.engine import Threads
from tests.memory.test_peer_state import built
from tests.memory.test_residence import BATCHES, words
from tests.proofs import adamw, assert_same, planned, proven, refused, sgd, trained

CUT = "layers pipeline_split(over=pp)\n"
PIPE = CUT + 'pipeline(order="1F1B", micro=4)'
ROUNDS = CUT + 'pipeline(order="Interleaved1F1B", micro=4, chunks=2)'
FIRST = "layers[0] offload(activations, to=peer, over=pp, prefetch=0)\n"
EACH = "layers.* offload(activations, to=peer, over=pp)\n"
WHOLE = "offload(activations, to=peer, over=pp)\n"
SPLIT = "layers.*.up shard(col, over=tp)\nlayers.*.down shard(row, over=tp)\n"


@pytest.mark.parametrize(
    "before, rows, after, mesh",
    [
        ("", FIRST, PIPE, "pp=2"),
        ("", WHOLE, PIPE, "pp=3"),
        ("", "layers.*.up offload(activations, to=peer, over=pp, prefetch=0)\n", PIPE, "pp=2"),
        ("layers.*.up checkpoint()\n", EACH, ROUNDS, "pp=2"),
        ("layers.* checkpoint()\n", EACH, PIPE.replace("1F1B", "GPipe"), "pp=2"),
        (
            "layers.* checkpoint()\n",
            "layers.*.up offload(activations, to=peer, over=pp)\n",
            PIPE,
            "pp=2",
        ),
        (SPLIT, EACH, PIPE, "pp=2, tp=2"),
        (
            "",
            EACH.replace("pp)", "pp, prefetch=0)"),
            f'{CUT}zero(stage=3, over=dp)\npipeline(order="1F1B", micro=2)',
            "pp=2, dp=2",
        ),
        ("", EACH, "offload(parameters)\n" + PIPE, "pp=2"),
        ("", EACH, PIPE.replace("1F1B", "ZB-H1"), "pp=2"),
        ("", EACH, "offload(optimizer, to=peer, over=pp)\n" + PIPE, "pp=2"),
        ("layers[2] checkpoint()\n", FIRST + "layers[1] offload(activations)\n", PIPE, "pp=2"),
        ("layers[2] compress(activations, int8)\n", EACH, PIPE, "pp=2"),
    ],
    ids=[
        "first",
        "ring",
        "inside",
        "rounds",
        "checkpoint",
        "inside of a checkpoint",
        "tensor",
        "zero",
        "streamed",
        "halves",
        "state",
        "mixed",
        "rounded",
    ],
)
def test_same_bits_as_at_home(
    threads: Threads, before: str, rows: str, after: str, mesh: str
) -> None:
    """Losses, gradients, norms, weights and state of three clipped steps are those of no rows."""
    layers, relax = 4 if after == ROUNDS else 3, "lossy" if "compress" in before else ""
    seen, plain = (
        trained(
            threads,
            planned(words(layers), before + r + after, mesh, relax),
            BATCHES,
            adamw,
            clip=0.5,
        )
        for r in (rows, "")
    )
    assert_same(seen, plain)


@pytest.mark.deep
def test_same_bits_in_processes(pool: Any) -> None:
    """Over gloo between two processes, both of which send and hold, as between threads."""
    seen, plain = (trained(pool, planned(words(), r + PIPE, "pp=2"), BATCHES) for r in (EACH, ""))
    assert_same(seen, plain)


@pytest.mark.parametrize("base", [PIPE, ROUNDS], ids=["1F1B", "interleaved"])
def test_proven(threads: Threads, base: str) -> None:
    """A pipeline that gives activations away trains as the original, in float64."""
    rows = (EACH + base).replace("layers", "transformer.h")
    proven(
        threads, planned(models.gpt2(), rows, "pp=2"), [models.tokens(9), models.tokens(10, seed=2)]
    )


# -- what lies where -------------------------------------------------------------------------------


def wide() -> nn.Module:
    """Four layers whose activations are most of what a rank holds."""
    layers = (nn.Sequential(nn.Tanh(), nn.Linear(64, 64)) for _ in range(4))
    return models.Stack(layers, "layers")


def points() -> dict[str, Tensor]:
    """Enough rows that parameters are few beside them."""
    return {"x": torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))}


def held(plan: Any) -> tuple[dict[str, int], int]:
    """On a rank: the most bytes on each tier in a step, and what of a microbatch left."""
    program = build(plan, points(), optimizer=adamw)
    program.train_step(points())
    with TierCounter() as seen:
        program.train_step(points())
    parking = program.assembly.pipeline.parking
    left = {} if parking is None else parking.sent
    return dict(seen.ledger.peak), max(left.values(), default=0)


@pytest.mark.parametrize("order", ["1F1B", "GPipe"])
def test_the_giver_holds_less(threads: Threads, order: str) -> None:
    """The first rank's peak falls by what it gives but for one microbatch's; the next holds it."""
    base = PIPE.replace("1F1B", order)
    rows = "layers[:2] offload(activations, to=peer, over=pp, prefetch=0)\n"
    plain, given = (threads.run(held, 2, planned(wide(), r + base, "pp=2")) for r in ("", rows))
    size = given[0][1]
    there = 2 if order == "1F1B" else 4  # microbatches that lie with the peer at a time, at most
    assert size > 500_000
    assert plain[0][0]["device"] - given[0][0]["device"] > 0.8 * (there - 1) * size
    assert plain[1][0]["peer"] == 0 and given[0][0]["peer"] == 0
    assert given[1][0]["peer"] == there * size
    assert given[1][0]["device"] <= plain[1][0]["device"]


def test_the_plan_counts_what_is_sent(threads: Threads) -> None:
    """Bytes out and home, as many as the program sends; the giver's peak in the plan falls."""
    rows = "layers[:2] offload(activations, to=peer, over=pp, prefetch=0)\n"
    plans = [planned(wide(), r + PIPE, "pp=2") for r in ("", rows)]
    plain, given = (account(plan, points(), memory=True) for plan in plans)
    assert given.collectives is not None and plain.memory and given.memory
    mine = {c.what: c for c in given.collectives if "activations" in c.what}
    out, home = mine["activations to a peer"], mine["activations to their owner"]
    size = threads.run(held, 2, plans[1])[0][1]
    assert (out.bytes, out.places, out.to) == (size, frozenset({0}), 1)
    assert (home.total, home.places, home.to) == (out.total, frozenset({1}), 0)
    assert given.timeline is not None
    assert out.count == int((given.timeline.kind == Kind.EVICT).sum()) == 4
    assert plain.memory[0].peak - given.memory[0].peak > 0.8 * size
    assert given.memory[1].peak > plain.memory[1].peak


# -- the order -------------------------------------------------------------------------------------


def away(t: Timeline) -> list[tuple[int, int, int]]:
    """Of each row that parks: its rank, the rows until it is called back, and from then on."""
    found = []
    for rank in range(t.ranks):
        rows = t.rows(rank)
        for k, op in enumerate(rows):
            if op.kind is Kind.EVICT:
                kinds = (op._replace(kind=kind) for kind in (Kind.LOAD,))
                back = rows.index(next(kinds))
                used = next(
                    n
                    for n, one in enumerate(rows)
                    if one.kind in (Kind.B, Kind.I) and one[1:5] == op[1:5]
                )
                between = [one for one in rows[back:used] if one.kind not in PARKS]
                found.append((rank, back - k, len(between)))
    return found


PARKS = (Kind.EVICT, Kind.LOAD)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_called_back_in_time(ahead: int) -> None:
    """So many operations before the backward, in any order; what would not be away stays."""
    for seed in range(20):
        homes = ((0, 1, 2), (2, 1, 0)) if seed % 2 else ((0, 1, 2, 0, 1, 2),)
        edges = [(s, s + 1) for s in range(len(homes[0]) - 1)]
        plain = drawn(random.Random(seed), homes, 5, edges)
        made = with_evictions(plain, {0: ahead, 2: ahead})
        check_timeline(with_transfers(made))
        assert all(gone > 1 and early == ahead for _, gone, early in away(made))
        stays = made.pick((made.kind != Kind.EVICT) & (made.kind != Kind.LOAD))
        assert stays == plain
        assert set(made.stage[made.kind == Kind.EVICT].tolist()) <= {0, 2}
    assert with_evictions(plain, {}) is plain


def test_the_ring_gives_to_the_next() -> None:
    """The last rank's partner is the first."""
    made = with_evictions(make_order("GPipe", 3, 4), {0: 0, 1: 0, 2: 0})
    sent = made.kind == Kind.EVICT
    assert ((made.rank[sent] + 1) % 3 == made.peer[sent]).all() and len(set(made.rank[sent])) == 3


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, mesh, said",
    [
        ("layers[0] offload(activations, to=peer)", "pp=2", ("S851", "over=pp")),
        (
            "layers[0] offload(gradients, to=peer, over=pp)",
            "pp=2",
            ("S851", "would send them, 18.9 KiB", "zero(stage=2"),
        ),
        (
            "layers[0] offload(parameters, to=peer, over=pp)",
            "pp=2",
            ("S851", "fetch them twice, 18.9 KiB", "zero(stage=3"),
        ),
    ],
)
def test_refused(rows: str, mesh: str, said: tuple[str, ...]) -> None:
    """Half a row, and what no peer holds, each with its reason."""
    told = refused(words(), rows, mesh)
    assert all(word in told for word in said), told


@pytest.mark.parametrize(
    "rows, mesh, said",
    [
        (
            "layers[0] offload(activations, to=peer, over=dp)\nzero(stage=0, over=dp)",
            "dp=2",
            ("S851", "none would hold less", "checkpoint()"),
        ),
        (
            FIRST + PIPE.replace("1F1B", "BPipe"),
            "pp=4",
            ("S851", "already decides what happens", "EVICT"),
        ),
        (
            FIRST + PIPE.replace("1F1B", "Varuna"),
            "pp=2",
            ("S851", "already decides what happens", "RECOMPUTE"),
        ),
    ],
    ids=["axis", "parks", "again"],
)
def test_refused_when_built(threads: Threads, rows: str, mesh: str, said: tuple[str, ...]) -> None:
    """Where nothing is gained, and where the order says itself what its forwards keep."""
    plan = planned(words(4, tied=False), rows, mesh)
    for told in threads.run(built, plan.mesh.world, plan, sgd):
        assert all(word in told for word in said), told


def test_an_axis_of_one_has_no_peer() -> None:
    """On one rank of a pipeline the row does nothing."""
    plan = planned(words(), EACH + PIPE, "pp=1")
    assert account(plan, BATCHES[0]).timeline is None
    build(plan, BATCHES[0], optimizer=adamw).train_step(BATCHES[0])
