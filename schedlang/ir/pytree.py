"""Pytrees: nested values, flattened and rebuilt, for all classes that models take and return.

torch's pytree handles lists, tuples and dicts. Models also take and return dataclasses, attrs
classes, mappings and namespaces; and libraries register classes without paths for their children.
These functions have pytree's names. They first register every class that holds a tensor in the
nest, so that hooks that flatten by themselves (of fully_shard) find the tensors, too.

Also for models that are sent to other processes:

* `record_outputs` repeats what libraries record when a model is made. transformers records which
  hidden states and attentions a class can return when the first model of the class is made; a model
  unpickled in another process would silently return none.
* `make_picklable` makes parts of a model picklable that pickle rejects.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import importlib
import operator
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, keystr, tree_unflatten

__all__ = [
    "GetAttrKey",
    "MappingKey",
    "SequenceKey",
    "is_opaque",
    "is_flat",
    "keystr",
    "register_nest",
    "known_classes",
    "register_classes",
    "is_sample_batch",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_map_with_path",
    "tree_unflatten",
]

IsLeaf = Callable[[Any], bool]
_PLAIN = (Tensor, int, float, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
_LEAVES = frozenset(
    [
        *(Tensor, nn.Parameter, int, float, bool, str, bytes, type(None), slice, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    ]
)
_LISTS = frozenset([tuple, list, torch.Size])
_REGISTERED: dict[type, None] = {}  # classes that were registered here, in order


def is_flat(tree: Any) -> bool:
    """Return whether a value is a dict of tensors and plain values alone, as most batches are;
    fast."""
    return type(tree) is dict and _LEAVES.issuperset(map(type, tree.values()))


def tree_flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Any]:
    """Return the leaves of a nest, and its structure."""
    register_nest(tree)
    return _pytree.tree_flatten(tree, is_leaf)


def tree_leaves(tree: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """Return the leaves of a nest."""
    leaves: list[Any] = []
    todo = [tree]
    # faster than torch, which checks each value for a named tuple
    while todo and is_leaf is None:
        value = todo.pop()
        kind = type(value)
        if kind in _LEAVES:
            leaves.append(value)
        elif kind in _LISTS:
            todo += value[::-1]
        elif kind is dict:
            todo += reversed(value.values())
        else:
            break
    else:
        if is_leaf is None:
            return leaves
    register_nest(tree)
    return _pytree.tree_leaves(tree, is_leaf)


def tree_flatten_with_path(
    tree: Any, is_leaf: IsLeaf | None = None
) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the leaves of a nest with their paths, and its structure."""
    register_nest(tree)
    leaves: list[tuple[Any, Any]] = []
    _collect_leaves(tree, (), is_leaf or (lambda value: False), leaves)
    return leaves, _pytree.tree_structure(tree, is_leaf)


def _collect_leaves(
    value: Any, path: tuple[Any, ...], is_leaf: IsLeaf, leaves: list[tuple[Any, Any]]
) -> None:
    """Collect the leaves inside a value; torch's own walk stops at classes without paths."""
    node = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
    if node is None or is_leaf(value):
        leaves.append((path, value))
        return
    children, _ = (node.flatten_with_keys_fn or _with_keys(node))(value)
    for key, child in children:
        _collect_leaves(child, (*path, key), is_leaf, leaves)


def tree_map(function: Callable[..., Any], tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Return the nest with `function` applied to each leaf."""
    if is_flat(tree):
        return {name: function(value) for name, value in tree.items()}
    register_nest(tree)
    return _pytree.tree_map(function, tree, is_leaf=is_leaf)


Undo = list[Callable[[], None]]


def write_back(nest: Any, changed: Any, undo: Undo | None = None) -> Any:
    """Write the leaves of a changed copy of a nest into the nest itself; return the nest.

    Mappings, lists and dataclasses stay the same objects, so that all who hold them see the
    changes. A part that cannot be written into is replaced by the copy's. Each call in `undo`
    restores one item, if the item still is what was written.
    """
    if nest is changed or type(nest) is not type(changed):
        return changed
    if isinstance(nest, tuple):
        written = [write_back(item, other, undo) for item, other in zip(nest, changed)]
        return type(nest)(*written) if hasattr(nest, "_fields") else type(nest)(written)
    keys: Iterable[Any]
    get: Any
    put: Any
    if isinstance(nest, MutableMapping | list):
        keys = list(nest) if isinstance(nest, MutableMapping) else range(len(nest))
        get, put = operator.getitem, operator.setitem
    elif dataclasses.is_dataclass(nest) and not vars(type(nest))["__dataclass_params__"].frozen:
        keys, get, put = [item.name for item in dataclasses.fields(nest)], getattr, setattr
    else:
        return changed
    for key in keys:
        value = get(nest, key)
        new = write_back(value, get(changed, key), undo)
        if new is not value:
            put(nest, key, new)
            if undo is not None:
                undo.append(partial(_restore_item, nest, key, value, new, get, put))
    return nest


def _restore_item(nest: Any, key: Any, value: Any, new: Any, get: Any, put: Any) -> None:
    with contextlib.suppress(LookupError):  # the item may have been deleted
        if get(nest, key) is new:
            put(nest, key, value)


def tree_map_only(kinds: Any, function: Callable[..., Any], tree: Any) -> Any:
    """Return the nest with `function` applied to each leaf of some classes."""
    register_nest(tree)
    return _pytree.tree_map_only(kinds, function, tree)


def tree_map_with_path(
    function: Callable[..., Any], tree: Any, is_leaf: IsLeaf | None = None
) -> Any:
    """Return the nest with `function` applied to each path and leaf."""
    leaves, spec = tree_flatten_with_path(tree, is_leaf)
    return tree_unflatten([function(path, leaf) for path, leaf in leaves], spec)


def known_classes() -> tuple[type, ...]:
    """Return the classes that this process registered, for a process that has not seen the
    values."""
    return tuple(_REGISTERED)


def register_classes(kinds: Iterable[type]) -> None:
    """Register classes before a value of them is seen."""
    for kind in kinds:
        _register(kind)


def is_sample_batch(value: Any) -> bool:
    """Return whether a value is one object of many samples that can be separated and rebuilt.

    A `Batch` of torch_geometric is one.
    """
    return _form_of_class(type(value)) == "samples"


def is_opaque(value: Any) -> bool:
    """Return whether a value holds tensors and has a class that cannot be flattened here."""
    kind = type(value)
    if isinstance(value, (*_PLAIN, list, tuple)):
        return False
    if kind in _pytree.SUPPORTED_NODES or _form_of_class(kind) is not None:
        return False
    return _holds_tensor(value, 3)


def _holds_tensor(value: Any, depth: int) -> bool:
    """Return whether attributes or items of a value hold a tensor, at most `depth` levels deep."""
    if isinstance(value, _PLAIN) or not depth:
        return isinstance(value, Tensor)
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(item, depth - 1) for item in value)
    attributes = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return any(_holds_tensor(attributes[name], depth - 1) for name in attributes)


def register_nest(value: Any) -> bool:
    """Register the classes in a nest that hold a tensor; return whether the nest holds any."""
    if isinstance(value, _PLAIN):
        return isinstance(value, Tensor)
    kind = type(value)
    if kind is list or isinstance(value, tuple):
        return any([register_nest(item) for item in value])  # a list, so that all are visited
    if kind is dict:
        return any([register_nest(item) for item in value.values()])
    node = _pytree.SUPPORTED_NODES.get(kind)  # private: torch has no other way to ask
    if node is not None:
        return any([register_nest(item) for item in node.flatten_fn(value)[0]])
    if _form_of_class(kind) is None or not any(
        [register_nest(item) for item in _children(value)[1]]
    ):
        return False
    _register(kind)
    return True


def _with_keys(node: Any) -> Callable[[Any], tuple[list[tuple[Any, Any]], Any]]:
    """Return a flatten function with paths for a registered class: by name if its context lists
    names."""

    def flatten(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        contents, context = node.flatten_fn(value)
        children = list(contents)
        by_name = isinstance(context, (list, tuple)) and len(context) == len(children)
        if by_name and all(isinstance(name, str) for name in context):
            return [(MappingKey(n), c) for n, c in zip(context, children)], context
        return [(SequenceKey(k), c) for k, c in enumerate(children)], context

    return flatten


# -- classes that pytree does not know -----------------------------------------------------------


def _form_of_class(kind: type) -> str | None:
    """Return how values of a class hold others: "attributes", "items", "samples", or None.

    None for a class that handles calls of torch itself: its values stand for tensors.
    """
    if hasattr(kind, "__torch_function__"):
        return None
    if all(hasattr(kind, method) for method in ("to_data_list", "from_data_list", "num_graphs")):
        return "samples"
    if dataclasses.is_dataclass(kind) and not issubclass(kind, Mapping):
        return "attributes"
    if hasattr(kind, "__attrs_attrs__") or issubclass(kind, SimpleNamespace):
        return "attributes"
    return "items" if issubclass(kind, Mapping) else None


def _register(kind: type) -> None:
    if kind in _pytree.SUPPORTED_NODES:
        return
    if _form_of_class(kind) == "samples":  # may be made at run time: no other process can import it
        return _register_samples(kind)
    _REGISTERED[kind] = None

    def flatten(value: Any) -> tuple[list[Any], Any]:
        names, children = _children(value)
        return children, (tuple(names), OtherState(value, names))

    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(value)
        key = MappingKey if _form_of_class(kind) == "items" else GetAttrKey
        return [(key(name), child) for name, child in zip(context[0], children)], context

    def unflatten(children: Iterable[Any], context: Any) -> Any:
        return _rebuild(kind, dict(zip(context[0], children)), context[1])

    _pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


def _register_samples(kind: type) -> None:
    """Register a class of objects of many samples, which hold tensors in stores or attributes."""

    def flatten(value: Any) -> tuple[list[Any], Any]:
        places = list(_places(value))
        names = tuple(name for name, _, _ in places)
        return [store[key] for _, store, key in places], (names, EmptyBatch(value))

    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(value)
        return [(MappingKey(name), child) for name, child in zip(context[0], children)], context

    def unflatten(children: Iterable[Any], context: Any) -> Any:
        return context[1].fill(children)

    _pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


def _places(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield everything that an object of many samples holds: name, store and key."""
    for store in getattr(value, "stores", None) or [vars(value)]:
        kind = getattr(store, "_key", None)  # the type of nodes or edges, if there are several
        prefix = [] if kind is None else [kind] if isinstance(kind, str) else ["__".join(kind)]
        for key in list(store.keys()):
            yield ".".join([*prefix, str(key)]), store, key


class EmptyBatch:
    """An object of many samples without its contents; all of one class compare equal."""

    def __init__(self, value: Any) -> None:
        self.value = copy.copy(value)
        for _, store, key in list(_places(self.value)):
            store[key] = 0  # do not keep the tensors alive

    def fill(self, children: Iterable[Any]) -> Any:
        """Return a copy that holds other contents."""
        filled = copy.copy(self.value)
        for (_, store, key), child in zip(list(_places(filled)), children):
            store[key] = child
        return filled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmptyBatch) and type(self.value) is type(other.value)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return ""


class OtherState:
    """The state of a value besides its children; compares equal to every other, in a tree's
    structure."""

    def __init__(self, value: Any, names: Sequence[Any]) -> None:
        attrs = getattr(value, "__dict__", {})
        is_mapping = _form_of_class(type(value)) == "items"
        inside = ("data",) if isinstance(value, UserDict) else ()
        self.state = {
            k: v for k, v in attrs.items() if k not in inside and (is_mapping or k not in names)
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OtherState)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return ""


def _children(value: Any) -> tuple[list[Any], list[Any]]:
    """Return the names and the values that a value holds."""
    kind = type(value)
    if _form_of_class(kind) == "items":
        return list(value.keys()), [value[key] for key in value]
    if _form_of_class(kind) == "samples":
        entries = [(name, store[key]) for name, store, key in _places(value)]
        return [name for name, _ in entries], [item for _, item in entries]
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif hasattr(kind, "__attrs_attrs__"):
        names = [item.name for item in kind.__attrs_attrs__]
    else:
        names = list(vars(value))
    names = [name for name in names if hasattr(value, name)]
    return names, [getattr(value, name) for name in names]


def _rebuild(kind: Any, children: Mapping[Any, Any], rest: OtherState) -> Any:
    """Make a value of a class from other children, without running its code where possible."""
    if issubclass(kind, dict):
        result = kind.__new__(kind)
        put = OrderedDict if issubclass(kind, OrderedDict) else dict
        for name, child in children.items():
            put.__setitem__(result, name, child)
    elif issubclass(kind, UserDict):
        result = kind.__new__(kind)
        result.__dict__["data"] = dict(children)
    elif issubclass(kind, Mapping):
        return kind(dict(children))
    else:
        result = kind.__new__(kind)
        for name, child in children.items():
            object.__setattr__(result, name, child)
    # a dict whose items are also attributes keeps both in step
    for name, value in rest.state.items():
        object.__setattr__(result, name, children.get(name, value))
    return result


def record_outputs(*modules: nn.Module) -> None:
    """Record for the classes of modules what making the modules would have recorded.

    transformers looks up by class name the outputs that its hooks collect (hidden states, logits of
    routers), and collects none where a module's class was replaced since.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    registry = getattr(capturing, "_CAN_RECORD_REGISTRY", None)  # private; no other way since 5.0
    if registry is None:
        return
    for module in modules:
        if hasattr(module, "_can_record_outputs") and str(type(module)) not in registry:
            registry[module] = module._can_record_outputs


def make_picklable(model: nn.Module) -> None:
    """Register how to pickle the parts of a model that pickle rejects; without such parts, do
    nothing.

    Parametrized modules (weight norm): torch forbids pickling them, as their class is made at run
    time, and files would outlive it; here ranks unpickle at once. Context variables: hooks that a
    library installed in a first forward refer to those of its modules.
    """
    copyreg.pickle(ContextVar, _reduce_context_variable)
    for module in model.modules():
        if parametrize.is_parametrized(module):
            copyreg.pickle(type(module), _reduce_parametrized)


def _reduce_context_variable(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """Return how to find a context variable: as an attribute of a module, or of an object in
    one."""
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items() if module is not None else ()):
            if value is variable:
                return _load_attribute, (name, (attribute,))
            attributes = getattr(value, "__dict__", None)
            inside = attributes.items() if isinstance(attributes, dict) else ()
            if key := next((k for k, v in list(inside) if v is variable), None):
                return _load_attribute, (name, (attribute, key))
    raise TypeError(f"no module holds the context variable {variable.name}")


def _load_attribute(module: str, path: tuple[str, ...]) -> Any:
    value: Any = importlib.import_module(module)
    for name in path:
        value = getattr(value, name)
    return value


def _reduce_parametrized(module: nn.Module) -> tuple[Any, ...]:
    held: Any = module.parametrizations
    return _make_parametrized, (type(module).__bases__[0], tuple(held)), dict(vars(module))


def _make_parametrized(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Make an empty module of a parametrized class; pickle then sets its state."""
    module: nn.Module = kind.__new__(kind)
    nn.Module.__init__(module)
    parametrize._inject_new_class(module)  # private: what `register_parametrization` does
    for name in names:
        parametrize._inject_property(module, name)
    copyreg.pickle(type(module), _reduce_parametrized)
    return module
