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
def _with(name: str, value: Any) -> Iterator[None]:
    """Inside, what is known of this thread is this."""
    before = getattr(_here, name)
    setattr(_here, name, value)
    try:
        yield
    finally:
        setattr(_here, name, before)


def keeping(keep: Keep) -> AbstractContextManager[None]:
    """Let what is kept beside what autograd saves be kept in this way, too."""
    return _with("keep", keep)


def uncoded() -> AbstractContextManager[None]:
    """Inside, what coded modules save is kept as it is, and not counted."""
    return _with("uncoded", True)


def is_uncoded() -> bool:
    """Whether what is saved now is kept as it is."""
    return _here.uncoded


def summing() -> AbstractContextManager[None]:
    """Inside, results are parts of sums over ranks, and not those of one process: a recomputation
    that spares them keeps them as they are."""
    return _with("summed", True)


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
    around: Callable[[], AbstractContextManager[None]],
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with around():
        return inner(*args, **kwargs)
