"""Proofs in the working dtype: rounding and its consequences pass, small mistakes do not."""

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
from tests.proofs import make_plan


class TopOne(nn.Module):
    """Each row selects the layer with the larger score; scores may be equal up to rounding."""

    def __init__(self, spread: float, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(4, 3), nn.Linear(4, 3)
        self.spread, self.wrong = spread, wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x) * self.spread + 1.0
        takes_first = scores.topk(1, -1).indices == 0
        y = torch.where(takes_first, self.a(x), self.b(x))
        if self.wrong and dist.is_initialized() and x.dtype == torch.bfloat16 and not x.is_meta:
            y = y * 1.5
        return y.square().mean()


def _prove_mean(pool: Pool, model: nn.Module, dtype: str) -> Report:
    batches = [
        {"x": torch.randn(64, 4, generator=torch.Generator().manual_seed(k))} for k in range(2)
    ]
    plan = make_plan(model, "zero(stage=0, over=dp)", "dp=2")
    return prove(Case(plan, tuple(batches), dtype=dtype), pool=pool)


@pytest.mark.parametrize(("spread", "tips"), [(1e-4, True), (10.0, False)], ids=["tipped", "clear"])
def test_behind_a_tipped_choice_the_original_chooses_alike(
    spread: float, tips: bool, pool: Pool
) -> None:
    """A choice that rounding changes passes and is reported; a mistake after it is found."""
    passing = _prove_mean(pool, TopOne(spread), "bfloat16")
    assert passing.ok, str(passing)
    assert tips == any("choices of `topk` in `the model`" in fact for _, fact in passing.facts)
    failing = _prove_mean(pool, TopOne(spread, wrong=True), "bfloat16")
    assert failing.exit_code == 1


def test_tipped_choices_are_counted() -> None:
    """Different choices are counted by site and operator, if both sides have them."""
    choices = {(0, "gate", "topk", 0, k): torch.tensor([[k]]) for k in range(3)}
    changed = {key: value.clone() for key, value in choices.items()}
    assert describe_changed_choices(choices, changed) == []
    changed[(0, "gate", "topk", 0, 1)] += 1
    del changed[(0, "gate", "topk", 0, 2)]
    assert describe_changed_choices(choices, changed) == [
        "1 of 2 choices of `topk` in `gate` differ"
    ]


def test_what_a_batch_gives_is_in_the_dtype_asked_for(pool: Pool) -> None:
    """Float inputs are cast to the working dtype on both sides."""
    report = _prove_mean(pool, MeanSquare(), "bfloat16")
    assert report.ok, str(report)
    assert {row.kind for row in report.rows} >= {"loss in working dtype"}


# -- rounding errors of parts of a batch -----------------------------------------------------------


class Cancelling(nn.Module):
    """A bias whose gradient sums weights that almost cancel, each exact in bfloat16."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.wrong = nn.Linear(4, 3), wrong

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = self.head(x)
        if self.wrong and dist.is_initialized() and y.dtype == torch.bfloat16 and not x.is_meta:
            y = y + 0.02 * (y - y.detach()).sum(0)
        return (y.float() * w[:, None]).sum(1).mean()


def _prove_cancelling(pool: Pool, model: nn.Module, rows: str, mesh: str) -> Report:
    """Prove with weights whose halves need more bits than bfloat16 has and almost cancel."""
    half = torch.tensor([1.0, 1.0078125, 1.0234375, 1.0390625])
    w = torch.cat([half, -half - torch.tensor([0.0, 0.0, 0.0, 0.0078125])])
    batches = [
        {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(k)), "w": w}
        for k in range(2)
    ]
    return prove(Case(make_plan(model, rows, mesh, "dtype"), tuple(batches)), pool=pool)


class LargeGradient(nn.Module):
    """A scaled gradient that overflows float16 for the batch, but not for half of it."""

    def __init__(self, faulty: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.wrong = nn.Linear(4, 3), faulty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x)
        if self.wrong and dist.is_initialized() and y.dtype == torch.float16 and not x.is_meta:
            y = y + 0.02 * (y - y.detach())
        return y.float().mean(0).sum()


@pytest.mark.parametrize("micro", [False, True], ids=["replicas", "microbatches"])
def test_where_the_original_alone_skips_a_step_both_scale_the_loss_less(
    micro: bool, pool: Pool
) -> None:
    """Gradients of the batch overflow, those of its halves do not: this passes, mistakes do not.

    Only the original would skip the step, so both use a smaller loss scale: a gradient error of two
    percent must be found in that step.
    """
    rows, mesh = "cast(fp16)\nzero(stage=0, over=dp)", "dp=2"
    if micro:
        rows, mesh = 'cast(fp16)\npipeline(order="GPipe", micro=2)', "pp=1"
    batches = tuple(
        {"x": 1.5 + torch.rand(8, 4, generator=torch.Generator().manual_seed(k)) / 8}
        for k in range(2)
    )

    def proved(faulty: bool) -> Report:
        return prove(
            Case(make_plan(LargeGradient(faulty), rows, mesh, "dtype"), batches), pool=pool
        )

    passing = proved(False)
    assert passing.ok, str(passing)
    assert any(SCALE_NOTE in fact and "65,536" in fact for _, fact in passing.facts), passing.facts
    failed_rows = [row for row in proved(True).rows if not row.ok]
    assert {("gradients in working dtype", k) for k in (0, 1)} <= {
        (r.kind, r.step) for r in failed_rows
    }
    assert all(row.error < math.inf for row in failed_rows)


@pytest.mark.parametrize("micro", [False, True], ids=["replicas", "microbatches"])
def test_parts_that_cancel_are_rounded_one_by_one(micro: bool, pool: Pool) -> None:
    """Gradients exact for the batch but rounded for its halves pass: so does the original."""
    rows, mesh = "cast(bf16)\nzero(stage=0, over=dp)", "dp=2"
    if micro:
        rows, mesh = 'cast(bf16)\npipeline(order="GPipe", micro=2)', "pp=1"
    report = _prove_cancelling(pool, Cancelling(), rows, mesh)
    assert report.ok, str(report)
    assert "head.bias" in {r.name for r in report.rows if r.kind == "gradients in working dtype"}


def test_a_wrong_gradient_stays_above_all_draws(pool: Pool) -> None:
    """A wrong gradient exceeds the errors of all runs of the original."""
    report = _prove_cancelling(
        pool, Cancelling(wrong=True), "cast(bf16)\nzero(stage=0, over=dp)", "dp=2"
    )
    assert report.exit_code == 1
    failed_rows = {(r.kind, r.name) for r in report.rows if not r.ok}
    assert ("gradients in working dtype", "head.weight") in failed_rows


class MeanSquare(nn.Module):
    """The mean square of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).square().mean()


# ---- Quantized values that rounding changes: accepted in a proof, other changes are not.


WIDTH = 32
ROWS = "inner  compress(activations, int4, block=32)\nzero(stage=0, over=dp)"


class Net(nn.Module):
    """A layer whose saved input is quantized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.inner(x) / 8)) ** 2).mean()


GAP = 2.0**-19  # distance to a whole number: some rounding errors of float32


def _nearly_whole() -> Tensor:
    """Return rows from 0 to 15, so that the quantization step is 1, with almost whole numbers."""
    parts = []
    for samples in ((0, 1, 2), (3, 4, 5)):
        positions = torch.arange(1, 3 * WIDTH + 1)
        random_bits = stream_numbers(positions, torch.tensor(stream_of("inner", 0, 0, samples, 1)))
        x = (torch.arange(3 * WIDTH) % 13 + 2 - random_bits.double() / 2**53 - GAP).float()
        x.view(3, WIDTH)[:, :2] = torch.tensor([0.0, 15.0])
        parts.append(x.view(3, WIDTH))
    return torch.cat(parts)


def _prove_quantized(threads: Threads) -> Report:
    batches = [{"x": _nearly_whole()}, {"x": torch.randn(4, WIDTH)}]
    plan = make_plan(Net(), ROWS, "dp=2", "lossy")
    return prove(Case(plan, tuple(batches)), pool=threads)


def _with_error(random_numbers: Callable[..., Tensor], by: float) -> Callable[..., Tensor]:
    """Add an error to the random numbers in float32, not to those of the original."""

    def other(tensor: Tensor, offset: int, stream: int) -> Tensor:
        numbers = random_numbers(tensor, offset, stream)
        return numbers + by if tensor.dtype == torch.float32 else numbers

    return other


def test_a_number_that_rounding_tips_is_no_difference(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both quantized values are right: rows of the working dtype pass within their bounds."""
    monkeypatch.setattr(
        quantized, "_random_numbers", _with_error(quantized._random_numbers, 2 * GAP)
    )
    report = _prove_quantized(threads)
    assert report.ok, [row for row in report.rows if not row.ok][:3]
    assert any(row.note == ROUNDED_NOTE and "in working dtype" in row.kind for row in report.rows)
    assert "as ranks took them" in dict(report.facts)["in fewer bits"]


def test_other_numbers_are_a_difference(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized values that rounding does not explain fail."""
    monkeypatch.setattr(quantized, "_random_numbers", _with_error(quantized._random_numbers, 0.5))
    report = _prove_quantized(threads)
    assert not report.ok
    failed_kinds = {row.kind for row in report.rows if not row.ok}
    assert "gradients in working dtype" in failed_kinds
    assert all(kind.endswith("in working dtype") for kind in failed_kinds)


def test_where_nothing_is_tipped_nothing_is_said(threads: Threads) -> None:
    """Without changed values the original is run once, and nothing is reported."""
    report = _prove_quantized(threads)
    assert report.ok and not any(row.note == ROUNDED_NOTE for row in report.rows)
    assert "in fewer bits" not in dict(report.facts)


# -- sums that depend on the number of threads -----------------------------------------------------


class Series(nn.Module):
    """A norm whose gradients are sums over many tokens, split over threads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)).tanh())
        return (y - x.roll(1, 0)).square().mean()


@pytest.mark.parametrize("threads", [1, 8])
def test_the_original_shares_its_sums_as_ranks_do(threads: int, pool: Pool) -> None:
    """The original uses as many threads as a rank: with more, its bounds would be too small."""
    plan = make_plan(Series(), "up shard(col, over=tp)\ndown shard(row, over=tp)", "tp=2")
    batches = tuple({"x": _normal_tensor(k, 2**15, 16)} for k in range(2))
    old_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        report = prove(Case(plan, batches, dtype="float32"), pool=pool)
    finally:
        torch.set_num_threads(old_threads)
    assert report.ok, str(report)


def _normal_tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- float64 of a model whose steps amplify rounding errors ----------------------------------------


class Chaotic(nn.Module):
    """A loss with such curvature that a step amplifies weight differences by 1e6.

    On ranks it is multiplied by `factor`.
    """

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.wrong = nn.Linear(8, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        y = (2000.0 * self.lin(x)).cos().mean()
        on_ranks = dist.is_initialized() and not x.is_meta
        return y * self.wrong if on_ranks else y


def _prove_chaotic(pool: Pool, factor: float) -> Report:
    batches = tuple({"x": _normal_tensor(k, 16, 8).double()} for k in range(3))
    plan = make_plan(Chaotic(factor).double(), "zero(stage=0, over=dp)", "dp=2")
    return prove(Case(plan, batches, dtype="none"), pool=pool)


def test_roundings_that_steps_magnify_are_no_mistake(pool: Pool) -> None:
    """Float64 bounds grow with the original's amplified rounding errors, and the report says so."""
    report = _prove_chaotic(pool, 1.0)
    assert report.ok, str(report)
    wide_rows = [row for row in report.rows if row.gate > RTOL]
    assert 0 not in {row.step for row in wide_rows} and max(row.error for row in wide_rows) > RTOL
    assert any(kind == "conditioning" for kind, _ in report.facts)


@pytest.mark.parametrize("wrong", [1 + 1e-7, 1.01], ids=["1e-7", "1e-2"])
def test_what_roundings_do_not_explain_is_a_mistake(wrong: float, pool: Pool) -> None:
    """The first step amplifies nothing: a gradient error there fails."""
    report = _prove_chaotic(pool, wrong)
    assert not report.ok and report.first is not None and report.first.step == 0


def test_of_a_plain_mistake_the_original_is_not_asked() -> None:
    """A row with a clear error, or a bound of zero, fails without running the original."""
    key = Key("SGD", "gradients", 0, "w")

    def seen(value: float) -> Observation:
        return Observation(tensors={key: torch.full((2,), value)})

    def run(draw: int) -> Observation:
        raise AssertionError("the original ran")

    for value, gate in ((1.5, RTOL), (1.0 + 1e-8, 0.0)):
        row = Row("SGD", "gradients", "w", abs(value - 1.0), gate, False, 0)
        assert ErrorBounds(seen(1.0), run).widen_gates([row], seen(value)) == [row]
