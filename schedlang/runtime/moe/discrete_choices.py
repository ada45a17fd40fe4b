"""A recorder of the results of discrete operators (topk, argmax, ...), by place and sample.

Rounding may change such choices; a comparison can force the recorded ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime import scope
from schedlang.runtime.comm import world
from schedlang.runtime.modes import ATTRIBUTE_ACCESS, CarryingMode

ChoiceKey = tuple[int, str, str, int, int]  # step, site, operator, number of the call, sample

_NAMES = ("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "mode")
CHOOSING_CALLS: dict[Any, str] = {
    getattr(home, name): name for name in _NAMES for home in (torch, Tensor)
}


class ChoiceRecorder(CarryingMode):
    """Records the chosen indices in `found`, within a scope; a recomputation records them again.

    Choices in `forced` replace those of the operator.
    """

    carried = True

    def __init__(self, forced: Mapping[ChoiceKey, Tensor] | None = None) -> None:
        super().__init__()
        self.forced = forced or {}
        self.found: dict[ChoiceKey, Tensor] = {}
        self._calls: dict[Any, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if type(func) is ATTRIBUTE_ACCESS:  # a third of all calls
            if func.__name__ == "__get__":  # no mode changes what is read
                return func(*args)
            return self.call_beneath(func, types, args, kwargs or {})
        out = self.run(func, types, args, kwargs or {})
        # rounding changes no choice among integers
        if (
            func in CHOOSING_CALLS
            and scope.current() is not None
            and takes_floats(args, kwargs or {})
        ):
            with self.beneath():
                right = self._record(CHOOSING_CALLS[func], out)
                if right is not None:
                    return apply_choice(CHOOSING_CALLS[func], out, right, args, kwargs or {})
        return out

    def _record(self, name: str, out: Any) -> Tensor | None:
        """Record the indices of a result by sample; return forced indices if they differ."""
        where = scope.current()
        chosen = out if isinstance(out, Tensor) else out[1]
        assert where is not None
        samples = where.samples
        if chosen.is_floating_point() or not chosen.dim() or chosen.shape[0] % len(samples):
            return None
        place = (where.step, where.microbatch, samples, scope.current_site(), name)
        call = self._calls[place] = self._calls.get(place, -1) + 1
        parts = chosen.detach().cpu().chunk(len(samples)) if len(chosen) else ()
        right = []
        for sample, part in zip(samples, parts):
            key = (where.step, scope.current_site(), name, call, sample)
            forced = self.forced.get(key)
            right.append(part if forced is None or forced.shape != part.shape else forced)
            self.found.setdefault(key, right[-1].clone())
        if all(one is part for one, part in zip(right, parts)):
            return None
        return torch.cat(right).to(chosen.device)

    def gather(self) -> dict[ChoiceKey, Tensor]:
        """Return the choices of all ranks; for equal keys, those of the first rank."""
        if world.size() == 1:
            return self.found
        out: dict[ChoiceKey, Tensor] = {}
        for found in reversed(world.all_gather_object(self.found)):
            out.update(found)
        return out


def takes_floats(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the input of an operator is a float tensor."""
    tensor = args[0] if args else kwargs.get("input")
    return isinstance(tensor, Tensor) and tensor.is_floating_point()


def apply_choice(name: str, out: Any, right: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator with forced indices."""
    if isinstance(out, Tensor):
        return right
    tensor = args[0] if args else kwargs["input"]
    place = 2 if name in ("topk", "kthvalue") else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    if right.dim() == tensor.dim():
        return type(out)((tensor.gather(dim, right), right))
    return type(out)((tensor.gather(dim, right.unsqueeze(dim)).squeeze(dim), right))
