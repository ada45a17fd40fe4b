"""Lazy tensors of files: operators cut, join and transpose them before any value is read.

The loader of a library gets them in place of values. Each result knows the boxes of files from
which a box of its elements comes, and reads only these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlang.ir import pytree
from schedlang.runtime.checkpointing.index import DTYPES
from schedlang.runtime.device import HOST
from schedlang.runtime.redistribution.sharding import TensorSlice, box_slice, overlaps

Box = tuple[tuple[int, int], ...]  # begin and end of each dim
Read = Callable[[Box], Tensor]
_aten = torch.ops.aten
_PLACES = count(1)

# the dtypes of safetensors by the names that checkpoints use
KINDS = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32"},
    **{"I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"},
    **{"U16": "uint16", "U32": "uint32", "U64": "uint64"},
}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file."""

    file: Path
    name: str
    kind: str  # dtype in the file
    shape: tuple[int, ...]
    open_: dict[Path, Any] = field(repr=False, compare=False)  # open files

    def read(self, box: Box) -> Tensor:
        """Read a box of its elements."""
        from safetensors import safe_open

        if self.file not in self.open_:
            self.open_[self.file] = safe_open(self.file, "pt")
        file = self.open_[self.file]
        if not self.shape:
            return file.get_tensor(self.name)  # type: ignore[no-any-return]
        value = file.get_slice(self.name)[tuple(slice(start, stop) for start, stop in box)]
        return value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FakeStorage:
    """A fake storage of a lazy tensor: its address and its bytes."""

    place: int
    size: int

    def data_ptr(self) -> int:
        """Return an address that no other tensor has."""
        return self.place

    def nbytes(self) -> int:
        """Return the bytes of all elements."""
        return self.size


class LazyTensor(Tensor):
    """A tensor whose elements are read box by box, by `part`; operators return further lazy
    tensors.

    Each has a fake address of its own, for libraries that look for ties and sizes of storages.
    """

    part: Read
    leaves: tuple[FileTensor, ...]
    place: int

    @staticmethod
    def __new__(
        cls, part: Read, shape: Sequence[int], dtype: torch.dtype, leaves: tuple[FileTensor, ...]
    ) -> LazyTensor:
        tensor: LazyTensor = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=HOST
        )
        tensor.part, tensor.leaves = part, leaves
        tensor.place = next(_PLACES) << 40  # farther apart than any tensor is long
        return tensor

    def data_ptr(self) -> int:
        """Return the fake address."""
        return self.place

    def untyped_storage(self) -> Any:
        """Return the fake storage."""
        return FakeStorage(self.place, self.numel() * self.element_size())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<stored {self.dtype} {[*self.shape]} of {len(self.leaves)} tensors>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _lazy_result(func, args, dict(kwargs or {}))


def lazy_tensor(leaf: FileTensor) -> LazyTensor:
    """Return a tensor of a file as a lazy tensor; of bytes if torch lacks its dtype."""
    return LazyTensor(leaf.read, leaf.shape, DTYPES[KINDS.get(leaf.kind, "uint8")], (leaf,))


def read_box(tensor: LazyTensor, corner: Sequence[int], size: Sequence[int]) -> Tensor:
    """Read the elements of a box."""
    return tensor.part(tuple((start, start + n) for start, n in zip(corner, size)))


def read_part(tensor: LazyTensor, part: Tensor, cells: TensorSlice, limit: int = 1 << 62) -> None:
    """Read a rank's part in place, `limit` bytes of the full tensor at a time."""
    shape = tuple(tensor.shape)
    rows = max(limit // max(math.prod(shape[1:]) * part.element_size(), 1), 1)
    for row in range(0, shape[0], rows) if shape else (0,):
        corner, size = ((row, *[0] * (len(shape) - 1)), (rows, *shape[1:])) if shape else ((), ())
        for box in overlaps(box_slice(corner, size), cells):
            start = [o + c for o, c in zip(box.here, corner)]
            box.view(part, box.there).copy_(read_box(tensor, start, box.size))


def _lazy_result(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the lazy result of an operator."""
    lazy = [arg for arg in pytree.tree_leaves((args, kwargs)) if isinstance(arg, LazyTensor)]
    leaves = tuple(dict.fromkeys(leaf for arg in lazy for leaf in arg.leaves))

    def on_meta(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    device_option = {"device": "meta"} if kwargs.get("device") is not None else {}
    shapes = func(
        *pytree.tree_map(on_meta, args), **pytree.tree_map(on_meta, kwargs | device_option)
    )
    rule = _RULES.get(func.overloadpacket)

    def made(number: int | None, template: Tensor) -> LazyTensor:
        read = rule(number, template, args, kwargs) if rule is not None else None
        read = read or partial(_read_full, func, args, kwargs, number)
        result = LazyTensor(read, template.shape, template.dtype, leaves)
        result.place = _result_address(func.overloadpacket, args, result.place)
        return result

    if isinstance(shapes, Tensor):
        return made(None, shapes)
    return type(shapes)(made(number, template) for number, template in enumerate(shapes))


def _result_address(operator: Any, args: Any, address: int) -> int:
    """Return the address of a result: inside its source for views, as libraries compare ends."""
    if operator in (_aten.view, _aten.alias, _aten.detach):
        return int(args[0].place)
    if operator is _aten.select:
        source, dim, index = args
        step = math.prod(source.shape[dim % source.ndim + 1 :]) * source.element_size()
        return int(source.place + index % source.shape[dim] * step)
    return address


def _read_full(func: Any, args: Any, kwargs: Any, number: int | None, box: Box) -> Tensor:
    """Return a box of the result of any operator, computed on full tensors."""

    def read(value: Any) -> Any:
        return value.part(full_box(value.shape)) if isinstance(value, LazyTensor) else value

    result = func(*pytree.tree_map(read, args), **pytree.tree_map(read, kwargs))
    return crop(result if number is None else result[number], box)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return tuple((0, size) for size in shape)


def crop(value: Tensor, box: Box) -> Tensor:
    """Return the elements of a box."""
    return value[tuple(slice(start, stop) for start, stop in box)] if box else value


def _replace_span(box: Box, dim: int, *spans: tuple[int, int]) -> Box:
    """Return the box with other spans in place of that of one dim."""
    return (*box[:dim], *spans, *box[dim + 1 :])


# -- operators that only move elements: for each, the function that reads a box of its result ------
# `number`: index of the result among several; `like` has its shape and dtype


def _copy_rule(number: int | None, template: Tensor, args: Any, kwargs: Any) -> Read:
    if args[0].dtype == template.dtype:
        return args[0].part  # type: ignore[no-any-return]
    return lambda box: args[0].part(box).to(template.dtype)


def _permute_rule(number: int | None, template: Tensor, args: Any, kwargs: Any) -> Read:
    source, *dims = args
    order = list(range(source.ndim))
    if len(dims) == 2:
        a, b = dims
        order[a], order[b] = order[b], order[a]
    else:
        order = [dim % source.ndim for dim in dims[0]] if dims else order[::-1]

    def read(box: Box) -> Tensor:
        spans = {dim: span for dim, span in zip(order, box)}
        return source.part(tuple(spans[d] for d in range(source.ndim))).permute(order)  # type: ignore[no-any-return]

    return read


def _slice_rule(number: int | None, template: Tensor, args: Any, kwargs: Any) -> Read | None:
    defaults: tuple[Any, ...] = (0, None, None, 1)
    source, dim, start, end, step = tuple(args) + defaults[len(args) - 1 :]
    if step != 1:
        return None
    offset = slice(start, end).indices(source.shape[dim])[0]
    return _read_shifted(source, dim % source.ndim, offset)


def _read_shifted(source: LazyTensor, dim: int, offset: int) -> Read:
    return lambda box: source.part(
        _replace_span(box, dim, (box[dim][0] + offset, box[dim][1] + offset))
    )


def _split_rule(number: int | None, template: Tensor, args: Any, kwargs: Any) -> Read:
    source, sizes = args[:2]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % source.ndim
    offset = (number or 0) * sizes if isinstance(sizes, int) else sum(sizes[:number])
    return _read_shifted(source, dim, offset)


def _read_selected(source: LazyTensor, dim: int, index: int) -> Read:
    inner = dim % source.ndim
    return lambda box: source.part((*box[:inner], (index, index + 1), *box[inner:])).squeeze(inner)


def _unbind_rule(number: int | None, template: Tensor, args: Any, kwargs: Any) -> Read:
    return _read_selected(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), number or 0)


def _select_rule(number: int | None, template: Tensor, args: Any, kwargs: Any) -> Read:
    source, dim, index = args
    return _read_selected(source, dim, index % source.shape[dim])


def _cat_rule(number: int | None, template: Tensor, args: Any, kwargs: Any) -> Read:
    parts = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % template.ndim
    ends = [0, *accumulate(part.shape[dim] for part in parts)]

    def read(box: Box) -> Tensor:
        low, high = box[dim]
        spans = ((max(low, offset), min(high, end), offset) for offset, end in zip(ends, ends[1:]))
        values = [
            _read(part, _replace_span(box, dim, (start - offset, stop - offset)))
            for part, (start, stop, offset) in zip(parts, spans)
            if start < stop
        ]
        return torch.cat(values, dim) if values else torch.empty(_size(box), dtype=template.dtype)

    return read


def _stack_rule(number: int | None, template: Tensor, args: Any, kwargs: Any) -> Read:
    parts = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % template.ndim

    def read(box: Box) -> Tensor:
        values = [_read(part, _replace_span(box, dim)) for part in parts[slice(*box[dim])]]
        return torch.stack(values, dim) if values else torch.empty(_size(box), dtype=template.dtype)

    return read


def _read(tensor: Tensor, box: Box) -> Tensor:
    return tensor.part(box) if isinstance(tensor, LazyTensor) else crop(tensor, box)


def _size(box: Box) -> list[int]:
    return [stop - start for start, stop in box]


def _view_rule(number: int | None, template: Tensor, args: Any, kwargs: Any) -> Read | None:
    """Return the rule for a view that splits or merges dims: read the touched rows, then crop."""
    source = args[0]
    if source.dtype != template.dtype or template.numel() == 0:
        return None
    groups = list(_groups(tuple(source.shape), tuple(template.shape)))

    def read(box: Box) -> Tensor:
        if 0 in _size(box):
            return torch.empty(_size(box), dtype=template.dtype)
        source_box: list[tuple[int, int]] = []
        flat, flat_box, shape, result_box = [], [], [], []
        for inner, outer, dim in groups:
            spans = box[dim : dim + len(outer)]
            (start, stop), row = (spans[0], math.prod(outer[1:])) if outer else ((0, 1), 1)
            step = math.prod(inner[1:])
            first, last = (start * row) // step, -(-(stop * row) // step)
            source_box += [(first, last), *full_box(inner[1:])] if inner else []
            flat.append((last - first) * step)
            flat_box.append((start * row - first * step, stop * row - first * step))
            shape += [stop - start, *outer[1:]] if outer else []
            result_box += [(0, stop - start), *spans[1:]] if outer else []
        value = crop(source.part(tuple(source_box)).reshape(flat), tuple(flat_box))
        return crop(value.reshape(shape), tuple(result_box))

    return read


def _groups(
    a: tuple[int, ...], b: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield the shortest runs of dims with equal numbers of elements, and their start in `b`."""
    i = j = 0
    while i < len(a) or j < len(b):
        start, begin = i, j
        dim_a, dim_b = a[i : i + 1], b[j : j + 1]
        if 1 in (*dim_a, *dim_b) and dim_a != dim_b:  # a dim of size one that is added or removed
            i, j = i + (dim_a == (1,)), j + (dim_a != (1,))
            yield a[start:i], b[begin:j], begin
            continue
        i, j = min(i + 1, len(a)), min(j + 1, len(b))
        while (size_a := math.prod(a[start:i])) != (size_b := math.prod(b[begin:j])):
            i, j = (i + 1, j) if size_a < size_b else (i, j + 1)
        yield a[start:i], b[begin:j], begin


_RULES: dict[Any, Callable[[int | None, Tensor, Any, Any], Read | None]] = {
    **dict.fromkeys((_aten.detach, _aten.alias, _aten.clone, _aten._to_copy), _copy_rule),
    **dict.fromkeys((_aten.transpose, _aten.permute, _aten.t), _permute_rule),
    **dict.fromkeys((_aten.split, _aten.split_with_sizes), _split_rule),
    **dict.fromkeys((_aten.view, _aten._unsafe_view, _aten.squeeze, _aten.unsqueeze), _view_rule),
    _aten.slice: _slice_rule,
    _aten.unbind: _unbind_rule,
    _aten.select: _select_rule,
    _aten.cat: _cat_rule,
    _aten.stack: _stack_rule,
}
