"""Probes of modules: run a copy on made-up inputs, independent of the module's name.

The copy has the module's own forward and new random float64 parameters on the CPU, so that a module
on the meta device, or with sharded parameters, is probed like any other. Hooks are not copied. A
result holds for all modules that are equal in all that the probe could read (`probe_once`).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

TOLERANCE = 1e-9
# a prime: repeated numbers are then at other positions in every row and column
_DISTINCT = 1_000_003
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks"),
    "_backward_pre_hooks",
)


@dataclass(frozen=True)
class Mismatch:
    """The reason why a kernel does not fit, and the relative difference if the module ran."""

    reason: str
    error: float | None = None

    @classmethod
    def raised(cls, message: str, error: Exception) -> Mismatch:
        """Return a mismatch with `message` and the first line of the module's own error."""
        return cls(f"{message}: {error_line(error)}")


def error_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def bare_copy(
    module: nn.Module,
    dtype: torch.dtype,
    seed: int = 0,
    spread: Callable[[torch.Size], float] | None = None,
) -> nn.Module:
    """Copy a module without hooks, with random parameters in [0.5, 1.5) of `dtype` on the CPU.

    With `spread` they are centred at zero, with this width for a shape. Submodules are copied too,
    shared parameters stay shared; other attributes are the module's own. Buffers keep their values,
    floating ones in `dtype`; none may be on the meta device.
    """
    generator = torch.Generator().manual_seed(seed)
    memo: dict[int, Any] = {}

    def fresh(p: nn.Parameter | None) -> nn.Parameter | None:
        if p is not None and id(p) not in memo:
            memo[id(p)] = nn.Parameter(_random_parameter(p.shape, dtype, generator, spread))
        return None if p is None else memo[id(p)]

    def moved(buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        kind = dtype if buffer.is_floating_point() else buffer.dtype
        return buffer.detach().to("cpu", kind, copy=True)

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in memo:
            twin = memo[id(part)] = copy.copy(part)
            state = twin.__dict__
            state.update({name: type(state[name])() for name in _HOOKS if name in state})
            state["_parameters"] = {name: fresh(p) for name, p in part._parameters.items()}
            state["_buffers"] = {name: moved(b) for name, b in part._buffers.items()}
            children = part._modules.items()
            state["_modules"] = {n: copied(c) if c is not None else None for n, c in children}
        twin_: nn.Module = memo[id(part)]
        return twin_

    return copied(module)


def _random_parameter(
    shape: torch.Size,
    dtype: torch.dtype,
    generator: torch.Generator,
    spread: Callable[[torch.Size], float] | None,
) -> Tensor:
    """Return random numbers; for very large shapes some numbers are repeated, at other positions
    per row.

    Drawing each number of wide weights would take longer than computing with them.
    """
    repeats = math.prod(shape) > 4 * _DISTINCT and all(size % _DISTINCT for size in shape)
    numbers = (
        torch.rand((_DISTINCT,) if repeats else shape, generator=generator, device="cpu") + 0.5
    )
    numbers = numbers.to(dtype)
    if spread is not None:
        numbers.sub_(1.0).mul_(spread(shape))
    return _repeat_numbers(numbers, shape) if repeats else numbers


def _repeat_numbers(numbers: Tensor, shape: torch.Size) -> Tensor:
    """Return a new CPU tensor of a shape, filled with some numbers, repeated in turn."""
    filled = torch.empty(math.prod(shape), dtype=numbers.dtype, device="cpu")
    rounds, rest = divmod(len(filled), len(numbers))
    filled[: rounds * len(numbers)].view(rounds, len(numbers)).copy_(numbers)
    filled[len(filled) - rest :] = numbers[:rest]
    return filled.view(shape)


def inputs_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of the module's forward."""
    arguments = inspect.signature(type(module).forward).parameters.values()
    return tuple(p.name for p in arguments if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))[1:]


def one_input(module: nn.Module) -> Mismatch | None:
    """Return a mismatch if the module's forward has more arguments than its input."""
    extra = inputs_of(module)[1:]
    if extra:
        return Mismatch(f"takes `{extra[0]}` beside its input: the kernel does not")
    return None


def random_rows(size: int, seed: int = 1, rows: int = 16) -> Tensor:
    """Return standard normal rows [2, rows / 2, size] in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, rows // 2, size)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference divided by that of `b`; infinite for NaN."""
    distance = float((a.double() - b).norm() / b.norm().clamp_min(1e-300))
    return distance if math.isfinite(distance) else math.inf


def run_rows(module: nn.Module, x: Tensor, *args: Tensor) -> Tensor:
    """Run the module on rows; raise ValueError if the result has another shape."""
    y = module(x, *args)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"it returns {shape} for {tuple(x.shape)}")
    return y


def gradients_distance(y: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> float:
    """Return the largest relative difference of gradients of two results of the same leaves.

    Infinite if one of the results does not depend on one of the leaves.
    """
    if not y.requires_grad:
        return float("inf")
    grad = distinct_gradient(y)
    grads = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    exact = torch.autograd.grad(expected, leaves, grad.to(expected.dtype), allow_unused=True)
    return max(
        math.inf if a is None or b is None else relative_error(a, b)
        for a, b in zip(grads, exact, strict=True)
    )


def distinct_gradient(y: Tensor) -> Tensor:
    """Return a gradient for a result in which every element differs, from -1 to 1."""
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)


# -- one probe for modules that are equal ----------------------------------------------------------
# Modules are equal if they have the same class; equal numbers, flags and texts; parameters of equal
# sizes; buffers of equal values; the same other objects (a config, a function, a hook); the same
# ties; and equal children. Their position in the model (`layer_idx`) may differ if the module did
# not read it.


ProbeResult = TypeVar("ProbeResult")
POSITION_NAMES = frozenset(("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx"))
_MODULE_ATTRIBUTES = frozenset(("_parameters", "_buffers", "_modules", *vars(nn.Module())))
_HOOK_ATTRIBUTES = frozenset(name for name in _MODULE_ATTRIBUTES if name.endswith("_hooks"))
# elements of a buffer up to which values are compared; larger buffers are compared by identity
_MAX_COMPARED = 2**20


def probe_once(
    module: nn.Module,
    probe: Callable[[nn.Module], ProbeResult | Mismatch],
    cache: MutableMapping[Any, Any],
    about: Hashable,
) -> ProbeResult | Mismatch:
    """Return the result of `probe` for a module; equal modules are probed once.

    `cache` caches results, `about` is the subject of the probe. A mismatch is always cached for
    modules in the same position only.
    """
    keys = [
        ("probe", about, module_key(module)),
        ("probe", about, module_key(module, POSITION_NAMES)),
    ]
    result = next((cache[key] for key in keys if key in cache), None)
    if result is not None:
        return result  # type: ignore[no-any-return]
    if keys[0] != keys[1]:
        twin, read = record_position_reads(module)
        result = probe(twin)
        if not read and not isinstance(result, Mismatch):
            cache[keys[1]] = result
            return result
    cache[keys[0]] = probe(module)
    return cache[keys[0]]  # type: ignore[no-any-return]


def module_key(module: nn.Module, ignored: frozenset[str] = frozenset()) -> Hashable:
    """Return a key that is equal for equal modules, ignoring attributes of these names."""
    return _module_key(module, ignored), *_shared(module)


def _shared(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Return which submodules, parameters and buffers are shared, by the first position of each.

    Ties are part of equality: a probe may give another result for tied modules.
    """
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    parameters = [p for _, p in module.named_parameters(remove_duplicate=False)]
    buffers = [b for _, b in module.named_buffers(remove_duplicate=False)]
    return tuple(_first_positions(objects) for objects in (parts, parameters, buffers))


def _first_positions(objects: Sequence[object]) -> tuple[int, ...]:
    places: dict[int, int] = {}
    return tuple(places.setdefault(id(item), position) for position, item in enumerate(objects))


def _module_key(module: nn.Module, ignored: frozenset[str]) -> Hashable:
    attrs = vars(module)
    rest = [
        (n, _value_key(v))
        for n, v in attrs.items()
        if n not in _MODULE_ATTRIBUTES and n not in ignored
    ]
    tensors = [
        (n, None if p is None else (p.shape, p.dtype, p.requires_grad))
        for n, p in module._parameters.items()
    ]
    buffers = [(n, None if b is None else _buffer_key(b)) for n, b in module._buffers.items()]
    children = [
        (n, None if child is None else _module_key(child, ignored))
        for n, child in module._modules.items()
    ]
    hooks = [
        (n, *map(id, attrs[n].values()))
        for n in sorted(_HOOK_ATTRIBUTES & attrs.keys())
        if attrs[n]
    ]
    return type(module), *rest, module.training, *hooks, *tensors, *buffers, *children


def _value_key(value: object) -> Hashable:
    """Return a key of a value: plain values by value, others by id; the model keeps these alive."""
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        return type(value), value
    if type(value) in (tuple, list, torch.Size):
        return type(value), *map(_value_key, value)  # type: ignore[call-overload]
    if type(value) is dict:
        return dict, *((_value_key(k), _value_key(v)) for k, v in value.items())
    return type(value), id(value)


def _buffer_key(buffer: Tensor) -> Hashable:
    if buffer.is_meta or buffer.numel() > _MAX_COMPARED or type(buffer) is not Tensor:
        return id(buffer)
    on_cpu = buffer.detach().cpu().contiguous()
    return buffer.shape, buffer.dtype, on_cpu.view(-1).view(torch.uint8).numpy().tobytes()


def record_position_reads(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return a copy of the module that records reads of its position, and the list of names read.

    Its parameters, buffers and other attributes are the module's own.
    """
    read: list[str] = []
    memo: dict[int, nn.Module] = {}

    def twin(part: nn.Module) -> nn.Module:
        if id(part) not in memo:
            duplicate = memo[id(part)] = copy.copy(part)
            attrs = duplicate.__dict__
            attrs["_modules"] = {n: c if c is None else twin(c) for n, c in part._modules.items()}
            places = [name for name in POSITION_NAMES if name in attrs]
            if places:
                duplicate.__class__ = _recording_class(type(part), places, read)
        return memo[id(part)]

    return twin(module), read


def _recording_class(kind: type, names: Iterable[str], read: list[str]) -> type:
    """Return a class whose objects record when one of these attributes is read."""

    def noted(name: str) -> property:
        def get(self: nn.Module) -> object:
            read.append(name)
            return vars(self)[name]

        return property(get, lambda self, value: vars(self).update({name: value}))

    copied = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), copied | {name: noted(name) for name in names})
