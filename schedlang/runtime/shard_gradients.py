"""Follow gradients of shards in loops of a user: no number of one rank's part may change them.

After a step, `.grad` of a shard is a `GradientPart`: it computes as a tensor. What a loop reduces
it to (a norm, a mean, a largest value) is a `PartNumber`, on each rank another one. Where that
changes a gradient or a shard, ranks would not train as the original does: refused (S622). Where it
leaves torch, as for a log, a warning says what it is. A number that a loop has all-reduced has
another value than torch has computed, and is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.runtime import scope
from schedlang.runtime.adapters.torch_tensor import in_backward_pass
from schedlang.runtime.loop_terms import shard_name, shards

_BY_DIM = (
    *("all", "amax", "amin", "any", "argmax", "argmin", "argsort", "count_nonzero", "cumsum"),
    *("linalg_norm", "linalg_vector_norm", "logsumexp", "max", "mean", "median", "min", "nanmean"),
    *("nansum", "norm", "prod", "renorm", "softmax", "sort", "std", "std_mean", "sum", "var"),
    *("var_mean", "cosine_similarity"),
)
_OF_ALL = (
    *("_foreach_norm", "_foreach_max", "aminmax", "dist", "dot", "histc", "inner", "kthvalue"),
    *("linalg_matrix_norm", "linalg_qr", "linalg_svd", "linalg_svdvals", "matmul", "mm", "mv"),
    *("nanmedian", "nanquantile", "quantile", "topk", "trace", "vdot"),
)
_REDUCING = frozenset(_BY_DIM + _OF_ALL)
_AFTER_ORDER = ("norm", "linalg_norm", "linalg_vector_norm")  # their second argument is an order
_VIEWS = ("H", "T", "data", "mH", "mT", "real")  # attributes that are elements as well
_DIMS = "_schedlang_part_dims"  # of parameters: the dims of a shard
_warned: dict[Any, Any] = {}  # the lines that were warned of, as `warnings` notes them
_LEAVING = ("item", "tolist", "__float__", "__format__", "__repr__", "__bool__", "numpy")


class _Followed(Tensor):
    """A tensor whose uses are seen; copies and files of it are plain tensors."""

    origin: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kwargs = kwargs or {}
            operands = [*_tensors((*args, *kwargs.values()))]
            parts = [value for value in operands if isinstance(value, GradientPart)]
            numbers = [v for v in operands if isinstance(v, PartNumber) and v.is_own()]
            name = func.__name__
            if name == "__get__" and func.__self__.__name__ not in _VIEWS:
                return func(*args, **kwargs)
            if numbers and (shard := _shard_among(operands)):
                raise _part_refusal(numbers[0], shard)
            if numbers and name in _LEAVING:
                _warn(numbers[0])
            result = func(*args, **kwargs)
            if func is Tensor.as_subclass or "c10d" in str(getattr(func, "namespace", "")):
                return result
            reduced = _reduced(name, parts, args, kwargs) if name in _REDUCING else None
            if reduced is not None:
                return _mark_results(result, operands, lambda v: _number(v, reduced.origin, name))
            if numbers:
                first = numbers[0]
                return _mark_results(
                    result, operands, lambda v: _number(v, first.origin, first.reduction)
                )
            if parts:
                return _mark_results(result, operands, lambda v: _part_like(v, parts[0]))
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class GradientPart(_Followed):
    """The gradient of a rank's shard, or what a loop has made of its elements.

    origin  of the parameter
    dims    the dims along which other ranks hold the rest; None: not known
    """

    dims: tuple[int, ...] | None


class PartNumber(_Followed):
    """A number, or numbers, to which a rank has reduced its part.

    origin     of the parameter
    reduction  the function that reduced it
    computed   its local value
    """

    reduction: str
    computed: Tensor

    def is_own(self) -> bool:
        """Return whether its value is that of torch's: no collective has changed it."""
        return torch.equal(_local(self).nan_to_num(), self.computed.nan_to_num())


class SlicedPart(GradientPart, DTensor):
    """The same of a shard that `zero` slices: torch knows of the slices only."""

    def full_tensor(self, **options: Any) -> Tensor:
        """Return the rank's part, which torch takes for the full tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return _as_part(super().full_tensor(**options), self.origin, self.dims)


class SlicedNumber(PartNumber, DTensor):
    """A number to which slices of a part are reduced."""

    def full_tensor(self, **options: Any) -> Tensor:
        """Return the number of all slices of the rank's part."""
        with torch._C.DisableTorchFunctionSubclass():
            return _number(super().full_tensor(**options), self.origin, self.reduction)


def note_dims(parameter: Tensor, dims: tuple[int, ...]) -> None:
    """Note along which dims of a shard other ranks hold the rest; () if there are none."""
    setattr(parameter, _DIMS, dims)


def mark_gradients(parameters: Iterable[Tensor] | None = None) -> None:
    """Mark the gradients of parameters that are shards; without parameters, of all programs.

    Nothing is marked within a step or a backward.
    """
    if scope.current() is not None or in_backward_pass():
        return
    for parameter in shards() if parameters is None else parameters:
        gradient, dims = parameter.grad, vars(parameter).get(_DIMS)
        if gradient is None or type(gradient) not in (Tensor, DTensor):
            continue
        if dims and not gradient.requires_grad:
            parameter.grad = _as_part(gradient, shard_name(parameter) or "", dims)


def unmark_gradients(parameters: Iterable[Tensor]) -> None:
    """Make gradients plain tensors again, for an optimizer, which is checked itself."""
    for parameter in parameters:
        if isinstance(gradient := parameter.grad, DTensor) and isinstance(gradient, _Followed):
            gradient.__class__ = DTensor  # type: ignore[assignment]
        elif isinstance(gradient, _Followed):
            parameter.grad = gradient.as_subclass(Tensor)


def _as_kind(value: Tensor, kind: type[Any], sliced: type[Any]) -> Any:
    """Return a tensor as one of a class, on the same storage; a DTensor becomes one of `sliced`."""
    if not isinstance(value, DTensor):
        return value.as_subclass(kind)
    value.__class__ = sliced
    return value


def _local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value.as_subclass(Tensor)


def _as_part(value: Tensor, name: str, dims: tuple[int, ...] | None) -> GradientPart:
    part: GradientPart = _as_kind(value, GradientPart, SlicedPart)
    part.origin, part.dims = name, dims
    return part


def _part_like(value: Tensor, part: GradientPart) -> Tensor:
    return _as_part(value, part.origin, part.dims if value.shape == part.shape else None)


def _number(value: Tensor, name: str, reduction: str) -> Tensor:
    number: PartNumber = _as_kind(value, PartNumber, SlicedNumber)
    number.origin, number.reduction = name, reduction
    number.computed = _local(number).detach().clone()
    return number


def _mark_results(result: Any, operands: list[Tensor], mark: Callable[[Tensor], Tensor]) -> Any:
    """Mark a tensor, or those of a list or tuple; a number that was written into is noted again."""
    if isinstance(result, PartNumber):
        result.computed = _local(result).detach().clone()
    elif type(result) in (Tensor, DTensor) and not any(result is value for value in operands):
        return mark(result)
    if type(result) in (list, tuple):
        return type(result)(_mark_results(value, operands, mark) for value in result)
    return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _shard_among(operands: Iterable[Tensor]) -> str:
    """Return the name of the first part or shard among operands; "" if there is none."""
    names = (v.origin if isinstance(v, GradientPart) else shard_name(v) for v in operands)
    return next((name for name in names if name), "")


def _reduced(
    name: str, parts: Iterable[GradientPart], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GradientPart | None:
    """Return the first part that a call reduces along a dim that is split over ranks."""
    dims = None if name in _OF_ALL else kwargs.get("dim", kwargs.get("axis"))
    place = 2 if name in _AFTER_ORDER else 1
    if dims is None and name in _BY_DIM and len(args) > place:
        dims = args[place]
    dims = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not isinstance(dims, (list, tuple)) or not dims:
        return next(iter(parts), None)

    def along(part: GradientPart) -> bool:
        return part.dims is None or any(dim % part.dim() in part.dims for dim in dims)

    return next((part for part in parts if along(part)), None)


def _warn(number: PartNumber) -> None:
    """Warn, once for each line of the user's, that a number is of this rank's part only."""
    span = python_span()
    text = (
        f"`{number.reduction}` is of this rank's shard of `{number.origin}` only: other ranks have"
        " others. `program.grad_norm` is the norm of all gradients; `program.gradients()` has full"
        " gradients"
    )
    warnings.warn_explicit(text, UserWarning, span.source.name, span.line, registry=_warned)


def _part_refusal(number: PartNumber, shard: str) -> Refusal:
    return Refusal.of(
        "S622",
        f"`{shard}` would be changed by a number of this rank's gradients only",
        notes=(
            f"`{number.reduction}` reads this rank's shard of `{number.origin}`; other ranks have"
            " other shards and numbers",
        ),
        helps=(
            "`build(clip=1.0)`: a step clips by the norm of all gradients",
            "`program.grad_norm` is that norm, `program.gradients()` has full gradients",
            "`build(optimizer=lambda named: ...)`: an optimizer that reads full tensors gets them",
            "or all-reduce the number over the ranks that share the tensor",
        ),
    ).at(python_span())
