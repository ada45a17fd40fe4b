"""Results of operators that are kept for a second run, as one process that is compared has them.

Programs do it in `chosen.py`: here the first run is over before anything is put away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from schedlang.runtime.keeping.recompute import numbers
from schedlang.runtime.keeping.through import through
from schedlang.runtime.scope import capture, site

if TYPE_CHECKING:
    from schedlang.regions.again import Again


@dataclass
class _Result:
    """What one operator gave: where it ran, its tensors with their versions, and their values.

    `whole`: it is kept as it is; where it was written into since, it is made again (`stale`).
    """

    place: Callable[[], Any]
    leaves: list[Any]
    spec: Any
    whole: bool
    copies: list[tuple[int, Tensor]]
    stale: bool = False

    def keep(self) -> None:
        """Let the hooks around keep it, as what the operator's module saves."""
        kept = iter(self.copies)
        for k, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                version, copy = next(kept)
                now = leaf if leaf._version == version else copy
                self.stale |= self.whole and now is copy
                with self.place():
                    (value,) = [now] if self.whole else through([now])
                self.leaves[k] = value.detach()

    def given(self) -> Any:
        """It again, for somebody who may write into it."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


class Results:
    """The results that are kept of one call of a module; in some `parts` of it as they are."""

    def __init__(self, again: Again, parts: Collection[str] = ()) -> None:
        self.some, self.parts = again.results, parts
        self.numbers, self.chosen = numbers(again.save, again.chosen)
        self.found: dict[Hashable, _Result] = {}

    def names(self, key: Hashable | None) -> bool:
        """Whether the result of the call of this name is kept."""
        return key is not None and (self.chosen is None or key in self.chosen)

    def noting(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The first run."""
        if not self.some:
            return inner(*args, **kwargs)
        with _Noting(self):
            return inner(*args, **kwargs)

    def keep(self) -> None:
        """In their order."""
        for result in self.found.values():
            result.keep()

    def given(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The second run, in which they take the place of what their operators would give."""
        if not self.some:
            return inner(*args, **kwargs)
        with _Giving(self):
            return inner(*args, **kwargs)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results, self.turns = results, results.numbers()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        key = self.turns.of(func, args, kwargs)
        out = func(*args, **kwargs)
        if self.results.names(key):
            leaves, spec = tree_flatten(out)
            # a later operator may write into them
            copies = [(t._version, t.clone()) for t in leaves if isinstance(t, torch.Tensor)]
            whole = any(_inside(site(), part) for part in self.results.parts)
            self.results.found[key] = _Result(capture(), leaves, spec, whole, copies)
        return out


def _inside(fqn: str, part: str) -> bool:
    return fqn == part or fqn.startswith(f"{part}.")


class _Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results, self.turns = results, results.numbers()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        key = self.turns.of(func, args, kwargs)
        kept = self.results.found.get(key)
        return func(*args, **kwargs) if kept is None or kept.stale else kept.given()
