"""Forward hooks inside pipeline units, and modules that are called again outside of them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import Batch, assert_proven, make_plan, sgd
from tests.single_process import cut_evenly
from tests.zoo.networks import DroppedAgain, HookLoss, module_maker, points

ROWS = 'blocks  pipeline_split(over=pp)\npipeline(order="{}", micro=2)'


@pytest.mark.parametrize(
    "kwargs, doubling", [(False, False), (True, False), (False, True), (True, True)]
)
def test_what_hooks_are_told_reaches_the_loss(
    kwargs: bool, doubling: bool, threads: Threads
) -> None:
    """Loss, output and gradients equal the model's, with hooks that read or change outputs."""
    model = module_maker(lambda: HookLoss(kwargs, doubling))()
    report = assert_proven(
        threads, make_plan(model, ROWS.format("1F1B"), "pp=2"), [points(0), points(1)]
    )
    names = {r.name for r in report.rows if r.kind == "gradients"}
    assert {f"blocks.{k}.up.weight" for k in range(3)} <= names


def test_it_is_sent_from_where_it_is_told() -> None:
    """Values that hooks of a unit receive are sent to the stages that read them."""
    cut = cut_evenly(module_maker(HookLoss)(), points(0), 3, ["blocks"])
    hook_values = {
        (end, token) for end, tokens in cut.routes.items() for token in tokens if token[1] < 0
    }
    last = cut.stages - 1
    assert {end for end, _ in hook_values} == {(k, last) for k in range(last)}, hook_values


def test_beside_data_parallelism_and_recomputation(threads: Threads) -> None:
    """Hooks in recomputed units, with data parallelism."""
    rows = f"blocks.*.down  checkpoint()\n{ROWS.format('GPipe')}".replace(
        "pipeline(order", "zero(stage=1, over=dp)\npipeline(order"
    )
    model = module_maker(HookLoss)()
    assert_proven(threads, make_plan(model, rows, "dp=2, pp=2"), [points(0, 8), points(1, 8)])


class ReadsHook(HookLoss):
    """Reads a value that its own hook computes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hooked: list[Tensor] = []
        first_block: Any = self.blocks[0]
        handle = first_block.up.register_forward_hook(lambda m, a, out: hooked.append(out.exp()))
        try:
            error = super().forward(x, y)
        finally:
            handle.remove()
        return error + hooked[0].mean()


class Keeping(nn.Module):
    """A unit that reads and removes what its own hook has stored."""

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
        output: Tensor = self.leave(torch.tanh(self.enter(x)))
        return x + output * torch.sigmoid(self.kept.pop("enter"))


class Kept(nn.Module):
    """Four such units and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(6) for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x).squeeze(-1)
        return F.mse_loss(output, y.mean(-1))


@pytest.mark.parametrize("order", ["1F1B", "Interleaved1F1B"])
def test_a_unit_reads_what_its_own_hooks_keep(order: str, threads: Threads) -> None:
    """Shapes of a unit on another stage are found with its hooks."""
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(4, 6, generator=generator) for name in "xy"}
    assert_proven(threads, make_plan(Kept(), ROWS.format(order), "pp=2"), [batch])


class Capturing(nn.Module):
    """Blocks that return all hidden states; hooks, registered by the first forward, collect them.

    transformers does so for `output_hidden_states`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.states: list[Tensor] = []

    def _collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.states += [output] if self.states else [args[0], output]

    def forward(self, x: Tensor) -> list[Tensor]:
        if not getattr(self, "is_hooked", False):
            for block in self.blocks:
                block.register_forward_hook(self._collect)
            self.is_hooked = True
        self.states.clear()
        for block in self.blocks:
            x = torch.tanh(block(x))
        states = [*self.states, x]
        assert len(states) == len(self.blocks) + 2
        self.states.clear()
        return states


class Captured(nn.Module):
    """A model whose loss weighs each of its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.trunk = nn.Linear(6, 6), Capturing()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        states = self.trunk(2 * self.enter(x))
        terms = [(k + 1) * state.square().mean() for k, state in enumerate(states)]
        return torch.stack(terms).sum()


def _two_steps(plan: Plan, batches: list[Batch]) -> list[Tensor]:
    """On a rank: losses and gradients of two steps."""
    program, values = build(plan, batches[0], optimizer=sgd), list[Tensor]()
    for batch in batches:
        values.append(program.train_step(batch).clone())
        values += [grad.clone() for _, grad in sorted(program.gradients().items())]
    return values


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(
    "rows, mesh",
    [
        ('trunk.blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)', "pp=2"),
        ("trunk  checkpoint()", ""),
        ("trunk.blocks.*  checkpoint()", ""),
        ("zero(stage=1, over=dp)", "dp=2"),
    ],
)
def test_hooks_that_a_forward_registers(
    rows: str, mesh: str, has_run: bool, threads: Threads
) -> None:
    """What they collect, inputs too, is what they collect in a plain loop, also in later steps."""
    torch.manual_seed(0)
    model = Captured()
    batches: list[Batch] = [{"x": torch.randn(4, 6, dtype=torch.float64)} for _ in range(2)]
    if has_run:
        model(**batches[0])
    plain, expected = copy.deepcopy(model), list[Tensor]()
    optimizer = sgd(plain.named_parameters())
    for batch in batches:
        optimizer.zero_grad()
        loss = plain(**batch)
        loss.backward()
        expected += [loss.detach()]
        expected += [
            p.grad.clone() for _, p in sorted(plain.named_parameters()) if p.grad is not None
        ]
        optimizer.step()
    plan = make_plan(model, rows, mesh)
    for values in threads.run(_two_steps, plan.mesh.world, plan, batches):
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-11)


def test_what_a_hook_computes() -> None:
    """Only values that a hook receives cross stages: values that it computes are refused."""
    with pytest.raises(Refusal, match="reads a value inside `blocks.0`") as caught:
        cut_evenly(module_maker(ReadsHook)(), points(0), 3, ["blocks"])
    assert caught.value.diagnostic.code == "S610"


@pytest.mark.parametrize("order", ["GPipe", "1F1B"])
def test_a_module_called_again_from_outside(order: str, threads: Threads) -> None:
    """A dropout that is called again outside of its unit draws the masks that follow the unit's."""
    model = module_maker(DroppedAgain)()
    report = assert_proven(
        threads, make_plan(model, ROWS.format(order), "pp=2"), [points(0), points(1)]
    )
    draw_rows = [row for row in report.rows if row.kind == "draws" or "draws" in row.kind]
    assert draw_rows and all(row.ok for row in draw_rows), {row.kind for row in report.rows}
