"""A step of an optimizer whose groups hold sliced parameters beside plain ones.

What updates a list of tensors in one call (`foreach`, the default on accelerators, and `fused`)
takes tensors of one kind: DTensors of one mesh, or plain ones. So for the time of a step each such
group stands as several, alike in everything but their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from schedlang.runtime.device import on_accelerator

_LISTS = ("foreach", "fused")  # of torch's own optimizers: None leaves it to the device


def step_by_kinds(optimizer: torch.optim.Optimizer) -> None:
    """One step, of an optimizer that may update many parameters in one call."""
    with _apart(optimizer):
        optimizer.step()


@contextmanager
def _apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Groups by kind; what a step writes into one of them is written into the group it was."""
    groups = optimizer.param_groups
    parts = [_parts(group) for group in groups]
    if all(len(some) == 1 for some in parts):
        yield
        return
    optimizer.param_groups = [one for some in parts for one in some]
    try:
        yield
    finally:
        for group, (first, *rest) in zip(groups, parts, strict=True):
            if rest:
                group.update({key: value for key, value in first.items() if key != "params"})
        optimizer.param_groups = groups


def _parts(group: dict[str, Any]) -> Sequence[dict[str, Any]]:
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in group["params"]:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(kinds) < 2 or not _as_list(group):
        return [group]
    return [{**group, "params": some} for some in kinds.values()]


def _as_list(group: dict[str, Any]) -> bool:
    """Whether a group is updated in one call, as far as is known: of None the device decides."""
    asked = [group[key] for key in _LISTS if key in group]
    if any(asked):
        return True
    undecided = "foreach" in group and group["foreach"] is None
    return undecided and any(on_accelerator(one) for one in group["params"])
