"""What torch's fully_shard holds gathered.  Private parts of it stand here and nowhere else."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule


def groups_of(unit: FSDPModule) -> list[Any]:
    """The groups of parameters that a unit gathers together; mostly one."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        groups = [one for one in [state._fsdp_param_group] if one is not None]
    return list(groups)


def settle(unit: FSDPModule) -> None:
    """End a gather that was begun for a unit that did not run.

    Else the unit's next forward would take what was gathered for values of now.
    """
    for group in groups_of(unit):
        if group._all_gather_result is not None:
            group.wait_for_unshard()
            group._to_sharded()


def name_in(unit: FSDPModule, held: Any) -> str:
    """The name inside a unit of a parameter that it gathers."""
    info = held._module_info
    modules = unit.named_modules()  # type: ignore[attr-defined]
    prefix = next((name for name, child in modules if child is info.module), "")
    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)
