"""The devices of this machine: the accelerator, its streams, generators and memory, by any name.

The only file that asks of what type a device is. Everything goes through `torch.accelerator` and
the module that torch has for a device, so that each kind of accelerator is served alike. On a CPU
there are no streams: what asks for one is given None, and what is given None does nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from schedlang.runtime.inside import Modules

HOST = torch.device("cpu")
MOVERS = ("cpu", "cuda")  # methods of tensors that give one on a device of that kind
_HOST = HOST.type
_NOT_THERE = "meta"  # shapes without bytes


class States(Protocol):
    """A generator of random numbers whose state can be read and put back."""

    def get_state(self) -> Tensor:
        """Return the state."""

    def set_state(self, new_state: Tensor) -> Any:
        """Stand there again."""

    def manual_seed(self, seed: int) -> Any:
        """Stand at the beginning of a stream."""


# ---- which device ---------------------------------------------------------------------------


def accelerator() -> torch.device | None:
    """The kind of accelerator that this machine has, without an index; None: it has none."""
    return torch.accelerator.current_accelerator(check_available=True)


def own_device(otherwise: int = 0) -> torch.device:
    """The device of this rank, made current: the one of LOCAL_RANK, or the CPU where there is none.

    A device other than the first that is current already was chosen by whoever started us, and
    stays. `otherwise` is the place where no starter tells LOCAL_RANK. Ranks beyond the devices of a
    machine share them, by turns; a rank that sees one device (as starters that hide the others have
    it) takes that.
    """
    kind = accelerator()
    if kind is None:
        return HOST
    place = torch.accelerator.current_device_index()
    if place == 0:
        told = os.environ.get("LOCAL_RANK", otherwise)
        place = int(told) % torch.accelerator.device_count()
        torch.accelerator.set_device_index(place)
    return torch.device(kind.type, place)


def indexed(device: torch.device) -> torch.device:
    """A device with its index: of an accelerator without one, the current."""
    if device.index is not None or not _accelerates(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def make_current(device: torch.device) -> None:
    """Have new tensors and kernels of this thread go to a device; nothing for a CPU."""
    if _accelerates(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def on_accelerator(where: Tensor | torch.device) -> bool:
    """Return whether a tensor lies, or a device is, apart from the host: neither CPU nor meta."""
    kind = (where.device if isinstance(where, Tensor) else where).type
    return kind != _HOST and kind != _NOT_THERE


def on_host(where: Tensor | torch.device) -> bool:
    """Return whether a tensor lies in the memory of the host."""
    return (where.device if isinstance(where, Tensor) else where).type == HOST.type


def not_there(where: Tensor | torch.device) -> bool:
    """Return whether a device has shapes and no bytes."""
    return (where.device if isinstance(where, Tensor) else where).type == _NOT_THERE


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64; Apple's does not."""
    return device.type != "mps"


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """The device of the first tensor that has one; of none, the CPU."""
    return next((tensor.device for tensor in tensors), HOST)


def _accelerates(device: torch.device) -> bool:
    return on_accelerator(device)


# ---- streams and events -----------------------------------------------------------------------


def has_streams(device: torch.device) -> bool:
    """Return whether work on a device is ordered by streams."""
    return _accelerates(device) and hasattr(torch.get_device_module(device), "Stream")


def new_stream(device: torch.device) -> torch.Stream | None:
    """A stream of its own on a device; None: it has none."""
    return torch.Stream(indexed(device)) if has_streams(device) else None


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which this thread's kernels run; None: it has none."""
    return torch.accelerator.current_stream(indexed(device)) if has_streams(device) else None


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Let this thread's kernels run on a stream, for the time of a block."""
    return nullcontext() if stream is None else stream


def follow(stream: torch.Stream | None, first: torch.Stream | None) -> None:
    """Let the work put on a stream from now on wait for all work on the first one."""
    if stream is not None and first is not None:
        stream.wait_stream(first)


def record(stream: torch.Stream | None) -> torch.Event | None:
    """A mark behind what stands on a stream now."""
    return None if stream is None else stream.record_event()


def wait(event: torch.Event | None, stream: torch.Stream | None) -> None:
    """Let the work put on a stream from now on wait for an event."""
    if event is not None and stream is not None:
        stream.wait_event(event)


def settled(event: torch.Event | None) -> None:
    """Have the host wait for a mark."""
    if event is not None:
        event.synchronize()


def used_on(tensor: Tensor, stream: torch.Stream | None) -> Tensor:
    """The tensor, whose memory is given to nobody before a stream is done with it."""
    if stream is not None and on_accelerator(tensor):
        tensor.record_stream(stream)
    return tensor


def synchronize(where: torch.device | torch.Stream | None) -> None:
    """Have the host wait for all that was started on a device or a stream; nothing for a CPU."""
    if isinstance(where, torch.Stream):
        where.synchronize()
    elif where is not None and _accelerates(where):
        torch.accelerator.synchronize(indexed(where))


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on a device; the host waits for nothing."""
    if has_streams(device):  # from pageable memory it would wait for the copy
        host = host_empty(host.shape, host.dtype, beside=device).copy_(host)
    return host.to(device, non_blocking=True)


def seeded(*words: object) -> torch.Generator:
    """A generator on the host whose numbers depend on some words alone."""
    digest = hashlib.blake2b(" ".join(map(str, words)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def at_hand(value: Tensor) -> Tensor | float:
    """Return what the host can read without a wait as a number, which no tensor keeps alive."""
    return float(value) if value.device.type == _HOST else value


def numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Numbers that may lie on a device, for which the host waits once."""
    values = [v.item() if isinstance(v, Tensor) and v.device.type == _HOST else v for v in values]
    there = [value for value in values if isinstance(value, Tensor)]
    if len({(one.device, one.dtype) for one in there}) == 1:
        told = iter(torch.stack([one.detach().reshape(()) for one in there]).tolist())
        values = [next(told) if isinstance(value, Tensor) else value for value in values]
    return [float(value) for value in values]


# ---- memory -----------------------------------------------------------------------------------


def host_empty(shape: Sequence[int], dtype: torch.dtype, *, beside: torch.device) -> Tensor:
    """A new tensor in host memory, pinned where it is for copies from or to an accelerator."""
    pinned = has_streams(beside)
    return torch.empty(tuple(shape), dtype=dtype, device=HOST, pin_memory=pinned)


def same_kind(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices are of one type, whatever their numbers."""
    return one.type == other.type


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes of tensors that a device held since `reset_peak`; None: nobody counts them."""
    told = _memory(device, "max_memory_allocated")
    return None if told is None else int(told)


def reset_peak(device: torch.device) -> None:
    """Count the peak from now on."""
    _memory(device, "reset_peak_memory_stats")


def total_bytes(device: torch.device) -> int | None:
    """The memory of a device, or of this machine; None: nobody tells it."""
    if on_host(device):
        names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
        pages, size = (os.sysconf(n) if n in os.sysconf_names else -1 for n in names)
        return pages * size if min(pages, size) > 0 else None
    told = _memory(device, "mem_get_info")
    return None if told is None else int(told[1])


def name_of(device: torch.device) -> str:
    """The name that a device's maker gave it; "" where nobody tells it."""
    told = _memory(device, "get_device_name")
    return "" if told is None else str(told)


def _memory(device: torch.device, name: str) -> Any:
    if not _accelerates(device):
        return None
    told = getattr(torch.get_device_module(device), name, None)
    return None if told is None else told(indexed(device))


# ---- random numbers ---------------------------------------------------------------------------


class _Module:
    """The generator of a device whose module shows it by its state alone."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def get_state(self) -> Tensor:
        """Let anybody draw or seed for the time of a block; default generators are then put back.

        Of the accelerator the current device's, unless nobody has begun to use it.
        """
        state: Tensor = self.module.get_rng_state()
        return state

    def set_state(self, new_state: Tensor) -> None:
        """Stand there again."""
        self.module.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        """Stand at the beginning of a stream."""
        self.module.manual_seed(seed)


def default_generator(device: torch.device) -> States:
    """The generator that operators on a device draw from where none is given."""
    if not _accelerates(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    if hasattr(module, "init"):
        module.init()  # generators are made with the device's context
    held = getattr(module, "default_generators", None)
    return held[indexed(device).index] if held else _Module(module)


def default_generators(devices: Iterable[torch.device]) -> list[States]:
    """The CPU's generator, from which seeds are drawn everywhere, and those of the devices."""
    apart = {indexed(device): None for device in devices if _accelerates(device)}
    return [torch.default_generator, *(default_generator(device) for device in apart)]


_draw_nothing: set[type] = set()  # classes of what modules have been seen to hold


def own_generators(inside: Modules) -> list[torch.Generator]:
    """The generators that some modules hold as plain attributes."""
    apart = [
        one for _, one in inside if not _draw_nothing.issuperset(map(type, vars(one).values()))
    ]
    if not apart:  # most modules, by classes alone, without a call of Python for each value
        return []
    # not by `isinstance`, which asks a class written in Python
    kinds = {type(value) for one in apart for value in vars(one).values()}
    made = {kind for kind in kinds if torch.Generator in kind.__mro__}
    _draw_nothing.update(kinds - made)
    held = [value for one in apart for value in vars(one).values() if type(value) in made]
    return list({id(value): value for value in held}.values())


class Replayed(AbstractContextManager[None]):
    """A context in which generators stand where they stood when it was made; after it, as
    before."""

    def __init__(self, generators: Iterable[States]) -> None:
        self.first = [(one, one.get_state()) for one in generators]
        self.now: list[list[tuple[States, Tensor]]] = []

    def __enter__(self) -> None:
        self.now.append([(one, one.get_state()) for one, _ in self.first])
        for one, state in self.first:
            one.set_state(state)

    def __exit__(self, *error: object) -> None:
        for one, state in self.now.pop():
            one.set_state(state)


def undrawn() -> AbstractContextManager[None]:
    """Let anybody draw or seed for the time of a block; default generators are then put back.

    Of the accelerator the current device's, unless nobody has begun to use it.
    """
    kind = accelerator()
    begun = kind is not None and getattr(torch.get_device_module(kind), "is_initialized", bool)()
    return Replayed(default_generators([kind] if kind is not None and begun else []))
