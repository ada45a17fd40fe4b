"""Models and batches without values: copies on the meta device, shapes there, what is known.

And calls of torch as modes see them beside such a forward: names, tensors, the line of the model.

* A copy of a model, or of a batch, that has shapes but no values (the meta device).
* Shapes of operators on the meta device, worked out once for equal tensors. Torch finds them in
  Python, which takes longer than a kernel would; layers that are alike ask for the same ones
  again and again.
* Real values beside meta tensors: of what is computed from the batch alone, such as masks.
* Calls of torch's functions as a mode sees them: their names, and the tensors among arguments.
* Which line of the model is running, told from the stack.
"""

from __future__ import annotations

import copy
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from schedlang.ir import pytree
from schedlang.ir.copied import deeply_copied
from schedlang.runtime.adapters.hook_numbers import number_hooks_from
from schedlang.runtime.tracing import meta_shapes as meta_shapes


def copy_with(
    model: nn.Module,
    parameter: Callable[[str, nn.Parameter], nn.Parameter],
    other: Callable[[Tensor], Tensor],
    kept: Mapping[str, Sequence[str]] | None = None,
) -> nn.Module:
    """A deep copy of a model in which tensors are made by the given functions, never copied.

    parameter: first name and parameter to its stand-in; ties stay ties.
    other: buffers and tensors kept as plain attributes.
    kept: of these lists of modules only these children are copied, and numbered anew.
    """
    memo: dict[int, Any] = {}
    for name, tensor in model.named_parameters():
        memo[id(tensor)] = parameter(name, tensor)
    for module in model.modules():
        plain = (value for value in vars(module).values() if isinstance(value, Tensor))
        for value in (*module._buffers.values(), *plain):
            if value is not None and id(value) not in memo:
                memo[id(value)] = other(value)
        taken = max((*module._forward_hooks, *module._forward_pre_hooks), default=-1)
        if taken >= RemovableHandle.next_id:  # it was loaded whole: hooks of another process
            number_hooks_from(taken + 1)
    for fqn in sorted(kept or {}, key=lambda name: -name.count(".")):  # the inner lists first
        found = model.get_submodule(fqn)
        memo[id(found)] = _shorter(found, (kept or {})[fqn], memo)
    return deeply_copied(model, memo)


def _shorter(found: nn.Module, kept: Sequence[str], memo: dict[int, Any]) -> nn.Module:
    """A copy of a list of modules with fewer of them."""
    made = copy.copy(found)
    children = (copy.deepcopy(found._modules[name], memo) for name in kept)
    made.__dict__["_modules"] = {str(k): child for k, child in enumerate(children)}
    return made


def meta_parameter(tensor: nn.Parameter, shape: tuple[int, ...] | None = None) -> nn.Parameter:
    """A parameter on the meta device, of the same or the given shape."""
    empty = torch.empty(shape or tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad)


def meta_model(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    kept: Mapping[str, Sequence[str]] | None = None,
) -> nn.Module:
    """The model on the meta device, with other shapes for some parameters (by first name).

    With `kept`, lists of modules that hold fewer.
    """
    return copy_with(
        model,
        lambda name, tensor: meta_parameter(tensor, shapes.get(name)),
        lambda tensor: tensor.to("meta"),
        kept,
    )


def meta_batch(batch: Any) -> Any:
    """The batch with every tensor on the meta device."""
    to_meta = lambda value: value.to("meta") if isinstance(value, Tensor) else value  # noqa: E731
    return pytree.tree_map(to_meta, batch)


Made = tuple[tuple[Any, ...], tuple[Any, ...], torch.dtype]  # size, stride, dtype of a result
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
MOST = 1 << 14  # results that are kept; a model asks for some hundreds
LEAVES = frozenset(
    [
        *(int, float, bool, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    ]
)


@dataclass(eq=False)
class Memo:
    """Runs operators that make new tensors; of one that ran with such arguments the result alone.

    Only what neither writes nor views, draws nothing and is given nothing but meta tensors and
    plain numbers is remembered; a result that shares memory with an argument never is. Where
    another mode watches below, every operator runs: it must see the operator, not bare memory.

    One may serve many runs: the key holds all that the shape of a result hangs on, the default
    dtype too, to which integers are promoted.
    """

    _known: dict[Any, tuple[type, tuple[Made | None, ...]] | None] = field(default_factory=dict)
    # by id, as a hash would ask torch: operators, and whether one only makes new tensors
    _fresh: dict[int, tuple[Any, bool]] = field(default_factory=dict)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the results of the operator `func`; remember their shapes."""
        known = self._fresh.get(id(func))
        if known is None:
            ends = (*func._schema.arguments, *func._schema.returns)
            alias = any(one.alias_info is not None for one in ends)
            known = self._fresh[id(func)] = func, not (alias or draws(func))
        inputs: list[Tensor] = []
        key = None
        if known[1] and torch._C._len_torch_dispatch_stack() == 0:
            key = _key((id(func), torch.get_default_dtype(), args, *kwargs.items()), inputs)
        if key is None or not inputs:
            return func(*args, **kwargs)
        found = self._known.get(key)
        # what is called inside is no call of the model: no mode above may see it, or miss it
        with torch._C.DisableTorchFunction():
            if found is not None:
                return _again(found)
            out = func(*args, **kwargs)
        if key not in self._known:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = _described(out, inputs)
        return out


def _key(value: Any, inputs: list[Tensor]) -> Any:
    """Equal for arguments whose results are alike; None where nobody can tell. Notes tensors."""
    kind = type(value)
    if kind in PLAIN:
        if not value.is_meta or value.layout is not torch.strided or value.is_conj():
            return None
        inputs.append(value)
        return "t", value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        parts = []
        for one in value:  # no generator: this is called some times for each operator of a model
            part = _key(one, inputs)
            if part is None:
                return None
            parts.append(part)
        return kind, tuple(parts)
    if kind in LEAVES or isinstance(value, torch._ops.OpOverload):
        return kind, value
    return None


def _described(out: Any, inputs: Iterable[Tensor]) -> tuple[type, tuple[Made | None, ...]] | None:
    """Return what makes a result anew; None for one that is not new memory of its own."""
    parts = (out,) if isinstance(out, Tensor) else out
    if not isinstance(parts, tuple | list):
        return None
    known = {one.untyped_storage()._cdata for one in inputs}
    made: list[Made | None] = []
    for one in parts:
        if one is None:
            made.append(None)
            continue
        if type(one) is not Tensor or not one.is_meta or one.storage_offset():
            return None
        storage = one.untyped_storage()
        size, stride = tuple(one.shape), one.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if one.numel() else 0
        if storage._cdata in known or storage.nbytes() != span * one.element_size():
            return None
        known.add(storage._cdata)
        made.append((size, stride, one.dtype))
    return type(out) if not isinstance(out, Tensor) else Tensor, tuple(made)


def _again(found: tuple[type, tuple[Made | None, ...]]) -> Any:
    kind, made = found
    tensors = [
        None if one is None else torch.empty_strided(one[0], one[1], dtype=one[2], device="meta")
        for one in made
    ]
    return tensors[0] if kind is Tensor else kind(tensors)


# of torch's own operators, for all runs of this process: what these give never changes; one that a
# library or a user registers may be registered anew, and is remembered within a run
_ATEN = Memo()


def remembered(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator, remembered where it is torch's own."""
    own = func.namespace == "aten"
    return _ATEN.run(func, args, kwargs) if own else func(*args, **kwargs)


SCALAR = torch.ops.aten._local_scalar_dense.default
LIMIT = 1 << 22  # bytes; padding masks and positions are small, anything larger is not followed


@dataclass(eq=False)
class Constants:
    """Runs operators on meta tensors and, where every input is known, on real values too.

    A model may ask whether a mask is all ones, which a meta tensor cannot answer. Values are
    known per storage, so views and in-place writes are followed.
    """

    values: dict[int, Tensor] = field(default_factory=dict)  # meta storage to a flat real tensor
    memo: Memo = field(default_factory=Memo)
    tell: Callable[[Any], Any] = lambda value: value  # what a model that asks gets of a known value
    _alive: dict[int, Any] = field(default_factory=dict)  # while a storage lives its value is known

    def know(self, real: Any, meta: Any) -> None:
        """Remember the values of integer and boolean tensors given as arguments."""
        for value, bare in zip(_pytree.tree_leaves(real), _pytree.tree_leaves(meta)):
            if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_meta:
                continue
            self._keep(bare, value)

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        unknown: Callable[[Any], Any],
    ) -> Any:
        """The operator's result; what a value that is not known becomes is for `unknown(func)`."""
        if func is SCALAR and args[0].is_meta:
            value = self.real(args[0])
            return unknown(func) if value is None else self.tell(value.item())
        if func is torch.ops.aten.masked_select.default and args[0].is_meta:
            return self._sized(func, args, kwargs, unknown)
        try:
            memo = _ATEN if func.namespace == "aten" else self.memo
            output = memo.run(func, args, kwargs)
        except NotImplementedError:  # the shape depends on values
            return self._sized(func, args, kwargs, unknown)
        except RuntimeError as error:  # so it says of one operator
            if "meta tensor without output_size" in str(error):
                return self._sized(func, args, kwargs, unknown)
            if (moved := self._moved(args, kwargs)) is None:
                raise
            return self.run(func, *moved, unknown)
        first: Any = args[0] if args else None
        with torch._C.DisableTorchFunction():  # a look at an attribute is a call through all modes
            if type(first) in PLAIN and type(output) is Tensor and output.dtype is not torch.bool:
                # most operators of a model: nothing is known of the result, nor has it been
                values = self.values
                known = values and (storage(first) in values or storage(output) in values)
                if first.is_meta and output.is_meta and not known:
                    return output
            parts = (output,) if isinstance(output, Tensor) else _pytree.tree_leaves(output)
            made = [t for t in parts if isinstance(t, Tensor) and t.is_meta]
            small = all(t.untyped_storage().nbytes() <= LIMIT for t in made)
            # where nothing is known, what is made of a tensor is not known either
            blind = not self.values and isinstance(first, torch.Tensor) and first.is_meta
        if not made:
            if func._schema.is_mutable:
                self._forget(t for t in _pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
            return output
        shadow = self._shadow(func, args, kwargs) if small and not blind else None
        if shadow is None and func is torch.ops.aten._is_all_true.default:
            shadow = torch.tensor(True)  # by which distributions check values that are not here
        if shadow is not None:
            for bare, value in zip(_pytree.tree_leaves(output), _pytree.tree_leaves(shadow)):
                if isinstance(bare, torch.Tensor) and storage(bare) not in self.values:
                    self._keep(bare, value)
        elif func._schema.is_mutable:
            self._forget(made)
        return output

    def _moved(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with all tensors on the meta device; None where they lie on one device.

        A table that the model's code keeps in a global, or by `lru_cache`, has values already.
        """
        leaves, spec = _pytree.tree_flatten((args, dict(kwargs)))
        real = [t for t in leaves if isinstance(t, torch.Tensor) and t.ndim and not t.is_meta]
        if not real or not any(isinstance(t, torch.Tensor) and t.is_meta for t in leaves):
            return None
        moved: dict[int, Any] = {id(one): one.to("meta") for one in real}
        self.know(real, [moved[id(one)] for one in real])
        made = _pytree.tree_unflatten([moved.get(id(t), t) for t in leaves], spec)
        return made[0], made[1]

    def _sized(self, func: Any, args: Any, kwargs: Any, unknown: Callable[[Any], Any]) -> Any:
        """The result of an operator whose shape only values tell."""
        shadow = self._shadow(func, args, kwargs)
        if shadow is None:
            numbered = self._numbered(func, args)
            if numbered is not None:
                return torch.ops.aten.index.Tensor(args[0], numbered)
            if unknown(func):  # other values than those below: none is set
                return self._of_zeros(func, args, kwargs)
            try:
                with shapes.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
                    return func(*args, **kwargs)
            except NotImplementedError:  # torch has it for values alone
                return self._of_zeros(func, args, kwargs)
        output = _pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), shadow)
        for bare, value in zip(_pytree.tree_leaves(output), _pytree.tree_leaves(shadow)):
            self._keep(bare, value)
        return output

    def _of_zeros(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of such an operator where all that it is given is zero."""
        zeros = lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t  # noqa: E731
        args, kwargs = _pytree.tree_map_only(Tensor, zeros, (args, dict(kwargs)))
        return _pytree.tree_map_only(Tensor, lambda t: t.to("meta"), func(*args, **kwargs))

    def _numbered(self, func: Any, args: Any) -> list[Tensor | None] | None:
        """Return the indices of an operator with known masks as positions: their number is known.

        What is taken by them, logits where a mask of the batch is set, need not be known.
        """
        if func is torch.ops.aten.masked_select.default and args[0].shape == args[1].shape:
            masks = [args[1]]
        elif func is torch.ops.aten.index.Tensor:
            masks = args[1]
        else:
            return None
        found: list[Tensor | None] = []
        for one in masks:
            if one is None or one.dtype not in (torch.bool, torch.uint8):
                found.append(one)
                continue
            mask = self.real(one) if one.is_meta else one
            if mask is None:
                return None
            found += [at.to("meta") for at in mask.nonzero(as_tuple=True)]
        return found

    def _shadow(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if draws(func):  # the batch does not decide it, and a program's own numbers stay unused
            return None
        if any(type(a) in PLAIN and a.is_meta and storage(a) not in self.values for a in args):
            return None  # most operators of a model: found out without a look into what they take
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
                leaf = self.real(leaf)
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

    def real(self, bare: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor on the meta device, where they are known."""
        flat = self.values.get(storage(bare))
        if flat is None:
            return None
        if flat.dtype != bare.dtype:
            flat = flat.view(bare.dtype)
        return flat.as_strided(bare.shape, bare.stride(), bare.storage_offset())

    def _keep(self, bare: torch.Tensor, value: torch.Tensor) -> None:
        size = bare.untyped_storage().nbytes() // max(1, bare.element_size())
        if bare.untyped_storage().nbytes() > LIMIT or bare.shape != value.shape:
            return
        flat = torch.zeros(size, dtype=value.dtype, device="cpu")
        flat.as_strided(bare.shape, bare.stride(), bare.storage_offset()).copy_(value)
        key, me = storage(bare), weakref.ref(self)  # no cycle: values go when nobody asks more

        def gone(_: Any) -> None:  # another storage may come to lie at its place
            if (known := me()) is not None:
                known.values.pop(key, None)
                known._alive.pop(key, None)

        self.values[key] = flat
        self._alive[key] = weakref.ref(bare.untyped_storage(), gone)

    def _forget(self, written: Iterable[torch.Tensor]) -> None:
        for bare in written:
            self.values.pop(storage(bare), None)


@contextmanager
def without_values(
    batch: Mapping[str, Any], other: bool = False
) -> Iterator[tuple[dict[str, Any], OnMeta]]:
    """The batch on the meta device; what runs within makes its tensors there, too.

    A model may ask for values: it gets those that the batch decides, and 0 for others.  With
    `other` it gets other ones.
    """
    inputs = meta_batch(dict(batch))
    values = OnMeta(dict(batch), inputs, other)
    with values, Literals(values.constants), torch.device("meta"):
        yield inputs, values


@contextmanager
def on_meta(real: Any, meta: Any) -> Iterator[OnMeta]:
    """Models that are run inside may ask for values: they get those that the batch decides."""
    mode = OnMeta(real, meta)
    with mode, Literals(mode.constants):
        yield mode


@dataclass(eq=False)
class Literals(TorchFunctionMode):
    """Tells `constants` of numbers that a model spells out; on the meta device they are lost.

    Both are made below all dispatch: tensors from numbers, and lists that stand as an index. The
    ways back are below it, too: a tensor as a list of numbers, which only the batch can tell, and
    one number written into a text.
    """

    constants: Constants

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in TELLING and args[0].is_meta and (told := self._told(func, args)) is not None:
            return told
        if func in INDEXING and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            spelt = tuple(self._tensor(i) if isinstance(i, list) else i for i in index)
            args = (args[0], spelt, *args[2:])
        output = func(*args, **kwargs)
        if func in MAKING and output.is_meta and _plain(args[0]):
            self.constants.know(func(*args, **{**kwargs, "device": "cpu"}), output)
        return output

    def _told(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The numbers of a tensor; None where nobody knows them, for torch to say so."""
        if func is torch.Tensor.tolist:
            real = self.constants.real(args[0])
            return None if real is None else self.constants.tell(real.tolist())
        return format(args[0].item(), *args[1:]) if args[0].ndim == 0 else None

    def _tensor(self, numbers: list[Any]) -> Any:
        if not _plain(numbers):
            return numbers
        real = torch.tensor(numbers, device="cpu")
        bare = real.to("meta")
        self.constants.know(real, bare)
        return bare


INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
MAKING = (torch.tensor, torch.as_tensor)
TELLING = (torch.Tensor.tolist, torch.Tensor.__format__)


def _plain(data: Any) -> bool:
    return all(isinstance(value, int | bool) for value in _pytree.tree_leaves(data))


class OnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a model run on meta tensors although it asks for values.

    `real` and `meta` are its arguments, of which values are known; other values are taken as 0.
    `other`: whoever asks is told another value than that, known or not.
    """

    def __init__(self, real: Any = (), meta: Any = (), other: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants = Constants(tell=self._tell)
        self.constants.know(real, meta)
        self.other = other
        self.asked = False  # for a value that is not known
        self.told = False  # a value that is known
        self.random = False  # whether a random operator has run
        # told of every random operator that runs
        self.drew: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None] = _nobody

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if draws(func):
            self.random = True
            self.drew(func, args, kwargs or {})
        return self.constants.run(func, args, kwargs or {}, self._zero)

    def _zero(self, func: Any) -> int:
        self.asked = True
        return int(self.other)

    def _tell(self, value: Any) -> Any:
        self.told = True
        return _pytree.tree_map(_another, value) if self.other else value


def _another(value: float) -> float:
    """Return a number of the same kind that is another one."""
    return type(value)(not value)


def _nobody(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Told of what is drawn, where nobody asks."""


@cache
def draws(func: Any) -> bool:
    """Return whether an operator draws random numbers, if its arguments let it."""
    return torch.Tag.nondeterministic_seeded in func.tags


def storage(tensor: torch.Tensor) -> int:
    """Return what names a tensor's memory as long as it is in use, also one without values."""
    return int(tensor.untyped_storage()._cdata)


def name_of(func: Any) -> str:
    """A readable name of a torch function or tensor method."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):
        return getattr(func.__self__, "__name__", name)
    return name


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a nest of lists, tuples and dicts, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


OURS = Path(__file__).resolve().parents[3]  # what holds schedlang/, passes/ and primitives/
KNOWN = (
    *(str(OURS / part) + os.sep for part in ("schedlang", "passes", "primitives")),
    str(Path(torch.__file__).resolve().parent) + os.sep,
)
RUNS = {("batch.py", "forward"), ("original.py", "derive")}  # our code that runs a model


def model_line() -> str:
    """File and line of the innermost code that is neither torch's nor ours; "" outside a model.

    A model is run by our code, so what lies further out than that is no model.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        code = frame.f_code
        if (Path(code.co_filename).name, code.co_name) in RUNS:
            return ""
        if not os.path.realpath(code.co_filename).startswith(KNOWN) and code.co_filename[:1] != "<":
            return f"{Path(code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
