"""What values of a step do not show: works and masks of one's own, few bits, steps not taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedlang import TrainingProgram, verify_program
from schedlang.passes.judge import async_collectives, module_comparison
from schedlang.passes.judge.explanations import (
    INITIAL,
    _miscounts,
    _squared_norms,
    explain_initial_weights,
)
from schedlang.passes.judge.optimizer_steps import diverged_parameters, explain_steps
from schedlang.passes.judge.rank_copies import RankCopy
from schedlang.passes.judge.record import RunRecord
from schedlang.passes.judge.regions import Region
from schedlang.passes.judge.tensor_search import FullTensor
from schedlang.passes.verify.mapped_tensors import map_tensor
from schedlang.passes.verify.observe import Key, Observation
from schedlang.report import Report, Row
from schedlang.runtime.launch.pool import Pool
from tests.judging.catches.parts import ranks
from tests.judging.catches.words import WIDTH, Words, batch, loss


def model() -> nn.Module:
    """Words, a layer that drops, and one that drops in a recomputation."""
    return Words(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)))


def program(waits: bool, alike: bool, again: bool) -> Any:
    """All rows on each rank, whose gradients are averaged by works that are waited for.

    alike  ranks draw by one seed
    again  a recomputation draws as before
    """

    def program(model: Any) -> TrainingProgram:
        torch.manual_seed(0 if alike else dist.get_rank())
        plain = model.inner.forward

        def step(batch: Any) -> Tensor:
            value = loss(model(batch["ids"]), batch)
            value.backward()
            low = torch.zeros((), dtype=torch.bfloat16)
            works = [dist.all_reduce(low, async_op=True)]
            for p in model.parameters():
                p.grad /= ranks()
                works.append(dist.all_reduce(p.grad, async_op=True))
            for work in works[1 - waits :]:
                work.wait()
            return value

        keep = {"use_reentrant": False, "preserve_rng_state": again}
        model.inner.forward = lambda x: checkpoint(plain, x, **keep)
        return TrainingProgram(model, step, world_loss="same")

    return program


def judged(made: Any, pool: Pool) -> Report:
    """The verdict on two ranks."""
    torch.manual_seed(0)
    return verify_program(made, model=model(), batch=batch, loss=loss, ranks=2, pool=pool)


def test_what_is_waited_for_and_drawn_alike_passes(pool: Pool) -> None:
    """It is told that float64 stands in for fewer bits."""
    report = judged(program(waits=True, alike=True, again=True), pool)
    assert report.ok, str(report)
    assert "bfloat16 (float64 stands in for it" in report.gaps[0].condition, report.gaps


def test_what_no_value_shows_fails(pool: Pool) -> None:
    """A work that nobody waits for by its line, masks by the module; all values are right."""
    report = judged(program(waits=False, alike=False, again=True), pool)
    (first, asked), (second, masks) = report.localised
    assert (first, second) == ("collectives", "dropout"), str(report)
    assert asked.startswith("`all_reduce` (test_asked.py:") and "on rank 0, 1 nobody" in asked
    assert masks.startswith("`inner.1`: ranks 0, 1 have the same of it, and draw"), masks
    assert {row.kind for row in report.rows if not row.ok} == {"collectives", "dropout"}


def test_a_recomputation_that_draws_anew(pool: Pool) -> None:
    """The judge's masks are alike both times, and it says that the program's own are not."""
    report = judged(program(waits=True, alike=True, again=False), pool)
    ((kind, said),) = report.localised
    assert kind == "dropout" and said.startswith("`inner.1`: it is computed again with another")


def test_a_work_that_is_asked_counts_as_waited_for() -> None:
    """Any question of it is one; it passes for what it stands for."""
    heard = async_collectives.CallMonitor()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    work = torch._C._distributed_c10d._create_work_from_future(future)
    future.set_result(torch.zeros(()))
    for ask in ("wait", "get_future", "is_completed"):
        watched = heard.monitor(dist.all_reduce, work)
        assert isinstance(watched, dist.Work) and [*heard.unwaited.values()][0][0] == "all_reduce"
        getattr(watched, ask)()
        assert not heard.unwaited
    assert heard.monitor(dist.isend, work) is work


def test_a_norm_of_slices_that_ranks_have_twice() -> None:
    """Of a hybrid mesh: by what the first rank has alone, or each rank's copy counted."""
    slices = {0: [0, 1], 1: [2], 2: [0, 1], 3: [2]}
    whole = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    copies = [
        RankCopy(rank, "w", *[Region.from_numbers(torch.tensor(at))] * 2, map_tensor(whole, None))
        for rank, at in slices.items()
    ]
    assert _squared_norms(copies) == [[5.0, 5.0], [25.0, 25.0]]
    found = {words: amount for _, amount, words in _miscounts({"w": _squared_norms(copies)})}
    assert found["it counts each rank's copy of"] == 30.0
    assert found["it leaves out what ranks but the first hold of"] == -25.0
    assert found["it leaves out"] == -30.0


def test_a_part_in_another_order_is_found() -> None:
    """Words from both ends, in rows of a small vocabulary: no number of them is alone."""
    whole = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 1, 0, 0, 1, 1, 1.0]]).double()
    whole = torch.stack([whole, 1 - whole, whole + torch.arange(8) // 4], 2)
    for order in ([0, 1, 6, 7], [6, 0, 7, 1]):
        window = FullTensor(whole).find_window(whole[:, order])
        assert window is None or window[1].tolist() == order
    found = FullTensor(torch.arange(8.0).expand(2, 8).double()).find_window(
        torch.tensor([[6.0, 0, 7, 1]] * 2).double()
    )
    assert found is not None and found[1].tolist() == [6, 0, 7, 1]
    twice = torch.ones(2, 8).double()
    assert FullTensor(twice).find_window(twice[:, :4]) is None


ROW = Row("SGD", "parameters", "w", 0.3, 1e-9, False, 0)
WAS, TO = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.3, 0.2])


@pytest.mark.parametrize(
    "now, said",
    [
        (WAS, "1 of 1 (`w`): not stepped: they are what they were before; gradients are right"),
        (WAS + 2 * TO, "each step is ranks = 2 times the right one: a rate"),
        (WAS + TO * torch.tensor([1, 1, 0]), "1 of 3 elements are not stepped"),
        (WAS + torch.tensor([0.5, 0.1, 0.1]), ""),
    ],
)
def test_how_a_step_is_another(now: Tensor, said: str) -> None:
    """By what the optimizer adds, not by what it is added to."""
    key = Key("SGD", "parameters", 0, "w")
    sides = Observation({key: WAS + TO}), Observation({key: now})
    initial: Mapping[str, Any] = {"w": WAS}
    kept = RunRecord(initial=dict(initial))
    told = [text for _, text in explain_steps([ROW], ROW, *sides, kept, {"ranks": 2})]
    assert all(said in text for text in told) and bool(told) == bool(said), told


def test_copies_that_a_step_leaves_apart() -> None:
    """They are told though the first rank's are right, and its loss differs a step later."""
    later = Row("SGD", "loss", "loss", 0.1, 1e-9, False, 1)
    copies = Row("SGD", "replicas", "w", 0.1, 1e-9, False, 0)
    of_gradient = Row("SGD", "replicas", "gradient of w", 0.1, 1e-9, False, 0)
    assert diverged_parameters([later, copies], later) == ["w"]
    assert diverged_parameters([later, copies, of_gradient], later) == []
    assert diverged_parameters([later], later) == []


def test_weights_that_are_nowhere_are_told_by_how() -> None:
    """Tensors of one kind are told together, and none by the count of another."""
    rows = [
        Row("", INITIAL, name, 1.0, 0.0, False, None, note)
        for name, note in (("a", "on no rank"), ("b", "3 of its 8 elements are on no rank"))
    ]
    ((_, said),) = explain_initial_weights(
        [*rows, Row("", INITIAL, "c", 1.0, 0.0, False, None, rows[0].note)]
    )
    assert said.startswith("2 (`a`, `c`): on no rank; 1 (`b`): 3 of its 8 elements")


def test_a_sum_that_has_a_row_too_much() -> None:
    """A bias that each rank adds is the same in all places; other gaps are not."""
    row = torch.tensor([1.0, -2.0])
    assert module_comparison._has_equal_rows(row.expand(3, 4, 2))
    assert not module_comparison._has_equal_rows(torch.arange(24.0).reshape(3, 4, 2))
    assert not module_comparison._has_equal_rows(torch.zeros(3, 2))
