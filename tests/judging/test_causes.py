"""By what a verdict says a gradient or an output came about: only what gives every number of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang import TrainingProgram, verify_program
from schedlang.passes.judge.batch_parts import PartGradients
from schedlang.passes.judge.first_difference import RecordedTensor, explain_unmasked
from schedlang.passes.judge.gradient_errors import explain_gradient
from schedlang.passes.judge.gradient_terms import GradientTape, RankGradient, explain_by_terms
from schedlang.passes.judge.module_inputs import (
    ChangedBatch,
    RankOutputs,
    change_batches,
    explain_dependence,
)
from schedlang.report import Row
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches import (
    accumulated_means,
    expert_inputs,
    experts_doubled,
    identity_backward,
    lost_window,
    sentinel_slots,
    unsynchronised,
)
from tests.judging.catches.words import original

RANKS = 2
ROW = Row("SGD", "gradients", "bias", 1.0, 1e-9, False, 0)
CAUSES = ("its derivative", "counts", "missing", "a term of", "zero is due", "depends on")


def judged(catch: Any, program: Any, pool: Pool) -> dict[str, str]:
    """What the verdict on a program that is wrong says."""
    torch.manual_seed(0)
    given = original(catch)
    report = verify_program(program, **given, ranks=2, pool=pool)
    assert report.exit_code == 1, str(report)
    return dict(report.localised)


# ---- The terms of a gradient.


def taped() -> tuple[GradientTape, Tensor, dict[str, Tensor]]:
    """A tensor that two functions take, a linear one and a softmax; its terms, by hand."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True, dtype=torch.float64)
    weight, more = (torch.randn(n, 6, dtype=torch.float64) for n in (5, 4))
    tape = GradientTape()
    with tape:
        y = x * 2.0
        linear = F.linear(y, weight)
        soft = y.log_softmax(-1)
        total = linear.square().sum() + (soft * more).sum()
    total.backward()
    raw = more
    terms = {
        "linear": 2 * F.linear(y.detach(), weight) @ weight,
        "softmax": raw - soft.detach().exp() * raw.sum(-1, keepdim=True),
        "raw": raw,
    }
    return tape, y, terms


def ranks(*values: Tensor) -> list[RankGradient]:
    """Each rank's whole gradient."""
    return [RankGradient(k, v.flatten(), torch.arange(v.numel())) for k, v in enumerate(values)]


def test_terms_add_up_to_what_autograd_gives() -> None:
    """Each function's own term is the derivative by hand; together they are the gradient."""
    tape, y, right = taped()
    found = tape.terms(y)
    assert [term.call.name.split("`")[1] for term in found] == ["linear", "log_softmax"]
    for term, name in zip(found, ("linear", "softmax")):
        assert torch.allclose(term.gradient, right[name], rtol=1e-12, atol=1e-12)
    assert torch.allclose(found[1].output_gradient, right["raw"])


MADE: dict[str, tuple[Callable[[Any], list[Tensor]], str]] = {
    "right": (lambda t: [t["linear"] + t["softmax"]] * RANKS, ""),
    "an identity": (lambda t: [t["linear"] + t["raw"]] * RANKS, "its derivative is left out"),
    "a term that is missing": (lambda t: [t["linear"]] * RANKS, "`log_softmax` .*is missing"),
    "a term twice": (
        lambda t: [2 * t["linear"] + t["softmax"]] * RANKS,
        "`linear` outside of all modules sends back counts 2 times",
    ),
    "terms of a sum": (
        lambda t: [t["softmax"] + t["linear"] * share for share in (0.3, 0.7)],
        "what `linear` .* is a term of a sum on each rank",
    ),
    "all are terms of a sum": (
        lambda t: [(t["softmax"] + t["linear"]) * share for share in (0.3, 0.7)],
        "",
    ),
    "twice the right value": (lambda t: [2 * (t["linear"] + t["softmax"])] * RANKS, ""),
    "one number off": (
        lambda t: [t["linear"] + t["raw"] + 1e-3 * torch.eye(4, 6)] * RANKS,
        "",
    ),
    "other numbers": (lambda t: [t["linear"] ** 2, t["softmax"].roll(1, 0)], ""),
    "one rank of two": (lambda t: [t["linear"] + t["raw"], t["linear"] + t["softmax"]], ""),
}


@pytest.mark.parametrize("made, said", MADE.values(), ids=MADE)
def test_a_gradient_is_made_of_terms(made: Any, said: str) -> None:
    """A sentence only where it gives all numbers of all ranks; of what is right there is none."""
    tape, y, terms = taped()
    found = explain_by_terms(tape, y, ranks(*made(terms)))
    assert re.search(said, found) if said else not found, found


def test_what_is_drawn_or_written_into_says_nothing() -> None:
    """What gives other numbers when it runs again has no term, nor what was given others."""
    for spoil in (F.dropout, lambda y: y.add_(1.0)):
        torch.manual_seed(0)
        tape = GradientTape()
        with tape:
            y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True) * 2
            z = y.exp()
            (z.sum() + spoil(y).square().sum()).backward()
        assert explain_by_terms(tape, y, ranks(z.detach())) == ""


# ---- Elements that one rank owns.


def owned(masked: bool, own: bool = True) -> tuple[GradientTape, list[list[RecordedTensor]]]:
    """Ranks have the right gradient of every other element; the others are zero, or are not."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True, dtype=torch.float64)
    tape = GradientTape()
    with tape:
        y = x.exp()
        y.square().sum().backward()
    want = tape.gradient(y)
    found = []
    for rank in range(RANKS):
        mine = (torch.arange(24).reshape(4, 6) % RANKS) == (rank if own else 0)
        other = torch.zeros_like(want) if masked else torch.randn_like(want)
        found.append([RecordedTensor(y.detach(), torch.where(mine, want, other))])
    return tape, found


def test_what_others_add_to_an_element() -> None:
    """Said where each element is right on one rank alone and others are not zero; else nothing."""
    assert "zero is due" in explain_unmasked(*owned(masked=False))
    assert explain_unmasked(*owned(masked=True)) == ""
    assert explain_unmasked(*owned(masked=False, own=False)) == ""
    tape, (first, _) = owned(masked=False)
    assert explain_unmasked(tape, [first]) == "" and explain_unmasked(tape, [first, first]) == ""


# ---- Places that an output depends on.


def windowed(x: Tensor, window: int) -> Tensor:
    """The sum over a window of words before each."""
    far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = ((far >= 0) & (far < window)).to(x.dtype)
    return torch.einsum("ij,bjd->bid", seen, x.cumsum(-1))


def sights(window: int, scale: float = 1.0) -> str:
    """What is said of another window than three, and of another scale, on two parts of words."""
    batch = {"x": torch.randn(2, 6, 3, dtype=torch.float64)}
    (made,) = change_batches(batch)
    batches = [batch["x"], *(one.batch["x"] for one in made)]
    right = [windowed(x, 3) for x in batches]
    numbers = torch.arange(12).reshape(2, 6)
    parts = [
        RankOutputs([scale * windowed(x, window)[:, cut] for x in batches], numbers[:, cut])
        for cut in (slice(0, 3), slice(3, 6))
    ]
    return explain_dependence(right, parts, made)


def test_a_window_that_is_another_is_told() -> None:
    """Which place depends on which, if only one side does; numbers alone say nothing."""
    assert sights(3) == sights(3, scale=1.1) == ""
    more = sights(6)
    assert (
        more.startswith("place 3 depends on place 0 of `x` (6 such pairs)") and "too much" in more
    )
    less = sights(2)
    assert less.startswith("place 2 does not depend on place 0 of `x`") and "missing" in less


def test_places_that_are_changed() -> None:
    """Other numbers of the batch's own; no masks, and nothing without places."""
    ids = torch.tensor([[3, 5, 7], [5, 7, 3]])
    batch = {"ids": ids, "attention_mask": torch.ones(2, 3).long(), "labels": torch.tensor([1, 2])}
    (made,) = change_batches(batch)
    assert [one.place for one in made] == [0, 1, 2]
    for one in made:
        assert isinstance(one, ChangedBatch) and set(one.batch["ids"].unique().tolist()) <= {
            3,
            5,
            7,
        }
        other = (one.batch["ids"] != ids).any(0)
        assert other.nonzero().flatten().tolist() == [one.place]
        assert bool((one.batch["ids"][:, one.place] != ids[:, one.place]).all())


# ---- Whole programs.


def bent(catch: Any, place: str, backward: bool) -> Any:
    """The mended program, with an output or a gradient off by a square: none of the causes."""

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if not backward:
            return output + 0.05 * output.square()
        output.register_hook(lambda g: g + 5 * g.square())
        return output

    def program(model: Any) -> TrainingProgram:
        made: TrainingProgram = catch.right(model)
        model.get_submodule(place).register_forward_hook(hook)
        return made

    return program


@pytest.mark.parametrize(
    "catch, place, backward",
    [
        (sentinel_slots, "inner.router", True),
        (expert_inputs, "embed", True),
        (identity_backward, "head", True),
        (lost_window, "inner", False),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)).rpartition(".")[2],
)
def test_another_mistake_has_none_of_these_causes(
    pool: Pool, catch: Any, place: str, backward: bool
) -> None:
    """The same module in the mended program, wrong in a way of its own: no cause is said."""
    said = judged(catch, bent(catch, place, backward), pool)
    assert f"`{place}`" in said["first module"] and "elements are wrong" in said["first module"]
    assert not any(cause in said["first module"] for cause in CAUSES), said


def test_microbatches_or_ranks(pool: Pool) -> None:
    """What averages over ranks leave is a factor of microbatches; else it may be the ranks'."""
    said = judged(accumulated_means, accumulated_means.wrong, pool)
    assert "microbatches = 2 times" in said["gradients"] and "ranks" not in said["gradients"]
    said = judged(experts_doubled, experts_doubled.wrong, pool)
    assert "ranks = 2 times" in said["gradients"] and "microbatches" not in said["gradients"]
    assert "microbatches" not in judged(unsynchronised, unsynchronised.wrong, pool)["gradients"]


# ---- Parts of a batch that weigh otherwise.


@dataclass(frozen=True)
class Known:
    """The gradients of one cut of the rows, or of the words."""

    rows: Sequence[PartGradients] = ()
    words: Sequence[PartGradients] = ()

    def split_by_rows(self, *_: str) -> Iterator[PartGradients]:
        """Those of rows."""
        return iter(self.rows)

    def split_by_tokens(self, *_: str) -> Iterator[PartGradients]:
        """Those of words."""
        return iter(self.words)

    def label_counts_by_part(self, _: str) -> list[list[int]]:
        """No labels."""
        return []

    def label_counts(self, _: str) -> dict[str, int]:
        """Likewise."""
        return {}


def test_few_numbers_tell_the_weights_of_parts() -> None:
    """Eight numbers of a bias are enough for four parts; what is no sum of them is not said so."""
    torch.manual_seed(0)
    parts = [torch.randn(8, dtype=torch.float64) for _ in range(4)]
    want = sum(part * weight for part, weight in zip(parts, (0.1, 0.2, 0.3, 0.4)))
    got = sum(part * weight for part, weight in zip(parts, (0.1, 0.2, 0.6, 0.0)))
    said = explain_gradient(want, got, [], {}, Known([PartGradients(parts)]), ROW)
    assert said.text == "4 parts of the batch count 1, 1, 2, 0 times what they should"
    other = got + 1e-3 * parts[0].square()
    assert (
        "parts"
        not in explain_gradient(want, other, [], {}, Known([PartGradients(parts)]), ROW).text
    )
    lost = got.clone()
    lost[0] = torch.inf
    assert (
        "not finite"
        in explain_gradient(want, lost, [], {}, Known([PartGradients(parts)]), ROW).text
    )
    of_words = explain_gradient(
        want, got, [], {}, Known((), [PartGradients(parts, "the words")]), ROW
    )
    assert of_words.text == "4 parts of the words count 1, 1, 2, 0 times what they should"
