"""Why a model cannot be cut along its sequences: the module that gives a slice something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime.scope import visit
from schedlang.runtime.slicing.slice_trial import Trial, forward, sliced
from schedlang.runtime.slicing.slices import Slicing

Outputs = dict[str, list[Tensor]]


def fault(trial: Trial, slicing: Slicing, error: Exception) -> Refusal:
    """The refusal of a model for which slices failed with `error` when run as `slicing` says."""
    total, first = sum(trial.lengths), trial.lengths[0]
    kind = type(trial.model).__name__
    whole = _outputs(trial, trial.batch)
    changed = _outputs(trial, _changed(trial.batch, first, total))
    ahead = [
        (name, not _near(plain[:, :first], other[:, :first]))
        for name, (plain, other) in _pairs(whole, changed, total)
    ]
    if ahead and ahead[-1][1]:  # something inside may look ahead and be masked afterwards
        name = next(name for name, differs in ahead if differs)
        return refusal(
            f"`{kind}` cannot be split into slices",
            f"it is not causal: in `{name}` the first {first} tokens depend on later ones",
            "a slice has only the tokens before it",
        )
    if isinstance(error, Refusal):
        return error
    found: Outputs = {}
    try:
        with _noting(trial.model, found):
            sliced(trial, slicing)
    except Exception as raised:  # the model's own code, on a slice: whatever it raises
        said = f"{type(raised).__name__}: {raised}".splitlines()[0]
        return refusal(f"`{kind}` does not run on a slice of a sequence", said, *_where(found))
    for name, outputs in whole.items():
        if outputs[0].dim() < 2 or outputs[0].shape[1] != total:
            continue
        joined = _joined(outputs[0], found.get(name, []), trial.lengths)
        if joined is None or not _near(joined, outputs[0]):
            return refusal(
                f"`{kind}` cannot be split into slices",
                f"`{name}` computes a slice differently than in the full sequence",
                "positions counted from shapes, and tokens mixed outside of attention"
                " (convolutions, sums), start again in every slice",
            )
    return refusal(f"`{kind}` cannot be split into slices", str(error))


def _joined(whole: Tensor, parts: list[Tensor], lengths: Sequence[int]) -> Tensor | None:
    """What slices gave, one after the other; None if it does not fit together."""
    parts = [part[:, :length] for part, length in zip(parts, lengths) if part.dim() > 1]
    sizes = [(whole.shape[0], length, *whole.shape[2:]) for length in lengths]
    return torch.cat(parts, 1) if [tuple(part.shape) for part in parts] == sizes else None


def _where(found: Outputs) -> list[str]:
    """The module that ended last before a slice failed."""
    upto = max((len(outputs) for outputs in found.values()), default=0)
    done = [name for name, outputs in found.items() if len(outputs) == upto]
    return [f"in slice {upto - 1}, after `{done[-1]}`"] if upto > 1 else []


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


def _changed(batch: Mapping[str, Any], first: int, total: int) -> dict[str, Any]:
    """The batch with other tokens after the first slice."""

    def other(name: str, value: Any) -> Any:
        ids = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == total
        if not ids or "mask" in name or "position" in name or "label" in name:
            return value
        copied = value.clone()
        copied[:, first:] = copied[:, first:].flip(1) if not value.is_floating_point() else (
            copied[:, first:] + 1
        )  # fmt: skip
        return copied

    return {name: other(name, value) for name, value in batch.items()}


def _pairs(a: Outputs, b: Outputs, total: int) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    for name, outputs in a.items():
        if name in b and outputs[0].dim() > 1 and outputs[0].shape[1] == total:
            yield name, (outputs[0], b[name][0])


def _outputs(trial: Trial, batch: Mapping[str, Any]) -> Outputs:
    found: Outputs = {}
    with _noting(trial.model, found):
        forward(trial, trial.model, batch)
    return found


@contextmanager
def _noting(model: nn.Module, found: Outputs) -> Iterator[None]:
    """The outputs of every module, innermost first; of a slice one after the other."""

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point():
                held = found.setdefault(name, [])
                part = visit()
                if len(held) == (part.span.index if part is not None else 0):
                    held.append(first.detach())

        return hook

    named = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(note(name)) for name, module in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def refusal(title: str, *notes: str) -> Refusal:
    """The model cannot be cut along its sequences."""
    return Refusal(
        Diagnostic(
            "S655", title, notes=notes,
            helps=("leave `slices` out: `slices=1`",
                   'or use an order without slices: `pipeline(order="1F1B", micro=...)`'),
        )
    )  # fmt: skip
