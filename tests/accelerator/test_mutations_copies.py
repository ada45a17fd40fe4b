"""Each order of schedlang's own copies is missed when it is left out.

The calls are found by looking at all of schedlang: whoever calls `follow`, `wait`, `record`,
`used_on`, `settled` or `synchronize` of the device, or `ready`, `mark` or `settle` of the copies,
is hunted from then on.
"""

from __future__ import annotations

import pytest

from schedlang.testing.accelerator import unavailable
from tests.accelerator import copied_ways
from tests.accelerator.hunting import hunt, judge
from tests.accelerator.mutants import ours, sites, users

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

_PACE = "a pace and no order: it bounds how many copies are on their way, and nobody reads for it"
_CLOCK = "before the clock is read: without it times are wrong, and no values"
# calls that nothing needs, by their function and text: why that is so
REDUNDANT = {
    ("ActivationStore.end_call", "copies.record_copies(self._device)"): _PACE,
    ("ActivationStore.end_call", "host_wait(pending)"): _PACE,
}
# calls that none of these programs reaches
UNREACHED = {
    ("StepTimer._now", "synchronize(self.device)"): _CLOCK,
    ("_seconds", "synchronize(device)"): _CLOCK,
    ("_seconds", "synchronize(device) (2)"): _CLOCK,
    ("synchronize", "torch.accelerator.synchronize(with_index(target))"): _CLOCK,
}
_STORAGE = "schedlang.runtime.storage."
NEAR = (
    f"{_STORAGE}copies",
    f"{_STORAGE}offloaded_gradients",
    "schedlang.runtime.pipeline.evicted_activations",
)

SLICES = "schedlang.runtime.adapters.fully_shard"
SAVES = "schedlang.runtime.checkpointing.background"
DEVICE = "schedlang.runtime.device"  # the calls of torch themselves, through which all others go


def test_every_order_of_the_copies_themselves() -> None:
    """Of the file of copies, of gradients that leave, of stages that park, and of the device."""
    some = [*sites(*NEAR, chosen=ours), *sites(DEVICE)]
    judge(hunt(some, copied_ways.DIRECT, ranks=1), (), UNREACHED)


def test_every_order_of_slices() -> None:
    """Of what torch copies to the host: it takes two ranks."""
    judge(hunt(sites(SLICES, chosen=ours), (copied_ways.slices,)), (), ())


def test_every_order_of_a_save_in_the_background() -> None:
    """A thread writes the bytes of pinned memory: what it reads too early is NaN, and no report.

    In a world with a library for hosts: without one the thread waits for the device by chance.
    """
    here, ways = sites(SAVES, chosen=ours), (copied_ways.saved_behind,)
    fates = hunt(here, ways, ranks=1, backend="cpu:gloo,sim:simccl")
    assert len(fates) == 2 and all(fate.wrong == "NaN" for fate in fates), fates


def test_all_users_are_known() -> None:
    """The search by text misses none of those that are certain to be there."""
    assert {*NEAR, "schedlang.runtime.offload.offloaded_step"} <= set(users())


@pytest.mark.deep
def test_every_order_of_whoever_copies() -> None:
    """All that is left out is found by a report; what is not is listed above, with the reason."""
    ways = (*copied_ways.DIRECT, *copied_ways.PROGRAMS)
    here = [one for one in users() if one not in (SLICES, SAVES)]
    judge(hunt(sites(*here, chosen=ours), ways, ranks=1), REDUNDANT, UNREACHED)
