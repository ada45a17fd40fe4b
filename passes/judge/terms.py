"""Terms of a gradient: what each function that a tensor goes into sends back to it.

A tape notes the functions of a step. Where a tensor's gradient is wrong, each function is derived
again by itself: its term of the right gradient, and the gradient that it was sent, are tried as
what the wrong one is made of. A sentence is said only where it gives every number of every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from schedlang.ir import pytree
from schedlang.passes.judge.kinds import SPARE
from schedlang.passes.localize.diagnose import fits
from schedlang.runtime import scope
from schedlang.runtime.modes import ATTRIBUTE
from schedlang.runtime.tracing.meta import tensors_in

MOST_TERMS, MOST_STEPS = 6, 8
NEAR = 1e-6


@dataclass(frozen=True, eq=False)
class Call:
    """A function that ran: what it took (with counts of writes) and gave, and in which module."""

    function: Any
    args: Any
    kwargs: Any
    given: tuple[tuple[Tensor, int], ...]
    outputs: tuple[Tensor, ...]
    module: str

    @property
    def name(self) -> str:
        """The function and its place, in words."""
        name = getattr(self.function, "__name__", "a function").strip("_")
        return f"`{name}` in `{self.module}`" if self.module else f"`{name}` outside of all modules"


@dataclass(frozen=True, eq=False)
class Term:
    """A gradient that a call sends back to a tensor, and the one it was sent, if shaped alike."""

    call: Call
    back: Tensor
    sent: Tensor | None


class Tape(TorchFunctionMode):
    """The functions of a step that gradients go through, and the gradients of what they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.gradients: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it and note it."""
        kwargs = kwargs or {}
        if type(func) is ATTRIBUTE or func is torch.Tensor.backward:
            return func(*args, **kwargs)
        versions = tuple((t, t._version) for t in tensors_in((args, kwargs)))
        given = [t for t, _ in versions if t.requires_grad and t.is_floating_point()]
        for tensor in given:
            self.watch(tensor)  # before it may be written into
        made = func(*args, **kwargs)
        outputs = tuple(t for t in tensors_in(made) if t.requires_grad and t.is_floating_point())
        if given and outputs:
            self.calls.append(Call(func, args, kwargs, versions, outputs, scope.site()))
            for tensor in outputs:
                self.watch(tensor)
        return made

    def watch(self, tensor: Tensor) -> None:
        """Note the gradient of a tensor when it comes."""
        if id(tensor) not in self.gradients:
            self.gradients[id(tensor)] = torch.empty(0)
            tensor.register_hook(self._noting(id(tensor)))  # type: ignore[no-untyped-call]

    def _noting(self, key: int) -> Any:
        def note(gradient: Tensor) -> None:
            before, new = self.gradients[key], gradient.detach().clone()
            self.gradients[key] = before + new if before.numel() else new

        return note

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """The gradient that came back to a tensor; None if none did."""
        found = self.gradients.get(id(tensor))
        return found if found is not None and found.shape == tensor.shape else None

    def terms(self, tensor: Tensor) -> list[Term]:
        """Return its terms by call; none where they do not add up to its gradient."""
        total = self.gradient(tensor)
        if total is None:
            return []
        found = [
            term
            for call in self.calls
            if any(t is tensor for t, _ in call.given)
            if (term := self._term(call, tensor)) is not None
        ]
        whole = found and fits(torch.stack([term.back for term in found]).sum(0), total)
        return found if whole and len(found) <= MOST_TERMS else []

    def _term(self, call: Call, tensor: Tensor) -> Term | None:
        sent = [self.gradient(one) for one in call.outputs]
        if all(one is None for one in sent) or any(t._version != v for t, v in call.given):
            return None
        back = pulled(call, tensor, sent)
        alike = len(sent) == 1 and sent[0] is not None and sent[0].shape == tensor.shape
        return None if back is None else Term(call, back, sent[0] if alike else None)


def pulled(call: Call, tensor: Tensor, sent: Sequence[Tensor | None]) -> Tensor | None:
    """Derive a call once more by itself: what it sends back to a tensor for what it is sent."""
    leaf = tensor.detach().clone().requires_grad_()

    def anew(value: Any) -> Any:
        if value is tensor:
            return leaf
        return value.detach() if isinstance(value, Tensor) else value

    args, kwargs = pytree.tree_map(anew, (call.args, call.kwargs))
    with torch.enable_grad():
        made = [t for t in tensors_in(call.function(*args, **kwargs)) if t.requires_grad]
    if len(made) != len(sent):
        return None
    pairs = [(one, grad) for one, grad in zip(made, sent) if grad is not None]
    outputs, grads = [one for one, _ in pairs], [grad for _, grad in pairs]
    (found,) = torch.autograd.grad(outputs, [leaf], grads, allow_unused=True)
    return found


# ---- What a wrong gradient is made of.


@dataclass(frozen=True)
class Got:
    """A rank's gradient of a tensor, and which numbers of the whole one it is about."""

    rank: int
    value: Tensor
    places: Tensor


@dataclass
class Path:
    """The functions between a tensor and one that is made of it alone, the last one first."""

    calls: list[tuple[Call, Tensor]] = field(default_factory=list)

    def back(self, gradient: Tensor) -> Tensor | None:
        """Bring a gradient of the last tensor back to the first one."""
        for call, tensor in self.calls:
            found = pulled(call, tensor, [gradient])
            if found is None:
                return None
            gradient = found
        return gradient


def made_of(tape: Tape, tensor: Tensor, got: Sequence[Got]) -> str:
    """Say of which terms the ranks' wrong gradients of a tensor are made; "" if of none of them.

    Where one function alone takes the tensor, what it gives is looked at, too, and so on.
    """
    path = Path()
    for _ in range(MOST_STEPS):
        terms = tape.terms(tensor)
        brought = [(term, back) for term in terms if (back := path.back(term.back)) is not None]
        if len(brought) < len(terms) or not terms:
            return ""
        if (
            said := _left_out(brought, path, got)
            or _counted(brought, got)
            or _unsummed(brought, got)
        ):
            return said
        call = terms[0].call
        if len(terms) > 1 or len(call.outputs) > 1:
            return ""
        path.calls.insert(0, (call, tensor))
        tensor = call.outputs[0]
    return ""


Brought = Sequence[tuple[Term, Tensor]]


def _solved(value: Tensor, columns: Sequence[Tensor]) -> list[float] | None:
    """The factors of columns that give a value, where they are the only ones, and do."""
    matrix = torch.stack([column.reshape(-1) for column in columns], 1)
    flat = value.reshape(-1, 1)
    if len(matrix) < len(columns) + SPARE:
        return None
    scale = matrix.norm(dim=0)
    if not bool((scale > 0).all()) or not bool(flat.isfinite().all()):
        return None
    found = torch.linalg.lstsq(matrix / scale, flat, driver="gelsd")
    if int(found.rank) < len(columns) or not fits((matrix / scale) @ found.solution, flat):
        return None
    factors: list[float] = (found.solution[:, 0] / scale).tolist()
    return factors


def _is(number: float, wanted: float) -> bool:
    return abs(number - wanted) <= NEAR * max(1.0, abs(wanted))


def _left_out(terms: Brought, path: Path, got: Sequence[Got]) -> str:
    """Whether a function sends on what it is sent, as if it were none: no derivative of it."""
    for place, (term, back) in enumerate(terms):
        sent = None if term.sent is None else path.back(term.sent)
        if sent is None or fits(sent, back):
            continue
        columns = [sent if k == place else other for k, (_, other) in enumerate(terms)]
        total = torch.stack(columns).sum(0).reshape(-1)
        if len(total) > SPARE and all(fits(one.value, total[one.places]) for one in got):
            return f"{term.call.name} sends back what it is sent: its derivative is left out"
    return ""


def _counted(terms: Brought, got: Sequence[Got]) -> str:
    """Whether terms count otherwise than they should, and not all of them alike."""
    if len(terms) < 2:
        return ""
    said: dict[str, None] = {}
    for one in got:
        factors = _solved(one.value, [back.reshape(-1)[one.places] for _, back in terms])
        if factors is None or all(_is(f, factors[0]) for f in factors):
            return ""
        said["; ".join(_counts(terms, factors))] = None
    return next(iter(said)) if len(said) == 1 else ""


def _counts(terms: Brought, factors: Sequence[float]) -> Iterator[str]:
    for (term, _), factor in zip(terms, factors):
        if abs(factor) <= NEAR:
            yield f"what {term.call.name} sends back is missing"
        elif not _is(factor, 1.0):
            yield f"what {term.call.name} sends back counts {factor:.4g} times"


def _unsummed(terms: Brought, got: Sequence[Got]) -> str:
    """Whether some terms are whole on every rank, and others terms of a sum over ranks."""
    if len(got) < 2 or len(terms) < 2 or len({one.rank for one in got}) < len(got):
        return ""
    if any(not torch.equal(one.places, got[0].places) for one in got):
        return ""
    columns = [back.reshape(-1)[got[0].places] for _, back in terms]
    factors = _solved(torch.stack([one.value for one in got]).sum(0), columns)
    if factors is None or not all(_is(f, 1.0) or _is(f, len(got)) for f in factors):
        return ""
    names = [term.call.name for (term, _), f in zip(terms, factors) if _is(f, 1.0)]
    if not names or len(names) == len(terms):
        return ""
    what = " and ".join(names)
    return (
        f"what {what} sends back is a term of a sum on each rank, and is not summed; "
        "all else is whole on every rank"
    )
