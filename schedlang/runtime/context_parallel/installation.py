"""Installation of context parallelism in a model: its attentions, and its counting of positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime import scope
from schedlang.runtime.comm.collectives import enter, reduce
from schedlang.runtime.context_parallel import transformers_attention
from schedlang.runtime.context_parallel.attention import AttentionOptions, attend, attend_lse
from schedlang.runtime.context_parallel.attention_products import (
    ADDED_PRODUCTS,
    PRODUCTS,
    Scores,
    apply_to_scores,
    begin_scores,
)
from schedlang.runtime.context_parallel.decoding import Decoding, current_decoding
from schedlang.runtime.context_parallel.local_tokens import (
    UNSPLIT,
    AttentionCall,
    AttentionMethod,
    SequenceShard,
    TokenSplit,
    compute_on_full,
    current_shard,
    take_shard,
)
from schedlang.runtime.context_parallel.token_layout import AttentionDropout, AttentionMask
from schedlang.runtime.context_parallel.transformers_attention import (
    attend_cached,
    cache_refusal,
    is_causal,
    local_keys_refusal,
    unsplit_refusal,
)
from schedlang.runtime.forward import wrap
from schedlang.runtime.modes import AmbientMode, enter_modes
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.rng.native_dropout import NativeDropout
from schedlang.runtime.sequence_pipelining.carried_keys import (
    Place,
    calling_line,
    counts_up_to,
    index_items,
    takes_first,
    takes_last,
)
from schedlang.runtime.storage.saved_tensors_slot import policies

# -- calls of torch's attention -------------------------------------------------------------------

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
_LOWEST = -1e4  # numbers that hide a key when added to its score are lower


class AttentionMode(AmbientMode):
    """Mode in a module that a row names: distributes its calls of torch's attention, or products.

    `products` are the lines of the model that multiply queries and keys.
    """

    eager = "ranks exchange keys and values in it"

    def __init__(self, method: AttentionMethod, products: Collection[Place] = ()) -> None:
        super().__init__()
        self.how, self.products = method, frozenset(products)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (decoding := current_decoding()) is not None:
            if func is F.scaled_dot_product_attention:
                return _attend_kept(decoding, self.how, {**dict(zip(_ARGUMENTS, args)), **kwargs})
            if (
                decoding.returned
                and func in PRODUCTS | ADDED_PRODUCTS
                and calling_line() in self.products
            ):
                raise cache_refusal("it multiplies queries and keys in its own code")
            return self.run(func, types, args, kwargs)
        shard = current_shard()
        if shard is not None and func is F.scaled_dot_product_attention:
            arguments = {**dict(zip(_ARGUMENTS, args)), **kwargs}
            query, key = arguments["query"], arguments["key"]
            if query.shape[-2] == key.shape[-2] == shard.length:
                return _attend(shard, self.how, arguments)
        if shard is not None and any(type(value) is Scores for value in args):
            return apply_to_scores(func, args, kwargs)
        if (
            shard is not None
            and func in PRODUCTS | ADDED_PRODUCTS
            and calling_line() in self.products
        ):
            scores = begin_scores(shard, self.how, func, args, kwargs)
            if scores is not None:
                return scores
        return self.run(func, types, args, kwargs)


def distribute_attention(module: nn.Module, method: AttentionMethod, tokens: TokenSplit) -> None:
    """Wrap a module so that its calls of torch's attention use the keys of all ranks.

    A call that cannot be split, in a batch that takes another path than the batch of the build, is
    refused at the row that splits the sequences (S661).
    """

    def layer(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if current_shard() is None and current_decoding() is None:
            return inner(*args, **kwargs)
        try:
            with enter_modes(AttentionMode(method, tokens.products)):
                return inner(*args, **kwargs)
        except Refusal as refusal:
            if refusal.diagnostic.code != UNSPLIT:
                raise
            raise tokens.with_row(refusal) from refusal.__cause__

    wrap(module, "context", layer)


def _attend(shard: SequenceShard, method: AttentionMethod, args: dict[str, Any]) -> Tensor:
    query, key, value = args["query"], args["key"], args["value"]
    flat = query.dim() == 3  # one head
    if flat:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
    if query.dim() != 4:
        raise unsplit_refusal(f"its queries have {query.dim()} dims")
    rule = _rule(shard, args.get("attn_mask"), bool(args.get("is_causal")))
    call = AttentionCall(query, key, value, rule, args.get("scale"), args.get("dropout_p", 0.0))
    out = shard.attend(method, call)
    return out.squeeze(1) if flat else out


def _attend_kept(decoding: Decoding, method: AttentionMethod, args: dict[str, Any]) -> Tensor:
    tensors = args["query"], args["key"], args["value"]
    if any(t.dim() != 4 for t in tensors) or args.get("is_causal"):
        raise cache_refusal(
            "it calls torch's attention with tensors or arguments that are not supported there"
        )
    mask = args.get("attn_mask")
    if isinstance(mask, Tensor):
        mask = mask[(None,) * (4 - mask.dim())]
    return attend_cached(decoding, method, tensors, mask, args.get("scale"))


def _rule(shard: SequenceShard, mask: Tensor | None, causal: bool) -> AttentionMask:
    """Return the mask of an attention call as a description; raises Refusal S661."""
    if mask is None:
        return AttentionMask(causal=causal)
    if mask.shape[-1] == shard.length and mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        return AttentionMask(causal=causal, present=_present(mask[:, 0, 0]))
    if mask.shape[-2:] == (shard.length, shard.layout.total) and mask.dim() <= 4:
        rows = mask[(None,) * (4 - mask.dim())]
        if rows.dtype == torch.bool and is_causal(shard, rows):
            return AttentionMask(causal=True)  # a ring skips blocks that positions hide
        return AttentionMask(causal=causal, rows=rows)
    raise unsplit_refusal("its mask covers only the tokens of one rank, not all")


def _present(mask: Tensor) -> Tensor:
    """Return which keys a mask shows; the mask must be booleans, or zeros and very low numbers."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not mask.is_meta and not bool((visible | (mask < _LOWEST)).all()):
        raise local_keys_refusal()
    return visible


# -- positions -----------------------------------------------------------------------------------


class PositionsMode(AmbientMode):
    """Mode in which lines that count positions by the input's length count the shard's positions.

    places  the lines of the model that count positions
    follow  values that are computed from positions and from the batch's integers are computed for
            the full sequence
    """

    eager = "the model counts positions, and ranks share the sequence"

    def __init__(self, places: Collection[Place], follow_full: bool = False) -> None:
        super().__init__()
        self.places, self.follow = frozenset(places), follow_full

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        shard = current_shard()
        if (
            shard is not None
            and func in _COUNTED
            and calling_line(SequenceShard.attend) in self.places
        ):
            counted = _COUNTED[func](shard, args, kwargs, self.follow)
            if counted is not None:
                return counted
        if shard is not None and self.follow:
            computed = compute_on_full(shard, func, args, kwargs)
            if computed is not None:
                return computed
            _refuse_sums(shard, func, args)
        return self.run(func, types, args, kwargs)


def _refuse_sums(shard: SequenceShard, func: Any, args: Any) -> None:
    """Refuse (S661) cumulative sums of integers over local tokens, as they count positions."""
    if func not in (torch.cumsum, Tensor.cumsum) or args[0].is_floating_point():
        return
    if shard.length in args[0].shape[1:] and not args[0].is_meta:
        raise unsplit_refusal("it sums over tokens, but each rank has only some of them")


def _arange(
    shard: SequenceShard, args: Any, kwargs: dict[str, Any], follow_full: bool
) -> Tensor | None:
    """Replace `torch.arange(length)` and `torch.arange(0, length)`."""
    if not counts_up_to(args, kwargs, shard.length):
        return None
    device = kwargs.get("device") or torch.get_default_device()
    if follow_full:
        full = torch.arange(shard.layout.total, device=device, dtype=kwargs.get("dtype"))
        return take_shard(shard, full, 0)
    positions = shard.positions(device)
    return positions.to(kwargs["dtype"]) if kwargs.get("dtype") else positions


def _getitem(
    shard: SequenceShard, args: Any, kwargs: dict[str, Any], follow_full: bool
) -> Tensor | None:
    """Replace `table[:length]` of a parameter or buffer; of two such dims the first is of queries.

    With `follow_full` also `table[-length:]` of a table that the model has made.
    """
    tensor, index = args
    items, at_end = list(index_items(index)), takes_last(tensor, index, shard.length)
    from_start = takes_first(index, shard.length)
    runs = [k for k in range(len(items)) if from_start[k] or (follow_full and at_end[k])]
    if not runs or Ellipsis in items or any(isinstance(item, Tensor) for item in items):
        return None
    total = shard.layout.total
    full_index = [
        slice(-total, None)
        if k in runs and not from_start[k]
        else slice(0, total)
        if k in runs
        else item
        for k, item in enumerate(items)
    ]
    taken: Tensor = tensor[tuple(full_index)]
    dims = [sum(not isinstance(item, int) for item in items[:k]) for k in runs]
    for dim in dims[:-1] if len(dims) == 2 else () if follow_full else dims:
        taken = taken.index_select(dim, shard.positions(taken.device))
    return take_shard(shard, taken, dims[-1], len(dims) == 2) if follow_full else taken


_COUNTED: dict[Any, Callable[[SequenceShard, Any, dict[str, Any], bool], Tensor | None]] = {
    torch.arange: _arange,
    Tensor.__getitem__: _getitem,
}


# -- the model -----------------------------------------------------------------------------------


def install_context(
    model: nn.Module, tokens: TokenSplit, methods: Mapping[str, AttentionMethod]
) -> list[Any]:
    """Install context parallelism in the named attentions; return handles of hooks to remove.

    `methods`: module -> the method of its attention.
    """
    transformers_attention.switch_attentions(model)
    for fqn, method in methods.items():
        module = model.get_submodule(fqn)
        transformers_attention.set_method(module, method)
        distribute_attention(module, method, tokens)
    return tokens.lengthen_head(model)


class ExchangeKeys:
    """The exchange over groups of ranks; `draw` decides which weights dropout removes."""

    def __init__(self, draw: LogicalDropout | NativeDropout | None = None) -> None:
        self.draw = draw

    def __call__(
        self, shard: SequenceShard, method: AttentionMethod, call: AttentionCall
    ) -> Tensor:
        """Compute the attention of a shard's tokens to the full sequence, as `Exchange` does."""
        rows, heads = call.query.shape[:2]
        drop = call.dropout_mask
        if call.dropout:
            drop = self.draw_dropout(shard, call.dropout, rows, heads)
        options = AttentionOptions(method.method, method.groups, shard.layout, call.scale, drop)
        tensors, mask = (call.query, call.key, call.value), call.mask
        hides = mask.present is not None or mask.rows is not None
        # sinks have all the weight of a query that sees no key
        if call.unseen_result == "zero" or not hides or mask.sinks is not None:
            return attend(*tensors, mask, options)  # Ulysses sends no log-sum-exp
        out, lse = attend_lse(*tensors, mask, options)
        blind = lse.detach().isneginf().unsqueeze(-1)
        mean = _mean(call, heads, method, shard.layout.total)
        if call.unseen_result == "scores" and call.mask.cap is not None and torch.is_grad_enabled():
            mean = _BlindGradientCheck.apply(mean.expand_as(out), blind)  # type: ignore[no-untyped-call]
        return torch.where(blind, mean, out)

    def draw_dropout(
        self, shard: SequenceShard, p: float, rows: int, heads: int
    ) -> AttentionDropout:
        """Draw the dropout of attention weights, as `Exchange` does."""
        assert self.draw is not None, "several ranks agree on masks"
        total = shard.layout.total
        if isinstance(self.draw, LogicalDropout):
            return AttentionDropout.from_logical(p, self.draw, rows, heads, total)
        draw = partial(AttentionDropout.from_generator, p, rows, heads, total)
        dropout: AttentionDropout = self.draw.draw_attention(draw, (rows, heads, total, total))
        return dropout


class MetaExchange(ExchangeKeys):
    """The exchange of one rank on meta, where values of dropout masks do not matter."""

    def draw_dropout(
        self, shard: SequenceShard, p: float, rows: int, heads: int
    ) -> AttentionDropout:
        """Draw a mask of the right shape.

        Raises Refusal S935 in modules whose saved tensors are compressed: there a single process
        saves the scores of attention with dropout, and context parallelism saves none.
        """
        if policies.code is not None:
            raise Refusal.of(
                "S935",
                "`compress` cannot round the activations of attention with dropout here",
                notes=(
                    "a single process saves scores for this dropout, but ranks that split"
                    " tokens do not",
                ),
                helps=(
                    "train without dropout in attention",
                    "or select other modules, for example `layers.*.mlp  compress(...)`",
                ),
            )
        return AttentionDropout.from_generator(p, rows, heads, shard.layout.total)


CAPPED_GRADIENT = (
    "attention under `context_parallel`: a query that sees no key gives its capped scores a"
    " gradient that sums over keys do not tell; pad rows on the right, or give the token behind"
    " the padding no label"
)


class _BlindGradientCheck(torch.autograd.Function):
    """Identity; its backward asserts that queries that see no key have no gradient."""

    @staticmethod
    def forward(out: Tensor, blind: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (blind,) = ctx.saved_tensors
        torch._assert_async(~(blind & (grads[0] != 0)).any(), CAPPED_GRADIENT)
        return grads[0], None


def _mean(call: AttentionCall, heads: int, method: AttentionMethod, total: int) -> Tensor:
    """Return the mean of all tokens' values, for each head of the queries.

    Scores that are hidden by added very low numbers still have a gradient: that of a softmax with
    equal weights, which needs sums over all keys only.
    """
    key, value = call.key, call.value
    sums = value.sum(2, keepdim=True)
    flows = call.unseen_result == "scores" and call.mask.cap is None
    if flows:  # one all-reduce for the sums of values, of keys times values, and of keys
        ones = F.pad(value.detach(), (0, 1), value=1.0)
        sums = torch.cat([F.pad(sums, (0, 1)), key.mT @ ones], 2)
    for group in method.groups:
        sums = enter(reduce(sums, group), group)
    sums = sums.repeat_interleave(heads // value.shape[1], 1)
    if not flows:
        return sums / total
    mean, products, keys = sums[:, :, :1, :-1] / total, sums[:, :, 1:, :-1], sums[:, :, 1:, -1:]
    scale = key.shape[-1] ** -0.5 if call.scale is None else call.scale
    slope = (call.query @ products - (call.query @ keys) * mean.detach()) * (scale / total)
    return mean + slope - slope.detach()


class ShardContext:
    """Enters a microbatch's shard, and the mode that counts its positions."""

    def __init__(self, tokens: TokenSplit | None) -> None:
        counts = tokens is not None and (tokens.places or tokens.follows_full)
        self._mode = (
            PositionsMode(tokens.places, tokens.follows_full) if tokens and counts else None
        )

    @contextmanager
    def enter_shard(
        self, shard: SequenceShard | Decoding, around: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """Run the forward or backward of a microbatch, inside `around`."""
        with ExitStack() as stack:
            stack.enter_context(around)
            stack.enter_context(scope.enter_slice(shard))
            # in decoding the model's own positions of new tokens are right
            counts = self._mode is not None and not isinstance(shard, Decoding)
            stack.enter_context(enter_modes(*([self._mode] if self._mode and counts else [])))
            yield
