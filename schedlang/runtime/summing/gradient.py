"""Gradients made whole: sums over the ranks that each had a part, and their true global norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.runtime.collectives.collective import Group, count
from schedlang.runtime.storage.leaving import gradient_device, gradient_of, leaves, set_gradient

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel


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


def sum_gradients(parameters: Mapping[str, nn.Parameter], sums: Sequence[Sum]) -> None:
    """Replace each gradient by its sum over the group, bucket by bucket, in order of the sums.

    A parameter that got no gradient on any rank of the group keeps none.
    """
    for one in sums:
        for bucket, work in begin(parameters, [one]):
            if work is not None:
                work.wait()
            bucket.unpack()


def begin(parameters: Mapping[str, nn.Parameter], sums: Sequence[Sum]) -> list[tuple[Bucket, Any]]:
    """Start sums of gradients: each bucket with the work to wait for before it is unpacked."""
    return [
        begin_one(one.group, members)
        for one in sums
        for members in in_buckets([parameters[name] for name in one.names], one.bucket)
    ]


def begin_one(group: Group, members: Sequence[nn.Parameter]) -> tuple[Bucket, Any]:
    """Start the sum of one bucket."""
    bucket = Bucket(members)
    count("all-reduce", group, bucket.flat)
    work = None
    if group.pg is not None:
        work = dist.all_reduce(bucket.flat, group=group.pg, async_op=True)
    return bucket, work


def in_buckets(parameters: Sequence[nn.Parameter], most: int | None) -> list[list[nn.Parameter]]:
    """Parameters whose gradients are summed together: up to so many bytes of one kind."""
    sizes = [
        (_local(p).numel() * _local(p).element_size(), (_local(p).dtype, gradient_device(p)))
        for p in parameters
    ]
    return [[parameters[k] for k in bucket] for bucket in buckets(sizes, most)]


def buckets(sizes: Sequence[tuple[int, object]], most: int | None = None) -> list[list[int]]:
    """Which tensors, of these bytes and kinds (dtypes), are summed together: runs of one kind."""
    limit = BUCKET_BYTES if most is None else most
    found: list[list[int]] = []
    room, kind = 0, object()
    for place, (size, dtype) in enumerate(sizes):
        if kind != dtype or size > room:
            found.append([])
            room, kind = limit, dtype
        found[-1].append(place)
        room -= size
    return found


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Bucket:
    """The gradients of some parameters in one flat tensor, and how many ranks had each."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.locals = [_local(parameter) for parameter in parameters]
        grads = [local_gradient(parameter) for parameter in parameters]
        # one number a parameter behind the values: on how many ranks it got a gradient
        there = torch.tensor([g is not None for g in grads], dtype=self.locals[0].dtype)
        device = gradient_device(parameters[0])
        parts = [
            (g if g is not None else torch.zeros_like(p, device=device)).reshape(-1)
            for g, p in zip(grads, self.locals)
        ]
        self.flat = torch.cat([*parts, there.to(parts[0].device)])

    def unpack(self) -> None:
        """Give every parameter its part of the sum."""
        counts = self.flat[-len(self.parameters) :].tolist()
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
            value.clone(), parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
    else:
        set_gradient(parameter, value.clone())


def square_sum(parameters: Mapping[str, nn.Parameter], speaks: Callable[[str], bool]) -> Tensor:
    """The sum of squares of the gradients for which this rank speaks, in float64 or wider."""
    grads = [local_gradient(p) for name, p in parameters.items() if speaks(name)]
    present = [g for g in grads if g is not None and g.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float64)
    kinds = dict.fromkeys(g.device for g in present)
    apart = [torch._foreach_norm([g for g in present if g.device == kind]) for kind in kinds]
    sums = [torch.stack([n.double() for n in norms]).square().sum() for norms in apart]
    return sums[0] if len(sums) == 1 else torch.stack([one.cpu() for one in sums]).sum()


def norm_alone(parameters: Mapping[str, nn.Parameter], clip: float | None) -> float:
    """The norm of the gradients of a world of one, which are then bounded by `clip`.

    By torch's own functions, so that a plain loop gives the same to the last bit.
    """
    grads = [g for p in parameters.values() if (g := gradient_of(p)) is not None]
    norm = nn.utils.get_total_norm(grads)
    if clip is not None and float(norm) > clip:
        there: Any = [SimpleNamespace(grad=grad) for grad in grads]  # all that torch looks at
        nn.utils.clip_grads_with_norm_(there, clip, norm)
    return float(norm)


def scale_gradients(parameters: Mapping[str, nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    grads = [g for p in parameters.values() if (g := local_gradient(p)) is not None]
    if grads:
        torch._foreach_mul_(grads, factor)
