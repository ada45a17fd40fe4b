"""Devices of this machine: the accelerator, its streams, random generators and memory.

The only file that asks for the type of a device. Everything goes through `torch.accelerator` and
torch's module for a device, so that each kind of accelerator is treated alike. A CPU has no
streams: functions that return a stream return None there, and functions that accept one do nothing
for None.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from schedlang.runtime.submodules import Modules

HOST = torch.device("cpu")
DEVICE_METHODS = ("cpu", "cuda")  # methods of tensors that copy to a device of that kind
_HOST = HOST.type
_NOT_THERE = "meta"  # shapes without storage


class RandomGenerator(Protocol):
    """A random number generator whose state can be read and set."""

    def get_state(self) -> Tensor:
        """Return the state."""

    def set_state(self, new_state: Tensor) -> Any:
        """Set the state."""

    def manual_seed(self, seed: int) -> Any:
        """Set the state to the beginning of the stream of a seed."""


# ---- which device ---------------------------------------------------------------------------


def operator_context() -> tuple[object, ...]:
    """Return what context managers of torch set for operators: gradients, inference, autocast."""
    autocasts = [
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICE_METHODS
    ]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocasts


def accelerator() -> torch.device | None:
    """Return the kind of this machine's accelerator, without an index; None: it has none."""
    return torch.accelerator.current_accelerator(check_available=True)


def local_device(otherwise: int = 0) -> torch.device:
    """Make the device of this rank current and return it: LOCAL_RANK's, or the CPU without
    accelerator.

    If the current device is not the first, the launcher has chosen it, and it stays. `otherwise` is
    the index where LOCAL_RANK is not set. Ranks beyond the devices of a machine share them, round
    robin; a rank that sees one device (some launchers hide the others) uses that one.
    """
    kind = accelerator()
    if kind is None:
        return HOST
    index = torch.accelerator.current_device_index()
    if index == 0:
        local_rank = os.environ.get("LOCAL_RANK", otherwise)
        index = int(local_rank) % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index: for an accelerator without one, the current index."""
    if device.index is not None or not _accelerates(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def set_current_device(device: torch.device) -> None:
    """Make a device the default for new tensors and kernels of this thread; do nothing for a
    CPU."""
    if _accelerates(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def on_accelerator(holder: Tensor | torch.device) -> bool:
    """Return whether a tensor or device is on an accelerator: neither CPU nor meta."""
    kind = (holder.device if isinstance(holder, Tensor) else holder).type
    return kind != _HOST and kind != _NOT_THERE


def on_host(holder: Tensor | torch.device) -> bool:
    """Return whether a tensor is in host memory."""
    return (holder.device if isinstance(holder, Tensor) else holder).type == HOST.type


def is_meta(holder: Tensor | torch.device) -> bool:
    """Return whether a tensor or device is the meta device: shapes without storage."""
    return (holder.device if isinstance(holder, Tensor) else holder).type == _NOT_THERE


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64; Apple's does not."""
    return device.type != "mps"


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of the first tensor; the CPU if there are no tensors."""
    return next((tensor.device for tensor in tensors), HOST)


def _accelerates(device: torch.device) -> bool:
    return on_accelerator(device)


# ---- streams and events -----------------------------------------------------------------------


def has_streams(device: torch.device) -> bool:
    """Return whether work on a device is ordered by streams."""
    return _accelerates(device) and hasattr(torch.get_device_module(device), "Stream")


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream on a device; None: the device has no streams."""
    return torch.Stream(with_index(device)) if has_streams(device) else None


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream on which this thread's kernels run; None: the device has no streams."""
    return torch.accelerator.current_stream(with_index(device)) if has_streams(device) else None


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Return a context in which this thread's kernels run on a stream."""
    return nullcontext() if stream is None else stream


def queue_stream_wait(stream: torch.Stream | None, awaited: torch.Stream | None) -> None:
    """Let later work on a stream wait for all work that is now on `awaited`."""
    if stream is not None and awaited is not None:
        stream.wait_stream(awaited)


def mark_stream(stream: torch.Stream | None) -> torch.Event | None:
    """Record an event at the end of the work that is now on a stream."""
    return None if stream is None else stream.record_event()


def queue_event_wait(event: torch.Event | None, stream: torch.Stream | None) -> None:
    """Let later work on a stream wait for an event."""
    if event is not None and stream is not None:
        stream.wait_event(event)


def host_wait(event: torch.Event | None) -> None:
    """Block the host until an event is reached."""
    if event is not None:
        event.synchronize()


def hold_for_stream(tensor: Tensor, stream: torch.Stream | None) -> Tensor:
    """Return the tensor; its memory is not reused before the stream has finished with it."""
    if stream is not None and on_accelerator(tensor):
        tensor.record_stream(stream)
    return tensor


def synchronize(target: torch.device | torch.Stream | None) -> None:
    """Block the host until all work on a device or a stream is done; do nothing for a CPU."""
    if isinstance(target, torch.Stream):
        target.synchronize()
    elif target is not None and _accelerates(target):
        torch.accelerator.synchronize(with_index(target))


def send_to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the host to a device, without blocking the host."""
    if has_streams(device):  # a copy from pageable memory would block
        host = host_empty(host.shape, host.dtype, beside=device).copy_(host)
    return host.to(device, non_blocking=True)


def seeded_generator(*seeds: object) -> torch.Generator:
    """Return a generator on the host whose seed is a hash of the words."""
    digest = hashlib.blake2b(" ".join(map(str, seeds)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def host_number(value: Tensor) -> Tensor | float:
    """Return a host tensor of one number as a float, so that no tensor is kept alive; else the
    tensor."""
    return float(value) if value.device.type == _HOST else value


def plain_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return plain numbers; the host waits at most once for those on a device."""
    values = [v.item() if isinstance(v, Tensor) and v.device.type == _HOST else v for v in values]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1:
        fetched = iter(torch.stack([tensor.detach().reshape(()) for tensor in tensors]).tolist())
        values = [next(fetched) if isinstance(value, Tensor) else value for value in values]
    return [float(value) for value in values]


# ---- memory -----------------------------------------------------------------------------------


def host_empty(shape: Sequence[int], dtype: torch.dtype, *, beside: torch.device) -> Tensor:
    """Return a new tensor in host memory, pinned if `beside` is an accelerator, for fast copies."""
    pinned = has_streams(beside)
    return torch.empty(tuple(shape), dtype=dtype, device=HOST, pin_memory=pinned)


def same_kind(device: torch.device, other: torch.device) -> bool:
    """Return whether two devices are of one type, whatever their indices."""
    return device.type == other.type


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak bytes of tensors on a device since `reset_peak`; None: not counted there."""
    peak = _memory(device, "max_memory_allocated")
    return None if peak is None else int(peak)


def reset_peak(device: torch.device) -> None:
    """Begin to count the peak anew."""
    _memory(device, "reset_peak_memory_stats")


def total_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory of a device, or of this machine for the CPU; None: not known."""
    if on_host(device):
        names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
        pages, size = (os.sysconf(n) if n in os.sysconf_names else -1 for n in names)
        return pages * size if min(pages, size) > 0 else None
    free_and_total = _memory(device, "mem_get_info")
    return None if free_and_total is None else int(free_and_total[1])


def device_name(device: torch.device) -> str:
    """Return the product name of a device; "" if not known."""
    name = _memory(device, "get_device_name")
    return "" if name is None else str(name)


def _memory(device: torch.device, name: str) -> Any:
    if not _accelerates(device):
        return None
    function = getattr(torch.get_device_module(device), name, None)
    return None if function is None else function(with_index(device))


# ---- random numbers ---------------------------------------------------------------------------


class _StateOnlyGenerator:
    """The generator of a device whose torch module gives only its state."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def get_state(self) -> Tensor:
        """Return the state."""
        state: Tensor = self.module.get_rng_state()
        return state

    def set_state(self, new_state: Tensor) -> None:
        """Set the state."""
        self.module.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        """Set the state to the beginning of the stream of a seed."""
        self.module.manual_seed(seed)


def default_generator(device: torch.device) -> RandomGenerator:
    """Return the generator that operators on a device use by default."""
    if not _accelerates(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    if hasattr(module, "init"):
        module.init()  # generators are made with the device's context
    generators = getattr(module, "default_generators", None)
    return generators[with_index(device).index] if generators else _StateOnlyGenerator(module)


def default_generators(devices: Iterable[torch.device]) -> list[RandomGenerator]:
    """Return the CPU's generator, which gives seeds to all devices, and those of the given
    devices."""
    distinct = {with_index(device): None for device in devices if _accelerates(device)}
    return [torch.default_generator, *(default_generator(device) for device in distinct)]


_draw_nothing: set[type] = set()  # classes of attributes of modules that hold no generator


def module_generators(modules: Modules) -> list[torch.Generator]:
    """Return the generators that modules hold as plain attributes."""
    candidates = [
        m for _, m in modules if not _draw_nothing.issuperset(map(type, vars(m).values()))
    ]
    # most modules: decided by classes alone, without a Python call for each value
    if not candidates:
        return []
    # not by `isinstance`, which calls into classes written in Python
    kinds = {type(value) for m in candidates for value in vars(m).values()}
    drawing = {kind for kind in kinds if torch.Generator in kind.__mro__}
    _draw_nothing.update(kinds - drawing)
    generators = [value for m in candidates for value in vars(m).values() if type(value) in drawing]
    return list({id(value): value for value in generators}.values())


class RestoredGenerators(AbstractContextManager[None]):
    """A context in which generators have the states from when it was made; it restores them
    after."""

    def __init__(self, generators: Iterable[RandomGenerator]) -> None:
        self.first = [(generator, generator.get_state()) for generator in generators]
        self.now: list[list[tuple[RandomGenerator, Tensor]]] = []

    def __enter__(self) -> None:
        self.now.append([(generator, generator.get_state()) for generator, _ in self.first])
        for generator, state in self.first:
            generator.set_state(state)

    def __exit__(self, *error: object) -> None:
        for generator, state in self.now.pop():
            generator.set_state(state)


def generators_restored() -> AbstractContextManager[None]:
    """Return a context that restores the default generators' states: code inside may draw or seed.

    Of an accelerator, the current device's generator is included, unless the device is not in use
    yet.
    """
    kind = accelerator()
    begun = kind is not None and getattr(torch.get_device_module(kind), "is_initialized", bool)()
    return RestoredGenerators(default_generators([kind] if kind is not None and begun else []))
