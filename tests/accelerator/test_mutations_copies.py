"""Mutation tests of schedlang's copies: each order that is left out is noticed.

The calls are found in the text of all of schedlang: whoever calls a function of `mutations.ORDERS`
is tested from then on.
"""

from __future__ import annotations

import pytest

from schedlang.testing.accelerator import unavailable
from tests.accelerator import offload_variants
from tests.accelerator.mutation_runs import check_outcomes, run_mutations
from tests.accelerator.mutations import call_sites, calling_modules, is_copy_order

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
COPY_MODULES = (
    f"{_STORAGE}copies",
    f"{_STORAGE}offloaded_gradients",
    "schedlang.runtime.pipeline.evicted_activations",
)

FSDP_MODULE = "schedlang.runtime.adapters.fully_shard"
SAVE_MODULE = "schedlang.runtime.checkpointing.background"
DEVICE_MODULE = (
    "schedlang.runtime.device"  # the calls of torch themselves, through which all others go
)


def test_every_order_of_the_copies_themselves() -> None:
    """The modules of copies, offloaded gradients and evicted stages, and the device module."""
    chosen = [*call_sites(*COPY_MODULES, chosen=is_copy_order), *call_sites(DEVICE_MODULE)]
    check_outcomes(run_mutations(chosen, offload_variants.DIRECT, ranks=1), (), UNREACHED)


def test_every_order_of_slices() -> None:
    """What torch copies to the host, on two ranks."""
    check_outcomes(
        run_mutations(
            call_sites(FSDP_MODULE, chosen=is_copy_order), (offload_variants.sharded_parameters,)
        ),
        (),
        (),
    )


def test_every_order_of_a_save_in_the_background() -> None:
    """A thread writes bytes of pinned memory: what it reads too early is NaN, without a report.

    In a world with a backend for hosts: without one the thread waits for the device by chance.
    """
    chosen, variants = (
        call_sites(SAVE_MODULE, chosen=is_copy_order),
        (offload_variants.background_save,),
    )
    outcomes = run_mutations(chosen, variants, ranks=1, backend="cpu:gloo,sim:simccl")
    assert len(outcomes) == 2 and all(outcome.wrong == "NaN" for outcome in outcomes), outcomes


def test_all_users_are_known() -> None:
    """The search by text finds those that must be there."""
    assert {*COPY_MODULES, "schedlang.runtime.offload.offloaded_step"} <= set(calling_modules())


@pytest.mark.deep
def test_every_order_of_whoever_copies() -> None:
    """Every call that is left out is reported; the others are listed above, with the reason."""
    variants = (*offload_variants.DIRECT, *offload_variants.PROGRAMS)
    modules = [module for module in calling_modules() if module not in (FSDP_MODULE, SAVE_MODULE)]
    check_outcomes(
        run_mutations(call_sites(*modules, chosen=is_copy_order), variants, ranks=1),
        REDUNDANT,
        UNREACHED,
    )
