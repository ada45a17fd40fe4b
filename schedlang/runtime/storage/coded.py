"""Frozen parameters that lie in codes, and have values only while somebody asks.

The parameter itself stays, with its name, shape and dtype, so that all that goes by parameters
finds it; its memory is one element, shared by all, which is no number: whoever reads it in another
way than by `value` gets no number, and who writes it is refused by torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.storage.codebook import Coding

_SLOT = "_schedlang_coded"


class Coded:
    """A parameter in codes."""

    def __init__(self, parameter: nn.Parameter, coding: Coding) -> None:
        assert not parameter.requires_grad
        self.parameter, self.coding = parameter, coding
        self.shape, self.dtype = parameter.shape, parameter.dtype
        self.codes = self.scales = torch.empty(0)
        self._shown = 0  # forwards that have the values now
        self._open = False
        self.put(parameter.detach())
        vars(parameter)[_SLOT] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Coded:
        """A copy of the module would have a parameter without values."""
        raise TypeError("a module with a quantised weight cannot be copied; its state can")

    def put(self, value: Tensor) -> None:
        """Take over values: those of codes come back as they were."""
        rows = value.t() if self.coding.transposed else value
        self.codes, self.scales = self.coding.book.encoded(rows)
        self._leave()

    def value(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values that are meant, a tensor of their own."""
        if self._open:
            return self.parameter.detach()
        with torch.no_grad():
            coding = self.coding
            made = coding.book.decoded(self.codes, self.scales, self.shape[coding.inputs])
            made = made.t().contiguous() if coding.transposed else made
            return made if dtype is None else made.to(dtype)

    def show(self, dtype: torch.dtype) -> Tensor:
        """Let the parameter have its values, in this dtype, for a forward; these values."""
        if not self._shown or self.parameter.dtype != dtype:
            self.parameter.data = self.value(dtype)
        self._shown += 1
        return self.parameter.detach()

    def hide(self) -> None:
        """The forward is over."""
        self._shown -= 1
        if not self._shown:
            self._leave()

    def _leave(self) -> None:
        self.parameter.data = _none(self.dtype, self.scales.device).expand(self.shape)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let the parameter have its values, which may be written: they are put into codes anew."""
        if self._open:
            yield
            return
        self.parameter.data = self.value()
        self._open = True
        try:
            yield
        finally:
            self._open = False
            self.put(self.parameter.detach())


@cache
def _none(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The one element of all of them."""
    return torch.full((), torch.nan, dtype=dtype, device=device)


def coded_of(parameter: Tensor) -> Coded | None:
    """Return the codes of a parameter; None: it lies as it is."""
    return vars(parameter).get(_SLOT)


def all_coded(parameters: Iterable[Tensor]) -> list[Coded]:
    """List the codes of those of some parameters that lie in codes."""
    return [held for parameter in parameters if (held := coded_of(parameter)) is not None]


def as_they_lie(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors that some parameters take memory for."""
    for parameter in parameters:
        held = coded_of(parameter)
        yield from (parameter,) if held is None else (held.codes, held.scales)


@contextmanager
def all_opened(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters have values that may be written; afterwards those that lay in codes do."""
    with ExitStack() as stack:
        for held in all_coded(parameters):
            stack.enter_context(held.opened())
        yield
