"""Outputs of whole batches, joined from parts: metrics in training, and outputs that cannot be
joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.passes.prove import Case, prove
from schedlang.report import Report
from schedlang.runtime.batch import MissingOutput, stack_outputs
from schedlang.runtime.full_tensors import drop_missing
from schedlang.runtime.launch.pool import Pool
from tests import models
from tests.proofs import Batch, assert_proven, make_plan


class MetricModel(nn.Module):
    """Returns a mean, a count of rows and a value for each pair beside its loss."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.wrong = nn.Linear(4, 6), nn.Linear(6, 2), wrong
        self.double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.two(self.one(x).tanh())
        size = h.abs().mean()
        if self.wrong and self.training and dist.is_initialized():
            size = size * 1.5
        output = {"loss": h.square().mean(), "size": size.detach(), "pairs": h.reshape(-1, 1)}
        return {**output, "rows": len(x), "many": torch.tensor(len(x)), "name": "metered"}


def batch(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 4, generator=generator, dtype=torch.float64)}


BATCHES = (batch(7, 1), batch(6, 2))


def prove_metrics(pool: Pool, wrong: bool) -> Report:
    plan = make_plan(MetricModel(wrong), "zero(stage=0, over=dp)", "dp=2")
    return prove(Case(plan, BATCHES, dtype="none"), pool=pool)


def test_metrics_in_training_are_compared(pool: Pool) -> None:
    """A metric that is wrong only in training, with right loss and gradients, fails."""
    report = prove_metrics(pool, wrong=False)
    assert report.ok, str(report)
    names = {row.name for row in report.rows if row.kind == "training outputs"}
    assert names == {"loss", "size", "pairs"}
    wrong_report = prove_metrics(pool, wrong=True)
    failed = {(row.kind, row.name) for row in wrong_report.rows if not row.ok}
    assert failed == {("training outputs", "size")}, failed


def test_counts_of_parts_are_left_out_and_said(pool: Pool) -> None:
    """A count that differs between parts is None for a user, and a gap in the report."""
    conditions = [gap.condition for gap in prove_metrics(pool, wrong=False).gaps]
    assert any("`rows`" in condition for condition in conditions) and any(
        "`many`" in condition for condition in conditions
    )


def test_parts_that_agree_or_do_not() -> None:
    """Multiples of rows are joined; equal values stay; others are missing."""
    parts = [
        {"tokens": torch.ones(4, 3), "n": torch.tensor(2), "f": 1.0, "c": object()},
        {"tokens": torch.zeros(2, 3), "n": torch.tensor(2), "f": 4.0, "c": object()},
    ]
    stacked, missing = drop_missing(stack_outputs(parts, [2, 1], [1.0, 3.0]))
    assert stacked["tokens"].shape == (6, 3) and stacked["n"] == 2
    assert stacked["f"] == pytest.approx(3.25) and stacked["c"] is None and list(missing) == ["c"]
    assert isinstance(stack_outputs([1, 2], [1, 1], [1.0, 1.0]), MissingOutput)
    assert stack_outputs([object], [1], [1.0]) is object


def test_lists_with_an_entry_for_each_sample() -> None:
    """Lists with an entry per sample are joined; ambiguous ones, such as lists of layers, are
    missing."""
    three, two, matrices = [torch.ones(5)] * 3, [torch.zeros(5)] * 2, [torch.ones(3, 2)] * 3
    parts = [{"a": three, "z": torch.ones(3)}, {"a": two, "z": torch.zeros(2)}]
    stacked = stack_outputs(parts, [3, 2], [1.0, 1.0])
    assert [entry[0].item() for entry in stacked["a"]] == [1, 1, 1, 0, 0]
    assert stacked["z"].tolist() == [1, 1, 1, 0, 0]
    assert isinstance(stack_outputs([three, three], [3, 3], [1.0, 1.0]), MissingOutput)
    assert isinstance(stack_outputs([three, two], [4, 4], [1.0, 1.0]), MissingOutput)
    assert [entry.shape for entry in stack_outputs([matrices, matrices], [3, 3], [1.0, 1.0])] == [
        (6, 2)
    ] * 3
    assert stack_outputs([(1.0, 2.0), (3.0, 4.0)], [2, 2], [1.0, 1.0]) == (2.0, 3.0)


class SampleLists(nn.Module):
    """Returns a list of features of each sample, as image models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.one(x).tanh()
        return {"loss": self.two(h).square().mean(), "pieces": list(h.unbind()), "after": h}


def test_samples_by_themselves_do_not_shift_what_stands_behind_them(pool: Pool) -> None:
    """Parts have shorter lists than the batch; the other outputs are compared, the list is
    reported."""
    plan = make_plan(SampleLists(), "zero(stage=0, over=dp)", "dp=2")
    report = prove(Case(plan, BATCHES, dtype="none"), pool=pool)
    assert report.ok, str(report)
    names = {row.name for row in report.rows if row.kind == "training outputs"}
    assert {"loss", "after"} <= names, names
    assert any("`pieces`" in gap.condition for gap in report.gaps)


class ListModel(nn.Module):
    """Returns a list into which every layer writes a value, as into a cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ListLayer() for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        values: list[Tensor] = []
        states = [x]
        for layer in self.layers:
            x = layer(x, values)
            states.append(x)
        return {"loss": x.square().mean(), "y": x, "kept": values, "states": states}


class ListLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor, values: list[Tensor]) -> Tensor:
        values.append(self.mix(x) * 2)
        return self.mix(x).tanh()


def test_what_other_stages_keep_is_left_out_and_said(pool: Pool) -> None:
    """Values from inside of earlier stages are None, and a gap in the report.

    What an earlier unit itself returned is sent on and compared.
    """
    rows = 'layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    report = assert_proven(pool, make_plan(ListModel(), rows, "pp=2"), BATCHES)
    assert any("`kept`" in gap.condition for gap in report.gaps), report.gaps
    assert {row.name for row in report.rows if row.kind == "outputs"} >= {
        *("y", "loss", "states.0", "states.1", "states.2")
    }


def test_hidden_states_of_transformers(pool: Pool) -> None:
    """Compared where ranks have whole models; between stages they are left out and reported."""
    model: Any = models.gpt2(2)
    model.config.output_hidden_states = True
    states = {f"hidden_states.{k}" for k in range(3)}
    batches = [models.tokens(rows=6)]
    report = assert_proven(pool, make_plan(model, "zero(stage=0, over=dp)", "dp=2"), batches)
    assert states <= {row.name for row in report.rows if row.kind == "training outputs"}
    rows = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    report = assert_proven(pool, make_plan(model, rows, "pp=2"), batches)
    assert not states & {row.name for row in report.rows}
    assert any("`hidden_states`" in gap.condition for gap in report.gaps)


@pytest.mark.parametrize("stage", [1, 3])
def test_hidden_states_that_the_loss_reads_under_slices(stage: int, pool: Pool) -> None:
    """transformers' hooks also collect them where torch has replaced the model's class."""
    model: Any = models.gpt2(2).transformer
    model.config.output_hidden_states = True
    batches = [{"input_ids": models.tokens(rows=6)["input_ids"]}]
    plan = make_plan(model, f"zero(stage={stage}, over=dp)", "dp=2")
    report = assert_proven(pool, plan, batches, loss=loss_of_states)
    assert "hidden_states.1" in {row.name for row in report.rows if row.kind == "outputs"}


def loss_of_states(output: Any, batch: Batch) -> Tensor:
    return output.last_hidden_state.mean() + output.hidden_states[1].square().mean()


class Weighted(nn.Module):
    """Returns what it computes, and a parameter by which the loss weighs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both."""
        return self.linear(x), self.weight


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_parameter_as_output(stage: int, threads: Any) -> None:
    """A proof compares it as it was before the step; hooks on it are no hooks of the user."""
    plan = make_plan(Weighted(), f"zero(stage={stage}, over=dp)", "dp=2")
    batches = [{"x": torch.randn(4, 4)} for _ in range(2)]
    loss = lambda output, batch: (output[0] * output[1].exp()).square().mean()  # noqa: E731
    assert_proven(threads, plan, batches, loss=loss)
