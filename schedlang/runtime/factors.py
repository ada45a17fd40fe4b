"""What torch's fully_shard will do with the gradients of a built program: sum, and divide by what.

Private parts of torch stand here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from schedlang.runtime.replicas import Sliced


def reduced(
    sliced: Sliced, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[frozenset[str], float]]:
    """For each unit the names of its parameters, and the number that their sum is divided by."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for unit in sliced.units:
        state: Any = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one at most
            groups = [one for one in [state._fsdp_param_group] if one is not None]
        for group in groups:
            held = frozenset(names[id(p.sharded_param)] for p in group.fsdp_params)
            size = group.mesh_info.mesh.size()
            factor = group.gradient_divide_factor
            yield held, float(size if factor is None else factor)
