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


def test_none_is_forgotten() -> None:
    """But for a library, and one that is refused."""
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("**/*.sched")}
    left = {"llama/megatron.sched", "llama/too_many.sched"}
    assert {example.file for example in RUN} == files - left


@pytest.mark.parametrize("example", RUN, ids=str)
def test_as_on_a_cpu(example: Example) -> None:
    """Losses, norms and parameters of three steps; copies of one part are equal."""
    exact = example.file != "llama/kernels.sched"  # which computes in bfloat16
    near = 1e-8 if exact else 2e-2
    losses, norms, parameters, *_ = on_ranks(example, "cpu", exact)[0]
    for rank, (mine, told, state, where, apart) in enumerate(on_ranks(example, "sim", exact)):
        assert where == f"sim:{rank}" and apart == 0.0 and all(map(math.isfinite, mine))
        assert mine == pytest.approx(losses, rel=near) and told == pytest.approx(norms, rel=near)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=near, atol=near, msg=name)
