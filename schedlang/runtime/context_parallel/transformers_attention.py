"""Attention of transformers' models on a rank's tokens: masks as descriptions, never as tensors.

Transformers looks up the functions that make masks and compute attention by a name in the config.
Under the name registered here a mask stays a function of positions; its parameters are read from
the closures of transformers' mask functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.context_parallel.decoding import Decoding, current_decoding
from schedlang.runtime.context_parallel.local_attention import BlockRules
from schedlang.runtime.context_parallel.local_tokens import (
    UNSPLIT,
    AttentionCall,
    AttentionMethod,
    SequenceShard,
    current_shard,
    expand_over_keys,
    to_plain,
)
from schedlang.runtime.context_parallel.token_layout import AttentionMask, PositionMask
from schedlang.runtime.kernel_injection.sdpa_attention import attention_name, set_attention_name
from schedlang.runtime.scope import current_site
from schedlang.runtime.tracing.model_lines import model_line

NAME = "schedlang_context"
SLOT = "_schedlang_context"
_EAGER = "_schedlang_eager"  # attribute of modules that used the `eager` attention
# arguments that modules pass to any attention, and that are not needed here or read elsewhere
IGNORED_ARGUMENTS = frozenset(
    (
        *("sliding_window", "position_ids", "output_attentions", "use_cache", "softcap"),
        *("cache_position", "output_hidden_states", "layer_idx", "labels", "shift_labels"),
    )
)


@dataclass(frozen=True, eq=False)
class MaskRule:
    """A mask that a model passes to its attentions as a description in place of a tensor."""

    mask: AttentionMask

    def to(self, *_: Any, **__: Any) -> MaskRule:
        """Return the mask itself: it has no dtype and no device."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for attributes of tensors."""
        raise AttributeError(f"masks are rules here, not tensors: they have no `{name}`")

    def __getitem__(self, _: Any) -> MaskRule:
        """Return the mask itself: it needs no slice to the number of keys."""
        return self


def switch_attentions(model: nn.Module) -> bool:
    """Switch all modules of transformers to our mask and attention functions.

    Returns whether there is such a module.
    """
    attentions = [module for module in model.modules() if attention_name(module) is not None]
    if attentions:
        _register()
    for module in attentions:
        if attention_name(module) == "eager":
            vars(module)[_EAGER] = True
        set_attention_name(module, NAME)
    return bool(attentions)


@functools.cache
def _register() -> None:
    """Register our functions with transformers, once."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mask(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **kwargs) if current_shard() is None else _mask(*args, **kwargs)

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        if (decoding := current_decoding()) is not None:
            return _attend_kept(decoding, module, q, k, v, mask, **kwargs)
        if current_shard() is None:
            return sdpa(module, q, k, v, mask, **kwargs)
        return _attend(module, q, k, v, mask, **kwargs)

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
    """Make the description of a mask for the local tokens, in place of transformers' mask."""
    shard = current_shard()
    assert shard is not None
    if q_length != shard.length or kv_length != shard.length or q_offset or kv_offset:
        raise unsplit_refusal("its masks have more keys than queries")
    mask, documents = describe_mask(mask_function), shard.documents
    if mask.chunk is not None and (chunks := shard.chunks(mask.chunk)) is not None:
        mask = replace(mask, chunk=None)
        documents = chunks if attention_mask is None else chunks.to(attention_mask.device)
    return MaskRule(replace(mask, documents=documents, present=to_plain(attention_mask)))


def describe_mask(function: Any) -> AttentionMask:
    """Return a mask function of transformers as a description.

    Raises Refusal S661 for an unknown function.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    cells = _cells(function)
    match name.split(".")[0]:
        case "causal_mask_function":
            return AttentionMask(causal=True)
        case "bidirectional_mask_function":
            return AttentionMask()
        case "and_masks":
            return functools.reduce(_intersect, map(describe_mask, cells["mask_functions"]))
        case "sliding_window_overlay":
            return AttentionMask(back=int(cells["sliding_window"]) - 1)
        case "sliding_window_bidirectional_overlay":
            return AttentionMask(
                back=int(cells["sliding_window"]), ahead=int(cells["sliding_window"])
            )
        case "chunked_overlay":
            return AttentionMask(chunk=int(cells["chunk_size"]))
        case "packed_sequence_mask_function":
            return AttentionMask()  # it has local tokens only; the shard has all documents
        case "remap_positions_for_packed_sequence":
            # uses differences within one document only
            return describe_mask(cells["mask_function"])
    raise unsplit_refusal(f"its masks are made by `{name}`, which is not supported")


def _cells(function: Any) -> dict[str, Any]:
    closure = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in closure)))


def _intersect(a: AttentionMask, b: AttentionMask) -> AttentionMask:
    """Return the intersection of two masks."""

    def least(x: int | None, y: int | None) -> int | None:
        limits = [n for n in (x, y) if n is not None]
        return min(limits) if limits else None

    if a.chunk is not None and b.chunk is not None and a.chunk != b.chunk:
        raise unsplit_refusal("its masks have chunks of two sizes")
    return AttentionMask(
        causal=a.causal or b.causal,
        back=least(a.back, b.back),
        ahead=least(a.ahead, b.ahead),
        chunk=least(a.chunk, b.chunk),
    )


# -- attention -----------------------------------------------------------------------------------


def _method(module: nn.Module) -> AttentionMethod:
    """Return the method of a module's row; raises Refusal S660 for a module without a row."""
    method: AttentionMethod | None = vars(module).get(SLOT)
    if method is None:
        raise unnamed_refusal(type(module).__name__)
    return method


def _tensor_arguments(kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors among further arguments, which may not be of all tokens."""
    return [n for n, v in kwargs.items() if isinstance(v, Tensor) and n not in IGNORED_ARGUMENTS]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention to the full sequence, in place of an attention function of transformers."""
    shard, method = current_shard(), _method(module)
    assert shard is not None
    sinks = kwargs.pop("s_aux", None)  # GPT-OSS: scores in the softmax that have no values
    bias = kwargs.pop("position_bias", None)  # numbers that T5 adds to scores
    extra = _tensor_arguments(kwargs)
    if extra:
        raise unsplit_refusal(f"its attention gets `{extra[0]}`, which cannot be split by tokens")
    if key.shape[-2] != shard.length or query.shape[-2] != shard.length:
        raise unsplit_refusal("it attends to more than the tokens of the batch")
    rule = _rule(module, mask, is_causal)
    if kwargs.get("softcap") is not None:
        rule = replace(rule, cap=float(kwargs["softcap"]))
    if sinks is not None:
        rule = replace(rule, sinks=sinks)
    if bias is not None:
        rule = replace(rule, rows=expand_over_keys(shard, bias))
        if rule.rows is None:
            raise local_keys_refusal()
    unseen_result: Any = "scores" if vars(module).get(_EAGER) else "zero"
    call = AttentionCall(query, key, value, rule, scaling, dropout, unseen_result)
    return shard.attend(method, call).transpose(1, 2).contiguous(), None


def _attend_kept(
    decoding: Decoding,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention to the cached keys of all ranks; the mask is the model's, over all keys."""
    method, sinks = _method(module), kwargs.pop("s_aux", None)
    extra = _tensor_arguments(kwargs)
    if extra or (dropout and not decoding.shapes):  # stages on meta may be in training mode
        raise cache_refusal(f"its attention gets `{extra[0] if extra else 'dropout'}`")
    out = attend_cached(
        decoding, method, (query, key, value), mask, scaling, kwargs.get("softcap"), sinks
    )
    return out.transpose(1, 2).contiguous(), None


def attend_cached(
    decoding: Decoding,
    method: AttentionMethod,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    scale: float | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of new tokens to the keys and values that the cache has returned.

    Raises Refusal S627 for keys that were changed since, and for masks that are no tensors.
    """
    query, key, value = tensors
    if not decoding.is_from_cache(key, value):
        raise cache_refusal("it attends to other keys than those that its cache keeps")
    if not (isinstance(mask, Tensor) or (mask is None and query.shape[2] == 1)):
        raise cache_refusal("its masks are no tensors of [queries, keys]")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rules = BlockRules(PositionMask(), scale, None if cap is None else float(cap))
    return decoding.attend(method, tensors, mask, rules, sinks)


def cache_refusal(reason: str) -> Refusal:
    """Return the refusal S627 of an attention whose keys cannot be cached split by tokens."""
    return Refusal.of(
        "S627",
        f"`{current_site() or 'an attention'}` cannot keep keys and values by tokens",
        notes=(reason,),
        helps=("`use_cache=False` computes every token from the full sequence",),
    )


def _rule(module: nn.Module, mask: Any, is_causal: bool | None) -> AttentionMask:
    if isinstance(mask, MaskRule):
        return mask.mask
    if mask is not None:
        raise unsplit_refusal("it makes its masks itself, as tensors of [queries, keys]")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return AttentionMask(causal=bool(causal))


def is_causal(shard: SequenceShard, visible: Tensor) -> bool:
    """Return whether a boolean mask [.., local queries, all keys] is exactly the causal mask."""
    if visible.is_meta or visible.shape[-2] != shard.length:
        return False
    positions = shard.positions(visible.device)[:, None]
    keys = torch.arange(shard.layout.total, device=visible.device)
    return bool((visible == (keys <= positions)).all())


def unnamed_refusal(class_name: str) -> Refusal:
    """Return the refusal S660 of an attention that no row names."""
    return Refusal.of(
        "S660",
        f"`{current_site() or class_name}` is an attention that no `context_parallel` row names",
        notes=("all attentions of a model must get the same tokens",),
        helps=("select all of them: `layers.*.self_attn  context_parallel(...)`",),
    )


def unsplit_refusal(reason: str, *helps: str) -> Refusal:
    """Return the refusal S661 of an attention that cannot be split, with the model's line."""
    line = model_line() if current_site() else ""
    return Refusal.of(
        UNSPLIT,
        f"`{current_site() or 'an attention'}` cannot be split by tokens",
        notes=(f"{reason}, at {line}" if line else reason,),
        helps=(*helps, "or " * bool(helps) + "leave `context_parallel` out for this model"),
    )


def local_keys_refusal() -> Refusal:
    """Return the refusal of numbers added to scores that cover a rank's own keys only."""
    return unsplit_refusal(
        "the term that it adds to its scores covers only the tokens of one rank",
        "compute it only from positions and integers of the batch: each rank can compute this for"
        " all tokens",
    )


def set_method(module: nn.Module, method: AttentionMethod) -> None:
    """Set the method of all attentions in a module."""
    for part in module.modules():
        vars(part)[SLOT] = method
