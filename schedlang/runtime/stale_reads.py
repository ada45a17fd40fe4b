"""Find the attributes of a model that its forward writes and a loss of the user's reads.

A program runs a copy of the model. A loss that reads `model.layers[0].aux` of the user's own model
(by a closure, a global, or as its method) would read what no forward of the program writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal, quote_names
from schedlang.ir import pytree
from schedlang.runtime.module_state import MODULE_ATTRIBUTES, is_plain

Marks = list[Any]  # identities of tensors in a value, with their versions; other values as they are


class WrittenAttributes:
    """Plain attributes and buffers of a copy before its forward; `originals` have them, too."""

    def __init__(self, copied: nn.Module, originals: Iterable[nn.Module]) -> None:
        self._copied, self._originals = copied, list({id(m): m for m in originals}.values())
        self._before = {
            name: (_state(module), _marks(module)) for name, module in copied.named_modules()
        }

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Refuse (S615) reads, in the block, of what the forward has written, of an original."""
        found: list[str] = []
        names: dict[int, tuple[str, frozenset[str]]] = {}
        classes: dict[type, None] = {}
        for fqn, module in self._copied.named_modules():
            before = self._before[fqn][1]
            written = frozenset(k for k, mark in _marks(module).items() if before.get(k) != mark)
            for original in self._originals if written else ():
                of_user = original.get_submodule(fqn)
                names[id(of_user)] = fqn, written
                classes[type(of_user)] = None
        try:
            with ExitStack() as undo:
                for cls in classes:
                    undo.callback(_observe(cls, names, found))
                yield
        finally:
            if found:
                raise Refusal.of(
                    "S615",
                    f"the loss reads {quote_names(found)} of the model, which no program writes",
                    notes=(
                        "the forward writes it, and what a program runs is a copy of the model",
                    ),
                    helps=("let the model's forward compute this part, and return it",),
                )


def _state(module: nn.Module) -> dict[str, Any]:
    attributes = {k: v for k, v in vars(module).items() if k not in MODULE_ATTRIBUTES}
    return {k: v for k, v in {**attributes, **module._buffers}.items() if is_plain(v)}


def _marks(module: nn.Module) -> dict[str, Marks]:
    return {key: [_mark(leaf) for leaf in _leaves(v)] for key, v in _state(module).items()}


def _leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value) if isinstance(value, (list, dict, tuple)) else [value]


def _mark(leaf: Any) -> Any:
    """Return what changes with a tensor: another object, or a write; objects by identity."""
    if isinstance(leaf, Tensor):
        return id(leaf), leaf._version
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else id(leaf)


def _observe(
    cls: Any, names: dict[int, tuple[str, frozenset[str]]], found: list[str]
) -> Callable[[], None]:
    """Let a class report reads of attributes; return the function that ends it."""
    own, inner = vars(cls).get("__getattribute__"), cls.__getattribute__

    def read(self: Any, key: str) -> Any:
        fqn, written = names.get(id(self), ("", frozenset()))
        if key in written and (name := f"{fqn}.{key}".lstrip(".")) not in found:
            found.append(name)
        return inner(self, key)

    def end() -> None:
        if own is None:
            del cls.__getattribute__
        else:
            cls.__getattribute__ = own

    cls.__getattribute__ = read
    return end
