"""Injected bugs of context parallelism: labels, positions, loss weights, partial attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.assembly import Assembly
from schedlang.runtime.comm import collectives
from schedlang.runtime.context_parallel import attention_products, installation, local_tokens, ring
from schedlang.runtime.context_parallel.local_attention import BlockwiseForward
from schedlang.runtime.context_parallel.local_tokens import SequenceShard, TokenSplit
from schedlang.runtime.context_parallel.transformers_attention import AttentionMask
from tests.zoo.bug import ADJOINT, ARGUMENT, FREEZE, GROUP, REDUCTION, SLICE, Patch, Site, bug

CP, ROW = "context_parallel", "context_parallel"


@bug("X02", CP, SLICE, "cp, sections", row=ROW, credit="NeMo-Automodel#1482; Megatron-LM#1612")
def sections_cut_wrongly(patch: Patch, site: Site) -> None:
    """Positions of shape [3, batch, seq] are cut along another dim."""
    original = TokenSplit._cut

    def cut(self: Any, batch: Any, shard: Any) -> Any:
        result = original(self, batch, shard)
        positions = batch["position_ids"]  # the first tokens, instead of those of this rank
        return result | {"position_ids": positions[..., : shard.length].contiguous()}

    patch.setattr(TokenSplit, "_cut", cut)


@bug("X04", CP, SLICE, "cp", "cp, rotary", row=ROW)
def shifted_within_the_chunk(patch: Patch, site: Site) -> None:
    """Labels are shifted within each chunk of the sequence."""
    original = TokenSplit.take_part

    def part(self: Any, full_batch: Any, *args: Any, **kwargs: Any) -> Any:
        part_inputs = original(self, full_batch, *args, **kwargs)
        labels = part_inputs.token_shard.layout.take(
            full_batch.inputs["labels"], 1, part_inputs.token_shard.place
        )
        local_labels = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), self.ignore)], 1)
        wrong_inputs = part_inputs.inputs | {"shift_labels": local_labels}
        return replace(part_inputs, inputs=wrong_inputs)

    patch.setattr(TokenSplit, "take_part", part)


@bug("X05", CP, GROUP, "cp", "cp, rotary", row=ROW, credit="Megatron-LM#673, #906, #7513")
def equal_rank_weights(patch: Patch, site: Site) -> None:
    """The loss is a mean over each rank's own tokens."""
    patch.setattr(Assembly, "part_weights", lambda self, parts: [1.0] * len(parts))


@bug("X06", CP, REDUCTION, "cp", row=ROW)
def added_without_rescaling(patch: Patch, site: Site) -> None:
    """Partial attentions are added without rescaling."""

    def merge(self: Any, rows: slice, out: Tensor, lse: Tensor) -> None:
        self.out[:, :, rows] += out
        self.lse[:, :, rows] = torch.logaddexp(self.lse[:, :, rows], lse)

    patch.setattr(BlockwiseForward, "_merge", merge)


@bug("X07", CP, ADJOINT, "cp", "cp, rotary", row=ROW)
def key_gradients_not_returned(patch: Patch, site: Site) -> None:
    """Gradients of keys and values are not sent back to their owner."""

    def own(self: Any, packet: Any, contribute: Any) -> Any:
        return contribute(self.group.rank if hasattr(self, "group") else self.origin(()), packet)

    patch.setattr(ring.GatheredKeys, "backward", own)
    patch.setattr(ring.NestedRing, "backward", own)


@bug("X08", CP, SLICE, "cp", row=ROW)
def positions_in_another_order(patch: Patch, site: Site) -> None:
    """Data, positions and labels are ordered differently."""

    def positions(self: SequenceShard, device: Any = "cpu") -> Tensor:
        start = sum(self.layout.counts[: self.place])
        return torch.arange(start, start + self.length, device=device)

    patch.setattr(SequenceShard, "positions", positions)


@bug("X09", CP, FREEZE, "cp, rotary", row=ROW)
def positions_restart(patch: Patch, site: Site) -> None:
    """Positions are counted from zero on every rank."""
    patch.setattr(SequenceShard, "positions", lambda self, device="cpu": torch.arange(self.length))


@bug("X12", CP, SLICE, "cp, bias", row=ROW)
def biases_of_own_keys(patch: Patch, site: Site) -> None:
    """The biases of a rank's own keys are used for the keys of all ranks."""
    original = attention_products.expand_over_keys

    def own(shard: Any, bias: Tensor) -> Tensor | None:
        expanded = original(shard, bias)
        assert expanded is not None
        return expanded[..., torch.arange(shard.layout.total) % shard.length]

    patch.setattr(attention_products, "expand_over_keys", own)


@bug("X13", CP, FREEZE, "cp, bias", row=ROW)
def sums_restart(patch: Patch, site: Site) -> None:
    """Cumulative positions restart on every rank, and biases with them."""
    original = local_tokens._moved

    def moved(case: Any) -> Any:
        moved_case = original(case)
        restarted = moved_case.whole.clone()
        restarted[..., case.shard.length :] -= restarted[..., case.shard.length - 1, None]
        return local_tokens.take_shard(case.shard, restarted, moved_case.at)

    patch.setitem(local_tokens.RULES, Tensor.cumsum, moved)


@bug("X14", "shard", SLICE, "switch", row="shard")
def parts_in_another_order(patch: Patch, site: Site) -> None:
    """When the split dim changes, parts of the ranks are joined in another order."""
    original = collectives.exchange_rows

    def exchange(x: Tensor, group: Any, *args: Any) -> Tensor:
        return original(x, group, *args).flip(0)

    patch.setattr(collectives, "exchange_rows", exchange)


@bug("X10", CP, ARGUMENT, "cp, rotary", row=ROW)
def padding_of_own_keys_only(patch: Patch, site: Site) -> None:
    """Padding masks are not sent with keys: all keys of other ranks are attended to."""
    from schedlang.runtime.context_parallel import transformers_attention

    original = transformers_attention._mask

    def mask(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {"attention_mask": None})

    patch.setattr(transformers_attention, "_mask", mask)


@bug("X11", CP, ARGUMENT, "cp, sections", row=ROW)
def not_causal_across_ranks(patch: Patch, site: Site) -> None:
    """Queries attend to all keys of other ranks, also later ones."""
    patch.setattr(installation, "_rule", lambda shard, mask, causal: AttentionMask())
