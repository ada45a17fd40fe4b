"""What a rank does while a step is played: operations, bytes that move through memory, messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, ops
from torch.utils import flop_counter

HALF = 2  # bytes of the floats in which operations are counted


@dataclass(frozen=True)
class Message:
    """One collective, or one message to another rank: bytes whole, and between which ranks.

    `ends` of a message: from, and to.
    """

    op: str
    ranks: tuple[int, ...]
    bytes: int
    ends: tuple[int, int] | None = None


@dataclass
class Work:
    """Of one stretch of a step.

    operators   (operations, bytes read and written) of each operator -> how often it ran.
                Operations count as 16-bit ones: in 32 bits they are twice as many, as tensor cores
                have it
    messages    what is sent, and how often
    """

    operators: Counter[tuple[float, int]] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Take up one operator; those that only look at a tensor in another way cost nothing."""
        if not _looks(func):
            made = list(_tensors((out,)))
            given = (*_tensors(args), *_tensors(kwargs.values()))
            moved = sum(t.numel() * t.element_size() for t in (*given, *made))
            width = max((t.element_size() for t in made), default=HALF)
            flops = _flops(func, args, kwargs, out) * width / HALF
            self.operators[flops, moved] += 1

    def sent(self, message: Message) -> None:
        """Take up what was sent."""
        self.messages[message] += 1


@cache
def _looks(func: Any) -> bool:
    """Does an operator give nothing but a view?"""
    return bool(func.is_view)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Of one operator, by torch's formula; none for those that only move bytes."""
    own = FORMULAS.get(func._overloadpacket)
    if own is not None:
        return own(*args)
    formula = flop_counter.flop_registry.get(func._overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> float:
    count: Callable[..., int] = flop_counter.sdpa_flop_count
    return float(count(query.shape, key.shape, value.shape))


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> float:
    count: Callable[..., int] = flop_counter.sdpa_backward_flop_count
    return float(count(grad.shape, query.shape, key.shape, value.shape))


# the fused operators of a CPU, which stand for any device's: torch has no formulas for them
FORMULAS: dict[Any, Callable[..., float]] = {
    ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
