"""Generate text with a program, by the loop of transformers' own `generate`.

Used by `Program.generate`. The loop runs on every rank, on the same tokens; only the model's
forward is the program's. Prompts are split over replicas and microbatches as the rows of a batch
are. Keys and values stay on the rank that computes them: a rank has those of its layers, heads,
rows and tokens. An encoder runs again with each token, because the program has it and the decoder
in one chain of stages; its output is not stored. Where rows split sequences, padding tokens follow
those of a forward, until ranks can split them evenly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.placement import S
from schedlang.runtime.comm.agreement import AgreementItem, check_agreement, checksum
from schedlang.runtime.context_parallel.decoding import CacheAssignment, Decoding, current_decoding
from schedlang.runtime.device import default_generators
from schedlang.runtime.sharding.edges import dim_of

if TYPE_CHECKING:
    from schedlang.runtime.assembly import Assembly
    from schedlang.runtime.batch import BatchPart
    from schedlang.runtime.context_parallel.token_layout import SequenceLayout
    from schedlang.runtime.device import RandomGenerator

RunForward = Callable[..., Any]

# the argument in newer versions of transformers 5, and in older ones
CACHES = ("cache", "past_key_values")
OTHER_STATE = "this model keeps more than keys and values between tokens, or moves their rows"
NO_CACHE_HELP = "`use_cache=false` computes every token from the full sequence"
REFUSED_OPTIONS = {  # settings under which ranks could diverge, or that move the rows of a cache
    "max_time": "ranks have different clocks: use `max_new_tokens` as the bound",
    "assistant_model": "leave it out: the program's own model makes every token",
    "prompt_lookup_num_tokens": "leave it out: the program's own model makes every token",
    "custom_generate": "leave it out: the loop is transformers' own",
    "synced_gpus": "leave it out: all ranks do the same",
}


def generate(a: Assembly, run: RunForward, inputs: Tensor | None, options: dict[str, Any]) -> Any:
    """Return what the model's own `generate` returns, equal on every rank.

    `run(batch, each)` is a forward of the program without gradients; `each` maps the index of a
    microbatch and the microbatch to the microbatch that runs; `whole`: every rank of a sequence
    gets all tokens. Raises Refusal S627 for models and settings that are not supported, and S650 if
    ranks have different prompts.
    """
    model: Any = a.module
    config = options.get("generation_config") or getattr(model, "generation_config", None)
    _check_options(
        model, {name: options.get(name, getattr(config, name, None)) for name in REFUSED_OPTIONS}
    )
    samples = options.get("do_sample", getattr(config, "do_sample", False))
    _check_same_on_ranks(inputs, options, default_generators([a.ranks.device]) if samples else [])
    if model.config.is_encoder_decoder:
        options |= _encoder_option(model, inputs, options)
    return _facade(a, model, run).generate(*([] if inputs is None else [inputs]), **options)


def _encoder_option(model: Any, inputs: Tensor | None, options: Mapping[str, Any]) -> Any:
    """Return an option `encoder_outputs` that holds the inputs of the encoder instead of its
    outputs.

    The loop repeats its rows for beams and samples, and passes it to each forward.
    """
    from transformers.utils import ModelOutput

    if options.get("encoder_outputs") is not None:
        raise _refusal("`encoder_outputs` are not followed", "give the inputs of the encoder")
    names = (model.main_input_name, "inputs_embeds")
    inputs_by_name = {name: options[name] for name in names if options.get(name) is not None}
    encoder_inputs = inputs_by_name or ({} if inputs is None else {names[0]: inputs})
    if not encoder_inputs:
        raise _refusal(f"`{names[0]}`, an input of the encoder, is missing", "give it")
    return {"encoder_outputs": ModelOutput(encoder_inputs)}


def _check_options(model: Any, options: Mapping[str, Any]) -> None:
    if not callable(getattr(model, "generate", None)) or not hasattr(model, "generation_config"):
        raise _refusal(
            f"`{type(model).__name__}` has no `generate` of transformers",
            "write your own loop: `eval_step` returns the outputs of the full batch on every rank",
        )
    for name, help_ in REFUSED_OPTIONS.items():
        if options.get(name) is not None:
            raise _refusal(f"`{name}` is not supported", help_)


def _check_same_on_ranks(
    inputs: Tensor | None, options: Mapping[str, Any], generators: Sequence[RandomGenerator]
) -> None:
    """Raise Refusal S650 if ranks have different prompts, settings or states of generators."""
    tensors = {
        name: checksum(value)
        for name, value in {"inputs": inputs, **options}.items()
        if isinstance(value, Tensor)
    }
    settings = {
        name: repr(value)
        for name, value in options.items()
        if isinstance(value, (bool, int, float, str, list, tuple, type(None)))
    }
    helps = ("give the same prompts and settings on every rank",)
    states = {str(k): checksum(generator.get_state()) for k, generator in enumerate(generators)}
    check_agreement(
        [
            AgreementItem("prompt", tensors, readable=False, helps=helps),
            AgreementItem("settings of generation", settings, helps=helps),
            AgreementItem(
                "generator of random numbers",
                states,
                readable=False,
                helps=("call `torch.manual_seed` with one number on all ranks before sampling",),
            ),
        ]
    )


def _refusal(message: str, help_: str) -> Refusal:
    return Refusal.of("S627", message, helps=(help_,))


def _facade(a: Assembly, model: Any, run: RunForward) -> Any:
    """Return a model for transformers' loop whose forward runs the program on full batches."""
    from transformers.cache_utils import EncoderDecoderCache

    kind: Any = type(model)
    shares, _, _ = a.batch_parts
    min_rows = (shares if isinstance(shares, int) else sum(shares)) * a.microbatches
    multiples = {split: _token_multiple(a, split) for split in (True, False)}
    tokens_fed = 0  # tokens of the last forward without our cache

    @functools.wraps(kind.forward)
    def forward(self: Any, **inputs: Any) -> Any:
        nonlocal tokens_fed
        name = next((name for name in CACHES if inputs.get(name) is not None), None)
        cache: Any = None if name is None else inputs.pop(name)
        if (encoder := inputs.pop("encoder_outputs", None)) is not None:
            inputs |= encoder  # the inputs that `_encoder_option` has put there
        tokens = _token_count(inputs)
        # a cache that the model itself makes (RWKV, MiniMax): the loop expects that it is used
        if (tokens < tokens_fed) if name is None else not isinstance(cache, KeyValueCache):
            raise _refusal(OTHER_STATE, NO_CACHE_HELP)
        tokens_fed = tokens if name is None else 0
        # new tokens after a prompt are unsharded on every rank of their sequence; stored keys are
        # sharded
        new = a.tokens is not None and name is not None and cache.seen > 0
        multiple = multiples[not new]
        if a.tokens is not None and not new:
            inputs = _drop_defaults(inputs, a.batch_keys)
        num_kept = inputs.pop("logits_to_keep", 0) if multiple > 1 else 0
        batch, rows = _pad_rows(_pad_tokens(inputs, tokens, multiple), min_rows)
        arguments = {"return_dict": True, **{key: v for key, v in batch.items() if v is not None}}
        output = run(arguments, _with_cache(name, cache, tokens if new else 0), whole=new)
        if rows < min_rows or multiple > 1:
            output.logits = output.logits[:rows, tokens - num_kept if num_kept else 0 : tokens]
        if name is not None:
            if a.tokens is not None and not new:
                cache.keep_prompt(a.tokens.layout(arguments), tokens)
            cache.advance(tokens, -tokens % multiple)
            output[name] = cache
        return output

    def prepared(self: Any, config: Any, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        kind._prepare_cache_for_generation(self, config, values, *args, **kwargs)
        for name in CACHES:
            if (cache := values.get(name)) is None:
                continue
            is_pair = type(cache) is EncoderDecoderCache
            names = ("self_attention_cache", "cross_attention_cache") if is_pair else ()
            for part in [getattr(cache, name) for name in names] or [cache]:
                _check_cache(part)
            values[name] = _cache_class(is_pair)()
            values[name].turns = new_turns(a)

    attributes = {
        "forward": forward,
        "_prepare_cache_for_generation": prepared,
        "device": property(lambda self: a.ranks.device),
        "__module__": kind.__module__,
    }
    facade: Any = object.__new__(type(kind.__name__, (kind,), attributes))
    facade.__dict__.update({name: v for name, v in vars(model).items() if name != "forward"})
    return facade


def _with_cache(name: str | None, cache: Any, new: int) -> Callable[[int, BatchPart], BatchPart]:
    """Return a function that adds its cache to a microbatch; `new`: new tokens, to be split by
    rank."""
    visit = cache.decoding_contexts(new) if new else None

    def each(k: int, part: BatchPart) -> BatchPart:
        inputs = part.inputs if name is None else {**part.inputs, name: cache.part(k)}
        return replace(part, inputs=inputs, token_shard=visit(k) if visit else part.token_shard)

    return each


def new_turns(a: Assembly) -> CacheAssignment | None:
    """Return the record of the tokens that this rank stores, still empty; None: sequences are
    unsharded."""
    if a.tokens is None:
        return None
    return CacheAssignment(
        a.ranks.mesh.index(a.ranks.rank, a.context), a.tokens.ranks, a.ranks.device
    )


def _check_cache(cache: Any) -> None:
    """Refuse a cache that does not store exactly all keys and values."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if type(cache) is not DynamicCache:
        raise _refusal(
            f"a cache of the kind `{type(cache).__name__}` is not supported",
            "leave out `cache_implementation` and caches of your own: this one keeps"
            " all keys and values",
        )
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        raise _refusal(OTHER_STATE, NO_CACHE_HELP)


# the sequences that the loop appends to: those of the decoder in an encoder-decoder model
_GROWING = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


def _token_count(inputs: Mapping[str, Any]) -> int:
    """Return the number of tokens of each row of a forward."""
    grows = next(inputs[name] for name in _GROWING if inputs.get(name) is not None)
    return int(grows.shape[1])


def _drop_defaults(inputs: Mapping[str, Any], batch_keys: frozenset[str]) -> dict[str, Any]:
    """Drop tensors with default values that the program does not know; refuse (S627) others.

    known  the keys of the batch that the program was built from, which splits sequences
    """
    remaining = dict(inputs)
    for name, value in inputs.items():
        if name in batch_keys or not isinstance(value, Tensor):
            continue
        positions = torch.arange(value.shape[-1], device=value.device)
        default = positions if name.endswith(("position_ids", "cache_position")) else 1
        if not bool((value == default).all()):
            raise _refusal(
                f"`{name}` was not in the batch of `build`, and sequences are split",
                f"build from a batch with `{name}`",
            )
        del remaining[name]
    return remaining


def _token_multiple(a: Assembly, split: bool) -> int:
    """Return the number that must divide a sequence's tokens, so that all rows can split them
    evenly.

    split  rows that split tokens for attention count as well
    """
    mesh = a.ranks.mesh
    axes = {
        boundary.axis
        for boundaries in a.boundaries.values()
        for boundary in boundaries
        for placement in (boundary.input, boundary.output)
        if isinstance(placement, S) and dim_of(placement) == 1
    }
    # a rank has at most two ranges of the tokens that are split for attention
    runs = 2 * mesh.size(a.context) if split and a.tokens is not None else 1
    return runs * math.lcm(*(mesh.size(axis) for axis in axes))


def _pad_tokens(inputs: Mapping[str, Any], tokens: int, multiple: int) -> Mapping[str, Any]:
    """Return the batch padded with tokens up to a multiple; the mask hides them from all others.

    Positions continue; masks also cover the stored tokens before.
    """
    padding = -tokens % multiple
    if not padding:
        return inputs

    tokens_name = next(name for name in _GROWING if inputs.get(name) is not None)
    mask = "decoder_attention_mask" if tokens_name.startswith("decoder") else "attention_mask"

    def filled(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name in ("position_ids", "cache_position"):
            steps = torch.arange(1, padding + 1, device=value.device, dtype=value.dtype)
            return torch.cat([value, value[..., -1:] + steps], -1)
        if name == mask:
            return torch.cat([value, value.new_zeros(len(value), padding)], 1)
        if name in (tokens_name, "token_type_ids"):
            return torch.cat([value, value[:, -1:].expand(-1, padding, *value.shape[2:])], 1)
        return value

    return {name: filled(name, value) for name, value in inputs.items()}


def _pad_rows(inputs: Mapping[str, Any], min_rows: int) -> tuple[dict[str, Any], int]:
    """Return the batch padded to `min_rows` rows by copies of its last row, and its number of
    rows."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    rows = len(tensors[0])

    def filled(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != rows:
            return value
        return torch.cat([value, value[-1:].expand(min_rows - rows, *value.shape[1:])])

    if rows >= min_rows:
        return dict(inputs), rows
    return {name: filled(value) for name, value in inputs.items()}, rows


class KeyValueCache:
    """Keys and values of a microbatch, for the layers of this rank.

    seen   tokens that all layers have processed
    turns  which of them this rank stores, where rows split sequences; None: all
    """

    turns: CacheAssignment | None = None

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self._whole = self
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._parts: dict[int, KeyValueCache] = {}
        self._running: dict[int, Decoding] = {}

    def part(self, microbatch: int) -> KeyValueCache:
        """Return the cache of a microbatch."""
        if microbatch not in self._parts:
            self._parts[microbatch] = part = type(self)()
            part._whole = self
        return self._parts[microbatch]

    def keep_prompt(self, layout: SequenceLayout, tokens: int) -> None:
        """Store this rank's tokens of a prompt; drop the padding."""
        assert self.turns is not None
        local = self.turns.assign_prompt(layout, tokens)
        for part in self._parts.values():
            for layer, (keys, values) in part._held.items():
                if keys.shape[-2] != layout.counts[self.turns.place]:
                    raise _refusal(OTHER_STATE, NO_CACHE_HELP)
                part._held[layer] = keys.index_select(-2, local), values.index_select(-2, local)

    def decoding_contexts(self, tokens: int) -> Callable[[int], Decoding]:
        """Assign new tokens to ranks; return a function that gives the context of each
        microbatch."""
        assert self.turns is not None
        local = self.turns.assign_new(tokens)
        positions = self.turns.positions
        self._running = running = dict[int, Decoding]()
        return lambda k: running.setdefault(k, Decoding(positions, local))

    def advance(self, tokens: int, padding: int = 0) -> None:
        """Count the tokens of a forward, and drop the padding.

        Raises Refusal S627 if the model stores other tokens than expected.
        """
        self.seen += tokens
        expected = self.seen + padding
        if self.turns is not None:  # `keep_prompt` has dropped some already
            expected, padding = len(self.turns.positions), 0
            if any(decoding.returned for decoding in self._running.values()):
                raise _refusal(OTHER_STATE, NO_CACHE_HELP)
        for part in self._parts.values():
            for layer, (keys, values) in part._held.items():
                if keys.shape[-2] != expected:
                    raise _refusal(OTHER_STATE, NO_CACHE_HELP)
                if padding:
                    part._held[layer] = keys[..., : self.seen, :], values[..., : self.seen, :]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values to the stored ones; on the meta device nothing is stored."""
        decoding = current_decoding()
        if decoding is not None:
            return self._dealt(decoding, key_states, value_states, layer_idx)
        if key_states.is_meta:
            cached = [
                decoding.new_empty((*decoding.shape[:-2], self._whole.seen, decoding.shape[-1]))
                for decoding in (key_states, value_states)
            ]
        else:
            cached = list(self._held.get(layer_idx, ()))
        keys, values = key_states, value_states
        if cached:
            keys, values = torch.cat([cached[0], keys], -2), torch.cat([cached[1], values], -2)
        if not key_states.is_meta:
            self._held[layer_idx] = keys, values
        return keys, values

    def _dealt(
        self, decoding: Decoding, keys: Tensor, values: Tensor, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's keys and values, after appending the new ones that are assigned to
        it."""
        if not decoding.shapes:
            local, cached = decoding.cached_tokens, self._held[layer]
            if len(local):  # else nothing is copied
                added = keys.index_select(-2, local), values.index_select(-2, local)
                cached = torch.cat([cached[0], added[0]], -2), torch.cat([cached[1], added[1]], -2)
            self._held[layer] = keys, values = cached
        decoding.returned.append((keys, values))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens before this forward, for every layer, whether or not it has run
        already."""
        return self._whole.seen

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys that the new tokens see, and the offset of the first (0)."""
        return self._whole.seen + query_length, 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as None: outputs are sent to other ranks, the cache stays on its rank."""
        return type(None), ()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise _refusal(OTHER_STATE, NO_CACHE_HELP)

    update_conv_state = update_recurrent_state = update_indexer = _refuse
    get_conv_state = get_recurrent_state = has_previous_state = _refuse
    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse


class _NoUpdates(dict[int, bool]):
    """A dict without entries: no layer stores keys of the encoder's tokens; each forward makes
    them."""

    def __setitem__(self, layer: int, value: bool) -> None:
        """Do nothing."""


@functools.cache
def _cache_class(two_caches: bool) -> Any:
    """Return the class of caches; made on first use, since few runs import transformers.

    two  for a decoder with an encoder: each microbatch has a second cache that stores nothing
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    cache_class = type("Cache", (KeyValueCache, DynamicCache), {})
    if not two_caches:
        return cache_class

    class Passes(DynamicCache):  # type: ignore[misc]  # transformers has no types
        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    class Both(EncoderDecoderCache):  # type: ignore[misc]
        __reduce__ = KeyValueCache.__reduce__

    def part(self: Any, microbatch: int) -> Any:
        cache_pair = Both(KeyValueCache.part(self, microbatch), Passes())
        cache_pair.is_updated = _NoUpdates()
        return cache_pair

    return type("Cache", (cache_class,), {"part": part})
