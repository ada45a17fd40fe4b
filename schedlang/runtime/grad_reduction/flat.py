"""The parameters of a rank, and flat tensors that their gradients are parts of from step to step.

What is summed together lies together: the `.grad` of each parameter is a view of one tensor, into
which autograd adds, and which is summed as it is (DDP, Li et al. 2020, calls these buckets' views).
Nothing is put together before a sum, or copied back after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.runtime.storage.leaving import drop_gradients, gradient_device, leaves
from schedlang.runtime.storage.tiers import DEVICE, tier_of

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel


class Summed(Protocol):
    """What is summed together: these names, for a reason, up to so many bytes at once."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of parameters."""

    @property
    def kind(self) -> str:
        """What made their gradients parts."""

    @property
    def bucket(self) -> int | None:
        """Bytes at once, if not as usual."""


class Flat:
    """The gradients of some parameters in one tensor; behind them, how many ranks had each.

    Each view counts its own writes, so it is known who got a gradient in a step: the others have
    none, as if they had no view.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.views: list[Tensor] = []
        self.here: list[bool] = []  # which of them had a gradient on this rank when the sum began
        self._flat: Tensor | None = None
        self._there: Tensor | None = None
        self._before: list[int] = []
        self._open = False  # it is yet to be seen who gets one

    def _made(self) -> Tensor:
        if self._flat is None:
            sizes = [parameter.numel() for parameter in self.parameters]
            like = self.parameters[0].detach()
            self._flat = like.new_zeros(sum(sizes) + len(sizes))
            *parts, self._there = torch.split(self._flat, [*sizes, len(sizes)])
            # `.data` has a count of writes of its own
            both = zip(parts, self.parameters)
            self.views = [part.data.view(parameter.shape) for part, parameter in both]
        return self._flat

    def begin(self) -> None:
        """Zeros for a step; autograd adds to them."""
        with torch._C.DisableTorchFunction():
            self._made().zero_()
            for parameter, view in zip(self.parameters, self.views):
                parameter.grad = view
            self._before = self.written()
            self._open = True

    def written(self) -> list[int]:
        """How often each gradient was written into."""
        return [view._version for view in self.views]

    def at_home(self) -> bool:
        """Whether all gradients lie here: nothing has put another tensor in the place of one."""
        return bool(self.views) and all(
            [p.grad is view for p, view in zip(self.parameters, self.views)]
        )

    def settle(self) -> None:
        """Backward has ended: what got no gradient has none."""
        if not self._open:
            return
        self._open = False
        with torch._C.DisableTorchFunction():
            for parameter, view, before in zip(self.parameters, self.views, self._before):
                if view._version == before and parameter.grad is view:
                    parameter.grad = None

    def start(self) -> Tensor:
        """What is summed: the gradients that are here, wherever they came from, and who has one."""
        self.settle()
        with torch._C.DisableTorchFunction():
            flat, here = self._made(), []
            for parameter, view in zip(self.parameters, self.views):
                grad = parameter.grad
                here.append(grad is not None)
                if grad is None:
                    view.zero_()
                elif grad is not view:
                    parameter.grad = view.copy_(grad)
            assert self._there is not None
            self._there.fill_(1)
            for place in [k for k, got in enumerate(here) if not got]:
                self._there[place] = 0
        self.here = here
        return flat

    def unpack(self) -> None:
        """The sum is there: give those a gradient who got one on other ranks alone.

        Counts are looked at only where this rank had none: the host waits for the device.
        """
        if all(self.here):
            return
        assert self._there is not None
        for parameter, view, here, got in zip(
            self.parameters, self.views, self.here, self._there.tolist()
        ):
            if got and not here:
                parameter.grad = view


class Held(dict[str, nn.Parameter]):
    """The parameters of a rank by name, and what is constant of them while a program lives."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self.flats: list[Flat] = []
        self._flat: dict[int, Flat] = {}  # by id of a parameter
        self._loose: list[nn.Parameter] | None = None
        self._buckets: dict[object, list[Flat | list[nn.Parameter]]] = {}

    def flatten(self, sums: Sequence[Summed]) -> None:
        """Let gradients that are summed together be parts of one tensor: first those of replicas.

        Each is part of one; what is summed again over others, lies off the device, leaves it or is
        sliced is put together for its sum.
        """
        for one in sorted(sums, key=lambda one: one.kind != "replicas"):
            for members in in_buckets([self[n] for n in one.names], one.bucket):
                if all(map(self._free, members)):
                    flat = Flat(members)
                    self.flats.append(flat)
                    self._flat.update(dict.fromkeys(map(id, members), flat))
        self._loose = None
        self._buckets.clear()

    def _free(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient may be part of a flat tensor, and is of none yet."""
        away = leaves(parameter) or tier_of(parameter) != DEVICE
        return not away and not isinstance(parameter, DTensor) and id(parameter) not in self._flat

    def buckets(self, names: tuple[str, ...], most: int | None) -> list[Flat | list[nn.Parameter]]:
        """How the gradients of some are summed, up to so many bytes at once.

        What stands in a bucket follows from the names alone: all ranks of the group have the same
        ones. Whether a bucket lies together is each rank's own affair, for it is sent alike.
        """
        key = names, most
        if key not in self._buckets:
            found = in_buckets([self[name] for name in names], most)
            self._buckets[key] = [self._together(members) or members for members in found]
        return self._buckets[key]

    def _together(self, members: list[nn.Parameter]) -> Flat | None:
        """The flat tensor of exactly these, in their order, if there is one."""
        flat = self._flat.get(id(members[0]))
        same = flat is not None and list(map(id, flat.parameters)) == list(map(id, members))
        return flat if same else None

    def zero(self) -> None:
        """No gradients: a step begins."""
        for flat in self.flats:
            flat.begin()
        if self._loose is None:
            self._loose = [p for p in self.values() if id(p) not in self._flat]
        drop_gradients(self._loose)

    def settle(self) -> None:
        """Backward has ended: what got no gradient has none."""
        for flat in self.flats:
            flat.settle()


def held_of(parameters: Mapping[str, nn.Parameter]) -> Held:
    """The same, with what is constant of them."""
    return parameters if isinstance(parameters, Held) else Held(parameters)


def in_buckets(parameters: Sequence[nn.Parameter], most: int | None) -> list[list[nn.Parameter]]:
    """Parameters whose gradients are summed together: up to so many bytes of one kind."""
    sizes = [
        (part.numel() * part.element_size(), (part.dtype, gradient_device(p)))
        for p, part in ((p, local_part(p)) for p in parameters)
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


def local_part(parameter: nn.Parameter) -> Tensor:
    """What of a parameter lies on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
