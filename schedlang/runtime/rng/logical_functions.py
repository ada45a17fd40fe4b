"""Random functions of torch, including recurrent layers, computed from given uniform numbers.

* Recurrent networks with several layers, layer by layer, with dropout between them. torch computes
  all layers of an LSTM in one call with internal dropout. One call per layer computes the same, and
  makes the mask between layers a draw of its own, over rows and tokens of the batch.
* The other random functions of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.runtime.tracing.meta_runs import name_of

RECURRENT_FUNCTIONS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def has_packed_sequences(args: Sequence[Any]) -> bool:
    """Return whether a call has packed sequences: (data, batch sizes, states, weights, ..).

    Its rows are tokens of all samples, sorted by length: no sample has rows of its own.
    """
    return not isinstance(args[3], bool)


def draws_masks(args: Sequence[Any]) -> bool:
    """Return whether a call draws masks: (.., layers, dropout, train, ..); only between layers."""
    position = next(index for index, value in enumerate(args) if type(value) is int)
    return bool(args[position] > 1 and args[position + 1] and args[position + 2])


def run_recurrent(
    draw: DrawSource, func: Callable[..., Any], input: Tensor, hx: Any, params: Any, *options: Any
) -> Any:
    """Compute torch.lstm, gru, rnn_tanh, rnn_relu: (input, states, weights, ..) to (output,
    *states)."""
    arguments = (input, hx, params, *options)
    if has_packed_sequences(arguments) or not draws_masks(arguments):
        return func(*arguments)
    has_biases, num_layers, dropout, train, bidirectional, batch_first = options
    flags: tuple[Any, ...] = (train, bidirectional, batch_first)
    has_two_states = isinstance(hx, (list, tuple))  # an LSTM has two states
    states, directions = tuple(hx) if has_two_states else (hx,), 2 if bidirectional else 1
    per_layer = len(params) // num_layers
    final_states: list[Sequence[Tensor]] = []
    for layer in range(num_layers):
        if layer:
            input = _dropped(draw, input, dropout, batch_first)
        layer_params = params[layer * per_layer : (layer + 1) * per_layer]
        start = tuple(state[layer * directions : (layer + 1) * directions] for state in states)
        input, *last = func(
            input, start if has_two_states else start[0], layer_params, has_biases, 1, 0.0, *flags
        )
        final_states.append(last)
    return (input, *(torch.cat(list(ends)) for ends in zip(*final_states)))


def _dropped(draw: DrawSource, value: Tensor, p: float, batch_first: bool) -> Tensor:
    rows = value if batch_first else value.transpose(0, 1)  # dim 0 of a draw is the samples
    keep = draw.keep(rows.shape, p, value.device).to(value.dtype)
    factor = keep / (1 - p) if p < 1 else keep * 0
    return value * (factor if batch_first else factor.transpose(0, 1))


_ALPHA = -1.7580993408473766  # saturation value of SELU


class DrawSource(Protocol):
    """A source of random numbers: a new tensor for every call."""

    def keep(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """Return booleans of `shape`, true with probability 1 - p."""

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return numbers of `shape`, uniform in [0, 1)."""


def _dropout(
    draw: DrawSource, func: Any, input: Tensor, p: float = 0.5, train: bool = True
) -> Tensor:
    """Compute torch.dropout, dropout_, feature_dropout, feature_dropout_ and their alpha forms."""
    name = func.__name__
    if not train or p == 0 or not input.numel():
        return input
    shape = input.shape
    if name.startswith("feature"):  # drops full channels
        shape = torch.Size((*shape[:2], *[1] * (input.dim() - 2)))
    keep = draw.keep(shape, p, input.device)
    if "alpha" in name:  # Klambauer et al.: Self-normalizing neural networks, NeurIPS 2017
        scale = 0.0 if p == 1 else ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5
        result = scale * (torch.where(keep, input, _ALPHA) - p * _ALPHA)
    else:
        factor = (
            keep.to(input.dtype) / (1 - p) if p < 1 else torch.zeros_like(keep, dtype=input.dtype)
        )
        return input.mul_(factor) if name.endswith("_") else input * factor
    return input.copy_(result) if name.endswith("_") else result


def _native_dropout(
    draw: DrawSource, func: Any, input: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    keep = draw.keep(input.shape, p, input.device)
    return input * keep.to(input.dtype) / (1 - p if p < 1 else 1), keep


def _attention(
    draw: DrawSource,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled dot-product attention, by plain operators if it drops; fully masked rows give
    0."""
    if dropout_p == 0:
        # called directly: a user may have replaced the function of that name
        attention: Callable[..., Tensor] = func
        return attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:  # aligned top left, as in torch
        attn_mask = torch.ones_like(scores[..., :, :], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    keep = draw.keep(weights.shape, dropout_p, weights.device)
    factor = (
        keep.to(weights.dtype) / (1 - dropout_p) if dropout_p < 1 else keep.to(weights.dtype) * 0
    )
    return (weights * factor) @ value


def _dtype_and_device(x: Tensor, kwargs: dict[str, Any]) -> tuple[torch.dtype, torch.device]:
    return kwargs.get("dtype") or x.dtype, torch.device(kwargs.get("device") or x.device)


def _normal(
    draw: DrawSource, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return normal numbers by the inverse of their distribution function.

    This is one draw, as every function makes, because draws are numbered by call.
    """
    middle = draw.uniform(shape, torch.float64, device) + 2.0**-54  # never 0
    numbers: Tensor = torch.special.ndtri(middle).to(dtype)
    return numbers


def _with_size(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch.rand or torch.randn: sizes are given one by one or as a sequence."""

    def made(draw: DrawSource, func: Any, *size: Any, **kwargs: Any) -> Tensor:
        size = tuple(kwargs.pop("size", size))
        if len(size) == 1 and not isinstance(size[0], int):
            size = tuple(size[0])
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        numbers = sample(
            draw, size, dtype, torch.device(kwargs.get("device") or torch.get_default_device())
        )
        return numbers.requires_grad_(bool(kwargs.get("requires_grad")))

    return made


def _like_input(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch.rand_like or torch.randn_like."""

    def made(draw: DrawSource, func: Any, input: Tensor, **kwargs: Any) -> Tensor:
        return sample(draw, input.shape, *_dtype_and_device(input, kwargs))

    return made


def _rand(
    draw: DrawSource, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return draw.uniform(shape, dtype, device)


def _uniform_(draw: DrawSource, func: Any, x: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    u = draw.uniform(x.shape, x.dtype, x.device)
    return x.copy_(a + (b - a) * u)


def _normal_(draw: DrawSource, func: Any, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return x.copy_(mean + std * _normal(draw, x.shape, x.dtype, x.device))


def _torch_normal(
    draw: DrawSource,
    func: Any,
    mean: Tensor | float,
    std: Tensor | float = 1.0,
    size: Sequence[int] = (),
    **kwargs: Any,
) -> Tensor:
    """Compute torch.normal, which torch.distributions use: of tensors, or of numbers and a size."""
    given = [x for x in (mean, std) if isinstance(x, Tensor)]
    shape = torch.as_tensor(mean + 0 * std).shape if given else tuple(size)  # their broadcast shape
    reference = given[0] if given else torch.empty(0, dtype=kwargs.get("dtype"))
    dtype, device = _dtype_and_device(reference, kwargs)
    numbers = mean + std * _normal(draw, shape, dtype, device)
    out = kwargs.get("out")
    return numbers if out is None else out.resize_(numbers.shape).copy_(numbers)


def _exponential_(draw: DrawSource, func: Any, x: Tensor, lambd: float = 1.0) -> Tensor:
    return x.copy_(-torch.log1p(-draw.uniform(x.shape, torch.float64, x.device)) / lambd)


def _bernoulli(draw: DrawSource, func: Any, input: Tensor, p: float | None = None) -> Tensor:
    """Compute torch.bernoulli: with the probabilities in `input`, or with `p`."""
    u = draw.uniform(input.shape, torch.float64, input.device)
    return (u < (input if p is None else p)).to(input.dtype)


def _bernoulli_(draw: DrawSource, func: Any, x: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return x.copy_(draw.uniform(x.shape, torch.float64, x.device) < p)


LOGICAL: dict[Any, Callable[..., Any]] = {
    **{
        getattr(torch, f"{kind}dropout{tail}"): _dropout
        for kind in ("", "feature_", "alpha_", "feature_alpha_")
        for tail in ("", "_")
    },
    torch.native_dropout: _native_dropout,
    F.scaled_dot_product_attention: _attention,
    torch.rand: _with_size(_rand),
    torch.randn: _with_size(_normal),
    torch.rand_like: _like_input(_rand),
    torch.randn_like: _like_input(_normal),
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.Tensor.uniform_: _uniform_,
    torch.Tensor.normal_: _normal_,
    torch.Tensor.exponential_: _exponential_,
    torch.normal: _torch_normal,
    **dict.fromkeys(RECURRENT_FUNCTIONS, run_recurrent),
}


def _draws_always(args: Any, kwargs: Any) -> bool:
    return True


def _draws_packed(args: Any, kwargs: Any) -> bool:
    return has_packed_sequences(args) and draws_masks(args)


def _draws_leaky(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("training", args[3] if len(args) > 3 else False))


_ILLOGICAL_NAMES: tuple[str, ...] = (
    *("randint", "randint_like", "randperm", "multinomial", "poisson", "binomial"),
    *("random_", "cauchy_", "log_normal_", "geometric_", "_standard_gamma", "_sample_dirichlet"),
)
ILLOGICAL: dict[Any, Callable[[Any, Any], bool]] = {
    **{
        found: _draws_always
        for name in _ILLOGICAL_NAMES
        for home in (torch, torch.Tensor)
        if (found := getattr(home, name, None)) is not None
    },
    **dict.fromkeys(RECURRENT_FUNCTIONS, _draws_packed),
    torch.rrelu: _draws_leaky,
    torch.rrelu_: _draws_leaky,
}


def may_draw(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call may draw random numbers, by its function and arguments' names."""
    is_listed = func in LOGICAL or func in ILLOGICAL or isinstance(func, _OPERATORS)
    return is_listed or "generator" in kwargs


# their tags say whether they draw
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def draws_illogically(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call draws random numbers in a way that `LOGICAL` does not cover."""
    if func in ILLOGICAL:
        return ILLOGICAL[func](args, kwargs)
    if kwargs.get("generator") is not None:  # the user's own stream
        return True
    if isinstance(func, torch._ops.OpOverloadPacket):
        names: list[str] = func.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(func, name) for name in names]
    else:
        overloads = [func] if isinstance(func, torch._ops.OpOverload) else []
    return any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads) and is_drawing(
        overloads[0], args, kwargs
    )


def is_drawing(overload: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a random operator draws here: not with dropout 0, nor outside of training."""
    passed = dict(zip((a.name for a in overload._schema.arguments), args)) | dict(kwargs)
    if not passed.get("train", passed.get("training", not _has_argument(overload, "training"))):
        return False
    for name in ("dropout_p", "dropout", "p"):
        if name in passed or name == "dropout_p" and _has_argument(overload, name):
            return bool(passed.get(name, 0))
    return True


def _has_argument(overload: Any, name: str) -> bool:
    return any(a.name == name for a in overload._schema.arguments)


def draws_logically(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers in a way that has a logical form.

    This includes functions that are composed of others (`F.dropout`).
    """
    if "dropout" in name_of(func):
        passed = {**dict(zip(("input", "p", "training"), args)), **kwargs}
        on = passed.get("train", passed.get("training", True))  # F.dropout and torch.dropout
        return bool(passed.get("p", 0.5) > 0 and on)
    if func is F.scaled_dot_product_attention:
        rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return bool(rate > 0)
    if func in RECURRENT_FUNCTIONS:
        return draws_masks(args)
    return func in LOGICAL


def mask_shapes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of the masks that such a call draws, samples first; none for empty
    tensors."""
    values = (*args, *kwargs.values())
    tensors = [item for item in values if isinstance(item, Tensor)]
    if func in (torch.rand, torch.randn):
        size = kwargs.get("size", args)
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return [tuple(size)]
    if func is F.scaled_dot_product_attention:
        query, key = tensors[:2]
        return [(*query.shape[:-1], key.shape[-2])]
    if func in RECURRENT_FUNCTIONS:
        position = next(index for index, value in enumerate(args) if type(value) is int)
        rows = tensors[0] if args[-1] else tensors[0].transpose(0, 1)
        return [tuple(rows.shape)] * (args[position] - 1)
    shape = tuple(tensors[0].shape)
    if "feature" in name_of(func):
        shape = (*shape[:2], *[1] * (len(shape) - 2))
    return [shape] if tensors[0].numel() else []
