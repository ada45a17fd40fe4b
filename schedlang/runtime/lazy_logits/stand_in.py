"""Stand-ins for logits in a model's own loss code, in place of logits that no rank has in full.

A stand-in implements a few functions; any other function gets the full logits, as one tensor that
the stand-in keeps.  So what a function writes into them, also through a view, holds for what
follows, as in torch: from then on the loss is that of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Size, Tensor

from schedlang.runtime.modes import reenter_modes

# what belongs to one tensor: whoever asks for it may change values or gradients of that tensor
_OF_THE_TENSOR = frozenset(
    [
        *("data", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
        *("numpy", "data_ptr", "untyped_storage", "requires_grad_", "set_"),
    ]
)


class LogitsStandIn:
    """Logits [..., classes] that do not exist as one tensor until a function needs one.

    computed        the full logits once computed; may be written into
    _version        the version of `computed` when it was computed
    _is_exposed     whether other code may write into `computed` unseen
    _source         the logits of which these are a view, `_view` of their full tensor
    _edits          how often the values were replaced
    _source_edits   the edits of `_source` when the view was made
    """

    computed: Tensor | None = None
    _version: int = 0
    _is_exposed: bool = False
    _source: LogitsStandIn | None = None
    _view: Callable[[Tensor], Tensor] | None = None
    _edits: int = 0
    _source_edits: int = 0

    # -- what a class defines ----------------------------------------------------------------------

    @property
    def shape(self) -> Size:
        """The shape of the full logits."""
        raise NotImplementedError

    def compute(self) -> Tensor:
        """Compute the full logits, as a plain tensor."""
        raise NotImplementedError

    @property
    def base(self) -> Tensor:
        """The tensor with the same leading dims, from whose last dim the logits are computed."""
        raise NotImplementedError

    def with_base(self, lines: Tensor) -> Any:
        """Return the logits of `lines` in place of those of `base`."""
        raise NotImplementedError

    def become(self, other: Any) -> None:
        """Take over the values of another stand-in that was made of this one."""
        raise NotImplementedError

    @classmethod
    def replacements(cls) -> Mapping[Any, Callable[..., Any]]:
        """Return functions of torch that accept a stand-in as first argument -> replacements."""
        raise NotImplementedError

    # -- the full logits ---------------------------------------------------------------------------

    def full(self) -> Tensor:
        """Return the full logits, as a plain tensor that is computed once."""
        if self.computed is None:
            source, view = self._source, self._view
            with torch.enable_grad():  # whoever reads it first may do so without gradients
                full = self.compute() if source is None or view is None else view(source.full())
            self._version = -1 if full.is_inference() else full._version
            self.computed = full
        return self.computed

    def has_loss(self) -> bool:
        """Return whether the loss can be computed without the full logits: they are unchanged."""
        return not self.is_written()

    def is_written(self) -> bool:
        """Return whether the full logits, or those of which these are a view, were written into."""
        source, full = self._source, self.computed
        if source is not None and (self._source_edits != source._edits or source.is_written()):
            return True
        if full is None:
            return False
        return self._is_exposed or full.is_inference() or full._version != self._version

    def linked(self, view: Any, step: Callable[[Tensor], Tensor]) -> Any:
        """Return `view` as a view of these logits: `step` makes its full logits from these."""
        view._source, view._view, view._source_edits = self, step, self._edits
        return view

    def _expose(self) -> None:
        self.full()
        self._is_exposed = True
        if self._source is not None:
            self._source._expose()

    # -- attributes and methods of a tensor --------------------------------------------------------

    @property
    def ndim(self) -> int:
        """The number of dims, as Tensor.ndim."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, *shape: Any) -> Any:
        """View as Tensor.view; a stand-in if the last dim is kept, else of the full logits."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if self.has_loss() and sizes and _keeps_last(sizes, self.shape):
            lines = self.base.reshape(*sizes[:-1], self.base.shape[-1])
            return self.linked(self.with_base(lines), lambda full: full.reshape(*shape))
        return self.full().reshape(*shape)

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        if self.has_loss() and _takes_rows(index, self.ndim):
            return self.linked(self.with_base(self.base[index]), lambda full: full[index])
        return self.full()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.full()[index] = to_full(value)

    # read by `getattr`, so that a hook on the full logits, say, is one on what the loss is made of
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if name in _OF_THE_TENSOR:
            self._expose()
        return getattr(self.full(), name)

    def _scale(self, name: str, scaled: Callable[[], Any], other: Any) -> Any:
        """Scale in place: as a later step if nobody has seen the values, else in the tensor."""
        if is_number(other) and self.computed is None and self._source is None:
            result = scaled()
            if type(result) is type(self):
                self.become(result)
                self._edits += 1
                return self
        getattr(self.full(), name)(to_full(other))
        return self

    def __imul__(self, other: Any) -> Any:
        return self._scale("mul_", lambda: self * other, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._scale("div_", lambda: self / other, other)

    mul_, div_ = __imul__, __itruediv__

    def size(self, dim: int | None = None) -> Any:
        """Return the size, as Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flatten as Tensor.flatten; a stand-in if the last dim is kept."""
        first, last = start_dim % self.ndim, end_dim % self.ndim
        if not first <= last < self.ndim - 1:
            return self.full().flatten(start_dim, end_dim)
        sizes = tuple(self.shape)
        return self.view(*sizes[:first], math.prod(sizes[first : last + 1]), *sizes[last + 1 :])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function's replacement, or the function with the full logits."""
        kwargs, replacement = dict(kwargs or {}), cls.replacements().get(func)
        if "input" in kwargs and replacement is not None:
            args = (kwargs.pop("input"), *args)
        with reenter_modes():  # a function mode that called this is off inside
            if replacement is not None and args and isinstance(args[0], cls):
                return replacement(*args, **kwargs)
            full_kwargs = {name: to_full(value) for name, value in kwargs.items()}
            return func(*(to_full(value) for value in args), **full_kwargs)


def to_full(value: Any) -> Any:
    """Return an argument with full logits in place of stand-ins."""
    if isinstance(value, LogitsStandIn):
        return value.full()
    return type(value)(map(to_full, value)) if type(value) in (list, tuple) else value


def is_number(value: Any) -> bool:
    """Return whether a value is a number of Python, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _computing(name: str) -> Callable[..., Any]:
    def compute(self: LogitsStandIn, *args: Any) -> Any:
        return getattr(self.full(), name)(*map(to_full, args))

    return compute


def _writing(name: str) -> Callable[..., Any]:
    def write(self: LogitsStandIn, other: Any) -> Any:
        getattr(self.full(), name)(to_full(other))
        return self

    return write


for _name in (
    *("add", "radd", "sub", "rsub", "rtruediv", "neg", "abs", "pow", "rpow", "matmul", "rmatmul"),
    *("floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne"),
):
    setattr(LogitsStandIn, f"__{_name}__", _computing(f"__{_name}__"))
for _name in ("iadd", "isub", "ipow"):
    setattr(LogitsStandIn, f"__{_name}__", _writing(f"__{_name}__"))


def _takes_rows(index: Any, ndim: int) -> bool:
    """Return whether an index keeps the last dim, and indexes others by integers and slices."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice | int) or part is Ellipsis for part in parts):
        return False
    return len(parts) < ndim and Ellipsis not in parts or parts[-1] == slice(None)


def _keeps_last(sizes: list[Any], shape: torch.Size) -> bool:
    """Return whether a view with these sizes keeps the last dim."""
    if sizes.count(-1) > 1 or sizes[-1] not in (-1, shape[-1]):
        return False
    kept_rows = torch.Size(s for s in sizes[:-1] if s != -1).numel()
    rows = shape[:-1].numel()
    return kept_rows == rows if -1 not in sizes[:-1] else bool(kept_rows) and rows % kept_rows == 0
