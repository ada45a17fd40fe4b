"""Compiles the simulated device when it is first used, once for a version of torch and of its code.

The result is kept in `TORCH_EXTENSIONS_DIR` or the user's cache folder; processes that ask at once
wait for the one that compiles.
"""

from __future__ import annotations

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
from functools import cache
from pathlib import Path
from typing import Any

import torch

NAME = "schedlang_simulated_accelerator"
SOURCES = Path(__file__).with_name("csrc")
# NDEBUG as torch itself: without it some of torch's classes have other fields than in its library
_FLAGS = ("-std=c++20", "-fPIC", "-O1", "-g0", "-w", "-DNDEBUG", "-DUSE_DISTRIBUTED", "-DUSE_C10D")


class Unavailable(RuntimeError):
    """The device cannot be simulated here: why."""


def unavailable() -> str:
    """Why the device cannot be simulated here; empty if it can, as far as is known by looking."""
    if sys.platform != "linux":
        return f"the simulated accelerator needs Linux, and this is {sys.platform}"
    if not torch.distributed.is_available():
        return "torch was built without torch.distributed"
    if not library().exists() and not _compiler():
        return "there is no C++ compiler: set CXX, or install g++"
    return ""


def _compiler() -> str | None:
    asked = os.environ.get("CXX")
    return shutil.which(asked) if asked else shutil.which("g++") or shutil.which("c++")


@cache
def library() -> Path:
    """Where the compiled code is, or will be."""
    text = hashlib.sha256(repr((torch.__version__, torch.version.git_version, _FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        text.update(path.read_bytes())
    asked = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(asked) if asked else Path(cache_home) / "schedlang"
    abi = sysconfig.get_config_var("SOABI")
    return root / f"{NAME}-{torch.__version__}-{abi}-{text.hexdigest()[:16]}" / f"{NAME}.so"


@cache
def load() -> Any:
    """The compiled module; `Unavailable` says why there is none."""
    if reason := unavailable():
        raise Unavailable(reason)
    target = library()
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"no folder to compile in: {error}") from error
        with open(target.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go when this process ends, however it ends
            if not target.exists():
                _compile(target)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(target))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(target: Path) -> None:
    """One compilation of all files, since torch's headers take most of it; it appears whole."""
    from torch.utils import cpp_extension

    compiler = _compiler()
    assert compiler is not None
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    includes.append(f"-I{sysconfig.get_path('include')}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole, made = Path(folder) / "whole.cpp", Path(folder) / target.name
        parts = sorted(SOURCES.glob("*.cpp"))
        whole.write_text("".join(f'#include "{path}"\n' for path in parts))
        command = [compiler, "-shared", *_FLAGS, abi, f"-DTORCH_EXTENSION_NAME={NAME}", *includes]
        done = subprocess.run(
            [*command, str(whole), "-o", str(made), *libraries], capture_output=True, text=True
        )
        if done.returncode:
            told = "\n".join(done.stderr.splitlines()[:40])
            raise Unavailable(f"the simulated accelerator does not compile here:\n{told}")
        os.replace(made, target)
