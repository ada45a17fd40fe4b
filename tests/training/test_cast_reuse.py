"""Reuse of cast weights: once per step where weights do not change, and no longer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.passes.lower.build import build
from schedlang.runtime.storage.offloaded_gradients import in_backward
from tests.engine import Threads
from tests.proofs import make_plan

CAST_ALL = "cast(bf16, params=true)"
MICRO = 'pipeline(order="GPipe", micro=4)'


class Layers(nn.Module):
    """Two projections of distinct sizes, and a mean of squares as the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(x)))
        return output.float().square().mean()


class CastCounter(TorchDispatchMode):
    """Counts casts to bf16 by the shape of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.shapes[tuple(result.shape)] += 1
        return result


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Return eight rows."""
    return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))}


def build_program(rows: str, mesh: str = "") -> Any:
    """Build a program that trains by SGD."""
    plan = make_plan(Layers(), rows, mesh, "dtype")
    return build(plan, batch(), optimizer=lambda named: torch.optim.SGD([p for _, p in named], 1))


def weights_cast(program: Any) -> list[int]:
    """Return how often a step casts each of the two weights."""
    with CastCounter() as counted:
        program.train_step(batch())
    return [counted.shapes[shape] for shape in ((10, 6), (3, 10))]


@pytest.mark.parametrize("rest, times", [(MICRO, 1), ("{up,down} checkpoint()\n" + MICRO, 2)])
def test_a_weight_is_cast_once_a_step(rest: str, times: int) -> None:
    """Independent of the number of microbatches; recomputation after the last forward casts again,
    so that no cast is stored beside all gradients."""
    program = build_program(f"{CAST_ALL}\n{rest}")
    for _ in range(2):
        assert weights_cast(program) == [times, times]


def test_autocast_casts_as_torchs_does() -> None:
    """Once per forward, however often it uses a weight."""

    class Twice(Layers):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.down(self.up(x)) + self.down(self.up(-x))
            return output.float().square().mean()

    plan = make_plan(Twice(), "cast(bf16)\n" + MICRO, "", "dtype")
    assert weights_cast(build(plan, batch())) == [4, 4]


def test_gradients_do_not_pile_up() -> None:
    """Backward accumulates each weight's gradient at once, in later microbatches too."""
    program, events = build_program(f"{CAST_ALL}\n{MICRO}"), list[str]()
    module = program.module
    for name, parameter in module.named_parameters():
        hook = in_backward(lambda _, name=name: events.append(name))
        parameter.register_post_accumulate_grad_hook(hook)
    module.up.register_full_backward_hook(lambda *_: events.append("backward of up"))
    program.train_step(batch())
    down_names = ["down.weight", "down.bias"]
    count = len(events) // 4
    for start in range(0, len(events), count):
        step = events[start : start + count]
        assert set(step[:2]) == set(down_names) and "backward of up" in step[2:], step


@pytest.mark.parametrize(
    "rows, mesh, keeps",
    [
        ("", "", True),
        ("zero(stage=1, over=dp)", "dp=2", True),
        ("zero(stage=3, over=dp)", "dp=2", False),
        ("up offload(parameters)", "", False),
    ],
)
def test_what_is_gathered_or_fetched_is_cast_for_each_use(
    threads: Threads, rows: str, mesh: str, keeps: bool
) -> None:
    """A cast that outlives its parameter would be a copy of what was freed."""
    kept = threads.run(keeps_casts, 2 if mesh else 1, f"{CAST_ALL}\n{rows}", mesh)
    assert set(kept) == {keeps}


def keeps_casts(rows: str, mesh: str) -> bool:
    region = build_program(rows, mesh).assembly.region
    region.begin_step()
    try:
        return region.casts is not None
    finally:
        region.end_step()


@pytest.mark.parametrize("row", ["cast(bf16)", "cast(bf16, params=true)"])
def test_each_step_casts_the_weights_that_it_has(row: str) -> None:
    """The second step computes gradients of the weights that the first one updated."""
    program = build_program(f"{row}\n{MICRO}")
    program.train_step(batch())
    loaded = build_program(f"{row}\n{MICRO}")
    loaded.load_state_dict(program.state_dict())
    program.train_step(batch(1)), loaded.train_step(batch(1))
    fresh = program.gradients()
    assert fresh and fresh.keys() == loaded.gradients().keys()
    assert all(torch.equal(grad, fresh[name]) for name, grad in loaded.gradients().items())


def test_microbatches_add_up_in_the_stored_dtype() -> None:
    """As a loop over microbatches in which each casts by itself, bit by bit."""
    program = build_program(f"{CAST_ALL}\n{MICRO}")
    program.train_step(batch())
    module = Layers()
    for part in batch()["x"].chunk(4):
        cast_weights = {n: p.to(torch.bfloat16) for n, p in module.named_parameters()}
        loss = torch.func.functional_call(module, cast_weights, (part.to(torch.bfloat16),))
        (loss / 4).backward()
    for name, grad in program.gradients().items():
        assert torch.equal(grad, module.get_parameter(name).grad), name


def test_a_step_that_fails_keeps_nothing() -> None:
    """The next step casts anew, and so does a direct call of the module."""
    program = build_program(f"{CAST_ALL}\n{MICRO}")
    program.train_step(batch())
    handle = program.module.down.register_forward_hook(raise_error)
    with pytest.raises(RuntimeError, match="stop"):
        program.train_step(batch())
    handle.remove()
    assert program.assembly.region.casts is None
    assert weights_cast(program) == [1, 1]


def raise_error(*unused: object) -> None:
    raise RuntimeError("stop")
