"""Optimizer state on the next rank of a pipeline: the same bits, counted, saved and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.passes.simulate.account import account
from schedlang.runtime.comm.collectives import listen_to_collectives
from schedlang.runtime.storage.tiers import tier_of
from tests.engine import Threads
from tests.memory.test_residence import BATCHES, adafactor, batch, words
from tests.proofs import adamw, assert_same, planned, proven, refused, sgd, trained

PIPE = 'layers pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
FIRST = "layers[0] offload(optimizer, to=peer, over=pp)\n"
ALL = "offload(optimizer, to=peer, over=pp)\n"
WIDE = "pp=2, dp=2"


@pytest.mark.parametrize("size", [1, 1 << 25], ids=["one by one", "together"])
@pytest.mark.parametrize(
    "rows, base, mesh",
    [
        (FIRST, PIPE, "pp=2"),
        (ALL, PIPE, "pp=3"),
        (ALL + "offload(gradients)\n", PIPE + "\nzero(stage=1, over=dp)", WIDE),
    ],
    ids=["first", "ring", "slices"],
)
def test_same_bits(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, size: int, rows: str, base: str, mesh: str
) -> None:
    """Losses, gradients, weights and state of three clipped steps are those of no rows."""
    monkeypatch.setattr("schedlang.runtime.grad_reduction.gradient.BUCKET_BYTES", size)
    seen, plain = (
        trained(threads, planned(words(), r + base, mesh), BATCHES, adamw, clip=0.5)
        for r in (rows, "")
    )
    assert_same(seen, plain)


def test_same_bits_in_processes(pool: Any) -> None:
    """Over gloo between two processes, both of which send and hold, as between threads."""
    seen, plain = (trained(pool, planned(words(), r + PIPE, "pp=2"), BATCHES) for r in (ALL, ""))
    assert_same(seen, plain)


def test_proven(threads: Threads) -> None:
    """A pipeline whose first stage sends its state away trains as the original."""
    base = PIPE.replace("micro=2", "micro=1")  # the model counts its calls
    proven(threads, planned(words(tied=False), FIRST + base, "pp=2"), [batch(5, 6), batch(2, 7)])


# -- what lies where -------------------------------------------------------------------------------


def kept(plan: Any) -> tuple[dict[str, int], int]:
    """On a rank after two steps: bytes of moments by where they lie, and what the second sent."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    sent = [0]

    def heard(kind: str, group: Any, size: int) -> None:
        sent[0] += size * (kind == "send" and group.axes == ("pp",))

    with listen_to_collectives(heard):
        program.train_step(BATCHES[0])
    assert program.offloaded is not None and program.optimizer is not None
    peer = program.offloaded.peer
    assert peer is not None and all(tier_of(one) == "peer" for one in peer.held.values())
    found = {"own": 0, "out": 0, "peer": peer.held_bytes()}
    for state in program.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            found["out" if state[key].is_meta else "own"] += state[key].nbytes
    return found, sent[0]


@pytest.mark.parametrize("rows", [FIRST, ALL], ids=["first", "ring"])
def test_the_plan_counts_what_lies_where(pool: Any, rows: str) -> None:
    """Bytes that a plan tells of each rank, its own and its peer's, and bytes sent in a step."""
    plan = planned(words(tied=False), rows + PIPE, "pp=2")
    told = account(plan, BATCHES[0])
    assert told.classes is not None and told.collectives is not None
    by_place = {one.place: one for one in told.classes}
    for place, (found, sent) in enumerate(pool.run(kept, 2, plan)):
        assert found["own"] == by_place[place].optimizer
        assert found["peer"] == by_place[place].peer
        mine = [c for c in told.collectives if "state to" in c.what and place in (c.places or ())]
        assert sent == sum(c.total for c in mine) > 0
    assert sum(one.peer for one in told.classes) > 0


def most_home(plan: Any) -> tuple[int, int]:
    """On a rank: the most bytes of travelling state at home in a step, and those of all of it."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    assert program.offloaded is not None and program.optimizer is not None
    peer, state, most = program.offloaded.peer, program.optimizer.state, [0]
    assert peer is not None
    steps = peer.iterate_rounds

    def watched(optimizer: torch.optim.Optimizer) -> Any:
        for names in steps(optimizer):
            kept = [state[p][k] for p in state for k in ("exp_avg", "exp_avg_sq")]
            most[0] = max(most[0], sum(one.nbytes for one in kept if not one.is_meta))
            yield names

    peer.iterate_rounds = watched  # type: ignore[method-assign]
    program.train_step(BATCHES[0])
    return most[0], sum(v.nbytes for s in state.values() for v in s.values() if v.is_meta)


def test_one_round_is_home_at_a_time(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is made, no more comes home than the largest parameter's two moments."""
    monkeypatch.setattr("schedlang.runtime.grad_reduction.gradient.BUCKET_BYTES", 1)
    plan = planned(words(tied=False), ALL + PIPE, "pp=2")
    largest = max(2 * p.nbytes for p in words().layers[0].parameters())
    for most, out in threads.run(most_home, 2, plan):
        assert 0 < most <= largest < out


# -- saved and loaded ------------------------------------------------------------------------------


def saves(plan: Any, path: str) -> dict[str, Any]:
    """On a rank: a step, saved and gone on with; then its state."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    program.save(path)
    program.load_state_dict(program.state_dict())  # state that is out stays out
    program.train_step(BATCHES[1])
    return program.optimizer_state()


def loads(plan: Any, path: str) -> dict[str, Any]:
    """On a rank that has gone another way: what was saved, taken over, and gone on with."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[2])
    program.load(path)
    program.train_step(BATCHES[1])
    return program.optimizer_state()


@pytest.mark.parametrize("first, then", [(ALL, ""), ("", ALL), (ALL, FIRST)])
def test_saved_and_loaded(threads: Threads, tmp_path: Path, first: str, then: str) -> None:
    """State is saved from where it lies, and goes where a row says after it is loaded."""
    path = str(tmp_path / "state")
    want, got = (
        threads.run(act, 2, planned(words(), rows + PIPE, "pp=2"), path)[0]
        for act, rows in ((saves, first), (loads, then))
    )
    pairs = [(v, got[name][key]) for name, slots in want.items() for key, v in slots.items()]
    assert pairs and all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, mesh, code, said",
    [
        ("offload(gradients, to=peer, over=pp)", "pp=2", "S851", "cannot be sent to a peer"),
        ("offload(optimizer, to=peer)", "pp=2", "S851", "over=pp"),
        (
            "offload(optimizer, to=disk, over=pp)",
            "pp=2",
            "S851",
            "`to=peer` and `over` must be given together",
        ),
        (FIRST + "layers[0] offload(optimizer)", "pp=2", "S501", "is offloaded already"),
    ],
)
def test_refused(rows: str, mesh: str, code: str, said: str) -> None:
    """Rows without meaning, and two homes for one state."""
    told = refused(words(), rows, mesh)
    assert code in told and said in told, told


def built(plan: Any, optimizer: Any) -> str:
    """The message of the refusal that a rank's build ends in."""
    try:
        build(plan, BATCHES[0], optimizer=optimizer)
    except Refusal as refusal:
        return refusal.render()
    return ""


STALE = 'layers pipeline_split(over=pp)\npipeline(order="PipeDream", micro=4)'


@pytest.mark.parametrize(
    "rows, mesh, optimizer, said",
    [
        (
            "offload(optimizer, to=peer, over=dp)\nzero(stage=0, over=dp)",
            "dp=2",
            sgd,
            ("S851", "none would hold less", "zero(stage=1, over=dp)"),
        ),
        (
            FIRST + "layers[2] offload(optimizer, to=disk)\n" + PIPE,
            "pp=2",
            sgd,
            ("S851", "another row offloads to disk", "to=cpu"),
        ),
        (
            FIRST + "layers[0] offload(parameters)\n" + PIPE,
            "pp=2",
            sgd,
            ("S851", "is in host memory", "on the device"),
        ),
        (FIRST + PIPE, "pp=2", adafactor, ("S851", "not elementwise", "AdamW")),
        (ALL + STALE, "pp=2", sgd, ("S625", "cannot be kept on a peer", "to=cpu")),
    ],
    ids=["axis", "disk", "streamed", "whole steps", "versions"],
)
def test_refused_when_built(
    threads: Threads, rows: str, mesh: str, optimizer: Any, said: tuple[str, ...]
) -> None:
    """Where nothing is gained, where steps are undone or made elsewhere, and where they part."""
    relax = "staleness" if "PipeDream" in rows else ""
    for told in threads.run(built, 2, planned(words(tied=False), rows, mesh, relax), optimizer):
        assert all(word in told for word in said), told


def test_an_axis_of_one_has_no_peer() -> None:
    """On one rank of a pipeline the row does nothing."""
    program = build(planned(words(), ALL + PIPE, "pp=1"), BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    assert program.offloaded is None and program.optimizer_state()
