"""Optimizers that need full tensors (Muon, Adafactor, LAMB, a Shampoo), on parts of matrices."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.runtime.optim.full_tensor_step import SAMPLE_DIMS, is_elementwise, is_tensorwise
from tests.engine import Threads
from tests.proofs import (
    adamw,
    assert_near,
    assert_same,
    make_plan,
    train_on_ranks,
    train_sequential,
    train_steps,
)

Named = Iterable[tuple[str, nn.Parameter]]


class Net(nn.Module):
    """Matrices of odd sizes, without vectors, which Muon does not take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 9, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.pair = nn.Linear(9, 2, bias=False)  # one row on each rank, and one column

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return (self.pair(x) ** 2).mean()


class Block(nn.Module):
    """Up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(9, 8, bias=False)
        self.down = nn.Linear(8, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Lamb(torch.optim.Optimizer):
    """An update scaled by the norm of its tensor (You et al. 2020), without its moments."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Shampoo(torch.optim.Optimizer):
    """One preconditioner of rows, kept from step to step (Gupta et al. 2018)."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                eye = torch.eye(p.shape[0], dtype=p.dtype)
                preconditioner = self.state[p].setdefault("left", 0.1 * eye)
                preconditioner += p.grad @ p.grad.T
                p.sub_(group["lr"] * torch.linalg.solve(preconditioner, p.grad))


class GlobalNorm(torch.optim.Optimizer):
    """Reads the norm of all gradients."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(0.05 * p.grad / norm)


def muon(named: Named) -> torch.optim.Optimizer:
    """Return torch's Muon."""
    return torch.optim.Muon([p for _, p in named], lr=0.02)


def adafactor(named: Named) -> torch.optim.Optimizer:
    """Return torch's Adafactor: rows and columns of second moments."""
    return torch.optim.Adafactor([p for _, p in named], lr=0.02)


class MixedGroups(torch.optim.Optimizer):
    """Updates scaled by the norm in the blocks, plain ones elsewhere: groups by name."""

    def __init__(self, named: Named) -> None:
        pairs = list(named)
        body = [p for name, p in pairs if name.startswith("blocks.")]
        others = [p for name, p in pairs if not name.startswith("blocks.")]
        super().__init__([{"params": body, "whole": True}, {"params": others, "whole": False}], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.05 * p.grad * (p.norm() / p.grad.norm() if group["whole"] else 1.0))


class VectorNorm(torch.optim.Optimizer):
    """Elementwise for matrices; divides the gradient of a vector by its norm."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(0.05 * (p.grad / p.grad.norm() if p.dim() == 1 else p.grad))


OPTIMIZERS = {
    "muon": muon,
    "adafactor": adafactor,
    "lamb": Lamb,
    "shampoo": Shampoo,
    "mixed": MixedGroups,
}
TENSOR_ROWS = "blocks.*.up shard(col, over=tp)\nblocks.*.down shard(row, over=tp)\n"


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 6, generator=generator, dtype=torch.float64)}


BATCHES = [_batch(seed) for seed in range(3)]


def test_what_an_optimizer_looks_at() -> None:
    """A trial finds whether it reads elements, tensors, or all of them."""
    assert is_elementwise(adamw) and is_tensorwise(adamw)
    for name, make in OPTIMIZERS.items():
        dims = {"blocks.0.up.weight": 2, "embed.weight": 2} if name == "mixed" else SAMPLE_DIMS
        assert not is_elementwise(make, dims) and is_tensorwise(make, dims)
    assert not is_elementwise(GlobalNorm) and not is_tensorwise(GlobalNorm)


class BoundedSgd(torch.optim.SGD):
    """Bounds the norm of all gradients in its own step; small gradients never reach the bound."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], 0.05)

    def step(self, closure: Any = None) -> Any:
        """Bound, and step."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 50.0)
        return super().step(closure)


def hooked_sgd(named: Named) -> torch.optim.Optimizer:
    """Return torch's SGD with the same bound in a hook of its step."""
    stepper = torch.optim.SGD([p for _, p in named], lr=0.05)

    def bound(optimizer: Any, *unused: object) -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 50.0)

    stepper.register_step_pre_hook(bound)
    return stepper


def test_a_trial_ends_at_the_first_step_that_differs() -> None:
    """An update by the norm of its matrix shows in one step of the whole and of its quarters."""
    steps: list[Tensor] = []

    class Counted(Lamb):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            steps.extend(p for group in self.param_groups for p in group["params"])
            super().step(closure)

    assert not is_elementwise(Counted)
    assert [tuple(p.shape) for p in steps] == [*[(2, 3)] * 4, (4, 6)]


def test_a_bound_in_the_step_is_found() -> None:
    """Of whatever size, and also with one optimizer for each tensor."""
    for make in (lambda named: BoundedSgd(named), hooked_sgd):
        assert not is_elementwise(make) and not is_tensorwise(make)
        assert not is_tensorwise(make, in_turns=False)
    assert all(is_tensorwise(make, in_turns=False) for make in OPTIMIZERS.values())


def blocks_only(named: Named) -> torch.optim.Optimizer:
    """Return an optimizer of the blocks' parameters, chosen by name."""
    return Lamb((name, p) for name, p in named if name.startswith("blocks."))


def test_names_choose_what_is_stepped_on(threads: Threads) -> None:
    """A function that selects by the model's own names: the others do not change."""
    plan = make_plan(Net().double(), TENSOR_ROWS + "zero(stage=1, over=dp)", "dp=2, tp=2")
    results = train_on_ranks(threads, plan, BATCHES, blocks_only, clip=0.5)
    assert_near(results, train_sequential(Net().double(), BATCHES, blocks_only, clip=0.5))


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize(
    "rows, mesh",
    [
        (TENSOR_ROWS + "zero(stage=1, over=dp)", "dp=2, tp=2"),
        (
            "blocks pipeline_split(over=pp)\nzero(stage=3, over=dp)\n"
            'pipeline(order="1F1B", micro=2)',
            "pp=2, dp=2",
        ),
    ],
)
def test_parts_are_updated_as_the_whole_is(
    threads: Threads, make: str, rows: str, mesh: str
) -> None:
    """Split, sliced, in stages: parameters, gradients and optimizer state after three steps equal
    those of the plain loop."""
    plan = make_plan(Net().double(), rows, mesh)
    results = train_on_ranks(threads, plan, BATCHES, OPTIMIZERS[make], clip=0.5)
    assert_near(results, train_sequential(Net().double(), BATCHES, OPTIMIZERS[make], clip=0.5))


def save_and_load(plan: Any, folder: str, make: Any) -> dict[str, Tensor]:
    """Return the state after two steps, saved and loaded between them if there is a folder."""
    program = build(plan, BATCHES[0], optimizer=make)
    program.train_step(BATCHES[0])
    if folder:
        program.save(folder)
        program = build(plan, BATCHES[0], optimizer=make)
        program.load(folder)
    program.train_step(BATCHES[1])
    return program.state_dict()


def test_it_goes_on_from_a_checkpoint(threads: Threads, tmp_path: Path) -> None:
    """Sharded state and shared state are saved and loaded."""
    plan = make_plan(Net().double(), TENSOR_ROWS, "tp=2")
    uninterrupted, loaded = (
        threads.run(save_and_load, 2, plan, folder, adafactor)[0]
        for folder in ("", str(tmp_path / "c"))
    )
    assert_same(loaded, uninterrupted)


def test_what_looks_at_all_is_refused(threads: Threads) -> None:
    """An optimizer that reads all parameters together cannot get some of them (S622)."""
    plan = make_plan(Net().double(), TENSOR_ROWS, "tp=2")
    with pytest.raises(Refusal, match="S622"):
        threads.run(train_steps, 2, plan, BATCHES, GlobalNorm, None, {})
    rows = 'blocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    plan = make_plan(Net().double(), rows, "pp=2")  # full tensors, a norm per stage
    with pytest.raises(Refusal, match="S622.*looks at all"):
        threads.run(train_steps, 2, plan, BATCHES, hooked_sgd, None, {})


def test_rates_by_the_sizes_of_parts_are_refused(threads: Threads) -> None:
    """A learning rate by the width of a weight would differ for a rank's part (S622)."""

    def by_width(named: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.1 / p.shape[-1]} for _, p in named])

    plan = make_plan(Net().double(), TENSOR_ROWS, "tp=2")
    with pytest.raises(Refusal, match="(?s)S622.*lr 0.0125 among all"):
        threads.run(train_steps, 2, plan, BATCHES[:1], by_width, None, {})


def test_settings_by_place_are_refused(threads: Threads) -> None:
    """The first two parameters of a stage are not the first two of the model (S622)."""
    rows = 'blocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'

    def halves(named: Named) -> torch.optim.Optimizer:
        parameters = [p for _, p in named]
        return torch.optim.SGD(
            [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}], lr=0.2
        )

    plan = make_plan(Net().double(), rows, "pp=2")
    with pytest.raises(Refusal, match="S622.*`blocks.1.up.weight` follow"):
        threads.run(train_steps, 2, plan, BATCHES[:1], halves, None, {})


class BiasedLayers(nn.Module):
    """Two layers with biases, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return a mean of squares."""
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss: Tensor = self.head(x).square().mean()
        return loss


def plain_loop(make: Any, rates: Any) -> Any:
    """Return the parameters after a plain loop with a scheduler."""
    model = BiasedLayers()
    optimizer = make(model.named_parameters())
    scheduler = rates(optimizer)
    for batch in BATCHES:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
        scheduler.step()
    return model.state_dict()


def test_a_vector_that_is_looked_at_whole(threads: Threads) -> None:
    """Matrices are updated by elements, biases as full tensors: both are tried."""
    rows = "blocks.0 shard(col, output=R, over=tp)"

    def body() -> Any:
        program = build(make_plan(BiasedLayers(), rows, "tp=2"), BATCHES[0], optimizer=VectorNorm)
        for batch in BATCHES:
            program.train_step(batch)
        return program.state_dict()

    def always(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    state = threads.run(body, 2)[0]
    for name, value in plain_loop(VectorNorm, always).items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_groups_of_other_stages_keep_their_places(threads: Threads) -> None:
    """A scheduler with a number for each group works on a stage that has some of them."""

    def by_sort(named: Named) -> torch.optim.Optimizer:
        sorts: dict[str, list[nn.Parameter]] = {"head": [], "blocks.0": [], "blocks.1": []}
        for name, p in named:
            sorts[next(key for key in sorts if name.startswith(key))].append(p)
        return torch.optim.SGD(
            [{"params": members} for members in sorts.values() if members], lr=0.1
        )

    def rates(optimizer: torch.optim.Optimizer) -> Any:
        schedules = [lambda step, factor=factor: factor**step for factor in (0.3, 0.6, 0.9)]
        return torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)

    def body() -> Any:
        rows = 'blocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
        program = build(make_plan(BiasedLayers(), rows, "pp=2"), BATCHES[0], optimizer=by_sort)
        assert program.optimizer is not None
        scheduler = rates(program.optimizer)
        for batch in BATCHES:
            program.train_step(batch)
            scheduler.step()
        return program.state_dict()

    state = threads.run(body, 2)[0]
    for name, value in plain_loop(by_sort, rates).items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
