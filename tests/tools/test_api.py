"""Public names of schedlang: the README's example, `verify` and `assert_equivalent` from Python."""

from pathlib import Path

import pytest
import torch
from torch import nn

import schedlang
from schedlang import equivalence
from schedlang.report import Row
from schedlang.schedule import Schedule
from tests import forks

ROOT = Path(__file__).parents[2]


class Block(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output - batch["x"].sum(-1, keepdim=True).sin()).square().mean()


def _build_schedule(model: nn.Module, tp: int) -> Schedule:
    """A tensor-parallel schedule of the model."""
    sch = schedlang.create_schedule(model)
    sch.mesh(tp=tp)
    with sch.step("tensor parallel"):
        sch["blocks.*.up"].shard("col", over="tp")
        sch["blocks.*.down"].shard("row", over="tp")
    return sch


def test_import_costs_no_torch() -> None:
    """`import schedlang` imports no heavy module; all names of `__all__` exist."""
    code = (
        "import sys, schedlang\n"
        "heavy = {'torch', 'numpy', 'lark', 'schedlang.diagnostics.diagnostic'}\n"
        "assert not heavy & set(sys.modules)\n"
        "assert all(getattr(schedlang, name) is not None for name in schedlang.__all__)\n"
        "assert set(schedlang.__all__) <= set(dir(schedlang))\n"
    )
    result = forks.run_interpreter("-c", code, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    with pytest.raises(AttributeError, match="has no `nonsense`"):
        _ = schedlang.nonsense


def test_the_example() -> None:
    """The README's steps work in order: rows, plan, undo, why, text, build, train."""
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sch = _build_schedule(model, tp=1)
    plan = sch.plan()
    assert [action.name for action in plan.actions] == ["shard", "shard"]
    assert "blocks.1.up" in sch.why("blocks.1.up")
    text = sch.to_sched()
    sch["blocks.*"].checkpoint()
    assert len(sch.plan().actions) == 3
    sch.undo()
    assert sch.to_sched() == text and sch.plan() == plan
    program = sch.build(
        loss=loss, optimizer=lambda named: torch.optim.AdamW(named, lr=3e-2), clip=1.0
    )
    first = program.train_step(batch())
    for _ in range(10):
        last = program.train_step(batch())
    assert last < first
    assert isinstance(program.module, Net)
    assert program.state_dict().keys() == before.keys()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_verify() -> None:
    """A correct schedule passes; batches may come from a function, models and losses from
    closures."""

    class Local(Net):
        pass

    def shifted(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss(output, batch) + 1.0

    sch = _build_schedule(Local(), tp=2)
    report = schedlang.verify(sch, batch=batch, loss=shifted, dtype="none")
    assert isinstance(report, schedlang.Report) and report.ok, str(report)
    assert report.worst is not None and report.worst.error < 1e-12


def test_verify_with_one_batch() -> None:
    """One dict serves every step; the report says what was derived and what is not covered."""
    schedlang.assert_equivalent(
        _build_schedule(Net(), tp=2), batch=batch(), loss=loss, dtype="none"
    )
    report = schedlang.verify(_build_schedule(Net(), tp=1), batch=batch(), loss=loss, dtype="none")
    assert report.ok and dict(report.facts)["derived"] == "another number of rows"
    assert any(gap.condition == "one length only" for gap in report.gaps)
    assert {row.step for row in report.rows if row.kind == "gradients"} >= {0, 1, 2}


def test_a_difference_is_an_assertion_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`assert_equivalent` shows the report in its error."""
    row = Row("SGD", "gradients", "head.weight", 0.5, 1e-9, False)
    report = schedlang.Report((row,), title="Net")
    monkeypatch.setattr(equivalence, "verify", lambda sch, **options: report)
    with pytest.raises(AssertionError, match=r"head\.weight") as caught:
        schedlang.assert_equivalent(_build_schedule(Net(), tp=1), batch=batch(), loss=loss)
    assert "FAIL" in str(caught.value)


@pytest.mark.parametrize("wrong", [3, lambda seed: [seed]])
def test_batches_that_are_none(wrong: object) -> None:
    """A batch that is not a dict is refused before any rank starts."""
    with pytest.raises(schedlang.Refusal, match="not a dict"):
        schedlang.verify(_build_schedule(Net(), tp=2), batch=wrong, loss=loss)


def test_models_without_values_are_refused() -> None:
    """A model on the meta device can be planned, but not verified."""
    with torch.device("meta"):
        sch = _build_schedule(Net(), tp=2)
    with pytest.raises(schedlang.Refusal, match="meta device"):
        schedlang.verify(sch, batch=batch, loss=loss)
