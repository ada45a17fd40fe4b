"""Autocast rules on the meta device, and models that torch does not run under a cast."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.working_dtype import check_cast
from schedlang.runtime.mixed_precision import AutocastLayer, CastRegion
from tests.engine import Threads
from tests.proofs import make_plan
from tests.training.test_cast import prove_in_both

SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()
Call = Callable[[nn.Linear, Tensor], Any]

# of a projection, whose result is in the low dtype, and its input in float32
CALLS: dict[str, Call] = {
    "LSTM": lambda a, x: nn.LSTM(4, 4, 2, dropout=0.1, batch_first=True)(a(x)[None]),
    "LSTM with a state": lambda a, x: nn.LSTM(4, 4)(x[None], (x[None], x[None])),
    "GRU": lambda a, x: nn.GRU(4, 4)(a(x)[None]),
    "RNN": lambda a, x: nn.RNN(4, 4)(x[None]),
    "LSTMCell": lambda a, x: nn.LSTMCell(4, 4)(x),
    "GRUCell": lambda a, x: nn.GRUCell(4, 4)(a(x)),
    "einsum, a product": lambda a, x: torch.einsum("ij,jk->ik", a(x), a.weight),
    "einsum, implied": lambda a, x: torch.einsum("bi,oi", x, a.weight),
    "einsum, pointwise": lambda a, x: torch.einsum("ij,ij->ij", a(x), x),
    "einsum, outer": lambda a, x: torch.einsum("i,j->ij", a(x)[0], x[0]),
    "einsum, of one": lambda a, x: torch.einsum("ij->i", a(x)),
    "MultiheadAttention": lambda a, x: nn.MultiheadAttention(4, 2)(x, x, x),
    "layer of a transformer": lambda a, x: nn.TransformerEncoderLayer(4, 2, 8)(a(x)),
    "sdpa": lambda a, x: F.scaled_dot_product_attention(a(x)[None], x[None], x[None]),
    "norms": lambda a, x: (nn.LayerNorm(4)(a(x)), nn.GroupNorm(2, 4)(a(x)), nn.RMSNorm(4)(a(x))),
    "BatchNorm": lambda a, x: nn.BatchNorm1d(4)(a(x)),
    "cat and stack": lambda a, x: (torch.cat([a(x), x]), torch.stack([x, a(x)])),
    "index_copy": lambda a, x: a(x).index_copy(0, torch.tensor([0], device=x.device), x[:1]),
    "vecdot": lambda a, x: torch.linalg.vecdot(a(x), x),
    "inverse": lambda a, x: torch.linalg.inv(a(x)),
    "solve": lambda a, x: torch.linalg.solve(a(x), x),
    "qr": lambda a, x: tuple(torch.linalg.qr(a(x))),
    "rfft": lambda a, x: torch.fft.rfft(a(x)),
    "as complex": lambda a, x: torch.view_as_complex(a(x).view(4, 2, 2)),
    "mirrored": lambda a, x: F.pad(a(x)[None], (1, 1), mode="reflect"),
    "padded": lambda a, x: F.pad(a(x), (1, 1)),
    "losses": lambda a, x: (F.mse_loss(a(x), x), F.binary_cross_entropy(a(x).sigmoid(), x * 0)),
    "spectral norm": lambda a, x: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))(a(x)),
    "mv": lambda a, x: torch.mv(a.weight, x[0]),
    "PReLU": lambda a, x: nn.PReLU()(a(x)),
    "Conv1d": lambda a, x: (nn.Conv1d(4, 4, 1)(x[None]), nn.ConvTranspose1d(4, 4, 1)(x[None])),
    "Bilinear": lambda a, x: nn.Bilinear(4, 4, 3)(a(x), a(x)),
    "Bilinear of what comes in": lambda a, x: nn.Bilinear(4, 4, 3)(x, x),
    "dot": lambda a, x: torch.dot(a(x)[0], x[0]),
    "tensordot": lambda a, x: torch.tensordot(a(x), x, 1),
    "scatter_add": lambda a, x: a(x).scatter_add(0, torch.zeros_like(x, dtype=torch.long), x),
}


def autocast_dtypes(call: Call, device: str) -> list[torch.dtype] | str:
    """Return the dtypes of all outputs of a call under autocast, or that it raises."""
    with torch.device(device):
        linear, x = nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)
        try:
            outputs = AutocastLayer(torch.bfloat16, CastRegion(), inner=False)(call, linear, x)
        except RuntimeError:
            return "raises"
    return [leaf.dtype for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_without_values_dtypes_are_those_of_torchs_autocast(name: str) -> None:
    """On the meta device, where torch has no autocast, dtypes equal those of the CPU."""
    dtypes = autocast_dtypes(CALLS[name], "meta")
    assert dtypes == autocast_dtypes(CALLS[name], "cpu") and dtypes


class Recurrent(nn.Module):
    """An RNN between projections, and a product written as an einsum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.rnn = nn.Linear(6, 8), nn.LSTM(8, 8, batch_first=True)
        self.mix, self.leave = nn.Parameter(torch.randn(8, 8) / 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.enter(x))
        output: Tensor = self.leave(torch.einsum("bti,io->bto", h, self.mix))
        return output.float().square().mean()


def random_batch(seed: int, *shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, *shape, generator=torch.Generator().manual_seed(seed))}


def test_a_recurrence_under_a_cast_in_a_pipeline(threads: Threads) -> None:
    """Pipeline stages run what one process runs under torch.autocast."""
    rows = 'cast(bf16)\nleave pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
    plan = make_plan(Recurrent(), rows, "pp=2", "dtype")
    prove_in_both(threads, plan, [random_batch(seed, 5, 6) for seed in range(2)])


class TableBlock(nn.Module):
    """A block that multiplies its input with a table; torch multiplies only equal dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        output: Tensor = self.up(x) @ table
        return output


class TableModel(nn.Module):
    """Two table blocks after a layer; the table has the dtype of the layer's output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(TableBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        table = torch.eye(6, dtype=x.dtype, device=x.device)
        for block in self.blocks:
            x = block(x, table)
        return x.float().square().mean()


def test_later_stages_know_the_dtype_of_what_earlier_ones_give(threads: Threads) -> None:
    """A whole model in bf16: code between units makes a bf16 table in every stage."""
    rows = (
        'cast(bf16, params=true)\nblocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
    )
    plan = make_plan(TableModel(), rows, "pp=2", "dtype")
    prove_in_both(threads, plan, [random_batch(seed, 5, 6) for seed in range(2)])


class Block(nn.Module):
    """Two towers joined in a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.join = nn.Linear(6, 6), nn.Bilinear(6, 6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.join(self.tower(x), self.tower(-x))
        return output


class JoinedTowers(nn.Module):
    """Two blocks of joined towers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Projection(nn.Module):
    """A projection whose loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.up(x)
        return output


class Overwritten(nn.Module):
    """Overwrites its first row: only tensors with values show which dtypes meet."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h.index_put((torch.zeros(1, dtype=torch.long, device=h.device),), x[:1])
        return h.float().square().mean()


def refusal_text(model: nn.Module, rows: str, loss: Any = None, mesh: str = "dp=2") -> str:
    with pytest.raises(Refusal) as error:
        prepare(cast_plan(model, rows, mesh), random_batch(0, 6), loss)
    return error.value.render(200)


def cast_plan(model: nn.Module, rows: str, mesh: str = "dp=2") -> Plan:
    return make_plan(model, rows, mesh, "dtype")


def source_line(text: str) -> str:
    numbers = [k for k, line in enumerate(SOURCE, 1) if text in line]
    return f"at test_cast_rules.py:{numbers[0]}"


ZERO = "\nzero(stage=0, over=dp)"
STAGES = '\nblocks[1] pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'


@pytest.mark.parametrize("rest, mesh", [(ZERO, "dp=2"), (STAGES, "pp=2")])
def test_what_torch_does_not_run_is_refused_with_what_it_runs(rest: str, mesh: str) -> None:
    """The refusal names module and line, and offers rows under which it runs, with and without
    stages."""
    message = refusal_text(JoinedTowers(), "cast(bf16)" + rest, mesh=mesh)
    assert "S895" in message and "does not run `blocks.0.join` under `cast(bf16)`" in message
    assert "All tensors must have the same dtype" in message
    assert source_line("= self.join(self.tower(x)") in message, message
    assert "`blocks.*.join  cast(fp32)`" in message, message
    rows = "cast(bf16)\nblocks.*.join  cast(fp32)" + rest
    prepare(cast_plan(JoinedTowers(), rows, mesh), random_batch(0, 6))


def test_rows_for_blocks() -> None:
    """A cast of some modules is refused by its own row, not as one of the whole model."""
    message = refusal_text(JoinedTowers(), "blocks.*  cast(bf16)" + ZERO)
    assert "under `cast(bf16)`" in message and "`blocks.*.join  cast(fp32)`" in message


def test_an_operation_between_modules_is_none_of_theirs() -> None:
    """An operation in the forward of the model itself: no float32 island can contain it."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.dot(self.up(x).flatten(), x.flatten())

    message = refusal_text(Between(), "cast(bf16)" + ZERO)
    assert "does not run the model under `cast(bf16)`" in message and "cast(fp32)" not in message
    assert (
        "`cast(bf16, params=true)`" in message
        and source_line("return torch.dot(self.up") in message
    )


def test_a_loss_that_does_not_run() -> None:
    """The loss after the model is under its cast too."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        return torch.dot(output.flatten(), batch["x"].flatten())

    message = refusal_text(Projection(), "cast(bf16)" + ZERO, loss)
    assert "S895" in message and "does not run the loss under" in message
    assert source_line("return torch.dot(output") in message


def test_what_only_values_tell_is_refused_before_ranks_run(threads: Threads) -> None:
    """A kernel that refuses two dtypes only with values is refused before any rank raises."""
    plan = cast_plan(Overwritten(), "cast(bf16)" + ZERO)
    prepare(plan, random_batch(0, 6))
    with pytest.raises(Refusal) as error:
        prove(Case(plan, (random_batch(0, 6),)), pool=threads)
    message = error.value.render(200)
    assert "S895" in message and source_line("h = h.index_put") in message, message
    assert "cast parameters too: `cast(bf16, params=true)`" in message, message


class BatchNormed(nn.Module):
    """Batch norm, whose statistics no cast changes, between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def test_an_island_is_tried_with_values_too() -> None:
    """A float32 island that the refusal offers runs on this machine."""
    batch = random_batch(0, 6)
    with pytest.raises(Refusal) as error:
        check_cast(Case(make_plan(BatchNormed(), "cast(bf16, params=true)", "", "dtype"), (batch,)))
    message = error.value.render(200)
    assert "does not run `layers.0.1` under `cast(bf16, params=true)`" in message
    (row,) = re.findall(r"float32, below this row: `(.*)`", message)
    rows = f"cast(bf16, params=true)\n{row}"
    check_cast(Case(make_plan(BatchNormed(), rows, "", "dtype"), (batch,)))
