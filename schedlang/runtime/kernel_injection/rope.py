"""Rotary embeddings by one kernel (`replace_kernel(rope)`): the probe and the layer."""

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
from schedlang.kernels.probe import TOLERANCE, Mismatch, relative_error
from schedlang.kernels.rope import Case, Form, reference, rotate
from schedlang.runtime.declined_calls import note_declined
from schedlang.runtime.float64 import Float64
from schedlang.runtime.forward import change_innermost, with_globals
from schedlang.runtime.modes import enter_modes

# -- the probe -------------------------------------------------------------------------------------
# A module's forward calls a function of its own file that rotates queries and keys. The probe runs
# the functions that the forward names, to find this function and its form of rotation;
# `_rotate_by_kernel` replaces it by the kernel.


_SIZE, _TOKENS, _HEADS = 8, 5, (4, 3)
_ORDERS = {4: (("q", "k", "cos", "sin"),), 3: (("q", "cos", "sin"), ("q", "sin", "cos"))}


@dataclass(frozen=True)
class Rotation:
    """One function that rotates: its name, its arguments, and its form of rotation.

    order     the arguments that it needs, in order
    doubled   there are half as many angles as rotated numbers
    partial   it can rotate fewer numbers than a head has
    names     its parameters
    defaults  the default values of the parameters after the needed ones
    second    with `unsqueeze_dim=2`, heads are the dim before the last
    flat      it also rotates tensors without rows: [tokens, heads, size]
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
class RotaryForm:
    """The functions of a module's forward that rotate queries and keys."""

    rotations: tuple[Rotation, ...]

    def cases(self) -> list[Case]:
        """Return test cases of the kernel in these forms."""
        forms = dict.fromkeys(rotation.form for rotation in self.rotations)
        return [
            Case((2, 5, 3, 2, 16), dtype, 8 if index else 0, form)
            for form in forms
            for index, dtype in enumerate(("float32", "bfloat16"))
        ]


def probe_rope(module: nn.Module) -> RotaryForm | Mismatch:
    """Return the rotating functions that a module's forward names, or why there are none."""
    if "forward" in vars(module):
        return Mismatch("has a replaced forward already")
    results = [
        _probe_function(name, function) for name, function in _functions(type(module).forward)
    ]
    rotations = tuple(result for result in results if isinstance(result, Rotation))
    if rotations:
        return RotaryForm(rotations)
    missed = [result for result in results if isinstance(result, Mismatch)]
    nearest = min(
        missed,
        key=lambda result: result.error if result.error is not None else torch.inf,
        default=None,
    )
    return nearest or Mismatch(
        "calls no function of its file with queries, keys, cosines and sines"
    )


def _functions(forward: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of the file that a forward names."""
    inner = inspect.unwrap(forward)
    for name in dict.fromkeys(_names_in(inner.__code__)):
        value = inner.__globals__.get(name)
        if callable(value) and not isinstance(value, type | nn.Module):
            yield name, value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)


def _probe_function(name: str, function: Any) -> Rotation | Mismatch | None:
    """Return how a function rotates; None if it does not accept such tensors at all."""
    try:
        params = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # no signature: not written in Python
        return None
    positional = [p for p in params if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = sum(p.default is p.empty for p in positional)
    if needed not in _ORDERS or any(
        p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in params
    ):
        return None
    names = tuple(p.name for p in positional)
    defaults = tuple(p.default for p in positional[needed:])
    with torch.random.fork_rng(devices=[]), enter_modes(Float64):
        order_runs = [
            (order, heads, runs)
            for order in _ORDERS[needed]
            for heads in (1, 2)
            if (runs := _try_runs(function, order, heads))
        ]
        trials = [t for order, heads, runs in order_runs for t in _forms(name, order, heads, runs)]
    if not trials:
        return None
    error, best = min(trials, key=lambda pair: pair[0])
    if not error <= TOLERANCE:
        return Mismatch(f"calls `{name}`, which does not compute this rotation", error)
    return _complete(function, replace(best, names=names, defaults=defaults))


@dataclass(frozen=True)
class _Run:
    """One run of a function: its arguments and its results."""

    given: Mapping[str, Tensor]
    made: tuple[Tensor, ...]


def _random_inputs(heads: int, angles: int, kind: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(angles)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(kind)

    shapes = [(2, n, _TOKENS, _SIZE) if heads == 1 else (2, _TOKENS, n, _SIZE) for n in _HEADS]
    tables = {name: normal(2, _TOKENS, angles) for name in ("cos", "sin")}
    return {name: normal(*shape) for name, shape in zip(("q", "k"), shapes)} | tables


def _call(
    function: Any, order: tuple[str, ...], inputs: Mapping[str, Tensor], **kwargs: Any
) -> Any:
    results = function(*(inputs[name] for name in order), **kwargs)
    results = results if isinstance(results, tuple | list) else (results,)
    expected_shapes = [inputs[name].shape for name in order if name in ("q", "k")]
    if [getattr(y, "shape", None) for y in results] != expected_shapes:
        raise ValueError("other shapes")
    return tuple(results)


def _try_runs(function: Any, order: tuple[str, ...], heads: int, **kwargs: Any) -> list[_Run]:
    """Run with as many angles as numbers, and with half as many; skip runs that raise."""
    runs = []
    for angles in (_SIZE, _SIZE // 2):
        inputs = _random_inputs(heads, angles)
        try:
            runs.append(_Run(inputs, _call(function, order, inputs, **kwargs)))
        except Exception:  # it does not accept such tensors; the other run decides
            continue
    return runs


def _forms(
    name: str, order: tuple[str, ...], heads: int, runs: list[_Run]
) -> Iterator[tuple[float, Rotation]]:
    """Yield every form of the kernel, with its distance from the function's results."""
    for pairs, paired in ((False, False), (True, True), (True, False)):
        for own_form, doubled in ((True, False), (False, False), (False, True)):
            form = Form(pairs, paired, own_form, heads)
            widths = [run.given["cos"].shape[-1] * (1 + doubled) for run in runs]
            if max(widths) > _SIZE:
                continue
            error = max(_distance(run, order, width, form) for run, width in zip(runs, widths))
            yield error, Rotation(name, order, form, doubled, min(widths) < _SIZE, (), ())


def _expected(inputs: Mapping[str, Tensor], order: tuple[str, ...], width: int, form: Form) -> Any:
    rotated_names = [name for name in order if name in ("q", "k")]
    return [reference(inputs[n], inputs["cos"], inputs["sin"], width, form) for n in rotated_names]


def _distance(run: _Run, order: tuple[str, ...], width: int, form: Form) -> float:
    expected = _expected(run.given, order, width, form)
    return max(relative_error(y, exact) for y, exact in zip(run.made, expected, strict=True))


def _complete(function: Any, rotation: Rotation) -> Rotation | Mismatch:
    """Return the rotation with its gradients checked and its rounding determined, else a
    Mismatch."""
    angles = _SIZE // (1 + rotation.doubled)
    try:
        error = _gradient_distance(function, rotation, angles)
        if not error <= TOLERANCE:
            return Mismatch(
                f"calls `{rotation.name}`, whose gradients differ from a rotation's", error
            )
        second, flat = _has_second(function, rotation), _is_flat(function, rotation, angles)
        rotation = replace(rotation, second=second, flat=flat)
        return _rounding(function, rotation, angles)
    except Exception as raised:  # the model's own code: whatever it raises is a mismatch
        return Mismatch.raised(f"calls `{rotation.name}`, which does not run", raised)


def _gradient_distance(function: Any, rotation: Rotation, angles: int) -> float:
    inputs = _random_inputs(rotation.form.heads, angles)
    leaves = [inputs[name].requires_grad_() for name in rotation.order if name in ("q", "k")]
    with enter_modes(Float64):
        actual = _call(function, rotation.order, inputs)
    expected = _expected(inputs, rotation.order, _SIZE, rotation.form)
    sides = []
    for results in (actual, expected):
        total = torch.stack([(y * y.detach().cos()).sum() for y in results]).sum()
        sides.append(torch.autograd.grad(total, leaves, allow_unused=True))
    return max(torch.inf if a is None else relative_error(a, b) for a, b in zip(*sides))


def _has_second(function: Any, rotation: Rotation) -> bool:
    """Return whether `unsqueeze_dim=2` moves the dim of heads."""
    if "unsqueeze_dim" not in rotation.names or rotation.form.heads != 1:
        return False
    with enter_modes(Float64):
        runs = _try_runs(function, rotation.order, 2, unsqueeze_dim=2)
    form = replace(rotation.form, heads=2)
    widths = [run.given["cos"].shape[-1] * (1 + rotation.doubled) for run in runs]
    errors = [_distance(run, rotation.order, width, form) for run, width in zip(runs, widths)]
    return bool(errors) and max(errors) <= TOLERANCE


def _is_flat(function: Any, rotation: Rotation, angles: int) -> bool:
    """Return whether tensors without rows are rotated like those of one row."""
    inputs = _random_inputs(rotation.form.heads, angles)
    unbatched = {name: tensor[0] for name, tensor in inputs.items()}
    expected = _expected(inputs, rotation.order, _SIZE, rotation.form)
    try:
        with enter_modes(Float64):
            actual = _call(function, rotation.order, unbatched)
    except Exception:  # it rejects them
        return False
    return max(relative_error(y, x[0]) for y, x in zip(actual, expected)) <= TOLERANCE


def _rounding(function: Any, rotation: Rotation, angles: int) -> Rotation | Mismatch:
    """Return the rotation with the form that equals the function bit by bit in bfloat16.

    Angles are tried in bfloat16 and in float32.
    """
    low_inputs, float32_angles = (
        _random_inputs(rotation.form.heads, angles, torch.bfloat16) for _ in range(2)
    )
    float32_angles |= {name: float32_angles[name].float() for name in ("cos", "sin")}
    actual = [_call(function, rotation.order, inputs) for inputs in (low_inputs, float32_angles)]
    keeps_dtype = actual[1][0].dtype == torch.bfloat16
    shares = {}
    for rounds_early in (True, False):
        form = replace(rotation.form, early=rounds_early, keeps=keeps_dtype)
        pairs = [
            pair
            for ys, inputs in zip(actual, (low_inputs, float32_angles))
            for pair in zip(ys, _expected(inputs, rotation.order, _SIZE, form))
        ]
        equal_shares = [float((y == expected).double().mean()) for y, expected in pairs]
        same_dtypes = all(y.dtype == expected.dtype for y, expected in pairs)
        shares[form] = min(equal_shares) if same_dtypes else 0.0
    best = max(shares, key=lambda form: shares[form])
    if shares[best] < 0.99:
        return Mismatch(
            f"calls `{rotation.name}`, which rounds differently in bfloat16: at best "
            f"{shares[best]:.0%} of bits agree"
        )
    return replace(rotation, form=best)


# -- the layer -------------------------------------------------------------------------------------
# A module runs its own forward, with another function under the name of the rotating function: the
# file and all other modules do not change.


class FusedRope:
    """The layer that runs a module's own forward with the kernel in place of its functions."""

    kernel = "rope"

    def __init__(self, module: nn.Module, rotary_form: RotaryForm) -> None:
        self.__setstate__({"module": module, "found": rotary_form})

    def __getstate__(self) -> dict[str, Any]:
        """Drop the changed forward: a copy makes its own, which records declined calls at the
        copy."""
        return {"module": self.module, "found": self.found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self.found = state["module"], state["found"]
        forward: Any = type(self.module).forward
        namespace = inspect.unwrap(forward).__globals__
        kernels = {
            rotation.name: _rotate_by_kernel(namespace[rotation.name], rotation, self.module)
            for rotation in self.found.rotations
        }
        self.forward = change_innermost(forward, partial(with_globals, named=kernels))

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the changed forward of the module's class; `inner` is not called."""
        return self.forward(self.module, *args, **kwargs)


def _rotate_by_kernel(original: Any, rotation: Rotation, module: nn.Module) -> Callable[..., Any]:
    """Return a function like `original` that runs the kernel, and `original` for declined calls."""
    needed = len(rotation.order)
    defaults = dict(zip(rotation.names[needed:], rotation.defaults))

    def turn(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(rotation.names, args))
        arguments.update(kwargs)
        extra = {
            name: value for name, value in arguments.items() if name not in rotation.names[:needed]
        }
        second = rotation.second and extra.pop("unsqueeze_dim", None) == 2
        foreign = [n for n, value in extra.items() if n not in defaults or value is not defaults[n]]
        tensors: Any = {
            role: arguments.get(name) for role, name in zip(rotation.order, rotation.names)
        }
        form = replace(rotation.form, heads=2) if second else rotation.form
        flat = rotation.flat and getattr(tensors["q"], "ndim", 0) == 3
        if flat:
            tensors = {n: t[None] if isinstance(t, Tensor) else t for n, t in tensors.items()}
        reason = f"it does not support the argument `{foreign[0]}`" if foreign else ""
        reason = reason or _decline_reason(rotation, form, **tensors)
        if reason:
            note_declined(module, "rope", reason, **tensors)
            return original(*args, **kwargs)
        width = tensors["cos"].shape[2] * (1 + rotation.doubled)
        result = rotate(tensors["q"], tensors.get("k"), tensors["cos"], tensors["sin"], width, form)
        if not flat:
            return result
        return tuple(y[0] for y in result) if isinstance(result, tuple) else result[0]

    return turn


def _decline_reason(
    rotation: Rotation, form: Form, q: Any = None, k: Any = None, cos: Any = None, sin: Any = None
) -> str:
    """Return why the kernel declines these tensors; "" if it accepts them.

    Raises Refusal S871 for angles that need a gradient.
    """
    queries_keys, tables = (q,) if "k" not in rotation.order else (q, k), (cos, sin)
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in queries_keys):
        return "it takes queries and keys of shape [rows, heads, tokens, head_dim]"
    if not all(isinstance(t, Tensor) and t.dim() == 3 for t in tables):
        return "it takes cosines and sines of shape [rows or 1, tokens, angles]"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tables):
        raise _gradient_refusal(rotation.name)
    rows, tokens, size = q.shape[0], q.shape[3 - form.heads], q.shape[3]
    # torch.compile may have symbolic sizes here, which it compares correctly only one by one
    if not all(
        x.shape[0] == rows
        and x.shape[3 - form.heads] == tokens
        and x.shape[3] == size
        and x.dtype == q.dtype
        for x in queries_keys
    ):
        return "queries and keys must have the same dtype, rows, tokens and head_dim"
    same_shape = all(a == b for a, b in zip(cos.shape, sin.shape))
    if not same_shape or not (cos.shape[0] == 1 or cos.shape[0] == rows) or cos.shape[1] != tokens:
        return "cosines and sines must have the same shape, with all tokens"
    width = cos.shape[2] * (1 + rotation.doubled)
    if width != size and not (rotation.partial and width < size and width % 2 == 0):
        return "the number of angles differs from that at build"
    return ""


def _gradient_refusal(name: str) -> Refusal:
    return Refusal.of(
        "S871",
        f"the angles of `{name}` need a gradient",
        notes=("the kernel `rope` takes the angles as constants, and returns no gradient",),
        helps=("leave this attention as it is",),
    )
