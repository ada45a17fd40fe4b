"""Registers the simulated device with torch: `torch.device("sim")` and the module `torch.sim`."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from schedlang.runtime.adapters.torch_tensor import assignable
from schedlang.testing.accelerator import build

NAME = "sim"


@cache
def registered() -> Any:
    """The compiled module, after the device is known to torch; `Unavailable` says why not.

    Until `simulation.simulated` says how many devices there are, there are none: what asks torch
    for an accelerator finds it unavailable.
    """
    core = build.load()
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", NAME):
        raise build.Unavailable(f"another device holds torch's place for one more: {taken}")
    backend: Any = torch.utils.backend_registration
    backend.rename_privateuse1_backend(NAME)
    core.register()
    register_module: Any = torch._register_device_module
    register_module(NAME, _module(core))
    backend.generate_methods_for_privateuse1_backend(for_storage=True)
    _assignable(core)
    from schedlang.testing.accelerator import collectives

    collectives.register(core)
    return core


def _index(core: Any, device: Any) -> int:
    if device is None:
        return int(core.get_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(core.get_device()) if index is None else index


def _stream_classes(core: Any) -> tuple[type, type]:
    class Stream(torch.Stream):
        """A stream of the device, as `torch.cuda.Stream` is one of CUDA's."""

        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            if "stream_id" in given:
                return super().__new__(cls, **given)
            where = torch.device(NAME, _index(core, device))
            return super().__new__(cls, device=where, priority=priority)

    class Event(torch.Event):
        """An event of the device."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
            where = torch.device(NAME, core.get_device())
            return super().__new__(cls, device=where, enable_timing=enable_timing)

    return Stream, Event


def _module(core: Any) -> types.ModuleType:
    """What `torch.cuda` is for CUDA, as far as a program may ask for it."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.Stream, module.Event = _stream_classes(core)

    def index(device: Any = None) -> int:
        return _index(core, device)

    def where(device: Any = None) -> torch.device:
        return torch.device(NAME, index(device))

    @contextlib.contextmanager
    def stream(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream(stream.device)
        device = core.get_device()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            core.set_device(device)

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before = core.get_device()
        core.set_device(index(device))
        try:
            yield
        finally:
            core.set_device(before)

    number = torch._C._autograd.DeviceType.PrivateUse1.value
    module.stream, module.device = stream, device
    module.current_stream = lambda device=None: torch.accelerator.current_stream(where(device))
    module.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=index(device), device_type=number
    )
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = lambda device=None: torch.accelerator.synchronize(where(device))
    module.is_available = lambda: core.device_count() > 0
    module.device_count, module.current_device = core.device_count, core.get_device
    module.set_device = lambda device: core.set_device(index(device))
    module.get_device_name = lambda device=None: "simulated accelerator"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_bf16_supported = lambda *_: True
    module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module._initialized = True  # without it torch.utils.checkpoint keeps no generator state
    _generators(core, module, index)
    _memory(core, module, index)
    return module  # type: ignore[no-any-return]


def _generators(core: Any, module: Any, index: Any) -> None:
    def every(seed: int) -> None:
        for one in module.default_generators:
            one.manual_seed(seed)

    module.default_generators = [core.default_generator(i) for i in range(8)]
    module.manual_seed = lambda seed: core.default_generator(-1).manual_seed(seed)
    module.manual_seed_all = every
    module.initial_seed = lambda: core.default_generator(-1).initial_seed()
    module.get_rng_state = lambda device=None: core.default_generator(index(device)).get_state()

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        core.default_generator(index(device)).set_state(state)

    module.set_rng_state = set_state
    module.get_rng_state_all = lambda: [
        core.default_generator(i).get_state() for i in range(core.device_count())
    ]

    def set_all(states: list[torch.Tensor]) -> None:
        for i, state in enumerate(states):
            set_state(state, i)

    module.set_rng_state_all = set_all


def _memory(core: Any, module: Any, index: Any) -> None:
    """Bytes of tensors; no cache is simulated, so that reserved and allocated are the same."""
    module.memory_allocated = lambda device=None: core.memory(index(device))[0]
    module.max_memory_allocated = lambda device=None: core.memory(index(device))[1]
    module.memory_reserved = module.memory_allocated
    module.max_memory_reserved = module.max_memory_allocated
    module.reset_peak_memory_stats = lambda device=None: core.reset_peak(index(device))

    def statistics(device: Any = None) -> dict[str, int]:
        now, peak = core.memory(index(device))
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak}

    module.memory_stats = statistics
    module.empty_cache = lambda: None


def _assignable(core: Any) -> None:
    """`.data =` between host and device, as for CUDA: torch refuses it for a device of this kind.

    `module.to` keeps its Parameters by it, and FSDP2 moves offloaded gradients so.
    """

    def across(a: Any, b: Any) -> bool:
        plain = type(a) in (torch.Tensor, torch.nn.Parameter)
        return plain and {a.device.type, b.device.type} == {"cpu", NAME}

    assignable(across, core.shallow_set)
