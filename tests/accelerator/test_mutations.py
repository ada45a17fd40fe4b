"""Mutation tests of FSDP2: each wait, event and record that is left out is noticed."""

from __future__ import annotations

import pytest
import torch

from schedlang.testing.accelerator import unavailable
from tests.accelerator import fsdp_variants
from tests.accelerator.mutation_runs import Outcome, check_outcomes, run_mutations
from tests.accelerator.mutations import call_sites

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())
LISTED = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="calls of torch are listed as 2.13 has them"
)

_FSDP = "torch.distributed.fsdp._fully_shard._"
MODULES = tuple(
    _FSDP + name for name in ("fsdp_collectives", "fsdp_param", "fsdp_param_group", "fsdp_state")
) + (f"{_FSDP}fully_shard",)

_GATHER = (
    "foreach_all_gather lets the stream of gathers wait for that of the copies, which waited for "
    "the same, before anything runs on it"
)
_GIVEN_UP = (
    "three waits of reset_iter_state cover each other: the last event of each stream that reduces "
    "(the state's), each group's own, and that of each reduce-scatter, which ran before those"
)
_KEPT = (
    "nobody uses what was gathered, and the work of an asynchronous collective keeps its tensors "
    "until it is done"
)
# calls that nothing needs, by their function and text: why that is so
REDUNDANT = {
    (
        "FSDPParamGroup._wait_all_gather_streams_on_event",
        "self.comm_ctx.all_gather_stream.wait_event(event)",
    ): _GATHER,
    ("FSDPState._root_pre_forward", "self._comm_ctx.all_gather_stream.wait_event(event)"): _GATHER,
    (
        "FSDPState._root_pre_forward",
        "self._comm_ctx.all_gather_stream.wait_stream(current_stream)",
    ): _GATHER,
    (
        "FSDPState._post_forward",
        "self._comm_ctx.all_gather_stream.wait_event(all_gather_state.event)",
    ): _GATHER,
    (
        "FSDPState._root_post_backward_final_callback",
        "self._device_handle.current_stream().wait_event(rs_state.event)",
    ): "finalize_backward, called just before, waits for the last event of the same stream",
    (
        "FSDPState._reset_iter_state",
        "current_stream.wait_event(ag_state.event)",
    ): "the event is one of the current stream: of its own copy out of the gathered tensor",
    ("FSDPState._reset_iter_state", "current_stream.wait_event(rs_state.event)"): _GIVEN_UP,
    ("FSDPState._reset_iter_state", "current_stream.wait_event(event)"): _GIVEN_UP,
    (
        "FSDPParamGroup._reset_iter_state",
        "current_stream.wait_event(self._post_reduce_event)",
    ): _GIVEN_UP,
    (
        "FSDPParamGroup._reset_iter_state",
        "current_stream.wait_event(self._all_reduce_state.event)",
    ): _GIVEN_UP,
    (
        "foreach_reduce",
        "post_reduce_stream.record_event()",
    ): "gradients that wait for their all-reduce are used on the stream that made them, and the "
    "memory of their inputs is ordered by the event of the reduce-scatter before",
    (
        "foreach_reduce",
        "all_reduce_stream.record_event()",
    ): "finalize_backward waits for a later event of the same stream before the memory is let go",
    (
        "FSDPParamGroup.unshard",
        "self.device_handle.Event().record()",
    ): "`Event.record` returns None, so that nobody can wait for it; one rank gathers nothing",
    ("FSDPParamGroup._reset_iter_state", "work.wait()"): _KEPT,
    ("FSDPParamGroup.finalize_backward", "work.wait()"): _KEPT,
    (
        "FSDPModule.unshard",
        "handle.wait()",
    ): "the module's own forward waits for a gather that is under way",
}
# calls that none of these programs reaches
UNREACHED = {
    (
        "foreach_reduce",
        "all_reduce_stream.wait_stream(current_stream)",
    ): "dead: it stands in the other branch of `world_size >= 1`",
    (
        "FSDPParam._get_grad_inner_tensor",
        "grad.wait()",
    ): "such a tensor waits by itself when it is used",
    (
        "FSDPParamGroup.post_backward",
        "self.device_handle.current_stream().wait_event(self._post_reduce_event)",
    ): "for parameters of one module that are sharded over several meshes",
    (
        "FSDPParamGroup._wait_for_post_backward",
        "self.device_handle.current_stream().wait_event(self._post_reduce_event)",
    ): "for gradients of one module that are reduced twice before backward ends",
    (
        "FSDPParamGroup._wait_for_post_backward",
        "self.device_handle.current_stream().wait_event(self._all_reduce_state.event)",
    ): "for gradients of one module that are reduced twice before backward ends",
}


@LISTED
def test_a_wait_of_fsdp2_that_is_left_out() -> None:
    """One of each kind is reported: a wait for a stream, for an event, and the record of an
    event."""
    chosen = [
        next(site for site in call_sites(*MODULES) if text in site.text)
        for text in (
            "reduce_scatter_stream.wait_stream(current_stream)",
            "all_gather_stream.record_event()",
            "current_stream().wait_event(oldest.event)",
        )
    ]
    for outcome in run_mutations(chosen, fsdp_variants.TWO[:1]):
        assert outcome.report, str(outcome.site)


@LISTED
@pytest.mark.deep
def test_every_order_of_fsdp2_is_needed_or_known() -> None:
    """Every call that is left out is found; the others are listed above, with the reason."""
    everything = call_sites(*MODULES)
    on_two = run_mutations(everything, fsdp_variants.TWO)
    unfound = [outcome for outcome in on_two if not outcome.found]
    on_four = run_mutations([outcome.site for outcome in unfound], fsdp_variants.FOUR, ranks=4)
    later = dict(zip(unfound, on_four, strict=True))
    check_outcomes(
        [_later(outcome, later.get(outcome)) for outcome in on_two], REDUNDANT, UNREACHED
    )


def _later(before: Outcome, after: Outcome | None) -> Outcome:
    return before if after is None or before.reached and not after.found else after
