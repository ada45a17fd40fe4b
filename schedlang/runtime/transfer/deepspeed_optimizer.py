"""Optimizer state of ZeRO that DeepSpeed has written, for a program of any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.runtime.checkpointing import archive, checkpoint_folders
from schedlang.runtime.checkpointing.boxes import without_function_modes
from schedlang.runtime.checkpointing.index import Unreadable
from schedlang.runtime.checkpointing.optimizer_state import (
    NOT_SAVED,
    SavedOptimizer,
    describe_optimizer,
    load_optimizer,
)
from schedlang.runtime.checkpointing.plain_values import to_plain
from schedlang.runtime.program import Program
from schedlang.runtime.redistribution.sharding import copy_overlap, full_slice
from schedlang.runtime.storage.folder import run_on_all_ranks
from schedlang.runtime.transfer.dcp_optimizer import (
    STEP,
    add_group,
    allocate_parts,
    check_hypers,
    state_refusal,
)
from schedlang.runtime.transfer.deepspeed_shards import ZeroShards
from schedlang.runtime.transfer.folders import find_head

BIAS_CORRECTION = "bias_correction"  # only groups of DeepSpeed's own Adam have it
Diagnose = Callable[[BaseException], Diagnostic]


@dataclass(frozen=True)
class DeepSpeedOptimizer:
    """The optimizer's state in a folder, for a program; all its ranks have described it alike.

    saved  the state without large tensors; `names`: parameter -> its name in the folder
    """

    shards: ZeroShards
    saved: SavedOptimizer
    names: Mapping[str, str]

    @staticmethod
    def of(program: Program, folder: Path, diagnose: Diagnose) -> DeepSpeedOptimizer:
        """Describe the state in a folder; all ranks of the program must call this.

        Raises Refusal S633 or S636 on all ranks, before anything is changed.
        """
        current, a = describe_optimizer(program), program.assembly
        aliases = {alias: names[0] for names in a.ties for alias in names}
        shapes = {name: tuple(a.holdings[name].layout.shape) for name in current.of}
        dtypes = dict(archive.tensor_dtypes(program))

        def read() -> DeepSpeedOptimizer:
            path = checkpoint_folders.find_deepspeed(folder)
            assert path is not None
            shards = ZeroShards(path)
            head = find_head({*shapes, *aliases}, shards.names)
            names = {}
            for full_name in shards.shapes:
                name = full_name.removeprefix(head)
                names[aliases.get(name, name)] = full_name
            saved = SavedOptimizer(kind=current.kind)
            for name, full_name in names.items():
                if name in shapes:  # else it is refused below, by name
                    _check_form(name, shards, full_name, shapes[name], dtypes[name])
                    _describe(saved, name, shards, full_name, current)
                else:
                    saved.of[name] = 0
            if not names:
                raise state_refusal("the folder has no shards of ZeRO's optimizer")
            return DeepSpeedOptimizer(shards, saved, names)

        state = run_on_all_ranks(read, diagnose, (Exception,))
        archive.check_optimizer(program, state.saved)
        return state

    def load(self, program: Program, diagnose: Diagnose) -> None:
        """Load the state; all ranks of the program must call this."""
        parts = allocate_parts(program, self.saved)

        def read() -> None:
            for (name, slot), (local, part) in parts.items():
                value = self.shards.moment(self.names[name], slot)
                copy_overlap(value, full_slice(value.shape), local, part)

        with without_function_modes(), torch.no_grad():
            run_on_all_ranks(read, diagnose, (Exception,))
        load_optimizer(program, self.saved, {key: local for key, (local, _) in parts.items()})
        archive.settle_loaded(program)
        program.step = self.shards.step


def _check_form(
    name: str, shards: ZeroShards, full_name: str, shape: tuple[int, ...], dtype: str
) -> None:
    """Refuse (S636) a parameter of another shape, or that is not the optimizer's copy."""
    if shards.shapes[full_name] != shape:
        shapes = f"{[*shards.shapes[full_name]]}, and the program's {[*shape]}"
        raise state_refusal(f"`{name}` has the shape {shapes}")
    if (kind := shards.dtypes(full_name)[0]) != dtype:
        raise state_refusal(
            f"the optimizer's own copy of `{name}` is {kind}, and the program's {dtype}: a {kind} "
            "model with `cast(...)` trains like it"
        )


def _describe(
    saved: SavedOptimizer, name: str, shards: ZeroShards, full_name: str, current: SavedOptimizer
) -> None:
    """Add the state of a parameter. Raises Refusal S636 for another optimizer."""
    parts, values = shards.entries(full_name)
    hypers = {k: v for k, v in shards.hypers(full_name).items() if k not in NOT_SAVED}
    own = current.groups[current.of[name]]
    if BIAS_CORRECTION in hypers:
        hypers, values = _as_torch_adam(hypers, values, own, current.kind, shards.settings)
    if parts:
        saved.parts[name] = parts
    if values:
        saved.values[name] = {slot: to_plain(slot, value) for slot, value in values.items()}
    check_hypers(hypers.keys(), own.keys())
    add_group(saved, name, {key: to_plain(key, value) for key, value in hypers.items()})


def _as_torch_adam(
    hypers: dict[str, Any],
    values: dict[str, Any],
    own: Mapping[str, Any],
    kind: str | None,
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the groups and steps of DeepSpeed's own Adam as torch's Adam has them.

    Whether weight decay is decoupled stands only in the configuration. Raises Refusal S636 if
    torch's optimizer would compute something else.
    """
    options = settings.get("params") or {}
    decoupled = str(settings.get("type", "")).lower() == "adamw" or options.get("adam_w_mode", True)
    if kind not in ("Adam", "AdamW"):
        raise state_refusal(f"it is of DeepSpeed's Adam, and the program has `{kind}`")
    if not hypers[BIAS_CORRECTION]:
        raise state_refusal("it is of an Adam without bias correction, which torch's has")
    if settings and hypers.get("weight_decay") and decoupled != (kind == "AdamW"):
        raise state_refusal(
            f"its weight decay is {'' if decoupled else 'not '}decoupled, as in "
            f"`torch.optim.{'AdamW' if decoupled else 'Adam'}`; the program has `{kind}`"
        )
    step = values.get(STEP, hypers.get(STEP))
    if step is None:
        raise Unreadable("the optimizer's state has no `step`")
    taken = {key: value for key, value in hypers.items() if key in own}
    tensor = step if isinstance(step, torch.Tensor) else torch.tensor(float(step))
    return {**own, **taken}, {**values, STEP: tensor}
