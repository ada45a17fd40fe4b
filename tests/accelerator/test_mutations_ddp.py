"""Mutation tests of DDP: each wait, event and record in Python that is left out is noticed.

Those of its reducer are in C++ and cannot be left out one by one. All waits for one kind of
collective can: the library gives them something else to wait for.
"""

from __future__ import annotations

import pytest

from schedlang.testing.accelerator import unavailable
from tests.accelerator import ddp_variants
from tests.accelerator.mutation_runs import check_outcomes, run_mutations
from tests.accelerator.mutations import IgnoredWait, call_sites

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

_BY_CUDA = "only where torch.cuda is there"
_LIST = (
    "the hook takes what NCCL's work of all_gather holds, one tensor; that of simccl holds a list, "
    "and the hook stops there"
)
# calls that nothing needs, by their function and text: why that is so
REDUNDANT = {
    (
        "DistributedDataParallel._match_all_reduce_for_bwd_pass",
        "work.wait()",
    ): "a rank without a batch has no use for the sums, and the work keeps its tensors"
}
# calls that none of these programs reaches
UNREACHED = {
    ("powerSGD_hook", "torch.cuda.synchronize(device)"): _BY_CUDA,
    ("batched_powerSGD_hook", "torch.cuda.synchronize(device)"): _BY_CUDA,
    (
        "batched_powerSGD_hook",
        "dist.all_reduce(state.q_memory_dict[bucket_index], group=group_to_use, async_op=True)"
        ".get_future().wait()",
    ): "this hook of torch fails before: it gives a matrix to what wants several",
    **{
        (f"quantization_{kind}_hook", f"fut.wait(){nth}"): _LIST
        for kind in ("pertensor", "perchannel")
        for nth in ("", " (2)", " (3)")
    },
}
COLLECTIVES = [IgnoredWait(name) for name in ("all_reduce", "broadcast", "all_gather")]


def test_a_wait_of_ddp_that_is_left_out() -> None:
    """A wait of the reducer for sums, and one in Python for an event, are reported."""
    event = next(site for site in call_sites(*ddp_variants.MODULES) if "event.wait(" in site.text)
    variants = (ddp_variants.small_buckets, ddp_variants.mixed_precision)
    for outcome in run_mutations([COLLECTIVES[0], event], variants):
        assert outcome.report, str(outcome.site)


@pytest.mark.deep
def test_every_order_of_ddp_is_needed_or_known() -> None:
    """Every call that is left out is reported; the others are listed above, with the reason."""
    everything = [*call_sites(*ddp_variants.MODULES), *COLLECTIVES]
    check_outcomes(run_mutations(everything, ddp_variants.VARIANTS), REDUNDANT, UNREACHED)
