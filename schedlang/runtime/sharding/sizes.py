"""Sizes and whole numbers that a module counts by, and what it holds a part of.

* What calls do to the dims of a tensor, as far as their names and arguments tell.
* The whole numbers that a module counts by: its own attributes, and those of its configuration.
* Sizes that a module reads of its input, and by which it counts what each rank holds a part of.
  `B, T, C = x.size()`, and then `k.view(B, T, heads, C // heads)` and `y.view(B, T, C)`: the
  input is whole on every rank, but the module's own code means the width of its heads.  With a
  part of the heads it reads that part of the width; every other reader of the tensor sees its
  true size.
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
# the keyword and the place of the dims in a call, and those of a call without; None: all dims
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


def along(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dims: int) -> set[int]:
    """The dims of a tensor of so many along which a call mixes what stands at different places.

    By where torch's functions take them; those of a name that is not known are none.
    """
    if name.strip("_") == "renorm":  # the norm of a slice is over all dims but the one named
        return set(range(dims)) - {kwargs.get("dim", args[2] if len(args) > 2 else 0) % dims}
    if name.strip("_") not in _ALONG:
        return set()
    word, place, usual = _ALONG[name.strip("_")]
    given = kwargs.get(word, usual)
    if word and word not in kwargs and len(args) > place:
        given = args[place:] if name == "flip" and len(args) > place + 1 else args[place]
    if given is None:
        return set(range(dims))
    named = given if isinstance(given, (tuple, list)) else (given,)
    return {one % dims for one in named if isinstance(one, int)}


_ARITHMETIC = {
    *("add", "sub", "mul", "div", "truediv", "true_divide", "floordiv", "floor_divide", "pow"),
    *("radd", "rsub", "rmul", "rdiv", "rtruediv", "rpow", "multiply", "divide", "subtract"),
    *("iadd", "isub", "imul", "itruediv", "idiv", "ipow"),
}


def factors_of(name: str, args: Sequence[Any]) -> tuple[float, ...]:
    """The plain numbers among the arguments of arithmetic, in order; of another call none."""
    if name.strip("_") not in _ARITHMETIC:
        return ()
    return tuple(n for n in args if isinstance(n, (int, float)) and not isinstance(n, bool))


def index_at(given: Any, dim: int, dims: int) -> Any:
    """Return the item for one dim of an index into a tensor of so many dims."""
    index = given if isinstance(given, tuple) else (given,)
    if any(one is Ellipsis for one in index):
        at = next(k for k, one in enumerate(index) if one is Ellipsis)
        behind = len(index) - at - 1
        index = (slice(None),) * (dims - behind) + index[len(index) - behind :]
    return index[dim] if dim < len(index) else slice(None)


def block_cut(cut: Any, blocks: Sequence[int], ranks: int) -> int | None:
    """The block that a slice takes from what each of the ranks has; None if it is another cut."""
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
    """Every whole number above one of a module, by its path: `heads`, `config.heads`.

    Objects that hold settings are looked into; tensors, modules and containers are not.
    """
    for name, value in vars(module).items():
        if _counts(value):
            yield name, value
        elif name[:1] != "_" and _settings(value):
            yield from ((f"{name}.{k}", v) for k, v in vars(value).items() if _counts(v))


def number_at(module: nn.Module, path: str) -> Any:
    """The number at a path, or None."""
    holder, _, last = path.rpartition(".")
    found = vars(module).get(holder) if holder else module
    return vars(found).get(last) if found is not None else None


def set_number(module: nn.Module, path: str, value: int) -> None:
    """Set a number of this module alone: settings that it shares with others are copied first."""
    holder, _, last = path.rpartition(".")
    if not holder:
        setattr(module, last, value)
        return
    own = copy.copy(vars(module)[holder])
    vars(own)[last] = value  # past any setter that would change other settings with it
    setattr(module, holder, own)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _settings(value: Any) -> bool:
    plain = hasattr(value, "__dict__") and not callable(value)
    return plain and not isinstance(value, Tensor | nn.Module | type)


SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Counted:
    """An argument of a module, of whose dim (from the last, below 0) a rank counts its part."""

    name: str
    dim: int
    parts: int


@dataclass(frozen=True)
class Sizes:
    """The layer of a module that counts by sizes of its arguments."""

    module: nn.Module
    counted: tuple[Counted, ...]

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `inner`, in which the module reads its own sizes."""
        given = dict(arguments(self.module, args, kwargs))
        own = [(given[c.name], c.dim, c.parts) for c in self.counted if c.name in given]
        with _Reading(self.module, own):
            return inner(*args, **kwargs)


def arguments(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call by the names that the module's forward gives them."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    for name, value in [*zip(names, args), *((k, v) for k, v in kwargs.items() if k in names)]:
        if isinstance(value, Tensor):
            yield name, value


class _Reading(TorchFunctionMode):
    """The mode in which one module's own code reads some sizes of some tensors as its part."""

    def __init__(self, module: nn.Module, own: Sequence[tuple[Tensor, int, int]]) -> None:
        super().__init__()
        self.module, self.own = module, own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The call; of a size that the module reads, its part."""
        if func is not Tensor.size and func != SHAPE:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        parts = {dim % tensor.ndim: n for held, dim, n in self.own if held is tensor}
        if not parts or not _runs(self.module, sys._getframe(1)):
            return func(*args, **(kwargs or {}))
        sizes = [size // parts.get(dim, 1) for dim, size in enumerate(SHAPE(tensor))]
        at = (kwargs or {}).get("dim", args[1] if len(args) > 1 else None)
        return torch.Size(sizes) if at is None else sizes[at]


def _ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("schedlang.runtime.")


def _runs(module: nn.Module, frame: FrameType | None) -> bool:
    """Return whether a frame runs the module's own code: a method of it, or what stands inside of
    one; modes that lie above are none of it."""
    while frame is not None and (frame.f_code.co_name.startswith("<") or _ours(frame)):
        frame = frame.f_back
    names = frame.f_code.co_varnames[:1] if frame is not None else ()
    return bool(names) and frame is not None and frame.f_locals.get(names[0]) is module
