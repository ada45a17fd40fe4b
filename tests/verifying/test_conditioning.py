"""Tests of bounds from the original's conditioning: what roundings do, what no luck explains."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.passes.verify.conditioning import (
    LEAST_ERRORS,
    ErrorBounds,
    PerturbedRounding,
    error_bound,
    quantile,
)
from schedlang.passes.verify.observe import Key, Observation, observe, standard_conditions
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.working_dtype import error_bounds, split_undecided
from schedlang.report import Report
from schedlang.runtime.float64 import Float64, as_float64, to_float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.moe.discrete_choices import ChoiceRecorder
from schedlang.runtime.scope import Scope, enter_scope

# ---- Runs whose every result is off by a rounding.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_result_is_off_by_one_unit_in_its_last_place(dtype: torch.dtype) -> None:
    """Up or down, as the seed says; what moves numbers and rounds none is exact."""
    x = torch.rand(64, 64).to(dtype) + 0.3
    eps = torch.finfo(dtype).eps
    with PerturbedRounding(1):
        y, again = x * 0.7, [x.T.clone(), x.float(), torch.cat([x, x])[:64], x.relu()]
    off = ((y.double() - (x * 0.7).double()) / (x * 0.7).double()).abs()
    assert float((off > 0).double().mean()) > 0.9 and float(off.max()) <= eps
    assert all(torch.equal(a.to(dtype), b) for a, b in zip(again, (x.T, x, x, x)))
    seen = []
    for seed in (1, 2):
        with PerturbedRounding(seed):
            seen.append(x * 0.7)
    assert torch.equal(seen[0], y) and not torch.equal(seen[1], y)


def test_numbers_below_the_normal_ones_are_moved() -> None:
    """Those of float16 by the distance between two: a part of their size would be rounded away."""
    least = 2.0**-24
    x = torch.full((64,), 3 * least, dtype=torch.float16)
    with PerturbedRounding(1):
        y = x * 1.1
    assert set(y.tolist()) == {2 * least, 4 * least}


def test_masks_and_whole_numbers_stay() -> None:
    """One minus a mask times the lowest number is a mask still; positions are themselves."""
    mask = torch.tensor([[1.0, 0.0, 1.0]]).bfloat16()
    lowest = torch.finfo(torch.bfloat16).min
    with PerturbedRounding(1):
        hidden = (1.0 - mask) * lowest
        places = torch.arange(9).bfloat16() * 2.0
        scores = torch.zeros(1, 3).masked_fill(mask == 0, -math.inf).softmax(-1)
    assert hidden.tolist() == [[0.0, lowest, 0.0]] or hidden.tolist() == [[-0.0, lowest, -0.0]]
    assert torch.equal(places, torch.arange(9).bfloat16() * 2)
    assert scores[0, 1] == 0 and scores.isfinite().all()


def test_backward_and_updates_are_moved() -> None:
    """A gradient and a step of an optimizer are results too."""

    def trained(seed: int) -> tuple[Tensor, Tensor]:
        w = nn.Parameter(torch.linspace(0.1, 0.9, 32))
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        x = torch.linspace(0.3, 0.7, 32)
        with PerturbedRounding(seed) if seed else nullcontext():
            out = w @ x
            (grad,) = torch.autograd.grad(out, w, torch.tensor(0.3))
            w.grad = x * 0.5
            optimizer.step()
        return grad, w.detach()

    for plain, moved in zip(trained(0), trained(3)):
        assert 0 < float((plain - moved).norm() / plain.norm()) < 4e-7


def test_low_types_of_eight_bits_move_too() -> None:
    """A cast to float8 rounds by its own unit, and what follows it by that of what it gives."""
    x = torch.rand(256) + 0.3
    with PerturbedRounding(1):
        y = x.to(torch.float8_e4m3fn).float()
    off = ((y - x.to(torch.float8_e4m3fn).float()) / x).abs()
    assert 2**-5 < float(off.mean()) < 2**-2


def test_what_is_forced_is_chosen() -> None:
    """Operators that choose give the numbers at the places they are told, by sample."""
    x = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]], requires_grad=True)

    def chosen() -> list[Any]:
        with enter_scope(Scope(0, 0, (0, 1))):
            top, order = x.topk(2, -1), x.argsort(-1)
            most, ends = x.max(1), torch.sort(x, 1, descending=True)
            return [top.values, top.indices, order, most.values, most.indices, ends[0], ends[1]]

    with enter_modes(noted := ChoiceRecorder()):
        plain = chosen()
    with enter_modes(ChoiceRecorder(noted.found)):
        assert all(torch.equal(a, b) for a, b in zip(chosen(), plain))
    turned = {
        key: value.flip(-1) if value.dim() > 1 else value for key, value in noted.found.items()
    }
    with enter_modes(
        ChoiceRecorder({k: (v + 1) % 3 if v.dim() == 1 else v for k, v in turned.items()})
    ):
        other = chosen()
    assert torch.equal(other[1], plain[1].flip(-1)) and torch.equal(other[0], plain[0].flip(-1))
    assert torch.equal(other[2], plain[2].flip(-1)) and torch.equal(other[6], plain[6].flip(-1))
    assert torch.equal(other[3], x.gather(1, other[4][:, None])[:, 0])
    assert torch.equal(other[4], (plain[4] + 1) % 3)
    assert other[0].requires_grad


# ---- Rows that are held against such runs.


class Halved(nn.Module):
    """A linear layer that sums two halves of its inputs, the second with a factor."""

    def __init__(self, inner: nn.Linear, factor: float) -> None:
        super().__init__()
        self.weight, self.bias, self.factor = inner.weight, inner.bias, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (a, b), (v, w) = x.chunk(2, -1), self.weight.chunk(2, 1)
        return a @ v.T + self.factor * (b @ w.T) + self.bias


def _seen(
    dtype: torch.dtype, *, exact: bool = False, factor: float | None = None, nudge: int = 0
) -> Observation:
    """The same weights and batches, rounded to `dtype`, computed so or in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)).to(dtype)
    batches: Any = [{"input": torch.randn(8, 32).to(dtype)} for _ in range(3)]
    if factor is not None:
        model = nn.Sequential(Halved(model[0], factor), model[1], Halved(model[2], factor))
    if exact:
        model, batches = as_float64(model), to_float64(batches)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean()

    def make(condition: Any) -> Sequential:
        return Sequential(copy.deepcopy(model), condition.optimizer, loss=loss, clip=condition.clip)

    with enter_modes(Float64()) if exact else PerturbedRounding(nudge) if nudge else nullcontext():
        return observe(make, standard_conditions(batches, 1.0)[:1])


def _bounds(dtype: torch.dtype) -> ErrorBounds:
    return ErrorBounds(_seen(dtype, exact=True), lambda draw: _seen(dtype, nudge=draw))


@pytest.mark.parametrize(
    ("dtype", "wrong"), [(torch.float32, 1 + 1e-5), (torch.bfloat16, 1.1)], ids=["fp32", "bf16"]
)
def test_rounding_passes_and_a_wrong_factor_fails(dtype: torch.dtype, wrong: float) -> None:
    """The gate follows the precision: what is nothing in bfloat16 is a mistake in float32."""
    bounds = _bounds(dtype)
    good = Report(bounds.rows(_seen(dtype, factor=1.0)))
    assert good.ok, str(good)
    bad = Report(bounds.rows(_seen(dtype, factor=wrong)))
    assert bad.first is not None and bad.first.kind == "outputs in working dtype"


def test_what_is_missing_fails() -> None:
    """A tensor that the program does not have, or NaN, never passes."""
    plain = _seen(torch.float32)
    bounds = ErrorBounds(_seen(torch.float32, exact=True), lambda draw: plain, draws=0)
    for key, value in bounds.exact.tensors.items():
        if key.kind == "gradients" and value is not None and key.step == 0:
            for spoiled in (None, torch.full_like(plain.tensors[key], torch.nan)):
                program = Observation({**plain.tensors, key: spoiled})
                assert Report(bounds.rows(program)).exit_code == 1


def test_single_numbers_have_a_gate_by_their_size() -> None:
    """A loss may be off by some roundings of its own size, not by a thousandth in float32."""
    plain, bounds = _seen(torch.float32), _bounds(torch.float32)
    for kind in ("loss", "gradient norm"):
        (key,) = (k for k in plain.tensors if k[:3] == ("SGD", kind, 0))
        value = plain.tensors[key]
        assert value is not None
        for factor, ok in ((1 + 1e-7, True), (1 + 1e-3, False)):
            program = Observation({**plain.tensors, key: value * factor})
            rows = [r for r in bounds.rows(program) if r.kind.startswith(kind)]
            assert all(row.ok for row in rows) == ok


@pytest.mark.parametrize("ours", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("working", [1.0, math.nan])
@pytest.mark.parametrize("exact", [math.nan, math.inf])
def test_an_original_that_is_no_number_in_float64_decides_nothing(
    exact: float, working: float, ours: float
) -> None:
    """Whatever the others have: no row of such a loss passes, and none fails."""
    key = Key("SGD", "loss", 0, "loss")
    kinds = (torch.float64, torch.bfloat16, torch.bfloat16)
    values = (torch.tensor(v, dtype=d) for v, d in zip((exact, working, ours), kinds))
    right, low, program = (Observation({key: value}) for value in values)
    rows = ErrorBounds(right, lambda draw: low).rows(program)
    assert split_undecided([*rows])[0] == [] and split_undecided([*rows])[1]


@pytest.mark.parametrize("lost", [0, 1, 7])
@pytest.mark.parametrize("ours", [1.01, 2.0, math.nan])
def test_where_roundings_alone_overflow_nothing_fails(lost: int, ours: float) -> None:
    """Runs that are no numbers are no small errors: what is beyond the others is undecided."""
    torch.manual_seed(0)
    key, ones = Key("SGD", "gradients", 2, "w"), torch.ones(64)

    def run(draw: int) -> Observation:
        value = ones + 0.01 * torch.randn(64)
        return Observation({key: value * math.nan if 0 < draw <= lost else value})

    bounds = ErrorBounds(Observation({key: ones.double()}), run)
    (row,) = bounds.rows(Observation({key: ones * ours}))
    if ours == 1.01:
        assert row.ok
    else:
        assert not row.ok and bool(split_undecided([row])[1]) == bool(lost)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["kept in it", "autocast"])
def test_bounds_of_a_program_that_was_written_elsewhere(autocast: torch.dtype | None) -> None:
    """A model that computes in bfloat16 or is cast to it: halves pass, mistakes fail."""
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)).to(dtype)
    batches: Any = [{"input": torch.randn(8, 32).to(dtype)} for _ in range(3)]
    told = standard_conditions(batches, 1.0)[:1]

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.float().square().mean()

    def program(factor: float) -> Observation:
        halves = nn.Sequential(Halved(model[0], factor), model[1], Halved(model[2], factor))
        cast = torch.autocast("cpu", autocast) if autocast else nullcontext()

        def make(condition: Any) -> Sequential:
            return Sequential(copy.deepcopy(halves), condition.optimizer, loss=loss)

        with cast:
            return observe(make, told)

    bounds = error_bounds(model, told, loss, autocast=autocast)
    right = Report(bounds.rows(program(1.0)))
    assert right.ok and {row.kind for row in right.rows} >= {"gradients in working dtype"}
    assert not Report(bounds.rows(program(1.1))).ok


class Quantised(nn.Module):
    """Products of numbers in eight bits, each tensor by a scale of its own; in parts, their sum."""

    def __init__(self, parts: int = 1, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(64, 32), nn.Linear(32, 8)
        self.parts, self.factor = parts, factor

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            pairs = zip(x.chunk(self.parts, -1), layer.weight.chunk(self.parts, 1))
            done = [_eight(a) @ _eight(w).T for a, w in pairs]
            done[-1] = done[-1] * self.factor
            x = torch.tanh(sum(done[1:], done[0]) + layer.bias)
        return x


def _eight(x: Tensor) -> Tensor:
    """In eight bits, backward as it stands."""
    scale = 2.0 ** x.detach().abs().max().log2().floor()
    return x + ((x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale - x).detach()


def _eight_bits(*, exact: bool = False, nudge: int = 0, **options: Any) -> Observation:
    model = Quantised(**options).bfloat16()
    batches: Any = [{"x": torch.randn(16, 64).bfloat16()} for _ in range(2)]
    if exact:
        model, batches = as_float64(model), to_float64(batches)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean()

    def make(condition: Any) -> Sequential:
        return Sequential(copy.deepcopy(model), condition.optimizer, loss=loss)

    with enter_modes(Float64()) if exact else PerturbedRounding(nudge) if nudge else nullcontext():
        return observe(make, standard_conditions(batches, 1.0)[:1])


def test_eight_bits_have_the_bounds_of_eight_bits() -> None:
    """Sums of parts that are cast to float8 pass, another factor of one part does not."""
    bounds = ErrorBounds(_eight_bits(exact=True), lambda draw: _eight_bits(nudge=draw))
    assert Report(bounds.rows(_eight_bits(parts=2))).ok
    assert not Report(bounds.rows(_eight_bits(parts=2, factor=1.5))).ok


def _run(error: Tensor | float, kind: str = "gradients") -> Observation:
    """A run of one tensor that is 1 but for an error, or of a number seen after each step."""
    value = 1.0 + torch.as_tensor(error, dtype=torch.float64)
    if kind == "gradients":
        return Observation({Key("SGD", kind, 0, "bias"): value})
    return Observation({Key("SGD", kind, step, "norm"): v for step, v in enumerate(value)})


def _several(count: int, size: int = 4) -> list[Tensor]:
    """Errors of one law, each element its own way, about 0.01 in all."""
    generator = torch.Generator().manual_seed(0)
    return [0.01 * torch.randn(size, generator=generator) / size**0.5 for _ in range(count)]


def _share(program: Tensor, runs: list[Tensor], kind: str = "gradients") -> float:
    seen = [_run(one, kind) for one in runs]
    bounds = ErrorBounds(_run(torch.zeros_like(runs[0]), kind), lambda k: seen[k], len(seen) - 1)
    return max(row.error for row in bounds.rows(_run(program, kind)))


@pytest.mark.parametrize("kind", ["gradients", "gradient norm"])
def test_a_lucky_original_is_no_measure(kind: str) -> None:
    """Where one run of the original is nearly exact by luck, the others tell what is rounding."""
    draws = _several(10)
    assert _share(draws[1], [draws[0] * 1e-3], kind) > 1
    assert _share(draws[1], [draws[0] * 1e-3, *draws[2:]], kind) <= 1
    assert _share(draws[1].sign(), [draws[0] * 1e-3, *draws[2:]], kind) > 1


@pytest.mark.parametrize("size, factor", [(4, 15), (64, 5), (1024, 4)])
def test_a_mistake_is_above_all_luck(size: int, factor: float) -> None:
    """An error several times as large as all draws is none of them, the sooner the more elements
    there are, each with a chance of its own to be small."""
    draws = _several(10, size)
    runs = [draws[0] / 2, *draws[1:9]]
    assert _share(draws[9], runs) <= 1
    assert _share(factor * draws[9], runs) > 1


def test_one_element_among_many() -> None:
    """One that is off by twenty times what others are moves no norm, and is found all the same."""
    draws = _several(10, 4096)
    wrong = draws[9].clone()
    wrong[7] = 20 * float(wrong.square().mean().sqrt())
    assert float(wrong.norm()) < 1.1 * float(draws[9].norm())
    assert _share(draws[9], draws[:9]) <= 1 < _share(wrong, draws[:9])


def test_as_few_runs_as_it_takes() -> None:
    """What the original as it stands explains asks for no other run of it."""
    draws, taken = _several(10, 64), list[int]()

    def run(draw: int) -> Observation:
        taken.append(draw)
        return _run(draws[draw] / (1 if draw else 2))

    bounds = ErrorBounds(_run(torch.zeros(64)), run)
    assert Report(bounds.rows(_run(draws[9]))).ok and taken == [0]
    assert not Report(bounds.rows(_run(100 * draws[9]))).ok and taken == list(range(9))


def test_what_is_exact_for_the_whole_may_be_rounded_once() -> None:
    """Where no run of the original is off, one rounding of a tensor's own size is allowed."""
    exact = Observation({Key("SGD", "gradients", 0, "bias"): torch.ones(4, dtype=torch.float64)})
    plain = Observation({k: v.bfloat16() for k, v in exact.tensors.items() if v is not None})
    bounds = ErrorBounds(exact, lambda draw: plain)
    for off, ok in ((2**-8, True), (2**-6, False)):
        program = Observation({k: v * (1 + off) for k, v in exact.tensors.items() if v is not None})
        assert Report(bounds.rows(program)).ok is ok


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
            more = [draw() for _ in range(each)]
            for chance in above:
                limit = error_bound(known, chance)
                assert limit is not None
                above[chance] += sum(limit.share(e) > 1 for e in more) / trials / each
        for chance, found in above.items():
            assert found <= 3 * chance + 0.003, (n, chance, found)


def test_a_bound_is_no_licence() -> None:
    """Of many elements that err each its own way none may be half as large again; of one number,
    of which nine draws tell little, up to some twenty times."""
    for n, most in ((1000, 1.5), (64, 2.0), (16, 3.0), (1, 30.0)):
        known = [_laws(n)["each its own way"]] * 9
        limit = error_bound([draw() for draw in known], 1e-9)
        assert limit is not None
        assert math.sqrt(n) < limit.norm < most * math.sqrt(n), (n, limit)


def test_what_cannot_be_told() -> None:
    """Too few errors, none at all, or such that are no numbers: no bound."""
    one = torch.ones(3)
    assert error_bound([one] * (LEAST_ERRORS - 1), 1e-6) is None
    assert error_bound([0 * one] * 9, 1e-6) is None
    assert error_bound([*[one] * 8, one * math.inf], 1e-6) is None
    told = error_bound([one] * 9, 1e-6)
    assert told is not None and told.norm == pytest.approx(math.sqrt(3), rel=0.01)


class _WithoutDraws(TorchFunctionMode):
    """A mode that refuses every draw of torch's, as the one that replaces a model's does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.randint, torch.rand, torch.randn), func
        return func(*args, **(kwargs or {}))


def test_roundings_of_large_tensors_are_no_draws_of_the_model() -> None:
    """Where more numbers are moved than signs are kept, they are drawn unseen by modes."""
    plain = torch.full((300, 300), 1.1).sin()
    with _WithoutDraws(), PerturbedRounding(0):
        moved = torch.full((300, 300), 1.1).sin()
    assert 0 < (moved - plain).abs().max() < 1e-6
