"""Casts of weights serve a whole step where weights stay as they are, and no longer than that."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import planned

WHOLE = "cast(bf16, params=true)"
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


@pytest.mark.parametrize("rest, times", [(MICRO, 1), ("{up,down} checkpoint()\n" + MICRO, 2)])
def test_a_weight_is_cast_once_a_step(rest: str, times: int) -> None:
    """However many microbatches there are; what runs again after the last forward casts again, so
    that no cast lies beside all gradients."""
    program = program_of(f"{WHOLE}\n{rest}")
    for _ in range(2):
        assert weights_cast(program) == [times, times]


def test_autocast_casts_as_torchs_does() -> None:
    """Once a forward, however often it uses a weight."""

    class Twice(Layers):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(self.up(x)) + self.down(self.up(-x))
            return out.float().square().mean()

    plan = planned(Twice(), "cast(bf16)\n" + MICRO, "", "dtype")
    assert weights_cast(build(plan, points())) == [4, 4]


def test_gradients_do_not_pile_up() -> None:
    """Each weight has its gradient when backward has gone past it, in later microbatches too."""
    program, seen = program_of(f"{WHOLE}\n{MICRO}"), list[str]()
    module = program.module
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    module.up.register_full_backward_hook(lambda *_: seen.append("backward of up"))
    program.train_step(points())
    one = ["down.weight", "down.bias"]
    each = len(seen) // 4
    for start in range(0, len(seen), each):
        step = seen[start : start + each]
        assert set(step[:2]) == set(one) and "backward of up" in step[2:], step


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
    """A cast that outlived the parameter would be a copy of what was freed."""
    found = threads.run(_keeps, 2 if mesh else 1, f"{WHOLE}\n{rows}", mesh)
    assert set(found) == {keeps}


def _keeps(rows: str, mesh: str) -> bool:
    region = program_of(rows, mesh).assembly.region
    region.begin_step()
    try:
        return region.casts is not None
    finally:
        region.end_step()


@pytest.mark.parametrize("row", ["cast(bf16)", "cast(bf16, params=true)"])
def test_each_step_casts_the_weights_that_it_has(row: str) -> None:
    """Gradients of a second step are those of the weights that the first one made."""
    program = program_of(f"{row}\n{MICRO}")
    program.train_step(points())
    other = program_of(f"{row}\n{MICRO}")
    other.load_state_dict(program.state_dict())
    program.train_step(points(1)), other.train_step(points(1))
    fresh = program.gradients()
    assert fresh and fresh.keys() == other.gradients().keys()
    assert all(torch.equal(grad, fresh[name]) for name, grad in other.gradients().items())


def test_microbatches_add_up_in_the_stored_dtype() -> None:
    """As a loop over microbatches in which each casts by itself, to the last bit."""
    program = program_of(f"{WHOLE}\n{MICRO}")
    program.train_step(points())
    module = Layers()
    for part in points()["x"].chunk(4):
        low = {n: p.to(torch.bfloat16) for n, p in module.named_parameters()}
        loss = torch.func.functional_call(module, low, (part.to(torch.bfloat16),))
        (loss / 4).backward()
    for name, grad in program.gradients().items():
        assert torch.equal(grad, module.get_parameter(name).grad), name


def test_a_step_that_fails_keeps_nothing() -> None:
    """The next step casts anew, and so does who calls the module itself."""
    program = program_of(f"{WHOLE}\n{MICRO}")
    program.train_step(points())
    handle = program.module.down.register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="stop"):
        program.train_step(points())
    handle.remove()
    assert program.assembly.region.casts is None
    assert weights_cast(program) == [1, 1]


def _fail(*unused: object) -> None:
    raise RuntimeError("stop")
