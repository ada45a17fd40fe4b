"""Results that are kept for a recomputation: of collectives, and of single operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from schedlang.remat.operators import Key
from schedlang.runtime.activation_memory.quantized import unpack
from schedlang.runtime.storage.fewer import Keep, is_summed

# ---- Keep the results of collectives for a recomputation, so that no rank communicates twice.
# torch's selective checkpointing keeps what an operator returns.  The collectives of
# torch.distributed write into a tensor of the caller's instead; skipped, they would leave it as it
# was, and the gradients would be wrong without a word.  Here the recomputation copies the kept
# result into that tensor.  What was written into since (`h += x` on a sum over ranks) is sent
# again, by all ranks alike: they run the same model.


_NAMES = (
    "allreduce_",
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "reduce_scatter_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "reduce_",
)


class KeepCollectives:
    """Two dispatch modes over one store: `forward` fills it, `again` reads it in the same order."""

    def __init__(self) -> None:
        self.kept: list[tuple[list[Tensor], list[int], Any]] = []
        self.forward = _Record(self.kept)
        self.again = _Replay(self.kept)


def _is_collective(func: Any) -> bool:
    namespace, _, name = func.name().partition("::")
    name, _, _ = name.partition(".")
    return namespace == "c10d" and name in _NAMES


def _written(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that a collective writes: its first argument, however it is nested."""

    def flat(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        return [tensor for each in value for tensor in flat(each)]

    return flat(args[0])


class Seeing(TorchDispatchMode):
    """A mode that sees operators of a higher order (flex_attention), and leaves alone what is
    compiled."""

    supports_higher_order_operators = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether functions stay compiled."""
        return True


class _Record(Seeing):
    def __init__(self, kept: list[tuple[list[Tensor], list[int], Any]]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_collective(func):
            tensors = [alias(tensor) for tensor in _written(args)]
            self.kept.append((tensors, [tensor._version for tensor in tensors], result))
        return result


class _Replay(Seeing):
    def __init__(self, kept: list[tuple[list[Tensor], list[int], Any]]) -> None:
        super().__init__()
        self.kept = kept
        self.next = 0

    def __enter__(self) -> Any:
        self.next = 0  # a second backward through a retained graph starts over
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _is_collective(func):
            return func(*args, **(kwargs or {}))
        tensors, versions, result = self.kept[self.next]
        self.next += 1
        if versions != [tensor._version for tensor in tensors]:
            return func(*args, **(kwargs or {}))
        for target, source in zip(_written(args), tensors, strict=True):
            target.copy_(source)
        return result


def alias(tensor: Tensor) -> Tensor:
    """The same storage and count of writes, without history."""
    # within a dispatch mode a plain detach would not share the count
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# ---- Operators of a module whose results are kept when it is recomputed.
# Of a plan an operator is known by its name and by which of its calls in the module it is. Counted
# are calls that autograd records and that give something new: what is made without a gradient may
# be made in one run and not in the other (what a module makes once, parameters that are gathered),
# and would shift the count. Of a class of operators each call is known by what it is given
# besides: the kernels of packages run where nothing is recorded. Both runs are held against each
# other all the same: where they call different operators there is an error, never another call's
# result. A result that was written into since (a cell that adds to its product in place) is made
# again.


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
        name = name_of(operator)
        name = ATTENTION if "_scaled_dot_product_" in name else name
        self.counts[name] += 1
        self.order.append(name)
        return name, self.counts[name] - 1


Wanted = Callable[[Any, Any, Any], bool]  # of a call: operator and arguments


class Kinds:
    """Numbers the calls that are wanted, each among those that are given tensors of its shapes.

    Counted is what is made of something with a gradient, recorded or not: a package's kernel runs
    inside of a function of its own. What is made of constants may be there already in a second run.
    `recorded`: only what autograd records. Calls inside of an autograd function (the products of
    ring attention, say) are steps of a layout's own, which no single process makes.
    """

    def __init__(self, wanted: Wanted, recorded: bool = False) -> None:
        self.wanted, self.recorded = wanted, recorded
        self.counts: Counter[Hashable] = Counter()
        self.order: list[str] = []

    def of(self, operator: Any, args: Any, kwargs: Any) -> Hashable | None:
        """The name of this call; None for one that is not wanted."""
        if not self.wanted(operator, args, kwargs):
            return None
        if self.recorded and not torch.is_grad_enabled():
            return None
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not any(one.requires_grad for one in given):
            return None
        name = name_of(operator)
        kind = (name, *((one.shape, one.dtype) for one in given))
        self.counts[kind] += 1
        self.order.append(name)
        return kind, self.counts[kind] - 1


class Numbers(Protocol):
    """Gives calls names that are the same in both runs, and notes what was called."""

    order: list[str]

    def of(self, operator: Any, args: Any, kwargs: Any) -> Hashable | None:
        """The name of this call; None for one whose result is not kept."""


class Chosen:
    """Two dispatch modes over one store: `forward` keeps what was chosen, `again` finds it there.

    Both count; a second backward through a retained graph finds the same again. `chosen` are the
    names that are kept (None: all that get one). Inside of a coded module results are kept in fewer
    bits (`keep`, see fewer.keeper), but for parts of sums.
    """

    def __init__(
        self,
        numbers: Callable[[], Numbers],
        chosen: Collection[Hashable] | None = None,
        keep: Keep | None = None,
    ) -> None:
        self.numbers, self.chosen, self.keep = numbers, chosen, keep
        self.order: list[str] = []
        self.store: dict[Hashable, Any] = {}
        self.forward, self.again = _First(self), _Second(self)

    def held(self, tensor: Tensor) -> _Held | _Few:
        """A result, to be found again."""
        coded = self.keep is not None and not is_summed()
        packed = self.keep(tensor) if coded and self.keep is not None else tensor
        return _Held(tensor) if packed is tensor else _Few(packed)


class _Mode(Seeing):
    def __init__(self, chosen: Chosen) -> None:
        super().__init__()
        self.chosen, self.turns = chosen, chosen.numbers()


class _First(_Mode):
    def __init__(self, chosen: Chosen) -> None:
        super().__init__(chosen)
        self.turns.order = chosen.order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        key, chosen = self.turns.of(func, args, kwargs or {}), self.chosen
        out = func(*args, **(kwargs or {}))
        if key is not None and (chosen.chosen is None or key in chosen.chosen):
            chosen.store[key] = tree_map_only(Tensor, chosen.held, out)
        return out


class _Second(_Mode):
    def __enter__(self) -> Any:
        self.turns = self.chosen.numbers()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        key = self.turns.of(func, args, kwargs or {})
        if key is not None:
            self._check(len(self.turns.order) - 1)
        kept = self.chosen.store.get(key)
        if kept is None or any(isinstance(one, _Held) and one.stale for one in tree_leaves(kept)):
            return func(*args, **(kwargs or {}))
        return tree_map_only((_Held, _Few), lambda held: held.get(), kept)

    def _check(self, place: int) -> None:
        first, second = self.chosen.order, self.turns.order
        if place >= 0 and (place >= len(first) or first[place] != second[place]):
            was = f"`{first[place]}`" if place < len(first) else "nothing"
            raise RuntimeError(
                f"recomputation took another way: `{second[place]}` where there was {was}"
            )


class _Held:
    """A result that is kept as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = alias(tensor)
        self.version = tensor._version

    @property
    def stale(self) -> bool:
        """Whether somebody has written into it since."""
        return self.tensor._version != self.version

    def get(self) -> Tensor:
        """The same values, for autograd to make its own."""
        return alias(self.tensor)


class _Few:
    """A result in fewer bits, which nobody else has."""

    def __init__(self, packed: Any) -> None:
        self.packed = packed

    def get(self) -> Tensor:
        """What the whole numbers say."""
        return unpack(self.packed)


def name_of(operator: Any) -> str:
    """The name of an operator, of a higher order too."""
    schema = getattr(operator, "_schema", None)
    return str(operator.name() if schema is None else schema.name)


def fresh(operator: Any) -> bool:
    """Whether it gives something new, and writes into nothing."""
    schema = getattr(operator, "_schema", None)
    if schema is None:  # of a higher order
        return True
    if schema.name == "aten::_unsafe_view":  # a view that does not say so
        return False
    return all(one.alias_info is None for one in (*schema.arguments, *schema.returns))


def draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call moves the random state on.

    Operators of packages may not say that they draw; of these a rate of dropout tells it.
    """
    if not hasattr(operator, "_schema"):
        return False
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
