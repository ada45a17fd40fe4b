"""Modules within a budget of bytes: the same gradients bit by bit, and never more than that."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.runtime.activation_memory.dynamic import BudgetPool, limit_saved_bytes
from tests import models
from tests.engine import Threads
from tests.memory.test_region import WAYS, gradients
from tests.memory.test_region import Stack as Blocks
from tests.proofs import planned, proven, refused

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
ROW = "transformer.h.*  checkpoint(plan=dtr, memory={})\n"


def same(found: Any, expected: Any) -> bool:
    """Equal to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def pair(way: str, budget: int, **options: Any) -> tuple[nn.Module, nn.Module, BudgetPool]:
    """Blocks as they are, and within a budget."""
    torch.manual_seed(0)
    plain = Blocks(way, **options).double()
    ours = copy.deepcopy(plain)
    return plain, ours, limit_saved_bytes(list(ours.blocks), budget)


def floor(way: str) -> int:
    """The fewest bytes in which these blocks can be run again."""
    _, ours, pool = pair(way, 0)
    gradients(ours)
    return pool.peak


@pytest.mark.parametrize("way", WAYS)
def test_same_gradients_bit_by_bit(way: str) -> None:
    """Output, every gradient and the random state afterwards are the untouched model's at any
    budget, dropout included; nothing is held afterwards."""
    for budget in (0, 6_000, 12_000, 10**9):
        plain, ours, pool = pair(way, budget)
        for times in (1, 2):
            assert same(gradients(ours, times), gradients(plain, times))
            assert pool.held_bytes == 0


def test_kept_bytes_stay_within_the_budget() -> None:
    """From the least budget on the peak never passes it; more memory is less work again, none
    where all fits; below it nothing more is kept than has to be."""
    least = floor("plain")
    works = []
    for budget in (least, 2 * least, 3 * least, 10**9):
        _, ours, pool = pair("plain", budget)
        gradients(ours)
        assert pool.peak <= budget
        works.append(pool.repeated_work)
    assert works == sorted(works, reverse=True) and works[0] > works[-1] == 0
    _, ours, pool = pair("plain", least // 2)
    gradients(ours)
    assert least // 2 < pool.peak <= 2 * least


class Writing(nn.Module):
    """Writes into what it made, whole and in parts, and into what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        y = self.lin(x)
        y.mul_(2.0).add_(y.detach())
        z = torch.zeros(3, 4, dtype=x.dtype)
        z[1:] = y[1:].tanh()
        made, turned = z.sin(), side.cos()
        with torch.no_grad():
            side[0] += 1.0
        kept = (y + 1.0).tanh()  # made of what y is now, and not saved as such
        y.mul_(2.0)
        return (made * turned).exp() * y.sigmoid() * kept


def test_what_is_written_into_is_made_again_as_it_was() -> None:
    """Writes in place, whole, partial and through views, give the same gradients at any budget."""
    torch.manual_seed(0)
    plain = Writing().double()
    found = []
    for budget in (None, 0, 400, 700, 10**6):
        module = copy.deepcopy(plain)
        pool = BudgetPool(0) if budget is None else limit_saved_bytes([module], budget)
        x = torch.linspace(0, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        side = torch.ones(3, 4, dtype=torch.float64)
        module(x, side).square().sum().backward()
        found.append([x.grad, side, module.lin.weight.grad])
        assert budget != 0 or pool.dropped > 0
    assert all(same(one, found[0]) for one in found[1:])


class Giving(nn.Module):
    """Writes into what it gave to a block."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.blocks = nn.Linear(4, 4), nn.ModuleList([Shifted()])

    def forward(self, x: Tensor) -> Tensor:
        given = self.lin(x)
        made = self.blocks[0](given)
        return (made + given.mul_(2.0)).sum()


class Shifted(nn.Module):
    """Saves nothing of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1.0).tanh().exp()


def test_written_into_by_the_model_afterwards_is_an_error() -> None:
    """What a module was given, or saved of its output, and the model then wrote into, is an error
    and never a wrong gradient."""

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1.0).tanh()

    for budget, late in ((0, False), (10**6, True)):
        module = Plain()
        limit_saved_bytes([module], budget)
        x = torch.ones(3, requires_grad=True) * 1.0
        y = module(x)
        z = y.sin()
        with torch.no_grad():
            (y if late else x).add_(1.0)
        with pytest.raises((Refusal, RuntimeError), match="S846|modified by an inplace"):
            z.sum().backward()


def test_a_long_chain_costs_little_more() -> None:
    """A chain of n equal operators within the square root of n of them runs a few times n again
    (Kirisame et al., theorem 3.1: O(n) for a budget of 2 sqrt(n) + 1)."""

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(144):
                x = x.tanh()
            return x

    module = Chain()
    x = torch.linspace(-1, 1, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    pool = limit_saved_bytes([module], (2 * 12 + 2) * 16 * 8)
    (found,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(found, expected)
    assert pool.peak <= pool.budget and pool.repeated_work <= 4 * 144 * 16


def test_generators_of_a_module_are_replayed() -> None:
    """Draws from a generator that the module holds, and from the default one, are made again."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.Generator().manual_seed(5)

        def forward(self, x: Tensor) -> Tensor:
            x = (x * torch.rand(x.shape, generator=self.own)).tanh()
            return (x * torch.rand_like(x)).sin().exp()

    found = []
    for budget in (None, 0):
        module = Noisy()
        if budget is not None:
            limit_saved_bytes([module], budget)
        torch.manual_seed(3)
        x = torch.ones(4, requires_grad=True)
        module(x).sum().backward()
        found.append([x.grad, torch.rand(2), module.own.get_state()])
    assert same(*found)


@pytest.mark.parametrize("what", ["activations", "parameters"])
@pytest.mark.parametrize("at", ["transformer.h.*", "transformer.h.0.mlp", "transformer"])
def test_nothing_is_left_to_offload(what: str, at: str) -> None:
    """S844: a budget keeps its bytes by itself; other modules, and state, move as ever."""
    told = refused(models.gpt2(2), ROW.format("1MiB") + f"{at}  offload({what})")
    assert "S844" in told and "nothing is left to offload" in told and "help:" in told
    planned(models.gpt2(2), ROW.format("1MiB") + f"lm_head  offload({what})")
    planned(models.gpt2(2), ROW.format("1MiB") + "offload(gradients)\noffload(optimizer)")


def test_a_model_that_writes_into_what_it_gave_is_refused() -> None:
    """S846, before anything runs, names what was written into and the row."""
    plan = planned(Giving().double(), "blocks.*  checkpoint(plan=dtr, memory=200B)")
    with pytest.raises(Refusal) as caught:
        prepare(plan, {"x": torch.ones(3, 4, dtype=torch.float64)})
    told = caught.value.render()
    assert "S846" in told and "the model changed" in told and "rows.sched" in told


def test_the_page_says_what_runs() -> None:
    """The page's example keeps within its budget, and drops and makes again for it."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    names: dict[str, Any] = {}
    exec(code, names)
    pool = names["pool"]
    assert pool.peak <= pool.budget == 64 * 1024 and pool.dropped > 0 and pool.repeated_work > 0


def test_too_little_is_refused() -> None:
    """S841 says how many bytes are needed, and that many are enough."""
    with pytest.raises(Refusal) as caught:
        prepare(planned(models.gpt2(2), ROW.format("8KiB")), BATCHES[0])
    told = caught.value.render()
    need = int(told.split("each microbatch needs ")[1].split()[0])
    assert "the inputs of modules are kept" in told and need > 8 * 1024
    prepare(planned(models.gpt2(2), ROW.format(f"{need}B")), BATCHES[0])


@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("zero(stage=3, over=dp)", "dp=2"),
        pytest.param(
            'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=3)',
            "pp=2",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_budget_trains_as_the_original(threads: Threads, rows: str, mesh: str) -> None:
    """Layers within a budget train as the original, with dropout, sliced and in a pipeline."""
    memory = ROW.format("400KiB")
    proven(threads, planned(models.gpt2(dropout=0.1), memory + rows, mesh), BATCHES)


def test_the_plan_by_its_name_alone() -> None:
    """Who writes the plan without its argument is told the argument."""
    told = refused(models.gpt2(1), "transformer.h.*  checkpoint(dtr, budget=1MiB)")
    assert "write `checkpoint(plan=dtr, memory=1MiB)`" in told
