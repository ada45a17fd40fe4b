"""Partial sums in a module that ends a region (`output=R` on its row): where they may arise and go.

A product over a dim of which each rank has a shard gives a partial sum on each rank.  Until the
region's end, which sums over the ranks, only calls that are linear in it may compute with it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

from torch import Tensor

from schedlang.ir.placement import EVEN
from schedlang.runtime.adapters.torch_tensor import in_transform
from schedlang.runtime.propagation.call_rules import ADDS, BIASED, LINEAR, SUMMING, TIMES
from schedlang.runtime.propagation.trace import RunningCall

if TYPE_CHECKING:
    from schedlang.runtime.propagation.follower import ComparedCall, Follower

SUMS = {*SUMMING, "sum"} - {"conv1d", "conv2d", "conv3d"}
READS = {"__setitem__", "item", "tolist", "__bool__", "__float__", "__int__", "__index__"}


def sums_over(call: ComparedCall, axes: Set[str]) -> bool:
    """Return whether a call that reduces over dims split over `axes` gives partial sums of a
    region."""
    follower = call.follower
    frames = [fqn for fqn, _ in follower.stack.frames if fqn in follower.summing]
    summed = frozenset[str]().union(*(follower.summing[fqn] for fqn in frames))
    tags = [tag for tensor in call.inputs for tag in follower.of(tensor).tags.values()]
    # gradients would reach padding, and equal shards would be added for each rank
    even = all(tag.uneven == EVEN for tag in tags)
    sums = call.name in SUMS and axes <= summed and even and not _has_bias(call)
    follower.regions.update(frames if sums else ())
    return sums


def check_pending(call: ComparedCall) -> frozenset[str]:
    """Return the axes over which the results of a call are partial sums, as its inputs are.

    Raises Mismatch if the call is not linear in a partial sum.
    """
    notes = [call.follower.of(tensor) for tensor in call.inputs]
    pending = frozenset[str]().union(*(note.pending for note in notes))
    partial = [note for note in notes if note.pending]
    is_single = len(partial) == 1 and not any(note.tags.keys() & pending for note in notes)
    if call.name in ADDS:
        fits = all(note.pending == pending for note in notes) and _adds_tensors(call)
    elif call.name in LINEAR:
        fits = is_single and partial[0] is notes[0]
    else:
        fits = is_single and call.name in {*SUMS, *TIMES} and not _has_bias(call)
    if not fits:
        raise pending_mismatch(call.follower, f"`{call.name}` computes with", min(pending))
    return pending


def check_region_call(call: RunningCall, follower: Follower) -> None:
    """Raise Mismatch for a call in a region that reads or writes partial sums, and returns no
    tensor, or whose tensors cannot be followed: torch.func wraps them."""
    if not any(fqn in follower.regions for fqn, _ in follower.stack.frames):
        return
    if in_transform():
        reason = f"`{call.name}` computes inside of `torch.func`, where tensors are not followed"
        raise follower.refuse(reason, None, "write out what `torch.vmap` does")
    for tensor in call.inputs if call.name in READS and not call.outputs else ():
        for axis in follower.of(tensor).pending:
            raise pending_mismatch(follower, f"`{call.name}` reads", axis)


def pending_mismatch(follower: Follower, does: str, axis: str) -> Any:
    """Return the mismatch of what needs a sum over the ranks of `axis`, and gets partial sums."""
    help_ = "end the region before: `output=R` on a row of the module that computes the sum"
    return follower.refuse(f"{does} a partial sum over `{axis}`", axis, help_)


def _has_bias(call: RunningCall) -> bool:
    """Return whether a product adds a tensor, which each rank would add."""
    place = BIASED.get(call.name)
    value = call.argument(place, "bias" if place else "input") if place is not None else None
    return isinstance(value, Tensor)


def _adds_tensors(call: RunningCall) -> bool:
    return call.name in ("stack", "cat", "concat") or all(
        isinstance(value, Tensor) for value in call.args
    )
