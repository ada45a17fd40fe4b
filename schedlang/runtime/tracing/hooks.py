"""Forward hooks that a library or a user has put inside of a unit: what they are told leaves it.

transformers collects router logits and hidden states by hooks, and a loss reads them.  A stage that
does not run the unit calls its hooks with what the unit's own stage has sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

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
    """Within, `heard` is called in place of every such hook; what it returns is the hook's.

    `hooked` has the hooks, where `unit` is a copy that was made before they were put there.
    """
    kept: list[tuple[nn.Module, Any]] = []
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
