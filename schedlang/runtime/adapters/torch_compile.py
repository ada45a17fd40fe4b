"""Patches of torch.compile: a fixed rule of dynamo, recomputed side effects, two-part backwards.

* Losses that are modules. dynamo's rule for `nn.CrossEntropyLoss()` puts a call on tensors into the
  graph, and fails on lazy logits; the function itself dispatches on its arguments, as it does
  outside of a graph.
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

_EARLY = torch.__version__ < "2.12"  # 2.11 is the only such version that can be installed
_done: list[bool] = []


def patch_loss_modules() -> bool:
    """Let dynamo's rule call the function if the logits are no tensor; patched once, while it
    traces.

    Returns whether it was patched: a torch version without this rule is not changed.
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


# as torch.compiler.assume_constant_result does, which would import all of the compiler
patch_loss_modules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run_side_effects_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a recomputed part of a graph; its Python side effects happen once.

    dynamo refuses code there that changes outer state, because in eager mode the change would
    happen twice: the arrived inputs of a block, the dtype of a region. These changes are undone
    before the part ends.
    """
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as run

    return run(function, *args, **kwargs)


def compile_one_graph(function: Callable[..., Any], limit: int, backend: Any) -> Callable[..., Any]:
    """Compile a function as one graph per kind of call, with at most `limit` graphs."""
    limits: dict[str, Any] = {} if _EARLY else {"recompile_limit": limit}
    compiled: Callable[..., Any] = torch.compile(
        function, fullgraph=True, backend=backend, **limits
    )
    if not _EARLY:
        return compiled

    def limited(*args: Any, **kwargs: Any) -> Any:  # torch 2.11 has one limit for all functions
        from torch._dynamo import config

        with config.patch(recompile_limit=limit):
            return compiled(*args, **kwargs)

    return limited


T = TypeVar("T", bound=Callable[..., Any])


def returns_new_tensor(collective: T) -> T:
    """Let a collective return another tensor than the one that it fills, in a graph of torch 2.11.

    There the gradient of an autograd function that returns a tensor written in place is zero.
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
    """Let backwards compiled from now on be run in two parts, in this process, permanently.

    torch lets a compiled backward overwrite tensors saved by its forward, which the second part
    needs; it refuses two parts of such a graph. The keys of its caches do not include this, so the
    key's tag is changed; this also holds for backwards that are compiled at their first run.
    """
    if not _kept:
        _kept.append(True)
        torch.compiler.config.cache_key_tag += " buffers kept"


def keeps_buffers() -> bool:
    """Return whether `keep_buffers` was called in this process."""
    return bool(_kept)


@contextmanager
def compile_keeping_buffers() -> Iterator[None]:
    """Compile graphs within the block whose backward, after `keep_buffers`, overwrites no saved
    tensor.

    functorch's own setting, `donated_buffer`, does not do this: disabled while a graph is compiled,
    two parts are still refused; disabled at run time, overwriting graphs are not refused.
    """
    if not _kept:
        yield
        return
    from torch._functorch._aot_autograd import graph_compile

    original = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *args, **kwargs: []
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = original
