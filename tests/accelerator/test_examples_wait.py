"""How often the host waits for its device in a step of each schedule of `examples/`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schedlang.testing.accelerator import spawn, unavailable
from tests.accelerator.example_runs import CASES, EXAMPLE_RUNS, Example, host_waits, model_waits
from tests.benchmarks.synchronisations import own_waits_of

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

# optimizer steps on the host need the gradients; two layers of experts that drop no tokens
NEEDED_WAITS = {"gpt2/memory.sched": 1, "mixtral/ep.sched": 2}


def cases() -> Iterator[object]:
    """Yield all examples; one runs with the ordinary tests: its kernel reads its masks."""
    for example in EXAMPLE_RUNS:
        marks = [] if example.file == "bert/one_device.sched" else [pytest.mark.deep]
        yield pytest.param(example, marks=marks, id=str(example))


@pytest.mark.parametrize("example", cases())
def test_for_the_loss_alone(example: Example) -> None:
    """A step of a dense model waits only if the loss is read, and then once, wherever batches are;
    lines at which the original model waits do not count."""
    model = set(spawn(model_waits, example, ranks=1, timeout=300)[0])
    needed = NEEDED_WAITS.get(example.file, 0)
    by_case = spawn(host_waits, example, ranks=example.ranks, timeout=600)[0]
    for (on_device, read_loss), steps in zip(CASES, by_case, strict=True):
        longest = max(own_waits_of(steps, model), key=len)
        assert len(longest) == needed + read_loss, (on_device, read_loss, longest)
