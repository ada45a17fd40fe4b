"""Single operators of a module whose results are kept when it is recomputed.

An operator is known by its name and by which of its calls in the module it is. Counted are calls
that autograd records and that give something new: what is made without a gradient may be made in
one run and not in the other (what a module makes once, parameters that are gathered), and would
shift the count. Both runs are held against each other all the same: where they call different
operators there is an error, never another call's result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from schedlang.regions.operators import Key
from schedlang.runtime.keeping.coded import unpack
from schedlang.runtime.storage.fewer import Keep, is_summed

ATTENTION = "attention"  # whichever kernel computes it


class Turns:
    """Numbers the calls of operators whose results could be kept."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.order: list[str] = []

    def of(self, operator: Any, args: Any, kwargs: Any) -> Key | None:
        """The name of this call; None for one that is not counted."""
        if not fresh(operator) or not torch.is_grad_enabled() or draws(operator, args, kwargs):
            return None
        given = tree_leaves((args, kwargs))
        if not any(isinstance(one, Tensor) and one.requires_grad for one in given):
            return None
        name = operator._schema.name
        name = ATTENTION if "_scaled_dot_product_" in name else name
        self.counts[name] += 1
        self.order.append(name)
        return name, self.counts[name] - 1


Wanted = Callable[[Key, Any, Any, Any], bool]  # of a call's name, operator and arguments


class Chosen:
    """Two dispatch modes over one store: `forward` keeps what was chosen, `again` finds it there.

    Both count; a second backward through a retained graph finds the same again. Inside of a coded
    module results are kept in fewer bits (`keep`, see fewer.keeper), but for parts of sums.
    """

    def __init__(self, wanted: Wanted, keep: Keep | None = None) -> None:
        self.wanted, self.keep = wanted, keep
        self.order: list[str] = []
        self.store: dict[Key, Any] = {}
        self.forward, self.again = _First(self), _Second(self)

    def held(self, tensor: Tensor) -> _Held | _Few:
        """A result, to be found again."""
        coded = self.keep is not None and not is_summed()
        packed = self.keep(tensor) if coded and self.keep is not None else tensor
        return _Held(tensor) if packed is tensor else _Few(packed)


class _First(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, chosen: Chosen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen, self.turns = chosen, Turns()
        self.turns.order = chosen.order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        key = self.turns.of(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if key is not None and self.chosen.wanted(key, func, args, kwargs or {}):
            self.chosen.store[key] = tree_map_only(Tensor, self.chosen.held, out)
        return out


class _Second(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, chosen: Chosen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen, self.turns = chosen, Turns()

    def __enter__(self) -> Any:
        self.turns = Turns()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        key = self.turns.of(func, args, kwargs or {})
        if key is None:
            return func(*args, **(kwargs or {}))
        self._check(len(self.turns.order) - 1)
        if key not in self.chosen.store:
            return func(*args, **(kwargs or {}))
        return tree_map_only((_Held, _Few), lambda held: held.get(), self.chosen.store[key])

    def _check(self, place: int) -> None:
        first, second = self.chosen.order, self.turns.order
        if place >= len(first) or first[place] != second[place]:
            was = f"`{first[place]}`" if place < len(first) else "nothing"
            raise RuntimeError(
                f"recomputation took another way: `{second[place]}` where there was {was}"
            )


class _Held:
    """A result that is kept, and that nobody may write into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = alias(tensor)
        self.version = tensor._version

    def get(self) -> Tensor:
        """The same values, for autograd to make its own."""
        if self.tensor._version != self.version:
            raise RuntimeError("the result of an operator that was kept has been overwritten")
        return alias(self.tensor)


class _Few:
    """A result in fewer bits, which nobody else has."""

    def __init__(self, packed: Any) -> None:
        self.packed = packed

    def get(self) -> Tensor:
        """What the whole numbers say."""
        return unpack(self.packed)


def alias(tensor: Tensor) -> Tensor:
    """The same storage and count of writes, without history."""
    # within a dispatch mode a plain detach would not share the count
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def fresh(operator: Any) -> bool:
    """Whether it gives something new, and writes into nothing."""
    schema = operator._schema
    if schema.name == "aten::_unsafe_view":  # a view that does not say so
        return False
    return all(one.alias_info is None for one in (*schema.arguments, *schema.returns))


def draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call moves the random state on.

    Operators of packages may not say that they draw; of these a rate of dropout tells it.
    """
    seeded = torch.Tag.nondeterministic_seeded in operator.tags
    rates = _rates(operator, args, kwargs)
    return any(rates) if rates or not seeded else True


def _rates(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """The rates of dropout that a call was given; none where it takes none."""
    own = operator._schema.name.startswith("aten::")
    found = []
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p" or (not own and "drop" in argument.name):
            given = kwargs.get(argument.name, args[place] if place < len(args) else 0.0)
            found.append(float(given) if isinstance(given, int | float) else 0.0)
    return found
