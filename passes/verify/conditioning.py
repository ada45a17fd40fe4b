"""Error bounds: how far roundings move each tensor of the original, and so may move a program's.

The original runs again in its working dtype. Each result of each operator, in forward, backward and
optimizer, is off by one rounding, up or down (TTrace's perturbation, at every operator). The errors
then show each tensor's conditioning, so no tolerance is chosen by hand.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.ir import pytree
from schedlang.passes.verify.compare import OUTPUTS, is_left_out, mask_common_nans, ratio
from schedlang.passes.verify.observe import HIDDEN_BUFFERS, Key, Observation
from schedlang.report import Row

# ---- Runs in which every result is off by a rounding.

# Operators without a rounding. Factories take no tensor; views are known by their schema.
_EXACT_NAMES = (
    "_reshape_alias _unsafe_view abs amax amin as_strided_scatter bernoulli cat clamp clamp_max "
    "clamp_min clone constant_pad_nd copy diag_embed diagonal_scatter embedding empty_like "
    "exponential fill flip full_like gather index index_copy index_select lift_fresh log_normal "
    "masked_fill masked_scatter masked_select max max_pool2d_with_indices maximum min minimum "
    "native_dropout neg new_full normal ones_like rand_like randn_like relu repeat roll round "
    "select_backward select_scatter set sign slice_backward slice_scatter sort stack take "
    "threshold_backward topk tril triu uniform unfold_backward where zero zeros_like"
)
_EXACT = frozenset(_EXACT_NAMES.split())
_POOL = 2**16  # signs, drawn once and read from a random offset


class PerturbedRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Perturb each rounded result by one more rounding, up or down, of one unit in its last place.

    In the mean square that equals twelve roundings to nearest. Subnormal numbers move by the
    distance between two of them: a second moment in float16 is one or two of these, or zero.
    Integers that the dtype represents stay, and so do stand-ins for infinity: roundings do not make
    them, and a mask of 0 and 1 times other numbers would be no mask. In eight bits only 0 stays.
    Numbers in float64 stay too, unless `wide`.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int, *, wide: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least = 0.0 if wide else 2**-50
        # not torch's generator: modes that replace a model's draws refuse others
        self._generator = np.random.default_rng(seed)
        self._signs = torch.from_numpy(1.0 - 2.0 * self._generator.integers(2, size=_POOL))
        self._steps: dict[tuple[torch.dtype, float], Tensor] = {}
        self._places = random.Random(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_rounding(func) and not _is_power_of_two(func, args) and (units := _units(args)):
            # a cast to a wider dtype does not round
            min_unit = min(units) if func._overloadpacket.__name__ == "_to_copy" else -1.0
            with torch._C.DisableTorchFunction():  # function modes apply to the model's calls only
                for value in (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out):
                    if isinstance(value, Tensor) and _unit(value.dtype) > min_unit:
                        self._move(value)
        return out

    def _move(self, value: Tensor) -> None:
        if value.dtype.is_complex:
            value = torch.view_as_real(value)
        unit = _unit(value.dtype)
        if not unit > self._least:
            return  # no float, or float64
        if value.is_meta or value.layout != torch.strided or not value.numel():
            return
        is_float8 = value.dtype.itemsize == 1
        v, kind = value.float() if is_float8 else value, torch.finfo(value.dtype)
        size = v.abs()
        perturbed = torch.addcmul(v, size.clamp(min=2 * kind.smallest_normal), self._step(v, unit))
        if is_float8:  # eight bits: most values are integers, and the largest are no infinity
            unchanged, perturbed = v == 0, perturbed.clamp_(-kind.max, kind.max)
        else:
            unchanged = (v.trunc() == v).logical_and_(size.clamp(1 / unit, kind.max / 4) != size)
        value.copy_(torch.where(unchanged, v, perturbed))

    def _step(self, value: Tensor, unit: float) -> Tensor:
        """Draw a relative perturbation for each element."""
        key, count = (value.dtype, unit), value.numel()
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = (self._signs * unit).to(value.dtype)
        if count > _POOL // 2:
            return steps[torch.from_numpy(self._generator.integers(_POOL, size=value.shape))]
        offset = self._places.randrange(_POOL - count + 1)
        if value.is_contiguous():
            return steps.as_strided(value.shape, value.stride(), offset)
        return steps[offset : offset + count].view(value.shape)


@cache
def _unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a dtype; 0 for non-floats."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


@cache
def _is_rounding(func: Any) -> bool:
    """Return whether an operator computes new values: no view, and no exact operation."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.inplace_view in func.tags:
        return False
    name = func._overloadpacket.__name__
    alias_infos = [alias_info.alias_info for alias_info in func._schema.returns]
    views = any(alias_info is not None and not alias_info.is_write for alias_info in alias_infos)
    return not views and name not in _EXACT and name.removesuffix("_") not in _EXACT


def _is_power_of_two(func: Any, args: Any) -> bool:
    """Return whether an operator multiplies or divides by a power of two, which is exact."""
    operand = args[1] if len(args) > 1 else None
    if not isinstance(operand, (int, float)) or abs(math.frexp(operand)[0]) != 0.5:
        return False
    return func._overloadpacket.__name__ in ("mul", "mul_", "div", "div_")


def _units(args: Iterable[Any]) -> list[float]:
    """Return the unit roundoffs of an operator's float arguments."""
    units = []
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.dtype.is_floating_point:
                units.append(_unit(arg.dtype))
        elif isinstance(arg, (list, tuple)):
            units += _units(arg)
    return units


# ---- The distribution of such errors: which size is implausible for one more error?
#
# Assume errors e ~ N(0, S) with unknown S. Their squared norm is a sum of chi squares, weighted
# by the eigenvalues of S. With the same mean and variance, it is tr(S)/n times a chi square of
# n = tr(S)^2 / tr(S^2) degrees of freedom (Satterthwaite, Biometrics Bulletin 2, 1946; Box, Annals
# of Mathematical Statistics 25, 1954). n is 1 if all elements move together, and the number of
# elements if they are independent. So for one more error x besides K others
#
#     |x|^2 / mean |e|^2  ~  F(n, K n),
#
# and it exceeds the (1 - p) quantile of that distribution with probability p.
#
# n is estimated from the same errors by the smaller of two estimates; too low an n is safe, because
# quantiles fall with n. For errors with a common mean m (all runs cast one weight), n is
# 2 (E |e|^2)^2 over var |e|^2 = 2 tr(S^2) + 4 m'Sm. This variance is estimated
#
#     from pairs of errors: the variance of e . f is half of it; many pairs give less noise;
#     from squared norms directly, which holds for longer tails too.
#
# The largest of n normal numbers is about sqrt(2 ln 2n) times their standard deviation, and exceeds
# sqrt(2 ln 2n/p) times it with probability p. One element may be that much further, or as much as
# the norm if that is more.

CHANCE = 1e-6  # of a false alarm, in all rows of a report together
LEAST_ERRORS = 4  # errors needed to estimate n
MOST_FREEDOM = 1e6  # degrees of freedom if all errors are equal


@dataclass(frozen=True)
class ErrorBound:
    """The largest plausible error: its norm, and its largest element."""

    norm: float
    element: float

    def share(self, error: Tensor) -> float:
        """Return the ratio of an error to the bound; above 1 it is not plausible."""
        if not bool(error.isfinite().all()):
            return math.inf
        return max(ratio(float(error.norm()), self.norm), ratio(_largest(error), self.element))


@dataclass(frozen=True)
class ErrorSize:
    """The size of an error: its norm, and its largest element."""

    norm: float
    element: float

    @classmethod
    def of(cls, error: Tensor, factor: float = 1.0) -> ErrorSize:
        """Return the size of an error times a factor."""
        return cls(factor * float(error.norm()), factor * _largest(error))


def error_bound(errors: Sequence[Tensor], chance: float) -> ErrorBound | None:
    """Return the size that one more error exceeds with this chance; None: too few errors."""
    freedom = estimate_freedom(errors)
    if freedom is None:
        return None
    return bound_with_freedom([ErrorSize.of(e) for e in errors], chance, freedom)


def estimate_freedom(errors: Sequence[Tensor]) -> float | None:
    """Estimate degrees of freedom, at least 1; None: too few errors, all zero, or not finite."""
    norms = [float(e @ e) for e in errors]
    mean = math.fsum(norms) / max(1, len(norms))
    if len(errors) < LEAST_ERRORS or not mean or not math.isfinite(mean):
        return None
    unit = [e / math.sqrt(mean) for e in errors]
    dots = [[float(e @ f) for f in unit] for e in unit]
    return degrees_of_freedom([norm / mean for norm in norms], dots)


def bound_with_freedom(
    sizes: Sequence[ErrorSize], chance: float, n: float, draws: int = 0
) -> ErrorBound:
    """Return the bound of errors with `n` degrees of freedom, as if there were `draws` errors."""
    times = math.sqrt(quantile(chance / 2, n, n * (draws or len(sizes))))
    further = math.sqrt(1 + math.log(2 / chance) / math.log(2 * n))
    norm = _mean_square([size.norm for size in sizes])
    max_element = _mean_square([size.element for size in sizes])
    return ErrorBound(times * norm, max(times, further) * max_element)


def _mean_square(sizes: Sequence[float]) -> float:
    return math.sqrt(math.fsum(size * size for size in sizes) / len(sizes))


def _largest(error: Tensor) -> float:
    return float(error.abs().max()) if error.numel() else 0.0


def degrees_of_freedom(norms: Sequence[float], dots: Sequence[Sequence[float]]) -> float:
    """Estimate degrees of freedom from norms and inner products; mean squared norm is 1."""
    pairs = {(i, j): dots[i][j] for i, j in combinations(range(len(norms)), 2)}
    squares = math.fsum(p * p for p in pairs.values()) / len(pairs)
    disjoint_products = [
        p * q for (i, p), (j, q) in combinations(pairs.items(), 2) if not {*i} & {*j}
    ]  # their mean is the squared mean of e . f
    by_pairs = squares - max(0.0, math.fsum(disjoint_products) / len(disjoint_products))
    by_norms = math.fsum((norm - 1) ** 2 for norm in norms) / (len(norms) - 1) / 2
    return min(MOST_FREEDOM, max(1.0, 1 / max(by_pairs, by_norms, 1 / MOST_FREEDOM)))


@cache
def quantile(chance: float, n: float, m: float) -> float:
    """Return the number that F(n, m) exceeds with this chance."""
    lower, upper = 0.0, 1.0
    while survival_probability(upper, n, m) > chance:
        lower, upper = upper, 2 * upper
    for _ in range(60):
        middle = (lower + upper) / 2
        lower, upper = (
            (middle, upper) if survival_probability(middle, n, m) > chance else (lower, middle)
        )
    return upper


def survival_probability(value: float, n: float, m: float) -> float:
    """Return the probability that F(n, m) exceeds a number: an incomplete beta function."""
    return _beta(m / 2, n / 2, m / (m + n * value)) if value > 0 else 1.0


def _beta(a: float, b: float, x: float) -> float:
    """Compute the regularised incomplete beta function by its continued fraction (DLMF 8.17.22)."""
    if x > (a + 1) / (a + b + 2):  # the complement converges faster
        return 1.0 - _beta(b, a, 1.0 - x) if x < 1 else 1.0
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) - math.log(a)
    front += a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1))
    fraction = d
    for k in range(1, 10_000):
        even = k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k))
        odd = -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1))
        for term in (even, odd):
            d = 1.0 / (1.0 + term * d)
            c = 1.0 + term / c
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-13:
            break
    return math.exp(front) * fraction


# ---- Bounds of each tensor, and rows that compare a program with them.

KINDS = (
    *("outputs", "training outputs", "gradients", "input gradients", "parameters"),
    *("loss", "gradient norm"),
)
_NUMBERS = frozenset(KINDS[-2:])
_BUFFERS = ("other state", HIDDEN_BUFFERS)
DRAWS = 8  # perturbed runs of the original
PLAIN_FACTOR = 2.0  # perturbed runs are at least so much further off than the unperturbed run
MANY_FREEDOM = 256  # more degrees of freedom hardly change quantiles
IN_DTYPE = " in working dtype"
WIDEST_GATE = 1e-4  # the largest float64 error that roundings may explain
MAGNIFIED = "steps of the original magnify roundings: its gate is how far"
CANCELS = "its terms cancel: the error is relative to gradients times parameters"
OVERFLOWS = "the original itself is not finite"
RunOriginal = Callable[[int], Observation]


class RunErrors(NamedTuple):
    """The errors of one run for a tensor; `lost`: the tensor is there, and not finite."""

    sizes: tuple[ErrorSize, ...]
    lost: bool


@dataclass(frozen=True)
class KnownErrors:
    """The known errors of the runs: many programs may be compared with them, as a judge does.

    runs     draw and tensor -> the errors
    freedom  tensor, and whether under casts -> degrees of freedom of the errors of all draws
    least    tensor -> the size of one rounding
    """

    runs: dict[tuple[int, Key], RunErrors] = field(default_factory=dict)
    freedom: dict[tuple[Key, bool], float | None] = field(default_factory=dict)
    least: dict[Key, ErrorSize] = field(default_factory=dict)


@dataclass
class ErrorBounds:
    """Bounds of each tensor's distance from float64, estimated from runs of the original.

    exact  the original in float64, from the same initial weights
    run    its k-th run in the working dtype: unperturbed for 0, `PerturbedRounding` by k for others
    state  also bound buffers and the optimizer's state
    """

    exact: Observation
    run: RunOriginal
    draws: int = DRAWS
    state: bool = False
    _plain: Observation | None = None
    _known: KnownErrors = field(init=False, default_factory=KnownErrors)

    def rows(
        self, program: Observation, *, rtol: Mapping[str, float] | None = None, casts: bool = False
    ) -> tuple[Row, ...]:
        """Compare a program's errors with their bounds; the gate is 1 in units of the bound.

        For kinds in `rtol` the schedule gives a bound of the relative error. Under `casts` a step
        with overflowing gradients is skipped: if the original skips a step, the program must skip
        it too, whatever tensor overflows; of such a step only tensors that are finite on both sides
        are compared. The original runs until each error is known to be within its bound, so only a
        few times if the program is right.
        """
        rtol, rows_by_key, errors_left = rtol or {}, dict[Key, Row](), dict[Key, Tensor]()
        keys = list(self._keys(program))
        chance = CHANCE / max(1, len(keys))
        skipped = _overflowing(self._unperturbed) if casts else frozenset()
        for key in keys:
            own_rtol = rtol.get(key.kind)
            row = Row(
                key.condition, key.kind + IN_DTYPE, key.name, math.inf, own_rtol or 1.0, False
            )
            row = replace(row, step=key.step, note="" if own_rtol is None else _SCHEDULE_NOTE)
            error = _error(self.exact, program, key)
            r, s = self.exact.tensors[key], self._unperturbed.tensors.get(key)
            assert r is not None
            if error is None or s is None:
                row = replace(row, note="missing")
            elif own_rtol is not None:
                row = replace(row, error=ratio(float(error.norm()), float(r.double().norm())))
            elif _of_a_skipped_step(key, s, error) and (key.condition, key.step) in skipped:
                same_overflow = (key.condition, key.step) in _overflowing(program)
                row = replace(row, error=0.0 if same_overflow else math.inf)
            elif _is_lost(key, r, s):  # no reference value
                row = replace(row, error=math.nan, note=OVERFLOWS)
            elif bool((r.isfinite() & ~s.isfinite()).any()):
                same_overflow = casts and not bool(error.isfinite().all())
                row = replace(row, error=0.0 if same_overflow else math.inf)
                row = row if casts else replace(row, error=math.nan, note=OVERFLOWS)
            else:
                errors_left[key] = error
            rows_by_key[key] = replace(row, ok=row.error <= row.gate)
        for key, share in self._ratios(errors_left, chance, casts).items():
            note = OVERFLOWS if math.isnan(share) else ""
            rows_by_key[key] = replace(rows_by_key[key], error=share, ok=share <= 1.0, note=note)
        return tuple(rows_by_key.values())

    def widen_gates(self, rows: Sequence[Row], program: Observation) -> list[Row]:
        """Widen the gates of float64 rows that fail by no more than roundings explain.

        All runs are `PerturbedRounding`. If they move a tensor further than its gate, as steps of
        an ill-conditioned model do, the gate becomes their bound. If some row fails by more than
        `WIDEST_GATE`, or without a size, no rounding explains it: then nothing is run, and all
        rows are returned as they are. Errors of losses are relative to the size of their terms.
        """
        of_rows = {Key(r.condition, r.kind, r.step or 0, r.name): r for r in rows if not r.ok}
        failed = {key: self._relative_to_terms(key, row, program) for key, row in of_rows.items()}
        errors = dict[Key, Tensor]()
        for key, row in failed.items():
            error = (
                _error(self.exact, program, key) if row.gate and row.error <= WIDEST_GATE else None
            )
            if error is None:
                return list(rows)
            errors[key] = error
        widened = dict[Row, Row]()
        for key, share in self._ratios(errors, CHANCE / max(1, len(rows))).items():
            row = failed[key]
            if share <= 1.0:
                note = MAGNIFIED if row is of_rows[key] else CANCELS
                gate = max(row.gate, row.error / share)
                widened[of_rows[key]] = replace(row, ok=True, gate=gate, note=note)
        return [widened.get(row, row) for row in rows]

    def _relative_to_terms(self, key: Key, row: Row, program: Observation) -> Row:
        """Return the row of a loss, or of a number of the output, whose terms cancel; else the row.

        Rounding each parameter moves a loss by up to a unit of |gradient| |parameters|, which is a
        size of its terms. Advantages relative to a group leave a rounding of it as the value.
        """
        r, x = self.exact.tensors.get(key), program.tensors.get(key)
        if key.kind not in (*OUTPUTS, "loss") or r is None or x is None or r.dim() or x.dim():
            return row
        norms = {"gradients": 0.0, "parameters": 0.0}
        for other, value in self.exact.tensors.items():
            if other.condition == key.condition and other.kind in norms and value is not None:
                norms[other.kind] = max(norms[other.kind], float(value.double().norm()))
        size, error = math.prod(norms.values()), float((x.double() - r.double()).abs())
        cancels = float(r.double().abs()) < WIDEST_GATE * size and error <= WIDEST_GATE * size
        return replace(row, error=error / size) if cancels else row

    def overflows_elsewhere(self, program: Observation) -> bool:
        """Return whether gradients overflow in other steps of the program than of the original."""
        return _overflowing(program) != _overflowing(self._unperturbed)

    @property
    def _unperturbed(self) -> Observation:
        if self._plain is None:
            self._plain = self.run(0)
        return self._plain

    def _keys(self, program: Observation) -> Iterator[Key]:
        """Yield the floats to compare; of parameters only those of the last step."""
        last = {key[:2]: key.step for key in self.exact.tensors}
        for key, r in self.exact.tensors.items():
            if not self._is_bounded(key) or key.kind in program.missing or r is None:
                continue
            if is_left_out(key, program.left_out) or not r.is_floating_point():
                continue
            if key.kind not in (*_NUMBERS, *_BUFFERS) and r.dim() == 0:
                continue
            if key.kind != "parameters" or key.step == last[key[:2]]:
                yield key

    def _is_bounded(self, key: Key) -> bool:
        state = key.kind in _BUFFERS or key.kind.startswith("optimizer ")
        return key.kind in KINDS or (self.state and state)

    def limited_to(self, keys: Iterable[Key]) -> ErrorBounds:
        """Return the bounds of some tensors; what is known of the runs is shared.

        Of a number, the keys of all steps must be among them.
        """
        tensors = {key: self.exact.tensors[key] for key in keys}
        limited = replace(self, exact=replace(self.exact, tensors=tensors))
        limited._known = self._known
        return limited

    def _ratios(
        self, errors_left: Mapping[Key, Tensor], chance: float, casts: bool = False
    ) -> dict[Key, float]:
        """Return the ratios of errors to their bounds, from as many runs as that needs.

        A bound decreases with the degrees of freedom, which are at most the number of elements. An
        error within the bound for that number, from the runs so far, needs no more runs. NaN means
        that an error exceeds its bound, and roundings alone make some run of the original not
        finite.
        """
        shares, lost, known = dict[Key, float](), set[Key](), self._known
        # the sizes of errors of the unperturbed run, and of the others
        unmoved, moved = ({key: list[ErrorSize]() for key in errors_left} for _ in range(2))
        perturbed = {key: list[Tensor]() for key in errors_left}
        for draw in range(self.draws + 1):
            observed = self.run(draw) if draw else self._unperturbed
            if casts and draw and self.overflows_elsewhere(observed):
                continue  # a step that only this run skips shows no rounding
            for key in errors_left:
                if (key, casts) not in known.freedom:
                    known.runs[draw, key], finite = self._run_errors(draw, observed, key)
                    if draw:
                        perturbed[key] += finite
                run_errors = known.runs[draw, key]
                (moved if draw else unmoved)[key].extend(run_errors.sizes)
                if run_errors.lost:
                    lost.add(key)
            for key, x in errors_left.items():
                sizes, draws = unmoved[key] + moved[key], DRAWS * len(self._same_law(key))
                freedom = min(max(1, x.numel()), MANY_FREEDOM)
                law_bound = (
                    bound_with_freedom(sizes, chance, freedom, draws)
                    if sizes
                    else ErrorBound(0.0, 0.0)
                )
                shares[key] = self._with_least_rounding(key, law_bound).share(x)
            errors_left = {key: x for key, x in errors_left.items() if not shares[key] <= 1.0}
            if not errors_left:
                break
        for key, x in errors_left.items():
            if (key, casts) not in known.freedom:
                known.freedom[key, casts] = estimate_freedom(perturbed[key])
            if n := known.freedom[key, casts]:
                final = bound_with_freedom(moved[key], chance, n)
                shares[key] = self._with_least_rounding(key, final).share(x)
            if key in lost and not shares[key] <= 1.0:
                shares[key] = math.nan
        return shares

    def _run_errors(
        self, draw: int, observed: Observation, key: Key
    ) -> tuple[RunErrors, list[Tensor]]:
        """Return the errors of a run for a tensor: their sizes, and those that are finite."""
        errors = {k: _error(self.exact, observed, k) for k in self._same_law(key)}
        finite = {k: e for k, e in errors.items() if e is not None and bool(e.isfinite().all())}
        factor = 1.0 if draw else PLAIN_FACTOR
        sizes = tuple(ErrorSize.of(e, factor) for e in finite.values())
        return RunErrors(sizes, errors[key] is not None and key not in finite), [*finite.values()]

    def _same_law(self, key: Key) -> list[Key]:
        """Return the key; for a number the keys of all steps: one draw says little of its law."""
        if key.kind not in _NUMBERS:
            return [key]
        return [k for k in self.exact.tensors if k._replace(step=0) == key._replace(step=0)]

    def _with_least_rounding(self, key: Key, bound: ErrorBound) -> ErrorBound:
        """Return the bound, at least one rounding: a result may be exact by luck."""
        least = self._known.least.get(key)
        if least is None:
            r, s = self.exact.tensors[key], self._unperturbed.tensors[key]
            assert r is not None and s is not None
            r = torch.ones(1) if key.kind in _NUMBERS else torch.where(r.isfinite(), r, 0).double()
            least = self._known.least[key] = ErrorSize.of(r, _unit(s.dtype))
        return ErrorBound(max(bound.norm, least.norm), max(bound.element, least.element))


def _is_lost(key: Key, exact: Tensor, original: Tensor) -> bool:
    """Return whether the original is not finite in float64, except NaN in all dtypes."""
    if key.kind in OUTPUTS:
        return bool(mask_common_nans(key, exact, original)[0].isnan().any())
    return not bool(exact.isfinite().all())


_SKIPPED = ("gradients", "gradient norm")


def _of_a_skipped_step(key: Key, original: Tensor, error: Tensor) -> bool:
    """Return whether a gradient or the gradient norm is not finite on some side."""
    finite = bool(original.isfinite().all()) and bool(error.isfinite().all())
    return key.kind in _SKIPPED and not finite


def _overflowing(observed: Observation) -> frozenset[tuple[str, int]]:
    """Return conditions and steps in which some gradient is not finite."""
    grads = ((k, v) for k, v in observed.tensors.items() if k.kind == "gradients" and v is not None)
    return frozenset((k.condition, k.step) for k, v in grads if not bool(v.isfinite().all()))


_SCHEDULE_NOTE = "the bound of the schedule"


def _value(observed: Observation, key: Key) -> Tensor | None:
    """Return a tensor; of parameters the change since step 0, as their size would hide errors."""
    value = observed.tensors.get(key)
    if key.kind != "parameters" or value is None:
        return value
    initial = observed.tensors.get(key._replace(step=0)) if key.step else None
    return value if initial is None else value - initial


def _error(exact: Observation, observed: Observation, key: Key) -> Tensor | None:
    """Return the error of a tensor, relative for a number; None if it is missing."""
    r, v = (_value(side, key) for side in (exact, observed))
    if r is None or v is None or v.shape != r.shape:
        return None
    r, v = mask_common_nans(key, r.double(), v.double())
    equal_inf = (v == r) & r.isinf()  # masked scores
    error = torch.where(equal_inf, 0, v - r).flatten()
    return error / (float(r.abs()) or 1.0) if key.kind in _NUMBERS else error
