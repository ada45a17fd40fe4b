"""Reduction of gradients over ranks: flat buckets, all-reduces, and the global norm.

`sum_gradients` runs after the last backward of a step; `pipeline.overlapped_sums` begins earlier.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.runtime.adapters.torch_tensor import storage_uses
from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import Group, count
from schedlang.runtime.device import HOST, on_accelerator, on_host, send_to_device
from schedlang.runtime.grad_reduction.gradient_hooks import GradientHooks
from schedlang.runtime.storage.offloaded_gradients import (
    OFFLOADED,
    as_dtensor_like,
    drop_gradients,
    gradient_device,
    gradient_of,
    gradients_of,
    local_tensor,
    offloads_gradient,
    set_gradient,
)
from schedlang.runtime.storage.tiers import DEVICE, tier_of

# ---- The parameters of a rank, and flat tensors of their gradients that last from step to step.
# The `.grad` of each parameter in a bucket is a view of one tensor, into which autograd adds, and
# which is all-reduced as it is (gradient_as_bucket_view of DDP, Li et al. 2020). Nothing is copied
# before a reduction or after it.


BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel


@dataclass(frozen=True)
class GradientReduction:
    """One reduction: the gradients of these parameters are partial over this group.

    bucket  bytes per bucket, at most, if not the default; a larger gradient has a bucket of its own
    """

    group: Group
    names: tuple[str, ...]
    kind: str  # "replicas", "partial" or "tied": what made them parts
    bucket: int | None = None


class FlatGradients:
    """The gradients of some parameters in one tensor, followed by the number of ranks that had
    each.

    Each view has its own version counter, which shows who got a gradient in a step: the others have
    none, as if they had no view.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.views: list[Tensor] = []
        # whether each had a gradient on this rank when the reduction began
        self.here: list[bool] = []
        self._flat: Tensor | None = None
        self._counts: Tensor | None = None
        self._before: list[int] = []
        self._references: list[int] = []  # to each view, when it was made
        self._aliases = 0  # tensors of the storage
        self._unsettled = False  # backward runs: who gets a gradient is not known yet

    def _flat_tensor(self) -> Tensor:
        if self._flat is None:
            self._flat = self._make_views()
            self._references = self._count_references()
            self._aliases = storage_uses(self._flat)
        return self._flat

    def _make_views(self) -> Tensor:
        """Return a new flat tensor; gradients and counts are views of it."""
        sizes = [parameter.numel() for parameter in self.parameters]
        template = self.parameters[0].detach()
        flat = template.new_zeros(sum(sizes) + len(sizes))
        *parts, self._counts = torch.split(flat, [*sizes, len(sizes)])
        # `.data` has a version counter of its own
        pairs = zip(parts, self.parameters)
        self.views = [part.data.view(parameter.shape) for part, parameter in pairs]
        return flat

    def _is_held(self) -> bool:
        """Return whether a loop has kept gradients of the last step, which zeros would replace."""
        if self._flat is None:
            return False
        references = self._count_references()
        return references != self._references or storage_uses(self._flat) > self._aliases

    def _count_references(self) -> list[int]:
        """Return the references to each view in Python, without that of its parameter."""
        counts = list(map(sys.getrefcount, self.views))
        kept = [p.grad is view for p, view in zip(self.parameters, self.views)]
        return [count - by_parameter for count, by_parameter in zip(counts, kept)]

    def zero(self) -> None:
        """Zero all gradients for a step; autograd adds to them.

        Gradients that a loop has kept stay as they are: the step gets another tensor.
        """
        with torch._C.DisableTorchFunction():
            if self._is_held():
                self._flat, self.views = None, []
            self._flat_tensor().zero_()
            for parameter, view in zip(self.parameters, self.views):
                parameter.grad = view
            self._before = self.write_counts()
            self._unsettled = True

    def write_counts(self) -> list[int]:
        """Return the number of writes into each gradient."""
        return [view._version for view in self.views]

    def is_in_place(self) -> bool:
        """Return whether all gradients are views of this tensor: none was replaced."""
        return bool(self.views) and all(
            [p.grad is view for p, view in zip(self.parameters, self.views)]
        )

    def drop_unwritten(self) -> None:
        """Set `.grad` to None where backward made no gradient."""
        if not self._unsettled:
            return
        self._unsettled = False
        with torch._C.DisableTorchFunction():
            for parameter, view, version in zip(self.parameters, self.views, self._before):
                if view._version == version and parameter.grad is view:
                    parameter.grad = None

    def collect(self) -> Tensor:
        """Return the flat tensor to reduce, with gradients from wherever they are, and flags."""
        self.drop_unwritten()
        with torch._C.DisableTorchFunction():
            flat, present = self._flat_tensor(), []
            for parameter, view in zip(self.parameters, self.views):
                grad = parameter.grad
                present.append(grad is not None)
                if grad is None:
                    view.zero_()
                elif grad is not view:
                    parameter.grad = view.copy_(grad)
            assert self._counts is not None
            self._counts.fill_(1)
            for index in [k for k, has_grad in enumerate(present) if not has_grad]:
                self._counts[index] = 0
        self.here = present
        return flat

    def unpack(self) -> None:
        """Set gradients that only other ranks had, after the reduction.

        Counts are read only if this rank had none: the host waits for the device.
        """
        if all(self.here):
            return
        assert self._counts is not None
        for parameter, view, present, users in zip(
            self.parameters, self.views, self.here, self._counts.tolist()
        ):
            if users and not present:
                parameter.grad = view


class LocalParameters(dict[str, nn.Parameter]):
    """The parameters of a rank by name, with state that is constant while a program lives."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self.flats: list[FlatGradients] = []
        self._flat: dict[int, FlatGradients] = {}  # by id of a parameter
        self._loose: list[nn.Parameter] | None = None
        self._buckets: dict[object, list[FlatGradients | list[nn.Parameter]]] = {}
        self.unreduced: frozenset[str] = frozenset()  # frozen ones that no step can train
        self.stepping = False  # a step runs: its gradients will be reduced
        self.broken = False  # an exception has ended the last step or evaluation
        self.hooks: GradientHooks | None = None  # a user's, in this step
        self.guarded = False  # the module was handed out: see `user_loops`
        self.shapes: dict[str, torch.Size] = {}  # of its shards, from then on
        # the first gradient with which a step has updated, the number of writes into it, by which
        self.used: tuple[ref[Tensor], int, ref[torch.optim.Optimizer]] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark the block as the forwards and backwards of a step; hooks wait until its end."""
        self.stepping = self.broken = True
        hooked = [
            parameter
            for parameter in self.values()
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ]
        self.hooks = GradientHooks(self, hooked) if hooked else None
        try:
            with nullcontext() if self.hooks is None else self.hooks.held_back():
                yield
            self.broken = False
        finally:
            self.stepping = False

    def flatten(self, reductions: Sequence[GradientReduction]) -> None:
        """Make gradients that are reduced together views of one tensor, replicas first.

        Each gradient is in one tensor; a gradient that is reduced again over another group, is off
        the device or moves off, or is a DTensor, is copied into a bucket for its reduction.
        """
        for reduction in sorted(reductions, key=lambda reduction: reduction.kind != "replicas"):
            for members in bucket_parameters([self[n] for n in reduction.names], reduction.bucket):
                if all(map(self._can_flatten, members)):
                    flat = FlatGradients(members)
                    self.flats.append(flat)
                    self._flat.update(dict.fromkeys(map(id, members), flat))
        self._loose = None
        self._buckets.clear()

    def _can_flatten(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient may be part of a flat tensor, and is not yet."""
        offloaded = offloads_gradient(parameter) or tier_of(parameter) != DEVICE
        return (
            not offloaded and not isinstance(parameter, DTensor) and id(parameter) not in self._flat
        )

    def buckets(
        self, names: tuple[str, ...], bucket_bytes: int | None
    ) -> list[FlatGradients | list[nn.Parameter]]:
        """Return the buckets in which gradients are reduced, each of at most `bucket_bytes` bytes.

        The members of a bucket follow from the names alone: all ranks of the group have the same.
        Whether a bucket is flat may differ by rank, because the message is the same.
        """
        key = names, bucket_bytes
        if key not in self._buckets:
            buckets = bucket_parameters([self[name] for name in names], bucket_bytes)
            self._buckets[key] = [self._flat_of(members) or members for members in buckets]
        return self._buckets[key]

    def _flat_of(self, members: list[nn.Parameter]) -> FlatGradients | None:
        """Return the flat tensor of exactly these parameters, in order, if there is one."""
        flat = self._flat.get(id(members[0]))
        same_members = flat is not None and list(map(id, flat.parameters)) == list(map(id, members))
        return flat if same_members else None

    def zero(self) -> None:
        """Drop all gradients, at the begin of a step.

        Raises Refusal S617 if a loop trains a parameter whose gradient the step would not reduce,
        and within torch.inference_mode.
        """
        if torch.is_inference_mode_enabled():  # no tensor of the step would have a gradient
            title = "no step can train within `torch.inference_mode()`"
            helps = ("call `train_step` outside of it",)
            raise Refusal.of("S617", title, helps=helps).at(python_span())
        if any(self[name].requires_grad for name in self.unreduced if name in self):
            raise self._untrained_refusal()
        for name in self.shapes:  # a mark of `shard_gradients` keeps the storage of a flat tensor
            self[name].grad = None
        for flat in self.flats:
            flat.zero()
        if self._loose is None:
            self._loose = [p for p in self.values() if id(p) not in self._flat]
        drop_gradients(self._loose)

    def _untrained_refusal(self) -> Refusal:
        name = next(n for n, p in self.items() if n in self.unreduced and p.requires_grad)
        return Refusal.of(
            "S617",
            f"`{name}` is trained now, and was frozen when the program was built",
            notes=("a step sums gradients over ranks only of what was trained then",),
            helps=(
                "build the program with all that is ever trained, and freeze it afterwards:"
                " `parameter.requires_grad_(False)`",
            ),
        ).at(python_span())

    def drop_unwritten(self) -> None:
        """Set `.grad` to None where backward made no gradient."""
        for flat in self.flats:
            flat.drop_unwritten()


def as_local_parameters(parameters: Mapping[str, nn.Parameter]) -> LocalParameters:
    """Return the parameters as LocalParameters."""
    return parameters if isinstance(parameters, LocalParameters) else LocalParameters(parameters)


def bucket_parameters(
    parameters: Sequence[nn.Parameter], bucket_bytes: int | None
) -> list[list[nn.Parameter]]:
    """Return runs of parameters whose gradients are reduced together: of one kind, in bytes
    limited."""
    sizes = [
        (part.numel() * part.element_size(), (part.dtype, gradient_device(p)))
        for p, part in ((p, local_tensor(p)) for p in parameters)
    ]
    return [[parameters[k] for k in bucket] for bucket in bucket_indices(sizes, bucket_bytes)]


def bucket_indices(
    sizes: Sequence[tuple[int, object]], bucket_bytes: int | None = None
) -> list[list[int]]:
    """Return runs of indices of tensors of one kind that are reduced together, from bytes and
    kinds."""
    limit = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    buckets: list[list[int]] = []
    bytes_left, kind = 0, object()
    for index, (size, dtype) in enumerate(sizes):
        if kind != dtype or size > bytes_left:
            buckets.append([])
            bytes_left, kind = limit, dtype
        buckets[-1].append(index)
        bytes_left -= size
    return buckets


# ---- Reductions.


StartedSum = tuple["FlatGradients | Bucket", Any]  # a reduction that has begun, and its handle


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the local shard of a gradient as a plain tensor."""
    grad = gradient_of(parameter)
    return grad.to_local() if isinstance(grad, DTensor) else grad


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of parameters that have one, with few calls of Python."""
    grads = [
        p.grad if OFFLOADED not in p.__dict__ and not isinstance(p, DTensor) else local_gradient(p)
        for p in parameters
    ]
    return [grad for grad in grads if grad is not None]


def sum_gradients(
    parameters: Mapping[str, nn.Parameter], reductions: Sequence[GradientReduction]
) -> None:
    """All-reduce each gradient over its group, bucket by bucket, in order of the sums.

    A parameter that got no gradient on any rank of the group keeps none.
    """
    local_parameters = as_local_parameters(parameters)
    local_parameters.drop_unwritten()
    for reduction in reductions:
        for bucket, work in begin_sums(local_parameters, [reduction]):
            if work is not None:
                work.wait()
            bucket.unpack()


def begin_sums(
    parameters: Mapping[str, nn.Parameter], reductions: Sequence[GradientReduction]
) -> list[StartedSum]:
    """Start reductions: return each bucket with the work to wait for before it is unpacked."""
    local_parameters = as_local_parameters(parameters)
    return [
        begin_bucket(reduction.group, members)
        for reduction in reductions
        for members in local_parameters.buckets(reduction.names, reduction.bucket)
    ]


def begin_bucket(group: Group, members: FlatGradients | Sequence[nn.Parameter]) -> StartedSum:
    """Start the reduction of one bucket, flat or copied together."""
    if isinstance(members, FlatGradients):
        flat = members.collect()
        count("all-reduce", group, flat)
        return members, world.all_reduce(flat, group.pg, wait=False)
    bucket = Bucket(members, group.device)
    count("all-reduce", group, bucket.flat)
    return bucket, world.all_reduce(bucket.flat, group.pg, wait=False)


class Bucket:
    """The gradients of some parameters copied into one tensor, and the number of ranks that had
    each.

    `device`: that of the group, to which gradients in host memory are copied for the reduction;
    those of a dry run stay where they are.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device = HOST) -> None:
        self.parameters = parameters
        self.locals = [local_tensor(parameter) for parameter in parameters]
        grads = [local_gradient(parameter) for parameter in parameters]
        self.all_here = all(g is not None for g in grads)
        grad_device = gradient_device(parameters[0])
        parts = [
            (g if g is not None else torch.zeros_like(p, device=grad_device)).reshape(-1)
            for g, p in zip(grads, self.locals)
        ]
        # one number per parameter after the values: how many ranks had its gradient
        presence = parts[0].new_ones(len(grads), dtype=self.locals[0].dtype)
        for index, grad in enumerate(grads):
            if grad is None:
                presence[index] = 0
        self.flat = torch.cat([*parts, presence])
        if on_accelerator(device):
            self.flat = send_to_device(self.flat, device) if on_host(self.flat) else self.flat

    def unpack(self) -> None:
        """Copy the reduced gradients back to the parameters.

        Counts are read only if this rank lacked a gradient: the host waits for the device.
        """
        num_parameters = len(self.parameters)
        counts = [1.0] * num_parameters if self.all_here else self.flat[-num_parameters:].tolist()
        if on_accelerator(self.flat) and not on_accelerator(gradient_device(self.parameters[0])):
            self.flat = self.flat.cpu()
        offset = 0
        for parameter, part, users in zip(self.parameters, self.locals, counts):
            if users:
                replace_gradient(parameter, self.flat[offset : offset + part.numel()].view_as(part))
            offset += part.numel()


def replace_gradient(parameter: nn.Parameter, value: Tensor) -> None:
    """Write this rank's shard over the present gradient, or set it as the gradient."""
    current = local_gradient(parameter)
    if current is not None:
        current.copy_(value)
    elif isinstance(parameter, DTensor) and not offloads_gradient(parameter):
        parameter.grad = as_dtensor_like(value.clone(), parameter)
    else:
        set_gradient(parameter, value.clone())


def square_sum(
    parameters: Mapping[str, nn.Parameter], primary: Container[str], device: torch.device = HOST
) -> Tensor:
    """Return the sum of squares of the gradients that this rank counts (`primary`), at least in
    float64.

    On `device`, if that is an accelerator.
    """
    primaries = [p for name, p in parameters.items() if name in primary]
    present = [g for g in local_gradients(primaries) if g.numel()]
    if not present:
        # a dry run is on the meta device
        sum_device = device if on_accelerator(device) else None
        return torch.zeros((), dtype=torch.float64, device=sum_device)
    devices = dict.fromkeys([g.device for g in present])
    single = len(devices) == 1  # as almost always: one pass
    by_device = [
        present if single else [g for g in present if g.device == kind] for kind in devices
    ]
    norms = [torch.stack(torch._foreach_norm(grads)).double() for grads in by_device]
    sums = [value.square_().sum() for value in norms]
    if on_accelerator(device):
        sums = [value.to(device, non_blocking=True) for value in sums]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def norm_on_one_rank(parameters: Mapping[str, nn.Parameter], clip: float | None) -> Tensor:
    """Return the gradient norm of a world of one rank, and clip the gradients to `clip`.

    By torch's own functions, so that a plain loop gives the same bits.
    """
    grads = [g for g in gradients_of(parameters.values()) if g is not None]
    devices = list(dict.fromkeys([g.device for g in grads]))
    if len(devices) < 2:
        norm = nn.utils.get_total_norm(grads)
    else:  # torch would copy norms to the first device one by one
        target = next(filter(on_accelerator, devices), devices[0])
        by_device = [nn.utils.get_total_norm([g for g in grads if g.device == k]) for k in devices]
        norm = nn.utils.get_total_norm(
            [send_to_device(n, target) if on_host(n) else n for n in by_device]
        )
    if clip is not None and (on_accelerator(norm) or float(norm) > clip):
        for grad_device in devices:
            holders: Any = [SimpleNamespace(grad=g) for g in grads if g.device == grad_device]
            nn.utils.clip_grads_with_norm_(holders, clip, norm)
    return norm


def clip_factor(norm: Tensor | float, clip: float) -> float | Tensor | None:
    """Return the factor for gradients of this norm, as in torch.nn.utils.clip_grad_norm_.

    On an accelerator it is computed there, so that the host does not wait for the norm. On a CPU it
    is None if the norm is below `clip`: there is nothing to scale.
    """
    if isinstance(norm, Tensor) and on_accelerator(norm):
        return torch.where(norm > clip, clip / (norm + 1e-6), 1.0)
    value = float(norm)
    return clip / (value + 1e-6) if value > clip else None


def scale_gradients(parameters: Mapping[str, nn.Parameter], factor: float | Tensor) -> None:
    """Multiply every gradient in place."""
    grads = local_gradients(parameters.values())
    if not isinstance(factor, Tensor):
        if grads:
            torch._foreach_mul_(grads, factor)
        return
    for grad_device in dict.fromkeys([g.device for g in grads]):
        torch._foreach_mul_([g for g in grads if g.device == grad_device], factor.to(grad_device))
