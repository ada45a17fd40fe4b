"""The operators of torch that run generated kernels: one forward and one backward for all chains.

Being operators they are opaque to what looks at a model from outside: recomputation, FSDP2,
torch.compile.  A chain is known by a name that follows from its text, so that names agree on every
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.rowwise.chain import From
from schedlang.runtime.rowwise.graphs import Sort, graphs, sorts_of
from schedlang.runtime.rowwise.launch import Kernel, kernel, number, run


@dataclass(frozen=True, eq=False)
class Pair:
    """Both kernels of a chain for one set of shapes.

    results    how many there are: the first outputs of the forward kernel
    kept       where it comes from: what was given, or an output of the forward kernel
    gradients  where those of what was given come from, in the backward kernel
    """

    sorts: tuple[Sort, ...]
    forward: Kernel
    backward: Kernel | None
    results: int
    kept: tuple[From, ...] = ()
    gradients: tuple[From, ...] = ()

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The generated ones."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)


@dataclass(eq=False)
class Region:
    """A function of tensors, by the name that the operators know it by."""

    function: Callable[..., Any]
    rounding: str
    made: dict[tuple[Sort, ...], Pair]

    def pair(self, given: Sequence[Tensor], wanted: Sequence[bool]) -> Pair:
        """The kernels for these tensors, made when they are first asked for."""
        sorts = sorts_of(given, wanted)
        if sorts not in self.made:
            self.made[sorts] = pair_of(self.function, sorts, self.rounding)
        return self.made[sorts]


_regions: dict[str, Region] = {}


def declare(name: str, function: Callable[..., Any], rounding: str) -> Region:
    """Make a function known by a name."""
    return _regions.setdefault(name, Region(function, rounding, {}))


def pair_of(function: Callable[..., Any], sorts: tuple[Sort, ...], rounding: str) -> Pair:
    """Both kernels of a function; raises NotRowwise."""
    found = graphs(function, sorts)
    forward = kernel(found.forward, rounding, found.results)
    if found.backward is None:
        return Pair(sorts, forward, None, found.results)
    backward = kernel(found.backward, rounding)
    kept = forward.chain.outputs[found.results :]
    return Pair(sorts, forward, backward, found.results, kept, backward.chain.outputs)


def apply(name: str, given: Sequence[Tensor], results: int) -> list[Tensor]:
    """The results of a chain, of which there are so many."""
    graded = torch.is_grad_enabled()
    wanted = [graded and t.requires_grad for t in given]
    stored: list[Tensor] = rowwise_forward(list(given), wanted, name)
    return stored[:results]


@torch.library.custom_op("schedlang::rowwise_forward", mutates_args=())
def rowwise_forward(given: list[Tensor], wanted: list[bool], name: str) -> list[Tensor]:
    """All that the forward kernel gives: the results, then what else backward needs."""
    return run(_regions[name].pair(given, wanted).forward, given)


@torch.library.custom_op("schedlang::rowwise_backward", mutates_args=())
def rowwise_backward(kept: list[Tensor], grads: list[Tensor], key: str) -> list[Tensor]:
    """All gradients that the backward kernel gives."""
    return run(_backward(key), [*kept, *grads])


_keys: dict[str, Pair] = {}


def _backward(key: str) -> Kernel:
    found = _keys[key].backward
    assert found is not None
    return found


def _empty(made: Kernel, like: Tensor) -> list[Tensor]:
    """Tensors as a kernel gives them."""
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in made.shapes]


@rowwise_forward.register_fake
def _(given: list[Tensor], wanted: list[bool], name: str) -> list[Tensor]:
    return _empty(_regions[name].pair(given, wanted).forward, given[0])


@rowwise_backward.register_fake
def _(kept: list[Tensor], grads: list[Tensor], key: str) -> list[Tensor]:
    return _empty(_backward(key), grads[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given, wanted, name = inputs
    pair = _regions[name].pair(given, wanted)
    ctx.key = f"{name} {pair.sorts}"
    _keys[ctx.key] = pair
    kept = (given[k.place] if k.where == "given" else output[number(pair.forward, k)]
            for k in pair.kept)  # fmt: skip
    ctx.save_for_backward(*kept)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    pair, kept = _keys[ctx.key], list(ctx.saved_tensors)
    backward = _backward(ctx.key)
    like = next(t for t in (*kept, *grads) if t is not None)
    tangents = [
        like.new_zeros(shape, dtype=dtype) if grad is None else grad
        for grad, (shape, dtype) in zip(grads[: pair.results], pair.forward.shapes)
    ]
    made = rowwise_backward(kept, tangents, ctx.key)
    found = dict(zip(backward.order, made, strict=True))
    found |= {From("given", place): t for place, t in enumerate([*kept, *tangents])}
    return [found.get(source) for source in pair.gradients], None, None


rowwise_forward.register_autograd(_differentiate, setup_context=_save)
