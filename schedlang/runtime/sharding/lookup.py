"""An embedding with a forward of its own (one that scales) around the lookup of its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Lookup(TorchFunctionMode):
    """While it is on, the rows of one module's weight are looked up by `rows`."""

    def __init__(self, module: nn.Embedding, rows: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.rows = module, rows

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The call, or the rows."""
        if func is F.embedding and args[1] is self.module.weight:
            return self.rows(args[0])
        return func(*args, **(kwargs or {}))


def around(module: nn.Embedding, rows: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """The module's own forward around the rows; the rows alone if it is a plain one."""
    own = type(module).forward
    if own is nn.Embedding.forward:
        return rows

    def forward(ids: Tensor) -> Any:
        with Lookup(module, rows):
            return own(module, ids)

    return forward
