"""checkpoint(plan=dtr), modules within a memory budget: equal gradients, peak, refusals."""

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
from tests.memory.test_recompute_regions import LOOP_KINDS, gradients
from tests.memory.test_recompute_regions import Stack as Blocks
from tests.proofs import assert_proven, make_plan, refusal_text

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
ROW = "transformer.h.*  checkpoint(plan=dtr, memory={})\n"


def all_equal(actual: Any, expected: Any) -> bool:
    """Return whether all tensors are bitwise equal."""
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def make_pair(
    loop_kind: str, budget: int, **options: Any
) -> tuple[nn.Module, nn.Module, BudgetPool]:
    """Return blocks without and with a budget, and the budget's pool."""
    torch.manual_seed(0)
    plain = Blocks(loop_kind, **options).double()
    limited = copy.deepcopy(plain)
    return plain, limited, limit_saved_bytes(list(limited.blocks), budget)


def least_budget(loop_kind: str) -> int:
    """Return the fewest bytes in which these blocks can run."""
    _, limited, pool = make_pair(loop_kind, 0)
    gradients(limited)
    return pool.peak


@pytest.mark.parametrize("way", LOOP_KINDS)
def test_same_gradients_bit_by_bit(way: str) -> None:
    """Output, gradients and random state are the original's at any budget, with dropout; nothing is
    held afterwards."""
    for budget in (0, 6_000, 12_000, 10**9):
        plain, limited, pool = make_pair(way, budget)
        for times in (1, 2):
            assert all_equal(gradients(limited, times), gradients(plain, times))
            assert pool.held_bytes == 0


def test_kept_bytes_stay_within_the_budget() -> None:
    """From the least budget on the peak keeps the budget; more memory is less work; below it only
    what is needed is held."""
    minimum = least_budget("plain")
    works = []
    for budget in (minimum, 2 * minimum, 3 * minimum, 10**9):
        _, limited, pool = make_pair("plain", budget)
        gradients(limited)
        assert pool.peak <= budget
        works.append(pool.repeated_work)
    assert works == sorted(works, reverse=True) and works[0] > works[-1] == 0
    _, limited, pool = make_pair("plain", minimum // 2)
    gradients(limited)
    assert minimum // 2 < pool.peak <= 2 * minimum


class WritesInPlace(nn.Module):
    """Writes into its own results, complete and in parts, and into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        y = self.lin(x)
        y.mul_(2.0).add_(y.detach())
        z = torch.zeros(3, 4, dtype=x.dtype)
        z[1:] = y[1:].tanh()
        sine, cosine = z.sin(), side.cos()
        with torch.no_grad():
            side[0] += 1.0
        later = (y + 1.0).tanh()  # computed from y before the next write; y itself is not saved
        y.mul_(2.0)
        return (sine * cosine).exp() * y.sigmoid() * later


def test_what_is_written_into_is_made_again_as_it_was() -> None:
    """In-place writes, complete, partial and through views, give the same gradients at any
    budget."""
    torch.manual_seed(0)
    plain = WritesInPlace().double()
    results = []
    for budget in (None, 0, 400, 700, 10**6):
        module = copy.deepcopy(plain)
        pool = BudgetPool(0) if budget is None else limit_saved_bytes([module], budget)
        x = torch.linspace(0, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        side = torch.ones(3, 4, dtype=torch.float64)
        module(x, side).square().sum().backward()
        results.append([x.grad, side, module.lin.weight.grad])
        assert budget != 0 or pool.dropped > 0
    assert all(all_equal(result, results[0]) for result in results[1:])


class WritesIntoOutput(nn.Module):
    """Writes into a tensor that it passed to a block."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.blocks = nn.Linear(4, 4), nn.ModuleList([SavesNoInput()])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lin(x)
        output = self.blocks[0](hidden)
        return (output + hidden.mul_(2.0)).sum()


class SavesNoInput(nn.Module):
    """Saves nothing of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1.0).tanh().exp()


def test_written_into_by_the_model_afterwards_is_an_error() -> None:
    """If the model overwrites a module's input or saved output, that is an error, never a wrong
    gradient."""

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
    """A chain of n equal operators in memory for about 2 sqrt(n) repeats only O(n) of them
    (Kirisame et al., theorem 3.1)."""

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(144):
                x = x.tanh()
            return x

    module = Chain()
    x = torch.linspace(-1, 1, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    pool = limit_saved_bytes([module], (2 * 12 + 2) * 16 * 8)
    (actual,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(actual, expected)
    assert pool.peak <= pool.budget and pool.repeated_work <= 4 * 144 * 16


def test_generators_of_a_module_are_replayed() -> None:
    """Draws from the module's own generator and the default one are repeated."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.Generator().manual_seed(5)

        def forward(self, x: Tensor) -> Tensor:
            x = (x * torch.rand(x.shape, generator=self.own)).tanh()
            return (x * torch.rand_like(x)).sin().exp()

    results = []
    for budget in (None, 0):
        module = Noisy()
        if budget is not None:
            limit_saved_bytes([module], budget)
        torch.manual_seed(3)
        x = torch.ones(4, requires_grad=True)
        module(x).sum().backward()
        results.append([x.grad, torch.rand(2), module.own.get_state()])
    assert all_equal(*results)


@pytest.mark.parametrize("what", ["activations", "parameters"])
@pytest.mark.parametrize("at", ["transformer.h.*", "transformer.h.0.mlp", "transformer"])
def test_nothing_is_left_to_offload(what: str, at: str) -> None:
    """S844: modules within a budget cannot be offloaded; other modules and other state can."""
    message = refusal_text(models.gpt2(2), ROW.format("1MiB") + f"{at}  offload({what})")
    assert "S844" in message and "nothing is left to offload" in message and "help:" in message
    make_plan(models.gpt2(2), ROW.format("1MiB") + f"lm_head  offload({what})")
    make_plan(models.gpt2(2), ROW.format("1MiB") + "offload(gradients)\noffload(optimizer)")


def test_a_model_that_writes_into_what_it_gave_is_refused() -> None:
    """S846, before training, names the overwritten tensor and the row."""
    plan = make_plan(WritesIntoOutput().double(), "blocks.*  checkpoint(plan=dtr, memory=200B)")
    with pytest.raises(Refusal) as caught:
        prepare(plan, {"x": torch.ones(3, 4, dtype=torch.float64)})
    message = caught.value.render()
    assert "S846" in message and "the model changed" in message and "rows.sched" in message


def test_the_page_says_what_runs() -> None:
    """The example of docs/checkpoint.md keeps its budget by dropping and recomputing."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    pool = namespace["pool"]
    assert pool.peak <= pool.budget == 64 * 1024 and pool.dropped > 0 and pool.repeated_work > 0


def test_too_little_is_refused() -> None:
    """S841 gives the needed bytes, and they are enough."""
    with pytest.raises(Refusal) as caught:
        prepare(make_plan(models.gpt2(2), ROW.format("8KiB")), BATCHES[0])
    message = caught.value.render()
    needed = int(message.split("each microbatch needs ")[1].split()[0])
    assert "the inputs of modules are kept" in message and needed > 8 * 1024
    prepare(make_plan(models.gpt2(2), ROW.format(f"{needed}B")), BATCHES[0])


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
    """Layers within a budget, with dropout, ZeRO and a pipeline, train as the original."""
    memory = ROW.format("400KiB")
    assert_proven(threads, make_plan(models.gpt2(dropout=0.1), memory + rows, mesh), BATCHES)


def test_the_plan_by_its_name_alone() -> None:
    """The plan's name without `plan=` is refused with the right spelling."""
    message = refusal_text(models.gpt2(1), "transformer.h.*  checkpoint(dtr, budget=1MiB)")
    assert "write `checkpoint(plan=dtr, memory=1MiB)`" in message
