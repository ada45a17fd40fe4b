"""Each schedule of `examples/` on simulated devices trains as on the CPU, without a race."""

from __future__ import annotations

import math

import pytest
import torch

from schedlang.testing.accelerator import unavailable
from tests.accelerator.example_runs import EXAMPLE_RUNS, EXAMPLES, Example, train_on_ranks

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there"),
]

FLOAT32 = {"llama/kernels.sched": 2e-2}  # in bfloat16, and the tolerance for it
NOT_RUN = {"llama/megatron.sched", "llama/too_many.sched"}


def test_none_is_forgotten() -> None:
    """All schedules run, except a library of steps that others use and one that is refused."""
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("**/*.sched")}
    assert {example.file for example in EXAMPLE_RUNS} == files - NOT_RUN


def test_compiled_regions() -> None:
    """In float32 regions are graphs, whose operators run one by one: no race in them."""
    bert = Example("bert/one_device.sched", 1)
    losses, _, _, computed_on, _ = train_on_ranks(bert, "sim", exact=False)[0]
    expected = train_on_ranks(bert, "cpu", exact=False)[0][0]
    # each device draws masks of its own
    assert computed_on == "sim:0" and losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("example", EXAMPLE_RUNS, ids=str)
def test_as_on_a_cpu(example: Example) -> None:
    """Losses, norms and parameters of three steps; copies of one part are equal."""
    tolerance = FLOAT32.get(example.file, 1e-8)
    exact = example.file not in FLOAT32
    losses, norms, parameters, *_ = train_on_ranks(example, "cpu", exact)[0]
    for rank, (actual, actual_norms, state, computed_on, replica_error) in enumerate(
        train_on_ranks(example, "sim", exact)
    ):
        assert (
            computed_on == f"sim:{rank}"
            and replica_error == 0.0
            and all(map(math.isfinite, actual))
        )
        assert actual == pytest.approx(losses, rel=tolerance) and actual_norms == pytest.approx(
            norms, rel=tolerance
        )
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance, msg=name)
