"""Buffers that a forward writes: whether microbatches leave in them what the whole batch would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.passes.proving.observe import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from schedlang.passes.proving.original import Sequential
    from schedlang.runtime.parts import Part


def check_buffers(
    subject: Sequential, batch: Batch, shares: Sequence[Sequence[Part]], rtol: float = 1e-9
) -> None:
    """Refuse a model whose buffers depend on how a batch is split (S708), measured on the original.

    `shares` are the microbatches of each data-parallel rank, which run one after the other.
    """
    from schedlang.passes.proving.original import rows

    before = {name: b.detach().clone() for name, b in subject.module.named_buffers()}
    if not before:
        return
    whole = _after(subject, before, [(batch, range(rows(batch)))])
    changed = [name for name, value in before.items() if not _near(whole[name], value, 0.0)]
    for parts in shares if changed else ():
        found = _after(subject, before, [(part.inputs, part.rows) for part in parts])
        for name in changed:
            if not _near(found[name], whole[name], rtol):
                raise _refusal(name, len(parts))


def _after(
    subject: Sequential,
    before: dict[str, Tensor],
    parts: Sequence[tuple[Batch, Sequence[int]]],
) -> dict[str, Tensor]:
    """The buffers after a forward and backward of each part in turn; then they are put back."""
    for inputs, samples in parts:
        subject.derive(inputs, samples)
    buffers = dict(subject.module.named_buffers())
    after = {name: buffers[name].detach().clone() for name in before}
    for name, value in before.items():
        buffers[name].copy_(value)
    return after


def _near(x: Tensor, r: Tensor, rtol: float) -> bool:
    import torch

    return x.shape == r.shape and torch.allclose(
        x.double(), r.double(), rtol=rtol, atol=rtol * 1e-3, equal_nan=True
    )


def _refusal(name: str, parts: int) -> Refusal:
    why = f"{parts} microbatches in turn" if parts > 1 else "the rows of one rank alone"
    return Refusal(
        Diagnostic(
            "S708", f"the buffer `{name}` depends on how the batch is split",
            notes=(f"on the original, after {why} it differs from its value after the full batch",
                   "a forward updates it: an average over calls, a count, statistics of the batch"),
            helps=("use one microbatch, `micro=1`, or no data parallelism, as the note says",
                   "or allow it: `step \"...\" relax(batch_stats) {`"),
        )
    )  # fmt: skip
