"""Probes of modules: a copy is run on made-up inputs, and its name is never looked at.

The copy has the module's own forward and fresh random float64 parameters on the CPU, so that a
module on the meta device, or one whose parameters lie on many ranks, is judged like any other.
Hooks are left behind.  What was found of a module holds for all that are equal in whatever it could
see of them (`judged`).
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
# a prime: numbers that are used again and again then stand elsewhere in every row and column
_DRAWN = 1_000_003
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
    def raised(cls, what: str, error: Exception) -> Mismatch:
        """`what`, and the first line of what the module's own code raised."""
        return cls(f"{what}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def bare_copy(
    module: nn.Module,
    dtype: torch.dtype,
    seed: int = 0,
    spread: Callable[[torch.Size], float] | None = None,
) -> nn.Module:
    """A copy without hooks, with random parameters in [0.5, 1.5) of `dtype` on the CPU.

    With `spread` they lie around zero, over as much as it says for a shape.  Submodules are copied
    alike, shared parameters stay shared; other attributes are the module's own.  Buffers keep their
    values, floating ones in `dtype`; none may lie on the meta device.
    """
    generator = torch.Generator().manual_seed(seed)
    done: dict[int, Any] = {}

    def fresh(p: nn.Parameter | None) -> nn.Parameter | None:
        if p is not None and id(p) not in done:
            done[id(p)] = nn.Parameter(_drawn(p.shape, dtype, generator, spread))
        return None if p is None else done[id(p)]

    def moved(buffer: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        kind = dtype if buffer.is_floating_point() else buffer.dtype
        return buffer.detach().to("cpu", kind, copy=True)

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in done:
            twin = done[id(part)] = copy.copy(part)
            state = twin.__dict__
            state.update({name: type(state[name])() for name in _HOOKS if name in state})
            state["_parameters"] = {name: fresh(p) for name, p in part._parameters.items()}
            state["_buffers"] = {name: moved(b) for name, b in part._buffers.items()}
            children = part._modules.items()
            state["_modules"] = {n: copied(c) if c is not None else None for n, c in children}
        twin_: nn.Module = done[id(part)]
        return twin_

    return copied(module)


def _drawn(
    shape: torch.Size,
    dtype: torch.dtype,
    generator: torch.Generator,
    spread: Callable[[torch.Size], float] | None,
) -> Tensor:
    """Random numbers; very many are some of them again and again, which no two rows begin alike.

    Drawing each number of wide weights takes longer than computing with them.
    """
    long = math.prod(shape) > 4 * _DRAWN and all(size % _DRAWN for size in shape)
    some = torch.rand((_DRAWN,) if long else shape, generator=generator, device="cpu") + 0.5
    some = some.to(dtype)
    if spread is not None:
        some.sub_(1.0).mul_(spread(shape))
    return _repeated(some, shape) if long else some


def _repeated(some: Tensor, shape: torch.Size) -> Tensor:
    """Fill a new CPU tensor of a shape with some numbers, repeated in turn."""
    made = torch.empty(math.prod(shape), dtype=some.dtype, device="cpu")
    rounds, rest = divmod(len(made), len(some))
    made[: rounds * len(some)].view(rounds, len(some)).copy_(some)
    made[len(made) - rest :] = some[:rest]
    return made.view(shape)


def inputs_of(module: nn.Module) -> tuple[str, ...]:
    """The names of what the module's forward may be given."""
    every = inspect.signature(type(module).forward).parameters.values()
    return tuple(p.name for p in every if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))[1:]


def one_input(module: nn.Module) -> Mismatch | None:
    """Return a mismatch if the module's forward takes more than its input."""
    more = inputs_of(module)[1:]
    if more:
        return Mismatch(f"takes `{more[0]}` beside its input: the kernel does not")
    return None


def rows_of(size: int, seed: int = 1, rows: int = 16) -> Tensor:
    """Standard normal rows [2, rows / 2, size] in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, rows // 2, size)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over that of `b`; infinite where it is no number."""
    far = float((a.double() - b).norm() / b.norm().clamp_min(1e-300))
    return far if math.isfinite(far) else math.inf


def run_rows(module: nn.Module, x: Tensor, *more: Tensor) -> Tensor:
    """Run the module on rows; raise ValueError where it does not return as many rows."""
    y = module(x, *more)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"it returns {shape} for {tuple(x.shape)}")
    return y


def gradients_apart(y: Tensor, expected: Tensor, leaves: Sequence[Tensor]) -> float:
    """The largest relative difference of a gradient of two results of the same leaves.

    Infinite where one of the results does not depend on one of them.
    """
    if not y.requires_grad:
        return float("inf")
    grad = rising(y)
    found = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    exact = torch.autograd.grad(expected, leaves, grad.to(expected.dtype), allow_unused=True)
    return max(
        math.inf if a is None or b is None else relative(a, b)
        for a, b in zip(found, exact, strict=True)
    )


def rising(y: Tensor) -> Tensor:
    """A gradient for a result in which every element counts differently, from -1 to 1."""
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)


# -- one probe for modules that are equal ----------------------------------------------------------
# Equal are modules of one class, with equal numbers, flags and texts, parameters of equal sizes,
# buffers of equal values, and the same other objects (a config, a function, a hook), which are tied
# alike, and so are their children.  Their place in the model (`layer_idx`) may differ where nothing
# that ran asked for it.


Found = TypeVar("Found")
PLACES = frozenset(("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx"))
_WITHIN = frozenset(("_parameters", "_buffers", "_modules", *vars(nn.Module())))
_HOOKED = frozenset(name for name in _WITHIN if name.endswith("_hooks"))
_MOST = 2**20  # elements of a buffer that are compared; of larger ones only the same are equal


def judged(
    module: nn.Module,
    probe: Callable[[nn.Module], Found | Mismatch],
    known: MutableMapping[Any, Any],
    about: Hashable,
) -> Found | Mismatch:
    """Return what `probe` finds of a module; equal modules are probed once.

    `known` keeps the answers, `about` is what they are about.  A mismatch is always the module's
    own.
    """
    keys = [("probe", about, seen(module)), ("probe", about, seen(module, PLACES))]
    found = next((known[key] for key in keys if key in known), None)
    if found is not None:
        return found  # type: ignore[no-any-return]
    if keys[0] != keys[1]:
        twin, read = watched(module)
        found = probe(twin)
        if not read and not isinstance(found, Mismatch):
            known[keys[1]] = found
            return found
    known[keys[0]] = probe(module)
    return known[keys[0]]  # type: ignore[no-any-return]


def seen(module: nn.Module, but: frozenset[str] = frozenset()) -> Hashable:
    """Equal for modules that are, whatever their numbers of these names."""
    return _seen(module, but), *_shared(module)


def _shared(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Return which parameters, buffers and parts are shared, by the first place of each.

    What is tied may be told in several ways, of which one holds for what is not.
    """
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    parameters = [p for _, p in module.named_parameters(remove_duplicate=False)]
    buffers = [b for _, b in module.named_buffers(remove_duplicate=False)]
    return tuple(_first(each) for each in (parts, parameters, buffers))


def _first(objects: Sequence[object]) -> tuple[int, ...]:
    places: dict[int, int] = {}
    return tuple(places.setdefault(id(one), place) for place, one in enumerate(objects))


def _seen(module: nn.Module, but: frozenset[str]) -> Hashable:
    own = vars(module)
    rest = [(n, _value(v)) for n, v in own.items() if n not in _WITHIN and n not in but]
    tensors = [
        (n, None if p is None else (p.shape, p.dtype, p.requires_grad))
        for n, p in module._parameters.items()
    ]
    buffers = [(n, None if b is None else _content(b)) for n, b in module._buffers.items()]
    children = [
        (n, None if child is None else _seen(child, but)) for n, child in module._modules.items()
    ]
    hooks = [(n, *map(id, own[n].values())) for n in sorted(_HOOKED & own.keys()) if own[n]]
    return type(module), *rest, module.training, *hooks, *tensors, *buffers, *children


def _value(value: object) -> Hashable:
    """Plain values by what they are, others by which they are; the model keeps these alive."""
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        return type(value), value
    if type(value) in (tuple, list, torch.Size):
        return type(value), *map(_value, value)  # type: ignore[call-overload]
    if type(value) is dict:
        return dict, *((_value(k), _value(v)) for k, v in value.items())
    return type(value), id(value)


def _content(buffer: Tensor) -> Hashable:
    if buffer.is_meta or buffer.numel() > _MOST or type(buffer) is not Tensor:
        return id(buffer)
    plain = buffer.detach().cpu().contiguous()
    return buffer.shape, buffer.dtype, plain.view(-1).view(torch.uint8).numpy().tobytes()


def watched(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """The same module in parts that note when their place is read, and the names that were.

    Its parameters and buffers, and whatever else it has, are the module's own.
    """
    read: list[str] = []
    done: dict[int, nn.Module] = {}

    def twin(part: nn.Module) -> nn.Module:
        if id(part) not in done:
            made = done[id(part)] = copy.copy(part)
            own = made.__dict__
            own["_modules"] = {n: c if c is None else twin(c) for n, c in part._modules.items()}
            places = [name for name in PLACES if name in own]
            if places:
                made.__class__ = _noting(type(part), places, read)
        return done[id(part)]

    return twin(module), read


def _noting(kind: type, names: Iterable[str], read: list[str]) -> type:
    """A class whose objects note when one of these attributes is asked for."""

    def noted(name: str) -> property:
        def get(self: nn.Module) -> object:
            read.append(name)
            return vars(self)[name]

        return property(get, lambda self, value: vars(self).update({name: value}))

    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), same | {name: noted(name) for name in names})
