"""Causes that a verdict gives for a wrong gradient or output: only if they explain all of it."""

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
from tests.judging.catches.language_model import original

RANKS = 2
ROW = Row("SGD", "gradients", "bias", 1.0, 1e-9, False, 0)
CAUSES = ("its derivative", "counts", "missing", "a term of", "zero is due", "depends on")


def judge_catch(catch: Any, program: Any, pool: Pool) -> dict[str, str]:
    """Return the messages of the verdict on a wrong program."""
    torch.manual_seed(0)
    inputs = original(catch)
    report = verify_program(program, **inputs, ranks=2, pool=pool)
    assert report.exit_code == 1, str(report)
    return dict(report.localised)


# ---- The terms of a gradient.


def record_terms() -> tuple[GradientTape, Tensor, dict[str, Tensor]]:
    """Return a tape, a tensor that two functions use, and its gradient terms by hand."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True, dtype=torch.float64)
    weight, factor = (torch.randn(n, 6, dtype=torch.float64) for n in (5, 4))
    tape = GradientTape()
    with tape:
        y = x * 2.0
        linear = F.linear(y, weight)
        soft = y.log_softmax(-1)
        total = linear.square().sum() + (soft * factor).sum()
    total.backward()
    output_grad = factor
    terms = {
        "linear": 2 * F.linear(y.detach(), weight) @ weight,
        "softmax": output_grad - soft.detach().exp() * output_grad.sum(-1, keepdim=True),
        "raw": output_grad,
    }
    return tape, y, terms


def rank_gradients(*values: Tensor) -> list[RankGradient]:
    """Return each rank's full gradient."""
    return [RankGradient(k, v.flatten(), torch.arange(v.numel())) for k, v in enumerate(values)]


def test_terms_add_up_to_what_autograd_gives() -> None:
    """Each function's term equals the derivative by hand."""
    tape, y, expected = record_terms()
    terms = tape.terms(y)
    assert [term.call.name.split("`")[1] for term in terms] == ["linear", "log_softmax"]
    for term, name in zip(terms, ("linear", "softmax")):
        assert torch.allclose(term.gradient, expected[name], rtol=1e-12, atol=1e-12)
    assert torch.allclose(terms[1].output_gradient, expected["raw"])


GRADIENTS: dict[str, tuple[Callable[[Any], list[Tensor]], str]] = {
    "right": (lambda t: [t["linear"] + t["softmax"]] * RANKS, ""),
    "an identity": (lambda t: [t["linear"] + t["raw"]] * RANKS, "its derivative is left out"),
    "a term that is missing": (lambda t: [t["linear"]] * RANKS, "`log_softmax` .*is missing"),
    "a term twice": (
        lambda t: [2 * t["linear"] + t["softmax"]] * RANKS,
        "`linear` outside of all modules sends back counts 2 times",
    ),
    "a term that is missing, of an average": (
        lambda t: [2 * t["linear"]] * RANKS,
        "^what `log_softmax` [a-z ]* is missing$",
    ),
    "a term twice, of an average": (
        lambda t: [4 * t["linear"] + 2 * t["softmax"]] * RANKS,
        "^what `linear` [a-z ]* counts 2 times$",
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


@pytest.mark.parametrize("made, said", GRADIENTS.values(), ids=GRADIENTS)
def test_a_gradient_is_made_of_terms(made: Any, said: str) -> None:
    """An explanation is given only if it fits all numbers; right gradients have none."""
    tape, y, terms = record_terms()
    explanation = explain_by_terms(tape, y, rank_gradients(*made(terms)))
    assert re.search(said, explanation) if said else not explanation, explanation


def test_what_is_drawn_or_written_into_says_nothing() -> None:
    """Random or in-place functions give no explanation."""
    for spoil in (F.dropout, lambda y: y.add_(1.0)):
        torch.manual_seed(0)
        tape = GradientTape()
        with tape:
            y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True) * 2
            z = y.exp()
            (z.sum() + spoil(y).square().sum()).backward()
        assert explain_by_terms(tape, y, rank_gradients(z.detach())) == ""


# ---- Elements that one rank owns.


def record_owned(masked: bool, own: bool = True) -> tuple[GradientTape, list[list[RecordedTensor]]]:
    """Return a tape, and ranks that are right for every other element, else zero or random."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True, dtype=torch.float64)
    tape = GradientTape()
    with tape:
        y = x.exp()
        y.square().sum().backward()
    expected = tape.gradient(y)
    recorded = []
    for rank in range(RANKS):
        is_own = (torch.arange(24).reshape(4, 6) % RANKS) == (rank if own else 0)
        other_values = torch.zeros_like(expected) if masked else torch.randn_like(expected)
        recorded.append([RecordedTensor(y.detach(), torch.where(is_own, expected, other_values))])
    return tape, recorded


def test_what_others_add_to_an_element() -> None:
    """Reported only if each element is right on one rank and not zero on the others."""
    assert "zero is due" in explain_unmasked(*record_owned(masked=False))
    assert explain_unmasked(*record_owned(masked=True)) == ""
    assert explain_unmasked(*record_owned(masked=False, own=False)) == ""
    tape, (first_rank, _) = record_owned(masked=False)
    assert (
        explain_unmasked(tape, [first_rank]) == ""
        and explain_unmasked(tape, [first_rank, first_rank]) == ""
    )


# ---- Places that an output depends on.


def window_sum(x: Tensor, window: int) -> Tensor:
    """Return the sum over a window of tokens before each."""
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    visible = ((distance >= 0) & (distance < window)).to(x.dtype)
    return torch.einsum("ij,bjd->bid", visible, x.cumsum(-1))


def explain_window(window: int, scale: float = 1.0) -> str:
    """Return the explanation for another window than 3, or scale, on two parts of tokens."""
    batch = {"x": torch.randn(2, 6, 3, dtype=torch.float64)}
    (changed,) = change_batches(batch)
    batches = [batch["x"], *(changed_batch.batch["x"] for changed_batch in changed)]
    expected = [window_sum(x, 3) for x in batches]
    numbers = torch.arange(12).reshape(2, 6)
    parts = [
        RankOutputs([scale * window_sum(x, window)[:, cut] for x in batches], numbers[:, cut])
        for cut in (slice(0, 3), slice(3, 6))
    ]
    return explain_dependence(expected, parts, changed)


def test_a_window_that_is_another_is_told() -> None:
    """A wrong dependence between positions is reported; wrong numbers alone are not."""
    assert explain_window(3) == explain_window(3, scale=1.1) == ""
    too_wide = explain_window(6)
    assert (
        too_wide.startswith("place 3 depends on place 0 of `x` (6 such pairs)")
        and "too much" in too_wide
    )
    too_narrow = explain_window(2)
    assert (
        too_narrow.startswith("place 2 does not depend on place 0 of `x`")
        and "missing" in too_narrow
    )


def test_places_that_are_changed() -> None:
    """Changed batches change one position to other values of the batch; masks stay."""
    ids = torch.tensor([[3, 5, 7], [5, 7, 3]])
    batch = {"ids": ids, "attention_mask": torch.ones(2, 3).long(), "labels": torch.tensor([1, 2])}
    (changed,) = change_batches(batch)
    assert [changed_batch.place for changed_batch in changed] == [0, 1, 2]
    for changed_batch in changed:
        assert isinstance(changed_batch, ChangedBatch) and set(
            changed_batch.batch["ids"].unique().tolist()
        ) <= {
            3,
            5,
            7,
        }
        differs = (changed_batch.batch["ids"] != ids).any(0)
        assert differs.nonzero().flatten().tolist() == [changed_batch.place]
        assert bool(
            (
                changed_batch.batch["ids"][:, changed_batch.place] != ids[:, changed_batch.place]
            ).all()
        )


# ---- Whole programs.


def with_error(catch: Any, place: str, backward: bool) -> Any:
    """Return the fixed program with a squared error in an output or gradient."""

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if not backward:
            return output + 0.05 * output.square()
        output.register_hook(lambda g: g + 5 * g.square())
        return output

    def program(model: Any) -> TrainingProgram:
        right_program: TrainingProgram = catch.right(model)
        model.get_submodule(place).register_forward_hook(hook)
        return right_program

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
    """Another mistake in the same module is located, but no cause is given."""
    messages = judge_catch(catch, with_error(catch, place, backward), pool)
    assert (
        f"`{place}`" in messages["first module"]
        and "elements are wrong" in messages["first module"]
    )
    assert not any(cause in messages["first module"] for cause in CAUSES), messages


def test_microbatches_or_ranks(pool: Pool) -> None:
    """A factor of 2 is attributed to microbatches or to ranks, as it fits."""
    messages = judge_catch(accumulated_means, accumulated_means.wrong, pool)
    assert (
        "microbatches = 2 times" in messages["gradients"] and "ranks" not in messages["gradients"]
    )
    messages = judge_catch(experts_doubled, experts_doubled.wrong, pool)
    assert (
        "ranks = 2 times" in messages["gradients"] and "microbatches" not in messages["gradients"]
    )
    assert (
        "microbatches" not in judge_catch(unsynchronised, unsynchronised.wrong, pool)["gradients"]
    )


# ---- Parts of a batch that weigh otherwise.


@dataclass(frozen=True)
class FixedGradients:
    """Fixed gradients of one split of rows, or of tokens."""

    rows: Sequence[PartGradients] = ()
    words: Sequence[PartGradients] = ()

    def split_by_rows(self, *_: str) -> Iterator[PartGradients]:
        """Yield the gradients of parts of rows."""
        return iter(self.rows)

    def split_by_tokens(self, *_: str) -> Iterator[PartGradients]:
        """Yield the gradients of parts of tokens."""
        return iter(self.words)

    def split_into_rows(self, *_: str) -> Iterator[PartGradients]:
        """Yield no gradients of single rows."""
        return iter(())

    def label_counts_by_part(self, _: str) -> list[list[int]]:
        """Return no counts."""
        return []

    def label_counts(self, _: str) -> dict[str, int]:
        """Return no counts."""
        return {}


def test_few_numbers_tell_the_weights_of_parts() -> None:
    """Eight numbers of a bias determine the weights of four parts."""
    torch.manual_seed(0)
    parts = [torch.randn(8, dtype=torch.float64) for _ in range(4)]
    expected = sum(part * weight for part, weight in zip(parts, (0.1, 0.2, 0.3, 0.4)))
    actual = sum(part * weight for part, weight in zip(parts, (0.1, 0.2, 0.6, 0.0)))
    explanation = explain_gradient(
        expected, actual, [], {}, FixedGradients([PartGradients(parts)]), ROW
    )
    assert explanation.text == "4 parts of the batch count 1, 1, 2, 0 times what they should"
    not_a_sum = actual + 1e-3 * parts[0].square()
    assert (
        "parts"
        not in explain_gradient(
            expected, not_a_sum, [], {}, FixedGradients([PartGradients(parts)]), ROW
        ).text
    )
    not_finite = actual.clone()
    not_finite[0] = torch.inf
    assert (
        "not finite"
        in explain_gradient(
            expected, not_finite, [], {}, FixedGradients([PartGradients(parts)]), ROW
        ).text
    )
    token_explanation = explain_gradient(
        expected, actual, [], {}, FixedGradients((), [PartGradients(parts, "the words")]), ROW
    )
    assert token_explanation.text == "4 parts of the words count 1, 1, 2, 0 times what they should"
