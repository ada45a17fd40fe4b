"""A forward on the meta device with a number of rows that divides no other size, to know rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from schedlang.ir import nests as pytree
from schedlang.runtime.batch import called, rows_of
from schedlang.runtime.propagation.trace import Recorder, Recording, Stack
from schedlang.runtime.tracing.constants import on_meta
from schedlang.runtime.tracing.meta import hollow_batch, hollow_model
from schedlang.runtime.tracing.record import loss_of
from schedlang.runtime.tracing.torch_calls import tensors_in

Result = TypeVar("Result")
PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167)


def at_many_rows(
    model: nn.Module,
    batch: Mapping[str, Any],
    run: Callable[[nn.Module, dict[str, Any], Stack, int], Result],
) -> Result | None:
    """What `run(bare model, inputs, stack, rows)` gives; None if the model takes no other batch.

    A dim that holds rows is a multiple of `rows` there, and no dim of a parameter is.
    """
    sizes = {n for p in model.parameters() for n in p.shape}
    sizes |= {n for t in tensors_in(dict(batch)) for n in t.shape[1:]}
    rows = next((p for p in PRIMES if all(n % p for n in sizes)), None)
    if rows is None:
        return None
    bare, stack = hollow_model(model, {}), Stack()
    bare.train()
    stack.watch(bare, lambda fqn: False)
    try:
        many = _repeated(batch, rows)
        inputs = hollow_batch(many)
        with on_meta(many, inputs), torch.device("meta"):
            return run(bare, inputs, stack, rows)
    except Exception:  # the model's own code, with another number of rows: then nothing is known
        return None


def _repeated(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The batch with its rows again and again, until there are so many."""
    count = rows_of(batch)
    index = torch.arange(rows) % count

    def repeat(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count
        return value[index.to(value.device)] if whole else value

    found: dict[str, Any] = pytree.tree_map(repeat, dict(batch))
    return found


def unbatched_draws(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Callable[..., Any] | None,
    recording: Recording,
) -> dict[tuple[str, int], bool]:
    """Of each draw of a recording whether it has no dim of samples; empty where all have one.

    Dropout on a table of relative positions is such a draw: its shape is one for all batches. Those
    that are made of no tensor of the batch are looked at, as the rows that a shape was given count.
    """

    def run(bare: nn.Module, inputs: dict[str, Any], stack: Stack, rows: int) -> Recording:
        with Recorder(stack, inputs) as recorder:
            loss_of(called(bare, inputs), inputs, loss)
        found: Recording = recorder.recording
        return found

    again = at_many_rows(model, batch, run)
    if again is None:
        return {}
    alike = {at for at in recording.sourceless if again.drawn.get(at) == recording.drawn[at]}
    return {at: at in alike for at in recording.drawn} if alike else {}
