"""Each wait, event and record of DDP that Python makes is missed when it is left out.

Those of its reducer are C++ and cannot be left out one by one. All that waits for one kind of
collective can, since the library can give it something else to wait for.
"""

from __future__ import annotations

import pytest

from schedlang.testing.accelerator import unavailable
from tests.accelerator import replicated_ways
from tests.accelerator.hunting import hunt, judge
from tests.accelerator.mutants import Unheard, sites

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
COLLECTIVES = [Unheard(name) for name in ("all_reduce", "broadcast", "all_gather")]


def test_a_wait_of_ddp_that_is_left_out() -> None:
    """Of its reducer, for sums; and of its Python, for an event: by a report."""
    event = next(site for site in sites(*replicated_ways.MODULES) if "event.wait(" in site.text)
    ways = (replicated_ways.small, replicated_ways.mixed)
    for fate in hunt([COLLECTIVES[0], event], ways):
        assert fate.report, str(fate.site)


@pytest.mark.deep
def test_every_order_of_ddp_is_needed_or_known() -> None:
    """All that is left out is found by a report; what is not is listed above, with the reason."""
    everything = [*sites(*replicated_ways.MODULES), *COLLECTIVES]
    judge(hunt(everything, replicated_ways.WAYS), REDUNDANT, UNREACHED)
