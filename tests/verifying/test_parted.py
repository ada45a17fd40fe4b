"""Relaxed statistics: an oracle that trains by parts finds what a skipped check would hide."""

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
from tests.training.test_build import Normed, _series
from tests.zoo.bug import Patch
from tests.zoo.pool import Mutated

RELAXED = """schedule 1

mesh(dp=2)

step "a" relax(batch_stats) {
  zero(stage=0, over=dp)
}
"""


def _proof(model: nn.Module, batches: Sequence[Any], pool: Any) -> Report:
    plan = Schedule(model, parse(Source("rows.sched", RELAXED))).plan()
    return prove(Case(plan, tuple(batches), dtype="none"), pool=pool)


BATCHES = [_series(8, seed) for seed in range(2)]


def test_batch_norm_by_parts_is_equal_to_the_original_by_parts(pool: Pool) -> None:
    """Loss, gradients, parameters and running statistics to the usual bound; the class says so."""
    report = _proof(Normed(), BATCHES, pool)
    assert report.ok, str(report)
    assert max(row.error for row in report.rows) < 1e-12
    assert report.equivalence == "relaxed (batch_stats)"
    names = {row.name for row in report.rows if row.kind == "other state"}
    assert "norm.running_var" in names
    assert any("statistics of their own" in gap.condition for gap in report.gaps)
    limits = {row.kind for row in report.rows if "vanishes" in row.condition}
    assert {"loss", "gradients", "parameters", "outputs"} <= limits  # against the original itself


def whole_batch_statistics(patch: Patch) -> None:
    """Ranks put their rows together for the statistics, which no row has asked for."""

    def batch_norm(x: Tensor, mean: Any, var: Any, *args: Any, **options: Any) -> Tensor:
        if torch.is_grad_enabled() and dist.is_initialized() and not x.is_meta:
            ones = torch.ones(len(x), 1, dtype=x.dtype)
            sums = torch.cat([ones, x.detach(), x.detach().square()], 1).sum(0)
            dist.all_reduce(sums)
            middle, squares = (sums[1:] / sums[0]).chunk(2)
            x = (x - middle) / (squares - middle.square() + 1e-5).sqrt()
            return x * args[0] + args[1]
        return plain(x, mean, var, *args, **options)

    plain = F.batch_norm
    patch.setattr(F, "batch_norm", batch_norm)


def parts_weighed_wrongly(patch: Patch) -> None:
    """One rank's part counts twice."""
    real = program.Program._run

    def run(self: Any, parts: Any, scale: Any, **options: Any) -> Any:
        twice = [2 * s for s in scale] if scale is not None and dist.get_rank() == 1 else scale
        return real(self, parts, twice, **options)

    patch.setattr(program.Program, "_run", run)


@pytest.mark.parametrize("mutant", [whole_batch_statistics, parts_weighed_wrongly])
def test_other_statistics_and_other_weights_are_found(mutant: Any, pool: Pool) -> None:
    """That statistics may differ by part is no licence for anything else."""
    report = _proof(Normed(), BATCHES, Mutated(pool, mutant))
    assert report.exit_code == 1 and report.first is not None


class Routed(nn.Module):
    """A loss over the batch that does not stand still in eval mode either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(3, 4)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.enter(x).mean(0).square().sum() + y.mean() * 0


def test_where_the_rule_never_vanishes_that_is_a_gap(pool: Pool) -> None:
    """The oracle by parts still holds; that there is no limit to compare in is said."""
    report = _proof(Routed(), BATCHES, pool)
    assert report.ok, str(report)
    assert any("limit" in gap.condition for gap in report.gaps)


# -- stages laid over ranks in two directions ------------------------------------------------------


class Blocks(nn.Module):
    """Blocks with batch norms, for stages; momentum makes the order of updates count."""

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


def _directed(ranks: int, order: str, relax: str = "relax(batch_stats) ") -> str:
    return f"""schedule 1

mesh(pp={ranks})

step "a" {relax}{{
  blocks  pipeline_split(over=pp)
  pipeline(order="{order}", micro=4)
}}
"""


def _planned(model: nn.Module, text: str) -> Any:
    return Schedule(model, parse(Source("rows.sched", text))).plan()


@pytest.mark.parametrize(
    ("order", "ranks"), [("Chimera", 2), ("GEMS", 2), ("GEMS", 3), ("DualPipe", 2)]
)
def test_each_direction_has_statistics_of_its_own(order: str, ranks: int, pool: Pool) -> None:
    """Of three ranks the middle one keeps one copy, which both directions update in turn."""
    plan = _planned(Blocks(ranks), _directed(ranks, order))
    batches = tuple(_series(12, seed) for seed in range(2))
    report = prove(Case(plan, batches, dtype="none"), pool=pool)
    assert report.ok, str(report)
    names = {row.name for row in report.rows if row.kind == "other state"}
    assert {f"blocks.{k}.1.running_mean" for k in range(ranks)} <= names


def _trained_buffers(plan: Any, batch: Any, folder: str) -> tuple[dict[str, Tensor], ...]:
    """What a program's state says of its buffers after a step, and a checkpoint of it."""
    from schedlang.passes.lower.build import build

    made = build(plan, batch)
    made.train_step(batch)
    made.save(folder)
    now = made.buffers()
    made.train_step(batch)
    made.load(folder)
    return now, made.buffers()


def test_the_state_holds_the_statistics_of_the_first_direction(pool: Pool, tmp_path: Any) -> None:
    """By hand: of all stages what the even microbatches leave, in the state and in a checkpoint."""
    model, batch = Blocks(2), _series(12, 0)
    plan = _planned(model, _directed(2, "Chimera"))
    found = pool.run(_trained_buffers, 2, plan, batch, str(tmp_path / "saved"))
    for first in (0, 6):  # microbatches of three rows: the first and the third
        model(**{name: value[first : first + 3] for name, value in batch.items()})
    for kept, loaded in found:
        for name, value in model.named_buffers():
            torch.testing.assert_close(kept[name], value)
            torch.testing.assert_close(loaded[name], value)


class Largest(Blocks):
    """A buffer that microbatches in turn leave as the whole batch would, and halves do not."""

    def __init__(self) -> None:
        super().__init__(2)
        self.blocks = nn.ModuleList(_Largest() for _ in range(2))
        self.double()


class _Largest(nn.Module):
    """Keeps the largest entry that it has seen."""

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
    """1F1B leaves the largest of all rows; with two directions a copy sees half of them."""
    batches = (_series(12, 0), _series(12, 1))
    plain = _planned(Largest(), _directed(2, "1F1B", ""))
    assert prove(Case(plain, batches, dtype="none"), pool=pool).ok
    with pytest.raises(Refusal) as caught:
        prove(Case(_planned(Largest(), _directed(2, "GEMS", "")), batches, dtype="none"), pool=pool)
    assert caught.value.diagnostics[0].code == "S708"
    relaxed = _planned(Largest(), _directed(2, "GEMS"))
    assert prove(Case(relaxed, batches, dtype="none"), pool=pool).ok


# -- what is said of the model ---------------------------------------------------------------------


class Plain(nn.Module):
    """A mean over rows: parts of a batch make the whole."""

    def __init__(self, spread: bool = False, drops: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.spread, self.drops = nn.Linear(3, 1), spread, drops
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = nn.functional.dropout(x, self.drops, self.training)
        out = self.enter(x + self.drops * torch.rand_like(x))[:, 0] - y
        return out.std() if self.spread else out.square().mean()


@pytest.mark.parametrize("drops", [0.0, 0.2], ids=["", "drawing"])
@pytest.mark.parametrize("spread", [False, True], ids=["ours", "the model's"])
def test_what_the_model_alone_does_not_show_is_our_error(
    spread: bool, drops: float, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the original that takes parts for more than they are is not blamed on its user."""
    real = probe.loss_and_gradients

    def derived(subject: Any, batch: Any, samples: Any) -> Any:
        found = real(subject, batch, samples)
        return {k: v if len(batch["x"]) == 8 or v is None else 2 * v for k, v in found.items()}

    monkeypatch.setattr(probe, "loss_and_gradients", derived)
    _ours_unless(spread, drops, pool)


@pytest.mark.parametrize("spread", [False, True], ids=["ours", "the model's"])
def test_draws_of_ours_that_depend_on_the_part_are_our_error(
    spread: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks by the place of a row in its part: the model alone draws by row, and is whole."""
    real = probe.loss_and_gradients
    monkeypatch.setattr(
        probe,
        "loss_and_gradients",
        lambda subject, batch, rows: real(subject, batch, range(len(rows))),
    )
    _ours_unless(spread, 0.2, pool)


class Relative(Plain):
    """An error beside the spread of the labels, which one row alone does not have."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gap = self.enter(x)[:, 0] - y
        return gap.square().sum() / (y - y.mean()).square().sum()


def test_parts_without_a_finite_loss_are_no_error_of_ours(pool: Pool) -> None:
    """Parts of one row give an infinite loss: the model's doing, however large the gap is."""
    text = RELAXED.replace(" relax(batch_stats)", "")
    text = text.replace("over=dp)", 'over=dp)\n  pipeline(order="GPipe", micro=4)')
    with pytest.raises(Refusal) as caught:
        prove(Case(_planned(Relative(), text), tuple(BATCHES), dtype="none"), pool=pool)
    assert caught.value.diagnostics[0].code == "S668"


def _ours_unless(spread: bool, drops: float, pool: Pool) -> None:
    plan = _planned(Plain(spread, drops), RELAXED.replace(" relax(batch_stats)", ""))
    with pytest.raises(Refusal if spread else OwnError) as caught:
        prove(Case(plan, tuple(BATCHES), dtype="none"), pool=pool)
    if spread:
        assert caught.value.diagnostics[0].code == "S703"
    else:
        said = str(caught.value)
        assert "an error of schedlang, not of the model" in said and "please report" in said


class Laid(Plain):
    """Gives its loss as a tensor of one number."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": super().forward(x, y).view(1, 1)}


def test_a_loss_of_one_number_is_a_loss(threads: Any) -> None:
    """However it is laid out, the original trains by it as the ranks do."""
    plan = _planned(Laid(), RELAXED.replace(" relax(batch_stats)", ""))
    report = prove(Case(plan, tuple(BATCHES), dtype="none"), pool=threads)
    assert report.ok, str(report)


# -- what a forward carries to the next one in plain attributes ------------------------------------


class Carrying(nn.Module):
    """A layer whose output hangs on what earlier calls have left in attributes."""

    calls = 0
    memory: Tensor | None = None
    notes: tuple[()] | list[Tensor] = ()
    table: Tensor | None = None  # a cache, alike for all rows

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.total = nn.Linear(3, 3), how, torch.zeros(3)

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


class Annealed:
    """A loss that counts its calls; or keeps a running mean of what it gives, and draws."""

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(())

    def running(self, output: Tensor, batch: Any) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * output.detach()
        return output / (1 + self.mean) + 0 * (random.random() + numpy.random.rand())


@pytest.mark.parametrize("how", ["counts", "remembers", "replays", "totals"])
def test_attributes_are_what_they_were_where_a_forward_runs_again(how: str) -> None:
    """Recomputed, a layer trains as it does alone; one that writes into a tensor is refused."""
    batches = [{"x": torch.randn(4, 3)} for _ in range(3)]
    alone = Carrying(how)
    made = create_schedule(copy.deepcopy(alone))
    made.checkpoint()
    if how == "totals":
        with pytest.raises(Refusal, match="S813"):
            made.build(batch=batches[0])
        return
    program = made.build(batch=batches[0], optimizer=_descent)
    optimizer = _descent(alone.named_parameters())
    for batch in batches:
        optimizer.zero_grad()
        alone(**batch).backward()
        optimizer.step()
        program.train_step(batch)
    for name, value in program.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name
    assert program.module.calls == alone.calls and len(program.module.notes) == len(alone.notes)


def _descent(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


@pytest.mark.parametrize("how", ["counts", "remembers", "replays", "caches", "notes"])
def test_attributes_that_are_carried_are_refused(how: str) -> None:
    """Microbatches run a forward more often than a plain loop: S708, but for caches and notes."""
    model = Carrying(how)
    made = create_schedule(model)
    made.pipeline(order="GPipe", micro=2)
    batch = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}
    if how in ("caches", "notes"):
        made.build(batch=batch)
    else:
        with pytest.raises(Refusal, match="S708"):
            made.build(batch=batch)
    assert model.calls == 0 and model.memory is None


def _closing(loss: Annealed) -> Any:
    calls = 0

    def counted(output: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss.calls = max(loss.calls, calls)
        return loss.running(output, batch)

    return counted


class Held:
    """A loss that holds another one."""

    def __init__(self, inner: Annealed) -> None:
        self.inner = inner

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return self.inner.running(output, batch)


@pytest.mark.parametrize("way", [_closing, Held, lambda loss: partial(loss.running)])
def test_what_a_loss_keeps_begins_with_the_first_step(way: Callable[[Annealed], Any]) -> None:
    """Wherever it is kept; nor do Python's and numpy's generators go on."""
    batch = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}
    loss, drawn = Annealed(), (random.getstate(), numpy.random.get_state(legacy=False))
    given = way(loss)
    create_schedule(Carrying("caches")).build(batch=batch, loss=given)
    assert loss.calls == 0 and loss.mean.device.type == "cpu" and float(loss.mean) == 0
    assert drawn[0] == random.getstate()
    after = numpy.random.get_state(legacy=False)
    assert drawn[1]["state"]["pos"] == after["state"]["pos"]


class Cumulative(nn.Module):
    """A batch norm whose running statistics are averages over all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = torch.tanh(self.norm(self.up(x))).square().mean()
        return loss


def test_running_statistics_may_be_averages(pool: Pool) -> None:
    """The number of batches, by which torch divides, has no value where the model is traced."""
    batches = [
        {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))} for seed in range(2)
    ]
    report = _proof(Cumulative(), batches, pool)
    assert report.ok, str(report)
