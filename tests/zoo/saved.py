"""Injected bugs of checkpoints: names, layouts, missing entries."""

from __future__ import annotations

from typing import Any

from schedlang.runtime import full_tensors
from schedlang.runtime.checkpointing import archive
from schedlang.runtime.grad_reduction import zero
from schedlang.runtime.program import Program
from tests.zoo.bug import CONSTANT, FREEZE, SKIP, SLICE, Patch, Site, bug
from tests.zoo.trackers import rank


def _change_state(patch: Patch, change: Any) -> None:
    original = full_tensors.full_state_dict
    patch.setattr(full_tensors, "full_state_dict", lambda *args: change(original(*args)))


@bug("S01", "checkpoint", SLICE, "recomputed", row="none", credit="pytorch PR#77224; ray#43594")
def names_of_wrappers(patch: Patch, site: Site) -> None:
    """Names in the state dict contain wrappers that a primitive has added."""

    def wrapped(state: Any) -> Any:
        return {n.replace("h.0.", "h.0._checkpoint_wrapped_module."): v for n, v in state.items()}

    _change_state(patch, wrapped)


@bug(
    "S02",
    "",
    SKIP,
    "dp",
    planning=True,
    credit="torchtitan; Megatron-LM#6271",
    site="transformer.h.0.mlp.c_fc.weight",
)
def not_all_loaded(patch: Patch, site: Site) -> None:
    """Loading silently skips missing entries."""
    original = archive._copy_values

    def take_over(target: Any, values: Any) -> None:
        parameters = target.assembly.parameters
        old_values = {
            name: archive.local_tensor(p).clone()
            for name, p in parameters.items()
            if site.covers(name)
        }
        original(target, {**values, **old_values})

    patch.setattr(archive, "_copy_values", take_over)


@bug("S03", "zero", FREEZE, "sliced", credit="pytorch#117421")
def gathered_copy_survives_loading(patch: Patch, site: Site) -> None:
    """After loading, the next forward still uses the gathered weights of before."""
    patch.setattr(archive, "reshard_all", lambda sliced: None)
    patch.setattr(zero.ShardedStage, "free_gathered", lambda self: None)  # after an evaluation


@bug("S04", "", SKIP, "dp", credit="sglang#15890")
def second_name_of_a_tie_lost(patch: Patch, site: Site) -> None:
    """A weight with two names is saved under the first only."""

    def first(state: Any) -> Any:
        return {name: value for name, value in state.items() if name != "lm_head.weight"}

    _change_state(patch, first)


@bug("S05", "shard", SLICE, "tp", row="attn.c_attn", credit="Slapo PR#46")
def saved_in_local_order(patch: Patch, site: Site) -> None:
    """A fused weight is saved in the order in which ranks hold its parts."""
    original = archive.BoxedTensor

    def boxed(path: Any, local: Any, shape: Any, part: Any, *args: Any) -> Any:
        def run(cells: Any) -> Any:
            length = sum(n for *_, n in cells)
            return ((0, rank() * length, length),) if len(cells) > 1 else cells

        return original(path, local, shape, tuple(map(run, part)), *args)

    patch.setattr(archive, "BoxedTensor", boxed)


@bug("S06", "", SKIP, "dp", planning=True)
def count_of_steps_not_restored(patch: Patch, site: Site) -> None:
    """A loaded program starts to count its steps anew."""
    original = archive.load

    def load(target: Any, path: Any) -> None:
        original(target, path)
        target.step = 0

    patch.setattr(archive, "load", load)


@bug("S05b", "zero", CONSTANT, "sliced", credit="what is saved, in general")
def saved_wrong(patch: Patch, site: Site) -> None:
    """Saved slices differ from the program's values."""
    import torch

    from schedlang.runtime.storage.offloaded_gradients import local_tensor

    original = Program.save

    def save(self: Any, path: Any) -> None:
        tensors = [
            local_tensor(p) for p in self.assembly.parameters.values() if self.assembly.sliced
        ]
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(2)
            original(self, path)
            for tensor in tensors:
                tensor.div_(2)

    patch.setattr(Program, "save", save)
