"""The original training loop and its observation: same as a plain loop, everything by name."""

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
from tests.proofs import make_plan


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
    """Three steps with clipping give the same parameters as a plain training loop."""
    torch.manual_seed(0)
    model = Tied().double()
    plain_model = copy.deepcopy(model)
    batch = {"ids": torch.randint(0, 7, (3, 5)), "labels": torch.randint(0, 7, (3, 5))}
    trainer = Sequential(model, lambda parameters: torch.optim.Adam(parameters, lr=0.1), clip=0.5)
    optimizer = torch.optim.Adam(plain_model.parameters(), lr=0.1)
    for _ in range(3):
        loss = trainer.train_step(batch)
        optimizer.zero_grad()
        expected = plain_model(**batch)["loss"]
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain_model.parameters(), 0.5)
        optimizer.step()
        assert torch.equal(loss, expected) and torch.equal(trainer.grad_norm, norm)
    for name, value in trainer.state_dict().items():
        assert torch.equal(value, plain_model.state_dict()[name])
    assert trainer.ties == (("emb.weight", "head.weight"),)
    assert set(trainer.trainable()) == dict(plain_model.named_parameters()).keys()
    assert set(trainer.optimizer_state()) == set(trainer.trainable())


def test_randomised_moves_every_parameter_and_keeps_ties() -> None:
    """Randomising changes all parameters, keeps ties, and does not change the given module."""
    model = Tied()
    nn.init.zeros_(model.head.bias)
    old_state = copy.deepcopy(model.state_dict())
    randomised = randomise(model, 0)
    for name, value in randomised.named_parameters():
        assert not (value == old_state[name]).any()
    assert tied_names(randomised) == tied_names(model)
    assert all(torch.equal(v, old_state[k]) for k, v in model.state_dict().items())
    repeated = randomise(model, 0)
    assert torch.equal(repeated.emb.weight, randomised.emb.weight)
    assert not torch.equal(randomise(model, 1).emb.weight, randomised.emb.weight)


def test_the_loss_is_found_or_refused() -> None:
    """The loss is an attribute, a key, or the output; otherwise the refusal says what to write."""
    loss = torch.tensor(1.0)
    assert returned_loss(loss, {}) is returned_loss({"loss": loss}, {}) is loss
    assert returned_loss(SimpleNamespace(loss=loss), {}) is loss
    for invalid in (torch.ones(2), {"logits": loss}, (loss,), SimpleNamespace(loss=None)):
        with pytest.raises(Refusal, match="loss\\(output, batch\\)"):
            returned_loss(invalid, {})


def test_rows_are_what_most_tensors_agree_on() -> None:
    """The number of rows is the most common size; a shared tensor does not decide it."""
    batch = {"a": torch.ones(3, 2), "b": torch.ones(3), "shared": torch.ones(9), "n": 4}
    assert count_rows(batch) == 3


# ---- observe: all values that can be compared, by name.


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def _loss(output: Any, batch: Any) -> torch.Tensor:
    return output.square().mean()


BATCHES = tuple(
    {"input": torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))}
    for n in (4, 5, 6)
)


def _observe_net(**options: Any) -> Any:
    def make(condition: Condition) -> Sequential:
        return Sequential(_net(), condition.optimizer, loss=_loss, clip=condition.clip)

    return observe(make, standard_conditions(BATCHES, 1.0), **options)


def test_everything_is_seen() -> None:
    """Each kind of value is observed under each condition, at its steps, with module names."""
    observation = _observe_net()
    names = dict(_net().named_parameters()).keys()
    for condition in ("SGD", "AdamW, clipped"):
        for step in range(3):
            grads = {k.name for k in observation.tensors if k[:3] == (condition, "gradients", step)}
            assert grads == names
            assert Key(condition, "loss", step, "loss") in observation.tensors
            followed = Key(condition, "input gradients", step, "input") in observation.tensors
            assert followed is (condition == "SGD")
        for step in (0, 2):
            names_seen = {
                k.name for k in observation.tensors if k[:3] == (condition, "parameters", step)
            }
            assert names_seen == names
            assert Key(condition, "other state", step, "1.running_mean") in observation.tensors
        assert Key(condition, "outputs", 3, "output") in observation.tensors
        assert observation.sets[Key(condition, "trainable set", 0, "")] == names
    slots = {k.kind for k in observation.tensors if k.condition != "SGD" and "optimizer" in k.kind}
    assert slots == {"optimizer step", "optimizer exp_avg", "optimizer exp_avg_sq"}
    assert observation.order[-2:] in {("0.weight", "0.bias"), ("0.bias", "0.weight")}


def test_a_brief_look_sees_all_that_is_computed() -> None:
    """A brief observation only omits optimizer state and generator state."""
    full, brief = _observe_net(), _observe_net(brief=True)
    omitted = {key.kind for key in full.tensors if key not in brief.tensors}
    assert omitted == {
        *("optimizer momentum_buffer", "optimizer step", "optimizer exp_avg"),
        *("optimizer exp_avg_sq", "generator state"),
    }
    for key, value in brief.tensors.items():
        assert torch.equal(value, full.tensors[key]), key


def test_one_condition_gives_inputs_as_training_does() -> None:
    """Float inputs need gradients under SGD and not under AdamW, on both sides."""
    input_flags: set[bool] = set()

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 1).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            input_flags.add(x.requires_grad)
            loss: torch.Tensor = self.one(x).square().mean()
            return loss

    conditions = standard_conditions([{"x": b["input"]} for b in BATCHES], 1.0)
    for condition, expected in zip(conditions, (True, False)):
        plan = make_plan(Noting(), "")
        case = prepare_case(Case(plan, condition.batches))
        program = build_for_condition(case, condition)
        input_flags.clear()
        with enter_modes(*proof_modes(case)[0]):
            make_original_subject(case, condition).train_step(condition.batches[0])
        assert input_flags == {expected}
        input_flags.clear()
        ProgramSubject(program, follow=condition.follow).train_step(condition.batches[0])
        assert input_flags == {expected}


def test_one_condition_clips_and_one_does_not() -> None:
    """Gradients are clipped under the clipping condition only."""
    torch.manual_seed(0)
    trainer = Sequential(_net(), loss=_loss)
    norm = trainer.gradient_norm(BATCHES[0])
    unclipped, clipped = standard_conditions(BATCHES, norm)
    for condition, expected in ((unclipped, norm), (clipped, norm / 4)):
        trainer = Sequential(_net(), condition.optimizer, loss=_loss, clip=condition.clip)
        trainer.train_step(BATCHES[0])
        norm_left = torch.stack([g.norm() for g in trainer.gradients().values()]).norm()
        assert abs(norm_left / expected - 1) < 1e-4
        assert abs(trainer.grad_norm / norm - 1) < 1e-12


def test_a_rank_that_keeps_nothing_runs_all() -> None:
    """Without `keep` all steps run and the observation is empty."""
    steps = []

    class Counted(Sequential):
        def train_step(self, batch: Any) -> torch.Tensor:
            steps.append(len(batch["input"]))
            return super().train_step(batch)

    observation = observe(
        lambda c: Counted(_net(), c.optimizer, loss=_loss),
        standard_conditions(BATCHES, 1.0),
        keep=False,
    )
    assert steps == [4, 5, 6] * 2 and not observation.tensors and not observation.sets


def test_what_is_seen_is_a_copy() -> None:
    """Observed values are copies: later steps do not change them."""
    observation = _observe_net()
    first_value, last_value = (
        observation.tensors[Key("SGD", "parameters", s, "0.weight")] for s in (0, 2)
    )
    assert not torch.equal(first_value, last_value)


def test_outputs_of_any_structure_are_read() -> None:
    """Nested containers, named tuples and dataclasses are read by path; others are named."""

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
