"""The gain of fusing a module: kernel launches and bytes before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.ir import pytree
from schedlang.ir.features import Count, Gain
from schedlang.runtime.fusion.fuse import FuseRequest, fuse_pattern
from schedlang.runtime.fusion.rewrite import record_regions
from schedlang.runtime.rowwise_kernels.chain import count_passes
from schedlang.runtime.rowwise_kernels.launch import RowwiseKernel, launch_shape
from schedlang.runtime.rowwise_kernels.rowwise_operator import (
    ForwardBackward,
    KernelPair,
    function_of_tensors,
    kernels_for,
    trace_graphs,
)
from schedlang.runtime.tracing.meta_runs import tensors_in

# -- kernels and bytes of a function ---------------------------------------------------------------
# Eager torch runs one kernel for each operator that is no view, and each reads its inputs and
# writes its outputs. A generated kernel reads what it loads and writes what it stores. For
# inductor, its own scheduler is run, without compiling anything.


# these only allocate or alias: nothing is launched
_NO_LAUNCH = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias")


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and their bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count it."""
        output = func(*args, **(kwargs or {}))
        if launches_kernel(func):
            self.kernels += 1
            inputs = {id(t): t for t in tensors_in((args, kwargs or {}))}
            outputs = {id(t): t for t in tensors_in(output)}
            self.bytes += sum(map(_bytes, inputs.values())) + sum(map(_bytes, outputs.values()))
        return output


def launches_kernel(func: Any) -> bool:
    """Return whether an operator launches a kernel: a view does not."""
    name = func._schema.name.split("::")[1]
    views = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    return not views and name not in _NO_LAUNCH


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's memory; a broadcast dim is read once."""
    sizes = [n for n, stride in zip(tensor.shape, tensor.stride()) if stride != 0]
    count = 1
    for size in sizes:
        count *= size
    return count * tensor.element_size()


def count_eager(
    function: Callable[..., Any], args: Sequence[Any], leaves: Sequence[Tensor]
) -> Count:
    """Count kernels and bytes of a function on the meta device, with gradients of `leaves`."""
    with _Counting() as forward:
        output = function(*args)
    outputs = [t for t in tensors_in(output) if t.requires_grad]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    grads = [torch.empty_like(t) for t in outputs]
    with _Counting() as backward:
        if outputs and trained:
            torch.autograd.grad(outputs, trained, grads, allow_unused=True)
    return Count(forward.kernels, backward.kernels, forward.bytes + backward.bytes)


def count_generated(pair: KernelPair) -> Count:
    """Count the generated kernels of a chain, and the sums after them."""
    counts = [_count_generated(kernel) for kernel in pair.kernels]
    backward = counts[1][0] if len(counts) > 1 else 0
    return Count(counts[0][0], backward, sum(size for _, size in counts))


def _count_generated(kernel: RowwiseKernel) -> tuple[int, int]:
    """Return kernels and bytes of one: its loads and stores, the sums of its programs, and the
    tail."""
    chain = kernel.chain
    num_kernels = moved_bytes = 0
    with torch.device("meta"):
        template = torch.empty(0)
        placeholders = [n for n in kernel.graph.nodes if n.op == "placeholder"]
        for value in chain.inputs:
            passes = count_passes(chain) if kernel.looped and value.cols else 1
            moved_bytes += _bytes(placeholders[value.place].meta["val"]) * passes
        for row_sum in chain.stored:
            moved_bytes += _bytes(torch.empty(row_sum.shape, dtype=row_sum.dtype))
        programs = launch_shape(kernel, template).programs
        with _Counting() as after:
            sums = []
            for row_sum in chain.sums:
                part = torch.empty(programs, chain.grid.size if row_sum.value.cols else 1)
                moved_bytes += _bytes(part)
                sums.append(part.sum(0).to(row_sum.dtype).reshape(row_sum.shape))
            if kernel.tail is not None:
                tail_args = [
                    torch.empty_like(placeholders[p].meta["val"], device="meta")
                    for p in chain.tail_inputs
                ]
                kernel.tail(*sums, *tail_args)
        num_kernels += after.kernels
    return num_kernels + 1, moved_bytes + after.bytes


def count_scheduled(graphs: ForwardBackward) -> Count:
    """Count kernels and bytes by inductor's scheduler; nothing is compiled."""
    forward = _count_scheduled(graphs.forward, graphs.backward is None, False)
    backward = (
        _count_scheduled(graphs.backward, False, True) if graphs.backward is not None else (0, 0)
    )
    return Count(forward[0], backward[0], forward[1] + backward[1])


def _count_scheduled(graph: fx.Graph, inference: bool, backward: bool) -> tuple[int, int]:
    """Return kernels and bytes of one graph: inductor's lowering and its scheduler only."""
    from torch._inductor import config
    from torch._inductor.compile_fx import record_original_output_strides
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    module = fx.GraphModule({}, graph)
    record_original_output_strides(module)
    inputs: list[Any] = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    lowered = GraphLowering(
        module, example_inputs=inputs, is_inference=inference, is_backward=backward
    )
    mode: Any = inputs[0].fake_mode
    with V.set_graph_handler(lowered), V.set_fake_mode(mode), DebugContext():
        with config.patch(fallback_random=True):
            lowered.run(*inputs)
            lowered._update_scheduler()
            size, _, _ = lowered.count_bytes()
        return len(lowered.scheduler.nodes), int(size)


# -- the gain of a module, for one call ------------------------------------------------------------


_ZERO = Count(0, 0, 0)


def gain_of_regions(
    module: nn.Module, request: FuseRequest, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Gain:
    """Return the gain of all regions that one call of a module on the meta device runs."""
    fuse_pattern(module, request)
    with torch.device("meta"), record_regions() as called:
        module.train()(*_meta_leaves(args), **_meta_leaves(kwargs))
    before = after = _ZERO
    texts: dict[str, None] = {}
    for region, values in called:
        inputs = [_meta_leaf(t, t.requires_grad) if isinstance(t, Tensor) else t for t in values]
        before += count_eager(region.eager, inputs, [t for t in inputs if isinstance(t, Tensor)])
        if region.backend == "rowwise":
            pair = kernels_for(region.eager, inputs, region.rounding)
            after += count_generated(pair)
            texts |= dict.fromkeys(kernel.text for kernel in pair.kernels)
        else:
            after += count_scheduled(trace_graphs(*function_of_tensors(region.eager, inputs)))
    return Gain(before, after, tuple(texts))


def gain_of_module(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Gain:
    """Return the gain of a module on the meta device that inductor compiles as a whole."""
    module.train()
    names = [name for name, _ in module.named_parameters()]
    example = [_meta_leaves(args), _meta_leaves(kwargs), [p for _, p in module.named_parameters()]]
    flat, spec = pytree.tree_flatten(example)

    def call(*values: Any) -> Any:
        call_args, call_kwargs, parameters = pytree.tree_unflatten(list(values), spec)
        named_params = dict(zip(names, parameters, strict=True))
        output = torch.func.functional_call(module, named_params, tuple(call_args), call_kwargs)
        return tensors_in(output)

    with torch.device("meta"):
        before = count_eager(call, flat, [t for t in flat if isinstance(t, Tensor)])
    return Gain(before, count_scheduled(trace_graphs(*function_of_tensors(call, flat))))


def _meta_leaves(tree: Any) -> Any:
    """Return a nest with its tensors on the meta device, with gradients for floats."""
    return pytree.tree_map_only(Tensor, lambda t: _meta_leaf(t, t.is_floating_point()), tree)


def _meta_leaf(tensor: Tensor, graded: bool) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(graded)
