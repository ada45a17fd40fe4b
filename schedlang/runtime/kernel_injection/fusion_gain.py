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
        out = func(*args, **(kwargs or {}))
        if launches_kernel(func):
            self.kernels += 1
            given = {id(t): t for t in tensors_in((args, kwargs or {}))}
            made = {id(t): t for t in tensors_in(out)}
            self.bytes += sum(map(_bytes, given.values())) + sum(map(_bytes, made.values()))
        return out


def launches_kernel(func: Any) -> bool:
    """Return whether an operator launches a kernel: a view does not."""
    name = func._schema.name.split("::")[1]
    views = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    return not views and name not in _NO_LAUNCH


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's memory; a broadcast dim is read once."""
    held = [n for n, stride in zip(tensor.shape, tensor.stride()) if stride != 0]
    count = 1
    for size in held:
        count *= size
    return count * tensor.element_size()


def count_eager(
    function: Callable[..., Any], given: Sequence[Any], leaves: Sequence[Tensor]
) -> Count:
    """Count kernels and bytes of a function on the meta device, with gradients of `leaves`."""
    with _Counting() as forward:
        out = function(*given)
    made = [t for t in tensors_in(out) if t.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = [torch.empty_like(t) for t in made]
    with _Counting() as backward:
        if made and wanted:
            torch.autograd.grad(made, wanted, grads, allow_unused=True)
    return Count(forward.kernels, backward.kernels, forward.bytes + backward.bytes)


def count_generated(pair: KernelPair) -> Count:
    """Count the generated kernels of a chain, and the sums after them."""
    found = [_count_generated(kernel) for kernel in pair.kernels]
    backward = found[1][0] if len(found) > 1 else 0
    return Count(found[0][0], backward, sum(size for _, size in found))


def _count_generated(made: RowwiseKernel) -> tuple[int, int]:
    """Return kernels and bytes of one: its loads and stores, the sums of its programs, and the
    tail."""
    chain = made.chain
    kernels = moved = 0
    with torch.device("meta"):
        like = torch.empty(0)
        places = [n for n in made.graph.nodes if n.op == "placeholder"]
        for value in chain.inputs:
            again = count_passes(chain) if made.looped and value.cols else 1
            moved += _bytes(places[value.place].meta["val"]) * again
        for one in chain.stored:
            moved += _bytes(torch.empty(one.shape, dtype=one.dtype))
        parts = launch_shape(made, like).programs
        with _Counting() as after:
            sums = []
            for one in chain.sums:
                part = torch.empty(parts, chain.grid.size if one.value.cols else 1)
                moved += _bytes(part)
                sums.append(part.sum(0).to(one.dtype).reshape(one.shape))
            if made.tail is not None:
                late = [
                    torch.empty_like(places[p].meta["val"], device="meta")
                    for p in chain.tail_inputs
                ]
                made.tail(*sums, *late)
        kernels += after.kernels
    return kernels + 1, moved + after.bytes


def count_scheduled(found: ForwardBackward) -> Count:
    """Count kernels and bytes by inductor's scheduler; nothing is compiled."""
    forward = _count_scheduled(found.forward, found.backward is None, False)
    backward = (
        _count_scheduled(found.backward, False, True) if found.backward is not None else (0, 0)
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
    made = GraphLowering(
        module, example_inputs=inputs, is_inference=inference, is_backward=backward
    )
    mode: Any = inputs[0].fake_mode
    with V.set_graph_handler(made), V.set_fake_mode(mode), DebugContext():
        with config.patch(fallback_random=True):
            made.run(*inputs)
            made._update_scheduler()
            size, _, _ = made.count_bytes()
        return len(made.scheduler.nodes), int(size)


# -- the gain of a module, for one call ------------------------------------------------------------


_ZERO = Count(0, 0, 0)


def gain_of_regions(
    module: nn.Module, told: FuseRequest, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Gain:
    """Return the gain of all regions that one call of a module on the meta device runs."""
    fuse_pattern(module, told)
    with torch.device("meta"), record_regions() as called:
        module.train()(*_meta_leaves(args), **_meta_leaves(kwargs))
    before = after = _ZERO
    texts: dict[str, None] = {}
    for region, given in called:
        inputs = [_meta_leaf(t, t.requires_grad) if isinstance(t, Tensor) else t for t in given]
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
    given = [_meta_leaves(args), _meta_leaves(kwargs), [p for _, p in module.named_parameters()]]
    flat, form = pytree.tree_flatten(given)

    def call(*values: Any) -> Any:
        own, named, parameters = pytree.tree_unflatten(list(values), form)
        held = dict(zip(names, parameters, strict=True))
        made = torch.func.functional_call(module, held, tuple(own), named)
        return tensors_in(made)

    with torch.device("meta"):
        before = count_eager(call, flat, [t for t in flat if isinstance(t, Tensor)])
    return Gain(before, count_scheduled(trace_graphs(*function_of_tensors(call, flat))))


def _meta_leaves(tree: Any) -> Any:
    """Return a nest with its tensors on the meta device, with gradients for floats."""
    return pytree.tree_map_only(Tensor, lambda t: _meta_leaf(t, t.is_floating_point()), tree)


def _meta_leaf(tensor: Tensor, graded: bool) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(graded)
