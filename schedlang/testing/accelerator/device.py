"""The simulated device: compiled on first use, registered with torch as `sim` and `torch.sim`.

It is compiled once for a version of torch and of its own code. The library is stored in
`TORCH_EXTENSIONS_DIR` or the user's cache folder; processes that need it at the same time wait for
the one that compiles.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from schedlang.runtime.adapters.torch_tensor import patch_data_assignment

LIBRARY = "schedlang_simulated_accelerator"
SOURCES = Path(__file__).with_name("csrc")
# NDEBUG as in torch's build: without it some of torch's classes have other fields
_FLAGS = ("-std=c++20", "-fPIC", "-O1", "-g0", "-w", "-DNDEBUG", "-DUSE_DISTRIBUTED", "-DUSE_C10D")


class Unavailable(RuntimeError):
    """Raised with the reason if the device cannot be simulated here."""


def unavailable() -> str:
    """Return why the device cannot be simulated here; "" if it probably can."""
    if sys.platform != "linux":
        return f"the simulated accelerator needs Linux, and this is {sys.platform}"
    if not torch.distributed.is_available():
        return "torch was built without torch.distributed"
    if not library().exists() and not _compiler():
        return "there is no C++ compiler: set CXX, or install g++"
    return ""


def _compiler() -> str | None:
    requested = os.environ.get("CXX")
    return shutil.which(requested) if requested else shutil.which("g++") or shutil.which("c++")


@cache
def library() -> Path:
    """Return the path of the compiled library, whether it exists or not."""
    text = hashlib.sha256(repr((torch.__version__, torch.version.git_version, _FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        text.update(path.read_bytes())
    requested = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(requested) if requested else Path(cache_home) / "schedlang"
    abi = sysconfig.get_config_var("SOABI")
    return root / f"{LIBRARY}-{torch.__version__}-{abi}-{text.hexdigest()[:16]}" / f"{LIBRARY}.so"


@cache
def load() -> Any:
    """Return the compiled module; raise `Unavailable` with the reason if there is none."""
    if reason := unavailable():
        raise Unavailable(reason)
    target = library()
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"no folder to compile in: {error}") from error
        with open(target.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when this process ends, in any way
            if not target.exists():
                _compile(target)
    loader = importlib.machinery.ExtensionFileLoader(LIBRARY, str(target))
    spec = importlib.util.spec_from_loader(LIBRARY, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(target: Path) -> None:
    """Compile all files at once, since torch's headers take most of the time; the result appears
    atomically."""
    compiler = _compiler()
    assert compiler is not None
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    includes.append(f"-I{sysconfig.get_path('include')}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source, built = Path(folder) / "whole.cpp", Path(folder) / target.name
        parts = sorted(SOURCES.glob("*.cpp"))
        source.write_text("".join(f'#include "{path}"\n' for path in parts))
        definition = f"-DTORCH_EXTENSION_NAME={LIBRARY}"
        command = [compiler, "-shared", *_FLAGS, abi, definition, *includes]
        process = subprocess.run(
            [*command, str(source), "-o", str(built), *libraries], capture_output=True, text=True
        )
        if process.returncode:
            errors = "\n".join(process.stderr.splitlines()[:40])
            raise Unavailable(f"the simulated accelerator does not compile here:\n{errors}")
        os.replace(built, target)


# -- its names in torch ----------------------------------------------------------------------------


NAME = "sim"


@cache
def registered() -> Any:
    """Register the device with torch, and return the compiled module; may raise `Unavailable`.

    There are no devices until `simulation.simulated` sets their number: torch reports the
    accelerator as unavailable.
    """
    core = load()
    backend_name = torch._C._get_privateuse1_backend_name()
    if backend_name not in ("privateuseone", NAME):
        raise Unavailable(f"another device holds torch's place for one more: {backend_name}")
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

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            if "stream_id" in kwargs:
                return super().__new__(cls, **kwargs)
            target = torch.device(NAME, _index(core, device))
            return super().__new__(cls, device=target, priority=priority)

    class Event(torch.Event):
        """An event of the device."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
            target = torch.device(NAME, core.get_device())
            return super().__new__(cls, device=target, enable_timing=enable_timing)

    return Stream, Event


def _module(core: Any) -> types.ModuleType:
    """Make the module that corresponds to `torch.cuda` for the device."""
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
    module._initialized = True  # without it torch.utils.checkpoint saves no generator state
    _generators(core, module, index)
    _memory(core, module, index)
    return module  # type: ignore[no-any-return]


def _generators(core: Any, module: Any, index: Any) -> None:
    def every(seed: int) -> None:
        for generator in module.default_generators:
            generator.manual_seed(seed)

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
    """Add the functions for bytes of tensors; without a simulated cache, reserved equals
    allocated."""
    module.memory_allocated = lambda device=None: core.memory(index(device))[0]
    module.max_memory_allocated = lambda device=None: core.memory(index(device))[1]
    module.memory_reserved = module.memory_allocated
    module.max_memory_reserved = module.max_memory_allocated
    module.reset_peak_memory_stats = lambda device=None: core.reset_peak(index(device))

    def statistics(device: Any = None) -> dict[str, int]:
        current, peak = core.memory(index(device))
        return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": peak}

    module.memory_stats = statistics
    module.empty_cache = lambda: None


def _assignable(core: Any) -> None:
    """Allow `.data =` between host and device, as for CUDA: torch refuses it for such a device.

    `module.to` keeps its Parameters this way, and FSDP2 moves offloaded gradients.
    """

    def across(a: Any, b: Any) -> bool:
        is_plain = type(a) in (torch.Tensor, torch.nn.Parameter)
        return is_plain and {a.device.type, b.device.type} == {"cpu", NAME}

    patch_data_assignment(across, core.shallow_set)
