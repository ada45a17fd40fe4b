"""torch.compile: a rule of dynamo that is mended, its checks of one call, backwards in two parts.

* Losses that are modules. torch.compile's rule for `nn.CrossEntropyLoss()` writes the call into
  the graph as one of tensors, and fails on a stand-in; the function asks its arguments, as it
  does outside of a graph.
* What a graph recomputes; how many graphs one function may have.
* Gradients of collectives, in graphs of torch 2.11.
* Backwards in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.nn import functional as F

_EARLY = torch.__version__ < "2.12"  # of those that may be installed, 2.11
_done: list[bool] = []


def follow_losses() -> bool:
    """Let dynamo's rule call the function where the logits are no tensor; while it traces, once.

    Whether it could be done: a torch that makes such losses in another way is left alone.
    """
    if not _done:
        _done.append(_patched())
    return _done[0]


def _patched() -> bool:
    from torch._dynamo.utils import has_torch_function
    from torch._dynamo.variables import LambdaVariable, UserDefinedClassVariable
    from torch._dynamo.variables.base import VariableTracker

    owner: Any = UserDefinedClassVariable
    original = getattr(owner, "_call_cross_entropy_loss", None)
    if original is None:
        return False

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        usual = original(self, tx, args, kwargs)

        def loss(input: Any, target: Any) -> Any:
            if not has_torch_function(input):
                return usual.call_function(tx, [input, target], {})
            function = VariableTracker.build(tx, F.cross_entropy)
            return function.call_function(tx, [input, target, *args], kwargs)

        return LambdaVariable(loss)

    owner._call_cross_entropy_loss = called
    return True


# torch.compiler.assume_constant_result, which would import all of the compiler
follow_losses._dynamo_marked_constant = True  # type: ignore[attr-defined]


def once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a part of a graph that is recomputed; Python that it runs, runs once.

    dynamo refuses code there that changes what is outside, for eagerly it would do so twice: what
    arrived at a block, the dtype of a region.  These are changed back before the part ends.
    """
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as run

    return run(function, *args, **kwargs)


def compiled(function: Callable[..., Any], limit: int, backend: Any) -> Callable[..., Any]:
    """Compile a function as one graph for each kind of call, and at most so many graphs."""
    own: dict[str, Any] = {} if _EARLY else {"recompile_limit": limit}
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend, **own)
    if not _EARLY:
        return made

    def limited(*args: Any, **kwargs: Any) -> Any:  # there is one limit, for all
        from torch._dynamo import config

        with config.patch(recompile_limit=limit):
            return made(*args, **kwargs)

    return limited


T = TypeVar("T", bound=Callable[..., Any])


def fresh(collective: T) -> T:
    """Let a collective give another tensor than the one that it fills, in a graph of torch 2.11.

    There the gradient of a function of autograd that returns what it wrote in place is zero.
    """
    if not _EARLY:
        return collective

    @wraps(collective)
    def cloned(*args: Any, **kwargs: Any) -> Any:
        out = collective(*args, **kwargs)
        return out.clone() if torch.compiler.is_compiling() else out

    return cast(T, cloned)


_kept: list[bool] = []


def keep_buffers() -> None:
    """Let backwards of what is compiled from now on be run in two parts, in this process, for good.

    torch lets a compiled backward overwrite what its forward saved, which the second part needs;
    it refuses two parts of such a graph.  Keys of its caches do not say whether a graph does so:
    they are told apart from now on, also for backwards that are compiled when they are first run.
    """
    if not _kept:
        _kept.append(True)
        torch.compiler.config.cache_key_tag += " buffers kept"


def keeps_buffers() -> bool:
    """Return whether `keep_buffers` was called in this process."""
    return bool(_kept)


@contextmanager
def keeping() -> Iterator[None]:
    """Compile graphs inside: once `keep_buffers` was called, the backward of none overwrites what
    its forward saved.

    functorch's own setting, `donated_buffer`, is not it: turned off while a graph is compiled, two
    parts of it are still refused; turned off when they run, graphs that overwrite are not.
    """
    if not _kept:
        yield
        return
    from torch._functorch._aot_autograd import graph_compile

    plain = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *given, **named: []
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = plain
