"""Patch of torch.utils.checkpoint, which models call themselves: where their recomputation runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from torch.utils import checkpoint

Function = Callable[..., Any]
Context = AbstractContextManager[None]


class _Forward(threading.local):
    saves_all = False
    reentrant: Exception | None = None


_forward = _Forward()


@contextmanager
def without_checkpoints(reentrant: Exception) -> Iterator[None]:
    """Let checkpoints save what they would recompute, in this thread; raise at a reentrant one.

    For forwards that meet those of other threads at collectives: their backward is one call.
    """
    before = _forward.saves_all, _forward.reentrant
    _forward.saves_all, _forward.reentrant = True, reentrant
    try:
        yield
    finally:
        _forward.saves_all, _forward.reentrant = before


def recompute_within(capture: Callable[[], Callable[[], Context] | None]) -> None:
    """Let torch recompute each checkpoint within the context of its forward, from now on.

    `capture` is called in forward, and what it returns makes that context; None: there is none.
    Both forms, with `use_reentrant` and without.
    """
    module: Any = checkpoint
    generate = module._checkpoint_without_reentrant_generator
    run = module.CheckpointFunction.forward

    @wraps(generate)
    def generate_within(fn: Function, *args: Any, **kwargs: Any) -> Any:
        if _forward.saves_all:
            return _nothing()
        return generate(_within(fn, capture), *args, **kwargs)

    @wraps(run)
    def run_within(ctx: Any, run_function: Function, *args: Any) -> Any:
        if _forward.reentrant is not None:
            raise _forward.reentrant
        again = _within(run_function, capture)
        output = run(ctx, run_function, *args)
        ctx.run_function = again
        return output

    module._checkpoint_without_reentrant_generator = generate_within
    module.CheckpointFunction.forward = staticmethod(run_within)


def _nothing() -> Iterator[None]:
    """Return what torch runs around a forward, once before it and once behind."""
    yield


def _within(function: Function, capture: Callable[[], Any]) -> Function:
    """Return what the recomputation calls."""
    if (context := capture()) is None:
        return function

    def again(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return again
