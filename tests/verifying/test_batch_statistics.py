"""Batch statistics per part (`relax(batch_stats)`), state in attributes: equal or refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import OwnError, Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.prove import Case, prove
from schedlang.passes.verify import probe
from schedlang.report import Report
from schedlang.runtime import program
from schedlang.runtime.launch.pool import Pool
from schedlang.schedule import Schedule, create_schedule
from tests.training.test_build import BatchNormed, series
from tests.zoo.bug import Patch
from tests.zoo.pool import Mutated

RELAXED = """schedule 1

mesh(dp=2)

step "a" relax(batch_stats) {
  zero(stage=0, over=dp)
}
"""


def _prove_relaxed(model: nn.Module, batches: Sequence[Any], pool: Any) -> Report:
    plan = Schedule(model, parse(Source("rows.sched", RELAXED))).plan()
    return prove(Case(plan, tuple(batches), dtype="none"), pool=pool)


BATCHES = [series(8, seed) for seed in range(2)]


def test_batch_norm_by_parts_is_equal_to_the_original_by_parts(pool: Pool) -> None:
    """Batch norm per part equals an original that trains by parts, within the usual tolerance."""
    report = _prove_relaxed(BatchNormed(), BATCHES, pool)
    assert report.ok, str(report)
    assert max(row.error for row in report.rows) < 1e-12
    assert report.equivalence == "relaxed (batch_stats)"
    names = {row.name for row in report.rows if row.kind == "other state"}
    assert "norm.running_var" in names
    assert any("statistics of their own" in gap.condition for gap in report.gaps)
    limits = {row.kind for row in report.rows if "vanishes" in row.condition}
    assert {"loss", "gradients", "parameters", "outputs"} <= limits  # against the original itself


def whole_batch_statistics(patch: Patch) -> None:
    """Inject a bug: ranks use statistics of the full batch, which no row requests."""

    def batch_norm(x: Tensor, mean: Any, var: Any, *args: Any, **options: Any) -> Tensor:
        if torch.is_grad_enabled() and dist.is_initialized() and not x.is_meta:
            ones = torch.ones(len(x), 1, dtype=x.dtype)
            sums = torch.cat([ones, x.detach(), x.detach().square()], 1).sum(0)
            dist.all_reduce(sums)
            middle, squares = (sums[1:] / sums[0]).chunk(2)
            x = (x - middle) / (squares - middle.square() + 1e-5).sqrt()
            return x * args[0] + args[1]
        return torch_batch_norm(x, mean, var, *args, **options)

    torch_batch_norm = F.batch_norm
    patch.setattr(F, "batch_norm", batch_norm)


def wrong_part_weights(patch: Patch) -> None:
    """Inject a bug: one rank's part counts twice."""
    real = program.Program._run

    def run(self: Any, parts: Any, scale: Any, **options: Any) -> Any:
        twice = [2 * s for s in scale] if scale is not None and dist.get_rank() == 1 else scale
        return real(self, parts, twice, **options)

    patch.setattr(program.Program, "_run", run)


@pytest.mark.parametrize("mutant", [whole_batch_statistics, wrong_part_weights])
def test_other_statistics_and_other_weights_are_found(mutant: Any, pool: Pool) -> None:
    """Relaxed statistics do not hide other mistakes."""
    report = _prove_relaxed(BatchNormed(), BATCHES, Mutated(pool, mutant))
    assert report.exit_code == 1 and report.first is not None


class Routed(nn.Module):
    """A loss over batch statistics that depends on the batch in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(3, 4)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.enter(x).mean(0).square().sum() + y.mean() * 0


def test_where_the_rule_never_vanishes_that_is_a_gap(pool: Pool) -> None:
    """The comparison by parts passes; that there is no limit to compare in is reported as a gap."""
    report = _prove_relaxed(Routed(), BATCHES, pool)
    assert report.ok, str(report)
    assert any("limit" in gap.condition for gap in report.gaps)


# -- bidirectional pipelines ----------------------------------------------------------------------


class Blocks(nn.Module):
    """Blocks with batch norms for stages; momentum makes the order of updates matter."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.3)) for _ in range(blocks)
        )
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return ((x.sum(1) - y) ** 2).mean()


def _two_way_text(ranks: int, order: str, relax: str = "relax(batch_stats) ") -> str:
    return f"""schedule 1

mesh(pp={ranks})

step "a" {relax}{{
  blocks  pipeline_split(over=pp)
  pipeline(order="{order}", micro=4)
}}
"""


def _make_plan(model: nn.Module, text: str) -> Any:
    return Schedule(model, parse(Source("rows.sched", text))).plan()


@pytest.mark.parametrize(
    ("order", "ranks"), [("Chimera", 2), ("GEMS", 2), ("GEMS", 3), ("DualPipe", 2)]
)
def test_each_direction_has_statistics_of_its_own(order: str, ranks: int, pool: Pool) -> None:
    """Each direction has its own statistics; of three ranks both share the middle one."""
    plan = _make_plan(Blocks(ranks), _two_way_text(ranks, order))
    batches = tuple(series(12, seed) for seed in range(2))
    report = prove(Case(plan, batches, dtype="none"), pool=pool)
    assert report.ok, str(report)
    names = {row.name for row in report.rows if row.kind == "other state"}
    assert {f"blocks.{k}.1.running_mean" for k in range(ranks)} <= names


def _trained_buffers(plan: Any, batch: Any, folder: str) -> tuple[dict[str, Tensor], ...]:
    """Return the buffers of a program after a step, and after loading its checkpoint."""
    from schedlang.passes.lower.build import build

    program_ = build(plan, batch)
    program_.train_step(batch)
    program_.save(folder)
    trained = program_.buffers()
    program_.train_step(batch)
    program_.load(folder)
    return trained, program_.buffers()


def test_the_state_holds_the_statistics_of_the_first_direction(pool: Pool, tmp_path: Any) -> None:
    """State and checkpoint hold the statistics of the even microbatches, computed by hand."""
    model, batch = Blocks(2), series(12, 0)
    plan = _make_plan(model, _two_way_text(2, "Chimera"))
    results = pool.run(_trained_buffers, 2, plan, batch, str(tmp_path / "saved"))
    for start in (0, 6):  # microbatches of three rows: the first and the third
        model(**{name: value[start : start + 3] for name, value in batch.items()})
    for trained, loaded in results:
        for name, value in model.named_buffers():
            torch.testing.assert_close(trained[name], value)
            torch.testing.assert_close(loaded[name], value)


class MaxBlocks(Blocks):
    """Blocks with a running maximum: equal for sequential microbatches, not for halves."""

    def __init__(self) -> None:
        super().__init__(2)
        self.blocks = nn.ModuleList(_RunningMax() for _ in range(2))
        self.double()


class _RunningMax(nn.Module):
    """A layer with a buffer of the largest input so far."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.copy_(torch.maximum(self.seen, x.detach().max()))
        return torch.as_tensor(self.inner(x))


def test_a_buffer_of_one_direction_is_refused_unless_relaxed(pool: Pool) -> None:
    """1F1B gives the maximum of all rows; with two directions a copy sees half of them."""
    batches = (series(12, 0), series(12, 1))
    one_way = _make_plan(MaxBlocks(), _two_way_text(2, "1F1B", ""))
    assert prove(Case(one_way, batches, dtype="none"), pool=pool).ok
    with pytest.raises(Refusal) as caught:
        prove(
            Case(_make_plan(MaxBlocks(), _two_way_text(2, "GEMS", "")), batches, dtype="none"),
            pool=pool,
        )
    assert caught.value.diagnostics[0].code == "S708"
    relaxed = _make_plan(MaxBlocks(), _two_way_text(2, "GEMS"))
    assert prove(Case(relaxed, batches, dtype="none"), pool=pool).ok


# -- errors of the model and of schedlang ----------------------------------------------------------


class MeanLoss(nn.Module):
    """A loss that is a mean over rows, or, with `spread`, is not."""

    def __init__(self, spread: bool = False, drops: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.spread, self.drops = nn.Linear(3, 1), spread, drops
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = nn.functional.dropout(x, self.drops, self.training)
        errors = self.enter(x + self.drops * torch.rand_like(x))[:, 0] - y
        return errors.std() if self.spread else errors.square().mean()


@pytest.mark.parametrize("drops", [0.0, 0.2], ids=["", "drawing"])
@pytest.mark.parametrize("spread", [False, True], ids=["ours", "the model's"])
def test_what_the_model_alone_does_not_show_is_our_error(
    spread: bool, drops: float, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only schedlang's run by parts is wrong, it is reported as our own error."""
    real = probe.loss_and_gradients

    def derived(trainer: Any, batch: Any, samples: Any) -> Any:
        result = real(trainer, batch, samples)
        return {k: v if len(batch["x"]) == 8 or v is None else 2 * v for k, v in result.items()}

    monkeypatch.setattr(probe, "loss_and_gradients", derived)
    _expect_own_error(spread, drops, pool)


@pytest.mark.parametrize("spread", [False, True], ids=["ours", "the model's"])
def test_draws_of_ours_that_depend_on_the_part_are_our_error(
    spread: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If our draws depend on the part and the model's do not, it is our own error."""
    real = probe.loss_and_gradients
    monkeypatch.setattr(
        probe,
        "loss_and_gradients",
        lambda trainer, batch, rows: real(trainer, batch, range(len(rows))),
    )
    _expect_own_error(spread, 0.2, pool)


class RelativeLoss(MeanLoss):
    """An error relative to the variance of labels, which is zero for one row."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gap = self.enter(x)[:, 0] - y
        return gap.square().sum() / (y - y.mean()).square().sum()


def test_parts_without_a_finite_loss_are_no_error_of_ours(pool: Pool) -> None:
    """Parts of one row give an infinite loss: a property of the model, not our error."""
    text = RELAXED.replace(" relax(batch_stats)", "")
    text = text.replace("over=dp)", 'over=dp)\n  pipeline(order="GPipe", micro=4)')
    with pytest.raises(Refusal) as caught:
        prove(Case(_make_plan(RelativeLoss(), text), tuple(BATCHES), dtype="none"), pool=pool)
    assert caught.value.diagnostics[0].code == "S668"


def test_a_batch_norm_is_not_told_to_define_weights(pool: Pool) -> None:
    """No weights of parts make the statistics of a part those of the batch."""
    plan = _make_plan(BatchNormed(), RELAXED.replace(" relax(batch_stats)", ""))
    with pytest.raises(Refusal) as caught:
        prove(Case(plan, tuple(BATCHES), dtype="none"), pool=pool)
    assert caught.value.diagnostics[0].code == "S703"
    helps = caught.value.diagnostics[0].helps
    assert "relax(batch_stats)" in helps[0] and "weight(batch)" not in "".join(helps)


def _expect_own_error(spread: bool, drops: float, pool: Pool) -> None:
    plan = _make_plan(MeanLoss(spread, drops), RELAXED.replace(" relax(batch_stats)", ""))
    with pytest.raises(Refusal if spread else OwnError) as caught:
        prove(Case(plan, tuple(BATCHES), dtype="none"), pool=pool)
    if spread:
        assert caught.value.diagnostics[0].code == "S703"
    else:
        message = str(caught.value)
        assert "an error of schedlang, not of the model" in message and "please report" in message


class ReshapedLoss(MeanLoss):
    """Returns its loss as a tensor of shape [1, 1]."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": super().forward(x, y).view(1, 1)}


def test_a_loss_of_one_number_is_a_loss(threads: Any) -> None:
    """A loss of one element in any shape is accepted."""
    plan = _make_plan(ReshapedLoss(), RELAXED.replace(" relax(batch_stats)", ""))
    report = prove(Case(plan, tuple(BATCHES), dtype="none"), pool=threads)
    assert report.ok, str(report)


# -- state in plain attributes -------------------------------------------------------------------


class Stateful(nn.Module):
    """A layer whose output depends on attributes that earlier calls have set."""

    calls = 0
    memory: Tensor | None = None
    notes: tuple[()] | list[Tensor] = ()
    table: Tensor | None = None  # a cache, equal for all rows

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.how, self.total = nn.Linear(3, 3), kind, torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.how == "counts":
            self.calls += 1
            y = y if self.calls < 4 else 0.5 * y  # not in the first step
        elif self.how == "remembers":
            y = y if self.memory is None else y + self.memory
            self.memory = y.detach().mean(0)
        elif self.how == "totals":
            self.total += y.detach().mean(0)
            y = y + self.total
        elif self.how == "replays":
            y = y if not self.notes else y + self.notes[-1]
            self.notes = [*self.notes, y.detach().mean(0)]
        elif self.how == "notes":
            self.notes = [*self.notes, y.detach().mean(0)]
        elif self.table is None:
            self.table = torch.ones(3)
        return (y**2).mean()


class StatefulLoss:
    """A loss that counts its calls, keeps a running mean and draws random numbers."""

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(())

    def running(self, output: Tensor, batch: Any) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * output.detach()
        return output / (1 + self.mean) + 0 * (random.random() + numpy.random.rand())


@pytest.mark.parametrize("how", ["counts", "remembers", "replays", "totals"])
def test_attributes_are_what_they_were_where_a_forward_runs_again(how: str) -> None:
    """Recomputed, a stateful layer trains as without; one that changes a tensor is refused."""
    batches = [{"x": torch.randn(4, 3)} for _ in range(3)]
    plain_model = Stateful(how)
    sch = create_schedule(copy.deepcopy(plain_model))
    sch.checkpoint()
    if how == "totals":
        with pytest.raises(Refusal, match="S813"):
            sch.build(batch=batches[0])
        return
    program = sch.build(batch=batches[0], optimizer=_make_sgd)
    optimizer = _make_sgd(plain_model.named_parameters())
    for batch in batches:
        optimizer.zero_grad()
        plain_model(**batch).backward()
        optimizer.step()
        program.train_step(batch)
    for name, value in program.state_dict().items():
        assert torch.equal(value, plain_model.state_dict()[name]), name
    assert program.module.calls == plain_model.calls and len(program.module.notes) == len(
        plain_model.notes
    )


def _make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1)


@pytest.mark.parametrize("how", ["counts", "remembers", "replays", "caches", "notes"])
def test_attributes_that_are_carried_are_refused(how: str) -> None:
    """Microbatches change state more often than a plain loop: S708, except for caches and notes."""
    model = Stateful(how)
    sch = create_schedule(model)
    sch.pipeline(order="GPipe", micro=2)
    batch = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}
    if how in ("caches", "notes"):
        sch.build(batch=batch)
    else:
        with pytest.raises(Refusal, match="S708"):
            sch.build(batch=batch)
    assert model.calls == 0 and model.memory is None


def _counting_closure(loss: StatefulLoss) -> Any:
    calls = 0

    def counted(output: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss.calls = max(loss.calls, calls)
        return loss.running(output, batch)

    return counted


class LossWrapper:
    """A loss that wraps another one."""

    def __init__(self, inner: StatefulLoss) -> None:
        self.inner = inner

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return self.inner.running(output, batch)


@pytest.mark.parametrize(
    "way", [_counting_closure, LossWrapper, lambda loss: partial(loss.running)]
)
def test_what_a_loss_keeps_begins_with_the_first_step(way: Callable[[StatefulLoss], Any]) -> None:
    """`build` does not change the state of a loss, nor Python's and numpy's generators."""
    batch = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}
    loss, old_states = StatefulLoss(), (random.getstate(), numpy.random.get_state(legacy=False))
    loss_function = way(loss)
    create_schedule(Stateful("caches")).build(batch=batch, loss=loss_function)
    assert loss.calls == 0 and loss.mean.device.type == "cpu" and float(loss.mean) == 0
    assert old_states[0] == random.getstate()
    new_state = numpy.random.get_state(legacy=False)
    assert old_states[1]["state"]["pos"] == new_state["state"]["pos"]


class Cumulative(nn.Module):
    """A batch norm with cumulative averages (momentum=None)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = torch.tanh(self.norm(self.up(x))).square().mean()
        return loss


def test_running_statistics_may_be_averages(pool: Pool) -> None:
    """Cumulative averages, which depend on the number of batches, pass."""
    batches = [
        {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))} for seed in range(2)
    ]
    report = _prove_relaxed(Cumulative(), batches, pool)
    assert report.ok, str(report)
