"""Notes what discrete operators choose, by place and sample: rounding may tip them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.comm import world
from schedlang.runtime.modes import ATTRIBUTE, Carrying

Where = tuple[int, str, str, int, int]  # step, site, operator, how manyth there, sample

_NAMES = ("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "mode")
CHOOSING: dict[Any, str] = {
    getattr(home, name): name for name in _NAMES for home in (torch, Tensor)
}


class Choices(Carrying):
    """`found` holds the indices that were chosen, inside a scope; a recomputation chooses again.

    What is in `forced` is chosen as it says there.
    """

    carried = True

    def __init__(self, forced: Mapping[Where, Tensor] | None = None) -> None:
        super().__init__()
        self.forced = forced or {}
        self.found: dict[Where, Tensor] = {}
        self._calls: dict[Any, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if type(func) is ATTRIBUTE:  # a third of all calls
            if func.__name__ == "__get__":  # no mode changes what is read
                return func(*args)
            return self.ask(func, types, args, kwargs or {})
        out = self.run(func, types, args, kwargs or {})
        # rounding tips no choice among whole numbers
        if func in CHOOSING and scope.current() is not None and of_floats(args, kwargs or {}):
            with self.beneath():
                right = self._note(CHOOSING[func], out)
                if right is not None:
                    return as_chosen(CHOOSING[func], out, right, args, kwargs or {})
        return out

    def _note(self, name: str, out: Any) -> Tensor | None:
        """Note the indices of a result, sample by sample; give those that are forced, if others."""
        where = scope.current()
        chosen = out if isinstance(out, Tensor) else out[1]
        assert where is not None
        samples = where.samples
        if chosen.is_floating_point() or not chosen.dim() or chosen.shape[0] % len(samples):
            return None
        place = (where.step, where.microbatch, samples, scope.site(), name)
        call = self._calls[place] = self._calls.get(place, -1) + 1
        parts = chosen.detach().cpu().chunk(len(samples)) if len(chosen) else ()
        right = []
        for sample, part in zip(samples, parts):
            key = (where.step, scope.site(), name, call, sample)
            told = self.forced.get(key)
            right.append(part if told is None or told.shape != part.shape else told)
            self.found.setdefault(key, right[-1].clone())
        if all(one is part for one, part in zip(right, parts)):
            return None
        return torch.cat(right).to(chosen.device)

    def everyone(self) -> dict[Where, Tensor]:
        """Gather the choices of all ranks; where several have one place, the first rank's count."""
        if world.size() == 1:
            return self.found
        out: dict[Where, Tensor] = {}
        for found in reversed(world.all_gather_object(self.found)):
            out.update(found)
        return out


def of_floats(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator is given floats."""
    given = args[0] if args else kwargs.get("input")
    return isinstance(given, Tensor) and given.is_floating_point()


def as_chosen(name: str, out: Any, right: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator that chooses as it is told."""
    if isinstance(out, Tensor):
        return right
    given = args[0] if args else kwargs["input"]
    place = 2 if name in ("topk", "kthvalue") else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    if right.dim() == given.dim():
        return type(out)((given.gather(dim, right), right))
    return type(out)((given.gather(dim, right.unsqueeze(dim)).squeeze(dim), right))
