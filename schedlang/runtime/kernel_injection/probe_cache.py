"""What a probe found of a module holds for all that are equal in whatever it could see of them.

Equal are modules of one class, with equal numbers, flags and texts, parameters of equal sizes,
buffers of equal values, and the same other objects (a config, a function, a hook), which are tied
alike, and so are their children.  Their place in the model (`layer_idx`) may differ where nothing
that ran asked for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from schedlang.kernels.probe import Mismatch

Found = TypeVar("Found")
PLACES = frozenset(("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx"))
_WITHIN = frozenset(("_parameters", "_buffers", "_modules", *vars(nn.Module())))
_HOOKS = frozenset(name for name in _WITHIN if name.endswith("_hooks"))
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
    hooks = [(n, *map(id, own[n].values())) for n in sorted(_HOOKS & own.keys()) if own[n]]
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
