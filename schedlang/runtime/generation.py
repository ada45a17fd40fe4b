"""Generate text on a sharded program, by the loop of transformers' own `generate`.

The loop runs on every rank, on the same tokens; only the model's forward is the program's.  Prompts
are shared among replicas and microbatches as the rows of a batch are.  Keys and values stay where
they are made: a rank has those of its layers, of its heads, of its rows, and of its tokens.  An
encoder runs with each token again, as stages that the program has in one chain: what it gives is
kept nowhere.  Where rows split sequences, tokens that nothing looks at stand behind those of a
forward, until they can be split evenly.
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
from schedlang.runtime.comm.agreement import Item, agree, checksum
from schedlang.runtime.context_parallel.decoding import Decoding, Turns, decoding
from schedlang.runtime.device import default_generators
from schedlang.runtime.sharding.shard import dim_of

if TYPE_CHECKING:
    from schedlang.runtime.assembly import Assembly
    from schedlang.runtime.batch import Part
    from schedlang.runtime.context_parallel.token_layout import Layout
    from schedlang.runtime.device import States

Run = Callable[..., Any]

CACHES = ("cache", "past_key_values")  # the argument in newer transformers 5, and in older ones
MORE = "this model keeps more than keys and values between tokens, or moves their rows"
WITHOUT = "`use_cache=false` computes every token from the full sequence"
REFUSED = {  # settings under which ranks would go different ways, or that move a cache's rows
    "max_time": "ranks have different clocks: use `max_new_tokens` as the bound",
    "assistant_model": "leave it out: the program's own model makes every token",
    "prompt_lookup_num_tokens": "leave it out: the program's own model makes every token",
    "custom_generate": "leave it out: the loop is transformers' own",
    "synced_gpus": "leave it out: all ranks do the same",
}


def generate(a: Assembly, run: Run, inputs: Tensor | None, options: dict[str, Any]) -> Any:
    """Return what the model's own `generate` returns, alike on every rank.

    `run(batch, each)` is a forward of the program without gradients, of what `each` makes of a
    microbatch and its number; `whole`: with all tokens on each rank of a sequence.  Raises
    Refusal S627 for models and settings that it cannot follow, and S650 where ranks are given
    different prompts.
    """
    model: Any = a.module
    config = options.get("generation_config") or getattr(model, "generation_config", None)
    _check(a, model, {name: options.get(name, getattr(config, name, None)) for name in REFUSED})
    samples = options.get("do_sample", getattr(config, "do_sample", False))
    _check_same(inputs, options, default_generators([a.ranks.device]) if samples else [])
    if model.config.is_encoder_decoder:
        options |= _beside_encoder(model, inputs, options)
    return _facade(a, model, run).generate(*([] if inputs is None else [inputs]), **options)


def _beside_encoder(model: Any, inputs: Tensor | None, options: Mapping[str, Any]) -> Any:
    """Put what an encoder is given in the place of what it gives: there the loop repeats its rows
    where it tries several for one, and hands them to each forward."""
    from transformers.utils import ModelOutput

    if options.get("encoder_outputs") is not None:
        raise _refused("`encoder_outputs` are not followed", "give the inputs of the encoder")
    names = (model.main_input_name, "inputs_embeds")
    given = {name: options[name] for name in names if options.get(name) is not None}
    found = given or ({} if inputs is None else {names[0]: inputs})
    if not found:
        raise _refused(f"`{names[0]}`, an input of the encoder, is missing", "give it")
    return {"encoder_outputs": ModelOutput(found)}


def _check(a: Assembly, model: Any, options: Mapping[str, Any]) -> None:
    if not callable(getattr(model, "generate", None)) or not hasattr(model, "generation_config"):
        raise _refused(
            f"`{type(model).__name__}` has no `generate` of transformers",
            "write your own loop: `eval_step` returns the outputs of the full batch on every rank",
        )
    for name, help_ in REFUSED.items():
        if options.get(name) is not None:
            raise _refused(f"`{name}` is not supported", help_)


def _check_same(
    inputs: Tensor | None, options: Mapping[str, Any], generators: Sequence[States]
) -> None:
    """Raise Refusal S650 where ranks are given other prompts, settings or states of generators."""
    tensors = {
        name: checksum(value)
        for name, value in {"inputs": inputs, **options}.items()
        if isinstance(value, Tensor)
    }
    plain = {
        name: repr(value)
        for name, value in options.items()
        if isinstance(value, (bool, int, float, str, list, tuple, type(None)))
    }
    helps = ("give the same prompts and settings on every rank",)
    states = {str(k): checksum(one.get_state()) for k, one in enumerate(generators)}
    agree(
        [
            Item("prompt", tensors, shown=False, helps=helps),
            Item("settings of generation", plain, helps=helps),
            Item(
                "generator of random numbers",
                states,
                shown=False,
                helps=("call `torch.manual_seed` with one number on all ranks before sampling",),
            ),
        ]
    )


def _refused(title: str, help_: str) -> Refusal:
    return Refusal.of("S627", title, helps=(help_,))


def _facade(a: Assembly, model: Any, run: Run) -> Any:
    """The model as transformers' loop sees it: its forward is the program's, on whole batches."""
    from transformers.cache_utils import EncoderDecoderCache

    kind: Any = type(model)
    shares, _, _ = a.parts
    least = (shares if isinstance(shares, int) else sum(shares)) * a.micro
    multiples = {split: _multiple(a, split) for split in (True, False)}
    fed = 0  # tokens of the last forward without a cache of ours

    @functools.wraps(kind.forward)
    def forward(self: Any, **inputs: Any) -> Any:
        nonlocal fed
        name = next((name for name in CACHES if inputs.get(name) is not None), None)
        cache: Any = None if name is None else inputs.pop(name)
        if (encoder := inputs.pop("encoder_outputs", None)) is not None:
            inputs |= encoder  # what `_beside_encoder` has laid there
        tokens = _tokens(inputs)
        # a cache that the model makes by itself (RWKV, MiniMax): the loop takes it as kept
        if (tokens < fed) if name is None else not isinstance(cache, KeyValueCache):
            raise _refused(MORE, WITHOUT)
        fed = tokens if name is None else 0
        # tokens behind a prompt run whole on every rank of its sequence, over what each has kept
        new = a.tokens is not None and name is not None and cache.seen > 0
        multiple = multiples[not new]
        if a.tokens is not None and not new:
            inputs = _known(inputs, a.inputs)
        kept = inputs.pop("logits_to_keep", 0) if multiple > 1 else 0
        batch, rows = _enough_rows(_enough_tokens(inputs, tokens, multiple), least)
        given = {"return_dict": True, **{key: v for key, v in batch.items() if v is not None}}
        output = run(given, _beside(name, cache, tokens if new else 0), whole=new)
        if rows < least or multiple > 1:
            output.logits = output.logits[:rows, tokens - kept if kept else 0 : tokens]
        if name is not None:
            if a.tokens is not None and not new:
                cache.begin(a.tokens.layout(given), tokens)
            cache.advance(tokens, -tokens % multiple)
            output[name] = cache
        return output

    def prepared(self: Any, config: Any, given: dict[str, Any], *more: Any, **keyed: Any) -> None:
        kind._prepare_cache_for_generation(self, config, given, *more, **keyed)
        for name in CACHES:
            if (made := given.get(name)) is None:
                continue
            two = type(made) is EncoderDecoderCache
            for one in (made.self_attention_cache, made.cross_attention_cache) if two else (made,):
                _check_cache(one)
            given[name] = _cache_class(two)()
            given[name].turns = turns(a)

    more = {
        "forward": forward,
        "_prepare_cache_for_generation": prepared,
        "device": property(lambda self: a.ranks.device),
        "__module__": kind.__module__,
    }
    facade: Any = object.__new__(type(kind.__name__, (kind,), more))
    facade.__dict__.update({name: v for name, v in vars(model).items() if name != "forward"})
    return facade


def _beside(name: str | None, cache: Any, new: int) -> Callable[[int, Part], Part]:
    """Return what puts its cache beside a microbatch; `new`: tokens for ranks to deal."""
    visit = cache.visits(new) if new else None

    def each(k: int, part: Part) -> Part:
        inputs = part.inputs if name is None else {**part.inputs, name: cache.part(k)}
        return replace(part, inputs=inputs, shard=visit(k) if visit else part.shard)

    return each


def turns(a: Assembly) -> Turns | None:
    """Return the tokens that this rank will keep, of none yet; None where sequences stay whole."""
    if a.tokens is None:
        return None
    return Turns(a.ranks.mesh.index(a.ranks.rank, a.context), a.tokens.ranks, a.ranks.device)


def _check_cache(made: Any) -> None:
    """Refuse a cache that keeps other things than all keys and values, or in another way."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if type(made) is not DynamicCache:
        raise _refused(
            f"a cache of the kind `{type(made).__name__}` is not supported",
            "leave out `cache_implementation` and caches of your own: this one keeps"
            " all keys and values",
        )
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in made.layers):
        raise _refused(MORE, WITHOUT)


# the sequences that tokens are added to: of a decoder with an encoder, or else all that there is
_GROWS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


def _tokens(inputs: Mapping[str, Any]) -> int:
    """Count the tokens of each row that a forward is given."""
    grows = next(inputs[name] for name in _GROWS if inputs.get(name) is not None)
    return int(grows.shape[1])


def _known(inputs: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Leave out tensors that say nothing of which a program that splits sequences does not know;
    raise Refusal S627 for others of which it does not know."""
    found = dict(inputs)
    for name, value in inputs.items():
        if name in known or not isinstance(value, Tensor):
            continue
        counted = torch.arange(value.shape[-1], device=value.device)
        plain = counted if name.endswith(("position_ids", "cache_position")) else 1
        if not bool((value == plain).all()):
            raise _refused(
                f"`{name}` was not in the batch of `build`, and sequences are split",
                f"build from a batch with `{name}`",
            )
        del found[name]
    return found


def _multiple(a: Assembly, split: bool) -> int:
    """Return the number that divides the tokens of a sequence that all rows can split evenly.

    split  those of attention as well
    """
    mesh = a.ranks.mesh
    axes = {
        one.axis
        for found in a.boundaries.values()
        for one in found
        for placement in (one.input, one.output)
        if isinstance(placement, S) and dim_of(placement) == 1
    }
    # of tokens that are split for attention a rank has two runs, at most
    runs = 2 * mesh.size(a.context) if split and a.tokens is not None else 1
    return runs * math.lcm(*(mesh.size(axis) for axis in axes))


def _enough_tokens(inputs: Mapping[str, Any], tokens: int, multiple: int) -> Mapping[str, Any]:
    """The batch with tokens behind its own, up to a multiple, that no mask lets another see.

    Positions go on; masks reach over what is kept of tokens before, too.
    """
    more = -tokens % multiple
    if not more:
        return inputs

    grows = next(name for name in _GROWS if inputs.get(name) is not None)
    mask = "decoder_attention_mask" if grows.startswith("decoder") else "attention_mask"

    def filled(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name in ("position_ids", "cache_position"):
            steps = torch.arange(1, more + 1, device=value.device, dtype=value.dtype)
            return torch.cat([value, value[..., -1:] + steps], -1)
        if name == mask:
            return torch.cat([value, value.new_zeros(len(value), more)], 1)
        if name in (grows, "token_type_ids"):
            return torch.cat([value, value[:, -1:].expand(-1, more, *value.shape[2:])], 1)
        return value

    return {name: filled(name, value) for name, value in inputs.items()}


def _enough_rows(inputs: Mapping[str, Any], least: int) -> tuple[dict[str, Any], int]:
    """The batch with as many rows as there are parts, the last one again, and how many it had."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    rows = len(tensors[0])

    def filled(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != rows:
            return value
        return torch.cat([value, value[-1:].expand(least - rows, *value.shape[1:])])

    if rows >= least:
        return dict(inputs), rows
    return {name: filled(value) for name, value in inputs.items()}, rows


class KeyValueCache:
    """Keys and values of a microbatch, of the layers that run here; lengths are told for all.

    seen   tokens that all layers have had
    turns  which of them this rank keeps, where rows split sequences; None: all
    """

    turns: Turns | None = None

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self._whole = self
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._parts: dict[int, KeyValueCache] = {}
        self._running: dict[int, Decoding] = {}

    def part(self, microbatch: int) -> KeyValueCache:
        """The cache of a microbatch."""
        if microbatch not in self._parts:
            self._parts[microbatch] = made = type(self)()
            made._whole = self
        return self._parts[microbatch]

    def begin(self, layout: Layout, tokens: int) -> None:
        """Keep this rank's tokens of a prompt; what stood behind it is dropped."""
        assert self.turns is not None
        own = self.turns.prompt(layout, tokens)
        for part in self._parts.values():
            for layer, (keys, values) in part._held.items():
                if keys.shape[-2] != layout.counts[self.turns.place]:
                    raise _refused(MORE, WITHOUT)
                part._held[layer] = keys.index_select(-2, own), values.index_select(-2, own)

    def visits(self, tokens: int) -> Callable[[int], Decoding]:
        """Deal new tokens to ranks; returns what each microbatch of their forward runs in."""
        assert self.turns is not None
        own = self.turns.new(tokens)
        held = self.turns.held
        self._running = running = dict[int, Decoding]()
        return lambda k: running.setdefault(k, Decoding(held, own))

    def advance(self, tokens: int, behind: int = 0) -> None:
        """Count the tokens of a forward, and drop those behind them; refuse a model that keeps
        others."""
        self.seen += tokens
        wanted = self.seen + behind
        if self.turns is not None:  # of which `begin` has dropped some already
            wanted, behind = len(self.turns.held), 0
            if any(one.given for one in self._running.values()):
                raise _refused(MORE, WITHOUT)
        for part in self._parts.values():
            for layer, (keys, values) in part._held.items():
                if keys.shape[-2] != wanted:
                    raise _refused(MORE, WITHOUT)
                if behind:
                    part._held[layer] = keys[..., : self.seen, :], values[..., : self.seen, :]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values behind those before; a run for shapes leaves no trace."""
        new = decoding()
        if new is not None:
            return self._dealt(new, key_states, value_states, layer_idx)
        if key_states.is_meta:
            before = [
                new.new_empty((*new.shape[:-2], self._whole.seen, new.shape[-1]))
                for new in (key_states, value_states)
            ]
        else:
            before = list(self._held.get(layer_idx, ()))
        keys, values = key_states, value_states
        if before:
            keys, values = torch.cat([before[0], keys], -2), torch.cat([before[1], values], -2)
        if not key_states.is_meta:
            self._held[layer_idx] = keys, values
        return keys, values

    def _dealt(
        self, new: Decoding, keys: Tensor, values: Tensor, layer: int
    ) -> tuple[Tensor, Tensor]:
        """This rank's keys and values, with those of the new ones that it keeps."""
        if not new.shapes:
            own, held = new.own, self._held[layer]
            if len(own):  # else nothing is copied
                more = keys.index_select(-2, own), values.index_select(-2, own)
                held = torch.cat([held[0], more[0]], -2), torch.cat([held[1], more[1]], -2)
            self._held[layer] = keys, values = held
        new.given.append((keys, values))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before these: alike for all layers, also of one that has had these already."""
        return self._whole.seen

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that the next tokens see; their first is the first of the sequence."""
        return self._whole.seen + query_length, 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing of it: outputs are handed to other ranks, and it stays where it is."""
        return type(None), ()

    def _other(self, *_: Any, **__: Any) -> Any:
        raise _refused(MORE, WITHOUT)

    update_conv_state = update_recurrent_state = update_indexer = _other
    get_conv_state = get_recurrent_state = has_previous_state = _other
    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _other


class _None(dict[int, bool]):
    """No layer has keys and values of an encoder's tokens: each forward makes them."""

    def __setitem__(self, layer: int, value: bool) -> None:
        """Leave it at that."""


@functools.cache
def _cache_class(two: bool) -> Any:
    """Made when first asked for: transformers is imported for its own models only.

    two  of a decoder with an encoder: parts have one more cache, which gives back what it is given
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    one = type("Cache", (KeyValueCache, DynamicCache), {})
    if not two:
        return one

    class Passes(DynamicCache):  # type: ignore[misc]  # transformers has no types
        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    class Both(EncoderDecoderCache):  # type: ignore[misc]
        __reduce__ = KeyValueCache.__reduce__

    def part(self: Any, microbatch: int) -> Any:
        both = Both(KeyValueCache.part(self, microbatch), Passes())
        both.is_updated = _None()
        return both

    return type("Cache", (one,), {"part": part})
