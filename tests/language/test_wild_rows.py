"""`shard` rows that do not fit together: refused with a reason; never a crash or a wrong value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from schedlang.runtime.launch.pool import Pool
from tests.proofs import refusal_text
from tests.properties.engine import Differs, cheap
from tests.properties.models import Block, Config
from tests.properties.schedules import Drawn, step

MLP = Config((Block("mlp", hidden=12),), width=6)
WORDS = Config((Block("mlp", hidden=12),), width=6, entry="words", vocab=12, dropout=0.25)
TIED = Config((Block(),), width=6, entry="words", vocab=12, tied=True)


@pytest.mark.parametrize(
    "config, rows, said",
    [
        (MLP, "blocks.0.down  shard(row, input=R, over=tp)", "but gets R"),
        (MLP, "blocks.0.down  shard(row, input=S(seq), over=tp)", "along their last dim"),
        (MLP, "blocks.0.up  shard(col, input=S(0), output=R, over=tp)", "needs a replicated input"),
        (WORDS, "blocks.0.up  shard(vocab, input=S(0), over=tp)", "needs a replicated input"),
        (MLP, "blocks.0.up  shard(col, output=S(seq), over=tp)", "cannot output"),
        (MLP, "blocks.0.down  shard(row, blocks=2, over=tp)", "sharded in blocks"),
        (MLP, "blocks.0.up  shard(vocab, blocks=2, over=tp)", "cannot be split into blocks"),
        (MLP, "blocks.0.up  shard(weight=S(out), output=R, over=tp)", "only one of weight"),
        (MLP, "blocks.0.up  shard(weight=S(in), bias=S(out), over=tp)", "only one of weight"),
        (TIED, "head  shard(col, output=R, over=tp)", "`embed` shares a sharded weight"),
        (
            WORDS,
            "blocks.0.up  shard(vocab, over=tp)\nblocks.0.down  shard(row, over=tp)",
            "gets sharded logits",
        ),
    ],
)
def test_refused(config: Config, rows: str, said: str) -> None:
    """What cannot be computed from the shards is refused when traced, with the row."""
    message = refusal_text(config.model(), rows, "tp=2", config.batch(4, 4, 0, True))
    assert said in message and "rows.sched:" in message


def test_two_axes_at_one_layer_with_a_bias() -> None:
    """A bias sharded over one axis cannot be added to a sum over another axis."""
    rows = "blocks.0.down  shard(row, over=tp)\nblocks.0.down  shard(col, output=R, over=up)"
    message = refusal_text(MLP.model(), rows, "tp=2, up=3", MLP.batch(2, 4, 0, True))
    assert "adds its bias" in message


def _check_equal(pool: Pool, config: Config, *rows: str) -> None:
    """Check that a model with these rows computes what the original does."""
    drawn = Drawn(config, (("tp", 2),), (step("shard", rows, ["x"], ["tp"]),), 1, 4)
    failed = tuple(row for row in cheap(drawn, pool) if not row.ok)
    if failed:
        raise Differs(failed, drawn)


def test_blocks_in_and_out(pool: Pool) -> None:
    """A block-sharded input fits a weight that is sharded in the same blocks."""
    up = "blocks.0.up  shard(col, blocks=2, over=tp)"
    _check_equal(pool, MLP, up, "blocks.0.down  shard(row, blocks=2, over=tp)")


def test_dropout_on_split_logits(pool: Pool) -> None:
    """Sharded logits that a function needs in full go through dropout in float64 correctly."""
    _check_equal(pool, WORDS, "blocks.0.down  shard(vocab, over=tp)")


class TwoOutputs(nn.Module):
    """A model that uses the hidden state again after the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head, self.low = nn.Linear(4, 8), nn.Linear(4, 6), nn.Linear(8, 8)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        loss = nn.functional.cross_entropy(self.head(x), y)
        return loss + wide.mean()


def test_a_split_tensor_behind_split_logits() -> None:
    """A tensor that is still sharded after sharded logits is refused."""
    rows = "up  shard(col, over=tp)\nhead  shard(vocab, over=tp)"
    batch = {"x": torch.ones(4, 4, dtype=torch.float64), "y": torch.arange(4)}
    message = refusal_text(TwoOutputs(), rows, "tp=2", batch)
    assert "`mean` uses a tensor sharded over `tp` after sharded logits" in message
