"""Check training loops that a user writes around a program's module; refuse what would train wrong.

* A backward outside of a step that reaches parameters whose gradients a step all-reduces after its
  last backward.
* A term of the loss that a loop makes of parameters where a rank has shards: `loop_terms`.
* The norm of gradients, a loss scale that depends on gradients, or an optimizer that needs full
  tensors, where a rank has shards.
* A copy of a module with slices, new parameters in place of those that a step trains, and full
  values in place of shards.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.runtime import scope
from schedlang.runtime.adapters.fully_shard import refuse_copies, replaced_parameter
from schedlang.runtime.adapters.torch_clip import check_unscaling, replace_norms
from schedlang.runtime.adapters.torch_distributed import hear_collectives
from schedlang.runtime.adapters.torch_tensor import (
    check_backwards,
    in_backward_pass,
    wrap_gradients,
)
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.grad_reduction.gradient import GradientReduction, LocalParameters
from schedlang.runtime.grad_reduction.zero import own_backward, reshard_all
from schedlang.runtime.held_parts import checked_norm, note_parts
from schedlang.runtime.loop_terms import (
    check_terms,
    has_shard_name,
    mark_part,
    mark_shard,
    note_forwards,
    run_gradients,
    shard_name,
)
from schedlang.runtime.optim.full_tensor_step import (
    SAMPLE_DIMS,
    STEP_HOOKS,
    FullTensorStep,
    is_elementwise,
)
from schedlang.runtime.scope import Scope
from schedlang.runtime.shard_gradients import (
    follow_between_forwards,
    mark_gradients,
    mark_parameters,
    note_collective,
    note_dims,
    note_gather,
    unmark_gradients,
    unmark_parameters,
)
from schedlang.runtime.shard_state import guard_state
from schedlang.runtime.storage.offloaded_gradients import in_backward

T = TypeVar("T")
_MARKED = "_schedlang_marked"  # of an optimizer that steps: parameters
_SECOND = "schedlang: a second step"  # the key of a hook
_STEP = "use `train_step` and `eval_step`"

_checked: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers that have been checked
# of each parameter of a program that a loop has got, by id: all of that program
_owners: WeakValueDictionary[int, LocalParameters] = WeakValueDictionary()
_user_modules: WeakSet[nn.Module] = WeakSet()  # modules of programs that user loops have got


def module_of(a: Assembly, offloads_gradients: bool) -> nn.Module:
    """Return the module of a program for loops of the user.

    Raises Refusal S617 where a loop cannot train with the module, as with offloaded gradients.
    """
    if a.tokens is not None:
        message = f"`{a.context[0]}` splits sequences: a program has no module to call"
        raise Refusal.of("S617", message, helps=(f"{_STEP}: they split the sequences",))
    if a.stage_axis is not None:
        message = f"the pipeline over `{a.stage_axis}` has no single module"
        helps = (f"{_STEP}: each rank runs a stage of the model",)
        raise Refusal.of("S617", message, helps=helps)
    if offloads_gradients:
        message = "offloaded gradients leave the device at once: your own loop would find none"
        raise Refusal.of("S617", message, helps=(_STEP,))
    if not a.local_parameters.guarded:
        a.local_parameters.guarded = True
        refuse_copies(a.module, _refuse_copy)
        _user_modules.update(a.module.modules())
        _register_replacement_hooks()
        _guard_sums(a.local_parameters, a.reductions)
        _guard_shards(a)
        _guard_slices(a)
        _owners.update(dict.fromkeys(map(id, a.parameters.values()), a.local_parameters))
        _register_second_steps()
        if a.host_draws is not None:
            _seed_draws(a.module, a.host_draws)
    return a.module


def _seed_draws(root: nn.Module, seeding: Callable[[Scope], Any]) -> None:
    """Let calls outside of a step draw from Python and numpy equally on all ranks.

    Each call takes a number from torch's default generator, which a user's loop seeds equally.
    """
    entered: list[Any] = []

    def before(*unused: object) -> None:
        outside = scope.current() is None and not torch.compiler.is_compiling()
        number = int(torch.randint(2**62, ())) if outside and root.training else None
        entered.append(nullcontext() if number is None else seeding(Scope(number, 0, ())))
        entered[-1].__enter__()

    def after(*unused: object) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    root.register_forward_pre_hook(before, prepend=True)
    root.register_forward_hook(after, always_call=True)


@functools.cache
def _register_replacement_hooks() -> None:
    """Check from now on the parameters and modules that replace those of a program."""
    register_module_parameter_registration_hook(_check_replacement)
    register_module_module_registration_hook(_check_replacement)


def _check_replacement(module: nn.Module, name: str, value: object) -> None:
    """Raise Refusal S617 if a step would neither train nor save the new parameter or module."""
    parts = value.modules() if isinstance(value, nn.Module) else ()
    if isinstance(module, DistributedDataParallel):
        for part in _user_modules.intersection(parts):
            _check_replicas(part)
    if module in _user_modules and value is not getattr(module, name, None):
        raise Refusal.of(
            "S617",
            f"a new `{name}` in a module of a program would be neither trained nor saved",
            notes=(f"a program trains what it was built with, in this `{type(module).__name__}`",),
            helps=(
                "set values in place: `with torch.no_grad(): parameter.copy_(value)`",
                "or change the model, and build a program of it",
            ),
        ).at(python_span())


def _check_replicas(module: nn.Module) -> None:
    """Raise Refusal S617 if DistributedDataParallel would give all ranks one rank's shards."""
    parts = (
        name for name, p in module.named_parameters() if shard_name(p) or hasattr(p, "to_local")
    )
    if (name := next(parts, None)) is not None:
        raise Refusal.of(
            "S617",
            "`DistributedDataParallel` would give all ranks the shards of the first",
            notes=(f"each rank has a shard of `{name}` of its own",),
            helps=(f"{_STEP} of the program: a row `zero(stage=0, over=dp)` replicates",),
        ).at(python_span())


def copy_refusal(message: str) -> Refusal:
    """Return S617 for a copy of a program or of its module, whose ranks could not communicate."""
    helps = (
        "`program.state_dict()` has whole values, for averages of weights or a copy of the model",
        "a second program: `sch.build(...)` again, then `load_state_dict`",
    )
    return Refusal.of("S617", message, helps=helps).at(python_span())


def copy_program(program: T) -> T:
    """Return a shallow copy of a program."""
    twin = object.__new__(type(program))
    vars(twin).update(vars(program))
    return twin


def refuse_pickle(program: Any, protocol: Any) -> NoReturn:
    """Refuse (S617) to pickle a program, as `torch.save` and queues do."""
    title = "a program cannot be pickled: its groups and hooks are this process's"
    help_ = "`program.save(folder)` and `program.load(folder)` have its state"
    raise Refusal.of("S617", title, helps=(help_,)).at(python_span())


def _refuse_copy(module: nn.Module, unused: object) -> nn.Module:
    raise copy_refusal(f"a `{type(module).__name__}` whose parameters are slices cannot be copied")


def _guard_sums(parameters: LocalParameters, reductions: Iterable[GradientReduction]) -> None:
    """Refuse a backward outside of a step if it reaches gradients that are all-reduced over
    ranks."""
    for reduction in reductions:
        for name in reduction.names if reduction.group.size > 1 else ():
            parameter = parameters[name]
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # else it accepts no hook; it may be trained later
            parameter.register_hook(_check_stepping(parameters, name))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)


def _check_stepping(parameters: LocalParameters, name: str) -> Callable[[Tensor], None]:
    def check(unused: Tensor) -> None:
        if not parameters.stepping:
            raise own_backward(name).at(python_span())

    return in_backward(check)


def _guard_slices(a: Assembly) -> None:
    """Free what a call of the module outside of a step has gathered: torch keeps it, and an update
    of the slices would not reach it.

    Refuse (S617) calls in which other tensors stand for parameters that it gathers.
    """
    parameters, root, calls = a.local_parameters, a.module, list[None]()

    def begin() -> None:
        calls.append(None)
        name = None if parameters.stepping or len(calls) > 1 else replaced_parameter(root)
        if name is not None:
            raise Refusal.of(
                "S617",
                f"another tensor stands for `{name}`, but `zero` would gather its own slices",
                notes=("`torch.func.functional_call` puts tensors there for one call",),
                helps=("set values in place: `with torch.no_grad(): parameter.copy_(value)`",),
            ).at(python_span())

    def end() -> None:
        if calls:
            calls.pop()
        if not (parameters.stepping or calls):
            reshard_all(a.sliced)

    eagerly: Any = torch.compiler.disable
    eager_begin, eager_end = eagerly(begin), eagerly(end)

    def before(*unused: object) -> None:
        eager_begin() if torch.compiler.is_compiling() else begin()

    def after(*unused: object) -> None:
        eager_end() if torch.compiler.is_compiling() else end()

    units: list[Any] = [unit for stage in a.sliced.values() for unit in stage.units]
    for unit in units:
        unit.register_forward_pre_hook(before, prepend=True)
        unit.register_forward_hook(after, always_call=True)


def check_loop(a: Assembly) -> None:
    """Raise Refusal if a loop of the user has changed what a step would train wrong.

    S617: a value of another shape in a shard; S622: an optimizer that steps inside the backward.
    """
    _check_shapes(a.local_parameters)
    unmark_parameters()
    names = [n for n, p in a.parameters.items() if "_in_backward_optimizers" in vars(p)]
    if names and (a.reductions or a.sliced):
        raise Refusal.of(
            "S622",
            f"an optimizer would step `{names[0]}` inside the backward, before its gradient is"
            " summed over ranks",
            notes=("`_apply_optimizer_in_backward` steps when a rank's own gradient is there",),
            helps=(
                "`build(optimizer=lambda named: ...)`: a step updates after its sums",
                "or step in `parameter.register_post_accumulate_grad_hook(...)`: a step runs such"
                " hooks on summed gradients",
            ),
        ).at(python_span())


def _check_shapes(parameters: LocalParameters) -> None:
    """Raise Refusal S617 if a loop of the user has put a value of another shape into a parameter.

    A rank that holds a shard takes the full value for its shard: rows and columns of other ranks.
    """
    for name, shape in parameters.shapes.items():
        if parameters[name].shape != shape:
            shard_shape, new_shape = tuple(shape), tuple(parameters[name].shape)
            raise Refusal.of(
                "S617",
                f"`.data =` gave `{name}` the shape {new_shape}, and this rank's"
                f" shard of it is {shard_shape}",
                helps=(
                    "`program.load_state_dict({**program.state_dict(), name: value})` takes full"
                    " values",
                ),
            ).at(python_span())


def begin_update(a: Assembly, optimizer: Any) -> bool:
    """Let an optimizer step with the gradients of a step; return whether a loop has hooked it."""
    a.local_parameters.used = None
    getattr(optimizer, STEP_HOOKS[0], {}).pop(_SECOND, None)
    return any(getattr(optimizer, name, None) for name in STEP_HOOKS)


def end_step(a: Assembly, optimizer: Any) -> None:
    """Mark the gradients that a step leaves; refuse from now on to update with them once more."""
    parameters = a.local_parameters
    if parameters.shapes:
        mark_gradients(a.parameters.values())
        mark_parameters(a.parameters.values())
    first = next((p.grad for p in a.parameters.values() if p.grad is not None), None)
    if optimizer is not None and first is not None:
        parameters.used = ref(first), first._version, ref(optimizer)
        getattr(optimizer, STEP_HOOKS[0], {})[_SECOND] = partial(_check_second, ref(parameters))


def _check_second(
    owner: Callable[[], LocalParameters | None],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Raise Refusal S622 if an optimizer steps with gradients that a step has used; warn if they
    were changed since.

    With a closure it steps after that, which makes gradients: return the arguments of a step that
    checks then.
    """
    parameters = owner()
    if parameters is None or parameters.used is None:
        return None
    given = [*args[1:], *kwargs.values()]
    if (closure := next((value for value in given if callable(value)), None)) is not None:

        def checked() -> Any:
            loss = closure()
            _check_second(owner, optimizer, (), {})
            return loss

        return (optimizer, checked), {}
    (used, writes, built), gradients = parameters.used, (p.grad for p in parameters.values())
    first = next((gradient for gradient in gradients if gradient is not None), None)
    if first is None or used() is not first or not _share(optimizer, built(), parameters):
        return None
    refusal = Refusal.of(
        "S622",
        "an optimizer steps a second time with the gradients of `train_step`",
        notes=("a program that was built with `optimizer=` has updated its weights in that step",),
        helps=(
            "leave this step out; a scheduler of learning rates steps as before",
            "or build without `optimizer=`: then `train_step` leaves gradients for your own",
        ),
    ).at(python_span())
    if first._version == writes:
        raise refusal
    warnings.warn(f"{refusal.diagnostic.title}, which were changed since", stacklevel=4)
    return None


def _share(
    one: torch.optim.Optimizer, built: torch.optim.Optimizer | None, own: LocalParameters
) -> bool:
    """Return whether two optimizers update the same of a program's parameters."""
    names = {id(parameter) for parameter in own.values()}
    first, second = (
        names.intersection(id(p) for group in optimizer.param_groups for p in group["params"])
        for optimizer in (one, built or one)
    )
    return bool(first & second)


@functools.cache
def _register_second_steps() -> None:
    """Check from now on the steps of optimizers that a loop has made of a program's parameters."""
    register_optimizer_step_pre_hook(_check_own_optimizer)


def _check_own_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return None
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    owners = (owner for p in parameters if (owner := _owners.get(id(p))) is not None)
    owner = next(owners, None)
    return None if owner is None else _check_second(lambda: owner, optimizer, args, kwargs)


@contextmanager
def hooks_around(
    a: Assembly, optimizer: torch.optim.Optimizer | None, full: FullTensorStep | None
) -> Iterator[None]:
    """Run the hooks that a loop has put on steps of an optimizer once, around the block.

    They get what this rank holds. In the block the optimizer may step several times, and on other
    tensors in place of the parameters. Raises Refusal S622 for a hook that takes a norm of shards,
    that gives the step other arguments, or that would run before one that needs full tensors.
    """
    for name, parameter in _shards_of(a):
        mark_part(parameter, name)
        _register_checks()
    made_with = frozenset[int]() if full is None else full.hooks
    own = [getattr(optimizer, name) for name in STEP_HOOKS]
    before, after = ([h for key, h in hooks.items() if key not in made_with] for hooks in own)
    if before and not made_with.isdisjoint(own[0]):
        raise _hook_refusal(
            "a hook before a step would run too early",
            "the optimizer was made with hooks, which run when a step has gathered full tensors",
            "put this hook on the optimizer, too, in the function that makes it",
        )
    for hook in before:
        if hook(optimizer, (optimizer,), {}) is not None:
            raise _hook_refusal(
                "a hook gives other arguments to the step of an optimizer",
                "`program.train_step` makes the step, without arguments",
                "let the hook return None",
            )
    try:
        for name, hooks in zip(STEP_HOOKS, own):
            kept = OrderedDict((key, hook) for key, hook in hooks.items() if key in made_with)
            setattr(optimizer, name, kept)
        yield
    finally:
        for name, hooks in zip(STEP_HOOKS, own):
            setattr(optimizer, name, hooks)
    for hook in after:
        hook(optimizer, (optimizer,), {})


def _hook_refusal(message: str, note: str, remedy: str) -> Refusal:
    return Refusal.of("S622", message, notes=(note,), helps=(remedy,)).at(python_span())


def _guard_shards(a: Assembly) -> None:
    """Mark the parameters that are shards, and register checks of what needs full tensors."""
    for name, parameter in _shards_of(a):
        mark_shard(parameter, name)
        a.local_parameters.shapes[name] = parameter.shape
        pairs = enumerate(zip(parameter.shape, a.holdings[name].layout.shape))
        note_dims(parameter, tuple(dim for dim, (here, full) in pairs if here != full))
        _register_checks()
    if note_parts(a):
        _hear_collectives()
    guard_state(a, a.local_parameters.shapes)
    if a.local_parameters.shapes:
        note_forwards(a.module)
        follow_between_forwards(a.module)
        mark_gradients(a.parameters.values())
        if any(parameter.grad is not None for parameter in a.parameters.values()):
            mark_parameters(a.parameters.values())  # not before: a compiled loop would break up


@functools.cache
def _hear_collectives() -> None:
    hear_collectives(note_collective, note_gather)


def _shards_of(a: Assembly) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters with elements on other ranks only; all, if others are on other ranks."""
    everything = all(name in a.parameters for name in a.holdings)
    for name, parameter in a.parameters.items():
        full_size = math.prod(a.holdings[name].layout.shape)
        if not everything or parameter.numel() < full_size:  # a DTensor's numel counts all shards
            yield name, parameter


@functools.cache
def _register_checks() -> None:
    """Check norms of gradients from now on, terms of losses, and optimizers that step."""
    replace_norms(checked_norm)
    check_unscaling(_check_scaler)
    check_backwards(check_terms)
    wrap_gradients(_run_marked)
    _hear_collectives()
    register_optimizer_step_pre_hook(_check_optimizer)
    register_optimizer_step_post_hook(_mark_again)


def _run_marked(run: Callable[[], Any], roots: Any, inputs: Any, *flags: bool) -> Any:
    """Run a backward, and mark the gradients of shards that it leaves to a loop."""
    marked = () if in_backward_pass() else unmark_parameters()
    gradients = run_gradients(run, roots, inputs, *flags)
    mark_gradients()
    mark_parameters(marked)
    return gradients


def _shard_name(parameters: Iterable[Any]) -> str | None:
    """Return the name of the first parameter that is a shard; None if there is none."""
    return next((name for p in parameters if (name := shard_name(p))), None)


def _check_scaler(parameters: Iterable[Any]) -> None:
    """Raise Refusal S622 where ranks would skip steps, and change scales, each by its parts."""
    name = _shard_name(parameters)
    if name is not None:
        raise Refusal.of(
            "S622",
            "`GradScaler` would skip a step by what this rank holds",
            notes=(f"here is a part of `{name}`; where another rank's overflows, this one steps",),
            helps=("a row `cast(fp16)` scales the loss, and all ranks skip a step alike",),
        ).at(python_span())


def _check_optimizer(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """Raise Refusal S622 at the first step of an optimizer that needs full tensors and has
    shards.

    A compiled step runs it eagerly, if there are shards: only then it breaks the graph.
    """
    if torch.compiler.is_compiling():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any([has_shard_name(p) for p in parameters]):
            _check_eagerly(optimizer)
        return
    _check_shards(optimizer)


def _check_shards(optimizer: torch.optim.Optimizer) -> None:
    vars(optimizer)[_MARKED] = unmark_parameters()
    unmark_gradients(p for group in optimizer.param_groups for p in group["params"])
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sliced = "its parameters" if any(hasattr(p, "to_local") for p in parameters) else None
    name = _shard_name(parameters)
    _check_broadcasts(optimizer, f"`{name}`" if name else sliced)
    for group in optimizer.param_groups:
        name = _shard_name(group["params"])
        if name is not None and not _is_elementwise(optimizer, group):
            raise Refusal.of(
                "S622",
                f"`{type(optimizer).__name__}` needs full tensors, but would step on shards",
                notes=(f"this rank holds a shard of `{name}`",),
                helps=("`build(optimizer=lambda named: ...)`: a step gathers the shards",),
            ).at(python_span())


def check_broadcasts(a: Assembly, optimizer: torch.optim.Optimizer) -> None:
    """Raise Refusal S622 if an optimizer broadcasts parameters of which ranks have other parts."""
    names = (*a.sliced_parameters, *(name for name, _ in _shards_of(a)))
    name = next(iter(names), None)
    _check_broadcasts(optimizer, f"`{name}`" if name else None)


def _check_broadcasts(optimizer: torch.optim.Optimizer, name: str | None) -> None:
    module: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if name and module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        raise Refusal.of(
            "S622",
            f"`{type(optimizer).__name__}` would give other ranks this rank's shards",
            notes=(f"this rank holds a shard of {name}, and other ranks hold others",),
            helps=("a row `zero(stage=1, over=dp)` slices the state of an optimizer",),
        ).at(python_span())


def _mark_again(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    if not torch.compiler.is_compiling():
        mark_parameters(vars(optimizer).pop(_MARKED, ()))


_check_eagerly = torch.compiler.disable(_check_shards)  # type: ignore[no-untyped-call]


def _is_elementwise(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return whether the optimizer is elementwise, by a trial with a copy without state."""

    def twin(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        copied = copy.copy(optimizer)
        copied.state = defaultdict(dict)
        copied.param_groups = [{**group, "params": [p for _, p in named_params]}]
        _checked.add(copied)
        return copied

    vector = any(parameter.dim() == 1 for parameter in group["params"])
    try:
        return is_elementwise(twin, {**SAMPLE_DIMS, "probe.1.bias": 1} if vector else SAMPLE_DIMS)
    except Refusal:
        raise
    except Exception:  # one that steps on a device only, say: treat it as elementwise
        return True
