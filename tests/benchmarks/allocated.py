"""Bytes of all tensors of a process, now and at most, told by torch's allocator of host memory.

Around the allocator there is one that counts what is asked for and what is given back, in whatever
thread: a collective library lets go of tensors in its own.  Python's objects, code and the scratch
of kernels are no tensors.  It is compiled once for a version of torch, in some seconds.
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
    """Counts the bytes of tensors that are made from the first one of these on."""

    def __init__(self) -> None:
        self._core = ctypes.CDLL(str(library()))
        for name in ("now", "peak"):
            getattr(self._core, name).restype = ctypes.c_longlong
        self._core.begin()

    def now(self) -> int:
        """Return the bytes that live."""
        return int(self._core.now())

    def peak(self) -> int:
        """Return the most bytes that have lived at once since `anew`."""
        return int(self._core.peak())

    def anew(self) -> None:
        """Let the most be what lives now."""
        self._core.anew()


@functools.cache
def library() -> Path:
    """Return the path of the compiled code, which is compiled where it is not there yet."""
    from torch.utils import cpp_extension

    said = repr((torch.__version__, torch.version.git_version, _SOURCE)).encode()
    folder = simulated.library().parent.parent
    target = folder / f"schedlang_allocated-{hashlib.sha256(said).hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        source = Path(made) / "allocated.cpp"
        source.write_text(_SOURCE)
        command = [
            *(os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-O1", "-std=c++20", "-DNDEBUG"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in cpp_extension.include_paths()),
            *(str(source), "-o", f"{made}/it.so"),
            *(f"-L{path}" for path in cpp_extension.library_paths()),
            "-lc10",
        ]
        subprocess.run(command, check=True)
        os.replace(f"{made}/it.so", target)
    return target
