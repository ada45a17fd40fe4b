"""Bugs of sequences that are split over ranks: labels, positions, shares, partial attentions."""

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
def sections_cut_elsewhere(patch: Patch, site: Site) -> None:
    """Positions of shape [3, batch, seq] are cut along another dim."""
    plain = TokenSplit._cut

    def cut(self: Any, batch: Any, shard: Any) -> Any:
        made = plain(self, batch, shard)
        whole = batch["position_ids"]  # the first tokens, instead of those of this rank
        return made | {"position_ids": whole[..., : shard.length].contiguous()}

    patch.setattr(TokenSplit, "_cut", cut)


@bug("X04", CP, SLICE, "cp", "cp, rotary", row=ROW)
def shifted_within_the_chunk(patch: Patch, site: Site) -> None:
    """Labels are shifted within each chunk of the sequence."""
    plain = TokenSplit.take_part

    def part(self: Any, whole: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(self, whole, *args, **kwargs)
        labels = made.token_shard.layout.take(whole.inputs["labels"], 1, made.token_shard.place)
        own = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), self.ignore)], 1)
        wrong = made.inputs | {"shift_labels": own}
        return replace(made, inputs=wrong)

    patch.setattr(TokenSplit, "take_part", part)


@bug("X05", CP, GROUP, "cp", "cp, rotary", row=ROW, credit="Megatron-LM#673, #906, #7513")
def every_rank_weighs_the_same(patch: Patch, site: Site) -> None:
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
def gradients_of_keys_stay(patch: Patch, site: Site) -> None:
    """Gradients of keys and values are not sent back to their owner."""

    def own(self: Any, packet: Any, contribute: Any) -> Any:
        return contribute(self.group.rank if hasattr(self, "group") else self.origin(()), packet)

    patch.setattr(ring.GatheredKeys, "backward", own)
    patch.setattr(ring.NestedRing, "backward", own)


@bug("X08", CP, SLICE, "cp", row=ROW)
def positions_in_another_order(patch: Patch, site: Site) -> None:
    """Data, positions and labels are ordered differently."""

    def positions(self: SequenceShard, device: Any = "cpu") -> Tensor:
        first = sum(self.layout.counts[: self.place])
        return torch.arange(first, first + self.length, device=device)

    patch.setattr(SequenceShard, "positions", positions)


@bug("X09", CP, FREEZE, "cp, rotary", row=ROW)
def positions_begin_anew(patch: Patch, site: Site) -> None:
    """Positions are counted from zero on every rank."""
    patch.setattr(SequenceShard, "positions", lambda self, device="cpu": torch.arange(self.length))


@bug("X12", CP, SLICE, "cp, bias", row=ROW)
def biases_of_own_keys(patch: Patch, site: Site) -> None:
    """Biases of a rank's own keys stand at the keys of all ranks."""
    plain = attention_products.expand_over_keys

    def own(shard: Any, given: Tensor) -> Tensor | None:
        found = plain(shard, given)
        assert found is not None
        return found[..., torch.arange(shard.layout.total) % shard.length]

    patch.setattr(attention_products, "expand_over_keys", own)


@bug("X13", CP, FREEZE, "cp, bias", row=ROW)
def sums_begin_anew(patch: Patch, site: Site) -> None:
    """Positions that are summed up begin anew on every rank, biases with them."""
    plain = local_tokens._moved

    def moved(case: Any) -> Any:
        made = plain(case)
        begun = made.whole.clone()
        begun[..., case.shard.length :] -= begun[..., case.shard.length - 1, None]
        return local_tokens.take_shard(case.shard, begun, made.at)

    patch.setitem(local_tokens.RULES, Tensor.cumsum, moved)


@bug("X14", "shard", SLICE, "switch", row="shard")
def parts_in_another_order(patch: Patch, site: Site) -> None:
    """Where parts change their dim, those of the ranks are put together in another order."""
    plain = collectives.exchange_rows

    def exchange(x: Tensor, group: Any, *rest: Any) -> Tensor:
        return plain(x, group, *rest).flip(0)

    patch.setattr(collectives, "exchange_rows", exchange)


@bug("X10", CP, ARGUMENT, "cp, rotary", row=ROW)
def padding_of_own_keys_only(patch: Patch, site: Site) -> None:
    """Padding is not sent along with keys: those of other ranks are all seen."""
    from schedlang.runtime.context_parallel import transformers_attention

    plain = transformers_attention._mask

    def mask(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs | {"attention_mask": None})

    patch.setattr(transformers_attention, "_mask", mask)


@bug("X11", CP, ARGUMENT, "cp, sections", row=ROW)
def not_causal_across_ranks(patch: Patch, site: Site) -> None:
    """Queries see the keys of all other ranks, whichever came first."""
    patch.setattr(installation, "_rule", lambda shard, mask, causal: AttentionMask())
