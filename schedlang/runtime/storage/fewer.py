"""Whether a coded module runs in this thread: how it keeps tensors, and which it leaves out.

For those who keep tensors beside what autograd saves, or have some that no other process has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

Keep = Callable[[Tensor], Any]  # a tensor to what is kept in its place


class _Here(threading.local):
    keep: Keep | None = None
    uncoded = False
    summed = False


_here = _Here()


def keeper() -> Keep | None:
    """How a coded module around what runs keeps a tensor; None where there is none."""
    return _here.keep


@contextmanager
def keeping(keep: Keep) -> Iterator[None]:
    """Let what is kept beside what autograd saves be kept in this way, too."""
    before, _here.keep = _here.keep, keep
    try:
        yield
    finally:
        _here.keep = before


@contextmanager
def uncoded() -> Iterator[None]:
    """Inside, what coded modules save is kept as it is, and not counted."""
    before, _here.uncoded = _here.uncoded, True
    try:
        yield
    finally:
        _here.uncoded = before


def is_uncoded() -> bool:
    """Whether what is saved now is kept as it is."""
    return _here.uncoded


@contextmanager
def summing() -> Iterator[None]:
    """Inside, results are parts of sums over ranks, and not those of one process: a recomputation
    that spares them keeps them as they are."""
    before, _here.summed = _here.summed, True
    try:
        yield
    finally:
        _here.summed = before


def is_summed() -> bool:
    """Whether what is computed now is a part of a sum."""
    return _here.summed


def put_inside(
    around: Callable[[], AbstractContextManager[None]], model: nn.Module, modules: Iterable[str]
) -> None:
    """Let some modules of a throwaway copy run inside of `uncoded`, or of `summing`."""
    for fqn in modules:
        module = model.get_submodule(fqn)
        module.forward = partial(_inside, around, module.forward)


def _inside(
    around: Callable[[], AbstractContextManager[None]], inner: Callable[..., Any],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    with around():
        return inner(*args, **kwargs)
