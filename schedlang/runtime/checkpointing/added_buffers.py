"""Buffers that a forward has added to a module since the program was built, in checkpoints.

A state dict of torch has them: `register_buffer("scale", None)`, and a value from the first batch.
A stage of a pipeline adds those of its own modules, so ranks agree on them before a save.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schedlang.runtime.checkpointing.index import DTYPE_NAMES, DTYPES, Unreadable
from schedlang.runtime.comm import world

if TYPE_CHECKING:
    from schedlang.runtime.assembly import Assembly

ENTRY = "added"  # of the contents of a checkpoint: the names of these buffers, if there are any


def describe_added(a: Assembly, contents: dict[str, Any]) -> None:
    """Write the added buffers of all ranks into the contents of a checkpoint; all ranks call this.

    Of a buffer that several stages have, that of the first one counts which has changed it.
    """
    axis = a.stage_axis
    stage = 0 if axis is None else a.ranks.mesh.index(a.ranks.rank, axis)
    local = {
        name: ((a.is_as_loaded(name, buffer), stage), list(buffer.shape), DTYPE_NAMES[buffer.dtype])
        for name, buffer in a.added_buffers.items()
    }
    forms_of_ranks = [local] if axis is None else world.distinct_objects(local)
    for name in sorted({name for forms in forms_of_ranks for name in forms}):
        (_, home), shape, dtype = min(forms[name] for forms in forms_of_ranks if name in forms)
        a.added_homes[name] = home
        contents["buffers"][name], contents["dtypes"][name] = shape, dtype
        contents.setdefault(ENTRY, []).append(name)


def check_added(contents: Mapping[str, Any]) -> None:
    """Raise Unreadable if the entry of a checkpoint does not name buffers."""
    names = contents.get(ENTRY, [])
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name in contents["buffers"] for name in names
    ):
        raise Unreadable(f"`{ENTRY}` names what is no buffer")


def empty_added(contents: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors for the added buffers of a checkpoint."""
    return {
        name: torch.zeros(contents["buffers"][name], dtype=DTYPES[contents["dtypes"][name]])
        for name in contents.get(ENTRY, ())
    }


def other_shapes(a: Assembly, contents: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of all parameters and buffers of a checkpoint, without added buffers that
    this program can take: it has their modules, and no buffer of that name."""
    modules, built = dict(a.module.named_modules()), a.built_buffers or ()
    taken = {
        name
        for name in contents.get(ENTRY, ())
        if name.rpartition(".")[0] in modules and name not in built
    }
    shapes = {**contents["parameters"], **contents["buffers"]}
    return {name: shape for name, shape in shapes.items() if name not in taken}


def set_added(a: Assembly, contents: Mapping[str, Any], values: dict[str, Tensor]) -> None:
    """Move the added buffers out of the values that were read, into their modules."""
    for name in contents.get(ENTRY, ()):
        owner, _, local_name = name.rpartition(".")
        buffer = values.pop(name).to(a.ranks.device)
        a.module.get_submodule(owner).register_buffer(local_name, buffer)
        a.loaded_buffers[name] = buffer, buffer._version
