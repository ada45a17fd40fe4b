"""Results kept for a recomputation: of classes of operators, of single ones, of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from schedlang.remat.operators import Key
from schedlang.runtime.storage.saved import Kept, Pack, alias, policies, unpack
from schedlang.runtime.tracing.meta import storage

# ---- Collectives, whose results are kept so that no rank communicates twice.
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


class Numbered(TorchDispatchMode):
    """Names the calls of operators in one run, and lets `gives` say what each of them gives.

    It sees operators of a higher order (flex_attention), and leaves alone what is compiled.
    """

    supports_higher_order_operators = True

    def __init__(self, numbers: Callable[[], Numbers], gives: Gives) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers, self.gives = numbers, gives
        self.turns, self.sent = numbers(), 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether functions stay compiled."""
        return True

    def __enter__(self) -> Any:
        self.turns, self.sent = self.numbers(), 0  # a second backward through a graph starts over
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.gives(self, func, args, kwargs or {})


Gives = Callable[[Numbered, Any, tuple[Any, ...], dict[str, Any]], Any]


class Chosen:
    """Two dispatch modes over one store: `forward` keeps what was chosen, `again` finds it there.

    Both count; a second backward through a retained graph finds the same again. `chosen` are the
    names that are kept (None: all that get one). Inside of a coded module results are kept in fewer
    bits (`keep`, how that keeps a tensor), but for parts of sums. With `collectives` those of
    torch.distributed are not repeated.
    """

    def __init__(
        self,
        numbers: Callable[[], Numbers],
        chosen: Collection[Hashable] | None = None,
        keep: Pack | None = None,
        collectives: bool = False,
    ) -> None:
        self.chosen, self.keep, self.collectives = chosen, keep, collectives
        self.order: list[str] = []
        self.store: dict[Hashable, Any] = {}
        self.kept: dict[int, Kept] = {}  # by their storages
        self.sent: list[tuple[list[Kept], Any]] = []  # what each collective wrote, and gave
        self.forward = Numbered(numbers, self._first)
        self.again = Numbered(numbers, self._second)

    def _first(self, run: Numbered, func: Any, args: Any, kwargs: Any) -> Any:
        self.order = run.turns.order
        if self.collectives and _is_collective(func):
            out = func(*args, **kwargs)
            self.sent.append(([Kept(tensor) for tensor in _written(args)], out))
            return out
        key = run.turns.of(func, args, kwargs)
        out = func(*args, **kwargs)
        if key is not None and (self.chosen is None or key in self.chosen):
            self.store[key] = tree_map_only(Tensor, self.held, out)
            self.kept |= {storage(one.saved): one for one in _kept(self.store[key])}
        elif name_of(func) == _UNSAFE_VIEW and (one := self.kept.get(storage(out))) is not None:
            one.watch(out)
        return out

    def held(self, tensor: Tensor) -> Kept | _Few:
        """A result, to be found again."""
        coded = tensor if self.keep is None or policies.summed else self.keep(tensor)
        return Kept(tensor) if coded is tensor else _Few(coded)

    def _second(self, run: Numbered, func: Any, args: Any, kwargs: Any) -> Any:
        if self.collectives and _is_collective(func):
            return self._sent_before(run, func, args, kwargs)
        key = run.turns.of(func, args, kwargs)
        if key is not None:
            self._check(run.turns.order)
        kept = self.store.get(key)
        if kept is None or any(one.stale for one in _kept(kept)):
            return func(*args, **kwargs)
        return tree_map_only((Kept, _Few), lambda one: alias(unpack(one)), kept)

    def _sent_before(self, run: Numbered, func: Any, args: Any, kwargs: Any) -> Any:
        kept, out = self.sent[run.sent]
        run.sent += 1
        if any(one.stale for one in kept):
            return func(*args, **kwargs)
        for target, source in zip(_written(args), kept, strict=True):
            target.copy_(source.saved)
        return out

    def _check(self, second: Sequence[str]) -> None:
        first, place = self.order, len(second) - 1
        if place >= len(first) or first[place] != second[place]:
            was = f"`{first[place]}`" if place < len(first) else "nothing"
            raise RuntimeError(
                f"recomputation took another way: `{second[place]}` where there was {was}"
            )


def _kept(value: Any) -> list[Kept]:
    """Return the tensors that are kept as they are."""
    return [one for one in tree_leaves(value) if isinstance(one, Kept)]


class _Few:
    """A result in fewer bits, which nobody else has."""

    def __init__(self, packed: Any) -> None:
        self.packed = packed

    def tensor(self) -> Tensor:
        """The values that the whole numbers mean."""
        return unpack(self.packed)


# a view that does not say so, and that counts writes by itself: `matmul` ends with it, so that what
# is written into its result is not seen at the product below
_UNSAFE_VIEW = "aten::_unsafe_view"


def name_of(operator: Any) -> str:
    """The name of an operator, of a higher order too."""
    schema = getattr(operator, "_schema", None)
    return str(operator.name() if schema is None else schema.name)


def fresh(operator: Any) -> bool:
    """Return whether it gives something new, and writes into nothing."""
    schema = getattr(operator, "_schema", None)
    if schema is None:  # of a higher order
        return True
    if schema.name == _UNSAFE_VIEW:
        return False
    return all(one.alias_info is None for one in (*schema.arguments, *schema.returns))


def draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call moves the random state on.

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


# ---- Classes of operators, by which a row names results.


_OPERATORS = {
    "linear": (
        "aten::mm aten::addmm aten::bmm aten::baddbmm aten::linear aten::_grouped_mm "
        "aten::_scaled_mm mkldnn::_linear_pointwise"
    ),
    "attention": (
        "aten::_scaled_dot_product_flash_attention "
        "aten::_scaled_dot_product_flash_attention_for_cpu "
        "aten::_scaled_dot_product_efficient_attention "
        "aten::_scaled_dot_product_cudnn_attention "
        "aten::_scaled_dot_product_fused_attention_overrideable "
        "aten::_flash_attention_forward aten::_efficient_attention_forward "
        "aten::_cudnn_attention_forward flex_attention"
    ),
    "collective": (
        "_c10d_functional::all_gather_into_tensor _c10d_functional::all_reduce "
        "_c10d_functional::all_to_all_single _c10d_functional::reduce_scatter_tensor "
        "_c10d_functional::broadcast _c10d_functional::wait_tensor"
    ),
}
CLASSES = tuple(_OPERATORS)


def numbers(
    save: tuple[str, ...], chosen: frozenset[Key], coded: bool
) -> tuple[Callable[[], Numbers], Collection[Hashable] | None]:
    """Return the numbering of calls whose results may be kept, and the names that are (None: all).

    Results that are `coded` are rounded by draws that follow from their numbers: only what every
    layout records may have one.
    """
    if chosen:
        return Turns, chosen
    return partial(Kinds, partial(keeps, operators(save)), coded), None


def operators(save: tuple[str, ...]) -> frozenset[str]:
    """The names of the operators of some classes."""
    return frozenset(save) | {name for each in save for name in _OPERATORS[each].split()}


def keeps(kept: frozenset[str], operator: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the result of a call is kept: of these operators, new, and the same again."""
    wanted = name_of(operator) in kept or ("attention" in kept and attends(operator))
    return wanted and fresh(operator) and not draws(operator, args, kwargs)


def attends(operator: Any) -> bool:
    """Return whether an operator that is not torch's own says by its name that it is an attention's
    forward, as `flash_attn::_flash_attn_forward`, and writes into nothing."""
    space, _, _ = name_of(operator).partition("::")
    said = name_of(operator).lower()
    back = any(word in said for word in ("backward", "bwd", "grad"))
    named = "attn" in said or "attention" in said
    return space not in ("aten", "prims") and named and not back and fresh(operator)
