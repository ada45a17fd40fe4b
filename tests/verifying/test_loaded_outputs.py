"""Outputs after loading a saved state: bitwise equal in a program with the same frozen weights."""

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
from tests.proofs import assert_proven, make_plan
from tests.spacetime import WIDTH, batch

ROWS = "layers.0 checkpoint()"  # on one rank: no layout changes the bits
FROZEN = "layers.2.weight"  # one of the weights that a proof freezes


class Transposed(nn.Module):
    """Layers on a transposed activation, as attention along another dim."""

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


OutputPair = tuple[Tensor, Tensor]


def _loaded_outputs(folder: Path) -> tuple[OutputPair, OutputPair]:
    """Return outputs of the saved and the loading program: first program, and in the proof."""
    case = randomised_float64(
        prepare_case(Case(make_plan(Transposed().double(), ROWS), (batch(1),), dtype="none"))
    )
    conditions = plan_runs(case).conditions[:2]
    frozen_case = conditions[1].case
    assert (
        frozen_case is not None
        and not frozen_case.plan.model.model.get_parameter(FROZEN).requires_grad
    )
    programs: list[Program] = []
    with enter_modes(Float64()):
        observe_programs(case, conditions, programs)
        programs[1].save(folder / "state")
        first_pair = saved_state._load_and_evaluate(
            programs[1], programs[0], case.batches[0], str(folder)
        )
        proof_pair = saved_state.load_on_ranks(programs, case, conditions, str(folder))
    a, b = ((expected["y"], loaded["y"]) for expected, loaded in (first_pair, proof_pair))
    return a, b


def test_other_frozen_weights_are_no_lost_state(tmp_path: Path) -> None:
    """torch folds leading dims of a product only if the weight is trained: with a transposed
    activation outputs differ in bits, but not in a program with the same frozen weights."""
    first_pair, proof_pair = _loaded_outputs(tmp_path)
    assert not torch.equal(*first_pair), (
        "nothing is tested: give it a model where torch rounds apart"
    )
    torch.testing.assert_close(*first_pair, rtol=1e-14, atol=1e-14)
    assert torch.equal(*proof_pair)


@pytest.mark.parametrize("factor", [1 + 4e-16, 1.5])
def test_a_load_that_changes_a_weight_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """A changed weight is found, even by one rounding; it is frozen, so training cannot hide it."""
    copy_values = archive._copy_values

    def take_over(target: Any, values: Any) -> None:
        copy_values(target, {**values, FROZEN: values[FROZEN] * factor})

    monkeypatch.setattr(archive, "_copy_values", take_over)
    assert not torch.equal(*_loaded_outputs(tmp_path)[1])


def test_a_load_that_leaves_out_what_is_frozen_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights that are not loaded are found: the other program starts from other values."""
    copy_values = archive._copy_values

    def take_over(target: Any, values: Any) -> None:
        parameters = target.assembly.parameters
        old_values = {n: p.detach().clone() for n, p in parameters.items() if not p.requires_grad}
        copy_values(target, {**values, **old_values})

    monkeypatch.setattr(archive, "_copy_values", take_over)
    assert not torch.equal(*_loaded_outputs(tmp_path)[1])


class MaxNormTable(nn.Module):
    """An embedding with max_norm, which changes its rows at each lookup, also in evaluation."""

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
    """Parameters that forward changes are saved as the last evaluation left them."""
    rows = f'layers[1]  pipeline_split(over=pp)\npipeline(order="{order}", micro=2)'
    ids = torch.arange(24).view(4, 6) * 5 % 12
    assert_proven(threads, make_plan(MaxNormTable().double(), rows, "pp=2"), [{"ids": ids}])
