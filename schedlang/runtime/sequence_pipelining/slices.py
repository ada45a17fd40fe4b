"""A microbatch that is split along its sequence, and a model that runs slice by slice.

`Slicing` splits microbatches; `SliceRunner` puts modes, caches and hooks around the model's own
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.runtime import scope
from schedlang.runtime.batch import (
    Batch,
    MissingOutput,
    can_stack,
    dotted_path,
    row_count,
    run_forward,
    split_rows,
    stack_outputs,
)
from schedlang.runtime.batch_weights import (
    Number,
    are_on_host,
    as_numbers,
    filled_like,
    nonzero_weight,
    sum_numbers,
)
from schedlang.runtime.device import plain_numbers
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import LogicalWindow, WindowOfDraw, narrow_window
from schedlang.runtime.sequence_pipelining.carried_keys import (
    CarriedKeys,
    Place,
    SliceMode,
    SliceSpan,
    SliceVisit,
    cache_argument,
    slice_cache,
)
from schedlang.runtime.zero_weight_loss import zero_unlabelled_loss

Weight = Callable[[Batch], float]


@dataclass(frozen=True, kw_only=True)
class SplitSequences:
    """The split of an unmodified model's sequences into parts; found by a probe.

    labels  the input with the labels; "" if there is none
    shift   how the last token of a part gets its label, which the next part may have: "none", the
            model does not shift labels; "given", as the input `shift_labels`; "head", the part gets
            that label too, and the output of the module `head` one more row without a label
    ignore  the label that does not count
    along   inputs (by path) that are split along the sequence; None: decided by their sizes
    places  lines of the model that count positions by the length of their input
    draws   (module, turn) of a random draw -> for each dim of one sample "", "rows" or "keys"
    """

    labels: str = ""
    shift: str = "none"
    ignore: int = -100
    head: str = ""
    along: frozenset[str] | None = None
    places: frozenset[Place] = frozenset()
    draws: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)

    def is_along(self, name: str, value: Any, total: int, rows: int) -> bool:
        """Return whether an input is split along the sequence."""
        return has_token_dim(value, total, rows) if self.along is None else name in self.along

    def lengthen_head(self, model: nn.Module) -> list[RemovableHandle]:
        """Add a row to the output of module `head` if labels are shifted; return hook handles."""
        if self.shift != "head" or not self.head:
            return []
        return [model.get_submodule(self.head).register_forward_hook(_append_row)]

    def windows(self, inner: WindowOfDraw | None) -> WindowOfDraw:
        """Return the window of a logical dropout mask for a part, within `inner`'s windows."""

        def window(site: str, call: int, shape: tuple[int, ...]) -> LogicalWindow | None:
            inner_window = inner(site, call, shape) if inner else None
            visit = scope.current_visit()
            if visit is None:
                return inner_window
            dims, total = self.draws.get((site, call)), visit.total
            if dims is None or len(dims) != len(shape):
                raise self.unknown_draw(site)
            if all(size == total for size, role in zip(shape, dims) if role):
                return inner_window  # an attention draws the full mask, and takes its part itself
            runs = visit.runs()
            return narrow_window(inner_window, shape, total, [runs.get(role) for role in dims])

        return window

    def unknown_draw(self, site: str) -> Refusal:
        """Return the refusal of a random draw whose dims are not known."""
        raise NotImplementedError


def _append_row(module: nn.Module, args: Any, output: Any) -> Any:
    """Append a row without a label to the output of a part that has the next part's first label."""
    visit = scope.current_visit()
    if visit is None or not visit.more:
        return output
    return torch.cat([output, output.new_zeros(output[:, :1].shape)], 1)


@dataclass(frozen=True)
class Slicing(SplitSequences):
    """The split of a model's sequences into slices that run one after the other.

    count                the number of slices
    carrier              how keys and values are carried: "cache", by a cache of transformers;
                         "calls", at the model's calls of torch's attention
    keys                 inputs of two dims along the sequence that describe keys: a slice gets them
                         up to its end
    allows_left_padding  whether sequences may be padded on the left
    multiple             lengths are multiples of it, if ranks split sequences
    """

    count: int
    carrier: str
    keys: frozenset[str] = frozenset()
    allows_left_padding: bool = True
    multiple: int = 1

    def unknown_draw(self, site: str) -> Refusal:
        """Return the refusal S655 of a random draw whose dims are not known."""
        return Refusal.of(
            "S655",
            f"`{site}` draws random numbers that it did not draw at build",
            notes=("a slice must find its part of the numbers drawn for the full sequence",),
            helps=("leave `slices` out of the row",),
        )

    def split_batch(
        self, batch: Batch, lengths: tuple[int, ...] | None = None
    ) -> list[SequenceSlice]:
        """Split a microbatch into slices; without `lengths` they are as equal as possible.

        Raises Refusal S606 for a sequence with fewer tokens than slices.
        """
        total, rows = sequence_length(batch), row_count(batch)
        spans = _spans(total, lengths or even_lengths(total, self.count, self.multiple))
        return [self._piece(batch, span, rows) for span in spans]

    def _piece(self, batch: Batch, span: SliceSpan, rows: int) -> SequenceSlice:
        extra = int(self.shift != "none" and span.stop < span.total)

        def part(path: Any, value: Any) -> Any:
            name = dotted_path(path)
            if not self.is_along(name, value, span.total, rows):
                return value
            if value.shape[-1 if value.dim() == 4 else 1] != span.total:
                raise _other_length(name, value, span.total)
            labels = name == self.labels
            until = span.stop + extra
            own_part = value[:, span.start : until] if labels else self._cut(name, value, span)
            return own_part.contiguous()  # models take views of their inputs

        parts: dict[str, Any] = pytree.tree_map_with_path(part, dict(batch))
        if self.shift != "given" or self.labels not in parts:
            return SequenceSlice(span, parts, parts)
        labels = parts[self.labels]
        pad = labels.new_full((len(labels), 1 - extra), self.ignore)
        own_labels = {self.labels: labels[:, : span.length].contiguous()}
        shifted = torch.cat([labels[:, 1:], pad], 1)
        return SequenceSlice(span, parts | own_labels | {"shift_labels": shifted}, parts)

    def _cut(self, name: str, value: Tensor, span: SliceSpan) -> Tensor:
        if value.dim() == 4:  # [rows, heads, queries, keys]
            rows = value if value.shape[2] == 1 else value[:, :, span.start : span.stop]
            return rows[..., : span.stop]
        start = 0 if name in self.keys else span.start
        return value[:, start : span.stop]


@dataclass(frozen=True)
class SequenceSlice:
    """A slice of a microbatch: the model's inputs, and the batch that decides its weight."""

    span: SliceSpan
    inputs: dict[str, Any]
    weight_batch: dict[str, Any]


def sequence_length(batch: Batch) -> int:
    """Return the length of sequences: dim 1 of the first tensor of integers with two dims.

    Without such a tensor, dim 1 of the first tensor with at least two dims.  Raises Refusal S656.
    """
    tensors = [t for t in pytree.tree_leaves(dict(batch)) if isinstance(t, Tensor) and t.dim() > 1]
    ids = [t for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    for tensor in (*ids, *tensors):
        return int(tensor.shape[1])
    raise Refusal.of(
        "S656",
        "the batch has no sequence to split into slices",
        notes=("none of its tensors has a dim of tokens after the dim of samples",),
        helps=("leave `slices` out",),
    )


def even_lengths(total: int, count: int, grain: int = 1) -> tuple[int, ...]:
    """Return lengths of `count` slices that differ by at most `grain`.

    They are multiples of `grain`, except the last one if `total` is not a multiple.
    """
    *earlier, last = (grain * len(rows) for rows in split_rows(total // grain, count))
    return (*earlier, last + total % grain)


def _spans(total: int, lengths: tuple[int, ...]) -> list[SliceSpan]:
    if min(lengths) < 1:
        raise Refusal.of(
            "S606",
            f"{total} tokens are too few for {len(lengths)} slices",
            helps=(f"use at most {total} slices, or longer sequences",),
        )
    assert sum(lengths) == total, f"slices of {lengths} tokens for a sequence of {total}"
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    return [SliceSpan(k, low, low + n, total) for k, (low, n) in enumerate(zip(starts, lengths))]


def _other_length(name: str, value: Tensor, total: int) -> Refusal:
    return Refusal.of(
        "S656",
        f"`{name}` is not as long as the sequence",
        notes=(f"its shape is {tuple(value.shape)}, but sequences have {total} tokens",),
        helps=("give all inputs of a batch the same length, as when the program was built",),
    )


def token_masks(batch: Batch) -> frozenset[str]:
    """Return the inputs of two dims that mask tokens, by their name or their boolean dtype."""
    return frozenset(
        name
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() == 2
        if "mask" in name or value.dtype == torch.bool
    )


def sequence_inputs(batch: Batch) -> frozenset[str]:
    """Return the paths of the inputs that are split along the sequence, by their sizes."""
    total, rows = sequence_length(batch), row_count(batch)
    leaves, _ = pytree.tree_flatten_with_path(dict(batch))
    return frozenset(
        dotted_path(path) for path, value in leaves if has_token_dim(value, total, rows)
    )


def is_multi_position(value: Any, total: int, rows: int) -> bool:
    """Return whether a tensor has several positions for each token.

    These are integers [sections, rows, tokens], which multimodal models use for rotary embeddings
    by time, height and width.
    """
    return (
        isinstance(value, Tensor)
        and value.dim() == 3
        and not value.is_floating_point()
        and value.shape[1:] == (rows, total)
    )


def has_token_dim(value: Any, total: int, rows: int) -> bool:
    """Return whether a tensor has a dim of tokens: [rows, tokens, ..], or a mask of four dims."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    if value.dim() == 4 and value.shape[-1] == total and value.shape[2] in (1, total):
        return value.shape[1] != total
    return value.shape[0] in (1, rows) and value.shape[1] == total


Loss = Callable[[Any, Mapping[str, Any]], Tensor]
Lengths = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class WeightedSlice:
    """A slice, and its share in the mean loss of its microbatch."""

    piece: SequenceSlice
    share: Number


class SliceRunner:
    """Runs `model` on slices as `slicing` describes; one object for all stages of a rank.

    weight   returns the weight of a part of a batch in the mean loss
    lengths  (tokens, slices) -> the length of each slice; default: equal lengths
    """

    def __init__(
        self, model: nn.Module, slicing: Slicing, weight: Weight, *, lengths: Lengths | None = None
    ) -> None:
        self.slicing, self.weight, self.lengths = slicing, weight, lengths
        self.mode = SliceMode(slicing.places) if slicing.carrier == "calls" else None
        self.cache = cache_argument(model) if slicing.carrier == "cache" else None
        self.handles = slicing.lengthen_head(model)

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self.handles:
            handle.remove()

    def split_batch(self, batch: Batch) -> list[WeightedSlice]:
        """Return the slices of a microbatch."""
        return self.split_batches([batch])[0]

    def split_batches(self, batches: Sequence[Batch]) -> list[list[WeightedSlice]]:
        """Return the slices of each microbatch; weights are computed on the labels' device."""
        all_slices = [self._pieces(batch) for batch in batches]
        weight = getattr(self.weight, "counted", self.weight)
        values = iter(
            as_numbers([weight(part.weight_batch) for slices in all_slices for part in slices])
        )
        result = []
        for slices in all_slices:
            weights = [next(values) for _ in slices]
            total = nonzero_weight(sum_numbers(weights))
            result.append([WeightedSlice(part, w / total) for part, w in zip(slices, weights)])
        return result

    def _pieces(self, batch: Batch) -> list[SequenceSlice]:
        if not self.slicing.allows_left_padding:
            _check_left_padding(batch)
        _check_packed(batch)
        total = sequence_length(batch)
        lengths = self.lengths(total, self.slicing.count) if self.lengths else None
        return self.slicing.split_batch(batch, lengths)

    @contextmanager
    def forward(self, part: WeightedSlice, carried: CarriedKeys) -> Iterator[dict[str, Any]]:
        """Context of a slice's forward; yields the keyword arguments of the model."""
        piece = part.piece
        visit = SliceVisit(carried, piece.span)
        modes = enter_modes(*([self.mode] if self.mode is not None else []))
        with scope.enter_slice(visit), modes, zero_unlabelled_loss(part.share):
            if self.cache:
                yield piece.inputs | {self.cache: slice_cache(piece.span), "use_cache": True}
            else:
                yield piece.inputs


def _check_left_padding(batch: Batch) -> None:
    for name in token_masks(batch):
        value = batch[name]
        if not value.is_meta and not bool(value[:, 0].all()):
            raise Refusal.of(
                "S657",
                f"`{name}` pads sequences on the left",
                notes=("a first slice of only padding has no key to attend to",),
                helps=("pad on the right", "or leave `slices` out of the row"),
            )


def _check_packed(batch: Batch) -> None:
    """Refuse (S658) documents that only positions separate: with a cache they would mix."""
    positions = batch.get("position_ids")
    if positions is None or "attention_mask" in batch or positions.is_meta:
        return
    if bool((positions[..., 1:] <= positions[..., :-1]).any()):
        raise Refusal.of(
            "S658",
            "`position_ids` restart within a row",
            notes=("documents packed into one row would attend to each other across slices",),
            helps=("leave `slices` out of the row", "or put one document into each row"),
        )


# -- outputs and masks ---------------------------------------------------------------------------


def whole_loss(losses: Sequence[Tensor], slices: Sequence[WeightedSlice]) -> Tensor:
    """Return the mean loss of a microbatch; the loss of a slice with share 0 may be NaN."""
    all_shares = [part.share for part in slices]
    if are_on_host(all_shares):
        shares = [(value, share) for value, share in zip(losses, all_shares) if share]
        return torch.stack([v * share for v, share in shares]).sum() if shares else losses[0]
    share_values = torch.stack([filled_like(losses[0], share) for share in all_shares])
    parts = torch.stack([*losses])
    mean_loss = torch.where(share_values > 0, parts * share_values, 0.0).sum(0)
    return torch.where((share_values > 0).any(), mean_loss, losses[0])


def join_outputs(outputs: Sequence[Any], slices: Sequence[WeightedSlice]) -> Any:
    """Join the outputs of slices to the output of a microbatch, along tokens if there are any."""
    lengths = [p.piece.span.length for p in slices]
    shares = plain_numbers([p.share for p in slices])
    flat = [pytree.tree_flatten(output) for output in outputs]
    joined = [
        _concatenate_tokens(values, lengths)
        if _have_tokens(values, lengths)
        else stack_outputs(values, [1] * len(values), shares)
        for values in zip(*(leaves for leaves, _ in flat))
    ]
    checked = [
        value if can_stack(value) else MissingOutput("slices of it cannot be concatenated")
        for value in joined
    ]
    return pytree.tree_unflatten(checked, flat[0][1])


def _have_tokens(values: Sequence[Any], lengths: Sequence[int]) -> bool:
    tensors = all(isinstance(v, Tensor) and v.dim() > 1 for v in values)
    return tensors and all(v.shape[1] in (n, n + 1) for v, n in zip(values, lengths))


def _concatenate_tokens(values: Sequence[Any], lengths: Sequence[int]) -> Tensor:
    return torch.cat([value[:, :n] for value, n in zip(values, lengths)], 1)


# -- one process ---------------------------------------------------------------------------------


def run_slices(
    slices: SliceRunner, model: nn.Module, batch: Batch, loss: Loss | None = None
) -> tuple[Tensor, list[Any]]:
    """Run forward and backward of a microbatch by slices on one process.

    Returns the loss, and the outputs of the slices.  Gradients are added to the parameters'
    `.grad`.
    """
    carried, parts = CarriedKeys(), slices.split_batch(batch)
    outputs, losses = [], []
    for part in parts:
        with slices.forward(part, carried) as inputs:
            output, value = run_forward(model, inputs, loss)
        assert value is not None, "the model returns no loss"
        outputs.append(output)
        losses.append(value)
    for part, value in reversed(list(zip(parts, losses))):
        run_backward(carried, part, value)
    return whole_loss([v.detach() for v in losses], parts), outputs


def run_backward(carried: CarriedKeys, part: WeightedSlice, value: Tensor) -> None:
    """Run the backward of one slice from its loss `value` and from its own keys and values."""
    index = part.piece.span.index
    edges, grads = carried.backward_roots(index)
    roots: list[Any] = [value, *edges] if value.requires_grad else list(edges)
    loss_grads = [filled_like(value, part.share)] if value.requires_grad else []
    if roots:
        torch.autograd.backward(roots, [*loss_grads, *grads])
    carried.free(index)
