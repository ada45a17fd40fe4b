"""Injected bugs: offloaded parameters, gradients and optimizer state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from schedlang.runtime.offload.offloaded_step import OffloadedState, PeerState
from schedlang.runtime.offload.streamed_parameters import StreamedParameter
from schedlang.runtime.pipeline.evicted_activations import PartnerEviction, bag_of
from schedlang.runtime.pipeline.in_flight import work_of
from schedlang.runtime.storage import offloaded_gradients
from schedlang.runtime.storage.tiers import DISK
from tests.zoo.bug import FREEZE, REDUCTION, SKIP, SLICE, Patch, Site, bug


@bug("C13", "offload", FREEZE, "streamed", row="offload(what=parameters")
def copied_once(patch: Patch, site: Site) -> None:
    """Parameters are copied to the device in the first step only, and reused in later steps."""
    patch.setattr(StreamedParameter, "drop_copy", lambda self: None)


@bug("C14", "offload", REDUCTION, "streamed", row="offload(what=parameters")
def last_microbatch_only(patch: Patch, site: Site) -> None:
    """An offloaded gradient overwrites those of earlier microbatches instead of adding to them."""
    original = offloaded_gradients._offload

    def leave(scratch: Any, parameter: Tensor) -> None:
        if parameter.grad is not None:
            vars(parameter).pop(offloaded_gradients._SLOT, None)
        original(scratch, parameter)

    patch.setattr(offloaded_gradients, "_offload", leave)


@bug("C15", "offload", SKIP, "streamed", row="offload(what=optimizer")
def state_left_on_disk(patch: Patch, site: Site) -> None:
    """The step starts without state: the state on disk is not loaded."""
    original = OffloadedState._master

    def master(self: Any, optimizer: Any, fetched: Any) -> Any:
        if self.tiers[fetched.name].state == DISK:
            optimizer.state.pop(self.parameters[fetched.name], None)
        return original(self, optimizer, fetched)

    patch.setattr(OffloadedState, "_master", master)


@bug("C20", "offload", SLICE, "lent", row="offload(what=optimizer")
def states_swapped(patch: Patch, site: Site) -> None:
    """State that returns from a peer is unpacked in another order than it was packed."""
    original = PeerState._moved_entries

    def moving(self: PeerState, round_index: int, optimizer: Any) -> Any:
        entries = original(self, round_index, optimizer)
        offloaded = [state[key].is_meta for state, key in entries]
        return entries[::-1] if any(offloaded) else entries

    patch.setattr(PeerState, "_moved_entries", moving)


@bug("C21", "offload", FREEZE, "lent", row="offload(what=optimizer")
def state_of_the_first_step(patch: Patch, site: Site) -> None:
    """A peer keeps the state of the first step and returns it in every step."""
    original = PeerState._send_round

    def send(self: PeerState, round_index: int, optimizer: Any) -> None:
        original(self, round_index, optimizer)
        first_state = vars(self).setdefault("first", {})
        if round_index in self.held:
            self.held[round_index] = first_state.setdefault(
                round_index, self.held[round_index].clone()
            )

    patch.setattr(PeerState, "_send_round", send)


@bug("C22", "offload", FREEZE, "parked", row="offload(what=activations")
def first_microbatch_reused(patch: Patch, site: Site) -> None:
    """A peer returns the saved activations of the first microbatch for every microbatch."""
    original = PartnerEviction.load

    def load(self: PartnerEviction, step: Any, op: Any) -> None:
        original(self, step, op)
        bag = bag_of(step, work_of(op))
        fetch, first_loaded = bag._bring, vars(self).setdefault("first", {})
        assert fetch is not None
        bag.set_loader(lambda: first_loaded.setdefault((op.stage, *bag.sizes()), fetch()))

    patch.setattr(PartnerEviction, "load", load)
