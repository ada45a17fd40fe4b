"""Frozen parameters that are stored in codes, and have values only while a forward uses them.

The parameter itself stays, with name, shape and dtype, so that code that walks parameters finds it.
Its memory is one NaN element, shared by all: a read other than by `value` gives NaN, and torch
refuses a write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.storage.codebook import WeightQuantization

_SLOT = "_schedlang_coded"


class QuantizedParameter:
    """A parameter in codes."""

    def __init__(self, parameter: nn.Parameter, coding: WeightQuantization) -> None:
        assert not parameter.requires_grad
        self.parameter, self.coding = parameter, coding
        self.shape, self.dtype = parameter.shape, parameter.dtype
        self.codes = self.scales = torch.empty(0)
        self._users = 0  # forwards that use the values now
        self._writable = False
        self.encode(parameter.detach())
        vars(parameter)[_SLOT] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedParameter:
        """Raise TypeError: a copy of the module would have a parameter without values."""
        raise TypeError("a module with a quantised weight cannot be copied; its state can")

    def encode(self, value: Tensor) -> None:
        """Encode values; values that came from codes are unchanged."""
        rows = value.t() if self.coding.transposed else value
        self.codes, self.scales = self.coding.book.encode(rows)
        self._drop_values()

    def value(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the decoded values in a new tensor."""
        if self._writable:
            return self.parameter.detach()
        with torch.no_grad():
            coding = self.coding
            values = coding.book.decode(self.codes, self.scales, self.shape[coding.input_dim])
            values = values.t().contiguous() if coding.transposed else values
            return values if dtype is None else values.to(dtype)

    def materialize(self, dtype: torch.dtype) -> Tensor:
        """Give the parameter its values, in this dtype, for a forward; return them."""
        if not self._users or self.parameter.dtype != dtype:
            self.parameter.data = self.value(dtype)
        self._users += 1
        return self.parameter.detach()

    def release(self) -> None:
        """Drop the values after the last forward that uses them."""
        self._users -= 1
        if not self._users:
            self._drop_values()

    def _drop_values(self) -> None:
        self.parameter.data = _nan(self.dtype, self.scales.device).expand(self.shape)

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Give the parameter its values within a block; they may be written, and are encoded
        anew."""
        if self._writable:
            yield
            return
        self.parameter.data = self.value()
        self._writable = True
        try:
            yield
        finally:
            self._writable = False
            self.encode(self.parameter.detach())


@cache
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the one element shared by all parameters in codes."""
    return torch.full((), torch.nan, dtype=dtype, device=device)


def quantized_of(parameter: Tensor) -> QuantizedParameter | None:
    """Return the codes of a parameter; None if it has none."""
    return vars(parameter).get(_SLOT)


def list_quantized(parameters: Iterable[Tensor]) -> list[QuantizedParameter]:
    """Return the codes of all parameters that have codes."""
    return [codes for parameter in parameters if (codes := quantized_of(parameter)) is not None]


def stored_tensors(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors in which parameters are stored: themselves, or codes and scales."""
    for parameter in parameters:
        codes = quantized_of(parameter)
        yield from (parameter,) if codes is None else (codes.codes, codes.scales)


@contextmanager
def open_quantized(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Give parameters in codes their values within a block, to be written and encoded anew."""
    with ExitStack() as stack:
        for codes in list_quantized(parameters):
            stack.enter_context(codes.writable())
        yield
