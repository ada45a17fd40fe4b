"""What torch's fully_shard holds gathered.  Private parts of it stand here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives


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


def set_up(units: Sequence[FSDPModule]) -> None:
    """Do what the first call of each unit would do, so that another can gather for it before.

    A unit that lies in another is set up with that one. To be called when all are there.
    """
    inside: set[Any] = set()
    for unit in units:
        inside.update(list(unit.modules())[1:])  # type: ignore[attr-defined]
    for unit in units:
        if unit not in inside:
            unit._get_fsdp_state()._lazy_init()


def name_in(unit: FSDPModule, held: Any) -> str:
    """The name inside a unit of a parameter that it gathers."""
    info = held._module_info
    modules = unit.named_modules()  # type: ignore[attr-defined]
    prefix = next((name for name, child in modules if child is info.module), "")
    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)


class Shard:
    """A slice of a parameter, which fully_shard gathers from wherever `home` lies."""

    def __init__(self, held: Any) -> None:
        self._held = held

    @property
    def home(self) -> Tensor:
        """The slice with its padding, flat."""
        flat: Tensor = self._held._sharded_param_data
        return flat

    def laid(self, value: Tensor) -> Tensor:
        """The values of a slice as they lie."""
        flat = torch.zeros_like(self.home, device="cpu")
        flat[: value.numel()].copy_(value.reshape(-1))
        return flat

    def settle(self, home: Tensor) -> None:
        """Let the slice lie there from now on."""
        held = self._held
        dim, part = held.fsdp_placement.dim, held.sharded_param._local_tensor
        held._sharded_param_data = home
        whole = home.view(held.padded_sharded_param_size)
        length = part.size(dim) if part.numel() else 0
        held.sharded_param._local_tensor = whole.narrow(dim, 0, length)


def shards_of(units: Iterable[FSDPModule]) -> dict[Any, Shard]:
    """The slices that units gather, by parameter."""
    groups = [group for unit in units for group in groups_of(unit)]
    return {one.sharded_param: Shard(one) for group in groups for one in group.fsdp_params}


@contextmanager
def without_values(units: Iterable[FSDPModule]) -> Iterator[None]:
    """Let units run on the meta device, which they refuse by themselves."""
    for unit in units:
        for group in groups_of(unit):
            group._validate_no_meta_params = lambda: None
            group.device = torch.device("meta")
            for one in group.fsdp_params:  # those that are cast are put together there
                one.device = torch.device("meta")
    names = vars(_fsdp_collectives)
    before = names["_get_device_handle"]
    names["_get_device_handle"] = partial(_handle, before)
    try:
        yield
    finally:
        names["_get_device_handle"] = before


def _handle(plain: Callable[[str], Any], device: str) -> Any:
    return plain("cpu" if device == "meta" else device)
