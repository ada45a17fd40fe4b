"""Rotary embeddings by one kernel: find the functions that turn queries and keys; replace them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.probe import TOLERANCE, Mismatch, relative
from schedlang.kernels.rope import Case, Form, reference, rope
from schedlang.runtime.float64 import Float64
from schedlang.runtime.forward import decorated, other_names
from schedlang.runtime.left import leave
from schedlang.runtime.modes import ambient

# -- the probe -------------------------------------------------------------------------------------
# A module's forward calls a function of its own file that turns queries and keys.  Which function
# that is, and how it turns, is found by running the functions that the forward names; `_turning`
# lets the kernel take its place.


_SIZE, _TOKENS, _HEADS = 8, 5, (4, 3)
_ORDERS = {4: (("q", "k", "cos", "sin"),), 3: (("q", "cos", "sin"), ("q", "sin", "cos"))}


@dataclass(frozen=True)
class Rotation:
    """One function that turns: its name, what its arguments are, and how it turns.

    `doubled`: there are half as many angles as numbers are turned.  `partial`: fewer numbers may be
    turned than a head has.  `names` are its parameters, with the values of those it need not be
    given; `second`: with `unsqueeze_dim=2` heads are the dim before the last; `flat`: tensors
    without rows, [tokens, heads, size], are turned alike.
    """

    name: str
    order: tuple[str, ...]
    form: Form
    doubled: bool
    partial: bool
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    second: bool = False
    flat: bool = False


@dataclass(frozen=True)
class Rotary:
    """The functions of a module's forward that turn queries and keys."""

    rotations: tuple[Rotation, ...]

    def cases(self) -> list[Case]:
        """Runs of the kernel in the forms that were found."""
        forms = dict.fromkeys(each.form for each in self.rotations)
        return [
            Case((2, 5, 3, 2, 16), dtype, 8 if index else 0, form)
            for form in forms
            for index, dtype in enumerate(("float32", "bfloat16"))
        ]


def probe_rope(module: nn.Module) -> Rotary | Mismatch:
    """The functions that turn, of those that a module's forward names; or why there are none."""
    if "forward" in vars(module):
        return Mismatch("has a replaced forward already")
    tried = [_judged(name, function) for name, function in _functions(type(module).forward)]
    found = tuple(each for each in tried if isinstance(each, Rotation))
    if found:
        return Rotary(found)
    missed = [each for each in tried if isinstance(each, Mismatch)]
    nearest = min(
        missed, key=lambda each: each.error if each.error is not None else torch.inf, default=None
    )
    return nearest or Mismatch(
        "calls no function of its file with queries, keys, cosines and sines"
    )


def _functions(forward: Any) -> Iterator[tuple[str, Any]]:
    """Functions of the file that a forward names."""
    inner = inspect.unwrap(forward)
    for name in dict.fromkeys(_named(inner.__code__)):
        value = inner.__globals__.get(name)
        if callable(value) and not isinstance(value, type | nn.Module):
            yield name, value


def _named(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _named(const)


def _judged(name: str, function: Any) -> Rotation | Mismatch | None:
    """Find how a function rotates; None if it does not take tensors like these at all."""
    try:
        params = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # no signature: not written in Python
        return None
    places = [p for p in params if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = sum(p.default is p.empty for p in places)
    if needed not in _ORDERS or any(
        p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in params
    ):
        return None
    names = tuple(p.name for p in places)
    defaults = tuple(p.default for p in places[needed:])
    with torch.random.fork_rng(devices=[]), ambient(Float64):
        ran = [
            (order, heads, runs)
            for order in _ORDERS[needed]
            for heads in (1, 2)
            if (runs := _runs(function, order, heads))
        ]
        tried = [each for order, heads, runs in ran for each in _forms(name, order, heads, runs)]
    if not tried:
        return None
    error, best = min(tried, key=lambda pair: pair[0])
    if not error <= TOLERANCE:
        return Mismatch(f"calls `{name}`, which does not compute this rotation", error)
    return _finished(function, replace(best, names=names, defaults=defaults))


@dataclass(frozen=True)
class _Run:
    """One run of a function: its arguments and its results."""

    given: Mapping[str, Tensor]
    made: tuple[Tensor, ...]


def _drawn(heads: int, angles: int, kind: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(angles)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(kind)

    shapes = [(2, n, _TOKENS, _SIZE) if heads == 1 else (2, _TOKENS, n, _SIZE) for n in _HEADS]
    tables = {name: normal(2, _TOKENS, angles) for name in ("cos", "sin")}
    return {name: normal(*shape) for name, shape in zip(("q", "k"), shapes)} | tables


def _called(function: Any, order: tuple[str, ...], given: Mapping[str, Tensor], **more: Any) -> Any:
    made = function(*(given[name] for name in order), **more)
    made = made if isinstance(made, tuple | list) else (made,)
    wanted = [given[name].shape for name in order if name in ("q", "k")]
    if [getattr(y, "shape", None) for y in made] != wanted:
        raise ValueError("other shapes")
    return tuple(made)


def _runs(function: Any, order: tuple[str, ...], heads: int, **more: Any) -> list[_Run]:
    """Run with as many angles as numbers, and with half as many; leave out what does not run."""
    found = []
    for angles in (_SIZE, _SIZE // 2):
        given = _drawn(heads, angles)
        try:
            found.append(_Run(given, _called(function, order, given, **more)))
        except Exception:  # it does not take tensors like these: other runs will tell
            continue
    return found


def _forms(
    name: str, order: tuple[str, ...], heads: int, runs: list[_Run]
) -> Iterator[tuple[float, Rotation]]:
    """Every form of the kernel, with its distance from what a function gave."""
    for pairs, paired in ((False, False), (True, True), (True, False)):
        for own, doubled in ((True, False), (False, False), (False, True)):
            form = Form(pairs, paired, own, heads)
            widths = [run.given["cos"].shape[-1] * (1 + doubled) for run in runs]
            if max(widths) > _SIZE:
                continue
            error = max(_distance(run, order, width, form) for run, width in zip(runs, widths))
            yield error, Rotation(name, order, form, doubled, min(widths) < _SIZE, (), ())


def _expected(given: Mapping[str, Tensor], order: tuple[str, ...], width: int, form: Form) -> Any:
    turned = [name for name in order if name in ("q", "k")]
    return [reference(given[n], given["cos"], given["sin"], width, form) for n in turned]


def _distance(run: _Run, order: tuple[str, ...], width: int, form: Form) -> float:
    expected = _expected(run.given, order, width, form)
    return max(relative(y, right) for y, right in zip(run.made, expected, strict=True))


def _finished(function: Any, found: Rotation) -> Rotation | Mismatch:
    """Return the rotation with its gradients judged, and where it rounds; else a Mismatch."""
    angles = _SIZE // (1 + found.doubled)
    try:
        error = _gradient_distance(function, found, angles)
        if not error <= TOLERANCE:
            return Mismatch(
                f"calls `{found.name}`, whose gradients differ from a rotation's", error
            )
        second, flat = _has_second(function, found), _is_flat(function, found, angles)
        found = replace(found, second=second, flat=flat)
        return _rounding(function, found, angles)
    except Exception as raised:  # the model's own code: whatever it raises is a mismatch
        return Mismatch.raised(f"calls `{found.name}`, which does not run", raised)


def _gradient_distance(function: Any, found: Rotation, angles: int) -> float:
    given = _drawn(found.form.heads, angles)
    leaves = [given[name].requires_grad_() for name in found.order if name in ("q", "k")]
    with ambient(Float64):
        made = _called(function, found.order, given)
    right = _expected(given, found.order, _SIZE, found.form)
    sides = []
    for results in (made, right):
        total = torch.stack([(y * y.detach().cos()).sum() for y in results]).sum()
        sides.append(torch.autograd.grad(total, leaves, allow_unused=True))
    return max(torch.inf if a is None else relative(a, b) for a, b in zip(*sides))


def _has_second(function: Any, found: Rotation) -> bool:
    """Tell whether `unsqueeze_dim=2` moves the dim of heads."""
    if "unsqueeze_dim" not in found.names or found.form.heads != 1:
        return False
    with ambient(Float64):
        runs = _runs(function, found.order, 2, unsqueeze_dim=2)
    form = replace(found.form, heads=2)
    widths = [run.given["cos"].shape[-1] * (1 + found.doubled) for run in runs]
    errors = [_distance(run, found.order, width, form) for run, width in zip(runs, widths)]
    return bool(errors) and max(errors) <= TOLERANCE


def _is_flat(function: Any, found: Rotation, angles: int) -> bool:
    """Tell whether tensors without a dim of rows are rotated as those of one row."""
    given = _drawn(found.form.heads, angles)
    alone = {name: tensor[0] for name, tensor in given.items()}
    right = _expected(given, found.order, _SIZE, found.form)
    try:
        with ambient(Float64):
            made = _called(function, found.order, alone)
    except Exception:  # it does not take them
        return False
    return max(relative(y, x[0]) for y, x in zip(made, right)) <= TOLERANCE


def _rounding(function: Any, found: Rotation, angles: int) -> Rotation | Mismatch:
    """The form that equals the function bit by bit in bfloat16, angles in it and in float32."""
    low, wide = (_drawn(found.form.heads, angles, torch.bfloat16) for _ in range(2))
    wide |= {name: wide[name].float() for name in ("cos", "sin")}
    made = [_called(function, found.order, given) for given in (low, wide)]
    keeps = made[1][0].dtype == torch.bfloat16
    shares = {}
    for early in (True, False):
        form = replace(found.form, early=early, keeps=keeps)
        pairs = [
            pair
            for ys, given in zip(made, (low, wide))
            for pair in zip(ys, _expected(given, found.order, _SIZE, form))
        ]
        same = [float((y == right).double().mean()) for y, right in pairs]
        kinds = all(y.dtype == right.dtype for y, right in pairs)
        shares[form] = min(same) if kinds else 0.0
    best = max(shares, key=lambda form: shares[form])
    if shares[best] < 0.99:
        return Mismatch(
            f"calls `{found.name}`, which rounds differently in bfloat16: at best "
            f"{shares[best]:.0%} of bits agree"
        )
    return replace(found, form=best)


# -- the layer -------------------------------------------------------------------------------------
# A module runs its own forward with another function under the name of the one that turns: the
# file, and all other modules, are left as they are.


class FusedRope:
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
    """Say why the kernel does not take these tensors; empty where it does; S871 where it cannot."""
    lines, tables = (q,) if "k" not in found.order else (q, k), (cos, sin)
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in lines):
        return "it takes queries and keys of shape [rows, heads, tokens, head_dim]"
    if not all(isinstance(t, Tensor) and t.dim() == 3 for t in tables):
        return "it takes cosines and sines of shape [rows or 1, tokens, angles]"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tables):
        raise _learned(found.name)
    rows, tokens, size = q.shape[0], q.shape[3 - form.heads], q.shape[3]
    # sizes may be symbols here, which torch.compile compares rightly only one by one
    if not all(
        x.shape[0] == rows
        and x.shape[3 - form.heads] == tokens
        and x.shape[3] == size
        and x.dtype == q.dtype
        for x in lines
    ):
        return "queries and keys must have the same dtype, rows, tokens and head_dim"
    alike = all(a == b for a, b in zip(cos.shape, sin.shape))
    if not alike or not (cos.shape[0] == 1 or cos.shape[0] == rows) or cos.shape[1] != tokens:
        return "cosines and sines must have the same shape, with all tokens"
    width = cos.shape[2] * (1 + found.doubled)
    if width != size and not (found.partial and width < size and width % 2 == 0):
        return "the number of angles differs from that at build"
    return ""


def _learned(name: str) -> Refusal:
    return Refusal.of(
        "S871",
        f"the angles of `{name}` need a gradient",
        notes=("the kernel `rope` takes the angles as constants, and returns no gradient",),
        helps=("leave this attention as it is",),
    )
