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
Gradients = list[Tensor | None]


def nonlinear_backward(subject: Sequential, batch: Batch) -> str:
    """Return what in the backward of a batch's loss is not linear, with its line; "" if nothing.

    Runs one forward and three backwards of the subject; buffers are restored. Returns "" as well
    if the graph of the loss cannot be run more than once.
    """
    descriptions: list[str] = []
    own_loss = subject.loss

    def loss(output: Any, inputs: Batch) -> Tensor:
        value = own_loss(output, inputs)
        descriptions.append(_first_nonlinear(value))
        return value

    with restored_buffers(subject):  # and what the subject's loss holds, so not yet ours
        subject.loss = loss
        try:
            subject.forward_backward(batch, range(count_rows(batch)))
        except RuntimeError:  # a function of the model that frees what its backward needs
            return ""
        finally:
            subject.loss = own_loss
    return descriptions[0]


def check_linear(case: Case, batch: Batch, parts: int, difference: Row) -> None:
    """Refuse (S703) a model whose losses add up over parts, but whose backward is not linear.

    `difference` is what differs between the parts and the whole.
    """
    if difference.kind.startswith("loss"):
        return
    with original_subject(case) as subject:
        nonlinear = nonlinear_backward(subject, batch)
    if nonlinear:
        raise Refusal.of(
            "S703",
            "splitting the batch changes the gradients of this model, not its loss",
            notes=(
                f"{nonlinear}, is not linear: of half a gradient it does not make"
                " half of its result",
                f"on the original, in {parts} parts, {difference.place} differs by"
                f" {difference.error:.1e}",
                "each part of the batch has its own part of the gradient, and is changed alone",
            ),
            helps=(
                "do not split the batch: no axis in `zero` rows, and `micro=1`",
                "or clip the full gradient: `build(clip=1.0)`",
            ),
        )


def _first_nonlinear(loss: Tensor) -> str:
    """Return the first node of a loss's backward that is not linear; its graph is kept."""
    first_calls: dict[Any, tuple[Gradients, Gradients]] = {}
    nonlinear: list[str] = []

    def record(node: Any) -> Callable[[Any, Any], None]:
        def hook(
            grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]
        ) -> None:
            if node not in first_calls:
                first_calls[node] = _copied(grad_inputs), _copied(grad_outputs)
            elif not nonlinear:
                first_call = first_calls[node]
                if not _scaled(first_call[1], grad_outputs):
                    nonlinear.append(f"a hook on the result of `{_forward_name(node)}`")
                elif not _scaled(first_call[0], grad_inputs):
                    nonlinear.append(_describe(node))

        return hook

    nodes = list(autograd_nodes(loss.grad_fn))
    leaves = {node.variable: node.variable.grad for node in nodes if hasattr(node, "variable")}
    inner_nodes = [node for node in nodes if not hasattr(node, "variable")]
    handles = [node.register_hook(record(node)) for node in inner_nodes]
    try:
        for factor in (1.0, _FACTOR):
            torch.autograd.backward(loss, torch.full_like(loss, factor), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
        for leaf, grad in leaves.items():
            leaf.grad = grad
    return nonlinear[0] if nonlinear else ""


def autograd_nodes(root: Any) -> Iterator[Any]:
    """Yield a node of autograd and all nodes below it, each once."""
    pending, visited = [root], {None, root}
    while pending:
        node = pending.pop()
        yield node
        parents = dict.fromkeys(parent for parent, _ in node.next_functions)
        pending += [parent for parent in parents if parent not in visited]
        visited.update(parents)


def _copied(values: Sequence[Tensor | None]) -> Gradients:
    return [None if value is None else value.detach().clone() for value in values]


def _scaled(before: Sequence[Tensor | None], after: Sequence[Tensor | None]) -> bool:
    """Return whether each gradient is `_FACTOR` times the one before."""
    for x, y in zip(before, after):
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
