"""Recurrent networks of several layers, layer by layer, with drawn dropout between the layers.

torch computes all layers of an LSTM in one call and drops inside of it.  One call for each layer
computes the same, and what lies between is in the open: the mask of each layer is a draw of its
own, over the rows and tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from schedlang.runtime.drawing.draws import Draw


FUNCTIONS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def packed(args: Sequence[Any]) -> bool:
    """Is it the form for packed sequences: (data, sizes of batches, states, weights, ..)?

    Its rows are tokens of all samples, sorted by length: no sample has rows of its own.
    """
    return not isinstance(args[3], bool)


def drops(args: Sequence[Any]) -> bool:
    """Does a call draw masks: (.., layers, dropout, train, ..), between layers only?"""
    at = next(place for place, value in enumerate(args) if type(value) is int)
    return bool(args[at] > 1 and args[at + 1] and args[at + 2])


def recurrent(
    draw: Draw, func: Callable[..., Any], input: Tensor, hx: Any, params: Any, *rest: Any
) -> Any:  # fmt: skip
    """torch.lstm, gru, rnn_tanh, rnn_relu: (input, states, weights, ..) to (output, *states)."""
    called = (input, hx, params, *rest)
    if packed(called) or not drops(called):
        return func(*called)
    has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
    given: tuple[Any, ...] = (train, bidirectional, batch_first)
    several = isinstance(hx, (list, tuple))  # an LSTM has two states
    states, ways = tuple(hx) if several else (hx,), 2 if bidirectional else 1
    each = len(params) // num_layers
    found: list[Sequence[Tensor]] = []
    for layer in range(num_layers):
        if layer:
            input = _dropped(draw, input, dropout, batch_first)
        own = params[layer * each : (layer + 1) * each]
        start = tuple(state[layer * ways : (layer + 1) * ways] for state in states)
        input, *last = func(input, start if several else start[0], own, has_biases, 1, 0.0, *given)
        found.append(last)
    return (input, *(torch.cat(list(ends)) for ends in zip(*found)))


def _dropped(draw: Draw, value: Tensor, p: float, batch_first: bool) -> Tensor:
    rows = value if batch_first else value.transpose(0, 1)  # samples come first in a draw
    keep = draw.keep(rows.shape, p, value.device).to(value.dtype)
    factor = keep / (1 - p) if p < 1 else keep * 0
    return value * (factor if batch_first else factor.transpose(0, 1))
