"""Units of a model, between which it may be cut: find them, intercept their calls and their hooks.

Used when a forward is recorded, and when stages of a pipeline replay it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.tracing.module_calls import ModuleCalls, record_calls
from schedlang.runtime.tracing.stage_graph import refusal

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
OVERRIDE = "_compiled_call_impl"
Handler = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class CallSwitch:
    """Intercepts every call of a unit, before the module's hooks, and passes it to a handler.

    A module that is k times in `names` is k units: its n-th call (since `using`) is the n-th unit,
    and any further call the last unit.  Without a handler (also in recomputation) a unit is called
    unchanged.  Only this class uses `Module._compiled_call_impl`, torch's override of a module's
    call: a function that `module.compile()` has put there is called behind the switch.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.modules = tuple(model.get_submodule(name) for name in names)
        names_of = {id(m): name for m, name in zip(self.modules[::-1], self.names[::-1])}
        self.names = tuple(names_of[id(m)] for m in self.modules)  # one module, one name
        self.handler: Handler | None = None
        self.turns: dict[str, int] = {}
        self._before = {n: model.get_submodule(n).__dict__.get(OVERRIDE) for n in self.names}
        self._routes = {name: self._route(model, name) for name in self._before}
        for module, route in self._routes.values():
            module.__dict__[OVERRIDE] = route

    def _route(self, model: nn.Module, name: str) -> tuple[nn.Module, Callable[..., Any]]:
        module = model.get_submodule(name)
        units = [unit for unit, unit_name in enumerate(self.names) if unit_name == name]
        only = units[0] if len(units) == 1 else None

        def call(*args: Any, **kwargs: Any) -> Any:
            previous = self._before[name]
            original = previous if previous is not None else module._call_impl
            if self.handler is None:
                return original(*args, **kwargs)
            if only is not None:
                return self.handler(only, original, args, kwargs)
            call_number = self.turns.get(name, 0)
            self.turns[name] = call_number + 1
            return self.handler(units[min(call_number, len(units) - 1)], original, args, kwargs)

        return module, call

    @contextmanager
    def using(self, handler: Handler) -> Iterator[None]:
        """Context in which calls of units are passed to `handler`."""
        for name, (module, route) in self._routes.items():
            if (current := module.__dict__[OVERRIDE]) is not route:  # the module was compiled since
                self._before[name], module.__dict__[OVERRIDE] = current, route
        outer, self.handler, self.turns = (self.handler, self.turns), handler, {}
        try:
            yield
        finally:
            self.handler, self.turns = outer

    def remove(self) -> None:
        """Restore the modules' own calls."""
        for name, module in zip(self.names, self.modules):
            if self._before[name] is None:
                module.__dict__.pop(OVERRIDE, None)
            else:
                module.__dict__[OVERRIDE] = self._before[name]


def units_of(
    model: nn.Module,
    kwargs: Mapping[str, Any],
    starts: Sequence[str] = (),
    *,
    trunks: Sequence[str] = (),
    unrolled: Mapping[str, int] | None = None,
    meta: bool = True,
    calls: ModuleCalls | None = None,
) -> tuple[str, ...]:
    """Return the modules between which the model may be cut, in the call order of one forward.

    These are the elements of the trunk, the modules `starts`, and before, between and after them
    every outermost module with parameters.  The trunk is `trunks`: lists (and single modules) in
    any order.  Without `trunks` it is the outermost module lists; a Sequential if there is no list;
    the model's children if there is neither.  Elements that this forward does not call are left
    out.

    A module that is called several times is several units, and appears once for each call, if it is
    in `unrolled` (module -> number of calls, which must be right) or if its calls are in different
    gaps of the trunk, one in each.  Other repeated modules outside the trunk belong to the code
    between units; so do lists that are walked again, if `starts` names modules of other lists.  In
    the trunk a repeated module is refused (S601).

    `kwargs` are the model's arguments.  With `meta` the forward runs on a copy on the meta device,
    else on the model itself.  It does not run if its `calls` are given.
    """
    starts = [_first_name(model, name) for name in starts]
    unrolled = {_first_name(model, name): times for name, times in (unrolled or {}).items()}
    calls = calls or record_calls(model, kwargs, meta)
    modules = dict(model.named_modules())
    trunk = trunk_elements(model, calls.counts, trunks, unrolled)
    if starts and not trunks:
        trunk = _walked_once(trunk, calls, (*starts, *unrolled))
    check_calls(unrolled, calls.counts)
    cut = {*trunk, *starts, *unrolled}
    units = _outermost(modules, calls, cut)
    for name in dict.fromkeys(units):
        if calls.counts[name] > 1 and name in cut and name not in unrolled:
            raise _in_a_loop(calls, name)
    for name in starts:
        if not any(unit == name or unit.startswith(f"{name}.") for unit in units):
            reason = (
                "is never called" if name not in calls.counts else "cannot be the start of a stage"
            )
            raise refusal("S601", name, reason)
    gapped = _one_in_each_gap(units, cut)
    return tuple(n for n in units if calls.counts[n] == 1 or n in unrolled or n in gapped)


def default_units(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the units between which a model may be cut if a schedule does not say where.

    If some lists are walked again and others are not, only the others are cut: a discriminator that
    judges two images stays in one piece behind the generator.
    """
    calls = record_calls(model, kwargs, True)
    trunk = trunk_elements(model, calls.counts)
    modules, once = dict(model.named_modules()), _walked_once(trunk, calls)
    if once == trunk:
        return units_of(model, kwargs, calls=calls)
    starts = [
        n for n in calls.order if n in once and next(modules[n].parameters(), None) is not None
    ]
    return units_of(model, kwargs, starts, calls=calls)


def _walked_once(trunk: Set[str], calls: ModuleCalls, kept: Sequence[str] = ()) -> set[str]:
    """Return a trunk's elements without those of lists that are walked again.

    Lists that contain a module of `kept` remain.
    """

    def holder(name: str) -> str:
        return name.rpartition(".")[0]

    repeated = {holder(name) for name in trunk if calls.counts[name] > 1}
    inside = {
        name for name in repeated for inner in kept if inner.startswith(f"{name}." if name else "")
    }
    return {name for name in trunk if holder(name) not in repeated - inside}


def _outermost(modules: Mapping[str, nn.Module], calls: ModuleCalls, cut: Set[str]) -> list[str]:
    """Return every call of a module with parameters that no other such module encloses."""
    containers = {""}
    for name in cut:
        parts = name.split(".")
        containers |= {".".join(parts[:k]) for k in range(len(parts))}
    outer_names = set()
    for name in calls.counts:
        parts = name.split(".")
        above = {".".join(parts[:k]) for k in range(1, len(parts))}
        # a module that is never called, such as a list, encloses nothing
        outermost = not (above - containers) & calls.counts.keys()
        has_own = next(modules[name].parameters(), None) is not None
        if name not in containers and outermost and has_own:
            outer_names.add(name)
    return [name for name in calls.order if name in outer_names]


def _one_in_each_gap(units: Sequence[str], cut: Set[str]) -> set[str]:
    """Return the modules outside the trunk that are called at most once in each gap."""
    seen_gaps: set[tuple[str, int]] = set()
    twice, gap = set(), 0
    for name in units:
        gap += name in cut
        if (name, gap) in seen_gaps:
            twice.add(name)
        seen_gaps.add((name, gap))
    return {name for name in units if name not in cut} - twice


def check_calls(unrolled: Mapping[str, int], counts: Mapping[str, int]) -> None:
    """Refuse a module that is not called as often as `unrolled` says (S601)."""
    for name, times in unrolled.items():
        count = counts.get(name, 0)
        if count != times:
            raise refusal(
                "S601",
                name,
                f"is called {_times(count)} in one forward, not {_times(times)}",
                *([f"`{name}  unroll({count})`"] if count else ()),
            )


def _in_a_loop(calls: ModuleCalls, name: str) -> Refusal:
    count = calls.counts[name]
    return refusal(
        "S601",
        name,
        f"is called {_times(count)} in one forward: no stage can start at it",
        "cut outside the loop that calls it",
        f"or make each call a separate module first: `{name}  unroll({count})`",
        note=calls.describe_repeat(name),
    )


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def is_in_trunk(
    model: nn.Module, units: Sequence[str], trunks: Sequence[str] = (), unrolled: Iterable[str] = ()
) -> tuple[bool, ...]:
    """Return for each unit whether it is an element of the trunk, or inside of one."""
    elements = trunk_elements(model, dict.fromkeys(units, 1), trunks, unrolled)
    return tuple(any(unit == e or unit.startswith(f"{e}.") for e in elements) for unit in units)


def trunk_elements(
    model: nn.Module,
    called: Iterable[str],
    trunks: Sequence[str] = (),
    unrolled: Iterable[str] = (),
) -> set[str]:
    """Return the called elements of the trunk: of the lists `trunks`, else of the outermost lists.

    A module in `trunks` that is no list, or is unrolled, is an element itself.
    """
    modules, called = dict(model.named_modules()), set(called)
    if not trunks:
        return _trunk(modules, called)
    elements = set()
    for name in (_first_name(model, trunk) for trunk in trunks):
        if isinstance(modules[name], LISTS) and name not in unrolled:
            elements |= {f"{name}.{child}" for child, _ in modules[name].named_children()}
        else:
            elements.add(name)
    inside = {e for e in elements for name in called if name == e or name.startswith(f"{e}.")}
    return inside


def _first_name(model: nn.Module, name: str) -> str:
    """Return the first name of a module; one object may have several names."""
    try:
        target = model.get_submodule(name)
    except AttributeError:
        raise refusal("S613", name, "is not a module of this model") from None
    return next(str(n) for n, module in model.named_modules() if module is target)


def _trunk(modules: Mapping[str, nn.Module], calls: Set[str]) -> set[str]:
    """Return the elements of the outermost lists of called modules."""

    def elements(kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> set[str]:
        members: set[str] = set()
        for name, module in modules.items():
            if not isinstance(module, kind):
                continue
            inside = any(name.startswith(f"{e}.") or name == e for e in members)
            prefix = f"{name}." if name else ""
            children = [prefix + child for child, _ in module.named_children()]
            called = [c for c in children if c in calls]
            if len(called) >= 2 and not inside:
                members |= set(called)
        return members

    root = {name for name in calls if name and "." not in name}
    return elements((nn.ModuleList, nn.ModuleDict)) or elements(nn.Sequential) or root


# -- forward hooks inside of units ----------------------------------------------------------------


OWN_PACKAGES = ("torch", "schedlang")
# calls a hook with (arguments, keyword arguments) and an output
CallHook = Callable[[Any, Any], Any]
# (module's name in the unit, number of its hook, the hook, the module's arguments, its output)
HookHandler = Callable[[str, int, CallHook, Any, Any], Any]
Hook = Callable[..., Any]


def foreign_hooks(module: nn.Module) -> list[tuple[int, Hook]]:
    """Return the forward hooks (key, hook) of a module that are neither torch's nor schedlang's."""
    return [(key, hook) for key, hook in module._forward_hooks.items() if not _ours(hook)]


def _ours(hook: Any) -> bool:
    inner = getattr(hook, "func", hook)  # of a partial function
    package = (
        getattr(getattr(inner, "__func__", inner), "__module__", None) or type(inner).__module__
    )
    return package.split(".")[0] in OWN_PACKAGES


@contextmanager
def intercept_hooks(
    unit: nn.Module, heard: HookHandler, *, hooked: nn.Module | None = None
) -> Iterator[None]:
    """Context in which `heard` is called in place of every foreign hook; its result is the hook's.

    `hooked` has the hooks, if `unit` is a copy that was made before they were registered.  A hook
    that is a method of one of the copy's own modules is called on the copy: the unit may read what
    the hook stores there.
    """
    saved_hooks: list[tuple[nn.Module, Any]] = []
    within = set(unit.modules())
    for name, owner in (hooked or unit).named_modules():
        foreign = foreign_hooks(owner)
        if not foreign:
            continue
        module = unit.get_submodule(name)
        saved_hooks.append((module, module._forward_hooks))
        put = OrderedDict(
            item for item in module._forward_hooks.items() if owner is module or _ours(item[1])
        )
        for index, (key, hook) in enumerate(foreign):
            # a copy needs another key; the owner knows whether the hook takes keyword arguments
            own_key = key if owner is module else -1 - index
            takes_kwargs = _with_kwargs(module, own_key)
            put[own_key] = _stand_in_hook(
                heard, name, index, owner, hook, _with_kwargs(owner, key), takes_kwargs
            )
            copied = module._forward_hooks.get(key) if owner is not module else None
            bound = getattr(getattr(copied, "func", copied), "__self__", None) in within
            if copied is not None and bound:
                put[key] = copied
        module._forward_hooks = put
    try:
        yield
    finally:
        for module, hooks in saved_hooks:
            module._forward_hooks = hooks


def _with_kwargs(module: nn.Module, key: int) -> bool:
    return key in module._forward_hooks_with_kwargs


def _stand_in_hook(
    heard: HookHandler,
    name: str,
    index: int,
    module: nn.Module,
    hook: Hook,
    kwargs: bool,
    takes_kwargs: bool,
) -> Hook:
    def call(arguments: Any, output: Any) -> Any:
        return _call_hook(module, hook, kwargs, arguments, output)

    if takes_kwargs:
        return lambda _, args, named, output: heard(name, index, call, (args, named), output)
    return lambda _, args, output: heard(name, index, call, (args, {}), output)


def _call_hook(module: nn.Module, hook: Hook, kwargs: bool, arguments: Any, output: Any) -> Any:
    args, keyword_args = arguments
    return hook(module, args, keyword_args, output) if kwargs else hook(module, args, output)


def call_foreign_hook(module: nn.Module, index: int, arguments: Any, output: Any) -> Any:
    """Call the foreign hook number `index` of a module, without intercepting it."""
    key, hook = foreign_hooks(module)[index]
    return _call_hook(module, hook, _with_kwargs(module, key), arguments, output)
