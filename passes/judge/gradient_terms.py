"""Explain a wrong gradient by its terms: the gradient that each use of a tensor contributes.

A tape records the functions of a step. Where a tensor's gradient is wrong, each function that uses
the tensor is differentiated again by itself. Its term of the right gradient, and the gradient of
its output, are tried as components of the wrong gradient. An explanation must give every element on
every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from schedlang.ir import pytree
from schedlang.passes.judge.gradient_errors import SPARE_EQUATIONS
from schedlang.passes.localize.diagnosis import is_close
from schedlang.runtime import scope
from schedlang.runtime.modes import ATTRIBUTE_ACCESS
from schedlang.runtime.tracing.meta_runs import tensors_in

MOST_TERMS, MOST_STEPS = 6, 8
NEAR = 1e-6


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """A function call: inputs (with their version counters), outputs, and the enclosing module."""

    function: Any
    args: Any
    kwargs: Any
    inputs: tuple[tuple[Tensor, int], ...]
    outputs: tuple[Tensor, ...]
    module: str

    @property
    def name(self) -> str:
        """The function and its module, in words."""
        name = getattr(self.function, "__name__", "a function").strip("_")
        return f"`{name}` in `{self.module}`" if self.module else f"`{name}` outside of all modules"


@dataclass(frozen=True, eq=False)
class GradientTerm:
    """A call's contribution to a tensor's gradient, and its output's gradient, if shaped alike."""

    call: FunctionCall
    gradient: Tensor
    output_gradient: Tensor | None


class GradientTape(TorchFunctionMode):
    """Mode that records a step's differentiable functions, and the gradients of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[FunctionCall] = []
        self.gradients: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function and record it."""
        kwargs = kwargs or {}
        if type(func) is ATTRIBUTE_ACCESS or func is torch.Tensor.backward:
            return func(*args, **kwargs)
        versions = tuple((t, t._version) for t in tensors_in((args, kwargs)))
        inputs = [t for t, _ in versions if t.requires_grad and t.is_floating_point()]
        for tensor in inputs:
            self.watch(tensor)  # before an in-place write
        result = func(*args, **kwargs)
        outputs = tuple(t for t in tensors_in(result) if t.requires_grad and t.is_floating_point())
        if inputs and outputs:
            self.calls.append(
                FunctionCall(func, args, kwargs, versions, outputs, scope.current_site())
            )
            for tensor in outputs:
                self.watch(tensor)
        return result

    def watch(self, tensor: Tensor) -> None:
        """Record a tensor's gradient when backward computes it."""
        if id(tensor) not in self.gradients:
            self.gradients[id(tensor)] = torch.empty(0)
            tensor.register_hook(self._gradient_hook(id(tensor)))  # type: ignore[no-untyped-call]

    def _gradient_hook(self, key: int) -> Any:
        def note(gradient: Tensor) -> None:
            previous, copied = self.gradients[key], gradient.detach().clone()
            self.gradients[key] = previous + copied if previous.numel() else copied

        return note

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's gradient; None if it has none."""
        recorded = self.gradients.get(id(tensor))
        return recorded if recorded is not None and recorded.shape == tensor.shape else None

    def terms(self, tensor: Tensor) -> list[GradientTerm]:
        """Return a tensor's terms by call; nothing if they do not add up to its gradient."""
        total = self.gradient(tensor)
        if total is None:
            return []
        terms = [
            term
            for call in self.calls
            if any(t is tensor for t, _ in call.inputs)
            if (term := self._find_term(call, tensor)) is not None
        ]
        complete = terms and is_close(torch.stack([term.gradient for term in terms]).sum(0), total)
        return terms if complete and len(terms) <= MOST_TERMS else []

    def _find_term(self, call: FunctionCall, tensor: Tensor) -> GradientTerm | None:
        grads = [self.gradient(one) for one in call.outputs]
        if all(one is None for one in grads) or any(t._version != v for t, v in call.inputs):
            return None
        pulled = pull_back(call, tensor, grads)
        alike = len(grads) == 1 and grads[0] is not None and grads[0].shape == tensor.shape
        return None if pulled is None else GradientTerm(call, pulled, grads[0] if alike else None)


def pull_back(call: FunctionCall, tensor: Tensor, seeds: Sequence[Tensor | None]) -> Tensor | None:
    """Differentiate a call by itself: return a tensor's gradient for given output gradients."""
    leaf = tensor.detach().clone().requires_grad_()

    def anew(value: Any) -> Any:
        if value is tensor:
            return leaf
        return value.detach() if isinstance(value, Tensor) else value

    args, kwargs = pytree.tree_map(anew, (call.args, call.kwargs))
    with torch.enable_grad():
        results = [t for t in tensors_in(call.function(*args, **kwargs)) if t.requires_grad]
    if len(results) != len(seeds):
        return None
    pairs = [(result, grad) for result, grad in zip(results, seeds) if grad is not None]
    outputs, grads = [result for result, _ in pairs], [grad for _, grad in pairs]
    (gradient,) = torch.autograd.grad(outputs, [leaf], grads, allow_unused=True)
    return gradient


# ---- Components of a wrong gradient.


@dataclass(frozen=True)
class RankGradient:
    """A rank's gradient of a tensor, and the flat indices of its elements in the full tensor."""

    rank: int
    value: Tensor
    places: Tensor


@dataclass
class CallChain:
    """Functions between a tensor and one that is computed from it alone, the last one first."""

    calls: list[tuple[FunctionCall, Tensor]] = field(default_factory=list)

    def pull_back(self, gradient: Tensor) -> Tensor | None:
        """Propagate a gradient of the last tensor back to the first one."""
        for call, tensor in self.calls:
            pulled = pull_back(call, tensor, [gradient])
            if pulled is None:
                return None
            gradient = pulled
        return gradient


def explain_by_terms(tape: GradientTape, tensor: Tensor, grads: Sequence[RankGradient]) -> str:
    """Explain the ranks' wrong gradients of a tensor by its terms; "" if no explanation fits.

    If only one function uses the tensor, the terms of its output are tried next, and so on.
    """
    path = CallChain()
    for _ in range(MOST_STEPS):
        terms = tape.terms(tensor)
        pulled_terms = [
            (term, grad) for term in terms if (grad := path.pull_back(term.gradient)) is not None
        ]
        if len(pulled_terms) < len(terms) or not terms:
            return ""
        if (
            text := _explain_missing_derivative(pulled_terms, path, grads)
            or _explain_factors(pulled_terms, grads)
            or _explain_missing_sum(pulled_terms, grads)
        ):
            return text
        call = terms[0].call
        if len(terms) > 1 or len(call.outputs) > 1:
            return ""
        path.calls.insert(0, (call, tensor))
        tensor = call.outputs[0]
    return ""


PulledTerms = Sequence[tuple[GradientTerm, Tensor]]


def _solve(value: Tensor, columns: Sequence[Tensor]) -> list[float] | None:
    """Return the unique factors of columns that give a value; None if there are none."""
    matrix = torch.stack([column.reshape(-1) for column in columns], 1)
    flat = value.reshape(-1, 1)
    if len(matrix) < len(columns) + SPARE_EQUATIONS:
        return None
    scale = matrix.norm(dim=0)
    if not bool((scale > 0).all()) or not bool(flat.isfinite().all()):
        return None
    fit = torch.linalg.lstsq(matrix / scale, flat, driver="gelsd")
    if int(fit.rank) < len(columns) or not is_close((matrix / scale) @ fit.solution, flat):
        return None
    factors: list[float] = (fit.solution[:, 0] / scale).tolist()
    return factors


def _is_near(number: float, target: float) -> bool:
    return abs(number - target) <= NEAR * max(1.0, abs(target))


def _explain_missing_derivative(
    terms: PulledTerms, path: CallChain, grads: Sequence[RankGradient]
) -> str:
    """Report a function that returns its output's gradient unchanged, without a derivative."""
    for index, (term, pulled) in enumerate(terms):
        passed = None if term.output_gradient is None else path.pull_back(term.output_gradient)
        if passed is None or is_close(passed, pulled):
            continue
        columns = [passed if k == index else other for k, (_, other) in enumerate(terms)]
        total = torch.stack(columns).sum(0).reshape(-1)
        if len(total) > SPARE_EQUATIONS and all(
            is_close(grad.value, total[grad.places]) for grad in grads
        ):
            return f"{term.call.name} sends back what it is sent: its derivative is left out"
    return ""


def _explain_factors(terms: PulledTerms, grads: Sequence[RankGradient]) -> str:
    """Report terms with a wrong factor, unless all have the same factor.

    Gradients that are averaged later have the number of ranks as a factor.
    """
    if len(terms) < 2:
        return ""
    texts: dict[str, None] = {}
    for grad in grads:
        factors = _solve(grad.value, [pulled.reshape(-1)[grad.places] for _, pulled in terms])
        if factors is None or all(_is_near(f, factors[0]) for f in factors):
            return ""
        averaged = float(len({grad.rank for grad in grads}))  # losses are scaled by it before
        common = max(1.0, averaged, key=lambda scale: sum(_is_near(f, scale) for f in factors))
        relative = [factor / common for factor in factors]
        texts["; ".join(_describe_factors(terms, relative))] = None
    return next(iter(texts)) if len(texts) == 1 else ""


def _describe_factors(terms: PulledTerms, factors: Sequence[float]) -> Iterator[str]:
    for (term, _), factor in zip(terms, factors):
        if abs(factor) <= NEAR:
            yield f"what {term.call.name} sends back is missing"
        elif not _is_near(factor, 1.0):
            yield f"what {term.call.name} sends back counts {factor:.4g} times"


def _explain_missing_sum(terms: PulledTerms, grads: Sequence[RankGradient]) -> str:
    """Report terms that need a sum over ranks, where other terms are complete on each rank."""
    if len(grads) < 2 or len(terms) < 2 or len({grad.rank for grad in grads}) < len(grads):
        return ""
    if any(not torch.equal(grad.places, grads[0].places) for grad in grads):
        return ""
    columns = [pulled.reshape(-1)[grads[0].places] for _, pulled in terms]
    factors = _solve(torch.stack([grad.value for grad in grads]).sum(0), columns)
    if factors is None or not all(_is_near(f, 1.0) or _is_near(f, len(grads)) for f in factors):
        return ""
    names = [term.call.name for (term, _), f in zip(terms, factors) if _is_near(f, 1.0)]
    if not names or len(names) == len(terms):
        return ""
    call_names = " and ".join(names)
    return (
        f"what {call_names} sends back is a term of a sum on each rank, and is not summed; "
        "all else is whole on every rank"
    )
