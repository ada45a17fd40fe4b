"""Units of a model: who they are, a switch in front of their calls, and the hooks inside them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.tracing.calls import Calls, calls_of
from schedlang.runtime.tracing.graph import refusal

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
OVERRIDE = "_compiled_call_impl"
Handler = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Switch:
    """Stands in front of every call to a unit, hooks included, and hands it to a handler.

    A module that stands several times in `names` is as many units: its k-th call (since `using`)
    is the k-th of them, and any further call the last. Without a handler (also in recomputation) a
    unit is called as it is. This is the one place that uses `Module._compiled_call_impl`, torch's
    own override of a module's call: what `module.compile()` puts there is called behind the switch.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.modules = tuple(model.get_submodule(name) for name in names)
        first = {id(one): name for one, name in zip(self.modules[::-1], self.names[::-1])}
        self.names = tuple(first[id(one)] for one in self.modules)  # one module, one name
        self.handler: Handler | None = None
        self.turns: dict[str, int] = {}
        self._before = {n: model.get_submodule(n).__dict__.get(OVERRIDE) for n in self.names}
        self._routes = {name: self._route(model, name) for name in self._before}
        for module, route in self._routes.values():
            module.__dict__[OVERRIDE] = route

    def _route(self, model: nn.Module, name: str) -> tuple[nn.Module, Callable[..., Any]]:
        module = model.get_submodule(name)
        units = [unit for unit, other in enumerate(self.names) if other == name]
        only = units[0] if len(units) == 1 else None

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._before[name]
            original = before if before is not None else module._call_impl
            if self.handler is None:
                return original(*args, **kwargs)
            if only is not None:
                return self.handler(only, original, args, kwargs)
            turn = self.turns.get(name, 0)
            self.turns[name] = turn + 1
            return self.handler(units[min(turn, len(units) - 1)], original, args, kwargs)

        return module, call

    @contextmanager
    def using(self, handler: Handler) -> Iterator[None]:
        """Hand calls to `handler` within."""
        for name, (module, route) in self._routes.items():
            if (now := module.__dict__[OVERRIDE]) is not route:  # the module was compiled since
                self._before[name], module.__dict__[OVERRIDE] = now, route
        outer, self.handler, self.turns = (self.handler, self.turns), handler, {}
        try:
            yield
        finally:
            self.handler, self.turns = outer

    def remove(self) -> None:
        """Leave the modules as they were."""
        for name, module in zip(self.names, self.modules):
            if self._before[name] is None:
                module.__dict__.pop(OVERRIDE, None)
            else:
                module.__dict__[OVERRIDE] = self._before[name]


def units_of(
    model: nn.Module,
    kwargs: Mapping[str, Any],
    at: Sequence[str] = (),
    *,
    trunks: Sequence[str] = (),
    unrolled: Mapping[str, int] | None = None,
    meta: bool = True,
    calls: Calls | None = None,
) -> tuple[str, ...]:
    """The modules between which the model may be cut, in call order, from one forward.

    The trunk's elements and the modules `at`; and before, between and after them every outermost
    module that has parameters. The trunk is `trunks`, lists (and single modules) in any order;
    without them the outermost module lists, a Sequential where there is no list, the model's
    children where there is neither. Elements that this forward does not call are left out. A module
    called several times is several units, and stands here as often, where `unrolled` says so (then
    it must be called as often as said) or where calls lie in different gaps of the trunk, one in
    each. Any other outside the trunk is left to the code between units, and so are lists that are
    walked again where modules `at` of other lists are named; in the trunk it is refused (S601).
    `kwargs` are the model's arguments; with `meta` the forward runs on a copy on the meta
    device, else on the model itself; it does not run where its `calls` are known.
    """
    at = [_first(model, name) for name in at]
    unrolled = {_first(model, name): times for name, times in (unrolled or {}).items()}
    calls = calls or calls_of(model, kwargs, meta)
    named = dict(model.named_modules())
    trunk = elements_of(model, calls.counts, trunks, unrolled)
    if at and not trunks:
        trunk = _walked_once(trunk, calls, (*at, *unrolled))
    check_calls(unrolled, calls.counts)
    cut = {*trunk, *at, *unrolled}
    units = _outermost(named, calls, cut)
    for name in dict.fromkeys(units):
        if calls.counts[name] > 1 and name in cut and name not in unrolled:
            raise _in_a_loop(calls, name)
    for name in at:
        if not any(unit == name or unit.startswith(f"{name}.") for unit in units):
            why = (
                "is never called" if name not in calls.counts else "cannot be the start of a stage"
            )
            raise refusal("S601", name, why)
    gapped = _one_in_each_gap(units, cut)
    return tuple(n for n in units if calls.counts[n] == 1 or n in unrolled or n in gapped)


def startable(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The units between which a model may be cut where nobody says where.

    Where some lists are walked again and others are not, those of the others: a discriminator that
    judges two images stays whole behind the generator that is cut.
    """
    calls = calls_of(model, kwargs, True)
    trunk = elements_of(model, calls.counts)
    named, once = dict(model.named_modules()), _walked_once(trunk, calls)
    if once == trunk:
        return units_of(model, kwargs, calls=calls)
    at = [n for n in calls.order if n in once and next(named[n].parameters(), None) is not None]
    return units_of(model, kwargs, at, calls=calls)


def _walked_once(trunk: Set[str], calls: Calls, kept: Sequence[str] = ()) -> set[str]:
    """The elements of a trunk less those of lists that are walked again and have none of `kept`."""

    def holder(name: str) -> str:
        return name.rpartition(".")[0]

    again = {holder(name) for name in trunk if calls.counts[name] > 1}
    inside = {name for name in again for one in kept if one.startswith(f"{name}." if name else "")}
    return {name for name in trunk if holder(name) not in again - inside}


def _outermost(named: Mapping[str, nn.Module], calls: Calls, cut: Set[str]) -> list[str]:
    """Every call of a module with parameters that no other such module encloses."""
    containers = {""}
    for name in cut:
        parts = name.split(".")
        containers |= {".".join(parts[:k]) for k in range(len(parts))}
    chosen = set()
    for name in calls.counts:
        parts = name.split(".")
        above = {".".join(parts[:k]) for k in range(1, len(parts))}
        # what is never called, such as a list, encloses nothing
        outermost = not (above - containers) & calls.counts.keys()
        has_own = next(named[name].parameters(), None) is not None
        if name not in containers and outermost and has_own:
            chosen.add(name)
    return [name for name in calls.order if name in chosen]


def _one_in_each_gap(units: Sequence[str], cut: Set[str]) -> set[str]:
    """The modules outside the trunk that are called more than once, never twice in one gap."""
    seen: set[tuple[str, int]] = set()
    twice, gap = set(), 0
    for name in units:
        gap += name in cut
        if (name, gap) in seen:
            twice.add(name)
        seen.add((name, gap))
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


def _in_a_loop(calls: Calls, name: str) -> Refusal:
    count = calls.counts[name]
    return refusal(
        "S601",
        name,
        f"is called {_times(count)} in one forward: no stage can start at it",
        "cut outside the loop that calls it",
        f"or make each call a module of its own first: `{name}  unroll({count})`",
        note=calls.place(name),
    )


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def in_trunk(
    model: nn.Module,
    units: Sequence[str],
    trunks: Sequence[str] = (),
    unrolled: Iterable[str] = (),
) -> tuple[bool, ...]:
    """Return for each unit whether it is an element of the trunk, or lies in one."""
    elements = elements_of(model, dict.fromkeys(units, 1), trunks, unrolled)
    return tuple(any(unit == e or unit.startswith(f"{e}.") for e in elements) for unit in units)


def elements_of(
    model: nn.Module,
    called: Iterable[str],
    trunks: Sequence[str] = (),
    unrolled: Iterable[str] = (),
) -> set[str]:
    """The called elements of the trunk: of the lists given, else of the outermost lists.

    A module given that is no list, or is unrolled, is an element itself.
    """
    named, called = dict(model.named_modules()), set(called)
    if not trunks:
        return _trunk(named, called)
    found = set()
    for name in (_first(model, trunk) for trunk in trunks):
        if isinstance(named[name], LISTS) and name not in unrolled:
            found |= {f"{name}.{child}" for child, _ in named[name].named_children()}
        else:
            found.add(name)
    inside = {e for e in found for name in called if name == e or name.startswith(f"{e}.")}
    return inside


def _first(model: nn.Module, name: str) -> str:
    """The first name of a module; one object may stand in several places."""
    try:
        wanted = model.get_submodule(name)
    except AttributeError:
        raise refusal("S613", name, "is not a module of this model") from None
    return next(str(n) for n, module in model.named_modules() if module is wanted)


def _trunk(named: Mapping[str, nn.Module], calls: Set[str]) -> set[str]:
    """The elements of the outermost lists of called modules."""

    def elements(kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> set[str]:
        found: set[str] = set()
        for name, module in named.items():
            if not isinstance(module, kind):
                continue
            inside = any(name.startswith(f"{e}.") or name == e for e in found)
            prefix = f"{name}." if name else ""
            children = [prefix + child for child, _ in module.named_children()]
            called = [c for c in children if c in calls]
            if len(called) >= 2 and not inside:
                found |= set(called)
        return found

    root = {name for name in calls if name and "." not in name}
    return elements((nn.ModuleList, nn.ModuleDict)) or elements(nn.Sequential) or root


# ----


OURS = ("torch", "schedlang")
Tell = Callable[[Any, Any], Any]  # calls a hook with (arguments, keyword arguments) and an output
# the module's name in the unit, which of its hooks, the hook, what the module was given, its output
Heard = Callable[[str, int, Tell, Any, Any], Any]
Hook = Callable[..., Any]


def foreign(module: nn.Module) -> list[tuple[int, Hook]]:
    """The forward hooks of a module that neither torch nor this package has put there."""
    return [(key, hook) for key, hook in module._forward_hooks.items() if not _ours(hook)]


def _ours(hook: Any) -> bool:
    inner = getattr(hook, "func", hook)  # of a partial function
    home = getattr(getattr(inner, "__func__", inner), "__module__", None) or type(inner).__module__
    return home.split(".")[0] in OURS


@contextmanager
def overheard(unit: nn.Module, heard: Heard, *, hooked: nn.Module | None = None) -> Iterator[None]:
    """Call `heard` in place of every such hook, for the time of a block; its result is the hook's.

    `hooked` has the hooks, where `unit` is a copy that was made before they were put there.  What
    are methods of its own modules is called in a copy, too: what they keep is read within.
    """
    kept: list[tuple[nn.Module, Any]] = []
    within = set(unit.modules())
    for name, owner in (hooked or unit).named_modules():
        theirs = foreign(owner)
        if not theirs:
            continue
        module = unit.get_submodule(name)
        kept.append((module, module._forward_hooks))
        put = OrderedDict(
            one for one in module._forward_hooks.items() if owner is module or _ours(one[1])
        )
        for place, (key, hook) in enumerate(theirs):
            # a key of its own in a copy: whether it takes keyword arguments is told by the owner
            mine = key if owner is module else -1 - place
            told = _with_kwargs(module, mine)
            put[mine] = _standing_in(
                heard, name, place, owner, hook, _with_kwargs(owner, key), told
            )
            copied = module._forward_hooks.get(key) if owner is not module else None
            bound = getattr(getattr(copied, "func", copied), "__self__", None) in within
            if copied is not None and bound:
                put[key] = copied
        module._forward_hooks = put
    try:
        yield
    finally:
        for module, hooks in kept:
            module._forward_hooks = hooks


def _with_kwargs(module: nn.Module, key: int) -> bool:
    return key in module._forward_hooks_with_kwargs


def _standing_in(
    heard: Heard, name: str, place: int, module: nn.Module, hook: Hook, kwargs: bool, told: bool
) -> Hook:
    def call(given: Any, output: Any) -> Any:
        return _called(module, hook, kwargs, given, output)

    if told:
        return lambda _, args, named, output: heard(name, place, call, (args, named), output)
    return lambda _, args, output: heard(name, place, call, (args, {}), output)


def _called(module: nn.Module, hook: Hook, kwargs: bool, given: Any, output: Any) -> Any:
    args, named = given
    return hook(module, args, named, output) if kwargs else hook(module, args, output)


def tell(module: nn.Module, place: int, given: Any, output: Any) -> Any:
    """Call one of these hooks of a module, which nobody overhears."""
    key, hook = foreign(module)[place]
    return _called(module, hook, _with_kwargs(module, key), given, output)
