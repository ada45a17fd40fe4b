"""Every schedule of `examples/` on simulated devices: as on ranks of the CPU, without a race."""

from __future__ import annotations

import math

import pytest
import torch

from schedlang.testing.accelerator import unavailable
from tests.accelerator.exampled import EXAMPLES, RUN, Example, on_ranks

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there"),
]

SINGLE = {"llama/kernels.sched": 2e-2}  # in bfloat16, and how near then
LEFT = {"llama/megatron.sched", "llama/too_many.sched"}


def test_none_is_forgotten() -> None:
    """But for a library of steps, which others use, and one that is refused."""
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("**/*.sched")}
    assert {example.file for example in RUN} == files - LEFT


def test_compiled_regions() -> None:
    """In float32 regions are graphs, of which operators run one by one: nothing races in them."""
    bert = Example("bert/one_device.sched", 1)
    losses, _, _, where, _ = on_ranks(bert, "sim", exact=False)[0]
    wanted = on_ranks(bert, "cpu", exact=False)[0][0]
    # each device draws masks of its own
    assert where == "sim:0" and losses == pytest.approx(wanted, rel=2e-2)


@pytest.mark.parametrize("example", RUN, ids=str)
def test_as_on_a_cpu(example: Example) -> None:
    """Losses, norms and parameters of three steps; copies of one part are equal."""
    near = SINGLE.get(example.file, 1e-8)
    exact = example.file not in SINGLE
    losses, norms, parameters, *_ = on_ranks(example, "cpu", exact)[0]
    for rank, (mine, told, state, where, apart) in enumerate(on_ranks(example, "sim", exact)):
        assert where == f"sim:{rank}" and apart == 0.0 and all(map(math.isfinite, mine))
        assert mine == pytest.approx(losses, rel=near) and told == pytest.approx(norms, rel=near)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=near, atol=near, msg=name)
