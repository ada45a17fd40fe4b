"""Tests of the working dtype: another order of sums passes, small mistakes and luck do not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.observe import Key, Observation, conditions, observe
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.pooled_draws import LEAST, bound, quantile
from schedlang.passes.verify.working_dtype import TIPPED, nudged, tipped, within_rounding
from schedlang.report import Report
from schedlang.runtime.activation_memory import quantized
from schedlang.runtime.activation_memory.quantized import stream
from schedlang.runtime.float64 import Float64, as_float64, widened
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import ambient
from schedlang.runtime.rng.logical_dropout import mixed
from tests.engine import Threads
from tests.proofs import planned


class Halved(nn.Module):
    """A linear layer that sums two halves of its inputs, the second with a factor."""

    def __init__(self, inner: nn.Linear, factor: float) -> None:
        super().__init__()
        self.weight, self.bias, self.factor = inner.weight, inner.bias, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (a, b), (v, w) = x.chunk(2, -1), self.weight.chunk(2, 1)
        return a @ v.T + self.factor * (b @ w.T) + self.bias


def _seen(dtype: torch.dtype, *, exact: bool = False, factor: float | None = None) -> Observation:
    """The same weights and batches, rounded to `dtype`, computed so or in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)).to(dtype)
    batches: Any = [{"input": torch.randn(8, 32).to(dtype)} for _ in range(3)]
    if factor is not None:
        model = nn.Sequential(Halved(model[0], factor), model[1], Halved(model[2], factor))
    if exact:
        model, batches = as_float64(model), widened(batches)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean()

    def make(condition: Any) -> Sequential:
        return Sequential(copy.deepcopy(model), condition.optimizer, loss=loss, clip=condition.clip)

    with ambient(Float64()) if exact else nullcontext():
        return observe(make, conditions(batches, 1.0))


@pytest.mark.parametrize(
    ("dtype", "wrong"), [(torch.float32, 1 + 1e-5), (torch.bfloat16, 1.1)], ids=["fp32", "bf16"]
)
def test_rounding_passes_and_a_wrong_factor_fails(dtype: torch.dtype, wrong: float) -> None:
    """The gate follows the precision: what is nothing in bfloat16 is a mistake in float32."""
    exact, plain = _seen(dtype, exact=True), _seen(dtype)
    good = Report(within_rounding(exact, plain, _seen(dtype, factor=1.0)))
    assert good.ok, str(good)
    bad = Report(within_rounding(exact, plain, _seen(dtype, factor=wrong)))
    assert bad.first is not None and bad.first.kind == "outputs in working dtype"


def test_what_is_missing_fails() -> None:
    """A tensor that the program does not have, or NaN, never passes."""
    exact, plain = _seen(torch.float32, exact=True), _seen(torch.float32)
    for key, value in exact.tensors.items():
        if key.kind == "gradients" and value is not None:
            for spoiled in (None, torch.full_like(plain.tensors[key], torch.nan)):
                program = Observation({**plain.tensors, key: spoiled})
                assert Report(within_rounding(exact, plain, program)).exit_code == 1


def test_single_numbers_have_a_gate_by_their_size() -> None:
    """A loss may be off by some roundings of its own size, not by a thousandth in float32."""
    exact, plain = _seen(torch.float32, exact=True), _seen(torch.float32)
    for kind in ("loss", "gradient norm"):
        (key,) = (k for k in plain.tensors if k[:3] == ("SGD", kind, 0))
        value = plain.tensors[key]
        assert value is not None
        for factor, ok in ((1 + 1e-7, True), (1 + 1e-3, False)):
            program = Observation({**plain.tensors, key: value * factor})
            rows = [r for r in within_rounding(exact, plain, program) if r.kind.startswith(kind)]
            assert all(row.ok for row in rows) == ok


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


@pytest.mark.parametrize(("spread", "code"), [(1e-4, 3), (10.0, 1)], ids=["tipped", "clear"])
def test_behind_a_tipped_choice_nothing_is_decided(spread: float, code: int, pool: Pool) -> None:
    """A row that fails in the working dtype then counts as not checked; else it is different."""
    good = _chosen(pool, Chosen(spread), "bfloat16")
    assert good.ok, str(good)
    bad = _chosen(pool, Chosen(spread, wrong=True), "bfloat16")
    assert bad.exit_code == code
    assert (code == 3) == any("choices of `topk` in `the model`" in u for u in bad.unchecked)


def test_tipped_choices_are_counted() -> None:
    """By site and operator, among those that both sides have."""
    right = {(0, "gate", "topk", 0, k): torch.tensor([[k]]) for k in range(3)}
    other = {key: value.clone() for key, value in right.items()}
    assert tipped(right, other) == []
    other[(0, "gate", "topk", 0, 1)] += 1
    del other[(0, "gate", "topk", 0, 2)]
    assert tipped(right, other) == ["1 of 2 choices of `topk` in `gate` fall otherwise"]


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


def _run(error: torch.Tensor | float, kind: str = "gradients") -> Observation:
    """A run of one tensor that is 1 but for an error, or of a number seen after each step."""
    value = 1.0 + torch.as_tensor(error, dtype=torch.float64)
    if kind == "gradients":
        return Observation({Key("SGD", kind, 0, "bias"): value})
    return Observation({Key("SGD", kind, step, "norm"): v for step, v in enumerate(value)})


def _several(count: int, size: int = 4) -> list[torch.Tensor]:
    """Errors of one law, each element its own way, about 0.01 in all."""
    generator = torch.Generator().manual_seed(0)
    return [0.01 * torch.randn(size, generator=generator) / size**0.5 for _ in range(count)]


@pytest.mark.parametrize(
    "kind, low",
    [
        ("gradients", 2**-8),
        ("gradients", 0.0),
        ("gradient norm", 2**-8),
    ],
)
def test_a_lucky_original_is_no_measure(kind: str, low: float) -> None:
    """Where one run of the original is nearly exact by luck, its others tell what is rounding."""
    draws = _several(9)
    plain, right = draws[0] * 1e-3, draws[1] * (1.0 if kind == "gradients" else 2.0)

    def errors(program: torch.Tensor, some: list[torch.Tensor]) -> list[float]:
        rows = within_rounding(
            _run(torch.zeros(4), kind),
            _run(plain, kind),
            _run(program, kind),
            low=low,
            draws=[_run(one, kind) for one in some],
        )
        return [row.error for row in rows]

    assert max(errors(right, [])) > 1
    assert max(errors(right, [plain, *draws[2:]])) < 0.7
    assert min(errors(draws[1].sign(), [plain, *draws[2:]])) > 1
    assert max(errors(right, draws[:3])) > 1, "three tell nothing"


@pytest.mark.parametrize("size, factor", [(4, 15), (64, 5), (1024, 3)])
def test_a_mistake_is_above_all_luck(size: int, factor: float) -> None:
    """An error several times as large as all draws is none of them, the sooner the more elements
    there are, each with a chance of its own to be small."""
    draws = _several(10, size)
    seen = [_run(one) for one in draws]
    for error, ok in ((draws[9], True), (factor * draws[9], False)):
        (row,) = within_rounding(
            _run(torch.zeros(size)), _run(draws[0]), _run(error), low=2**-20, draws=seen[:9]
        )
        assert row.ok is ok, row


def test_where_the_larger_of_two_counts() -> None:
    """The original by the parts of the program rounds what the whole need not."""
    exact, plain, program, parts = map(
        _run, torch.tensor([[0.0, 0], [0.01, 0], [0.035, 0], [0.02, 0]])
    )
    (row,) = within_rounding(exact, plain, program, low=2**-8)
    assert row.error == pytest.approx(1.75, rel=1e-3)
    (row,) = within_rounding(exact, plain, program, low=2**-8, parts=parts)
    assert row.error == pytest.approx(0.875, rel=1e-3)


def test_values_that_differ_by_a_rounding() -> None:
    """Weights and float inputs are off by at most one; a mask of 0 and 1 stays one."""
    batch = {"x": torch.rand(4, 4), "mask": torch.tensor([[0.0, 1.0], [1.0, -torch.inf]])}
    case = Case(planned(Mean(), "", ""), (batch,))
    near = [nudged(case, 2**-8, draw) for draw in range(2)]
    for one in near:
        assert torch.equal(one.batches[0]["mask"], batch["mask"])
        module = one.plan.model.base.model
        pairs = [(one.batches[0]["x"], batch["x"]), *zip(module.parameters(), Mean().parameters())]
        for value, plain in pairs:
            off = ((value - plain) / plain).detach().abs()
            assert 0 < float(off.max()) <= 2**-8 * 1.001
    assert not torch.equal(near[0].batches[0]["x"], near[1].batches[0]["x"])


class Mean(nn.Module):
    """The mean square of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).square().mean()


# ---- Tests of luck: how large an error may be by chance, told from several errors of its kind.


@pytest.mark.parametrize(
    "n, m, chance, wanted",
    [
        (1, 10, 0.001, 21.04),
        (2, 4, 0.05, 6.944),
        (4, 8, 0.01, 7.006),
        (5, 10, 0.05, 3.326),
        (10, 120, 0.001, 3.237),
        (30, 30, 0.01, 2.386),
    ],
)
def test_the_law_is_that_of_tables(n: int, m: int, chance: float, wanted: float) -> None:
    """Upper quantiles of F, as printed in tables."""
    assert quantile(chance, n, m) == pytest.approx(wanted, rel=2e-4)


@pytest.mark.parametrize("chance", [1e-3, 1e-6, 1e-9])
def test_small_chances(chance: float) -> None:
    """F(2, m) has a closed form, P(F > f) = (1 + 2 f / m)^(-m/2), also far out in its tail."""
    for m in (3.0, 16.0, 250.0):
        assert quantile(chance, 2, m) == pytest.approx((chance ** (-2 / m) - 1) * m / 2, rel=1e-6)


Law = Callable[[], Tensor]


def _laws(n: int) -> dict[str, Law]:
    generator = torch.Generator().manual_seed(n)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    fading, shared = 0.5 ** torch.arange(n), normal(n)
    return {
        "each its own way": lambda: normal(n),
        "some more than others": lambda: normal(n) * fading,
        "together": lambda: shared * normal(1),
        "with one mean": lambda: shared + 0.3 * normal(n),
    }


@pytest.mark.parametrize("law", _laws(1))
def test_false_alarms_are_as_rare_as_said(law: str) -> None:
    """Whatever the covariance of errors, one more is above the bound as often as asked for."""
    for n in (1, 4, 64):
        draw = _laws(n)[law]
        above = {0.05: 0.0, 0.005: 0.0}
        trials, each = 100, 50
        for _ in range(trials):
            known = [draw() for _ in range(9)]
            more = [float(draw().norm()) for _ in range(each)]
            for chance in above:
                limit = bound(known, chance)
                above[chance] += sum(size > limit for size in more) / trials / each
        for chance, found in above.items():
            assert found <= 3 * chance + 0.003, (n, chance, found)


def test_a_bound_is_no_licence() -> None:
    """Of many elements that err each its own way none may be half as large again; of one number,
    of which nine draws tell little, up to some twenty times."""
    for n, most in ((1000, 1.5), (64, 2.0), (16, 3.0), (1, 30.0)):
        known = [_laws(n)["each its own way"]] * 9
        limit = bound([draw() for draw in known], 1e-9)
        assert math.sqrt(n) < limit < most * math.sqrt(n), (n, limit)


def test_what_cannot_be_told() -> None:
    """Too few errors, none at all, or such that are no numbers: no bound."""
    one = torch.ones(3)
    assert bound([one] * (LEAST - 1), 1e-6) == 0.0
    assert bound([0 * one] * 9, 1e-6) == 0.0
    assert bound([*[one] * 8, one * math.inf], 1e-6) == 0.0
    assert bound([one] * 9, 1e-6) == pytest.approx(math.sqrt(3), rel=0.01)


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
        bits = mixed(places, torch.tensor(stream("inner", 0, 0, samples, 1)))
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
    monkeypatch.setattr(quantized, "_draws", _more(quantized._draws, 2 * NEAR))
    report = _report(threads)
    assert report.ok, [row for row in report.rows if not row.ok][:3]
    assert any(row.note == TIPPED and "in working dtype" in row.kind for row in report.rows)
    assert "as ranks took them" in dict(report.facts)["in fewer bits"]


def test_other_numbers_are_a_difference(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that no rounding explains are told, although they are noted as well."""
    monkeypatch.setattr(quantized, "_draws", _more(quantized._draws, 0.5))
    report = _report(threads)
    assert not report.ok
    bad = {row.kind for row in report.rows if not row.ok}
    assert "gradients in working dtype" in bad
    assert all(kind.endswith("in working dtype") for kind in bad)


def test_where_nothing_is_tipped_nothing_is_said(threads: Threads) -> None:
    """The same sums round alike: the original is run once, as it is."""
    report = _report(threads)
    assert report.ok and not any(row.note == TIPPED for row in report.rows)
    assert "in fewer bits" not in dict(report.facts)
