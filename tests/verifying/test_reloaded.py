"""Outputs with a loaded state: bit by bit, by a program that is frozen as the saved one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.passes.verify import saved_state
from schedlang.passes.verify.proof_case import (
    Case,
    observe_programs,
    prepare_case,
    randomised_float64,
)
from schedlang.passes.verify.training_runs import plan_runs
from schedlang.runtime.checkpointing import archive
from schedlang.runtime.float64 import Float64
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.program import Program
from tests.engine import Threads
from tests.proofs import planned, proven
from tests.spacetime import WIDTH, batch

ROWS = "layers.0 checkpoint()"  # on one rank: the bits hang on no layout
FROZEN = "layers.2.weight"  # among those that a proof freezes


class Turned(nn.Module):
    """Layers that see a turned activation, as attention along another dim does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, video: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.stem(video)
        for layer in self.layers:
            x = x + layer(x.transpose(1, 2)).transpose(1, 2)
        return {"loss": F.mse_loss(x.sum(-1), target), "y": x}


Both = tuple[Tensor, Tensor]


def _outputs(folder: Path) -> tuple[Both, Both]:
    """Of the saved program and of another: the first one made, and what the proof compares."""
    case = randomised_float64(
        prepare_case(Case(planned(Turned().double(), ROWS), (batch(1),), dtype="none"))
    )
    conditions = plan_runs(case).conditions[:2]
    own = conditions[1].case
    assert own is not None and not own.plan.model.model.get_parameter(FROZEN).requires_grad
    made: list[Program] = []
    with enter_modes(Float64()):
        observe_programs(case, conditions, made)
        made[1].save(folder / "state")
        first = saved_state._load_and_evaluate(made[1], made[0], case.batches[0], str(folder))
        found = saved_state.load_on_ranks(made, case, conditions, str(folder))
    a, b = ((want["y"], got["y"]) for want, got in (first, found))
    return a, b


def test_other_frozen_weights_are_no_lost_state(tmp_path: Path) -> None:
    """torch folds a product's leading dims where the weight is trained, and else does not: with
    an activation whose dims are turned the bits differ, and do not in a program frozen alike."""
    first, found = _outputs(tmp_path)
    assert not torch.equal(*first), "nothing is tested: give it a model where torch rounds apart"
    torch.testing.assert_close(*first, rtol=1e-14, atol=1e-14)
    assert torch.equal(*found)


@pytest.mark.parametrize("factor", [1 + 4e-16, 1.5])
def test_a_load_that_changes_a_weight_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """By a rounding, or by much; the weight is a frozen one, so no training hides it."""
    plain = archive._copy_values

    def take_over(made: Any, values: Any) -> None:
        plain(made, {**values, FROZEN: values[FROZEN] * factor})

    monkeypatch.setattr(archive, "_copy_values", take_over)
    assert not torch.equal(*_outputs(tmp_path)[1])


def test_a_load_that_leaves_out_what_is_frozen_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that is frozen alike starts from other weights, the frozen ones among them."""
    plain = archive._copy_values

    def take_over(made: Any, values: Any) -> None:
        held = made.assembly.parameters
        kept = {n: p.detach().clone() for n, p in held.items() if not p.requires_grad}
        plain(made, {**values, **kept})

    monkeypatch.setattr(archive, "_copy_values", take_over)
    assert not torch.equal(*_outputs(tmp_path)[1])


class Shortened(nn.Module):
    """A table whose rows are made shorter where they are looked up, in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(12, WIDTH, max_norm=0.3), nn.Linear(WIDTH, 12)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


@pytest.mark.parametrize("order", ["1F1B", "ZB-H1"])
def test_what_an_evaluation_writes_is_saved(threads: Threads, order: str) -> None:
    """Parameters into which each forward writes are saved as the last evaluation left them."""
    rows = f'layers[1]  pipeline_split(over=pp)\npipeline(order="{order}", micro=2)'
    ids = torch.arange(24).view(4, 6) * 5 % 12
    proven(threads, planned(Shortened().double(), rows, "pp=2"), [{"ids": ids}])
