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
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
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
    made = optimizer(_small_parameters(dims, {}))
    check_closure(made)
    own = type(made) in _BY_ELEMENT and "step" not in vars(made)
    return own and not (made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks)


def _small_parameters(
    dims: Dims, own: Mapping[str, nn.Parameter]
) -> list[tuple[str, nn.Parameter]]:
    """Return small parameters under all names, except those in `own`."""

    def small(count: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros((4, 6, *(1,) * count)[:count], dtype=torch.float64))

    return [(name, own[name] if name in own else small(dims[name])) for name in dims]


def _make_optimizer(
    optimizer: OptimizerFactory, dims: Dims, own: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer made with parameters of all names, then restricted to `own`."""
    made = optimizer(_small_parameters(dims, own))
    held = {id(p) for p in own.values()}
    for group in made.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in held]
    made.param_groups = [group for group in made.param_groups if group["params"]]
    return made


def _group_names(optimizer: OptimizerFactory, dims: Dims) -> list[list[str]]:
    """Return names of parameters by equal settings of their groups, ignoring names and rates."""
    named = _small_parameters(dims, {})
    names, found = {id(p): name for name, p in named}, dict[str, list[str]]()
    for group in optimizer(named).param_groups:
        settings = repr(sorted((key, one) for key, one in group.items() if key not in _IGNORED))
        found.setdefault(settings, []).extend(
            names[id(p)] for p in group["params"] if id(p) in names
        )
    return [kind for kind in found.values() if kind]


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
    def quarters(whole: Tensor) -> list[Tensor]:
        return [piece for half in whole[0].chunk(2) for piece in half.chunk(2, -1)]

    def moved(value: Tensor, grads: Sequence[Tensor]) -> Tensor:
        more = (1,) * (dims[name] - 2)  # dims of convolutions
        parameter = nn.Parameter(value.reshape(*value.shape, *more).clone())
        made = _make_optimizer(optimizer, dims, {name: parameter})
        for grad in grads:
            parameter.grad = grad.reshape(parameter.shape).clone()
            made.step()
        return parameter.detach().reshape(value.shape)

    together = moved(values[0], [grad[0] for grad in grads])
    cut = [quarters(grad) for grad in grads]
    alone = [moved(one, own) for one, own in zip(quarters(values), zip(*cut))]
    joined = torch.cat([torch.cat(alone[:2], -1), torch.cat(alone[2:], -1)])
    return torch.equal(together, joined)


def _moves_one_by_one(
    optimizer: OptimizerFactory, dims: Dims, pair: Sequence[str], draws: Tensor, in_turns: bool
) -> bool:
    moved = []
    for separately in (False, True):
        held = {name: nn.Parameter(value.clone()) for name, value in zip(pair, draws[0])}
        one = separately and not in_turns
        made = [_make_optimizer(optimizer, dims, own) for own in _split_parameters(held, one)]
        for here in draws[1:]:
            for parameter, grad in zip(held.values(), here):
                parameter.grad = grad.clone()
            for each, own in zip(made, _split_parameters(held, one)):
                for some in _split_parameters(own, separately and in_turns):
                    step_only(each, {id(p): p for p in some.values()})
        moved.append(torch.stack([p.detach() for p in held.values()]))
    return torch.equal(*moved)


Groups = Sequence[tuple[Container[str], Mapping[str, Any]]]  # names of parameters, and settings


def groups_of(make: OptimizerFactory, dims: Dims, here: Container[str]) -> Groups:
    """Return the groups that an optimizer of the whole model has, for one of those that are `here`.

    `dims` are of all parameters that are trained.  There are none where it takes no small tensors,
    or does not step on groups of which nothing is here.
    """
    with suppress(Exception):  # the user's own code, by sizes of the model say
        named = _small_parameters(dims, {})
        called = {id(p): name for name, p in named}
        made = make(named)
        groups = [({called[id(p)] for p in g["params"]}, dict(g)) for g in made.param_groups]
        for group in made.param_groups:
            group["params"] = [p for p in group["params"] if called[id(p)] in here]
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        made.step()
        return groups
    return ()


def fill_groups(optimizer: torch.optim.Optimizer, whole: Groups, names: Mapping[int, str]) -> None:
    """Give a stage's optimizer the groups of the whole model, in their order.

    Those of which other stages hold all parameters are empty here: schedulers with a number for
    each group, and what is set by a group's place, then say the same on every rank.  `names` are
    those of the stage's parameters, by id.
    """
    filled = [{**settings, "params": []} for _, settings in whole]
    for group in optimizer.param_groups:
        own = {names.get(id(p)) for p in group["params"]}
        at = [k for k, (some, _) in enumerate(whole) if own and all(n in some for n in own)]
        if len(at) != 1 or filled[at[0]]["params"]:
            return
        filled[at[0]] = group
    if filled:
        optimizer.param_groups = filled


def _split_parameters(
    held: Mapping[str, nn.Parameter], separately: bool
) -> list[Mapping[str, nn.Parameter]]:
    return [{name: p} for name, p in held.items()] if separately else [held]


def check_closure(made: torch.optim.Optimizer) -> None:
    """Raise Refusal S622 for an optimizer that requires a closure, S618 for none at all."""
    if not hasattr(made, "step"):
        title = f"`optimizer` returns {kind_of(made)}, not an optimizer"
        helps = ("let it return one: `lambda named: torch.optim.AdamW(named, lr=1e-3)`",)
        raise Refusal.of("S618", title, helps=helps)
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Refusal.of(
            "S622",
            f"`{type(made).__name__}` computes the loss again within its step",
            notes=(
                "its `step(closure)` runs forward and backward again, which a program cannot do",
            ),
            helps=("use an optimizer that needs no closure (SGD, AdamW, Muon)",),
        )


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
    every = [p for group in optimizer.param_groups for p in group["params"]]
    # no call of Python per parameter: most models have no DTensors
    sliced = [p for p in every if isinstance(p, DTensor) and p.grad is not None]
    with _local_parts(optimizer, sliced) if sliced else _NO_CONTEXT:
        optimizer.step()


_NO_CONTEXT = nullcontext()


@contextmanager
def _local_parts(optimizer: torch.optim.Optimizer, sliced: Sequence[Any]) -> Iterator[None]:
    """Replace these DTensors by their local shards, with gradients and state, within a block.

    Between steps the state is sharded as the parameter.
    """
    before = [group["params"] for group in optimizer.param_groups]
    states, parts = optimizer.state, {}
    with torch.no_grad():
        for parameter in sliced:
            parts[id(parameter)] = part = nn.Parameter(local_tensor(parameter))
            part.grad = local_gradient(parameter)
            if state := states.get(parameter):
                states[part] = {key: _local_state(value) for key, value in state.items()}
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [parts.get(id(p), p) for p in parameters]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
        with torch.no_grad():
            for parameter in sliced:
                if state := states.pop(parts[id(parameter)], None):
                    old = states[parameter]
                    states[parameter] = {
                        k: _like_parameter(parameter, v, old.get(k)) for k, v in state.items()
                    }


def _is_sliced(value: Any) -> bool:
    return hasattr(value, "to_local")


def _local_state(value: Any) -> Any:
    return local_tensor(value) if _is_sliced(value) else value


def _like_parameter(parameter: Any, value: Any, old: Any) -> Any:
    """Return local state as a DTensor like the parameter; the old one if it wraps this state."""
    if not is_sharded_like(value, parameter):
        return value
    if _is_sliced(old) and local_tensor(old) is value:
        return old
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
    if all(len(some) == 1 for some in parts):
        yield
        return
    optimizer.param_groups = [one for some in parts for one in some]
    try:
        yield
    finally:
        for group, (first, *rest) in zip(groups, parts, strict=True):
            if rest:
                group.update({key: value for key, value in first.items() if key != "params"})
        optimizer.param_groups = groups


def _split_by_mesh(group: dict[str, Any]) -> Sequence[dict[str, Any]]:
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in group["params"]:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(kinds) < 2 or not _updates_lists(group):
        return [group]
    return [{**group, "params": some} for some in kinds.values()]


def _updates_lists(group: dict[str, Any]) -> bool:
    """Return whether a group is updated in one call; with None the device decides."""
    flags = [group[key] for key in _LISTS if key in group]
    if any(flags):
        return True
    undecided = "foreach" in group and group["foreach"] is None
    return undecided and any(on_accelerator(one) for one in group["params"])


_VALUE, _GRAD = " value", " gradient"  # besides the keys of the optimizer's state
BATCH_ELEMENTS = 2**24  # elements of full tensors at a time, or one parameter


@dataclass(frozen=True)
class FullTensorStep:
    """The optimizer step of parameters with these holdings; all ranks must call it."""

    parameters: Mapping[str, nn.Parameter]
    holdings: Mapping[str, Holding]
    ranks: RankGroups

    def step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Run one step; every rank takes part, also one that trains nothing."""
        split = [n for n, h in self.holdings.items() if h.layout.splits or h.sliced]
        if optimizer is not None:
            rest = {id(p): p for n, p in self.parameters.items() if n not in set(split)}
            step_only(optimizer, rest)
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
        held = {n: self.parameters[n] for n in names if n in self.parameters}
        states: Mapping[Any, dict[str, Any]] = {} if optimizer is None else optimizer.state
        own = {(name, _VALUE): local_tensor(p) for name, p in held.items()}
        for name, p in held.items():
            if (grad := local_gradient(p)) is not None:
                own[name, _GRAD] = grad
            for key, value in states.get(p, {}).items():
                if is_sharded_like(value, p):
                    own[name, key] = local_tensor(value)
        found = self._assemble(names, own)
        if optimizer is None:
            return
        wholes: dict[int, nn.Parameter] = {}
        for name, parameter in held.items():
            device = local_tensor(parameter).device
            mine = {key: value.to(device) for (n, key), value in found.items() if n == name}
            whole, grad = nn.Parameter(mine.pop(_VALUE)), mine.pop(_GRAD, None)
            if grad is None:
                continue
            wholes[id(parameter)], whole.grad = whole, grad
            state = {**states.get(parameter, {}), **mine}
            if state:
                optimizer.state[whole] = state
        step_only(optimizer, wholes)
        for name, parameter in held.items():
            if id(parameter) in wholes:
                self._store_shards(optimizer, name, parameter, wholes[id(parameter)])

    def _store_shards(
        self, optimizer: torch.optim.Optimizer, name: str, mine: nn.Parameter, whole: nn.Parameter
    ) -> None:
        """Store this rank's shards of the value and of the state."""

        def part(value: Tensor) -> Tensor:
            return shard_of(value, self.holdings[name], self.ranks.mesh, self.ranks.rank)

        with torch.no_grad():
            local_tensor(mine).copy_(part(whole.detach()))
            state = optimizer.state.pop(whole, {})
            optimizer.state[mine] = {
                key: sharded_like(part(value), mine)
                if is_sharded_like(value, whole)
                else mark_unsharded(value)
                for key, value in state.items()
            }

    def _assemble(
        self, names: Sequence[str], own: Mapping[tuple[str, str], Tensor]
    ) -> dict[tuple[str, str], Tensor]:
        """Assemble full tensors on the ranks that hold a shard."""
        keys = {key for some in world.distinct_objects(sorted({k for _, k in own})) for key in some}
        some = {(name, key): self.holdings[name] for key in sorted(keys) for name in names}
        return assemble_tensors(some, own, self.ranks, lambda spread: spread.holding_ranks)


def step_only(optimizer: torch.optim.Optimizer, stands_for: Mapping[int, nn.Parameter]) -> None:
    """Step on some parameters: `stands_for` maps the id of a parameter to its replacement."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            found = (stands_for.get(id(p)) for p in group["params"])
            group["params"] = [p for p in found if p is not None]
        step_optimizer(optimizer)
    finally:
        for group, parameters in zip(optimizer.param_groups, before):
            group["params"] = parameters
