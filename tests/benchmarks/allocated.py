"""Live and peak bytes of all tensors of a process, counted in torch's CPU allocator.

A wrapper of the allocator counts allocations and frees in all threads: a collective library frees
tensors in its own.  Python objects, code and kernel scratch memory are not counted.  The wrapper
is compiled once per version of torch, in some seconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from schedlang.testing.accelerator import device as simulated

_SOURCE = r"""
#include <algorithm>
#include <c10/core/Allocator.h>
#include <mutex>
#include <unordered_map>

namespace {
std::mutex lock;
std::unordered_map<void*, long long> blocks;
long long held = 0, most = 0;

void free_block(void*);

struct Counting final : c10::Allocator {
  c10::Allocator* inner = nullptr;

  c10::DataPtr allocate(size_t size) override {
    void* block = inner->raw_allocate(size);
    if (block != nullptr) {
      std::lock_guard<std::mutex> guard(lock);
      blocks[block] = size;
      held += size;
      most = std::max(most, held);
    }
    return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    inner->copy_data(to, from, count);
  }
};

Counting counting;

void free_block(void* block) {
  if (block == nullptr) return;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto found = blocks.find(block);
    held -= found->second;
    blocks.erase(found);
  }
  counting.inner->raw_deallocate(block);
}
}  // namespace

extern "C" {
void begin() {
  if (counting.inner == nullptr) {
    counting.inner = c10::GetAllocator(c10::DeviceType::CPU);
    c10::SetAllocator(c10::DeviceType::CPU, &counting);
  }
}
long long now() {
  std::lock_guard<std::mutex> guard(lock);
  return held;
}
long long peak() {
  std::lock_guard<std::mutex> guard(lock);
  return most;
}
void anew() {
  std::lock_guard<std::mutex> guard(lock);
  most = held;
}
}
"""


class Allocated:
    """Counts the bytes of tensors that are created after the first instance of this class."""

    def __init__(self) -> None:
        self._core = ctypes.CDLL(str(library()))
        for name in ("now", "peak"):
            getattr(self._core, name).restype = ctypes.c_longlong
        self._core.begin()

    def now(self) -> int:
        """Return the live bytes."""
        return int(self._core.now())

    def peak(self) -> int:
        """Return the peak of live bytes since `anew`."""
        return int(self._core.peak())

    def anew(self) -> None:
        """Reset the peak to the live bytes."""
        self._core.anew()


@functools.cache
def library() -> Path:
    """Return the path of the compiled library; compile it if it does not exist."""
    from torch.utils import cpp_extension

    build_key = repr((torch.__version__, torch.version.git_version, _SOURCE)).encode()
    folder = simulated.library().parent.parent
    target = folder / f"schedlang_allocated-{hashlib.sha256(build_key).hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as build_dir:
        source = Path(build_dir) / "allocated.cpp"
        source.write_text(_SOURCE)
        command = [
            *(os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-O1", "-std=c++20", "-DNDEBUG"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in cpp_extension.include_paths()),
            *(str(source), "-o", f"{build_dir}/it.so"),
            *(f"-L{path}" for path in cpp_extension.library_paths()),
            "-lc10",
        ]
        subprocess.run(command, check=True)
        os.replace(f"{build_dir}/it.so", target)
    return target
