"""Selective checkpointing: results of operators that a recomputation reuses instead of computing.

The results are those of classes of operators, of single operators, or of collectives.
"""

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
from schedlang.runtime.storage.saved_tensors_slot import (
    Pack,
    VersionedTensor,
    alias,
    policies,
    unpack,
)
from schedlang.runtime.tracing.meta_runs import storage

# ---- Collectives, whose results are saved so that no rank communicates twice.
# torch's selective checkpointing saves the return value of an operator. The collectives of
# torch.distributed write into a tensor of the caller instead; skipped, they would leave that tensor
# unchanged, and the gradients would be silently wrong. Here the recomputation copies the saved
# result into that tensor. If the result was written into since (`h += x` on a sum over ranks), the
# collective runs again, on all ranks, because they run the same model.


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


def _written_tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that a collective writes: its first argument, however nested."""

    def flat(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        return [tensor for item in value for tensor in flat(item)]

    return flat(args[0])


# ---- Operators of a module whose results are saved when it is recomputed.
# A plan names an operator by its name and the number of its call in the module. Only calls that
# autograd records and that return new tensors count: calls without a gradient may occur in one run
# only (a constant that a module makes once, a gather of parameters), and would shift the numbers.
# In a class of operators, a call is also named by the shapes of its arguments: the kernels of
# packages run where autograd records nothing. Both runs are compared in any case: if they call
# different operators, an error is raised, and no call gets the result of another. A result that was
# written into since (a cell that adds to its product in place) is computed again.


ATTENTION = "attention"  # whichever kernel computes it


class CallNumbers:
    """Numbers the calls of operators whose results could be saved, by operator."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.order: list[str] = []

    def next_key(self, operator: Any, args: Any, kwargs: Any) -> Key | None:
        """Return the key of this call; None for a call that is not counted."""
        if (
            not is_functional(operator)
            or not torch.is_grad_enabled()
            or draws_random(operator, args, kwargs)
        ):
            return None
        arguments = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in arguments):
            return None
        name = name_of(operator)
        name = ATTENTION if "_scaled_dot_product_" in name else name
        self.counts[name] += 1
        self.order.append(name)
        return name, self.counts[name] - 1


CallPredicate = Callable[[Any, Any, Any], bool]  # of a call: operator and arguments


class CallNumbersByKind:
    """Numbers the calls that `predicate` accepts, among those with tensors of the same shapes.

    A call counts if an argument requires a gradient, even if autograd does not record it: the
    kernel of a package runs inside an autograd function. Results of constants may exist before a
    second run. `recorded`: only calls that autograd records count. Calls inside an autograd
    function (the products of ring attention, say) belong to a layout, and a single process does not
    make them.
    """

    def __init__(self, predicate: CallPredicate, recorded: bool = False) -> None:
        self.wanted, self.recorded = predicate, recorded
        self.counts: Counter[Hashable] = Counter()
        self.order: list[str] = []

    def next_key(self, operator: Any, args: Any, kwargs: Any) -> Hashable | None:
        """Return the key of this call; None for a call that is not wanted."""
        if not self.wanted(operator, args, kwargs):
            return None
        if self.recorded and not torch.is_grad_enabled():
            return None
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(leaf.requires_grad for leaf in arguments):
            return None
        name = name_of(operator)
        kind = (name, *((leaf.shape, leaf.dtype) for leaf in arguments))
        self.counts[kind] += 1
        self.order.append(name)
        return kind, self.counts[kind] - 1


class CallNumbering(Protocol):
    """Gives calls keys that are equal in both runs, and records the order of the calls."""

    order: list[str]

    def next_key(self, operator: Any, args: Any, kwargs: Any) -> Hashable | None:
        """Return the key of this call; None for a call whose result is not saved."""


class NumberedCalls(TorchDispatchMode):
    """Numbers the calls of operators in one run, and lets `handler` return their results.

    The mode sees higher-order operators (flex_attention), and leaves compiled code alone.
    """

    supports_higher_order_operators = True

    def __init__(self, numbers: Callable[[], CallNumbering], handler: CallHandler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers, self.gives = numbers, handler
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


CallHandler = Callable[[NumberedCalls, Any, tuple[Any, ...], dict[str, Any]], Any]


class SelectiveModes:
    """Two dispatch modes over one store: `forward` saves chosen results, `second` returns them.

    Both number the calls; a second backward through a retained graph finds the same results again.
    `chosen` are the keys that are saved (None: all calls with a key). Inside a module with
    quantized activations, results are quantized by `keep`, except partial sums. With `collectives`,
    the collectives of torch.distributed are not repeated.
    """

    def __init__(
        self,
        numbers: Callable[[], CallNumbering],
        chosen: Collection[Hashable] | None = None,
        keep: Pack | None = None,
        collectives: bool = False,
    ) -> None:
        self.chosen, self.keep, self.collectives = chosen, keep, collectives
        self.order: list[str] = []
        self.store: dict[Hashable, Any] = {}
        self.kept: dict[int, VersionedTensor] = {}  # by storage
        # tensors written by each collective, its result
        self.sent: list[tuple[list[VersionedTensor], Any]] = []
        self.forward = NumberedCalls(numbers, self._run_first)
        self.second = NumberedCalls(numbers, self._run_second)

    def _run_first(self, calls: NumberedCalls, func: Any, args: Any, kwargs: Any) -> Any:
        self.order = calls.turns.order
        if self.collectives and _is_collective(func):
            value = func(*args, **kwargs)
            self.sent.append(
                ([VersionedTensor(tensor) for tensor in _written_tensors(args)], value)
            )
            return value
        key = calls.turns.next_key(func, args, kwargs)
        value = func(*args, **kwargs)
        if name_of(func) in _UNSAFE_VIEWS:
            for view in tree_leaves(value):
                if (saved := self.kept.get(storage(view))) is not None:
                    saved.watch(view)
        if key is not None and (self.chosen is None or key in self.chosen):
            self.store[key] = tree_map_only(Tensor, self.save, value)
            self.kept |= {storage(saved.saved): saved for saved in _plain_results(self.store[key])}
        return value

    def save(self, tensor: Tensor) -> VersionedTensor | _CodedResult:
        """Save a result."""
        coded = tensor if self.keep is None or policies.summed else self.keep(tensor)
        return VersionedTensor(tensor) if coded is tensor else _CodedResult(coded)

    def _run_second(self, calls: NumberedCalls, func: Any, args: Any, kwargs: Any) -> Any:
        if self.collectives and _is_collective(func):
            return self._replay_collective(calls, func, args, kwargs)
        key = calls.turns.next_key(func, args, kwargs)
        if key is not None:
            self._check(calls.turns.order)
        saved = self.store.get(key)
        if saved is None or any(leaf.is_stale for leaf in _plain_results(saved)):
            return func(*args, **kwargs)
        return tree_map_only(
            (VersionedTensor, _CodedResult), lambda leaf: alias(unpack(leaf)), saved
        )

    def _replay_collective(self, calls: NumberedCalls, func: Any, args: Any, kwargs: Any) -> Any:
        saved, result = self.sent[calls.sent]
        calls.sent += 1
        if any(tensor.is_stale for tensor in saved):
            return func(*args, **kwargs)
        for target, source in zip(_written_tensors(args), saved, strict=True):
            target.copy_(source.saved)
        return result

    def _check(self, second: Sequence[str]) -> None:
        first, index = self.order, len(second) - 1
        if index >= len(first) or first[index] != second[index]:
            expected = f"`{first[index]}`" if index < len(first) else "nothing"
            raise RuntimeError(
                f"recomputation ran differently from the forward: `{second[index]}`, not {expected}"
            )


def _plain_results(value: Any) -> list[VersionedTensor]:
    """Return the results that are saved unquantized."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, VersionedTensor)]


class _CodedResult:
    """A quantized result, which nothing else refers to."""

    def __init__(self, packed: Any) -> None:
        self.packed = packed

    def tensor(self) -> Tensor:
        """Return the dequantized values."""
        return unpack(self.packed)


# views without alias information, with version counters of their own: `matmul` ends with the first,
# recurrent cells split their products by the others, and writes into their results do not show in
# the counter of the product
_UNSAFE_VIEWS = frozenset(
    f"aten::{name}"
    for name in ("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
)


def name_of(operator: Any) -> str:
    """Return the name of an operator, also of a higher-order one."""
    schema = getattr(operator, "_schema", None)
    return str(operator.name() if schema is None else schema.name)


def is_functional(operator: Any) -> bool:
    """Return whether an operator returns new tensors, and writes into none."""
    schema = getattr(operator, "_schema", None)
    if schema is None:  # a higher-order operator
        return True
    if schema.name == "aten::_unsafe_view":
        return False
    return all(argument.alias_info is None for argument in (*schema.arguments, *schema.returns))


def draws_random(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call advances the random state.

    Operators of packages may not declare that they draw; for these a rate of dropout decides.
    """
    if not hasattr(operator, "_schema"):
        return False
    seeded = torch.Tag.nondeterministic_seeded in operator.tags
    rates = _dropout_rates(operator, args, kwargs)
    return any(rates) if rates or not seeded else True


def _dropout_rates(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Return the rates of dropout among the arguments of a call; empty without such arguments."""
    is_aten = operator._schema.name.startswith("aten::")
    rates = []
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p" or (not is_aten and "drop" in argument.name):
            rate = kwargs.get(argument.name, args[index] if index < len(args) else 0.0)
            rates.append(float(rate) if isinstance(rate, int | float) else 0.0)
    return rates


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
OPERATOR_CLASSES = tuple(_OPERATORS)


def numbering_of(
    save: tuple[str, ...], chosen: frozenset[Key], coded: bool
) -> tuple[Callable[[], CallNumbering], Collection[Hashable] | None]:
    """Return the numbering of calls whose results may be saved, and the saved keys (None: all).

    The rounding of `coded` results depends on their numbers, so only calls that every layout
    records may get one.
    """
    if chosen:
        return CallNumbers, chosen
    return partial(CallNumbersByKind, partial(is_saved_call, operators_of(save)), coded), None


def operators_of(save: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the operators of some classes."""
    return frozenset(save) | {name for kind in save for name in _OPERATORS[kind].split()}


def is_saved_call(saved: frozenset[str], operator: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the result of a call is saved: of these operators, functional,
    deterministic."""
    selected = name_of(operator) in saved or ("attention" in saved and is_attention(operator))
    return selected and is_functional(operator) and not draws_random(operator, args, kwargs)


def is_attention(operator: Any) -> bool:
    """Return whether an operator of a package is the forward of an attention, by its name.

    Such as `flash_attn::_flash_attn_forward`; operators that write into an argument do not count.
    """
    space, _, _ = name_of(operator).partition("::")
    text = name_of(operator).lower()
    backward = any(mark in text for mark in ("backward", "bwd", "grad"))
    mentions = "attn" in text or "attention" in text
    return space not in ("aten", "prims") and mentions and not backward and is_functional(operator)
