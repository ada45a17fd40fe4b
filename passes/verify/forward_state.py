"""Check state that a forward leaves in buffers and plain attributes: counts, means, memories.

Microbatches and ranks run a forward more often than a plain loop, or on other rows. All buffers
that a forward writes are compared. Attributes (`self.calls += 1`, `self.memory = x`) are compared
if the same batch changes them twice; an attribute that stays equal then is a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.verify.compare import RTOL
from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.original import Sequential, count_rows
from schedlang.runtime.batch import BatchPart
from schedlang.runtime.module_state import StateSnapshot, same_values

NOTES = (str, list, dict, tuple)  # types of attributes that may be notes, such as losses to plot


def _is_concatenation(parts: list[Any], full: Any) -> bool:
    """Return whether the concatenation of the parts' tensors equals the tensor of the whole."""
    tensors = isinstance(full, Tensor) and full.dim() and all(isinstance(p, Tensor) for p in parts)
    return bool(tensors) and same_values(torch.cat(parts), full)


def _depends_on_earlier(later: Any, fresh: Any) -> bool:
    """Return whether a float value differs after an earlier forward, as a running mean does.

    Values must have equal shapes, so a growing table does not count.
    """
    first, second = (torch.as_tensor(x) if isinstance(x, float) else x for x in (later, fresh))
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    return (
        first.is_floating_point() and first.shape == second.shape and not same_values(first, second)
    )


@contextmanager
def restored_buffers(subject: Sequential) -> Iterator[dict[str, Tensor]]:
    """Yield a subject's buffers, and restore them afterwards.

    Parameters that the forward writes to, and plain attributes of modules, are restored too.
    """
    buffers, snapshot = _copy_state(subject), StateSnapshot(subject.module, subject.loss)
    yield buffers
    subject.changed |= snapshot.changed().keys()
    snapshot.restore()
    with torch.no_grad():
        for name, value in _state(subject).items():
            value.copy_(buffers[name])


def _state(subject: Sequential) -> dict[str, Tensor]:
    named_parameters = subject.module.named_parameters()
    parameters = {name: p.data for name, p in named_parameters if name in subject.rewritten}
    return {**dict(subject.module.named_buffers()), **parameters}


def _copy_state(subject: Sequential) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in _state(subject).items()}


# ---- Buffers that a forward writes: do microbatches leave the same as the full batch?


def check_buffers(
    subject: Sequential, batch: Batch, shares: Sequence[Sequence[BatchPart]], rtol: float = RTOL
) -> None:
    """Refuse (S708) a model whose buffers depend on how a batch is split, measured on the original.

    `shares` are the microbatches of each data-parallel rank, which run one after the other.
    """
    full_batch = [BatchPart(dict(batch), tuple(range(count_rows(batch))))]
    initial, final = _buffers_after(subject, full_batch)
    changed = [name for name, value in initial.items() if not is_close(final[name], value, 0.0)]
    for parts in shares if changed else ():
        _, part_values = _buffers_after(subject, parts)
        for name in changed:
            if not is_close(part_values[name], final[name], rtol):
                kind = "parameter" if name in subject.rewritten else "buffer"
                raise _refusal(name, kind, len(parts))


def _buffers_after(
    subject: Sequential, parts: Sequence[BatchPart]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the buffers before and after a forward and backward of each part; restore them."""
    with restored_buffers(subject) as initial:
        for part in parts if initial else ():
            subject.forward_backward(part.inputs, part.rows)
        final = _copy_state(subject)
    return initial, final


def check_attributes(
    subject: Sequential,
    batch: Batch,
    shares: Sequence[Sequence[BatchPart]],
    changed: Iterable[str],
    shared: bool,
) -> None:
    """Refuse (S708) attributes that carry state between forwards and depend on the split.

    `changed` are attributes that a forward changes. With `shared`, ranks share sums, so a part
    alone says nothing of its result. Lists and the like that change no loss are the user's notes.
    """
    names, max_parts = [*changed], max(map(len, shares))

    def after(*parts: BatchPart) -> dict[str, Any]:
        snapshot = StateSnapshot(subject.module, subject.loss)
        with restored_buffers(subject):
            for part in parts:
                subject.forward_backward(part.inputs, part.rows)
            changed_values = snapshot.changed()
        return {name: changed_values.get(name) for name in names}

    full_part, first_part = BatchPart(dict(batch), tuple(range(count_rows(batch)))), shares[0][0]
    once, twice = after(full_part), after(full_part, full_part)
    carried = [name for name in names if not same_values(once[name], twice[name])]
    if not carried:  # a running mean of two equal batches equals its first value
        fresh, later = after(first_part), after(full_part, first_part)
        carried = [name for name in names if _depends_on_earlier(later[name], fresh[name])]
    if not any(isinstance(once[n], NOTES) for n in carried) or _changes_results(
        subject, full_part, first_part
    ):
        notes: tuple[type, ...] = ()
    else:
        notes = NOTES
    for name in carried:
        by_split = [after(*parts)[name] for parts in shares]
        equal = all(same_values(value, once[name]) for value in by_split) or _is_concatenation(
            by_split, once[name]
        )
        if (max_parts > 1 or not (equal or shared)) and not isinstance(once[name], notes):
            raise _refusal(name, "attribute", max_parts)


def _changes_results(subject: Sequential, earlier: BatchPart, part: BatchPart) -> bool:
    """Return whether an earlier forward changes a part's loss or gradients."""

    def given(*parts: BatchPart) -> list[Tensor | None]:
        with restored_buffers(subject):
            for batch_part in parts:
                loss = subject.forward_backward(batch_part.inputs, batch_part.rows)
            grads = subject.gradients().values()
            return [loss, *(None if g is None else g.detach().clone() for g in grads)]

    return not same_values(given(earlier, part), given(part))


def is_close(x: Tensor, r: Tensor, rtol: float) -> bool:
    """Return whether two tensors are equal up to this relative tolerance."""
    dtype = torch.complex128 if x.is_complex() else torch.float64
    return x.shape == r.shape and torch.allclose(
        x.to(dtype), r.to(dtype), rtol=rtol, atol=rtol * 1e-3, equal_nan=True
    )


def _refusal(name: str, kind: str, parts: int) -> Refusal:
    cause = f"{parts} microbatches in turn" if parts > 1 else "the rows of one rank alone"
    return Refusal.of(
        "S708",
        f"the {kind} `{name}` depends on how the batch is split",
        notes=(
            f"on the original, after {cause} it differs from its value after the full batch",
            "a forward updates it: an average over calls, a count, statistics of the batch",
        ),
        helps=(
            "use one microbatch, `micro=1`, or no data parallelism, as the note says",
            'or allow it: `step "..." relax(batch_stats) {`',
        ),
    )
