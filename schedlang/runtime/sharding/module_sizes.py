"""Sizes in a model's code that must become sizes of a rank, and rules for dims of torch's calls.

* Along which dims a call of torch mixes elements, from its name and arguments.
* The integers that a module uses as sizes: its attributes, and those of its configuration.
* Sizes that a module reads of its input, for tensors that are split: `B, T, C = x.size()`, and then
  `k.view(B, T, heads, C // heads)` and `y.view(B, T, C)`.  The input is full on every rank, but the
  module's code means the width of its heads.  On a rank with a shard of the heads the module reads
  the width of this shard; other code sees the tensor's true size.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FILLS = {
    "zeros",
    "ones",
    "full",
    "empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
}
PARTS = {"split", "chunk", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk"}
# (keyword, position, default) of the argument with the dims; None: all dims
_ALONG: Mapping[str, tuple[str, int, Any]] = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "cummax"),
        ("dim", 1, -1),
    ),
    **dict.fromkeys(("cummin", "sort", "argsort", "glu"), ("dim", 1, -1)),
    **dict.fromkeys(("cross_entropy", "nll_loss"), ("", 0, 1)),
    **dict.fromkeys(("topk", "kthvalue"), ("dim", 2, -1)),
    **dict.fromkeys(
        ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"), ("dim", 2, -1)
    ),
    **dict.fromkeys(("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2"), ("dim", 2, (-2, -1))),
    **dict.fromkeys(("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn"), ("dim", 2, None)),
    **dict.fromkeys(("tril", "triu"), ("", 0, (-2, -1))),
    **dict.fromkeys(("index_fill", "index_copy", "index_add", "scatter", "gather"), ("dim", 1, -1)),
    **dict.fromkeys(("channel_shuffle", "local_response_norm"), ("", 0, 1)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), ("", 0, -3)),
    "normalize": ("dim", 2, 1),
    "gumbel_softmax": ("dim", 4, -1),
    "flip": ("dims", 1, None),
    "roll": ("dims", 2, None),
    "rot90": ("dims", 2, (0, 1)),
    "fliplr": ("", 0, 1),
    "flipud": ("", 0, 0),
    "msort": ("", 0, 0),
}


def dims_of_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dims: int) -> set[int]:
    """Return the dims along which a call mixes elements, from its arguments.

    `dims` is the tensor's number of dims.  Empty for a function that is not known.
    """
    if name.strip("_") == "renorm":  # the norm of a slice is over all dims but the given one
        return set(range(dims)) - {kwargs.get("dim", args[2] if len(args) > 2 else 0) % dims}
    if name.strip("_") not in _ALONG:
        return set()
    keyword, position, default = _ALONG[name.strip("_")]
    dim_arg = kwargs.get(keyword, default)
    if keyword and keyword not in kwargs and len(args) > position:
        dim_arg = args[position:] if name == "flip" and len(args) > position + 1 else args[position]
    if dim_arg is None:
        return set(range(dims))
    named_dims = dim_arg if isinstance(dim_arg, (tuple, list)) else (dim_arg,)
    return {named_dim % dims for named_dim in named_dims if isinstance(named_dim, int)}


_ARITHMETIC = {
    *("add", "sub", "mul", "div", "truediv", "true_divide", "floordiv", "floor_divide", "pow"),
    *("radd", "rsub", "rmul", "rdiv", "rtruediv", "rpow", "multiply", "divide", "subtract"),
    *("iadd", "isub", "imul", "itruediv", "idiv", "ipow"),
}


def factors_of(name: str, args: Sequence[Any]) -> tuple[float, ...]:
    """Return the plain numbers among the arguments of arithmetic, in order; else nothing."""
    if name.strip("_") not in _ARITHMETIC:
        return ()
    return tuple(n for n in args if isinstance(n, (int, float)) and not isinstance(n, bool))


def index_at(indices: Any, dim: int, dims: int) -> Any:
    """Return the item for dim `dim` of an index into a tensor of `dims` dims."""
    index = indices if isinstance(indices, tuple) else (indices,)
    if any(item is Ellipsis for item in index):
        ellipsis_at = next(k for k, item in enumerate(index) if item is Ellipsis)
        behind = len(index) - ellipsis_at - 1
        index = (slice(None),) * (dims - behind) + index[len(index) - behind :]
    return index[dim] if dim < len(index) else slice(None)


def sliced_block(cut: Any, blocks: Sequence[int], ranks: int) -> int | None:
    """Return the full size of the block that a slice takes of each rank's shard; None: no block."""
    start = 0
    for size in blocks:
        if cut == slice(start // ranks or None, (start + size) // ranks) or (
            isinstance(cut, slice)
            and (cut.start or 0) * ranks == start
            and cut.step is None
            and (cut.stop is None or cut.stop * ranks == start + size)
        ):
            return size
        start += size
    return None


def numbers_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the path and the value of every integer above 1 of a module: `heads`, `config.heads`.

    Objects with settings are searched, and the sizes of axes of a layer of einops (`axes_lengths`);
    tensors, modules and other containers are not.
    """
    for name, value in vars(module).items():
        if _is_count(value):
            yield name, value
        elif name[:1] != "_" and (_has_settings(value) or name == EINOPS_SIZES):
            yield from ((f"{name}.{k}", v) for k, v in _settings(value).items() if _is_count(v))


EINOPS_SIZES = (
    "axes_lengths"  # of `Rearrange("b n (h d) -> b h n d", h=heads)`; a tuple has them too
)


def _settings(holder: Any) -> dict[str, Any]:
    return holder if isinstance(holder, dict) else vars(holder)


def number_at(module: nn.Module, path: str) -> Any:
    """Return the integer at a path of `numbers_of`, or None."""
    holder, _, last = path.rpartition(".")
    owner = vars(module).get(holder) if holder else module
    return _settings(owner).get(last) if owner is not None else None


def set_number(module: nn.Module, path: str, value: int) -> None:
    """Set an integer of this module alone: settings shared with other modules are copied first."""
    holder, _, last = path.rpartition(".")
    if not holder:
        setattr(module, last, value)
        return
    own_settings = copy.copy(vars(module)[holder])
    _settings(own_settings)[last] = value  # without setters, which may change other settings
    setattr(module, holder, own_settings)
    if holder == EINOPS_SIZES:
        setattr(module, f"_{holder}", tuple(own_settings.items()))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _has_settings(value: Any) -> bool:
    is_object = hasattr(value, "__dict__") and not callable(value)
    return is_object and not isinstance(value, Tensor | nn.Module | type)


SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SizeArgument:
    """An argument of a module, and its dim (below 0) whose size is read divided by `parts`."""

    name: str
    dim: int
    parts: int


@dataclass(frozen=True)
class SizesLayer:
    """The layer around a module that reads some sizes of its arguments as sizes of this rank."""

    module: nn.Module
    sizes: tuple[SizeArgument, ...]

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `inner`, in which the module reads this rank's sizes."""
        tensors = dict(named_arguments(self.module, args, kwargs))
        read_sizes = [(tensors[c.name], c.dim, c.parts) for c in self.sizes if c.name in tensors]
        with _Reading(self.module, read_sizes):
            return inner(*args, **kwargs)


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, tensor) for the tensors of a call of the module's forward."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    for name, value in [*zip(names, args), *((k, v) for k, v in kwargs.items() if k in names)]:
        if isinstance(value, Tensor):
            yield name, value


class _Reading(TorchFunctionMode):
    """Mode in which one module's own code reads some sizes of some tensors divided by ranks."""

    def __init__(self, module: nn.Module, read_sizes: Sequence[tuple[Tensor, int, int]]) -> None:
        super().__init__()
        self.module, self.own = module, read_sizes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the call; divide a size that the module's own code reads."""
        if func is not Tensor.size and func != SHAPE:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        parts = {dim % tensor.ndim: n for sized, dim, n in self.own if sized is tensor}
        if not parts or not _is_code_of(self.module, sys._getframe(1)):
            return func(*args, **(kwargs or {}))
        sizes = [size // parts.get(dim, 1) for dim, size in enumerate(SHAPE(tensor))]
        dim_arg = (kwargs or {}).get("dim", args[1] if len(args) > 1 else None)
        return torch.Size(sizes) if dim_arg is None else sizes[dim_arg]


def _is_own_frame(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("schedlang.runtime.")


def _is_code_of(module: nn.Module, frame: FrameType | None) -> bool:
    """Return whether a frame runs the module's own code: a method of it, or an expression inside.

    Frames of schedlang's function modes above it are skipped.
    """
    while frame is not None and (frame.f_code.co_name.startswith("<") or _is_own_frame(frame)):
        frame = frame.f_back
    names = frame.f_code.co_varnames[:1] if frame is not None else ()
    return bool(names) and frame is not None and frame.f_locals.get(names[0]) is module
