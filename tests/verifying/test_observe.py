"""Tests of the original and of what is observed: one protocol, a plain loop, all by name."""

import copy
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.verify.observe import (
    Condition,
    Key,
    flatten_output,
    observe,
    standard_conditions,
)
from schedlang.passes.verify.original import (
    Sequential,
    count_rows,
    randomise,
    returned_loss,
    tied_names,
)
from schedlang.passes.verify.proof_case import (
    Case,
    ProgramSubject,
    build_for_condition,
    make_original_subject,
    prepare_case,
    proof_modes,
)
from schedlang.runtime.modes import enter_modes
from tests.proofs import planned


class Tied(nn.Module):
    """An embedding and a head of one weight, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)
        self.head.weight = self.emb.weight

    def forward(self, ids, labels=None):
        logits = self.head(self.norm(self.emb(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_the_loop_is_the_plain_loop() -> None:
    """Three steps with clipping give the parameters of the loop that everyone writes."""
    torch.manual_seed(0)
    model = Tied().double()
    twin = copy.deepcopy(model)
    batch = {"ids": torch.randint(0, 7, (3, 5)), "labels": torch.randint(0, 7, (3, 5))}
    subject = Sequential(model, lambda named: torch.optim.Adam(named, lr=0.1), clip=0.5)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.1)
    for _ in range(3):
        loss = subject.train_step(batch)
        optimizer.zero_grad()
        expected = twin(**batch)["loss"]
        expected.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        assert torch.equal(loss, expected) and torch.equal(subject.grad_norm, norm)
    for name, value in subject.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])
    assert subject.ties == (("emb.weight", "head.weight"),)
    assert set(subject.trainable()) == dict(twin.named_parameters()).keys()
    assert set(subject.optimizer_state()) == set(subject.trainable())


def test_randomised_moves_every_parameter_and_keeps_ties() -> None:
    """Zero biases and unit gains are gone, ties and the given module stay."""
    model = Tied()
    nn.init.zeros_(model.head.bias)
    before = copy.deepcopy(model.state_dict())
    twin = randomise(model, 0)
    for name, value in twin.named_parameters():
        assert not (value == before[name]).any()
    assert tied_names(twin) == tied_names(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    again = randomise(model, 0)
    assert torch.equal(again.emb.weight, twin.emb.weight)
    assert not torch.equal(randomise(model, 1).emb.weight, twin.emb.weight)


def test_the_loss_is_found_or_refused() -> None:
    """Attribute, key, or the output itself; without one the refusal says what to write."""
    one = torch.tensor(1.0)
    assert returned_loss(one, {}) is returned_loss({"loss": one}, {}) is one
    assert returned_loss(SimpleNamespace(loss=one), {}) is one
    for bad in (torch.ones(2), {"logits": one}, (one,), SimpleNamespace(loss=None)):
        with pytest.raises(Refusal, match="loss\\(output, batch\\)"):
            returned_loss(bad, {})


def test_rows_are_what_most_tensors_agree_on() -> None:
    """A tensor shared by all samples does not decide the number of samples."""
    batch = {"a": torch.ones(3, 2), "b": torch.ones(3), "shared": torch.ones(9), "n": 4}
    assert count_rows(batch) == 3


# ---- Tests of observe: one protocol, all that can be compared, by name.


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def _loss(output: Any, batch: Any) -> torch.Tensor:
    return output.square().mean()


BATCHES = tuple(
    {"input": torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))}
    for n in (4, 5, 6)
)


def _seen(**options: Any) -> Any:
    def make(condition: Condition) -> Sequential:
        return Sequential(_net(), condition.optimizer, loss=_loss, clip=condition.clip)

    return observe(make, standard_conditions(BATCHES, 1.0), **options)


def test_everything_is_seen() -> None:
    """Each kind is there under each condition, at its steps, with the names of the module."""
    seen = _seen()
    names = dict(_net().named_parameters()).keys()
    for condition in ("SGD", "AdamW, clipped"):
        for step in range(3):
            grads = {k.name for k in seen.tensors if k[:3] == (condition, "gradients", step)}
            assert grads == names
            assert Key(condition, "loss", step, "loss") in seen.tensors
            followed = Key(condition, "input gradients", step, "input") in seen.tensors
            assert followed is (condition == "SGD")
        for step in (0, 2):
            held = {k.name for k in seen.tensors if k[:3] == (condition, "parameters", step)}
            assert held == names
            assert Key(condition, "other state", step, "1.running_mean") in seen.tensors
        assert Key(condition, "outputs", 3, "output") in seen.tensors
        assert seen.sets[Key(condition, "trainable set", 0, "")] == names
    slots = {k.kind for k in seen.tensors if k.condition != "SGD" and "optimizer" in k.kind}
    assert slots == {"optimizer step", "optimizer exp_avg", "optimizer exp_avg_sq"}
    assert seen.order[-2:] in {("0.weight", "0.bias"), ("0.bias", "0.weight")}


def test_a_brief_look_sees_all_that_is_computed() -> None:
    """It leaves out the optimizer's state and the generators', and changes nothing else."""
    whole, brief = _seen(), _seen(brief=True)
    left = {key.kind for key in whole.tensors if key not in brief.tensors}
    assert left == {
        *("optimizer momentum_buffer", "optimizer step", "optimizer exp_avg"),
        *("optimizer exp_avg_sq", "generator state"),
    }
    for key, value in brief.tensors.items():
        assert torch.equal(value, whole.tensors[key]), key


def test_one_condition_gives_inputs_as_training_does() -> None:
    """Float inputs ask for gradients under SGD and not under AdamW, on both sides."""
    asked: set[bool] = set()

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 1).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.add(x.requires_grad)
            out: torch.Tensor = self.one(x).square().mean()
            return out

    told = standard_conditions([{"x": b["input"]} for b in BATCHES], 1.0)
    for condition, wanted in zip(told, (True, False)):
        plan = planned(Noting(), "")
        case = prepare_case(Case(plan, condition.batches))
        program = build_for_condition(case, condition)
        asked.clear()
        with enter_modes(*proof_modes(case)[0]):
            make_original_subject(case, condition).train_step(condition.batches[0])
        assert asked == {wanted}
        asked.clear()
        ProgramSubject(program, follow=condition.follow).train_step(condition.batches[0])
        assert asked == {wanted}


def test_one_condition_clips_and_one_does_not() -> None:
    """Gradients as left by a step are shortened under the clip, and only there."""
    torch.manual_seed(0)
    subject = Sequential(_net(), loss=_loss)
    norm = subject.gradient_norm(BATCHES[0])
    plain, clipped = standard_conditions(BATCHES, norm)
    for condition, expected in ((plain, norm), (clipped, norm / 4)):
        subject = Sequential(_net(), condition.optimizer, loss=_loss, clip=condition.clip)
        subject.train_step(BATCHES[0])
        left = torch.stack([g.norm() for g in subject.gradients().values()]).norm()
        assert abs(left / expected - 1) < 1e-4
        assert abs(subject.grad_norm / norm - 1) < 1e-12


def test_a_rank_that_keeps_nothing_runs_all() -> None:
    """Without `keep` the training is the same and the observation is empty."""
    steps = []

    class Counted(Sequential):
        def train_step(self, batch: Any) -> torch.Tensor:
            steps.append(len(batch["input"]))
            return super().train_step(batch)

    seen = observe(
        lambda c: Counted(_net(), c.optimizer, loss=_loss),
        standard_conditions(BATCHES, 1.0),
        keep=False,
    )
    assert steps == [4, 5, 6] * 2 and not seen.tensors and not seen.sets


def test_what_is_seen_is_a_copy() -> None:
    """Parameters seen after the first step are not those of the last."""
    seen = _seen()
    first, last = (seen.tensors[Key("SGD", "parameters", s, "0.weight")] for s in (0, 2))
    assert not torch.equal(first, last)


def test_outputs_of_any_structure_are_read() -> None:
    """Nested containers, named tuples and dataclasses give tensors by path; others are named."""

    @dataclass
    class Out:
        x: Any
        y: Any = None

    Pair = namedtuple("Pair", "a b")
    unread: set[str] = set()
    t = torch.ones(1)
    value = {"l": [t, {"m": t}], "o": Out(t), "p": Pair(t, 2.0), "s": "text", "c": object()}
    assert [name for name, _ in flatten_output(value, unread)] == [
        "l.0",
        "l.1.m",
        "o.x",
        "p.a",
        "p.b",
    ]
    assert unread == {"object"}
