"""Single operators kept: the best of all sets, the same gradients, an error for another way."""

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
from tests.proofs import planned, proven

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
ROW = "transformer.h.*  checkpoint(plan=pareto, memory={})\n"


def drawn(count: int, seed: int) -> ModuleCost:
    """A module with some operators, in small whole numbers."""
    draw = random.Random(seed)
    made = []
    for place in range(count):
        size = draw.randint(1, 6)
        saved = size * draw.randint(0, 1)
        key = (f"aten::{draw.choice('ab')}", place)
        made.append(Operator(key, draw.randint(1, 9), size, saved))
    entered = draw.randint(0, 3)
    saved = entered + sum(one.saved for one in made) + draw.randint(0, 3)
    return ModuleCost(0.0, saved, entered, tuple(made), draw.randint(0, 5))


def sets(operators: tuple[Operator, ...]) -> Iterator[tuple[Operator, ...]]:
    """All sets of operators."""
    for count in range(len(operators) + 1):
        yield from itertools.combinations(operators, count)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_no_set_beats_the_frontier(count: int) -> None:
    """For every number of bytes the frontier repeats as little as the best of all sets, and what
    it says of its own sets is so."""
    for seed in range(8):
        operators = drawn(count, seed).operators
        total = sum(one.work for one in operators)
        found = pareto_front(operators)
        for size, work, kept in found:
            chosen = [operators[place] for place in kept]
            assert size == sum(one.bytes for one in chosen)
            assert work == total - sum(one.work for one in chosen)
        known = [(sum(o.bytes for o in s), total - sum(o.work for o in s)) for s in sets(operators)]
        for size, _ in known:
            best = min(work for other, work in known if other <= size)
            assert best == min(work for other, work, _ in found if other <= size)


def ways(cost: ModuleCost) -> list[tuple[int, int, float]]:
    """Held, during and again of all that can be done with one module."""
    found = [(cost.saved, 0, 0.0)]
    for kept in sets(cost.operators):
        rest = sum(one.work for one in cost.operators) - sum(one.work for one in kept)
        inside = sum(one.saved for one in kept)
        held = cost.input + sum(one.bytes for one in kept)
        found.append((held, cost.saved - inside, cost.fixed + rest))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_for_a_chain_is_better(seed: int) -> None:
    """For every limit the choices fit at all times and repeat least among all there are; one byte
    less than `needed` holds none."""
    chain = [drawn(count, 10 * seed + count) for count in (2, 3, 2)]
    known = []
    for chosen in itertools.product(*map(ways, chain)):
        before = most = 0
        for held, during, _ in chosen:
            most, before = max(most, before + held + during), before + held
        known.append((most, sum(again for _, _, again in chosen)))
    least = min(most for most, _ in known)
    # a module that keeps more than all it saves is never better, and so not among the choices
    assert min_memory(chain) == least and choose_saved(chain, least - 1) is None
    for memory in range(least, max(most for most, _ in known) + 1):
        found = choose_saved(chain, memory)
        assert found is not None
        before = 0
        for choice in found:
            assert before + choice.held + choice.during <= memory
            before += choice.held
        best = min(again for most, again in known if most <= memory)
        assert sum(choice.again for choice in found) == best


def test_a_long_chain_is_cheap_and_fits() -> None:
    """Of many operators and layers the frontier is told apart in steps: it still fits, and more
    memory is never slower."""
    draw = random.Random(0)
    made = tuple(
        Operator((f"o{k}", 0), draw.randint(1, 10**9), draw.randint(1, 10**6), 0) for k in range(30)
    )
    cost = ModuleCost(0.0, sum(one.bytes for one in made), 10, made)
    chain, found = [cost] * 9, []
    for memory in (*range(min_memory(chain), cost.saved * 9, cost.saved * 4), cost.saved * 9):
        chosen = choose_saved(chain, memory)
        assert chosen is not None and sum(one.held for one in chosen) <= memory
        found.append(sum(one.again for one in chosen))
    assert found == sorted(found, reverse=True) and found[-1] == 0
    assert len(module_choices(cost)) < 200


def counted_operators(model: nn.Module) -> OperatorCosts:
    """What could be kept of the blocks of a stack."""
    menu = OperatorCosts(2)
    x, mask = batch()
    with counting_costs(menu, model, ["blocks.0", "blocks.1"]):
        model(x.requires_grad_(), mask=mask)
    return menu


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name
        self.names[name] = self.names.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_any_set_gives_the_same_gradients() -> None:
    """Whatever is kept, output and gradients are the untouched module's bit by bit, dropout
    included; and matrix products and attention that are kept do not run again."""
    torch.manual_seed(0)
    plain = Stack().double()
    names = [one.key for one in counted_operators(plain).operators(0)]
    assert ("attention", 0) in names and ("aten::mm", 0) in names
    expected = gradients(plain)
    draw = random.Random(1)
    for size in (1, 3, 5, len(names)):
        kept = draw.sample(names, size)
        ours = copy.deepcopy(plain)
        for block in ours.blocks:
            checkpoint(block, chosen=kept)
        with Counted() as seen:
            found = gradients(ours)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), kept
        with Counted() as before:
            gradients(plain)
        again = 2 * sum(name == "aten::addmm" and (name, k) not in kept for name, k in names)
        assert seen.names["aten::addmm"] == before.names["aten::addmm"] + again


def test_a_kept_result_that_is_written_into() -> None:
    """What was kept and then written into is made again, never a wrong gradient; two backwards
    through one graph find the same."""

    class Writing(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.writes = writes

        def forward(self, x: Tensor) -> Tensor:
            made = x.exp()
            y = made.tanh().sin()
            return y + made.detach().mul_(2.0) if self.writes else y

    x = torch.ones(3, requires_grad=True)
    (expected,) = torch.autograd.grad(Writing(False)(x).sum(), x)
    for writes in (False, True):
        module = Writing(writes)
        checkpoint(module, chosen=[("aten::exp", 0)])
        out = module(x).sum()
        first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second) and torch.equal(first, expected)


def test_another_way_is_an_error() -> None:
    """A second run that calls other operators raises: it never takes another call's result."""

    turns = itertools.count(1)  # outside of the module, whose own counts a second run begins with

    class Turning(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.exp().sin() if next(turns) % 2 else x.sin().exp()
            return x.exp().tanh()

    module = Turning()
    checkpoint(module, chosen=[("aten::exp", 1)])
    out = module(torch.ones(3, requires_grad=True))
    with pytest.raises(
        RuntimeError, match="ran differently from the forward: `aten::sin`, not `aten::exp`"
    ):
        out.sum().backward()


def test_a_plan_keeps_products_and_repeats_the_rest() -> None:
    """Of a transformer's layer what costs most per byte is kept first: matrix products, and never
    a norm or an activation before them; less memory, more work again."""
    plan = planned(models.gpt2(dropout=0.1), ROW.format("400KiB"))
    made = prepare(plan, BATCHES[0])
    ((_, chosen),) = made.chains[plan.actions[0].sites]
    costs = costs_of(CostSubject(plan, made.traced, made.staged, BATCHES[0]), plan.actions[0].sites)
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
    """Each plan has a note of what it does with which modules: operators, regions, a budget."""
    said = {}
    for name in ("pareto", "rotor", "dtr"):
        row = f"transformer.h.*  checkpoint(plan={name}, memory=400KiB)"
        notes = account(planned(models.gpt2(), row), BATCHES[0], memory=True).notes
        (said[name],) = [n for n in notes if n.startswith("`checkpoint` of transformer.h.0 to ")]
    assert "recomputed, of which are kept: " in said["pareto"] and " addmm" in said["pareto"]
    assert "operations again" in said["pareto"] and "1 kept whole" in said["pareto"]
    assert "1 kept whole, 3 in 3 regions" in said["rotor"]
    assert "at most 409600 bytes, dropped and made again" in said["dtr"]


def test_too_little_memory_is_refused() -> None:
    """S841 says how much is needed, and that is enough."""
    with pytest.raises(Refusal) as caught:
        prepare(planned(models.gpt2(), ROW.format("20KiB")), BATCHES[0])
    need = int(caught.value.render().split("each microbatch needs ")[1].split()[0])
    prepare(planned(models.gpt2(), ROW.format(f"{need}B")), BATCHES[0])
    with pytest.raises(Refusal, match="S841"):
        prepare(planned(models.gpt2(), ROW.format(f"{need - 1}B")), BATCHES[0])


@pytest.mark.parametrize("rows, mesh", [("zero(stage=3, over=dp)", "dp=2")])
def test_chosen_operators_train_as_the_original(threads: Threads, rows: str, mesh: str) -> None:
    """Layers whose operators are chosen by a plan train as the original, sliced."""
    proven(threads, planned(models.gpt2(dropout=0.1), ROW.format("400KiB") + rows, mesh), BATCHES)
