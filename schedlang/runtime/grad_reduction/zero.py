"""ZeRO: data-parallel parameters, gradients and optimizer state, sharded by torch's fully_shard.

`ShardedStage` holds the fully_shard units of one stage; `join_stages` connects the stages of a
rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    share_comm_ctx,
)
from torch.distributed.tensor import Shard

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.ir.placement import slicing_dim
from schedlang.ir.pytree import record_outputs
from schedlang.pipeline.timeline.table import Kind
from schedlang.runtime.adapters.fully_shard import (
    end_broken_step,
    end_unused_gather,
    finish_reductions,
    gather_for_views,
    gather_in_inference,
    groups_of,
    keep_containers,
    offloaded_gradients,
    parameter_names,
    refuse_data_assignment,
    run_again_after_backward,
    wrap_post_backward,
)
from schedlang.runtime.comm import world
from schedlang.runtime.device import has_streams, send_to_device
from schedlang.runtime.mixed_precision import DTYPES
from schedlang.runtime.storage.offloaded_gradients import accumulate_offloaded, offloads_gradient
from schedlang.runtime.storage.tiers import CPU, DEVICE

if TYPE_CHECKING:
    from schedlang.runtime.pipeline.executor import Handler

T = TypeVar("T")
_PRIME = 2**31 - 1  # the largest prime in 32 bits

# ---- Data-parallel state split over ranks (ZeRO), by torch's fully_shard (FSDP2).
# Rajbhandari et al., ZeRO (SC 2020). Gradients are summed, never averaged: the loss of each part
# is already weighted by its share of the full batch.


@dataclass(frozen=True)
class ShardedUnit:
    """The settings of one fully_shard unit.

    `root`: the root of its stage; `stays_gathered`: parts of the module compute after its forward,
    so it stays gathered; `tier`: the tier of its shards; `gather_dtype`: the dtype in which it is
    gathered (None: as stored; gradients are always reduced as stored).
    """

    root: bool = False
    stays_gathered: bool = False
    tier: str = DEVICE
    gather_dtype: str | None = None
    overwrites: bool = False


class ShardedStage:
    """The units of one stage whose parameters are sharded over data-parallel ranks.

    Stage 1 of ZeRO reduces gradients once a step, 2 and 3 after each microbatch; 3 also frees
    gathered parameters after each forward and backward. Rows of a timeline may hold them gathered
    for a run of operations of the stage (`unshard`, `reshard_all`): gradients are then reduced
    once a run.
    """

    def __init__(
        self,
        stage: int,
        mesh: DeviceMesh,
        ignored: set[nn.Parameter],
        reshards: bool = True,
        may_skip: bool = False,
    ) -> None:
        self.stage, self.mesh, self.ignored = stage, mesh, ignored
        # free gathered parameters between forward and backward
        self.between = reshards and stage == 3
        self.units: list[FSDPModule] = []
        self.waiting: set[FSDPModule] = set()
        self.ahead = 0
        self.early = False  # rows of this step have begun to gather all units
        self.asked = may_skip  # values may decide which ranks use a parameter in a step
        self.used: set[nn.Parameter] = set()  # parameters with a gradient on this rank in this step
        # for each unit: a hash of its calls in this step, if values decide on them
        self.calls: list[int] = []
        self._turn = 0  # calls of units in this step
        self._root: _Root | None = None  # in a pipeline, where no unit contains all others
        self._new_roots: list[_Root] = []  # of all stages of this rank, not set up yet
        self._synced: tuple[bool, bool] | None = None
        self._stepping = False  # a backward of a step runs
        self._unshards: list[UnshardHandle] | None = (
            None  # while a run holds the parameters gathered
        )

    def add_unit(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        unit: ShardedUnit,
        required: Collection[nn.Parameter],
    ) -> None:
        """Shard over a mesh the parameters of a module that no earlier unit holds.

        `required`: parameters on which the loss depends, whatever the values on this rank; not
        stored, because shards replace these parameters.

        The parameters of the root stay gathered after its forward, because the backward begins
        there. So do those of a unit that `stays_gathered`. Shards of another tier than the
        device's are gathered from the host.
        """
        pinned = unit.tier == CPU and has_streams(torch.device(mesh.device_type))
        policy = OffloadPolicy() if unit.tier == DEVICE else CPUOffloadPolicy(pin_memory=pinned)
        places = {n for n, p in module.named_parameters() if p in required}
        mp_policy = (
            MixedPrecisionPolicy()
            if unit.gather_dtype is None
            else MixedPrecisionPolicy(
                DTYPES[unit.gather_dtype], torch.float32, cast_forward_inputs=False
            )
        )
        fully_shard(
            module,
            mesh=mesh,
            ignored_params=self.ignored,
            offload_policy=policy,
            mp_policy=mp_policy,
            shard_placement_fn=lambda p: Shard(slicing_dim(p.shape, mesh.size())),
            reshard_after_forward=self.between and not (unit.root or unit.stays_gathered),
        )
        assert isinstance(module, FSDPModule)
        record_outputs(module)  # fully_shard has changed its class
        keep_containers(module, unit.overwrites)
        gather_for_views(module)
        gather_in_inference(module)
        run_again_after_backward(module)
        refuse_data_assignment(module, _data_refusal)
        self._zero_missing(module, places)
        module.set_gradient_divide_factor(1.0)
        # a plain sum: gloo lacks the operator for a factor, even of one
        module.set_force_sum_reduction_for_comms(True)
        self.units.append(module)
        if unit.stays_gathered:
            self.waiting.add(module)
        if self.asked:
            module.register_forward_pre_hook(self._counter(len(self.units) - 1))

    def _counter(self, index: int) -> Callable[..., None]:
        self.calls.append(0)

        def count(*unused: object) -> None:
            self._turn += 1
            self.calls[index] = (self.calls[index] * 31 + self._turn) % _PRIME

        return count

    def prefetch(self, ahead: int) -> None:
        """Let each unit gather the next `ahead` units, in the order of calls."""
        self.ahead, units = ahead, self.units if ahead else []
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])
            unit.set_modules_to_backward_prefetch(units[max(index - ahead, 0) : index][::-1])

    def run_forward(self, forward: Callable[[], T]) -> T:
        """Run a forward of this stage; for torch it is the forward of a root of its units."""
        assert self._root is not None
        self._set_up()
        results: list[T] = []
        self._root(lambda: results.append(forward()))
        return results[0]

    def _set_up(self) -> None:
        """Run the setup of the first call of each root, before anything is gathered."""
        while self._new_roots:
            self._new_roots.pop()(lambda: None)

    def free_gathered(self) -> None:
        """Free gathered parameters and prefetched gathers, at the end of a step.

        Torch does so in a backward. None runs in a stage where all is frozen: it would keep the
        values of this step, and what is frozen.
        """
        self._stepping = False
        for unit in self.units:
            if self.ahead or self.early:
                end_unused_gather(unit)
            unit.reshard()
        self.early = False

    def end_broken_step(self) -> None:
        """Forget a step that an exception has ended: its gradients, and what was gathered."""
        self.calls, self._turn, self._stepping = [0] * len(self.calls), 0, False
        self.used.clear()
        if self._unshards is not None:
            self.reshard()
        root: Any = [] if self._root is None else [self._root]
        for unit in (*self.units, *root):
            end_broken_step(unit)

    def _zero_missing(self, unit: FSDPModule, names: set[str]) -> None:
        """Set a gradient to zero if only other ranks have one (of an expert without tokens here).

        Otherwise fully_shard would reduce different sets of parameters on different ranks. Its own
        setting for that would also give a gradient to parameters that no rank uses.
        """
        for group in groups_of(unit):
            inner_names = parameter_names(unit, group.fsdp_params)
            required = {param for param, name in inner_names.items() if name in names}
            wrap_post_backward(group, partial(self._zeroing_backward, group, required))

    def _zeroing_backward(self, group: Any, required: set[Any], inner: Callable[..., None]) -> Any:
        def post_backward(*unused: object) -> None:
            if not self._stepping and self.mesh.size() > 1:
                name = str(group.fsdp_params[0]._param_fqn)
                raise own_backward(name).at(python_span())
            for param in group.fsdp_params if group.reduce_grads else ():
                if not hasattr(param, "_unsharded_param"):
                    continue
                full = param.unsharded_param
                if param.unsharded_accumulated_grad is not None or full.grad is not None:
                    self.used.add(param.sharded_param)
                elif param in required and full.requires_grad:
                    full.grad = torch.zeros_like(full)
            inner(*unused)
            for sharded, event in offloaded_gradients(group, offloads_gradient):
                accumulate_offloaded(sharded, event)

        return post_backward

    def check_calls(self) -> None:
        """Raise Refusal S663 if values let ranks call units in different orders.

        Then their collectives mixed different units.
        """
        if self.asked and self.units:
            counted = [*self.calls, *(-count for count in self.calls)]
            device = torch.device(self.mesh.device_type)
            flags = send_to_device(torch.tensor(counted, dtype=torch.int32), device)
            world.all_reduce(flags, self.mesh.get_group(), largest=True)
            self.calls, self._turn = [0] * len(self.calls), 0
            _check_calls(flags.tolist())

    def before_backward(self, last: bool, reduces: bool = True) -> None:
        """Announce whether the next backward is the last of this step, and whether it reduces."""
        self._stepping = True
        if (last, reduces) == self._synced:
            return
        self._synced = (last, reduces)
        frees = self._unshards is None and (last or self.stage == 3)
        # in a pipeline a backward must not wait for its reductions: earlier stages need its result
        waits = last and self._root is None
        for unit in self.units:
            unit.set_requires_gradient_sync(last or self.stage > 1 and reduces, recurse=False)
            unit.set_is_last_backward(waits)
            unit.set_reshard_after_backward(frees, recurse=False)

    def finish_backwards(self) -> None:
        """Wait for the reductions that the backwards of a step in a pipeline have begun."""
        if self._root is not None:
            finish_reductions(self.units)

    def unshard(self) -> None:
        """Begin to gather all units, and keep them gathered; each unit waits for its own gather.

        In stages 1 and 2 of ZeRO they stay gathered until the last backward of the step.
        """
        self._set_up()
        if self.stage < 3:
            self.early = True
            for unit in self.units:
                unit.unshard(async_op=True)
            return
        assert self._unshards is None
        self._set_held(True)
        handles = (unit.unshard(async_op=True) for unit in self.units)
        self._unshards = [handle for handle in handles if handle is not None]

    def reshard(self) -> None:
        """Free the parameters gathered by `unshard`."""
        assert self._unshards is not None
        for handle in self._unshards:  # a unit that did not run has not waited: its next gather
            handle.wait()  # would return the present values
        for unit in self.units:
            unit.reshard()
        self._unshards = None
        self._set_held(False)

    def _set_held(self, stays_gathered: bool) -> None:
        self._synced = None
        for unit in self.units:
            frees = self.between and not stays_gathered and unit not in self.waiting
            unit.set_reshard_after_forward(frees, recurse=False)
            unit.set_reshard_after_backward(not stays_gathered, recurse=False)


class _Root(nn.Module):
    """An empty module that torch takes for the model around the units of a stage."""

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)  # type: ignore[arg-type]

    def forward(self, forward: Callable[[], None]) -> None:
        """Run the forward of a stage, which calls the units."""
        forward()


def join_stages(stages: Sequence[ShardedStage]) -> None:
    """Give the units of each stage of this rank a root, and all stages the same streams.

    Without a root each unit is a root: it is gathered after all earlier ones are computed, and the
    input of its reduction stays until backward ends. With a root, gathers and reductions overlap
    with computation, and the input of a reduction is freed when the next one begins, of any stage.
    """
    roots: list[Any] = []
    for stage in stages:
        stage._root, stage._new_roots = _Root(stage.units), roots
        roots.append(fully_shard(stage._root, mesh=stage.mesh, ignored_params=stage.ignored))
        # torch would use the order of the latest forwards, which are of other microbatches here;
        # the first unit prefetches itself, a no-op: with an empty list torch uses its own order
        for index, unit in enumerate(stage.units):
            ahead = stage.units[max(index - max(stage.ahead, 1), 0) : index][::-1]
            unit.set_modules_to_backward_prefetch(ahead or [unit])
    share_comm_ctx(roots)


def gradient_flags(
    sliced: Mapping[int, ShardedStage], parameters: Mapping[str, nn.Parameter], names: Sequence[str]
) -> list[float]:
    """Return 1 for each sharded parameter (by name) with a gradient on this rank, else 0."""
    used = {parameter for stage in sliced.values() for parameter in stage.used}
    for stage in sliced.values():
        stage.used.clear()
    return [float(parameters.get(n) in used) for n in names]


def pack_flags(flags: Sequence[float], world: int, dtype: torch.dtype) -> list[float]:
    """Pack flags into few numbers whose sums over the ranks of a world are exact."""
    width, size = _fields(world, dtype)
    chunks = [flags[k : k + size] for k in range(0, len(flags), size)]
    return [float(sum(int(flag) << width * k for k, flag in enumerate(part))) for part in chunks]


def unpack_counts(sums: Sequence[float], count: int, world: int, dtype: torch.dtype) -> list[int]:
    """Return for each of `count` flags how many ranks had a one, from sums of packed flags."""
    width, size = _fields(world, dtype)
    last = (1 << width) - 1
    return [int(sums[k // size]) >> width * (k % size) & last for k in range(count)]


def _fields(world: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bits of a count of ranks, and how many counts a number of this dtype holds
    exactly."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return world.bit_length(), digits // world.bit_length()


def own_backward(name: str) -> Refusal:
    """Return the refusal of a backward outside of a step: nothing would reduce this gradient."""
    return Refusal.of(
        "S617",
        f"your own backward: only a step sums the gradient of `{name}` over ranks",
        helps=(
            "`program.train_step(batch)`: built without `optimizer=` it leaves the gradients of"
            " the full batch for your loop",
        ),
    )


def _data_refusal(parameter: nn.Parameter) -> Refusal:
    shape = tuple(parameter.shape)
    return Refusal.of(
        "S617",
        f"`.data =` would not change a parameter that `zero` shards, of shape {shape}",
        notes=("torch would replace the data of the wrapper (a DTensor), not those of the shard",),
        helps=(
            "change values in place: `with torch.no_grad(): parameter.mul_(0.5)`",
            "or set full values: `program.load_state_dict({**program.state_dict(), name: value})`",
        ),
    ).at(python_span())


def _check_calls(counts: Sequence[int]) -> None:
    """Compare the most and the (negated) least of all ranks' call hashes of each unit."""
    maxima, minima = counts[: len(counts) // 2], counts[len(counts) // 2 :]
    if any(maximum + minimum for maximum, minimum in zip(maxima, minima)):
        raise Refusal.of(
            "S663",
            "values decide which of the modules that `zero` gathers are called",
            notes=("ranks called them in different orders, or numbers, in this step",),
            helps=("use `zero(stage=0, ...)`, or `expert_parallel` for experts",),
        )


def reshard_all(sliced: Mapping[int, ShardedStage]) -> None:
    """Free gathered parameters, so that the next forward gathers the present shards."""
    for stage in sliced.values():
        stage.free_gathered()


def gather_handlers(sliced: Mapping[int, ShardedStage]) -> Mapping[Kind, Handler]:
    """Return the handlers of rows that hold stages gathered.

    REDUCE does nothing: fully_shard has reduced in the backward before it.
    """
    return {
        Kind.UNSHARD: lambda step, op: sliced[op.stage].unshard(),
        Kind.RESHARD: lambda step, op: sliced[op.stage].reshard(),
        Kind.REDUCE: lambda step, op: None,
    }


# ---- The factors of fully_shard's reductions in a built program.


def reduction_factors(
    sliced: ShardedStage, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[frozenset[str], float]]:
    """Yield the names of each unit's parameters, and the number by which their sum is divided."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for unit in sliced.units:
        for group in groups_of(unit):
            unit_names = frozenset(names[id(p.sharded_param)] for p in group.fsdp_params)
            size = group.mesh_info.mesh.size()
            factor = group.gradient_divide_factor
            yield unit_names, float(size if factor is None else factor)
