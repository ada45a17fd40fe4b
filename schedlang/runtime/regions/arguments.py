"""The arguments of a call by their names: a function with the parameters of another gives them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def arguments_of(forward: Any) -> Callable[..., dict[str, Any]]:
    """A function that is called as `forward` is, and gives its arguments by name, `self` left out.

    Defaults are filled in, as `inspect.BoundArguments.apply_defaults` does.  Python binds them
    here: sooner than inspect, and torch.compile can follow it.  Raises TypeError as `forward`
    would.
    """
    parameters = list(inspect.signature(forward).parameters.values())
    found = ", ".join(f"{p.name!r}: {p.name}" for p in parameters[1:])
    space: dict[str, Any] = {}
    exec(f"def named({_written(parameters)}): return {{{found}}}", space)
    made: Any = space["named"]
    usual = [p for p in parameters if p.default is not p.empty]
    made.__defaults__ = tuple(p.default for p in usual if p.kind != p.KEYWORD_ONLY) or None
    made.__kwdefaults__ = {p.name: p.default for p in usual if p.kind == p.KEYWORD_ONLY} or None
    made.__name__ = made.__qualname__ = getattr(forward, "__qualname__", "forward")
    bound: Callable[..., dict[str, Any]] = made
    return bound


def _written(parameters: list[inspect.Parameter]) -> str:
    """The parameters as text, each default a None that is replaced afterwards."""
    bare = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in parameters
    ]
    return str(inspect.Signature(bare))[1:-1]
