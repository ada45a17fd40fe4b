"""What fully_shard will do with the gradients of a built program: sum, and divide by what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from schedlang.runtime.summing.gathered import groups_of
from schedlang.runtime.summing.replicas import Sliced


def reduced(
    sliced: Sliced, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[frozenset[str], float]]:
    """For each unit the names of its parameters, and the number that their sum is divided by."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for unit in sliced.units:
        for group in groups_of(unit):
            held = frozenset(names[id(p.sharded_param)] for p in group.fsdp_params)
            size = group.mesh_info.mesh.size()
            factor = group.gradient_divide_factor
            yield held, float(size if factor is None else factor)
