"""Find where the backward of the original is not linear in the gradient that it gets.

A gradient is summed over parts of a batch, and over ranks that hold shards. That is right only
after a backward that is linear: the gradient of twice the loss must be twice the gradient. A hook
or an `autograd.Function` that takes the sign, clips or normalises need not be.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.verify.compare import RTOL
from schedlang.passes.verify.forward_state import restored_buffers
from schedlang.passes.verify.observe import Batch
from schedlang.passes.verify.original import Sequential, count_rows
from schedlang.passes.verify.proof_case import Case, original_subject
from schedlang.report import Row

_FACTOR = 0.25  # of the second gradient: parts of a batch have smaller ones, never larger
Given = list[Tensor | None]


def nonlinear_backward(subject: Sequential, batch: Batch) -> str:
    """Return what in the backward of a batch's loss is not linear, with its line; "" if nothing.

    Runs one forward and three backwards of the subject; buffers are restored. Returns "" as well
    if the graph of the loss cannot be run more than once.
    """
    found: list[str] = []
    plain = subject.loss

    def loss(output: Any, given: Batch) -> Tensor:
        value = plain(output, given)
        found.append(_first_nonlinear(value))
        return value

    with restored_buffers(subject):  # and what the subject's loss holds, so not yet ours
        subject.loss = loss
        try:
            subject.forward_backward(batch, range(count_rows(batch)))
        except RuntimeError:  # a function of the model that frees what its backward needs
            return ""
        finally:
            subject.loss = plain
    return found[0]


def check_linear(case: Case, batch: Batch, parts: int, bad: Row) -> None:
    """Refuse (S703) a model whose losses add up over parts, but whose backward is not linear.

    `bad` is what differs between the parts and the whole.
    """
    if bad.kind.startswith("loss"):
        return
    with original_subject(case) as subject:
        where = nonlinear_backward(subject, batch)
    if where:
        raise Refusal.of(
            "S703",
            "splitting the batch changes the gradients of this model, not its loss",
            notes=(
                f"{where}, is not linear: of half a gradient it does not make half of its result",
                f"on the original, in {parts} parts, {bad.place} differs by {bad.error:.1e}",
                "each part of the batch has its own part of the gradient, and is changed alone",
            ),
            helps=(
                "do not split the batch: no axis in `zero` rows, and `micro=1`",
                "or clip the full gradient: `build(clip=1.0)`",
            ),
        )


def _first_nonlinear(loss: Tensor) -> str:
    """Return the first node of a loss's backward that is not linear; its graph is kept."""
    seen: dict[Any, tuple[Given, Given]] = {}
    wrong: list[str] = []

    def record(node: Any) -> Callable[[Any, Any], None]:
        def hook(made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
            if node not in seen:
                seen[node] = _copied(made), _copied(given)
            elif not wrong:
                before = seen[node]
                if not _scaled(before[1], given):
                    wrong.append(f"a hook on the result of `{_forward_name(node)}`")
                elif not _scaled(before[0], made):
                    wrong.append(_describe(node))

        return hook

    handles = [node.register_hook(record(node)) for node in _nodes(loss.grad_fn)]
    leaves = {node.variable: node.variable.grad for node in _nodes(loss.grad_fn, leaves=True)}
    try:
        for factor in (1.0, _FACTOR):
            torch.autograd.backward(loss, torch.full_like(loss, factor), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
        for leaf, grad in leaves.items():
            leaf.grad = grad
    return wrong[0] if wrong else ""


def _nodes(root: Any, leaves: bool = False) -> Iterator[Any]:
    """Yield the nodes below a root: those of leaves, or all others."""
    pending, met = [root], {None, root}
    while pending:
        node = pending.pop()
        if hasattr(node, "variable") == leaves:
            yield node
        below = [one for one, _ in node.next_functions if one not in met]
        met.update(below)
        pending += dict.fromkeys(below)


def _copied(values: Sequence[Tensor | None]) -> Given:
    return [None if one is None else one.detach().clone() for one in values]


def _scaled(before: Sequence[Tensor | None], now: Sequence[Tensor | None]) -> bool:
    """Return whether each gradient is `_FACTOR` times the one before."""
    for x, y in zip(before, now):
        if x is None or y is None:
            continue
        if not float((y - _FACTOR * x).norm()) <= RTOL * float(x.norm()):
            return False
    return True


def _forward_name(node: Any) -> str:
    function = getattr(node, "_forward_cls", None)
    name = node.name().split("Backward")[0].lower() if function is None else function.__name__
    return str(name)


def _describe(node: Any) -> str:
    function = getattr(node, "_forward_cls", None)
    if function is None:
        return f"the backward of `{_forward_name(node)}`"
    code = inspect.unwrap(function.backward).__code__
    line = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return f"the backward of `{function.__name__}`, at {line}"
