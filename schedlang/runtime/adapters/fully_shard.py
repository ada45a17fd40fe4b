"""Patches of fully_shard (FSDP2): gathers, inputs, views, offloaded gradients, dry runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from schedlang.ir.pytree import Undo, tree_flatten, tree_leaves, tree_map_only, write_back
from schedlang.runtime.device import host_wait

_UNMARKED = nullcontext()
_REFUSE_DATA = "_schedlang_refuse_data"  # of a parameter: makes the refusal of `.data =`


def _profiler_mark(name: str, args: str | None = None) -> AbstractContextManager[Any]:
    """Return torch's profiler mark if a profiler is active; else a mark would cost two operators.

    There are eight marks for each unit and microbatch, and every function mode sees them.
    """
    return record_function(name, args) if _autograd._profiler_enabled() else _UNMARKED


_autograd: Any = torch.autograd
_marking: Any = _fsdp_param_group
_marking.record_function = _profiler_mark


def groups_of(unit: FSDPModule) -> list[Any]:
    """Return the groups of parameters that a unit gathers together; usually one."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    return list(groups)


def refuse_copies(module: nn.Module, refuse: Callable[[nn.Module, object], nn.Module]) -> None:
    """Call `refuse` when a module of torch's fully_shard is deep-copied, in place of torch's
    error."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            fsdp_class: Any = type(child)  # a class that torch has made
            fsdp_class.__deepcopy__ = refuse


def refuse_data_assignment(unit: FSDPModule, refuse: Callable[[nn.Parameter], Exception]) -> None:
    """Raise what `refuse` returns where `.data =` is used on a parameter that a unit shards.

    Such a parameter is a DTensor: torch would replace the data of the wrapper, which has none, and
    leave those of the shard.
    """
    _patch_data()
    for group in groups_of(unit):
        for one in group.fsdp_params:
            setattr(one.sharded_param, _REFUSE_DATA, refuse)


@cache
def _patch_data() -> None:
    data: Any = torch.Tensor.data

    def assign(self: DTensor, value: Tensor) -> None:
        refuse = vars(self).get(_REFUSE_DATA)
        if refuse is not None:
            raise refuse(self)
        data.__set__(self, value)

    DTensor.data = property(data.__get__, assign)  # type: ignore[assignment]


def end_unused_gather(unit: FSDPModule) -> None:
    """End a prefetched gather for a unit that did not run.

    Otherwise the unit's next forward would use the stale gathered values.
    """
    for group in groups_of(unit):
        if group._all_gather_result is not None:
            group.wait_for_unshard()
            group._to_sharded()


def finish_reductions(units: Iterable[FSDPModule]) -> None:
    """Let the device wait for the reductions that backwards of units have begun; free their
    inputs.

    torch does this within a backward that is the last one of a step.
    """
    for unit in units:
        for group in groups_of(unit):
            group.finalize_backward()
            context = group.comm_ctx
            context.post_forward_order.clear()
            # inputs of reductions, which are done where their results are
            if hasattr(context, "reduce_scatter_states"):
                context.reduce_scatter_states.clear()
            else:  # torch 2.11 has one at most
                context.reduce_scatter_state = None


def end_broken_step(unit: FSDPModule) -> None:
    """Put a unit into the state between two steps, after an exception in a step.

    torch does so at the end of a backward that is complete. Without it, the next backward neither
    ends nor waits for its reductions, and adds to gradients that were left. Waits for gathers that
    were begun; gradients are dropped.
    """
    state: Any = unit._get_fsdp_state()
    state._training_state = TrainingState.IDLE
    state._modules_to_run_forward.clear()
    shared = state._state_ctx  # of all units under a root
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False
    state._comm_ctx.post_forward_order.clear()
    for group in groups_of(unit):
        group.finalize_backward()
        group._training_state, group._partial_reduce_output = TrainingState.IDLE, None
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
        group._to_sharded()


class _WaitOnce:
    """An event that the host waits for once, however often it is called."""

    def __init__(self, event: torch.Event) -> None:
        self.event: torch.Event | None = event

    def synchronize(self) -> None:
        """Wait, at the first call."""
        event, self.event = self.event, None
        host_wait(event)


def offloaded_gradients(
    group: Any, offloads: Callable[[nn.Parameter], bool]
) -> list[tuple[nn.Parameter, Any]]:
    """Return the parameters that are `offloads` whose gradients a group copies to the host, with
    events.

    A group reduces gradients and copies them to the host; the event is reached when the copies are
    there, or None. torch would wait for each copy at the end of backward, and at once add the next
    microbatch's gradient.
    """
    params = [param for param in group.fsdp_params if offloads(param.sharded_param)]
    # one stream made them all: the last event covers the earlier ones
    events = [param.grad_offload_event for param in params if param.grad_offload_event is not None]
    event: Any = _WaitOnce(events[-1]) if events else None
    for param in params:
        param.grad_offload_event = None
    return [(param.sharded_param, event) for param in params]


def keep_containers(unit: FSDPModule, overwrites: bool = False) -> None:
    """Let a unit's module get its caller's containers instead of copies.

    Before a forward, fully_shard replaces the tensors that need a gradient, in copies of the dicts
    and lists around them: what a module writes into such a container (keys and values for later
    layers) would be silently lost. After the forward, entries that the module did not write are
    restored.

    A module that `overwrites` input tensors cannot write into fully_shard's replacements, which are
    views. It writes into clones, whose values are then copied to the caller's tensors.
    """
    for group in groups_of(unit):
        _keep_containers(group, overwrites)


def _keep_containers(group: Any, overwrites: bool) -> None:
    before, after = group._register_post_backward_hook, group.post_forward
    undo: Undo = []
    clones: list[tuple[Tensor, Tensor]] = []

    def registered(args: Any, kwargs: Any) -> tuple[Any, Any]:
        undo.clear()  # left by a forward that failed
        inputs = tuple(args), dict(kwargs)
        changed = before(*inputs)
        if overwrites:
            changed = _clone_inputs(inputs, changed, clones)
        result: tuple[Any, Any] = write_back(inputs, changed, undo)
        return result

    def ended(*args: Any) -> Any:
        while undo:
            undo.pop()()
        output = after(*args)
        return _write_back(output, clones) if clones else output

    group._register_post_backward_hook, group.post_forward = registered, ended


def _clone_inputs(inputs: Any, changed: Any, clones: list[tuple[Tensor, Tensor]]) -> Any:
    """Clone the tensors that replace the caller's; `clones` collects (caller's tensor, clone)
    pairs."""
    clones.clear()  # left by a forward that failed
    leaves, spec = tree_flatten(changed)
    for index, (original, value) in enumerate(zip(tree_leaves(inputs), leaves, strict=True)):
        if value is not original:
            leaves[index] = value.clone()
            clones.append((original, leaves[index]))
    return spec.unflatten(leaves)


def _write_back(output: Any, clones: list[tuple[Tensor, Tensor]]) -> Any:
    """Copy modified clones to the caller's tensors; outputs that are clones become these
    tensors."""
    originals = {}
    while clones:
        original, clone = clones.pop()
        if clone._version:
            original.copy_(clone)
        originals[id(clone)] = original
    if not any(id(leaf) in originals for leaf in tree_leaves(output)):
        return output
    return tree_map_only(Tensor, lambda leaf: originals.get(id(leaf), leaf), output)


def gather_for_views(unit: FSDPModule) -> None:
    """Let a unit gather for its backward if an output is a view that is modified in place later.

    torch triggers the gather by a hook on each output. An in-place change of a view gives it
    another node, without that hook: parameters are not gathered, and torch warns for every view.
    The node of the view's base stays; if the unit's own forward made it, the hook goes there.
    """
    state: Any = unit._get_fsdp_state()
    register, first_node = state._register_pre_backward_hook, [0]
    for group in groups_of(unit):
        _note_first_node(group, first_node)

    def gather(unused: Any) -> None:
        state._pre_backward(None)

    def hooked(output: Any) -> Any:
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return register(output)
        for tensor in _gradient_outputs(output):
            if isinstance(tensor, nn.Parameter):  # its hooks would stay for all later steps
                continue
            node: Any = None if tensor._base is None else tensor._base.grad_fn
            if node is not None and node._sequence_nr() >= first_node[0]:
                node.register_prehook(gather)
            else:
                cast(Any, tensor).register_hook(state._pre_backward)
        return output

    state._register_pre_backward_hook = hooked


def _note_first_node(group: Any, first_node: list[int]) -> None:
    """Store the sequence number of the first node that a group's forward will make."""
    before = group._register_post_backward_hook

    def registered(args: Any, kwargs: Any) -> Any:
        result = before(args, kwargs)
        first_node[0] = torch._C._autograd._get_sequence_nr()
        return result

    group._register_post_backward_hook = registered


# of torch 2.13; earlier versions use pytrees
_collect: Any = getattr(_fsdp_state, "collect_grad_tensors", None)


def gather_in_inference(unit: FSDPModule) -> None:
    """Let a unit make tensors that can be trained when `torch.inference_mode` gathers first.

    torch keeps what the first gather made for all later ones.
    """
    for group in groups_of(unit):
        group.unshard = _outside_of_inference(group.unshard)
        group.wait_for_unshard = _outside_of_inference(group.wait_for_unshard)


def _outside_of_inference(gather: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return gather(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return gather(*args, **kwargs)

    return run


def _gradient_outputs(output: Any) -> Iterable[Tensor]:
    """Return the tensors of an output that need a gradient, as torch finds them."""
    if _collect is not None:
        outputs: Iterable[Tensor] = _collect(output)
        return outputs
    tensors = (tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor))
    return (tensor for tensor in tensors if tensor.requires_grad)


def run_again_after_backward(unit: FSDPModule) -> None:
    """Let a forward in a backward, of a unit whose own backward has ended, be one of its own.

    A reentrant checkpoint of a unit that is called twice makes such forwards. torch takes them for
    a recomputation before the unit's backward until all of the backward ends: it would reduce no
    gradient of theirs.
    """
    state: Any = unit._get_fsdp_state()

    def ending(post_backward: Callable[..., None]) -> Callable[..., None]:
        def end(*unused: object) -> None:
            post_backward(*unused)
            state._training_state = TrainingState.IDLE

        return end

    for group in groups_of(unit):
        wrap_post_backward(group, ending)


def wrap_post_backward(
    group: Any, make: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
    """Wrap the function that a group runs after its backward by `make`."""
    group.post_backward = make(group.post_backward)


def parameter_names(unit: FSDPModule, fsdp_params: Iterable[Any]) -> dict[Any, str]:
    """Return the names, inside a unit, of parameters that the unit gathers."""
    modules = unit.named_modules()  # type: ignore[attr-defined]
    prefixes = {module: f"{name}." if name else "" for name, module in modules}
    infos = {param: param._module_info for param in fsdp_params}
    return {
        param: f"{prefixes.get(info.module, '')}{info.param_name}" for param, info in infos.items()
    }


def replaced_parameter(module: nn.Module) -> str | None:
    """Return the name of a parameter of units for which another tensor stands in its module."""
    for unit in module.modules():
        for group in groups_of(unit) if isinstance(unit, FSDPModule) else ():
            for param in group.fsdp_params:
                info = param._module_info
                present = info.module._parameters.get(info.param_name)
                own = param.sharded_param, getattr(param, "_unsharded_param", None)
                if all(present is not one for one in own):
                    return parameter_names(cast(FSDPModule, module), [param])[param]
    return None


class ZeroSlice:
    """A ZeRO slice of a parameter, which fully_shard gathers from the tensor `home`."""

    def __init__(self, fsdp_param: Any) -> None:
        self._held = fsdp_param

    @property
    def home(self) -> Tensor:
        """The slice with its padding, flat."""
        flat: Tensor = self._held._sharded_param_data
        return flat

    def as_stored(self, value: Tensor) -> Tensor:
        """Return the values of a slice, flat and padded."""
        flat = torch.zeros_like(self.home, device="cpu")
        flat[: value.numel()].copy_(value.reshape(-1))
        return flat

    def set_home(self, storage: Tensor) -> None:
        """Store the slice in this tensor from now on."""
        fsdp_param = self._held
        dim, local = fsdp_param.fsdp_placement.dim, fsdp_param.sharded_param._local_tensor
        fsdp_param._sharded_param_data = storage
        padded = storage.view(fsdp_param.padded_sharded_param_size)
        length = local.size(dim) if local.numel() else 0
        fsdp_param.sharded_param._local_tensor = padded.narrow(dim, 0, length)


def shards_of(units: Iterable[FSDPModule]) -> dict[Any, ZeroSlice]:
    """Return the slices that units gather, by parameter."""
    groups = [group for unit in units for group in groups_of(unit)]
    return {p.sharded_param: ZeroSlice(p) for group in groups for p in group.fsdp_params}


@contextmanager
def on_meta_device(units: Iterable[FSDPModule]) -> Iterator[None]:
    """Let units run on the meta device, within the block, which fully_shard refuses."""
    for unit in units:
        for group in groups_of(unit):
            group._validate_no_meta_params = lambda: None
            group.device = torch.device("meta")
            for param in group.fsdp_params:  # parameters that are cast are gathered on this device
                param.device = torch.device("meta")
    names = vars(_fsdp_collectives)
    before = names["_get_device_handle"]
    names["_get_device_handle"] = partial(_device_handle, before)
    try:
        yield
    finally:
        names["_get_device_handle"] = before


def _device_handle(original: Callable[[str], Any], device: str) -> Any:
    return original("cpu" if device == "meta" else device)
