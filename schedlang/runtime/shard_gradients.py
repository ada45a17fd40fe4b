"""Follow gradients of shards in loops of a user: no number of one rank's part may change them.

After a step, `.grad` of a shard is a `GradientPart`: it computes as a tensor. What a loop reduces
it to (a norm, a mean, a largest value), and what it computes with that, is a `PartNumber`, on each
rank another one. Where it is written into a gradient or a shard, ranks would not train as the
original does: refused (S622), or warned of where a rank may have all that was reduced. Where it
leaves torch, as for a log, a warning says what it is. One that went through a collective is taken.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.runtime import scope
from schedlang.runtime.adapters.torch_tensor import in_backward_pass
from schedlang.runtime.held_parts import held_with, hold_alike
from schedlang.runtime.loop_terms import shard_name, shards
from schedlang.runtime.part_reductions import (
    Dims,
    dims_after,
    is_product,
    product_dims,
    reduced_dims,
)

_VIEWS = ("H", "T", "data", "mH", "mT", "real")  # attributes that are elements as well
# draws of the original for a tensor are other ones than those of ranks for their parts
_RANDOM = ("bernoulli", "exponential", "normal", "rand", "randint", "randn", "random", "uniform")
_JOINS = ("cat", "concat", "concatenate", "hstack", "stack")
_MARKED = "_schedlang_marked"  # of a module that runs: the parameters that were followed before
# modules between a call of a loop and the check of it
_CALLING = (__name__, "schedlang.runtime.adapters.torch_distributed")
_DETACHING = ("data", "detach", "__deepcopy__")
_DIMS = "_schedlang_part_dims"  # of parameters: the dims of a shard
_warned: dict[Any, Any] = {}  # the lines that were warned of, as `warnings` notes them
_LEAVING = ("item", "tolist", "__float__", "__format__", "__repr__", "__bool__", "__int__")
_TO_NUMPY = ("numpy", "__array__")
_OVERWRITING = ("zero_", "fill_", "copy_")
_eagerly: Any = torch.compiler.disable


class _Followed(Tensor):
    """A tensor whose uses are seen; copies and files of it are plain tensors."""

    origin: str

    @classmethod
    @_eagerly  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            kwargs, name = kwargs or {}, _name_of(func)
            if name is None or _is_collective(func) or _is_of_library(types):
                if name and name.endswith("_"):
                    note_collective(args[:1])
                return func(*args, **kwargs)
            operands = [*_tensors((*args, *kwargs.values()))]
            targets = [*_tensors(_written(func.__name__, name, args, kwargs))]
            written = {id(target) for target in targets}
            numbers = [v for v in operands if isinstance(v, PartNumber) and v.is_own()]
            sources = [number for number in numbers if id(number) not in written]
            parts: list[Any] = [value for value in operands if _is_read(value, name)]
            for target in targets if sources else ():
                if shard := _shard_behind(target):
                    _refuse(sources, shard)
            leaves = (
                name in _LEAVING + _TO_NUMPY or not written and _is_new_shard(operands, numbers)
            )
            if numbers and leaves:
                _warn(numbers[0].reduction, numbers[0].origin)
            elif parts and name in _TO_NUMPY:
                _warn(name, parts[0].origin)
            result = func(*args, **kwargs)
            for target in targets:
                _note_write(target, sources, name)
            if name.removesuffix("_").removesuffix("_like") in _RANDOM:
                return _drawn(result, name, [v for v in operands if isinstance(v, GradientPart)])
            if written or name.endswith("_like") or name.startswith("new_"):
                return result
            return _mark(result, operands, _marking(func, name, parts, numbers, (args, kwargs)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class GradientPart(_Followed):
    """The gradient of a rank's shard, or what a loop has made of its elements.

    origin    of the parameter
    dims      the dims along which other ranks hold the rest; None: not known
    elements  how many the shard has
    """

    dims: Dims | None
    elements: int


@dataclass
class _Reduction:
    """The way a number was made; numbers of one storage share it.

    name    of the function that reduced a part
    origin  of the parameter
    surely  whether it is certain that other ranks have other numbers
    own     whether no collective has written the number since
    """

    name: str
    origin: str
    surely: bool
    own: bool = True


class ParameterPart(GradientPart, nn.Parameter):
    """A rank's shard of a parameter, between the steps of a loop that may change it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]


class PartNumber(_Followed):
    """A number, or numbers, to which a rank has reduced its part, or that it made of such.

    history   how, from which part
    computed  its local value, as torch has computed it here
    """

    history: _Reduction
    computed: Tensor

    @property
    def reduction(self) -> str:
        """Return the function that reduced the part."""
        return self.history.name

    def is_own(self) -> bool:
        """Return whether the number is this rank's alone.

        It is not if a collective of torch was seen to write it, or if its value is another than
        torch has computed: what writes it unseen is a collective, too.
        """
        if not self.history.own:
            return False
        return torch.equal(_local(self).nan_to_num(), self.computed.nan_to_num())


class SlicedPart(GradientPart, DTensor):
    """The same of a shard that `zero` slices: torch knows of the slices only."""

    def full_tensor(self, **options: Any) -> Tensor:
        """Return the rank's part, which torch takes for the full tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            full = super().full_tensor(**options)
            if _is_of_library((type(self),)) or not _is_read(self, "full_tensor"):
                return full
            return _as_part(full, self.origin, self.dims, self.elements)

    def to_local(self, **options: Any) -> Tensor:
        """Return the slice of the part, which is split along the dims of both."""
        with torch._C.DisableTorchFunctionSubclass():
            local = super().to_local(**options)
            if _is_of_library((type(self),)) or not _is_read(self, "to_local"):
                return local
            sliced = {p.dim for p in self.placements if p.is_shard()}  # type: ignore[attr-defined]
            dims = None if self.dims is None else (*sorted({*self.dims, *sliced}),)
            return _as_part(local, self.origin, dims, local.numel())


class SlicedNumber(PartNumber, DTensor):
    """A number to which slices of a part are reduced."""

    def full_tensor(self, **options: Any) -> Tensor:
        """Return the number of all slices of the rank's part."""
        with torch._C.DisableTorchFunctionSubclass():
            return _number(super().full_tensor(**options), [self.history])


def note_dims(parameter: Tensor, dims: tuple[int, ...]) -> None:
    """Note along which dims of a shard other ranks hold the rest; () if there are none."""
    setattr(parameter, _DIMS, dims)


def mark_gradients(parameters: Iterable[Tensor] | None = None) -> None:
    """Mark the gradients of parameters that are shards; without parameters, of all programs.

    Nothing is marked within a step or a backward.
    """
    if scope.current() is not None or in_backward_pass():
        return
    for parameter in shards() if parameters is None else parameters:
        gradient, dims = parameter.grad, vars(parameter).get(_DIMS)
        if gradient is None or type(gradient) not in (Tensor, DTensor):
            continue
        if dims and not gradient.requires_grad:
            name = shard_name(parameter) or ""
            parameter.grad = _as_part(gradient, name, dims, gradient.numel())


def mark_parameters(parameters: Iterable[Tensor]) -> None:
    """Follow what a loop computes of shards from now on, until a forward, backward or step."""
    for parameter in parameters:
        dims: Any = vars(parameter).get(_DIMS)
        if dims and type(parameter) in (nn.Parameter, DTensor):
            sliced = isinstance(parameter, DTensor)
            parameter.__class__ = SlicedPart if sliced else ParameterPart
            part: Any = parameter
            part.origin, part.dims = shard_name(parameter) or "", dims
            part.elements = parameter.numel()


def unmark_parameters() -> list[nn.Parameter]:
    """Make shards plain parameters again; return those that were marked."""
    marked: list[nn.Parameter] = []
    for parameter in shards():
        if not isinstance(parameter, GradientPart):
            continue
        marked.append(parameter)
        kind: Any = DTensor if isinstance(parameter, DTensor) else nn.Parameter
        parameter.__class__ = kind
    return marked


def follow_between_forwards(module: nn.Module) -> None:
    """Let a module that a loop calls compute with plain parameters."""
    for part in module.modules():
        if part is module or any(shard_name(parameter) for parameter in part.parameters()):
            part.register_forward_pre_hook(_begin_call, prepend=True)
            part.register_forward_hook(_end_call, always_call=True)


def _begin_call(module: nn.Module, *unused: object) -> None:
    if not torch.compiler.is_compiling():
        vars(module).setdefault(_MARKED, []).append(unmark_parameters())


def _end_call(module: nn.Module, *unused: object) -> None:
    if not torch.compiler.is_compiling() and vars(module).get(_MARKED):
        mark_parameters(vars(module)[_MARKED].pop())


def unmark_gradients(parameters: Iterable[Tensor]) -> None:
    """Make gradients plain tensors again, for an optimizer, which is checked itself.

    Raises Refusal S622 for one that was made from a number of this rank's part.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, PartNumber) and gradient.is_own():
            _refuse([gradient], shard_name(parameter) or gradient.history.origin)
        if isinstance(gradient, DTensor) and isinstance(gradient, _Followed):
            gradient.__class__ = DTensor  # type: ignore[assignment]
        elif isinstance(gradient, _Followed):
            parameter.grad = gradient.as_subclass(Tensor)


def note_collective(results: Iterable[Any], name: str = "", ranks: Iterable[int] = ()) -> None:
    """Note that a collective writes tensors: they are no more what this rank has reduced alone.

    Raises Refusal S622 for one that mixes the parts of a parameter, or of its gradient, that ranks
    hold; a copy of a part that is mixed so is a number.
    """
    for value in _tensors(results):
        if isinstance(value, PartNumber):
            value.history.own = False
            continue
        ranks = [*ranks]
        if not ranks or _is_called_by_library():
            return
        holder = held_with(partial(_is_alias, value))
        if holder is not None and not hold_alike(holder, ranks):
            shard = shard_name(holder) or str(getattr(value, "origin", ""))
            raise _mixing_refusal(name, shard)
        if holder is not None:
            return
        if type(value) in (GradientPart, SlicedPart) and len(ranks) > 1:
            part: Any = value
            _number(value, [_Reduction(name, part.origin, False)])


def note_gather(results: Iterable[Any], *unused: object) -> None:
    """Note that a gather writes tensors: they are parts no more."""
    for value in _tensors(results):
        if isinstance(value, _Followed):
            value.__class__ = DTensor if isinstance(value, DTensor) else Tensor  # type: ignore


def _is_of_library(types: Iterable[type]) -> bool:
    """Return whether schedlang itself calls a function of torch on parameters."""
    if not any(issubclass(kind, (ParameterPart, SlicedPart)) for kind in types):
        return False
    return _is_called_by_library()


def _is_called_by_library() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in _CALLING and module.partition(".")[0] != "torch":
            return bool(module.startswith("schedlang."))
        frame = frame.f_back
    return False


def _is_read(value: Any, name: str) -> bool:
    """Return whether a call reads a part outside of a graph: terms of losses are checked apart."""
    if not isinstance(value, GradientPart):
        return False
    return name in _DETACHING or not (value.requires_grad and torch.is_grad_enabled())


def _as_kind(value: Tensor, kind: type[Any], sliced: type[Any]) -> Any:
    """Return a tensor as one of a class, on the same storage; a DTensor becomes one of `sliced`."""
    if not isinstance(value, DTensor):
        return value.as_subclass(kind)
    value.__class__ = sliced
    return value


def _local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value.as_subclass(Tensor)


def _as_part(value: Tensor, name: str, dims: Dims | None, elements: int) -> GradientPart:
    part: GradientPart = _as_kind(value, GradientPart, SlicedPart)
    part.origin, part.dims, part.elements = name, dims, elements
    return part


def _mixing_refusal(collective: str, shard: str) -> Refusal:
    of = f" of `{shard}`" if shard else ""
    return Refusal.of(
        "S622",
        f"`{collective}` mixes different parts{of}: each rank holds its own",
        notes=("some of the ranks that take part hold other rows or columns",),
        helps=(
            "`train_step` sums gradients over ranks; replicas stay equal by themselves",
            "`program.state_dict()` and `program.gradients()` have full values",
        ),
    ).at(python_span())


def _number(value: Tensor, histories: list[_Reduction], sources: Iterable[Tensor] = ()) -> Tensor:
    """Return a tensor as a number that was made as others, or by a reduction."""
    first = histories[0]
    if not any(_storage(value) == _storage(source) for source in sources):
        surely = any(reduction.surely for reduction in histories)
        first = _Reduction(first.name, first.origin, surely, any(other.own for other in histories))
    number: PartNumber = _as_kind(value, PartNumber, SlicedNumber)
    number.origin, number.history = first.origin, first
    number.computed = _local(number).detach().clone()
    return number


def _drawn(result: Any, name: str, parts: list[GradientPart]) -> Any:
    """Return random numbers in the shape of a part as numbers of a rank; warn of a shard's."""
    if result is not None and any(result is part for part in parts):
        if _shard_behind(result):
            _warn(name, parts[0].origin)
    elif parts and type(result) in (Tensor, DTensor):
        return _number(result, [_Reduction(name, parts[0].origin, False)])
    return result


def _marking(
    func: Any, name: str, parts: list[GradientPart], numbers: list[PartNumber], call: Any
) -> Callable[[Tensor], Tensor]:
    """Return what makes a result of a call a part, or a number."""
    reduction = _reduced(name, parts, *call)
    histories = [*([reduction] if reduction else ()), *(number.history for number in numbers)]
    if histories:
        return partial(_number, histories=histories, sources=numbers)
    if not parts:
        return lambda value: value

    of_shape = {part.shape: part for part in reversed(parts) if part.dims is not None}

    def as_part(value: Tensor) -> Tensor:
        part = of_shape.get(value.shape, parts[0])
        if is_product(name):
            split = {id(part): part.dims for part in parts}
            dims = product_dims(name, call[0], value, lambda v: split.get(id(v), ()))
        else:
            dims = dims_after(func, name, part, part.dims, value, call)
        joined = sum(each.elements for each in parts)
        return _as_part(value, part.origin, dims, joined if name in _JOINS else part.elements)

    return as_part


def _mark(result: Any, operands: list[Tensor], mark: Callable[[Tensor], Tensor]) -> Any:
    """Mark a tensor, or those of a list or tuple, that are no operands."""
    known = {id(value) for value in operands}

    def marked(value: Any) -> Any:
        if type(value) in (Tensor, DTensor) and id(value) not in known:
            return mark(value)
        if isinstance(value, (list, tuple)):
            values = [marked(each) for each in value]
            is_named = hasattr(value, "_fields")
            return type(value)(*values) if is_named else type(value)(values)
        return value

    return marked(result)


def _name_of(func: Any) -> str | None:
    """Return the name of a function or attribute; None for what makes and reads no elements."""
    name = str(func.__name__)
    if name in ("__get__", "__set__", "__delete__"):
        owner = func.__self__
        attribute = getattr(owner, "__name__", "data")  # torch has no other property of Python
        is_seen = attribute in _VIEWS if name == "__get__" else attribute == "data"
        return attribute if is_seen else None
    return None if func is Tensor.as_subclass else name


def _is_collective(func: Any) -> bool:
    """Return whether a function is torch's for collectives; an overload of one has a namespace."""
    places = (getattr(func, place, "") for place in ("namespace", "__module__"))
    return any("c10d" in str(place) for place in places)


def _written(called: str, name: str, args: tuple[Any, ...], kwargs: Any) -> Iterator[Any]:
    """Yield the tensors, or lists of them, that a call writes into."""
    if "out" in kwargs:
        yield kwargs["out"]
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    if args and (in_place or operator or called in ("__setitem__", "__set__")):
        yield args[0]


def _note_write(target: Tensor, sources: list[PartNumber], name: str) -> None:
    """Note numbers that were written: a number has them now, and a tensor of a loop becomes one."""
    if isinstance(target, PartNumber):
        keeps = target.history.own and not name.endswith(_OVERWRITING)
        target.history.own = bool(sources) or keeps
        target.history.surely |= any(source.history.surely for source in sources)
        target.computed = _local(target).detach().clone()
    elif sources and type(target) in (Tensor, DTensor, GradientPart, SlicedPart):
        if target.requires_grad or _shard_behind(target):
            return
        target.__class__ = SlicedNumber if isinstance(target, DTensor) else PartNumber
        number: Any = target
        first = sources[0].history
        surely = any(source.history.surely for source in sources)
        number.origin, number.history = first.origin, _Reduction(first.name, first.origin, surely)
        number.computed = _local(target).detach().clone()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _storage(value: Tensor) -> int:
    try:
        return int(_local(value).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a tensor of a transform has none
        return -id(value)


def _is_alias(a: Tensor, b: Tensor) -> bool:
    return _storage(a) == _storage(b)


def _shard_behind(target: Tensor) -> str:
    """Return the name of the shard that a tensor is, or whose gradient, by storage; "" for none."""
    if name := shard_name(target):
        return name
    storage = _storage(target)
    for parameter in shards():
        if vars(parameter).get(_DIMS):
            held = (value for value in (parameter, parameter.grad) if value is not None)
            if any(_storage(value) == storage for value in held):
                return shard_name(parameter) or ""
    return ""


def _reduced(
    name: str, parts: Iterable[GradientPart], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Reduction | None:
    """Return the first reduction of a part along a dim that is split over ranks; sure ones first.

    It is not sure where a loop has cut or reshaped the part, so that a rank may have all.
    """
    unsure = None
    for part in parts:
        dims = reduced_dims(name, part, args, kwargs)
        if dims is None or dims and part.dims is None:
            if dims and len(dims) == part.dim() and part.numel() >= part.elements:
                return _Reduction(name, part.origin, True)
            unsure = unsure or _Reduction(name, part.origin, False)
        elif part.dims is not None and any(dim in part.dims for dim in dims):
            return _Reduction(name, part.origin, True)
    return unsure


def _is_new_shard(operands: list[Tensor], numbers: list[PartNumber]) -> bool:
    """Return whether a call makes new values of a shard from numbers, as for `.data =`."""
    shapes = {number.shape for number in numbers}
    plain = (v for v in operands if not isinstance(v, _Followed) and v.shape in shapes)
    return any(_shard_behind(value) for value in plain)


def _refuse(numbers: list[PartNumber], shard: str) -> None:
    """Raise Refusal S622 for what changes a shard; warn where the number may be the whole."""
    surely = next((number for number in numbers if number.history.surely), None)
    if surely is not None:
        raise _part_refusal(surely, shard)
    _warn(numbers[0].reduction, numbers[0].origin)


def _warn(reduction: str, origin: str) -> None:
    """Warn, once for each line of the user's, that a number is of this rank's part only."""
    span = python_span()
    text = (
        f"`{reduction}` is of this rank's shard of `{origin}` only: other ranks have"
        " others. `program.grad_norm` is the norm of all gradients; `program.gradients()` and"
        " `program.state_dict()` have full tensors"
    )
    warnings.warn_explicit(text, UserWarning, span.source.name, span.line, registry=_warned)


def _part_refusal(number: PartNumber, shard: str) -> Refusal:
    return Refusal.of(
        "S622",
        f"`{shard}` would be changed by a number of this rank's part only",
        notes=(
            f"`{number.reduction}` reads this rank's shard of `{number.origin}`; other ranks have"
            " other shards and numbers",
        ),
        helps=(
            "`build(clip=1.0)`: a step clips by the norm of all gradients",
            "`program.grad_norm` is that norm, `program.gradients()` has full gradients",
            "`build(optimizer=lambda named: ...)`: an optimizer that reads full tensors gets them",
            "`program.state_dict()` has full weights, and `load_state_dict` takes them",
            "or all-reduce the number over the ranks that share the tensor",
        ),
    ).at(python_span())
