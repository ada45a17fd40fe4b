"""Gradients made whole: sums over the ranks that each had a part, and their true global norm."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import Group, count
from schedlang.runtime.device import HOST, on_accelerator, on_host, sent
from schedlang.runtime.grad_reduction.flat import Flat, held_of, local_part
from schedlang.runtime.storage.leaving import (
    AWAY,
    gradient_device,
    gradient_of,
    gradients_of,
    leaves,
    set_gradient,
)

Started = tuple["Flat | Bucket", Any]  # a sum that has begun, and what to wait for


@dataclass(frozen=True)
class Sum:
    """One reduction: the gradients of these parameters are parts over this group.

    bucket  bytes that are summed at once, at most, if not as usual; a larger gradient is alone
    """

    group: Group
    names: tuple[str, ...]
    kind: str  # "replicas", "partial" or "tied": what made them parts
    bucket: int | None = None


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The part of the gradient that this rank holds, as a plain tensor."""
    grad = gradient_of(parameter)
    return grad.to_local() if isinstance(grad, DTensor) else grad


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Those of them that have one; plain ones are asked without a call of Python."""
    found = [
        p.grad if AWAY not in p.__dict__ and not isinstance(p, DTensor) else local_gradient(p)
        for p in parameters
    ]
    return [grad for grad in found if grad is not None]


def sum_gradients(parameters: Mapping[str, nn.Parameter], sums: Sequence[Sum]) -> None:
    """Replace each gradient by its sum over the group, bucket by bucket, in order of the sums.

    A parameter that got no gradient on any rank of the group keeps none.
    """
    held = held_of(parameters)
    held.settle()
    for one in sums:
        for bucket, work in begin(held, [one]):
            if work is not None:
                work.wait()
            bucket.unpack()


def begin(parameters: Mapping[str, nn.Parameter], sums: Sequence[Sum]) -> list[Started]:
    """Start sums of gradients: each bucket with the work to wait for before it is unpacked."""
    held = held_of(parameters)
    return [
        begin_one(one.group, members)
        for one in sums
        for members in held.buckets(one.names, one.bucket)
    ]


def begin_one(group: Group, members: Flat | Sequence[nn.Parameter]) -> Started:
    """Start the sum of one bucket: of what lies together, or is put together."""
    if isinstance(members, Flat):
        flat = members.start()
        count("all-reduce", group, flat)
        return members, world.all_reduce(flat, group.pg, wait=False)
    bucket = Bucket(members, group.device)
    count("all-reduce", group, bucket.flat)
    return bucket, world.all_reduce(bucket.flat, group.pg, wait=False)


class Bucket:
    """The gradients of some parameters in one flat tensor, and how many ranks had each.

    `device`: that of the group, to which gradients that lie in host memory go for the sum; those
    of a step without values stay where they are.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device = HOST) -> None:
        self.parameters = parameters
        self.locals = [local_part(parameter) for parameter in parameters]
        grads = [local_gradient(parameter) for parameter in parameters]
        self.all_here = all(g is not None for g in grads)
        home = gradient_device(parameters[0])
        parts = [
            (g if g is not None else torch.zeros_like(p, device=home)).reshape(-1)
            for g, p in zip(grads, self.locals)
        ]
        # one number a parameter behind the values: on how many ranks it got a gradient
        there = parts[0].new_ones(len(grads), dtype=self.locals[0].dtype)
        for place, grad in enumerate(grads):
            if grad is None:
                there[place] = 0
        self.flat = torch.cat([*parts, there])
        if on_accelerator(device):
            self.flat = sent(self.flat, device) if on_host(self.flat) else self.flat

    def unpack(self) -> None:
        """Give every parameter its part of the sum.

        Counts are looked at only where this rank had no gradient: the host waits for the device.
        """
        count = len(self.parameters)
        counts = [1.0] * count if self.all_here else self.flat[-count:].tolist()
        if on_accelerator(self.flat) and not on_accelerator(gradient_device(self.parameters[0])):
            self.flat = self.flat.cpu()
        at = 0
        for parameter, local, got in zip(self.parameters, self.locals, counts):
            if got:
                _set_gradient(parameter, self.flat[at : at + local.numel()].view_as(local))
            at += local.numel()


def _set_gradient(parameter: nn.Parameter, value: Tensor) -> None:
    current = local_gradient(parameter)
    if current is not None:
        current.copy_(value)
    elif isinstance(parameter, DTensor) and not leaves(parameter):
        parameter.grad = DTensor.from_local(
            value.clone(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        set_gradient(parameter, value.clone())


def square_sum(
    parameters: Mapping[str, nn.Parameter],
    speaks: Container[str],
    device: torch.device = HOST,
) -> Tensor:
    """The sum of squares of the gradients for which this rank speaks, in float64 or wider.

    It lies on `device`, if that is an accelerator's.
    """
    spoken = [p for name, p in parameters.items() if name in speaks]
    present = [g for g in local_gradients(spoken) if g.numel()]
    if not present:
        # without values everything lies on the meta device, wherever the rank is
        home = device if on_accelerator(device) else None
        return torch.zeros((), dtype=torch.float64, device=home)
    kinds = dict.fromkeys([g.device for g in present])
    apart = [torch._foreach_norm([g for g in present if g.device == kind]) for kind in kinds]
    sums = [torch.stack([*norms]).double().square().sum() for norms in apart]
    if on_accelerator(device):
        sums = [one.to(device, non_blocking=True) for one in sums]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def norm_alone(parameters: Mapping[str, nn.Parameter], clip: float | None) -> Tensor:
    """The norm of the gradients of a world of one, which are then bounded by `clip`.

    By torch's own functions, so that a plain loop gives the same to the last bit.
    """
    grads = [g for g in gradients_of(parameters.values()) if g is not None]
    kinds = list(dict.fromkeys([g.device for g in grads]))
    if len(kinds) < 2:
        norm = nn.utils.get_total_norm(grads)
    else:  # torch would send the norms of the others to the first device one by one
        there = next(filter(on_accelerator, kinds), kinds[0])
        apart = [nn.utils.get_total_norm([g for g in grads if g.device == k]) for k in kinds]
        norm = nn.utils.get_total_norm([sent(n, there) if on_host(n) else n for n in apart])
    if clip is not None and (on_accelerator(norm) or float(norm) > clip):
        for kind in kinds:
            held: Any = [SimpleNamespace(grad=g) for g in grads if g.device == kind]
            nn.utils.clip_grads_with_norm_(held, clip, norm)
    return norm


def clip_factor(norm: Tensor, clip: float) -> float | Tensor | None:
    """What gradients of this norm are multiplied by, as in torch.nn.utils.clip_grad_norm_.

    On an accelerator it is computed there, so that the host does not wait for the norm.  On a CPU
    the norm is at hand: None where it is below, and nothing is to be done.
    """
    if on_accelerator(norm):
        return torch.where(norm > clip, clip / (norm + 1e-6), 1.0)
    found = float(norm)
    return clip / (found + 1e-6) if found > clip else None


def scale_gradients(parameters: Mapping[str, nn.Parameter], factor: float | Tensor) -> None:
    """Multiply every gradient in place."""
    grads = local_gradients(parameters.values())
    if not isinstance(factor, Tensor):
        if grads:
            torch._foreach_mul_(grads, factor)
        return
    for home in dict.fromkeys([g.device for g in grads]):
        torch._foreach_mul_([g for g in grads if g.device == home], factor.to(home))
