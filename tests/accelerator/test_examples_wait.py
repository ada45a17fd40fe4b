"""How often the host waits for its device in a step of each schedule of `examples/`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schedlang.testing.accelerator import spawn, unavailable
from tests.accelerator.exampled import CASES, RUN, Example, plainly, waits
from tests.benchmarks.synchronisations import own

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is there")

# steps on the host, which has to have the gradients; two layers of experts that drop nothing
MORE = {"gpt2/memory.sched": 1, "mixtral/ep.sched": 2}


def cases() -> Iterator[object]:
    """All, of which one runs with the ordinary tests: its kernel looks at its masks."""
    for example in RUN:
        marks = [] if example.file == "bert/one_device.sched" else [pytest.mark.deep]
        yield pytest.param(example, marks=marks, id=str(example))


@pytest.mark.parametrize("example", cases())
def test_for_the_loss_alone(example: Example) -> None:
    """Of a dense model not at all where nobody reads the loss, and once for who does, wherever
    batches lie; beside lines at which the untouched model waits."""
    model = set(spawn(plainly, example, ranks=1, timeout=300)[0])
    some = MORE.get(example.file, 0)
    found = spawn(waits, example, ranks=example.ranks, timeout=600)[0]
    for (there, read), steps in zip(CASES, found, strict=True):
        most = max(own(steps, model), key=len)
        assert len(most) == some + read, (there, read, most)
