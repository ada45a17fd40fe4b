"""Checks of randomness and hidden state: each check finds a mistake that all others miss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.randomness import describe_draws, generator_states, repeated_streams
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng import logical_dropout
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.scope import Scope, capture_scope, enter_scope, named_sites
from tests.proofs import make_plan


class Net(nn.Module):
    """A network with dropout, a non-persistent buffer, and one fault on ranks."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.drop, self.two = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1)
        self.wrong = fault
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("rows", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.one(x).tanh())
        if self.training:
            self.calls = self.calls + 0.0
        if self.training and dist.is_initialized() and not x.is_meta:
            self.err(h)
        return self.two(h).square().mean()

    def err(self, h: Tensor) -> None:
        if self.wrong == "draws":
            self.drop(h.detach())
        elif self.wrong == "generator" or self.wrong == "generator of one" and dist.get_rank():
            torch.manual_seed(7)
        elif self.wrong == "hidden buffer":
            self.calls += 1
        elif self.wrong == "buffer of one rank" and dist.get_rank() == 1:
            self.rows += 1


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(6, 4, generator=generator, dtype=torch.float64)}


FAILING_KINDS = {
    "": set(),
    "draws": {"dropout draws"},
    "generator": {"generator state"},
    "generator of one": {"replicas"},
    "hidden buffer": {"hidden buffers"},
    "buffer of one rank": {"replicas"},
}


@pytest.mark.parametrize("wrong", FAILING_KINDS)
def test_each_is_found_by_one_check_alone(wrong: str, pool: Pool) -> None:
    """An extra mask, a changed generator or buffer: exactly one kind of check fails."""
    plan = make_plan(Net(wrong), "zero(stage=0, over=dp)", "dp=2")
    report = prove(Case(plan, (_batch(1), _batch(2)), dtype="none"), pool=pool)
    assert {row.kind for row in report.rows if not row.ok} == FAILING_KINDS[wrong], str(report)


def test_draws_are_said_by_place_and_rows() -> None:
    """Draws are described by site, call, step and ranges of rows."""
    noted: Any = {(1, "h.drop", 0): {0, 1, 2, 5}, (0, "", 2): {3}}
    assert describe_draws(noted) == [
        "`h.drop` call 0, step 1, rows 0-2,5",
        "`model` call 2, step 0, rows 3",
    ]


class Twice(nn.Module):
    """One dropout, called twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(self.drop(x))
        return dropped


def _begun_streams(again: bool = False) -> Any:
    """Return the streams begun in two steps of two rows; `again`: each pass runs twice."""
    model, dropout = Twice(), LogicalDropout(0)
    named_sites(model)
    dropout.begun = {}
    for step in range(2):
        with enter_modes(dropout), enter_scope(Scope(step, 0, (0, 1))):
            restore_scope = capture_scope()
            model(torch.ones(2, 9))
            if again:
                model(torch.ones(2, 9))  # recomputed in backward
                with restore_scope():
                    model(torch.ones(2, 9))
    return dropout.begun


def test_streams_are_apart() -> None:
    """Steps, calls and rows use separate streams; recomputation is not a repetition."""
    assert len(_begun_streams()) == 8 and repeated_streams(_begun_streams()) == []
    assert repeated_streams(_begun_streams(again=True)) == []


def test_what_repeats_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated or overlapping stream is named with the one that it repeats."""
    stream_of = logical_dropout.stream_of
    monkeypatch.setattr(
        logical_dropout, "stream_of", lambda *args: stream_of(args[0], 0, *args[2:])
    )
    repeated = repeated_streams(_begun_streams())
    assert (
        len(repeated) == 4
        and repeated[0] == "`drop` call 0, step 1, row 0 as `drop` call 0, step 0, row 0"
    )

    def behind(*args: Any) -> int:
        return logical_dropout._signed(
            (stream_of(*args[:4], 0) + args[4] * 3 * logical_dropout._GAMMA) % (1 << 64)
        )

    monkeypatch.setattr(logical_dropout, "stream_of", behind)
    assert len(repeated_streams(_begun_streams())) == 4
    monkeypatch.setattr(logical_dropout, "stream_of", stream_of)
    monkeypatch.setattr("schedlang.runtime.scope.count_call", lambda site_name: 0)
    assert set(repeated_streams(_begun_streams())) == {
        f"`drop` call 0, step {step}, row {row} twice" for step in (0, 1) for row in (0, 1)
    }


def test_generators_of_modules_are_seen() -> None:
    """The generator of a module is recorded under its path, besides torch's own."""
    model = Net()
    model.drop.own = torch.Generator().manual_seed(3)
    states = generator_states(model)
    assert set(states) == {"torch", "drop.own"}
    torch.rand(1, generator=model.drop.own)
    assert not torch.equal(generator_states(model)["drop.own"], states["drop.own"])


def test_a_buffer_that_is_replaced_is_the_one_that_is_saved() -> None:
    """If a model replaces a buffer by assignment, the new buffer is saved."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 1)
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.one(x).square().mean()
            self.mean = 0.5 * self.mean + loss.detach()
            return loss

    program = build(make_plan(Running().double(), ""), _batch(1))
    program.train_step(_batch(1))
    assert program.state_dict()["mean"] > 0
