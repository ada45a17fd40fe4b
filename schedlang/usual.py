"""Axes by what they are usually called: which one of a mesh a help names, and what a mesh lacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# what ranks along an axis do -> what it is usually called; the first is offered where none is there
NAMES: Mapping[str, tuple[str, ...]] = {
    "replicas": ("dp", "data", "ddp", "fsdp", "rep", "replicas", "dp2"),
    "stages": ("pp", "pipe", "pipeline", "stage", "stages"),
    "parts": ("tp", "mp", "tensor", "model", "tp2"),
    "tokens": ("cp", "sp", "seq", "ctx", "ring"),
    "experts": ("ep", "expert", "experts"),
}


def usual(axes: Collection[str], role: str) -> str | None:
    """The axis that a help names for ranks of a role of NAMES; None where there is none.

    That of a usual name, or else the first whose name tells nothing of another role.
    """
    named = [name for name in NAMES[role] if name in axes]
    others = {name for names in NAMES.values() for name in names}
    return next(iter([*named, *(axis for axis in axes if axis not in others)]), None)


def offered(row: str, axes: Collection[str], role: str) -> str:
    """A row as a help offers it, its `{}` the axis for a role, with how the mesh has to be for it.

    >>> offered("zero(stage=1, over={})", ["dp"], "replicas")
    '`zero(stage=1, over=dp)`'
    >>> offered("zero(stage=1, over={})", ["pp"], "replicas")
    '`zero(stage=1, over=dp)`, with `dp` among the axes of the mesh, which are `pp`'
    """
    axis, wanted = usual(axes, role), NAMES[role][0]
    if axis is not None:
        return f"`{row.format(axis)}`"
    known = ", ".join(f"`{one}`" for one in axes)
    lacks = f"which are {known}" if known else "of which there are none"
    return f"`{row.format(wanted)}`, with `{wanted}` among the axes of the mesh, {lacks}"
