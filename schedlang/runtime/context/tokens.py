"""A microbatch split by tokens: the inputs of each rank, and what its part weighs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime import nests as pytree
from schedlang.runtime.attend import Layout
from schedlang.runtime.context.known import known
from schedlang.runtime.context.seat import Exchange, Seat
from schedlang.runtime.parts import Batch, Part, dotted, rows_of
from schedlang.runtime.slicing.slices import Place, length_of, runs_along, sections


@dataclass(frozen=True)
class Tokens:
    """How an unmodified model runs on some tokens of its sequences, as a probe has found it.

    labels     the input that holds them; "" where there is none
    shift      how a token gets its label, which another rank may have: `none`, the model does not
               shift; `given`, as `shift_labels`; `head`, labels come moved by one, and the output
               of the module `head` has one more row, which gets none
    along      inputs (by path) that run along the sequence; None: those whose sizes say so
    positions  whether the model is given `position_ids`
    documents  whether positions that start anew within a row tell documents apart
    places     lines of the model that count positions by the length of what they are given
    products   lines of the model that multiply queries and keys
    follow     whether what the model makes of the batch's integers and of positions alone is made
               for the whole sequence
    draws      (module, turn) of a random draw -> per dim of one sample "", "rows" or "keys"
    outputs    leaf of the output (by path) -> its dim of tokens
    """

    kind: str
    ranks: int
    labels: str = ""
    shift: str = "none"
    ignore: int = -100
    head: str = ""
    along: frozenset[str] | None = None
    positions: bool = False
    documents: bool = False
    places: frozenset[Place] = frozenset()
    products: frozenset[Place] = frozenset()
    follow: bool = False
    draws: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)

    def layout(self, batch: Batch) -> Layout:
        """Which tokens of a batch each rank has."""
        return Layout.of(self.kind, length_of(batch), self.ranks)

    def sizes(self, batch: Batch, place: int = 0) -> Callable[[Any], tuple[int, ...]]:
        """From the shape of a value for whole sequences to that of a place's tokens."""
        layout = self.layout(batch)

        def resized(shape: Any) -> tuple[int, ...]:
            runs = len(shape) > 1 and shape[1] == layout.total
            return (shape[0], layout.counts[place], *shape[2:]) if runs else tuple(shape)

        return resized

    def part(
        self, part: Part, place: int, exchange: Exchange | None, layout: Layout | None = None
    ) -> Part:
        """The tokens of a microbatch that the rank at a place has."""
        batch = part.inputs
        layout = layout or self.layout(batch)
        seat = Seat(layout, place, exchange, more=self.shift == "head")
        inputs = self._cut(batch, seat)
        if self.positions and "position_ids" not in batch:
            inputs["position_ids"] = seat.positions(_device(batch)).unsqueeze(0)
        if self.documents:
            seat = replace(seat, documents=_documents(batch, seat))
        if self.shift == "none" or self.labels not in batch:
            return replace(part, inputs=inputs, seat=seat)
        labels = batch[self.labels]
        # what the label of a token is: that of the next one, wherever that lies
        last = labels.new_full((len(labels), 1), self.ignore)
        own = layout.take(torch.cat([labels[:, 1:], last], 1), 1, place)
        moved = inputs | {self.labels: torch.cat([last, own], 1)}
        given = inputs | {"shift_labels": own} if self.shift == "given" else moved
        return replace(part, inputs=given, weighed=moved, seat=seat)

    def _cut(self, batch: Batch, seat: Seat) -> dict[str, Any]:
        total, rows = seat.layout.total, rows_of(batch)

        def cut(path: Any, value: Any) -> Any:
            name = dotted(path)
            if sections(value, total, rows):
                return seat.layout.take(value, 2, seat.place)
            runs = runs_along(value, total, rows)
            if not (name in self.along if self.along is not None else runs):
                return value
            if not runs or value.dim() == 4:
                raise _unfit(name, value, total)
            if self.follow and value.dim() == 2 and name != self.labels and not (
                value.is_floating_point()):  # fmt: skip
                return known(seat, value, 1)
            return seat.layout.take(value, 1, seat.place)

        made: dict[str, Any] = pytree.tree_map_with_path(cut, dict(batch))
        return made


def _documents(batch: Batch, seat: Seat) -> Tensor | None:
    """Which document each token is of, where positions say so: they start anew in a row."""
    positions = batch.get("position_ids")
    if positions is None or "attention_mask" in batch:
        return None
    jumps = torch.diff(positions, dim=-1, prepend=positions[:, :1] - 1) != 1
    numbers = jumps.cumsum(-1).expand(rows_of(batch), -1)
    return seat.layout.take(numbers, 1, seat.place)


def _device(batch: Batch) -> torch.device:
    found = [leaf for leaf in pytree.tree_leaves(dict(batch)) if isinstance(leaf, Tensor)]
    return found[0].device


def _unfit(name: str, value: Tensor, total: int) -> Refusal:
    why = "masks of [queries, keys] cannot be split" if value.dim() == 4 else (
        f"sequences have {total} tokens")  # fmt: skip
    return Refusal(
        Diagnostic(
            "S656", f"`{name}` cannot be split by tokens",
            notes=(f"its shape is {tuple(value.shape)}; {why}",),
            helps=("give all inputs of a batch the same length, and masks of shape [rows,"
                   " tokens]",),
        )
    )  # fmt: skip
