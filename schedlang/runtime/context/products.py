"""Attention that a model writes as products: scores, what it adds and hides, softmax, and values.

Inside of a module that a row names, the product of queries and keys is not computed but followed,
through everything that is done to it, until the values come; then it is a call of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.context.described import unknown
from schedlang.runtime.context.scores import RULES, State, plus, rows_of
from schedlang.runtime.context.seat import How, Seat
from schedlang.runtime.modes import Ambient
from schedlang.runtime.slicing.counting import caller
from schedlang.runtime.slicing.slices import Place

PRODUCTS: set[Any] = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
ADDED: set[Any] = {torch.baddbmm, Tensor.baddbmm}


def factors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Both factors of a product of matrices, as a model may write it; () for other calls."""
    if func in PRODUCTS:
        given = (*args, *kwargs.values())
    elif func in ADDED:
        given = (*args[1:], *(kwargs[n] for n in ("batch1", "batch2") if n in kwargs))
    else:
        return ()
    return tuple(given[:2])


def scored(found: Sequence[Any], length: int) -> bool:
    """Whether factors are queries and keys of so many tokens: [.., tokens, d], [.., d, tokens]."""
    if len(found) != 2 or not all(isinstance(x, Tensor) and x.dim() > 2 for x in found):
        return False
    a, b = found
    return bool(a.shape[-2] == b.shape[-1] == length and a.shape[-1] > 1)


class Lines(Ambient):
    """Notes in a whole forward the lines that multiply queries and keys."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.found: set[Place] = set()
        self.others: set[Place] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if scored(factors(func, args, kwargs), self.length):
            self.found.add(caller())
        return self.run(func, types, args, kwargs)


# -- what is followed ----------------------------------------------------------------------------

_TURNED = {"add": "add", "radd": "add", "mul": "mul", "rmul": "mul", "where": "where"}
_IN_PLACE = {"iadd", "isub", "imul", "itruediv"}


class Scores:
    """Scores, or weights, that are not there: what is done to them is noted."""

    def __init__(self, state: State) -> None:
        self.state = state

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return follow(func, args, dict(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        """As the model sees it."""
        length = self.state.seat.length
        return torch.Size((*self.state.lead, length, length))

    @property
    def dtype(self) -> torch.dtype:
        """That of the queries."""
        return self.state.query.dtype

    @property
    def device(self) -> torch.device:
        """That of the queries."""
        return self.state.query.device

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not callable(getattr(Tensor, name, None)):
            raise AttributeError(name)
        func = getattr(Tensor, name)
        return lambda *args, **kwargs: follow(func, (self, *args), kwargs)


def _operated(name: str) -> Callable[..., Any]:
    def run(self: Scores, *args: Any) -> Any:
        return follow(getattr(Tensor, name), (self, *args), {})

    return run


for _name in ("add", "radd", "iadd", "sub", "isub", "mul", "rmul", "imul", "truediv", "itruediv",
              "matmul"):  # fmt: skip
    setattr(Scores, f"__{_name}__", _operated(f"__{_name}__"))


def begin(seat: Seat, how: How, func: Any, args: Any, kwargs: dict[str, Any]) -> Scores | None:
    """The scores of a product, if it is one of queries and keys."""
    found = factors(func, args, kwargs)
    if not scored(found, seat.length):
        return None
    query, key = found[0], found[1].mT
    lead = _lead(query.shape[:-2], key.shape[:-2])
    state = State(seat, how, query, key, lead, lead)
    if func not in ADDED:
        return Scores(state)
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    bias = rows_of(state, args[0] if args else kwargs["input"])
    return Scores(plus(replace(state, scale=float(alpha)), bias * beta))


def _lead(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    if len(a) != len(b) or any(m != n and 1 not in (m, n) for m, n in zip(a, b)):
        raise unknown("its queries and keys have different numbers of heads")
    return tuple(map(max, a, b))


def follow(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function makes of scores or weights; raises Refusal S661 where that is not known."""
    name = getattr(func, "__name__", "?")
    plain = name.strip("_")
    there = [x for x in args if isinstance(x, Scores)]
    if not args or not isinstance(args[0], Scores):
        plain = "" if kwargs else _TURNED.get(plain, "")
    if len(there) != 1 or plain not in RULES:
        raise unknown(f"`{name}` on its scores is not supported: pass it to torch's attention")
    scores, rest = there[0], tuple(x for x in args if x is not there[0])
    made = RULES[plain](scores.state, *rest, **kwargs)
    written = name.endswith("_") and not name.startswith("__")
    if (written or plain in _IN_PLACE) and isinstance(made, State):
        scores.state = made
        return scores
    return Scores(made) if isinstance(made, State) else made
