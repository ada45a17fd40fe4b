"""A microbatch that is split by tokens: the inputs of each rank, and values of the full sequence.

* `SequenceShard`: the tokens of one rank, and the exchange of keys and values with other ranks.
* `FullSequenceTensor`: values that every rank has for the full sequence, i.e. integers of the
  batch, positions, and whatever the model computes from them alone (positions by a cumulative sum
  over a mask, biases by distances).  These are computed for the full sequence without
  communication; a rank uses its own tokens of them.
* `TokenSplit`: how a model runs on a rank's tokens; splits microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Span
from schedlang.ir import pytree
from schedlang.runtime import scope
from schedlang.runtime.batch import Batch, BatchPart, dotted_path, row_count
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.context_parallel.token_layout import AttentionMask, SequenceLayout
from schedlang.runtime.sequence_pipelining.carried_keys import Place, index_items
from schedlang.runtime.sequence_pipelining.slices import (
    SplitSequences,
    has_token_dim,
    is_multi_position,
    sequence_length,
)

UNSPLIT = "S661"


@dataclass(frozen=True)
class AttentionMethod:
    """The method by which an attention exchanges keys and values; its groups, outermost first."""

    method: str
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of an attention call; query, key, value: [rows, heads, local tokens, size].

    dropout_mask   the result of `SequenceShard.draw`, if the model's own dropout of weights ran
                   before
    unseen_result  the result for a query that sees no key: "zero", or the "mean" of all values;
                   "scores": the mean, and its scores have a gradient (`eager` attention of
                   transformers, which adds very low numbers to hidden scores)
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: AttentionMask
    scale: float | None = None
    dropout: float = 0.0
    unseen_result: Literal["zero", "mean", "scores"] = "zero"
    dropout_mask: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.query.shape[:-1], self.value.shape[-1])


class Exchange(Protocol):
    """A function that computes attention of local queries to the keys of all ranks."""

    def __call__(
        self, shard: SequenceShard, method: AttentionMethod, call: AttentionCall
    ) -> Tensor:
        """Compute the attention of a shard's tokens to the full sequence."""

    def draw_dropout(self, shard: SequenceShard, p: float, rows: int, heads: int) -> Any:
        """Draw the dropout mask of attention weights for the running module."""


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """A rank's tokens of a sequence.

    place      the rank's place in the layout
    documents  integers [rows, local tokens]: the document of each token; None: one document
    padding    the batch's mask, [rows, tokens of the sequence]: false for padding
    more       the output of the model's head gets one more row, for shifted labels
    exchange   computes attention; None: for shapes only
    """

    layout: SequenceLayout
    place: int
    exchange: Exchange | None = None
    documents: Tensor | None = None
    more: bool = False
    padding: Tensor | None = None

    @property
    def index(self) -> int:
        """The number of this shard among the shards of the sequence."""
        return self.place

    @property
    def length(self) -> int:
        """The number of local tokens."""
        return self.layout.counts[self.place]

    @property
    def total(self) -> int:
        """The number of tokens of the sequence."""
        return self.layout.total

    def runs(self) -> dict[str, Any]:
        """Return the positions of the local tokens, and of the keys that they see."""
        return {"rows": self.positions(), "keys": range(self.total)}

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of the local tokens in the sequence."""
        return self.layout.positions(self.place, device)

    def chunks(self, size: int) -> Tensor | None:
        """Return [rows, local tokens]: the number of each token's chunk of `size` tokens.

        Chunks are counted from the first token that is no padding.  None without a padding mask:
        then chunks are counted from the first position.
        """
        if self.padding is None:
            return None
        left_padding = (self.padding.cumsum(-1) == 0).sum(-1, keepdim=True)
        return (self.positions(left_padding.device) - left_padding).div(size, rounding_mode="floor")

    def on_meta(self) -> SequenceShard:
        """Return the shard for shapes only, without an exchange."""
        padding = None if self.padding is None else self.padding.to("meta")
        return replace(self, exchange=None, padding=padding)

    def attend(self, method: AttentionMethod, call: AttentionCall) -> Tensor:
        """Compute the attention of the local tokens to the full sequence."""
        if self.exchange is None:
            return call.query.new_empty(call.shape)
        return self.exchange(self, method, call)

    def draw(self, p: float, rows: int, heads: int) -> Any:
        """Draw the dropout mask of an attention call, for `Call.drawn`; None without exchange."""
        return None if self.exchange is None else self.exchange.draw_dropout(self, p, rows, heads)


def current_shard() -> SequenceShard | None:
    """Return the shard for which this thread runs a model; None if sequences are not split."""
    visit: Any = scope.current_visit()
    return visit if isinstance(visit, SequenceShard) else None


class FullSequenceTensor(Tensor):
    """A tensor of a rank's tokens; `whole` is the value of the full sequence along dim `at`.

    `at` is negative.  A `pair` has tokens along two dims, queries and keys: in `whole` the queries
    are the rank's own.  As an operand it is a plain tensor of the rank's tokens.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    whole: Tensor | None
    at: int
    pair: bool


def take_shard(
    shard: SequenceShard, full: Tensor, dim: int, pair: bool = False
) -> FullSequenceTensor:
    """Return a shard's tokens of a value with the full sequence along a dim."""
    dim = dim if dim < 0 else dim - full.dim()
    local = full.index_select(dim, shard.positions(full.device)).as_subclass(FullSequenceTensor)
    local.whole, local.at, local.pair = full, dim, pair
    return local


def full_sequence_of(value: Any) -> Tensor | None:
    """Return the full sequence of a `FullSequenceTensor` value; None for other values."""
    return value.whole if isinstance(value, FullSequenceTensor) else None


def to_plain(value: Any) -> Any:
    """Return a value as a plain tensor of the rank's tokens."""
    return value.as_subclass(Tensor) if isinstance(value, FullSequenceTensor) else value


def expand_over_keys(shard: SequenceShard, added: Tensor) -> Tensor | None:
    """Return values for scores as [.., local queries or 1, keys of the full sequence].

    None if the values of other ranks' keys are not known.
    """
    value: Tensor = added
    if isinstance(added, FullSequenceTensor) and added.whole is not None and added.at == -1:
        value = added.whole
    total = shard.layout.total
    if value.is_meta and value.dim() > 1 and value.shape[-1] == shard.length > 1:
        # on meta only sizes are known, and the model computes nothing from the integers
        padding = value.new_empty((*value.shape[:-1], total - shard.length))
        value = torch.cat([value, padding], -1)
    if (
        value.dim() < 2
        or value.shape[-1] not in (1, total)
        or value.shape[-2] not in (1, shard.length)
    ):
        return None
    return value.expand(*value.shape[:-1], total)


def compute_on_full(
    shard: SequenceShard, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Compute a function for the full sequence; None if the function must be called unchanged."""
    tensors = [x for x in torch_pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor)]
    full_tensors = [x for x in tensors if full_sequence_of(x) is not None]
    if not full_tensors or func not in RULES:
        return _drop_full(func, args)
    try:
        result = RULES[func](_Operands(shard, func, args, kwargs, tensors, full_tensors))
    except (RuntimeError, IndexError):  # the model's sizes do not fit the full sequence
        result = None
    return _drop_full(func, args) if result is None else result


def _drop_full(func: Any, args: Sequence[Any]) -> None:
    """Drop the full sequence of a value into which only this rank's tokens are written."""
    name = getattr(func, "__name__", "")
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if writes and args and isinstance(args[0], FullSequenceTensor):
        args[0].whole = None


@dataclass
class _Operands:
    """A call, its tensors (`held`), and the `FullSequenceTensor` tensors among them (`there`)."""

    shard: SequenceShard
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    held: list[Tensor]
    there: list[Any]

    @property
    def pair(self) -> bool:
        """Whether the result has tokens along two dims."""
        return any(x.pair for x in self.there) or len({x.at for x in self.there}) > 1

    def on_whole(self, dim: int, args: Any = None) -> Any:
        """Run the call on values of the full sequence along a dim."""

        def full_value(value: Any) -> Any:
            full = full_sequence_of(value)
            return full if full is not None and value.at == dim else value

        return self.func(
            *torch_pytree.tree_map(full_value, args or tuple(self.args)),
            **torch_pytree.tree_map(full_value, dict(self.kwargs)),
        )

    def placed(self, local: Any, full: Any) -> FullSequenceTensor | None:
        """Return a result as `FullSequenceTensor`; None unless local and full shape differ in one
        token dim."""
        if not isinstance(full, Tensor) or local.dim() != full.dim():
            return None
        dims = [d for d, (a, b) in enumerate(zip(local.shape, full.shape)) if a != b]
        if len(dims) != 1 or full.shape[dims[0]] != self.shard.layout.total:
            return None
        if local.shape[dims[0]] != self.shard.length:
            return None
        return take_shard(self.shard, full, dims[0], self.pair)


# -- rules ---------------------------------------------------------------------------------------


def _pointwise(case: _Operands) -> FullSequenceTensor | None:
    """Apply an elementwise call: along the last token dim of all operands."""
    dim = max(x.at for x in case.there)
    for x in case.held:
        if full_sequence_of(x) is None and x.dim() >= -dim and x.shape[dim] != 1:
            return None  # of the rank's tokens only
    full = case.on_whole(dim)
    fits = isinstance(full, Tensor) and full.shape[dim] == case.shard.layout.total
    return take_shard(case.shard, full, dim, case.pair) if fits else None


def _moved(case: _Operands) -> FullSequenceTensor | None:
    """Apply a call that adds, removes or moves dims, or a cumulative sum."""
    dim = case.there[0].at
    return case.placed(case.func(*case.args, **case.kwargs), case.on_whole(dim))


def _concatenated(case: _Operands) -> FullSequenceTensor | None:
    """Apply a concatenation along a dim that is not the dim of tokens."""
    same_dim = len(case.there) == len(case.held) and len({x.at for x in case.there}) == 1
    return _moved(case) if same_dim else None


def _reduced(case: _Operands) -> Any:
    """Apply a reduction: over tokens the result is that of the full sequence."""
    if len(case.held) > 1:
        return _pointwise(case)
    local, full = case.func(*case.args, **case.kwargs), case.on_whole(case.there[0].at)
    if isinstance(full, Tensor) and full.shape == local.shape:
        return full
    return case.placed(local, full) if isinstance(full, Tensor) else None


def _item(case: _Operands) -> Any:
    """Apply indexing: new dims and full slices of a value, or a lookup in a table by pairs."""
    table, index = case.args
    if full_sequence_of(table) is None:
        return _looked_up(case, 1 - table.dim()) if full_sequence_of(index) is not None else None
    items, length = index_items(index), case.shard.length
    runs = [item for item in items if isinstance(item, slice)]
    if any(isinstance(item, Tensor) for item in items) or any(
        s.start not in (None, 0) or s.stop not in (None, length) or s.step not in (None, 1)
        for s in runs
    ):
        return None
    full = tuple(slice(None) if isinstance(item, slice) else item for item in items)
    local = case.func(table, index)
    return case.placed(local, case.on_whole(table.at, (table, full)))


def _looked_up(case: _Operands, shift: int = -1) -> FullSequenceTensor | None:
    """Apply a lookup by pairs of tokens; a lookup by tokens is local, and not followed."""
    (pair,) = case.there
    return (
        take_shard(case.shard, case.on_whole(pair.at), pair.at + shift, True) if pair.pair else None
    )


def _shaped(case: _Operands) -> FullSequenceTensor | None:
    """Apply a reshape that keeps the dim of tokens and the sizes behind it."""
    (x,), length, total = case.there, case.shard.length, case.shard.layout.total
    if x is not case.args[0]:
        return None
    local = case.func(*case.args, **case.kwargs)
    inner_size = x.shape[x.at :].numel() // length if length else 0
    dims = [
        d
        for d in range(local.dim())
        if local.shape[d] == length and local.shape[d + 1 :].numel() == inner_size
    ]
    if len(dims) != 1:
        return None  # with one local token the dim is ambiguous
    sizes = [*local.shape]
    sizes[dims[0]] = total
    assert x.whole is not None
    return take_shard(case.shard, x.whole.reshape(sizes), dims[0], x.pair)


def _spread(case: _Operands) -> FullSequenceTensor | None:
    (x,), local = case.there, case.func(*case.args, **case.kwargs)
    assert x.whole is not None
    sizes = [*local.shape]
    sizes[x.at] = case.shard.layout.total
    return take_shard(case.shard, x.whole.expand(sizes), x.at, x.pair)


def _cast(case: _Operands) -> FullSequenceTensor | None:
    """Apply a cast or a copy of the first operand."""
    x, *other_args = case.args
    if not isinstance(x, FullSequenceTensor) or x.whole is None:
        return None
    return take_shard(case.shard, case.func(x.whole, *other_args, **case.kwargs), x.at, x.pair)


def _written(case: _Operands) -> FullSequenceTensor | None:
    """Apply `a += b`: a new full tensor is made, because the old one may belong to the batch."""
    target, case.func = case.args[0], _IN_PLACE[case.func]
    result = _pointwise(case)
    if result is None or not isinstance(target, FullSequenceTensor) or result.shape != target.shape:
        return None
    target.copy_(result)
    target.whole, target.at, target.pair = result.whole, result.at, result.pair
    return target


Rule = Callable[[_Operands], Any]
_METHODS = """abs add bitwise_and bitwise_not bitwise_or clamp clamp_max clamp_min cos div eq exp
floor floor_divide ge gt le log logical_and logical_not logical_or lt masked_fill maximum minimum
mul ne neg pow remainder round sigmoid sin sqrt square sub tanh true_divide where"""
_OPERATORS = """abs add and eq floordiv ge gt invert le lt mod mul ne neg or pow radd rand rmul ror
rsub rtruediv sub truediv"""
_CASTS = """bfloat16 bool clone contiguous detach double float full_like half int long ones_like to
type type_as zeros_like"""
_MOVES = "cumsum movedim narrow permute repeat squeeze swapaxes t transpose unsqueeze"
_REDUCES = "all amax amin any max min sum"
_IN_PLACE = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name)
    for name in _METHODS.split()
    if hasattr(Tensor, f"{name}_")
}


def _rules() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    tables = ((_METHODS, _pointwise), (_CASTS, _cast), (_MOVES, _moved), (_REDUCES, _reduced))
    for names, rule in tables:
        for name, namespace in itertools.product(names.split(), (torch, Tensor)):
            if callable(getattr(namespace, name, None)):
                rules[getattr(namespace, name)] = rule
    rules |= {getattr(Tensor, f"__{name}__"): _pointwise for name in _OPERATORS.split()}
    rules |= dict.fromkeys(_IN_PLACE, _written)
    rules |= {Tensor.__getitem__: _item, F.embedding: _looked_up, torch.embedding: _looked_up}
    rules |= dict.fromkeys((torch.cat, torch.concat), _concatenated)
    rules |= dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _shaped)
    rules |= dict.fromkeys((Tensor.expand, Tensor.broadcast_to, torch.broadcast_to), _spread)
    return rules


RULES = _rules()


@dataclass(frozen=True)
class TokenSplit(SplitSequences):
    """The split of a model's sequences by tokens over ranks; found by a probe.

    kind          kind of the layout
    positions     whether the model gets `position_ids`
    documents     whether positions that restart within a row separate documents
    products      lines of the model that multiply queries and keys
    follows_full  whether values that the model computes from the batch's integers and from
                  positions alone are computed for the full sequence
    outputs       leaf of the output (by path) -> its dim of tokens
    row           the row that splits the sequences, for refusals while they run
    """

    kind: str
    ranks: int
    positions: bool = False
    documents: bool = False
    products: frozenset[Place] = frozenset()
    follows_full: bool = False
    outputs: Mapping[str, int] = field(default_factory=dict)
    row: Span | None = None

    def unknown_draw(self, site: str) -> Refusal:
        """Return the refusal S661 of a random draw whose dims are not known."""
        return self.with_row(
            Refusal.of(
                UNSPLIT,
                f"`{site}` draws random numbers that it did not draw at build",
                notes=("a rank must find its part of the numbers drawn for the full sequence",),
                helps=("leave `context_parallel` out for this model",),
            )
        )

    def with_row(self, refusal: Refusal) -> Refusal:
        """Return a refusal with the place of the row that splits the sequences."""
        return refusal if self.row is None else refusal.at(self.row)

    def layout(self, batch: Batch) -> SequenceLayout:
        """Return the layout of a batch's tokens over the ranks."""
        return SequenceLayout.of_kind(self.kind, sequence_length(batch), self.ranks)

    def sizes(
        self, batch: Batch, rank: int = 0, max_split: int = 1, rows: int | None = None
    ) -> Callable[[Any], tuple[int, ...]]:
        """Return a function from the shape of a value of full sequences to a place's shape.

        Tokens are dim 1, or dim 0 with the rows (`rows`; None: those of the batch). The value may
        also be split along the sequence over up to `max_split` other ranks.
        """
        layout = self.layout(batch)
        rows = row_count(batch) if rows is None else rows

        def length(tokens: int) -> int | None:
            """Return the local tokens of a row that has these; None: these are no tokens."""
            parts = layout.total // tokens if tokens else 0
            split = parts and max_split % parts == 0 and tokens * parts == layout.total
            return -(-layout.counts[rank] // parts) if split else None

        def resized(shape: Any) -> tuple[int, ...]:
            if len(shape) > 1 and (local := length(shape[1])) is not None:
                return (shape[0], local, *shape[2:])
            if shape and shape[0] % rows == 0 and (local := length(shape[0] // rows)) is not None:
                return (rows * local, *shape[1:])
            return tuple(shape)

        return resized

    def take_part(
        self,
        part: BatchPart,
        rank: int,
        exchange: Exchange | None,
        layout: SequenceLayout | None = None,
    ) -> BatchPart:
        """Return the tokens of a microbatch for the rank at a place."""
        batch = part.inputs
        layout = layout or self.layout(batch)
        mask = batch.get("attention_mask")
        padding = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        shard = SequenceShard(layout, rank, exchange, None, self.shift == "head", padding)
        inputs = self._cut(batch, shard)
        if self.positions and "position_ids" not in batch:
            inputs["position_ids"] = shard.positions(_device(batch)).unsqueeze(0)
        if self.documents:
            shard = replace(shard, documents=_documents_of(batch, shard))
        if self.shift == "none" or self.labels not in batch:
            return replace(part, inputs=inputs, token_shard=shard)
        labels = batch[self.labels]
        # the label of a token is the next token of the sequence, which another rank may have
        last = labels.new_full((len(labels), 1), self.ignore)
        local_labels = layout.take(torch.cat([labels[:, 1:], last], 1), 1, rank)
        shifted = inputs | {self.labels: torch.cat([last, local_labels], 1)}
        new_inputs = inputs | {"shift_labels": local_labels} if self.shift == "given" else shifted
        return replace(part, inputs=new_inputs, weight_inputs=shifted, token_shard=shard)

    def _cut(self, batch: Batch, shard: SequenceShard) -> dict[str, Any]:
        total, rows = shard.layout.total, row_count(batch)

        def cut(path: Any, value: Any) -> Any:
            name = dotted_path(path)
            if is_multi_position(value, total, rows):
                return shard.layout.take(value, 2, shard.place)
            if not self.is_along(name, value, total, rows):
                return value
            if not has_token_dim(value, total, rows) or value.dim() == 4:
                raise _length_refusal(name, value, total)
            if (
                self.follows_full
                and value.dim() == 2
                and name != self.labels
                and not (value.is_floating_point())
            ):
                return take_shard(shard, value, 1)
            return shard.layout.take(value, 1, shard.place)

        local_batch: dict[str, Any] = pytree.tree_map_with_path(cut, dict(batch))
        return local_batch


def _documents_of(batch: Batch, shard: SequenceShard) -> Tensor | None:
    """Return each local token's document, from positions that restart in a row; None: unknown."""
    positions = batch.get("position_ids")
    if positions is None or "attention_mask" in batch:
        return None
    jumps = torch.diff(positions, dim=-1, prepend=positions[:, :1] - 1) != 1
    numbers = jumps.cumsum(-1).expand(row_count(batch), -1)
    return shard.layout.take(numbers, 1, shard.place)


def _device(batch: Batch) -> torch.device:
    tensors = [leaf for leaf in pytree.tree_leaves(dict(batch)) if isinstance(leaf, Tensor)]
    return tensors[0].device


def _length_refusal(name: str, value: Tensor, total: int) -> Refusal:
    reason = (
        "masks of [queries, keys] cannot be split"
        if value.dim() == 4
        else (f"sequences have {total} tokens")
    )
    return Refusal.of(
        "S656",
        f"`{name}` cannot be split by tokens",
        notes=(f"its shape is {tuple(value.shape)}; {reason}",),
        helps=("give all inputs of a batch the same length, and masks of shape [rows, tokens]",),
    )
