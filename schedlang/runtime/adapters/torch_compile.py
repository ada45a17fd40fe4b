"""torch.compile: a rule of dynamo that is mended, its checks of one call, backwards in two parts.

* Losses that are modules. torch.compile's rule for `nn.CrossEntropyLoss()` writes the call into
  the graph as one of tensors, and fails on a stand-in; the function asks its arguments, as it
  does outside of a graph.
* What a graph recomputes.
* Backwards in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

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
