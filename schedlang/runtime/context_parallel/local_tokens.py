"""Split a microbatch by tokens: this rank's tokens, and what it knows of the whole sequence.

* The tokens of one microbatch that one rank has, and how its queries meet the keys of others.
* Values that every rank knows of the whole sequence: integers of the batch, and positions. What a
  model makes of them alone (positions summed up over a mask, biases by distances) is made for the
  whole sequence, without a message, and a rank has its own tokens of that.
* A microbatch split by tokens: the inputs of each rank, and what its part weighs.
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
from schedlang.runtime.batch import Batch, Part, dotted, rows_of
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.context_parallel.token_layout import Layout, Mask
from schedlang.runtime.sequence_pipelining.carry import Place, items_of
from schedlang.runtime.sequence_pipelining.slices import (
    SequenceParts,
    length_of,
    runs_along,
    sections,
)

UNSPLIT = "S661"


@dataclass(frozen=True)
class AttentionMethod:
    """The method by which one attention exchanges keys and values, and its groups, outermost
    first."""

    method: str
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of an attention: [rows, heads, own tokens, size] each, and what else it is given.

    drawn  what `SequenceShard.draw` gave, where the model's own dropout of weights was asked first
    blind  what a query that sees no key gives: nothing, or the mean of all values; `scores`: whose
           scores have a gradient all the same (`eager` attention of transformers, which adds very
           low numbers to them)
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    scale: float | None = None
    dropout: float = 0.0
    blind: Literal["zero", "mean", "scores"] = "zero"
    drawn: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.query.shape[:-1], self.value.shape[-1])


class Exchange(Protocol):
    """A way in which queries meet the keys of other ranks."""

    def __call__(self, shard: SequenceShard, how: AttentionMethod, call: Call) -> Tensor:
        """The attention of the tokens of a shard to those of the whole sequence."""

    def drawn(self, shard: SequenceShard, p: float, rows: int, heads: int) -> Any:
        """Return the weights to drop, as the module that runs now would draw them."""


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """The place of a rank in a sequence: its tokens, in the order in which it has them.

    documents  integers [rows, own tokens]: which of several in a row a token is of; None: one
    padding    the batch's mask of tokens that are no padding, [rows, tokens of the sequence]
    more       the output of the model's head gets one more row, for labels that are shifted
    exchange   None: for shapes only
    """

    layout: Layout
    place: int
    exchange: Exchange | None = None
    documents: Tensor | None = None
    more: bool = False
    padding: Tensor | None = None

    @property
    def index(self) -> int:
        """The number of this part among the parts of the sequence."""
        return self.place

    @property
    def length(self) -> int:
        """The number of tokens here."""
        return self.layout.counts[self.place]

    @property
    def total(self) -> int:
        """The number of tokens of the sequence."""
        return self.layout.total

    def runs(self) -> dict[str, Any]:
        """The positions of the tokens here, and of the keys that they see."""
        return {"rows": self.positions(), "keys": range(self.total)}

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of these tokens in the sequence."""
        return self.layout.positions(self.place, device)

    def chunks(self, size: int) -> Tensor | None:
        """Return the run of `size` that each token here is of, [rows, own tokens], counted from the
        first that is no padding; None: from the first of the sequence."""
        if self.padding is None:
            return None
        left = (self.padding.cumsum(-1) == 0).sum(-1, keepdim=True)
        return (self.positions(left.device) - left).div(size, rounding_mode="floor")

    def on_meta(self) -> SequenceShard:
        """The same for shapes only: nothing is exchanged."""
        padding = None if self.padding is None else self.padding.to("meta")
        return replace(self, exchange=None, padding=padding)

    def attend(self, how: AttentionMethod, call: Call) -> Tensor:
        """Attention of the tokens here to those of the whole sequence."""
        if self.exchange is None:
            return call.query.new_empty(call.shape)
        return self.exchange(self, how, call)

    def draw(self, p: float, rows: int, heads: int) -> Any:
        """Return the weights that a call of attention will drop, for `Call.drawn`; None without
        exchange."""
        return None if self.exchange is None else self.exchange.drawn(self, p, rows, heads)


def current_shard() -> SequenceShard | None:
    """The shard that this thread runs a model for; None where sequences are whole."""
    found: Any = scope.visit()
    return found if isinstance(found, SequenceShard) else None


class Known(Tensor):
    """A rank's tokens of a value; `whole` has those of the whole sequence along dim `at`.

    `at` is counted from behind. A `pair` has tokens along two dims, queries and keys: in `whole`
    the queries are the rank's own. As an operand it is a plain tensor of the rank's tokens.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    whole: Tensor | None
    at: int
    pair: bool


def known(shard: SequenceShard, whole: Tensor, dim: int, pair: bool = False) -> Known:
    """The tokens of a shard, out of those of the whole sequence along a dim."""
    dim = dim if dim < 0 else dim - whole.dim()
    made = whole.index_select(dim, shard.positions(whole.device)).as_subclass(Known)
    made.whole, made.at, made.pair = whole, dim, pair
    return made


def whole_of(value: Any) -> Tensor | None:
    """Return the whole sequence of a value that knows it; None for other values."""
    return value.whole if isinstance(value, Known) else None


def plain(value: Any) -> Any:
    """The same as nothing but the tokens of the rank."""
    return value.as_subclass(Tensor) if isinstance(value, Known) else value


def over_all_keys(shard: SequenceShard, given: Tensor) -> Tensor | None:
    """Numbers for scores, [.., queries here or 1, keys of the whole sequence]; None: not known."""
    value: Tensor = given
    if isinstance(given, Known) and given.whole is not None and given.at == -1:
        value = given.whole
    total = shard.layout.total
    if value.is_meta and value.dim() > 1 and value.shape[-1] == shard.length > 1:
        # a batch without values says no more than its sizes, of which nothing is made
        others = value.new_empty((*value.shape[:-1], total - shard.length))
        value = torch.cat([value, others], -1)
    if (
        value.dim() < 2
        or value.shape[-1] not in (1, total)
        or value.shape[-2] not in (1, shard.length)
    ):
        return None
    return value.expand(*value.shape[:-1], total)


def followed(
    shard: SequenceShard, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Compute a function on the whole sequence; None where it is to be called as it is."""
    held = [x for x in torch_pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, Tensor)]
    there = [x for x in held if whole_of(x) is not None]
    if not there or func not in RULES:
        return _forgotten(func, args)
    try:
        made = RULES[func](_Operands(shard, func, args, kwargs, held, there))
    except (RuntimeError, IndexError):  # the model's sizes do not fit the whole sequence
        made = None
    return _forgotten(func, args) if made is None else made


def _forgotten(func: Any, args: Sequence[Any]) -> None:
    """Forget the whole sequence of a value that is written with this rank's tokens alone."""
    name = getattr(func, "__name__", "")
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if writes and args and isinstance(args[0], Known):
        args[0].whole = None


@dataclass
class _Operands:
    """A call, with its tensors, and those of them that are known."""

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
        """The call on values that are whole along a dim."""

        def taken(value: Any) -> Any:
            found = whole_of(value)
            return found if found is not None and value.at == dim else value

        return self.func(
            *torch_pytree.tree_map(taken, args or tuple(self.args)),
            **torch_pytree.tree_map(taken, dict(self.kwargs)),
        )

    def placed(self, local: Any, whole: Any) -> Known | None:
        """The result, by where its shapes differ; None unless that is along one dim of tokens."""
        if not isinstance(whole, Tensor) or local.dim() != whole.dim():
            return None
        found = [d for d, (a, b) in enumerate(zip(local.shape, whole.shape)) if a != b]
        if len(found) != 1 or whole.shape[found[0]] != self.shard.layout.total:
            return None
        if local.shape[found[0]] != self.shard.length:
            return None
        return known(self.shard, whole, found[0], self.pair)


# -- rules ---------------------------------------------------------------------------------------


def _pointwise(case: _Operands) -> Known | None:
    """Keys are whole wherever one operand has them; queries are those of the rank then."""
    dim = max(x.at for x in case.there)
    for x in case.held:
        if whole_of(x) is None and x.dim() >= -dim and x.shape[dim] != 1:
            return None  # of the rank's tokens only
    made = case.on_whole(dim)
    fits = isinstance(made, Tensor) and made.shape[dim] == case.shard.layout.total
    return known(case.shard, made, dim, case.pair) if fits else None


def _moved(case: _Operands) -> Known | None:
    """Dims come, go and move; sums run on from token to token."""
    dim = case.there[0].at
    return case.placed(case.func(*case.args, **case.kwargs), case.on_whole(dim))


def _joined(case: _Operands) -> Known | None:
    """Several, one behind the other along a dim that is not that of tokens."""
    alike = len(case.there) == len(case.held) and len({x.at for x in case.there}) == 1
    return _moved(case) if alike else None


def _reduced(case: _Operands) -> Any:
    """One value of all tokens, which is that of the whole; or each token's of another dim."""
    if len(case.held) > 1:
        return _pointwise(case)
    local, whole = case.func(*case.args, **case.kwargs), case.on_whole(case.there[0].at)
    if isinstance(whole, Tensor) and whole.shape == local.shape:
        return whole
    return case.placed(local, whole) if isinstance(whole, Tensor) else None


def _item(case: _Operands) -> Any:
    """New dims and whole runs; of a table that is looked up, all keys."""
    table, index = case.args
    if whole_of(table) is None:
        return _looked_up(case, 1 - table.dim()) if whole_of(index) is not None else None
    items, length = items_of(index), case.shard.length
    runs = [item for item in items if isinstance(item, slice)]
    if any(isinstance(item, Tensor) for item in items) or any(
        run.start not in (None, 0) or run.stop not in (None, length) or run.step not in (None, 1)
        for run in runs
    ):
        return None
    full = tuple(slice(None) if isinstance(item, slice) else item for item in items)
    local = case.func(table, index)
    return case.placed(local, case.on_whole(table.at, (table, full)))


def _looked_up(case: _Operands, by: int = -1) -> Known | None:
    """A table's entries for pairs of tokens; those for tokens are the rank's own matter."""
    (pair,) = case.there
    return known(case.shard, case.on_whole(pair.at), pair.at + by, True) if pair.pair else None


def _shaped(case: _Operands) -> Known | None:
    """The dim of tokens keeps its size and what stands behind it, or nothing is known after."""
    (x,), length, total = case.there, case.shard.length, case.shard.layout.total
    if x is not case.args[0]:
        return None
    local = case.func(*case.args, **case.kwargs)
    behind = x.shape[x.at :].numel() // length if length else 0
    found = [
        d
        for d in range(local.dim())
        if local.shape[d] == length and local.shape[d + 1 :].numel() == behind
    ]
    if len(found) != 1:
        return None  # of a single token it may be any
    sizes = [*local.shape]
    sizes[found[0]] = total
    assert x.whole is not None
    return known(case.shard, x.whole.reshape(sizes), found[0], x.pair)


def _spread(case: _Operands) -> Known | None:
    (x,), local = case.there, case.func(*case.args, **case.kwargs)
    assert x.whole is not None
    sizes = [*local.shape]
    sizes[x.at] = case.shard.layout.total
    return known(case.shard, x.whole.expand(sizes), x.at, x.pair)


def _cast(case: _Operands) -> Known | None:
    """Another type, or copy, of the first operand, whatever the others are."""
    x, *rest = case.args
    if not isinstance(x, Known) or x.whole is None:
        return None
    return known(case.shard, case.func(x.whole, *rest, **case.kwargs), x.at, x.pair)


def _written(case: _Operands) -> Known | None:
    """`a += b`: what is whole is made anew, as it may be the batch's own."""
    into, case.func = case.args[0], _IN_PLACE[case.func]
    made = _pointwise(case)
    if made is None or not isinstance(into, Known) or made.shape != into.shape:
        return None
    into.copy_(made)
    into.whole, into.at, into.pair = made.whole, made.at, made.pair
    return into


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
    found: dict[Any, Rule] = {}
    tables = ((_METHODS, _pointwise), (_CASTS, _cast), (_MOVES, _moved), (_REDUCES, _reduced))
    for names, rule in tables:
        for name, home in itertools.product(names.split(), (torch, Tensor)):
            if callable(getattr(home, name, None)):
                found[getattr(home, name)] = rule
    found |= {getattr(Tensor, f"__{name}__"): _pointwise for name in _OPERATORS.split()}
    found |= dict.fromkeys(_IN_PLACE, _written)
    found |= {Tensor.__getitem__: _item, F.embedding: _looked_up, torch.embedding: _looked_up}
    found |= dict.fromkeys((torch.cat, torch.concat), _joined)
    found |= dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _shaped)
    found |= dict.fromkeys((Tensor.expand, Tensor.broadcast_to, torch.broadcast_to), _spread)
    return found


RULES = _rules()


@dataclass(frozen=True)
class Tokens(SequenceParts):
    """The way in which a model runs on each rank's tokens of its sequences.

    positions  whether the model is given `position_ids`
    documents  whether positions that start anew within a row tell documents apart
    products   lines of the model that multiply queries and keys
    follow     whether what the model makes of the batch's integers and of positions alone is made
               for the whole sequence
    outputs    leaf of the output (by path) -> its dim of tokens
    row        the row that splits the sequences, for what is refused while they run
    """

    kind: str
    ranks: int
    positions: bool = False
    documents: bool = False
    products: frozenset[Place] = frozenset()
    follow: bool = False
    outputs: Mapping[str, int] = field(default_factory=dict)
    row: Span | None = None

    def unknown_draw(self, site: str) -> Refusal:
        """The refusal S661 of a draw whose dims are not known."""
        return self.at_its_row(
            Refusal.of(
                UNSPLIT,
                f"`{site}` draws random numbers that it did not draw at build",
                notes=("a rank must find its part of the numbers drawn for the full sequence",),
                helps=("leave `context_parallel` out for this model",),
            )
        )

    def at_its_row(self, refusal: Refusal) -> Refusal:
        """The refusal at the row that splits the sequences."""
        return refusal if self.row is None else refusal.at(self.row)

    def layout(self, batch: Batch) -> Layout:
        """Return the layout of a batch's tokens over the ranks."""
        return Layout.of(self.kind, length_of(batch), self.ranks)

    def sizes(
        self, batch: Batch, place: int = 0, spread: int = 1
    ) -> Callable[[Any], tuple[int, ...]]:
        """Return the function from the shape of a value of whole sequences to that of a place's
        tokens; of one that is split along the sequence over up to `spread` other ranks, too."""
        layout = self.layout(batch)

        def resized(shape: Any) -> tuple[int, ...]:
            parts = layout.total // shape[1] if len(shape) > 1 and shape[1] else 0
            if not parts or spread % parts or shape[1] * parts != layout.total:
                return tuple(shape)
            return (shape[0], -(-layout.counts[place] // parts), *shape[2:])

        return resized

    def part(
        self, part: Part, place: int, exchange: Exchange | None, layout: Layout | None = None
    ) -> Part:
        """The tokens of a microbatch that the rank at a place has."""
        batch = part.inputs
        layout = layout or self.layout(batch)
        mask = batch.get("attention_mask")
        padding = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        shard = SequenceShard(layout, place, exchange, None, self.shift == "head", padding)
        inputs = self._cut(batch, shard)
        if self.positions and "position_ids" not in batch:
            inputs["position_ids"] = shard.positions(_device(batch)).unsqueeze(0)
        if self.documents:
            shard = replace(shard, documents=_documents(batch, shard))
        if self.shift == "none" or self.labels not in batch:
            return replace(part, inputs=inputs, shard=shard)
        labels = batch[self.labels]
        # what the label of a token is: that of the next one, wherever that lies
        last = labels.new_full((len(labels), 1), self.ignore)
        own = layout.take(torch.cat([labels[:, 1:], last], 1), 1, place)
        moved = inputs | {self.labels: torch.cat([last, own], 1)}
        given = inputs | {"shift_labels": own} if self.shift == "given" else moved
        return replace(part, inputs=given, weighed=moved, shard=shard)

    def _cut(self, batch: Batch, shard: SequenceShard) -> dict[str, Any]:
        total, rows = shard.layout.total, rows_of(batch)

        def cut(path: Any, value: Any) -> Any:
            name = dotted(path)
            if sections(value, total, rows):
                return shard.layout.take(value, 2, shard.place)
            if not self.is_along(name, value, total, rows):
                return value
            if not runs_along(value, total, rows) or value.dim() == 4:
                raise _unfit(name, value, total)
            if (
                self.follow
                and value.dim() == 2
                and name != self.labels
                and not (value.is_floating_point())
            ):
                return known(shard, value, 1)
            return shard.layout.take(value, 1, shard.place)

        made: dict[str, Any] = pytree.tree_map_with_path(cut, dict(batch))
        return made


def _documents(batch: Batch, shard: SequenceShard) -> Tensor | None:
    """Return each token's document where positions start anew within a row; None: nothing says
    so."""
    positions = batch.get("position_ids")
    if positions is None or "attention_mask" in batch:
        return None
    jumps = torch.diff(positions, dim=-1, prepend=positions[:, :1] - 1) != 1
    numbers = jumps.cumsum(-1).expand(rows_of(batch), -1)
    return shard.layout.take(numbers, 1, shard.place)


def _device(batch: Batch) -> torch.device:
    found = [leaf for leaf in pytree.tree_leaves(dict(batch)) if isinstance(leaf, Tensor)]
    return found[0].device


def _unfit(name: str, value: Tensor, total: int) -> Refusal:
    why = (
        "masks of [queries, keys] cannot be split"
        if value.dim() == 4
        else (f"sequences have {total} tokens")
    )
    return Refusal.of(
        "S656",
        f"`{name}` cannot be split by tokens",
        notes=(f"its shape is {tuple(value.shape)}; {why}",),
        helps=("give all inputs of a batch the same length, and masks of shape [rows, tokens]",),
    )
