"""Tensors in files that have no name: whole once mapped, and gone with whoever holds them.

A file is made without a name in the temporary folder (`TMPDIR`), gets all its room at once, is
written, and mapped copy-on-write. So nobody ever sees a part of one, a process that is killed
leaves none behind, and a tensor in a file is read, copied and saved as any other.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.runtime.storage.folder import together
from schedlang.runtime.storage.tiers import CPU, DISK, mark, plain_copy

_PIECE = 1 << 24  # bytes written at a time


class Scratch:
    """The files of one program on one rank.

    What does not fit stays in host memory, and is told at the end of the step, on all ranks alike:
    a rank that stopped in the middle would leave the others waiting for it.
    """

    def __init__(self) -> None:
        self.failure: OSError | None = None
        self.written = 0  # bytes so far
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Scratch:
        """Copies of a module go on using the same."""
        return self

    def put(self, tensor: Tensor) -> Tensor:
        """The same values in a file; in host memory if there is no room, which is noted."""
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return mark(tensor.detach().cpu(), DISK)
        host = tensor if tensor.is_cpu and tensor.is_contiguous() else plain_copy(tensor)
        try:
            mapped = _write(host.detach(), size)
        except OSError as error:
            with self._lock:
                self.failure = self.failure or error
            return plain_copy(tensor, CPU)
        with self._lock:
            self.written += size
        return mark(mapped, DISK)

    def check(self, consequence: str) -> None:
        """Raise the same Refusal S850 on all ranks if anything could not be written on one."""
        failure, self.failure = self.failure, None

        def fail() -> None:
            if failure is not None:
                raise failure

        together(fail, lambda error: full(error, consequence))


def full(error: BaseException, consequence: str) -> Diagnostic:
    """What is said where a file cannot be written."""
    return Diagnostic(
        "S850",
        f"cannot write what a row offloads to disk in `{tempfile.gettempdir()}`",
        notes=(str(error), consequence),
        helps=(
            "make room, or set TMPDIR to a folder on a larger disk",
            "or offload to host memory: `to=cpu`",
        ),
    )


def _write(host: Tensor, size: int) -> Tensor:
    """A tensor mapped from a new file of its bytes; raises OSError where there is no room."""
    with torch._C.DisableTorchFunction(), tempfile.TemporaryFile(buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # all the room now, or an error now
        raw = memoryview(host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        at = 0
        while at < size:
            at += file.write(raw[at : at + _PIECE])
        # private to this process: writing into the tensor does not write into the file
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=torch.uint8).view(host.dtype).view(host.shape)
