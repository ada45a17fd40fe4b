"""Injected bugs of dropout: identities of logical streams in proofs, seeds in training."""

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
from tests.zoo.trackers import rank


def _drop_from_stream(patch: Patch, left_out: int) -> None:
    """A stream does not depend on one of (seed, step, site, call, sample)."""
    original = drawing.stream_of
    patch.setattr(
        drawing, "stream_of", lambda *args: original(*args[:left_out], 0, *args[left_out + 1 :])
    )


@bug("D50", "", FREEZE, "dp", row="none", planning=True)
def masks_of_the_first_step(patch: Patch, site: Site) -> None:
    """Every step uses the dropout masks of the first step."""
    _drop_from_stream(patch, 1)


@bug("D51", "", FREEZE, "dp", row="none", planning=True)
def masks_of_another_module(patch: Patch, site: Site) -> None:
    """All modules use the same random numbers for dropout."""
    _drop_from_stream(patch, 2)


@bug("D52", "", FREEZE, "dropping twice", row="none", planning=True)
def masks_of_the_first_call(patch: Patch, site: Site) -> None:
    """A module that is called twice uses the same mask in both calls."""
    _drop_from_stream(patch, 3)


@bug("D53", "", FREEZE, "dp", row="none", planning=True)
def masks_of_the_first_row(patch: Patch, site: Site) -> None:
    """All rows of a batch use the same mask."""
    _drop_from_stream(patch, 4)


@bug("D54", "", SKIP, "dropping twice", row="none", planning=True)
def calls_not_counted(patch: Patch, site: Site) -> None:
    """Calls of a module are not counted, so that the second call repeats the first mask."""
    patch.setattr(scope, "count_call", lambda site_name: 0)


@bug("D55", "", SLICE, "dp", row="none", planning=True)
def shifted_masks(patch: Patch, site: Site) -> None:
    """The random stream of a row is the stream of the previous row, shifted by one."""
    original = drawing.stream_of

    def key(seed: int, step: int, site_name: str, call: int, sample: int) -> int:
        stream_start = original(seed, step, site_name, call, 0) + sample * drawing._GAMMA
        return drawing._signed(stream_start % (1 << 64))

    patch.setattr(drawing, "stream_of", key)


# -- native dropout --------------------------------------------------------------------------------


def _change_seed(patch: Patch, changed: Callable[..., tuple[int, int, Any]]) -> None:
    """The seed of a step is derived from changed (seed, step, places)."""
    original = native_dropout.step_seed
    patch.setattr(native_dropout, "step_seed", lambda *args: original(*changed(*args)))


@bug("D61", "", FREEZE, "dp", row="none")
def native_masks_of_the_first_step(patch: Patch, site: Site) -> None:
    """Every training step is seeded like the first one."""
    _change_seed(patch, lambda seed, step, places: (seed, 0, places))


@bug("D62", "", GROUP, "dp", row="none")
def native_masks_of_all_data_ranks(patch: Patch, site: Site) -> None:
    """All data-parallel ranks use the same dropout mask for different rows."""
    _change_seed(patch, lambda seed, step, places: (seed, step, ()))


@bug("D63", "", GROUP, "tp", row="none", credit="TransformerEngine#1272")
def native_masks_of_each_replica(patch: Patch, site: Site) -> None:
    """Tensor-parallel ranks use different dropout masks for replicated activations."""
    _change_seed(patch, lambda seed, step, places: (seed, step, (*places, ("rank", rank()))))


@bug("D64", "", GROUP, "tp", row="none", credit="Megatron-LM#6858")
def native_masks_of_all_heads(patch: Patch, site: Site) -> None:
    """Tensor-parallel ranks use the same dropout mask for different heads."""
    original = native_dropout.fork_seed
    patch.setattr(native_dropout, "fork_seed", lambda *args: original(*args[:-1], ()))


@bug("D65", "", FREEZE, "pp", row="none")
def native_masks_of_the_first_microbatch(patch: Patch, site: Site) -> None:
    """Each microbatch of a step is seeded with the seed of the step."""
    original, step_seed, steps = scope.enter_scope, native_dropout.step_seed, list[int]()

    def begun(*args: Any) -> int:
        steps.append(step_seed(*args))
        return steps[-1]

    def entered(scope_name: Any) -> Any:
        if steps:  # of a training, not of the proof before it
            torch.manual_seed(steps[-1])
        return original(scope_name)

    patch.setattr(native_dropout, "step_seed", begun)
    patch.setattr(program, "enter_scope", entered)


@bug("D66", "", SKIP, "tp, recomputed", row="none", credit="OLMo-core#828")
def native_masks_drawn_anew(patch: Patch, site: Site) -> None:
    """A recomputation does not restore the state of the generators."""
    patch.setattr(recompute, "ReplayedState", lambda within, tensors: nullcontext())


@bug("D67", "", SKIP, "stages run again", row="none")
def native_masks_of_a_stage_drawn_anew(patch: Patch, site: Site) -> None:
    """A stage that is recomputed does not restore the state of the generators."""
    patch.setattr(kept_inputs, "RestoredGenerators", lambda generators: nullcontext())


@bug("D68", "", FREEZE, "tp", row="none")
def native_masks_of_the_first_fork(patch: Patch, site: Site) -> None:
    """A module uses the same seed for all of its forks in a step."""
    original = native_dropout.fork_seed
    patch.setattr(
        native_dropout,
        "fork_seed",
        lambda seed, position, site, call, index, places: original(
            seed, position, "", 0, 0, places
        ),
    )


@bug("D69", "", SKIP, "tp", row="none")
def forks_left_out(patch: Patch, site: Site) -> None:
    """No random operator gets a forked seed."""
    patch.setattr(native_dropout, "install_forks", lambda *args: None)
