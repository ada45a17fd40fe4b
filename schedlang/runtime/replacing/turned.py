"""Rotary embeddings by one kernel, at work in the attention of chosen modules only.

A module runs its own forward with another function under the name of the one that turns: the file,
and all other modules, are left as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.kernels.rope import Form, rope
from schedlang.runtime.left import leave
from schedlang.runtime.replacing.rebound import decorated, other_names
from schedlang.runtime.replacing.rope import Rotary, Rotation


class Turning:
    """The layer that runs a module's own forward with the kernel in place of its functions."""

    kernel = "rope"

    def __init__(self, module: nn.Module, found: Rotary) -> None:
        self.__setstate__({"module": module, "found": found})

    def __getstate__(self) -> dict[str, Any]:
        """Copies make a forward of their own: it notes what is left at the copied module."""
        return {"module": self.module, "found": self.found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self.found = state["module"], state["found"]
        forward: Any = type(self.module).forward
        space = inspect.unwrap(forward).__globals__
        turning = {
            each.name: _turning(space[each.name], each, self.module)
            for each in self.found.rotations
        }
        self.forward = decorated(forward, partial(other_names, named=turning))

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's class's forward; `inner`, which is the same, is not called."""
        return self.forward(self.module, *args, **kwargs)


def _turning(original: Any, found: Rotation, module: nn.Module) -> Callable[..., Any]:
    """The kernel under the signature of the function; that function for what it does not take."""
    needed = len(found.order)
    usual = dict(zip(found.names[needed:], found.defaults))

    def turn(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(found.names, args))
        given.update(kwargs)
        more = {name: value for name, value in given.items() if name not in found.names[:needed]}
        second = found.second and more.pop("unsqueeze_dim", None) == 2
        foreign = [n for n, value in more.items() if n not in usual or value is not usual[n]]
        tensors: Any = {what: given.get(name) for what, name in zip(found.order, found.names)}
        form = replace(found.form, heads=2) if second else found.form
        flat = found.flat and getattr(tensors["q"], "ndim", 0) == 3
        if flat:
            tensors = {n: t[None] if isinstance(t, Tensor) else t for n, t in tensors.items()}
        why = f"it does not support the argument `{foreign[0]}`" if foreign else ""
        why = why or _unfit(found, form, **tensors)
        if why:
            leave(module, "rope", why, **tensors)
            return original(*args, **kwargs)
        width = tensors["cos"].shape[2] * (1 + found.doubled)
        made = rope(tensors["q"], tensors.get("k"), tensors["cos"], tensors["sin"], width, form)
        if not flat:
            return made
        return tuple(y[0] for y in made) if isinstance(made, tuple) else made[0]

    return turn


def _unfit(
    found: Rotation, form: Form, q: Any = None, k: Any = None, cos: Any = None, sin: Any = None
) -> str:
    """Why the kernel does not take these tensors; empty where it does (S871: where it cannot)."""
    lines, tables = (q,) if "k" not in found.order else (q, k), (cos, sin)
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in lines):
        return "it takes queries and keys of shape [rows, heads, tokens, head_dim]"
    if not all(isinstance(t, Tensor) and t.dim() == 3 for t in tables):
        return "it takes cosines and sines of shape [rows or 1, tokens, angles]"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tables):
        raise _learned(found.name)
    rows, tokens, size = q.shape[0], q.shape[3 - form.heads], q.shape[3]
    # sizes may be symbols here, which torch.compile compares rightly only one by one
    if not all(x.shape[0] == rows and x.shape[3 - form.heads] == tokens and x.shape[3] == size
               and x.dtype == q.dtype for x in lines):  # fmt: skip
        return "queries and keys must have the same dtype, rows, tokens and head_dim"
    alike = all(a == b for a, b in zip(cos.shape, sin.shape))
    if not alike or not (cos.shape[0] == 1 or cos.shape[0] == rows) or cos.shape[1] != tokens:
        return "cosines and sines must have the same shape, with all tokens"
    width = cos.shape[2] * (1 + found.doubled)
    if width != size and not (found.partial and width < size and width % 2 == 0):
        return "the number of angles differs from that at build"
    return ""


def _learned(name: str) -> Refusal:
    return Refusal(
        Diagnostic(
            "S871",
            f"the angles of `{name}` need a gradient",
            notes=("the kernel `rope` takes the angles as constants, and returns no gradient",),
            helps=("leave this attention as it is",),
        )
    )
