"""Real values beside meta tensors: of what is computed from the batch alone, such as masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.diagnostic import Refusal
from schedlang.runtime.graph import refusal

LIMIT = 1 << 24  # elements; masks and positions are small, anything larger is not followed


class Constants:
    """Runs operators on meta tensors and, where every input is known, on real values too.

    A model may ask whether a mask is all ones, which a meta tensor cannot answer. Values are
    known per storage, so views and in-place writes are followed.
    """

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}  # meta storage to a flat real tensor
        self.alive: list[Any] = []

    def know(self, real: Any, meta: Any) -> None:
        """Remember the values of integer and boolean tensors given as arguments."""
        for value, bare in zip(pytree.tree_leaves(real), pytree.tree_leaves(meta)):
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                self._keep(bare, value)

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        refuse: Callable[[Any], Exception],
    ) -> Any:
        """The operator's result; a value that must be known and is not raises `refuse(func)`."""
        if func._schema.name == "aten::_local_scalar_dense" and args[0].is_meta:
            value = self._real(args[0])
            if value is None:
                raise refuse(func)
            return value.item()
        shadow = self._shadow(func, args, kwargs)
        output = func(*args, **kwargs)
        if shadow is not None:
            for bare, value in zip(pytree.tree_leaves(output), pytree.tree_leaves(shadow)):
                known = not isinstance(bare, torch.Tensor) or _storage(bare) in self.values
                if not known and bare.is_meta:
                    self._keep(bare, value)
        elif func._schema.is_mutable:
            self._forget(output)
        return output

    def _shadow(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on_meta = any(t.is_meta for t in tensors) or any(
            isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in leaves
        )
        if not on_meta:
            return None
        real = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                leaf = self._real(leaf)
                if leaf is None:
                    return None
            elif isinstance(leaf, torch.device) and leaf.type == "meta":
                leaf = torch.device("cpu")
            real.append(leaf)
        try:
            args, kwargs = pytree.tree_unflatten(real, spec)
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return None

    def _real(self, bare: torch.Tensor) -> torch.Tensor | None:
        flat = self.values.get(_storage(bare))
        if flat is None:
            return None
        if flat.dtype != bare.dtype:
            flat = flat.view(bare.dtype)
        return flat.as_strided(bare.shape, bare.stride(), bare.storage_offset())

    def _keep(self, bare: torch.Tensor, value: torch.Tensor) -> None:
        size = bare.untyped_storage().nbytes() // max(1, bare.element_size())
        if size > LIMIT or bare.shape != value.shape:
            return
        flat = torch.zeros(size, dtype=value.dtype)
        flat.as_strided(bare.shape, bare.stride(), bare.storage_offset()).copy_(value)
        self.values[_storage(bare)] = flat
        self.alive.append(bare.untyped_storage())

    def _forget(self, output: Any) -> None:
        for bare in pytree.tree_leaves(output):
            if isinstance(bare, torch.Tensor) and bare.is_meta:
                self.values.pop(_storage(bare), None)


class OnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a model run on meta tensors although it asks for values of its arguments."""

    def __init__(self, real: Any, meta: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants = Constants()
        self.constants.know(real, meta)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.constants.run(func, args, kwargs or {}, no_value)


def no_value(func: Any, where: str = "") -> Refusal:
    """What to raise where a value is asked for that is not known."""
    return refusal(
        "S611",
        where,
        f"reads the value of a tensor ({func._schema.name}) while recorded without data",
        "record it on real tensors",
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
