"""Record the module calls of one step: outputs or inputs, and gradients of the outputs.

Used on both sides to find the first module that differs (`module_comparison.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.passes.judge.layouts import local_tensor
from schedlang.runtime.isolated_modules import CallFrame, tensors_of
from schedlang.runtime.submodules import remove_hooks_after

_PIPELINING = os.path.join("distributed", "pipelining", "")
_WEIGHT_BACKWARD = "stage_backward_weight"
OutputKey = tuple[CallFrame, int]  # a module's call, and the number of its output


@dataclass
class ModuleCall:
    """One call of a module: its float outputs, and the gradient of each output."""

    outputs: list[Tensor]
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class RecordedStep:
    """All module calls of a step, in the order of returns, and the order of their gradients."""

    calls: dict[CallFrame, ModuleCall] = field(default_factory=dict)
    backward_order: list[OutputKey] = field(default_factory=list)
    autograd_outputs: dict[OutputKey, Tensor] = field(default_factory=dict)  # if requested
    # of the original, if `autograd_outputs`
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, key: OutputKey, grad: bool = False) -> Tensor:
        """Return an output, or the gradient with respect to the output."""
        call = self.calls[key[0]]
        return call.gradients[key[1]] if grad else call.outputs[key[1]]


def record_step(
    modules: Mapping[str, nn.Module],
    step: Callable[[], Any],
    *,
    live: bool = False,
    taken: bool = False,
) -> RecordedStep:
    """Run a step, and record the outputs of modules and the gradients of these outputs.

    live   also store the output tensors themselves, with their autograd graph
    taken  record the inputs instead of the outputs: the local part of a DTensor, as float64
    """
    run, call_counts = RecordedStep(), dict.fromkeys(modules, 0)

    def hook(name: str) -> Any:
        def after(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() >= 0 or infers_shapes():
                return  # a recomputation, or a call on a dummy input
            frame = name, call_counts[name]
            call_counts[name] += 1
            tensors = tensors_of((args, kwargs))[0]
            if taken:
                numbers = [
                    t for t in tensors if t.dim() and t.dtype != torch.bool and not t.is_complex()
                ]
                run.calls[frame] = ModuleCall(
                    [local_tensor(t.detach()).clone().double() for t in numbers]
                )
                return
            floats = [t for t in tensors_of(output)[0] if t.is_floating_point() and t.dim()]
            with torch.no_grad():
                run.calls[frame] = ModuleCall([_full_copy(t) for t in floats])
            for k, tensor in enumerate(floats):
                if live:
                    run.autograd_outputs[frame, k] = tensor
                # the gradient of an input that is passed on is also that of its other uses
                if tensor.requires_grad and not any(tensor is given for given in tensors):
                    tensor.register_hook(_gradient_hook(run, frame, k))  # type: ignore[no-untyped-call]

        return after

    with remove_hooks_after(
        m.register_forward_hook(hook(n), with_kwargs=True) for n, m in modules.items()
    ):
        step()
    return run


def record_settled_step(modules: Mapping[str, nn.Module], step: Callable[[], Any]) -> RecordedStep:
    """Run a step twice; return the second record if the two called different modules.

    A first step may also call modules on dummy inputs, to learn shapes, as pipelines do.
    """
    first, second = (record_step(modules, step) for _ in range(2))
    return first if first.calls.keys() == second.calls.keys() else second


def infers_shapes() -> bool:
    """Return whether torch's pipelining runs a stage on dummy inputs, to learn shapes."""
    return _is_called_by_pipelining("stage.py", "_inference")


def _is_called_by_pipelining(file: str, suffix: str) -> bool:
    """Return whether a function of torch's pipelining whose name ends so is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if code.co_filename.endswith(_PIPELINING + file) and code.co_name.endswith(suffix):
            return True
    return False


def _gradient_hook(run: RecordedStep, frame: CallFrame, k: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        with torch.no_grad():
            gradients, part = run.calls[frame].gradients, _full_copy(gradient)
            if k in gradients:  # a step may run several backwards through one output
                # zero bubble: the backward of weights starts from gradients that are known
                if not _is_called_by_pipelining("_backward.py", _WEIGHT_BACKWARD):
                    gradients[k] += part
                return
            gradients[k] = part
        run.backward_order.append((frame, k))

    return note


def _full_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, of a DTensor the full tensor."""
    value = tensor.detach()
    full = getattr(value, "full_tensor", None)
    return (full() if full is not None else value).clone()
