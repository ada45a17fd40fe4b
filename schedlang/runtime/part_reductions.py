"""Tell which dims of a tensor a call of torch reduces, and where the other dims of it go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Dims = tuple[int, ...]
_FIRST = (
    *("all", "amax", "amin", "any", "argmax", "argmin", "argsort", "count_nonzero", "cummax"),
    *("cummin", "cumprod", "cumsum", "log_softmax", "logcumsumexp", "logsumexp", "max", "mean"),
    *("median", "min", "mode", "nanmean", "nanmedian", "nansum", "prod", "softmax", "softmin"),
    *("sort", "std", "std_mean", "sum", "var", "var_mean", "aminmax"),
)
_SECOND = (
    *("cosine_similarity", "kthvalue", "linalg_norm", "linalg_vector_norm", "nanquantile"),
    *("norm", "normalize", "quantile", "renorm", "topk"),
)
_PLACES = {**dict.fromkeys(_FIRST, 1), **dict.fromkeys(_SECOND, 2)}  # of the argument `dim`
_DEFAULTS = {
    **dict.fromkeys(("argsort", "kthvalue", "sort", "topk"), -1),
    **dict.fromkeys(("cosine_similarity", "normalize"), 1),
}
_OF_ALL = (
    *("_foreach_norm", "_foreach_max", "cdist", "corrcoef", "cov", "det", "dist", "dot", "histc"),
    *("histogram", "l1_loss", "linalg_cond", "linalg_det", "linalg_eigh", "linalg_inv"),
    *("linalg_matrix_norm", "linalg_pinv", "linalg_qr", "linalg_svd", "linalg_svdvals"),
    *("linalg_eigvalsh", "logdet", "mse_loss", "msort", "pinverse", "slogdet", "trace", "vdot"),
)
_UNKNOWN = ("einsum", "tensordot")
_LAST = ("layer_norm", "rms_norm")  # their second argument is the shape of the last dims
# the places of two factors; the last dim of the first is contracted
_PRODUCTS = {
    **dict.fromkeys(("__matmul__", "bmm", "inner", "linear", "matmul", "mm", "mv"), (0, 1)),
    **dict.fromkeys(("addbmm", "addmm", "addmv", "baddbmm"), (1, 2)),
    "__rmatmul__": (1, 0),
}
_BY_ROWS = ("inner", "linear")  # products that contract the last dim of the second, too
_PERMUTING = (
    *("H", "T", "adjoint", "mH", "mT", "moveaxis", "movedim", "permute", "swapaxes", "swapdims"),
    *("t", "transpose"),
)


def reduced_dims(name: str, operand: Tensor, args: Any, kwargs: dict[str, Any]) -> Dims | None:
    """Return the dims of an operand that a call reduces; None: not known which."""
    every = tuple(range(operand.dim()))
    if name in _UNKNOWN:
        return None
    if name in _OF_ALL:
        return every
    if name in _PRODUCTS:
        return _contracted(name, operand, args)
    if name in _LAST:
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        return every[len(every) - len(shape) :]
    if name not in _PLACES or name in ("max", "min") and "other" in kwargs:
        return ()
    dims = kwargs.get("dim", kwargs.get("axis"))
    if dims is None and len(args) > _PLACES[name]:
        dims = args[_PLACES[name]]
    if isinstance(dims, Tensor):  # the larger elements of two tensors
        return ()
    if dims is None or isinstance(dims, (bool, str)):
        dims = _DEFAULTS.get(name, ())
    given = dims if isinstance(dims, (list, tuple)) else (dims,)
    if any(not isinstance(dim, int) for dim in given):
        return None
    chosen = tuple(dim % len(every) for dim in given if every)
    if name == "renorm":
        return tuple(dim for dim in every if dim not in chosen)
    return chosen or every


def _contracted(name: str, operand: Tensor, args: Any) -> Dims | None:
    places = _PRODUCTS[name]
    if len(args) <= max(places):
        return None
    last, contracted = operand.dim() - 1, list[int]()
    if operand is args[places[0]]:
        contracted.append(last)
    if operand is args[places[1]]:
        contracted.append(last if name in _BY_ROWS else max(last - 1, 0))
    return tuple(contracted)


def product_dims(name: str, args: Any, result: Tensor, dims_of: Callable[[Any], Any]) -> Any:
    """Return the split dims of a product of parts; None: not known.

    dims_of  the split dims of an operand: () if it is no part, None if they are not known
    """
    first, second = (args[place] for place in _PRODUCTS[name])
    rows, columns = dims_of(first), dims_of(second)
    if result.dim() != 2 or first.dim() != 2 or second.dim() != 2 or None in (rows, columns):
        return None
    free = 0 if name in _BY_ROWS else 1
    return (0,) * (0 in rows) + (1,) * (free in columns)


def is_product(name: str) -> bool:
    """Return whether a call is a product of matrices."""
    return name in _PRODUCTS


def dims_after(
    func: Any, name: str, operand: Tensor, dims: Dims | None, result: Tensor, call: tuple[Any, Any]
) -> Dims | None:
    """Return the dims of a result that are the `dims` of an operand; None: not known."""
    args, kwargs = call
    if dims is None:
        return None
    if name in _PERMUTING:
        if not args or args[0] is not operand:
            return None
        probe = torch.empty(tuple(range(2, 2 + operand.dim())), device="meta")
        sizes = func(probe, *args[1:], **kwargs).shape
        return tuple(place for place, size in enumerate(sizes) if size - 2 in dims)
    gone = reduced_dims(name, operand, args, kwargs)
    if not gone or name in ("nanquantile", "quantile"):
        return dims if result.shape == operand.shape else None
    if result.dim() == operand.dim():
        return dims
    if result.dim() == operand.dim() - len(gone):
        return tuple(dim - sum(other < dim for other in gone) for dim in dims)
    return None
