"""Optimizer steps on sharded parameters: elementwise on shards, or on full tensors put together.

* `is_elementwise`, `is_tensorwise`: trials on small tensors show how an optimizer updates.
* `step_optimizer`: a step of an optimizer whose groups mix DTensors and plain tensors. Elementwise
  updates run on the local shards: on DTensors, each of some twenty operators per parameter passes
  through Python's dispatch.
* `FullTensorStep`: a step of an optimizer that needs full tensors (Muon, Adafactor, LAMB). Batches
  of parameters are assembled with gradients and state on the ranks that hold a shard; the user's
  own optimizer steps on these, and each rank stores its shards. Between steps nothing is full:
  state shaped as a parameter is sharded as the parameter, other state (rows and columns of
  Adafactor) is replicated on its ranks.
"""

from __future__ import annotations

import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.diagnostics.diagnostic import Refusal, kind_of
from schedlang.runtime.checkpointing.holdings import Holding, assemble_tensors, shard_of
from schedlang.runtime.checkpointing.optimizer_state import (
    is_sharded_like,
    mark_unsharded,
    sharded_like,
)
from schedlang.runtime.comm import world
from schedlang.runtime.comm.collectives import RankGroups
from schedlang.runtime.device import on_accelerator
from schedlang.runtime.grad_reduction.gradient import local_gradient
from schedlang.runtime.storage.offloaded_gradients import as_dtensor_like, local_tensor

# shapes, and the size of gradients in each step: a rule may apply to large tensors only (factors,
# blocks), late, or above a norm (that of two matrices is 1.41 times that of one)
TRIALS = (((4, 6), [1e-3 * 1.35**k for k in range(46)]), ((128, 192), [1.0]))
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
Dims = Mapping[str, int]
SAMPLE_DIMS: Dims = {"probe.0.weight": 2, "probe.1.weight": 2}
# settings of a group that are names, or rates of its step
_IGNORED = {
    *("params", "param_names", "name", "group_name"),
    *("lr", "initial_lr", "lr_scale", "weight_decay"),
}


def dims_of(holdings: Mapping[str, Holding]) -> Dims:
    """Return the number of dims of each parameter of a program, by name."""
    return {name: len(holding.layout.shape) for name, holding in holdings.items()}


def is_elementwise(optimizer: OptimizerFactory, dims: Dims = SAMPLE_DIMS) -> bool:
    """Return whether a matrix, updated in full, moves as its quarters do when updated alone.

    Trial steps with unequal gradients, in float64, must be bit-equal; torch's own optimizers need
    no trial. `dims`: the number of dims of each parameter, by name. `optimizer` is called with
    small parameters under these names; one parameter of each group with equal settings is tried, as
    a matrix, and one that is a vector also as a vector.
    """
    if _is_torch_elementwise(optimizer, dims):
        return True
    kinds = _group_names(optimizer, dims)
    vectors = (name for kind in kinds for name in [n for n in kind if dims[n] == 1][:1])
    return all(
        _moves_by_quarters(optimizer, dims, kind[0], *draws)
        for kind in kinds
        for draws in _trial_values(1)
    ) and all(
        _moves_by_quarters(optimizer, dims, name, *draws.flatten(-2))
        for name in vectors
        for draws in _trial_values(1)
    )


def is_tensorwise(
    optimizer: OptimizerFactory, dims: Dims = SAMPLE_DIMS, *, in_turns: bool = True
) -> bool:
    """Return whether two matrices move in one step as in two calls, one for each.

    Trial steps in float64 must be bit-equal. An optimizer that looks at all tensors together, or
    counts its calls, is not tensorwise; unless `in_turns`, each matrix has an optimizer of its own,
    which may count its calls. `dims` as for `is_elementwise`.
    """
    if _is_torch_elementwise(optimizer, dims):
        return True
    pairs = (
        [*kind, *(n for n in dims if n not in kind)][:2] for kind in _group_names(optimizer, dims)
    )
    return all(
        _moves_one_by_one(optimizer, dims, pair, draws, in_turns)
        for pair in pairs
        for draws in _trial_values(len(pair))
    )


def _is_torch_elementwise(optimizer: OptimizerFactory, dims: Dims) -> bool:
    """Return whether the optimizer is one of torch's own elementwise ones, without changes."""
    trial = optimizer(_small_parameters(dims, {}))
    check_closure(trial)
    listed = type(trial) in _BY_ELEMENT and "step" not in vars(trial)
    return listed and not (trial._optimizer_step_pre_hooks or trial._optimizer_step_post_hooks)


def _small_parameters(
    dims: Dims, fixed: Mapping[str, nn.Parameter]
) -> list[tuple[str, nn.Parameter]]:
    """Return small parameters under all names, except those in `fixed`."""

    def small(count: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros((4, 6, *(1,) * count)[:count], dtype=torch.float64))

    return [(name, fixed[name] if name in fixed else small(dims[name])) for name in dims]


def _make_optimizer(
    optimizer: OptimizerFactory, dims: Dims, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer made with parameters of all names, then restricted to `parameters`."""
    instance = optimizer(_small_parameters(dims, parameters))
    kept_ids = {id(p) for p in parameters.values()}
    for group in instance.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in kept_ids]
    instance.param_groups = [group for group in instance.param_groups if group["params"]]
    return instance


def _group_names(optimizer: OptimizerFactory, dims: Dims) -> list[list[str]]:
    """Return names of parameters by equal settings of their groups, ignoring names and rates."""
    parameters = _small_parameters(dims, {})
    names, by_settings = {id(p): name for name, p in parameters}, dict[str, list[str]]()
    for group in optimizer(parameters).param_groups:
        settings = repr(sorted((key, value) for key, value in group.items() if key not in _IGNORED))
        by_settings.setdefault(settings, []).extend(
            names[id(p)] for p in group["params"] if id(p) in names
        )
    return [kind for kind in by_settings.values() if kind]


def _trial_values(count: int) -> Iterator[Tensor]:
    """Yield, for each trial, the values of `count` matrices, and their gradients in each step."""
    generator = torch.Generator().manual_seed(7)
    for shape, sizes in TRIALS:
        values = torch.randn(
            1 + len(sizes), count, *shape, generator=generator, dtype=torch.float64
        )
        yield values * torch.tensor([1.0, *sizes]).reshape(-1, 1, 1, 1)


def _moves_by_quarters(
    optimizer: OptimizerFactory, dims: Dims, name: str, values: Tensor, *grads: Tensor
) -> bool:
    trailing = (1,) * (dims[name] - 2)  # dims of convolutions

    def quarters(matrix: Tensor) -> list[Tensor]:
        return [quarter for half in matrix.chunk(2) for quarter in half.chunk(2, -1)]

    def mover(value: Tensor) -> Callable[[Tensor], Tensor]:
        parameter = nn.Parameter(value.reshape(*value.shape, *trailing).clone())
        instance = _make_optimizer(optimizer, dims, {name: parameter})

        def move(grad: Tensor) -> Tensor:
            parameter.grad = grad.reshape(parameter.shape).clone()
            instance.step()
            return parameter.detach().reshape(value.shape)

        return move

    whole, parts = mover(values[0]), [mover(part) for part in quarters(values[0])]
    for grad in grads:  # most others differ in the first step: no further one is computed
        moved = [move(part) for move, part in zip(parts, quarters(grad[0]))]
        joined = torch.cat([torch.cat(moved[:2], -1), torch.cat(moved[2:], -1)])
        if not torch.equal(whole(grad[0]), joined):
            return False
    return True


def _moves_one_by_one(
    optimizer: OptimizerFactory, dims: Dims, pair: Sequence[str], draws: Tensor, in_turns: bool
) -> bool:
    results = []
    for separately in (False, True):
        params = {name: nn.Parameter(value.clone()) for name, value in zip(pair, draws[0])}
        single = separately and not in_turns
        optims = [
            _make_optimizer(optimizer, dims, part) for part in _split_parameters(params, single)
        ]
        for grads in draws[1:]:
            for parameter, grad in zip(params.values(), grads):
                parameter.grad = grad.clone()
            for optim, part in zip(optims, _split_parameters(params, single)):
                for stepped in _split_parameters(part, separately and in_turns):
                    step_only(optim, {id(p): p for p in stepped.values()})
        results.append(torch.stack([p.detach() for p in params.values()]))
    return torch.equal(*results)


Groups = Sequence[tuple[Container[str], Mapping[str, Any]]]  # names of parameters, and settings


def groups_of(make: OptimizerFactory, dims: Dims, local_names: Container[str]) -> Groups:
    """Return the groups that an optimizer of the whole model has, for one of those that are
    `local_names`.

    `dims` are of all parameters that are trained.  There are none where it takes no small tensors,
    or does not step on groups of which nothing is here.
    """
    with suppress(Exception):  # the user's own code, by sizes of the model say
        parameters = _small_parameters(dims, {})
        names = {id(p): name for name, p in parameters}
        instance = make(parameters)
        groups = [({names[id(p)] for p in g["params"]}, dict(g)) for g in instance.param_groups]
        for group in instance.param_groups:
            group["params"] = [p for p in group["params"] if names[id(p)] in local_names]
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        instance.step()
        return groups
    return ()


def fill_groups(optimizer: torch.optim.Optimizer, groups: Groups, names: Mapping[int, str]) -> None:
    """Give a stage's optimizer the groups of the whole model, in their order.

    Those of which other stages hold all parameters are empty here: schedulers with a number for
    each group, and what is set by a group's place, then say the same on every rank.  `names` are
    those of the stage's parameters, by id.
    """
    filled = [{**settings, "params": []} for _, settings in groups]
    for group in optimizer.param_groups:
        own_names = {names.get(id(p)) for p in group["params"]}
        fits = [
            k
            for k, (members, _) in enumerate(groups)
            if own_names and all(n in members for n in own_names)
        ]
        if len(fits) != 1 or filled[fits[0]]["params"]:
            return
        filled[fits[0]] = group
    if filled:
        optimizer.param_groups = filled


def _split_parameters(
    parameters: Mapping[str, nn.Parameter], separately: bool
) -> list[Mapping[str, nn.Parameter]]:
    return [{name: p} for name, p in parameters.items()] if separately else [parameters]


def check_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise Refusal S622 for an optimizer that requires a closure, S618 for none at all."""
    if not hasattr(optimizer, "step"):
        message = f"`optimizer` returns {kind_of(optimizer)}, not an optimizer"
        helps = ("let it return one: `lambda named: torch.optim.AdamW(named, lr=1e-3)`",)
        raise Refusal.of("S618", message, helps=helps)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Refusal.of(
            "S622",
            f"`{type(optimizer).__name__}` computes the loss again within its step",
            notes=(
                "its `step(closure)` runs forward and backward again, which a program cannot do",
            ),
            helps=("use an optimizer that needs no closure (SGD, AdamW, Muon)",),
        )


def complete_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the hooks on its state, if it does not call the constructor of torch's.

    Wrappers around another optimizer often take its groups and state instead (Lookahead).
    """
    for verb, moment in itertools.product(("state_dict", "load_state_dict"), ("pre", "post")):
        vars(optimizer).setdefault(f"_optimizer_{verb}_{moment}_hooks", OrderedDict())


_BY_ELEMENT = (  # torch's own elementwise optimizers; not classes derived from them
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer that may update many parameters, of DTensors and plain, in one call."""
    if type(optimizer) not in _BY_ELEMENT:
        with _split_groups(optimizer):
            optimizer.step()
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # no call of Python per parameter: most models have no DTensors
    sliced = [p for p in parameters if isinstance(p, DTensor) and p.grad is not None]
    with _local_parts(optimizer, sliced) if sliced else _NO_CONTEXT:
        optimizer.step()


_NO_CONTEXT = nullcontext()


@contextmanager
def _local_parts(optimizer: torch.optim.Optimizer, sliced: Sequence[Any]) -> Iterator[None]:
    """Replace these DTensors by their local shards, with gradients and state, within a block.

    Between steps the state is sharded as the parameter.
    """
    original = [group["params"] for group in optimizer.param_groups]
    states, parts = optimizer.state, {}
    with torch.no_grad():
        for parameter in sliced:
            parts[id(parameter)] = part = nn.Parameter(local_tensor(parameter))
            part.grad = local_gradient(parameter)
            if state := states.get(parameter):
                states[part] = {key: _local_state(value) for key, value in state.items()}
    for group, parameters in zip(optimizer.param_groups, original, strict=True):
        group["params"] = [parts.get(id(p), p) for p in parameters]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, original, strict=True):
            group["params"] = parameters
        with torch.no_grad():
            for parameter in sliced:
                if state := states.pop(parts[id(parameter)], None):
                    old_state = states[parameter]
                    states[parameter] = {
                        k: _like_parameter(parameter, v, old_state.get(k)) for k, v in state.items()
                    }


def _is_sliced(value: Any) -> bool:
    return hasattr(value, "to_local")


def _local_state(value: Any) -> Any:
    return local_tensor(value) if _is_sliced(value) else value


def _like_parameter(parameter: Any, value: Any, old_value: Any) -> Any:
    """Return local state as a DTensor like the parameter; the old one if it wraps this state."""
    if not is_sharded_like(value, parameter):
        return value
    if _is_sliced(old_value) and local_tensor(old_value) is value:
        return old_value
    return as_dtensor_like(value, parameter)


# Another optimizer that updates a list of tensors in one call (`foreach`, the default on
# accelerators, and `fused`) takes tensors of one kind: DTensors of one mesh, or plain tensors. So
# within a step each such group is split into several, equal in all but their parameters.


_LISTS = ("foreach", "fused")  # of torch's own optimizers: None leaves it to the device


@contextmanager
def _split_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Split groups by mesh within a block; settings that a step changes are written back."""
    groups = optimizer.param_groups
    parts = [_split_by_mesh(group) for group in groups]
    if all(len(group_parts) == 1 for group_parts in parts):
        yield
        return
    optimizer.param_groups = [part for group_parts in parts for part in group_parts]
    try:
        yield
    finally:
        for group, (first_part, *other_parts) in zip(groups, parts, strict=True):
            if other_parts:
                group.update({key: value for key, value in first_part.items() if key != "params"})
        optimizer.param_groups = groups


def _split_by_mesh(group: dict[str, Any]) -> Sequence[dict[str, Any]]:
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in group["params"]:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(kinds) < 2 or not _updates_lists(group):
        return [group]
    return [{**group, "params": parameters} for parameters in kinds.values()]


def _updates_lists(group: dict[str, Any]) -> bool:
    """Return whether a group is updated in one call; with None the device decides."""
    flags = [group[key] for key in _LISTS if key in group]
    if any(flags):
        return True
    undecided = "foreach" in group and group["foreach"] is None
    return undecided and any(on_accelerator(parameter) for parameter in group["params"])


_VALUE, _GRAD = " value", " gradient"  # besides the keys of the optimizer's state
BATCH_ELEMENTS = 2**24  # elements of full tensors at a time, or one parameter


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class FullTensorStep:
    """The optimizer step of parameters with these holdings; all ranks must call it.

    hooks  ids of the hooks that the optimizer was made with: part of it, they run on full tensors
    """

    parameters: Mapping[str, nn.Parameter]
    holdings: Mapping[str, Holding]
    ranks: RankGroups
    hooks: frozenset[int] = frozenset()

    def of(self, optimizer: torch.optim.Optimizer | None) -> FullTensorStep:
        """Return the same step, with the hooks that an optimizer now has as part of it."""
        hooks = (getattr(optimizer, name, ()) for name in STEP_HOOKS)
        return replace(self, hooks=frozenset().union(*hooks))

    def step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Run one step; every rank takes part, also one that trains nothing."""
        split = [n for n, h in self.holdings.items() if h.layout.splits or h.sliced]
        if optimizer is not None:
            unsplit = {id(p): p for n, p in self.parameters.items() if n not in set(split)}
            step_only(optimizer, unsplit)
        for names in self._batches(split):
            self._step_whole(optimizer, names)

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        size = 0
        for name in names:
            count = torch.Size(self.holdings[name].layout.shape).numel()
            if batch and size + count > BATCH_ELEMENTS:
                yield batch
                batch, size = [], 0
            batch.append(name)
            size += count
        if batch:
            yield batch

    def _step_whole(self, optimizer: torch.optim.Optimizer | None, names: list[str]) -> None:
        parameters = {n: self.parameters[n] for n in names if n in self.parameters}
        states: Mapping[Any, dict[str, Any]] = {} if optimizer is None else optimizer.state
        local = {(name, _VALUE): local_tensor(p) for name, p in parameters.items()}
        for name, p in parameters.items():
            if (grad := local_gradient(p)) is not None:
                local[name, _GRAD] = grad
            for key, value in states.get(p, {}).items():
                if is_sharded_like(value, p):
                    local[name, key] = local_tensor(value)
        assembled = self._assemble(names, local)
        if optimizer is None:
            return
        full_by_id: dict[int, nn.Parameter] = {}
        for name, parameter in parameters.items():
            device = local_tensor(parameter).device
            values = {key: value.to(device) for (n, key), value in assembled.items() if n == name}
            full, grad = nn.Parameter(values.pop(_VALUE)), values.pop(_GRAD, None)
            if grad is None:
                continue
            full_by_id[id(parameter)], full.grad = full, grad
            state = {**states.get(parameter, {}), **values}
            if state:
                optimizer.state[full] = state
        step_only(optimizer, full_by_id)
        for name, parameter in parameters.items():
            if id(parameter) in full_by_id:
                self._store_shards(optimizer, name, parameter, full_by_id[id(parameter)])

    def _store_shards(
        self, optimizer: torch.optim.Optimizer, name: str, local: nn.Parameter, full: nn.Parameter
    ) -> None:
        """Store this rank's shards of the value and of the state."""

        def part(value: Tensor) -> Tensor:
            return shard_of(value, self.holdings[name], self.ranks.mesh, self.ranks.rank)

        with torch.no_grad():
            local_tensor(local).copy_(part(full.detach()))
            state = optimizer.state.pop(full, {})
            optimizer.state[local] = {
                key: sharded_like(part(value), local)
                if is_sharded_like(value, full)
                else mark_unsharded(value)
                for key, value in state.items()
            }

    def _assemble(
        self, names: Sequence[str], local: Mapping[tuple[str, str], Tensor]
    ) -> dict[tuple[str, str], Tensor]:
        """Assemble full tensors on the ranks that hold a shard."""
        keys = {
            key for some in world.distinct_objects(sorted({k for _, k in local})) for key in some
        }
        some = {(name, key): self.holdings[name] for key in sorted(keys) for name in names}
        return assemble_tensors(some, local, self.ranks, lambda spread: spread.holding_ranks)


def step_only(optimizer: torch.optim.Optimizer, stands_for: Mapping[int, nn.Parameter]) -> None:
    """Step on some parameters: `stands_for` maps the id of a parameter to its replacement."""
    original = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            replaced = (stands_for.get(id(p)) for p in group["params"])
            group["params"] = [p for p in replaced if p is not None]
        step_optimizer(optimizer)
    finally:
        for group, parameters in zip(optimizer.param_groups, original):
            group["params"] = parameters
