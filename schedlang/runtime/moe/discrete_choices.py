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
        result = self.run(func, types, args, kwargs or {})
        # rounding changes no choice among integers
        if (
            func in CHOOSING_CALLS
            and scope.current() is not None
            and takes_floats(args, kwargs or {})
        ):
            with self.beneath():
                forced = self._record(CHOOSING_CALLS[func], result)
                if forced is not None:
                    return apply_choice(CHOOSING_CALLS[func], result, forced, args, kwargs or {})
        return result

    def _record(self, name: str, result: Any) -> Tensor | None:
        """Record the indices of a result by sample; return forced indices if they differ."""
        call_scope = scope.current()
        indices = result if isinstance(result, Tensor) else result[1]
        assert call_scope is not None
        samples = call_scope.samples
        if indices.is_floating_point() or not indices.dim() or indices.shape[0] % len(samples):
            return None
        call_site = (call_scope.step, call_scope.microbatch, samples, scope.current_site(), name)
        call = self._calls[call_site] = self._calls.get(call_site, -1) + 1
        parts = indices.detach().cpu().chunk(len(samples)) if len(indices) else ()
        corrected = []
        for sample, part in zip(samples, parts):
            key = (call_scope.step, scope.current_site(), name, call, sample)
            forced = self.forced.get(key)
            corrected.append(part if forced is None or forced.shape != part.shape else forced)
            self.found.setdefault(key, corrected[-1].clone())
        if all(index_part is part for index_part, part in zip(corrected, parts)):
            return None
        return torch.cat(corrected).to(indices.device)

    def gather(self) -> dict[ChoiceKey, Tensor]:
        """Return the choices of all ranks; for equal keys, those of the first rank."""
        if world.size() == 1:
            return self.found
        choices: dict[ChoiceKey, Tensor] = {}
        for rank_choices in reversed(world.all_gather_object(self.found)):
            choices.update(rank_choices)
        return choices


def takes_floats(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the input of an operator is a float tensor."""
    tensor = args[0] if args else kwargs.get("input")
    return isinstance(tensor, Tensor) and tensor.is_floating_point()


def apply_choice(
    name: str, result: Any, index: Tensor, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of an operator with forced indices."""
    if isinstance(result, Tensor):
        return index
    tensor = args[0] if args else kwargs["input"]
    dim_position = 2 if name in ("topk", "kthvalue") else 1
    dim = kwargs.get("dim", args[dim_position] if len(args) > dim_position else -1)
    if index.dim() == tensor.dim():
        return type(result)((tensor.gather(dim, index), index))
    return type(result)((tensor.gather(dim, index.unsqueeze(dim)).squeeze(dim), index))
