"""fully_shard (FSDP2): what it holds gathered, and runs without values; its private parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.profiler import record_function

from schedlang.ir.pytree import Undo, tree_flatten, tree_leaves, tree_map_only, written_into
from schedlang.runtime.device import settled

_UNMARKED = nullcontext()


def _marked(name: str, args: str | None = None) -> AbstractContextManager[Any]:
    """Return torch's mark for its profiler where one is at work; else a mark costs two operators.

    There are eight of them for each unit and microbatch, which every function mode sees.
    """
    return record_function(name, args) if _autograd._profiler_enabled() else _UNMARKED


_autograd: Any = torch.autograd
_marking: Any = _fsdp_param_group
_marking.record_function = _marked


def groups_of(unit: FSDPModule) -> list[Any]:
    """The groups of parameters that a unit gathers together; mostly one."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        groups = [one for one in [state._fsdp_param_group] if one is not None]
    return list(groups)


def not_copied(module: nn.Module, refuse: Callable[[nn.Module, object], nn.Module]) -> None:
    """Let `refuse` answer where torch only says that it copies no such module."""
    for one in module.modules():
        if isinstance(one, FSDPModule):
            made: Any = type(one)  # a class that torch has made
            made.__deepcopy__ = refuse


def end_gather(unit: FSDPModule) -> None:
    """End a gather that was begun for a unit that did not run.

    Else the unit's next forward would take what was gathered for values of now.
    """
    for group in groups_of(unit):
        if group._all_gather_result is not None:
            group.wait_for_unshard()
            group._to_sharded()


class _WaitOnce:
    """An event that the host waits for once, however many ask."""

    def __init__(self, event: torch.Event) -> None:
        self.event: torch.Event | None = event

    def synchronize(self) -> None:
        """Wait, if nobody has."""
        event, self.event = self.event, None
        settled(event)


def offloaded(
    group: Any, leaving: Callable[[nn.Parameter], bool]
) -> list[tuple[nn.Parameter, Any]]:
    """The parameters whose gradients a group has reduced and copied to the host, of those that are
    `leaving`; with an event that ends when they are there, or None.

    torch would wait for each at the end of backward, and add another microbatch's to it at once.
    """
    held = [one for one in group.fsdp_params if leaving(one.sharded_param)]
    # one stream has made them all: the last event stands for those before it
    events = [one.grad_offload_event for one in held if one.grad_offload_event is not None]
    event: Any = _WaitOnce(events[-1]) if events else None
    for one in held:
        one.grad_offload_event = None
    return [(one.sharded_param, event) for one in held]


def keep_inputs(unit: FSDPModule, overwrites: bool = False) -> None:
    """Let a unit's module be given the containers that its caller holds, not copies of them.

    Before a forward fully_shard puts other tensors in the place of those that need a gradient, in
    copies of the dicts and lists around them: what a module writes into one (keys and values that
    later layers read) would be lost, and nobody would say so.  After the forward what the module
    did not write itself is as it was.

    A module that `overwrites` tensors that it is given cannot write into those that fully_shard
    puts there, which are views.  It writes into clones, whose values the caller's tensors then get.
    """
    for group in groups_of(unit):
        _keep(group, overwrites)


def _keep(group: Any, overwrites: bool) -> None:
    before, after = group._register_post_backward_hook, group.post_forward
    undo: Undo = []
    clones: list[tuple[Tensor, Tensor]] = []

    def registered(args: Any, kwargs: Any) -> tuple[Any, Any]:
        undo.clear()  # of a forward that has failed
        given = tuple(args), dict(kwargs)
        changed = before(*given)
        if overwrites:
            changed = _cloned(given, changed, clones)
        found: tuple[Any, Any] = written_into(given, changed, undo)
        return found

    def ended(*given: Any) -> Any:
        while undo:
            undo.pop()()
        output = after(*given)
        return _given_back(output, clones) if clones else output

    group._register_post_backward_hook, group.post_forward = registered, ended


def _cloned(given: Any, changed: Any, clones: list[tuple[Tensor, Tensor]]) -> Any:
    """Clones in place of what was put in place of the caller's tensors; `clones`: both of each."""
    clones.clear()  # of a forward that has failed
    leaves, spec = tree_flatten(changed)
    for place, (mine, new) in enumerate(zip(tree_leaves(given), leaves, strict=True)):
        if new is not mine:
            leaves[place] = new.clone()
            clones.append((mine, leaves[place]))
    return spec.unflatten(leaves)


def _given_back(output: Any, clones: list[tuple[Tensor, Tensor]]) -> Any:
    """Write into the caller's tensors what was written into their clones; an output that is such a
    clone is the caller's tensor."""
    mine = {}
    while clones:
        one, clone = clones.pop()
        if clone._version:
            one.copy_(clone)
        mine[id(clone)] = one
    if not any(id(leaf) in mine for leaf in tree_leaves(output)):
        return output
    return tree_map_only(Tensor, lambda leaf: mine.get(id(leaf), leaf), output)


def gather_for_views(unit: FSDPModule) -> None:
    """Let a unit gather for its backward where an output is a view that is later written into.

    torch asks for the gather by a hook of each output.  A write in place into a view gives it
    another node, without that hook: parameters are not there, and torch warns of every view.  The
    node that made what is viewed stays; if the unit's own forward made it, the hook is there.
    """
    state: Any = unit._get_fsdp_state()
    plain, first = state._register_pre_backward_hook, [0]
    for group in groups_of(unit):
        _count_from(group, first)

    def gather(unused: Any) -> None:
        state._pre_backward(None)

    def hooked(output: Any) -> Any:
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return plain(output)
        for one in _outputs(output):
            node: Any = None if one._base is None else one._base.grad_fn
            if node is not None and node._sequence_nr() >= first[0]:
                node.register_prehook(gather)
            else:
                cast(Any, one).register_hook(state._pre_backward)
        return output

    state._register_pre_backward_hook = hooked


def _count_from(group: Any, first: list[int]) -> None:
    """Keep the number of the node that a group's forward will make first."""
    before = group._register_post_backward_hook

    def registered(args: Any, kwargs: Any) -> Any:
        found = before(args, kwargs)
        first[0] = torch._C._autograd._get_sequence_nr()
        return found

    group._register_post_backward_hook = registered


# of torch 2.13; versions before it look into what pytrees know
_collect: Any = getattr(_fsdp_state, "collect_grad_tensors", None)


def _outputs(output: Any) -> Iterable[Tensor]:
    """The tensors of an output that need a gradient, as torch finds them."""
    if _collect is not None:
        found: Iterable[Tensor] = _collect(output)
        return found
    tensors = (one for one in tree_leaves(output) if isinstance(one, Tensor))
    return (one for one in tensors if one.requires_grad)


def around_backward(group: Any, make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Let a group run, when its backward has ended, what `make` makes of torch's own function."""
    group.post_backward = make(group.post_backward)


def name_in(unit: FSDPModule, held: Any) -> str:
    """The name inside a unit of a parameter that it gathers."""
    info = held._module_info
    modules = unit.named_modules()  # type: ignore[attr-defined]
    prefix = next((name for name, child in modules if child is info.module), "")
    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)


class Shard:
    """A slice of a parameter, which fully_shard gathers from wherever `home` lies."""

    def __init__(self, held: Any) -> None:
        self._held = held

    @property
    def home(self) -> Tensor:
        """The slice with its padding, flat."""
        flat: Tensor = self._held._sharded_param_data
        return flat

    def laid(self, value: Tensor) -> Tensor:
        """The values of a slice as they lie."""
        flat = torch.zeros_like(self.home, device="cpu")
        flat[: value.numel()].copy_(value.reshape(-1))
        return flat

    def settle(self, home: Tensor) -> None:
        """Let the slice lie there from now on."""
        held = self._held
        dim, part = held.fsdp_placement.dim, held.sharded_param._local_tensor
        held._sharded_param_data = home
        whole = home.view(held.padded_sharded_param_size)
        length = part.size(dim) if part.numel() else 0
        held.sharded_param._local_tensor = whole.narrow(dim, 0, length)


def shards_of(units: Iterable[FSDPModule]) -> dict[Any, Shard]:
    """The slices that units gather, by parameter."""
    groups = [group for unit in units for group in groups_of(unit)]
    return {one.sharded_param: Shard(one) for group in groups for one in group.fsdp_params}


@contextmanager
def without_values(units: Iterable[FSDPModule]) -> Iterator[None]:
    """Let units run on the meta device, which they refuse by themselves."""
    for unit in units:
        for group in groups_of(unit):
            group._validate_no_meta_params = lambda: None
            group.device = torch.device("meta")
            for one in group.fsdp_params:  # those that are cast are put together there
                one.device = torch.device("meta")
    names = vars(_fsdp_collectives)
    before = names["_get_device_handle"]
    names["_get_device_handle"] = partial(_handle, before)
    try:
        yield
    finally:
        names["_get_device_handle"] = before


def _handle(plain: Callable[[str], Any], device: str) -> Any:
    return plain("cpu" if device == "meta" else device)
