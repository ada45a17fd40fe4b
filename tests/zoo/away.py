"""Bugs of what lies off the device: parameters, gradients, the optimizer's state."""

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
def brought_once(patch: Patch, site: Site) -> None:
    """Parameters are brought to the device in the first step, and used in all that follow."""
    patch.setattr(StreamedParameter, "drop_copy", lambda self: None)


@bug("C14", "offload", REDUCTION, "streamed", row="offload(what=parameters")
def last_microbatch_alone(patch: Patch, site: Site) -> None:
    """A gradient that leaves takes the place of the earlier microbatches'."""
    plain = offloaded_gradients._offload

    def leave(scratch: Any, parameter: Tensor) -> None:
        if parameter.grad is not None:
            vars(parameter).pop(offloaded_gradients._SLOT, None)
        plain(scratch, parameter)

    patch.setattr(offloaded_gradients, "_offload", leave)


@bug("C15", "offload", SKIP, "streamed", row="offload(what=optimizer")
def state_left_on_disk(patch: Patch, site: Site) -> None:
    """The step starts from no state: what lies on disk is not brought back."""
    plain = OffloadedState._master

    def master(self: Any, optimizer: Any, fetched: Any) -> Any:
        if self.tiers[fetched.name].state == DISK:
            optimizer.state.pop(self.parameters[fetched.name], None)
        return plain(self, optimizer, fetched)

    patch.setattr(OffloadedState, "_master", master)


@bug("C20", "offload", SLICE, "lent", row="offload(what=optimizer")
def state_of_one_for_the_other(patch: Patch, site: Site) -> None:
    """What comes home from a peer is taken apart in another order than it was put together."""
    plain = PeerState._moved_entries

    def moving(self: PeerState, turn: int, optimizer: Any) -> Any:
        places = plain(self, turn, optimizer)
        away = [state[key].is_meta for state, key in places]
        return places[::-1] if any(away) else places

    patch.setattr(PeerState, "_moved_entries", moving)


@bug("C21", "offload", FREEZE, "lent", row="offload(what=optimizer")
def state_of_the_first_step(patch: Patch, site: Site) -> None:
    """A peer keeps the state that it was given first, and gives that back in every step."""
    plain = PeerState._send_round

    def send(self: PeerState, turn: int, optimizer: Any) -> None:
        plain(self, turn, optimizer)
        first = vars(self).setdefault("first", {})
        if turn in self.held:
            self.held[turn] = first.setdefault(turn, self.held[turn].clone())

    patch.setattr(PeerState, "_send_round", send)


@bug("C22", "offload", FREEZE, "parked", row="offload(what=activations")
def first_parcel_again(patch: Patch, site: Site) -> None:
    """A peer gives back for every microbatch what the first one's forward had saved."""
    plain = PartnerEviction.load

    def load(self: PartnerEviction, step: Any, op: Any) -> None:
        plain(self, step, op)
        bag = bag_of(step, work_of(op))
        bring, first = bag._bring, vars(self).setdefault("first", {})
        assert bring is not None
        bag.set_loader(lambda: first.setdefault((op.stage, *bag.sizes()), bring()))

    patch.setattr(PartnerEviction, "load", load)
