"""A router with a balance loss, and Megatron-Core's: the original of several threads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.judging.catches.language_model import VOCAB, WIDTH
from tests.judging.versions.megatron import init_groups

EXPERTS, TOP_K, SHARE = 4, 2, 0.1


class Router(nn.Module):
    """A top-2 router that also returns the softmax over all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares of the chosen experts (zero for others), and the softmax over all."""
        scores = F.linear(x, self.weight)
        best = scores.topk(TOP_K)
        shares = torch.zeros_like(scores).scatter(-1, best.indices, best.values.softmax(-1))
        return shares, scores.softmax(-1)


class Balanced(nn.Module):
    """A language model whose experts scale tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.router = Router()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores of the next token, and the router's softmax for the balance."""
        x = self.embed(ids)
        shares, probs = self.router(x)
        return self.mixed(x, shares), probs

    def mixed(self, x: Tensor, shares: Tensor) -> Tensor:
        """Return scores of the next tokens after the experts."""
        return self.head(torch.tanh(x) * (shares @ self.experts))


def padded_batch(seed: int, rows: int, min_length: int) -> dict[str, Tensor]:
    """Return rows of eight tokens, with at least `min_length` that are not padding."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, 8), generator=draw)
    lengths = torch.randint(min_length, 9, (rows, 1), generator=draw)
    return {"ids": ids, "labels": ids.roll(-1, 1).masked_fill(torch.arange(8) >= lengths, -100)}


def balance(probs: Tensor, labels: Tensor) -> Tensor:
    """Return the Switch transformer's balance loss over tokens that are not padding."""
    counted = probs[labels != -100]
    counts = F.one_hot(counted.topk(TOP_K).indices, EXPERTS).sum((0, 1))
    return SHARE * EXPERTS * (counts / TOP_K / len(counted) * counted.mean(0)).sum()


def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the token loss plus the balance."""
    scores, probs = output
    return token_loss(scores, batch) + balance(probs, batch["labels"])


def token_loss(scores: Tensor, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of the tokens."""
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


def put_router(model: Any, kind: str, words: bool = False, **config: Any) -> None:
    """Put Megatron's router into the model: ranks have own rows, or with `words` own tokens."""
    init_groups(None if words else 1)
    own_group, world = dist.new_subgroups(1)[0], dist.group.WORLD
    group = world if words else own_group
    kinds = {"tp": group, "cp": own_group, "tp_cp": group, "tp_dp_cp": world}
    model.router = megatron_router(model.router, kind, **kinds, **config)


def megatron_router(router: Router, kind: str, **options: Any) -> Any:
    """Return Megatron's router with the same weights and one kind of balance loss.

    options  process groups by name, and other fields of its configuration
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    moe_utils.te_general_gemm = None  # 0.16.1 needs it without Transformer Engine
    names = ("tp", "cp", "tp_cp", "tp_dp_cp")
    process_groups = {name: options.pop(name) for name in names}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=SHARE,
        add_bias_linear=False,
        params_dtype=router.weight.dtype,
        use_cpu_initialization=True,
        **options,
    )
    mg_router = TopKRouter(config, ProcessGroupCollection(**process_groups))
    with torch.no_grad():
        mg_router.weight.copy_(router.weight)
    mg_router.set_layer_number(1)
    scaler = moe_utils.MoEAuxLossAutoScaler
    scaler.main_loss_backward_scale = torch.ones((), dtype=router.weight.dtype)
    return mg_router


def tracked_balance(kind: str) -> float:
    """Return the balance loss that Megatron logged in this step on this rank."""
    from megatron.core.transformer.moe import moe_utils

    noted = moe_utils.get_moe_layer_wise_logging_tracker().pop(kind)["values"]
    return SHARE * float(noted.sum())
