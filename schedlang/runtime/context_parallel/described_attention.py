"""Attention of transformers on some tokens of a sequence: masks as descriptions, never as tensors.

Its models make their masks, and its modules find their attention, by a name in their config. Under
ours a mask stays the function of positions that it was made from, read back from its closures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.context_parallel.decoding import Decoding, decoding
from schedlang.runtime.context_parallel.local_attention import Rules
from schedlang.runtime.context_parallel.local_tokens import (
    UNSPLIT,
    AttentionMethod,
    Call,
    SequenceShard,
    current_shard,
    over_all_keys,
    plain,
)
from schedlang.runtime.context_parallel.token_layout import Mask, Reach
from schedlang.runtime.kernel_injection.attention import implementation, switch
from schedlang.runtime.scope import site
from schedlang.runtime.tracing.meta import model_line

NAME = "schedlang_context"
SLOT = "_schedlang_context"
_EAGER = "_schedlang_eager"  # on modules that attended by plain products
# what modules hand to any attention, and what ours reads elsewhere or has no use for
KNOWN = frozenset(
    (
        *("sliding_window", "position_ids", "output_attentions", "use_cache", "softcap"),
        *("cache_position", "output_hidden_states", "layer_idx", "labels", "shift_labels"),
    )
)


@dataclass(frozen=True, eq=False)
class MaskRule:
    """The mask that a model hands to its attentions as a rule in place of a tensor; for `shard`
    alone."""

    mask: Mask

    def to(self, *_: Any, **__: Any) -> MaskRule:
        """Return the mask itself, as for any dtype: it says the same."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes of tensors: a rule has none (AttributeError)."""
        raise AttributeError(f"masks are rules here, not tensors: they have no `{name}`")

    def __getitem__(self, _: Any) -> MaskRule:
        """Return the mask itself, as if cut to the keys there are: a rule has no key too much."""
        return self


def register(model: nn.Module) -> bool:
    """Let every module of transformers make masks, and attend, by our functions; is there one?"""
    found = [module for module in model.modules() if implementation(module) is not None]
    if found:
        _register()
    for module in found:
        if implementation(module) == "eager":
            vars(module)[_EAGER] = True
        switch(module, NAME)
    return bool(found)


@functools.cache
def _register() -> None:
    """Once, and only for models of transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mask(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **kwargs) if current_shard() is None else _mask(*args, **kwargs)

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
        if (new := decoding()) is not None:
            return _attend_kept(new, module, q, k, v, mask, **more)
        if current_shard() is None:
            return sdpa(module, q, k, v, mask, **more)
        return _attend(module, q, k, v, mask, **more)

    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


# -- masks ---------------------------------------------------------------------------------------


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> MaskRule:
    """Make the rule that stands for a mask of transformers: positions, and tokens here."""
    shard = current_shard()
    assert shard is not None
    if q_length != shard.length or kv_length != shard.length or q_offset or kv_offset:
        raise unknown("its masks have more keys than queries")
    found, documents = described(mask_function), shard.documents
    if found.chunk is not None and (chunks := shard.chunks(found.chunk)) is not None:
        found = replace(found, chunk=None)
        documents = chunks if attention_mask is None else chunks.to(attention_mask.device)
    return MaskRule(replace(found, documents=documents, present=plain(attention_mask)))


def described(function: Any) -> Mask:
    """A mask function of transformers as rules; raises Refusal S661 for one that is unknown."""
    name = getattr(function, "__qualname__", type(function).__name__)
    cells = _cells(function)
    match name.split(".")[0]:
        case "causal_mask_function":
            return Mask(causal=True)
        case "bidirectional_mask_function":
            return Mask()
        case "and_masks":
            return functools.reduce(_both, map(described, cells["mask_functions"]))
        case "sliding_window_overlay":
            return Mask(back=int(cells["sliding_window"]) - 1)
        case "sliding_window_bidirectional_overlay":
            return Mask(back=int(cells["sliding_window"]), ahead=int(cells["sliding_window"]))
        case "chunked_overlay":
            return Mask(chunk=int(cells["chunk_size"]))
        case "packed_sequence_mask_function":
            return Mask()  # of tokens here only; the shard has the documents of the whole
        case "remap_positions_for_packed_sequence":
            return described(cells["mask_function"])  # by differences within one document
    raise unknown(f"its masks are made by `{name}`, which is not supported")


def _cells(function: Any) -> dict[str, Any]:
    closure = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in closure)))


def _both(a: Mask, b: Mask) -> Mask:
    """Return the mask that lets through only what both rules let through."""

    def least(x: int | None, y: int | None) -> int | None:
        known = [n for n in (x, y) if n is not None]
        return min(known) if known else None

    if a.chunk is not None and b.chunk is not None and a.chunk != b.chunk:
        raise unknown("its masks have chunks of two sizes")
    return Mask(
        causal=a.causal or b.causal,
        back=least(a.back, b.back),
        ahead=least(a.ahead, b.ahead),
        chunk=least(a.chunk, b.chunk),
    )


# -- attention -----------------------------------------------------------------------------------


def _method(module: nn.Module) -> AttentionMethod:
    """The method of a module's row; raises Refusal for a module that no row names."""
    how: AttentionMethod | None = vars(module).get(SLOT)
    if how is None:
        raise unnamed(type(module).__name__)
    return how


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend, in place of an attention function of transformers."""
    shard, how = current_shard(), _method(module)
    assert shard is not None
    sinks = more.pop("s_aux", None)  # scores of GPT-OSS that take part and have no value
    bias = more.pop("position_bias", None)  # numbers that T5 adds to scores
    other = [n for n, given in more.items() if isinstance(given, Tensor) and n not in KNOWN]
    if other:
        raise unknown(f"its attention gets `{other[0]}`, which cannot be split by tokens")
    if key.shape[-2] != shard.length or query.shape[-2] != shard.length:
        raise unknown("it attends to more than the tokens of the batch")
    rule = _rule(module, mask, is_causal)
    if more.get("softcap") is not None:
        rule = replace(rule, cap=float(more["softcap"]))
    if sinks is not None:
        rule = replace(rule, sinks=sinks)
    if bias is not None:
        rule = replace(rule, rows=over_all_keys(shard, bias))
        if rule.rows is None:
            raise of_few_tokens()
    blind: Any = "scores" if vars(module).get(_EAGER) else "zero"
    call = Call(query, key, value, rule, scaling, dropout, blind)
    return shard.attend(how, call).transpose(1, 2).contiguous(), None


def _attend_kept(
    new: Decoding,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend to keys that ranks have kept; the mask is the model's own, over all of them."""
    how, sinks = _method(module), more.pop("s_aux", None)
    other = [n for n, given in more.items() if isinstance(given, Tensor) and n not in KNOWN]
    if other or (dropout and not new.shapes):  # stand-ins for other stages are not in eval
        raise not_kept(f"its attention gets `{other[0] if other else 'dropout'}`")
    out = attend_kept(new, how, (query, key, value), mask, scaling, more.get("softcap"), sinks)
    return out.transpose(1, 2).contiguous(), None


def attend_kept(
    new: Decoding,
    how: AttentionMethod,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    scale: float | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention of new tokens to what the cache has given; raises Refusal S627 for keys that
    were changed since, and for masks of other kinds."""
    query, key, value = tensors
    if not new.knows(key, value):
        raise not_kept("it attends to other keys than those that its cache keeps")
    if not (isinstance(mask, Tensor) or (mask is None and query.shape[2] == 1)):
        raise not_kept("its masks are no tensors of [queries, keys]")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rules = Rules(Reach(), scale, None if cap is None else float(cap))
    return new.attend(how, tensors, mask, rules, sinks)


def not_kept(why: str) -> Refusal:
    """Return the refusal S627 of an attention whose keys cannot be kept by parts of sequences."""
    return Refusal.of(
        "S627",
        f"`{site() or 'an attention'}` cannot keep keys and values by tokens",
        notes=(why,),
        helps=("`use_cache=False` makes every token from the whole sequence",),
    )


def _rule(module: nn.Module, mask: Any, is_causal: bool | None) -> Mask:
    if isinstance(mask, MaskRule):
        return mask.mask
    if mask is not None:
        raise unknown("it makes its masks itself, as tensors of [queries, keys]")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return Mask(causal=bool(causal))


def is_causal(shard: SequenceShard, seen: Tensor) -> bool:
    """Return whether booleans, of the queries here and all keys, say that none sees a later one."""
    if seen.is_meta or seen.shape[-2] != shard.length:
        return False
    at = shard.positions(seen.device)[:, None]
    keys = torch.arange(shard.layout.total, device=seen.device)
    return bool((seen == (keys <= at)).all())


def unnamed(what: str) -> Refusal:
    """An attention runs that no row is about."""
    return Refusal.of(
        "S660",
        f"`{site() or what}` is an attention that no `context_parallel` row names",
        notes=("all attentions of a model must get the same tokens",),
        helps=("select all of them: `layers.*.self_attn  context_parallel(...)`",),
    )


def unknown(why: str, *helps: str) -> Refusal:
    """An attention that cannot be split by tokens, with the line of the model that runs."""
    line = model_line() if site() else ""
    return Refusal.of(
        UNSPLIT,
        f"`{site() or 'an attention'}` cannot be split by tokens",
        notes=(f"{why}, at {line}" if line else why,),
        helps=(*helps, "or " * bool(helps) + "leave `context_parallel` out for this model"),
    )


def of_few_tokens() -> Refusal:
    """Return the refusal of an added score that covers a rank's own keys only."""
    return unknown(
        "what it adds to its scores covers only the tokens of one rank",
        "make it from positions and from integers of the batch alone: that, each rank makes for"
        " all tokens",
    )


def set_method(module: nn.Module, how: AttentionMethod) -> None:
    """Say how attentions in a module meet the keys of other ranks."""
    for part in module.modules():
        vars(part)[SLOT] = how
