"""Byte views of float64 tensors: moving and viewing back works, arithmetic is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from schedlang import TrainingProgram, verify_program
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.float64 import Float64
from schedlang.runtime.launch.pool import Pool
from tests.judging import net, wrapped

MOVED = {
    "viewed back": lambda b: b.view(torch.float32),
    "of another shape": lambda b: b.view(-1).view(torch.bfloat16).view(3, 2),
    "cloned": lambda b: b.clone().view(torch.float32),
    "written": lambda b: torch.empty_like(b).copy_(b).view(torch.float32),
    "from plain ones": lambda b: b.copy_(torch.empty(48, dtype=torch.uint8).view(3, 16)),
    "cut and joined": lambda b: torch.cat([b[:1], b[1:]]).view(torch.float32),
    "split": lambda b: torch.stack(b.split(16, -1)).squeeze(0).view(torch.float32),
}
READ = {
    "added": lambda b: b + 1,
    "masked": lambda b: b & 0x80,
    "compared": lambda b: b > 127,
    "summed": lambda b: b.sum(),
    "multiplied from the right": lambda b: 2 * b,
    "in place": lambda b: b.bitwise_xor_(1),
    "looked up": lambda b: torch.arange(256)[b],
    "converted": lambda b: b.to(torch.int32),
    "as wider integers": lambda b: b.view(torch.int32),
    "of a copy": lambda b: b.clone().flatten()[:4] - 1,
    "into plain bytes": lambda b: torch.empty(3, 16, dtype=torch.uint8).copy_(b),
    "into a part of plain bytes": lambda b: torch.empty(9, dtype=torch.uint8).__setitem__(0, b),
    "to Python": lambda b: b.tolist(),
    "one to Python": lambda b: b[0, 0].item(),
    "to numpy": lambda b: b.numpy(),
    "in a list of plain bytes": lambda b: torch.cat([b, torch.zeros(1, 16, dtype=torch.uint8)]),
    "into a buffer": lambda b: torch.cat([b, b], out=torch.empty(6, 16, dtype=torch.uint8)),
    "summed over ranks": dist.all_reduce,
}


@pytest.mark.parametrize("way", MOVED)
def test_moved_bytes_are_the_numbers_that_they_were(way: str) -> None:
    """Moved bytes view back to the same numbers."""
    with Float64():
        x = torch.arange(6.0).reshape(3, 2)
        result = MOVED[way](x.view(torch.uint8))
    if result.dtype != torch.uint8:
        assert type(result) is Tensor and torch.equal(result.reshape(3, 2), x)


def test_a_file_of_float64_is_read() -> None:
    """Plain bytes may be viewed as float64, but not as float32."""
    plain = torch.arange(6.0, dtype=torch.float64).view(torch.uint8)
    with Float64():
        assert torch.equal(plain.view(torch.float64), torch.arange(6.0))
        with pytest.raises(Refusal, match="S811"):
            plain.view(torch.float32)


@pytest.mark.parametrize("way", READ)
def test_what_reads_bytes_as_integers_is_refused(way: str) -> None:
    """Integer operations on bytes are refused: float64 has other bits than the program's dtype."""
    with Float64(), pytest.raises(Refusal, match="S811"):
        READ[way](torch.arange(6.0).reshape(3, 2).view(torch.uint8))


def test_plain_bytes_are_no_float() -> None:
    """Bytes of unknown origin, and byte views of real float32 tensors, are refused."""
    narrow, unknown = torch.ones(2, dtype=torch.float32), torch.zeros(8, dtype=torch.uint8)
    with Float64():
        for view in (lambda: narrow.view(torch.uint8), lambda: unknown.view(torch.float32)):
            with pytest.raises(Refusal, match="S811"):
                view()


def test_writing_bytes_writes_the_numbers() -> None:
    """A byte view shares the storage: writing into it changes the numbers."""
    with Float64():
        x, y = torch.zeros(4), torch.arange(4.0)
        x.view(torch.uint8).copy_(y.view(torch.uint8))
    assert torch.equal(x, y)


def _broadcast_program(source_rank: int) -> Callable[[Any], Any]:
    """Return a program that broadcasts one rank's initial weights as bytes."""

    def program(model: Any) -> TrainingProgram:
        if dist.get_rank():
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
        for p in model.parameters():
            dist.broadcast(p.data.view(torch.uint8), source_rank)
        return wrapped.ddp(model)

    return program


@pytest.mark.parametrize("source", (0, 1))
def test_weights_cross_a_collective_as_bytes(pool: Pool, source: int) -> None:
    """Weights from rank 0 pass; those of another rank are found wrong."""
    torch.manual_seed(0)
    options: Any = {"model": net.Net(depth=1), "batch": net.batch, "loss": net.loss, "ranks": 2}
    report = verify_program(_broadcast_program(source), **options, pool=pool)
    assert report.ok is (source == 0), str(report)
