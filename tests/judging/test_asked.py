"""Mistakes that values may not show: unwaited collectives, equal dropout masks, missing steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedlang import TrainingProgram, verify_program
from schedlang.passes.judge import async_collectives, gradient_errors, module_comparison
from schedlang.passes.judge.explanations import (
    INITIAL,
    _miscounts,
    _ranks_of_norm,
    _squared_norms,
    explain_initial_weights,
)
from schedlang.passes.judge.optimizer_steps import diverged_parameters, explain_steps
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.regions import RankCopy, Region
from schedlang.passes.judge.tensor_search import FullTensor
from schedlang.passes.verify.mapped_tensors import map_tensor
from schedlang.passes.verify.observe import Key, Observation
from schedlang.report import Report, Row
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.collectives import world_size
from tests.judging.catches.language_model import WIDTH, LanguageModel, batch, loss


def model() -> nn.Module:
    """Return a language model with dropout."""
    return LanguageModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)))


def program(waits: bool, alike: bool, again: bool) -> Any:
    """Return a program with all rows on each rank, and gradients averaged by async collectives.

    alike  all ranks have the same seed
    again  recomputation restores the random state
    """

    def program(model: Any) -> TrainingProgram:
        torch.manual_seed(0 if alike else dist.get_rank())
        plain_forward = model.inner.forward

        def step(batch: Any) -> Tensor:
            value = loss(model(batch["ids"]), batch)
            value.backward()
            narrow = torch.zeros((), dtype=torch.bfloat16)
            works = [dist.all_reduce(narrow, async_op=True)]
            for p in model.parameters():
                p.grad /= world_size()
                works.append(dist.all_reduce(p.grad, async_op=True))
            for work in works[1 - waits :]:
                work.wait()
            return value

        keep = {"use_reentrant": False, "preserve_rng_state": again}
        model.inner.forward = lambda x: checkpoint(plain_forward, x, **keep)
        return TrainingProgram(model, step, world_loss="same")

    return program


def judge_program(build: Any, pool: Pool) -> Report:
    """Return the verdict on two ranks."""
    torch.manual_seed(0)
    return verify_program(build, model=model(), batch=batch, loss=loss, ranks=2, pool=pool)


def test_what_is_waited_for_and_drawn_alike_passes(pool: Pool) -> None:
    """A right program passes; the report says that float64 stands in for bfloat16."""
    report = judge_program(program(waits=True, alike=True, again=True), pool)
    assert report.ok, str(report)
    assert "bfloat16 (float64 stands in for it" in report.gaps[0].condition, report.gaps


def test_what_no_value_shows_fails(pool: Pool) -> None:
    """An unwaited collective is named by its line, equal masks by their module."""
    report = judge_program(program(waits=False, alike=False, again=True), pool)
    (first_kind, unwaited), (second_kind, masks) = report.localised
    assert (first_kind, second_kind) == ("collectives", "dropout"), str(report)
    assert unwaited.startswith("`all_reduce` (test_asked.py:") and "on rank 0, 1 nobody" in unwaited
    assert masks.startswith("`inner.1`: ranks 0, 1 have the same of it, and draw"), masks
    assert {row.kind for row in report.rows if not row.ok} == {"collectives", "dropout"}


def test_a_recomputation_that_draws_anew(pool: Pool) -> None:
    """A recomputation with other masks than the forward is named."""
    report = judge_program(program(waits=True, alike=True, again=False), pool)
    ((kind, message),) = report.localised
    assert kind == "dropout" and message.startswith("`inner.1`: it is computed again with another")


def test_a_work_that_is_asked_counts_as_waited_for() -> None:
    """Any call of the returned work counts as waiting; the proxy is a `dist.Work`."""
    monitor = async_collectives.CallMonitor()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    work = torch._C._distributed_c10d._create_work_from_future(future)
    future.set_result(torch.zeros(()))
    for method in ("wait", "get_future", "is_completed"):
        watched = monitor.monitor(dist.all_reduce, work)
        assert isinstance(watched, dist.Work) and [*monitor.unwaited.values()][0][0] == "all_reduce"
        getattr(watched, method)()
        assert not monitor.unwaited
    assert monitor.monitor(dist.isend, work) is work


def test_a_rank_without_a_gradient_of_its_part() -> None:
    """Ranks whose part has no gradient are named, if the parts of all others are right."""
    full = torch.tensor([1.0, 2.0, 5.0, 7.0], dtype=torch.float64)
    regions = [Region.from_numbers(torch.tensor(numbers)) for numbers in ([0, 1], [2, 3])]
    part = Region.from_numbers(torch.arange(2))
    for held, said in ((full[:2], "right on rank 0; there is none on rank 1"), (-full[:2], "")):
        copies = [
            RankCopy(rank, "w", part, region, map_tensor(held, None) if rank == 0 else None)
            for rank, region in enumerate(regions)
        ]
        text = gradient_errors._explain_absent(full, copies)
        assert text.startswith(said) and bool(text) == bool(said), text


def test_a_norm_of_slices_that_ranks_have_twice() -> None:
    """On a hybrid mesh: norms that miss slices, or count each rank's copy."""
    slices = {0: [0, 1], 1: [2], 2: [0, 1], 3: [2]}
    full = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    copies = [
        RankCopy(
            rank, "w", *[Region.from_numbers(torch.tensor(numbers))] * 2, map_tensor(full, None)
        )
        for rank, numbers in slices.items()
    ]
    assert _squared_norms(copies) == [[5.0, 5.0], [25.0, 25.0]]
    amounts = {phrase: amount for _, amount, phrase in _miscounts({"w": _squared_norms(copies)})}
    assert amounts["it counts each rank's copy of"] == 30.0
    assert amounts["it leaves out what ranks but the first hold of"] == -25.0
    assert amounts["it leaves out"] == -30.0


def test_a_norm_of_some_ranks() -> None:
    """Norms of what one rank holds, or the ranks of one axis, are told by these ranks."""
    whole = Region.from_numbers(torch.arange(1))
    copies = [
        RankCopy(rank, "w", whole, whole, map_tensor(torch.tensor([value]).double(), None))
        for rank, value in enumerate((1.0, 2.0, 4.0, 8.0))
    ]
    for square, ranks in ((1, [0]), (5, [0, 1]), (17, [0, 2]), (85, []), (4, [])):
        assert [*(_ranks_of_norm(copies, 4, square**0.5) or [])] == ranks


def test_zigzag_parts_of_repeated_values() -> None:
    """A block of rows with the outer chunks of tokens is found, though tokens occur many times."""
    torch.manual_seed(0)
    ids = torch.randint(24, (8, 8))
    full = torch.randn(24, 16, dtype=torch.float64)[ids]
    tokens = torch.tensor([0, 1, 6, 7])
    for rows in (slice(0, 4), slice(4, 8), slice(1, 8, 2)):
        window = FullTensor(full).find_window(full[rows][:, tokens])
        assert window is not None and window[1].equal(tokens)
        assert window[0].equal(torch.arange(8)[rows])
    assert FullTensor(full).find_window(full[:4, tokens] + 1e-3) is None


def test_a_part_in_another_order_is_found() -> None:
    """A permuted part is found even where every value occurs several times."""
    full = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 1, 0, 0, 1, 1, 1.0]]).double()
    full = torch.stack([full, 1 - full, full + torch.arange(8) // 4], 2)
    for order in ([0, 1, 6, 7], [6, 0, 7, 1]):
        window = FullTensor(full).find_window(full[:, order])
        assert window is None or window[1].tolist() == order
    window_found = FullTensor(torch.arange(8.0).expand(2, 8).double()).find_window(
        torch.tensor([[6.0, 0, 7, 1]] * 2).double()
    )
    assert window_found is not None and window_found[1].tolist() == [6, 0, 7, 1]
    repeated = torch.ones(2, 8).double()
    assert FullTensor(repeated).find_window(repeated[:, :4]) is None


ROW = Row("SGD", "parameters", "w", 0.3, 1e-9, False, 0)
BEFORE, CHANGE = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.3, 0.2])


@pytest.mark.parametrize(
    "now, said",
    [
        (BEFORE, "1 of 1 (`w`): not stepped: they are what they were before; gradients are right"),
        (BEFORE + 2 * CHANGE, "each step is ranks = 2 times the right one: a rate"),
        (BEFORE + CHANGE * torch.tensor([1, 1, 0]), "1 of 3 elements are not stepped"),
        (BEFORE + torch.tensor([0.5, 0.1, 0.1]), ""),
    ],
)
def test_how_a_step_is_another(now: Tensor, said: str) -> None:
    """Wrong optimizer steps are explained by the change that the optimizer adds."""
    key = Key("SGD", "parameters", 0, "w")
    sides = Observation({key: BEFORE + CHANGE}), Observation({key: now})
    initial: Mapping[str, Any] = {"w": BEFORE}
    record = RunRecord(initial=dict(initial))
    texts = [text for _, text in explain_steps([ROW], ROW, *sides, record, {"ranks": 2})]
    assert all(said in text for text in texts) and bool(texts) == bool(said), texts


@pytest.mark.parametrize("share, said", [(0.99, "0.01 of each weight too much"), (1.01, "little")])
def test_another_weight_decay_is_told(share: float, said: str) -> None:
    """A step that differs by a share of the weight itself has another weight decay."""
    before = BEFORE.double()
    key = Key("SGD", "parameters", 0, "w")
    sides = [Observation({key: factor * before + CHANGE}) for factor in (1.0, share)]
    record = RunRecord(initial={"w": before})
    (text,) = [text for _, text in explain_steps([ROW], ROW, *sides, record, {"ranks": 2})]
    assert said in text and "another weight decay" in text, text


def test_copies_that_a_step_leaves_apart() -> None:
    """Copies that differ after a step are named although rank 0 is right."""
    later = Row("SGD", "loss", "loss", 0.1, 1e-9, False, 1)
    copies = Row("SGD", "replicas", "w", 0.1, 1e-9, False, 0)
    of_gradient = Row("SGD", "replicas", "gradient of w", 0.1, 1e-9, False, 0)
    assert diverged_parameters([later, copies], later) == ["w"]
    assert diverged_parameters([later, copies, of_gradient], later) == []
    assert diverged_parameters([later], later) == []


def test_weights_that_are_nowhere_are_told_by_how() -> None:
    """Missing initial weights are grouped by their note."""
    rows = [
        Row("", INITIAL, name, 1.0, 0.0, False, None, note)
        for name, note in (("a", "on no rank"), ("b", "3 of its 8 elements are on no rank"))
    ]
    ((_, message),) = explain_initial_weights(
        [*rows, Row("", INITIAL, "c", 1.0, 0.0, False, None, rows[0].note)]
    )
    assert message.startswith("2 (`a`, `c`): on no rank; 1 (`b`): 3 of its 8 elements")


def test_a_sum_that_has_a_row_too_much() -> None:
    """A bias that is added twice is the same difference in all rows; other differences are not."""
    row = torch.tensor([1.0, -2.0])
    assert module_comparison._has_equal_rows(row.expand(3, 4, 2))
    assert not module_comparison._has_equal_rows(torch.arange(24.0).reshape(3, 4, 2))
    assert not module_comparison._has_equal_rows(torch.zeros(3, 2))
