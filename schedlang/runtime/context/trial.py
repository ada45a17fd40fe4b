"""A pass over a small model by parts of its sequences, side by side on one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.runtime.attend import Layout
from schedlang.runtime.attend.mask import Tags
from schedlang.runtime.context.install import At, install, windows
from schedlang.runtime.context.seat import Call, How, Seat
from schedlang.runtime.context.together import Together
from schedlang.runtime.context.tokens import Tokens
from schedlang.runtime.given import called
from schedlang.runtime.no_labels import no_labels
from schedlang.runtime.parts import Part, rows_of
from schedlang.runtime.recording.record import loss_of
from schedlang.runtime.slicing.slice_trial import Seen, Trial, gradients_of, running
from schedlang.runtime.training import Training


@dataclass
class Parts(Seen):
    """What the parts gave: their outputs, by place, and their common loss and gradients."""

    outputs: Sequence[Any] = ()


def layout_of(kind: str, lengths: Sequence[int]) -> Layout:
    """Runs of these lengths one after the other; for other kinds than that from both ends."""
    if kind == "contiguous":
        starts = [sum(lengths[:k]) for k in range(len(lengths))]
        return Layout(tuple((range(a, a + n),) for a, n in zip(starts, lengths)))
    left, runs, right = 0, [], sum(lengths)
    for n in lengths:
        front, back = n - n // 2, n // 2
        pair = (range(left, left + front), range(right - back, right))
        runs.append(tuple(run for run in pair if run))
        left, right = left + front, right - back
    return Layout(tuple(runs))


def parted(trial: Trial, tokens: Tokens, sites: Sequence[str], notes: Any = None) -> Parts:
    """Forward of every part, each in turn up to the next attention, and one backward."""
    model, count = trial.model, len(trial.lengths)
    layout = layout_of(tokens.kind, trial.lengths)
    together = Together(count)
    draws: dict[Any, tuple[int, ...]] = {}
    whole = Part(dict(trial.batch), tuple(range(rows_of(trial.batch))))
    exchange = _Meeting(together)
    parts = [tokens.part(whole, place, exchange, layout) for place in range(count)]
    weights = [trial.weight(part.weighed or part.inputs) for part in parts]
    at, inner = At(tokens), windows(tokens, None) if tokens.draws else None

    def one(part: Part, weight: float) -> tuple[Any, Tensor]:
        assert part.seat is not None
        sitting = at.sitting(part.seat, nullcontext())
        with running(trial, draws, inner), sitting, no_labels(weight):
            output = called(model, part.inputs)
            value = loss_of(output, part.inputs, trial.loss)
        assert value is not None, "the model returns no loss"
        return output, value

    with _ready(trial, tokens, sites, notes):
        made = together.run([partial(one, *each) for each in zip(parts, weights)])
        total = sum(weights) or 1.0
        shares = [v * (w / total) for (_, v), w in zip(made, weights) if w]
        value = torch.stack(shares).sum()
        with running(trial, {}):
            torch.autograd.backward(value)
    return Parts(value.detach(), gradients_of(model), draws, [output for output, _ in made])


@contextmanager
def _ready(trial: Trial, tokens: Tokens, sites: Sequence[str], notes: Any) -> Iterator[None]:
    """A model that runs by parts."""
    model = trial.model
    model.zero_grad(set_to_none=True)
    Training(model).on()
    hows: Mapping[str, How] = {site: How("trial") for site in sites}
    handles = install(model, tokens, hows)  # its modules say their names since the whole pass
    handles += notes(model) if notes is not None else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Meeting:
    """Attention by plain products, to what all parts have brought."""

    def __init__(self, together: Together) -> None:
        self.together = together

    def __call__(self, seat: Seat, how: How, call: Call) -> Tensor:
        met = self.together.meet(seat.place, (call.key, call.value, call.mask.tags))
        keys, values = (seat.layout.whole([one[k] for one in met], 2) for k in (0, 1))
        tags = Tags(*(_joined(seat.layout, column) for column in zip(*(one[2] for one in met))))
        groups = call.query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = call.query @ keys.mT
        scores = scores * (call.query.shape[-1] ** -0.5 if call.scale is None else call.scale)
        if call.mask.cap is not None:
            scores = call.mask.cap * torch.tanh(scores / call.mask.cap)
        scores = _masked(scores, seat, call, tags)
        if call.blind == "mean":
            scores = scores.masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)
        if call.mask.sinks is not None:
            sinks = call.mask.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1).nan_to_num()[..., : keys.shape[2]]
        if call.drawn is not None:
            weights = weights * call.drawn
        return F.dropout(weights, call.dropout) @ values

    def drawn(self, seat: Seat, p: float, rows: int, heads: int) -> Tensor:
        """See Exchange: what weights are multiplied by."""
        return F.dropout(torch.ones(rows, heads, seat.length, seat.layout.total), p)


def _joined(layout: Layout, parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return layout.whole(there, 1) if there else None


def _masked(scores: Tensor, seat: Seat, call: Call, tags: Tags) -> Tensor:
    rows, start, keys = [], 0, range(seat.layout.total)
    for run in seat.layout.runs[seat.place]:
        at = call.mask.tags.cut(start, start + len(run))
        mine = scores[:, :, start : start + len(run)]
        seen = call.mask.block(run, keys, at, tags, scores.device)
        rows.append(mine if seen is None else mine.masked_fill(~seen, -torch.inf))
        start += len(run)
    made, given = torch.cat(rows, 2), call.mask.rows
    if given is None:
        return made
    return made.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else made + given
