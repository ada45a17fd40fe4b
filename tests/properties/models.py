"""Random test models: a configuration as a value, and its module and batches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.passes.verify.original import randomise
from tests.properties import blocks as kinds
from tests.properties.replacements import REPLACEMENTS

Batch = dict[str, Any]


class Short:
    """A dataclass whose repr is Python code without default values."""

    def __repr__(self) -> str:
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))  # type: ignore[arg-type]
        arguments = ", ".join(
            f"{name}={value!r}" for name, value, default in values if value != default
        )
        return f"{type(self).__name__}({arguments})"


@dataclass(frozen=True, repr=False)
class Block(Short):
    """The configuration of one block; fields that its kind does not use are ignored."""

    kind: str = "chain"
    hidden: int = 6
    heads: int = 2
    groups: int = 2
    size: int = 2
    norm: str = "layer"
    pre: bool = True
    fused: bool = False
    causal: bool = False
    window: int = 0
    plain: bool = False
    flag: bool = False
    count: int = 2
    average: bool = False
    use: str = ""

    @property
    def paired(self) -> bool:
        """Whether the block has a norm and a pair of layers with the usual names."""
        inside = ("dict", "object", "named tuple")
        return self.kind == "mlp" or (self.kind == "used" and self.use not in inside)

    @property
    def up(self) -> str:
        """The path of the first layer of a pair."""
        return "up" if self.kind != "used" or self.paired else "inner.up"

    @property
    def turns(self) -> bool:
        """Whether an attention applies rotary positions."""
        return self.kind == "attention" and self.size % 2 == 0 and not self.flag

    def made(self, width: int, dropout: float) -> nn.Module:
        """Build the module."""
        match self.kind:
            case "chain":
                return kinds.Chain(width)
            case "mlp":
                return kinds.MLP(width, self.hidden, self.norm, dropout, self.pre)
            case "used":
                return kinds.Used(width, self.hidden, self.norm, dropout, self.use)
            case "attention":
                return kinds.Attention(
                    width,
                    self.heads,
                    self.groups,
                    self.size,
                    norm=self.norm,
                    dropout=dropout,
                    pre=self.pre,
                    fused=self.fused,
                    causal=self.causal,
                    window=self.window,
                    plain=self.plain,
                    flag=self.flag,
                    turn=self.turns,
                )
            case "experts":
                return kinds.Experts(width, self.hidden, self.count)
            case "routed":
                return kinds.Routed(width, self.hidden, self.count)
            case "conv":
                return kinds.Convolved(width, self.norm)
            case "twice":
                return kinds.Twice(width, dropout)
            case "counting":
                return kinds.Counting(width, self.average)
            case "writing":
                return kinds.Writing(width, self.hidden)
            case "custom":
                return kinds.Custom(width, self.hidden)
        raise ValueError(self.kind)


@dataclass(frozen=True, repr=False)
class Config(Short):
    """The configuration of a model; equal values build equal models.

    `entry` is "floats" or "words" (an embedding, and a head over the vocabulary); `returns` the
    "loss", a "dict" or an "object" (of a class of its own) with it, or a "tuple" without it, for
    which a loss function is given.  `skip` names a block whose output is added before a later one;
    `frozen` is a path that is not trained; `use` says what is used twice (`USES`).
    """

    blocks: tuple[Block, ...] = (Block(),)
    width: int = 6
    entry: str = "floats"
    vocab: int = 11
    tied: bool = False
    returns: str = "loss"
    skip: tuple[int, int] | None = None
    frozen: str = ""
    dropout: float = 0.0
    mask: bool = False
    side: bool = False
    seed: int = 0
    use: str = ""

    def model(self) -> nn.Module:
        """Build the module in float64, with random norm weights and biases."""
        torch.manual_seed(self.seed)
        module = randomise(Drawn(self).double(), self.seed)
        for name, parameter in module.named_parameters():
            frozen = self.frozen and name.startswith(f"{self.frozen}.")
            parameter.requires_grad_(not frozen)
        return module

    @property
    def loss(self) -> Cotangent | None:
        """The loss function, if the model returns no loss."""
        return Cotangent(self.entry, self.seed) if self.returns == "tuple" else None

    def batch(self, rows: int, length: int, seed: int, ragged: bool) -> Batch:
        """Return a batch: ragged with unevenly ignored labels, or full."""
        g = torch.Generator().manual_seed(1000 * self.seed + seed)
        is_text = self.entry == "words"
        lengths = torch.randint(1, length + 1, (rows, 1), generator=g)
        lengths[0] = length
        real = torch.arange(length) < lengths if ragged else torch.ones(rows, length).bool()
        batch: Batch = {}
        if is_text:
            batch["ids"] = torch.randint(0, self.vocab, (rows, length), generator=g)
            labels = batch["ids"].roll(-1, 1)
            labels[~real] = -100
            if ragged:
                labels[torch.rand(rows, length, generator=g) < 0.3] = -100
            labels[0, 0] = 1
            batch["labels"] = labels
        else:
            batch["x"] = torch.randn(rows, length, self.width, generator=g, dtype=torch.float64)
            batch["y"] = torch.randn(rows, length, generator=g, dtype=torch.float64)
        if self.mask:
            batch["mask"] = real.long()
        if self.side:
            shift = torch.randn(rows, 1, self.width, generator=g, dtype=torch.float64)
            batch["side"] = {"shift": shift, "scale": (1.5,)}
        return batch


USES = {
    "norm": "the last norm stands behind the embedding, too",
    "block": "the first block is called again behind the last",
    "same": "all blocks are one module",
    "embed": "the embedding's weight is used by a function, too",
    "head": "the head is called twice",
    "function": "the head is a function of the embedding's weight",
    "decay": "squares of some weights are a part of the loss",
}


@dataclass
class Output:
    """The output of a model as an object."""

    loss: Tensor
    out: Tensor
    parts: tuple[Tensor, ...]


@dataclass(frozen=True)
class Cotangent:
    """A loss for models that return none: weighted features plus their squares."""

    entry: str
    seed: int

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        features, _, *decay = output
        if self.entry == "words":
            return F.cross_entropy(features.flatten(0, 1), batch["labels"].flatten()) + sum(decay)
        places = torch.arange(features[0].numel(), dtype=torch.float64)
        weights = torch.sin(7.1 * places + self.seed).view(features.shape[1:])
        return (features * weights).flatten(1).sum(1).mean() + (features**2).mean() + sum(decay)


class Drawn(nn.Module):
    """The model of a configuration."""

    replacements = REPLACEMENTS

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.returns, self.skip, self.use = config.returns, config.skip, config.use
        width, is_text = config.width, config.entry == "words"
        outputs = config.vocab if is_text else 1
        self.embed = nn.Embedding(config.vocab, width) if is_text else nn.Linear(width, width)
        self.blocks = nn.ModuleList(b.made(width, config.dropout) for b in config.blocks)
        if self.use == "same":
            self.blocks = nn.ModuleList([self.blocks[0]] * len(self.blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs, bias=not config.tied)
        if config.tied:
            self.head.weight = self.embed.weight
        self.classes = outputs

    def forward(
        self,
        ids: Tensor | None = None,
        x: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        side: Any = None,
        labels: Tensor | None = None,
        y: Tensor | None = None,
    ) -> Any:
        h = self.embed(ids if x is None else x)
        if self.use == "embed":
            embedded = F.linear(torch.sin(h), self.embed.weight) if ids is None else None
            h = h + (
                F.embedding(ids.roll(1, 1), self.embed.weight) if ids is not None else embedded
            )
        if self.use == "norm":
            h = self.norm(h)
        if side is not None:
            h = h * side["scale"][0] + side["shift"]
        skipped: Tensor | None = None
        for index, block in enumerate(self.blocks):
            if skipped is not None and self.skip is not None and index == self.skip[1]:
                h = h + 0.5 * skipped
            h = block(h, mask)
            if self.skip is not None and index == self.skip[0]:
                skipped = h
        decay = self._decay() if self.use == "decay" else 0.0
        if self.use == "block":
            h = self.blocks[0](h, mask)
        if self.use == "function":
            outputs = F.linear(self.norm(h), self.embed.weight)[..., : self.classes]
        else:
            outputs = self.head(self.norm(h))
        if self.use == "head":
            outputs = outputs + torch.tanh(self.head(h))
        if self.returns == "tuple":
            return (outputs, h, decay) if self.use == "decay" else (outputs, h)
        if labels is not None:
            loss = F.cross_entropy(outputs.flatten(0, 1), labels.flatten())
        else:
            assert y is not None
            loss = ((outputs[..., 0] - y) ** 2).mean()
        loss = loss + decay
        if self.returns == "object":
            return Output(loss, outputs, (h,))
        return loss if self.returns == "loss" else {"loss": loss, "out": outputs, "parts": (h,)}

    def _decay(self) -> Any:
        """Return the sum of squares of all vectors of the first block and the last norm."""
        parameters = (*self.blocks[0].parameters(), *self.norm.parameters())
        return sum(p.square().sum() for p in parameters if p.dim() == 1)


KINDS = (
    *("chain", "mlp", "attention", "experts", "routed", "conv", "twice", "counting", "custom"),
    "writing",
    *("mlp", "attention"),  # drawn more often, as most rows apply to them
)


# kinds that allow context parallelism: torch attention, and blocks that mix no tokens
CONTEXT_KINDS = ("mlp", "chain", "custom", "attention", "attention")


@st.composite
def _block_strategy(draw: st.DrawFn, tp: int, context: bool, used: bool) -> Block:
    names = (*(CONTEXT_KINDS if context else KINDS), *("used",) * (4 * used))
    kind = draw(st.sampled_from(names))
    choose = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    hidden = choose(2 * tp, tp, 3 * tp, 5, 7)
    if kind == "mlp":
        return Block(kind, hidden, norm=choose("layer", "rms"), pre=choose(True, False))
    if kind == "used":
        return Block(kind, hidden, norm=choose("layer", "rms"), use=choose(*kinds.USES))
    if kind == "attention":
        heads, share = choose(
            (tp, 1),
            (2 * tp, 2),
            (2 * tp, 1),
            (3 * tp, 3),
            (3, 1),
            (2, 2),
            (2 * tp, 2 * tp),
            (tp, tp),
            (2 * tp, 4 if tp % 2 == 0 else 2),  # a group on two ranks
        )
        return Block(
            kind,
            heads=heads,
            groups=heads // share,
            size=choose(2, 1, 3),
            norm=choose("layer", "rms"),
            pre=choose(True, False),
            fused=choose(False, True),
            causal=choose(False, True),
            window=choose(0, 2),
            plain=choose(False, True),
            flag=context or choose(True, False),
        )
    if kind == "experts":
        return Block(kind, hidden, count=choose(2, 3))
    if kind == "routed":
        return Block(kind, hidden, count=choose(4, 6, 3))
    if kind == "conv":
        return Block(kind, norm=choose("group", "past", "batch"))
    if kind == "counting":
        return Block(kind, average=choose(False, True))
    return Block(kind, hidden)


@st.composite
def configs(
    draw: st.DrawFn, tp: int, min_blocks: int = 1, *, context: bool = False, used: bool = False
) -> Config:
    """Draw a configuration whose sizes `tp` mostly divides, with at least `min_blocks` blocks,
    sometimes equal ones; `context`: most have attentions that allow context parallelism; `used`:
    most use something twice or in an unusual way (`USES`)."""
    choose = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    blocks = tuple(
        draw(
            st.lists(
                _block_strategy(tp, context, used), min_size=min_blocks, max_size=min_blocks + 2
            )
        )
    )
    use = choose("", "", "", *USES) if used else ""
    if use == "same" or draw(st.integers(0, 2)) == 0:
        blocks = blocks[:1] * len(blocks)
    entry = choose("floats", "words")
    skip = None
    if len(blocks) > 1 and draw(st.booleans()):
        start = draw(st.integers(0, len(blocks) - 2))
        skip = (start, draw(st.integers(start + 1, len(blocks) - 1)))
    tied = entry == "words" and draw(st.booleans())
    frozen = choose("", "blocks.0", "norm", "embed" if not tied else "")
    return Config(
        blocks,
        choose(2 * tp, 3 * tp, 5, 7),
        entry,
        choose(11, 4 * tp, 9),
        tied,
        choose("loss", "dict", "tuple", "object"),
        skip,
        frozen,
        choose(0.0, 0.25),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 9)),
        use if use != "function" or tied else "",
    )
