"""A mapping that never changes: putting items gives another one, which shares what stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class Persistent(Mapping[K, V]):
    """Layers of items over a base, newest last.

    `put` adds a layer, and joins layers of like size: of n items put one by one each is copied
    log n times in all, where copies of a dict would take n * n.  Layers are never joined with the
    base, so that `own` is what was put since it was laid.  Order is that of a dict: of first puts.
    """

    def __init__(self, base: Mapping[K, V], layers: tuple[dict[K, V], ...] = ()) -> None:
        self._base, self._layers = base, layers

    def put(self, items: Mapping[K, V]) -> Persistent[K, V]:
        """The mapping with these items, instead of those that it has for the same keys."""
        layers = [*self._layers, dict(items)]
        while len(layers) > 1 and 2 * len(layers[-1]) >= len(layers[-2]):
            above = layers.pop()
            layers[-1] = {**layers[-1], **above}
        return Persistent(self._base, tuple(layers))

    @property
    def own(self) -> dict[K, V]:
        """What was put since the base was laid."""
        return {key: value for layer in self._layers for key, value in layer.items()}

    @cached_property
    def _whole(self) -> dict[K, V]:
        return {**self._base, **self.own}

    def many(self, keys: Sequence[K], missing: D) -> list[V | D]:
        """The values of many keys, `missing` where there is none; much faster than one by one."""
        base = self._base
        if isinstance(base, Persistent):
            found = base.many(keys, missing)
        else:
            found = list(map(base.get, keys, repeat(missing))) if base else [missing] * len(keys)
        for layer in self._layers:
            found = list(map(layer.get, keys, found))
        return found

    def get(self, key: K, default: D | None = None) -> V | D | None:  # type: ignore[override]
        """The value of a key; without an exception on the way, which would cost more than it."""
        for layer in reversed(self._layers):
            if key in layer:
                return layer[key]
        return self._base.get(key, default)

    def __getitem__(self, key: K) -> V:
        for layer in reversed(self._layers):
            if key in layer:
                return layer[key]
        return self._base[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    def __repr__(self) -> str:
        return repr(self._whole)

    def __getstate__(self) -> dict[str, object]:
        """One dict, without what was shared."""
        return {"_base": {}, "_layers": (self._whole,)}


def persistent(known: Mapping[K, V]) -> Persistent[K, V]:
    """A mapping of this kind: it itself, or what is laid on it."""
    return known if isinstance(known, Persistent) else Persistent(known)
