"""Error bounds for working dtypes: from runs of the original with perturbed rounding."""

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

# ---- Runs in which every result is perturbed by one rounding.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_result_is_off_by_one_unit_in_its_last_place(dtype: torch.dtype) -> None:
    """Results move by one unit up or down, as the seed decides; copies and moves stay exact."""
    x = torch.rand(64, 64).to(dtype) + 0.3
    eps = torch.finfo(dtype).eps
    with PerturbedRounding(1):
        y, exact_results = x * 0.7, [x.T.clone(), x.float(), torch.cat([x, x])[:64], x.relu()]
    relative_errors = ((y.double() - (x * 0.7).double()) / (x * 0.7).double()).abs()
    assert (
        float((relative_errors > 0).double().mean()) > 0.9 and float(relative_errors.max()) <= eps
    )
    assert all(torch.equal(a.to(dtype), b) for a, b in zip(exact_results, (x.T, x, x, x)))
    results = []
    for seed in (1, 2):
        with PerturbedRounding(seed):
            results.append(x * 0.7)
    assert torch.equal(results[0], y) and not torch.equal(results[1], y)


def test_numbers_below_the_normal_ones_are_moved() -> None:
    """Subnormal float16 numbers move by their distance: a relative change would be rounded away."""
    smallest = 2.0**-24
    x = torch.full((64,), 3 * smallest, dtype=torch.float16)
    with PerturbedRounding(1):
        y = x * 1.1
    assert set(y.tolist()) == {2 * smallest, 4 * smallest}


def test_masks_and_whole_numbers_stay() -> None:
    """Masks stay masks, and whole numbers such as positions are not perturbed."""
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
    """Gradients and optimizer steps are perturbed, too."""

    def trained(seed: int) -> tuple[Tensor, Tensor]:
        w = nn.Parameter(torch.linspace(0.1, 0.9, 32))
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        x = torch.linspace(0.3, 0.7, 32)
        with PerturbedRounding(seed) if seed else nullcontext():
            output = w @ x
            (grad,) = torch.autograd.grad(output, w, torch.tensor(0.3))
            w.grad = x * 0.5
            optimizer.step()
        return grad, w.detach()

    for exact, perturbed in zip(trained(0), trained(3)):
        assert 0 < float((exact - perturbed).norm() / exact.norm()) < 4e-7


def test_low_types_of_eight_bits_move_too() -> None:
    """A cast to float8 is perturbed by the unit of float8."""
    x = torch.rand(256) + 0.3
    with PerturbedRounding(1):
        y = x.to(torch.float8_e4m3fn).float()
    off = ((y - x.to(torch.float8_e4m3fn).float()) / x).abs()
    assert 2**-5 < float(off.mean()) < 2**-2


def test_what_is_forced_is_chosen() -> None:
    """Operators that select (topk, argsort, max) can be forced to recorded choices, by sample."""
    x = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]], requires_grad=True)

    def chosen() -> list[Any]:
        with enter_scope(Scope(0, 0, (0, 1))):
            top, order = x.topk(2, -1), x.argsort(-1)
            maximum, sorted_values = x.max(1), torch.sort(x, 1, descending=True)
            return [
                top.values,
                top.indices,
                order,
                maximum.values,
                maximum.indices,
                sorted_values[0],
                sorted_values[1],
            ]

    with enter_modes(recorder := ChoiceRecorder()):
        recorded = chosen()
    with enter_modes(ChoiceRecorder(recorder.found)):
        assert all(torch.equal(a, b) for a, b in zip(chosen(), recorded))
    flipped = {
        key: value.flip(-1) if value.dim() > 1 else value for key, value in recorder.found.items()
    }
    with enter_modes(
        ChoiceRecorder({k: (v + 1) % 3 if v.dim() == 1 else v for k, v in flipped.items()})
    ):
        forced = chosen()
    assert torch.equal(forced[1], recorded[1].flip(-1)) and torch.equal(
        forced[0], recorded[0].flip(-1)
    )
    assert torch.equal(forced[2], recorded[2].flip(-1)) and torch.equal(
        forced[6], recorded[6].flip(-1)
    )
    assert torch.equal(forced[3], x.gather(1, forced[4][:, None])[:, 0])
    assert torch.equal(forced[4], (recorded[4] + 1) % 3)
    assert forced[0].requires_grad


# ---- Rows that are compared with such runs.


class SummedHalves(nn.Module):
    """A linear layer that sums two halves of its inputs, the second with a factor."""

    def __init__(self, inner: nn.Linear, factor: float) -> None:
        super().__init__()
        self.weight, self.bias, self.factor = inner.weight, inner.bias, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (a, b), (v, w) = x.chunk(2, -1), self.weight.chunk(2, 1)
        return a @ v.T + self.factor * (b @ w.T) + self.bias


def _observe(
    dtype: torch.dtype, *, exact: bool = False, factor: float | None = None, nudge: int = 0
) -> Observation:
    """Observe a model with weights in `dtype`, computed in `dtype` or in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)).to(dtype)
    batches: Any = [{"input": torch.randn(8, 32).to(dtype)} for _ in range(3)]
    if factor is not None:
        model = nn.Sequential(
            SummedHalves(model[0], factor), model[1], SummedHalves(model[2], factor)
        )
    if exact:
        model, batches = as_float64(model), to_float64(batches)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean()

    def make(condition: Any) -> Sequential:
        return Sequential(copy.deepcopy(model), condition.optimizer, loss=loss, clip=condition.clip)

    with enter_modes(Float64()) if exact else PerturbedRounding(nudge) if nudge else nullcontext():
        return observe(make, standard_conditions(batches, 1.0)[:1])


def _bounds(dtype: torch.dtype) -> ErrorBounds:
    return ErrorBounds(_observe(dtype, exact=True), lambda draw: _observe(dtype, nudge=draw))


@pytest.mark.parametrize(
    ("dtype", "wrong"), [(torch.float32, 1 + 1e-5), (torch.bfloat16, 1.1)], ids=["fp32", "bf16"]
)
def test_rounding_passes_and_a_wrong_factor_fails(dtype: torch.dtype, wrong: float) -> None:
    """The bound follows the precision: an error that passes in bfloat16 fails in float32."""
    bounds = _bounds(dtype)
    passing = Report(bounds.rows(_observe(dtype, factor=1.0)))
    assert passing.ok, str(passing)
    failing = Report(bounds.rows(_observe(dtype, factor=wrong)))
    assert failing.first is not None and failing.first.kind == "outputs in working dtype"


def test_what_is_missing_fails() -> None:
    """A missing tensor or NaN never passes."""
    complete = _observe(torch.float32)
    bounds = ErrorBounds(_observe(torch.float32, exact=True), lambda draw: complete, draws=0)
    for key, value in bounds.exact.tensors.items():
        if key.kind == "gradients" and value is not None and key.step == 0:
            for spoiled in (None, torch.full_like(complete.tensors[key], torch.nan)):
                program = Observation({**complete.tensors, key: spoiled})
                assert Report(bounds.rows(program)).exit_code == 1


def test_single_numbers_have_a_gate_by_their_size() -> None:
    """A loss may differ by a few roundings of its size, not by a thousandth in float32."""
    observation, bounds = _observe(torch.float32), _bounds(torch.float32)
    for kind in ("loss", "gradient norm"):
        (key,) = (k for k in observation.tensors if k[:3] == ("SGD", kind, 0))
        value = observation.tensors[key]
        assert value is not None
        for factor, ok in ((1 + 1e-7, True), (1 + 1e-3, False)):
            program = Observation({**observation.tensors, key: value * factor})
            rows = [r for r in bounds.rows(program) if r.kind.startswith(kind)]
            assert all(row.ok for row in rows) == ok


@pytest.mark.parametrize("ours", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("working", [1.0, math.nan])
@pytest.mark.parametrize("exact", [math.nan, math.inf])
def test_an_original_that_is_no_number_in_float64_decides_nothing(
    exact: float, working: float, ours: float
) -> None:
    """If the float64 original is not finite, its row neither passes nor fails."""
    key = Key("SGD", "loss", 0, "loss")
    kinds = (torch.float64, torch.bfloat16, torch.bfloat16)
    values = (torch.tensor(v, dtype=d) for v, d in zip((exact, working, ours), kinds))
    exact_run, working_run, program = (Observation({key: value}) for value in values)
    rows = ErrorBounds(exact_run, lambda draw: working_run).rows(program)
    assert split_undecided([*rows])[0] == [] and split_undecided([*rows])[1]


@pytest.mark.parametrize("lost", [0, 1, 7])
@pytest.mark.parametrize("ours", [1.01, 2.0, math.nan])
def test_where_roundings_alone_overflow_nothing_fails(lost: int, ours: float) -> None:
    """If runs of the original are NaN, larger errors are undecided instead of failed."""
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
    """A model in bfloat16 or under autocast: sums of halves pass, mistakes fail."""
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)).to(dtype)
    batches: Any = [{"input": torch.randn(8, 32).to(dtype)} for _ in range(3)]
    conditions = standard_conditions(batches, 1.0)[:1]

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.float().square().mean()

    def program(factor: float) -> Observation:
        halves = nn.Sequential(
            SummedHalves(model[0], factor), model[1], SummedHalves(model[2], factor)
        )
        cast = torch.autocast("cpu", autocast) if autocast else nullcontext()

        def make(condition: Any) -> Sequential:
            return Sequential(copy.deepcopy(halves), condition.optimizer, loss=loss)

        with cast:
            return observe(make, conditions)

    bounds = error_bounds(model, conditions, loss, autocast=autocast)
    report = Report(bounds.rows(program(1.0)))
    assert report.ok and {row.kind for row in report.rows} >= {"gradients in working dtype"}
    assert not Report(bounds.rows(program(1.1))).ok


class Float8Net(nn.Module):
    """Matrix products in float8 with a scale per tensor, as a sum of parts."""

    def __init__(self, parts: int = 1, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(64, 32), nn.Linear(32, 8)
        self.parts, self.factor = parts, factor

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            pairs = zip(x.chunk(self.parts, -1), layer.weight.chunk(self.parts, 1))
            products = [_round_to_float8(a) @ _round_to_float8(w).T for a, w in pairs]
            products[-1] = products[-1] * self.factor
            x = torch.tanh(sum(products[1:], products[0]) + layer.bias)
        return x


def _round_to_float8(x: Tensor) -> Tensor:
    """Round to float8, with straight-through gradients."""
    scale = 2.0 ** x.detach().abs().max().log2().floor()
    return x + ((x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale - x).detach()


def _observe_float8(*, exact: bool = False, nudge: int = 0, **options: Any) -> Observation:
    model = Float8Net(**options).bfloat16()
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
    """Sums of float8 parts pass, a wrong factor of one part fails."""
    bounds = ErrorBounds(_observe_float8(exact=True), lambda draw: _observe_float8(nudge=draw))
    assert Report(bounds.rows(_observe_float8(parts=2))).ok
    assert not Report(bounds.rows(_observe_float8(parts=2, factor=1.5))).ok


def _observation_of(error: Tensor | float, kind: str = "gradients") -> Observation:
    """Return an observation of one tensor that is 1 plus an error, or of one number per step."""
    value = 1.0 + torch.as_tensor(error, dtype=torch.float64)
    if kind == "gradients":
        return Observation({Key("SGD", kind, 0, "bias"): value})
    return Observation({Key("SGD", kind, step, "norm"): v for step, v in enumerate(value)})


def _random_errors(count: int, size: int = 4) -> list[Tensor]:
    """Return independent random errors with norm of about 0.01."""
    generator = torch.Generator().manual_seed(0)
    return [0.01 * torch.randn(size, generator=generator) / size**0.5 for _ in range(count)]


def _error_share(program: Tensor, runs: list[Tensor], kind: str = "gradients") -> float:
    observations = [_observation_of(error, kind) for error in runs]
    bounds = ErrorBounds(
        _observation_of(torch.zeros_like(runs[0]), kind),
        lambda k: observations[k],
        len(observations) - 1,
    )
    return max(row.error for row in bounds.rows(_observation_of(program, kind)))


@pytest.mark.parametrize("kind", ["gradients", "gradient norm"])
def test_a_lucky_original_is_no_measure(kind: str) -> None:
    """If one run of the original is accidentally exact, the other runs define the bound."""
    draws = _random_errors(10)
    assert _error_share(draws[1], [draws[0] * 1e-3], kind) > 1
    assert _error_share(draws[1], [draws[0] * 1e-3, *draws[2:]], kind) <= 1
    assert _error_share(draws[1].sign(), [draws[0] * 1e-3, *draws[2:]], kind) > 1


@pytest.mark.parametrize("size, factor", [(4, 15), (64, 5), (1024, 4)])
def test_a_mistake_is_above_all_luck(size: int, factor: float) -> None:
    """An error several times as large as all draws fails; with more elements, a smaller factor is
    enough."""
    draws = _random_errors(10, size)
    runs = [draws[0] / 2, *draws[1:9]]
    assert _error_share(draws[9], runs) <= 1
    assert _error_share(factor * draws[9], runs) > 1


def test_one_element_among_many() -> None:
    """One element with twenty times the usual error does not change the norm, but is found."""
    draws = _random_errors(10, 4096)
    with_outlier = draws[9].clone()
    with_outlier[7] = 20 * float(with_outlier.square().mean().sqrt())
    assert float(with_outlier.norm()) < 1.1 * float(draws[9].norm())
    assert _error_share(draws[9], draws[:9]) <= 1 < _error_share(with_outlier, draws[:9])


def test_as_few_runs_as_it_takes() -> None:
    """If the first run of the original explains the error, no other run is made."""
    draws, used_draws = _random_errors(10, 64), list[int]()

    def run(draw: int) -> Observation:
        used_draws.append(draw)
        return _observation_of(draws[draw] / (1 if draw else 2))

    bounds = ErrorBounds(_observation_of(torch.zeros(64)), run)
    assert Report(bounds.rows(_observation_of(draws[9]))).ok and used_draws == [0]
    assert not Report(bounds.rows(_observation_of(100 * draws[9]))).ok and used_draws == list(
        range(9)
    )


def test_what_is_exact_for_the_whole_may_be_rounded_once() -> None:
    """If all runs of the original are exact, one rounding of the tensor's size is allowed."""
    exact = Observation({Key("SGD", "gradients", 0, "bias"): torch.ones(4, dtype=torch.float64)})
    rounded = Observation({k: v.bfloat16() for k, v in exact.tensors.items() if v is not None})
    bounds = ErrorBounds(exact, lambda draw: rounded)
    for change, ok in ((2**-8, True), (2**-6, False)):
        program = Observation(
            {k: v * (1 + change) for k, v in exact.tensors.items() if v is not None}
        )
        assert Report(bounds.rows(program)).ok is ok


# ---- Statistics: how large an error may be by chance, from several errors of its kind.


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
    """Quantiles of the F distribution equal those of printed tables."""
    assert quantile(chance, n, m) == pytest.approx(wanted, rel=2e-4)


@pytest.mark.parametrize("chance", [1e-3, 1e-6, 1e-9])
def test_small_chances(chance: float) -> None:
    """F(2, m) has a closed form, P(F > f) = (1 + 2 f / m)^(-m/2), also far out in its tail."""
    for m in (3.0, 16.0, 250.0):
        assert quantile(chance, 2, m) == pytest.approx((chance ** (-2 / m) - 1) * m / 2, rel=1e-6)


Law = Callable[[], Tensor]


def _error_laws(n: int) -> dict[str, Law]:
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


@pytest.mark.parametrize("law", _error_laws(1))
def test_false_alarms_are_as_rare_as_said(law: str) -> None:
    """For any covariance of errors, a new error exceeds the bound as rarely as requested."""
    for n in (1, 4, 64):
        draw = _error_laws(n)[law]
        above = {0.05: 0.0, 0.005: 0.0}
        trials, samples = 100, 50
        for _ in range(trials):
            errors = [draw() for _ in range(9)]
            new_errors = [draw() for _ in range(samples)]
            for chance in above:
                limit = error_bound(errors, chance)
                assert limit is not None
                above[chance] += sum(limit.share(e) > 1 for e in new_errors) / trials / samples
        for chance, rate in above.items():
            assert rate <= 3 * chance + 0.003, (n, chance, rate)


def test_a_bound_is_no_licence() -> None:
    """With many independent elements the bound is below 1.5 times the typical error; for a single
    number, of which nine draws say little, up to thirty times."""
    for n, factor in ((1000, 1.5), (64, 2.0), (16, 3.0), (1, 30.0)):
        draws = [_error_laws(n)["each its own way"]] * 9
        limit = error_bound([draw() for draw in draws], 1e-9)
        assert limit is not None
        assert math.sqrt(n) < limit.norm < factor * math.sqrt(n), (n, limit)


def test_what_cannot_be_told() -> None:
    """Too few errors, only zeros, or non-finite errors give no bound."""
    error = torch.ones(3)
    assert error_bound([error] * (LEAST_ERRORS - 1), 1e-6) is None
    assert error_bound([0 * error] * 9, 1e-6) is None
    assert error_bound([*[error] * 8, error * math.inf], 1e-6) is None
    bound = error_bound([error] * 9, 1e-6)
    assert bound is not None and bound.norm == pytest.approx(math.sqrt(3), rel=0.01)


class _WithoutDraws(TorchFunctionMode):
    """A mode that fails on random operators of torch, as the mode for dropout sees them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.randint, torch.rand, torch.randn), func
        return func(*args, **(kwargs or {}))


def test_roundings_of_large_tensors_are_no_draws_of_the_model() -> None:
    """Perturbing large tensors draws random signs that modes do not see."""
    exact = torch.full((300, 300), 1.1).sin()
    with _WithoutDraws(), PerturbedRounding(0):
        perturbed = torch.full((300, 300), 1.1).sin()
    assert 0 < (perturbed - exact).abs().max() < 1e-6
