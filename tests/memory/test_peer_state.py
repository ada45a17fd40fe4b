"""Optimizer state offloaded to a pipeline peer: equal training, bytes, checkpoints, refusals."""

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
from tests.memory.test_offloaded_state import BATCHES, adafactor, batch, language_model
from tests.proofs import (
    adamw,
    assert_proven,
    assert_same,
    make_plan,
    refusal_text,
    sgd,
    train_on_ranks,
)

PIPELINE = 'layers pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
FIRST_LAYER = "layers[0] offload(optimizer, to=peer, over=pp)\n"
ALL = "offload(optimizer, to=peer, over=pp)\n"
PP_DP_MESH = "pp=2, dp=2"


@pytest.mark.parametrize("size", [1, 1 << 25], ids=["one by one", "together"])
@pytest.mark.parametrize(
    "rows, base, mesh",
    [
        (FIRST_LAYER, PIPELINE, "pp=2"),
        (ALL, PIPELINE, "pp=3"),
        (ALL + "offload(gradients)\n", PIPELINE + "\nzero(stage=1, over=dp)", PP_DP_MESH),
    ],
    ids=["first", "ring", "slices"],
)
def test_same_bits(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, size: int, rows: str, base: str, mesh: str
) -> None:
    """Losses, gradients, weights and state of three clipped steps are bitwise equal."""
    monkeypatch.setattr("schedlang.runtime.grad_reduction.gradient.BUCKET_BYTES", size)
    on_peer, plain = (
        train_on_ranks(
            threads, make_plan(language_model(), r + base, mesh), BATCHES, adamw, clip=0.5
        )
        for r in (rows, "")
    )
    assert_same(on_peer, plain)


def test_same_bits_in_processes(pool: Any) -> None:
    """With gloo between two processes, both of which send and store."""
    on_peer, plain = (
        train_on_ranks(pool, make_plan(language_model(), r + PIPELINE, "pp=2"), BATCHES)
        for r in (ALL, "")
    )
    assert_same(on_peer, plain)


def test_proven(threads: Threads) -> None:
    """A pipeline whose first stage sends its state away trains as the original."""
    base = PIPELINE.replace("micro=2", "micro=1")  # the model counts its calls
    assert_proven(
        threads,
        make_plan(language_model(tied=False), FIRST_LAYER + base, "pp=2"),
        [batch(5, 6), batch(2, 7)],
    )


# -- what lies where -------------------------------------------------------------------------------


def state_bytes(plan: Any) -> tuple[dict[str, int], int]:
    """Return on a rank the bytes of moments by place after two steps, and the bytes the second
    sent."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    sent = [0]

    def heard(kind: str, group: Any, size: int) -> None:
        sent[0] += size * (kind == "send" and group.axes == ("pp",))

    with listen_to_collectives(heard):
        program.train_step(BATCHES[0])
    assert program.offloaded is not None and program.optimizer is not None
    peer = program.offloaded.peer
    assert peer is not None and all(tier_of(tensor) == "peer" for tensor in peer.held.values())
    sizes = {"own": 0, "out": 0, "peer": peer.held_bytes()}
    for state in program.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            sizes["out" if state[key].is_meta else "own"] += state[key].nbytes
    return sizes, sent[0]


@pytest.mark.parametrize("rows", [FIRST_LAYER, ALL], ids=["first", "ring"])
def test_the_plan_counts_what_lies_where(pool: Any, rows: str) -> None:
    """The plan's bytes of each rank, its peer's, and of communication are the real ones."""
    plan = make_plan(language_model(tied=False), rows + PIPELINE, "pp=2")
    report = account(plan, BATCHES[0])
    assert report.classes is not None and report.collectives is not None
    by_place = {rank_classes.place: rank_classes for rank_classes in report.classes}
    for rank, (sizes, sent) in enumerate(pool.run(state_bytes, 2, plan)):
        assert sizes["own"] == by_place[rank].optimizer
        assert sizes["peer"] == by_place[rank].peer
        transfers = [
            c for c in report.collectives if "state to" in c.what and rank in (c.places or ())
        ]
        assert sent == sum(c.total for c in transfers) > 0
    assert sum(rank_classes.peer for rank_classes in report.classes) > 0


def peak_at_home(plan: Any) -> tuple[int, int]:
    """Return on a rank the peak bytes of state that is home in a step, and all its bytes."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    assert program.offloaded is not None and program.optimizer is not None
    peer, state, peak = program.offloaded.peer, program.optimizer.state, [0]
    assert peer is not None
    iterate_rounds = peer.iterate_rounds

    def watched(optimizer: torch.optim.Optimizer) -> Any:
        for names in iterate_rounds(optimizer):
            moments = [state[p][k] for p in state for k in ("exp_avg", "exp_avg_sq")]
            peak[0] = max(peak[0], sum(moment.nbytes for moment in moments if not moment.is_meta))
            yield names

    peer.iterate_rounds = watched  # type: ignore[method-assign]
    program.train_step(BATCHES[0])
    return peak[0], sum(v.nbytes for s in state.values() for v in s.values() if v.is_meta)


def test_one_round_is_home_at_a_time(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step at most the largest parameter's two moments are home."""
    monkeypatch.setattr("schedlang.runtime.grad_reduction.gradient.BUCKET_BYTES", 1)
    plan = make_plan(language_model(tied=False), ALL + PIPELINE, "pp=2")
    largest = max(2 * p.nbytes for p in language_model().layers[0].parameters())
    for peak, away in threads.run(peak_at_home, 2, plan):
        assert 0 < peak <= largest < away


# -- saved and loaded ------------------------------------------------------------------------------


def save_and_step(plan: Any, path: str) -> dict[str, Any]:
    """Train a step on a rank, save, train another; return its state."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    program.save(path)
    program.load_state_dict(program.state_dict())  # state that is out stays out
    program.train_step(BATCHES[1])
    return program.optimizer_state()


def load_and_step(plan: Any, path: str) -> dict[str, Any]:
    """Train another step on a rank, load, train on; return its state."""
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[2])
    program.load(path)
    program.train_step(BATCHES[1])
    return program.optimizer_state()


@pytest.mark.parametrize("first, then", [(ALL, ""), ("", ALL), (ALL, FIRST_LAYER)])
def test_saved_and_loaded(threads: Threads, tmp_path: Path, first: str, then: str) -> None:
    """State is saved from where it is, and goes where the row says after loading."""
    path = str(tmp_path / "state")
    expected, actual = (
        threads.run(run, 2, make_plan(language_model(), rows + PIPELINE, "pp=2"), path)[0]
        for run, rows in ((save_and_step, first), (load_and_step, then))
    )
    pairs = [(v, actual[name][key]) for name, slots in expected.items() for key, v in slots.items()]
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
        (FIRST_LAYER + "layers[0] offload(optimizer)", "pp=2", "S501", "is offloaded already"),
    ],
)
def test_refused(rows: str, mesh: str, code: str, said: str) -> None:
    """Rows without a meaning, and two places for one state."""
    message = refusal_text(language_model(), rows, mesh)
    assert code in message and said in message, message


def build_refusal(plan: Any, optimizer: Any) -> str:
    """Return the refusal that a rank's build ends with."""
    try:
        build(plan, BATCHES[0], optimizer=optimizer)
    except Refusal as refusal:
        return refusal.render()
    return ""


PIPEDREAM = 'layers pipeline_split(over=pp)\npipeline(order="PipeDream", micro=4)'


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
            FIRST_LAYER + "layers[2] offload(optimizer, to=disk)\n" + PIPELINE,
            "pp=2",
            sgd,
            ("S851", "another row offloads to disk", "to=cpu"),
        ),
        (
            FIRST_LAYER + "layers[0] offload(parameters)\n" + PIPELINE,
            "pp=2",
            sgd,
            ("S851", "is in host memory", "on the device"),
        ),
        (FIRST_LAYER + PIPELINE, "pp=2", adafactor, ("S851", "not elementwise", "AdamW")),
        (ALL + PIPEDREAM, "pp=2", sgd, ("S625", "cannot be kept on a peer", "to=cpu")),
    ],
    ids=["axis", "disk", "streamed", "whole steps", "versions"],
)
def test_refused_when_built(
    threads: Threads, rows: str, mesh: str, optimizer: Any, said: tuple[str, ...]
) -> None:
    """Rows without a gain, and steps that are undone or computed elsewhere."""
    relax = "staleness" if "PipeDream" in rows else ""
    for message in threads.run(
        build_refusal, 2, make_plan(language_model(tied=False), rows, mesh, relax), optimizer
    ):
        assert all(word in message for word in said), message


def test_an_axis_of_one_has_no_peer() -> None:
    """In a pipeline of one rank the row does nothing."""
    program = build(
        make_plan(language_model(), ALL + PIPELINE, "pp=1"), BATCHES[0], optimizer=adamw
    )
    program.train_step(BATCHES[0])
    assert program.offloaded is None and program.optimizer_state()
