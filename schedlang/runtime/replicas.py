"""Data-parallel state split over ranks (ZeRO), by torch's fully_shard (FSDP2).

Rajbhandari et al., ZeRO (SC 2020).  Gradients are summed, never averaged: the loss of each part
already carries its weight in the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


class Sliced:
    """The units of one stage whose parameters lie in slices over data-parallel ranks.

    stage 1 reduces gradients once a step, 2 and 3 after each microbatch; 3 also frees the gathered
    parameters after each forward.
    """

    def __init__(self, stage: int, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
        self.stage, self.mesh, self.ignored = stage, mesh, ignored
        self.units: list[FSDPModule] = []
        self._last: bool | None = None

    def add(self, module: nn.Module, *, root: bool = False) -> None:
        """Slice what this module holds and no module added before it does.

        What the root itself holds stays gathered after its forward: the backward begins there.
        """
        fully_shard(
            module, mesh=self.mesh, reshard_after_forward=self.stage == 3 and not root,
            ignored_params=self.ignored,
        )  # fmt: skip
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # a plain sum: a factor of one would go through an operator that gloo does not have
        module.set_force_sum_reduction_for_comms(True)
        self.units.append(module)

    def before_backward(self, last: bool) -> None:
        """Say whether the backward to come is the last of this step."""
        if last == self._last:
            return
        self._last = last
        for unit in self.units:
            unit.set_requires_gradient_sync(last or self.stage > 1, recurse=False)
            unit.set_is_last_backward(last)
            unit.set_reshard_after_backward(last or self.stage == 3, recurse=False)


def reshard(sliced: Mapping[int, Sliced]) -> None:
    """Free gathered parameters, so that the next forward gathers what the slices hold now."""
    for one in sliced.values():
        for unit in one.units:
            unit.reshard()
