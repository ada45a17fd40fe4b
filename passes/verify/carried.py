"""State that a forward carries to the next one in plain attributes: counts, means, memories.

A buffer is seen by its name (S708).  An attribute (`self.calls += 1`, `self.memory = x.detach()`)
is no part of a state dict, and is as wrong where microbatches, or ranks, run a forward more often
than a plain loop, or on other rows.  What the same batch changes twice is carried; what it leaves
alike the second time is a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.ir import pytree

STANDARD = frozenset(vars(nn.Module()))
PLAIN = (bool, int, float, complex, str, type(None), Tensor, list, dict, tuple)
Space = MutableMapping[str, Any]


class Kept:
    """The plain attributes of a model's modules, and of its loss, as they are now."""

    def __init__(self, model: nn.Module | None, loss: Any = None) -> None:
        self._before = [(name, space, _plain(space)) for name, space in _spaces(model, loss)]

    def changed(self) -> dict[str, Any]:
        """Return those that have changed since, or have come, by name, with their values."""
        return {name: value for name, _, _, value in self._changes()}

    def put_back(self) -> None:
        """Let all be as it was."""
        for _, space, (before, key), _ in [*self._changes()]:
            if key in before:
                space[key] = _copied(before[key])
            else:
                del space[key]

    def _changes(self) -> Iterator[tuple[str, Space, tuple[Mapping[str, Any], str], Any]]:
        for name, space, before in self._before:
            for key, value in _plain(space, copy=False).items():
                if key not in before or not alike(before[key], value):
                    yield f"{name}.{key}".lstrip("."), space, (before, key), value


def _spaces(model: nn.Module | None, loss: Any) -> Iterator[tuple[str, Space]]:
    if model is not None:
        yield from ((name, vars(one)) for name, one in model.named_modules())
    owner = getattr(loss, "__self__", loss)  # of a method
    if isinstance(owner, nn.Module):
        for one in owner.modules():
            yield "the loss", vars(one)
            yield "the loss", one._buffers
    elif not callable(getattr(owner, "__get__", None)) and hasattr(owner, "__dict__"):
        yield "the loss", vars(owner)


def _plain(space: Space, copy: bool = True) -> dict[str, Any]:
    found = ((k, v) for k, v in space.items() if k not in STANDARD and isinstance(v, PLAIN))
    return {key: _copied(value) if copy else value for key, value in found}


def _copied(value: Any) -> Any:
    if not isinstance(value, (Tensor, list, dict, tuple)):
        return value
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def alike(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors in them by their numbers."""
    if a is b:
        return True
    mine, theirs = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.is_meta == b.is_meta and a.shape == b.shape and (a.is_meta or _near(a, b))
    return a is b or type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)


def _near(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a.detach(), b.detach(), rtol=1e-9, atol=1e-12, equal_nan=True))


def by_rows(parts: list[Any], whole: Any) -> bool:
    """Return whether tensors of parts, one after the other, are that of the whole."""
    tensors = (
        isinstance(whole, Tensor) and whole.dim() and all(isinstance(p, Tensor) for p in parts)
    )
    return bool(tensors) and alike(torch.cat(parts), whole)


def follows(later: Any, fresh: Any) -> bool:
    """Return whether a number, or one of equal shape, is another one after an earlier forward, as
    a running mean is that begins with its first value; a table that grows is none."""
    one, other = (torch.as_tensor(x) if isinstance(x, float) else x for x in (later, fresh))
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    return one.is_floating_point() and one.shape == other.shape and not alike(one, other)
