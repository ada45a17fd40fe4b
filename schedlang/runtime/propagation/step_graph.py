"""One forward recorded as a graph of steps and values, with the ways to split each step over ranks.

Modules that a row shards as a unit (projections, tables, norms, convolutions, experts) are one step
each; outside of them every call of torch is one step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from schedlang.runtime.batch import named_tensors, run_forward
from schedlang.runtime.global_state import restore_global_state
from schedlang.runtime.mixed_precision import DTYPES
from schedlang.runtime.propagation import call_splits
from schedlang.runtime.propagation.call_rules import LINEAR, SUMMING
from schedlang.runtime.propagation.call_splits import CallSplit
from schedlang.runtime.propagation.trace import Frame, Lattice, ModuleStack, RunningCall, Trace
from schedlang.runtime.sharding.module_sizes import FILLS
from schedlang.runtime.tracing.meta_runs import tensors_in, without_values

PRODUCTS = {*SUMMING, "conv_transpose2d"}


@dataclass(frozen=True)
class Value:
    """A tensor between steps: an edge of the graph.

    name    the name of the parameter or the input; "" for a step's result
    varies  whether it is computed from the batch or from parameters, and may be split with them
    """

    shape: tuple[int, ...]
    width: int  # bytes per element
    grad: bool
    kind: str = "step"  # "parameter", "input", "constant"
    name: str = ""
    varies: bool = True

    @property
    def bytes(self) -> float:
        """Bytes of the full tensor."""
        return float(math.prod(self.shape) * self.width)


@dataclass(frozen=True)
class Step:
    """A node of the graph: a module that is split as a unit, or a call of torch.

    site, turn  the module, or the module that makes the call, and the number of its call
    place       how many steps of equal name and shapes precede in this call of the module
    module      the kind of a module; "" for a call
    kind        "product", "attention" or "other"
    fills       whether it fills a tensor with a constant
    allocates   whether its results are new memory, and not views of its inputs
    kernels     how many operators a module runs; they move `inside` bytes within the module
    """

    site: str
    turn: int
    place: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    splits: tuple[CallSplit, ...]
    module: str
    kind: str
    flops: float
    allocates: bool
    fills: bool = False
    kernels: int = 1
    inside: float = 0.0


@dataclass
class StepGraph:
    """The graph of a forward: its steps in order, and all values."""

    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class GraphRecorder(Lattice):
    """Lattice that maps tensors to values, and records the steps."""

    mark, nothing = "_schedlang_wired", None

    def __init__(self, stack: ModuleStack, names: Mapping[int, str]) -> None:
        self.stack, self.names = stack, names
        self.wired, self.muted = StepGraph(), 0
        self.inner: list[float] = []
        self.places: Counter[tuple[Frame, str, tuple[tuple[int, ...], ...]]] = Counter()

    def add_value(self, tensor: Tensor, kind: str, name: str = "", varies: bool = True) -> int:
        """Add a value for a tensor, and return its number."""
        grad = tensor.requires_grad and tensor.is_floating_point()
        value = Value(tuple(tensor.shape), tensor.element_size(), grad, kind, name, varies)
        self.wired.values.append(value)
        self.put(tensor, (self, len(self.wired.values) - 1))
        return len(self.wired.values) - 1

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's value; a new tensor is a parameter, or a constant."""
        entry = self.of(tensor)
        if entry is not None and entry[0] is self:  # buffers are shared by copies of a model
            return int(entry[1])
        name = self.names.get(id(tensor), "")
        return self.add_value(tensor, "parameter" if name else "constant", name, bool(name))

    def after_call(self, call: RunningCall) -> None:
        """Record a call outside of the modules that are one step."""
        if self.muted or not call.outputs:
            if call.outputs and call.name not in LINEAR:
                self.inner.append(_bytes((*call.inputs, *call.outputs)))
            return
        input_numbers = [self.number_of(item) for item in call.inputs]
        varies = any(self.wired.values[item].varies for item in input_numbers)
        splits = call_splits.find_splits(call) if varies else ()
        attends = call.func is F.scaled_dot_product_attention
        kind = "attention" if attends else "product" if call.name in PRODUCTS else "other"
        allocates = call.name not in LINEAR
        self.add_step(call, input_numbers, splits, "", kind, varies, allocates)

    def add_step(
        self,
        call: RunningCall,
        input_numbers: list[int],
        splits: tuple[CallSplit, ...],
        module: str,
        kind: str,
        varies: bool,
        allocates: bool = True,
        inner: tuple[int, float] = (1, 0.0),
    ) -> None:
        """Record one step, with values for its results."""
        flops = _flops(call, module if module == "experts" else kind)
        outputs = [self.add_value(tensor, "step", varies=varies) for tensor in call.outputs]
        key = call.frame, call.name, tuple(tuple(tensor.shape) for tensor in call.inputs)
        occurrence = self.places[key]
        self.places[key] += 1
        self.wired.steps.append(
            Step(
                *call.frame,
                occurrence,
                call.name,
                tuple(input_numbers),
                tuple(outputs),
                splits,
                module,
                kind,
                flops,
                allocates,
                call.name in FILLS,
                *inner,
            )
        )

    def wrap_module(
        self, module: nn.Module, kind: str, inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap the forward of a module that is one step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.muted:
                return inner(*args, **kwargs)
            tensors = tensors_in((args, kwargs))
            input_numbers = [self.number_of(tensor) for tensor in tensors]
            parameters = list(module.parameters())
            input_numbers += [self.number_of(tensor) for tensor in parameters]
            self.muted += 1
            self.inner.clear()
            try:
                output = inner(*args, **kwargs)
            finally:
                self.muted -= 1
            frame = self.stack.frames[-1]
            results = tensors_in(output)
            call = RunningCall(
                frame, type(module).__name__, inner, args, kwargs, [*tensors, *parameters], output
            )
            call.outputs = results
            simple = len(results) == 1 and bool(tensors) and results[0] is not tensors[0]
            splits = _module_ways(module, kind, tensors, parameters) if simple else ()
            product = kind not in ("norm", "table")
            step_kind = "product" if product else "other"
            extra = max(0.0, sum(self.inner) - _bytes((*call.inputs, *results)))
            counts = (len(self.inner), extra) if kind == "norm" and self.inner else (1, 0.0)
            self.add_step(call, input_numbers, splits, kind, step_kind, True, inner=counts)
            return output

        return run


def _bytes(tensors: Sequence[Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _module_ways(
    module: nn.Module, kind: str, tensors: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[CallSplit, ...]:
    x = tuple(tensors[0].shape)
    if kind == "experts":
        return call_splits.expert_splits(len(parameters), len(tensors) - 1)
    if len(tensors) > 1:
        return ()
    if kind in ("linear", "conv1d"):
        return call_splits.linear_splits(x, int(kind == "conv1d"), len(parameters) > 1)
    if kind == "table":
        return call_splits.table_splits(x)
    if kind == "convolution":
        return call_splits.convolution_splits(x, len(parameters) > 1, int(module.groups) > 1)  # type: ignore[arg-type]
    return call_splits.norm_splits(x, len(parameters), parameters[0].dim())


def _flops(call: RunningCall, kind: str) -> float:
    """Return the operations of a forward: two for each product that is summed."""
    if kind == "experts":
        counts = [tensor.shape[-1] for tensor in call.inputs if not tensor.is_floating_point()]
        parameters = [tensor for tensor in call.inputs if isinstance(tensor, nn.Parameter)]
        rows = call.inputs[0].numel() / call.inputs[0].shape[-1]
        parameter_size = sum(tensor.numel() / tensor.shape[0] for tensor in parameters)
        return 2.0 * rows * max(counts, default=1) * parameter_size
    if kind == "other" or not call.inputs or not call.outputs:
        return 0.0
    output_size = max((tensor.numel() for tensor in call.outputs), default=0)
    if kind == "attention":
        query, key = call.inputs[:2]
        return 4.0 * query.numel() * key.shape[-2]
    weights = [tensor for tensor in call.inputs if tensor.dim() > 1][1:2]
    if not weights:
        return 2.0 * output_size
    rows = output_size / max(1, call.outputs[0].shape[-1])
    if call.name == "Conv1D" or isinstance(call.inputs[1], nn.Parameter):
        if weights[0].dim() > 2 and call.outputs[0].dim() == weights[0].dim():  # a convolution
            return 2.0 * output_size * math.prod(weights[0].shape[1:])
        return 2.0 * rows * weights[0].shape[-1] * weights[0].shape[-2]
    return 2.0 * output_size * call.inputs[0].shape[-1]


def record_graph(
    model: nn.Module,
    batch: Mapping[str, Any],
    kinds: Mapping[str, str],
    loss: Callable[..., Any] | None = None,
    dtype: str = "",
) -> StepGraph:
    """Record one forward of a throwaway model on the meta device, with its loss.

    kinds  modules that are one step -> linear, conv1d, table, norm, convolution or experts
    dtype  the dtype of all computation, `bf16` or `fp16`; "": the dtype of the parameters
    """
    if dtype:
        compute_dtype = DTYPES[dtype]
        model.to(compute_dtype)
        batch = _pytree.tree_map(
            lambda t: t.to(compute_dtype) if isinstance(t, Tensor) and t.is_floating_point() else t,
            dict(batch),
        )
    stack = ModuleStack()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wiring = GraphRecorder(stack, names)
    for fqn, module in model.named_modules():
        if fqn in kinds:
            module.forward = wiring.wrap_module(module, kinds[fqn], module.forward)
    stack.watch(model)
    model.train()
    with restore_global_state(model, loss), without_values(batch) as (inputs, _):
        for name, tensor in named_tensors(inputs).items():
            wiring.add_value(tensor, "input", name)
        with torch.enable_grad(), Trace(stack, wiring, asked=True):
            run_forward(model, inputs, loss)
    return wiring.wired
