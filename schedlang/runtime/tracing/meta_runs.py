"""Forwards on the meta device: copies of models and batches without values, and modes to run them.

* Copies of a model, or of a batch, on the meta device: shapes without values.
* `ResultCache`: results of operators on meta tensors, computed once for equal arguments.  Torch
  computes their shapes in Python, which takes longer than a kernel, and equal layers repeat the
  operators.
* `KnownValues`: real values of meta tensors that are computed from the batch alone, such as masks.
* Names of torch's functions, tensors among arguments, and the running line of the model.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from schedlang.ir import pytree
from schedlang.ir.module_copies import deepcopy_module
from schedlang.runtime.adapters.hook_numbers import number_hooks_from
from schedlang.runtime.tracing import meta_shapes as meta_shapes
from schedlang.runtime.tracing.model_lines import model_line

TORCH_NAMES = frozenset(vars(nn.Module()))  # attributes of every module


def copy_with(
    model: nn.Module,
    parameter: Callable[[str, nn.Parameter], nn.Parameter],
    other: Callable[[Tensor], Tensor],
    children: Mapping[str, Sequence[str]] | None = None,
) -> nn.Module:
    """Return a deep copy of a model whose tensors are made by the given functions, never copied.

    parameter: makes the stand-in from a parameter's first name and the parameter; ties stay ties.
    other: makes the stand-ins of buffers, and of tensors that are plain attributes.
    kept: list of modules -> the children that are copied, and renumbered; others are left out.
    """
    memo: dict[int, Any] = {id(p): parameter(name, p) for name, p in model.named_parameters()}
    for module in model.modules():
        own = [value for name, value in vars(module).items() if name not in TORCH_NAMES]
        kept = _pytree.tree_leaves([v for v in own if isinstance(v, (Tensor, dict, list, tuple))])
        for tensor in (*module._buffers.values(), *kept):  # a hook may have kept some in a dict
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = other(tensor)
        latest = max((*module._forward_hooks, *module._forward_pre_hooks), default=-1)
        if latest >= RemovableHandle.next_id:  # hooks of another process, in a pickled module
            number_hooks_from(latest + 1)
    for fqn in sorted(children or {}, key=lambda name: -name.count(".")):  # the inner lists first
        module_list = model.get_submodule(fqn)
        memo[id(module_list)] = _shorter(module_list, (children or {})[fqn], memo)
    return deepcopy_module(model, memo)


def _shorter(modules: nn.Module, names: Sequence[str], memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a list of modules that has only the children `names`."""
    shortened = copy.copy(modules)
    children = (deepcopy_module(modules.get_submodule(name), memo, True) for name in names)
    shortened.__dict__["_modules"] = {str(k): child for k, child in enumerate(children)}
    return shortened


def meta_parameter(tensor: nn.Parameter, shape: tuple[int, ...] | None = None) -> nn.Parameter:
    """Return a parameter on the meta device, of the same or the given shape."""
    empty = torch.empty(shape or tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad)


def meta_model(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    children: Mapping[str, Sequence[str]] | None = None,
) -> nn.Module:
    """Return the model on the meta device; `shapes` replaces parameters' shapes, by first name.

    `children`: list of modules -> the children that are copied (as in `copy_with`).
    """
    copied = copy_with(
        model,
        lambda name, tensor: meta_parameter(tensor, shapes.get(name)),
        lambda tensor: tensor.to("meta"),
        children,
    )
    for module in copied.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            module.momentum = 1.0  # a cumulative average divides by a count, without a value here
    return copied


def meta_batch(batch: Any) -> Any:
    """Return the batch with every tensor on the meta device."""
    to_meta = lambda value: value.to("meta") if isinstance(value, Tensor) else value  # noqa: E731
    return pytree.tree_map(to_meta, batch)


ResultForm = tuple[tuple[Any, ...], tuple[Any, ...], torch.dtype]  # size, stride, dtype of a result
ResultForms = tuple[type, tuple[ResultForm | None, ...]]  # of all results, and what holds them
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
MAX_RESULTS = 1 << 14  # the most results that are stored; a model needs some hundreds
LEAVES = frozenset(
    [
        *(int, float, bool, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    ]
)


@dataclass(eq=False)
class ResultCache:
    """Cache of operators' results on meta tensors: an operator runs once for equal arguments.

    Cached are operators that neither write, nor view, nor draw, and whose arguments are meta
    tensors and plain values only; never a result that shares memory with an argument.  Where
    another dispatch mode is active below, every operator runs, because that mode must see it.

    One cache may serve many runs: the key has everything that decides a result's shape, also the
    default dtype, to which integers are promoted.
    """

    _known: dict[Any, ResultForms | None] = field(default_factory=dict)
    # by id, as a hash would ask torch: operators, and whether one only makes new tensors
    _fresh: dict[int, tuple[Any, bool]] = field(default_factory=dict)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the results of the operator `func`; cache their shapes."""
        freshness = self._fresh.get(id(func))
        if freshness is None:
            ends = (*func._schema.arguments, *func._schema.returns)
            alias = any(end.alias_info is not None for end in ends)
            freshness = self._fresh[id(func)] = func, not (alias or is_random(func))
        inputs: list[Tensor] = []
        key = None
        if freshness[1] and torch._C._len_torch_dispatch_stack() == 0:
            key = _key((id(func), torch.get_default_dtype(), args, *kwargs.items()), inputs)
        if key is None or not inputs:
            return func(*args, **kwargs)
        cached = self._known.get(key)
        # the model does not make the calls below: function modes must not see them
        with torch._C.DisableTorchFunction():
            if cached is not None:
                return _recreate(cached)
            result = func(*args, **kwargs)
        if key not in self._known:
            if len(self._known) >= MAX_RESULTS:
                self._known.clear()
            self._known[key] = _describe_result(result, inputs)
        return result


def _key(value: Any, inputs: list[Tensor]) -> Any:
    """Return a key that is equal for arguments with equal results; None if there is none.

    Adds the tensors in `value` to `inputs`.
    """
    kind = type(value)
    if kind in PLAIN:
        if not value.is_meta or value.layout is not torch.strided or value.is_conj():
            return None
        inputs.append(value)
        return "t", value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        parts = []
        for item in value:  # no generator: this runs several times for each operator of a model
            part = _key(item, inputs)
            if part is None:
                return None
            parts.append(part)
        return kind, tuple(parts)
    if kind in LEAVES or isinstance(value, torch._ops.OpOverload):
        return kind, value
    return None


def _describe_result(result: Any, inputs: Iterable[Tensor]) -> ResultForms | None:
    """Return a description from which `_recreate` makes a result; None if it is not new memory."""
    parts = (result,) if isinstance(result, Tensor) else result
    if not isinstance(parts, tuple | list):
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    forms: list[ResultForm | None] = []
    for tensor in parts:
        if tensor is None:
            forms.append(None)
            continue
        if type(tensor) is not Tensor or not tensor.is_meta or tensor.storage_offset():
            return None
        storage = tensor.untyped_storage()
        size, stride = tuple(tensor.shape), tensor.stride()
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if tensor.numel() else 0
        if storage._cdata in storages or storage.nbytes() != extent * tensor.element_size():
            return None
        storages.add(storage._cdata)
        forms.append((size, stride, tensor.dtype))
    return type(result) if not isinstance(result, Tensor) else Tensor, tuple(forms)


def _recreate(cached: ResultForms) -> Any:
    kind, forms = cached
    tensors = [
        None if one is None else torch.empty_strided(one[0], one[1], dtype=one[2], device="meta")
        for one in forms
    ]
    return tensors[0] if kind is Tensor else kind(tensors)


# results of torch's own operators, for all runs of this process: they never change.  An operator of
# a library or a user may be registered again: its results are cached within a run only
_ATEN = ResultCache()


def run_cached(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator, from the cache of the process if it is torch's own."""
    is_aten = func.namespace == "aten"
    return _ATEN.run(func, args, kwargs) if is_aten else func(*args, **kwargs)


SCALAR = torch.ops.aten._local_scalar_dense.default
SMALLEST = sys.float_info.min  # an unknown floating-point number
# bytes of a value; padding masks and positions are small, larger ones are dropped
MAX_BYTES = 1 << 22
MAX_UNKNOWN = 1 << 12  # the most unknown values that become a list


@dataclass(eq=False)
class KnownValues:
    """Runs operators on meta tensors, and on real values too where all inputs' values are known.

    A model may branch on whether a mask is all ones, which a meta tensor cannot answer.  Values are
    stored by storage, so views and in-place writes are followed.
    """

    values: dict[int, Tensor] = field(default_factory=dict)  # meta storage -> flat real tensor
    cache: ResultCache = field(default_factory=ResultCache)
    on_read: Callable[[Any], Any] = lambda value: value  # known value -> what a model gets
    listed: str = ""  # line of the model that got a list of unknown values, if one did
    unknown_lists: list[Any] = field(default_factory=list)  # these lists
    _alive: dict[int, Any] = field(default_factory=dict)  # weak references of the storages

    def store_values(self, real: Any, meta: Any) -> None:
        """Store the values of the integer and boolean tensors in `real` for those in `meta`."""
        for value, bare in zip(_pytree.tree_leaves(real), _pytree.tree_leaves(meta)):
            if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_meta:
                continue
            self._store(bare, value)

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        unknown: Callable[[Any], Any],
    ) -> Any:
        """Return the operator's result; `unknown(func)` gives a scalar that is not known."""
        if func is SCALAR and args[0].is_meta:
            value = self.values_of(args[0])
            if value is None:  # a model may divide by it
                return unknown(func) or (SMALLEST if args[0].is_floating_point() else 0)
            return self.on_read(value.item())
        if func is torch.ops.aten.masked_select.default and args[0].is_meta:
            return self._run_data_dependent(func, args, kwargs, unknown)
        try:
            memo = _ATEN if func.namespace == "aten" else self.cache
            output = memo.run(func, args, kwargs)
        except NotImplementedError:  # the shape depends on values
            return self._run_data_dependent(func, args, kwargs, unknown)
        except RuntimeError as error:  # the message of one operator
            if "meta tensor without output_size" in str(error):
                return self._run_data_dependent(func, args, kwargs, unknown)
            if (meta_args := self._moved(args, kwargs)) is None:
                raise
            return self.run(func, *meta_args, unknown)
        first: Any = args[0] if args else None
        with torch._C.DisableTorchFunction():  # else an attribute access calls all modes
            if type(first) in PLAIN and type(output) is Tensor and output.dtype is not torch.bool:
                # most operators of a model: no values of the input or of the result are known
                values = self.values
                has_values = values and (storage(first) in values or storage(output) in values)
                if first.is_meta and output.is_meta and not has_values:
                    return output
            parts = (output,) if isinstance(output, Tensor) else _pytree.tree_leaves(output)
            meta_outputs = [t for t in parts if isinstance(t, Tensor) and t.is_meta]
            small = all(t.untyped_storage().nbytes() <= MAX_BYTES for t in meta_outputs)
            # without any known values a result computed from a tensor is not known either
            blind = not self.values and isinstance(first, torch.Tensor) and first.is_meta
        if not meta_outputs:
            if func._schema.is_mutable:
                self._forget(t for t in _pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
            return output
        shadow = self._shadow(func, args, kwargs) if small and not blind else None
        if shadow is None and func is torch.ops.aten._is_all_true.default:
            shadow = torch.tensor(True)  # a distribution's check of its arguments
        if shadow is not None:
            for bare, value in zip(_pytree.tree_leaves(output), _pytree.tree_leaves(shadow)):
                if isinstance(bare, torch.Tensor) and storage(bare) not in self.values:
                    self._store(bare, value)
        elif func._schema.is_mutable:
            self._forget(meta_outputs)
        return output

    def _moved(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with all tensors on the meta device; None if they have one device.

        A tensor that the model's code holds in a global, or by `lru_cache`, has values already.
        """
        leaves, spec = _pytree.tree_flatten((args, dict(kwargs)))
        real = [t for t in leaves if isinstance(t, torch.Tensor) and t.ndim and not t.is_meta]
        if not real or not any(isinstance(t, torch.Tensor) and t.is_meta for t in leaves):
            return None
        meta_copies: dict[int, Any] = {id(tensor): tensor.to("meta") for tensor in real}
        self.store_values(real, [meta_copies[id(tensor)] for tensor in real])
        arguments = _pytree.tree_unflatten([meta_copies.get(id(t), t) for t in leaves], spec)
        return arguments[0], arguments[1]

    def _run_data_dependent(
        self, func: Any, args: Any, kwargs: Any, unknown: Callable[[Any], Any]
    ) -> Any:
        """Return the result of an operator whose shape depends on values."""
        shadow = self._shadow(func, args, kwargs)
        if shadow is None:
            numbered = self._known_positions(func, args)
            if numbered is not None:
                return torch.ops.aten.index.Tensor(args[0], numbered)
            if unknown(func):  # `other`: no element is set, instead of all
                return self._run_on_zeros(func, args, kwargs)
            try:
                with shapes.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
                    return func(*args, **kwargs)
            except NotImplementedError:  # torch has no meta implementation
                return self._run_on_zeros(func, args, kwargs)
        output = _pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), shadow)
        for bare, value in zip(_pytree.tree_leaves(output), _pytree.tree_leaves(shadow)):
            self._store(bare, value)
        return output

    def _run_on_zeros(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator for arguments of zeros."""
        zeros = lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t  # noqa: E731
        args, kwargs = _pytree.tree_map_only(Tensor, zeros, (args, dict(kwargs)))
        return _pytree.tree_map_only(Tensor, lambda t: t.to("meta"), func(*args, **kwargs))

    def _known_positions(self, func: Any, args: Any) -> list[Tensor | None] | None:
        """Return an operator's indices with known masks as positions, whose number is known.

        The values that are selected (logits where a mask of the batch is set) need not be known.
        """
        if func is torch.ops.aten.masked_select.default and args[0].shape == args[1].shape:
            masks = [args[1]]
        elif func is torch.ops.aten.index.Tensor:
            masks = args[1]
        else:
            return None
        indices: list[Tensor | None] = []
        for index in masks:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            mask = self.values_of(index) if index.is_meta else index
            if mask is None:
                return None
            indices += [position.to("meta") for position in mask.nonzero(as_tuple=True)]
        return indices

    def _shadow(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if is_random(func):  # not decided by the batch; the program's random numbers stay unused
            return None
        if any(type(a) in PLAIN and a.is_meta and storage(a) not in self.values for a in args):
            return None  # most operators of a model: decided without flattening arguments
        leaves, spec = _pytree.tree_flatten((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on_meta = any(t.is_meta for t in tensors) or any(
            isinstance(leaf, torch.device) and leaf.type == "meta" for leaf in leaves
        )
        if not on_meta:
            return None
        real = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                leaf = self.values_of(leaf)
                if leaf is None:
                    return None
            elif isinstance(leaf, torch.device) and leaf.type == "meta":
                leaf = torch.device("cpu")
            real.append(leaf)
        try:
            args, kwargs = _pytree.tree_unflatten(real, spec)
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return None

    def values_of(self, bare: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor on the meta device; None if they are not known."""
        flat = self.values.get(storage(bare))
        if flat is None:
            return None
        if flat.dtype != bare.dtype:
            flat = flat.view(bare.dtype)
        return flat.as_strided(bare.shape, bare.stride(), bare.storage_offset())

    def list_of(self, bare: torch.Tensor) -> Any:
        """Return a tensor's numbers as lists, unknown ones as `item` gives them; None: too many."""
        if (real := self.values_of(bare)) is not None:
            return self.on_read(real.tolist())
        if bare.numel() > MAX_UNKNOWN:
            return None
        self.listed = model_line()
        first = bare.flatten()[0].item() if bare.numel() else 0
        numbers = torch.full(bare.shape, first, dtype=bare.dtype, device="cpu")
        self.unknown_lists.append(numbers.tolist())
        return self.unknown_lists[-1]

    def is_unknown(self, numbers: Any) -> bool:
        """Return whether `list_of` made this list, without knowing its numbers."""
        return isinstance(numbers, list) and any(numbers is made for made in self.unknown_lists)

    def _store(self, bare: torch.Tensor, value: torch.Tensor) -> None:
        size = bare.untyped_storage().nbytes() // max(1, bare.element_size())
        if bare.untyped_storage().nbytes() > MAX_BYTES or bare.shape != value.shape:
            return
        flat = torch.zeros(size, dtype=value.dtype, device="cpu")
        flat.as_strided(bare.shape, bare.stride(), bare.storage_offset()).copy_(value)
        key, me = storage(bare), weakref.ref(self)  # no cycle: values are freed with `self`

        def gone(_: Any) -> None:  # another storage may get the same address
            if (owner := me()) is not None:
                owner.values.pop(key, None)
                owner._alive.pop(key, None)

        self.values[key] = flat
        self._alive[key] = weakref.ref(bare.untyped_storage(), gone)

    def _forget(self, written: Iterable[torch.Tensor]) -> None:
        for bare in written:
            self.values.pop(storage(bare), None)


@contextmanager
def without_values(
    batch: Mapping[str, Any], other: bool = False
) -> Iterator[tuple[dict[str, Any], MetaMode]]:
    """Context: yield the batch on the meta device, and a mode; new tensors are on meta, too.

    A model may read values: it gets those that the batch decides, and 0 (or nearly) for others.
    With `other` it gets other values.
    """
    inputs = meta_batch(dict(batch))
    values = MetaMode(dict(batch), inputs, other)
    with values, LiteralsMode(values.constants), torch.device("meta"):
        yield inputs, values


@contextmanager
def on_meta(real: Any, meta: Any) -> Iterator[MetaMode]:
    """Context in which models may read values: they get those that the batch decides.

    `real` and `meta` are the models' arguments, with and without values.
    """
    mode = MetaMode(real, meta)
    with mode, LiteralsMode(mode.constants):
        yield mode


@dataclass(eq=False)
class LiteralsMode(TorchFunctionMode):
    """Mode that stores the numbers of literals in `constants`: on the meta device they are lost.

    Literals become tensors below dispatch: the arguments of `torch.tensor`, and lists of indices.
    The conversions back are below dispatch, too: `tolist`, and `format` of a scalar. Sizes of parts
    that are not known are replaced: one part is the whole tensor, the others are empty.
    """

    constants: KnownValues

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        reads = func in READING_CALLS and args[0].is_meta
        if reads and (value := self._read(func, args)) is not None:
            return value
        if func in INDEXING_CALLS and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            literal = tuple(self._tensor(i) if isinstance(i, list) else i for i in index)
            args = (args[0], literal, *args[2:])
        if func in SPLITTING_CALLS and len(args) > 1 and self.constants.is_unknown(args[1]):
            args = (args[0], _add_up(*args, **kwargs), *args[2:])
        output = func(*args, **kwargs)
        if func in TENSOR_CALLS and output.is_meta and _plain(args[0]):
            self.constants.store_values(func(*args, **{**kwargs, "device": "cpu"}), output)
        return output

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the numbers of a tensor; None if they are not known: then torch raises."""
        if func is torch.Tensor.tolist:
            return self.constants.list_of(args[0])
        return format(args[0].item(), *args[1:]) if args[0].ndim == 0 else None

    def _tensor(self, numbers: list[Any]) -> Any:
        if not _plain(numbers):
            return numbers
        real = torch.tensor(numbers, device="cpu")
        bare = real.to("meta")
        self.constants.store_values(real, bare)
        return bare


INDEXING_CALLS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
TENSOR_CALLS = (torch.tensor, torch.as_tensor)
SPLITTING_CALLS = (torch.split, torch.Tensor.split, torch.Tensor.split_with_sizes)
READING_CALLS = (torch.Tensor.tolist, torch.Tensor.__format__)


def _add_up(value: Tensor, sizes: list[int], dim: int = 0) -> list[int]:
    """Return sizes of parts that add up, for sizes that are not known."""
    whole = len(sizes) - 1 if any(sizes) else 0
    return [value.shape[dim] if part == whole else 0 for part in range(len(sizes))]


def _plain(data: Any) -> bool:
    return all(isinstance(value, int | bool) for value in _pytree.tree_leaves(data))


class MetaMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which a model that reads values runs on meta tensors.

    `real` and `meta` are the model's arguments, whose values are known; others are 0 (or nearly).
    `other`: every value that is read, known or not, is replaced with another one.
    `drew` is called for every random operator before it runs, `ran` returns every result.
    """

    def __init__(self, real: Any = (), meta: Any = (), other: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants = KnownValues(on_read=self._tell)
        self.constants.store_values(real, meta)
        self.other = other
        self.read_unknown = False  # whether an unknown value was read
        self.read_known = False  # whether a known value was read
        self.random = False  # whether a random operator has run
        self.drew: Callable[[Any, Any, Mapping[str, Any]], None] | None = None
        self.ran: Callable[[Any, Any, Mapping[str, Any], Any], Any] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_random(func):
            self.random = True
            if self.drew is not None:
                self.drew(func, args, kwargs or {})
        output = self.constants.run(func, args, kwargs or {}, self._zero)
        return output if self.ran is None else self.ran(func, args, kwargs or {}, output)

    def _zero(self, func: Any) -> int:
        self.read_unknown = True
        return int(self.other)

    def _tell(self, value: Any) -> Any:
        self.read_known = True
        return _pytree.tree_map(_another, value) if self.other else value


def _another(value: float) -> float:
    """Return another number of the same type."""
    return type(value)(not value)


@cache
def is_random(func: Any) -> bool:
    """Return whether an operator may draw random numbers; its arguments may still prevent it."""
    return torch.Tag.nondeterministic_seeded in func.tags


def storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, unique while it lives; works on meta too."""
    return int(tensor.untyped_storage()._cdata)


def name_of(func: Any) -> str:
    """Return a readable name of a torch function or tensor method."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):
        return getattr(func.__self__, "__name__", name)
    return name


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a pytree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
