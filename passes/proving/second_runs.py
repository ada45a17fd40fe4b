"""The original whose modules run again in backward from what is kept in fewer bits.

Written apart from what programs run (torch's `checkpoint`, `runtime/keeping/region.py` and
`chosen.py`): here the second run comes at once, and backward is handed what it saved.  Both share
the names by which single operators are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from schedlang.passes.laying.kept_parts import recomputed, summed
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.passes.preparing.prepare import Prepared
    from schedlang.regions.again import Again


def with_second_runs(plan: Plan, module: nn.Module, known: Prepared | None) -> None:
    """Let those modules of a copy of the original run again that are kept in fewer bits."""
    parts = summed(known.traced) if known is not None else ()
    for again in recomputed(plan, known.chains if known is not None else {}):
        region = _Region(again, parts)
        for place, fqn in enumerate(again.modules):
            part: Any = module.get_submodule(fqn)
            part.forward = partial(_forward, region, place, part, part.forward)


@dataclass
class _Region:
    """Modules that run again as one, and what tensors of this pass are in their second run."""

    again: Again
    summed: tuple[str, ...]  # modules of which ranks have parts of sums, kept as they are
    next: int = 0
    known: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)  # its version, the other

    def enter(self, place: int) -> None:
        """A call out of turn begins anew."""
        if place == 0 or place != self.next:
            self.known = []
        self.next = place + 1

    def given(self, tensors: list[Tensor]) -> list[Tensor]:
        """What the second run is given: what it made itself, and else what was kept."""
        from schedlang.runtime.keeping.through import through

        if not self.again.once:
            return through(tensors)
        new: list[Tensor] = []
        for tensor in tensors:
            if self._other(tensor) is None and not any(_same(tensor, one) for one in new):
                new.append(tensor)
        for tensor, value in zip(new, through(new)):
            self.note(tensor, value)
        found = [(tensor, self._other(tensor)) for tensor in tensors]
        return [value.detach().requires_grad_(tensor.requires_grad)
                for tensor, value in found if value is not None]  # fmt: skip

    def made(self, output: Any, second: Any) -> None:
        """The results of a call, in both runs."""
        from torch import Tensor

        from schedlang.runtime.nests import tree_leaves

        for one, two in zip(tree_leaves(output), tree_leaves(second), strict=True):
            if self.again.once and isinstance(one, Tensor):
                self.note(one, two.detach())

    def note(self, tensor: Tensor, value: Tensor) -> None:
        """What a tensor is in the second run."""
        self.known.append((tensor, tensor._version, value))

    def _other(self, tensor: Tensor) -> Tensor | None:
        return next((value for one, version, value in self.known
                     if version == tensor._version and _same(one, tensor)), None)  # fmt: skip


def _same(one: Tensor, two: Tensor) -> bool:
    """Are they the same view of the same memory?"""
    facts = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, two))
    return next(facts) == next(facts)


def _forward(
    region: _Region, place: int, module: nn.Module, inner: Callable[..., Any],
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """The output for the arguments as they are; its backward is that of a run from those kept."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from schedlang.runtime.keeping.results import Results
    from schedlang.runtime.staging.arguments import put, take

    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    region.enter(place)
    tensors: list[Tensor] = []
    template = take((args, kwargs), tensors)
    given, apart = region.given(tensors), _Apart(module)
    results = Results(region.again, region.summed)
    again: list[Tensor] = []
    places = count()
    with saved_tensors_hooks(lambda tensor: next(places), lambda place: again[place]):
        output = results.noting(inner, *args, **kwargs)
    results.keep()
    some, named = put(template, given)
    second = apart.run(again, partial(results.given, inner, *some, **named))
    assert len(again) == next(places), "a second run saves as many tensors"
    region.made(output, second)
    return output


class _Apart:
    """Where a call begins: what is drawn and counted in a second run is drawn and counted alike."""

    def __init__(self, module: nn.Module) -> None:
        import torch

        from schedlang.runtime.device import Replayed, own_generators
        from schedlang.runtime.scope import capture

        self.place = capture()
        self.draws = Replayed([torch.default_generator, *own_generators(module)])

    def run(self, saved: list[Tensor], call: Callable[[], Any]) -> Any:
        """A call's result; what autograd would keep of it is put into a list."""
        from torch.autograd.graph import saved_tensors_hooks

        def note(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            return tensor

        with self.place(), self.draws, saved_tensors_hooks(note, lambda tensor: tensor):
            return call()
