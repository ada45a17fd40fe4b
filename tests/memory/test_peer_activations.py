"""Activations offloaded to a pipeline peer: equal training, bytes, order, refusals."""

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
from tests.engine import Threads
from tests.memory.test_offloaded_state import BATCHES, language_model
from tests.memory.test_peer_state import build_refusal
from tests.proofs import (
    adamw,
    assert_proven,
    assert_same,
    make_plan,
    refusal_text,
    sgd,
    train_on_ranks,
)
from tests.random_orders import random_timeline

STAGE_SPLIT = "layers pipeline_split(over=pp)\n"
PIPELINE = STAGE_SPLIT + 'pipeline(order="1F1B", micro=4)'
INTERLEAVED = STAGE_SPLIT + 'pipeline(order="Interleaved1F1B", micro=4, chunks=2)'
FIRST_LAYER = "layers[0] offload(activations, to=peer, over=pp, prefetch=0)\n"
EACH_LAYER = "layers.* offload(activations, to=peer, over=pp)\n"
WHOLE_MODEL = "offload(activations, to=peer, over=pp)\n"
TENSOR_PARALLEL = "layers.*.up shard(col, over=tp)\nlayers.*.down shard(row, over=tp)\n"


@pytest.mark.parametrize(
    "before, rows, after, mesh",
    [
        ("", FIRST_LAYER, PIPELINE, "pp=2"),
        ("", WHOLE_MODEL, PIPELINE, "pp=3"),
        ("", "layers.*.up offload(activations, to=peer, over=pp, prefetch=0)\n", PIPELINE, "pp=2"),
        ("layers.*.up checkpoint()\n", EACH_LAYER, INTERLEAVED, "pp=2"),
        ("layers.* checkpoint()\n", EACH_LAYER, PIPELINE.replace("1F1B", "GPipe"), "pp=2"),
        (
            "layers.* checkpoint()\n",
            "layers.*.up offload(activations, to=peer, over=pp)\n",
            PIPELINE,
            "pp=2",
        ),
        (TENSOR_PARALLEL, EACH_LAYER, PIPELINE, "pp=2, tp=2"),
        (
            "",
            EACH_LAYER.replace("pp)", "pp, prefetch=0)"),
            f'{STAGE_SPLIT}zero(stage=3, over=dp)\npipeline(order="1F1B", micro=2)',
            "pp=2, dp=2",
        ),
        ("", EACH_LAYER, "offload(parameters)\n" + PIPELINE, "pp=2"),
        ("", EACH_LAYER, PIPELINE.replace("1F1B", "ZB-H1"), "pp=2"),
        ("", EACH_LAYER, "offload(optimizer, to=peer, over=pp)\n" + PIPELINE, "pp=2"),
        (
            "layers[2] checkpoint()\n",
            FIRST_LAYER + "layers[1] offload(activations)\n",
            PIPELINE,
            "pp=2",
        ),
        ("layers[2] compress(activations, int8)\n", EACH_LAYER, PIPELINE, "pp=2"),
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
    """Losses, gradients, norms, weights and state of three clipped steps are bitwise equal."""
    layers, relax = 4 if after == INTERLEAVED else 3, "lossy" if "compress" in before else ""
    evicted, plain = (
        train_on_ranks(
            threads,
            make_plan(language_model(layers), before + r + after, mesh, relax),
            BATCHES,
            adamw,
            clip=0.5,
        )
        for r in (rows, "")
    )
    assert_same(evicted, plain)


@pytest.mark.deep
def test_same_bits_in_processes(pool: Any) -> None:
    """With gloo between two processes, both of which send and store."""
    evicted, plain = (
        train_on_ranks(pool, make_plan(language_model(), r + PIPELINE, "pp=2"), BATCHES)
        for r in (EACH_LAYER, "")
    )
    assert_same(evicted, plain)


@pytest.mark.parametrize("base", [PIPELINE, INTERLEAVED], ids=["1F1B", "interleaved"])
def test_proven(threads: Threads, base: str) -> None:
    """A pipeline that sends activations away trains as the original, in float64."""
    rows = (EACH_LAYER + base).replace("layers", "transformer.h")
    assert_proven(
        threads,
        make_plan(models.gpt2(), rows, "pp=2"),
        [models.tokens(9), models.tokens(10, seed=2)],
    )


# -- what lies where -------------------------------------------------------------------------------


def wide_model() -> nn.Module:
    """Return four layers whose activations are most of a rank's memory."""
    layers = (nn.Sequential(nn.Tanh(), nn.Linear(64, 64)) for _ in range(4))
    return models.Stack(layers, "layers")


def random_batch() -> dict[str, Tensor]:
    """Return so many rows that parameters are small beside them."""
    return {"x": torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))}


def tier_peaks(plan: Any) -> tuple[dict[str, int], int]:
    """Return on a rank the peak bytes of each tier in a step, and the bytes sent for a
    microbatch."""
    program = build(plan, random_batch(), optimizer=adamw)
    program.train_step(random_batch())
    with TierCounter() as counter:
        program.train_step(random_batch())
    parking = program.assembly.pipeline.parking
    sent_bytes = {} if parking is None else parking.sent
    return dict(counter.ledger.peak), max(sent_bytes.values(), default=0)


@pytest.mark.parametrize("order", ["1F1B", "GPipe"])
def test_the_giver_holds_less(threads: Threads, order: str) -> None:
    """The sender's peak falls by what it sends, except one microbatch; the peer's rises."""
    base = PIPELINE.replace("1F1B", order)
    rows = "layers[:2] offload(activations, to=peer, over=pp, prefetch=0)\n"
    plain, evicted = (
        threads.run(tier_peaks, 2, make_plan(wide_model(), r + base, "pp=2")) for r in ("", rows)
    )
    size = evicted[0][1]
    stored = 2 if order == "1F1B" else 4  # the most microbatches at the peer at one time
    assert size > 500_000
    assert plain[0][0]["device"] - evicted[0][0]["device"] > 0.8 * (stored - 1) * size
    assert plain[1][0]["peer"] == 0 and evicted[0][0]["peer"] == 0
    assert evicted[1][0]["peer"] == stored * size
    assert evicted[1][0]["device"] <= plain[1][0]["device"]


def test_the_plan_counts_what_is_sent(threads: Threads) -> None:
    """Bytes sent and returned are the program's; the sender's estimated peak falls."""
    rows = "layers[:2] offload(activations, to=peer, over=pp, prefetch=0)\n"
    plans = [make_plan(wide_model(), r + PIPELINE, "pp=2") for r in ("", rows)]
    plain, evicted = (account(plan, random_batch(), memory=True) for plan in plans)
    assert evicted.collectives is not None and plain.memory and evicted.memory
    transfers = {c.what: c for c in evicted.collectives if "activations" in c.what}
    to_peer, to_owner = transfers["activations to a peer"], transfers["activations to their owner"]
    size = threads.run(tier_peaks, 2, plans[1])[0][1]
    assert (to_peer.bytes, to_peer.places, to_peer.to) == (size, frozenset({0}), 1)
    assert (to_owner.total, to_owner.places, to_owner.to) == (to_peer.total, frozenset({1}), 0)
    assert evicted.timeline is not None
    assert to_peer.count == int((evicted.timeline.kind == Kind.EVICT).sum()) == 4
    assert plain.memory[0].peak - evicted.memory[0].peak > 0.8 * size
    assert evicted.memory[1].peak > plain.memory[1].peak


# -- the order -------------------------------------------------------------------------------------


def eviction_gaps(timeline: Timeline) -> list[tuple[int, int, int]]:
    """Return for each eviction its rank, the rows until it is loaded, and from then to its use."""
    gaps = []
    for rank in range(timeline.ranks):
        rows = timeline.rows(rank)
        for k, op in enumerate(rows):
            if op.kind is Kind.EVICT:
                kinds = (op._replace(kind=kind) for kind in (Kind.LOAD,))
                load_index = rows.index(next(kinds))
                use_index = next(
                    n
                    for n, row in enumerate(rows)
                    if row.kind in (Kind.B, Kind.I) and row[1:5] == op[1:5]
                )
                passes = [row for row in rows[load_index:use_index] if row.kind not in EVICTIONS]
                gaps.append((rank, load_index - k, len(passes)))
    return gaps


EVICTIONS = (Kind.EVICT, Kind.LOAD)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_called_back_in_time(ahead: int) -> None:
    """Loaded the given number of operations before backward, in any order; an eviction too short is
    left out."""
    for seed in range(20):
        homes = ((0, 1, 2), (2, 1, 0)) if seed % 2 else ((0, 1, 2, 0, 1, 2),)
        edges = [(s, s + 1) for s in range(len(homes[0]) - 1)]
        plain = random_timeline(random.Random(seed), homes, 5, edges)
        evicting = with_evictions(plain, {0: ahead, 2: ahead})
        check_timeline(with_transfers(evicting))
        assert all(
            distance > 1 and margin == ahead for _, distance, margin in eviction_gaps(evicting)
        )
        others = evicting.pick((evicting.kind != Kind.EVICT) & (evicting.kind != Kind.LOAD))
        assert others == plain
        assert set(evicting.stage[evicting.kind == Kind.EVICT].tolist()) <= {0, 2}
    assert with_evictions(plain, {}) is plain


def test_the_ring_gives_to_the_next() -> None:
    """The last rank's peer is the first."""
    timeline = with_evictions(make_order("GPipe", 3, 4), {0: 0, 1: 0, 2: 0})
    is_evict = timeline.kind == Kind.EVICT
    assert ((timeline.rank[is_evict] + 1) % 3 == timeline.peer[is_evict]).all() and len(
        set(timeline.rank[is_evict])
    ) == 3


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
    """An incomplete row, and state that no peer stores, with the reason."""
    message = refusal_text(language_model(), rows, mesh)
    assert all(word in message for word in said), message


@pytest.mark.parametrize(
    "rows, mesh, said",
    [
        (
            "layers[0] offload(activations, to=peer, over=dp)\nzero(stage=0, over=dp)",
            "dp=2",
            ("S851", "none would hold less", "checkpoint()"),
        ),
        (
            FIRST_LAYER + PIPELINE.replace("1F1B", "BPipe"),
            "pp=4",
            ("S851", "already decides what happens", "EVICT"),
        ),
        (
            FIRST_LAYER + PIPELINE.replace("1F1B", "Varuna"),
            "pp=2",
            ("S851", "already decides what happens", "RECOMPUTE"),
        ),
    ],
    ids=["axis", "parks", "again"],
)
def test_refused_when_built(threads: Threads, rows: str, mesh: str, said: tuple[str, ...]) -> None:
    """Rows without a gain, and orders that already manage activations."""
    plan = make_plan(language_model(4, tied=False), rows, mesh)
    for message in threads.run(build_refusal, plan.mesh.world, plan, sgd):
        assert all(word in message for word in said), message


def test_an_axis_of_one_has_no_peer() -> None:
    """In a pipeline of one rank the row does nothing."""
    plan = make_plan(language_model(), EACH_LAYER + PIPELINE, "pp=1")
    assert account(plan, BATCHES[0]).timeline is None
    build(plan, BATCHES[0], optimizer=adamw).train_step(BATCHES[0])
