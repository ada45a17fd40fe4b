"""Bugs of what masks are drawn from: of a proof, in the one function of both sides; of training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from schedlang.runtime import program, scope
from schedlang.runtime.activation_memory import recompute
from schedlang.runtime.pipeline import recomputed_forward as kept_inputs
from schedlang.runtime.rng import logical_dropout as drawing
from schedlang.runtime.rng import native_dropout
from tests.zoo.bug import FREEZE, GROUP, SKIP, SLICE, Patch, Site, bug
from tests.zoo.place import rank


def _without(patch: Patch, left_out: int) -> None:
    """A stream does not hang on one of (seed, step, site, call, sample)."""
    plain = drawing.stream_of
    patch.setattr(drawing, "stream_of", lambda *of: plain(*of[:left_out], 0, *of[left_out + 1 :]))


@bug("D50", "", FREEZE, "dp", row="none", planning=True)
def masks_of_the_first_step(patch: Patch, site: Site) -> None:
    """Every step drops what the first did."""
    _without(patch, 1)


@bug("D51", "", FREEZE, "dp", row="none", planning=True)
def masks_of_another_module(patch: Patch, site: Site) -> None:
    """All modules drop by the same numbers."""
    _without(patch, 2)


@bug("D52", "", FREEZE, "dropping twice", row="none", planning=True)
def masks_of_the_first_call(patch: Patch, site: Site) -> None:
    """A module that is called twice drops the same in both calls."""
    _without(patch, 3)


@bug("D53", "", FREEZE, "dp", row="none", planning=True)
def masks_of_the_first_row(patch: Patch, site: Site) -> None:
    """All rows of a batch drop the same."""
    _without(patch, 4)


@bug("D54", "", SKIP, "dropping twice", row="none", planning=True)
def calls_not_counted(patch: Patch, site: Site) -> None:
    """Calls of a module are not counted, so that the second draws as the first did."""
    patch.setattr(scope, "count_call", lambda where: 0)


@bug("D55", "", SLICE, "dp", row="none", planning=True)
def masks_that_are_shifted(patch: Patch, site: Site) -> None:
    """The stream of a row is that of the row before it, from the next number on."""
    plain = drawing.stream_of

    def key(seed: int, step: int, place: str, call: int, sample: int) -> int:
        first = plain(seed, step, place, call, 0) + sample * drawing._GAMMA
        return drawing._signed(first % (1 << 64))

    patch.setattr(drawing, "stream_of", key)


# -- of native draws -------------------------------------------------------------------------------


def _seeded(patch: Patch, changed: Callable[..., tuple[int, int, Any]]) -> None:
    """A step is seeded from something else than (seed, step, places)."""
    plain = native_dropout.step_seed
    patch.setattr(native_dropout, "step_seed", lambda *of: plain(*changed(*of)))


@bug("D61", "", FREEZE, "dp", row="none")
def native_masks_of_the_first_step(patch: Patch, site: Site) -> None:
    """Every step of a training begins with the numbers of the first."""
    _seeded(patch, lambda seed, step, places: (seed, 0, places))


@bug("D62", "", GROUP, "dp", row="none")
def native_masks_of_all_data_ranks(patch: Patch, site: Site) -> None:
    """All data ranks of a training drop alike, each other rows."""
    _seeded(patch, lambda seed, step, places: (seed, step, ()))


@bug("D63", "", GROUP, "tp", row="none", credit="TransformerEngine#1272")
def native_masks_of_each_replica(patch: Patch, site: Site) -> None:
    """Ranks of tensor parallelism drop what they all hold by numbers of their own."""
    _seeded(patch, lambda seed, step, places: (seed, step, (*places, ("rank", rank()))))


@bug("D64", "", GROUP, "tp", row="none", credit="Megatron-LM#6858")
def native_masks_of_all_heads(patch: Patch, site: Site) -> None:
    """All ranks of tensor parallelism drop alike what each has other heads of."""
    plain = native_dropout.fork_seed
    patch.setattr(native_dropout, "fork_seed", lambda *of: plain(*of[:-1], ()))


@bug("D65", "", FREEZE, "pp", row="none")
def native_masks_of_the_first_microbatch(patch: Patch, site: Site) -> None:
    """Each operation of a step begins with the numbers of the step."""
    plain, seeded, steps = scope.enter_scope, native_dropout.step_seed, list[int]()

    def begun(*of: Any) -> int:
        steps.append(seeded(*of))
        return steps[-1]

    def entered(where: Any) -> Any:
        if steps:  # of a training, not of the proof before it
            torch.manual_seed(steps[-1])
        return plain(where)

    patch.setattr(native_dropout, "step_seed", begun)
    patch.setattr(program, "enter_scope", entered)


@bug("D66", "", SKIP, "tp, recomputed", row="none", credit="OLMo-core#828")
def native_masks_drawn_anew(patch: Patch, site: Site) -> None:
    """A recomputation goes on where the generators stand, and does not go back."""
    patch.setattr(recompute, "ReplayedState", lambda within, tensors: nullcontext())


@bug("D67", "", SKIP, "stages run again", row="none")
def native_masks_of_a_stage_drawn_anew(patch: Patch, site: Site) -> None:
    """A stage that runs again draws from where the generators stand."""
    patch.setattr(kept_inputs, "RestoredGenerators", lambda generators: nullcontext())


@bug("D68", "", FREEZE, "tp", row="none")
def native_masks_of_the_first_fork(patch: Patch, site: Site) -> None:
    """A module drops by the same numbers in each of its forks of a step."""
    plain = native_dropout.fork_seed
    patch.setattr(
        native_dropout,
        "fork_seed",
        lambda seed, at, site, call, index, places: plain(seed, at, "", 0, 0, places),
    )


@bug("D69", "", SKIP, "tp", row="none")
def forks_left_out(patch: Patch, site: Site) -> None:
    """No draw is a fork."""
    patch.setattr(native_dropout, "install_forks", lambda *of: None)
