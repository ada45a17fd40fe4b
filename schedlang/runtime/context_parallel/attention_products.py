"""Attention that a model writes as matrix products, traced and computed as one attention call.

Inside of a module that a row names, the product of queries and keys is not computed.  `Scores`
records the following operations (scale, bias, mask, softmax, dropout); the product with the values
is then computed by one call of attention over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.context_parallel.local_tokens import (
    AttentionCall,
    AttentionMethod,
    SequenceShard,
    expand_over_keys,
)
from schedlang.runtime.context_parallel.token_layout import AttentionMask
from schedlang.runtime.context_parallel.transformers_attention import (
    MaskRule,
    is_causal,
    local_keys_refusal,
    unsplit_refusal,
)
from schedlang.runtime.modes import AmbientMode
from schedlang.runtime.sequence_pipelining.carried_keys import Place, calling_line

LOWEST_SCORE = -1e4  # numbers that hide a key are lower


@dataclass(frozen=True)
class ScoresState:
    """Recorded scores: the arguments of an attention call so far.

    lead    sizes of the dims before queries and keys in the model's current view
    inner   sizes of these dims in `added`: [rows, heads] once the model has that view
    added   numbers [*inner, queries or 1, keys of the full sequence], -inf where hidden
    hides   whether `added` may hide all keys of a query
    weights whether softmax was applied
    drawn   the dropout mask of the weights
    """

    shard: SequenceShard
    how: AttentionMethod
    query: Tensor
    key: Tensor
    lead: tuple[int, ...]
    inner: tuple[int, ...]
    scale: float = 1.0
    added: Tensor | None = None
    mask: AttentionMask | None = None
    hides: bool = False
    weights: bool = False
    drawn: Any = None


def expand_added(state: ScoresState, added: Tensor) -> Tensor:
    """Return numbers that are added to scores for local queries and all keys, with dims `inner`.

    Raises Refusal S661 if the numbers for other ranks' keys are not known.
    """
    dims = len(state.lead) + 2
    value = expand_over_keys(state.shard, added if added.dim() > 1 else added[None])
    if value is None:
        raise local_keys_refusal()
    if value.dim() > dims:
        raise unsplit_refusal("the term that it adds to its scores has other dims")
    value = value[(None,) * (dims - value.dim())]
    if state.lead == state.inner:
        return value
    if set(value.shape[:-2]) != {1}:
        value = value.expand(*state.lead, -1, -1)
        return value.reshape(*state.inner, *value.shape[-2:])
    return value.reshape(*[1] * len(state.inner), *value.shape[-2:])


def add_to_scores(state: ScoresState, rows: Tensor) -> ScoresState:
    """Add numbers to the scores."""
    return replace(state, added=rows if state.added is None else state.added + rows)


def _add(state: ScoresState, term: Any, alpha: float = 1) -> ScoresState:
    _check_before_softmax(state)
    if isinstance(term, MaskRule):
        return _apply_mask_rule(state, term)
    if isinstance(term, Tensor) and term.dim():
        return add_to_scores(
            state, expand_added(state, term) * alpha if alpha != 1 else expand_added(state, term)
        )
    if not isinstance(term, (int, float, Tensor)):
        raise unsplit_refusal(f"it adds a `{type(term).__name__}` to its scores")
    return state  # the same for all keys


def _sub(state: ScoresState, subtrahend: Any, alpha: float = 1) -> ScoresState:
    if isinstance(subtrahend, MaskRule):
        raise unsplit_refusal("it subtracts a mask from its scores")
    return _add(state, subtrahend, alpha=-alpha)


def _mul(state: ScoresState, number: Any) -> ScoresState:
    _check_before_softmax(state)
    if isinstance(number, Tensor) and (number.dim() or number.requires_grad or number.is_meta):
        raise unsplit_refusal("it multiplies its scores by a tensor, not by a number")
    factor = float(number)
    added = None if state.added is None else state.added * factor
    return replace(state, scale=state.scale * factor, added=added)


def _div(state: ScoresState, factor: Any) -> ScoresState:
    return _mul(state, 1 / factor)


def _apply_mask_rule(state: ScoresState, mask_rule: MaskRule) -> ScoresState:
    if state.mask is not None:
        raise unsplit_refusal("it applies two masks to its scores")
    return replace(state, mask=mask_rule.mask)


def _fill(state: ScoresState, hidden: Any, value: Any) -> ScoresState:
    """Hide keys by a very low score."""
    _check_before_softmax(state)
    if float(value) > LOWEST_SCORE:
        raise unsplit_refusal(f"it sets some of its scores to {float(value):g}")
    if isinstance(hidden, MaskRule):
        return _apply_mask_rule(state, hidden)
    if not isinstance(hidden, Tensor) or hidden.dtype != torch.bool:
        raise unsplit_refusal("it masks keys by something other than booleans")
    drop_mask = expand_added(state, hidden)
    if state.mask is None and is_causal(state.shard, ~drop_mask):
        # a ring skips blocks that positions hide
        return replace(state, mask=AttentionMask(causal=True))
    zero = torch.zeros(drop_mask.shape, dtype=state.query.dtype, device=drop_mask.device)
    return add_to_scores(replace(state, hides=True), zero.masked_fill(drop_mask, -math.inf))


def _where(state: ScoresState, *values: Any) -> ScoresState:
    """Apply `torch.where(seen, scores, low)`."""
    visible, fill = values
    return _fill(state, ~visible, fill)


def _view(state: ScoresState, *sizes: Any, **_: Any) -> ScoresState:
    new_shape = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    length, lead = state.shard.length, new_shape[:-2]
    if len(new_shape) < 3 or new_shape[-1] not in (length, -1) or new_shape[-2] not in (length, -1):
        raise unsplit_refusal("it changes the shape of its scores")
    count = math.prod(state.lead)
    if -1 in lead:
        known_size = math.prod(n for n in lead if n != -1)
        lead = tuple(count // known_size if n == -1 else n for n in lead)
    if math.prod(lead) != count:
        raise unsplit_refusal("it changes the shape of its scores")
    if len(lead) < 2 or state.inner == lead or len(state.inner) > 1:
        return replace(state, lead=tuple(lead))
    added = state.added
    if added is not None:
        flat = added.expand(count, -1, -1) if added.shape[0] != count else added
        added = flat.reshape(*lead, *added.shape[-2:])
    return replace(state, lead=tuple(lead), inner=tuple(lead), added=added)


def _softmax(state: ScoresState, dim: Any = None, *_: Any, **__: Any) -> ScoresState:
    _check_before_softmax(state)
    if dim not in (-1, len(state.lead) + 1):
        raise unsplit_refusal("its softmax is not over keys")
    return replace(state, weights=True)


def _dropout(
    state: ScoresState, p: float = 0.5, training: bool = True, *_: Any, **__: Any
) -> ScoresState:
    if not state.weights or state.drawn is not None:
        raise unsplit_refusal("it applies dropout to its scores, or twice")
    if not training or not p:
        return state
    rows, heads = _heads(state)
    return replace(state, drawn=state.shard.draw(p, rows, heads))


def _keep(state: ScoresState, *_: Any, **__: Any) -> ScoresState:
    return state


def _values(state: ScoresState, value: Tensor) -> Tensor:
    """Compute the product with values: the attention call."""
    if not state.weights:
        raise unsplit_refusal("its scores are scaled twice before their softmax")
    rows, heads = _heads(state)
    mask = state.mask or AttentionMask()
    tagged = next((tag for tag in mask.tags if tag is not None), None)
    if tagged is not None and len(tagged) not in (1, rows):
        raise unsplit_refusal("its heads and rows share a dim")
    if state.added is not None:
        rows_and_heads = (
            state.added.reshape(state.added.shape[0], -1, *state.added.shape[-2:])
            if (len(state.inner) > 1)
            else state.added[:, None]
        )
        mask = replace(mask, rows=rows_and_heads)
    parts = [_to_four_dims(x, state, rows) for x in (state.query, state.key, value)]
    unseen_result: Any = "mean" if state.hides or mask.present is not None else "zero"
    call = AttentionCall(
        parts[0],
        parts[1],
        parts[2],
        mask,
        state.scale,
        unseen_result=unseen_result,
        dropout_mask=state.drawn,
    )
    out = state.shard.attend(state.how, call)
    return out.reshape(*state.lead, *out.shape[-2:])


def _heads(state: ScoresState) -> tuple[int, int]:
    return state.inner[0], math.prod(state.inner[1:])


def _to_four_dims(x: Tensor, state: ScoresState, rows: int) -> Tensor:
    """Return a factor as [rows, heads, tokens, size]."""
    if x.shape[:-2].numel() not in (math.prod(state.lead), rows):
        raise unsplit_refusal("its queries, keys and values have different numbers of heads")
    return x.reshape(rows, -1, *x.shape[-2:])


def _check_before_softmax(state: ScoresState) -> None:
    if state.weights:
        raise unsplit_refusal("it changes its weights after their softmax")


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd", "iadd"), _add),
    **dict.fromkeys(("sub", "isub"), _sub),
    **dict.fromkeys(("mul", "rmul", "imul"), _mul),
    **dict.fromkeys(("div", "truediv", "idiv", "itruediv"), _div),
    **dict.fromkeys(("view", "reshape"), _view),
    **dict.fromkeys(
        ("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"),
        _keep,
    ),
    **dict.fromkeys(("matmul", "bmm"), _values),
    "masked_fill": _fill,
    "where": _where,
    "softmax": _softmax,
    "dropout": _dropout,
}


PRODUCTS: set[Any] = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
ADDED_PRODUCTS: set[Any] = {torch.baddbmm, Tensor.baddbmm}


def product_factors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return both factors of a matrix product, as a model may write it; () for other calls."""
    if func in PRODUCTS:
        factors = (*args, *kwargs.values())
    elif func in ADDED_PRODUCTS:
        factors = (*args[1:], *(kwargs[n] for n in ("batch1", "batch2") if n in kwargs))
    else:
        return ()
    return tuple(factors[:2])


def is_query_key_product(factors: Sequence[Any], length: int) -> bool:
    """Return whether factors are queries [.., length, d] and transposed keys [.., d, length]."""
    if len(factors) != 2 or not all(isinstance(x, Tensor) and x.dim() > 2 for x in factors):
        return False
    a, b = factors
    return bool(a.shape[-2] == b.shape[-1] == length and a.shape[-1] > 1)


class ProductLines(AmbientMode):
    """Mode that records in a full forward the lines that multiply queries and keys."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.found: set[Place] = set()
        self.others: set[Place] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if is_query_key_product(product_factors(func, args, kwargs), self.length):
            self.found.add(calling_line())
        return self.run(func, types, args, kwargs)


# -- recorded scores -----------------------------------------------------------------------------

_REFLECTED = {"add": "add", "radd": "add", "mul": "mul", "rmul": "mul", "where": "where"}
_IN_PLACE = {"iadd", "isub", "imul", "idiv", "itruediv"}  # torch names `/=` __idiv__


class Scores:
    """Stand-in for scores, or weights, that are not computed: records operations on them."""

    def __init__(self, state: ScoresState) -> None:
        self.state = state

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return apply_to_scores(func, args, dict(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        """The shape in the model's view: [*lead, local tokens, local tokens]."""
        length = self.state.shard.length
        return torch.Size((*self.state.lead, length, length))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the queries."""
        return self.state.query.dtype

    @property
    def device(self) -> torch.device:
        """The device of the queries."""
        return self.state.query.device

    def size(self, dim: int | None = None) -> Any:
        """Return the size, as Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dims, as Tensor.dim."""
        return len(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not callable(getattr(Tensor, name, None)):
            raise AttributeError(name)
        func = getattr(Tensor, name)
        return lambda *args, **kwargs: apply_to_scores(func, (self, *args), kwargs)


def _operator_method(name: str) -> Callable[..., Any]:
    def run(self: Scores, *args: Any) -> Any:
        return apply_to_scores(getattr(Tensor, name), (self, *args), {})

    return run


for _name in (
    *("add", "radd", "iadd", "sub", "isub", "mul", "rmul", "imul", "truediv", "itruediv", "matmul"),
):
    setattr(Scores, f"__{_name}__", _operator_method(f"__{_name}__"))


def begin_scores(
    shard: SequenceShard, method: AttentionMethod, func: Any, args: Any, kwargs: dict[str, Any]
) -> Scores | None:
    """Return the scores of a product of queries and keys; None for another product."""
    factors = product_factors(func, args, kwargs)
    if not is_query_key_product(factors, shard.length):
        return None
    query, key = factors[0], factors[1].mT
    lead = _lead(query.shape[:-2], key.shape[:-2])
    state = ScoresState(shard, method, query, key, lead, lead)
    if func not in ADDED_PRODUCTS:
        return Scores(state)
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    bias = expand_added(state, args[0] if args else kwargs["input"])
    return Scores(add_to_scores(replace(state, scale=float(alpha)), bias * beta))


def _lead(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    if len(a) != len(b) or any(m != n and 1 not in (m, n) for m, n in zip(a, b)):
        raise unsplit_refusal("its queries and keys have different numbers of heads")
    return tuple(map(max, a, b))


def apply_to_scores(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply a function to scores or weights; raise Refusal S661 if it is not supported."""
    name = getattr(func, "__name__", "?")
    rule_name = name.strip("_")
    scores_args = [x for x in args if isinstance(x, Scores)]
    if not args or not isinstance(args[0], Scores):
        rule_name = "" if kwargs else _REFLECTED.get(rule_name, "")
    if len(scores_args) != 1 or rule_name not in RULES:
        raise unsplit_refusal(
            f"`{name}` on its scores is not supported: pass it to torch's attention"
        )
    scores, rest = scores_args[0], tuple(x for x in args if x is not scores_args[0])
    if rule_name == "where" and args[-1] is scores:  # where(hidden, low, scores)
        rest = (~args[0], args[1])
    result = RULES[rule_name](scores.state, *rest, **kwargs)
    written = name.endswith("_") and not name.startswith("__")
    if (written or rule_name in _IN_PLACE) and isinstance(result, ScoresState):
        scores.state = result
        return scores
    return Scores(result) if isinstance(result, ScoresState) else result
