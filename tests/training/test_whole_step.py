"""Tests of steps on whole parameters: Muon, Adafactor, LAMB and a Shampoo, on parts of matrices."""

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
from tests.proofs import adamw, assert_near, assert_same, planned, sequential, steps

Named = Iterable[tuple[str, nn.Parameter]]


class Net(nn.Module):
    """Matrices of odd sizes, without vectors: Muon takes no others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 9, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.pair = nn.Linear(9, 2, bias=False)  # one row on each rank, as columns have one

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
    """A step of the length of the tensor (You et al. 2020), without its moments."""

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
                left = self.state[p].setdefault("left", 0.1 * eye)
                left += p.grad @ p.grad.T
                p.sub_(group["lr"] * torch.linalg.solve(left, p.grad))


class Together(torch.optim.Optimizer):
    """Looks at the norm of all gradients."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(0.05 * p.grad / norm)


def muon(named: Named) -> torch.optim.Optimizer:
    """Torch's own."""
    return torch.optim.Muon([p for _, p in named], lr=0.02)


def adafactor(named: Named) -> torch.optim.Optimizer:
    """Torch's own: rows and columns of second moments."""
    return torch.optim.Adafactor([p for _, p in named], lr=0.02)


class Mixed(torch.optim.Optimizer):
    """Steps of the length of the tensor in the blocks, plain ones elsewhere: groups by name."""

    def __init__(self, named: Named) -> None:
        given = list(named)
        body = [p for name, p in given if name.startswith("blocks.")]
        rest = [p for name, p in given if not name.startswith("blocks.")]
        super().__init__([{"params": body, "whole": True}, {"params": rest, "whole": False}], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.05 * p.grad * (p.norm() / p.grad.norm() if group["whole"] else 1.0))


class Biased(torch.optim.Optimizer):
    """Matrices by elements; the gradient of a vector is divided by its norm."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(0.05 * (p.grad / p.grad.norm() if p.dim() == 1 else p.grad))


MAKE = {"muon": muon, "adafactor": adafactor, "lamb": Lamb, "shampoo": Shampoo, "mixed": Mixed}
TP = "blocks.*.up shard(col, over=tp)\nblocks.*.down shard(row, over=tp)\n"


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 6, generator=generator, dtype=torch.float64)}


BATCHES = [_batch(seed) for seed in range(3)]


def test_what_an_optimizer_looks_at() -> None:
    """Elements, tensors, or all of them, is found out by trying."""
    assert is_elementwise(adamw) and is_tensorwise(adamw)
    for name, make in MAKE.items():
        dims = {"blocks.0.up.weight": 2, "embed.weight": 2} if name == "mixed" else SAMPLE_DIMS
        assert not is_elementwise(make, dims) and is_tensorwise(make, dims)
    assert not is_elementwise(Together) and not is_tensorwise(Together)


class Bounded(torch.optim.SGD):
    """Bounds the norm of all gradients in its own step, which small ones never reach."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], 0.05)

    def step(self, closure: Any = None) -> Any:
        """Bound, and step."""
        every = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(every, 50.0)
        return super().step(closure)


def hooked(named: Named) -> torch.optim.Optimizer:
    """Torch's own, with the same bound in a hook of its step."""
    made = torch.optim.SGD([p for _, p in named], lr=0.05)

    def bound(optimizer: Any, *unused: object) -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 50.0)

    made.register_step_pre_hook(bound)
    return made


def test_a_bound_in_the_step_is_found() -> None:
    """Whatever its size is, and whoever steps, an optimizer for each tensor too."""
    for make in (lambda named: Bounded(named), hooked):
        assert not is_elementwise(make) and not is_tensorwise(make)
        assert not is_tensorwise(make, in_turns=False)
    assert all(is_tensorwise(make, in_turns=False) for make in MAKE.values())


def some(named: Named) -> torch.optim.Optimizer:
    """Steps on what is chosen by name: the blocks, and no others."""
    return Lamb((name, p) for name, p in named if name.startswith("blocks."))


def test_names_choose_what_is_stepped_on(threads: Threads) -> None:
    """A function that takes none but the model's own names: the rest stays as it was."""
    plan = planned(Net().double(), TP + "zero(stage=1, over=dp)", "dp=2, tp=2")
    found = threads.run(steps, 4, plan, BATCHES, some, 0.5, {})[0]
    assert_near(found, sequential(Net().double(), BATCHES, some, clip=0.5))


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    "rows, mesh",
    [
        (TP + "zero(stage=1, over=dp)", "dp=2, tp=2"),
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
    """Split, sliced, in stages: parameters, gradients and the optimizer's state after three steps
    are those of the plain loop."""
    plan = planned(Net().double(), rows, mesh)
    found = threads.run(steps, 4, plan, BATCHES, MAKE[make], 0.5, {})[0]
    assert_near(found, sequential(Net().double(), BATCHES, MAKE[make], clip=0.5))


def _again(plan: Any, folder: str, make: Any) -> dict[str, Tensor]:
    """State after two steps, saved and loaded between them, or not where there is no folder."""
    program = build(plan, BATCHES[0], optimizer=make)
    program.train_step(BATCHES[0])
    if folder:
        program.save(folder)
        program = build(plan, BATCHES[0], optimizer=make)
        program.load(folder)
    program.train_step(BATCHES[1])
    return program.state_dict()


def test_it_goes_on_from_a_checkpoint(threads: Threads, tmp_path: Path) -> None:
    """State in parts and state that all ranks share are saved and loaded."""
    plan = planned(Net().double(), TP, "tp=2")
    plain, loaded = (
        threads.run(_again, 2, plan, folder, adafactor)[0] for folder in ("", str(tmp_path / "c"))
    )
    assert_same(loaded, plain)


def test_what_looks_at_all_is_refused(threads: Threads) -> None:
    """An optimizer that looks at all parameters together cannot be given some at a time (S622)."""
    plan = planned(Net().double(), TP, "tp=2")
    with pytest.raises(Refusal, match="S622"):
        threads.run(steps, 2, plan, BATCHES, Together, None, {})
    rows = 'blocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
    plan = planned(Net().double(), rows, "pp=2")  # all is whole, and each stage has its own norm
    with pytest.raises(Refusal, match="S622.*looks at all"):
        threads.run(steps, 2, plan, BATCHES, hooked, None, {})


def test_rates_by_the_sizes_of_parts_are_refused(threads: Threads) -> None:
    """A rate by the width of a weight is another one for what a rank holds of it (S622)."""

    def by_width(named: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.1 / p.shape[-1]} for _, p in named])

    plan = planned(Net().double(), TP, "tp=2")
    with pytest.raises(Refusal, match="(?s)S622.*lr 0.0125 among all"):
        threads.run(steps, 2, plan, BATCHES[:1], by_width, None, {})


def test_settings_by_place_are_refused(threads: Threads) -> None:
    """The first two of a stage's parameters are others than the first two of all (S622)."""
    rows = 'blocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'

    def halves(named: Named) -> torch.optim.Optimizer:
        every = [p for _, p in named]
        return torch.optim.SGD([{"params": every[:2], "lr": 0.1}, {"params": every[2:]}], lr=0.2)

    plan = planned(Net().double(), rows, "pp=2")
    with pytest.raises(Refusal, match="S622.*`blocks.1.up.weight` follow"):
        threads.run(steps, 2, plan, BATCHES[:1], halves, None, {})


class Sorts(nn.Module):
    """Two layers with biases, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """A mean of squares."""
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss: Tensor = self.head(x).square().mean()
        return loss


def _scheduled(make: Any, rates: Any) -> Any:
    """The parameters that a plain loop leaves."""
    model = Sorts()
    optimizer = make(model.named_parameters())
    scheduler = rates(optimizer)
    for batch in BATCHES:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
        scheduler.step()
    return model.state_dict()


def test_a_vector_that_is_looked_at_whole(threads: Threads) -> None:
    """Matrices are stepped on by elements, biases are not: it is found by trying both."""
    rows = "blocks.0 shard(col, output=R, over=tp)"

    def body() -> Any:
        program = build(planned(Sorts(), rows, "tp=2"), BATCHES[0], optimizer=Biased)
        for batch in BATCHES:
            program.train_step(batch)
        return program.state_dict()

    def always(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    found = threads.run(body, 2)[0]
    for name, value in _scheduled(Biased, always).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_groups_of_other_stages_keep_their_places(threads: Threads) -> None:
    """A scheduler with a number for each group fits on a stage that has some of them."""

    def by_sort(named: Named) -> torch.optim.Optimizer:
        held: dict[str, list[nn.Parameter]] = {"head": [], "blocks.0": [], "blocks.1": []}
        for name, p in named:
            held[next(key for key in held if name.startswith(key))].append(p)
        return torch.optim.SGD([{"params": some} for some in held.values() if some], lr=0.1)

    def rates(optimizer: torch.optim.Optimizer) -> Any:
        each = [lambda step, by=by: by**step for by in (0.3, 0.6, 0.9)]
        return torch.optim.lr_scheduler.LambdaLR(optimizer, each)

    def body() -> Any:
        rows = 'blocks pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'
        program = build(planned(Sorts(), rows, "pp=2"), BATCHES[0], optimizer=by_sort)
        assert program.optimizer is not None
        scheduler = rates(program.optimizer)
        for batch in BATCHES:
            program.train_step(batch)
            scheduler.step()
        return program.state_dict()

    found = threads.run(body, 2)[0]
    for name, value in _scheduled(by_sort, rates).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
