"""Notes what discrete operators choose, by place and sample: rounding may tip them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.comm import world
from schedlang.runtime.modes import Ambient

Where = tuple[int, str, str, int, int]  # step, site, operator, how manyth there, sample

_NAMES = ("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "mode")
CHOOSING: dict[Any, str] = {
    getattr(home, name): name for name in _NAMES for home in (torch, Tensor)
}


class Choices(Ambient):
    """`found` holds the indices that were chosen, inside a scope; a recomputation chooses again."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Where, Tensor] = {}
        self._calls: dict[Any, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self.run(func, types, args, kwargs or {})
        if func in CHOOSING and scope.current() is not None:
            self._note(CHOOSING[func], out)
        return out

    def _note(self, name: str, out: Any) -> None:
        """The indices of a result, sample by sample, where its rows are those of samples."""
        where = scope.current()
        chosen = out if isinstance(out, Tensor) else out[1]
        assert where is not None
        samples = where.samples
        if chosen.is_floating_point() or not chosen.dim() or chosen.shape[0] % len(samples):
            return
        place = (where.step, where.microbatch, samples, scope.site(), name)
        call = self._calls[place] = self._calls.get(place, -1) + 1
        parts = chosen.detach().cpu().chunk(len(samples)) if len(chosen) else ()
        for sample, part in zip(samples, parts):
            key = (where.step, scope.site(), name, call, sample)
            self.found.setdefault(key, part.clone())

    def everyone(self) -> dict[Where, Tensor]:
        """Gather the choices of all ranks; where several have one place, the first rank's count."""
        if world.size() == 1:
            return self.found
        out: dict[Where, Tensor] = {}
        for found in reversed(world.gathered(self.found)):
            out.update(found)
        return out
