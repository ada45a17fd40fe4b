"""Dropout on tensors without batch rows, such as tables: one mask for all rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.propagate.propagate import propagate
from schedlang.runtime.batch import split_batch
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import LogicalDropout
from schedlang.runtime.scope import Scope, enter_scope
from tests.proofs import assert_proven, make_plan

ROWS, LENGTH, WIDTH = 8, 5, 8


class Attention(nn.Module):
    """Attention to a table of relative positions, with dropout on the table."""

    def __init__(self, positions: int, inside: bool) -> None:
        super().__init__()
        self.inside, self.positions = inside, positions
        self.drop = nn.Dropout(0.4)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        # by the function, at the same site for table and rows, or by a module
        table = F.dropout(table, 0.4, self.training) if self.inside else self.drop(table)
        x = x + F.dropout(x, 0.2, self.training)
        scores = x @ self.up(table).T
        result = x + self.down(scores.softmax(-1) @ table)
        return result


class Relative(nn.Module):
    """Blocks that share a table with twice as many rows as the batch, or fewer."""

    def __init__(self, positions: int = 2 * ROWS, inside: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(positions, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Attention(positions, inside) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        table = self.norm(self.table.weight)
        for block in self.blocks:
            x = block(x, table)
        return F.mse_loss(self.head(x)[..., 0], y)


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    return {"x": x, "y": torch.randn(ROWS, LENGTH, generator=generator)}


BATCHES = [_batch(0), _batch(1), _batch(2)]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("positions", [2 * ROWS, 2 * ROWS - 2])
@pytest.mark.parametrize(
    ("rows", "mesh"),
    [
        ("zero(stage=1, over=dp)", "dp=2"),
        ('zero(stage=0, over=dp)\npipeline(order="GPipe", micro=2)', "dp=2"),
        ('blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=4)', "pp=2"),
        ("blocks.*.up  shard(col, output=R, over=tp)\nzero(stage=1, over=dp)", "dp=2, tp=2"),
    ],
)
def test_a_table_has_one_mask(
    pool: Pool, rows: str, mesh: str, positions: int, inside: bool
) -> None:
    """Dropout on a table equals the original's for every split of the batch, also in training."""
    report = assert_proven(pool, make_plan(Relative(positions, inside), rows, mesh), BATCHES)
    native = [row for row in report.rows if row.kind == "native draws"]
    assert native and all(row.ok for row in native)


def test_parts_of_a_batch_share_the_mask() -> None:
    """A tensor without rows gets one mask for all parts of a batch, and a new one each step."""
    table = torch.ones(6, 3)

    def drawn(step: int, rows: tuple[int, ...]) -> Tensor:
        mode = LogicalDropout(3, unbatched={("", 0): True})
        with enter_modes(mode), enter_scope(Scope(step, 0, rows)):
            return F.dropout(table, 0.5)

    assert torch.equal(drawn(0, (0, 1)), drawn(0, (2, 3, 4)))
    assert not torch.equal(drawn(0, (0, 1)), drawn(1, (0, 1)))


class Rows(nn.Module):
    """Random operators per row on tensors that are not derived from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Parameter(torch.randn(1, WIDTH)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        token = F.dropout(self.token.expand(len(x), -1), 0.3, self.training)
        x = x + token[:, None] + torch.rand(len(x), 1, 1, device=x.device)
        return F.mse_loss(self.head(x)[..., 0], y)


def test_rows_of_no_tensor_of_the_batch_are_rows(pool: Pool) -> None:
    """A tensor with as many rows as the batch is drawn row by row."""
    plan = make_plan(Rows(), "zero(stage=0, over=dp)", "dp=2")
    sample = split_batch(BATCHES[0], 2, 1)[0][0].inputs
    assert not propagate(plan, sample).unbatched_masks
    assert_proven(pool, plan, BATCHES)


def test_a_table_is_known(pool: Pool) -> None:
    """Each call is classified separately, where one module draws with and without rows."""
    plan = make_plan(Relative(inside=True), "zero(stage=0, over=dp)", "dp=2")
    unbatched = propagate(plan, split_batch(BATCHES[0], 2, 1)[0][0].inputs).unbatched_masks
    assert unbatched["blocks.1", 0] and not unbatched["blocks.1", 1]


class Scaled(nn.Module):
    """Causal attention, and a projection whose dropout has one mask for all rows."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.tokens = tokens
        self.qkv, self.out, self.up = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        ones = torch.ones(*((x.shape[1], 1) if self.tokens else (1, 1, WIDTH)), dtype=x.dtype)
        return x + self.up(x) * F.dropout(ones, 0.4, self.training)


class Words(nn.Module):
    """Two such blocks between embedding and head."""

    def __init__(self, tokens: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.blocks = nn.ModuleList(Scaled(tokens) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _text_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randint(20, (ROWS, 8), generator=generator) for k in ("ids", "labels")}


SPLIT = [
    ("blocks.*  context_parallel(ring, over=cp)", "cp=2"),
    ('blocks  pipeline_split(over=pp)\npipeline(order="TeraPipe", micro=2, slices=2)', "pp=2"),
]


@pytest.mark.parametrize(("rows", "mesh"), SPLIT, ids=["context", "slices"])
def test_sequences_are_split_beside_one_mask(pool: Pool, rows: str, mesh: str) -> None:
    """A mask without samples and tokens is equal on all ranks and for all slices."""
    assert_proven(pool, make_plan(Words(), rows, mesh), [_text_batch(seed) for seed in range(3)])


@pytest.mark.parametrize(("rows", "mesh"), SPLIT, ids=["context", "slices"])
def test_one_mask_of_tokens_is_refused(rows: str, mesh: str) -> None:
    """A mask over tokens shared by all samples is refused, with its shape and a suggestion."""
    with pytest.raises(Refusal) as caught:
        prepare(make_plan(Words(tokens=True), rows, mesh), _text_batch(0))
    message = caught.value.render()
    assert caught.value.diagnostic.code == "S812" and "draws (8, 1): tokens" in message
    assert "draw it for each sample" in message and "rows.sched:" in message
