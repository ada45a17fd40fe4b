"""Language models with experts in one module, as in transformers, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, INNER, EXPERTS, CHOICES = 13, 6, 10, 4, 2


class Experts(nn.Module):
    """Gated experts with biases, computed one after the other for the tokens that chose them."""

    def __init__(self, count: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, 2 * INNER, WIDTH) / 2)
        self.up_bias = nn.Parameter(torch.randn(count, 2 * INNER) / 2)
        self.down = nn.Parameter(torch.randn(count, WIDTH, INNER) / 2)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The sum over each token's experts, by weight."""
        output = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            gate, up = F.linear(x[token], self.up[expert], self.up_bias[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            output = output.index_add(0, token, y * weights[token, slot, None])
        return output


class Mixture(nn.Module):
    """A router, its experts, and one that all tokens share."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts, self.common = Experts(count), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens through their best experts."""
        flat = x.reshape(-1, WIDTH)
        weights, index = self.router(flat).softmax(-1).topk(CHOICES, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        output: Tensor = self.experts(flat, index, weights)
        return (output + self.common(flat)).reshape(x.shape)


class Tiny(nn.Module):
    """An embedding, layers of experts beside a shortcut, and a head."""

    def __init__(self, count: int = EXPERTS, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Mixture(count) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss and the logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tiny_model(count: int = EXPERTS, layers: int = 2) -> nn.Module:
    """The model in float64."""
    torch.manual_seed(0)
    return Tiny(count, layers).double()


class LoggingMixture(Mixture):
    """A mixture that also returns the logits of its router."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The output of the experts, and the router's logits."""
        return super().forward(x), self.router(x)


class Balanced(Tiny):
    """A model whose loss contains a balance loss and a z-loss of its routers."""

    def __init__(self, layers: int) -> None:
        super().__init__(EXPERTS, layers)
        self.layers = nn.ModuleList(LoggingMixture(EXPERTS) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss and the logits."""
        x, all_logits = self.embed(ids), []
        for layer in self.layers:
            y, logits = layer(x)
            x = x + y
            all_logits.append(logits)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for router_logits in all_logits:
            loss = loss + 0.5 * self.balance(router_logits.flatten(0, 1))
            loss = loss + 0.1 * router_logits.logsumexp(-1).pow(2).mean()
        return {"loss": loss, "logits": logits}

    def balance(self, logits: Tensor) -> Tensor:
        """The load-balancing loss of one router."""
        probabilities = logits.softmax(-1)
        one_hot = F.one_hot(probabilities.argmax(-1), logits.shape[-1])
        return (one_hot.sum(0) / len(logits) * probabilities.mean(0)).sum() * logits.shape[-1]


def balanced_model(kind: type[Balanced] = Balanced, layers: int = 1) -> nn.Module:
    """A model with router losses, in float64."""
    torch.manual_seed(0)
    return kind(layers).double()


class Biased(Experts):
    """Experts with a bias after their last product, as in gpt-oss."""

    def __init__(self, count: int = EXPERTS) -> None:
        super().__init__(count)
        self.down_bias = nn.Parameter(torch.randn(count, WIDTH) / 2)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The sum over each token's experts, by weight."""
        biases = (self.down_bias[index] * weights[..., None]).sum(1)
        return super().forward(x, index, weights) + biases


def biased_model() -> nn.Module:
    """A model with one layer of biased experts, in float64."""
    torch.manual_seed(0)
    model = Tiny(layers=1)
    model.layers[0].experts = Biased()  # type: ignore[union-attr]
    return model.double()


def batch(seed: int, rows: int = 5) -> dict[str, Tensor]:
    """A batch of token ids; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, 4), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, :2] = -100
    return {"ids": ids, "labels": labels}


def transformers_model(kind: str, **overrides: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny mixture-of-experts model of transformers, in float64, and a batch."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "use_cache": False,
        **overrides,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    ids = torch.randint(3, 60, (4, 7), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}
