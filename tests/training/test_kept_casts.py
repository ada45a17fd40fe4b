"""Casts of weights serve a whole step where weights stay as they are, and no longer than that."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.passes.lower.build import build
from schedlang.runtime.launch.pool import Pool
from tests.proofs import planned

MICRO = 'pipeline(order="GPipe", micro=4)'


class Layers(nn.Module):
    """Two projections, of sizes that nothing else has, and a square as the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out.float().square().mean()


class Casts(TorchDispatchMode):
    """Counts casts to few bits, by the shape of what is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.shapes[tuple(out.shape)] += 1
        return out


def points(seed: int = 0) -> dict[str, Tensor]:
    """Eight rows."""
    return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))}


def program_of(rows: str, mesh: str = "") -> Any:
    """A program that is trained by plain gradient descent."""
    plan = planned(Layers(), rows, mesh, "dtype")
    return build(plan, points(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], 1))


def weights_cast(program: Any) -> list[int]:
    """How often a step casts each of the two weights."""
    with Casts() as counted:
        program.train_step(points())
    return [counted.shapes[shape] for shape in ((10, 6), (3, 10))]


@pytest.mark.parametrize("row", ["cast(bf16)", "cast(bf16, params=true)"])
@pytest.mark.parametrize("rest, times", [(MICRO, 1), ("{up,down} checkpoint()\n" + MICRO, 2)])
def test_a_weight_is_cast_once_a_step(row: str, rest: str, times: int) -> None:
    """However many microbatches there are; what runs again after the last forward casts again, so
    that no cast lies beside all gradients."""
    program = program_of(f"{row}\n{rest}")
    for _ in range(2):
        assert weights_cast(program) == [times, times]


def _gathered(rank: int) -> list[int]:
    program = program_of(f"cast(bf16)\nzero(stage=3, over=dp)\n{MICRO}", "dp=2")
    return weights_cast(program)


def test_what_is_gathered_is_cast_for_each_use(pool: Pool) -> None:
    """A cast that outlived the parameter would be a copy of what was freed."""
    for found in pool.run(_gathered, 2, 0):
        assert found == [4, 4]


@pytest.mark.parametrize("row", ["cast(bf16)", "cast(bf16, params=true)"])
def test_each_step_casts_the_weights_that_it_has(row: str) -> None:
    """Gradients of a second step are those of the weights that the first one made."""
    program = program_of(f"{row}\n{MICRO}")
    program.train_step(points())
    other = program_of(f"{row}\n{MICRO}")
    other.load_state_dict(program.state_dict())
    program.train_step(points(1)), other.train_step(points(1))
    fresh = program.gradients()
    assert all(torch.equal(grad, fresh[name]) for name, grad in other.gradients().items())


def test_microbatches_add_up_in_the_stored_dtype() -> None:
    """As a loop over microbatches in which each casts by itself, to the last bit."""
    program = program_of(f"cast(bf16)\n{MICRO}")
    program.train_step(points())
    module = Layers()
    for part in points()["x"].chunk(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(part)
        (loss / 4).backward()
    for name, grad in program.gradients().items():
        assert torch.equal(grad, module.get_parameter(name).grad), name


def test_a_step_that_fails_keeps_nothing() -> None:
    """The next use of autocast, of whoever, casts anew."""
    program = program_of(f"cast(bf16)\n{MICRO}")
    program.train_step(points())
    handle = program.module.down.register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="stop"):
        program.train_step(points())
    handle.remove()
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0
    assert weights_cast(program) == [1, 1]


def _fail(*unused: object) -> None:
    raise RuntimeError("stop")
