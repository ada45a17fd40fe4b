"""The rules of autocast without values, and models that torch does not run under them."""

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
from tests.proofs import planned
from tests.training.test_cast import in_both

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


def _dtypes(call: Call, device: str) -> list[torch.dtype] | str:
    """Of all that a call gives under autocast; where it raises, that it does."""
    with torch.device(device):
        linear, x = nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)
        try:
            made = AutocastLayer(torch.bfloat16, CastRegion(), inner=False)(call, linear, x)
        except RuntimeError:
            return "raises"
    return [leaf.dtype for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_without_values_dtypes_are_those_of_torchs_autocast(name: str) -> None:
    """On the meta device, where torch has no autocast: what it gives on the CPU, call by call."""
    found = _dtypes(CALLS[name], "meta")
    assert found == _dtypes(CALLS[name], "cpu") and found


class Recurrent(nn.Module):
    """A recurrence between projections, and a product that is written as a sum over names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.rnn = nn.Linear(6, 8), nn.LSTM(8, 8, batch_first=True)
        self.mix, self.leave = nn.Parameter(torch.randn(8, 8) / 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.enter(x))
        out: Tensor = self.leave(torch.einsum("bti,io->bto", h, self.mix))
        return out.float().square().mean()


def _rows(seed: int, *shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, *shape, generator=torch.Generator().manual_seed(seed))}


def test_a_recurrence_under_a_cast_in_a_pipeline(threads: Threads) -> None:
    """What one process runs under torch.autocast, stages run too."""
    rows = 'cast(bf16)\nleave pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
    plan = planned(Recurrent(), rows, "pp=2", "dtype")
    in_both(threads, plan, [_rows(seed, 5, 6) for seed in range(2)])


class Turned(nn.Module):
    """A block that takes, beside what it works on, a table made in the dtype of the first of all.

    torch multiplies no matrices of two dtypes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.up(x) @ table
        return out


class Tabled(nn.Module):
    """Two such blocks behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Turned() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        table = torch.eye(6, dtype=x.dtype, device=x.device)
        for block in self.blocks:
            x = block(x, table)
        return x.float().square().mean()


def test_later_stages_know_the_dtype_of_what_earlier_ones_give(threads: Threads) -> None:
    """A whole model in bf16: what stands between units makes a table of bf16 in every stage."""
    rows = (
        'cast(bf16, params=true)\nblocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)\n'
    )
    plan = planned(Tabled(), rows, "pp=2", "dtype")
    in_both(threads, plan, [_rows(seed, 5, 6) for seed in range(2)])


class Block(nn.Module):
    """Two towers that meet in a product of three."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.join = nn.Linear(6, 6), nn.Bilinear(6, 6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.join(self.tower(x), self.tower(-x))
        return out


class Joined(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Projected(nn.Module):
    """A projection whose loss stands outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x)
        return out


class Written(nn.Module):
    """A first row that is written over: which dtypes meet, only a tensor with values tells."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h.index_put((torch.zeros(1, dtype=torch.long, device=h.device),), x[:1])
        return h.float().square().mean()


def _refused(model: nn.Module, rows: str, loss: Any = None, mesh: str = "dp=2") -> str:
    with pytest.raises(Refusal) as error:
        prepare(_planned(model, rows, mesh), _rows(0, 6), loss)
    return error.value.render(200)


def _planned(model: nn.Module, rows: str, mesh: str = "dp=2") -> Plan:
    return planned(model, rows, mesh, "dtype")


def _line(text: str) -> str:
    found = [k for k, line in enumerate(SOURCE, 1) if text in line]
    return f"at test_cast_rules.py:{found[0]}"


ZERO = "\nzero(stage=0, over=dp)"
STAGES = '\nblocks[1] pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'


@pytest.mark.parametrize("rest, mesh", [(ZERO, "dp=2"), (STAGES, "pp=2")])
def test_what_torch_does_not_run_is_refused_with_what_it_runs(rest: str, mesh: str) -> None:
    """With and without stages: the module, the line, and helps under each of which it runs."""
    said = _refused(Joined(), "cast(bf16)" + rest, mesh=mesh)
    assert "S895" in said and "does not run `blocks.0.join` under `cast(bf16)`" in said
    assert "All tensors must have the same dtype" in said
    assert _line("= self.join(self.tower(x)") in said, said
    assert "`blocks.*.join  cast(fp32)`" in said, said
    rows = "cast(bf16)\nblocks.*.join  cast(fp32)" + rest
    prepare(_planned(Joined(), rows, mesh), _rows(0, 6))


def test_rows_for_blocks() -> None:
    """Rows for some modules are told apart from one for the whole model: their own helps."""
    said = _refused(Joined(), "blocks.*  cast(bf16)" + ZERO)
    assert "under `cast(bf16)`" in said and "`blocks.*.join  cast(fp32)`" in said


def test_an_operation_between_modules_is_none_of_theirs() -> None:
    """In the forward of the model itself: no island can hold it."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.dot(self.up(x).flatten(), x.flatten())

    said = _refused(Between(), "cast(bf16)" + ZERO)
    assert "does not run the model under `cast(bf16)`" in said and "cast(fp32)" not in said
    assert "`cast(bf16, params=true)`" in said and _line("return torch.dot(self.up") in said


def test_a_loss_that_does_not_run() -> None:
    """The loss after the model is under its cast too."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        return torch.dot(output.flatten(), batch["x"].flatten())

    said = _refused(Projected(), "cast(bf16)" + ZERO, loss)
    assert "S895" in said and "does not run the loss under" in said
    assert _line("return torch.dot(output") in said


def test_what_only_values_tell_is_refused_before_ranks_run(threads: Threads) -> None:
    """A kernel that does not take two dtypes, though its shapes do: no traceback of a rank."""
    plan = _planned(Written(), "cast(bf16)" + ZERO)
    prepare(plan, _rows(0, 6))
    with pytest.raises(Refusal) as error:
        prove(Case(plan, (_rows(0, 6),)), pool=threads)
    said = error.value.render(200)
    assert "S895" in said and _line("h = h.index_put") in said, said
    assert "cast parameters too: `cast(bf16, params=true)`" in said, said


class Scaled(nn.Module):
    """Norms of a batch, whose statistics no cast reaches, between projections."""

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
    """What is offered for a kernel that refuses its dtypes runs on this machine."""
    batch = _rows(0, 6)
    with pytest.raises(Refusal) as error:
        check_cast(Case(planned(Scaled(), "cast(bf16, params=true)", "", "dtype"), (batch,)))
    said = error.value.render(200)
    assert "does not run `layers.0.1` under `cast(bf16, params=true)`" in said
    (row,) = re.findall(r"float32, below this row: `(.*)`", said)
    rows = f"cast(bf16, params=true)\n{row}"
    check_cast(Case(planned(Scaled(), rows, "", "dtype"), (batch,)))
