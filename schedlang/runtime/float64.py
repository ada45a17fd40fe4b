"""A function mode under which a model computes in float64, although its code casts to other dtypes.

Proofs run the original and the program under `Float64`. Models cast: losses and norms to float32,
tables of positions to the dtype of a config. In a float64 run such a cast leaves an error of 1e-7,
a hundred times the tolerance. Under `Float64` every float dtype becomes float64 (complex64 becomes
complex128), and so does the default dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.ir.module_copies import copy_module
from schedlang.runtime.modes import ATTRIBUTE_ACCESS, AmbientMode

FLOAT64_DTYPES: dict[Any, torch.dtype] = {
    dtype: torch.complex128 if dtype.is_complex else torch.float64
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_complex or dtype.is_floating_point)
}
M = TypeVar("M", bound=nn.Module)
_LEGACY = {
    f"torch.{where}{kind}Tensor": f"torch.{where}DoubleTensor"
    for where in ("", "cuda.")
    for kind in ("Float", "Half", "BFloat16")
}
_CASTS = {
    Tensor.float: torch.float64,
    Tensor.half: torch.float64,
    Tensor.bfloat16: torch.float64,
    getattr(Tensor, "cfloat"): torch.complex128,  # noqa: B009  (torch's stubs lack them)
    getattr(Tensor, "chalf"): torch.complex128,  # noqa: B009
}
_LIKE = {Tensor.to, Tensor.type_as}  # functions that take their dtype from another tensor


_REQUIRE = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class Float64(AmbientMode):
    """Turn casts to a lower float into float64; replace functions that have no float64.

    Tensors that exist already keep their dtype: use `as_float64` for modules, `to_float64` for
    batches.
    """

    carried = True

    def __init__(self) -> None:
        super().__init__()
        self._defaults: list[torch.dtype] = []

    def __enter__(self) -> Float64:
        # the default dtype decides the dtype of factories and of integer / integer
        self._defaults.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._defaults.pop())

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if type(func) is ATTRIBUTE_ACCESS:  # a third of all calls
            if args[-1] is True and func == _REQUIRE and args[0].requires_grad:
                # it does already; torch refuses to set the flag of a tensor that is no leaf
                return None
            return func(*args, **kwargs)
        unchanged = _NO_DTYPES.issuperset(map(type, args))
        if func not in _RULED or (func is Tensor.view and unchanged and not kwargs):
            if not unchanged:
                args = _replace_dtypes(args)
            if kwargs and not _NO_DTYPES.issuperset(map(type, kwargs.values())):
                kwargs = {k: _replace_dtypes(v) for k, v in kwargs.items()}
            return self.run(func, types, args, kwargs)
        return self._by_rule(func, types, args, kwargs)

    def _by_rule(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call one of the functions whose output dtype is given in another way than by an
        argument."""
        if func in _CASTS:
            cast_dtype = _CASTS[func]
            return args[0].to(
                cast_dtype, memory_format=kwargs.get("memory_format", torch.preserve_format)
            )
        if func is Tensor.view and any(
            isinstance(a, torch.dtype) for a in (*args, *kwargs.values())
        ):
            target = next(a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype))
            if target == torch.uint8 and type(args[0]) in _WHOLE and args[0].dtype in _WIDEST:
                return self.run(func, types, args, kwargs).as_subclass(Float64Bytes)
            allowed = isinstance(args[0], Float64Bytes) and target in FLOAT64_DTYPES
            # bytes of a file that was written in float64 are valid in any mode
            allowed |= target == torch.float64 and not args[0].is_floating_point()
            if not allowed and (target in FLOAT64_DTYPES or args[0].dtype in FLOAT64_DTYPES):
                raise _bits_refusal(f"it views {args[0].dtype} as {target}")
        if func is Tensor.type and len(args) + len(kwargs) == 1:
            return func(*args, **kwargs)
        args, kwargs = _replace_dtypes(args), {k: _replace_dtypes(v) for k, v in kwargs.items()}
        if func in _LIKE and len(args) > 1 and isinstance(args[1], Tensor):
            args = (
                args[0],
                args[1].new_empty(0, dtype=FLOAT64_DTYPES.get(args[1].dtype)),
                *args[2:],
            )
        if func in _WITHOUT_FLOAT64:
            return _WITHOUT_FLOAT64[func](*args, **kwargs)
        return self.run(func, types, args, kwargs)


_NO_DTYPES = frozenset(
    (Tensor, nn.Parameter, int, float, bool, type(None), slice, torch.Size, torch.device)
)


def _replace_dtypes(value: Any) -> Any:
    """Return `value` with every lower float dtype in it replaced by float64."""
    if type(value) in _NO_DTYPES or isinstance(value, (Tensor, int, float)):
        return value
    if isinstance(value, torch.dtype):
        return FLOAT64_DTYPES.get(value, value)
    if isinstance(value, str):
        return _LEGACY.get(value, value)
    if type(value) in (tuple, list):
        unchanged = _NO_DTYPES.issuperset(map(type, value))
        return value if unchanged else type(value)([_replace_dtypes(v) for v in value])
    if type(value) is dict:
        return {k: _replace_dtypes(v) for k, v in value.items()}
    if isinstance(value, type) and (name := _LEGACY.get(f"{value.__module__}.{value.__name__}")):
        return name
    return value


def _bits_refusal(note: str) -> Refusal:
    return Refusal.of(
        "S811",
        "`Tensor.view(dtype)` reads bits of a float: they differ in float64",
        notes=(note,),
        helps=("convert with `.to(dtype)`, or leave this module out of the schedule",),
    )


# Functions that move bytes or ask for their layout, by name.
_MOVING = (
    "__deepcopy__ __get__ __getitem__ __len__ __repr__ __setitem__ as_strided cat chunk clone "
    "contiguous copy_ cpu data_ptr detach device dim element_size empty_like equal flatten "
    "get_device is_complex is_contiguous is_floating_point movedim narrow ndimension "
    "new_empty new_zeros numel permute pin_memory record_stream reshape size split squeeze stack "
    "storage_offset stride swapaxes to transpose unbind unflatten unsqueeze untyped_storage view "
    "zero_ zeros_like"
)
_SENDING = (
    "all_gather all_gather_into_tensor all_to_all all_to_all_single broadcast gather irecv isend "
    "recv scatter send"
)
_MOVES, _SENDS = frozenset(_MOVING.split()), frozenset(_SENDING.split())


class Float64Bytes(Tensor):
    """The bytes of a float64 tensor, on its storage: they may be moved and viewed back, not
    computed with.

    A program that sends its weights as bytes works with eight bytes for each number, too. Bytes may
    be written into a `Float64Bytes` tensor, but not into a plain one, which would not carry the
    class.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        values = (*args, *(kwargs or {}).values())
        kinds = [a for a in values if isinstance(a, torch.dtype)]
        tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
        if (
            name not in _MOVES | _SENDS
            or any(k not in FLOAT64_DTYPES if name == "view" else k != torch.uint8 for k in kinds)
            # an index, or a tensor that would hold bytes without being `Float64Bytes`
            or (name == "__getitem__" and len(tensors) > 1)
            or (name in ("copy_", "__setitem__") and not isinstance(args[0], Float64Bytes))
            or (
                name in _SENDS | {"cat", "stack"}
                and not all(type(t) is Float64Bytes for t in tensors)
            )
        ):
            raise _bits_refusal(f"`{name}` of the bytes of a float64 tensor")
        out = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        floats = isinstance(out, Tensor) and out.dtype != torch.uint8
        return out.as_subclass(Tensor) if floats else out


_WHOLE = (Tensor, nn.Parameter)
_WIDEST = (torch.float64, torch.complex128)


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute torch.nn.functional.grouped_mm as one product per group; `offs` are the groups'
    ends."""
    if mat_a.is_meta:  # the ends of the groups are not known, and not needed for the shape
        return torch._grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    if offs is None:
        out = torch.bmm(mat_a, mat_b)
    elif offs.is_meta:  # sizes of groups are not known: one group gives the shape of all
        summed = [m.sum(0) if m.dim() == 3 else m for m in (mat_a, mat_b)]
        out = torch.mm(*summed)
        out = out.expand(offs.shape[0], -1, -1) if mat_a.dim() == mat_b.dim() else out
    else:
        ends = [int(end) for end in offs.tolist()]
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        out = _GROUPED[mat_a.dim(), mat_b.dim()](mat_a, mat_b, spans)
    return out if bias is None else out + bias


def _rows(a: Tensor, b: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    parts = [a[i:j] @ b[g] for g, (i, j) in enumerate(spans)]
    rest = a.new_zeros(a.shape[0] - spans[-1][1], b.shape[-1])
    return torch.cat([*parts, rest])


def _columns(a: Tensor, b: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    parts = [a[g] @ b[:, i:j] for g, (i, j) in enumerate(spans)]
    rest = a.new_zeros(a.shape[1], b.shape[1] - spans[-1][1])
    return torch.cat([*parts, rest], 1)


def _inner(a: Tensor, b: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])


_GROUPED = {(2, 3): _rows, (3, 2): _columns, (2, 2): _inner}
_WITHOUT_FLOAT64: dict[Any, Callable[..., Tensor]] = {
    torch._grouped_mm: _grouped_mm,
    torch.ops.aten._grouped_mm: _grouped_mm,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
}
_RULED = {*_CASTS, *_LIKE, *_WITHOUT_FLOAT64, Tensor.view, Tensor.type}


def to_float64(value: Any) -> Any:
    """Return a nest of any classes that hold tensors, with its float tensors in float64."""

    def convert(leaf: Any) -> Any:
        return (
            leaf.to(FLOAT64_DTYPES.get(leaf.dtype, leaf.dtype))
            if isinstance(leaf, Tensor)
            else leaf
        )

    return pytree.tree_map(convert, value)


def as_float64(module: M) -> M:
    """Copy a module with float64 parameters, buffers and tensor attributes; ties are kept."""
    twin = copy_module(module)
    buffers: dict[int, Tensor] = {}
    for child in twin.modules():
        for parameter in child.parameters(recurse=False):
            parameter.grad = None
            parameter.data = to_float64(parameter.data)
        for name, buffer in child.named_buffers(recurse=False):
            setattr(child, name, buffers.setdefault(id(buffer), to_float64(buffer)))
        for name, value in list(vars(child).items()):
            if isinstance(value, (Tensor, tuple, list)) and not name.startswith("_"):
                setattr(child, name, to_float64(value))
    return twin
