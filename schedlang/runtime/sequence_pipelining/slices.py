"""A microbatch cut along its sequence: the inputs of each slice, and what it weighs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir import nests as pytree
from schedlang.runtime.batch import Batch, dotted, rows_of, shares
from schedlang.runtime.sequence_pipelining.carry import Span

Weight = Callable[[Batch], float]
Place = tuple[str, int]  # a file and a line of it


@dataclass(frozen=True)
class Slicing:
    """How an unmodified model runs on slices of its sequences, as a probe has found it.

    carrier  `cache`: by the cache of transformers; `calls`: at its calls of torch's attention
    labels   the input that holds them; "" where there is none
    shift    how the label of a slice's last token, which is the next slice's first, gets there:
             `none`, the model does not shift; `given`, as `shift_labels`; `head`, the slice gets
             that label too, and the output of the module `head` one more row, which then has none
    along    inputs (by path) that run along the sequence; None: those whose sizes say so
    keys     those of them, of two dims, that are about keys: a slice sees them up to its end
    places   lines of the model that count positions by the length of what they are given
    draws    (module, turn) of a random draw -> per dim of one sample "", "rows" or "keys"
    left     whether sequences may be padded on the left
    grain    lengths are multiples of it, where ranks split sequences between them
    """

    count: int
    carrier: str
    labels: str = ""
    shift: str = "none"
    ignore: int = -100
    head: str = ""
    along: frozenset[str] | None = None
    keys: frozenset[str] = frozenset()
    places: frozenset[Place] = frozenset()
    draws: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    left: bool = True
    grain: int = 1

    def pieces(self, batch: Batch, lengths: tuple[int, ...] | None = None) -> list[Piece]:
        """The slices of a microbatch, equal in length but for one token where none are given.

        Raises Refusal S606 for a sequence shorter than the slices are many.
        """
        total, rows = length_of(batch), rows_of(batch)
        spans = _spans(total, lengths or even(total, self.count, self.grain))
        return [self._piece(batch, span, rows) for span in spans]

    def _piece(self, batch: Batch, span: Span, rows: int) -> Piece:
        more = int(self.shift != "none" and span.stop < span.total)

        def part(path: Any, value: Any) -> Any:
            name = dotted(path)
            if not (
                name in self.along
                if self.along is not None
                else runs_along(value, span.total, rows)
            ):
                return value
            if value.shape[-1 if value.dim() == 4 else 1] != span.total:
                raise _other_length(name, value, span.total)
            labels = name == self.labels
            until = span.stop + more
            own = value[:, span.start : until] if labels else self._cut(name, value, span)
            return own.contiguous()  # models take views of what they are given

        seen: dict[str, Any] = pytree.tree_map_with_path(part, dict(batch))
        if self.shift != "given" or self.labels not in seen:
            return Piece(span, seen, seen)
        labels = seen[self.labels]
        pad = labels.new_full((len(labels), 1 - more), self.ignore)
        own = {self.labels: labels[:, : span.length].contiguous()}
        shifted = torch.cat([labels[:, 1:], pad], 1)
        return Piece(span, seen | own | {"shift_labels": shifted}, seen)

    def _cut(self, name: str, value: Tensor, span: Span) -> Tensor:
        if value.dim() == 4:  # [rows, heads, queries, keys]
            own = value if value.shape[2] == 1 else value[:, :, span.start : span.stop]
            return own[..., : span.stop]
        first = 0 if name in self.keys else span.start
        return value[:, first : span.stop]


@dataclass(frozen=True)
class Piece:
    """A slice of a microbatch: what the model is given, and what is weighed."""

    span: Span
    inputs: dict[str, Any]
    weighed: dict[str, Any]


def length_of(batch: Batch) -> int:
    """The length of the sequences: dim 1 of the first tensor of integers that has two dims.

    Without one, dim 1 of the first tensor with at least two. Raises Refusal S656.
    """
    tensors = [t for t in pytree.tree_leaves(dict(batch)) if isinstance(t, Tensor) and t.dim() > 1]
    whole = [t for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    for tensor in (*whole, *tensors):
        return int(tensor.shape[1])
    raise Refusal(
        Diagnostic(
            "S656",
            "the batch has no sequence to split into slices",
            notes=("none of its tensors has a dim of tokens after the dim of samples",),
            helps=("leave `slices` out",),
        )
    )


def even(total: int, count: int, grain: int = 1) -> tuple[int, ...]:
    """Lengths that differ by at most `grain`, multiples of it as far as the whole is one."""
    *most, last = (grain * len(run) for run in shares(total // grain, count))
    return (*most, last + total % grain)


def _spans(total: int, lengths: tuple[int, ...]) -> list[Span]:
    if min(lengths) < 1:
        raise Refusal(
            Diagnostic(
                "S606",
                f"{total} tokens are too few for {len(lengths)} slices",
                helps=(f"use at most {total} slices, or longer sequences",),
            )
        )
    assert sum(lengths) == total, f"slices of {lengths} tokens for a sequence of {total}"
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    return [Span(k, at, at + n, total) for k, (at, n) in enumerate(zip(starts, lengths))]


def _other_length(name: str, value: Tensor, total: int) -> Refusal:
    return Refusal(
        Diagnostic(
            "S656",
            f"`{name}` is not as long as the sequence",
            notes=(f"its shape is {tuple(value.shape)}, but sequences have {total} tokens",),
            helps=("give all inputs of a batch the same length, as when the program was built",),
        )
    )


def masks_of(batch: Batch) -> frozenset[str]:
    """Inputs of two dims that say which tokens count: by their name, or because they are bools."""
    return frozenset(
        name
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() == 2
        if "mask" in name or value.dtype == torch.bool
    )


def along(batch: Batch) -> frozenset[str]:
    """Paths of the inputs that run along the sequence, by their sizes."""
    total, rows = length_of(batch), rows_of(batch)
    leaves, _ = pytree.tree_flatten_with_path(dict(batch))
    return frozenset(dotted(path) for path, value in leaves if runs_along(value, total, rows))


def sections(value: Any, total: int, rows: int) -> bool:
    """Whether a tensor holds several positions of every token: integers [sections, rows, tokens].

    So multimodal models have them, for rotations by time, height and width.
    """
    return (
        isinstance(value, Tensor)
        and value.dim() == 3
        and not value.is_floating_point()
        and value.shape[1:] == (rows, total)
    )


def runs_along(value: Any, total: int, rows: int) -> bool:
    """Whether a tensor runs along the sequence: [rows, tokens, ..] or a mask of four dims."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    if value.dim() == 4 and value.shape[-1] == total and value.shape[2] in (1, total):
        return value.shape[1] != total
    return value.shape[0] in (1, rows) and value.shape[1] == total
