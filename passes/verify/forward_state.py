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

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.passes.verify.compare import RTOL
from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.original import Sequential, count_rows
from schedlang.runtime.batch import BatchPart
from schedlang.runtime.module_state import StateSnapshot, same_values

NOTES = (str, list, dict, tuple)  # types of attributes that may be notes, such as losses to plot


def _is_concatenation(parts: list[Any], whole: Any) -> bool:
    """Return whether the concatenation of the parts' tensors equals the tensor of the whole."""
    tensors = (
        isinstance(whole, Tensor) and whole.dim() and all(isinstance(p, Tensor) for p in parts)
    )
    return bool(tensors) and same_values(torch.cat(parts), whole)


def _depends_on_earlier(later: Any, fresh: Any) -> bool:
    """Return whether a float value differs after an earlier forward, as a running mean does.

    Values must have equal shapes, so a growing table does not count.
    """
    one, other = (torch.as_tensor(x) if isinstance(x, float) else x for x in (later, fresh))
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    return one.is_floating_point() and one.shape == other.shape and not same_values(one, other)


@contextmanager
def restored_buffers(subject: Sequential) -> Iterator[dict[str, Tensor]]:
    """Yield a subject's buffers, and restore them afterwards.

    Parameters that the forward writes to, and plain attributes of modules, are restored too.
    """
    before, plain = _copy_state(subject), StateSnapshot(subject.module, subject.loss)
    yield before
    subject.changed |= plain.changed().keys()
    plain.restore()
    with torch.no_grad():
        for name, value in _state(subject).items():
            value.copy_(before[name])


def _state(subject: Sequential) -> dict[str, Tensor]:
    named = subject.module.named_parameters()
    parameters = {name: p.data for name, p in named if name in subject.rewritten}
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
    whole = [BatchPart(dict(batch), tuple(range(count_rows(batch))))]
    before, full = _buffers_after(subject, whole)
    changed = [name for name, value in before.items() if not is_close(full[name], value, 0.0)]
    for parts in shares if changed else ():
        _, found = _buffers_after(subject, parts)
        for name in changed:
            if not is_close(found[name], full[name], rtol):
                kind = "parameter" if name in subject.rewritten else "buffer"
                raise _refusal(name, kind, len(parts))


def _buffers_after(
    subject: Sequential, parts: Sequence[BatchPart]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the buffers before and after a forward and backward of each part; restore them."""
    with restored_buffers(subject) as before:
        for part in parts if before else ():
            subject.forward_backward(part.inputs, part.rows)
        after = _copy_state(subject)
    return before, after


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
    names, most = [*changed], max(map(len, shares))

    def after(*parts: BatchPart) -> dict[str, Any]:
        kept = StateSnapshot(subject.module, subject.loss)
        with restored_buffers(subject):
            for part in parts:
                subject.forward_backward(part.inputs, part.rows)
            found = kept.changed()
        return {name: found.get(name) for name in names}

    whole, other = BatchPart(dict(batch), tuple(range(count_rows(batch)))), shares[0][0]
    once, twice = after(whole), after(whole, whole)
    carried = [name for name in names if not same_values(once[name], twice[name])]
    if not carried:  # a running mean of two equal batches equals its first value
        fresh, later = after(other), after(whole, other)
        carried = [name for name in names if _depends_on_earlier(later[name], fresh[name])]
    if not any(isinstance(once[n], NOTES) for n in carried) or _changes_results(
        subject, whole, other
    ):
        notes: tuple[type, ...] = ()
    else:
        notes = NOTES
    for name in carried:
        left = [after(*parts)[name] for parts in shares]
        same = all(same_values(one, once[name]) for one in left) or _is_concatenation(
            left, once[name]
        )
        if (most > 1 or not (same or shared)) and not isinstance(once[name], notes):
            raise _refusal(name, "attribute", most)


def _changes_results(subject: Sequential, before: BatchPart, part: BatchPart) -> bool:
    """Return whether an earlier forward changes a part's loss or gradients."""

    def given(*runs: BatchPart) -> list[Tensor | None]:
        with restored_buffers(subject):
            for run in runs:
                loss = subject.forward_backward(run.inputs, run.rows)
            grads = subject.gradients().values()
            return [loss, *(None if g is None else g.detach().clone() for g in grads)]

    return not same_values(given(before, part), given(part))


def is_close(x: Tensor, r: Tensor, rtol: float) -> bool:
    """Return whether two tensors are equal up to this relative tolerance."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    return x.shape == r.shape and torch.allclose(
        x.to(wide), r.to(wide), rtol=rtol, atol=rtol * 1e-3, equal_nan=True
    )


def _refusal(name: str, kind: str, parts: int) -> Refusal:
    why = f"{parts} microbatches in turn" if parts > 1 else "the rows of one rank alone"
    return Refusal(
        Diagnostic(
            "S708",
            f"the {kind} `{name}` depends on how the batch is split",
            notes=(
                f"on the original, after {why} it differs from its value after the full batch",
                "a forward updates it: an average over calls, a count, statistics of the batch",
            ),
            helps=(
                "use one microbatch, `micro=1`, or no data parallelism, as the note says",
                'or allow it: `step "..." relax(batch_stats) {`',
            ),
        )
    )
