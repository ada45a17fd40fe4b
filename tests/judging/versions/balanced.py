"""A router whose balance is trained, beside Megatron-Core's: an original for several threads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.judging.catches.words import VOCAB, WIDTH
from tests.judging.versions.megatron import groups

EXPERTS, MOST, SHARE = 4, 2, 0.1


class Router(nn.Module):
    """The two best experts of each word, and how likely each expert is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares of the experts that are met, zero for others; the softmax over all."""
        scores = F.linear(x, self.weight)
        best = scores.topk(MOST)
        shares = torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(-1))
        return shares, scores.softmax(-1)


class Balanced(nn.Module):
    """Words, of which each meets experts that scale it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.router = Router()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the next word, and what the balance is taken of."""
        x = self.embed(ids)
        shares, likely = self.router(x)
        return self.mixed(x, shares), likely

    def mixed(self, x: Tensor, shares: Tensor) -> Tensor:
        """What experts make of words, and the scores of the next ones."""
        return self.head(torch.tanh(x) * (shares @ self.experts))


def padded(seed: int, rows: int, least: int) -> dict[str, Tensor]:
    """Rows of eight words, of which at least some are not padding."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, 8), generator=draw)
    lengths = torch.randint(least, 9, (rows, 1), generator=draw)
    return {"ids": ids, "labels": ids.roll(-1, 1).masked_fill(torch.arange(8) >= lengths, -100)}


def balance(likely: Tensor, labels: Tensor) -> Tensor:
    """The loss of the Switch transformer, over the words that are not padding."""
    there = likely[labels != -100]
    met = F.one_hot(there.topk(MOST).indices, EXPERTS).sum((0, 1))
    return SHARE * EXPERTS * (met / MOST / len(there) * there.mean(0)).sum()


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """How badly words are predicted, and the balance."""
    scores, likely = output
    return of_words(scores, batch) + balance(likely, batch["labels"])


def of_words(scores: Tensor, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    """How badly words are predicted."""
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


def on_ranks(model: Any, kind: str, words: bool = False, **given: Any) -> None:
    """Put Megatron's router into it: each rank has rows of its own, or `words` of all rows."""
    groups(None if words else 1)
    alone, everyone = dist.new_subgroups(1)[0], dist.group.WORLD
    among = everyone if words else alone
    kinds = {"tp": among, "cp": alone, "tp_cp": among, "tp_dp_cp": everyone}
    model.router = megatron_router(model.router, kind, **kinds, **given)


def megatron_router(router: Router, kind: str, **given: Any) -> Any:
    """Megatron's router with those weights, balanced in one of its ways; the process's own scale.

    given   process groups by name, and what else its configuration takes
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    moe_utils.te_general_gemm = None  # 0.16.1 asks for it where there is no Transformer Engine
    names = ("tp", "cp", "tp_cp", "tp_dp_cp")
    held = {name: given.pop(name) for name in names}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=MOST,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=SHARE,
        add_bias_linear=False,
        params_dtype=router.weight.dtype,
        use_cpu_initialization=True,
        **given,
    )
    made = TopKRouter(config, ProcessGroupCollection(**held))
    with torch.no_grad():
        made.weight.copy_(router.weight)
    made.set_layer_number(1)
    scaler = moe_utils.MoEAuxLossAutoScaler
    scaler.main_loss_backward_scale = torch.ones((), dtype=router.weight.dtype)
    return made


def tracked(kind: str) -> float:
    """What Megatron notes of the balance of a step: this rank's part, times what the loss has."""
    from megatron.core.transformer.moe import moe_utils

    noted = moe_utils.get_moe_layer_wise_logging_tracker().pop(kind)["values"]
    return SHARE * float(noted.sum())
