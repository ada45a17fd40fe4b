"""Forward hooks inside of pipeline units, and modules called again from outside of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from tests.alone import cut_evenly
from tests.engine import Threads
from tests.proofs import planned, proven
from tests.zoo.networks import DroppedAgain, Heard, made, points

ROWS = 'blocks  pipeline_split(over=pp)\npipeline(order="{}", micro=2)'


@pytest.mark.parametrize(
    "kwargs, doubling", [(False, False), (True, False), (False, True), (True, True)]
)
def test_what_hooks_are_told_reaches_the_loss(
    kwargs: bool, doubling: bool, threads: Threads
) -> None:
    """Loss, output and every gradient are the model's, whether a hook looks on or changes."""
    model = made(lambda: Heard(kwargs, doubling))()
    report = proven(threads, planned(model, ROWS.format("1F1B"), "pp=2"), [points(0), points(1)])
    names = {r.name for r in report.rows if r.kind == "gradients"}
    assert {f"blocks.{k}.up.weight" for k in range(3)} <= names


def test_it_is_sent_from_where_it_is_told() -> None:
    """Stages that do not run a unit get what its hooks are told as values of their own."""
    cut = cut_evenly(made(Heard)(), points(0), 3, ["blocks"])
    told = {(end, token) for end, tokens in cut.routes.items() for token in tokens if token[1] < 0}
    last = cut.stages - 1
    assert {end for end, _ in told} == {(k, last) for k in range(last)}, told


def test_beside_data_parallelism_and_recomputation(threads: Threads) -> None:
    """Hooks in units whose inside is recomputed, on ranks that share the rows."""
    rows = f"blocks.*.down  checkpoint()\n{ROWS.format('GPipe')}".replace(
        "pipeline(order", "zero(stage=1, over=dp)\npipeline(order"
    )
    model = made(Heard)()
    proven(threads, planned(model, rows, "dp=2, pp=2"), [points(0, 8), points(1, 8)])


class Inside(Heard):
    """Reads what a hook has made itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept: list[Tensor] = []
        first: Any = self.blocks[0]
        put = first.up.register_forward_hook(lambda m, a, out: kept.append(out.exp()))
        try:
            error = super().forward(x, y)
        finally:
            put.remove()
        return error + kept[0].mean()


class Keeping(nn.Module):
    """A unit that reads what its own hook has kept, and gives it away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)
        self.kept: dict[str, Tensor] = {}
        self.enter.register_forward_hook(self._keep)
        self.leave.register_forward_hook(partial(self._more, by=2.0))

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept["enter"] = output

    def _more(self, module: nn.Module, args: Any, output: Tensor, by: float) -> Tensor:
        return output * by

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(torch.tanh(self.enter(x)))
        return x + out * torch.sigmoid(self.kept.pop("enter"))


class Kept(nn.Module):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(6) for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x).squeeze(-1)
        return F.mse_loss(out, y.mean(-1))


@pytest.mark.parametrize("order", ["1F1B", "Interleaved1F1B"])
def test_a_unit_reads_what_its_own_hooks_keep(order: str, threads: Threads) -> None:
    """Where the unit runs elsewhere its shapes are found with its hooks called."""
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(4, 6, generator=generator) for name in "xy"}
    proven(threads, planned(Kept(), ROWS.format(order), "pp=2"), [batch])


def test_what_a_hook_computes() -> None:
    """Only what a hook is told crosses stages: what it makes of that is refused, by name."""
    with pytest.raises(Refusal, match="reads a value inside `blocks.0`") as caught:
        cut_evenly(made(Inside)(), points(0), 3, ["blocks"])
    assert caught.value.diagnostic.code == "S610"


@pytest.mark.parametrize("order", ["GPipe", "1F1B"])
def test_a_module_called_again_from_outside(order: str, threads: Threads) -> None:
    """A dropout inside of a unit of another stage draws the masks that come after the unit's."""
    model = made(DroppedAgain)()
    report = proven(threads, planned(model, ROWS.format(order), "pp=2"), [points(0), points(1)])
    drawn = [row for row in report.rows if row.kind == "draws" or "draws" in row.kind]
    assert drawn and all(row.ok for row in drawn), {row.kind for row in report.rows}
