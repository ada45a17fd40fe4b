"""Adaptive compression of activations: bits by tensor, sensitivity, equal tables on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.compressed_activations import (
    BIT_CHOICES,
    allot_bits,
    find_bit_table,
    gradient_variance,
)
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.propagate.propagate import backward_root_of
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.account import account
from schedlang.runtime.activation_memory.costs import SavedPlace, find_places
from schedlang.runtime.forward import layers_of
from tests import models
from tests.engine import Threads
from tests.memory.test_compressed_activations import (
    PIPELINE,
    gpt2_dropout,
    random_tensor,
    saved_bytes,
    token_batches,
)
from tests.proofs import assert_proven, make_plan, sgd, train_sequential
from tests.tiers import thin_out
from tests.zoo.scenes import GPT2, LLAMA

ROW = "transformer.h.*  compress(activations, adaptive, bits={}, block=32)\n"
LLAMA_ROW = "model.layers.*  compress(activations, adaptive, bits={}, block=16)\n"
MLP_CHECKPOINT = "transformer.h.*.mlp  checkpoint()\n"


# -- shares of a budget ----------------------------------------------------------------------------

TENSORS = st.lists(st.tuples(st.integers(1, 50), st.integers(-20, 20)), min_size=1, max_size=5)


@given(TENSORS, st.floats(2, 8))
def test_a_budget_is_kept_and_well_spent(some: list[tuple[int, int]], budget: float) -> None:
    """No more bits than the budget; the variance is at most that of equal bits for all, and of the
    best choice with one step less."""
    elements, changes = [size for size, _ in some], [2.0**power for _, power in some]
    bits = allot_bits(elements, changes, budget)
    total = budget * sum(elements)

    def room(choice: Any) -> float:
        return float(sum(b * n for b, n in zip(choice, elements)))

    assert set(bits) <= set(BIT_CHOICES) and room(bits) <= total + 1e-9
    uniform = [max(c for c in BIT_CHOICES if c <= budget)] * len(bits)
    assert gradient_variance(changes, bits) <= gradient_variance(changes, uniform)
    step = 4 * max(elements)  # the most that one more tensor can take
    candidates = [
        choice
        for choice in itertools.product(BIT_CHOICES, repeat=len(bits))
        if room(choice) <= total - step
    ]
    if candidates:
        best = min(gradient_variance(changes, choice) for choice in candidates)
        assert gradient_variance(changes, bits) <= best * (1 + 1e-9)


def test_alike_tensors_share_alike() -> None:
    """Equal tensors get equal bits; a tensor that matters more gets more, one without effect
    fewest."""
    assert allot_bits([10, 10, 10], [1.0, 1.0, 1.0], 4) == [4, 4, 4]
    assert allot_bits([10, 10, 10], [1e6, 1.0, 0.0], 4) == [8, 2, 2]
    assert allot_bits([10, 10], [1.0, 1.0], 8) == [8, 8] and allot_bits(
        [10, 10], [1.0, 1.0], 2
    ) == [2, 2]


# -- what is measured ------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """Two linear layers in parallel, one with an input a hundred times as large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = nn.Linear(32, 4).double(), nn.Linear(32, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(100 * x).sum() + self.small(x).sum()


def test_sensitivity_is_the_variance_of_the_gradient() -> None:
    """The measured change is that of the weight's own gradient, whose variance grows with the
    square of the rounding."""
    x, model = random_tensor(64, 32).requires_grad_(), TwoLayers()
    costs = find_places(model, {"large": 32, "small": 32}, lambda: backward_root_of(model(x), None))
    (large,), (small,) = (
        [cost for saved_place, cost in costs.items() if saved_place.module == name]
        for name in ("large", "small")
    )
    assert set(costs) == {SavedPlace("large", 1), SavedPlace("small", 1)}
    assert large.elements == small.elements == 64 * 32 and large.site == "large"
    assert large.change is not None and small.change is not None
    assert large.change / small.change == pytest.approx(1e4, rel=0.5)
    step = float((x.max(1).values - x.min(1).values).square().mean()) / 15**2
    expected = 4 * 64 * 32 * step / 6  # of each of 4 rows: a rounding's mean square is step^2 / 6
    assert small.change == pytest.approx(expected, rel=0.3)


def test_more_bits_where_the_gradient_is_sensitive() -> None:
    """The larger input gets eight bits, the smaller two; a model without values has equal bits for
    all."""
    rows = "{large,small}  compress(activations, adaptive, bits=5, block=32)"
    batch = {"x": random_tensor(64, 32).requires_grad_()}
    table = find_bit_table(make_plan(TwoLayers(), rows, "", "lossy"), batch, None)
    assert [entry.bits for entry in table["large"]] == [8]
    assert [entry.bits for entry in table["small"]] == [2]
    with torch.device("meta"):
        empty = TwoLayers()
    table = find_bit_table(make_plan(empty, rows, "", "lossy"), batch, None)
    assert {entry.bits for entries in table.values() for entry in entries} == {4}


@pytest.mark.parametrize("budget", [3, 5])
def test_without_values_each_module_has_the_budget(budget: float) -> None:
    """On meta the bytes are those of a run within 5 %, and each module keeps the budget."""
    tables = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = models.gpt2(2)
        plan = make_plan(model, ROW.format(budget), "", "lossy")
        tables.append(find_bit_table(plan, models.tokens(rows=2), None))
    sizes = [
        sum(entry.bits * entry.elements for entries in table.values() for entry in entries)
        for table in tables
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
    for entries in tables[1].values():
        mean = sum(entry.bits * entry.elements for entry in entries) / sum(
            entry.elements for entry in entries
        )
        assert mean == pytest.approx(budget, rel=0.1)


def test_the_gradient_is_better_than_with_the_same_bits_for_all() -> None:
    """In a real model the gradient's error is below that of four bits for all, in the same
    memory."""
    batch, errors = models.tokens(rows=6), []
    exact = train_sequential(models.gpt2(2), [batch], sgd)
    for rows in (ROW.format(4), "transformer.h.*  compress(activations, int4, block=32)\n"):
        program = build(make_plan(models.gpt2(2), rows, "", "lossy"), batch, optimizer=sgd)
        total = 0.0
        for _ in range(4):  # learning rate 0: only the random draws differ
            for group in program.optimizer.param_groups:
                group["lr"] = 0.0
            program.train_step(batch)
            grads = program.gradients()
            total += sum(
                float((g - exact[f"grad 0 {n}"]).square().sum())
                for n, g in grads.items()
                if g is not None and f"grad 0 {n}" in exact
            )
        errors.append(total)
    assert errors[0] < 0.8 * errors[1]


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, rows, mesh",
    thin_out(
        [
            (gpt2_dropout, GPT2 + ROW.format(4), "tp=2"),
            (gpt2_dropout, ROW.format(3) + "zero(stage=3, over=dp)", "dp=2"),
            (lambda: models.llama(2), LLAMA + LLAMA_ROW.format(5), "tp=2"),
            (gpt2_dropout, ROW.format(2.5) + PIPELINE, "pp=2"),
            (gpt2_dropout, MLP_CHECKPOINT + ROW.format(4) + "zero(stage=1, over=dp)", "dp=2"),
        ],
        4,
    ),
)
def test_equal_to_one_process_with_the_same_table(
    threads: Threads, model: Callable[[], nn.Module], rows: str, mesh: str
) -> None:
    """Outputs, loss, gradients and training equal those of one process with the same table."""
    plan = make_plan(model(), rows, mesh, "lossy")
    bits = {
        entry.bits
        for entries in prepare(plan, token_batches()[0]).bits.values()
        for entry in entries
    }
    assert len(bits) > 1  # otherwise this is no test of different bits
    report = assert_proven(threads, plan, token_batches())
    assert report.equivalence == "relaxed (lossy)"


def test_another_table_is_found(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that uses the bits of the next tensor fails the proof."""
    from schedlang.runtime.activation_memory import quantized

    coding_of = quantized.QuantizedActivations.coding_of
    monkeypatch.setattr(
        quantized.QuantizedActivations,
        "coding_of",
        lambda self, number: coding_of(self, number + 1),
    )
    plan = make_plan(models.gpt2(1), ROW.format(4), "", "lossy")
    report = prove(Case(plan, tuple(token_batches()), None, None, 0, "none"), pool=threads)
    assert "gradients" in {row.kind for row in report.rows if not row.ok and not row.step}


def _bit_table(plan: Any, batches: list[Any]) -> Any:
    """Return the table of a program on a rank."""
    program = build(plan, batches[torch.distributed.get_rank()], optimizer=sgd, local=True)
    layers = layers_of(program.assembly.module.get_submodule("transformer.h.0"))
    assert layers is not None
    layer: Any = layers.kinds["code"]
    return dict(layer.bits)


def test_all_ranks_have_one_table(threads: Threads) -> None:
    """Ranks that measure with different batches use the first rank's table."""
    plan = make_plan(models.gpt2(1), ROW.format(4) + "zero(stage=0, over=dp)", "dp=2", "lossy")
    batches = [models.tokens(rows=3, seed=seed) for seed in range(2)]
    tables = threads.run(_bit_table, 2, plan, batches)
    expected = prepare(plan, batches[0]).bits["transformer.h.0"]
    assert tables[0] == tables[1] == {entry.number: entry.bits for entry in expected}


# -- bytes, words and refusals ---------------------------------------------------------------------


@pytest.mark.deep
def test_the_plan_knows_the_bytes_and_the_table() -> None:
    """The plan's peak has the bytes that modules save; its notes give the bits."""
    estimated, saved = saved_bytes(ROW.format(4))
    assert estimated == pytest.approx(saved, rel=0.1)
    batch = models.tokens(rows=4)
    plan = make_plan(models.gpt2(4), ROW.format(4), "", "lossy")
    notes = account(plan, batch, memory=True).notes
    assert any("8 bits for" in note and "2 bits for" in note for note in notes)
    assert any("bits for an element in the mean" in note for note in notes)


@pytest.mark.parametrize(
    "row, code, said",
    [
        ("transformer.h.*  compress(activations, int8, bits=4.5)", "S856", "adaptive"),
        ("transformer.h.*  compress(activations, adaptive, bits=1.5)", "S304", "2, 4 or 8"),
        ("transformer.h.*  compress(activations, adaptive, bits=9)", "S304", "2, 4 or 8"),
        ("compress(gradients, adaptive, over=dp)", "S856", "onebit"),
    ],
)
def test_refusals(row: str, code: str, said: str) -> None:
    """Budgets that no tensor can have, and rows that take no budget."""
    with pytest.raises(Refusal) as error:
        make_plan(models.gpt2(1), row, "dp=2", "lossy")
    assert code in error.value.render() and said in error.value.render()
