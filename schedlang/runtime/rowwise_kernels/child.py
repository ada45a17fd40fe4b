"""A process that has Triton's interpreter, and launches in it the kernels of one that has not.

Whether triton interprets is settled when it is imported, for the whole process.  Run as a module
this file reads launches from standard input and writes back the tensors that they wrote.
"""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from schedlang.kernels.device import INTERPRETED, KIND, triton
from schedlang.runtime.rowwise_kernels.launch import Kernel, Shape, jitted, launching


@contextmanager
def interpreted(device: str) -> Iterator[str]:
    """Run kernels for tensors of a device; yield "triton", "interpreter" or "reference"."""
    with ExitStack() as stack:
        if device == KIND:
            yield "triton"
        elif triton is None:
            yield "reference"
        else:
            if not INTERPRETED:
                child = stack.enter_context(_process())
                stack.enter_context(launching(_Far(child).launch))
            yield "interpreter"


@contextmanager
def _process() -> Iterator[subprocess.Popen[bytes]]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "schedlang.runtime.rowwise_kernels.child"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()  # it ends where its input does
        child.wait()


@dataclass(frozen=True)
class _Far:
    """Launches in another process."""

    child: subprocess.Popen[bytes]

    def launch(self, made: Kernel, arguments: list[Any], shape: Shape) -> None:
        """Send the arguments; what comes back is put into them."""
        assert self.child.stdin is not None and self.child.stdout is not None
        fusion = made.rounding != "eager"
        task = {
            "text": made.text,
            "arguments": arguments,
            "programs": shape.programs,
            "rows": shape.rows,
            "block": shape.block,
            "fusion": fusion,
        }
        _send(self.child.stdin, task)
        back = _received(self.child.stdout)
        if back is None:
            raise RuntimeError(
                "the process with triton's interpreter has ended; its words are above"
            )
        for mine, theirs in zip(arguments, back, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(theirs)


def _send(pipe: IO[bytes], value: Any) -> None:
    packed = io.BytesIO()
    torch.save(value, packed)
    pipe.write(struct.pack("<q", packed.tell()) + packed.getvalue())
    pipe.flush()


def _received(pipe: IO[bytes]) -> Any:
    """The next value; None at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    return torch.load(io.BytesIO(pipe.read(struct.unpack("<q", head)[0])))


def main() -> None:
    """Launch until the input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not meet the answers
    while (task := _received(sys.stdin.buffer)) is not None:
        jitted(task["text"])[(task["programs"],)](
            *task["arguments"],
            ROWS=task["rows"],
            BLOCK=task["block"],
            num_warps=4,
            enable_fp_fusion=task["fusion"],
        )
        _send(out, task["arguments"])


if __name__ == "__main__":
    main()
