"""Facts of an untouched model: modules, parameters, ties and named dims. Reads, never writes.

Selectors resolve paths on these facts, and a plan refers to the model through them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.module_copies import copy_module

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.runtime.storage.codebook import WeightQuantization

    # returns a copy that is trained in another way
    Change: TypeAlias = "Callable[[nn.Module], nn.Module] | AdapterChange"

# The names that a class gives to the dims of its parameters, by the class's qualified name;
# a subclass inherits them.  Parameters of other classes are addressed by dim number.
DIMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "torch.nn.modules.linear.Linear": {"weight": ("out", "in"), "bias": ("out",)},
    "torch.nn.modules.sparse.Embedding": {"weight": ("vocab", "hidden")},
    "torch.nn.modules.sparse.EmbeddingBag": {"weight": ("vocab", "hidden")},
    "torch.nn.modules.conv.Conv1d": {"weight": ("out", "in", "width"), "bias": ("out",)},
    "torch.nn.modules.conv.Conv2d": {"weight": ("out", "in", "height", "width"), "bias": ("out",)},
    "torch.nn.modules.conv.Conv3d": {
        "weight": ("out", "in", "depth", "height", "width"),
        "bias": ("out",),
    },
    "transformers.pytorch_utils.Conv1D": {"weight": ("in", "out"), "bias": ("out",)},
    "torch.nn.modules.normalization.LayerNorm": {"weight": ("hidden",), "bias": ("hidden",)},
    "torch.nn.modules.normalization.RMSNorm": {"weight": ("hidden",)},
    # in addition to those of the projection
    "schedlang.runtime.low_rank_adapters.AdaptedProjection": {
        "lora_A": ("rank", "in"),
        "lora_B": ("out", "rank"),
        "lora_magnitude": ("out",),
    },
}

BASE = "torch.nn.modules.module.Module"


@runtime_checkable
class AdapterChange(Protocol):
    """A change of a model that adds parameters of its own (`adapt`)."""

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a changed copy of a module, on the same storage."""

    def with_varied_values(self, module: nn.Module) -> nn.Module:
        """Return a changed copy; the added parameters get other values than training starts
        with."""

    def initializer_of(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function that makes the initial value of an added parameter from a like
        tensor; else None."""

    def coding_of(self, name: str) -> WeightQuantization | None:
        """Return the coding in which a parameter of this name is stored; None: stored as it is."""

    def merge_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge the added parameters into values of the model before the change."""

    def stop_random_draws(self, module: nn.Module) -> None:
        """Stop the added parts of a changed module from drawing random numbers."""


@dataclass(frozen=True, slots=True)
class ParameterFact:
    """One parameter: its first name in model order, shape, dtype and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    requires_grad: bool
    names: tuple[str, ...]  # all names of the tensor, `name` first

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Site:
    """One module of the untouched model.

    `classes` are the qualified names of its class and base classes; `dims` the names of the dims of
    its own parameters, where a class defines them; `parameters` maps a local name ("weight") to the
    parameter, which may be tied. A module without a forward, such as a list, is never called.
    """

    fqn: str
    classes: tuple[str, ...]
    children: tuple[str, ...]
    parameters: Mapping[str, ParameterFact] = field(hash=False)
    buffers: tuple[str, ...] = ()
    has_forward: bool = True
    dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    @property
    def class_name(self) -> str:
        """The plain name of the module's class."""
        return self.classes[0].rpartition(".")[2]

    def is_a(self, name: str) -> bool:
        """Return whether the class or a base class is called `name` (plain or qualified)."""
        return any(name in (qualified, qualified.rpartition(".")[2]) for qualified in self.classes)

    @property
    def is_list(self) -> bool:
        """Whether the module holds others in an order: a list, a dict or a sequential."""
        return any(map(self.is_a, ("ModuleList", "ModuleDict", "Sequential")))

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for sites of the same class, parameter shapes and dtypes."""
        shapes = ((name, fact.shape, fact.dtype) for name, fact in self.parameters.items())
        return (self.classes[0], tuple(shapes))

    def __str__(self) -> str:
        return self.fqn or "the model"


def check_unwrapped(model: nn.Module) -> None:
    """Refuse (S401) a model that is compiled, scripted, or parallel already: rows do that.

    Modules that are compiled in place (`block.compile()`) are as they were written.
    """
    from torch.jit import ScriptModule

    kind = type(model).__name__
    if hasattr(model, "_orig_mod"):
        title = "the model is a result of `torch.compile`"
        helps = ("give the module before it, and compile it by a row: `blocks.*  fuse()`",)
    elif kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
        title = f"the model is wrapped by `{kind}`"
        helps = ("give the module inside, `model.module`, and a row: `zero(stage=3, over=dp)`",)
    elif names := [name for name, p in model.named_parameters() if hasattr(type(p), "placements")]:
        title = f"the model is sharded already: `{names[0]}` is a DTensor"
        helps = ("give the model before `fully_shard` or `parallelize_module`",)
    elif names := [
        name or "model"
        for name, module in model.named_modules()
        if isinstance(module, ScriptModule) and any(True for _ in module.parameters())
    ]:
        title = f"`{names[0]}` is a module of `torch.jit`, whose forward cannot be followed"
        helps = ("give the module that it was made from",)
    else:
        return
    raise Refusal.of("S401", title, helps=helps)


class ModelFacts:
    """All sites of one model in model order, computed once; the model itself is never changed.

    The model may be on the meta device. `model` is stored for `attribute` and for `build`. Where
    rows change what is trained (`freeze`, `tie`) or what computes (`replace`), `model` is a copy
    with these `changes`, and `base` has the facts of the untouched model. `with_varied_values`: a
    proof has given the untouched model other values; parameters that rows add start with other
    values, too.
    """

    def __init__(
        self,
        model: nn.Module,
        base: ModelFacts | None = None,
        changes: tuple[Change, ...] = (),
        varied: bool = False,
    ) -> None:
        self.model = model
        self.base: ModelFacts = base or self
        self.has_varied_values = varied
        self.changes: tuple[Change, ...] = changes
        self.class_name: str = type(model).__name__
        self._modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.cache: dict[object, object] = {}  # results of probes
        self.python_replacements: dict[str, Any] = {}  # replacements given in Python, by name

    def with_change(self, change: Change) -> ModelFacts:
        """Return the facts of the model after one more change."""
        make = (
            change.with_varied_values
            if self.has_varied_values and isinstance(change, AdapterChange)
            else change
        )
        return ModelFacts(
            make(self.model), self.base, (*self.changes, change), self.has_varied_values
        )

    def for_module(self, module: nn.Module, varied: bool = False) -> ModelFacts:
        """Return the facts of another untouched module of equal structure, with the same
        changes."""
        facts = ModelFacts(module, varied=varied)
        for change in self.changes:
            facts = facts.with_change(change)
        return facts

    @property
    def replacements(self) -> Mapping[str, Any]:
        """The user's replacement modules by name, from the model file or the model's class, and
        from Python."""
        table = getattr(self.base.model, "replacements", None)
        return {**(table if isinstance(table, Mapping) else {}), **self.base.python_replacements}

    def register_replacement(self, value: object) -> object:
        """Register a module, or a function that makes one, and return a name for rows; else return
        `value`."""
        if not callable(value):
            return value
        own_name = getattr(value, "__name__", type(value).__name__)
        stem = name = own_name if own_name.isidentifier() else "replacement"
        number = 1
        while self.python_replacements.get(name, value) is not value:
            number += 1
            name = f"{stem}_{number}"
        self.python_replacements[name] = value
        return name

    @property
    def has_rewrites(self) -> bool:
        """Whether some row changes the computation of a module."""
        return any(getattr(change, "rewrites", False) for change in self.changes)

    def initializer_of(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function that makes the initial value of a parameter that a row adds, from a
        like tensor.

        None: the parameter is the model's own.
        """
        draws = (
            change.initializer_of(name)
            for change in self.changes
            if isinstance(change, AdapterChange)
        )
        return next((make for make in draws if make is not None), None)

    def coding_of(self, name: str) -> WeightQuantization | None:
        """Return the coding in which a rank stores a parameter, by its first name; None: stored as
        it is."""
        if not any(isinstance(change, AdapterChange) for change in self.changes):
            return None
        names = self.parameters[name].names
        codings = (
            c.coding_of(n) for c in self.changes if isinstance(c, AdapterChange) for n in names
        )
        return next((coding for coding in codings if coding is not None), None)

    def merge_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the untouched model's parameter values for values of this model, by every name."""
        merged = dict(values)
        for change in reversed(self.changes):
            if isinstance(change, AdapterChange):
                merged = change.merge_values(merged)
        return merged

    def without_random_draws(self) -> nn.Module:
        """Return a copy of the model in which no added part draws random numbers."""
        twin = copy_module(self.model)
        for change in self.changes:
            if isinstance(change, AdapterChange):
                change.stop_random_draws(twin)
        return twin

    @cached_property
    def reference_model(self) -> nn.Module:
        """The model that a proof compares with: trained as the rows say, with the original
        computation."""
        if not self.has_rewrites:
            return self.model
        facts = self.base
        for change in self.changes:
            facts = facts if getattr(change, "rewrites", False) else facts.with_change(change)
        return facts.model

    @cached_property
    def parameters(self) -> Mapping[str, ParameterFact]:
        """Every parameter by every name; tied names share one fact."""
        names: dict[int, list[str]] = {}
        tensors = {
            f"{fqn}.{name}" if fqn else name: tensor
            for fqn, module in self._modules.items()
            for name, tensor in module._parameters.items()
            if tensor is not None
        }
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        facts: dict[str, ParameterFact] = {}
        dtypes: dict[Any, tuple[str, int]] = {}
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal shapes share one tuple
        for tied in names.values():
            tensor = tensors[tied[0]]
            if hasattr(tensor, "materialize"):
                raise _refuse_lazy(tied[0])
            kind = tensor.dtype
            if kind not in dtypes:
                dtypes[kind] = str(kind).removeprefix("torch."), tensor.itemsize
            shape = tuple(tensor.shape)
            shared_fields = shapes.setdefault(shape, shape), *dtypes[kind], tensor.requires_grad
            fact = ParameterFact(tied[0], *shared_fields, tuple(tied))
            for name in tied:
                facts[name] = fact
        return {name: facts[name] for name in tensors}

    @cached_property
    def unique_parameters(self) -> Mapping[str, ParameterFact]:
        """Every parameter once, by its first name."""
        return {fact.name: fact for fact in self.parameters.values()}

    @cached_property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The groups of names that are one parameter."""
        return tuple(fact.names for fact in self.unique_parameters.values() if len(fact.names) > 1)

    @cached_property
    def shared_buffers(self) -> tuple[tuple[str, ...], ...]:
        """The groups of names that are one buffer, in model order."""
        names: dict[int, list[str]] = {}
        for fqn, module in self._modules.items():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    names.setdefault(id(buffer), []).append(f"{fqn}.{name}" if fqn else name)
        return tuple(tuple(shared) for shared in names.values() if len(shared) > 1)

    @cached_property
    def sites(self) -> Mapping[str, Site]:
        """Every module by its name; the model itself is ""."""
        facts, classes, sites = self.parameters, dict[type, tuple[str, ...]](), {}
        dims: dict[type, Mapping[str, tuple[str, ...]]] = {}
        for fqn, module in self._modules.items():
            kind, prefix = type(module), f"{fqn}." if fqn else ""
            if kind not in classes:
                names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
                class_names = (name for name in names if name not in (BASE, "builtins.object"))
                classes[kind] = tuple(class_names) or (BASE,)
                # for each parameter, the nearest class that names its dims
                tables = (DIMS.get(name, {}) for name in reversed(classes[kind]))
                dims[kind] = {own: names for table in tables for own, names in table.items()}
            own = {name: facts[prefix + name] for name in _present_names(module._parameters)}
            children, buffers = _present_names(module._modules), _present_names(module._buffers)
            # torch's default forward (of lists and dicts) only raises
            calls = getattr(module.forward, "__name__", "") != "_forward_unimplemented"
            sites[fqn] = Site(fqn, classes[kind], children, own, buffers, calls, dims[kind])
        return sites

        # torch's default forward (of lists and dicts) only raises

    def children(self, fqn: str) -> Sequence[str]:
        """Return the names of the direct children of a module."""
        return self.sites[fqn].children

    def class_names(self, fqn: str) -> tuple[str, ...]:
        """Return the plain names of a module's class and of its base classes."""
        return tuple(name.rpartition(".")[2] for name in self.sites[fqn].classes)

    def attribute(self, fqn: str, name: str) -> object:
        """Return an attribute of a module, without running code of the model.

        Raises AttributeError if the module has no such attribute, or computes it by a property.
        """
        module = self._modules[fqn]
        if isinstance(inspect.getattr_static(type(module), name, None), property | cached_property):
            raise AttributeError(name)
        return getattr(module, name)

    def attributes(self, fqn: str) -> list[str]:
        """Return the public names of a module's own attributes, without parameters and children."""
        attributes = vars(self._modules[fqn])  # torch puts `training` there
        return [name for name in attributes if not name.startswith("_") and name != "training"]

    def module(self, fqn: str) -> nn.Module:
        """Return the module itself; callers must not change it."""
        return self._modules[fqn]

    def computes_as(self, fqn: str, name: str) -> bool:
        """Return whether the module runs the forward of its base class `name`, unchanged."""
        module = self._modules[fqn]
        base = next((c for c in type(module).__mro__ if c.__name__ == name), None)
        overridden = "forward" in vars(module)
        if base is None or overridden:
            return False
        return getattr(type(module), "forward", None) is getattr(base, "forward", None)

    def numel(self, fqn: str) -> int:
        """Return the number of elements of a module's parameters, each tensor once."""
        return sum(fact.numel for fact in {id(f): f for f in self.parameters_below(fqn)}.values())

    def parameters_below(self, fqn: str) -> list[ParameterFact]:
        """Return the parameters of a module and of all modules below it, by every name there."""
        return [self.parameters[name] for name in self.names_below(fqn)]

    def names_below(self, fqn: str) -> Iterator[str]:
        """Yield the names of the parameters of a module and of all modules below it, in model
        order."""
        site, prefix = self.sites[fqn], f"{fqn}." if fqn else ""
        yield from (prefix + name for name in site.parameters)
        for child in site.children:
            yield from self.names_below(prefix + child)

    def owner(self, parameter: str) -> Site:
        """Return the module that holds a parameter of this name."""
        return self.sites[parameter.rpartition(".")[0]]


def _refuse_lazy(name: str) -> Refusal:
    return Refusal.of(
        "S623",
        f"`{name}` has no shape yet: a lazy module has not been called",
        helps=("call the model once, `model(**batch)`, before its schedule is made",),
    )


def _present_names(members: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names whose value is not None."""
    if not members:
        return ()
    return tuple([name for name, value in members.items() if value is not None])


def matches(name: str, pattern: str) -> bool:
    """Return whether a parameter's name matches the pattern, or a suffix after a dot does."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def quote_module(fqn: str) -> str:
    """Return the name of a module for a message; "the model" for ""."""
    return f"`{fqn}`" if fqn else "the model"


def is_inside(name: str, fqn: str) -> bool:
    """Return whether a name is the module `fqn`, or is inside of it."""
    return not fqn or name == fqn or name.startswith(f"{fqn}.")


def are_nested(fqn: str, other_fqn: str) -> bool:
    """Return whether two modules are equal, or one is inside the other."""
    return is_inside(fqn, other_fqn) or is_inside(other_fqn, fqn)


def common_parent(names: Iterable[str]) -> str:
    """Return the innermost module that contains all modules or parameters of these names."""
    return ".".join(os.path.commonprefix([name.split(".")[:-1] for name in names]))
