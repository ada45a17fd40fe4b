"""Usual axis names: helps name an axis that the mesh has, or say which one it would need."""

from __future__ import annotations

import doctest

import pytest
from torch import nn

import schedlang
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import mesh as usual


@pytest.mark.parametrize(
    "axes, role, said",
    [
        (("dp", "pp"), "replicas", "dp"),
        (("tp", "data"), "replicas", "data"),
        (("tp", "pp"), "replicas", None),
        (("x", "tp"), "replicas", "x"),
        (("dp", "stage"), "stages", "stage"),
        ((), "stages", None),
    ],
)
def test_the_axis_of_a_role(axes: tuple[str, ...], role: str, said: str | None) -> None:
    """The usual name comes first, then a neutral one; never an axis of another role."""
    assert usual.usual_axis(axes, role) == said


def test_no_name_is_of_two_roles() -> None:
    """Each name belongs to one role."""
    names = [name for role_names in usual.USUAL_NAMES.values() for name in role_names]
    assert len(names) == len(set(names))
    assert not doctest.testmod(usual).failed


@pytest.mark.parametrize(
    "mesh, helps",
    [
        (
            {"pp": 2},
            (
                "each replica: `zero(stage=2, over=dp)`, with `dp` among the axes of the mesh,"
                " which are `pp`",
                "store: `offload(activations, to=peer, over=pp)`",
            ),
        ),
        (
            {"data": 2, "pipe": 2},
            (
                "each replica: `zero(stage=2, over=data)`",
                "store: `offload(activations, to=peer, over=pipe)`",
            ),
        ),
    ],
)
def test_of_a_peer(mesh: dict[str, int], helps: tuple[str, ...]) -> None:
    """Refused rows with `to=peer` offer the axes of this mesh (S851)."""
    sch = schedlang.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    sch.mesh(**mesh)
    with pytest.raises(Refusal, match="S851") as error:
        sch["0"].offload("gradients", to="peer", over=list(mesh)[-1])
    offered = error.value.diagnostic.helps
    assert all(text.endswith(end) for text, end in zip(offered[1:], helps, strict=True)), offered
