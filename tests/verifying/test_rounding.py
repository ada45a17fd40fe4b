"""Tests of the working dtype: another order of sums passes, small mistakes and luck do not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.compare import RTOL
from schedlang.passes.verify.conditioning import ErrorBounds
from schedlang.passes.verify.observe import Key, Observation
from schedlang.passes.verify.working_dtype import ROUNDED_NOTE, SCALE_NOTE, describe_changed_choices
from schedlang.report import Report, Row
from schedlang.runtime.activation_memory import quantized
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.rng.logical_dropout import stream_numbers, stream_of
from tests.engine import Threads
from tests.proofs import planned


class Chosen(nn.Module):
    """Every row takes the output with the larger score; scores may be equal but for rounding."""

    def __init__(self, spread: float, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(4, 3), nn.Linear(4, 3)
        self.spread, self.wrong = spread, wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x) * self.spread + 1.0
        first = scores.topk(1, -1).indices == 0
        y = torch.where(first, self.a(x), self.b(x))
        if self.wrong and dist.is_initialized() and x.dtype == torch.bfloat16 and not x.is_meta:
            y = y * 1.5
        return y.square().mean()


def _chosen(pool: Pool, model: nn.Module, dtype: str) -> Report:
    batches = [
        {"x": torch.randn(64, 4, generator=torch.Generator().manual_seed(k))} for k in range(2)
    ]
    plan = planned(model, "zero(stage=0, over=dp)", "dp=2")
    return prove(Case(plan, tuple(batches), dtype=dtype), pool=pool)


@pytest.mark.parametrize(("spread", "tips"), [(1e-4, True), (10.0, False)], ids=["tipped", "clear"])
def test_behind_a_tipped_choice_the_original_chooses_alike(
    spread: float, tips: bool, pool: Pool
) -> None:
    """A program that chooses otherwise is right, which is said; a mistake behind it is found."""
    good = _chosen(pool, Chosen(spread), "bfloat16")
    assert good.ok, str(good)
    assert tips == any("choices of `topk` in `the model`" in said for _, said in good.facts)
    bad = _chosen(pool, Chosen(spread, wrong=True), "bfloat16")
    assert bad.exit_code == 1


def test_tipped_choices_are_counted() -> None:
    """By site and operator, among those that both sides have."""
    right = {(0, "gate", "topk", 0, k): torch.tensor([[k]]) for k in range(3)}
    other = {key: value.clone() for key, value in right.items()}
    assert describe_changed_choices(right, other) == []
    other[(0, "gate", "topk", 0, 1)] += 1
    del other[(0, "gate", "topk", 0, 2)]
    assert describe_changed_choices(right, other) == ["1 of 2 choices of `topk` in `gate` differ"]


def test_what_a_batch_gives_is_in_the_dtype_asked_for(pool: Pool) -> None:
    """Float inputs are rounded for both sides, so a model in bfloat16 can take them."""
    report = _chosen(pool, Mean(), "bfloat16")
    assert report.ok, str(report)
    assert {row.kind for row in report.rows} >= {"loss in working dtype"}


# -- more draws of the original's error ------------------------------------------------------------


class Cancelling(nn.Module):
    """A bias whose gradient is the sum of weights that nearly cancel, each exact in bfloat16."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.wrong = nn.Linear(4, 3), wrong

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = self.head(x)
        if self.wrong and dist.is_initialized() and y.dtype == torch.bfloat16 and not x.is_meta:
            y = y + 0.02 * (y - y.detach()).sum(0)
        return (y.float() * w[:, None]).sum(1).mean()


def _cancelled(pool: Pool, model: nn.Module, rows: str, mesh: str) -> Report:
    """Of eight rows four weigh what needs more bits than bfloat16 has, and four as much less."""
    half = torch.tensor([1.0, 1.0078125, 1.0234375, 1.0390625])
    w = torch.cat([half, -half - torch.tensor([0.0, 0.0, 0.0, 0.0078125])])
    batches = [
        {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(k)), "w": w}
        for k in range(2)
    ]
    return prove(Case(planned(model, rows, mesh, "dtype"), tuple(batches)), pool=pool)


class Large(nn.Module):
    """A weight whose gradient, times the scale of the loss, float16 has for a half of the batch."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.wrong = nn.Linear(4, 3), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x)
        if self.wrong and dist.is_initialized() and y.dtype == torch.float16 and not x.is_meta:
            y = y + 0.02 * (y - y.detach())
        return y.float().mean(0).sum()


@pytest.mark.parametrize("micro", [False, True], ids=["replicas", "microbatches"])
def test_where_the_original_alone_skips_a_step_both_scale_the_loss_less(
    micro: bool, pool: Pool
) -> None:
    """Gradients of the batch overflow, those of its halves do not: right, and no cover for wrong.

    That the original skips what the program does not is no mistake, and what it then trains is no
    measure of roundings: a gradient that is a fiftieth off must be found in the very step.
    """
    rows, mesh = "cast(fp16)\nzero(stage=0, over=dp)", "dp=2"
    if micro:
        rows, mesh = 'cast(fp16)\npipeline(order="GPipe", micro=2)', "pp=1"
    batches = tuple(
        {"x": 1.5 + torch.rand(8, 4, generator=torch.Generator().manual_seed(k)) / 8}
        for k in range(2)
    )

    def proved(wrong: bool) -> Report:
        return prove(Case(planned(Large(wrong), rows, mesh, "dtype"), batches), pool=pool)

    good = proved(False)
    assert good.ok, str(good)
    assert any(SCALE_NOTE in said and "65,536" in said for _, said in good.facts), good.facts
    bad = [row for row in proved(True).rows if not row.ok]
    assert {("gradients in working dtype", k) for k in (0, 1)} <= {(r.kind, r.step) for r in bad}
    assert all(row.error < math.inf for row in bad)


@pytest.mark.parametrize("micro", [False, True], ids=["replicas", "microbatches"])
def test_parts_that_cancel_are_rounded_one_by_one(micro: bool, pool: Pool) -> None:
    """What is exact for the whole batch is rounded for its halves, in the original by parts too."""
    rows, mesh = "cast(bf16)\nzero(stage=0, over=dp)", "dp=2"
    if micro:
        rows, mesh = 'cast(bf16)\npipeline(order="GPipe", micro=2)', "pp=1"
    report = _cancelled(pool, Cancelling(), rows, mesh)
    assert report.ok, str(report)
    assert "head.bias" in {r.name for r in report.rows if r.kind == "gradients in working dtype"}


def test_a_wrong_gradient_stays_above_all_draws(pool: Pool) -> None:
    """No run of the original has what the program does wrong: its gate hides nothing."""
    report = _cancelled(pool, Cancelling(wrong=True), "cast(bf16)\nzero(stage=0, over=dp)", "dp=2")
    assert report.exit_code == 1
    bad = {(r.kind, r.name) for r in report.rows if not r.ok}
    assert ("gradients in working dtype", "head.weight") in bad


class Mean(nn.Module):
    """The mean square of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).square().mean()


# ---- Tests of numbers that roundings tip: a proof follows them, and follows nothing else.


WIDTH = 32
ROWS = "inner  compress(activations, int4, block=32)\nzero(stage=0, over=dp)"


class Net(nn.Module):
    """A layer that saves what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.inner(x) / 8)) ** 2).mean()


NEAR = 2.0**-19  # by how much less than a whole number: some roundings of float32


def _nearly() -> Tensor:
    """Rows from 0 to 15, so that a step is 1, whose numbers in the first step are nearly whole."""
    parts = []
    for samples in ((0, 1, 2), (3, 4, 5)):
        places = torch.arange(1, 3 * WIDTH + 1)
        bits = stream_numbers(places, torch.tensor(stream_of("inner", 0, 0, samples, 1)))
        x = (torch.arange(3 * WIDTH) % 13 + 2 - bits.double() / 2**53 - NEAR).float()
        x.view(3, WIDTH)[:, :2] = torch.tensor([0.0, 15.0])
        parts.append(x.view(3, WIDTH))
    return torch.cat(parts)


def _report(threads: Threads) -> Report:
    batches = [{"x": _nearly()}, {"x": torch.randn(4, WIDTH)}]
    plan = planned(Net(), ROWS, "dp=2", "lossy")
    return prove(Case(plan, tuple(batches)), pool=threads)


def _more(drawn: Callable[..., Tensor], by: float) -> Callable[..., Tensor]:
    """Sums of float32 that are off by some; those of the original are not."""

    def other(like: Tensor, first: int, stream: int) -> Tensor:
        found = drawn(like, first, stream)
        return found + by if like.dtype == torch.float32 else found

    return other


def test_a_number_that_rounding_tips_is_no_difference(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either number is right: rows of the working dtype hold, within their own gates."""
    monkeypatch.setattr(quantized, "_random_numbers", _more(quantized._random_numbers, 2 * NEAR))
    report = _report(threads)
    assert report.ok, [row for row in report.rows if not row.ok][:3]
    assert any(row.note == ROUNDED_NOTE and "in working dtype" in row.kind for row in report.rows)
    assert "as ranks took them" in dict(report.facts)["in fewer bits"]


def test_other_numbers_are_a_difference(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that no rounding explains are told, although they are noted as well."""
    monkeypatch.setattr(quantized, "_random_numbers", _more(quantized._random_numbers, 0.5))
    report = _report(threads)
    assert not report.ok
    bad = {row.kind for row in report.rows if not row.ok}
    assert "gradients in working dtype" in bad
    assert all(kind.endswith("in working dtype") for kind in bad)


def test_where_nothing_is_tipped_nothing_is_said(threads: Threads) -> None:
    """The same sums round alike: the original is run once, as it is."""
    report = _report(threads)
    assert report.ok and not any(row.note == ROUNDED_NOTE for row in report.rows)
    assert "in fewer bits" not in dict(report.facts)


# -- sums whose chains are as long as threads are few ----------------------------------------------


class Series(nn.Module):
    """The gradients of a norm are sums over many tokens, each thread a part of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)).tanh())
        return (y - x.roll(1, 0)).square().mean()


@pytest.mark.parametrize("threads", [1, 8])
def test_the_original_shares_its_sums_as_ranks_do(threads: int, pool: Pool) -> None:
    """With more threads than a rank it would be more exact, and its bounds too tight."""
    plan = planned(Series(), "up shard(col, over=tp)\ndown shard(row, over=tp)", "tp=2")
    batches = tuple({"x": _normal(k, 2**15, 16)} for k in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        report = prove(Case(plan, batches, dtype="float32"), pool=pool)
    finally:
        torch.set_num_threads(before)
    assert report.ok, str(report)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- float64 of a model whose steps magnify roundings ----------------------------------------------


class Chaotic(nn.Module):
    """A loss so curved that a step takes weights a unit in the last place apart 1e6 times as far.

    In several processes it is `wrong` times what it is.
    """

    def __init__(self, wrong: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.wrong = nn.Linear(8, 4), wrong

    def forward(self, x: Tensor) -> Tensor:
        y = (2000.0 * self.lin(x)).cos().mean()
        many = dist.is_initialized() and not x.is_meta
        return y * self.wrong if many else y


def _chaotic(pool: Pool, wrong: float) -> Report:
    batches = tuple({"x": _normal(k, 16, 8).double()} for k in range(3))
    plan = planned(Chaotic(wrong).double(), "zero(stage=0, over=dp)", "dp=2")
    return prove(Case(plan, batches, dtype="none"), pool=pool)


def test_roundings_that_steps_magnify_are_no_mistake(pool: Pool) -> None:
    """Gates in float64 are as wide as the original makes roundings, and the report says so."""
    report = _chaotic(pool, 1.0)
    assert report.ok, str(report)
    wide = [row for row in report.rows if row.gate > RTOL]
    assert 0 not in {row.step for row in wide} and max(row.error for row in wide) > RTOL
    assert any(kind == "conditioning" for kind, _ in report.facts)


@pytest.mark.parametrize("wrong", [1 + 1e-7, 1.01], ids=["1e-7", "1e-2"])
def test_what_roundings_do_not_explain_is_a_mistake(wrong: float, pool: Pool) -> None:
    """The first step magnifies nothing yet: a gradient that is off there is wrong."""
    report = _chaotic(pool, wrong)
    assert not report.ok and report.first is not None and report.first.step == 0


def test_of_a_plain_mistake_the_original_is_not_asked() -> None:
    """A row that no rounding explains fails at once, and so does what has no size."""
    key = Key("SGD", "gradients", 0, "w")

    def seen(value: float) -> Observation:
        return Observation(tensors={key: torch.full((2,), value)})

    def run(draw: int) -> Observation:
        raise AssertionError("the original ran")

    for value, gate in ((1.5, RTOL), (1.0 + 1e-8, 0.0)):
        row = Row("SGD", "gradients", "w", abs(value - 1.0), gate, False, 0)
        assert ErrorBounds(seen(1.0), run).widen_gates([row], seen(value)) == [row]
