"""checkpoint(plan=pareto) saves single operators: optimal choice, equal gradients, errors."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.partition.recomputed_chains import CostSubject, costs_of
from schedlang.passes.simulate.account import account
from schedlang.remat.operators import (
    Operator,
    choose_saved,
    min_memory,
    module_choices,
    pareto_front,
)
from schedlang.remat.rotor import ModuleCost
from schedlang.runtime.activation_memory.costs import OperatorCosts
from schedlang.runtime.activation_memory.recompute import checkpoint
from schedlang.runtime.tracing.recording import counting_costs
from tests import models
from tests.engine import Threads
from tests.memory.test_recompute import Stack, batch, gradients
from tests.proofs import assert_proven, make_plan

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
ROW = "transformer.h.*  checkpoint(plan=pareto, memory={})\n"


def random_module(count: int, seed: int) -> ModuleCost:
    """Return a module with some operators, in small integers."""
    rng = random.Random(seed)
    operators = []
    for index in range(count):
        size = rng.randint(1, 6)
        saved = size * rng.randint(0, 1)
        key = (f"aten::{rng.choice('ab')}", index)
        operators.append(Operator(key, rng.randint(1, 9), size, saved))
    input_bytes = rng.randint(0, 3)
    saved = input_bytes + sum(operator.saved for operator in operators) + rng.randint(0, 3)
    return ModuleCost(0.0, saved, input_bytes, tuple(operators), rng.randint(0, 5))


def all_subsets(operators: tuple[Operator, ...]) -> Iterator[tuple[Operator, ...]]:
    """Yield all sets of operators."""
    for count in range(len(operators) + 1):
        yield from itertools.combinations(operators, count)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_no_set_beats_the_frontier(count: int) -> None:
    """For every number of bytes the frontier repeats as little work as the best set, and its own
    numbers are right."""
    for seed in range(8):
        operators = random_module(count, seed).operators
        total = sum(operator.work for operator in operators)
        frontier = pareto_front(operators)
        for size, work, kept in frontier:
            chosen = [operators[index] for index in kept]
            assert size == sum(operator.bytes for operator in chosen)
            assert work == total - sum(operator.work for operator in chosen)
        possible = [
            (sum(o.bytes for o in s), total - sum(o.work for o in s))
            for s in all_subsets(operators)
        ]
        for size, _ in possible:
            best = min(work for other, work in possible if other <= size)
            assert best == min(work for other, work, _ in frontier if other <= size)


def all_choices(cost: ModuleCost) -> list[tuple[int, int, float]]:
    """Return saved bytes, extra bytes while running, and repeated work of every choice for one
    module."""
    choices = [(cost.saved, 0, 0.0)]
    for kept in all_subsets(cost.operators):
        repeated_work = sum(operator.work for operator in cost.operators) - sum(
            operator.work for operator in kept
        )
        saved_inside = sum(operator.saved for operator in kept)
        held = cost.input + sum(operator.bytes for operator in kept)
        choices.append((held, cost.saved - saved_inside, cost.fixed + repeated_work))
    return choices


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_for_a_chain_is_better(seed: int) -> None:
    """For every limit the choices fit and repeat the least work; one byte below the minimum there
    is none."""
    chain = [random_module(count, 10 * seed + count) for count in (2, 3, 2)]
    possible = []
    for chosen in itertools.product(*map(all_choices, chain)):
        before = peak = 0
        for held, during, _ in chosen:
            peak, before = max(peak, before + held + during), before + held
        possible.append((peak, sum(work for _, _, work in chosen)))
    minimum = min(peak for peak, _ in possible)
    # saving more than the module itself saves is never better, and so is no choice
    assert min_memory(chain) == minimum and choose_saved(chain, minimum - 1) is None
    for memory in range(minimum, max(peak for peak, _ in possible) + 1):
        choices = choose_saved(chain, memory)
        assert choices is not None
        before = 0
        for choice in choices:
            assert before + choice.held + choice.during <= memory
            before += choice.held
        best = min(work for peak, work in possible if peak <= memory)
        assert sum(choice.again for choice in choices) == best


def test_a_long_chain_is_cheap_and_fits() -> None:
    """With many operators and layers the frontier is coarse: it still fits, and more memory is
    never slower."""
    rng = random.Random(0)
    operators = tuple(
        Operator((f"o{k}", 0), rng.randint(1, 10**9), rng.randint(1, 10**6), 0) for k in range(30)
    )
    cost = ModuleCost(0.0, sum(item.bytes for item in operators), 10, operators)
    chain, works = [cost] * 9, []
    for memory in (*range(min_memory(chain), cost.saved * 9, cost.saved * 4), cost.saved * 9):
        chosen = choose_saved(chain, memory)
        assert chosen is not None and sum(item.held for item in chosen) <= memory
        works.append(sum(item.again for item in chosen))
    assert works == sorted(works, reverse=True) and works[-1] == 0
    assert len(module_choices(cost)) < 200


def counted_operators(model: nn.Module) -> OperatorCosts:
    """Return which operators of a stack's blocks could be saved."""
    costs = OperatorCosts(2)
    x, mask = batch()
    with counting_costs(costs, model, ["blocks.0", "blocks.1"]):
        model(x.requires_grad_(), mask=mask)
    return costs


class OperatorCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the runs of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name
        self.names[name] = self.names.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_any_set_gives_the_same_gradients() -> None:
    """Whatever is saved, output and gradients are bitwise equal, with dropout; saved products and
    attention do not run again."""
    torch.manual_seed(0)
    plain = Stack().double()
    names = [operator.key for operator in counted_operators(plain).operators(0)]
    assert ("attention", 0) in names and ("aten::mm", 0) in names
    expected = gradients(plain)
    rng = random.Random(1)
    for size in (1, 3, 5, len(names)):
        kept = rng.sample(names, size)
        recomputed = copy.deepcopy(plain)
        for block in recomputed.blocks:
            checkpoint(block, chosen=kept)
        with OperatorCounter() as counter:
            actual = gradients(recomputed)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), kept
        with OperatorCounter() as plain_counter:
            gradients(plain)
        repeated = 2 * sum(name == "aten::addmm" and (name, k) not in kept for name, k in names)
        assert counter.names["aten::addmm"] == plain_counter.names["aten::addmm"] + repeated


def test_a_kept_result_that_is_written_into() -> None:
    """A saved result that is overwritten later is recomputed, never wrong; two backwards through
    one graph are equal."""

    class Writing(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.writes = writes

        def forward(self, x: Tensor) -> Tensor:
            exponential = x.exp()
            y = exponential.tanh().sin()
            return y + exponential.detach().mul_(2.0) if self.writes else y

    x = torch.ones(3, requires_grad=True)
    (expected,) = torch.autograd.grad(Writing(False)(x).sum(), x)
    for writes in (False, True):
        module = Writing(writes)
        checkpoint(module, chosen=[("aten::exp", 0)])
        out = module(x).sum()
        first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second) and torch.equal(first, expected)


def test_another_way_is_an_error() -> None:
    """A second run that calls other operators raises an error."""

    counter = itertools.count(1)  # outside the module, whose attributes are restored

    class Turning(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.exp().sin() if next(counter) % 2 else x.sin().exp()
            return x.exp().tanh()

    module = Turning()
    checkpoint(module, chosen=[("aten::exp", 1)])
    out = module(torch.ones(3, requires_grad=True))
    with pytest.raises(
        RuntimeError, match="ran differently from the forward: `aten::sin`, not `aten::exp`"
    ):
        out.sum().backward()


def test_a_plan_keeps_products_and_repeats_the_rest() -> None:
    """In a transformer layer matrix products are saved first; less memory means more work."""
    plan = make_plan(models.gpt2(dropout=0.1), ROW.format("400KiB"))
    prepared = prepare(plan, BATCHES[0])
    ((_, chosen),) = prepared.chains[plan.actions[0].sites]
    costs = costs_of(
        CostSubject(plan, prepared.traced, prepared.staged, BATCHES[0]), plan.actions[0].sites
    )
    kept = [choice.kept for choice in chosen]
    assert any(keys for keys in kept) and all(
        name == "aten::addmm" for keys in kept for name, _ in keys or ()
    )
    before = 0
    for choice in chosen:
        assert before + choice.held + choice.during <= 400 * 1024
        before += choice.held
    works = [
        sum(c.again for c in choose_saved(costs, memory) or ()) for memory in (300_000, 400_000)
    ]
    assert works[0] > works[1] > 0


def test_plan_says_what_was_chosen() -> None:
    """Each plan has a note of its choice for each module: operators, regions, a budget."""
    by_plan = {}
    for name in ("pareto", "rotor", "dtr"):
        row = f"transformer.h.*  checkpoint(plan={name}, memory=400KiB)"
        notes = account(make_plan(models.gpt2(), row), BATCHES[0], memory=True).notes
        (by_plan[name],) = [n for n in notes if n.startswith("`checkpoint` of transformer.h.0 to ")]
    assert "recomputed, of which are kept: " in by_plan["pareto"] and " addmm" in by_plan["pareto"]
    assert "operations again" in by_plan["pareto"] and "1 kept whole" in by_plan["pareto"]
    assert "1 kept whole, 3 in 3 regions" in by_plan["rotor"]
    assert "at most 409600 bytes, dropped and made again" in by_plan["dtr"]


def test_too_little_memory_is_refused() -> None:
    """S841 gives the needed memory, and that is enough."""
    with pytest.raises(Refusal) as caught:
        prepare(make_plan(models.gpt2(), ROW.format("20KiB")), BATCHES[0])
    needed = int(caught.value.render().split("each microbatch needs ")[1].split()[0])
    prepare(make_plan(models.gpt2(), ROW.format(f"{needed}B")), BATCHES[0])
    with pytest.raises(Refusal, match="S841"):
        prepare(make_plan(models.gpt2(), ROW.format(f"{needed - 1}B")), BATCHES[0])


@pytest.mark.parametrize("rows, mesh", [("zero(stage=3, over=dp)", "dp=2")])
def test_chosen_operators_train_as_the_original(threads: Threads, rows: str, mesh: str) -> None:
    """Layers with chosen operators train as the original under ZeRO."""
    assert_proven(
        threads, make_plan(models.gpt2(dropout=0.1), ROW.format("400KiB") + rows, mesh), BATCHES
    )


class Chunked(nn.Module):
    """A product whose parts are written one by one, as in torch's recurrent cells."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the product of the parts, and no state."""
        first, second, third = self.up(x).unsafe_chunk(3, -1)
        first.mul_(0.5)
        return first * second.sigmoid_() + third.tanh_(), None


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN, Chunked])
def test_a_saved_product_whose_parts_were_written_is_computed_again(kind: type[nn.Module]) -> None:
    """Parts by `unsafe_chunk` count their writes themselves: gradients equal the plain ones."""
    torch.manual_seed(0)
    plain = (kind() if kind is Chunked else kind(8, 8, batch_first=True)).double()
    recomputed = copy.deepcopy(plain)
    checkpoint(recomputed, ("linear",))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for module in (plain, recomputed):
        module(x)[0].square().sum().backward()
    for one, other in zip(recomputed.parameters(), plain.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)
